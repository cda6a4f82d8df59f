"""Whether a run's change to a table can be replayed on what `main` has become. Pure functions.

Replaying is allowed where the result is what running the run afterwards would have given, as far as its
files can tell; whatever they cannot tell is refused (docs/adr/0008).

What a rebase does not carry of a run's change to a table's metadata. Pure functions.

A rebase is built on `main`'s metadata, so what `main` changed stays. Of the run it carries snapshots, columns
with their documentation, and properties. Anything else it would lose without a word, and is refused by name.

A run that replaced files which `main` has compacted since: removing the new files instead. Pure functions.

Allowed where the rows are provably the same: the run removed all files of a partition that a compaction
rewrote, the new files have exactly as many rows, and nobody deleted rows in between. Rows do not change their
partition in a compaction, so each partition is mapped on its own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from branchlake_dagster.publication.table_change import (
    Bounds,
    DeleteFile,
    File,
    Layout,
    Mode,
    SnapshotChange,
    TableChange,
)
from branchlake_dagster.wording import Reason

_WIDER = {("int", "long"), ("float", "double")}
_DECIMAL = re.compile(r"decimal\((\d+), (\d+)\)")


def readable_as(written: str, now: str) -> bool:
    """Whether values of files written as one type are the same values when they are read as the other.

    Nested types are readable as themselves only.
    """
    if written == now or (written, now) in _WIDER:
        return True
    before, after = _DECIMAL.fullmatch(written), _DECIMAL.fullmatch(now)
    if before is None or after is None:
        return False
    return before[2] == after[2] and int(before[1]) <= int(after[1])


_WRITABLE = 2
"""The newest format version whose manifests PyIceberg writes."""

_OWN = frozenset({"location", "identity"})
"""A table that both sides created has these of the first one."""


def not_carried(mine: TableChange, theirs: TableChange) -> Reason | None:
    """Why a rebase of `mine` onto `theirs` would lose something of `mine`; None when it would not."""
    if theirs.after.format_version > _WRITABLE:
        return Reason(
            f"its format version is {theirs.after.format_version}, and a rebase writes"
            f" version {_WRITABLE} at most (no deletion vectors, no row lineage)",
            "format_version_of_main",
        )
    if mine.expired:
        why = f"the run expired {mine.expired} of its snapshots, which a rebase does not carry"
        return Reason(why, "snapshots_expired")
    if mine.before is None:
        return _created_apart(mine, theirs)
    if mine.after.format_version != mine.before.format_version:
        why = "the run changed its format version, which a rebase does not carry"
        return Reason(why, "format_version_changed")
    was = dict(mine.before.others)
    for name, value in mine.after.others:
        if value != was.get(name):
            why = f"the run changed its {name}, which a rebase does not carry"
            return Reason(why, f"{name.replace(' ', '_')}_changed")
    return None


def _created_apart(mine: TableChange, theirs: TableChange) -> Reason | None:
    """Both sides made the table: what it then is was decided by the first."""
    if mine.after.format_version != theirs.after.format_version:
        return Reason(
            "both sides created it with different format versions", "created_with_other_format_version"
        )
    now = dict(theirs.after.others)
    for name, value in mine.after.others:
        if name not in _OWN and value != now.get(name):
            code = f"created_with_other_{name.replace(' ', '_')}"
            return Reason(f"both sides created it with different {name}", code)
    return None


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


_NEVER = {
    Mode.UNKNOWN: Reason("its history does not lead back to the run's base", "history_lost"),
    Mode.OLD_LAYOUT: Reason("files of an older partition spec were touched", "older_partition_spec"),
    Mode.ROW_DELETES: Reason(
        "the run wrote delete files (merge-on-read), which cannot be replayed", "run_wrote_delete_files"
    ),
    Mode.DELETION_VECTORS: Reason(
        "the run wrote deletion vectors (format version 3), which cannot be replayed",
        "run_wrote_deletion_vectors",
    ),
    Mode.REPLACE_TABLE: Reason("the run replaced the whole table", "run_replaced_table"),
}
_THEIRS = {
    Mode.UNKNOWN: Reason(
        "its history does not lead back to the run's base (rolled back, or replaced)", "history_lost"
    ),
    Mode.OLD_LAYOUT: _NEVER[Mode.OLD_LAYOUT],
}
_DETAILS = "columns' documentation, identifier fields or defaults"


@dataclass(frozen=True)
class Overlap:
    """Why a change cannot be replayed: in words, in which partitions, and against whose steps.

    `only_expired`: it could be, had the run not taken snapshots out of the table.
    """

    why: Reason
    partitions: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    only_expired: bool = False


def overlap(mine: TableChange, theirs: TableChange) -> Overlap | None:
    """None when `mine` may be replayed after `theirs`; both are changes of one table since one base."""
    if why := _layouts(mine, theirs):
        return Overlap(why, runs=_runs(theirs.steps))
    own: set[str] = set()
    for step in mine.steps:
        if found := _step(step, own, theirs):
            return found
        own |= {file.path for file in step.added}
    if why := not_carried(mine, theirs):
        only_expired = bool(mine.expired) and not_carried(replace(mine, expired=0), theirs) is None
        return Overlap(why, runs=_runs(theirs.steps), only_expired=only_expired)
    return None


def _step(step: SnapshotChange, own: Set[str], theirs: TableChange) -> Overlap | None:
    """One step of the run's; `own` are the paths of the files that its earlier steps added."""
    everyone = _runs(theirs.steps)
    mode = Mode.ROW_DELETES if step.deletes and step.mode not in _NEVER else step.mode
    if mode in _NEVER:
        return Overlap(_NEVER[mode], runs=everyone)
    if mode is Mode.APPEND:
        return None  # whatever main did, appending after it is what running later would have done
    for other in theirs.steps:
        if other.mode in (Mode.UNKNOWN, Mode.OLD_LAYOUT):
            known = _THEIRS[other.mode]
            return Overlap(Reason(f"main's change cannot be compared: {known}", known.code), runs=everyone)
    if gone := _gone(step, theirs):
        return gone
    if hit := _hit(step, own, theirs):
        return hit
    # The same rows in other files are no change of rows; which files the run removed was asked above.
    others = [other for other in theirs.steps if other.mode is not Mode.COMPACT]
    if mode is Mode.COMPACT:
        return None
    if found := _replaced(step, others):
        return found
    if step.recorded is not None or not any(other.touched or other.deletes for other in others):
        return None
    shared = {name: [other for other in others if name in other.partitions] for name in step.partitions}
    shared = {name: steps for name, steps in shared.items() if steps}
    if mode is Mode.UPSERT:
        return _upserted(step, shared, others, theirs.after)
    if not shared:
        return None
    why = (
        Reason("both sides changed the same partitions", "same_partitions")
        if any(shared)
        else Reason("both sides changed its rows", "same_table")
    )
    return Overlap(why, tuple(sorted(shared)), _runs([s for steps in shared.values() for s in steps]))


