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

from branchlake_dagster.publication.snapshot_files import TouchedFiles
from branchlake_dagster.publication.table_change import (
    ChangeMode,
    File,
    Layout,
    LayoutColumn,
    SnapshotChange,
    TableChange,
)
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.replaced_rows import from_json

T = TypeVar("T")


_MODES = {
    "append": ChangeMode.APPEND,
    "replace_partitions": ChangeMode.REPLACE_PARTITIONS,
    "upsert": ChangeMode.UPSERT,
    "replace_table": ChangeMode.REPLACE_TABLE,
}


_TOTALS = ("added-", "deleted-", "removed-", "total-", "changed-partition-count", "partitions.", "partition-")
"""Starts of the summary entries that a snapshot computes for itself."""


def build_layout(metadata: TableMetadata) -> Layout:
    """Columns, partition fields and the rest of the metadata as they are now."""
    schema = metadata.schema()
    return Layout(
        columns=tuple(
            LayoutColumn(field.field_id, field.name, str(field.field_type), field.required)
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
            ("tags and branches", _format_references(metadata)),
            ("statistics", _format_statistics(metadata)),
        ),
        format_version=metadata.format_version,
    )


def _format_references(metadata: TableMetadata) -> str:
    """The table's own tags and branches; of `main`, which the first commit makes, only how long it keeps."""
    references = {
        name: ref.model_dump(exclude={"snapshot_id"} if name == MAIN_BRANCH else set(), exclude_none=True)
        for name, ref in metadata.refs.items()
    }
    if len(references.get(MAIN_BRANCH, {})) == 1:
        del references[MAIN_BRANCH]  # it says only that it is a branch
    return json.dumps(references, sort_keys=True, default=str)


def _format_statistics(metadata: TableMetadata) -> str:
    files = [*metadata.statistics, *metadata.partition_statistics]
    return json.dumps(
        sorted((statistics_file.snapshot_id, statistics_file.statistics_path) for statistics_file in files)
    )


def load_table_change(
    before: Table | None, after: Table, files: Callable[[Snapshot], TouchedFiles] | None
) -> TableChange:
    """What was done to a table between two of its states; without `files` only layouts and snapshot ids.

    `before` None: everything since its creation. `files` reads the snapshots of `after`.
    """
    old_metadata = before.metadata if before else None
    snapshots, is_complete = snapshots_since(
        old_metadata.current_snapshot_id if old_metadata else None, after.metadata
    )
    steps = [
        _build_step(snapshot, files(snapshot), before)
        if files
        else SnapshotChange(
            snapshot.snapshot_id,
            ChangeMode.UNKNOWN,
            run_id=_summary_property(snapshot, LakeProperty.RUN_ID),
            original_id=_original_id(snapshot),
        )
        for snapshot in snapshots
    ]
    if not is_complete:
        steps.append(SnapshotChange(0, ChangeMode.UNKNOWN))
    old_properties, new_properties = (
        (_table_properties(old_metadata) if old_metadata else {}),
        _table_properties(after.metadata),
    )
    return TableChange(
        before=build_layout(old_metadata) if old_metadata else None,
        after=build_layout(after.metadata),
        steps=tuple(_adjust_modes(steps)),
        properties_set={
            key: value
            for key, value in new_properties.items()
            # Of a new table only what its makers must not both have done: consumed the same change, or read
            # the same offsets.
            if old_properties.get(key) != value
            and (
                old_metadata
                or key.startswith(
                    (LakeProperty.CONSUMED, LakeProperty.OFFSETS_PREFIX, LakeProperty.REPROCESSED_PREFIX)
                )
            )
        },
        properties_removed=tuple(sorted(old_properties.keys() - new_properties.keys())),
        base_snapshot_id=old_metadata.current_snapshot_id if old_metadata else None,
        expired_count=_count_expired(old_metadata, after.metadata) if old_metadata else 0,
    )


def _count_expired(before: TableMetadata, after: TableMetadata) -> int:
    """How many of the snapshots of before are gone."""
    last = len(before.snapshots) - 1
    # Snapshots are added at the end: where the last one stands as it stood, none before it was taken out.
    if last < len(after.snapshots) and (
        last < 0 or after.snapshots[last].snapshot_id == before.snapshots[last].snapshot_id
    ):
        return 0
    return len(
        {snapshot.snapshot_id for snapshot in before.snapshots}
        - {snapshot.snapshot_id for snapshot in after.snapshots}
    )


