"""Random runs and other writers, with and without compactions between them: the same runs pass, with the same rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from branchlake_dagster.nessie.model import ContentKey, DiffEntry, IcebergTable
from branchlake_dagster.publication import compaction_reversal, rebase_plan
from branchlake_dagster.publication.conflicts import find_old_files, has_disjoint_keys
from branchlake_dagster.publication.ledger import Candidate, Refused
from branchlake_dagster.publication.rebase_plan import CommitPlan
from branchlake_dagster.publication.replay import StagedState
from branchlake_dagster.publication.table_change import ChangeMode, File, SnapshotChange
from branchlake_dagster_tests.simulation.changes import Change, Kind
from branchlake_dagster_tests.simulation.tables import (
    SimulatedTables,
    State,
    Warehouse,
    table_content,
)

KEY = ContentKey(["t"])
ALL_KINDS = tuple(kind for kind in Kind if kind is not Kind.COMPACT)
NO_REWRITES = (Kind.APPEND, Kind.REPLACE, Kind.CLEAR)
"""Changes after which compacted files are whole or gone. Without deletes, every compaction can be reversed."""
Outcome = Counter[Any] | Refused
"""The rows of `main` after the run's publication, or why it was refused."""


@dataclass
class History:
    """One history, drawn from a seed."""

    chance: random.Random
    warehouse: Warehouse
    changes: int = 0

    def draw(self, *kinds: Kind) -> Change:
        self.changes += 1
        part, key = self.chance.choice("ab"), self.chance.choice(["u1", "u2", "u3"])
        token = f"x{self.changes:04}"
        return Change(token, "t", self.chance.choice(kinds), part, key, token)

    def apply(self, state: State, change: Change, run_id: str) -> State:
        return change.on_files(state, self.warehouse, run_id) or state

    def store(self, state: State) -> IcebergTable:
        return table_content("id", self.warehouse.store(state), state)

    def outcome(self, base: IcebergTable, after: IcebergTable, main: IcebergTable) -> Outcome:
        candidate = Candidate(
            branch="run-r",
            head_hash="h",
            base_hash="b",
            run_id="r",
            root_run_id="r",
            verdict="passed",
            changes=(DiffEntry(KEY, base, after),),
        )
        plan = CommitPlan("m", {KEY: main}, SimulatedTables(self.warehouse))
        refused = plan.add(candidate, {})
        if refused is not None:
            assert isinstance(refused, Refused)
            return refused
        value = plan.new_contents[KEY]
        assert isinstance(value, StagedState | IcebergTable)
        state: Any = value.table if isinstance(value, StagedState) else self.warehouse.state(value)
        return Counter(self.warehouse.rows_of(state))


def play(seed: int, other_kinds: tuple[Kind, ...]) -> tuple[Outcome, Outcome] | None:
    """The outcomes of a run without and with compactions on `main`; None if the run changes nothing."""
    history = History(random.Random(seed), Warehouse())
    chance = history.chance
    state = State(steps=(SnapshotChange(history.warehouse.number(), ChangeMode.APPEND),), manifests=("m",))
    seed_kinds = (Kind.APPEND, Kind.UPSERT, *({Kind.ROW_DELETE} & {*other_kinds}))
    for _ in range(chance.randrange(2, 6)):
        state = history.apply(state, history.draw(*seed_kinds), "seed")
    base = history.store(state)
    base_state = run_state = history.warehouse.state(base)
    for _ in range(chance.randrange(1, 3)):
        run_state = history.apply(run_state, history.draw(*ALL_KINDS), "r")
    if run_state is base_state:
        return None
    after = history.store(run_state)
    others = [history.draw(*other_kinds) for _ in range(chance.randrange(3))]
    moments = {chance.randrange(len(others) + 1) for _ in range(2)}
    outcomes = []
    for is_compacted in (False, True):
        main_state = base_state
        for number in range(len(others) + 1):
            for part in "ab" if is_compacted and number in moments else "":
                compaction = Change("k", "t", Kind.COMPACT, part, "", "k")
                main_state = history.apply(main_state, compaction, "k")
            if number < len(others):
                main_state = history.apply(main_state, others[number], f"o{number}")
        main = base if main_state is base_state else history.store(main_state)
        outcomes.append(history.outcome(base, after, main))
    return outcomes[0], outcomes[1]


