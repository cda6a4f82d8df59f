"""The change of one table by a run, or by `main` since the run's base, and how it is loaded.

A `TableChange` has a list of steps, one per snapshot since the common base, and the layout before and after.
Each step has the data files that it added and removed. They come from the table's metadata and manifests; no
data file is read. `find_overlap` compares two changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from pyiceberg.manifest import (
    ManifestContent,
)
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Operation, Snapshot

from branchlake_dagster.history.capture import replayed_from, snapshots_between, summary_value
from branchlake_dagster.history.manifests import (
    read_live_files,
)
from branchlake_dagster.internals.column_metrics import DataPaths
from branchlake_dagster.runs.branch_commits import find_deleting_application
from branchlake_dagster.stored_names import LakeProperty, find_exclusive_property
from branchlake_dagster.tables.recorded_partitions import parse_entries
from branchlake_dagster.tables.replaced_rows import (
    ALL_ROWS,
    ReplacedRows,
    from_json,
)

FileBounds = tuple[Any, Any]
"""The (lowest, highest) value of a column in a file, both inclusive; possibly wider than the real values."""


class ChangeMode(StrEnum):
    """How one snapshot changed its table."""

    APPEND = "append"
    REPLACE_PARTITIONS = "replace_partitions"
    UPSERT = "upsert"
    REWRITE = "rewrite"
    """A copy-on-write UPDATE, DELETE or MERGE of the user. The rows that it read are not known."""
    REPLACE_TABLE = "replace_table"
    """All rows were removed: the table was replaced or truncated."""
    COMPACT = "compact"
    """The same rows were written to other files."""
    ROW_DELETES = "row deletes"
    """Merge-on-read: delete files instead of rewritten data files."""
    DELETION_VECTORS = "deletion vectors"
    """Merge-on-read in format version 3."""
    OLD_LAYOUT = "old layout"
    """Files of an older partition spec were changed. Their partitions cannot be compared with current
    ones."""
    UNKNOWN = "unknown"
    """The history does not lead back to the base: the table was rolled back, or replaced by another
    engine."""


def _no_bounds(_: str) -> FileBounds | None:
    return None


def _may_hold_any(_: ReplacedRows) -> bool:
    return True


@dataclass(frozen=True)
class File:
    """One data file.

    `partition` is its partition as text, such as `day=2026-11-05/kind=radar`; empty if the table has no
    partitions.
    """

    path: str
    partition: str = ""
    bounds: Callable[[str], FileBounds | None] = field(default=_no_bounds, compare=False, repr=False)
    """Returns the bounds of a column by its name; None if they are unknown or the column may have nulls."""
    handle: Any = field(default=None, compare=False, repr=False)
    """The table format's own object for the file: PyIceberg's `DataFile`."""
    may_hold: Callable[[ReplacedRows], bool] = field(default=_may_hold_any, compare=False, repr=False)
    """Checks by partition and bounds whether the file may hold rows of a predicate."""
    rows: int | None = None
    """The number of rows; None if unknown."""


@dataclass(frozen=True)
class DeleteFile:
    """One file of row-level deletes (merge-on-read), and the rows that it may delete."""

    path: str
    partition: str = ""
    paths: DataPaths | None = None
    """The data files whose rows it may delete; None if its manifest entry does not show them."""
    everywhere: bool = False
    """Whether the file may delete rows of all partitions, as an equality delete without a partition does."""
    may_hold: Callable[[ReplacedRows], bool] = field(default=_may_hold_any, compare=False, repr=False)
    """Checks whether the file may delete rows of a predicate."""
    by_value: bool = False
    """Whether the file deletes rows by the values of columns (equality deletes), not by their positions."""
    handle: Any = field(default=None, compare=False, repr=False)
    """The table format's own object for the file: PyIceberg's `DataFile`."""

    def may_delete_from(self, file: File) -> bool:
        """Return whether this delete file may delete rows of `file`, an older data file."""
        if self.paths is not None:
            return self.paths.may_name(file.path)
        return self.everywhere or self.partition == file.partition


@dataclass(frozen=True)
class SnapshotChange:
    """The change by one snapshot.

    `run_id` is the run that wrote it; None if the writer did not record one.
    """

    snapshot_id: int
    """The id of the snapshot; 0 for a history that does not lead back to the base."""
    mode: ChangeMode
    added: tuple[File, ...] = ()
    removed: tuple[File, ...] = ()
    key_columns: tuple[str, ...] = ()
    """The columns on which an upsert matched rows."""
    run_id: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The entries that the writer put into the snapshot's summary, without the totals."""
    deletes: tuple[DeleteFile, ...] = ()
    """The files of row-level deletes that the snapshot added.

    For the snapshot of an undo also those that it removed: they changed which rows the table has."""
    recorded_predicate: ReplacedRows | None = None
    """The predicate of the replaced rows as the writer recorded it; None if it did not."""
    partition_names: tuple[str, ...] = ()
    """The Dagster partitions that were written, for messages."""
    original_id: int | None = None
    """The id of the snapshot on a run's branch that this snapshot replays."""
    is_manifest_rewrite: bool = False
    """Whether the snapshot only lists the same files in other manifests."""
    removed_deletes: tuple[DeleteFile, ...] = ()
    """The files of row-level deletes that the snapshot removed."""
    is_reversal: bool = False
    """Whether a rebase adds this step, which the run's branch does not have, to reverse a compaction."""
    is_metadata_delete: bool = False
    """Whether Spark deleted whole files by a predicate that it did not record. It may have removed none."""

    @property
    def touched_files(self) -> tuple[File, ...]:
        """The added and removed files."""
        return (*self.added, *self.removed)

    @property
    def partitions(self) -> frozenset[str]:
        """The partitions whose rows the snapshot changed."""
        deleted = {delete_file.partition for delete_file in self.deletes}
        return frozenset({file.partition for file in self.touched_files} | deleted)

    @property
    def replaced_predicate(self) -> ReplacedRows | None:
        """The predicate of all replaced rows, whether such rows existed or not.

        None if it is unknown.
        """
        return ALL_ROWS if self.mode is ChangeMode.REPLACE_TABLE else self.recorded_predicate


