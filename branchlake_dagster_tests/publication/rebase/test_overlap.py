"""The rows of the table in publication/overlap.py: what the run did, what `main` did meanwhile, the answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from branchlake_dagster.internals.column_metrics import DataPaths
from branchlake_dagster.publication.conflicts import find_overlap, map_over_compactions
from branchlake_dagster.publication.table_change import (
    ChangeMode,
    DeleteFile,
    File,
    Layout,
    LayoutColumn,
    SnapshotChange,
    TableChange,
)
from branchlake_dagster.tables.replaced_rows import ALL_ROWS, ReplacedRows, StringSet, ValueRange

DAY, ID, N = (
    LayoutColumn(1, "day", "string", False),
    LayoutColumn(2, "id", "long", False),
    LayoutColumn(3, "n", "long", False),
)
BY_DAY = (("day", "identity", "day"),)
LAYOUT = Layout((DAY, ID), BY_DAY, 2)
FLAT = Layout((DAY, ID), (), 2)


def file(path: str, partition: str = "day=1", ids: tuple[int, int] | None = None) -> File:
    return File(path, partition, lambda column: ids if column == "id" else None)


def step(
    mode: ChangeMode,
    added: tuple[File, ...] = (),
    removed: tuple[File, ...] = (),
    keys: tuple[str, ...] = (),
    run: str = "r",
) -> SnapshotChange:
    return SnapshotChange(7, mode, added, removed, keys, run)


def change(
    *steps: SnapshotChange, before: Layout | None = LAYOUT, after: Layout | None = None, created: bool = False
) -> TableChange:
    return TableChange(None if created else before, after or before or LAYOUT, steps)


MINE, THEIRS = file("mine"), file("theirs")
OLD, OLD2 = file("old"), file("old2", "day=2")
APPEND = step(ChangeMode.APPEND, (MINE,))
REPLACE_1 = step(ChangeMode.REPLACE_PARTITIONS, (MINE,), (OLD,))
REPLACE_2 = step(ChangeMode.REPLACE_PARTITIONS, (file("mine2", "day=2"),), (OLD2,))
BY_KEY = ("day", "id")
UPSERT_1 = step(ChangeMode.UPSERT, (file("up", ids=(1, 9)),), (OLD,), BY_KEY)
DISJOINT_IDS = step(
    ChangeMode.UPSERT, (file("other", ids=(50, 60)),), (file("old3", ids=(50, 59)),), ("id",), "them"
)


def theirs(step_: SnapshotChange, run: str = "them") -> TableChange:
    return change(SnapshotChange(**{**vars(step_), "run_id": run}))


@pytest.mark.parametrize(
    ("mine", "main"),
    [
        (APPEND, step(ChangeMode.APPEND, (THEIRS,))),
        (APPEND, REPLACE_1),
        (APPEND, UPSERT_1),
        (APPEND, step(ChangeMode.REPLACE_TABLE, (THEIRS,), (OLD, OLD2))),
        (APPEND, step(ChangeMode.COMPACT, (THEIRS,), (OLD,))),
        (REPLACE_1, REPLACE_2),
        (REPLACE_1, step(ChangeMode.APPEND, (file("x", "day=2"),))),
        (UPSERT_1, REPLACE_2),
        (step(ChangeMode.UPSERT, (), (), ("id",)), step(ChangeMode.APPEND, (THEIRS,))),  # found no new key
        (UPSERT_1, step(ChangeMode.UPSERT, (file("x", "day=2"),), (OLD2,), BY_KEY)),
        (step(ChangeMode.REWRITE, (MINE,), (OLD,)), REPLACE_2),
        (step(ChangeMode.COMPACT, (MINE,), (OLD,)), step(ChangeMode.APPEND, (THEIRS,))),
    ],
)
def test_what_does_not_overlap_is_replayed(mine: SnapshotChange, main: SnapshotChange) -> None:
    assert find_overlap(change(mine), theirs(main)) is None


@pytest.mark.parametrize(
    ("mine", "main", "code", "partitions"),
    [
        (REPLACE_1, step(ChangeMode.APPEND, (THEIRS,)), "same_partitions", ("day=1",)),
        (REPLACE_1, step(ChangeMode.REPLACE_PARTITIONS, (THEIRS,), (OLD,)), "same_files", ("day=1",)),
        (REPLACE_1, step(ChangeMode.COMPACT, (THEIRS,), (OLD,)), "compacted", ("day=1",)),
        (UPSERT_1, step(ChangeMode.APPEND, (THEIRS,)), "same_keys", ("day=1",)),
        (UPSERT_1, step(ChangeMode.COMPACT, (THEIRS,), (OLD,)), "compacted", ("day=1",)),
        (
            step(ChangeMode.REWRITE, (), (OLD,)),
            step(ChangeMode.APPEND, (THEIRS,)),
            "same_partitions",
            ("day=1",),
        ),
        (step(ChangeMode.REPLACE_TABLE, (MINE,)), step(ChangeMode.APPEND, (OLD2,)), "run_replaced_table", ()),
        (step(ChangeMode.ROW_DELETES), step(ChangeMode.APPEND, (OLD2,)), "run_wrote_delete_files", ()),
        (step(ChangeMode.UNKNOWN), step(ChangeMode.APPEND, (OLD2,)), "history_lost", ()),
        (REPLACE_1, step(ChangeMode.UNKNOWN), "history_lost", ()),
        (step(ChangeMode.UPSERT, (), (), ("id",)), step(ChangeMode.REWRITE, (), (OLD,)), "same_keys", ()),
        (step(ChangeMode.OLD_LAYOUT), step(ChangeMode.APPEND, (OLD2,)), "older_partition_spec", ()),
        (
            step(ChangeMode.COMPACT, (MINE,), (OLD,)),
            step(ChangeMode.REWRITE, (), (OLD,)),
            "same_files",
            ("day=1",),
        ),
    ],
)
def test_what_overlaps_is_refused_by_partition_and_run(
    mine: SnapshotChange, main: SnapshotChange, code: str, partitions: tuple[str, ...]
) -> None:
    found = find_overlap(change(mine), theirs(main))
    assert found is not None
    assert found.reason.code == code
    assert (found.partitions, found.runs) == (partitions, ("them",))


def test_an_upsert_whose_key_lacks_the_partition_needs_disjoint_bounds() -> None:
    """The same key may have been inserted into another partition."""
    mine = step(ChangeMode.UPSERT, (file("up", ids=(1, 9)),), (), ("id",))
    elsewhere = step(ChangeMode.UPSERT, (file("x", "day=2", ids=(5, 6)),), (), ("id",), "them")
    found = find_overlap(change(mine), change(elsewhere))
    assert found is not None
    assert (found.reason.code, found.partitions, found.runs) == ("same_keys", (), ("them",))
    assert find_overlap(change(mine), change(DISJOINT_IDS)) is None


def test_unpartitioned_upserts_commute_only_by_their_bounds() -> None:
    flat = step(ChangeMode.UPSERT, (file("up", "", (1, 9)),), (file("old", "", (1, 8)),), ("id",))
    apart = step(ChangeMode.UPSERT, (file("x", "", (10, 12)),), (), ("id",))
    touching = step(ChangeMode.UPSERT, (file("x", "", (9, 12)),), (), ("id",))
    unknown = step(ChangeMode.UPSERT, (file("x", ""),), (), ("id",))
    assert find_overlap(change(flat, before=FLAT), change(apart, before=FLAT)) is None
    for other in (touching, unknown):
        assert find_overlap(change(flat, before=FLAT), change(other, before=FLAT)) is not None


def test_every_step_of_the_run_counts() -> None:
    assert find_overlap(change(APPEND, REPLACE_2), theirs(REPLACE_1)) is None
    found = find_overlap(change(APPEND, REPLACE_1), theirs(step(ChangeMode.APPEND, (THEIRS,))))
    assert found is not None
    assert found.partitions == ("day=1",)


def test_only_a_changed_layout_on_main_does_not_stop_a_rewrite() -> None:
    wider = Layout((DAY, ID, N), BY_DAY, 3)
    assert find_overlap(change(UPSERT_1), change(after=wider)) is None


@pytest.mark.parametrize(
    ("mine_after", "main_after", "code"),
    [
        (LAYOUT, Layout((DAY, ID, N), BY_DAY, 3), None),
        (Layout((DAY, ID, N), BY_DAY, 3), LAYOUT, None),
        (Layout((DAY, ID, N), BY_DAY, 3), Layout((DAY, ID, N), BY_DAY, 3), None),
        (LAYOUT, Layout((LayoutColumn(1, "date", "string", False), ID), BY_DAY, 2), None),
        (LAYOUT, Layout((DAY,), BY_DAY, 2), "column_dropped"),
        (LAYOUT, Layout((DAY, LayoutColumn(2, "id", "string", False)), BY_DAY, 2), "column_type"),
        (LAYOUT, Layout((DAY, LayoutColumn(2, "id", "int", False)), BY_DAY, 2), "column_type"),
        (LAYOUT, Layout((DAY, LayoutColumn(2, "id", "long", True)), BY_DAY, 2), "column_required"),
        (LAYOUT, Layout((DAY, ID, LayoutColumn(3, "n", "long", True)), BY_DAY, 3), "new_required_column"),
        (LAYOUT, Layout((DAY, ID), (), 2), "partition_spec"),
        (
            Layout((DAY, ID, N), BY_DAY, 3),
            Layout((DAY, ID, LayoutColumn(3, "m", "long", False)), BY_DAY, 3),
            "columns",
        ),
        # Added and dropped again on main: the column id is taken.
        (Layout((DAY, ID, N), BY_DAY, 3), Layout((DAY, ID), BY_DAY, 3), "columns"),
    ],
)
def test_layouts(mine_after: Layout, main_after: Layout, code: str | None) -> None:
    found = find_overlap(change(APPEND, after=mine_after), change(after=main_after))
    assert (found is None) is (code is None)
    assert code is None or (found is not None and found.reason.code == code)


@pytest.mark.parametrize(
    ("written", "now", "readable"),
    [
        ("int", "long", True),
        ("long", "int", False),
        ("int", "double", False),
        ("float", "double", True),
        ("decimal(4, 2)", "decimal(9, 2)", True),
        ("decimal(9, 2)", "decimal(4, 2)", False),
        ("decimal(4, 2)", "decimal(9, 3)", False),
        ("struct<5: a: optional int>", "struct<5: a: optional long>", False),
    ],
)
def test_a_column_that_main_widened_still_reads_the_runs_files(
    written: str, now: str, readable: bool
) -> None:
    mine, main = (Layout((DAY, LayoutColumn(2, "id", kind, False)), BY_DAY, 2) for kind in (written, now))
    found = find_overlap(change(APPEND, before=mine), change(before=mine, after=main))
    assert (found is None) is readable
    assert readable or (found is not None and found.reason.code == "column_type")


def test_a_table_that_both_created() -> None:
    replace_ = step(ChangeMode.REPLACE_PARTITIONS, (file("mine", "day=2"),))
    both = (
        change(replace_, created=True),
        change(step(ChangeMode.APPEND, (THEIRS,), run="them"), created=True),
    )
    assert find_overlap(*both) is None
    other = TableChange(None, Layout((DAY, N), BY_DAY, 3), both[1].steps)
    found = find_overlap(both[0], other)
    assert found is not None
    assert found.reason.code == "created_with_other_columns"
    again = find_overlap(both[0], TableChange(LAYOUT, LAYOUT))
    assert again is not None
    assert again.reason.code == "created_again"


# -- what was replaced, as a predicate -----------------------------------------------------------------


def days(first: int, last: int) -> ReplacedRows:
    return ReplacedRows(((ValueRange(1, "date", first, last + 1),),))


def of_day(day: int, name: str = "") -> File:
    """A file with rows of one day."""
    return File(name or f"of-{day}", f"day={day}", may_hold=lambda other: other.overlaps(days(day, day)))


def replaced_(
    predicate: ReplacedRows | None,
    *added: File,
    removed: tuple[File, ...] = (),
    named: tuple[str, ...] = (),
    run: str = "r",
) -> SnapshotChange:
    return SnapshotChange(
        7,
        ChangeMode.REPLACE_PARTITIONS,
        added,
        removed,
        run_id=run,
        recorded_predicate=predicate,
        partition_names=named,
    )


WEEK, NEXT = days(1, 7), days(8, 14)
APPENDED = step(ChangeMode.APPEND, (of_day(3),), run="them")


@pytest.mark.parametrize(
    ("mine", "main", "code"),
    [
        (replaced_(WEEK, of_day(1)), replaced_(WEEK, of_day(2)), "same_partitions_replaced"),
        (replaced_(WEEK), replaced_(WEEK, of_day(2)), "same_partitions_replaced"),
        (replaced_(WEEK, of_day(1)), replaced_(WEEK), "same_partitions_replaced"),
        (replaced_(WEEK), replaced_(WEEK), "same_partitions_replaced"),
        (replaced_(days(3, 3)), replaced_(WEEK), "same_partitions_replaced"),
        (replaced_(WEEK), replaced_(NEXT), None),
        (replaced_(WEEK, of_day(1)), replaced_(NEXT, of_day(9)), None),
        (replaced_(WEEK), replaced_(ALL_ROWS), "same_partitions_replaced"),
        (replaced_(WEEK), step(ChangeMode.REPLACE_TABLE), "same_partitions_replaced"),
        (replaced_(WEEK), APPENDED, "main_changed_replaced"),
        (replaced_(NEXT), APPENDED, None),
        (replaced_(WEEK), step(ChangeMode.UPSERT, (of_day(3),), keys=("id",)), "main_changed_replaced"),
        (replaced_(WEEK), step(ChangeMode.REWRITE, (), (of_day(3),)), "main_changed_replaced"),
        (replaced_(WEEK), step(ChangeMode.COMPACT, (of_day(3),), (of_day(3, "other"),)), None),
        (replaced_(WEEK), replaced_(None, of_day(3)), "main_changed_replaced"),
        (replaced_(None, of_day(3)), replaced_(WEEK), "main_replaced_changed"),
        (replaced_(None, of_day(9)), replaced_(WEEK), None),
        (step(ChangeMode.UPSERT, (of_day(3),), keys=BY_KEY), replaced_(WEEK), "main_replaced_changed"),
        (step(ChangeMode.UPSERT, (of_day(9),), keys=BY_KEY), replaced_(WEEK), None),
        (step(ChangeMode.REWRITE, (), (of_day(3),)), replaced_(WEEK), "main_replaced_changed"),
        (step(ChangeMode.APPEND, (of_day(3),)), replaced_(WEEK), None),
        (step(ChangeMode.COMPACT, (of_day(3),), (of_day(3, "other"),)), replaced_(WEEK), None),
    ],
)
def test_what_was_replaced_is_compared_as_a_predicate(
    mine: SnapshotChange, main: SnapshotChange, code: str | None
) -> None:
    found = find_overlap(change(mine), theirs(main))
    assert (found is None) is (code is None), found
    assert found is None or code is None or (found.reason.code == code and found.runs == ("them",))


def test_refusals_name_dagsters_partitions() -> None:
    mine = replaced_(WEEK, of_day(1), named=("2026-01-04", "2026-01-11", "… 50 in all"))
    main = replaced_(WEEK, of_day(2), named=("2026-01-11", "… 50 in all"))
    both = find_overlap(change(mine), theirs(main))
    assert both is not None
    assert both.partitions == ("2026-01-11",)
    by_hand = find_overlap(change(mine), theirs(replace(APPENDED, partition_names=())))
    assert by_hand is not None
    assert by_hand.partitions == ("2026-01-04", "2026-01-11", "… 50 in all")
    files = find_overlap(change(replaced_(WEEK)), theirs(APPENDED))
    assert files is not None
    assert files.partitions == ("day=3",)


def test_values_meet_by_name() -> None:
    radar, optical = (ReplacedRows(((StringSet(2, frozenset({kind})),),)) for kind in ("radar", "optical"))
    assert find_overlap(change(replaced_(radar)), theirs(replaced_(optical))) is None
    assert find_overlap(change(replaced_(radar)), theirs(replaced_(radar))) is not None


# -- deletes of whole files by Spark -------------------------------------------------------------------


@pytest.mark.parametrize("removed", [(), (file("old", "day=0"),)])
def test_rows_that_follow_a_delete_of_unknown_rows_meet_their_partitions(removed: tuple[File, ...]) -> None:
    delete = replace(step(ChangeMode.REWRITE, (), removed), is_metadata_delete=True)
    later = theirs(step(ChangeMode.APPEND, (THEIRS,)))
    found = find_overlap(change(delete, APPEND), later)
    assert found is not None
    assert (found.reason.code, found.partitions, found.runs) == ("same_partitions", ("day=1",), ("them",))
    assert find_overlap(change(delete, APPEND), theirs(step(ChangeMode.APPEND, (OLD2,)))) is None
    assert find_overlap(change(APPEND, delete), later) is None
    assert find_overlap(change(replace(delete, is_metadata_delete=False), APPEND), later) is None


# -- row-level deletes ---------------------------------------------------------------------------------


def deleting(*deletes: DeleteFile, mode: ChangeMode = ChangeMode.ROW_DELETES) -> SnapshotChange:
    return SnapshotChange(9, mode, run_id="them", deletes=deletes)


@pytest.mark.parametrize(
    ("deletes", "hit"),
    [
        (DeleteFile("d", "day=1", DataPaths(b"old", b"old")), True),
        (DeleteFile("d", "day=1", DataPaths(b"ol", b"ol")), True),  # truncated
        (DeleteFile("d", "day=1", DataPaths(b"other", b"other")), False),
        (DeleteFile("d", "day=1", DataPaths(b"a", b"z")), True),
        (DeleteFile("d", "day=1", DataPaths(b"p", b"z")), False),
        (DeleteFile("d", "day=1"), True),
        (DeleteFile("d", "day=2"), False),
        (DeleteFile("d", "day=2", everywhere=True), True),
    ],
)
@pytest.mark.parametrize("mode", [ChangeMode.COMPACT, ChangeMode.UPSERT])
def test_files_that_main_deleted_rows_of_are_not_removed(
    mode: ChangeMode, deletes: DeleteFile, hit: bool
) -> None:
    mine = change(step(mode, (file("new"),), (OLD,), BY_KEY))
    later = step(ChangeMode.APPEND, (file("x", "day=3"),), run="later")
    found = find_overlap(mine, change(deleting(deletes), later, step(ChangeMode.COMPACT)))
    if hit:
        assert found is not None
        assert found.reason.code == "main_wrote_delete_files"
        assert (found.partitions, found.runs) == (("day=1",), ("them",))
    elif mode is ChangeMode.COMPACT or deletes.partition == "day=2":
        assert found is None
    assert find_overlap(mine, change(deleting(deletes, mode=ChangeMode.COMPACT), later)) is None
    assert find_overlap(change(APPEND), change(deleting(deletes))) is None


def test_deletes_do_not_hit_what_the_run_has_added_itself() -> None:
    mine = change(step(ChangeMode.APPEND, (MINE,)), step(ChangeMode.COMPACT, (file("new"),), (MINE,)))
    assert find_overlap(mine, change(deleting(DeleteFile("d", "day=1")))) is None


def test_the_runs_own_deletes_are_refused_whatever_the_mode() -> None:
    own = replace(step(ChangeMode.UPSERT, (MINE,), (OLD,)), deletes=(DeleteFile("d", "day=1"),))
    found = find_overlap(change(own), theirs(step(ChangeMode.APPEND, (file("x", "day=3"),))))
    assert found is not None
    assert found.reason.code == "run_wrote_delete_files"


# -- compactions on main -------------------------------------------------------------------------------


def sized(path: str, rows: int | None, partition: str = "day=1") -> File:
    return File(path, partition, rows=rows)


F1, F2, BIG = sized("f1", 3), sized("f2", 4), sized("big", 7)
MERGED = SnapshotChange(9, ChangeMode.COMPACT, (BIG,), (F1, F2), run_id="them")
SWAPPED = step(ChangeMode.REPLACE_PARTITIONS, (MINE,), (F1, F2))


def test_a_compaction_is_mapped_when_all_its_files_were_removed() -> None:
    main = change(MERGED)
    mine = map_over_compactions(change(SWAPPED), main)
    assert mine.steps[0].removed == (BIG,)
    assert find_overlap(mine, main) is None
    split = change(step(ChangeMode.REWRITE, (), (F2,)), step(ChangeMode.REWRITE, (MINE,), (F1,)))
    assert [one.removed for one in map_over_compactions(split, main).steps] == [(BIG,), ()]
    again = change(
        MERGED, SnapshotChange(10, ChangeMode.COMPACT, (sized("bigger", 7),), (BIG,), run_id="them")
    )
    assert [one.path for one in map_over_compactions(change(SWAPPED), again).steps[0].removed] == ["bigger"]


@pytest.mark.parametrize(
    "main",
    [
        change(SnapshotChange(9, ChangeMode.COMPACT, (sized("big", 6),), (F1, F2), run_id="them")),
        change(SnapshotChange(9, ChangeMode.COMPACT, (sized("big", None),), (F1, F2), run_id="them")),
        change(
            SnapshotChange(9, ChangeMode.COMPACT, (sized("big", 9),), (F1, F2, sized("f3", 2)), run_id="them")
        ),
        change(deleting(DeleteFile("d", "day=1", DataPaths(b"f1", b"f1"))), MERGED),
        change(MERGED, step(ChangeMode.REWRITE, (), (BIG,), run="them")),
        change(MERGED, deleting(DeleteFile("d", "day=1", DataPaths(b"big", b"big")))),
        change(MERGED, step(ChangeMode.APPEND, (file("more"),), run="them")),
    ],
)
def test_a_compaction_is_not_mapped_without_proof(main: TableChange) -> None:
    found = find_overlap(map_over_compactions(change(SWAPPED), main), main)
    assert found is not None
    assert (found.partitions, found.runs) == (("day=1",), ("them",))


def test_partitions_are_mapped_apart() -> None:
    other = sized("other", 2, "day=2")
    both = SnapshotChange(
        9, ChangeMode.COMPACT, (BIG, sized("big2", 4, "day=2")), (F1, F2, other, sized("o2", 2, "day=2"))
    )
    assert map_over_compactions(change(SWAPPED), change(both)).steps[0].removed == (BIG,)
    half = step(ChangeMode.REPLACE_PARTITIONS, (MINE,), (F1, F2, other))
    assert map_over_compactions(change(half), change(both)).steps[0].removed == (other, BIG)


# -- what is not carried -------------------------------------------------------------------------------


def with_(name: str, value: str, **more: int) -> Layout:
    return replace(LAYOUT, others=((name, value),), **more)


def test_what_a_rebase_does_not_carry_is_named() -> None:
    run = change(APPEND, before=with_("sort order", ""), after=with_("sort order", "id"))
    found = find_overlap(run, change())
    assert found is not None
    assert found.reason.code == "sort_order_changed"
    assert find_overlap(change(APPEND), run) is None  # what main changed stays
    new = change(APPEND, after=replace(LAYOUT, format_version=3))
    for mine, main in ((change(APPEND), new), (new, change())):
        told = find_overlap(mine, main)
        assert told is not None
        assert told.reason.code in ("format_version_changed", "format_version_of_main")
    expired = find_overlap(replace(change(APPEND), expired_count=2), change())
    assert expired is not None
    assert expired.reason.code == "snapshots_expired"
    assert expired.only_expired
    both = find_overlap(replace(run, expired_count=2), change())
    assert both is not None
    assert not both.only_expired
    assert not found.only_expired


def test_a_lost_key_column_is_named() -> None:
    renamed = Layout((DAY, LayoutColumn(2, "number", "long", False)), BY_DAY, 2)
    found = find_overlap(
        change(UPSERT_1), change(step(ChangeMode.APPEND, (THEIRS,), run="them"), after=renamed)
    )
    assert found is not None
    assert found.reason.code == "key_column_gone"
    assert find_overlap(change(UPSERT_1), change(after=renamed)) is None
