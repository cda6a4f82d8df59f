"""Plans what the undo of publications changes in one table. Pure functions over a table's steps.

The undo of a step removes the files that the step added, and adds the files that it removed. Later steps of
other publications stay. The result must be the table that a history without the undone steps would have.
If the files do not prove that, `DependencyFound` is raised, with a `Dependency` that names the later
publications. They can be undone as well.

| a later step | the undo |
|---|---|
| appended rows | is independent of it |
| replaced the whole table, or the partitions that the undone step had replaced | has nothing to do |
| compacted exactly the files of the undone step | removes the compacted files |
| compacted them together with other files | restores the old files first, if the rows are the same |
| removed or rewrote a file that the undone step added | depends on it |
| updated or deleted rows where files would be restored | depends on it, unless keys are certainly different |
| removed, rewrote or compacted a file whose rows the undone step deleted by delete files | depends on it |
| removed or replaced these delete files | depends on it |
| wrote files with the partition spec that the undone step set | depends on it |
| updated or deleted rows where these rows come back | depends on it, except an upsert with deletes by value |

The delete files of an undone step are removed, so that the rows that they deleted come back in their files.
If the step had replaced older files of position deletes, the older ones are added again. Deletes by value
(equality deletes) apply to all older rows, whether other delete files had deleted them or not. So those of a
later upsert are independent of the undone step. Those of a statement may have only the values of rows that
it saw.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from branchlake_dagster.incremental.positions import ConsumptionRecord
from branchlake_dagster.publication.compaction_reversal import (
    drop_reversed_compactions,
    reverse_compactions,
)
from branchlake_dagster.publication.conflicts import (
    find_hit_files,
    has_disjoint_keys,
    map_over_compactions,
)
from branchlake_dagster.publication.table_change import (
    ChangeMode,
    DeleteFile,
    File,
    Layout,
    SnapshotChange,
    TableChange,
)
from branchlake_dagster.stored_names import LakeProperty, MaintenanceKind, find_exclusive_property
from branchlake_dagster.tables.recorded_partitions import is_shortened
from branchlake_dagster.tables.replaced_rows import ReplacedCondition, ValueRange
from branchlake_dagster.wording import CodedReason

_NOT_INVERTIBLE = {
    ChangeMode.UNKNOWN: CodedReason("its history does not lead back to the publication", "history_lost"),
    ChangeMode.OLD_LAYOUT: CodedReason("it has files of an older partition spec", "older_partition_spec"),
    ChangeMode.DELETION_VECTORS: CodedReason(
        "the publication wrote deletion vectors, which cannot be undone", "wrote_deletion_vectors"
    ),
}
_WROTE_DELETE_FILES = CodedReason(
    "the publication replaced delete files in a way that cannot be undone", "wrote_delete_files"
)
_COMPACTED = CodedReason("rows of the publication were compacted together with others", "compacted")
_DELETED_ROWS = CodedReason("rows that were deleted before the publication would come back", "deleted_rows")
_COMPACTED_DELETES = CodedReason("files whose rows the publication deleted were compacted since", "compacted")
_ROWS_CHANGED = CodedReason(
    "later changes may concern rows that the publication removed", "rows_changed_since"
)
SPEC_CHANGED = CodedReason("its partition spec was changed since", "partition_spec_changed_since")
_PERIODS_US = {"hour": 3_600_000_000, "day": 86_400_000_000}
"""The length of a partition in microseconds, by the name of its transform."""
_MAX_FORMAT_VERSION = 2
"""The newest format version whose manifests PyIceberg writes."""


@dataclass(frozen=True)
class Dependency:
    """A reason why the change of one table by a publication cannot be undone, or not alone.

    Attributes:
        table: The table's dotted name.
        reason: The reason, a clause.
        partitions: The partitions that the reason is about.
        run_ids: The later runs whose publications must be undone as well. Empty if no run can be named: then
            the undo is not possible.
    """

    table: str
    reason: CodedReason
    partitions: tuple[str, ...] = ()
    run_ids: tuple[str, ...] = ()


class DependencyFound(Exception):  # noqa: N818 - it never leaves the package
    """A part of the publication cannot be undone alone. `dependency` has the table and the reason."""

    def __init__(self, dependency: Dependency) -> None:
        super().__init__(dependency.reason)
        self.dependency = dependency


@dataclass(frozen=True)
class OwnChange:
    """The snapshots, properties and layouts by which the undone publications changed one table.

    Attributes:
        snapshot_ids: The snapshots on `main` that they added.
        old_properties: Each property that they set or removed, with its value before the first of them; None
            if the table did not have it.
        new_properties: The same names with their values after the last of them.
        old_layout: The layout before the first of them; None if it created the table.
        new_layout: The layout after the last of them.
    """

    snapshot_ids: frozenset[int]
    old_properties: Mapping[str, str | None]
    new_properties: Mapping[str, str | None]
    old_layout: Layout | None
    new_layout: Layout


@dataclass
class TableUndo:
    """The changes that the undo makes in one table.

    `removed` are the data files to remove and `restored` the data files to add again, by path.
    `properties_set` get their earlier values. `superseded_by` are the ids of later runs that have replaced a
    part of the rows already.
    """

    removed: dict[str, File] = field(default_factory=dict)
    restored: dict[str, File] = field(default_factory=dict)
    removed_deletes: dict[str, DeleteFile] = field(default_factory=dict)
    """The delete files to remove, by path. The rows that they deleted come back."""
    restored_deletes: dict[str, DeleteFile] = field(default_factory=dict)
    """The files of position deletes to add again, by path."""
    newer_paths: set[str] = field(default_factory=set)
    """The paths of data files in which `removed_deletes` delete no row of another step.

    These files were added after the newest of these delete files, or by the same step.
    """
    properties_set: dict[str, str] = field(default_factory=dict)
    properties_removed: tuple[str, ...] = ()
    old_layout: Layout | None = None
    """The layout whose columns become current again; None if they stay."""
    restores_spec: bool = False
    """Whether the partition spec from before the undone publications becomes the default again."""
    snapshot_ids: tuple[int, ...] = ()
    """The snapshots whose changes are undone."""
    superseded_by: tuple[str, ...] = ()
    superseding_ids: tuple[int, ...] = ()
    """The snapshots that have replaced a part of the rows."""
    reversals: list[SnapshotChange] = field(default_factory=list)
    """The steps that first reverse compactions which joined undone rows with other rows, newest first."""
    is_superseded: bool = False
    """Whether later publications have replaced all rows of the undone ones."""

    @property
    def split_files(self) -> list[File]:
        """The compacted files that `reversals` remove."""
        return [file for reversal in self.reversals for file in reversal.removed]

    @property
    def changes_files(self) -> bool:
        """Whether the undo adds or removes data files or delete files."""
        return bool(self.removed or self.restored or self.removed_deletes or self.restored_deletes)

    @property
    def changes_anything(self) -> bool:
        """Whether the undo changes files, properties or columns of the table."""
        return bool(
            self.changes_files
            or self.properties_set
            or self.properties_removed
            or self.old_layout is not None
            or self.restores_spec
        )


def plan_table_undo(
    table: str,
    change: TableChange,
    own: OwnChange,
    current_properties: Mapping[str, str],
    *,
    keep_positions: bool = False,
) -> TableUndo:
    """Plan the undo in one table. Reads and writes no file.

    `change` leads from the state before the first undone publication to the current state of `main`. `own`
    are the parts of it that the undone publications made. `current_properties` are the table's properties on
    `main`. With `keep_positions`, the positions of consumers and the offsets of ingestions stay as they are,
    so that no record is read again. Raises DependencyFound if the undo is not possible without others.
    """
    if not own.snapshot_ids <= {step.snapshot_id for step in change.steps}:
        reason = CodedReason("the publication's snapshots have expired or were rolled back", "history_lost")
        raise DependencyFound(Dependency(table, reason))
    # The undo of a run does not repeat a compaction that was reversed for the run.
    own = replace(own, snapshot_ids=own.snapshot_ids - _find_reversals(change.steps))
    steps = _drop_undone_steps(drop_reversed_compactions(change.steps))
    superseding_steps = _find_superseding_steps(steps, own.snapshot_ids, change.after)
    own_steps, undo = list[SnapshotChange](), TableUndo()
    later_deletes: list[DeleteFile] = []
    for step in steps:
        if step.snapshot_id in superseding_steps:
            continue
        if step.snapshot_id in own.snapshot_ids:
            _require_invertible(table, step)
            _require_no_deleted_rows(table, step, later_deletes)
            _require_whole_compactions(table, undo, step)
            own_steps.append(step)
            _add_own_step(undo, step)
            continue
        later_deletes += step.deletes
        is_comparable = step.mode not in (ChangeMode.UNKNOWN, ChangeMode.OLD_LAYOUT)
        if not is_comparable and own.snapshot_ids:
            raise DependencyFound(Dependency(table, _NOT_INVERTIBLE[step.mode], run_ids=_run_ids(step)))
        if own_steps:
            _follow_later_step(table, undo, step, change)
            undo.newer_paths |= {file.path for file in step.added}
    _require_separate_files(table, steps, own_steps, superseding_steps)
    undo.snapshot_ids = tuple(step.snapshot_id for step in own_steps)
    replacing_steps = superseding_steps.values()
    undo.superseded_by = tuple(dict.fromkeys(step.run_id for step in replacing_steps if step.run_id))
    undo.superseding_ids = tuple({step.snapshot_id for step in replacing_steps})
    undo.is_superseded = bool(own.snapshot_ids) and not own_steps
    _require_known_layout(table, undo, change, own)
    _plan_spec(table, undo, steps, change, own)
    _plan_columns(table, undo, steps, change, own)
    if not (keep_positions or undo.is_superseded):
        _require_own_positions(table, change, own, current_properties)
    _plan_properties(undo, own, current_properties, keep_positions)
    return undo


def _find_reversals(steps: Sequence[SnapshotChange]) -> frozenset[int]:
    """Return the ids of the snapshots by which rebases restored compacted files."""
    return frozenset(
        step.snapshot_id
        for step in steps
        if step.properties.get(LakeProperty.MAINTENANCE) == MaintenanceKind.COMPACTION_REVERSED
    )


def _drop_undone_steps(steps: Sequence[SnapshotChange]) -> list[SnapshotChange]:
    """Return the steps without those that an earlier undo reversed, and without the step of that undo."""
    undone_ids: set[int] = set()
    kept_steps = []
    for step in reversed(steps):
        if undone_snapshots := step.properties.get(LakeProperty.UNDONE_SNAPSHOTS):
            undone_ids |= {int(snapshot_id) for snapshot_id in undone_snapshots.split(",")}
        elif step.snapshot_id not in undone_ids:
            kept_steps.append(step)
    return kept_steps[::-1]


def _find_superseding_steps(
    steps: Sequence[SnapshotChange], own_ids: Collection[int], layout: Layout
) -> dict[int, SnapshotChange]:
    """Return the later step that replaced all rows of an undone step, by the snapshot id of the undone step.

    `own_ids` are the snapshots to undo; steps without such a later step are left out. The changes between
    both steps do not matter: their rows in the replaced partitions are gone as well. Exceptions are a
    statement that may have moved rows to other partitions, and an upsert that may have skipped keys there.
    `layout` is the table's present layout.
    """
    superseding_steps: dict[int, SnapshotChange] = {}
    for number, own_step in enumerate(steps):
        if own_step.snapshot_id in own_ids:
            later_steps = [step for step in steps[number + 1 :] if step.snapshot_id not in own_ids]
            for position, step in enumerate(later_steps):
                if not _supersedes(step, own_step):
                    continue
                between = later_steps[:position]
                if _replaces_whole_table(step) or not any(
                    _may_move_rows(one, own_step, layout) or _may_skip_keys(one, own_step, layout)
                    for one in between
                ):
                    superseding_steps[own_step.snapshot_id] = step
                break
    return superseding_steps


def _may_move_rows(step: SnapshotChange, own_step: SnapshotChange, layout: Layout) -> bool:
    """Return whether a statement of a user may have moved rows to other partitions, or would have moved them.

    It may have moved rows of the undone step `own_step` if it changed rows in a partition of that step and
    added rows to another partition. If the rows that `own_step` replaced are not whole partitions of the
    table, every statement that added rows may have done so. It may also have missed rows that `own_step` had
    removed, whatever it changed.
    """
    if step.mode not in (ChangeMode.REWRITE, ChangeMode.ROW_DELETES) or not step.added:
        return False
    own_partitions = {file.partition for file in own_step.touched_files}
    added_partitions = {file.partition for file in step.added}
    if added_partitions <= own_partitions and _replaces_whole_partitions(own_step, layout):
        return False
    changed_partitions = {file.partition for file in step.removed}
    changed_partitions |= {delete_file.partition for delete_file in step.deletes}
    return bool(own_step.removed or own_partitions & changed_partitions)


def _replaces_whole_partitions(step: SnapshotChange, layout: Layout) -> bool:
    """Return whether the rows that a step replaced are certainly whole partitions of the table."""
    predicate = step.recorded_predicate
    return predicate is not None and all(
        conditions and all(_is_aligned(condition, layout) for condition in conditions)
        for conditions in predicate.slices
    )


def _is_aligned(condition: ReplacedCondition, layout: Layout) -> bool:
    """Return whether all values of a table's partition are on the same side of the condition.

    False proves nothing: ranges of months and years are not compared.
    """
    names = [column.name for column in layout.columns if column.id == condition.field_id]
    transforms = {transform for source, transform, _ in layout.spec if source in names}
    if "identity" in transforms:
        return True
    if not isinstance(condition, ValueRange) or condition.kind == "string":
        return False
    bounds = [int(condition.low), int(condition.high)]
    if condition.kind == "date":
        return "day" in transforms
    periods = [_PERIODS_US[transform] for transform in transforms & _PERIODS_US.keys()]
    return any(all(bound % period == 0 for bound in bounds) for period in periods)


def _may_skip_keys(step: SnapshotChange, own_step: SnapshotChange, layout: Layout) -> bool:
    """Return whether an upsert that keeps existing rows may have skipped keys that `own_step` had added.

    It cannot have if its keys contain all columns by which rows belong to the replaced ones.
    """
    if not _keeps_existing_rows(step):
        return False
    predicate = own_step.recorded_predicate
    slices = predicate.slices if predicate is not None else ()
    ids = {condition.field_id for conditions in slices for condition in conditions}
    names = layout.partition_columns | {column.name for column in layout.columns if column.id in ids}
    return not (ids and names <= {*step.key_columns})


def _keeps_existing_rows(step: SnapshotChange) -> bool:
    return step.properties.get(LakeProperty.WHEN_MATCHED) == "keep"


def _require_separate_files(
    table: str,
    steps: Sequence[SnapshotChange],
    own_steps: Sequence[SnapshotChange],
    superseding_steps: Mapping[int, SnapshotChange],
) -> None:
    """Raise DependencyFound if an own step rewrote files of a superseded step.

    The undo would restore these files, and with them rows that a later step has replaced. `own_steps` are the
    undone steps that no later step supersedes.
    """
    replaced_paths = {
        file.path for step in steps if step.snapshot_id in superseding_steps for file in step.added
    }
    mixed_files = [file for step in own_steps for file in step.removed if file.path in replaced_paths]
    if mixed_files:
        reason = CodedReason("later changes replaced a part of the rows in the same files", "partly_replaced")
        raise DependencyFound(Dependency(table, reason, _partitions(mixed_files)))


def _require_invertible(table: str, step: SnapshotChange) -> None:
    """Raise DependencyFound if the undo of a step cannot be written, whatever the later steps are.

    A step that replaced files of equality deletes cannot be undone: these files apply to older data files
    only. If they were added again, they would also delete rows of newer files.
    """
    reason = _NOT_INVERTIBLE.get(step.mode)
    if reason is None and step.deletes:
        replaced_by_value = any(file.by_value for file in step.removed_deletes)
        if step.mode is not ChangeMode.ROW_DELETES or replaced_by_value:
            reason = _WROTE_DELETE_FILES
    if reason is not None:
        raise DependencyFound(Dependency(table, reason, tuple(sorted(step.partitions))))


def _require_no_deleted_rows(table: str, step: SnapshotChange, deletes: Sequence[DeleteFile]) -> None:
    """Raise DependencyFound if delete files had deleted rows of the files that an undone step removed.

    The undo would restore these files, and with them the deleted rows.
    """
    if hit_files := find_hit_files(deletes, step.removed):
        raise DependencyFound(Dependency(table, _DELETED_ROWS, _partitions(hit_files)))


def _require_whole_compactions(table: str, undo: TableUndo, step: SnapshotChange) -> None:
    """Raise DependencyFound if a step changed compacted files that the undo removes by a reversal."""
    split_files = undo.split_files
    split_paths = {file.path for file in split_files}
    lost_files = [file for file in step.removed if file.path in split_paths]
    if lost_files := lost_files or find_hit_files(step.deletes, split_files):
        raise DependencyFound(Dependency(table, _COMPACTED, _partitions(lost_files), _run_ids(step)))


def _add_own_step(undo: TableUndo, step: SnapshotChange) -> None:
    for file in step.removed:
        if undo.removed.pop(file.path, None) is None:
            undo.restored[file.path] = file
    for file in step.added:
        if undo.restored.pop(file.path, None) is None:
            undo.removed[file.path] = file
    for delete_file in step.removed_deletes:
        # Without new delete files, the step removed only those that had nothing left to delete.
        if undo.removed_deletes.pop(delete_file.path, None) is None and step.deletes:
            undo.restored_deletes[delete_file.path] = delete_file
    for delete_file in step.deletes:
        if undo.restored_deletes.pop(delete_file.path, None) is None:
            undo.removed_deletes[delete_file.path] = delete_file
    if step.deletes:
        undo.newer_paths.clear()
    undo.newer_paths |= {file.path for file in step.added}


def _supersedes(step: SnapshotChange, own_step: SnapshotChange) -> bool:
    """Return whether the later `step` replaced all rows of the undone `own_step`.

    This is so if `step` replaced the whole table, or if both replaced partitions of the same asset by the
    same predicate and `step` wrote all Dagster partitions of `own_step`. The predicate alone proves nothing,
    because it may be wider than the rows that were replaced.
    """
    if _replaces_whole_table(step):
        return True
    names = {*own_step.partition_names}
    return (
        own_step.mode is ChangeMode.REPLACE_PARTITIONS
        and step.mode is ChangeMode.REPLACE_PARTITIONS
        and own_step.recorded_predicate is not None
        and own_step.recorded_predicate == step.recorded_predicate
        and bool(names)
        and names <= {*step.partition_names}
        and not is_shortened(own_step.partition_names)
        and own_step.properties.get(LakeProperty.ASSET) == step.properties.get(LakeProperty.ASSET)
    )


def _follow_later_step(table: str, undo: TableUndo, step: SnapshotChange, change: TableChange) -> None:
    """Adapt `undo` so that it can be made after a later step, which stays.

    Raises DependencyFound if the later step depends on the undone publications.
    """
    _require_live_deletes(table, undo, step)
    if step.mode is ChangeMode.COMPACT:
        step = _follow_compaction(undo, step, change)
    else:
        _require_whole_compactions(table, undo, step)
    if lost_files := [file for file in step.removed if file.path in undo.removed]:
        reason = (
            _COMPACTED
            if step.mode is ChangeMode.COMPACT
            else CodedReason("later changes rewrote files of the publication", "rewritten_since")
        )
        raise DependencyFound(Dependency(table, reason, _partitions(lost_files), _run_ids(step)))
    if step.mode not in (ChangeMode.COMPACT, ChangeMode.APPEND):
        _require_independent_deletes(table, undo, step)
        _require_independent_rows(table, undo, step, change)
        _require_independent_returns(table, undo, step, change)
        _require_no_skipped_keys(table, undo, step)


def _require_live_deletes(table: str, undo: TableUndo, step: SnapshotChange) -> None:
    """Raise DependencyFound if a later step ended the effect of delete files that the undo removes.

    This is so if it removed or replaced one of them, or if it removed, rewrote or compacted a data file with
    rows that they may have deleted: these rows are in no file any more.
    """
    if not undo.removed_deletes:
        return
    replaced_deletes = [one for one in step.removed_deletes if one.path in undo.removed_deletes]
    older_files = [file for file in step.removed if file.path not in undo.newer_paths]
    lost_files = find_hit_files(list(undo.removed_deletes.values()), older_files)
    if replaced_deletes or lost_files:
        reason = CodedReason(
            "later changes rewrote files whose rows the publication deleted", "rewritten_since"
        )
        if step.mode is ChangeMode.COMPACT:
            reason = _COMPACTED_DELETES
        partitions = {file.partition for file in lost_files if file.partition}
        partitions |= {file.partition for file in replaced_deletes if file.partition}
        raise DependencyFound(Dependency(table, reason, tuple(sorted(partitions)), _run_ids(step)))


def _require_independent_returns(
    table: str, undo: TableUndo, step: SnapshotChange, change: TableChange
) -> None:
    """Raise DependencyFound if a later step might have changed rows that come back in their files.

    The step ran while delete files of the publication deleted these rows, so it did not change them. The
    equality deletes of an upsert concern them anyway, because they have the keys of its input. Those of a
    statement may have only the values of rows that it saw.
    """
    returning_deletes = list(undo.removed_deletes.values())
    is_upsert = step.properties.get(LakeProperty.WRITE_MODE) == "upsert" and not step.removed
    only_by_key = is_upsert and bool(step.deletes) and all(one.by_value for one in step.deletes)
    if not returning_deletes or only_by_key:
        return
    predicate, layout = step.recorded_predicate, change.after
    keys = {*step.key_columns}
    if predicate is not None:
        concerned_deletes = [one for one in returning_deletes if one.may_hold(predicate)]
    elif step.mode is ChangeMode.UPSERT and layout.partition_columns and layout.partition_columns <= keys:
        concerned_deletes = [
            one for one in returning_deletes if one.everywhere or one.partition in step.partitions
        ]
    else:
        concerned_deletes = returning_deletes if step.touched_files or step.deletes else []
    if concerned_deletes:
        partitions = tuple(sorted({one.partition for one in concerned_deletes if one.partition}))
        raise DependencyFound(Dependency(table, _ROWS_CHANGED, partitions, _run_ids(step)))


def _require_no_skipped_keys(table: str, undo: TableUndo, step: SnapshotChange) -> None:
    """Raise DependencyFound for a later upsert that may have skipped keys of the publication.

    These are upserts that keep rows with existing keys. Their files do not show which keys they skipped.
    """
    if undo.removed and _keeps_existing_rows(step):
        reason = CodedReason("a later upsert may have skipped keys of the publication", "keys_skipped")
        raise DependencyFound(Dependency(table, reason, _partitions(undo.removed.values()), _run_ids(step)))


def _replaces_whole_table(step: SnapshotChange) -> bool:
    """Return whether the step replaced all rows of the table, by the write mode that it recorded.

    The removed files do not show this: an update of all rows also removes all files.
    """
    return step.properties.get(LakeProperty.WRITE_MODE) == "replace_table"


def _follow_compaction(undo: TableUndo, step: SnapshotChange, change: TableChange) -> SnapshotChange:
    """Adapt `undo` to a compaction, and return the rest of the step.

    The rest has neither the mapped partitions nor the removed files of reversed partitions.
    If the compaction rewrote only files that the undo removes, the undo removes the compacted files instead.
    If it joined them with other files, it is reversed first, provided that the rows are provably the same.
    """
    removal = SnapshotChange(0, ChangeMode.REWRITE, removed=(*undo.removed.values(), *undo.split_files))
    own_removal = replace(removal, removed=tuple(undo.removed.values()))
    main_change = replace(change, steps=(step,))
    mapped = map_over_compactions(replace(change, steps=(own_removal,)), main_change)
    undo.removed = {file.path: file for file in mapped.steps[0].removed}
    new_paths = {file.path for file in step.added if file.path in undo.removed}
    mapped_partitions = {file.partition for file in step.added if file.path in new_paths}
    remaining = replace(
        step,
        added=tuple(file for file in step.added if file.partition not in mapped_partitions),
        removed=tuple(file for file in step.removed if file.partition not in mapped_partitions),
    )
    reversed_change = reverse_compactions(
        replace(change, steps=(removal,)), replace(change, steps=(remaining,))
    )
    reversals = list(reversed_change.steps[:-1])
    undo.reversals[:0] = reversals
    reversed_partitions = {file.partition for reversal in reversals for file in reversal.added}
    return replace(
        remaining,
        removed=tuple(file for file in remaining.removed if file.partition not in reversed_partitions),
    )


def _require_independent_deletes(table: str, undo: TableUndo, step: SnapshotChange) -> None:
    """Raise DependencyFound if delete files of a later step concern rows of the publication.

    These are rows that the undo restores, and rows of the publication of which the step wrote new versions.
    """
    if not step.deletes:
        return
    hit_files = find_hit_files(step.deletes, list(undo.restored.values()))
    if step.added and step.mode is not ChangeMode.UPSERT:
        # An update wrote new versions of the rows that it deleted.
        hit_files += find_hit_files(step.deletes, list(undo.removed.values()))
    if hit_files:
        reason = CodedReason("later changes updated or deleted rows of the publication", "rows_changed_since")
        raise DependencyFound(Dependency(table, reason, _partitions(hit_files), _run_ids(step)))


def _require_independent_rows(table: str, undo: TableUndo, step: SnapshotChange, change: TableChange) -> None:
    """Raise DependencyFound if a later step might have changed the rows that the undo restores.

    The step ran while these rows were missing, so it did not change them.
    """
    restored_files = list(undo.restored.values())
    if not restored_files:
        return
    predicate = step.recorded_predicate
    if predicate is not None:
        concerned_files = [file for file in restored_files if file.may_hold(predicate)]
    elif step.mode is ChangeMode.UPSERT:
        concerned_files = _files_with_its_keys(step, restored_files, change.after)
    else:
        # The statement of a user may have matched restored rows, wherever the rows that it changed are.
        concerned_files = restored_files if step.touched_files or step.deletes else []
    if concerned_files:
        raise DependencyFound(Dependency(table, _ROWS_CHANGED, _partitions(concerned_files), _run_ids(step)))


def _files_with_its_keys(step: SnapshotChange, files: list[File], layout: Layout) -> list[File]:
    """Return the files among `files` that may have a row with a key of the upsert `step`."""
    if not {*step.key_columns} <= {column.name for column in layout.columns}:
        return files  # a key column was renamed or dropped since
    if layout.partition_columns and layout.partition_columns <= {*step.key_columns}:
        files = [file for file in files if file.partition in step.partitions]
    own_step = SnapshotChange(0, ChangeMode.UPSERT, added=tuple(files), key_columns=step.key_columns)
    return [] if files and has_disjoint_keys(own_step, [step]) else files


def _require_known_layout(table: str, undo: TableUndo, change: TableChange, own: OwnChange) -> None:
    """Raise DependencyFound if the undo would have to change more than rows, columns and properties.

    This is so if the publication changed metadata of the table other than the partition spec, if the undo
    restores files and the spec was changed by the publication or later, or if the format version is above 2.
    """
    if change.after.format_version > _MAX_FORMAT_VERSION:
        reason = CodedReason(
            f"its format version is {change.after.format_version}; an undo writes version"
            f" {_MAX_FORMAT_VERSION} at most",
            "format_version",
        )
        raise DependencyFound(Dependency(table, reason))
    old_layout = own.old_layout
    if old_layout is None:
        return
    has_restored_files = bool(undo.restored or undo.restored_deletes)
    if has_restored_files and change.before is not None and change.before.spec != change.after.spec:
        reason = CodedReason("its partition spec has changed, and files would be restored", "partition_spec")
        raise DependencyFound(Dependency(table, reason))
    old_others = dict(old_layout.others)
    for name, value in own.new_layout.others:
        if value != old_others.get(name):
            reason = CodedReason(f"the publication changed its {name}", f"{name.replace(' ', '_')}_changed")
            raise DependencyFound(Dependency(table, reason))


def _plan_spec(
    table: str, undo: TableUndo, steps: Sequence[SnapshotChange], change: TableChange, own: OwnChange
) -> None:
    """Plan to make the earlier partition spec the default again, if the undone publications changed it.

    `steps` are those of `change` that no earlier undo has reversed. Raises DependencyFound if the
    publications also changed the columns, if the spec or the columns were changed since, or if a later step
    added data or delete files: without the publications, these would be partitioned otherwise.
    """
    old_layout = own.old_layout
    if old_layout is None or old_layout.spec == own.new_layout.spec:
        return
    if old_layout.shape != own.new_layout.shape:
        # The spec stays in the metadata, and readers of the metadata may need its column.
        reason = CodedReason("the publication changed its columns and its partition spec", "partition_spec")
        raise DependencyFound(Dependency(table, reason))
    if change.after.spec != own.new_layout.spec:
        raise DependencyFound(Dependency(table, SPEC_CHANGED))
    if change.after.shape != own.new_layout.shape:
        # A later publication may have dropped a column of the old spec, or given its name to another one.
        reason = CodedReason("its columns were changed later", "columns_used")
        raise DependencyFound(Dependency(table, reason))
    later_steps = [step for step in steps if step.snapshot_id not in own.snapshot_ids]
    if any(step.mode is ChangeMode.UNKNOWN for step in later_steps):
        raise DependencyFound(Dependency(table, _NOT_INVERTIBLE[ChangeMode.UNKNOWN]))
    if writers := [step for step in later_steps if step.added or step.deletes]:
        reason = CodedReason(
            "later changes were written with the partition spec of the publication", "partition_spec_used"
        )
        partitions = tuple(sorted({name for step in writers for name in step.partitions if name}))
        run_ids = tuple(dict.fromkeys(run_id for step in writers for run_id in _run_ids(step)))
        if any(not step.run_id for step in writers):
            run_ids = ()  # a writer that is not a run cannot be undone
        raise DependencyFound(Dependency(table, reason, partitions, run_ids))
    undo.restores_spec = True


def _plan_columns(
    table: str, undo: TableUndo, steps: Sequence[SnapshotChange], change: TableChange, own: OwnChange
) -> None:
    """Plan to restore the earlier columns in `undo`, if the undone publications changed the columns.

    `steps` are those of `change` that no earlier undo has reversed. Raises DependencyFound if a later
    publication has added data or delete files, or has changed the columns,
    the partition spec or the sort order since: these may use a column that the undo would remove.
    """
    old_layout = own.old_layout
    if old_layout is None or old_layout.shape == own.new_layout.shape:
        return
    own_ids = own.snapshot_ids
    others = [step for step in steps if step.snapshot_id not in own_ids]
    writers = [step for step in others if step.added or step.deletes]
    present, new = change.after, own.new_layout
    has_changed = (present.shape, present.spec, present.sort_order) != (new.shape, new.spec, new.sort_order)
    if has_changed or writers:
        reason = CodedReason("later changes were written with the columns of the publication", "columns_used")
        run_ids = tuple(dict.fromkeys(run_id for step in writers for run_id in _run_ids(step)))
        raise DependencyFound(Dependency(table, reason, run_ids=run_ids))
    undo.old_layout = old_layout


def _require_own_positions(
    table: str, change: TableChange, own: OwnChange, current_properties: Mapping[str, str]
) -> None:
    """Raise DependencyFound if a later run started from positions that the undone publications recorded.

    The positions of a consumer and the offsets of an ingestion record which input was read. If a later
    publication has moved them on, the input of the undone publication would never be read again.
    """
    moved_names = [
        name
        for name, value in own.new_properties.items()
        if find_exclusive_property(name) is not None and current_properties.get(name) != value
    ]
    for name in moved_names:
        reason = CodedReason(
            "a later run of the same ingestion or consumer started from the positions of the publication",
            "positions_moved",
        )
        steps = [
            step
            for step in change.steps
            if step.snapshot_id not in own.snapshot_ids and name in step.properties
        ]
        run_ids = [run_id for step in steps for run_id in _run_ids(step)]
        run_ids += recorded_run_ids(name, current_properties.get(name))
        raise DependencyFound(Dependency(table, reason, run_ids=tuple(dict.fromkeys(run_ids))))


def recorded_run_ids(name: str, value: str | None) -> list[str]:
    """Return a list with the id of the run that a consumer's position names; empty for other properties."""
    if value is None or not name.startswith(LakeProperty.CONSUMED):
        return []
    try:
        return [ConsumptionRecord.from_json(value).run_id]
    except (ValueError, KeyError, TypeError):
        return []


