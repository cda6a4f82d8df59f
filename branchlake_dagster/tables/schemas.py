"""Convert Arrow schemas to the types that the lake stores, and evolve a table's schema for a frame.

Table and frame are compared as Arrow schemas of stored types (`stored_schema`). A column of the frame fits,
widens a column of the table, is new, or is refused. Only `evolve_table` changes a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.table import Table
from pyiceberg.types import IcebergType, ListType, MapType, StructType

from branchlake_dagster.internals.pyiceberg import to_iceberg_schema
from branchlake_dagster.tables.errors import ColumnsFrozen, ColumnUnsupported, SchemaMismatch
from branchlake_dagster.wording import format_names

ColumnPath = tuple[str, ...]
_MAX_DIGITS = 38
_FORMAT_VERSION = 2
_MAX_PARQUET_LEVELS = 98
"""Arrow reads no Parquet schema with more levels of types in each other. Lists and maps have two levels."""
_MAX_JSON_LEVELS = 180
"""PyIceberg's reader of metadata accepts few more levels of JSON. A struct has three, a list or a map one."""


def stored_schema(schema: pa.Schema, *, table_name: str) -> pa.Schema:
    """Convert `schema` to the types that the lake stores: nullable columns, microseconds, zones in UTC.

    Every column is nullable because checks, not the storage, decide about nulls. pandas cannot express
    nullability and Spark derives it from the query, so it would change between runs of one asset. A column
    without values and without type keeps the type null.

    Raises SchemaMismatch if the frame has no columns, or if a name is empty or occurs twice, and
    ColumnUnsupported for a type that the lake cannot store, or that is nested too deeply.
    """
    if not schema.names:
        raise SchemaMismatch(
            "The frame has no columns.",
            table=table_name,
            hint="Return a frame with columns (it may have no rows), or None to write nothing.",
        )
    if duplicates := [name for name, count in Counter(schema.names).items() if count > 1]:
        raise SchemaMismatch(
            f"The frame has several columns with the same name: {', '.join(duplicates)}.",
            table=table_name,
            hint="Rename or drop all but one of them in the asset.",
        )
    require_readable_depth(schema, table_name=table_name)
    stored = pa.schema(
        [pa.field(field.name, stored_type(field.type, field.name, table_name)) for field in schema]
    )
    _require_usable_paths(stored, table_name)
    return stored


def require_readable_depth(schema: pa.Schema, *, table_name: str) -> None:
    """Raise ColumnUnsupported for a column that Arrow could write to a Parquet file, but not read again."""
    for field in schema:
        parquet_levels, json_levels = _find_depth(field.type)
        if parquet_levels > _MAX_PARQUET_LEVELS or json_levels > _MAX_JSON_LEVELS:
            raise ColumnUnsupported(
                f"Column {field.name} has too many lists, maps or structs in each other. Its files could not"
                " be read.",
                table=table_name,
                hint="Store the inner parts as JSON text, or as rows of another table.",
                reason="nested_too_deeply",
                subject=field.name,
            )


def _find_depth(kind: pa.DataType) -> tuple[int, int]:
    """Count the levels of a type in a Parquet schema and in the table's metadata.

    Works without recursion, because types can have any depth.
    """
    parquet_levels, json_levels = 0, 0
    pending_types = [(kind, 0, 0)]
    while pending_types:
        part, parquet, json = pending_types.pop()
        parquet_levels, json_levels = max(parquet_levels, parquet), max(json_levels, json)
        if pa.types.is_dictionary(part) or pa.types.is_run_end_encoded(part):
            pending_types.append((part.value_type, parquet, json))
        elif is_list_type(part):
            pending_types.append((part.value_type, parquet + 2, json + 1))
        elif pa.types.is_map(part):
            pending_types += [(inner, parquet + 2, json + 1) for inner in (part.key_type, part.item_type)]
        elif pa.types.is_struct(part):
            pending_types += [(field.type, parquet + 1, json + 3) for field in part]
    return parquet_levels, json_levels


