"""The table of DESIGN §6: what the run did, what `main` did meanwhile, and the answer."""

from __future__ import annotations

import pytest

from branchlake_dagster.publication.changes import Column, File, Layout, Mode, Step, TableChange
from branchlake_dagster.publication.overlap import Overlap, overlap

DAY, ID, N = Column(1, "day", "string", False), Column(2, "id", "long", False), Column(3, "n", "long", False)
BY_DAY = (("day", "identity", "day"),)
LAYOUT = Layout((DAY, ID), BY_DAY, 2)
FLAT = Layout((DAY, ID), (), 2)


def file(path: str, partition: str = "day=1", ids: tuple[int, int] | None = None) -> File:
    return File(path, partition, lambda column: ids if column == "id" else None)


def step(
    mode: Mode,
    added: tuple[File, ...] = (),
    removed: tuple[File, ...] = (),
    keys: tuple[str, ...] = (),
    run: str = "r",
) -> Step:
    return Step(7, mode, added, removed, keys, run)


def change(
    *steps: Step, before: Layout | None = LAYOUT, after: Layout | None = None, created: bool = False
) -> TableChange:
    return TableChange(None if created else before, after or before or LAYOUT, steps)


MINE, THEIRS = file("mine"), file("theirs")
OLD, OLD2 = file("old"), file("old2", "day=2")
APPEND = step(Mode.APPEND, (MINE,))
REPLACE_1 = step(Mode.REPLACE_PARTITIONS, (MINE,), (OLD,))
REPLACE_2 = step(Mode.REPLACE_PARTITIONS, (file("mine2", "day=2"),), (OLD2,))
BY_KEY = ("day", "id")
UPSERT_1 = step(Mode.UPSERT, (file("up", ids=(1, 9)),), (OLD,), BY_KEY)
DISJOINT_IDS = step(
    Mode.UPSERT, (file("other", ids=(50, 60)),), (file("old3", ids=(50, 59)),), ("id",), "them"
)


def theirs(step_: Step, run: str = "them") -> TableChange:
    return change(Step(**{**vars(step_), "run_id": run}))


@pytest.mark.parametrize(
    ("mine", "main"),
    [
        (APPEND, step(Mode.APPEND, (THEIRS,))),
        (APPEND, REPLACE_1),
        (APPEND, UPSERT_1),
        (APPEND, step(Mode.REPLACE_TABLE, (THEIRS,), (OLD, OLD2))),
        (APPEND, step(Mode.COMPACT, (THEIRS,), (OLD,))),
        (REPLACE_1, REPLACE_2),
        (REPLACE_1, step(Mode.APPEND, (file("x", "day=2"),))),
        (UPSERT_1, REPLACE_2),
        (UPSERT_1, step(Mode.UPSERT, (file("x", "day=2"),), (OLD2,), BY_KEY)),
        (step(Mode.REWRITE, (MINE,), (OLD,)), REPLACE_2),
        (step(Mode.COMPACT, (MINE,), (OLD,)), step(Mode.APPEND, (THEIRS,))),
    ],
)
def test_what_does_not_overlap_is_replayed(mine: Step, main: Step) -> None:
    assert overlap(change(mine), theirs(main)) is None


@pytest.mark.parametrize(
    ("mine", "main", "why", "partitions"),
    [
        (REPLACE_1, step(Mode.APPEND, (THEIRS,)), "same partitions", ("day=1",)),
        (REPLACE_1, step(Mode.REPLACE_PARTITIONS, (THEIRS,), (OLD,)), "same files", ("day=1",)),
        (REPLACE_1, step(Mode.COMPACT, (THEIRS,), (OLD,)), "were compacted", ("day=1",)),
        (UPSERT_1, step(Mode.APPEND, (THEIRS,)), "same keys", ("day=1",)),
        (UPSERT_1, step(Mode.COMPACT, (THEIRS,), (OLD,)), "were compacted", ("day=1",)),
        (step(Mode.REWRITE, (), (OLD,)), step(Mode.APPEND, (THEIRS,)), "same partitions", ("day=1",)),
        (step(Mode.REPLACE_TABLE, (MINE,)), step(Mode.APPEND, (OLD2,)), "whole table", ()),
        (step(Mode.ROW_DELETES), step(Mode.APPEND, (OLD2,)), "merge-on-read", ()),
        (step(Mode.UNKNOWN), step(Mode.APPEND, (OLD2,)), "does not lead back", ()),
        (REPLACE_1, step(Mode.UNKNOWN), "cannot be compared", ()),
        (step(Mode.OLD_LAYOUT), step(Mode.APPEND, (OLD2,)), "older partition spec", ()),
        (step(Mode.COMPACT, (MINE,), (OLD,)), step(Mode.REWRITE, (), (OLD,)), "same files", ("day=1",)),
    ],
)
def test_what_overlaps_is_refused_by_partition_and_run(
    mine: Step, main: Step, why: str, partitions: tuple[str, ...]
) -> None:
    found = overlap(change(mine), theirs(main))
    assert found is not None
    assert why in found.why
    assert (found.partitions, found.runs) == (partitions, ("them",))


