"""Declare an asset's table with metadata on the asset, and parse that metadata to a `TableSpec`."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dagster import AssetKey
from pyiceberg.table import TableProperties

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.nessie.model import ContentKey
from branchlake_dagster.spark.session import quote_spark_path
from branchlake_dagster.stored_names import AssetMetadata

WriteMode = Literal["replace_partitions", "replace_table", "append", "upsert"]
WhenMatched = Literal["update", "keep"]
Isolation = Literal["snapshot", "serializable"]
ColumnContract = Literal["evolve", "freeze"]


_EXCLUSIVE_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_INVALID_CHARACTERS = re.compile(r"[/@#?\x00-\x1f\x7f-\x9f]")


_TRANSFORM_PATTERN = re.compile(r"(year|month|day|hour)\((.+)\)|(bucket|truncate)\(\s*(\d+)\s*,\s*(.+)\)")
_TRANSFORM_CALL = re.compile(r"(years?|months?|days?|hours?|bucket|truncate|identity|void)\(.*\)")
"""Text that means a transform, perhaps one that `_TRANSFORM_PATTERN` does not accept."""
_MAX_WIDTH = 2**31 - 1
_CODECS = ("zstd", "gzip", "snappy", "lz4", "brotli")
_NO_CODEC = ("uncompressed", "none")
"""The values for files without compression. PyIceberg accepts them only in lower case."""
PARTITION_EXPR = "partition_expr"
"""The metadata key that Dagster's own database IO managers use for the partition column."""


