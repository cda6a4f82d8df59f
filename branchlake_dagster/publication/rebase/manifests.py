"""Reading what a table's snapshots did from its metadata and manifests. No data file is opened."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from urllib.parse import unquote

from pyiceberg.conversions import from_bytes
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestEntryStatus
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.types import PrimitiveType

from branchlake_dagster.branching.consuming.positions import CONSUMED
from branchlake_dagster.branching.table.provenance import PREFIX
from branchlake_dagster.branching.table.replaced import Replaced, from_text
from branchlake_dagster.changes.summary import OFFSETS, REPROCESSED
from branchlake_dagster.publication.rebase import file_bounds
from branchlake_dagster.publication.rebase.changes import (
    Bounds,
    Column,
    DeleteFile,
    File,
    Layout,
    Mode,
    SnapshotChange,
    TableChange,
)

_WRITE_MODE = f"{PREFIX}write_mode"
_KEYS = f"{PREFIX}keys"
_RUN = f"{PREFIX}run_id"
_REPLACED = f"{PREFIX}replaced"
_PARTITION = f"{PREFIX}partition"
_MODES = {
    "append": Mode.APPEND,
    "replace_partitions": Mode.REPLACE_PARTITIONS,
    "upsert": Mode.UPSERT,
    "replace_table": Mode.REPLACE_TABLE,
}
_DATA_PATH = 2147483546
"""The field id of `file_path` in files of position deletes."""
REPLAYED_FROM = f"{PREFIX}replayed_from"
"""In a replayed snapshot's summary: the id of the snapshot on the run's branch."""

_TOTALS = ("added-", "deleted-", "removed-", "total-", "changed-partition-count", "partitions.", "partition-")
"""Starts of the summary entries that a snapshot computes for itself."""


def layout(metadata: TableMetadata) -> Layout:
    """Columns, partition fields and the rest of the metadata as they are now."""
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
        schema=schema.model_dump_json(exclude={"schema_id"}),
        others=(
            ("sort order", str(metadata.sort_order().fields)),
            ("location", metadata.location),
            ("identity", str(metadata.table_uuid)),
            ("tags and branches", _references(metadata)),
            ("statistics", _statistics(metadata)),
        ),
        format_version=metadata.format_version,
    )


def _references(metadata: TableMetadata) -> str:
    """The table's own tags and branches; of `main`, which the first commit makes, only how long it keeps."""
    found = {
        name: ref.model_dump(exclude={"snapshot_id"} if name == MAIN_BRANCH else set(), exclude_none=True)
        for name, ref in metadata.refs.items()
    }
    if len(found.get(MAIN_BRANCH, {})) == 1:
        del found[MAIN_BRANCH]  # it says only that it is a branch
    return json.dumps(found, sort_keys=True, default=str)


def _statistics(metadata: TableMetadata) -> str:
    files = [*metadata.statistics, *metadata.partition_statistics]
    return json.dumps(sorted((one.snapshot_id, one.statistics_path) for one in files))


def change(before: Table | None, after: Table, *, files: bool = True) -> TableChange:
    """What was done to a table between two of its states; without `files` only layouts and snapshot ids.

    `before` None: everything since its creation.
    """
    old = before.metadata if before else None
    snapshots, complete = _since(old, after.metadata)
    read = _Files(after.metadata)
    steps = [
        _step(after, snapshot, before, read)
        if files
        else SnapshotChange(
            snapshot.snapshot_id, Mode.UNKNOWN, run_id=_property(snapshot, _RUN), origin=_origin(snapshot)
        )
        for snapshot in snapshots
    ]
    if not complete:
        steps.append(SnapshotChange(0, Mode.UNKNOWN))
    was, now = (_properties(old) if old else {}), _properties(after.metadata)
    return TableChange(
        before=layout(old) if old else None,
        after=layout(after.metadata),
        steps=tuple(_own_undone(steps)),
        properties_set={
            key: value
            for key, value in now.items()
            # Of a new table only what its makers must not both have done: consumed the same change, or read
            # the same offsets.
            if was.get(key) != value and (old or key.startswith((CONSUMED, OFFSETS, REPROCESSED)))
        },
        properties_removed=tuple(sorted(was.keys() - now.keys())),
        base_snapshot_id=old.current_snapshot_id if old else None,
        expired=_expired(old, after.metadata) if old else 0,
    )


