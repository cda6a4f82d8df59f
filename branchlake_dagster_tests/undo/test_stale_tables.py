"""Which tables have rows that were computed from undone ones, from plain positions in the log."""

import dataclasses
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from branchlake_dagster.publication.ledger import Publication
from branchlake_dagster.undo.stale_tables import (
    LaterPublication,
    LogSinceUndone,
    Partitions,
    find_stale_tables,
)

READS = {"copy": {"orders"}, "report": {"copy"}, "own": {"own"}, "log": {"orders"}}
"""The tables that each table is computed from."""
WHOLE: Partitions = {None}


@dataclass
class Lookup:
    """Partitions are equal in all tables. Runs without an entry in `written` wrote the whole table."""

    written: Mapping[str, Partitions] = dataclasses.field(default_factory=dict)
    appending: frozenset[str] = frozenset({"log"})

    def load_written(self, publication: Publication, table: str) -> Partitions:
        return self.written.get(publication.run_id, WHOLE)

    def map_downstream(self, input_table: str, partitions: Partitions, table: str) -> Partitions:
        return partitions

    def overwrites_partitions(self, table: str) -> bool:
        return table not in self.appending

    def recomputes_partitions(self, table: str) -> bool:
        return table not in self.appending


def published(position: int, base: int, *tables: str) -> LaterPublication:
    run_id = f"r{position}"
    return LaterPublication(
        Publication(f"run-{run_id}", run_id, run_id, "passed", "", tables), position, base
    )


def stale(
    *later: LaterPublication,
    undo: int | None = None,
    undone: Sequence[LaterPublication] = (published(0, -1, "orders"),),
    **written: Partitions,
) -> dict[str, tuple[Partitions, set[str], list[str]]]:
    found = find_stale_tables(LogSinceUndone(undone, later, undo), READS, Lookup(written))
    return {
        one.table: (one.partitions, one.inputs, [publication.run_id for publication in one.publications])
        for one in found
    }


def test_a_run_that_began_after_the_publication_has_read_it() -> None:
    assert stale(published(1, 0, "copy")) == {"copy": (WHOLE, {"orders"}, ["r1"])}


def test_a_run_that_began_before_has_not_although_it_was_published_later() -> None:
    assert stale(published(1, -1, "copy")) == {}


def test_a_run_that_was_under_way_at_the_undo_has_read_the_rows() -> None:
    assert stale(published(3, 1, "copy"), undo=2).keys() == {"copy"}


def test_a_run_after_the_undo_makes_its_table_correct_unless_it_appends() -> None:
    runs = [published(1, 0, "copy", "log"), published(3, 2, "copy", "log")]
    assert stale(*runs, undo=2) == {"log": (WHOLE, {"orders"}, ["r1"])}


@pytest.mark.parametrize(("base", "expected"), [(0, {"copy"}), (1, {"copy", "report"})])
def test_a_table_of_a_stale_table_is_stale_if_its_run_saw_it(base: int, expected: set[str]) -> None:
    assert stale(published(1, 0, "copy"), published(2, base, "report")).keys() == expected


@pytest.mark.parametrize(("base", "expected"), [(3, {"report"}), (4, set[str]())])
def test_a_table_is_correct_only_if_its_run_saw_correct_inputs(base: int, expected: set[str]) -> None:
    copies = [published(1, 0, "copy"), published(4, 3, "copy")]
    reports = [published(2, 1, "report"), published(5, base, "report")]
    assert stale(copies[0], reports[0], copies[1], reports[1], undo=3).keys() == expected


def test_only_written_partitions_that_depend_on_undone_ones_count() -> None:
    runs = [published(1, 0, "copy"), published(2, 0, "copy"), published(3, 2, "report")]
    found = stale(*runs, r0={"a", "b"}, r1={"b"}, r2={"c"}, r3={"a", "b", "c"})
    assert found == {"copy": ({"b"}, {"orders"}, ["r1"]), "report": ({"b"}, {"copy"}, ["r3"])}


def test_each_partition_becomes_correct_by_itself() -> None:
    runs = [published(1, 0, "copy"), published(3, 2, "copy"), published(4, 3, "report")]
    found = stale(*runs, undo=2, r0={"a", "b"}, r1={"a", "b"}, r3={"a"}, r4={"a", "b"})
    assert {table: one[0] for table, one in found.items()} == {"copy": {"b"}, "report": {"b"}}


def test_unknown_partitions_may_be_all() -> None:
    assert stale(published(1, 0, "copy"), r0=None, r1={"a"})["copy"][0] == {"a"}
    assert stale(published(1, 0, "copy"), r0={"a"}, r1=None)["copy"][0] == {"a"}
    assert stale(published(1, 0, "copy"), r0=None, r1=None)["copy"][0] is None


def test_a_table_that_is_computed_from_its_own_earlier_rows() -> None:
    found = stale(published(1, 0, "own"), undone=[published(0, -1, "own")])
    assert found == {"own": (WHOLE, {"own"}, ["r1"])}


def test_several_undone_publications_count_each_since_its_own_commit() -> None:
    undone = [published(2, 1, "orders"), published(0, -1, "orders")]
    found = stale(published(3, 1, "copy"), undone=undone, r0={"a"}, r2={"b"}, r3={"a", "b"})
    assert found["copy"][0] == {"a"}


def test_undone_rows_that_were_overwritten_are_read_by_nobody_later() -> None:
    runs = [published(1, 0, "copy"), published(2, 1, "orders"), published(3, 2, "copy")]
    assert stale(*runs) == {}
    assert stale(*runs, r0={"a"}, r1={"a"}, r2={"b"}, r3={"a"})["copy"][0] == {"a"}


TABLES = ("orders", "copy", "report")
DAYS = ("a", "b", "c")


@pytest.mark.parametrize("seed", range(200))
def test_random_histories_agree_with_a_replay_of_the_values(seed: int) -> None:
    """Each partition holds the number of the undone publication, or not: a replay says which hold it at the end."""
    rng = random.Random(seed)
    values: dict[tuple[str, str], bool] = {(table, day): False for table in TABLES for day in DAYS}
    states = [dict(values)]
    later: list[LaterPublication] = []
    written: dict[str, Partitions] = {"r0": set(rng.sample(DAYS, rng.randint(1, 3)))}
    for day in written["r0"] or ():
        states[0][("orders", str(day))] = True
    undo = rng.randint(2, 9)
    for position in itertools.islice(itertools.count(1), 12):
        current = dict(states[-1])
        if position == undo:
            current |= {("orders", day): False for day in DAYS}
        else:
            table, source = rng.choice([("copy", "orders"), ("report", "copy"), ("orders", None)])
            base = rng.randint(max(0, position - 4), position - 1)
            days = set(rng.sample(DAYS, rng.randint(1, 3)))
            written[f"r{position}"] = set(days)
            current |= {(table, day): source is not None and states[base][(source, day)] for day in days}
            later.append(published(position, base, table))
        states.append(current)
    found = stale(*later, undo=undo, **written)
    expected = {(table, day) for (table, day), wrong in states[-1].items() if wrong and table != "orders"}
    assert {(table, day) for table, one in found.items() for day in one[0] or ()} == expected, f"seed {seed}"
