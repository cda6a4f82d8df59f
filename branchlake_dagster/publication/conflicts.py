"""Decides whether a run's change to a table can be replayed on the current `main`. Pure functions.

A replay is allowed if its result is what the run would have produced on the current `main`, as far as the
files show. Anything that the files cannot show is refused (docs/adr/0008).

A rebase starts from `main`'s metadata, so `main`'s changes stay. From the run it takes snapshots, columns
with their documentation, and properties. The run is refused if it changed anything else, because a rebase
would lose that silently.

If the run replaced files that `main` has compacted since, a rebase removes the compacted files instead. This
is allowed if the rows are provably the same: the run removed all files of a partition that a compaction
rewrote, the new files have exactly as many rows, and no rows were deleted in between. A compaction does not
move rows to another partition, so each partition is handled on its own. An upsert is compared with `main` by
the bounds of its files, and the compacted files have wider ones. For it, and for a run that removed only some
of the old files, the compaction is reversed (`compaction_reversal`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType

from branchlake_dagster.publication.table_change import (
    ChangeMode,
    DeleteFile,
    File,
    FileBounds,
    Layout,
    SnapshotChange,
    TableChange,
)
from branchlake_dagster.stored_names import LakeProperty, find_exclusive_property
from branchlake_dagster.tables.recorded_partitions import is_shortened
from branchlake_dagster.wording import CodedReason

_WIDENINGS = {("int", "long"), ("float", "double")}
_DECIMAL = re.compile(r"decimal\((\d+), (\d+)\)")


def is_readable_as(file_type: str, table_type: str) -> bool:
    """Return whether values in files of `file_type` keep their values when they are read as `table_type`.

    Both are names of Iceberg types, such as `decimal(9, 2)`. Only widening is allowed: `int` to `long`,
    `float` to `double`, and decimals to more digits. A nested type is readable only as itself.
    """
    if file_type == table_type or (file_type, table_type) in _WIDENINGS:
        return True
    before, after = _DECIMAL.fullmatch(file_type), _DECIMAL.fullmatch(table_type)
    if before is None or after is None:
        return False
    return before[2] == after[2] and int(before[1]) <= int(after[1])


_MAX_FORMAT_VERSION = 2
"""The newest format version whose manifests PyIceberg writes."""

_SET_BY_CREATOR = frozenset({"location", "identity"})
"""The metadata that may differ if both sides created the table: the first creator's value stays."""


def find_unreplayable(run_change: TableChange, main_change: TableChange) -> CodedReason | None:
    """Return why a rebase onto `main_change` would lose a part of `run_change`; None if it would not."""
    if main_change.after.format_version > _MAX_FORMAT_VERSION:
        return CodedReason(
            f"its format version is {main_change.after.format_version}, and a rebase writes"
            f" version {_MAX_FORMAT_VERSION} at most (no deletion vectors, no row lineage)",
            "format_version_of_main",
        )
    if run_change.expired_count:
        sentence = (
            f"the run expired {run_change.expired_count} of its snapshots,"
            " and a rebase cannot replay that change"
        )
        return CodedReason(sentence, "snapshots_expired")
    if run_change.before is None:
        return _compare_creations(run_change, main_change)
    if run_change.after.format_version != run_change.before.format_version:
        sentence = "the run changed its format version, and a rebase cannot replay that change"
        return CodedReason(sentence, "format_version_changed")
    base_others = dict(run_change.before.others)
    for name, value in run_change.after.others:
        if value != base_others.get(name):
            sentence = f"the run changed its {name}, and a rebase cannot replay that change"
            return CodedReason(sentence, f"{name.replace(' ', '_')}_changed")
    return None


def _compare_creations(run_change: TableChange, main_change: TableChange) -> CodedReason | None:
    """Return why the tables that both sides created differ in more than location and identity.

    Returns None if they do not. Columns and partition spec are compared by `_check_layouts`.
    """
    if run_change.after.format_version != main_change.after.format_version:
        return CodedReason(
            "both sides created it with different format versions", "created_with_other_format_version"
        )
    main_others = dict(main_change.after.others)
    for name, value in run_change.after.others:
        if name not in _SET_BY_CREATOR and value != main_others.get(name):
            code = f"created_with_other_{name.replace(' ', '_')}"
            return CodedReason(f"both sides created it with different {name}", code)
    return None