def _expired(before: TableMetadata, after: TableMetadata) -> int:
    """How many of the snapshots of before are gone."""
    last = len(before.snapshots) - 1
    # Snapshots are added at the end: where the last one stands as it stood, none before it was taken out.
    if last < len(after.snapshots) and (
        last < 0 or after.snapshots[last].snapshot_id == before.snapshots[last].snapshot_id
    ):
        return 0
    return len({one.snapshot_id for one in before.snapshots} - {one.snapshot_id for one in after.snapshots})


def _properties(metadata: TableMetadata) -> dict[str, str]:
    """The table's properties without what Iceberg's Java catalogue for Nessie notes there for itself."""
    return {key: value for key, value in metadata.properties.items() if not key.startswith("nessie.")}


def _since(before: TableMetadata | None, after: TableMetadata) -> tuple[list[Snapshot], bool]:
    """The snapshots after `before`'s current one, oldest first, and whether the chain leads back to it."""
    start = before.current_snapshot_id if before else None
    found: list[Snapshot] = []
    current = after.current_snapshot_id
    # From the end, where the new ones are: a table with a long history is not gone through for two snapshots.
    for snapshot in reversed(after.snapshots):
        if current is None or current == start:
            break
        if snapshot.snapshot_id == current:
            found.append(snapshot)
            current = snapshot.parent_snapshot_id
    return found[::-1], current == start


def _origin(snapshot: Snapshot) -> int | None:
    told = _property(snapshot, REPLAYED_FROM) or ""
    return int(told) if told.isdigit() else None


def _property(snapshot: Snapshot, name: str) -> str | None:
    return snapshot.summary.additional_properties.get(name) if snapshot.summary else None


def _step(table: Table, snapshot: Snapshot, before: Table | None, files: _Files) -> SnapshotChange:
    added: list[File] = []
    removed: list[File] = []
    deletes: list[DeleteFile] = []
    mode = Mode.COMPACT if _operation(snapshot) == Operation.REPLACE else None
    default_spec = table.metadata.default_spec_id
    for manifest in snapshot.manifests(table.io):
        if manifest.added_snapshot_id != snapshot.snapshot_id:
            continue
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False):
            if entry.snapshot_id != snapshot.snapshot_id or entry.status == ManifestEntryStatus.EXISTING:
                continue
            if entry.data_file.spec_id != default_spec:
                mode = Mode.OLD_LAYOUT
            new = entry.status == ManifestEntryStatus.ADDED
            if entry.data_file.content == DataFileContent.DATA:
                (added if new else removed).append(files.data(entry.data_file))
            elif new:
                # One that is taken out is not kept: where it stays, it has nothing left to delete.
                deletes.append(files.deletes(entry.data_file))
                vector = entry.data_file.file_format == FileFormat.PUFFIN
                mode = mode or (Mode.DELETION_VECTORS if vector else Mode.ROW_DELETES)
    summary = snapshot.summary.additional_properties if snapshot.summary else {}
    keys = tuple(name for name in summary.get(_KEYS, "").split(",") if name)
    mode = mode or _mode(snapshot, removed, before)
    record = summary.get(_REPLACED) if mode is Mode.REPLACE_PARTITIONS else None
    return SnapshotChange(
        snapshot_id=snapshot.snapshot_id,
        mode=mode,
        added=tuple(added),
        removed=tuple(removed),
        keys=keys,
        run_id=summary.get(_RUN),
        properties={key: value for key, value in summary.items() if not key.startswith(_TOTALS)},
        origin=_origin(snapshot),
        deletes=tuple(deletes),
        recorded=from_text(record) if record is not None else None,
        named=tuple(name for name in summary.get(_PARTITION, "").split(",") if name),
    )


def _operation(snapshot: Snapshot) -> Operation | None:
    return snapshot.summary.operation if snapshot.summary else None


