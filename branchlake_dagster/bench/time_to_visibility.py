"""How long records took until readers had them: by the files of each snapshot, and when it was there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from branchlake_dagster.bench.kafka_feed import Feed
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import ContentKey, IcebergTable, Put

PLACE = ("partition_", "offset_")
"""The columns that say which record a row was."""


def packed(rows: pa.Table) -> np.ndarray[Any, Any]:
    """Partition and offset of each row as one number."""
    found: np.ndarray[Any, Any] = rows[PLACE[0]].to_numpy().astype(np.int64) << 40 | rows[PLACE[1]].to_numpy()
    return found


def delays(
    table: Table, feed: Feed, visible: Callable[[Snapshot], float], *, since: float = 0.0
) -> np.ndarray[Any, Any]:
    """Seconds from sending each record to when the snapshot with it was there; each file is read once.

    Of records that were sent at `since` or later, by the wall clock.
    """
    found = []
    for snapshot, read in added_rows(table, PLACE):
        rows = packed(read)
        partitions, offsets = rows >> 40, rows & ((1 << 40) - 1)
        for partition, sent in enumerate(feed.sent):
            at = np.array(sent)[offsets[partitions == partition]]
            found.append(visible(snapshot) - at[at >= since])
    return np.concatenate(found) if found else np.empty(0)


def added_rows(table: Table, columns: Sequence[str]) -> Iterator[tuple[Snapshot, pa.Table]]:
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


def publications(lake: Lakehouse, identifier: tuple[str, ...]) -> Mapping[int, float]:
    """By snapshot of a table the time of the commit that brought it to `main`, seconds since 1970."""
    key, found = ContentKey(identifier), dict[int, float]()
    for entry in lake.nessie.log(MAIN, fetch_operations=True):
        for one in entry.operations:
            if isinstance(one, Put) and one.key == key and isinstance(one.content, IcebergTable):
                at = entry.commit.commit_time
                if at is not None:
                    found[one.content.snapshot_id] = at.timestamp()
    return found
