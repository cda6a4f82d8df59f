"""The schema of an asset's table: how Arrow types are stored, and how a frame's columns change it.

What a frame's columns mean to a table's: which fit, which widen it, which are new, which are refused.

Both sides are Arrow schemas as the lake stores them (`types.stored_schema`). Nothing is read or changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.table import Table
from pyiceberg.types import IcebergType, ListType, MapType, StructType

from branchlake_dagster.internals.pyiceberg import iceberg_schema_of
from branchlake_dagster.tables.errors import ColumnsFrozen, ColumnUnsupported, SchemaMismatch
from branchlake_dagster.wording import named

_MOST_DIGITS = 38
_FORMAT_VERSION = 2


def stored_schema(schema: pa.Schema, *, table: str) -> pa.Schema:
    """`schema` as the lake stores it: every column nullable, times in microseconds, zones in UTC.

    Nullability is a matter of checks, not of storage: pandas cannot express it and Spark derives it
    from the query, so the same asset would flip it between runs. A column that is null in all rows and says
    no type keeps the type null. Raises SchemaMismatch for a frame without columns or with two of one name,
    ColumnUnsupported for a type that the lake has not.
    """
    if not schema.names:
        raise SchemaMismatch(
            "The frame has no columns.",
            table=table,
            hint="Return a frame with columns (it may have no rows), or None to write nothing.",
        )
    if twice := [name for name, count in Counter(schema.names).items() if count > 1]:
        raise SchemaMismatch(
            f"The frame has several columns of the name {', '.join(twice)}.",
            table=table,
            hint="Rename or drop all but one.",
        )
    return pa.schema([pa.field(one.name, stored_type(one.type, one.name, table)) for one in schema])


def stored_type(kind: pa.DataType, column: str, table: str) -> pa.DataType:
    """The type that the lake stores for `kind`; raises ColumnUnsupported where it has none."""
    if remedy := _remedy(kind):
        raise ColumnUnsupported(
            f"Column {column} is {kind}, which the lake cannot store.", table=table, hint=remedy
        )
    nested = _nested(kind, column, table)
    return _plain(kind) if nested is None else nested


def _nested(kind: pa.DataType, column: str, table: str) -> pa.DataType | None:
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return stored_type(kind.value_type, column, table)
    if is_list(kind):
        element = stored_type(kind.value_type, f"{column}.element", table)
        return pa.list_(pa.field("element", element))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, stored_type(f.type, f"{column}.{f.name}", table)) for f in kind])
    if pa.types.is_map(kind):
        key = stored_type(kind.key_type, f"{column}.key", table)
        return pa.map_(key, stored_type(kind.item_type, f"{column}.value", table))
    return None


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz="UTC" if kind.tz else None)
    if pa.types.is_time(kind):
        return pa.time64("us")
    if pa.types.is_date(kind):
        return pa.date32()
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_decimal(kind):
        return pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_unsigned_integer(kind):
        return pa.int64() if kind.bit_width >= 32 else pa.int32()
    if pa.types.is_integer(kind) and kind.bit_width < 32:
        return pa.int32()
    return pa.float32() if pa.types.is_float16(kind) else kind


def is_list(kind: pa.DataType) -> bool:
    """Whether it is a list of any of Arrow's layouts."""
    return any(
        test(kind)
        for test in (
            pa.types.is_list,
            pa.types.is_large_list,
            pa.types.is_fixed_size_list,
            pa.types.is_list_view,
            pa.types.is_large_list_view,
        )
    )


def _remedy(kind: pa.DataType) -> str | None:
    """What to do about a type that Iceberg has not; None where it has one."""
    if pa.types.is_duration(kind) or pa.types.is_interval(kind):
        return "Store whole numbers of one unit, such as int64 microseconds, and name it in the column."
    if pa.types.is_decimal(kind) and (kind.precision > _MOST_DIGITS or not 0 <= kind.scale <= kind.precision):
        return f"Cast it to a decimal of at most {_MOST_DIGITS} digits whose scale is not negative."
    if isinstance(kind, pa.BaseExtensionType) and not isinstance(kind, pa.UuidType):
        return "Cast it to text, numbers or time stamps."
    if pa.types.is_union(kind):
        return "Make a column of each of its types."
    return None


def has_type(kind: pa.DataType) -> bool:
    """Whether all of it is known: no null type, and none inside."""
    if pa.types.is_null(kind):
        return False
    if pa.types.is_list(kind):
        return has_type(kind.value_type)
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(has_type(field.type) for field in kind)
    return not pa.types.is_map(kind) or (has_type(kind.key_type) and has_type(kind.item_type))