def _require_usable_paths(schema: pa.Schema, table_name: str) -> None:
    """Raise SchemaMismatch if a column or field has an empty name, or the same dotted path as another one.

    Iceberg finds columns by dotted paths: the column `a.b` and the field `b` of a struct `a` share one.
    """
    paths = Counter(_iter_paths((), schema))
    empty = [".".join(path) for path in paths if not path[-1]]
    if empty:
        raise SchemaMismatch(
            "A column or field of the frame has an empty name.",
            table=table_name,
            hint="Give it a name in the asset.",
            reason="empty_name",
            subject=empty[0],
        )
    dotted_paths = Counter(".".join(path) for path in paths)
    if shared := [path for path, count in dotted_paths.items() if count > 1]:
        raise SchemaMismatch(
            f"{format_names('Name', shared)} could mean a column or a field of a struct.",
            table=table_name,
            hint="Rename the column in the asset: without a dot, or with another name before the dot.",
            reason="ambiguous_name",
            subject=shared[0],
        )


def _iter_paths(parent: ColumnPath, fields: Iterable[pa.Field]) -> Iterator[ColumnPath]:
    for field in fields:
        path = (*parent, field.name)
        yield path
        if pa.types.is_list(field.type):
            yield from _iter_paths(path, [pa.field("element", field.type.value_type)])
        elif pa.types.is_map(field.type):
            entries = [pa.field("key", field.type.key_type), pa.field("value", field.type.item_type)]
            yield from _iter_paths(path, entries)
        elif pa.types.is_struct(field.type):
            yield from _iter_paths(path, list(field.type))


def stored_type(kind: pa.DataType, column_name: str, table_name: str) -> pa.DataType:
    """Return the type that the lake stores for `kind`.

    Raise ColumnUnsupported if the lake has no such type.
    """
    if hint := _unsupported_type_hint(kind):
        raise ColumnUnsupported(
            f"Column {column_name} is {kind}, which the lake cannot store.", table=table_name, hint=hint
        )
    nested_type = _stored_nested_type(kind, column_name, table_name)
    return _stored_plain_type(kind) if nested_type is None else nested_type


def _stored_nested_type(kind: pa.DataType, column_name: str, table_name: str) -> pa.DataType | None:
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return stored_type(kind.value_type, column_name, table_name)
    if is_list_type(kind):
        element = stored_type(kind.value_type, f"{column_name}.element", table_name)
        return pa.list_(pa.field("element", element))
    if pa.types.is_struct(kind):
        return pa.struct(
            [pa.field(f.name, stored_type(f.type, f"{column_name}.{f.name}", table_name)) for f in kind]
        )
    if pa.types.is_map(kind):
        key = stored_type(kind.key_type, f"{column_name}.key", table_name)
        return pa.map_(key, stored_type(kind.item_type, f"{column_name}.value", table_name))
    return None


def _stored_plain_type(kind: pa.DataType) -> pa.DataType:
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


def is_list_type(kind: pa.DataType) -> bool:
    """Return whether `kind` is one of Arrow's five list types, such as list, large list or list view."""
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


def _unsupported_type_hint(kind: pa.DataType) -> str | None:
    """Return a sentence on how to avoid the type `kind`, which Iceberg lacks; None if Iceberg has the type.

    The parts of a nested type are not checked.
    """
    if pa.types.is_duration(kind) or pa.types.is_interval(kind):
        return "Store integers of one unit, such as int64 microseconds, and name the unit in the column."
    if pa.types.is_decimal(kind) and (kind.precision > _MAX_DIGITS or not 0 <= kind.scale <= kind.precision):
        return f"Cast it to a decimal of at most {_MAX_DIGITS} digits whose scale is not negative."
    if isinstance(kind, pa.BaseExtensionType) and not isinstance(kind, pa.UuidType):
        return "Cast it to text, numbers or timestamps."
    if pa.types.is_union(kind):
        return "Create one column for each type of the union."
    return None


