"""Namespaces of the catalog, nested to any depth, with properties. Views are refused."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from pyiceberg.catalog import Catalog, MetastoreCatalog, PropertiesUpdateSummary
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
)
from pyiceberg.schema import Schema
from pyiceberg.typedef import EMPTY_DICT, Identifier, Properties
from pyiceberg.types import transform_dict_value_to_str

from branchlake_dagster.catalog.content_store import ReferenceStore
from branchlake_dagster.errors import Unsupported
from branchlake_dagster.nessie.errors import NessieConflict
from branchlake_dagster.nessie.model import ContentKey, ContentsAt, Delete, Namespace, Operation, Put

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.view.metadata import ViewVersion


def namespace_key(namespace: str | Identifier) -> ContentKey:
    """Return the content key of a namespace. Raises NoSuchNamespaceError for an empty or blank name."""
    Catalog.namespace_to_string(namespace, NoSuchNamespaceError)
    return ContentKey(Catalog.identifier_to_tuple(namespace))


def require_namespace(state: ContentsAt, key: ContentKey) -> Namespace:
    """Return the namespace under `key`. Raises NoSuchNamespaceError."""
    content = state.contents.get(key)
    if not isinstance(content, Namespace):
        # "exists" is the wording of PyIceberg's other catalogs, which callers match.
        raise NoSuchNamespaceError(
            f"Namespace {key} does not exists at {state.reference.name or 'this hash'}"
        )
    return content


def _to_string_properties(properties: Properties) -> dict[str, str]:
    """Convert property values to strings. Raises ValueError for a missing value or an invalid name."""
    if not all(isinstance(name, str) and name for name in properties):
        raise ValueError(f"Property names must be non-empty strings, not {list(properties)}")
    return transform_dict_value_to_str(dict(properties))


class NamespaceOperations(MetastoreCatalog, ABC):
    """The namespace operations of `NessieCatalog`."""

    _store: ReferenceStore

    def namespace_exists(self, namespace: str | Identifier) -> bool:
        """Check whether the namespace exists. Raises NoSuchNamespaceError for an empty name."""
        key = namespace_key(namespace)
        return isinstance(self._store.read(key).contents.get(key), Namespace)

    def create_namespace(self, namespace: str | Identifier, properties: Properties = EMPTY_DICT) -> None:
        """Create a namespace, and its missing parents in the same commit.

        PyIceberg's other catalogs do not require parents; Nessie requires each of them. Raises
        NamespaceAlreadyExistsError, also if a table has that name, and NoSuchNamespaceError if a parent is a
        table.
        """
        key = namespace_key(namespace)
        values = _to_string_properties(properties)
        parents = [ContentKey(key[:depth]) for depth in range(1, len(key))]

        def plan(state: ContentsAt) -> Sequence[Operation]:
            if key in state.contents:
                raise NamespaceAlreadyExistsError(f"Namespace {key} already exists")
            missing = [parent for parent in parents if parent not in state.contents]
            for parent in set(parents).difference(missing):
                require_namespace(state, parent)
            return [
                *(Put(parent, Namespace(None, parent.elements)) for parent in missing),
                Put(key, Namespace(None, key.elements, values)),
            ]

        self._store.commit_plan([key, *parents], plan, f"Create namespace {key}")

    def drop_namespace(self, namespace: str | Identifier) -> None:
        """Drop an empty namespace. Raises NamespaceNotEmptyError if it has tables, views or namespaces."""
        key = namespace_key(namespace)

        def plan(state: ContentsAt) -> Sequence[Operation]:
            require_namespace(state, key)
            return [Delete(key)]

        state = self._store.read(key)
        self._store.require_branch(state.reference)
        operations = plan(state)
        try:
            self._store.commit(state.reference, operations, f"Drop namespace {key}")
        except NessieConflict as conflict:
            kinds = {item.kind for item in conflict.conflicts}
            if "NAMESPACE_NOT_EMPTY" in kinds:
                raise NamespaceNotEmptyError(f"Namespace {key} is not empty.") from conflict
            raise CommitFailedException(f"Another process changed namespace {key}. {conflict}") from conflict

    def list_namespaces(self, namespace: str | Identifier = ()) -> list[Identifier]:
        """List the namespaces directly under `namespace`; an empty one stands for the top."""
        if not namespace:
            return [entry.key.elements for entry in self._store.iter_children((), "NAMESPACE")]
        key = namespace_key(namespace)
        require_namespace(self._store.read(key), key)
        return [entry.key.elements for entry in self._store.iter_children(key.elements, "NAMESPACE")]

    def load_namespace_properties(self, namespace: str | Identifier) -> Properties:
        """Load a copy of the namespace's properties."""
        key = namespace_key(namespace)
        properties: dict[str, Any] = dict(require_namespace(self._store.read(key), key).properties)
        return properties

    def update_namespace_properties(
        self, namespace: str | Identifier, removals: set[str] | None = None, updates: Properties = EMPTY_DICT
    ) -> PropertiesUpdateSummary:
        """Remove and set properties in one commit. Raises ValueError if a key is in both."""
        key = namespace_key(namespace)
        values = _to_string_properties(updates)
        summary: list[PropertiesUpdateSummary] = []

        def plan(state: ContentsAt) -> Sequence[Operation]:
            current = require_namespace(state, key)
            update_summary, new_properties = self._get_updated_props_and_update_summary(
                dict(current.properties), removals, values
            )
            summary[:] = [update_summary]
            unchanged = new_properties == dict(current.properties)
            return [] if unchanged else [Put(key, replace(current, properties=new_properties))]

        self._store.commit_plan([key], plan, f"Update properties of namespace {key}")
        return summary[0]


def _refuse_view(identifier: str | Identifier) -> NoReturn:
    name = identifier if isinstance(identifier, str) else ".".join(identifier)
    raise Unsupported(
        f"This catalog does not support views, so {name!r} cannot be used as a view.",
        hint="Create and read views through Spark, on the same branch.",
    )


class NoViews(MetastoreCatalog, ABC):
    """Raises Unsupported, which is a NotImplementedError, for every view operation.

    PyIceberg's other catalogs raise a bare NotImplementedError.
    """

    def list_views(self, namespace: str | Identifier) -> list[Identifier]:
        """Raise Unsupported."""
        _refuse_view(namespace)

    def view_exists(self, identifier: str | Identifier) -> bool:
        """Raise Unsupported."""
        _refuse_view(identifier)

    def load_view(self, identifier: str | Identifier) -> NoReturn:
        """Raise Unsupported."""
        _refuse_view(identifier)

    def drop_view(self, identifier: str | Identifier) -> None:
        """Raise Unsupported."""
        _refuse_view(identifier)

    def register_view(self, identifier: str | Identifier, metadata_location: str) -> NoReturn:  # noqa: ARG002
        """Raise Unsupported."""
        _refuse_view(identifier)

    def create_view(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,  # noqa: ARG002
        view_version: ViewVersion,  # noqa: ARG002
        location: str | None = None,  # noqa: ARG002
        properties: Properties = EMPTY_DICT,  # noqa: ARG002
    ) -> NoReturn:
        """Raise Unsupported."""
        _refuse_view(identifier)
