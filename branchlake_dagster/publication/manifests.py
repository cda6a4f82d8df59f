"""Reading what a table's snapshots did from its metadata and manifests. No data file is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import unquote

from pyiceberg.conversions import from_bytes
from pyiceberg.manifest import DataFile, ManifestContent, ManifestEntryStatus
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.types import PrimitiveType

from branchlake_dagster.branching.provenance import PREFIX
from branchlake_dagster.publication.changes import Bounds, Column, File, Layout, Mode, Step, TableChange

_WRITE_MODE = f"{PREFIX}write_mode"
_KEYS = f"{PREFIX}keys"
_RUN = f"{PREFIX}run_id"
_MODES = {
    "append": Mode.APPEND,
    "replace_partitions": Mode.REPLACE_PARTITIONS,
    "upsert": Mode.UPSERT,
    "replace_table": Mode.REPLACE_TABLE,
}
_TOTALS = ("added-", "deleted-", "removed-", "total-", "changed-partition-count", "partitions.", "partition-")
"""Starts of the summary entries that a snapshot computes for itself."""


def layout(metadata: TableMetadata) -> Layout:
    """Columns and partition fields as they are now."""
    schema = metadata.schema()
    return Layout(
        columns=tuple(
            Column(field.field_id, field.name, str(field.field_type), field.required)
            for field in schema.fields
        ),
        spec=tuple(
            (
                schema.find_column_name(field.source_id) or str(field.source_id),
                str(field.transform),
                field.name,
            )
            for field in metadata.spec().fields
        ),
        highest_column_id=metadata.last_column_id,
    )


def change(before: Table | None, after: Table, *, files: bool = True) -> TableChange:
    """What was done to a table between two of its states; without `files` only layouts and snapshot ids.

    `before` None: everything since its creation.
    """
    old = before.metadata if before else None
    snapshots, complete = _since(old, after.metadata)
    steps = [
        _step(after, snapshot, before)
        if files
        else Step(snapshot.snapshot_id, Mode.UNKNOWN, run_id=_property(snapshot, _RUN))
        for snapshot in snapshots
    ]
    if not complete:
        steps.append(Step(0, Mode.UNKNOWN))
    was, now = (_properties(old) if old else {}), _properties(after.metadata)
    return TableChange(
        before=layout(old) if old else None,
        after=layout(after.metadata),
        steps=tuple(_own_undone(steps)),
        properties_set={key: value for key, value in now.items() if was.get(key) != value} if old else {},
        properties_removed=tuple(sorted(was.keys() - now.keys())),
        base_snapshot_id=old.current_snapshot_id if old else None,
    )


def _properties(metadata: TableMetadata) -> dict[str, str]:
    """The table's properties without what Iceberg's Java catalogue for Nessie notes there for itself."""
    return {key: value for key, value in metadata.properties.items() if not key.startswith("nessie.")}


def _since(before: TableMetadata | None, after: TableMetadata) -> tuple[list[Snapshot], bool]:
    """The snapshots after `before`'s current one, oldest first, and whether the chain leads back to it."""
    start = before.current_snapshot_id if before else None
    by_id = {snapshot.snapshot_id: snapshot for snapshot in after.snapshots}
    found: list[Snapshot] = []
    current = after.current_snapshot_id
    while current is not None and current != start:
        if (snapshot := by_id.get(current)) is None:
            return found[::-1], False
        found.append(snapshot)
        current = snapshot.parent_snapshot_id
    return found[::-1], current == start


def _property(snapshot: Snapshot, name: str) -> str | None:
    return snapshot.summary.additional_properties.get(name) if snapshot.summary else None


def _step(table: Table, snapshot: Snapshot, before: Table | None) -> Step:
    added: list[File] = []
    removed: list[File] = []
    mode: Mode | None = None
    default_spec = table.metadata.default_spec_id
    for manifest in snapshot.manifests(table.io):
        if manifest.added_snapshot_id != snapshot.snapshot_id:
            continue
        if manifest.content == ManifestContent.DELETES:
            mode = Mode.ROW_DELETES
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False):
            if entry.snapshot_id != snapshot.snapshot_id or entry.status == ManifestEntryStatus.EXISTING:
                continue
            if entry.data_file.spec_id != default_spec:
                mode = Mode.OLD_LAYOUT
            file = _file(entry.data_file, table.metadata)
            (added if entry.status == ManifestEntryStatus.ADDED else removed).append(file)
    summary = snapshot.summary.additional_properties if snapshot.summary else {}
    keys = tuple(name for name in summary.get(_KEYS, "").split(",") if name)
    return Step(
        snapshot_id=snapshot.snapshot_id,
        mode=mode or _mode(snapshot, removed, before),
        added=tuple(added),
        removed=tuple(removed),
        keys=keys,
        run_id=summary.get(_RUN),
        properties={key: value for key, value in summary.items() if not key.startswith(_TOTALS)},
    )


def _mode(snapshot: Snapshot, removed: list[File], before: Table | None) -> Mode:
    """The recorded write mode; without one, what the operation could have been at worst."""
    operation = snapshot.summary.operation if snapshot.summary else None
    if operation == Operation.REPLACE:
        return Mode.COMPACT
    recorded = _property(snapshot, _WRITE_MODE)
    if recorded in _MODES:
        return _MODES[recorded]
    if operation == Operation.APPEND and not removed:
        return Mode.APPEND
    if before and removed and live_paths(before) <= {file.path for file in removed}:
        return Mode.REPLACE_TABLE
    return Mode.REWRITE


def _own_undone(steps: list[Step]) -> Iterator[Step]:
    """An append that removes files judged by whose they are: a step's second attempt undoes its first."""
    own: set[str] = set()
    for step in steps:
        foreign = [file for file in step.removed if file.path not in own]
        own |= {file.path for file in step.added}
        yield Step(**{**vars(step), "mode": Mode.REWRITE}) if step.mode is Mode.APPEND and foreign else step


def live_paths(table: Table) -> set[str]:
    """The paths of the data files in the current snapshot."""
    snapshot = table.metadata.current_snapshot()
    if snapshot is None:
        return set()
    return {
        entry.data_file.file_path
        for manifest in snapshot.manifests(table.io)
        if manifest.content == ManifestContent.DATA
        for entry in manifest.fetch_manifest_entry(table.io)
    }


def _file(data_file: DataFile, metadata: TableMetadata) -> File:
    spec = metadata.specs()[data_file.spec_id]
    schema = metadata.schema()
    path = spec.partition_to_path(data_file.partition, schema) if spec.fields else ""
    return File(data_file.file_path, unquote(path), _bounds(data_file, schema), data_file)


def _bounds(data_file: DataFile, schema: Schema) -> Callable[[str], Bounds | None]:
    def of(column: str) -> Bounds | None:
        field = schema.find_field(column)
        low = (data_file.lower_bounds or {}).get(field.field_id)
        high = (data_file.upper_bounds or {}).get(field.field_id)
        nulls = (data_file.null_value_counts or {}).get(field.field_id, 0)
        if low is None or high is None or nulls or not isinstance(field.field_type, PrimitiveType):
            return None
        return from_bytes(field.field_type, low), from_bytes(field.field_type, high)

    return of