def table_metadata(
    *,
    write_mode: WriteMode | None = None,
    keys: Iterable[str] | None = (),
    when_matched: WhenMatched | None = None,
    partition_by: str | Mapping[str, str] | None = None,
    require_checks: bool | None = None,
    isolation: Isolation | None = None,
    preview_rows: int | None = None,
    layout: Iterable[str] | None = (),
    properties: Mapping[str, str] | None = None,
    exclusive: str | None = None,
    columns: ColumnContract | None = None,
) -> dict[str, Any]:
    """Return metadata for `@dg.asset(metadata=…)` that declares how the table is laid out and written.

    Invalid metadata raises ConfigurationError only when the asset is written.

    Args:
        write_mode (Optional[Literal["replace_partitions", "replace_table", "append", "upsert"]]): How a
            materialization changes the table. (default: `replace_partitions` when the asset is partitioned by
            a column, else `replace_table`)
        keys (Optional[Iterable[str]]): The columns that an `upsert` matches on.
        when_matched (Optional[Literal["update", "keep"]]): What an `upsert` does with a row whose keys are in
            the table already. `update` replaces the table's row. `keep` leaves it as it is and drops the new
            row, as for records that a source repeats. If a key is a date or timestamp, only files that
            overlap the span of the frame's values are read. (default: `update`)
        partition_by (Optional[str | Mapping[str, str]]): The column that holds the partition, or for
            multi-dimensional partitions `{dimension: column}`. A time window needs a timestamp column, or a
            date column if it consists of whole days. Other partitions need a string column with the key.
        require_checks (Optional[bool]): Whether a run that writes this table without any check is blocked.
            (default: the setting of that name)
        isolation (Optional[Literal["snapshot", "serializable"]]): With `serializable`, a run is published
            only if nothing that it read has changed on `main` since. `snapshot` requires this only of what
            it wrote. (default: `snapshot`)
        preview_rows (Optional[int]): How many of the rows that a run wrote are shown on the asset's page. Use
            0 for data that must not be stored in Dagster's database. (default: the setting of that name)
        layout (Optional[Iterable[str]]): How the table's files are partitioned in addition to `partition_by`:
            columns, or Iceberg's transforms of columns: `year(c)`, `month(c)`, `day(c)`, `hour(c)`,
            `bucket(16, c)`, `truncate(4, c)`. It applies to new tables only. (default: nothing)
        properties (Optional[Mapping[str, str]]): Iceberg's table properties, such as
            `{"write.merge.mode": "merge-on-read"}`. They apply to new tables only.
        exclusive (Optional[str]): A name of letters, digits, `_` and `-`. Only one run at a time may write
            assets with this name, and each run starts from what the previous one has published. A run that
            was declared dead can no longer publish. (default: runs work in parallel)
        columns (Optional[Literal["evolve", "freeze"]]): With `freeze`, a run that would add, remove, rename
            or widen a column of the existing table is not published. A frame fails the step with
            ColumnsFrozen or SchemaMismatch before anything is written; a change by SQL blocks the run.
            (default: `evolve`)

    Returns:
        Dict[str, Any]: The metadata. Combine it with your own with `|`.

    Examples:
        .. code-block:: python

            import dagster as dg
            import polars as pl

            from branchlake_dagster import table_metadata

            @dg.asset(
                partitions_def=dg.DailyPartitionsDefinition("2026-01-01"),
                metadata=table_metadata(partition_by="day") | {"owner": "shop"},
            )
            def sales(context: dg.AssetExecutionContext) -> pl.DataFrame:
                day = context.partition_time_window.start.date()
                return pl.DataFrame({"day": [day], "price": [2.5]})
    """
    key_columns, layout_entries = _read_list("keys", keys), _read_list("layout", layout)
    if partition_by is not None and not isinstance(partition_by, str | Mapping):
        raise ConfigurationError(
            f"partition_by={partition_by!r} names no column.",
            hint='Use the name of a column, or for several dimensions a dict: {"dimension": "column"}.',
            reason="not_a_mapping",
            subject="partition_by",
        )
    if properties is not None and not isinstance(properties, Mapping):
        raise ConfigurationError(
            f"properties={properties!r} is not a dict.",
            hint='Write a dict, such as properties={"write.merge.mode": "merge-on-read"}.',
            reason="not_a_mapping",
            subject="properties",
        )
    metadata: dict[str, Any] = {}
    if write_mode is not None:
        metadata[AssetMetadata.WRITE_MODE] = write_mode
    if key_columns:
        metadata[AssetMetadata.KEYS] = key_columns
    if when_matched is not None:
        metadata[AssetMetadata.WHEN_MATCHED] = when_matched
    if partition_by is not None:
        metadata[PARTITION_EXPR] = partition_by if isinstance(partition_by, str) else dict(partition_by)
    if require_checks is not None:
        metadata[AssetMetadata.REQUIRE_CHECKS] = require_checks
    if isolation is not None:
        metadata[AssetMetadata.ISOLATION] = isolation
    if preview_rows is not None:
        metadata[AssetMetadata.PREVIEW_ROWS] = preview_rows
    if layout_entries:
        metadata[AssetMetadata.LAYOUT] = layout_entries
    if properties:
        metadata[AssetMetadata.PROPERTIES] = dict(properties)
    if exclusive is not None:
        metadata[AssetMetadata.EXCLUSIVE] = exclusive
    if columns is not None:
        metadata[AssetMetadata.COLUMNS] = columns
    return metadata


def _read_list(option: str, value: Iterable[str] | None) -> list[str]:
    """Return the entries of an option of `table_metadata`. Reads an iterator once; None has no entries.

    Raises ConfigurationError for a text and for values that are not iterable.
    """
    if value is None:
        return []
    if not _is_iterable(value):
        raise ConfigurationError(
            f"{option}={value!r} is not a list.",
            hint=f"Write {option}=[{value!r}]." if isinstance(value, str) else "Write a list of texts.",
            reason="not_a_list",
            subject=option,
        )
    return list(value)