def map_over_compactions(run_change: TableChange, main_change: TableChange) -> TableChange:
    """Return `run_change` adapted to `main`'s compactions of files that the run removed.

    The adapted change removes the compacted files instead, where the rows are provably the same.
    """
    for number, main_step in enumerate(main_change.steps):
        if main_step.mode is ChangeMode.COMPACT:
            run_change = _map_over_compaction(run_change, main_step, main_change.steps[: number + 1])
    return run_change


def _map_over_compaction(
    run_change: TableChange, compaction: SnapshotChange, main_steps: Sequence[SnapshotChange]
) -> TableChange:
    """Return `run_change` adapted to one compaction; `main_steps` are `main`'s steps up to that compaction.

    If the run removed all files that the compaction rewrote in a partition, the run's first such step removes
    the compacted files instead.
    """
    files_before, files_after = group_by_partition(compaction.removed), group_by_partition(compaction.added)
    removed_paths = {
        file.path for step in run_change.steps if step.mode is not ChangeMode.UPSERT for file in step.removed
    }
    replacements = {
        partition: (frozenset(file.path for file in old), files_after.get(partition, ()))
        for partition, old in files_before.items()
        if {file.path for file in old} <= removed_paths
        and has_same_rows(old, files_after.get(partition, ()), main_steps)
    }
    if not replacements:
        return run_change
    steps: list[SnapshotChange] = []
    for step in run_change.steps:
        files = list(step.removed)
        for partition, (old, new) in list(replacements.items()):
            if any(file.path in old for file in step.removed):
                files += new  # only in the first step that removes one of the old files
                replacements[partition] = old, ()
            files = [file for file in files if file.path not in old]
        steps.append(replace(step, removed=tuple(files)))
    return replace(run_change, steps=tuple(steps))


def has_same_rows(
    old_files: Iterable[File], new_files: Iterable[File], main_steps: Sequence[SnapshotChange]
) -> bool:
    """Return whether a compaction of `old_files` to `new_files` certainly did not change their rows.

    True if both have the same number of rows and no delete file since the base may delete rows of the old
    files. `main_steps` are `main`'s steps from the base up to the compaction. A file's number of rows counts
    deleted rows too, so equal numbers also show that no rows had been deleted before the base.
    """
    counts = [[file.rows for file in files] for files in (old_files, new_files)]
    if any(rows is None for side in counts for rows in side):
        return False
    deletes = [
        delete_file
        for step in main_steps
        if step.mode is not ChangeMode.COMPACT
        for delete_file in step.deletes
    ]
    if any(delete_file.may_delete_from(file) for delete_file in deletes for file in old_files):
        return False
    before, after = (sum(rows or 0 for rows in side) for side in counts)
    return before == after


def group_by_partition(files: Iterable[File]) -> Mapping[str, tuple[File, ...]]:
    """Return the files by the text of their partition, in the same order."""
    groups: defaultdict[str, tuple[File, ...]] = defaultdict(tuple)
    for file in files:
        groups[file.partition] += (file,)
    return groups


_UNREPLAYABLE_MODES = {
    ChangeMode.UNKNOWN: CodedReason("its history does not lead back to the run's base", "history_lost"),
    ChangeMode.OLD_LAYOUT: CodedReason(
        "files of an older partition spec were touched", "older_partition_spec"
    ),
    ChangeMode.ROW_DELETES: CodedReason(
        "the run wrote delete files (merge-on-read), which cannot be replayed", "run_wrote_delete_files"
    ),
    ChangeMode.DELETION_VECTORS: CodedReason(
        "the run wrote deletion vectors (format version 3), which cannot be replayed",
        "run_wrote_deletion_vectors",
    ),
    ChangeMode.REPLACE_TABLE: CodedReason("the run replaced the whole table", "run_replaced_table"),
}
_INCOMPARABLE_MODES = {
    ChangeMode.UNKNOWN: CodedReason(
        "its history does not lead back to the run's base (rolled back, or replaced)", "history_lost"
    ),
    ChangeMode.OLD_LAYOUT: _UNREPLAYABLE_MODES[ChangeMode.OLD_LAYOUT],
}
_DETAILS = "columns' documentation, identifier fields or defaults"


