"""Tests the status tag of re-executions, to which Dagster copies the tags of the run that they repeat."""

from __future__ import annotations

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster import publish_at_end
from branchlake_dagster.internals.dagster import with_executor
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_tags import NO_VALUE, RunState
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.harness import project, re_execute_all
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


@pytest.mark.parametrize("has_passed", [True, False])
def test_a_re_execution_without_a_branch_does_not_have_the_status_of_its_parent(
    lakehouse: Lakehouse, has_passed: bool
) -> None:
    works = True

    @dg.asset
    def prices() -> pl.DataFrame:
        if not works:
            raise ValueError("The source does not answer.")
        return pl.DataFrame({"eur": [1]})

    @dg.asset_check(asset=prices)
    def good() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=has_passed)

    with project(lakehouse, prices, good) as p:
        p.definitions = with_executor(p.definitions, publish_at_end(dg.in_process_executor))
        first_id = p.run()
        state = p.settle(first_id).state
        assert state is (RunState.PUBLISHED if has_passed else RunState.BLOCKED)
        works = False
        failed_id = re_execute_all(p, first_id, ok=False)
        works = True
        repeated_id = re_execute_all(p, failed_id, ok=has_passed)
        runs = [p.instance.get_run_by_id(run_id) for run_id in (first_id, failed_id, repeated_id)]
        assert [run.tags.get(RunTag.STATUS) for run in runs if run] == [state, NO_VALUE, state]