def _is_iterable(value: Any) -> bool:
    """Return whether a declared value has entries. A text does not count, although its letters are some."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


@dataclass(frozen=True)
class LayoutField:
    """One field of a declared layout: a column and the Iceberg name of a transform, such as `bucket[16]`.

    `transform` is None if the table is partitioned by the column's values themselves.
    """

    column: str
    transform: str | None = None

    @property
    def has_valid_width(self) -> bool:
        """Whether the width of a `bucket` or `truncate` is one that Iceberg can use; true without a width."""
        width = re.search(r"\[(\d+)\]", self.transform or "")
        return width is None or 1 <= int(width[1]) <= _MAX_WIDTH

    @classmethod
    def from_declaration(cls, declaration: str) -> LayoutField:
        """Parse an entry of `table_metadata(layout=…)`, such as `day(at)` or `bucket(16, id)`.

        Text that is not a transform is a column name. Spaces around it are ignored.
        """
        transform_match = _TRANSFORM_PATTERN.fullmatch(declaration.strip())
        if transform_match is None:
            return cls(declaration.strip())
        time_transform, column, function, width, source = transform_match.groups()
        return (
            cls(column.strip(), time_transform)
            if time_transform
            else cls(source.strip(), f"{function}[{width}]")
        )


@dataclass(frozen=True)
class TableSpec:
    """Where an asset is stored and how a materialization changes its table.

    `identifier` is (namespace…, table). `keys` are the columns that an upsert matches on.
    `columns_by_dimension` maps a partition dimension to its column; the dimension of one-dimensional
    partitions is the empty string. `layout` and `properties` apply to a new table. `frozen` means that runs
    may not change the columns of the existing table. `keeps_matched` means that an upsert adds only the rows
    with new keys. `replaces_upsert` means that the rows are the result of an upsert that was computed from
    everything, so they replace what it wrote before.
    """

    identifier: tuple[str, ...]
    write_mode: WriteMode
    keys: tuple[str, ...] = ()
    columns_by_dimension: Mapping[str, str] = field(default_factory=dict)
    isolation: Isolation = "snapshot"
    layout: tuple[LayoutField, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    frozen: bool = False
    keeps_matched: bool = False
    replaces_upsert: bool = False

    @property
    def requires_unique_keys(self) -> bool:
        """Whether each row of a frame must have its own key, without nulls."""
        return self.write_mode == "upsert" or self.replaces_upsert

    @property
    def only_adds_rows(self) -> bool:
        """Whether a write leaves all existing rows of the table unchanged."""
        return self.write_mode == "append" or (self.write_mode == "upsert" and self.keeps_matched)

    @property
    def name(self) -> str:
        """The dotted name without the catalog, in the notation of Nessie's content keys."""
        return format_table_name(self.identifier)

    @property
    def spark_name(self) -> str:
        """The name in Spark SQL, including the catalog."""
        return f"nessie.{quote_spark_path(self.identifier)}"


def table_identifier(asset_key: AssetKey, default_namespace: str) -> tuple[str, ...]:
    """Return the identifier of an asset's table, (namespace…, table): its key path.

    A key of one part goes to the default namespace. Raises ConfigurationError for a part that cannot be a
    name. Such a part could leave the warehouse's folder, or have a meaning in Nessie or an engine
    (`table@branch`, `table#time`, a query in a path).
    """
    for part in asset_key.path:
        if part in ("", ".", "..") or _INVALID_CHARACTERS.search(part):
            raise ConfigurationError(
                f"Asset {asset_key.to_user_string()!r} has the key part {part!r}, which cannot be part of a"
                " table name.",
                hint="Rename it: it must not be empty, '.' or '..', or contain '/', '@', '#', '?' or a"
                " control character.",
                reason="key_part",
                subject=part,
            )
    return tuple(asset_key.path) if len(asset_key.path) > 1 else (default_namespace, *asset_key.path)


def find_table_name(asset_key: AssetKey, default_namespace: str) -> str | None:
    """Return the dotted name of an asset's table, or None if the key cannot name a table of the lake."""
    try:
        return format_table_name(table_identifier(asset_key, default_namespace))
    except ConfigurationError:
        return None


def format_table_name(identifier: Sequence[str]) -> str:
    """Return the dotted name of an identifier. `ContentKey.from_path` parses it."""
    return ContentKey(identifier).name