@dataclass(frozen=True)
class Overlap:
    """The conflict because of which a change cannot be replayed.

    `partitions` are the partitions in conflict, as far as they are known, and `runs` the ids of the published
    runs that the change conflicts with. `only_expired` is true if the change could be replayed if the run had
    not expired snapshots of the table.
    """

    reason: CodedReason
    partitions: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    only_expired: bool = False


def find_overlap(run_change: TableChange, main_change: TableChange) -> Overlap | None:
    """Return why `run_change` cannot be replayed after `main_change`; None if it can.

    Both are changes of the same table since the run's base.
    """
    if reason := _check_layouts(run_change, main_change):
        return Overlap(reason, runs=_run_ids(main_change.steps))
    own_paths: set[str] = set()
    has_deleted = False
    for step in run_change.steps:
        # "Delete the day, insert the day": the inserted rows replace what the predicate of the delete covers.
        # The day may have had no rows at the base, so only the inserted files show it.
        is_insertion = has_deleted and step.mode is ChangeMode.APPEND
        compared_step = replace(step, mode=ChangeMode.REWRITE) if is_insertion else step
        if step_overlap := _check_step(compared_step, own_paths, main_change):
            return step_overlap
        own_paths |= {file.path for file in step.added}
        has_deleted = has_deleted or step.is_metadata_delete
    if reason := find_unreplayable(run_change, main_change):
        only_expired = (
            bool(run_change.expired_count)
            and find_unreplayable(replace(run_change, expired_count=0), main_change) is None
        )
        return Overlap(reason, runs=_run_ids(main_change.steps), only_expired=only_expired)
    return None


def _check_step(step: SnapshotChange, own_paths: Set[str], main_change: TableChange) -> Overlap | None:
    """Return why one step of the run cannot be replayed after `main_change`; None if it can.

    `own_paths` are the files that the run's earlier steps added.
    """
    main_runs = _run_ids(main_change.steps)
    mode = ChangeMode.ROW_DELETES if step.deletes and step.mode not in _UNREPLAYABLE_MODES else step.mode
    if mode in _UNREPLAYABLE_MODES:
        return Overlap(_UNREPLAYABLE_MODES[mode], runs=main_runs)
    if mode is ChangeMode.APPEND:
        return None  # an append after main's change gives the same rows as a later run
    for main_step in main_change.steps:
        if main_step.mode in (ChangeMode.UNKNOWN, ChangeMode.OLD_LAYOUT):
            mode_reason = _INCOMPARABLE_MODES[main_step.mode]
            return Overlap(
                CodedReason(f"main's change cannot be compared: {mode_reason}", mode_reason.code),
                runs=main_runs,
            )
    if file_overlap := _check_removed_files(step, own_paths, main_change):
        return file_overlap
    if delete_overlap := _check_row_deletes(step, own_paths, main_change):
        return delete_overlap
    # A compaction does not change rows. The files that the run removed were compared above.
    main_steps = [
        other
        for other in main_change.steps
        if other.mode is not ChangeMode.COMPACT and not _adds_later_records(other, step)
    ]
    if mode is ChangeMode.COMPACT:
        return None
    if replace_overlap := _check_replaced_rows(step, main_steps):
        return replace_overlap
    if step.recorded_predicate is not None or not any(
        other.touched_files or other.deletes for other in main_steps
    ):
        return None
    shared_steps = {
        name: [other for other in main_steps if name in other.partitions] for name in step.partitions
    }
    shared_steps = {name: steps for name, steps in shared_steps.items() if steps}
    added_nothing = mode is ChangeMode.UPSERT and not step.touched_files and not step.deletes
    if added_nothing and not any(other.removed or other.deletes for other in main_steps):
        return None  # all of its keys were in the table, and main has removed no row since
    if mode is ChangeMode.UPSERT:
        return _check_upsert(step, shared_steps, main_steps, main_change)
    if not shared_steps:
        return None
    reason = (
        CodedReason("both sides changed the same partitions", "same_partitions")
        if any(shared_steps)
        else CodedReason("both sides changed its rows", "same_table")
    )
    return Overlap(
        reason, tuple(sorted(shared_steps)), _run_ids([s for steps in shared_steps.values() for s in steps])
    )


