"""The commits of a run's branch: the snapshots that they added to tables, and whether the run made them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot

from branchlake_dagster.history.capture import snapshots_between
from branchlake_dagster.nessie.model import Content, ContentKey, Delete, IcebergTable, LogEntry, Put
from branchlake_dagster.stored_names import LakeProperty

ReadMetadata = Callable[[str], TableMetadata | None]
"""A function that reads the table metadata at a location. It returns None if the file is missing."""


def iter_put_tables(entry: LogEntry) -> Iterator[tuple[ContentKey, IcebergTable]]:
    """Iterate over the tables that a commit put, with their keys.

    The log entry must include its operations.
    """
    for operation in entry.operations:
        if isinstance(operation, Put) and isinstance(operation.content, IcebergTable):
            yield operation.key, operation.content


def newest_metadata_locations(newest_first: Iterable[LogEntry]) -> dict[str, str]:
    """Return the newest metadata location of each table that the commits put, by content id.

    The commits must be in order, newest first.
    """
    locations: dict[str, str] = {}
    for entry in newest_first:
        for _, table in iter_put_tables(entry):
            locations.setdefault(table.content_id or "", table.metadata_location)
    return locations


def iter_unchanged_contents(
    newest_first: Iterable[LogEntry], changed_keys: Collection[ContentKey]
) -> Iterator[Content]:
    """Iterate over the contents that the commits changed, but that are the same at the base and at the head.

    Such are a table that was renamed and renamed back, and one that a repeated step restored. `changed_keys`
    are the keys whose contents differ.
    """
    seen_keys = set(changed_keys)
    for entry in newest_first:
        for operation in entry.operations:
            if isinstance(operation, Put | Delete) and operation.key not in seen_keys:
                seen_keys.add(operation.key)
                if isinstance(operation, Put):
                    yield operation.content


def find_added_snapshots(
    content: IcebergTable,
    snapshots_before: Mapping[str, int],
    read_metadata: ReadMetadata,
    newest_locations: Mapping[str, str],
) -> list[Snapshot] | None:
    """Find the snapshots that a commit added to one table, newest first. None if they can no longer be found.

    `content` is the table as the commit put it. `snapshots_before` maps content ids to the snapshot ids
    before the commit. The search walks from the current snapshot back to that snapshot. A rollback makes an
    older snapshot current, with a smaller sequence number, and adds no snapshots.

    Cost: reads one file, or none if the snapshot stayed the same. Spark may delete old metadata files
    (`write.metadata.delete-after-commit.enabled`). Then the file at the table's location in
    `newest_locations` is read instead.
    """
    previous_id = snapshots_before.get(content.content_id or "")
    if content.snapshot_id == previous_id:
        return []
    content_id = content.content_id or ""
    metadata = read_metadata(content.metadata_location) or read_metadata(newest_locations[content_id])
    if metadata is None or metadata.snapshot_by_id(content.snapshot_id) is None:
        return None if content.snapshot_id > 0 else []
    snapshots, _ = snapshots_between(metadata, previous_id, content.snapshot_id)
    previous_snapshot = metadata.snapshot_by_id(previous_id) if previous_id is not None else None
    previous_number = (previous_snapshot.sequence_number or 0) if previous_snapshot else 0
    return [
        snapshot
        for snapshot in reversed(snapshots)
        if not previous_number or (snapshot.sequence_number or 0) > previous_number
    ]


_SPARK_APPLICATION = "spark.app.id"
"""The entry of a snapshot's summary in which Spark records the id of its application."""
_APPLICATION_OF_COMMIT = "app-id"
"""The commit property in which Iceberg's Java client records the id of the Spark application."""
_ADDED_FILES = ("added-data-files", "added-delete-files")
"""Summary entries of snapshots that add files, such as row-level deletes that add delete files."""


def find_deleting_application(snapshot: Snapshot) -> str | None:
    """Return the id of the Spark application that deleted whole files without naming its run.

    Spark runs TRUNCATE, and DELETE of whole files, as a change of the metadata alone. These snapshots lack
    the session's snapshot properties. Returns None for snapshots that add files, also delete files.
    """
    summary = snapshot.summary
    if summary is None or summary.operation is not Operation.DELETE:
        return None
    entries = summary.additional_properties
    if any(name.startswith(LakeProperty.PREFIX) or name in _ADDED_FILES for name in entries):
        return None
    return entries.get(_SPARK_APPLICATION)


def find_committing_application(entry: LogEntry) -> str | None:
    """Return the id of the Spark application that made a commit; None if another client made it."""
    return entry.commit.properties.get(_APPLICATION_OF_COMMIT)


