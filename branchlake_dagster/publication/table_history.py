"""Load what was done to a table between two of its states, from its metadata and its snapshots' files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pyiceberg.manifest import ManifestContent
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Operation, Snapshot

from branchlake_dagster.history.capture import replayed_from, snapshots_between, summary_value
from branchlake_dagster.history.manifests import read_live_files
from branchlake_dagster.publication.snapshot_files import TouchedFiles
from branchlake_dagster.publication.table_change import (
    ChangeMode,
    File,
    Layout,
    LayoutColumn,
    SnapshotChange,
    TableChange,
)
from branchlake_dagster.stored_names import LakeProperty, find_exclusive_property
from branchlake_dagster.tables.replaced_rows import from_json

_MODES = {
    "append": ChangeMode.APPEND,
    "replace_partitions": ChangeMode.REPLACE_PARTITIONS,
    "upsert": ChangeMode.UPSERT,
    "replace_table": ChangeMode.REPLACE_TABLE,
}


_TOTALS = ("added-", "deleted-", "removed-", "total-", "changed-partition-count", "partitions.", "partition-")
"""Prefixes of the summary entries that a snapshot computes for itself."""


def build_layout(metadata: TableMetadata) -> Layout:
    """Build the layout: columns, partition fields and the other current metadata."""
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
    """Format the table's own tags and branches.

    For the branch `main`, which the first commit creates, only its retention counts.
    """
    references = {
        name: ref.model_dump(exclude={"snapshot_id"} if name == MAIN_BRANCH else set(), exclude_none=True)
        for name, ref in metadata.refs.items()
    }
    if len(references.get(MAIN_BRANCH, {})) == 1:
        del references[MAIN_BRANCH]  # the entry contains only the type, branch
    return json.dumps(references, sort_keys=True, default=str)


def _format_statistics(metadata: TableMetadata) -> str:
    files = [*metadata.statistics, *metadata.partition_statistics]
    return json.dumps(
        sorted((statistics_file.snapshot_id, statistics_file.statistics_path) for statistics_file in files)
    )


def load_table_change(
    before: Table | None, after: Table, files: Callable[[Snapshot], TouchedFiles] | None
) -> TableChange:
    """Load what was done to a table between two of its states.

    If `before` is None, the change starts with the creation of the table. `files` reads the files of the
    snapshots of `after`; without it, only layouts and snapshot ids are loaded.
    """
    old_metadata = before.metadata if before else None
    base_snapshot_id = old_metadata.current_snapshot_id if old_metadata else None
    snapshots, is_complete = snapshots_between(
        after.metadata, base_snapshot_id, after.metadata.current_snapshot_id
    )
    steps = [
        _build_step(snapshot, files(snapshot), before)
        if files
        else SnapshotChange(
            snapshot.snapshot_id,
            ChangeMode.UNKNOWN,
            run_id=summary_value(snapshot, LakeProperty.RUN_ID),
            original_id=replayed_from(snapshot),
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
            # For a new table only the properties that two creators must not share.
            if old_properties.get(key) != value and (old_metadata or find_exclusive_property(key))
        },
        properties_removed=tuple(sorted(old_properties.keys() - new_properties.keys())),
        base_snapshot_id=base_snapshot_id,
        expired_count=_count_expired(old_metadata, after.metadata) if old_metadata else 0,
    )


def _count_expired(before: TableMetadata, after: TableMetadata) -> int:
    """Count the snapshots of `before` that `after` does not have any more."""
    last = len(before.snapshots) - 1
    # Snapshots are added at the end. If the last one has kept its index, no snapshot before it was removed.
    if last < len(after.snapshots) and (
        last < 0 or after.snapshots[last].snapshot_id == before.snapshots[last].snapshot_id
    ):
        return 0
    return len(
        {snapshot.snapshot_id for snapshot in before.snapshots}
        - {snapshot.snapshot_id for snapshot in after.snapshots}
    )


def _table_properties(metadata: TableMetadata) -> dict[str, str]:
    """Return the table's properties, without those that Iceberg's Java catalog for Nessie writes."""
    return {key: value for key, value in metadata.properties.items() if not key.startswith("nessie.")}


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
        original_id=replayed_from(snapshot),
        deletes=files.deletes,
        recorded_predicate=from_json(recorded_predicate) if recorded_predicate is not None else None,
        partition_names=tuple(name for name in summary.get(LakeProperty.PARTITION, "").split(",") if name),
    )


def _infer_mode(snapshot: Snapshot, removed: Sequence[File], before: Table | None) -> ChangeMode:
    """Return the recorded write mode.

    Without a record, return the mode with the strictest conflict rules that fits the operation.
    """
    recorded = summary_value(snapshot, LakeProperty.WRITE_MODE)
    if recorded in _MODES:
        return _MODES[recorded]
    if snapshot.summary and snapshot.summary.operation == Operation.APPEND and not removed:
        return ChangeMode.APPEND
    if before and removed and list_live_paths(before) <= {file.path for file in removed}:
        return ChangeMode.REPLACE_TABLE
    return ChangeMode.REWRITE


def _adjust_modes(steps: list[SnapshotChange]) -> Iterator[SnapshotChange]:
    """Treat an append that removes files of others as a rewrite.

    An append may remove files of earlier steps: the second attempt of a step undoes the first one.
    """
    own_paths: set[str] = set()
    for step in steps:
        other_files = [file for file in step.removed if file.path not in own_paths]
        own_paths |= {file.path for file in step.added}
        yield (
            replace(step, mode=ChangeMode.REWRITE) if step.mode is ChangeMode.APPEND and other_files else step
        )


def list_live_paths(table: Table) -> set[str]:
    """List the paths of the data files in the current snapshot."""
    files = read_live_files(table.io, table.current_snapshot(), ManifestContent.DATA)
    return {file.file_path for file in files}
