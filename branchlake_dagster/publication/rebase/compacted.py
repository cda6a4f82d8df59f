"""A run that replaced files which `main` has compacted since: removing the new files instead. Pure functions.

Allowed where the rows are provably the same: the run removed all files of a partition that a compaction
rewrote, the new files have exactly as many rows, and nobody deleted rows in between. Rows do not change their
partition in a compaction, so each partition is mapped on its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from branchlake_dagster.publication.rebase.changes import File, Mode, SnapshotChange, TableChange


def mapped(mine: TableChange, theirs: TableChange) -> TableChange:
    """`mine`, removing what `main`'s compactions made of the files that it removed, where that is proven."""
    for number, other in enumerate(theirs.steps):
        if other.mode is Mode.COMPACT:
            mine = _over(mine, other, theirs.steps[: number + 1])
    return mine


def _over(mine: TableChange, compaction: SnapshotChange, since: Sequence[SnapshotChange]) -> TableChange:
    """`mine` over one compaction; `since` are `main`'s steps from the base up to it."""
    gone, made = _by_partition(compaction.removed), _by_partition(compaction.added)
    removed = {file.path for step in mine.steps for file in step.removed}
    instead = {
        partition: (frozenset(file.path for file in old), made[partition])
        for partition, old in gone.items()
        if {file.path for file in old} <= removed and _same_rows(old, made[partition], since)
    }
    if not instead:
        return mine
    steps: list[SnapshotChange] = []
    for step in mine.steps:
        files = list(step.removed)
        for partition, (old, new) in list(instead.items()):
            if any(file.path in old for file in step.removed):
                files += new  # with the first of them; a later step finds none of its own left
                instead[partition] = old, ()
            files = [file for file in files if file.path not in old]
        steps.append(replace(step, removed=tuple(files)))
    return replace(mine, steps=tuple(steps))


def _same_rows(old: Iterable[File], new: Iterable[File], since: Sequence[SnapshotChange]) -> bool:
    counts = [[file.rows for file in files] for files in (old, new)]
    if any(rows is None for side in counts for rows in side):
        return False
    deletes = [one for step in since if step.mode is not Mode.COMPACT for one in step.deletes]
    if any(one.may_hit(file) for one in deletes for file in old):
        return False
    before, after = (sum(rows or 0 for rows in side) for side in counts)
    return before == after


def _by_partition(files: Iterable[File]) -> Mapping[str, tuple[File, ...]]:
    found: defaultdict[str, tuple[File, ...]] = defaultdict(tuple)
    for file in files:
        found[file.partition] += (file,)
    return found
