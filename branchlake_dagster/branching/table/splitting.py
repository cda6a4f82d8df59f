"""Files that hold rows inside and outside of a selection are divided, so that an engine can drop whole files.

Spark's `overwrite(expr)` refuses to replace a part of a file. Runs that write one window each make no such
file; runs of several windows, compactions and other people's SQL do, where windows do not begin on hours.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Mapping

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.manifest import DataFile
from pyiceberg.table import FileScanTask, Table

from branchlake_dagster.branching.table.partitioning import whole_files
from branchlake_dagster.branching.table.selection import Selection, Values, ends, to_iceberg
from branchlake_dagster.internals.pyiceberg import commit_compaction, data_files, rows_all_match


def divide(table: Table, selection: Selection, properties: Mapping[str, str]) -> Table:
    """The table, its rows the same, without files that the selection cuts through.

    Reads no manifest where the layout rules such files out, and no data file but those. The change is a
    snapshot of its own, a compaction (`replace`), because nobody's rows change by it.
    """
    schema = table.schema()
    if whole_files(selection, schema, table.specs()):
        return table
    cut = list(_cut(table, to_iceberg(selection, schema)))
    if not cut:
        return table
    commit = uuid.uuid4()
    numbers = itertools.count()
    transaction = table.transaction()
    producer = transaction.update_snapshot(snapshot_properties=dict(properties)).overwrite(commit_uuid=commit)
    for task in cut:
        producer.delete_data_file(task.file)
        for file in _pieces(table, task, selection, commit, numbers):
            producer.append_data_file(file)
    return commit_compaction(transaction, producer)


def _cut(table: Table, row_filter: BooleanExpression) -> Iterator[FileScanTask]:
    """The files of which some rows may match the filter and others may not."""
    for task in table.scan(row_filter=row_filter).plan_files():
        if task.delete_files or not rows_all_match(table.schema(), task.residual, task.file):
            yield task


def _pieces(
    table: Table, task: FileScanTask, selection: Selection, commit: uuid.UUID, numbers: itertools.count[int]
) -> Iterator[DataFile]:
    """The file's rows again, in files whose statistics say which side they are on."""
    rows = ArrowScan(
        table_metadata=table.metadata, io=table.io, projected_schema=table.schema(), row_filter=AlwaysTrue()
    ).to_table(tasks=[task])
    cells = _cells(rows, selection)
    for cell in pc.unique(cells):
        part = rows.filter(pc.equal(cells, cell))
        yield from data_files(table.metadata, part, table.io, commit=commit, numbers=numbers)


def _cells(rows: pa.Table, selection: Selection) -> pa.ChunkedArray:
    """A number for each row. Rows of one number stand on one side of every end and value of the selection.

    Inside and outside alone would not do: rows before and after a window are outside, but the bounds of a
    file that holds both enclose it.
    """
    found = pa.chunked_array([pa.repeat(pa.scalar(0, pa.int64()), rows.num_rows)])
    for name in selection.columns():
        column = rows.column(name)
        place, places = pc.cast(pc.is_valid(column), pa.int64()), 2
        for above in _edges(column, selection, name):
            place, places = pc.add(place, pc.cast(pc.fill_null(above, False), pa.int64())), places + 1
        found = pc.add(pc.multiply(found, places), place)
    return found


def _edges(column: pa.ChunkedArray, selection: Selection, name: str) -> Iterator[pa.ChunkedArray]:
    """For each place where a condition on the column changes: which rows are beyond it."""
    conditions = {one for part in selection.slices for one in part if one.column == name}
    for value in {v for one in conditions if isinstance(one, Values) for v in one.values}:
        yield pc.greater_equal(column, pa.scalar(value, column.type))
        yield pc.greater(column, pa.scalar(value, column.type))
    ranges = [one for one in conditions if not isinstance(one, Values)]
    for end in {end for one in ranges for end in ends(one, column.type)}:
        yield pc.greater_equal(column, end)