def _mode(snapshot: Snapshot, removed: list[File], before: Table | None) -> Mode:
    """The recorded write mode; without one, what the operation could have been at worst."""
    recorded = _property(snapshot, _WRITE_MODE)
    if recorded in _MODES:
        return _MODES[recorded]
    if _operation(snapshot) == Operation.APPEND and not removed:
        return Mode.APPEND
    if before and removed and live_paths(before) <= {file.path for file in removed}:
        return Mode.REPLACE_TABLE
    return Mode.REWRITE


def _own_undone(steps: list[SnapshotChange]) -> Iterator[SnapshotChange]:
    """An append that removes files judged by whose they are: a step's second attempt undoes its first."""
    own: set[str] = set()
    for step in steps:
        foreign = [file for file in step.removed if file.path not in own]
        own |= {file.path for file in step.added}
        yield replace(step, mode=Mode.REWRITE) if step.mode is Mode.APPEND and foreign else step


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


class _Files:
    """The files of one table as plain values; predicates are bound to its columns once, not per file."""

    def __init__(self, metadata: TableMetadata) -> None:
        self._schema = metadata.schema()
        self._specs = metadata.specs()
        self._rows: dict[Replaced, Callable[[DataFile], bool]] = {}
        self._partitions: dict[tuple[Replaced, int], Callable[[DataFile], bool]] = {}
        self._known: dict[tuple[Replaced, int, str], bool] = {}

    def data(self, file: DataFile) -> File:
        """A data file."""

        def may_hold(predicate: Replaced) -> bool:
            return self._partition(predicate, file, path) and self._row(predicate)(file)

        path = self._path(file)
        return File(
            file.file_path,
            path,
            _bounds(file, self._schema),
            file,
            may_hold,
            file.record_count,
        )

    def deletes(self, file: DataFile) -> DeleteFile:
        """A file of row-level deletes."""

        def may_hold(predicate: Replaced) -> bool:
            return everywhere or self._partition(predicate, file, path)

        path = self._path(file)
        equality = file.content == DataFileContent.EQUALITY_DELETES
        everywhere = equality and not self._specs[file.spec_id].fields
        return DeleteFile(
            file.file_path,
            path,
            None if equality else _data_paths(file),
            everywhere,
            may_hold,
        )

    def _path(self, file: DataFile) -> str:
        spec = self._specs[file.spec_id]
        try:
            return unquote(spec.partition_to_path(file.partition, self._schema)) if spec.fields else ""
        except (ValueError, KeyError):  # an older spec of a column that has been dropped since
            return str(file.partition)

    def _partition(self, predicate: Replaced, file: DataFile, path: str) -> bool:
        """Asked once per partition: a thousand files of one day are of one day."""
        one = predicate, file.spec_id, path
        if one not in self._known:
            key = predicate, file.spec_id
            if key not in self._partitions:
                spec = self._specs[file.spec_id]
                self._partitions[key] = file_bounds.in_partition(predicate, self._schema, spec)
            self._known[one] = self._partitions[key](file)
        return self._known[one]

    def _row(self, predicate: Replaced) -> Callable[[DataFile], bool]:
        if predicate not in self._rows:
            self._rows[predicate] = file_bounds.in_bounds(predicate, self._schema)
        return self._rows[predicate]


def _data_paths(file: DataFile) -> tuple[str, str] | None:
    """The range of data file paths that a file of position deletes speaks of.

    PyIceberg does not read the field that names the one data file; the bounds say the same.
    """
    low = (file.lower_bounds or {}).get(_DATA_PATH)
    high = (file.upper_bounds or {}).get(_DATA_PATH)
    if low is None or high is None:
        return None
    try:
        return low.decode(), high.decode()
    except UnicodeDecodeError:  # cut within a character
        return None


def _bounds(data_file: DataFile, schema: Schema) -> Callable[[str], Bounds | None]:
    def of(column: str) -> Bounds | None:
        try:
            field = schema.find_field(column)
        except ValueError:  # renamed or dropped since the key was recorded
            return None
        low = (data_file.lower_bounds or {}).get(field.field_id)
        high = (data_file.upper_bounds or {}).get(field.field_id)
        nulls = (data_file.null_value_counts or {}).get(field.field_id, 0)
        if low is None or high is None or nulls or not isinstance(field.field_type, PrimitiveType):
            return None
        return from_bytes(field.field_type, low), from_bytes(field.field_type, high)

    return of