_CLIENT_PROPERTY = "application-type"
"""The commit property of Iceberg's Java client, which cannot attach properties of its caller."""


@dataclass(frozen=True)
class BranchCommits:
    """The commits of a run's branch since its base, and the runs that may have made them.

    Args:
        branch (str): The branch's name.
        base_hash (str): The commit of `main` that the branch started from.
        base_snapshots (Mapping[str, int]): Snapshot ids at the base, by content id, of the tables that the
            commits changed.
        entries (Sequence[LogEntry]): The commits after the base, newest first, with their operations.
        recorded_heads (Collection[str]): The hashes that the runs recorded after their writes.
        run_ids (Collection[str]): The runs that worked on the branch.
        applications (Collection[str]): The ids of the Spark applications that the runs recorded.
    """

    branch: str
    base_hash: str
    base_snapshots: Mapping[str, int]
    entries: Sequence[LogEntry]
    recorded_heads: Collection[str]
    run_ids: Collection[str]
    applications: Collection[str] = ()

    @cached_property
    def newest_locations(self) -> dict[str, str]:
        """The newest metadata location of each table that the commits put, by content id."""
        return newest_metadata_locations(self.entries)

    def find_objection(self, read_metadata: ReadMetadata) -> str | None:
        """Return why the branch is not exactly what its runs wrote, as part of a sentence; None if it is.

        Three conditions must hold:

        1. The branch contains every recorded head. Otherwise it was set back, or Nessie was restored from an
           older copy.
        2. One of the runs made every commit: the commit's properties name the run or, for Spark, the
           summaries of the added snapshots do. A delete of whole files by Spark names only the Spark
           application, so this must be an application that one of the runs recorded.
        3. The newest commit was recorded. No check has seen a later commit.

        `read_metadata` is called only for Spark commits that add a snapshot. A Spark commit without a
        snapshot, such as ALTER TABLE, does not name a run and is accepted.
        """
        hashes = {entry.commit.hash for entry in self.entries}
        if lost_heads := sorted(set(self.recorded_heads) - hashes - {self.base_hash}):
            return (
                f"branch {self.branch} no longer contains commit {lost_heads[0][:16]} that the run wrote:"
                " the branch was set back, or Nessie was restored from an older copy"
            )
        if (foreign_commit := self._find_foreign_commit(read_metadata)) is not None:
            return (
                f"{self._format_commit(foreign_commit)}, which the run did not make:"
                " another writer changed the branch"
            )
        if self.entries and self.entries[0].commit.hash not in self.recorded_heads:
            return f"{self._format_commit(self.entries[0])}, made after the last commit that the run recorded"
        return None

    def _find_foreign_commit(self, read_metadata: ReadMetadata) -> LogEntry | None:
        """Return the oldest commit after the base that none of the runs made; None if there is none.

        `read_metadata` is called only for Spark commits that add a snapshot (see `find_objection`).
        """
        snapshots, newest = dict(self.base_snapshots), self.newest_locations
        for entry in reversed(self.entries):
            properties = entry.commit.properties
            if LakeProperty.RUN_ID in properties:
                is_own = properties[LakeProperty.RUN_ID] in self.run_ids
            else:
                snapshots_by_table = (
                    find_added_snapshots(table, snapshots, read_metadata, newest)
                    for _, table in iter_put_tables(entry)
                )
                is_own = properties.get(_CLIENT_PROPERTY) == "iceberg" and all(
                    new_snapshots is not None and all(map(self._is_own_snapshot, new_snapshots))
                    for new_snapshots in snapshots_by_table
                )
            if not is_own:
                return entry
            snapshots |= {table.content_id or "": table.snapshot_id for _, table in iter_put_tables(entry)}
        return None

    def _is_own_snapshot(self, snapshot: Snapshot) -> bool:
        """Return whether one of the runs made the snapshot, or its operation `replace` changes no rows.

        Spark's procedures, such as rewrite_data_files, ignore the session's snapshot properties. So do its
        deletes of whole files: the run's Spark application must have made them.
        """
        summary = snapshot.summary
        if summary is None:
            return False
        return (
            summary.operation is Operation.REPLACE
            or summary.additional_properties.get(LakeProperty.RUN_ID) in self.run_ids
            or find_deleting_application(snapshot) in self.applications
        )

    def _format_commit(self, entry: LogEntry) -> str:
        commit = entry.commit
        author = f" by {commit.author}" if commit.author else ""
        return f"branch {self.branch} contains commit {commit.hash[:16]}{author} ({commit.message})"
