"""Files that hold rows inside and outside of a selection are divided, so that an engine can drop whole files.

Spark's `overwrite(expr)` refuses to replace a part of a file. Runs that write one window each make no such
file; runs of several windows, compactions and other people's SQL do, where windows do not begin on hours.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Mapping

import pyarrow as pa
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, EqualTo
from pyiceberg.expressions.visitors import _StrictMetricsEvaluator, bind
from pyiceberg.io.pyarrow import (
    ArrowScan,
    _dataframe_to_data_files,
    _expression_to_complementary_pyarrow,
    expression_to_pyarrow,
)
from pyiceberg.manifest import DataFile
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update import AddSnapshotUpdate, TableUpdate

from branchlake_dagster.branching.layout import whole_files
from branchlake_dagster.branching.selection import Selection, Values, to_iceberg


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
    updates, requirements = producer._commit()
    transaction._apply(tuple(map(_as_compaction, updates)), requirements)
    return transaction.commit_transaction()


def _cut(table: Table, row_filter: BooleanExpression) -> Iterator[FileScanTask]:
    """The files of which some rows may match the filter and others may not."""
    for task in table.scan(row_filter=row_filter).plan_files():
        if task.delete_files or not _StrictMetricsEvaluator(table.schema(), task.residual).eval(task.file):
            yield task


def _pieces(
    table: Table, task: FileScanTask, selection: Selection, commit: uuid.UUID, numbers: itertools.count[int]
) -> Iterator[DataFile]:
    """The file's rows again, apart by what they have to do with the selection."""
    schema = table.schema()
    rows = ArrowScan(
        table_metadata=table.metadata, io=table.io, projected_schema=schema, row_filter=AlwaysTrue()
    ).to_table(tasks=[task])
    parts = [_bound(table, part) for part in _single(selection, table)]
    inside = (rows.filter(expression_to_pyarrow(part, schema)) for part in parts)
    whole = _bound(table, to_iceberg(selection, schema))
    outside = rows.filter(_expression_to_complementary_pyarrow(whole, schema))
    for piece in (*inside, outside):
        if piece.num_rows:
            yield from _written(table, piece, commit, numbers)


def _written(
    table: Table, rows: pa.Table, commit: uuid.UUID, numbers: itertools.count[int]
) -> Iterator[DataFile]:
    yield from _dataframe_to_data_files(
        table_metadata=table.metadata, df=rows, io=table.io, write_uuid=commit, counter=numbers
    )


def _bound(table: Table, expression: BooleanExpression) -> BooleanExpression:
    return bind(table.schema(), expression, case_sensitive=True)


def _single(selection: Selection, table: Table) -> Iterator[BooleanExpression]:
    """Filters that are the selection together, each of which file statistics can prove of a whole file.

    Of a file with several values of a column its bounds do not tell whether all of them are listed.
    """
    for part in selection.slices:
        ranges = Selection((tuple(one for one in part if not isinstance(one, Values)),))
        of_time = to_iceberg(ranges, table.schema()) if ranges.slices[0] else AlwaysTrue()
        lists = [one for one in part if isinstance(one, Values)]
        for values in itertools.product(*(one.values for one in lists)):
            found: BooleanExpression = of_time
            for one, value in zip(lists, values, strict=True):
                found = And(found, EqualTo(one.column, value))
            yield found


def _as_compaction(update: TableUpdate) -> TableUpdate:
    """PyIceberg's producers know no `replace`; publication takes it for what it is: the same rows."""
    if not isinstance(update, AddSnapshotUpdate) or update.snapshot.summary is None:
        return update
    summary = Summary(Operation.REPLACE, **update.snapshot.summary.additional_properties)
    return AddSnapshotUpdate(snapshot=update.snapshot.model_copy(update={"summary": summary}))
