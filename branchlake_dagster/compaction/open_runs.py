"""The changes of open runs in a table.

A compaction skips a partition if an open run could not be published after its compaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from pyiceberg.table.snapshots import Snapshot

from branchlake_dagster.compaction.rewritten_files import RewrittenPartition
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.publication.snapshot_files import SnapshotFiles
from branchlake_dagster.publication.table_change import DeleteFile
from branchlake_dagster.runs.branch_owner import branch_filter
from branchlake_dagster.stored_names import ReferencePrefix
from branchlake_dagster.wording import CodedReason

_BRANCHES_AT_ONCE = 8


@dataclass(frozen=True)
class OpenRun:
    """The changes of one table on the branch of a run or of a live ingestion's batch.

    `removed_paths` are data files of `main` that the run removed, and `deletes` the delete files that it
    added. Both are empty if the run did not change the table. `is_comparable` is False if the current
    snapshot on the branch has no ancestor among the snapshots of `main`.
    """

    branch: str
    removed_paths: frozenset[str] = frozenset()
    deletes: tuple[DeleteFile, ...] = ()
    is_comparable: bool = True

    def find_obstacle(self, partition: RewrittenPartition) -> CodedReason | None:
        """Return why this partition must not be compacted before the run is published; None if it may be."""
        if not self.is_comparable:
            return CodedReason(f"the history on {self.branch} does not lead back to main", "run_unknown")
        if self.deletes:
            # Delete files cannot be replayed, so the run would be refused if anything else changed as well.
            return CodedReason(f"{self.branch} deleted rows by delete files", "run_wrote_delete_files")
        if any(file.path in self.removed_paths for file in partition.removed):
            return CodedReason(f"{self.branch} rewrote the same files", "run_rewrote_files")
        return None


def load_open_runs(
    client: NessieClient, tables: IcebergTableFormat, key: ContentKey, main_content: IcebergTable
) -> list[OpenRun]:
    """Load the changes of one table on all branches of open runs, also on branches without a change.

    Costs a request for each branch, and for each branch that changed the table, its metadata and the
    manifests of its own snapshots.
    """
    references = list(client.references(filter=branch_filter(ReferencePrefix.RUN)))
    main_snapshots = tables.open(key, main_content).table.metadata.snapshots
    main_ids = {snapshot.snapshot_id for snapshot in main_snapshots}
    files = SnapshotFiles()

    def load(branch: str) -> OpenRun | None:
        content = None
        with suppress(ReferenceNotFound):  # published or discarded meanwhile
            content = client.contents(branch, [key]).get(key)
            if not isinstance(content, IcebergTable) or content.content_id != main_content.content_id:
                return OpenRun(branch)
            return _load_open_run(branch, key, content, tables, main_ids, files)
        return None

    with ThreadPoolExecutor(_BRANCHES_AT_ONCE) as pool:
        return [run for run in pool.map(load, [reference.name for reference in references]) if run]


def _load_open_run(
    branch: str,
    key: ContentKey,
    content: IcebergTable,
    tables: IcebergTableFormat,
    main_ids: set[int],
    files: SnapshotFiles,
) -> OpenRun:
    if content.snapshot_id in main_ids:
        return OpenRun(branch)
    table = tables.open(key, content).table
    own_snapshots: list[Snapshot] = []
    snapshot = table.current_snapshot()
    while snapshot is not None and snapshot.snapshot_id not in main_ids:
        own_snapshots.append(snapshot)
        parent_id = snapshot.parent_snapshot_id
        snapshot = table.metadata.snapshot_by_id(parent_id) if parent_id is not None else None
    if snapshot is None and main_ids:
        return OpenRun(branch, is_comparable=False)
    touched = list(map(files.reader_for(table), own_snapshots))
    return OpenRun(
        branch,
        frozenset(file.path for one in touched for file in one.removed),
        tuple(delete_file for one in touched for delete_file in one.deletes),
    )


def find_run_obstacle(partition: RewrittenPartition, runs: Sequence[OpenRun]) -> CodedReason | None:
    """Return the first reason why an open run forbids the compaction of a partition; None without one."""
    return next(filter(None, (run.find_obstacle(partition) for run in runs)), None)