def parse_table_spec(
    asset_key: AssetKey, metadata: Mapping[str, Any], *, default_namespace: str, partitioned: bool
) -> TableSpec:
    """Build the table spec of an asset from its key and metadata.

    A key of one part goes to `default_namespace`. `partitioned` is whether the asset has partitions. Raises
    ConfigurationError if the metadata or a part of the key is invalid.
    """
    identifier = table_identifier(asset_key, default_namespace)
    table_name = format_table_name(identifier)
    expression = unwrap_metadata(metadata.get(PARTITION_EXPR))
    columns = _parse_partition_expr(expression, table_name)
    keys = _parse_keys(metadata, table_name)
    mode: Any = unwrap_metadata(metadata.get(AssetMetadata.WRITE_MODE)) or (
        "replace_partitions" if columns else "replace_table"
    )
    if mode not in get_args(WriteMode):
        raise ConfigurationError(
            f"Unknown write mode {mode!r}.",
            table=table_name,
            hint=f"Use one of {', '.join(get_args(WriteMode))}.",
            reason="write_mode",
        )
    isolation: Any = unwrap_metadata(metadata.get(AssetMetadata.ISOLATION)) or "snapshot"
    if isolation not in get_args(Isolation):
        raise ConfigurationError(
            f"Unknown isolation {isolation!r}.",
            table=table_name,
            hint=f"Use {' or '.join(get_args(Isolation))}.",
            reason="isolation",
        )
    contract: Any = unwrap_metadata(metadata.get(AssetMetadata.COLUMNS)) or "evolve"
    if contract not in get_args(ColumnContract):
        raise ConfigurationError(
            f"Unknown value {contract!r} of table_metadata(columns=…).",
            table=table_name,
            hint=f"Use {' or '.join(get_args(ColumnContract))}.",
            reason="columns",
        )
    if mode == "upsert" and not keys:
        raise ConfigurationError(
            "The write mode upsert needs keys.",
            table=table_name,
            hint="Declare table_metadata(keys=[…]).",
            reason="keys_missing",
        )
    when_matched: Any = unwrap_metadata(metadata.get(AssetMetadata.WHEN_MATCHED)) or "update"
    if when_matched not in get_args(WhenMatched):
        raise ConfigurationError(
            f"Unknown value {when_matched!r} of table_metadata(when_matched=…).",
            table=table_name,
            hint=f"Use {' or '.join(get_args(WhenMatched))}.",
            reason="when_matched",
        )
    if when_matched == "keep" and mode != "upsert":
        raise ConfigurationError(
            f"when_matched='keep' has no effect with the write mode {mode}.",
            table=table_name,
            hint='Declare write_mode="upsert", or remove when_matched.',
            reason="when_matched_without_upsert",
        )
    require_distinct_keys(keys, table_name=table_name)
    if any("," in key for key in keys):
        raise ConfigurationError(
            f"The keys {', '.join(map(repr, keys))} contain a comma. It separates keys in snapshot"
            " summaries.",
            table=table_name,
            hint="Rename the column.",
            reason="comma_in_key",
        )
    if mode == "replace_partitions" and not columns:
        raise ConfigurationError(
            "The write mode replace_partitions needs a partition column.",
            table=table_name,
            hint="Declare table_metadata(partition_by=…).",
            reason="partition_column_missing",
        )
    if partitioned and mode == "replace_table":
        raise ConfigurationError(
            "A partitioned asset that replaces its whole table would keep only its last partition.",
            table=table_name,
            hint="Name the column with table_metadata(partition_by=…), or choose append or upsert.",
            reason="only_last_partition",
        )
    parse_exclusive_name(metadata, table_name)
    _require_valid_options(metadata, table_name)
    layout = unwrap_metadata(metadata.get(AssetMetadata.LAYOUT))
    properties = unwrap_metadata(metadata.get(AssetMetadata.PROPERTIES)) or {}
    layout_fields = parse_layout(() if layout is None else layout, table_name=table_name)
    if not isinstance(properties, Mapping):
        raise ConfigurationError(
            f"The table's properties must be a dict, but they are {properties!r}.",
            table=table_name,
            hint='Declare a dict, such as properties={"write.merge.mode": "merge-on-read"}.',
            reason="properties",
        )
    table_properties = {str(key): str(value) for key, value in properties.items()}
    require_parquet(table_properties, table_name=table_name)
    return TableSpec(
        identifier,
        mode,
        keys,
        columns,
        isolation,
        layout_fields,
        table_properties,
        contract == "freeze",
        when_matched == "keep",
    )


