"""The order of writes and checks under other executors, event logs, mapped steps and repeated steps.

`apart` executes each step as Dagster's multiprocess executor does: with a plan and resources of its own, which
end before the next step starts. It uses no other process, because the lake is in the memory of this one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest

from branchlake_dagster import LakehouseResource, table_metadata
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.outcome import Outcome
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster_tests.dagster_internals import (
    CONSOLIDATED_EVENT_LOG,
    NO_COMPUTE_LOGS,
    Executor,
    InMemoryJob,
    RetryMode,
    create_execution_plan,
    execute_plan_iterator,
    execute_run,
)
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.publication.gate.test_writes_after_checks import (
    BAD_ROW,
    FREE,
    append_row,
    create_with_row,
    rename_column,
)
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.instances import new_instance
from branchlake_dagster_tests.suite.spark_deletes import spark_like

lakehouse = memory.lakehouse


OpenInstance = Callable[[], AbstractContextManager[dg.DagsterInstance]]


@contextmanager
def instance_with_one_log() -> Iterator[dg.DagsterInstance]:
    with tempfile.TemporaryDirectory() as folder:
        storage = {**CONSOLIDATED_EVENT_LOG, "config": {"base_dir": folder}}
        with dg.instance_for_test({"event_log_storage": storage, **NO_COMPUTE_LOGS}) as instance:
            yield instance


class StepsApart(Executor):
    retries = RetryMode.ENABLED

    def execute(self, plan_context: Any, execution_plan: Any) -> Iterator[dg.DagsterEvent]:
        run, instance, job = plan_context.dagster_run, plan_context.instance, plan_context.job
        with execution_plan.start(retry_mode=self.retries) as active:
            while not active.is_complete:
                for step in active.get_steps_to_execute():
                    plan = create_execution_plan(
                        job, step_keys_to_execute=[step.key], known_state=active.get_known_state()
                    )
                    mode = self.retries.for_inner_plan()
                    for event in execute_plan_iterator(plan, job, run, instance, retry_mode=mode):
                        yield event
                        active.handle_event(event)
                    active.verify_complete(plan_context, step.key)
                yield from active.plan_events_iterator(plan_context)


@dg.executor(name="steps_apart")
def apart(_: dg.InitExecutorContext) -> Executor:
    return StepsApart()


@pytest.fixture(params=[dg.in_process_executor, apart], ids=["in-process", "apart"])
def executor(request: pytest.FixtureRequest) -> dg.ExecutorDefinition:
    found: dg.ExecutorDefinition = request.param
    return found


def settle(
    lakehouse: Lakehouse,
    executor: dg.ExecutorDefinition,
    *parts: Any,
    open_instance: OpenInstance = new_instance,
) -> Outcome:
    """The outcome of a run of all these assets and checks."""
    with open_instance() as instance, project(lakehouse, *parts, instance=instance) as p:
        definitions = dg.Definitions.merge(
            p.definitions, dg.Definitions(jobs=[dg.define_asset_job("all", executor_def=executor)])
        )
        job = definitions.resolve_job_def("all")
        run = instance.create_run_for_job(job)
        result = execute_run(InMemoryJob(job), run, instance)
        assert result.success
        return p.settle(run.run_id)


def positive(asset: dg.AssetsDefinition) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=asset, blocking=True)
    def positive(rows: pl.DataFrame) -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=bool((rows["n"] > 0).all()))

    return positive


@dg.op(out=dg.DynamicOut())
def parts() -> Iterator[dg.DynamicOutput[int]]:
    yield from (dg.DynamicOutput(n, f"part_{n}") for n in (1, 2))


@pytest.fixture
def mapped(namespace: str) -> dg.AssetsDefinition:
    """An asset whose mapped steps write its table."""
    key = dg.AssetKey([namespace, "mapped"])

    @dg.op
    def create(lakehouse: LakehouseResource) -> None:
        create_with_row(lakehouse, key, 1)

    @dg.op(ins={"after": dg.In(dg.Nothing)})
    def write_part(lakehouse: LakehouseResource, n: int) -> int:
        lakehouse.catalog().load_table(tuple(key.path)).append(pa.table({"n": [n]}))
        return n

    @dg.op
    def finish(numbers: list[int]) -> None:
        assert numbers == [1, 2]

    @dg.graph_asset(key=key)
    def mapped() -> None:
        created = create()
        return finish(parts().map(lambda part: write_part(part, after=created)).collect())

    return mapped


def test_mapped_steps_may_write_the_table_of_their_asset(
    lakehouse: Lakehouse, executor: dg.ExecutorDefinition, mapped: dg.AssetsDefinition
) -> None:
    assert settle(lakehouse, executor, mapped, positive(mapped)).state is RunState.PUBLISHED


@pytest.mark.parametrize("names_step", [True, False], ids=["named", "spark"])
def test_a_mapped_step_after_the_check_may_not_change_the_table(
    lakehouse: Lakehouse,
    namespace: str,
    executor: dg.ExecutorDefinition,
    mapped: dg.AssetsDefinition,
    names_step: bool,
) -> None:
    @dg.op
    def change(lakehouse: LakehouseResource, n: int) -> int:
        if n == 2 and names_step:
            append_row(lakehouse, mapped.key)
        elif n == 2:
            catalog = spark_like(lakehouse)
            rename_column(catalog, catalog.load_table(tuple(mapped.key.path)))
        return n

    @dg.op(ins={"after": dg.In(dg.Nothing)}, out=dg.DynamicOut())
    def later_parts() -> Iterator[dg.DynamicOutput[int]]:
        yield from (dg.DynamicOutput(n, f"part_{n}") for n in (1, 2))

    @dg.op
    def total(numbers: list[int]) -> pl.DataFrame:
        return pl.DataFrame({"n": numbers})

    @dg.graph_asset(
        key=[namespace, "later"],
        ins={"after": dg.AssetIn(mapped.key, dagster_type=dg.Nothing)},
        metadata=FREE,
    )
    def later(after: Any) -> Any:
        return total(later_parts(after=after).map(change).collect())

    outcome = settle(lakehouse, executor, mapped, positive(mapped), later)
    assert outcome.codes == ("check_before_write",)


@pytest.mark.parametrize(
    "open_instance", [new_instance, pytest.param(instance_with_one_log, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("is_changed", [True, False], ids=["changed", "unchanged"])
def test_an_asset_that_alters_its_table_in_its_step_may_be_checked_there(
    lakehouse: Lakehouse,
    namespace: str,
    executor: dg.ExecutorDefinition,
    open_instance: OpenInstance,
    is_changed: bool,
) -> None:
    key = dg.AssetKey([namespace, "own"])

    @dg.asset(key=key, check_specs=[dg.AssetCheckSpec("good", asset=key)])
    def own(lakehouse: LakehouseResource) -> dg.MaterializeResult:
        create_with_row(lakehouse, key, 1)
        catalog = spark_like(lakehouse)
        rename_column(catalog, catalog.load_table(tuple(key.path)))
        return dg.MaterializeResult(check_results=[dg.AssetCheckResult(check_name="good", passed=True)])

    @dg.asset(key=[namespace, "other"], deps=[own], metadata=FREE)
    def other(lakehouse: LakehouseResource) -> pl.DataFrame:
        if is_changed:
            spark_like(lakehouse).drop_table(tuple(key.path))
            create_with_row(lakehouse, key, -1)
        return pl.DataFrame({"n": [1]})

    outcome = settle(lakehouse, executor, own, other, open_instance=open_instance)
    assert outcome.codes == (("check_before_write",) if is_changed else ())


def test_a_repeated_check_may_read_what_another_step_wrote_in_between(
    lakehouse: Lakehouse, namespace: str, executor: dg.ExecutorDefinition
) -> None:
    started: list[int] = []

    @dg.asset(key=[namespace, "checked"], metadata=table_metadata(write_mode="append"))
    def checked() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    @dg.asset_check(asset=checked, op_tags={"dagster/priority": "2"})
    def positive(rows: pl.DataFrame) -> dg.AssetCheckResult:
        started.append(len(rows))
        if len(started) == 1:
            raise dg.RetryRequested(seconds_to_wait=0.1)
        return dg.AssetCheckResult(passed=bool((rows["n"] > 0).all()))

    @dg.asset(key=[namespace, "other"], deps=[checked], metadata=FREE)
    def other(lakehouse: LakehouseResource) -> pl.DataFrame:
        lakehouse.catalog().load_table(tuple(checked.key.path)).append(pa.table({"n": [2]}))
        return pl.DataFrame({"n": [1]})

    outcome = settle(lakehouse, executor, checked, positive, other)
    assert started == [1, 2]
    assert outcome.state is RunState.PUBLISHED


def test_the_rows_of_a_failed_attempt_count_only_until_they_are_removed(
    lakehouse: Lakehouse, namespace: str, executor: dg.ExecutorDefinition
) -> None:
    key, attempts = dg.AssetKey([namespace, "own"]), []

    @dg.asset(key=key)
    def own(lakehouse: LakehouseResource) -> None:
        create_with_row(lakehouse, key, 1)
        attempts.append(1)
        if len(attempts) == 1:
            lakehouse.catalog().load_table(tuple(key.path)).append(BAD_ROW)
            raise dg.RetryRequested

    assert settle(lakehouse, executor, own, positive(own)).state is RunState.PUBLISHED