_SORT_ORDER, _STATISTICS = "sort order", "statistics"


@dataclass(frozen=True)
class LayoutColumn:
    """A top-level column. Data files identify columns by `id`; `type` is the name of the Iceberg type."""

    id: int
    name: str
    type: str
    required: bool


@dataclass(frozen=True)
class Layout:
    """The layout of a table. `spec` are its partition fields as (source column, transform, name)."""

    columns: tuple[LayoutColumn, ...] = ()
    spec: tuple[tuple[str, str, str], ...] = ()
    highest_column_id: int = 0
    schema: str = ""
    """The full definition of the columns as text: also documentation, identifier fields, defaults and nested
    fields."""
    others: tuple[tuple[str, str], ...] = ()
    """Other metadata of the table that a rebase does not replay, by name, as text."""
    format_version: int = 2

    @property
    def shape(self) -> tuple[tuple[LayoutColumn, ...], str]:
        """The columns with their full definition."""
        return self.columns, self.schema

    @property
    def sort_order(self) -> str | None:
        """The sort order as text; None if it is not known."""
        return dict(self.others).get(_SORT_ORDER)

    @property
    def without_statistics(self) -> Layout:
        """The same layout without the statistics files of snapshots, for comparisons."""
        return replace(self, others=tuple(other for other in self.others if other[0] != _STATISTICS))

    @property
    def partition_columns(self) -> frozenset[str]:
        """The names of the source columns of the partition fields."""
        return frozenset(source for source, _, _ in self.spec)


