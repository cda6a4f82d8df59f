"""Loads what steps read: the columns of inputs, stored rows, previews, and values that ops exchange.

Ops exchange values inside a graph-backed asset, and in op jobs. These values are not tables and are not
checked or published. They are stored like Dagster's default does, as pickle files in the instance's storage
folder, and a run that writes no asset creates no branch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
from dagster import FilesystemIOManager, InputContext, OutputContext, build_init_resource_context
from pyiceberg.manifest import DataFileContent, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyspark.sql import DataFrame

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.manifests import read_added_files
from branchlake_dagster.tables.errors import UnsupportedType
from branchlake_dagster.tables.selection import Selection, select_partitions
from branchlake_dagster.tables.specification import TableSpec, unwrap_metadata
from branchlake_dagster.wording import format_names

INPUT_COLUMNS = "columns"
"""The metadata key of an input's columns."""


def input_columns(metadata: Mapping[str, Any], existing: Sequence[str], *, table: str) -> list[str] | None:
    """Return the columns that an input's metadata names, in its order; None means all columns.

    `existing` are the columns of the table. Raises ConfigurationError if the table lacks a column, or if the
    metadata is not a list of at least one name without repetitions.
    """
    columns = unwrap_metadata(metadata.get(INPUT_COLUMNS))
    if columns is None:
        return None
    if isinstance(columns, str) or not isinstance(columns, Sequence) or not columns:
        raise ConfigurationError(
            f"The input's metadata has the columns {columns!r}, which is not a list of names.",
            table=table,
            hint='Write a list of column names: AssetIn(metadata={"columns": ["day", "price"]}).',
        )
    if missing := [str(column) for column in columns if column not in existing]:
        raise ConfigurationError(
            f"The input's metadata names {format_names('column', missing)}, which the table does not have.",
            table=table,
            hint=f"Name columns of the table: {', '.join(existing)}.",
        )
    if len({*columns}) < len(columns):
        raise ConfigurationError(
            f"The input's metadata names a column twice: {', '.join(columns)}.",
            table=table,
            hint="Name each column once.",
        )
    return list(columns)


def delivered_columns(columns: Sequence[str], existing: Sequence[str], frame: Sequence[str]) -> list[str]:
    """Return the columns to load from a frame of changes: the requested ones, and those about the change.

    `columns` are the requested columns, `existing` those of the table, `frame` those of the frame. A column
    about the change, such as `_change_type`, is one that the table lacks.
    """
    return [*columns, *(name for name in frame if name not in existing)]


def select_input_partitions(
    keys: Sequence[str], definition: dg.PartitionsDefinition[str], spec: TableSpec, schema: Schema
) -> Selection:
    """Select the rows of the given partitions in an input's table: exactly these, also if they are all.

    A table may have rows of no partition: those of deleted keys, or older rows of an adopted table. `keys`
    are different keys of `definition`, as Dagster maps them. `schema` is the schema of the table. Raises
    the errors of `select_partitions`.
    """
    map_window = None
    if isinstance(definition, dg.TimeWindowPartitionsDefinition) and (
        whole := _whole_window(keys, definition)
    ):
        # One range of time, without the computation of thousands of windows.
        keys, map_window = keys[:1], lambda *_: whole
    return select_partitions(
        keys,
        definition,
        spec.columns_by_dimension,
        schema=schema,
        table_name=spec.name,
        map_window=map_window,
    )


def _whole_window(keys: Sequence[str], definition: dg.TimeWindowPartitionsDefinition) -> dg.TimeWindow | None:
    """Return the window of all partitions together; None if `keys` are not all, or if some are excluded."""
    if definition.exclusions or len(keys) != definition.get_num_partitions():
        return None
    first, last = definition.get_first_partition_window(), definition.get_last_partition_window()
    return dg.TimeWindow(first.start, last.end) if first is not None and last is not None else None


def checks_whole_table(context: dg.InputContext) -> bool:
    """Return whether the input is the asset that a check without partitions checks.

    Such a check is about all rows of the table, also about those of no partition.
    """
    checks = context.step_context.assets_def
    if checks is None or checks.keys:
        return False
    specs = [spec for spec in checks.check_specs if spec.asset_key == context.asset_key]
    return bool(specs) and all(spec.partitions_def is None for spec in specs)


_STORED = "branchlake/stored_rows"


@dataclass(frozen=True)
class RowPartitions:
    """The partitions of rows: the asset's partitions definition, and the column of each dimension.

    A definition with one dimension has the empty string as its dimension.
    """

    definition: dg.PartitionsDefinition[str]
    columns_by_dimension: Mapping[str, str]


