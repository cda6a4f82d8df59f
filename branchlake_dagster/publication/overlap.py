"""Whether a run's change to a table can be replayed on what `main` has become meanwhile. Pure functions.

Replaying is allowed where the result is what running the run afterwards would have given, as far as its
files can tell; whatever they cannot tell is refused (DESIGN §6).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from branchlake_dagster.publication.changes import Bounds, File, Layout, Mode, Step, TableChange

_NEVER = {
    Mode.UNKNOWN: "its history does not lead back to the run's base",
    Mode.OLD_LAYOUT: "files of an older partition spec were touched",
    Mode.ROW_DELETES: "the run wrote delete files (merge-on-read), which cannot be replayed",
    Mode.REPLACE_TABLE: "the run replaced the whole table",
}


@dataclass(frozen=True)
class Overlap:
    """Why a change cannot be replayed: in words, in which partitions, and against whose steps."""

    why: str
    partitions: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()


def overlap(mine: TableChange, theirs: TableChange) -> Overlap | None:
    """None when `mine` may be replayed after `theirs`; both are changes of one table since one base."""
    if why := _layouts(mine, theirs):
        return Overlap(why, runs=_runs(theirs.steps))
    for step in mine.steps:
        if found := _step(step, theirs):
            return found
    return None


def _step(step: Step, theirs: TableChange) -> Overlap | None:
    everyone = _runs(theirs.steps)
    if step.mode in _NEVER:
        return Overlap(_NEVER[step.mode], runs=everyone)
    if step.mode is Mode.APPEND:
        return None  # whatever main did, appending after it is what running later would have done
    for other in theirs.steps:
        if other.mode in (Mode.UNKNOWN, Mode.OLD_LAYOUT):
            return Overlap(f"main's change cannot be compared: {_NEVER[other.mode]}", runs=everyone)
    if gone := _gone(step, theirs):
        return gone
    if step.mode is Mode.COMPACT or not any(other.touched for other in theirs.steps):
        return None
    shared = {name: _touching(name, theirs) for name in step.partitions}
    shared = {name: steps for name, steps in shared.items() if steps}
    if step.mode is Mode.UPSERT:
        touching = theirs.steps
        by_partition = theirs.after.partition_columns and theirs.after.partition_columns <= {*step.keys}
        if (not shared and by_partition) or _disjoint(step, touching):
            return None
        why = "both sides may have changed the same keys"
        return Overlap(
            why, tuple(sorted(shared)), _runs([s for v in shared.values() for s in v] or list(touching))
        )
    if not shared:
        return None
    why = "both sides changed the same partitions" if any(shared) else "both sides changed its rows"
    return Overlap(why, tuple(sorted(shared)), _runs([s for steps in shared.values() for s in steps]))


def _gone(step: Step, theirs: TableChange) -> Overlap | None:
    """Files the run removed that somebody else removed too."""
    theirs_removed = theirs.removed
    twice = [file for file in step.removed if file.path in theirs_removed]
    if not twice:
        return None
    others = [theirs_removed[file.path] for file in twice]
    compacted = all(other.mode is Mode.COMPACT for other in others)
    why = "files the run replaced were compacted" if compacted else "both sides replaced the same files"
    return Overlap(why, tuple(sorted({file.partition for file in twice})), _runs(others))


def _touching(partition: str, theirs: TableChange) -> list[Step]:
    return [step for step in theirs.steps if partition in step.partitions]


def _disjoint(step: Step, others: Sequence[Step]) -> bool:
    """Whether the bounds of one key column prove that no key is on both sides."""
    theirs = [file for other in others for file in other.touched]
    return any(_apart(step.touched, theirs, key) for key in step.keys)


def _apart(mine: Sequence[File], theirs: Sequence[File], column: str) -> bool:
    left, right = _range(mine, column), _range(theirs, column)
    if left is None or right is None:
        return False
    return all(b_high < low or high < b_low for low, high in left for b_low, b_high in right)


def _range(files: Sequence[File], column: str) -> list[Bounds] | None:
    found = [file.bounds(column) for file in files]
    return None if not found or any(bounds is None for bounds in found) else list(filter(None, found))


def _layouts(mine: TableChange, theirs: TableChange) -> str | None:
    """Why the run's files would not be valid in the table as it is now."""
    now = theirs.after
    if mine.after.spec != now.spec:
        return "its partition spec differs"
    if mine.before is None or theirs.before is None:
        if not (mine.created and theirs.created):
            return "it was dropped and created again"
        return None if mine.after.columns == now.columns else "both sides created it with different columns"
    if mine.before.columns == mine.after.columns:
        return _readable(mine.after, now)
    if theirs.before.columns == now.columns and theirs.before.highest_column_id == now.highest_column_id:
        return None
    return None if mine.after.columns == now.columns else "both sides changed its columns"


def _readable(written: Layout, now: Layout) -> str | None:
    """Whether files of one layout can be read under a newer one: by id, missing columns being null."""
    current = {column.id: column for column in now.columns}
    known = {column.id for column in written.columns}
    for column in written.columns:
        if column.id not in current:
            return f"its column {column.name} was dropped"
        if current[column.id].type != column.type:
            return f"its column {column.name} has changed its type"
        if current[column.id].required and not column.required:
            return f"its column {column.name} has become required"
    for column in now.columns:
        if column.id not in known and column.required:
            return f"it has a new required column {column.name}"
    return None


def _runs(steps: Iterable[Step]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(step.run_id for step in steps if step.run_id))
