"""Reverse compactions of `main` for a run that needs the files as they were. Pure functions.

A compaction must never make a user's run fail. A run that began before it removes the old files, which `main`
no longer has. If the run removed all old files of a partition, `map_over_compactions` lets it remove the new
ones. If it removed only some of them, as an upsert does, the new files also hold rows that the run keeps.
Then the rebase first restores the old files of that partition and removes the new ones, by a snapshot of the
operation `replace`. After it the run's own steps apply unchanged. Nothing is read but manifests.

Files are restored only if the rows are provably the same: both sides have the same number of rows, and no
rows were deleted before. Otherwise deleted rows would come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from branchlake_dagster.publication.conflicts import group_by_partition, has_same_rows
from branchlake_dagster.publication.table_change import ChangeMode, File, SnapshotChange, TableChange
from branchlake_dagster.stored_names import LakeProperty, MaintenanceKind


def reverse_compactions(run_change: TableChange, main_change: TableChange) -> TableChange:
    """Return `run_change`, preceded by steps that restore files which `main` has compacted.

    The old files of a partition are restored if the run removes one of them and the compaction provably kept
    their rows (`has_same_rows`). Otherwise the partition stays compacted, so the run is refused. If `main`
    compacted files twice, the later compaction is reversed first. Returns `run_change` itself if nothing is
    restored.
    """
    reversals: list[SnapshotChange] = []
    for number, main_step in enumerate(main_change.steps):
        if main_step.mode is not ChangeMode.COMPACT:
            continue
        needed_paths = {file.path for step in (*reversals, *run_change.steps) for file in step.removed}
        new_groups = group_by_partition(main_step.added)
        removed_files: list[File] = []
        restored_files: list[File] = []
        for partition, old_files in group_by_partition(main_step.removed).items():
            is_needed = any(file.path in needed_paths for file in old_files)
            new_files = new_groups.get(partition, ())
            if is_needed and has_same_rows(old_files, new_files, main_change.steps[: number + 1]):
                removed_files += new_files
                restored_files += old_files
        if restored_files:
            reversal = SnapshotChange(
                main_step.snapshot_id,
                ChangeMode.COMPACT,
                added=tuple(restored_files),
                removed=tuple(removed_files),
                properties={LakeProperty.MAINTENANCE: MaintenanceKind.COMPACTION_REVERSED},
                is_reversal=True,
            )
            reversals.insert(0, reversal)
    return replace(run_change, steps=(*reversals, *run_change.steps)) if reversals else run_change


def drop_reversed_compactions(steps: Sequence[SnapshotChange]) -> tuple[SnapshotChange, ...]:
    """Return the steps without the files of partitions that one step compacted and a later step restored.

    These files are removed from both steps. No step in between can have changed them: the reversal would have
    been refused. The steps themselves stay, so that their snapshot ids can still be found.
    """
    kept_steps = list(steps)
    for number, reversal in enumerate(kept_steps):
        if reversal.mode is not ChangeMode.COMPACT:
            continue
        for earlier_number in reversed(range(number)):
            compaction = kept_steps[earlier_number]
            if compaction.mode is ChangeMode.COMPACT:
                partitions = _mirrored_partitions(compaction, kept_steps[number])
                if partitions:
                    kept_steps[earlier_number] = _without_partitions(compaction, partitions)
                    kept_steps[number] = _without_partitions(kept_steps[number], partitions)
    return tuple(kept_steps)


def _mirrored_partitions(compaction: SnapshotChange, reversal: SnapshotChange) -> frozenset[str]:
    """Return the partitions in which `reversal` added what `compaction` removed, and vice versa.

    Files are compared by path. Partitions in which `reversal` added no file are omitted.
    """
    old, new = _paths_by_partition(compaction.removed), _paths_by_partition(compaction.added)
    removed, restored = _paths_by_partition(reversal.removed), _paths_by_partition(reversal.added)
    return frozenset(
        partition
        for partition, paths in restored.items()
        if paths == old.get(partition) and removed.get(partition) == new.get(partition)
    )


def _paths_by_partition(files: Sequence[File]) -> dict[str, frozenset[str]]:
    return {
        partition: frozenset(file.path for file in group)
        for partition, group in group_by_partition(files).items()
    }


def _without_partitions(step: SnapshotChange, partitions: frozenset[str]) -> SnapshotChange:
    return replace(
        step,
        added=tuple(file for file in step.added if file.partition not in partitions),
        removed=tuple(file for file in step.removed if file.partition not in partitions),
    )