def test_an_upsert_whose_key_lacks_the_partition_needs_disjoint_bounds() -> None:
    """The same key may have been inserted into another partition."""
    mine = step(Mode.UPSERT, (file("up", ids=(1, 9)),), (), ("id",))
    elsewhere = step(Mode.UPSERT, (file("x", "day=2", ids=(5, 6)),), (), ("id",), "them")
    assert overlap(change(mine), change(elsewhere)) == Overlap(
        "both sides may have changed the same keys", (), ("them",)
    )
    assert overlap(change(mine), change(DISJOINT_IDS)) is None


def test_unpartitioned_upserts_commute_only_by_their_bounds() -> None:
    flat = step(Mode.UPSERT, (file("up", "", (1, 9)),), (file("old", "", (1, 8)),), ("id",))
    apart = step(Mode.UPSERT, (file("x", "", (10, 12)),), (), ("id",))
    touching = step(Mode.UPSERT, (file("x", "", (9, 12)),), (), ("id",))
    unknown = step(Mode.UPSERT, (file("x", ""),), (), ("id",))
    assert overlap(change(flat, before=FLAT), change(apart, before=FLAT)) is None
    for other in (touching, unknown):
        assert overlap(change(flat, before=FLAT), change(other, before=FLAT)) is not None


def test_every_step_of_the_run_counts() -> None:
    assert overlap(change(APPEND, REPLACE_2), theirs(REPLACE_1)) is None
    found = overlap(change(APPEND, REPLACE_1), theirs(step(Mode.APPEND, (THEIRS,))))
    assert found is not None
    assert found.partitions == ("day=1",)


def test_only_a_changed_layout_on_main_does_not_stop_a_rewrite() -> None:
    wider = Layout((DAY, ID, N), BY_DAY, 3)
    assert overlap(change(UPSERT_1), change(after=wider)) is None


@pytest.mark.parametrize(
    ("mine_after", "main_after", "why"),
    [
        (LAYOUT, Layout((DAY, ID, N), BY_DAY, 3), None),
        (Layout((DAY, ID, N), BY_DAY, 3), LAYOUT, None),
        (Layout((DAY, ID, N), BY_DAY, 3), Layout((DAY, ID, N), BY_DAY, 3), None),
        (LAYOUT, Layout((Column(1, "date", "string", False), ID), BY_DAY, 2), None),
        (LAYOUT, Layout((DAY,), BY_DAY, 2), "column id was dropped"),
        (LAYOUT, Layout((DAY, Column(2, "id", "string", False)), BY_DAY, 2), "changed its type"),
        (LAYOUT, Layout((DAY, Column(2, "id", "long", True)), BY_DAY, 2), "become required"),
        (LAYOUT, Layout((DAY, ID, Column(3, "n", "long", True)), BY_DAY, 3), "new required column"),
        (LAYOUT, Layout((DAY, ID), (), 2), "partition spec differs"),
        (
            Layout((DAY, ID, N), BY_DAY, 3),
            Layout((DAY, ID, Column(3, "m", "long", False)), BY_DAY, 3),
            "both sides",
        ),
        # Added and dropped again on main: the column id is taken.
        (Layout((DAY, ID, N), BY_DAY, 3), Layout((DAY, ID), BY_DAY, 3), "both sides"),
    ],
)
def test_layouts(mine_after: Layout, main_after: Layout, why: str | None) -> None:
    found = overlap(change(APPEND, after=mine_after), change(after=main_after))
    assert (found is None) is (why is None)
    assert why is None or (found is not None and why in found.why)


def test_a_table_that_both_created() -> None:
    replace_ = step(Mode.REPLACE_PARTITIONS, (file("mine", "day=2"),))
    both = change(replace_, created=True), change(step(Mode.APPEND, (THEIRS,), run="them"), created=True)
    assert overlap(*both) is None
    other = TableChange(None, Layout((DAY, N), BY_DAY, 3), both[1].steps)
    found = overlap(both[0], other)
    assert found is not None
    assert "different columns" in found.why
    again = overlap(both[0], TableChange(LAYOUT, LAYOUT))
    assert again is not None
    assert "created again" in again.why
