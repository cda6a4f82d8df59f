"""What the IO manager reads: an input's columns, stored rows, previews, and values that ops exchange.

Values that go from op to op: inside a graph-backed asset, and in op jobs beside the assets.

They are no tables: nobody checks or publishes them, so they go where Dagster's own default puts them, into
pickle files in the instance's storage folder, and a run that writes no asset makes no branch.
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
from pyiceberg.manifest import DataFileContent, FileFormat, ManifestEntryStatus
from pyiceberg.table import Table
from pyspark.sql import DataFrame

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.pyiceberg_manifests import iter_entries
from branchlake_dagster.tables.errors import UnsupportedType
from branchlake_dagster.tables.selection import Selection
from branchlake_dagster.tables.specification import unwrap_metadata
from branchlake_dagster.wording import format_names

INPUT_COLUMNS = "columns"
"""Key in the metadata of an input."""


def input_columns(metadata: Mapping[str, Any], existing: Sequence[str], *, table: str) -> list[str] | None:
    """The columns that an input's metadata names, in its order; None if it names none, which means all.

    `existing` are the columns of the table. Raises ConfigurationError for a column that the table does not
    have, and for what is not a list of different names.
    """
    columns = unwrap_metadata(metadata.get(INPUT_COLUMNS))
    if columns is None:
        return None
    if isinstance(columns, str) or not isinstance(columns, Sequence) or not columns:
        raise ConfigurationError(
            f"The input's columns are {columns!r}.",
            table=table,
            hint='Write a list of names: AssetIn(metadata={"columns": ["day", "price"]}).',
        )
    if missing := [str(column) for column in columns if column not in existing]:
        raise ConfigurationError(
            f"The input names {format_names('column', missing)}, which the table does not have.",
            table=table,
            hint=f"It has {', '.join(existing)}.",
        )
    if len({*columns}) < len(columns):
        raise ConfigurationError(
            f"The input names a column twice: {', '.join(columns)}.", table=table, hint="Name it once."
        )
    return list(columns)


def delivered_columns(columns: Sequence[str], existing: Sequence[str], frame: Sequence[str]) -> list[str]:
    """The columns of a frame of changes: those asked for, and those that describe the change.

    `existing` are the columns of the table, `frame` those of the frame.
    """
    return [*columns, *(name for name in frame if name not in existing)]


_STORED = "branchlake/stored_rows"


@dataclass(frozen=True)
class RowPartitions:
    """How rows belong to an asset's partitions: its definition, and the column of each dimension.

    A definition of one dimension has the empty string as its dimension.
    """

    definition: dg.PartitionsDefinition[str]
    columns_by_dimension: Mapping[str, str]


@dataclass(frozen=True)
class StoredRows:
    """The rows of `selection` (None: all) in `table`, as it is on the reference `ref`.

    `open_frame` opens them in Spark: lazily read, in the run's session, which is opened for nothing else.
    `partitions` is None if the rows belong to one partition, or to an asset without partition columns.
    """

    table: Table
    selection: Selection | None
    ref: str
    open_frame: Callable[[], DataFrame]
    partitions: RowPartitions | None = None


def wants_stored_rows(kind: dg.DagsterType) -> bool:
    """Whether an input of this type does."""
    return _STORED in kind.metadata


# Dagster allows no metadata on the input of a check. To other IO managers an input annotated `StoredRows`
# looks as if it were annotated with a Spark frame, and they may give it one.
dg.make_python_type_usable_as_dagster_type(
    StoredRows,
    dg.DagsterType(
        lambda _, value: isinstance(value, StoredRows | DataFrame),
        "StoredRows",
        description="Rows where they are stored, or a Spark frame of them.",
        typing_type=DataFrame,
        metadata={_STORED: True},
    ),
)


_MAX_COLUMNS = 12
_MAX_CHARACTERS = 40
_log = logging.getLogger(__name__)


def format_preview(table: Table, *, rows: int) -> str | None:
    """At most `rows` rows and 12 columns as a Markdown table; None where nothing was written.

    They are read from a file that the newest snapshot added: two small reads and the file's first page.
    """
    if not rows:
        return None
    try:
        first_rows = _first_rows(table, rows)
    except Exception as error:  # noqa: BLE001 - the rows are written; that they cannot be shown is no failure
        _log.warning("No preview of %s: %s", ".".join(table.name()), error)
        return None
    return _format_markdown(first_rows) if first_rows is not None and first_rows.num_rows else None


def _first_rows(table: Table, rows: int) -> pa.Table | None:
    snapshot = table.current_snapshot()
    if snapshot is None:
        return None
    for manifest in snapshot.manifests(table.io):
        if manifest.added_snapshot_id != snapshot.snapshot_id:
            continue
        with table.io.new_input(manifest.manifest_path).open() as stream:
            content = stream.read()
        for entry in iter_entries(manifest, content):
            file = entry.data_file
            is_data = file.content == DataFileContent.DATA and file.file_format == FileFormat.PARQUET
            if is_data and entry.status == ManifestEntryStatus.ADDED and file.record_count:
                with table.io.new_input(file.file_path).open() as stream:
                    batch = next(pq.ParquetFile(stream).iter_batches(batch_size=rows))
                return pa.Table.from_batches([batch])
    return None


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
    """Keep what an op returned for the ops after it. Raises UnsupportedType for a Spark frame."""
    if isinstance(value, DataFrame):
        raise UnsupportedType(
            f"Op output {context.step_key}.{context.name} is a Spark frame: it is a query of its process's"
            " session and cannot be handed to another op.",
            hint="Return a pandas, Polars or Arrow frame, the name of a table, or make one op of the two.",
        )
    _filesystem_manager(context).handle_output(context, value)


def load_op_value(context: InputContext) -> Any:
    """What an op before this one returned."""
    return _filesystem_manager(context).load_input(context)


def _filesystem_manager(context: InputContext | OutputContext) -> Any:
    instance = context.step_context.instance
    manager = FilesystemIOManager(base_dir=instance.storage_directory())
    return manager.create_io_manager(build_init_resource_context(instance=instance))
