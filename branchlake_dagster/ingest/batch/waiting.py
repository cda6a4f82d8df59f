"""Records whose dead letters wait to be put back, while a table is filled again."""

from __future__ import annotations

from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.table import Table
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.ingest.positions.offsets import OffsetRange, Ranges, TopicPartition
from branchlake_dagster.ingest.scanning.prepared import WAITS

_OF_RECORD = ("topic", "partition", "offset")


def with_waiting(records: DataFrame, dead_letters: Table | None, ranges: Ranges) -> DataFrame:
    """The records, with a column of the tables for which a letter of them waits; "" is one for any table.

    A table that is filled again may take by now what it could not then: its letter would add the row once
    more when it is put back. All letters that wait are read, and those of the ranges count.
    """
    if dead_letters is None:
        return records
    columns = (*_OF_RECORD, "incarnation", "table")
    held = dead_letters.scan(row_filter="reprocessed_in is null", selected_fields=columns).to_arrow()
    parts = [held.filter(_within(held, one, span)) for one, span in ranges.items()]
    letters = pa.concat_tables(parts) if parts else held.slice(0, 0)
    if not letters.num_rows:
        return records
    told = letters.select([*_OF_RECORD]).append_column(WAITS, pc.fill_null(letters["table"], ""))
    grouped = told.group_by([*_OF_RECORD]).aggregate([(WAITS, "list")])
    named = grouped.rename_columns([*(f"_{WAITS}_{one}" for one in _OF_RECORD), WAITS])
    waiting = records.sparkSession.createDataFrame(named)
    same = [F.col(f"__{one}") == F.col(f"_{WAITS}_{one}") for one in _OF_RECORD]
    joined = records.join(F.broadcast(waiting), same, "left")
    return joined.drop(*(f"_{WAITS}_{one}" for one in _OF_RECORD))


def _within(letters: pa.Table, one: TopicPartition, span: OffsetRange) -> pa.ChunkedArray:
    """Of which letters the records are in this range of a partition."""
    conditions = [
        pc.equal(letters["topic"], one.topic),
        pc.equal(letters["incarnation"], one.incarnation),
        pc.equal(letters["partition"], one.partition),
        pc.greater_equal(letters["offset"], span.start),
        pc.less(letters["offset"], span.end),
    ]
    return pc.fill_null(reduce(pc.and_, conditions), fill_value=False)