@dataclass(frozen=True)
class StoredRows:
    """A reference to stored rows: the rows of `selection` (None: all) in `table` on the reference `ref`.

    `open_frame` returns them as a lazy frame of the run's Spark session, which is opened only then.
    `partitions` is None if the rows belong to one partition, or if the asset has no partition columns.
    """

    table: Table
    selection: Selection | None
    ref: str
    open_frame: Callable[[], DataFrame]
    partitions: RowPartitions | None = None


def wants_stored_rows(kind: dg.DagsterType) -> bool:
    """Return whether an input of the Dagster type `kind` gets `StoredRows` instead of a frame.

    True only for inputs that are annotated `StoredRows`.
    """
    return _STORED in kind.metadata


# Dagster does not allow metadata on the input of a check, so the type carries it. For other IO managers, an
# input annotated `StoredRows` has the annotation of a Spark frame, and they may load one.
dg.make_python_type_usable_as_dagster_type(
    StoredRows,
    dg.DagsterType(
        lambda _, value: isinstance(value, StoredRows | DataFrame),
        "StoredRows",
        description="Stored rows of a table, or a Spark frame of them.",
        typing_type=DataFrame,
        metadata={_STORED: True},
    ),
)


_MAX_COLUMNS = 12
_MAX_CHARACTERS = 40
_log = logging.getLogger(__name__)


def format_preview(table: Table, *, rows: int) -> str | None:
    """Return at most `rows` rows and 12 columns as a Markdown table; None if no rows can be shown.

    None also if the rows cannot be read, which is logged. The rows are read from one file that the newest
    snapshot added: two small reads and the file's first page.
    """
    if not rows:
        return None
    try:
        first_rows = _first_rows(table, rows)
    except Exception as error:  # noqa: BLE001 - the write succeeded, so a missing preview is not an error
        _log.warning("Cannot read a preview of table %s: %s", ".".join(table.name()), error)
        return None
    return _format_markdown(first_rows) if first_rows is not None and first_rows.num_rows else None


def _first_rows(table: Table, rows: int) -> pa.Table | None:
    snapshot = table.current_snapshot()
    if snapshot is None:
        return None
    for file in read_added_files(table.io, snapshot):
        is_data = file.content == DataFileContent.DATA and file.file_format == FileFormat.PARQUET
        if is_data and file.record_count:
            with table.io.new_input(file.file_path).open() as stream:
                batch = next(pq.ParquetFile(stream).iter_batches(batch_size=rows))
            return _restore_column_names(pa.Table.from_batches([batch]), table.schema())
    return None


_FIELD_ID = b"PARQUET:field_id"


def _restore_column_names(rows: pa.Table, schema: Schema) -> pa.Table:
    """Return rows of a data file with the column names of the table, which are found by field ids.

    Iceberg writes names of other characters than letters, digits and `_` in escapes: `my_x20column`.
    """
    return rows.rename_columns(
        [
            (
                schema.find_column_name(int(field.metadata[_FIELD_ID]))
                if field.metadata and _FIELD_ID in field.metadata
                else None
            )
            or field.name
            for field in rows.schema
        ]
    )


def _format_markdown(rows: pa.Table) -> str:
    names = rows.column_names[:_MAX_COLUMNS]
    more = ["…"] if rows.num_columns > _MAX_COLUMNS else []
    lines = [[*map(_format_cell, names), *more], ["---"] * (len(names) + len(more))]
    lines += [[*(_format_cell(row[name]) for name in names), *more] for row in rows.select(names).to_pylist()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _format_cell(value: Any) -> str:
    cell = "" if value is None else str(value)
    cell = cell if len(cell) <= _MAX_CHARACTERS else f"{cell[: _MAX_CHARACTERS - 1]}…"
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def store_op_value(context: OutputContext, value: Any) -> None:
    """Store the value that an op returned, for the ops after it. Raises UnsupportedType for a Spark frame."""
    if isinstance(value, DataFrame):
        raise UnsupportedType(
            f"Op output {context.step_key}.{context.name} is a Spark frame. It belongs to the Spark session"
            " of its process, so another op cannot load it.",
            hint="Return a pandas, Polars or Arrow frame, or the name of a table. Or combine the two ops.",
        )
    _filesystem_manager(context).handle_output(context, value)


def load_op_value(context: InputContext) -> Any:
    """Load the value that the upstream op returned."""
    return _filesystem_manager(context).load_input(context)


def _filesystem_manager(context: InputContext | OutputContext) -> Any:
    instance = context.step_context.instance
    manager = FilesystemIOManager(base_dir=instance.storage_directory())
    return manager.create_io_manager(build_init_resource_context(instance=instance))