def _upserted(
    step: SnapshotChange,
    shared: Mapping[str, Sequence[SnapshotChange]],
    others: Sequence[SnapshotChange],
    now: Layout,
) -> Overlap | None:
    """An upsert is apart from others by partition, if the key has it, or by the bounds of a key column."""
    names = {column.name for column in now.columns}
    if lost := [key for key in step.keys if key not in names]:
        why = f"its key column {lost[0]} was renamed or dropped, so the keys cannot be compared"
        return Overlap(Reason(why, "key_column_gone"), tuple(sorted(shared)), _runs(others))
    by_partition = now.partition_columns and now.partition_columns <= {*step.keys}
    if (not shared and by_partition) or _disjoint(step, others):
        return None
    meeting = [other for steps in shared.values() for other in steps]
    why = Reason("both sides may have changed the same keys", "same_keys")
    return Overlap(why, tuple(sorted(shared)), _runs(meeting or others))


def _replaced(step: SnapshotChange, others: Sequence[SnapshotChange]) -> Overlap | None:
    """What either side replaced as a predicate, which its files do not tell."""
    mine = step.recorded
    for other in others:
        theirs = other.replaced
        if mine is not None and theirs is not None:
            if mine.meets(theirs):
                why = Reason("both sides replaced the same partitions", "same_partitions_replaced")
                return Overlap(why, _named(step, other), _runs([other]))
        elif mine is not None:
            held = {file.partition for file in other.touched if file.may_hold(mine)}
            held |= {one.partition for one in other.deletes if one.may_hold(mine)}
            if held:
                why = Reason("main changed partitions that the run replaced", "main_changed_replaced")
                return Overlap(why, _named(step, other, held), _runs([other]))
        elif theirs is not None:
            held = {file.partition for file in step.touched if file.may_hold(theirs)}
            if held:
                why = Reason("main replaced partitions that the run changed", "main_replaced_changed")
                return Overlap(why, _named(other, step, held), _runs([other]))
    return None


def _named(step: SnapshotChange, other: SnapshotChange, held: Set[str] = frozenset()) -> tuple[str, ...]:
    """For people: the Dagster partitions that both sides name, else the step's own, else the files'."""
    both = {name for name in set(step.named) & set(other.named) if not name.startswith("…")}
    return tuple(sorted(both or set(step.named) or set(other.named) or held))