def _parse_keys(metadata: Mapping[str, Any], table_name: str) -> tuple[str, ...]:
    """Return the declared keys, or nothing. Raises ConfigurationError for keys that are not column names."""
    value = unwrap_metadata(metadata.get(AssetMetadata.KEYS))
    if value is None:
        return ()
    keys = tuple(value) if _is_iterable(value) else ()
    if not _is_iterable(value) or not all(isinstance(key, str) and key for key in keys):
        raise ConfigurationError(
            f"The keys are declared as {list(keys) if keys else value!r}.",
            table=table_name,
            hint='Declare a list of column names, such as keys=["item"].',
            reason="keys",
        )
    return keys


def _require_valid_options(metadata: Mapping[str, Any], table_name: str) -> None:
    """Raise ConfigurationError for invalid values of `require_checks` and `preview_rows`."""
    require_checks = unwrap_metadata(metadata.get(AssetMetadata.REQUIRE_CHECKS))
    if require_checks not in (None, True, False):
        raise ConfigurationError(
            f"The value {require_checks!r} of table_metadata(require_checks=…) is neither True nor False.",
            table=table_name,
            hint="Use True or False.",
            reason="require_checks",
        )
    parse_preview_rows(metadata, 0, table_name)


def parse_preview_rows(metadata: Mapping[str, Any], default: int, table_name: str) -> int:
    """Return the declared number of rows of the preview, or `default` without a declaration.

    Raises ConfigurationError for a value that is not a whole number from 0 on.
    """
    preview_rows = unwrap_metadata(metadata.get(AssetMetadata.PREVIEW_ROWS, default))
    try:
        row_count = -1 if isinstance(preview_rows, bool) else operator.index(preview_rows)
    except TypeError:
        row_count = -1
    if row_count < 0:
        raise ConfigurationError(
            f"The value {preview_rows!r} of table_metadata(preview_rows=…) is not a number of rows.",
            table=table_name,
            hint="Use a whole number from 0 on.",
            reason="preview_rows",
        )
    return row_count


def parse_layout(layout: Iterable[str], *, table_name: str) -> tuple[LayoutField, ...]:
    """Parse a declared layout, such as `["day(at)", "bucket(16, account)"]`. Raises ConfigurationError."""
    entries = tuple(layout) if _is_iterable(layout) else ()
    if not _is_iterable(layout) or not all(isinstance(declaration, str) for declaration in entries):
        raise ConfigurationError(
            f"The layout must be a list of strings, but it is {layout!r}.",
            table=table_name,
            hint='Declare a list, such as layout=["day", "bucket(16, account)"].',
            reason="layout",
        )
    layout_fields = tuple(LayoutField.from_declaration(declaration) for declaration in entries)
    for declaration, layout_field in zip(entries, layout_fields, strict=True):
        if not layout_field.column:
            raise ConfigurationError(
                f"The entry {declaration!r} of the layout does not name a column.",
                table=table_name,
                hint='Name a column in each entry, such as layout=["day", "bucket(16, account)"].',
                reason="layout_column",
                subject=declaration,
            )
        if not layout_field.transform and _TRANSFORM_CALL.fullmatch(layout_field.column):
            raise ConfigurationError(
                f"{layout_field.column} in the layout is not a valid transform.",
                table=table_name,
                hint="Use year(c), month(c), day(c), hour(c), bucket(16, c) or truncate(4, c) with the name"
                " of a column, or the name alone.",
                reason="layout_transform",
                subject=layout_field.column,
            )
    if any(not layout_field.has_valid_width for layout_field in layout_fields):
        raise ConfigurationError(
            f"The layout {', '.join(entries)} has a bucket or truncate of no width.",
            table=table_name,
            hint="Give it a width from 1 to 2147483647, such as bucket(16, account).",
            reason="layout_width",
        )
    if len(set(layout_fields)) < len(layout_fields):
        raise ConfigurationError(
            f"The layout {', '.join(entries)} has an entry twice.",
            table=table_name,
            hint="Name each column or transform of layout=[…] once.",
            reason="layout_twice",
        )
    return layout_fields