def _plan_properties(
    undo: TableUndo, own: OwnChange, current_properties: Mapping[str, str], keep_positions: bool
) -> None:
    """Plan to restore the earlier values of properties in `undo`, except those changed again since."""
    removed_names = []
    for name, old_value in own.old_properties.items():
        exclusive = find_exclusive_property(name)
        is_kept = keep_positions and exclusive is not None and exclusive.is_position
        current_value = current_properties.get(name)
        if is_kept or current_value != own.new_properties.get(name) or current_value == old_value:
            continue
        if old_value is None:
            removed_names.append(name)
        else:
            undo.properties_set[name] = old_value
    undo.properties_removed = tuple(removed_names)


def find_returning_deletes(
    undo: TableUndo, old_deletes: Sequence[DeleteFile], table: str
) -> Dependency | None:
    """Return a dependency if delete files had deleted rows of the restored files; else None.

    `old_deletes` are the delete files before the undone publications. They do not apply to a restored file,
    because it gets a new sequence number, so the deleted rows would come back.
    """
    hit_files = find_hit_files(old_deletes, list(undo.restored.values()))
    if not hit_files:
        return None
    return Dependency(table, _DELETED_ROWS, _partitions(hit_files))


def _partitions(files: Collection[File]) -> tuple[str, ...]:
    return tuple(sorted({file.partition for file in files if file.partition}))


def _run_ids(step: SnapshotChange) -> tuple[str, ...]:
    return (step.run_id,) if step.run_id else ()