def _hit(step: SnapshotChange, own: Set[str], theirs: TableChange) -> Overlap | None:
    """Files the run removed from which `main` has deleted rows by delete files: they would come back.

    Every delete file since the base applies to them, whatever else was done to the table before or after it.
    """
    removed = [file for file in step.removed if file.path not in own]
    for other in theirs.steps:
        if other.mode is Mode.COMPACT or not removed:
            continue  # deletes written anew for the same rows
        if hit := _which(other.deletes, removed):
            why = (
                Reason(
                    "main deleted rows (deletion vectors) of files that the run replaced",
                    "main_wrote_deletion_vectors",
                )
                if other.mode is Mode.DELETION_VECTORS
                else Reason(
                    "main deleted rows (merge-on-read) of files that the run replaced",
                    "main_wrote_delete_files",
                )
            )
            return Overlap(why, tuple(sorted({file.partition for file in hit})), _runs([other]))
    return None


def _which(deletes: Sequence[DeleteFile], files: Sequence[File]) -> list[File]:
    """The files that one of the delete files may hit. Most of those name one file, or one partition."""
    one_path = {one.paths.low for one in deletes if one.paths and one.paths.low == one.paths.high}
    lengths = {len(path) for path in one_path}  # a truncated path is the beginning of the file's
    partitions = {one.partition for one in deletes if one.paths is None}
    rest = [one for one in deletes if one.everywhere or (one.paths and one.paths.low != one.paths.high)]
    return [
        file
        for file in files
        if file.partition in partitions
        or any(file.path.encode()[:length] in one_path for length in lengths)
        or any(one.may_hit(file) for one in rest)
    ]


def _gone(step: SnapshotChange, theirs: TableChange) -> Overlap | None:
    """Files the run removed that somebody else removed too."""
    theirs_removed = theirs.removed
    twice = [file for file in step.removed if file.path in theirs_removed]
    if not twice:
        return None
    others = [theirs_removed[file.path] for file in twice]
    compacted = all(other.mode is Mode.COMPACT for other in others)
    why = (
        Reason("files the run replaced were compacted", "compacted")
        if compacted
        else Reason("both sides replaced the same files", "same_files")
    )
    return Overlap(why, tuple(sorted({file.partition for file in twice})), _runs(others))


def _disjoint(step: SnapshotChange, others: Sequence[SnapshotChange]) -> bool:
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


def _layouts(mine: TableChange, theirs: TableChange) -> Reason | None:
    """Why the run's files would not be valid in the table as it is now, or its columns not be the run's."""
    now = theirs.after
    if mine.after.spec != now.spec:
        if [field[1:] for field in mine.after.spec] == [field[1:] for field in now.spec]:
            return Reason("a column of its partition spec was renamed", "partition_column_renamed")
        return Reason("its partition spec differs", "partition_spec")
    if mine.before is None or theirs.before is None:
        if not (mine.created and theirs.created):
            return Reason("it was dropped and created again", "created_again")
        if mine.after.columns != now.columns:
            return Reason("both sides created it with different columns", "created_with_other_columns")
        if mine.after.schema == now.schema:
            return None
        return Reason(f"both sides created it with different {_DETAILS}", "created_with_other_details")
    if mine.before.shape == mine.after.shape:
        return _readable(mine.after, now)
    if theirs.before.shape == now.shape and theirs.before.highest_column_id == now.highest_column_id:
        return None
    if mine.after.shape == now.shape:
        return None
    same = mine.after.columns == now.columns
    if same:
        return Reason(f"both sides changed its {_DETAILS}", "column_details")
    return Reason("both sides changed its columns", "columns")


def _readable(written: Layout, now: Layout) -> Reason | None:
    """Whether files of one layout can be read under a newer one.

    By id: missing columns are null, narrower types are widened.
    """
    current = {column.id: column for column in now.columns}
    known = {column.id for column in written.columns}
    for column in written.columns:
        if column.id not in current:
            return Reason(f"its column {column.name} was dropped", "column_dropped")
        if not readable_as(column.type, current[column.id].type):
            return Reason(f"its column {column.name} has changed its type", "column_type")
        if current[column.id].required and not column.required:
            return Reason(f"its column {column.name} has become required", "column_required")
    for column in now.columns:
        if column.id not in known and column.required:
            return Reason(f"it has a new required column {column.name}", "new_required_column")
    return None


def _runs(steps: Iterable[SnapshotChange]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(step.run_id for step in steps if step.run_id))