@dataclass(frozen=True)
class TableChange:
    """All changes between the layouts `before` (None if the table was created) and `after`.

    `steps` has one step per snapshot, oldest first. `properties_set` are the table properties that were added
    or changed, with their new values.
    """

    before: Layout | None
    after: Layout
    steps: tuple[SnapshotChange, ...] = ()
    properties_set: Mapping[str, str] = field(default_factory=dict)
    properties_removed: tuple[str, ...] = ()
    base_snapshot_id: int | None = None
    expired_count: int = 0
    """How many snapshots of `before` are not in the history any more."""

    def shared_steps(self, other: TableChange) -> Literal["all", "some"] | None:
        """Return whether another change contains "all" or "some" of these steps; None if it contains none.

        Steps are compared by snapshot id. A replayed step counts like the step that it replays.
        """
        other_ids = {
            snapshot_id for step in other.steps for snapshot_id in (step.snapshot_id, step.original_id)
        }
        common_steps = [step for step in self.steps if step.snapshot_id in other_ids]
        return None if not common_steps else "all" if len(common_steps) == len(self.steps) else "some"

    @property
    def is_complete(self) -> bool:
        """Whether the steps lead back to the base; otherwise the table was rolled back or replaced.

        This uses the snapshot ids. The mode is unknown for steps that were loaded without their files.
        """
        return all(step.snapshot_id for step in self.steps)

    @property
    def is_only_maintenance(self) -> bool:
        """Whether nothing happened but the expiry of old snapshots and the merging of manifests.

        Rows, files, columns and properties are the same. False for a new table.
        """
        return self.changes_no_rows and all(step.is_manifest_rewrite for step in self.steps)

    @property
    def changes_no_rows(self) -> bool:
        """Whether the table was only maintained: compacted, its manifests merged, or old snapshots removed.

        Rows, columns and properties are the same. False for a new table.
        """
        if self.before is None or self.properties_set or self.properties_removed:
            return False
        is_maintained = all(
            step.is_manifest_rewrite or (step.mode is ChangeMode.COMPACT and step.snapshot_id)
            for step in self.steps
        )
        return is_maintained and self.before.without_statistics == self.after.without_statistics

    @property
    def removing_steps(self) -> dict[str, SnapshotChange]:
        """The step that removed each file, by path."""
        return {file.path: step for step in self.steps for file in step.removed}


