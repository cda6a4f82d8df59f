"""Adapt the undo of a table to a later step, or find that the later step depends on the undone ones."""

from __future__ import annotations

from dataclasses import replace

from branchlake_dagster.publication.compaction_reversal import reverse_compactions
from branchlake_dagster.publication.conflicts import find_hit_files, has_disjoint_keys, map_over_compactions
from branchlake_dagster.publication.table_change import ChangeMode, File, Layout, SnapshotChange, TableChange
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.undo.superseding_steps import keeps_existing_rows
from branchlake_dagster.undo.undo_plan import (
    Dependency,
    DependencyFound,
    TableUndo,
    list_partitions,
    list_run_ids,
)
from branchlake_dagster.wording import CodedReason

_COMPACTED = CodedReason("rows of the publication were compacted together with others", "compacted")
_COMPACTED_DELETES = CodedReason("files whose rows the publication deleted were compacted since", "compacted")
_ROWS_CHANGED = CodedReason(
    "later changes may concern rows that the publication removed", "rows_changed_since"
)


def follow_later_step(table: str, undo: TableUndo, step: SnapshotChange, change: TableChange) -> None:
    """Adapt `undo` so that it can be made after a later step, which stays.

    Raises DependencyFound if the later step depends on the undone publications.
    """
    _require_live_deletes(table, undo, step)
    if step.mode is ChangeMode.COMPACT:
        step = _follow_compaction(undo, step, change)
    else:
        require_whole_compactions(table, undo, step)
    if lost_files := [file for file in step.removed if file.path in undo.removed]:
        reason = (
            _COMPACTED
            if step.mode is ChangeMode.COMPACT
            else CodedReason("later changes rewrote files of the publication", "rewritten_since")
        )
        raise DependencyFound(Dependency(table, reason, list_partitions(lost_files), list_run_ids(step)))
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
        raise DependencyFound(Dependency(table, reason, tuple(sorted(partitions)), list_run_ids(step)))


def require_whole_compactions(table: str, undo: TableUndo, step: SnapshotChange) -> None:
    """Raise DependencyFound if a step changed compacted files that the undo removes by a reversal."""
    split_files = undo.split_files
    split_paths = {file.path for file in split_files}
    lost_files = [file for file in step.removed if file.path in split_paths]
    if lost_files := lost_files or find_hit_files(step.deletes, split_files):
        raise DependencyFound(Dependency(table, _COMPACTED, list_partitions(lost_files), list_run_ids(step)))


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
        raise DependencyFound(Dependency(table, reason, list_partitions(hit_files), list_run_ids(step)))


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
        raise DependencyFound(
            Dependency(table, _ROWS_CHANGED, list_partitions(concerned_files), list_run_ids(step))
        )


def _files_with_its_keys(step: SnapshotChange, files: list[File], layout: Layout) -> list[File]:
    """Return the files among `files` that may have a row with a key of the upsert `step`."""
    if not {*step.key_columns} <= {column.name for column in layout.columns}:
        return files  # a key column was renamed or dropped since
    if layout.partition_columns and layout.partition_columns <= {*step.key_columns}:
        files = [file for file in files if file.partition in step.partitions]
    own_step = SnapshotChange(0, ChangeMode.UPSERT, added=tuple(files), key_columns=step.key_columns)
    return [] if files and has_disjoint_keys(own_step, [step]) else files


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
        raise DependencyFound(Dependency(table, _ROWS_CHANGED, partitions, list_run_ids(step)))


def _require_no_skipped_keys(table: str, undo: TableUndo, step: SnapshotChange) -> None:
    """Raise DependencyFound for a later upsert that may have skipped keys of the publication.

    These are upserts that keep rows with existing keys. Their files do not show which keys they skipped.
    """
    if undo.removed and keeps_existing_rows(step):
        reason = CodedReason("a later upsert may have skipped keys of the publication", "keys_skipped")
        raise DependencyFound(
            Dependency(table, reason, list_partitions(undo.removed.values()), list_run_ids(step))
        )