def require_distinct_keys(keys: Sequence[str], *, table_name: str) -> None:
    """Raise ConfigurationError if `keys` are a text or name a column twice.

    Keys are the columns that identify a row.
    """
    if isinstance(keys, str):
        raise ConfigurationError(
            f"keys={keys!r} is a text, not a list.",
            table=table_name,
            hint=f"Write keys=[{keys!r}].",
            reason="not_a_list",
            subject="keys",
        )
    if len(set(keys)) < len(keys):
        raise ConfigurationError(
            f"The keys {', '.join(map(repr, keys))} name a column twice.",
            table=table_name,
            hint="Name each column of keys=[…] once.",
            reason="keys_twice",
        )


def require_parquet(properties: Mapping[str, str], *, table_name: str) -> None:
    """Raise ConfigurationError if a table's properties request another format than Parquet, or another codec.

    PyIceberg writes Parquet only. Branchlake uses it for frames that are not Spark's, for files that a
    selection cuts through, and for records of an ingestion.
    """
    name = TableProperties.WRITE_FILE_FORMAT
    file_format = properties.get(name, TableProperties.WRITE_FILE_FORMAT_DEFAULT)
    if file_format.lower() != TableProperties.WRITE_FILE_FORMAT_DEFAULT:
        raise ConfigurationError(
            f"The table's property {name} is {file_format!r}, but branchlake writes Parquet files only.",
            table=table_name,
            hint=f"Set {name} to 'parquet'. Existing files of other formats can still be read.",
            reason="file_format",
        )
    name = TableProperties.PARQUET_COMPRESSION
    codec = properties.get(name, TableProperties.PARQUET_COMPRESSION_DEFAULT)
    if codec.lower() not in _CODECS and codec not in _NO_CODEC:
        raise ConfigurationError(
            f"The table's property {name} is {codec!r}, which is not a codec of Parquet files.",
            table=table_name,
            hint=f"Set {name} to one of {', '.join(_CODECS + _NO_CODEC)}.",
            reason="codec",
            subject=codec,
        )


def parse_exclusive_name(metadata: Mapping[str, Any], table_name: str) -> str | None:
    """Return the name in `table_metadata(exclusive=…)`, or None if the asset does not declare one.

    Raises ConfigurationError for an invalid name.
    """
    name = unwrap_metadata(metadata.get(AssetMetadata.EXCLUSIVE))
    if name is None or (isinstance(name, str) and _EXCLUSIVE_PATTERN.fullmatch(name)):
        return name
    raise ConfigurationError(
        f"{name!r} is not a valid name in table_metadata(exclusive=…).",
        table=table_name,
        hint="Use at most 64 letters, digits, '_' and '-'.",
        reason="exclusive_name",
        subject=repr(name),
    )


def unwrap_metadata(value: Any) -> Any:
    """Return the value of metadata without Dagster's MetadataValue, if it is wrapped in one.

    Dagster wraps metadata that is declared on a definition.
    """
    return getattr(value, "value", value)


def _parse_partition_expr(expression: Any, table_name: str) -> Mapping[str, str]:
    if expression is None:
        return {}
    if isinstance(expression, str) and expression.strip():
        return {"": expression}
    if isinstance(expression, Mapping) and all(
        column is not None and str(column).strip() for column in expression.values()
    ):
        return {str(dimension): str(column) for dimension, column in expression.items()}
    raise ConfigurationError(
        f"The partition column is declared as {expression!r}.",
        table=table_name,
        hint="Declare a column name or {dimension: column} in table_metadata(partition_by=…).",
        reason="partition_expr",
    )