@dataclass(frozen=True)
class TouchedFiles:
    """The files that one snapshot added and removed."""

    added: tuple[File, ...] = ()
    removed: tuple[File, ...] = ()
    deletes: tuple[DeleteFile, ...] = ()
    mode: ChangeMode | None = None
    """How the snapshot changed the table; None if its operation and its files do not show it."""
    removed_deletes: tuple[DeleteFile, ...] = ()


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
            (_SORT_ORDER, str(metadata.sort_order().fields)),
            ("location", metadata.location),
            ("identity", str(metadata.table_uuid)),
            ("tags and branches", _format_references(metadata)),
            (_STATISTICS, _format_statistics(metadata)),
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
    """Load the change of a table between two of its states.

    If `before` is None, the change starts with the creation of the table. `files` reads the files of a
    snapshot of `after`. If it is None, no manifest is read: the steps have no files, and their mode is
    UNKNOWN.
    """
    old_metadata = before.metadata if before else None
    base_snapshot_id = old_metadata.current_snapshot_id if old_metadata else None
    snapshots, is_complete = snapshots_between(
        after.metadata, base_snapshot_id, after.metadata.current_snapshot_id
    )
    steps = [
        step
        for snapshot in snapshots
        for step in (
            (*_reversals_by(snapshot, after, files), _build_step(snapshot, files(snapshot), before))
            if files
            else (_build_bare_step(snapshot),)
        )
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


def _build_bare_step(snapshot: Snapshot) -> SnapshotChange:
    """Build a step from the snapshot's summary alone: without files, and with the mode UNKNOWN."""
    return SnapshotChange(
        snapshot.snapshot_id,
        ChangeMode.UNKNOWN,
        run_id=summary_value(snapshot, LakeProperty.RUN_ID),
        properties=_own_entries(snapshot),
        original_id=replayed_from(snapshot),
        is_manifest_rewrite=_is_manifest_rewrite(snapshot),
    )


def _reversals_by(
    snapshot: Snapshot, table: Table, files: Callable[[Snapshot], TouchedFiles]
) -> Iterator[SnapshotChange]:
    """Yield a step for each compaction that a snapshot reverses, newest first.

    The step removes the compacted files and adds the old files again. The snapshot's own manifests do not
    show this; its summary records the ids of the reversed compactions. The step of an expired compaction has
    the mode UNKNOWN.
    """
    for text in filter(None, (summary_value(snapshot, LakeProperty.REVERSED_SNAPSHOTS) or "").split(",")):
        compaction = table.metadata.snapshot_by_id(int(text))
        if compaction is None:  # it has expired
            yield SnapshotChange(int(text), ChangeMode.UNKNOWN)
            continue
        compacted = files(compaction)
        yield SnapshotChange(
            compaction.snapshot_id,
            ChangeMode.COMPACT,
            added=compacted.removed,
            removed=compacted.added,
            is_reversal=True,
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
    """Return the table properties in `metadata` that a user or engine set, by name.

    Properties that Iceberg's Java catalog for Nessie writes, which begin with `nessie.`, are omitted.
    """
    return {key: value for key, value in metadata.properties.items() if not key.startswith("nessie.")}


_FILE_COUNTS = ("added-data-files", "deleted-data-files", "added-delete-files", "removed-delete-files")
"""Summary entries that a snapshot has if it added or removed files."""


def _is_manifest_rewrite(snapshot: Snapshot) -> bool:
    """Check for a snapshot of the operation `replace` that added and removed no file."""
    summary = snapshot.summary
    if summary is None or summary.operation is not Operation.REPLACE:
        return False
    return not any(int(summary.additional_properties.get(name) or 0) for name in _FILE_COUNTS)


def _own_entries(snapshot: Snapshot) -> dict[str, str]:
    """Return the entries of a snapshot's summary that its writer chose, without the totals."""
    summary = snapshot.summary.additional_properties if snapshot.summary else {}
    return {key: value for key, value in summary.items() if not key.startswith(_TOTALS)}


def _build_step(snapshot: Snapshot, files: TouchedFiles, before: Table | None) -> SnapshotChange:
    summary = snapshot.summary.additional_properties if snapshot.summary else {}
    keys = tuple(name for name in summary.get(LakeProperty.KEYS, "").split(",") if name)
    mode, deletes = files.mode or _infer_mode(snapshot, files.removed, before), files.deletes
    if files.removed_deletes and LakeProperty.UNDONE_SNAPSHOTS in summary:
        # Rows that these files had deleted are in the table again. Other snapshots remove delete files only
        # together with the rows, or replace them by files that delete the same rows.
        mode, deletes = files.mode or ChangeMode.ROW_DELETES, (*deletes, *files.removed_deletes)
    recorded_predicate = summary.get(LakeProperty.REPLACED) if mode is ChangeMode.REPLACE_PARTITIONS else None
    return SnapshotChange(
        snapshot_id=snapshot.snapshot_id,
        mode=mode,
        added=files.added,
        removed=files.removed,
        key_columns=keys,
        run_id=summary.get(LakeProperty.RUN_ID),
        properties=_own_entries(snapshot),
        original_id=replayed_from(snapshot),
        is_manifest_rewrite=_is_manifest_rewrite(snapshot),
        deletes=deletes,
        removed_deletes=files.removed_deletes,
        recorded_predicate=from_json(recorded_predicate) if recorded_predicate is not None else None,
        partition_names=parse_entries(summary.get(LakeProperty.PARTITION, "")),
        is_metadata_delete=find_deleting_application(snapshot) is not None,
    )


def _infer_mode(snapshot: Snapshot, removed: Sequence[File], before: Table | None) -> ChangeMode:
    """Return the write mode that the snapshot records.

    Without a record, this is APPEND for Iceberg's operation `append` that removed no files, REPLACE_TABLE if
    all data files of `before` were removed, and REWRITE otherwise.
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
    """Yield the steps, with the mode REWRITE for appends that remove files from before the change.

    An append may remove files that earlier steps added: the second attempt of a step undoes the first one.
    """
    own_paths: set[str] = set()
    for step in steps:
        other_files = [file for file in step.removed if file.path not in own_paths]
        own_paths |= {file.path for file in step.added}
        yield (
            replace(step, mode=ChangeMode.REWRITE) if step.mode is ChangeMode.APPEND and other_files else step
        )


def list_live_paths(table: Table) -> set[str]:
    """Return the paths of the data files in the table's current snapshot; an empty set for an empty table."""
    files = read_live_files(table.io, table.current_snapshot(), ManifestContent.DATA)
    return {file.file_path for file in files}
