"""The gate's rules one by one, and the whole of it against a model small enough to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum, auto

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchlake_dagster.publication.verdict import (
    AssetRules,
    CheckEvaluation,
    Decision,
    RunEvidence,
    Verdict,
    WrittenPartition,
    judge_evidence,
    waive_unwritten_checks,
)
from branchlake_dagster.runs.run_events import EventPosition

A = "lake/a"
CHECK = (A, "good")
STEP, CHECK_STEP = "lake__a", "lake__a_good"


def result(
    passed: bool = True,
    *,
    blocks: bool = True,
    order: int = 20,
    run_index: int = 0,
    step: str | None = CHECK_STEP,
    told: str = "",
) -> CheckEvaluation:
    position = EventPosition(run_index, order)
    return CheckEvaluation(
        passed=passed, is_blocking=blocks, position=position, step_key=step, description=told
    )


def written(order: int = 10, step: str | None = STEP, *, run_index: int = 0) -> WrittenPartition:
    return WrittenPartition(EventPosition(run_index, order), step)


CLEAN = RunEvidence(
    run_id="r",
    succeeded=True,
    planned_checks=frozenset({(CHECK, None)}),
    evaluations={(CHECK, None): result()},
    written_partitions={(A, None): written()},
    rules={A: AssetRules("lake.a", frozenset({"good"}), demands_checks=True)},
    write_set=frozenset({"lake.a"}),
)
"""A run that wrote one table, whose one check was planned and passed."""

NO_RULES = AssetRules("lake.a", frozenset(), demands_checks=False)


def verdict(strict_tables: bool = True, **changes: object) -> Verdict:
    return judge_evidence(replace(CLEAN, **changes), strict_tables=strict_tables)


def test_changed_columns_of_a_frozen_table_block() -> None:
    found = verdict(changed_columns={"lake.a": ("extra",)})
    assert found.blocked
    assert len(found.reasons) == 1


def test_a_clean_run_passes() -> None:
    assert verdict() == Verdict(Decision.PASSED, (), (), 1, 1)
    assert "1/1" in verdict().format_summary()


def test_a_change_table_that_was_left_behind_blocks() -> None:
    (reason,) = verdict(
        strict_tables=False, write_set=frozenset({"lake.a", "lake.o__change__lake_a_0"})
    ).reasons
    assert "lake.o__change__lake_a_0" in reason


def test_a_run_that_did_not_succeed_is_blocked_whatever_its_checks_say() -> None:
    assert verdict(succeeded=False).codes == ("run_failed",)


def test_a_planned_check_without_an_evaluation_blocks() -> None:
    told = verdict(evaluations={})
    assert told.codes == ("check_not_evaluated",)
    assert "good on lake/a" in told.reasons[0]
    assert (told.checks_passed, told.checks_total) == (0, 1)


def test_a_planned_check_is_missed_partition_by_partition() -> None:
    told = verdict(
        planned_checks=frozenset({(CHECK, "p"), (CHECK, "q")}),
        evaluations={(CHECK, "p"): result()},
        written_partitions={(A, "p"): written(), (A, "q"): written()},
    )
    assert told.codes == ("check_not_evaluated",)
    assert "good on lake/a [q]" in told.reasons[0]
    assert (told.checks_passed, told.checks_total) == (1, 2)


def test_an_evaluation_without_a_partition_judges_all_partitions() -> None:
    told = verdict(
        planned_checks=frozenset({(CHECK, "p"), (CHECK, "q")}),
        written_partitions={(A, "p"): written(), (A, "q"): written()},
    )
    assert told.decision is Decision.PASSED


def test_a_failed_check_of_severity_error_blocks_and_reports_its_description() -> None:
    told = verdict(evaluations={(CHECK, None): result(False, told="2 rows")})
    assert told.codes == ("check_failed",)
    for name in ("good on lake/a", "2 rows"):
        assert name in told.reasons[0]
        assert name in told.format_summary()
    assert "0/1" in told.format_summary()


def test_reasons_that_are_sentences_are_joined_to_one() -> None:
    other = (A, "other")
    told = verdict(evaluations={(CHECK, None): result(False, told="2 rows."), (other, None): result(False)})
    assert told.codes == ("check_failed", "check_failed")
    assert told.format_summary().endswith("; ".join(told.reasons))
    assert ".;" not in told.format_summary()


def test_a_failed_check_of_severity_warn_passes_with_a_warning() -> None:
    told = verdict(evaluations={(CHECK, None): result(False, blocks=False, told="2 rows")})
    assert told == Verdict(Decision.PASSED_WITH_WARNINGS, (), told.warnings, 0, 1)
    assert [warning.code for warning in told.warnings] == ["check_failed"]
    assert "good on lake/a" in told.warnings[0]
    assert "2 rows" in told.format_summary()


def test_a_check_older_than_the_data_blocks() -> None:
    told = verdict(evaluations={(CHECK, None): result(order=5)})
    assert told.codes == ("check_before_write",)
    assert "good on lake/a" in told.reasons[0]


def test_the_order_of_events_within_one_step_is_dagsters() -> None:
    assert verdict(evaluations={(CHECK, None): result(order=5, step=STEP)}).decision is Decision.PASSED


def test_one_step_in_two_runs_is_two_steps() -> None:
    parent_check = {(CHECK, None): result(order=90, step=STEP)}
    rewritten = {(A, None): written(1, run_index=1)}
    assert verdict(evaluations=parent_check, written_partitions=rewritten).blocked


def test_positions_of_events_are_not_compared_with_numbers() -> None:
    with pytest.raises(TypeError):
        assert EventPosition(0, 1) < 2


def test_a_check_of_one_partition_does_not_grow_stale_by_another() -> None:
    def stale(written: Mapping[tuple[str, str | None], WrittenPartition]) -> bool:
        found = verdict(planned_checks=planned, evaluations=both, written_partitions=written)
        return found.codes == ("check_before_write",) and "good on lake/a [p]" in found.reasons[0]

    both = {(CHECK, "p"): result(order=15), (CHECK, "q"): result(order=25)}
    planned = frozenset({(CHECK, "p"), (CHECK, "q")})
    fine = {(A, "p"): written(10), (A, "q"): written(20)}
    assert (
        verdict(planned_checks=planned, evaluations=both, written_partitions=fine).decision is Decision.PASSED
    )
    again = {(A, "p"): written(18), (A, "q"): written(20)}
    assert stale(again)
    # Written without a partition: any of its rows may have changed.
    whole = {**fine, (A, None): written(18)}
    assert stale(whole)


def test_a_check_of_the_whole_table_grows_stale_by_any_partition() -> None:
    told = verdict(
        evaluations={(CHECK, None): result(order=15)},
        written_partitions={(A, "p"): written(10), (A, "q"): written(20)},
    )
    assert told.blocked


def test_the_reason_says_that_a_check_reads_more_partitions_than_the_run_wrote() -> None:
    rows = AssetRules("lake.a", frozenset({"good"}), demands_checks=True)
    whole = replace(rows, whole_table_checks={"good": frozenset({"lake.a"})})
    failed = {(CHECK, None): result(passed=False)}

    def reason(rules: AssetRules, partition: str | None) -> str:
        found = verdict(evaluations=failed, written_partitions={(A, partition): written()}, rules={A: rules})
        assert found.blocked
        return found.reasons[0]

    assert reason(whole, "p") != reason(rows, "p")
    assert "all partitions" in reason(whole, "p")
    assert reason(whole, None) == reason(rows, None)


def test_a_defined_check_that_was_left_out_blocks() -> None:
    told = verdict(planned_checks=frozenset(), evaluations={})
    assert "check_left_out" in told.codes
    assert any("good on lake/a" in reason for reason in told.reasons)


def test_a_defined_check_that_was_left_out_for_one_partition_blocks() -> None:
    told = verdict(
        planned_checks=frozenset({(CHECK, "p")}),
        evaluations={(CHECK, "p"): result()},
        written_partitions={(A, "p"): written(), (A, "q"): written()},
    )
    assert told.codes == ("check_left_out",)
    assert "good on lake/a [q]" in told.reasons[0]


def test_an_asset_that_demands_checks_and_has_none_blocks() -> None:
    bare: dict[str, object] = {"planned_checks": frozenset(), "evaluations": {}}
    told = verdict(**bare, rules={A: replace(NO_RULES, demands_checks=True)})
    assert told.codes == ("no_check",)
    assert "lake/a" in told.reasons[0]
    assert "require_checks=False" in told.reasons[0]
    assert verdict(**bare, rules={A: NO_RULES}).decision is Decision.PASSED


def test_a_check_that_ran_and_is_defined_no_more_still_counts() -> None:
    gone = {A: AssetRules("lake.a", frozenset(), demands_checks=True)}
    assert verdict(rules=gone).decision is Decision.PASSED
    assert verdict(rules=gone, evaluations={(CHECK, None): result(False)}).blocked


def test_a_check_of_an_asset_that_the_run_did_not_write_counts() -> None:
    other = (("lake/b", "good"), None)
    told = verdict(evaluations={**CLEAN.evaluations, other: result(False)})
    assert told.codes == ("check_failed",)
    assert "good on lake/b" in told.reasons[0]


def test_a_table_nobody_materialised_blocks_only_when_strict() -> None:
    changed = frozenset({"lake.a", "lake.side"})
    told = verdict(write_set=changed)
    assert "lake.side" in " ".join(told.reasons)
    assert verdict(strict_tables=False, write_set=changed).decision is Decision.PASSED


def test_all_reasons_are_reported_once_each() -> None:
    told = verdict(
        planned_checks=frozenset({(CHECK, None), ((A, "other"), None)}),
        evaluations={(CHECK, None): result(False, order=5)},
        written_partitions={(A, "p"): written(), (A, "q"): written()},
    )
    assert len(told.reasons) == len(set(told.reasons)) == 3


# -- against a model -----------------------------------------------------------------------------------


class Happened(Enum):
    """What became of one check in one partition."""

    LEFT_OUT = auto()
    NEVER_EVALUATED = auto()
    PASSED = auto()
    WARNED = auto()
    FAILED = auto()
    STALE = auto()
    UNPLANNED = auto()  # evaluated all the same, and passed


@st.composite
def runs(draw: st.DrawFn) -> tuple[RunEvidence, bool, Decision]:
    """A finished run, strictness, and what the model says of it."""
    happened_at_all = draw(st.booleans()) or draw(st.booleans())
    strict = draw(st.booleans())
    partitions: list[str | None] = draw(st.sampled_from([[None], ["p"], ["p", "q"]]))
    planned, evaluations, rows, rules = set(), {}, {}, {}
    ended: list[Happened] = []
    unchecked = False
    for asset in draw(st.sampled_from([[], ["a"], ["a", "b"]])):
        defined = draw(st.sampled_from([[], ["x"], ["x", "y"]]))
        demands = draw(st.booleans())
        rules[asset] = AssetRules(f"lake.{asset}", frozenset(defined), demands)
        unchecked |= demands and not defined
        for partition in partitions:
            rows[asset, partition] = written(10, asset)
            for check in defined:
                # Most checks are fine, else nearly every run would be blocked.
                state = draw(st.sampled_from([*Happened, *[Happened.PASSED] * 12]))
                ended.append(state)
                where = ((asset, check), partition)
                if state not in (Happened.LEFT_OUT, Happened.UNPLANNED):
                    planned.add(where)
                if state not in (Happened.LEFT_OUT, Happened.NEVER_EVALUATED):
                    evaluations[where] = result(
                        state not in (Happened.WARNED, Happened.FAILED),
                        blocks=state is not Happened.WARNED,
                        order=5 if state is Happened.STALE else 20,
                        step=f"{asset}_{check}",
                    )
    sneaked = draw(st.sampled_from([frozenset(), frozenset(), frozenset({"lake.side"})]))
    evidence = RunEvidence(
        "r",
        succeeded=happened_at_all,
        planned_checks=frozenset(planned),
        evaluations=evaluations,
        written_partitions=rows,
        rules=rules,
        write_set=frozenset(rule.table for rule in rules.values()) | sneaked,
    )
    fine = {Happened.PASSED, Happened.UNPLANNED, Happened.WARNED}
    published = happened_at_all and set(ended) <= fine and not unchecked and not (strict and bool(sneaked))
    warned = Happened.WARNED in ended
    passed = Decision.PASSED_WITH_WARNINGS if warned else Decision.PASSED
    return evidence, strict, passed if published else Decision.BLOCKED


@settings(derandomize=True, max_examples=400, deadline=None)
@given(runs())
def test_published_if_and_only_if_every_defined_check_answered_well(
    case: tuple[RunEvidence, bool, Decision],
) -> None:
    evidence, strict, expected = case
    told = judge_evidence(evidence, strict_tables=strict)
    assert told.decision is expected, told
    assert bool(told.reasons) is told.blocked
    assert told.checks_passed <= told.checks_total


@settings(derandomize=True, max_examples=200, deadline=None)
@given(runs(), st.data())
def test_only_assets_without_a_changed_table_need_no_checks(
    case: tuple[RunEvidence, bool, Decision], data: st.DataObject
) -> None:
    evidence, strict, _ = case
    changed = frozenset(data.draw(st.sets(st.sampled_from(["lake.a", "lake.b", "lake.side"]))))
    told = judge_evidence(
        replace(evidence, write_set=changed, rules=waive_unwritten_checks(evidence.rules, changed)),
        strict_tables=strict,
    )
    has_owners = changed <= {rule.table for rule in evidence.rules.values()}
    needed = {
        asset: rule for asset, rule in evidence.rules.items() if rule.table in changed or not has_owners
    }
    expected = judge_evidence(replace(evidence, write_set=changed, rules=needed), strict_tables=strict)
    assert (told.decision, told.reasons) == (expected.decision, expected.reasons)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(runs(), st.data())
def test_less_evidence_never_opens_the_gate(
    case: tuple[RunEvidence, bool, Decision], data: st.DataObject
) -> None:
    """Losing an evaluation (a crashed worker, a lost event) may close the gate, not open it."""
    evidence, strict, _ = case
    if not evidence.evaluations:
        return
    lost = data.draw(st.sampled_from(sorted(evidence.evaluations, key=repr)))
    before = judge_evidence(evidence, strict_tables=strict)
    rest = {where: one for where, one in evidence.evaluations.items() if where != lost}
    after = judge_evidence(replace(evidence, evaluations=rest), strict_tables=strict)
    if evidence.evaluations[lost].passed or not evidence.evaluations[lost].is_blocking:
        assert before.blocked <= after.blocked
    if lost[0][1] in evidence.rules[lost[0][0]].checks:
        assert after.blocked


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["write", "check", "next run"]), min_size=1, max_size=12),
    st.lists(st.integers(0, 1000), min_size=13, max_size=13),
)
def test_a_check_counts_only_after_the_last_write_whatever_the_counters_of_the_runs(
    history: list[str], starts: list[int]
) -> None:
    """Each run numbers its events from a start of its own, as the default SQLite storage does."""
    run_index, event_id, last = 0, starts[0], {"write": -1, "check": -1}
    rows: dict[tuple[str, str | None], WrittenPartition] = {}
    evaluations: dict[tuple[tuple[str, str], str | None], CheckEvaluation] = {}
    for index, event in enumerate(history):
        event_id += 1
        if event == "next run":
            run_index += 1
            event_id = starts[run_index]
            continue
        last[event] = index
        if event == "write":
            rows[A, None] = written(event_id, run_index=run_index)
        else:
            evaluations[CHECK, None] = result(order=event_id, run_index=run_index)
    checked = last["check"] > last["write"]
    expected = checked or (last["check"] >= 0 and not rows)
    assert verdict(written_partitions=rows, evaluations=evaluations).blocked is not expected
