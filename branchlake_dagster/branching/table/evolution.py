"""What a frame's columns mean to a table's: which fit, which widen it, which are new, which are refused.

Both sides are Arrow schemas as the lake stores them (`types.stored_schema`). Nothing is read or changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from branchlake_dagster.branching.errors import SchemaMismatch
from branchlake_dagster.branching.table.types import in_words
from branchlake_dagster.wording import named

_MOST_DIGITS = 38
_WIDER = {(pa.int32(), pa.int64()), (pa.float32(), pa.float64())}
_ADD_ONLY = "Cast the column in the asset; only adding nullable columns evolves a table."
Path = tuple[str, ...]


@dataclass(frozen=True)
class Added:
    """A new nullable column, or field of a struct."""

    path: Path
    kind: pa.DataType


@dataclass(frozen=True)
class Widened:
    """A column or nested field that takes a type which holds all that the old one does."""

    path: Path
    kind: pa.DataType


Change = Added | Widened


def changes(table: pa.Schema, frame: pa.Schema, *, name: str, widen: bool) -> list[Change]:
    """What the table `name` needs before it can hold the frame, outermost first.

    A column of the frame without a type (null in all rows) takes the table's, and none where the table has
    not got it. Without `widen` only new columns are allowed. Raises SchemaMismatch by column.
    """
    if missing := [column for column in table.names if column not in frame.names]:
        raise SchemaMismatch(
            f"The frame lacks {named('column', missing)}.",
            table=name,
            hint="Write it (nulls are fine), or drop it from the table on purpose.",
        )
    comparison = _Comparison(name, widen)
    return list(comparison.fields((), list(table), list(frame)))


@dataclass(frozen=True)
class _Comparison:
    name: str
    widen: bool

    def fields(self, path: Path, table: list[pa.Field], frame: list[pa.Field]) -> Iterator[Change]:
        current = {field.name: field.type for field in table}
        for field in frame:
            inside = (*path, field.name)
            if field.name in current:
                yield from self.types(inside, current[field.name], field.type)
            elif path or not pa.types.is_null(field.type):
                yield Added(inside, field.type)

    def types(self, path: Path, table: pa.DataType, frame: pa.DataType) -> Iterator[Change]:
        if pa.types.is_null(frame) or table == frame:
            return
        if not self.widen and pa.types.is_nested(table):
            if in_words(table, table=self.name) != in_words(frame, table=self.name):
                raise self._differ(path, table, frame)
            return
        if pa.types.is_struct(table) and pa.types.is_struct(frame):
            names = {field.name for field in frame}
            if missing := [field.name for field in table if field.name not in names]:
                raise SchemaMismatch(
                    f"The frame lacks {named('field', ['.'.join((*path, one)) for one in missing])}.",
                    table=self.name,
                    hint="Write it (nulls are fine), or drop it from the table on purpose.",
                )
            yield from self.fields(path, list(table), list(frame))
        elif pa.types.is_list(table) and pa.types.is_list(frame):
            yield from self.types((*path, "element"), table.value_type, frame.value_type)
        elif pa.types.is_map(table) and pa.types.is_map(frame):
            if list(self.types((*path, "key"), table.key_type, frame.key_type)):
                raise self._differ((*path, "key"), table.key_type, frame.key_type)
            yield from self.types((*path, "value"), table.item_type, frame.item_type)
        else:
            yield from self._plain(path, table, frame)

    def _plain(self, path: Path, table: pa.DataType, frame: pa.DataType) -> Iterator[Change]:
        if self.widen and (frame, table) in _WIDER:
            return  # the frame's values are cast
        if self.widen and (table, frame) in _WIDER:
            yield Widened(path, frame)
        elif self.widen and pa.types.is_decimal(table) and pa.types.is_decimal(frame):
            yield from self._decimals(path, table, frame)
        else:
            raise self._differ(path, table, frame)

    def _decimals(self, path: Path, table: pa.DataType, frame: pa.DataType) -> Iterator[Change]:
        """Iceberg widens the precision and never the scale, so the table's stays."""
        needed = max(table.precision, frame.precision - frame.scale + table.scale)
        if frame.scale > table.scale or needed > _MOST_DIGITS:
            raise self._differ(path, table, frame)
        if needed > table.precision:
            yield Widened(path, pa.decimal128(needed, table.scale))

    def _differ(self, path: Path, table: pa.DataType, frame: pa.DataType) -> SchemaMismatch:
        return SchemaMismatch(
            f"Column {'.'.join(path)} is {in_words(table, table=self.name)} in the table"
            f" and {in_words(frame, table=self.name)} in the frame.",
            table=self.name,
            hint=_hint(table, frame, self.widen),
        )


def _hint(table: pa.DataType, frame: pa.DataType, widen: bool) -> str:
    if pa.types.is_timestamp(table) and pa.types.is_timestamp(frame):
        if table.tz:
            return (
                "A time stamp without zone is taken for no moment. Say in the asset which zone its clock"
                " is in: pandas .dt.tz_localize(zone), Polars .dt.replace_time_zone(zone),"
                " Arrow pc.assume_timezone, Spark to_utc_timestamp(column, zone)."
            )
        return (
            "The table holds wall clocks of UTC. Take the zone off in the asset: pandas"
            " .dt.tz_convert('UTC').dt.tz_localize(None), Polars .dt.convert_time_zone('UTC')"
            ".dt.replace_time_zone(None), Spark to_timestamp_ntz in a session on UTC."
        )
    if pa.types.is_integer(table) and pa.types.is_floating(frame):
        return (
            "Cast it to whole numbers in the asset. pandas makes floats of whole numbers with gaps:"
            " its dtype 'Int64' does not."
        )
    if pa.types.is_decimal(table) and pa.types.is_decimal(frame):
        return (
            "A table keeps its scale, and 38 digits are the most: round in the asset, or make a new column."
        )
    if pa.types.is_map(table):
        return "Give the column a map type: a pyarrow.Table, or the pandas dtype ArrowDtype(pyarrow.map_(…))."
    if not widen:
        return f"{_ADD_ONLY} (The setting widen_columns is off.)"
    return (
        "Cast the column in the asset; a table takes new nullable columns and fields, int to long, float to"
        " double and decimals of more digits."
    )
