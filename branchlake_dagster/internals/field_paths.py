"""Corrects PyIceberg 0.12, which takes a dot in the name of a column for a field of a struct.

PyIceberg splits the dotted name of a field where it filters rows of Arrow, so a filter by the column `a.b`
fails (docs/upstream.md).
"""

from __future__ import annotations

from collections.abc import Iterable

from pyiceberg.expressions import BoundTerm
from pyiceberg.io.pyarrow import _ConvertToArrowExpression
from pyiceberg.types import NestedField, StructType

__all__: list[str] = []

_split_name = _ConvertToArrowExpression._get_field_name


def _get_field_path(self: _ConvertToArrowExpression, term: BoundTerm) -> str | tuple[str, ...]:
    """Return the name of a column, or the names that lead to a field of a struct."""
    path = _find_path(self._schema.fields, term.ref().field.field_id) if self._schema is not None else ()
    if not path:
        return _split_name(self, term)
    return path if len(path) > 1 else path[0]


def _find_path(fields: Iterable[NestedField], field_id: int) -> tuple[str, ...]:
    """Return the names that lead to a field; empty if it is not among the fields or in their structs."""
    for field in fields:
        if field.field_id == field_id:
            return (field.name,)
        inner_fields = field.field_type.fields if isinstance(field.field_type, StructType) else ()
        if inner_path := _find_path(inner_fields, field_id):
            return (field.name, *inner_path)
    return ()


_ConvertToArrowExpression._get_field_name = _get_field_path  # type: ignore[method-assign]
