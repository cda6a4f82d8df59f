"""Prove on Spark that rewritten files contain the same rows as the old files.

Only the old and new files of a compaction are read. Spark cannot select single files, and the same partitions
may also have large files that were not rewritten. So a state of the table without the large files is
committed to the compaction's branch, first with the old files and then with the new files. This changes only
metadata. The state to publish was loaded before, so these commits do not change it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from pyiceberg.manifest import DataFile, ManifestContent
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation

from branchlake_dagster.compaction.rewritten_files import prove_same_rows
from branchlake_dagster.compaction.row_checksums import RowChecksum, checksum_files
from branchlake_dagster.compaction.table_publication import RewrittenTable
from branchlake_dagster.history.manifests import read_live_files
from branchlake_dagster.internals.pyiceberg import apply_updates, build_snapshot
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import IcebergTable, Put
from branchlake_dagster.publication.replay import IcebergTableFormat, StagedState
from branchlake_dagster.publication.snapshot_files import convert_data_files
from branchlake_dagster.stored_names import LakeProperty, MaintenanceKind

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MAX_WRITTEN_VERSION = 2
"""The newest format version whose manifests PyIceberg writes. For newer tables, all files are read."""


class RowProof:
    """Compares the rows before and after one compaction by checksums.

    `session` is a Spark session on the compaction's branch.
    """

    def __init__(self, client: NessieClient, tables: IcebergTableFormat, session: SparkSession) -> None:
        self._client = client
        self._tables = tables
        self._session = session

    def prove(self, rewritten: RewrittenTable, predicate: str) -> dict[str, RowChecksum]:
        """Return the checksum of the new files of each partition, by partition.

        `predicate` selects the rewritten partitions in Spark's SQL.

        Reads every column of the old and of the new files once. Raises CompactionRowsDiffer if the rows of a
        partition differ.
        """
        partitions = {one.partition for one in rewritten.partitions}
        old_paths = {file.path for one in rewritten.partitions for file in one.removed}
        new_paths = {file.path for one in rewritten.partitions for file in one.added}
        # The second state replaces the first state on the branch, so either both states are stored or none.
        stores_states = self._has_old_schema(rewritten)
        before, after = (
            self._checksum(rewritten, content, partitions, paths, predicate, stores_states)
            for content, paths in ((rewritten.before, old_paths), (rewritten.after, new_paths))
        )
        return prove_same_rows(rewritten.key.name, rewritten.partitions, before, after)

    def _checksum(
        self,
        rewritten: RewrittenTable,
        content: IcebergTable,
        partitions: Collection[str],
        paths: Collection[str],
        predicate: str,
        stores_states: bool,
    ) -> dict[str, RowChecksum]:
        table = self._tables.open(rewritten.key, content).table
        snapshot_id = content.snapshot_id
        other_files = _list_other_files(table, partitions, paths)
        if other_files or stores_states:
            snapshot_id = self._store_narrow_state(rewritten, content, other_files)
        return checksum_files(
            self._session, rewritten.key, table.schema(), snapshot_id=snapshot_id, predicate=predicate
        )

    def _has_old_schema(self, rewritten: RewrittenTable) -> bool:
        """Return whether the table's columns have changed since the snapshot before the compaction.

        Spark reads a snapshot with the snapshot's own schema, so the old and new columns would differ. False
        for format versions whose manifests PyIceberg does not write.
        """
        metadata = self._tables.open(rewritten.key, rewritten.before).table.metadata
        snapshot = metadata.current_snapshot()
        if snapshot is None or metadata.format_version > _MAX_WRITTEN_VERSION:
            return False
        return snapshot.schema_id != metadata.current_schema_id

    def _store_narrow_state(
        self, rewritten: RewrittenTable, content: IcebergTable, other_files: list[DataFile]
    ) -> int:
        """Commit a state without `other_files` to the compaction's branch. Return its snapshot id."""
        key = rewritten.key
        state = self._tables.open(key, content)
        written_paths: list[str] = []
        updates = build_snapshot(
            state.table,
            added=[],
            removed=other_files,
            operation=Operation.DELETE,
            properties={LakeProperty.MAINTENANCE: MaintenanceKind.COMPACTION},
            written_paths=written_paths,
        )
        table, metadata = state.table, apply_updates(state.table.metadata, updates)
        narrow_table = Table(table.name(), metadata, table.metadata_location, table.io, table.catalog)
        narrow_content = self._tables.write(
            StagedState(state.base, narrow_table, written_paths), content.content_id
        )
        head = self._client.reference(rewritten.branch)
        self._client.commit(
            rewritten.branch,
            expected_hash=head.hash,
            operations=[Put(key, narrow_content)],
            message=f"Compare the compacted rows of {key.name}",
        )
        return narrow_content.snapshot_id


def _list_other_files(table: Table, partitions: Collection[str], paths: Collection[str]) -> list[DataFile]:
    """List the data files of `partitions` whose paths are not in `paths`; none for format version 3."""
    if table.metadata.format_version > _MAX_WRITTEN_VERSION:
        return []
    live_files = read_live_files(table.io, table.current_snapshot(), ManifestContent.DATA)
    return [
        file.handle
        for file in convert_data_files(table.metadata, live_files)
        if file.partition in partitions and file.path not in paths
    ]
