"""The first rows of what a run wrote, for Dagster's pages."""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.manifest import DataFileContent, FileFormat, ManifestEntryStatus
from pyiceberg.table import Table

from branchlake_dagster.internals.pyiceberg_manifests import entries_of

_COLUMNS = 12
_CHARACTERS = 40
_log = logging.getLogger(__name__)


def preview(table: Table, *, rows: int) -> str | None:
    """At most `rows` rows and 12 columns as a Markdown table; None where nothing was written.

    They are read from a file that the newest snapshot added: two small reads and the file's first page.
    """
    if not rows:
        return None
    try:
        found = _first_rows(table, rows)
    except Exception as error:  # noqa: BLE001 - the rows are written; that they cannot be shown is no failure
        _log.warning("No preview of %s: %s", ".".join(table.name()), error)
        return None
    return _markdown(found) if found is not None and found.num_rows else None


def _first_rows(table: Table, rows: int) -> pa.Table | None:
    snapshot = table.current_snapshot()
    if snapshot is None:
        return None
    for manifest in snapshot.manifests(table.io):
        if manifest.added_snapshot_id != snapshot.snapshot_id:
            continue
        with table.io.new_input(manifest.manifest_path).open() as stream:
            content = stream.read()
        for entry in entries_of(manifest, content):
            file = entry.data_file
            data = file.content == DataFileContent.DATA and file.file_format == FileFormat.PARQUET
            if data and entry.status == ManifestEntryStatus.ADDED and file.record_count:
                with table.io.new_input(file.file_path).open() as stream:
                    batch = next(pq.ParquetFile(stream).iter_batches(batch_size=rows))
                return pa.Table.from_batches([batch])
    return None


def _markdown(found: pa.Table) -> str:
    names = found.column_names[:_COLUMNS]
    more = ["…"] if found.num_columns > _COLUMNS else []
    lines = [[*map(_cell, names), *more], ["---"] * (len(names) + len(more))]
    lines += [[*(_cell(row[name]) for name in names), *more] for row in found.select(names).to_pylist()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    text = text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 1]}…"
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