def failures(other_kinds: tuple[Kind, ...], first: int, count: int) -> list[tuple[int, Outcome]]:
    """The seeds whose run passes without compactions, and with them is refused or gives other rows."""
    found = []
    for seed in range(first, first + count):
        played = play(seed, other_kinds)
        if played is not None and isinstance(played[0], Counter) and played[0] != played[1]:
            found.append((seed, played[1]))
    return found


def test_a_compaction_refuses_no_run_and_changes_no_row() -> None:
    first = random.randrange(2**32)
    assert failures(NO_REWRITES, first, 1_500) == []


def test_an_upsert_is_compared_with_the_files_before_a_compaction() -> None:
    """Another run removed a compacted file, whose key bounds are wider than those of its parts."""
    played = play(16_457, NO_REWRITES)
    assert played is not None
    assert isinstance(played[1], Counter)
    assert played[0] == played[1]


def data_file(path: str, low: int, high: int, *, part: str = "a", rows: int | None = 1) -> File:
    return File(path, part, lambda _: (low, high), rows=rows)


def compaction(old: Sequence[File], new: Sequence[File]) -> SnapshotChange:
    return SnapshotChange(2, ChangeMode.COMPACT, removed=tuple(old), added=tuple(new))


LOW, HIGH, ADDED_LATER = data_file("low", 1, 1), data_file("high", 9, 9), data_file("later", 5, 5)
WIDE = data_file("wide", 1, 9, rows=2)


@pytest.mark.parametrize(
    ("steps", "is_disjoint"),
    [
        ([], False),
        ([compaction([LOW, HIGH], [WIDE])], True),
        (
            [
                compaction([LOW], [data_file("middle", 1, 8)]),
                compaction([data_file("middle", 1, 8), HIGH], [WIDE]),
            ],
            True,
        ),
        ([compaction([LOW, HIGH, ADDED_LATER], [data_file("wide", 1, 9, rows=3)])], False),
        (
            [
                compaction([LOW, ADDED_LATER], [data_file("middle", 1, 5)]),
                compaction([data_file("middle", 1, 5), HIGH], [WIDE]),
            ],
            False,
        ),
        ([compaction([LOW], [WIDE])], False),
        ([compaction([LOW, data_file("high", 9, 9, rows=None)], [WIDE])], False),
        ([compaction([LOW, HIGH], [data_file("wide", 1, 9, part="b", rows=2)])], False),
        ([replace(compaction([LOW, HIGH], [WIDE]), mode=ChangeMode.REWRITE)], False),
    ],
    ids=[
        "not compacted",
        "once",
        "twice",
        "rows of main",
        "rows of main, twice",
        "more rows",
        "rows unknown",
        "other partition",
        "no compaction",
    ],
)
def test_only_files_before_a_compaction_prove_that_keys_differ(
    steps: list[SnapshotChange], is_disjoint: bool
) -> None:
    upsert = SnapshotChange(1, ChangeMode.UPSERT, added=(data_file("new", 5, 5),), key_columns=("key",))
    removal = SnapshotChange(3, ChangeMode.REPLACE_PARTITIONS, removed=(WIDE,))
    assert has_disjoint_keys(upsert, [removal], find_old_files(steps)) is is_disjoint


def test_rows_never_differ_whatever_others_did() -> None:
    first = random.randrange(2**32)
    assert [one for one in failures(ALL_KINDS, first, 1_500) if isinstance(one[1], Counter)] == []


@pytest.mark.parametrize(
    ("module", "name", "mistake"),
    [
        (rebase_plan, "reverse_compactions", lambda run_change, _: run_change),
        (CommitPlan, "_is_only_maintained", lambda *_: False),
        (compaction_reversal, "has_same_rows", lambda *_: True),
    ],
    ids=["not reversed", "not taken", "not proved"],
)
def test_mistakes_are_found(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, mistake: Callable[..., Any]
) -> None:
    monkeypatch.setattr(module, name, mistake)
    assert failures(ALL_KINDS if name == "has_same_rows" else NO_REWRITES, 0, 1_500)
