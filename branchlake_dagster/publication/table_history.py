"""What was done to a table between two of its states, from its metadata and its snapshots' files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from pyiceberg.manifest import ManifestContent
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Operation, Snapshot

from branchlake_dagster.publication.snapshot_files import Touched
from branchlake_dagster.publication.table_change import (
    Column,
    File,
    Layout,
    Mode,
    SnapshotChange,
    TableChange,
)
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.replaced_rows import from_text

T = TypeVar("T")


_MODES = {
    "append": Mode.APPEND,
    "replace_partitions": Mode.REPLACE_PARTITIONS,
    "upsert": Mode.UPSERT,
    "replace_table": Mode.REPLACE_TABLE,
}


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


def change(before: Table | None, after: Table, files: Callable[[Snapshot], Touched] | None) -> TableChange:
    """What was done to a table between two of its states; without `files` only layouts and snapshot ids.

    `before` None: everything since its creation. `files` reads the snapshots of `after`.
    """
    old = before.metadata if before else None
    snapshots, complete = snapshots_since(old.current_snapshot_id if old else None, after.metadata)
    steps = [
        _step(snapshot, files(snapshot), before)
        if files
        else SnapshotChange(
            snapshot.snapshot_id,
            Mode.UNKNOWN,
            run_id=_property(snapshot, LakeProperty.RUN_ID),
            origin=_origin(snapshot),
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
            if was.get(key) != value
            and (
                old
                or key.startswith(
                    (LakeProperty.CONSUMED, LakeProperty.OFFSETS_PREFIX, LakeProperty.REPROCESSED_PREFIX)
                )
            )
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


def snapshots_since(start: int | None, after: TableMetadata) -> tuple[list[Snapshot], bool]:
    """The snapshots after `start`, oldest first, and whether the chain of parents leads back to it.

    `start` None: all snapshots since the table was created.
    """
    newest_first = ((one.snapshot_id, one.parent_snapshot_id, one) for one in reversed(after.snapshots))
    return chain(start, after.current_snapshot_id, newest_first)


def chain(
    start: int | None, current: int | None, newest_first: Iterable[tuple[int, int | None, T]]
) -> tuple[list[T], bool]:
    """The items from `start`, which is not among them, to `current`, and whether the parents lead back to it.

    `newest_first` has the id, the parent's id and the item of each snapshot. It is read only as far as
    needed: a table with a long history is not gone through for two snapshots.
    """
    found: list[T] = []
    for number, parent, item in newest_first:
        if current is None or current == start:
            break
        if number == current:
            found.append(item)
            current = parent
    return found[::-1], current == start


def _origin(snapshot: Snapshot) -> int | None:
    told = _property(snapshot, LakeProperty.REPLAYED_FROM) or ""
    return int(told) if told.isdigit() else None


def _property(snapshot: Snapshot, name: str) -> str | None:
    # Whether there is one, not whether it holds anything: that is a look at each of its fields.
    return None if snapshot.summary is None else snapshot.summary.additional_properties.get(name)


def _step(snapshot: Snapshot, files: Touched, before: Table | None) -> SnapshotChange:
    summary = snapshot.summary.additional_properties if snapshot.summary else {}
    keys = tuple(name for name in summary.get(LakeProperty.KEYS, "").split(",") if name)
    mode = files.mode or _mode(snapshot, files.removed, before)
    record = summary.get(LakeProperty.REPLACED) if mode is Mode.REPLACE_PARTITIONS else None
    return SnapshotChange(
        snapshot_id=snapshot.snapshot_id,
        mode=mode,
        added=files.added,
        removed=files.removed,
        keys=keys,
        run_id=summary.get(LakeProperty.RUN_ID),
        properties={key: value for key, value in summary.items() if not key.startswith(_TOTALS)},
        origin=_origin(snapshot),
        deletes=files.deletes,
        recorded=from_text(record) if record is not None else None,
        named=tuple(name for name in summary.get(LakeProperty.PARTITION, "").split(",") if name),
    )


def _mode(snapshot: Snapshot, removed: Sequence[File], before: Table | None) -> Mode:
    """The recorded write mode; without one, what the operation could have been at worst."""
    recorded = _property(snapshot, LakeProperty.WRITE_MODE)
    if recorded in _MODES:
        return _MODES[recorded]
    if snapshot.summary and snapshot.summary.operation == Operation.APPEND and not removed:
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
