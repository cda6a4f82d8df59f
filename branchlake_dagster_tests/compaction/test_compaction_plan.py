"""Which partitions are due, in which order, and within which budgets."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import DayTransform, IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import DateType, NestedField, PrimitiveType, TimestampType, TimestamptzType

from branchlake_dagster.compaction.compaction_branch import (
    branch_created_at,
    new_branch_name,
)
from branchlake_dagster.compaction.compaction_plan import (
    MEBIBYTE,
    CompactionOptions,
    CompactionPlan,
    Strategy,
    plan_partitions,
    split_into_units,
)
from branchlake_dagster.compaction.errors import CompactionRowsDiffer
from branchlake_dagster.compaction.file_measures import PartitionFiles
from branchlake_dagster.compaction.partition_predicate import partition_predicate
from branchlake_dagster.compaction.rewritten_files import RewrittenPartition, prove_same_rows
from branchlake_dagster.compaction.row_checksums import RowChecksum
from branchlake_dagster.compaction.spark_rewrite import build_call
from branchlake_dagster.compaction.summary import (
    PLAN_HEADERS,
    format_plan,
    list_plan_rows,
    plan_to_json,
)
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.nessie.model import ContentKey
from branchlake_dagster.publication.table_change import File

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)


def measured(partition: str = "p", small: int = 60, mib: float = 10, **more: Any) -> PartitionFiles:
    size = int(mib * MEBIBYTE)
    fields: dict[str, Any] = {"predicate": f"day = '{partition}'", "last_write": NOW - timedelta(days=1)}
    return PartitionFiles("shop.t", partition, small, size, 100, small, size, **{**fields, **more})


def plan(*measures: PartitionFiles, **options: Any) -> CompactionPlan:
    return plan_partitions(measures, CompactionOptions(**options), now=NOW)


def names(chosen: CompactionPlan) -> list[str]:
    return [planned.measured.partition for planned in chosen.partitions]


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (measured(small=51), "small_files"),
        (measured(small=50), None),
        (measured(small=1, delete_files=1), "delete_files"),
        (measured(small=0), None),
    ],
)
def test_a_partition_is_due_by_measure(one: PartitionFiles, reason: str | None) -> None:
    chosen = plan(one)
    assert [planned.reason.code for planned in chosen.partitions] == [reason] * (reason is not None)
    assert chosen.healthy == (reason is None)


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (measured(last_write=NOW - timedelta(minutes=29)), "hot"),
        (measured(is_current_spec=False), "older_partition_spec"),
        (measured(predicate=None), "not_selectable"),
    ],
)
def test_what_cannot_be_compacted_now_is_left_with_its_reason(one: PartitionFiles, reason: str) -> None:
    chosen = plan(one)
    assert chosen.partitions == ()
    assert [skipped.reason.code for skipped in chosen.skipped] == [reason]


def test_one_file_of_an_older_spec_concerns_the_whole_table() -> None:
    """Spark also selects it by the predicate of another partition."""
    old = measured("old", small=0, is_current_spec=False)
    new = replace(measured(), partition="q")
    other = replace(measured(), table="other")
    chosen = plan(old, new, other)
    assert [planned.measured.table for planned in chosen.partitions] == ["other"]
    assert [skipped.measured.partition for skipped in chosen.skipped] == ["q"]


def test_hot_partitions_are_compacted_if_asked_for_or_unknown() -> None:
    hot = measured(last_write=NOW)
    assert names(plan(hot, include_hot=True)) == ["p"]
    assert names(plan(hot, hot_minutes=0.0)) == ["p"]
    assert names(plan(replace(hot, last_write=None))) == ["p"]


def test_the_best_benefit_for_its_cost_comes_first_and_budgets_cut() -> None:
    large, cheap, many = measured("large", 100, 90), measured("cheap", 60, 1), measured("many", 900, 50)
    assert names(plan(large, cheap, many)) == ["cheap", "many", "large"]
    within = plan(large, cheap, many, max_bytes=92 * MEBIBYTE)
    assert names(within) == ["cheap", "many"]
    assert [skipped.reason.code for skipped in within.skipped] == ["over_budget"]
    # A smaller one after it still fits.
    assert names(plan(large, cheap, many, max_bytes=20 * MEBIBYTE)) == ["cheap"]
    assert names(plan(large, cheap, many, max_partitions=1)) == ["cheap"]


def test_budgets_hold_for_any_measures() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 - shown if the test fails
    chance = random.Random(seed)
    for _ in range(300):
        measures = [
            measured(f"p{n}", chance.randrange(120), chance.random() * 50, delete_files=chance.randrange(2))
            for n in range(chance.randrange(20))
        ]
        budget = chance.randrange(1, 200) * MEBIBYTE
        chosen = plan(*measures, max_bytes=budget)
        assert chosen.bytes <= budget
        assert len(chosen.partitions) + len(chosen.skipped) + chosen.healthy == len(measures)
        benefits = [planned.benefit for planned in chosen.partitions]
        assert benefits == sorted(benefits, reverse=True)
        for skipped in chosen.skipped:
            assert skipped.measured.candidate_bytes > budget - chosen.bytes
        units = split_into_units(chosen.partitions, unit_bytes=40 * MEBIBYTE, unit_partitions=3)
        assert [one for unit in units for one in unit] == list(chosen.partitions)
        assert all(len(unit) <= 3 for unit in units)
        assert all(sum(one.bytes for one in unit) <= 40 * MEBIBYTE or len(unit) == 1 for unit in units)


def test_strategies_that_order_rows_rewrite_whole_partitions() -> None:
    one = replace(measured(), files=70, bytes=900 * MEBIBYTE)
    (planned,) = plan(one, strategy=Strategy.Z_ORDER, sort_columns=("a", "b")).partitions
    assert (planned.files, planned.bytes, planned.expected_files) == (70, 900 * MEBIBYTE, 2)
    call = build_call(ContentKey(["shop", "t"]), [planned], CompactionOptions(Strategy.Z_ORDER, ("a", "b c")))
    assert "zorder(`a`, `b c`)" in call
    assert "'rewrite-all', 'true'" in call


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": Strategy.Z_ORDER},
        {"sort_columns": ("a",)},
        {"max_bytes": 0},
        {"unit_bytes": -1},
        {"max_small_files": -1},
        {"max_small_files": float("nan")},
        {"strategy": "z_order"},
        {"strategy": "zorder", "sort_columns": ("n",)},
        {"strategy": "sort", "sort_columns": "n"},
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        CompactionOptions(**options)


@pytest.mark.parametrize("strategy", Strategy)
def test_a_strategy_may_be_given_by_its_name(strategy: Strategy) -> None:
    columns = () if strategy is Strategy.BIN_PACK else ("n",)
    assert CompactionOptions(strategy.value, columns).strategy is strategy


def test_a_plan_in_words_rows_and_json() -> None:
    chosen = plan(measured(), measured("hot", last_write=NOW), measured(small=2))
    assert format_plan(chosen)
    rows = list_plan_rows(chosen)
    assert [len(row) for row in rows] == [len(PLAN_HEADERS)] * 2
    written = plan_to_json(chosen)
    assert [one["reason"] for one in written["partitions"] + written["skipped"]] == ["small_files", "hot"]
    assert written["healthy"] == 1


def test_a_branch_name_holds_the_time_of_its_creation() -> None:
    name, again = new_branch_name(), new_branch_name()
    assert name != again
    created_at = branch_created_at(name)
    assert created_at is not None
    assert abs(datetime.now(UTC) - created_at) < timedelta(minutes=1)
    assert branch_created_at("compact-of-the-month") is None
    assert branch_created_at(f"run-{name.removeprefix('compact-')}") is None


# -- the proof -----------------------------------------------------------------------------------------

OLD, NEW = RowChecksum(3, 5, 7, 9), RowChecksum(4, 1, 2, 3)
REWRITTEN = RewrittenPartition("day=1", (File("f1", rows=3), File("f2", rows=5)), (File("new", rows=7),))


def test_equal_rows_are_proved_whatever_their_files() -> None:
    assert prove_same_rows("t", [REWRITTEN], {"f1": OLD, "f2": NEW, "x": OLD}, {"new": OLD + NEW}) == {
        "day=1": OLD + NEW
    }
    assert REWRITTEN.has_folded_deletes


@pytest.mark.parametrize(
    "after",
    [
        replace(OLD + NEW, rows=6),
        replace(OLD + NEW, xor=0),
        replace(OLD + NEW, low=10),
        replace(OLD + NEW, high=11),
        RowChecksum(),
    ],
)
def test_a_checksum_that_is_off_is_refused(after: RowChecksum) -> None:
    with pytest.raises(CompactionRowsDiffer) as caught:
        prove_same_rows("t", [REWRITTEN], {"f1": OLD, "f2": NEW}, {"new": after})
    assert caught.value.partitions == ("day=1",)


def test_rows_that_the_manifest_states_must_exist() -> None:
    more = replace(REWRITTEN, added=(File("new", rows=8),))
    with pytest.raises(CompactionRowsDiffer):
        prove_same_rows("t", [more], {"f1": OLD, "f2": NEW}, {"new": OLD + NEW})


@pytest.mark.parametrize("kind", [DateType(), TimestampType(), TimestamptzType()])
@pytest.mark.parametrize("transform", [IdentityTransform(), DayTransform()])
def test_a_moment_after_year_9999_has_no_predicate(kind: PrimitiveType, transform: Any) -> None:
    """A producer that sends milliseconds as seconds makes such partitions."""
    schema = Schema(NestedField(1, "at", kind, required=False))
    spec = PartitionSpec(PartitionField(1, 1000, transform, "at_part"))
    assert (
        partition_predicate(Record(2**62 if transform == IdentityTransform() else 2**30), spec, schema)
        is None
    )


@pytest.mark.parametrize(
    "options",
    [
        {"max_seconds": -1.0},
        {"max_seconds": float("nan")},
        {"hot_minutes": -1.0},
        {"hot_minutes": float("inf")},
        {"max_partitions": 0},
    ],
)
def test_limits_without_meaning_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        CompactionOptions(**options)
    CompactionOptions(max_seconds=0.0, hot_minutes=0.0)