def _table_properties(metadata: TableMetadata) -> dict[str, str]:
    """The table's properties without what Iceberg's Java catalogue for Nessie notes there for itself."""
    return {key: value for key, value in metadata.properties.items() if not key.startswith("nessie.")}


def snapshots_since(start: int | None, after: TableMetadata) -> tuple[list[Snapshot], bool]:
    """The snapshots after `start`, oldest first, and whether the chain of parents leads back to it.

    `start` None: all snapshots since the table was created.
    """
    newest_first = (
        (snapshot.snapshot_id, snapshot.parent_snapshot_id, snapshot)
        for snapshot in reversed(after.snapshots)
    )
    return follow_ancestors(start, after.current_snapshot_id, newest_first)


def follow_ancestors(
    start: int | None, current: int | None, newest_first: Iterable[tuple[int, int | None, T]]
) -> tuple[list[T], bool]:
    """The items from `start`, which is not among them, to `current`, and whether the parents lead back to it.

    `newest_first` has the id, the parent's id and the item of each snapshot. It is read only as far as
    needed: a table with a long history is not gone through for two snapshots.
    """
    items: list[T] = []
    for snapshot_id, parent, item in newest_first:
        if current is None or current == start:
            break
        if snapshot_id == current:
            items.append(item)
            current = parent
    return items[::-1], current == start


def _original_id(snapshot: Snapshot) -> int | None:
    value = _summary_property(snapshot, LakeProperty.REPLAYED_FROM) or ""
    return int(value) if value.isdigit() else None


def _summary_property(snapshot: Snapshot, name: str) -> str | None:
    # Whether there is one, not whether it holds anything: that is a look at each of its fields.
    return None if snapshot.summary is None else snapshot.summary.additional_properties.get(name)


def _build_step(snapshot: Snapshot, files: TouchedFiles, before: Table | None) -> SnapshotChange:
    summary = snapshot.summary.additional_properties if snapshot.summary else {}
    keys = tuple(name for name in summary.get(LakeProperty.KEYS, "").split(",") if name)
    mode = files.mode or _infer_mode(snapshot, files.removed, before)
    recorded_predicate = summary.get(LakeProperty.REPLACED) if mode is ChangeMode.REPLACE_PARTITIONS else None
    return SnapshotChange(
        snapshot_id=snapshot.snapshot_id,
        mode=mode,
        added=files.added,
        removed=files.removed,
        key_columns=keys,
        run_id=summary.get(LakeProperty.RUN_ID),
        properties={key: value for key, value in summary.items() if not key.startswith(_TOTALS)},
        original_id=_original_id(snapshot),
        deletes=files.deletes,
        recorded_predicate=from_json(recorded_predicate) if recorded_predicate is not None else None,
        partition_names=tuple(name for name in summary.get(LakeProperty.PARTITION, "").split(",") if name),
    )


def _infer_mode(snapshot: Snapshot, removed: Sequence[File], before: Table | None) -> ChangeMode:
    """The recorded write mode; without one, what the operation could have been at worst."""
    recorded = _summary_property(snapshot, LakeProperty.WRITE_MODE)
    if recorded in _MODES:
        return _MODES[recorded]
    if snapshot.summary and snapshot.summary.operation == Operation.APPEND and not removed:
        return ChangeMode.APPEND
    if before and removed and list_live_paths(before) <= {file.path for file in removed}:
        return ChangeMode.REPLACE_TABLE
    return ChangeMode.REWRITE


def _adjust_modes(steps: list[SnapshotChange]) -> Iterator[SnapshotChange]:
    """An append that removes files judged by whose they are: a step's second attempt undoes its first."""
    own_paths: set[str] = set()
    for step in steps:
        other_files = [file for file in step.removed if file.path not in own_paths]
        own_paths |= {file.path for file in step.added}
        yield (
            replace(step, mode=ChangeMode.REWRITE) if step.mode is ChangeMode.APPEND and other_files else step
        )


def list_live_paths(table: Table) -> set[str]:
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
