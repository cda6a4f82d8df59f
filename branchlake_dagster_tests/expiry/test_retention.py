"""Which snapshots of a table stay: single rules, and random histories held to the meaning of each root."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import pytest

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.expiry import retention
from branchlake_dagster.expiry.retention import (
    ConsumerPosition,
    ExpiryPolicy,
    KeptBy,
    SnapshotFacts,
    SnapshotRetention,
    TableHistory,
    TableReference,
    TableRoots,
    decide_retention,
    keep_suffix,
    list_ancestors,
    parse_retention,
    resolve_position,
)
from branchlake_dagster.history.change import Position

HOUR_MS = 3_600_000
NOW_MS = 1_000 * HOUR_MS
POLICY = ExpiryPolicy(keep_count=2, keep_age=timedelta(hours=5), position_age=timedelta(hours=50))


def chain(
    count: int, *, hours_apart: int = 10, references: Mapping[str, TableReference] | None = None
) -> TableHistory:
    """Snapshots 1 to `count`, the last one an hour old, and each some hours after the one before."""
    snapshots = [
        SnapshotFacts(number, number - 1 or None, NOW_MS - HOUR_MS * (1 + hours_apart * (count - number)))
        for number in range(1, count + 1)
    ]
    return TableHistory(snapshots, count or None, references or {})


NOBODY = TableRoots()


def decide(
    history: TableHistory, roots: TableRoots = NOBODY, policy: ExpiryPolicy = POLICY
) -> SnapshotRetention:
    return decide_retention(history, roots, policy, NOW_MS)


def test_the_newest_stay_by_number() -> None:
    decision = decide(chain(10))
    assert (decision.kept_ids, decision.oldest_id, decision.kept_by) == ({9, 10}, 9, KeptBy.COUNT)
    assert decision.expired_ids == set(range(1, 9))


def test_young_ones_stay_by_age() -> None:
    decision = decide(chain(10, hours_apart=1))
    assert (decision.oldest_id, decision.kept_by) == (7, KeptBy.AGE)


def test_nothing_expires_from_a_short_history() -> None:
    assert decide(chain(2)).expired_ids == set()
    assert decide(chain(0)).kept_ids == set()


def test_the_base_of_an_open_run_keeps_all_since() -> None:
    decision = decide(chain(10), TableRoots({4: "run-x"}))
    assert decision.kept_ids == {4, 5, 6, 7, 8, 9, 10}
    assert (decision.kept_by, decision.holder) == (KeptBy.BASE, "run-x")


def test_a_position_keeps_all_since_up_to_its_bound() -> None:
    roots = TableRoots({}, (ConsumerPosition("shop.totals", 6),))
    decision = decide(chain(10), roots)
    assert decision.kept_ids == {6, 7, 8, 9, 10}
    assert (decision.kept_by, decision.holder, decision.given_up) == (KeptBy.POSITION, "shop.totals", ())


@pytest.mark.parametrize(
    "policy",
    [POLICY, replace(POLICY, position_age=timedelta(days=99), position_count=5)],
    ids=["age", "number"],
)
def test_an_old_position_is_given_up_by_name(policy: ExpiryPolicy) -> None:
    roots = TableRoots({}, (ConsumerPosition("shop.totals", 3), ConsumerPosition("shop.new", 9)))
    decision = decide(chain(10), roots, policy)
    assert decision.kept_ids == {9, 10}
    assert [(one.consumer, one.snapshot_id) for one in decision.given_up] == [("shop.totals", 3)]


def test_an_old_position_is_not_given_up_while_something_else_keeps_it() -> None:
    decision = decide(chain(10), TableRoots({2: "run-x"}, (ConsumerPosition("shop.totals", 3),)))
    assert decision.given_up == ()
    assert decision.oldest_id == 2


def test_a_tag_stays_outside_the_chain() -> None:
    decision = decide(chain(10, references={"quarter": TableReference(3)}))
    assert decision.kept_ids == {3, 9, 10}
    assert decision.oldest_id == 9


def test_a_branch_of_the_table_keeps_ancestors_by_its_own_retention() -> None:
    history = chain(6, references={"audit": TableReference(20, is_branch=True, min_snapshots=3)})
    side = [SnapshotFacts(number, number - 1 if number > 15 else 2, HOUR_MS) for number in range(15, 21)]
    decision = decide(replace(history, snapshots=[*history.snapshots, *side]))
    assert decision.kept_ids == {5, 6, 18, 19, 20}


@pytest.mark.parametrize("name", ["main", "audit"])
@pytest.mark.parametrize(
    "reference",
    [
        TableReference(10, is_branch=True, min_snapshots=5),
        TableReference(10, is_branch=True, max_age_ms=42 * HOUR_MS),
    ],
    ids=["number", "age"],
)
def test_a_branch_at_the_current_snapshot_lengthens_the_chain(name: str, reference: TableReference) -> None:
    decision = decide(chain(10, references={name: reference}))
    assert decision.kept_ids == {6, 7, 8, 9, 10}
    assert (decision.oldest_id, decision.kept_by, decision.holder) == (6, KeptBy.RETENTION, name)


def test_a_branch_at_the_current_snapshot_does_not_shorten_the_chain() -> None:
    reference = TableReference(10, is_branch=True, min_snapshots=1, max_age_ms=1)
    decision = decide(chain(10, references={"main": reference}))
    assert (decision.oldest_id, decision.kept_by) == (9, KeptBy.COUNT)


@pytest.mark.parametrize("values", [{"min_snapshots": 5}, {"max_age_ms": 42 * HOUR_MS}])
def test_properties_of_the_table_lengthen_the_chain(values: dict[str, int]) -> None:
    decision = decide(replace(chain(10), **values))
    assert (decision.oldest_id, decision.kept_by, decision.holder) == (6, KeptBy.RETENTION, "")
    short = decide(replace(chain(10), min_snapshots=1, max_age_ms=1))
    assert (short.oldest_id, short.kept_by) == (9, KeptBy.COUNT)


def test_the_greatest_age_of_java_keeps_all() -> None:
    history = chain(6, references={"audit": TableReference(4, is_branch=True, max_age_ms=2**63 - 1)})
    assert decide(history).kept_ids == {1, 2, 3, 4, 5, 6}
    assert decide(replace(chain(6), max_age_ms=2**63 - 1)).expired_ids == set()


def test_properties_of_the_table_count_for_branches_without_a_retention() -> None:
    history = replace(chain(6, references={"audit": TableReference(4, is_branch=True)}), min_snapshots=3)
    assert decide(history).kept_ids == {2, 3, 4, 5, 6}


@pytest.mark.parametrize(
    ("value", "expected"), [("12", 12), ("0", None), ("-3", None), ("some", None), ("", None)]
)
def test_a_retention_that_is_no_number_counts_as_missing(value: str, expected: int | None) -> None:
    assert parse_retention({"p": value}, "p") == expected
    assert parse_retention({}, "p") is None


def test_rolled_back_snapshots_go_by_age() -> None:
    history = chain(5)
    lost = [SnapshotFacts(50, 4, NOW_MS - HOUR_MS), SnapshotFacts(51, 4, NOW_MS - 9 * HOUR_MS)]
    decision = decide(replace(history, snapshots=[*history.snapshots, *lost]))
    assert decision.kept_ids == {4, 5, 50}


def test_positions_resolve_to_what_a_consumer_reads_back_to() -> None:
    history = chain(5)
    assert resolve_position(history, Position("t", 2)) == 2
    assert resolve_position(history, Position("t", 99)) is None
    assert resolve_position(history, Position("t", None)) is None
    assert resolve_position(history, Position("t", 2, (4,))) == 4
    assert resolve_position(history, Position("t", 2, (77,))) == 2
    replayed = replace(
        history,
        snapshots=[
            replace(one, replayed_from=77 if one.snapshot_id == 3 else None) for one in history.snapshots
        ],
    )
    assert resolve_position(replayed, Position("t", None, (77,))) == 1


def test_a_snapshot_log_has_no_gap() -> None:
    assert keep_suffix([1, 2, 3, 4], frozenset({2, 3, 4})) == 1
    assert keep_suffix([1, 2, 3, 4], frozenset({1, 2, 4})) == 3
    assert keep_suffix([1, 2], frozenset({1, 2})) == 0


@pytest.mark.parametrize(
    "values",
    [
        {"keep_count": 0},
        {"keep_count": float("nan")},
        {"keep_age": timedelta(-1)},
        {"position_age": timedelta(-1)},
        {"position_count": 0},
    ],
)
def test_a_policy_that_keeps_less_than_nothing_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        ExpiryPolicy(**values)


# -- random histories ----------------------------------------------------------------------------------


def random_history(dice: random.Random) -> TableHistory:
    """A history with rollbacks, tags and branches; ids are not in the order of time."""
    ids = dice.sample(range(1, 10_000), dice.randint(1, 60))
    snapshots: list[SnapshotFacts] = []
    current: int | None = None
    at = NOW_MS - dice.randint(1, 300) * HOUR_MS
    for number in ids:
        if snapshots and dice.random() < 0.05:
            current = dice.choice(snapshots).snapshot_id  # rolled back
        snapshots.append(SnapshotFacts(number, current, at))
        current = number
        at = min(NOW_MS, at + dice.randint(0, 10) * HOUR_MS)
    if dice.random() < 0.3:
        snapshots = snapshots[dice.randint(0, len(snapshots) - 1) :]  # expired before
    references = {
        f"r{number}": TableReference(dice.choice(snapshots).snapshot_id, is_branch=dice.random() < 0.3)
        for number in range(dice.randint(0, 3))
    }
    if dice.random() < 0.3:
        references["main"] = TableReference(
            snapshots[-1].snapshot_id, is_branch=True, min_snapshots=dice.randint(1, 12)
        )
    min_snapshots = dice.randint(1, 12) if dice.random() < 0.3 else None
    max_age_ms = dice.randint(1, 300) * HOUR_MS if dice.random() < 0.3 else None
    return TableHistory(snapshots, snapshots[-1].snapshot_id, references, min_snapshots, max_age_ms)


def random_roots(dice: random.Random, history: TableHistory) -> TableRoots:
    ids = [one.snapshot_id for one in history.snapshots]
    bases = {dice.choice(ids): f"run-{number}" for number in range(dice.randint(0, 3))}
    positions = [ConsumerPosition(f"c{number}", dice.choice(ids)) for number in range(dice.randint(0, 4))]
    return TableRoots(bases, tuple(positions))


def random_policy(dice: random.Random) -> ExpiryPolicy:
    return ExpiryPolicy(
        keep_count=dice.randint(1, 10),
        keep_age=timedelta(hours=dice.choice([0, 5, 40])),
        position_age=timedelta(hours=dice.choice([0, 30, 200])),
    )


def broken_promises(
    history: TableHistory, roots: TableRoots, policy: ExpiryPolicy, decision: SnapshotRetention
) -> list[str]:
    """What a decision breaks, written down again and without the code under test's own bookkeeping."""
    parents = {one.snapshot_id: one.parent_id for one in history.snapshots}
    times = {one.snapshot_id: one.timestamp_ms for one in history.snapshots}
    line: list[int] = []
    at = history.current_id
    while at in parents and at not in line:
        line.append(at)
        at = parents[at]

    def age_h(number: int) -> float:
        return (NOW_MS - times[number]) / HOUR_MS

    def since(number: int) -> list[int]:
        return line[: line.index(number) + 1]

    broken = []
    main = history.references.get("main")
    main_count = (main.min_snapshots if main is not None else None) or 0
    keep_count = max(policy.keep_count, history.min_snapshots or 0)
    keep_age_h = max(policy.keep_age.total_seconds() / 3600, (history.max_age_ms or 0) / HOUR_MS)
    needed: set[int] = set(line[: max(keep_count, main_count)])
    for number in line:
        if age_h(number) < keep_age_h:
            needed |= {*since(number)}
    for number in roots.bases:
        needed |= {*since(number)} if number in line else {number}
    fresh = [
        one.snapshot_id
        for one in roots.positions
        if one.snapshot_id in line and age_h(one.snapshot_id) < policy.position_age.total_seconds() / 3600
    ]
    for number in fresh:
        needed |= {*since(number)}
    named = {one.snapshot_id for one in history.references.values()}
    for name, reference in history.references.items():
        if reference.is_branch and reference.snapshot_id != history.current_id:
            branch, at = [], reference.snapshot_id
            while at in parents:
                branch.append(at)
                at = parents[at]
            young = [n for n, one in enumerate(branch) if age_h(one) < keep_age_h]
            named |= {*branch[: max(keep_count, young[-1] + 1 if young else 0)]}
        if reference.snapshot_id not in decision.kept_ids:
            broken.append(f"reference {name} was forgotten")
    if missing := needed - decision.kept_ids:
        broken.append(f"{missing} was needed")
    aside = {
        number
        for number in parents
        if number not in line and age_h(number) < policy.keep_age.total_seconds() / 3600
    }
    if idle := decision.kept_ids - needed - named - aside:
        broken.append(f"{idle} was kept for nobody")
    if decision.kept_ids | decision.expired_ids != parents.keys() or decision.kept_ids & decision.expired_ids:
        broken.append("kept and expired are not all")
    given_up = {(one.consumer, one.snapshot_id) for one in decision.given_up}
    lost = {
        (one.consumer, one.snapshot_id) for one in roots.positions if one.snapshot_id not in decision.kept_ids
    }
    if given_up != lost:
        broken.append(f"positions {given_up ^ lost} were not reported")
    return broken