def iceberg_schema(schema: pa.Schema, *, table: str) -> Schema:
    """An Iceberg schema with fresh field ids for a stored Arrow schema whose columns all have a type."""
    for column in schema:
        if not has_type(column.type):
            raise ColumnUnsupported(
                f"Column {column.name} is {column.type}: a part of it has no type, because no row has a value"
                " there.",
                table=table,
                hint="Give it a type in the asset (an Arrow, Polars or Spark schema), or leave the part out.",
            )
    converted = iceberg_schema_of(schema, _FORMAT_VERSION)
    return assign_fresh_schema_ids(converted)


def iceberg_type(kind: pa.DataType, *, table: str) -> IcebergType:
    """The Iceberg type of a stored Arrow type that is known."""
    return iceberg_schema(pa.schema([pa.field("it", kind)]), table=table).fields[0].field_type


def in_words(kind: pa.DataType, *, table: str) -> str:
    """The type as Iceberg prints it, without field ids."""
    return _words(iceberg_type(kind, table=table)) if has_type(kind) else str(kind)


def _words(kind: IcebergType) -> str:
    if isinstance(kind, StructType):
        return f"struct<{', '.join(f'{f.name}: {_words(f.field_type)}' for f in kind.fields)}>"
    if isinstance(kind, ListType):
        return f"list<{_words(kind.element_type)}>"
    if isinstance(kind, MapType):
        return f"map<{_words(kind.key_type)}, {_words(kind.value_type)}>"
    return str(kind)


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


def arrow_schema(schema: Schema, *, name: str) -> pa.Schema:
    """A table's columns in Arrow's types, as frames are compared with them."""
    return stored_schema(schema_to_pyarrow(schema, include_field_ids=False), table=name)


def without_untyped(schema: pa.Schema, needed: tuple[str, ...], *, name: str) -> pa.Schema:
    """What a new table is made of: the columns that have a type.

    One that is null in all rows comes when a frame brings values. Raises SchemaMismatch when nothing is
    left, or one of `needed` (keys, partition columns) is not.
    """
    untyped = [column.name for column in schema if pa.types.is_null(column.type)]
    hint = "Give it a type in the asset (a pandas dtype, an Arrow, Polars or Spark schema)."
    if lost := [column for column in untyped if column in needed]:
        are, has, it = ("is", "it has", "it") if len(lost) == 1 else ("are", "they have", "them")
        raise SchemaMismatch(
            f"{named('Column', lost)} {are} null in all rows, so {has} no type, and the table is made by"
            f" {it}.",
            table=name,
            hint=hint,
        )
    if len(untyped) == len(schema):
        raise SchemaMismatch(
            f"All columns ({', '.join(untyped)}) are null in all rows, so no table can be made of them.",
            table=name,
            hint=hint,
        )
    return pa.schema([column for column in schema if column.name not in untyped])


def require_unchanged(table: Table, wanted: pa.Schema, *, name: str, widen: bool) -> None:
    """Raise ColumnsFrozen if a frame of `wanted` would change the table's columns.

    A new column that is null in all rows counts too. `evolve` would leave the column out, and its first value
    would fail a later run.
    """
    current = arrow_schema(table.schema(), name=name)
    paths = [change.path for change in changes(current, wanted, name=name, widen=widen)]
    untyped = [(column,) for column in wanted.names if column not in current.names]
    columns = tuple(".".join(path) for path in dict.fromkeys((*untyped, *paths)))
    if columns:
        new = tuple(column for column in columns if (column,) in untyped)
        raise ColumnsFrozen(
            f"The frame would change {named('column', columns)}, and the asset's columns are frozen.",
            columns=columns,
            table=name,
            hint=(
                f"Leave {named('column', new)} out in the asset" if new else "Cast the columns in the asset"
            )
            + ', or declare table_metadata(columns="evolve") for the run that shall change the table.',
        )


def evolve(table: Table, wanted: pa.Schema, *, name: str, widen: bool) -> Table:
    """Make the changes that let the table hold a frame of `wanted`; any other is refused by column."""
    found = changes(arrow_schema(table.schema(), name=name), wanted, name=name, widen=widen)
    for change in found:
        if not has_type(change.kind):
            raise ColumnUnsupported(
                f"{'.'.join(change.path)} has no type in the frame, because no row has a value there, and the"
                " table has not got it either.",
                table=name,
                hint="Give it a type in the asset (an Arrow, Polars or Spark schema), or leave it out.",
            )
    if not found:
        return table
    with table.update_schema() as update:
        for change in found:
            kind = iceberg_type(change.kind, table=name)
            if isinstance(change, Added):
                update.add_column(change.path, kind)
            else:
                update.update_column(change.path, field_type=kind)
    return table
