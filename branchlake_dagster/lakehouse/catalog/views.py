"""Views, refused."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, NoReturn

from pyiceberg.catalog import MetastoreCatalog
from pyiceberg.schema import Schema
from pyiceberg.typedef import EMPTY_DICT, Identifier, Properties

from branchlake_dagster.errors import Unsupported

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.view.metadata import ViewVersion


def _refuse(identifier: str | Identifier) -> NoReturn:
    name = identifier if isinstance(identifier, str) else ".".join(identifier)
    raise Unsupported(
        f"Views are not supported by this catalogue, so {name!r} cannot be used as one.",
        hint="Create and read views through Spark, on the same branch.",
    )


class NoViews(MetastoreCatalog, ABC):
    """Answers every view operation with Unsupported, which is a NotImplementedError.

    PyIceberg's other catalogues raise a bare NotImplementedError.
    """

    def list_views(self, namespace: str | Identifier) -> list[Identifier]:
        """Refused."""
        _refuse(namespace)

    def view_exists(self, identifier: str | Identifier) -> bool:
        """Refused."""
        _refuse(identifier)

    def load_view(self, identifier: str | Identifier) -> NoReturn:
        """Refused."""
        _refuse(identifier)

    def drop_view(self, identifier: str | Identifier) -> None:
        """Refused."""
        _refuse(identifier)

    def register_view(self, identifier: str | Identifier, metadata_location: str) -> NoReturn:  # noqa: ARG002
        """Refused."""
        _refuse(identifier)

    def create_view(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,  # noqa: ARG002
        view_version: ViewVersion,  # noqa: ARG002
        location: str | None = None,  # noqa: ARG002
        properties: Properties = EMPTY_DICT,  # noqa: ARG002
    ) -> NoReturn:
        """Refused."""
        _refuse(identifier)