def _adds_later_records(main_step: SnapshotChange, step: SnapshotChange) -> bool:
    """Return whether a step of `main` only appended later records than those that the run's step concerns.

    A step that reprocesses records of an ingestion changes rows of records that the table had at the run's
    base. A later batch of the same ingestion adds rows of other records. Bounds cannot show that if the
    topic's partitions have different offsets. A table that is filled again is never reprocessed.
    """
    later_names = {
        exclusive.later_rows_prefix + name.removeprefix(exclusive.prefix)
        for name in step.properties
        if (exclusive := find_exclusive_property(name)) is not None and exclusive.later_rows_prefix
    }
    return main_step.mode is ChangeMode.APPEND and any(name in main_step.properties for name in later_names)


def _check_upsert(
    step: SnapshotChange,
    shared_steps: Mapping[str, Sequence[SnapshotChange]],
    main_steps: Sequence[SnapshotChange],
    main_change: TableChange,
) -> Overlap | None:
    """Return why an upsert of the run conflicts with `main`'s steps; None if both changed different keys.

    Different keys are proven in one of two ways: all partition columns are key columns and both sides changed
    different partitions, or the bounds of a key column do not overlap. `main_steps` are the steps of
    `main_change` that may concern the upsert, and `shared_steps` those by the partitions that the upsert
    changed too.
    """
    layout = main_change.after
    column_names = {column.name for column in layout.columns}
    if lost_keys := [key for key in step.key_columns if key not in column_names]:
        reason = f"its key column {lost_keys[0]} was renamed or dropped, so the keys cannot be compared"
        return Overlap(
            CodedReason(reason, "key_column_gone"), tuple(sorted(shared_steps)), _run_ids(main_steps)
        )
    by_partition = layout.partition_columns and layout.partition_columns <= {*step.key_columns}
    if (not shared_steps and by_partition) or has_disjoint_keys(
        step, main_steps, find_old_files(main_change.steps)
    ):
        return None
    meeting_steps = [main_step for steps in shared_steps.values() for main_step in steps]
    reason = CodedReason("both sides may have changed the same keys", "same_keys")
    return Overlap(reason, tuple(sorted(shared_steps)), _run_ids(meeting_steps or main_steps))


def _check_replaced_rows(step: SnapshotChange, main_steps: Sequence[SnapshotChange]) -> Overlap | None:
    """Return the overlap if one side replaced rows by a predicate that the other side also changed.

    Returns None if there is no such overlap. The predicates are compared, because files do not show which
    rows a predicate covers. If only one side has a predicate, it is compared with the other side's files.
    """
    run_predicate = step.recorded_predicate
    for main_step in main_steps:
        main_predicate = main_step.replaced_predicate
        if run_predicate is not None and main_predicate is not None:
            if run_predicate.overlaps(main_predicate):
                reason = CodedReason("both sides replaced the same partitions", "same_partitions_replaced")
                return Overlap(reason, _common_partitions(step, main_step), _run_ids([main_step]))
        elif run_predicate is not None:
            held_partitions = {
                file.partition for file in main_step.touched_files if file.may_hold(run_predicate)
            }
            held_partitions |= {
                delete_file.partition
                for delete_file in main_step.deletes
                if delete_file.may_hold(run_predicate)
            }
            if held_partitions:
                reason = CodedReason("main changed partitions that the run replaced", "main_changed_replaced")
                return Overlap(
                    reason, _common_partitions(step, main_step, held_partitions), _run_ids([main_step])
                )
        elif main_predicate is not None:
            held_partitions = {file.partition for file in step.touched_files if file.may_hold(main_predicate)}
            if held_partitions:
                reason = CodedReason("main replaced partitions that the run changed", "main_replaced_changed")
                return Overlap(
                    reason, _common_partitions(main_step, step, held_partitions), _run_ids([main_step])
                )
    return None


def _common_partitions(
    step: SnapshotChange, other: SnapshotChange, held: Set[str] = frozenset()
) -> tuple[str, ...]:
    """Return sorted partition names for the message, from the first of these sources that is not empty.

    The sources are the names that both steps record, those of `step`, those of `other`, and `held`.
    """
    common_names = {
        name for name in set(step.partition_names) & set(other.partition_names) if not is_shortened([name])
    }
    return tuple(sorted(common_names or set(step.partition_names) or set(other.partition_names) or held))


