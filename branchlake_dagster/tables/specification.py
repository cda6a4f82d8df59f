"""The declaration of an asset's table: metadata on the asset, read back as a `TableSpec`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dagster import AssetKey
from pyiceberg.table import TableProperties

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.nessie.model import ContentKey
from branchlake_dagster.spark.session import quote_spark_path
from branchlake_dagster.stored_names import AssetMetadata

WriteMode = Literal["replace_partitions", "replace_table", "append", "upsert"]
Isolation = Literal["snapshot", "serializable"]
ColumnContract = Literal["evolve", "freeze"]


_EXCLUSIVE_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_INVALID_CHARACTERS = re.compile(r"[/@#?\x00-\x1f\x7f-\x9f]")


_TRANSFORM_PATTERN = re.compile(r"(year|month|day|hour)\((.+)\)|(bucket|truncate)\(\s*(\d+)\s*,\s*(.+)\)")
PARTITION_EXPR = "partition_expr"
"""Dagster's own name for it in its database IO managers."""


def table_metadata(
    *,
    write_mode: WriteMode | None = None,
    keys: Sequence[str] = (),
    partition_by: str | Mapping[str, str] | None = None,
    require_checks: bool | None = None,
    isolation: Isolation | None = None,
    preview_rows: int | None = None,
    layout: Sequence[str] = (),
    properties: Mapping[str, str] | None = None,
    exclusive: str | None = None,
    columns: ColumnContract | None = None,
) -> dict[str, Any]:
    """Asset metadata for `@dg.asset(metadata=…)`: how its table is laid out, written and judged.

    It is checked when the asset is written.

    Args:
        write_mode (Optional[Literal["replace_partitions", "replace_table", "append", "upsert"]]): How a
            materialisation changes the table. (default: `replace_partitions` when the asset is partitioned by
            a column, else `replace_table`)
        keys (Sequence[str]): The columns an `upsert` matches on.
        partition_by (Optional[str | Mapping[str, str]]): The column that holds the partition, or for
            multi-dimensional partitions `{dimension: column}`. A time window needs a timestamp or (if it is
            made of whole days) date column, others a string column equal to the key.
        require_checks (Optional[bool]): Whether a run that writes this table without any check is blocked.
            (default: the setting of that name)
        isolation (Optional[Literal["snapshot", "serializable"]]): With `serializable` a run is published only
            if nothing it read changed on `main` meanwhile; `snapshot` asks that only of what it wrote.
            (default: `snapshot`)
        preview_rows (Optional[int]): How many of the rows that a run wrote are shown on the asset's page; 0
            for data that must not stand in Dagster's database. (default: the setting of that name)
        layout (Sequence[str]): How the table's files are divided, beyond `partition_by`: columns, or
            Iceberg's transforms of them, `year(c)`, `month(c)`, `day(c)`, `hour(c)`, `bucket(16, c)`,
            `truncate(4, c)`. It counts when the table is made; one that is there is left as it is. (default:
            nothing)
        properties (Optional[Mapping[str, str]]): Iceberg's table properties, as
            `{"write.merge.mode": "merge-on-read"}`. They too are set when the table is made.
        exclusive (Optional[str]): A name of letters, digits, `_` and `-`. Of all runs that write assets with
            this name one works at a time, each from what the one before has published; one that was taken
            for dead cannot publish any more. (default: runs work side by side)
        columns (Optional[Literal["evolve", "freeze"]]): With `freeze` a run that would add, remove, rename or
            widen a column of the existing table is not published: a frame fails the step with ColumnsFrozen
            or SchemaMismatch before anything is written, a change by SQL blocks the run. (default: `evolve`)

    Returns:
        Dict[str, Any]: Metadata; add your own with `|`.

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
    metadata: dict[str, Any] = {}
    if write_mode is not None:
        metadata[AssetMetadata.WRITE_MODE] = write_mode
    if keys:
        metadata[AssetMetadata.KEYS] = list(keys)
    if partition_by is not None:
        metadata[PARTITION_EXPR] = partition_by if isinstance(partition_by, str) else dict(partition_by)
    if require_checks is not None:
        metadata[AssetMetadata.REQUIRE_CHECKS] = require_checks
    if isolation is not None:
        metadata[AssetMetadata.ISOLATION] = isolation
    if preview_rows is not None:
        metadata[AssetMetadata.PREVIEW_ROWS] = preview_rows
    if layout:
        metadata[AssetMetadata.LAYOUT] = list(layout)
    if properties:
        metadata[AssetMetadata.PROPERTIES] = dict(properties)
    if exclusive is not None:
        metadata[AssetMetadata.EXCLUSIVE] = exclusive
    if columns is not None:
        metadata[AssetMetadata.COLUMNS] = columns
    return metadata


@dataclass(frozen=True)
class LayoutField:
    """A part of a declared layout: a column, and Iceberg's name of a transform (`bucket[16]`); None: none."""

    column: str
    transform: str | None = None

    @classmethod
    def from_declaration(cls, declaration: str) -> LayoutField:
        """As `table_metadata` takes it. What looks like no transform is a column's name."""
        transform_match = _TRANSFORM_PATTERN.fullmatch(declaration.strip())
        if transform_match is None:
            return cls(declaration)
        time_transform, column, function, width, source = transform_match.groups()
        return (
            cls(column.strip(), time_transform)
            if time_transform
            else cls(source.strip(), f"{function}[{width}]")
        )


