"""What a compaction asks of Spark, done in memory: files are rewritten, and rows compared."""

from __future__ import annotations

import itertools
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.table import FileScanTask, Table

from branchlake_dagster.compaction.compaction_plan import PlannedPartition
from branchlake_dagster.compaction.errors import RewriteFailed
from branchlake_dagster.compaction.row_checksums import RowChecksum
from branchlake_dagster.internals.pyiceberg import commit_compaction, write_data_files
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.model import ContentKey
from branchlake_dagster.runs.heartbeats import Heartbeat
from branchlake_dagster_tests.simulation.scheduler import Clock


@dataclass(frozen=True)
class SimulatedSession:
    """In place of a Spark session at a branch."""

    ref: str

    def stop(self) -> None:
        """End nothing."""


def checksum_in_memory(
    lake: Lakehouse, session: SimulatedSession, key: ContentKey, *_: object, snapshot_id: int, **__: object
) -> dict[str, RowChecksum]:
    """Return the checksum of each data file of a snapshot, as `checksum_files` does on Spark."""
    table = lake.catalog(session.ref).load_table(key.elements)
    checksums: dict[str, RowChecksum] = {}
    for task in table.scan(snapshot_id=snapshot_id).plan_files():
        total = RowChecksum()
        for row in read_rows(table, [task]).to_pylist():
            row_hash = zlib.crc32(repr(sorted(row.items())).encode())
            total += RowChecksum(1, row_hash, row_hash, row_hash)
        if total.rows:
            checksums[task.file.file_path] = total
    return checksums


def read_rows(table: Table, tasks: Sequence[FileScanTask]) -> Any:
    """Return the rows of data files that are not deleted, as an Arrow table."""
    return ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue()).to_table(tasks)


class SimulatedRewrite:
    """In place of Spark's procedure. It sometimes rewrites nothing, and reports no error."""

    def __init__(self, lake: Lakehouse, random: Random, *, idle_share: float) -> None:
        self._lake = lake
        self._random = random
        self._idle_share = idle_share

    def __call__(
        self,
        session: SimulatedSession,
        key: ContentKey,
        unit: Sequence[PlannedPartition],
        *_: object,
    ) -> None:
        """Write the live rows of each partition to one file, in one snapshot of the branch."""
        if self._random.random() < self._idle_share:
            return
        partitions = {planned.measured.partition for planned in unit}
        table = self._lake.catalog(session.ref).load_table(key.elements)
        transaction, commit_id, numbers = table.transaction(), uuid.uuid4(), itertools.count()
        producer = transaction.update_snapshot().overwrite(commit_uuid=commit_id)
        tasks = sorted(table.scan().plan_files(), key=_partition_name)
        for name, group in itertools.groupby(tasks, key=_partition_name):
            members = list(group)
            if name not in partitions:
                continue
            rows = read_rows(table, members)
            for task in members:
                producer.delete_data_file(task.file)
            new_files = write_data_files(table.metadata, rows, table.io, commit=commit_id, numbers=numbers)
            for file in new_files if rows.num_rows else ():
                producer.append_data_file(file)
        try:
            commit_compaction(transaction, producer)
        except (CommitFailedException, CommitStateUnknownException) as error:
            raise RewriteFailed(str(error), table=key.name) from error


def _partition_name(task: FileScanTask) -> str:
    partition = task.file.partition
    return f"day={partition[0]}" if len(partition) else ""


class SimulatedHeartbeats:
    """The heartbeats of living writers: their files differ at each reading."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._beats: dict[str, Heartbeat] = {}
        self._readings = 0

    def all(self) -> Sequence[Heartbeat]:
        """Return the heartbeats of all writers."""
        self._readings += 1
        now = self._clock.now()
        return [replace(beat, written_at=now, text=f"{self._readings}") for beat in self._beats.values()]

    def remove(self, branch: str, writer: str) -> None:
        """Remove the file of a dead writer."""
        self._beats.pop(branch, None)

    def begin(self, branch: str) -> None:
        """Let a writer of a branch live from now on."""
        self._beats[branch] = Heartbeat(branch, f"w-{branch}", "r", started_at=self._clock.now())

    def end(self, branch: str) -> None:
        """Let the writer of a branch end."""
        self._beats.pop(branch, None)