def is_fully_typed(kind: pa.DataType) -> bool:
    """Return whether the stored type `kind` is known completely.

    False if it is null, or if a part of it is null or a struct without fields.
    """
    if pa.types.is_null(kind):
        return False
    if pa.types.is_list(kind):
        return is_fully_typed(kind.value_type)
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(is_fully_typed(field.type) for field in kind)
    return not pa.types.is_map(kind) or (is_fully_typed(kind.key_type) and is_fully_typed(kind.item_type))


def build_iceberg_schema(schema: pa.Schema, *, table_name: str) -> Schema:
    """Build an Iceberg schema with fresh field ids from a stored Arrow schema.

    Raises ColumnUnsupported if a column, or a part of it, has the type null.
    """
    for column in schema:
        if not is_fully_typed(column.type):
            raise ColumnUnsupported(
                f"Column {column.name} is {column.type}: a part of the column has no type, because no row has"
                " a value for it.",
                table=table_name,
                hint="Declare its type in the asset (an Arrow, Polars or Spark schema), or omit that part.",
            )
    converted = to_iceberg_schema(schema, _FORMAT_VERSION)
    return assign_fresh_schema_ids(converted)


def require_distinct_names(
    fields: Iterable[pa.Field], existing_names: Iterable[str] = (), *, path: ColumnPath = (), table_name: str
) -> None:
    """Raise SchemaMismatch if names of new columns, or of their fields, differ in upper and lower case only.

    Spark does not distinguish such names, so it could not read the table. `existing_names` are the names of
    the columns beside the new ones. `path` is the path of the struct that has the fields.
    """
    names = {name.lower(): name for name in existing_names}
    for field in fields:
        if (other := names.setdefault(field.name.lower(), field.name)) != field.name:
            shown = [".".join((*path, name)) for name in (other, field.name)]
            raise SchemaMismatch(
                f"{format_names('Column', shown)} differ in upper and lower case only, which Spark does not"
                " distinguish.",
                table=table_name,
                hint="Rename one of them in the asset.",
                reason="names_differ_in_case",
                subject=shown[1],
            )
        require_distinct_names(_nested_fields(field.type), path=(*path, field.name), table_name=table_name)


def _nested_fields(kind: pa.DataType) -> list[pa.Field]:
    """Return the fields of a struct, also inside lists and of the values of maps; empty for other types."""
    if is_list_type(kind):
        return _nested_fields(kind.value_type)
    if pa.types.is_map(kind):
        return _nested_fields(kind.item_type)
    return list(kind) if pa.types.is_struct(kind) else []


def build_iceberg_type(kind: pa.DataType, *, table_name: str) -> IcebergType:
    """Return the Iceberg type of a stored Arrow type, with fresh field ids.

    Raises ColumnUnsupported if the type, or a part of it, is null. The error names the table `table_name`.
    """
    return build_iceberg_schema(pa.schema([pa.field("it", kind)]), table_name=table_name).fields[0].field_type


def format_type(kind: pa.DataType, *, table_name: str) -> str:
    """Format the stored Arrow type `kind` as Iceberg prints it, without field ids.

    A type that is not fully known is printed as Arrow prints it. `table_name` is for errors.
    """
    return (
        _format_iceberg_type(build_iceberg_type(kind, table_name=table_name))
        if is_fully_typed(kind)
        else str(kind)
    )


def _format_iceberg_type(kind: IcebergType) -> str:
    if isinstance(kind, StructType):
        return f"struct<{', '.join(f'{f.name}: {_format_iceberg_type(f.field_type)}' for f in kind.fields)}>"
    if isinstance(kind, ListType):
        return f"list<{_format_iceberg_type(kind.element_type)}>"
    if isinstance(kind, MapType):
        return f"map<{_format_iceberg_type(kind.key_type)}, {_format_iceberg_type(kind.value_type)}>"
    return str(kind)