@dataclass(frozen=True)
class TableSpec:
    """Where an asset is stored and how a materialisation changes it.

    `identifier` is (namespace…, table). `columns_by_dimension` maps a partition dimension to its column;
    a one-dimensional partition has the empty string as its dimension. `layout` and `properties` are those
    of a table that is made. `frozen`: runs may not change the columns of the existing table.
    """

    identifier: tuple[str, ...]
    write_mode: WriteMode
    keys: tuple[str, ...] = ()
    columns_by_dimension: Mapping[str, str] = field(default_factory=dict)
    isolation: Isolation = "snapshot"
    layout: tuple[LayoutField, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    frozen: bool = False

    @property
    def name(self) -> str:
        """The dotted name without the catalogue, as Nessie's keys are written."""
        return format_table_name(self.identifier)

    @property
    def spark_name(self) -> str:
        """The name Spark SQL knows, catalogue included."""
        return f"nessie.{quote_spark_path(self.identifier)}"


def table_identifier(asset_key: AssetKey, default_namespace: str) -> tuple[str, ...]:
    """The table of an asset: its key path; a key without prefix goes to the default namespace.

    Raises ConfigurationError for a part that is no name: it would leave the warehouse's folder, or mean
    something to Nessie or to the engines (`table@branch`, `table#time`, a query in a path).
    """
    for part in asset_key.path:
        if part in ("", ".", "..") or _INVALID_CHARACTERS.search(part):
            raise ConfigurationError(
                f"Asset {asset_key.to_user_string()!r} has the key part {part!r}, which can name no table.",
                hint="It must not be empty, '.' or '..', nor hold '/', '@', '#', '?' or a control character.",
                reason="key_part",
                subject=part,
            )
    return tuple(asset_key.path) if len(asset_key.path) > 1 else (default_namespace, *asset_key.path)


def format_table_name(identifier: Sequence[str]) -> str:
    """The dotted name of an identifier, from which `ContentKey.from_path` reads it back."""
    return ContentKey(identifier).name


def parse_table_spec(
    asset_key: AssetKey, metadata: Mapping[str, Any], *, default_namespace: str, partitioned: bool
) -> TableSpec:
    """The spec of an asset from its metadata; raises ConfigurationError when that contradicts itself."""
    identifier = table_identifier(asset_key, default_namespace)
    table_name = format_table_name(identifier)
    expression = unwrap_metadata(metadata.get(PARTITION_EXPR))
    columns = _parse_partition_expr(expression, table_name)
    keys = tuple(unwrap_metadata(metadata.get(AssetMetadata.KEYS)) or ())
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
            f"Unknown value {contract!r} of columns.",
            table=table_name,
            hint=f"Use {' or '.join(get_args(ColumnContract))}.",
            reason="columns",
        )
    if mode == "upsert" and not keys:
        raise ConfigurationError(
            "An upsert needs keys.", table=table_name, hint="table_metadata(keys=[…])", reason="keys_missing"
        )
    if any("," in key for key in keys):
        raise ConfigurationError(
            f"The keys {', '.join(map(repr, keys))} hold a comma, which parts them in a snapshot's summary.",
            table=table_name,
            hint="Rename the column.",
            reason="comma_in_key",
        )
    if mode == "replace_partitions" and not columns:
        raise ConfigurationError(
            "Replacing partitions needs a partition column.",
            table=table_name,
            hint="table_metadata(partition_by=…)",
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
    layout, properties = (
        unwrap_metadata(metadata.get(AssetMetadata.LAYOUT)) or (),
        unwrap_metadata(metadata.get(AssetMetadata.PROPERTIES)) or {},
    )
    if isinstance(layout, str) or not all(isinstance(declaration, str) for declaration in layout):
        raise ConfigurationError(
            f"The layout is {layout!r}.",
            table=table_name,
            hint='It is a list, as layout=["day", "bucket(16, account)"].',
            reason="layout",
        )
    if not isinstance(properties, Mapping):
        raise ConfigurationError(
            f"The table's properties are {properties!r}.",
            table=table_name,
            hint="Give a dict.",
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
        tuple(LayoutField.from_declaration(declaration) for declaration in layout),
        table_properties,
        contract == "freeze",
    )


def require_parquet(properties: Mapping[str, str], *, table_name: str) -> None:
    """Raise ConfigurationError if a table's properties ask for data files of another format than Parquet.

    PyIceberg writes Parquet only, and this package writes with it: frames that are not Spark's, files that a
    selection cuts through, the records of an ingestion.
    """
    name = TableProperties.WRITE_FILE_FORMAT
    file_format = properties.get(name, TableProperties.WRITE_FILE_FORMAT_DEFAULT)
    if file_format.lower() != TableProperties.WRITE_FILE_FORMAT_DEFAULT:
        raise ConfigurationError(
            f"The table's property {name} is {file_format!r}, and branchlake writes Parquet files only.",
            table=table_name,
            hint=f"Set {name} to 'parquet'. Files of another format that the table has can still be read.",
            reason="file_format",
        )


def parse_exclusive_name(metadata: Mapping[str, Any], table_name: str) -> str | None:
    """The name under which an asset is exclusive; raises ConfigurationError for one that is none."""
    name = unwrap_metadata(metadata.get(AssetMetadata.EXCLUSIVE))
    if name is None or (isinstance(name, str) and _EXCLUSIVE_PATTERN.fullmatch(name)):
        return name
    raise ConfigurationError(
        f"{name!r} is no name for what is exclusive.",
        table=table_name,
        hint="Use letters, digits, '_' and '-', at most 64.",
        reason="exclusive_name",
        subject=repr(name),
    )


def unwrap_metadata(value: Any) -> Any:
    """Dagster wraps metadata given on a definition; the plain value is inside."""
    return getattr(value, "value", value)


def _parse_partition_expr(expression: Any, table_name: str) -> Mapping[str, str]:
    if expression is None:
        return {}
    if isinstance(expression, str):
        return {"": expression}
    if isinstance(expression, Mapping):
        return {str(dimension): str(column) for dimension, column in expression.items()}
    raise ConfigurationError(
        f"partition_expr is {expression!r}.",
        table=table_name,
        hint="A column or {dimension: column}.",
        reason="partition_expr",
    )
