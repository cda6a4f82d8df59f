"""Reads the contents of one Nessie reference, and changes them by compare-and-swap.

`NamespaceOperations` implements the namespaces of the catalog, which have properties and are nested to any
depth. `NoViews` refuses views.
"""

from __future__ import annotations

import json
import time
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from pyiceberg.catalog import Catalog, MetastoreCatalog, PropertiesUpdateSummary
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
)
from pyiceberg.schema import Schema
from pyiceberg.typedef import EMPTY_DICT, Identifier, Properties
from pyiceberg.types import transform_dict_value_to_str

from branchlake_dagster.errors import ReadOnlyReference, Unsupported
from branchlake_dagster.nessie import NessieClient
from branchlake_dagster.nessie.errors import (
    NessieConflict,
    NessieError,
    NessieOutcomeUnknown,
    ReferenceNotFound,
)
from branchlake_dagster.nessie.model import (
    CommitResult,
    ContentEntry,
    ContentKey,
    ContentsAt,
    Delete,
    IcebergTable,
    Namespace,
    Operation,
    Put,
    Reference,
    ReferenceType,
    parse_ref,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.view.metadata import ViewVersion


_ATTEMPTS = 4
_CACHE_S = 300.0
"""Seconds that contents stay in the cache. For an older hash, the server reads all later commits."""


@dataclass(frozen=True)
class _CachedContents:
    """The contents of `keys`, read at the time `read_at` of the monotonic clock, in seconds.

    A key of `keys` that `state` does not contain had no content.
    """

    keys: frozenset[ContentKey]
    state: ContentsAt
    read_at: float


class ReferenceStore:
    """Reads contents at `ref`, and commits to `ref` if it is a branch.

    `author` and `properties` are added to every commit. `now` returns seconds. Errors of the client are
    raised unchanged, with two exceptions. If the outcome of a commit is unknown, CommitStateUnknownException
    is raised. `commit_plan` repeats a commit after a conflict, and in the end raises CommitFailedException.
    Callers of `commit` convert NessieConflict to CommitFailedException themselves. The difference matters,
    because PyIceberg deletes the files after CommitFailedException and keeps them if the outcome is unknown.
    """

    def __init__(
        self,
        client: NessieClient,
        ref: str,
        *,
        author: str,
        properties: Mapping[str, str],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.ref = ref
        self._now = now
        self._cached: _CachedContents | None = None
        self._is_fixed = parse_ref(ref).hash is not None
        self._author = author
        self._properties = dict(properties)

    def read(self, *keys: ContentKey) -> ContentsAt:
        """Read the contents of `keys` at `ref`, and the hash at which they were read."""
        started_at = self._now()
        state = self.client.contents_at(self.ref, keys)
        self._cached = _CachedContents(frozenset(keys), state, started_at)
        return state

    @property
    def last_hash(self) -> str | None:
        """The hash of the reference at the last read or commit.

        None before the first one, and after a failed commit.
        """
        return self._cached.state.reference.hash if self._cached else None

    def get_cached(self, *keys: ContentKey) -> ContentsAt | None:
        """Return the contents of the last read or commit if they are recent and cover `keys`, else None.

        Never make a decision from the cache, because other writers may have changed the keys since. But a
        commit may start from the cached contents: the server refuses an outdated commit, and then the cache
        is cleared.
        """
        cached = self._cached
        if cached is None or not cached.keys.issuperset(keys) or self._now() - cached.read_at > _CACHE_S:
            return None
        return cached.state

    def iter_children(self, namespace: tuple[str, ...], content_type: str) -> Iterator[ContentEntry]:
        """Yield the entries of one content type directly under `namespace`.

        The empty tuple is the top level.
        """
        terms = [f"entry.contentType == '{content_type}'"]
        if not any("." in element for element in namespace):
            # CEL accepts JSON's string escapes. Its namespaces are joined by dots, so it cannot filter a
            # namespace with dots in its elements. The comparison below decides in every case.
            terms.append(f"entry.namespace == {json.dumps('.'.join(namespace), ensure_ascii=False)}")
        for entry in self.client.entries(self.ref, filter=" && ".join(terms)):
            if entry.key.parent == namespace:
                yield entry

    def require_branch(self, reference: Reference | None = None) -> None:
        """Raise ReadOnlyReference unless `ref` accepts commits.

        `reference` is the server's description of `ref`. Without it, only the argument `ref` itself is
        checked.
        """
        if self._is_fixed or (reference and reference.type is not ReferenceType.BRANCH):
            kind = "a fixed hash" if self._is_fixed else "a tag"
            raise ReadOnlyReference(
                f"{self.ref} is {kind} and cannot be changed.",
                branch=self.ref,
                hint="Open the catalog on a branch.",
            )

    def commit(self, base: Reference, operations: Sequence[Operation], message: str) -> None:
        """Commit `operations` if their keys are unchanged since `base`.

        Raises NessieConflict if they have changed, CommitStateUnknownException if the outcome is unknown, and
        ReadOnlyReference if `ref` does not accept commits. Other errors of the client are raised unchanged.
        """
        self.require_branch(base)
        self._cached = None
        started_at = self._now()
        outcome_unknown: NessieOutcomeUnknown
        try:
            result = self.client.commit(
                base.name,
                expected_hash=base.hash,
                operations=operations,
                message=message,
                properties=self._properties,
                author=self._author,
            )
            self._cached = _contents_after_commit(operations, result, base, started_at)
            return
        except NessieOutcomeUnknown as lost:
            outcome_unknown = lost
        if not self._is_committed(operations):
            raise CommitStateUnknownException(str(outcome_unknown)) from outcome_unknown

    def _is_committed(self, operations: Sequence[Operation]) -> bool:
        """Check whether Nessie already has the tables that `operations` would put.

        Metadata files have unique names, so finding the locations of these operations proves the commit. A
        missing location proves nothing: the request may still be under way, or others may have committed
        after it.
        """
        locations = {
            operation.key: operation.content.metadata_location
            for operation in operations
            if isinstance(operation, Put) and isinstance(operation.content, IcebergTable)
        }
        if not locations:
            return False
        try:
            contents = self.read(*locations).contents
        except NessieError:
            return False
        tables = {key: value for key, value in contents.items() if isinstance(value, IcebergTable)}
        return all(
            key in tables and tables[key].metadata_location == location for key, location in locations.items()
        )

    def commit_plan(
        self,
        keys: Sequence[ContentKey],
        plan: Callable[[ContentsAt], Sequence[Operation]],
        message: str,
        *,
        cached_state: ContentsAt | None = None,
    ) -> None:
        """Read `keys`, call `plan` with their contents, and commit the operations that it returns.

        If `plan` returns no operations, nothing is committed. If one of the keys changes in between, all is
        repeated from the new state. So a lost race ends in the error that `plan` raises for it, such as
        "already exists". `cached_state` is a state from `get_cached`, with which the first attempt is made.
        `message` is the message of the commit. Raises CommitFailedException if the keys keep changing,
        CommitStateUnknownException if the outcome of a commit is unknown, and ReadOnlyReference.
        """

        def states() -> Iterator[ContentsAt]:
            if cached_state is not None:
                yield cached_state
            for _ in range(_ATTEMPTS):
                yield self.read(*keys)

        last_error: NessieError | None = None
        for state in states():
            self.require_branch(state.reference)
            operations = plan(state)
            if not operations:
                return None
            try:
                return self.commit(state.reference, operations, message)
            except (NessieConflict, ReferenceNotFound) as error:  # `read` reports a missing reference
                last_error = error
        raise CommitFailedException(
            f"{message}: other writers kept changing the same keys. {last_error}"
        ) from last_error


def _contents_after_commit(
    operations: Sequence[Operation], result: CommitResult, base: Reference, read_at: float
) -> _CachedContents:
    """Return the contents of the keys that a commit changed, as an entry of the cache.

    A deleted key is in the entry, without content. Other keys are left out: other writers may have committed
    between `base` and this commit. `result` is Nessie's answer. `read_at` is a time of the monotonic clock,
    in seconds.
    """
    contents = {}
    for operation in operations:
        if isinstance(operation, Put):
            content, new_id = operation.content, result.content_ids.get(operation.key)
            contents[operation.key] = replace(content, content_id=new_id or content.content_id)
    reference = Reference(base.type, base.name, result.hash)
    keys = frozenset(operation.key for operation in operations)
    return _CachedContents(keys, ContentsAt(reference, contents), read_at)


def namespace_key(namespace: str | Identifier) -> ContentKey:
    """Return the content key of a namespace. Raises NoSuchNamespaceError for an empty or blank name."""
    Catalog.namespace_to_string(namespace, NoSuchNamespaceError)
    return ContentKey(Catalog.identifier_to_tuple(namespace))


def require_namespace(state: ContentsAt, key: ContentKey) -> Namespace:
    """Return the namespace under `key`. Raises NoSuchNamespaceError if there is none in `state`."""
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

        PyIceberg's other catalogs do not require parents; Nessie requires each of them. The values of
        `properties` are stored as strings. Raises NamespaceAlreadyExistsError, also if a table has that name,
        and NoSuchNamespaceError if a parent is a table.
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
        """List the namespaces directly under `namespace`; without it, those of the top level."""
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
        """Remove and set properties in one commit. Returns the names that were removed, updated and missing.

        `removals` are names of properties to remove; missing ones are reported, not raised. Raises ValueError
        if a name is in both arguments, and NoSuchNamespaceError.
        """
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
        """Always raise Unsupported: this catalog has no views."""
        _refuse_view(namespace)

    def view_exists(self, identifier: str | Identifier) -> bool:
        """Always raise Unsupported: this catalog has no views."""
        _refuse_view(identifier)

    def load_view(self, identifier: str | Identifier) -> NoReturn:
        """Always raise Unsupported: this catalog has no views."""
        _refuse_view(identifier)

    def drop_view(self, identifier: str | Identifier) -> None:
        """Always raise Unsupported: this catalog has no views."""
        _refuse_view(identifier)

    def register_view(self, identifier: str | Identifier, metadata_location: str) -> NoReturn:  # noqa: ARG002
        """Always raise Unsupported: this catalog has no views."""
        _refuse_view(identifier)

    def create_view(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,  # noqa: ARG002
        view_version: ViewVersion,  # noqa: ARG002
        location: str | None = None,  # noqa: ARG002
        properties: Properties = EMPTY_DICT,  # noqa: ARG002
    ) -> NoReturn:
        """Always raise Unsupported: this catalog has no views."""
        _refuse_view(identifier)