_WIDENINGS = {(pa.int32(), pa.int64()), (pa.float32(), pa.float64())}
_ADD_ONLY_HINT = "Cast the column in the asset. A table only accepts new nullable columns."


@dataclass(frozen=True)
class AddedColumn:
    """The change that adds a nullable column, or a nullable field of a struct."""

    path: ColumnPath
    kind: pa.DataType


@dataclass(frozen=True)
class WidenedColumn:
    """The change of a column or nested field to a type that includes all values of the old type."""

    path: ColumnPath
    kind: pa.DataType


SchemaChange = AddedColumn | WidenedColumn


def plan_schema_changes(
    table_schema: pa.Schema, frame_schema: pa.Schema, *, table_name: str, widen: bool
) -> list[SchemaChange]:
    """List the schema changes that table `table_name` needs before it can store the frame, outermost first.

    Columns are matched by name. A column without type (null in all rows) needs no change. Without `widen`,
    only new columns are allowed. Raises SchemaMismatch, which names the column, if the frame lacks a column
    of the table, if no such change is possible, or if a new name differs from another one in case only.
    """
    if missing_columns := [column for column in table_schema.names if column not in frame_schema.names]:
        raise SchemaMismatch(
            f"The frame lacks {format_names('column', missing_columns)} of the table.",
            table=table_name,
            hint="Write the column (nulls are fine), or drop it with `branchlake columns drop`.",
        )
    comparison = _SchemaComparison(table_name, widen)
    return list(comparison.compare_fields((), list(table_schema), list(frame_schema)))


@dataclass(frozen=True)
class _SchemaComparison:
    table_name: str
    widen: bool

    def compare_fields(
        self, path: ColumnPath, table_fields: list[pa.Field], frame_fields: list[pa.Field]
    ) -> Iterator[SchemaChange]:
        table_types = {field.name: field.type for field in table_fields}
        added_fields: list[pa.Field] = []
        for field in frame_fields:
            field_path = (*path, field.name)
            if field.name in table_types:
                yield from self.compare_types(field_path, table_types[field.name], field.type)
            elif path or not pa.types.is_null(field.type):
                added_fields.append(field)
                yield AddedColumn(field_path, field.type)
        require_distinct_names(added_fields, table_types, path=path, table_name=self.table_name)

    def compare_types(
        self, path: ColumnPath, table_type: pa.DataType, frame_type: pa.DataType
    ) -> Iterator[SchemaChange]:
        if pa.types.is_null(frame_type) or table_type == frame_type:
            return
        if not self.widen and pa.types.is_nested(table_type):
            if format_type(table_type, table_name=self.table_name) != format_type(
                frame_type, table_name=self.table_name
            ):
                raise self._mismatch_error(path, table_type, frame_type)
            return
        if pa.types.is_struct(table_type) and pa.types.is_struct(frame_type):
            names = {field.name for field in frame_type}
            if missing_fields := [field.name for field in table_type if field.name not in names]:
                raise SchemaMismatch(
                    "The frame lacks"
                    f" {format_names('field', ['.'.join((*path, name)) for name in missing_fields])}"
                    " of the table.",
                    table=self.table_name,
                    hint="Write the field (nulls are fine), or drop it from the table on purpose.",
                )
            yield from self.compare_fields(path, list(table_type), list(frame_type))
        elif pa.types.is_list(table_type) and pa.types.is_list(frame_type):
            yield from self.compare_types((*path, "element"), table_type.value_type, frame_type.value_type)
        elif pa.types.is_map(table_type) and pa.types.is_map(frame_type):
            if list(self.compare_types((*path, "key"), table_type.key_type, frame_type.key_type)):
                raise self._mismatch_error((*path, "key"), table_type.key_type, frame_type.key_type)
            yield from self.compare_types((*path, "value"), table_type.item_type, frame_type.item_type)
        else:
            yield from self._compare_plain_types(path, table_type, frame_type)

    def _compare_plain_types(
        self, path: ColumnPath, table_type: pa.DataType, frame_type: pa.DataType
    ) -> Iterator[SchemaChange]:
        if self.widen and (frame_type, table_type) in _WIDENINGS:
            return  # the frame's values are cast later
        if self.widen and (table_type, frame_type) in _WIDENINGS:
            yield WidenedColumn(path, frame_type)
        elif self.widen and pa.types.is_decimal(table_type) and pa.types.is_decimal(frame_type):
            yield from self._compare_decimals(path, table_type, frame_type)
        else:
            raise self._mismatch_error(path, table_type, frame_type)

    def _compare_decimals(
        self, path: ColumnPath, table_type: pa.DataType, frame_type: pa.DataType
    ) -> Iterator[SchemaChange]:
        """Yield the change that widens the column's precision for the frame's decimals, if that is needed.

        Iceberg never changes the scale. Raises SchemaMismatch if the frame's scale is greater than the
        table's, or if more than 38 digits would be needed.
        """
        required_digits = max(
            table_type.precision, frame_type.precision - frame_type.scale + table_type.scale
        )
        if frame_type.scale > table_type.scale or required_digits > _MAX_DIGITS:
            raise self._mismatch_error(path, table_type, frame_type)
        if required_digits > table_type.precision:
            yield WidenedColumn(path, pa.decimal128(required_digits, table_type.scale))

    def _mismatch_error(
        self, path: ColumnPath, table_type: pa.DataType, frame_type: pa.DataType
    ) -> SchemaMismatch:
        return SchemaMismatch(
            f"Column {'.'.join(path)} is {format_type(table_type, table_name=self.table_name)} in the table"
            f" and {format_type(frame_type, table_name=self.table_name)} in the frame.",
            table=self.table_name,
            hint=_mismatch_hint(table_type, frame_type, self.widen),
        )


