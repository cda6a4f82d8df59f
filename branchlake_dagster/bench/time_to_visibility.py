"""How long records took until readers had them: by the files of each snapshot, and when it was there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from branchlake_dagster.bench.kafka_feed import BenchFeed
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import ContentKey, IcebergTable, Put

OFFSET_COLUMNS = ("partition_", "offset_")
"""The columns that say which record a row was."""


def pack_offsets(rows: pa.Table) -> np.ndarray[Any, Any]:
    """Partition and offset of each row as one number."""
    numbers: np.ndarray[Any, Any] = (
        rows[OFFSET_COLUMNS[0]].to_numpy().astype(np.int64) << 40 | rows[OFFSET_COLUMNS[1]].to_numpy()
    )
    return numbers


def measure_delays(
    table: Table, feed: BenchFeed, visible_at: Callable[[Snapshot], float], *, since: float = 0.0
) -> np.ndarray[Any, Any]:
    """Seconds from sending each record to when the snapshot with it was there; each file is read once.

    Of records that were sent at `since` or later, by the wall clock.
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
    """Each file of a table with the snapshot that brought it."""
    for snapshot in table.metadata.snapshots:
        added = [
            entry.data_file.file_path
            for manifest in snapshot.manifests(table.io)
            if manifest.added_snapshot_id == snapshot.snapshot_id
            for entry in manifest.fetch_manifest_entry(table.io)
            if entry.snapshot_id == snapshot.snapshot_id
        ]
        for path in added:
            with table.io.new_input(path).open() as file:
                yield snapshot, pq.read_table(file, columns=[*columns])


def publication_times(lake: Lakehouse, identifier: tuple[str, ...]) -> Mapping[int, float]:
    """By snapshot of a table the time of the commit that brought it to `main`, seconds since 1970."""
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
