"""Commits that an attempt of a step leaves after a later attempt has written: Spark still ran its query."""

from collections.abc import Iterator

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from branchlake_dagster import BranchSparkResource, LakehouseResource, table_metadata
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.specification import WriteMode
from branchlake_dagster_tests.harness import project, retry
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.spark_deletes import open_session, spark_like

lakehouse = memory.lakehouse

FREE = table_metadata(require_checks=False)
ONE = dg.RetryPolicy(max_retries=1)
LATE = ("attempt_late",)


def commit_late(lakehouse: LakehouseResource, key: dg.AssetKey, mode: WriteMode) -> None:
    """Commit the row of the first attempt, as the Spark server does for a process that was killed."""
    table = spark_like(lakehouse).load_table(tuple(key.path))
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    properties = {
        name: value
        for name, value in snapshot.summary.additional_properties.items()
        if name.startswith(LakeProperty.PREFIX)
    } | {LakeProperty.ATTEMPT: "1"}
    write = table.append if mode == "append" else table.overwrite
    write(pa.table({"n": [1]}), snapshot_properties=properties)


@pytest.mark.parametrize("mode", ["append", "replace_table"])
@pytest.mark.parametrize("when", ["before the check", "after the check"])
def test_a_late_commit_of_an_earlier_attempt_is_not_published(
    lakehouse: Lakehouse, namespace: str, mode: WriteMode, when: str
) -> None:
    @dg.asset(key=[namespace, "t"], metadata=table_metadata(write_mode=mode), retry_policy=ONE)
    def t(context: dg.AssetExecutionContext) -> pl.DataFrame:
        if context.retry_number == 0:
            raise RuntimeError("the process was killed while Spark wrote")
        return pl.DataFrame({"n": [2]})

    @dg.asset(key=[namespace, "other"], deps=[t], metadata=FREE)
    def other(lakehouse: LakehouseResource) -> None:
        if when == "before the check":
            commit_late(lakehouse, t.key, mode)

    @dg.asset_check(asset=t, additional_deps=[other])
    def is_positive(t: pl.DataFrame, lakehouse: LakehouseResource) -> dg.AssetCheckResult:
        if when == "after the check":
            commit_late(lakehouse, is_positive.check_key.asset_key, mode)
        return dg.AssetCheckResult(passed=bool((t["n"] > 0).all()))

    with project(lakehouse, t, other, is_positive) as p:
        outcome = p.settle(p.run())
        assert (outcome.state, outcome.codes) == (RunState.BLOCKED, LATE)


def insert_row(lakehouse: LakehouseResource, key: dg.AssetKey, run_id: str, attempt: int) -> None:
    """Commit a row as SQL does in the run's Spark session, by the code of the step that writes the asset."""
    properties = {
        LakeProperty.RUN_ID: run_id,
        LakeProperty.CODE_OF_STEP: key.to_python_identifier(),
        LakeProperty.CODE_ATTEMPT: str(attempt),
    }
    catalog, rows = spark_like(lakehouse), pa.table({"n": [attempt]})
    catalog.create_namespace_if_not_exists(tuple(key.path[:-1]))
    table = catalog.create_table_if_not_exists(tuple(key.path), rows.schema)
    table.append(rows, snapshot_properties=properties)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_late_commit_by_sql_of_an_earlier_attempt_is_not_published(
    lakehouse: Lakehouse, namespace: str, is_late: bool
) -> None:
    @dg.asset(key=[namespace, "t"], metadata=FREE, retry_policy=ONE)
    def t(context: dg.AssetExecutionContext, lakehouse: LakehouseResource) -> None:
        attempt = context.retry_number + 1
        open_session(lakehouse)
        if attempt == 2 or not is_late:
            insert_row(lakehouse, t.key, context.run.run_id, attempt)
        if attempt == 1:
            raise RuntimeError("the process was killed while Spark wrote")
        if is_late:
            insert_row(lakehouse, t.key, context.run.run_id, 1)

    with project(lakehouse, t) as p:
        outcome = p.settle(p.run())
        if is_late:
            assert (outcome.state, outcome.codes) == (RunState.BLOCKED, LATE)
        else:
            assert outcome.state is RunState.PUBLISHED
            assert p.rows(namespace, "t") == [{"n": 2}]


@pytest.mark.parametrize("mode", ["append", "replace_table"])
@pytest.mark.parametrize("by_re_execution", [False, True])
def test_attempts_that_followed_each_other_are_published(
    lakehouse: Lakehouse, namespace: str, mode: WriteMode, by_re_execution: bool
) -> None:
    attempts: list[int] = []

    @dg.multi_asset(
        outs={"t": dg.AssetOut(key=[namespace, "t"], metadata={**FREE, **table_metadata(write_mode=mode)})},
        retry_policy=ONE,
    )
    def stored() -> Iterator[dg.Output[pl.DataFrame]]:
        attempts.append(1)
        yield dg.Output(pl.DataFrame({"n": [len(attempts)]}), output_name="t")
        if len(attempts) < (3 if by_re_execution else 2):
            raise RuntimeError("after the output")

    with project(lakehouse, stored) as p:
        run_id = p.run(ok=not by_re_execution)
        run_id = retry(p, run_id) if by_re_execution else run_id
        assert p.settle(run_id).state is RunState.PUBLISHED
        assert p.rows(namespace, "t") == [{"n": len(attempts)}]


@pytest.mark.spark
def test_sql_in_the_session_of_the_run_names_its_attempt(lakehouse: Lakehouse, namespace: str) -> None:
    kept_sessions: list[SparkSession] = []

    @dg.asset(key=[namespace, "t"], metadata=FREE, retry_policy=ONE)
    def t(context: dg.AssetExecutionContext, spark: BranchSparkResource) -> None:
        if context.retry_number == 0:
            kept_sessions.append(spark.spark_session)
            raise RuntimeError("before the write")
        session = kept_sessions[0]
        session.sql(f"CREATE NAMESPACE IF NOT EXISTS nessie.{namespace}")
        session.sql(f"CREATE TABLE nessie.{namespace}.t AS SELECT 1 AS n")

    with project(lakehouse, t) as p:
        run_id = p.run()
        snapshot = lakehouse.catalog(run_branch_name(run_id)).load_table((namespace, "t")).current_snapshot()
        assert snapshot is not None
        assert snapshot.summary is not None
        assert snapshot.summary.additional_properties[LakeProperty.CODE_ATTEMPT] == "2"
        assert p.settle(run_id).state is RunState.PUBLISHED