def _check_row_deletes(step: SnapshotChange, own_paths: Set[str], main_change: TableChange) -> Overlap | None:
    """Return the overlap if the run removed files from which `main` has deleted rows by delete files.

    Returns None if there is no such file. The run's replacement of such a file would bring the deleted rows
    back. Every delete file since the base applies to these files, regardless of other changes of the table.
    `own_paths` are the paths of files that the run itself added.
    """
    removed_files = [file for file in step.removed if file.path not in own_paths]
    for main_step in main_change.steps:
        if main_step.mode is ChangeMode.COMPACT or not removed_files:
            continue  # a compaction writes the same deletes again
        if hit_files := find_hit_files(main_step.deletes, removed_files):
            reason = (
                CodedReason(
                    "main deleted rows (deletion vectors) of files that the run replaced",
                    "main_wrote_deletion_vectors",
                )
                if main_step.mode is ChangeMode.DELETION_VECTORS
                else CodedReason(
                    "main deleted rows (merge-on-read) of files that the run replaced",
                    "main_wrote_delete_files",
                )
            )
            return Overlap(
                reason, tuple(sorted({file.partition for file in hit_files})), _run_ids([main_step])
            )
    return None


def find_hit_files(deletes: Sequence[DeleteFile], files: Sequence[File]) -> list[File]:
    """Return the files that one of the delete files may apply to.

    Most delete files name one data file or one partition, so these are compared by sets.
    """
    exact_paths = {
        delete_file.paths.low
        for delete_file in deletes
        if delete_file.paths and delete_file.paths.low == delete_file.paths.high
    }
    lengths = {len(path) for path in exact_paths}  # a bound may be a truncated path
    partitions = {delete_file.partition for delete_file in deletes if delete_file.paths is None}
    other_deletes = [
        delete_file
        for delete_file in deletes
        if delete_file.everywhere or (delete_file.paths and delete_file.paths.low != delete_file.paths.high)
    ]
    return [
        file
        for file in files
        if file.partition in partitions
        or any(file.path.encode()[:length] in exact_paths for length in lengths)
        or any(delete_file.may_delete_from(file) for delete_file in other_deletes)
    ]


def _check_removed_files(
    step: SnapshotChange, own_paths: Set[str], main_change: TableChange
) -> Overlap | None:
    """Return the overlap if the run and `main` removed the same files; None if there is no such file.

    Files that earlier steps of the run added or restored (`own_paths`) do not count.
    """
    main_removals = main_change.removing_steps
    shared_files = [
        file for file in step.removed if file.path in main_removals and file.path not in own_paths
    ]
    if not shared_files:
        return None
    main_steps = [main_removals[file.path] for file in shared_files]
    all_compacted = all(main_step.mode is ChangeMode.COMPACT for main_step in main_steps)
    reason = (
        CodedReason("files the run replaced were compacted", "compacted")
        if all_compacted
        else CodedReason("both sides replaced the same files", "same_files")
    )
    return Overlap(reason, tuple(sorted({file.partition for file in shared_files})), _run_ids(main_steps))


def find_old_files(main_steps: Sequence[SnapshotChange]) -> dict[str, tuple[File, ...]]:
    """Return the files from which `main`'s compactions made each compacted file, by its path.

    Every row of a compacted file is in one of these files: a compaction does not move rows to another
    partition. Files that were compacted more than once have the oldest files. A file has no entry where the
    compaction wrote more rows than it read, or an unknown number.
    """
    old_files: dict[str, tuple[File, ...]] = {}
    for step in main_steps:
        if step.mode is not ChangeMode.COMPACT:
            continue
        removed_files = group_by_partition(step.removed)
        for partition, new_files in group_by_partition(step.added).items():
            sources = removed_files.get(partition, ())
            if _has_no_more_rows(new_files, sources):
                oldest = {old.path: old for file in sources for old in old_files.get(file.path, (file,))}
                old_files |= dict.fromkeys((file.path for file in new_files), tuple(oldest.values()))
    return old_files


def _has_no_more_rows(new_files: Iterable[File], old_files: Iterable[File]) -> bool:
    new_rows, old_rows = [file.rows for file in new_files], [file.rows for file in old_files]
    if None in new_rows or None in old_rows:
        return False
    return sum(filter(None, new_rows)) <= sum(filter(None, old_rows))


