"""Find the snapshots that a commit on a Nessie branch added to its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from branchlake_dagster.history.capture import snapshots_between
from branchlake_dagster.nessie.model import ContentKey, IcebergTable, LogEntry, Put

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
    """Return the newest metadata location of each table that the commits put, by content id."""
    locations: dict[str, str] = {}
    for entry in newest_first:
        for _, table in iter_put_tables(entry):
            locations.setdefault(table.content_id or "", table.metadata_location)
    return locations


def find_added_snapshots(
    content: IcebergTable,
    snapshots_before: Mapping[str, int],
    read_metadata: ReadMetadata,
    newest_locations: Mapping[str, str],
) -> list[Snapshot] | None:
    """Find the snapshots that a commit added to one table, newest first. None if they can no longer be found.

    `content` is the table as the commit put it. `snapshots_before` maps content ids to the snapshot ids
    before the commit. The search walks from the current snapshot back to the one before the commit. A
    rollback ends at an older snapshot, with a smaller sequence number, and adds no snapshots.

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
