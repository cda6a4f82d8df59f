"""Delays from sending records until readers see them, computed from the files of each snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from branchlake_dagster.bench.kafka_feed import BenchFeed
from branchlake_dagster.history.manifests import read_added_files
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import ContentKey, IcebergTable, Put

OFFSET_COLUMNS = ("partition_", "offset_")
"""The columns with the Kafka partition and offset of a row."""


def pack_offsets(rows: pa.Table) -> np.ndarray[Any, Any]:
    """Combine partition and offset of each row into one integer: `partition << 40 | offset`."""
    numbers: np.ndarray[Any, Any] = (
        rows[OFFSET_COLUMNS[0]].to_numpy().astype(np.int64) << 40 | rows[OFFSET_COLUMNS[1]].to_numpy()
    )
    return numbers


def measure_delays(
    table: Table, feed: BenchFeed, visible_at: Callable[[Snapshot], float], *, since: float = 0.0
) -> np.ndarray[Any, Any]:
    """Measure the seconds from sending each record until its snapshot was visible. Reads each file once.

    Args:
        table: The table with the columns `OFFSET_COLUMNS`.
        feed: The sender of the records.
        visible_at: Returns the time at which a snapshot became visible, in seconds since 1970.
        since: Ignore records that were sent before this time, in seconds since 1970.
    """
    delay_arrays = []
    for snapshot, file_rows in iter_added_rows(table, OFFSET_COLUMNS):
        numbers = pack_offsets(file_rows)
        partitions, offsets = numbers >> 40, numbers & ((1 << 40) - 1)
        for partition, send_times in enumerate(feed.send_times):
            record_times = np.array(send_times)[offsets[partitions == partition]]
            delay_arrays.append(visible_at(snapshot) - record_times[record_times >= since])
    return np.concatenate(delay_arrays) if delay_arrays else np.empty(0)


def iter_added_rows(table: Table, columns: Sequence[str]) -> Iterator[tuple[Snapshot, pa.Table]]:
    """Iterate over the data files of a table: the snapshot that added the file, and the file's rows."""
    for snapshot in table.metadata.snapshots:
        for added_file in read_added_files(table.io, snapshot):
            with table.io.new_input(added_file.file_path).open() as file:
                yield snapshot, pq.read_table(file, columns=[*columns])


def publication_times(lake: Lakehouse, identifier: tuple[str, ...]) -> Mapping[int, float]:
    """Return the publication time of each snapshot id of a table, in seconds since 1970."""
    key, times = ContentKey(identifier), dict[int, float]()
    for entry in lake.nessie.log(MAIN, fetch_operations=True):
        for operation in entry.operations:
            if (
                isinstance(operation, Put)
                and operation.key == key
                and isinstance(operation.content, IcebergTable)
            ):
                commit_time = entry.commit.commit_time
                if commit_time is not None:
                    times[operation.content.snapshot_id] = commit_time.timestamp()
    return times