def has_disjoint_keys(
    step: SnapshotChange,
    main_steps: Sequence[SnapshotChange],
    old_files: Mapping[str, tuple[File, ...]] = MappingProxyType({}),
) -> bool:
    """Return whether the bounds of one key column prove that both sides changed different keys.

    False if a file of either side has no bounds for each key column, or if an undo on `main` removed delete
    files. A compacted file has wider bounds than the files that it was made from. So a file counts as outside
    if its own bounds, or those of all files that it was made from, do not meet the run's. `old_files` has
    these files, by the path of the compacted file.
    """
    if any(one.deletes and LakeProperty.UNDONE_SNAPSHOTS in one.properties for one in main_steps):
        return False  # an undo removed delete files, and the keys of the rows that came back are not known
    main_files = [file for main_step in main_steps for file in main_step.touched_files]
    return bool(main_files) and any(
        _has_disjoint_bounds(step.touched_files, main_files, old_files, key) for key in step.key_columns
    )


def _has_disjoint_bounds(
    run_files: Sequence[File],
    main_files: Sequence[File],
    old_files: Mapping[str, tuple[File, ...]],
    column: str,
) -> bool:
    run_bounds = _file_bounds(run_files, column)
    return run_bounds is not None and all(
        _is_outside(run_bounds, [file], column)
        or _is_outside(run_bounds, old_files.get(file.path, ()), column)
        for file in main_files
    )


def _is_outside(run_bounds: Sequence[FileBounds], main_files: Sequence[File], column: str) -> bool:
    """Return whether the bounds of `column` in all main files are known, and none meets `run_bounds`."""
    main_bounds = _file_bounds(main_files, column)
    return main_bounds is not None and all(
        main_high < low or high < main_low for low, high in run_bounds for main_low, main_high in main_bounds
    )


def _file_bounds(files: Sequence[File], column: str) -> list[FileBounds] | None:
    """Return the bounds of `column` in each file; None without files, or if bounds of a file are unknown."""
    all_bounds = [file.bounds(column) for file in files]
    return (
        None
        if not all_bounds or any(bounds is None for bounds in all_bounds)
        else list(filter(None, all_bounds))
    )


def _check_layouts(run_change: TableChange, main_change: TableChange) -> CodedReason | None:
    """Return why the run's files or columns do not fit the table's current layout on `main`; None if they do.

    Either side may have changed the columns, but not both, unless the columns are equal now.
    """
    main_layout = main_change.after
    if run_change.after.spec != main_layout.spec:
        if [field[1:] for field in run_change.after.spec] == [field[1:] for field in main_layout.spec]:
            return CodedReason("a column of its partition spec was renamed", "partition_column_renamed")
        return CodedReason("its partition spec differs", "partition_spec")
    if run_change.before is None or main_change.before is None:
        if run_change.before is not None or main_change.before is not None:
            return CodedReason("it was dropped and created again", "created_again")
        if run_change.after.columns != main_layout.columns:
            return CodedReason("both sides created it with different columns", "created_with_other_columns")
        if run_change.after.schema == main_layout.schema:
            return None
        return CodedReason(f"both sides created it with different {_DETAILS}", "created_with_other_details")
    if run_change.before.shape == run_change.after.shape:
        return _check_readable(run_change.after, main_layout)
    if (
        main_change.before.shape == main_layout.shape
        and main_change.before.highest_column_id == main_layout.highest_column_id
    ):
        return None
    if run_change.after.shape == main_layout.shape:
        return None
    same_columns = run_change.after.columns == main_layout.columns
    if same_columns:
        return CodedReason(f"both sides changed its {_DETAILS}", "column_details")
    return CodedReason("both sides changed its columns", "columns")


def _check_readable(file_layout: Layout, table_layout: Layout) -> CodedReason | None:
    """Return why files of one layout cannot be read under a newer one; None if they can.

    Columns are matched by id: missing columns are null, narrower types are widened.
    """
    table_columns = {column.id: column for column in table_layout.columns}
    file_column_ids = {column.id for column in file_layout.columns}
    for column in file_layout.columns:
        if column.id not in table_columns:
            return CodedReason(f"its column {column.name} was dropped", "column_dropped")
        if not is_readable_as(column.type, table_columns[column.id].type):
            return CodedReason(f"its column {column.name} has changed its type", "column_type")
        if table_columns[column.id].required and not column.required:
            return CodedReason(f"its column {column.name} has become required", "column_required")
    for column in table_layout.columns:
        if column.id not in file_column_ids and column.required:
            return CodedReason(f"it has a new required column {column.name}", "new_required_column")
    return None


def _run_ids(steps: Iterable[SnapshotChange]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(step.run_id for step in steps if step.run_id))