def _mismatch_hint(table_type: pa.DataType, frame_type: pa.DataType, widen: bool) -> str:
    if pa.types.is_timestamp(table_type) and pa.types.is_timestamp(frame_type):
        if table_type.tz:
            return (
                "A timestamp without time zone does not identify a moment. Declare its zone in the asset:"
                " pandas .dt.tz_localize(zone), Polars .dt.replace_time_zone(zone),"
                " Arrow pc.assume_timezone, Spark to_utc_timestamp(column, zone)."
            )
        return (
            "The table stores UTC without a time zone. Remove the zone in the asset: pandas"
            " .dt.tz_convert('UTC').dt.tz_localize(None), Polars .dt.convert_time_zone('UTC')"
            ".dt.replace_time_zone(None), Spark to_timestamp_ntz in a session on UTC."
        )
    if pa.types.is_integer(table_type) and pa.types.is_floating(frame_type):
        return (
            "Cast the column to integers in the asset. pandas converts integers with missing values to"
            " floats, unless their dtype is 'Int64'."
        )
    if pa.types.is_decimal(table_type) and pa.types.is_decimal(frame_type):
        return (
            "A table's column keeps its scale and has at most 38 digits: round in the asset, or add a column."
        )
    if pa.types.is_map(table_type):
        return "Give the column a map type: a pyarrow.Table, or the pandas dtype ArrowDtype(pyarrow.map_(…))."
    if not widen:
        return f"{_ADD_ONLY_HINT} (The setting widen_columns is off.)"
    return (
        "Cast the column in the asset. A table accepts new nullable columns and fields, and widens int to"
        " long, float to double and decimals to more digits."
    )


def table_arrow_schema(schema: Schema, *, table_name: str) -> pa.Schema:
    """Return the columns of a table with the Iceberg schema `schema`, as stored Arrow types.

    So frames can be compared with them. `table_name` is for errors.
    """
    return stored_schema(schema_to_pyarrow(schema, include_field_ids=False), table_name=table_name)