def find_broken(cases: int, seed: int) -> list[str]:
    for number in range(cases):
        dice = random.Random(f"{seed}-{number}")
        history = random_history(dice)
        roots, policy = random_roots(dice, history), random_policy(dice)
        if broken := broken_promises(history, roots, policy, decide(history, roots, policy)):
            return broken
    return []


def test_all_that_is_needed_stays_and_nothing_else() -> None:
    seed = int(os.environ.get("BRANCHLAKE_TEST_SEED", random.SystemRandom().randrange(1 << 30)))
    assert find_broken(1_000, seed) == [], f"BRANCHLAKE_TEST_SEED={seed}"


def test_a_second_expiry_finds_nothing_left() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    dice = random.Random(seed)
    for _ in range(300):
        history = random_history(dice)
        roots, policy = random_roots(dice, history), random_policy(dice)
        first = decide(history, roots, policy)
        rest = replace(
            history, snapshots=[one for one in history.snapshots if one.snapshot_id in first.kept_ids]
        )
        assert decide(rest, roots, policy).expired_ids == set(), f"seed {seed}"


@pytest.mark.parametrize("bug", ["a position", "an open run", "a tag"])
def test_the_property_finds_what_is_forgotten(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "a tag":
        monkeypatch.setattr(retention, "_list_referenced", lambda *_: set())
    else:
        extend = retention._extend_chain

        def forget(
            history: TableHistory,
            line: list[SnapshotFacts],
            depths: dict[int, int],
            roots: TableRoots,
            *rest: object,
        ) -> object:
            less = replace(roots, positions=()) if bug == "a position" else replace(roots, bases={})
            return extend(history, line, depths, less, *rest)

        monkeypatch.setattr(retention, "_extend_chain", forget)
    assert find_broken(300, 7)


def test_a_cycle_of_parents_ends() -> None:
    history = TableHistory([SnapshotFacts(1, 2, 0), SnapshotFacts(2, 1, 0)], 2)
    assert [one.snapshot_id for one in list_ancestors(history, 2)] == [2, 1]
