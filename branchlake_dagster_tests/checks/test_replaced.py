"""A run's rows beside those of `main` that they replace."""

import math
from datetime import date
from decimal import Decimal
from typing import Any

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster import replaced_check, table_metadata
from branchlake_dagster.checks.constraints import CheckFailedToRun, ContractError
from branchlake_dagster.checks.replaced_check import relative_change
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.raised import raising

lakehouse = memory.lakehouse

DAYS = dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-08-03")


def told(p: Project) -> tuple[bool, str, str]:
    (found,) = p.last.get_asset_check_evaluations()
    return found.passed, found.description or "", str(found.metadata["comparison"].value)


def test_what_a_backfill_changes_is_reported_and_may_block(lakehouse: Lakehouse, namespace: str) -> None:
    prices = [1, 3]

    @dg.asset(key=[namespace, "daily"], partitions_def=DAYS, metadata=table_metadata(partition_by="day"))
    def daily(context: dg.AssetExecutionContext) -> pl.DataFrame:
        day = date.fromisoformat(context.partition_key)
        return pl.DataFrame({"day": [day] * len(prices), "price": prices})

    check = replaced_check(daily, sums=["price"], most_change=0.5, severity="error")
    with project(lakehouse, daily, check) as p:
        for day in ("2026-08-01", "2026-08-02"):
            p.settle(p.run(partition=day))
            assert told(p)[:2] == (True, "Compared: main has none of these rows yet.")
        prices[:] = [1, 3, 2]
        run = p.run(partition="2026-08-01")
        assert told(p)[:2] == (True, "Compared: the largest change is 50.0%.")
        assert "| rows | 2 | 3 | +50.0% |" in told(p)[2]
        assert "| sum(price) | 4 | 6 | +50.0% |" in told(p)[2]
        p.settle(run)
        prices[:] = []
        refused = p.settle(p.run(partition="2026-08-02"))
        assert refused.state == RunState.BLOCKED
        assert "Changed too much" in refused.detail


@pytest.mark.parametrize("column", ["m", "s"])
def test_a_column_that_is_missing_or_no_number_leaves_no_verdict(
    lakehouse: Lakehouse, namespace: str, column: str
) -> None:
    @dg.asset(key=[namespace, "t"])
    def t() -> pl.DataFrame:
        return pl.DataFrame({"n": [1], "s": ["a"]})

    with project(lakehouse, t, replaced_check(t, sums=["n", column])) as p:
        run_id = p.run(ok=False)
        p.failed_with(CheckFailedToRun)
        assert p.settle(run_id).state != RunState.PUBLISHED


def test_limits_are_looked_at_when_they_are_declared() -> None:
    with raising(ContractError, reason="most_change"):
        replaced_check("a", most_change=-1)
    with raising(ContractError, "loud", reason="severity"):
        replaced_check("a", severity="loud")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (10, 12, 0.2),
        (Decimal(10), Decimal(5), -0.5),
        (0, 0, 0.0),
        (0, 1, math.inf),
        (5.0, math.nan, math.inf),
        (math.nan, 5.0, math.inf),
        (math.nan, math.nan, 0.0),
        (math.inf, math.inf, 0.0),
        (-math.inf, math.inf, math.inf),
        (None, 5, None),
    ],
)
def test_a_sum_that_becomes_nan_or_infinite_has_changed(
    before: Any, after: Any, expected: float | None
) -> None:
    assert relative_change(before, after) == expected