def drop_untyped_columns(
    schema: pa.Schema, required_columns: tuple[str, ...], *, table_name: str
) -> pa.Schema:
    """Return the schema without columns of type null. A new table is created from the result.

    A column that is null in all rows is added later, by a frame that has values for it. Raises SchemaMismatch
    if no column is left, or if one of `required_columns` (keys, partition columns) has no type.
    """
    untyped_columns = [column.name for column in schema if pa.types.is_null(column.type)]
    hint = "Declare a type in the asset (a pandas dtype, an Arrow, Polars or Spark schema)."
    if untyped_required := [column for column in untyped_columns if column in required_columns]:
        are, has, pronoun = (
            ("is", "it has", "it") if len(untyped_required) == 1 else ("are", "they have", "them")
        )
        raise SchemaMismatch(
            f"{format_names('Column', untyped_required)} {are} null in all rows, so {has} no type, but the"
            f" new table needs {pronoun} as a key or for its partitions.",
            table=table_name,
            hint=hint,
        )
    if len(untyped_columns) == len(schema):
        raise SchemaMismatch(
            f"All columns ({', '.join(untyped_columns)}) are null in all rows, so no table can be created.",
            table=table_name,
            hint=hint,
        )
    return pa.schema([column for column in schema if column.name not in untyped_columns])


def require_unchanged_columns(table: Table, frame_schema: pa.Schema, *, table_name: str, widen: bool) -> None:
    """Raise ColumnsFrozen if a frame of `frame_schema` would change the table's columns.

    A new column that is null in all rows counts too. `evolve_table` would omit the column, and its first
    value would then fail a later run. `widen` says whether types may be widened, such as int to long.
    """
    table_schema = table_arrow_schema(table.schema(), table_name=table_name)
    paths = [
        change.path
        for change in plan_schema_changes(table_schema, frame_schema, table_name=table_name, widen=widen)
    ]
    untyped_paths = [(column,) for column in frame_schema.names if column not in table_schema.names]
    columns = tuple(".".join(path) for path in dict.fromkeys((*untyped_paths, *paths)))
    if columns:
        untyped_columns = tuple(column for column in columns if (column,) in untyped_paths)
        raise ColumnsFrozen(
            f"The frame would change {format_names('column', columns)}, and the asset's columns are frozen.",
            columns=columns,
            table=table_name,
            hint=(
                f"Omit {format_names('column', untyped_columns)} in the asset"
                if untyped_columns
                else "Cast the columns in the asset"
            )
            + ', or declare table_metadata(columns="evolve") for the run that is to change the table.',
        )


def evolve_table(table: Table, frame_schema: pa.Schema, *, table_name: str, widen: bool) -> Table:
    """Change the table's schema so that it can store a frame of `frame_schema`, and return the table.

    `widen` says whether types may be widened, such as int to long; otherwise only columns are added. Raises
    SchemaMismatch or ColumnUnsupported, which name the column, if only a lossy change would do.
    """
    schema_changes = plan_schema_changes(
        table_arrow_schema(table.schema(), table_name=table_name),
        frame_schema,
        table_name=table_name,
        widen=widen,
    )
    for change in schema_changes:
        if not is_fully_typed(change.kind):
            raise ColumnUnsupported(
                f"Column {'.'.join(change.path)} has no type: no row of the frame has a value for it, and the"
                " table does not have the column.",
                table=table_name,
                hint="Declare its type in the asset (an Arrow, Polars or Spark schema), or omit the column.",
            )
    if not schema_changes:
        return table
    with table.update_schema() as update:
        for change in schema_changes:
            kind = build_iceberg_type(change.kind, table_name=table_name)
            if isinstance(change, AddedColumn):
                update.add_column(change.path, kind)
            else:
                update.update_column(change.path, field_type=kind)
    return table
