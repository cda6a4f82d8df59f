"""The gate's verdict on runs that are retried in parts, on Dagster's storages with one counter and with many."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import dagster as dg
import polars as pl
import pytest
from pyiceberg.exceptions import NoSuchTableError

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.dagster_internals import CONSOLIDATED_EVENT_LOG, NO_COMPUTE_LOGS
from branchlake_dagster_tests.harness import Project, project, retry, retry_failed_assets
from branchlake_dagster_tests.publication.gate.retried_checks import Amounts
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


@pytest.fixture(scope="module")
def consolidated_instance() -> Iterator[dg.DagsterInstance]:
    """An instance whose event log is one SQLite database, so one counter, for all runs of the module."""
    with tempfile.TemporaryDirectory() as folder:
        storage = {**CONSOLIDATED_EVENT_LOG, "config": {"base_dir": folder}}
        with dg.instance_for_test(overrides={"event_log_storage": storage, **NO_COMPUTE_LOGS}) as instance:
            yield instance


@pytest.fixture
def amounts(namespace: str) -> Amounts:
    return Amounts(namespace)


@pytest.fixture(
    # With one counter for all runs: the retry of a retry, whose events are ordered by it.
    params=["default", pytest.param("consolidated", marks=pytest.mark.soak)]
)
def p(lakehouse: Lakehouse, amounts: Amounts, request: pytest.FixtureRequest) -> Iterator[Project]:
    consolidated = request.param == "consolidated"
    instance = request.getfixturevalue("consolidated_instance") if consolidated else None
    with project(lakehouse, *amounts.definitions, instance=instance) as found:
        yield found


def test_a_retry_without_the_check_that_its_new_rows_need_is_blocked(p: Project, amounts: Amounts) -> None:
    amounts.noise = 20
    parent = p.run(ok=False)
    amounts.value, amounts.noise, amounts.report_fails = -1, 0, False
    child = retry(p, parent, amounts.steps["amounts"], amounts.steps["report"])
    assert p.settle(child).state is RunState.BLOCKED
    with pytest.raises(NoSuchTableError):
        p.rows(*amounts.outer_key.path)


@pytest.mark.parametrize("p", ["default", "consolidated"], indirect=True)
def test_a_retry_of_a_retry_is_blocked_by_rows_that_no_check_saw(p: Project, amounts: Amounts) -> None:
    amounts.noise = 20
    parent = p.run(ok=False)
    amounts.value, amounts.noise = -1, 0
    first = retry(p, parent, amounts.steps["amounts"], amounts.steps["report"], ok=False)
    amounts.value, amounts.report_fails = 1, False
    second = retry(p, first)
    assert p.settle(second).state is RunState.BLOCKED


def test_a_retry_from_failure_of_a_check_that_crashed_is_published(p: Project, amounts: Amounts) -> None:
    amounts.noise, amounts.check_crashes, amounts.report_fails = 50, True, False
    parent = p.run(ok=False)
    amounts.check_crashes = False
    child = retry(p, parent)
    assert p.settle(child).state is RunState.PUBLISHED
    assert p.rows(*amounts.outer_key.path) == [{"n": 1}]


def test_a_check_in_the_asset_s_step_judges_the_rows_of_its_own_run(p: Project, amounts: Amounts) -> None:
    parent = p.run(ok=False)
    amounts.value, amounts.report_fails = -1, False
    child = retry(p, parent, amounts.steps["inner"], amounts.steps["report"])
    assert p.settle(child).state is RunState.BLOCKED


@pytest.mark.parametrize("reports_again", [True, False])
def test_a_check_of_an_earlier_attempt_of_a_step_does_not_count_for_the_rows_of_a_later_one(
    lakehouse: Lakehouse, namespace: str, reports_again: bool
) -> None:
    key, values = dg.AssetKey([namespace, "t"]), [1, 2]

    @dg.multi_asset(
        outs={"t": dg.AssetOut(key=key, is_required=False)},
        check_specs=[dg.AssetCheckSpec("good", asset=key)],
        can_subset=True,
        retry_policy=dg.RetryPolicy(max_retries=1),
    )
    def t() -> Iterator[dg.Output[pl.DataFrame] | dg.AssetCheckResult]:
        value = values.pop(0)
        yield dg.Output(pl.DataFrame({"n": [value]}), output_name="t")
        if value == 1 or reports_again:
            yield dg.AssetCheckResult(check_name="good", asset_key=key, passed=True)
        if value == 1:
            raise dg.RetryRequested

    with project(lakehouse, t) as p:
        outcome = p.settle(p.run())
        assert not values
        if reports_again:
            assert outcome.state is RunState.PUBLISHED
            assert p.rows(*key.path) == [{"n": 2}]
        else:
            assert (outcome.state, outcome.codes) == (RunState.BLOCKED, ("check_before_write",))


def test_an_asset_that_only_a_failed_attempt_materialized_is_not_published(
    lakehouse: Lakehouse, namespace: str
) -> None:
    attempts: list[int] = []
    free = table_metadata(require_checks=False)
    outs = {
        name: dg.AssetOut(key=[namespace, name], metadata=free, is_required=False) for name in ("one", "two")
    }

    @dg.multi_asset(outs=outs, retry_policy=dg.RetryPolicy(max_retries=1))
    def both() -> Iterator[dg.Output[pl.DataFrame]]:
        attempts.append(1)
        if len(attempts) != 2:
            yield dg.Output(pl.DataFrame({"n": [len(attempts)]}), "one")
        if len(attempts) in (1, 3):
            raise RuntimeError("after the write")
        yield dg.Output(pl.DataFrame({"n": [len(attempts)]}), "two")

    with project(lakehouse, both) as p:
        outcome = p.settle(p.run())
        assert (outcome.state, outcome.codes) == (RunState.BLOCKED, ("attempt_abandoned",))
        assert p.settle(p.run()).state is RunState.PUBLISHED


def test_rows_that_a_failed_repetition_removed_are_not_taken_for_published(
    lakehouse: Lakehouse, namespace: str
) -> None:
    attempts: list[int] = []
    names = ("one", "two")
    free = table_metadata(require_checks=False)

    @dg.multi_asset(
        specs=[dg.AssetSpec([namespace, name], metadata=free) for name in names],
        can_subset=True,
        retry_policy=dg.RetryPolicy(max_retries=1),
    )
    def both(context, lakehouse: LakehouseResource):
        attempts.append(1)
        catalog = lakehouse.catalog()
        catalog.create_namespace_if_not_exists((namespace,))
        for name in names:
            key = dg.AssetKey([namespace, name])
            if key not in context.selected_asset_keys:
                continue
            if len(attempts) == 2 or (len(attempts) == 1 and name == "two"):
                raise RuntimeError("not yet")
            frame = pl.DataFrame({"n": [1]}).to_arrow()
            catalog.create_table((namespace, name), frame.schema).append(frame)
            yield dg.MaterializeResult(asset_key=key)

    with project(lakehouse, both) as p:
        outcome = p.settle(retry_failed_assets(p, p.run(ok=False)))
        assert (outcome.state, outcome.codes) == (RunState.BLOCKED, ("attempt_abandoned",))
