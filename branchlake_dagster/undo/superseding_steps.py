"""Find the later steps of a table that replaced all rows of undone steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from branchlake_dagster.publication.table_change import ChangeMode, Layout, SnapshotChange
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.recorded_partitions import is_shortened
from branchlake_dagster.tables.replaced_rows import ReplacedCondition, ValueRange

_PERIODS_US = {"hour": 3_600_000_000, "day": 86_400_000_000}
"""The length of a partition in microseconds, by the name of its transform."""


def find_superseding_steps(
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


def _replaces_whole_table(step: SnapshotChange) -> bool:
    """Return whether the step replaced all rows of the table, by the write mode that it recorded.

    The removed files do not show this: an update of all rows also removes all files.
    """
    return step.properties.get(LakeProperty.WRITE_MODE) == "replace_table"


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
    if not keeps_existing_rows(step):
        return False
    predicate = own_step.recorded_predicate
    slices = predicate.slices if predicate is not None else ()
    ids = {condition.field_id for conditions in slices for condition in conditions}
    names = layout.partition_columns | {column.name for column in layout.columns if column.id in ids}
    return not (ids and names <= {*step.key_columns})


def keeps_existing_rows(step: SnapshotChange) -> bool:
    """Return whether the step is an upsert that keeps rows whose keys exist already."""
    return step.properties.get(LakeProperty.WHEN_MATCHED) == "keep"
