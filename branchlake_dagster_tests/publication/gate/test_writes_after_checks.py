"""Tables that the code of a step changes after, or while, a check of them ran: the check proves nothing."""

from __future__ import annotations

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest

from branchlake_dagster import LakehouseResource, table_metadata
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

FREE = table_metadata(require_checks=False)
BAD_ROW = pa.table({"n": [-1]})


def create_with_row(lakehouse: LakehouseResource, key: dg.AssetKey, n: int) -> None:
    catalog = lakehouse.catalog()
    catalog.create_namespace_if_not_exists(tuple(key.path[:-1]))
    catalog.create_table(tuple(key.path), BAD_ROW.schema).append(pa.table({"n": [n]}))


def append_row(lakehouse: LakehouseResource, key: dg.AssetKey) -> None:
    lakehouse.catalog().load_table(tuple(key.path)).append(BAD_ROW)


@pytest.fixture
def checked(namespace: str) -> dg.AssetsDefinition:
    @dg.asset(key=[namespace, "checked"])
    def checked() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    return checked


def check_of(asset: dg.AssetsDefinition, *, blocking: bool = True) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=asset, blocking=blocking, name="is_positive")
    def is_positive(checked: pl.DataFrame) -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=bool((checked["n"] > 0).all()))

    return is_positive


def test_a_later_step_that_changes_a_checked_table_is_not_published(
    lakehouse: Lakehouse, namespace: str, checked: dg.AssetsDefinition
) -> None:
    @dg.asset(key=[namespace, "other"], deps=[checked], metadata=FREE)
    def other(lakehouse: LakehouseResource) -> pl.DataFrame:
        append_row(lakehouse, checked.key)
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, checked, check_of(checked), other) as p:
        outcome = p.settle(p.run())
        assert (outcome.state, outcome.codes) == (RunState.BLOCKED, ("check_before_write",))


def test_a_later_step_that_drops_a_checked_table_is_not_published(
    lakehouse: Lakehouse, namespace: str, checked: dg.AssetsDefinition
) -> None:
    @dg.asset(key=[namespace, "other"], deps=[checked], metadata=FREE)
    def other(lakehouse: LakehouseResource) -> pl.DataFrame:
        lakehouse.catalog().drop_table(tuple(checked.key.path))
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, checked, check_of(checked)) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
    with project(lakehouse, checked, check_of(checked), other) as p:
        outcome = p.settle(p.run())
        assert (outcome.state, outcome.codes) == (RunState.BLOCKED, ("check_before_write",))


def test_a_check_that_changes_its_own_table_is_not_published(
    lakehouse: Lakehouse, checked: dg.AssetsDefinition
) -> None:
    @dg.asset_check(asset=checked)
    def changes(checked: pl.DataFrame, lakehouse: LakehouseResource) -> dg.AssetCheckResult:
        append_row(lakehouse, changes.check_key.asset_key)
        return dg.AssetCheckResult(passed=True)

    with project(lakehouse, checked, changes) as p:
        outcome = p.settle(p.run())
        assert (outcome.state, outcome.codes) == (RunState.BLOCKED, ("check_before_write",))


def test_a_step_that_ends_before_the_check_may_change_the_table(
    lakehouse: Lakehouse, namespace: str, checked: dg.AssetsDefinition
) -> None:
    later = dg.AssetKey([namespace, "later"])

    @dg.asset(key=[namespace, "earlier"], metadata=FREE)
    def earlier(lakehouse: LakehouseResource) -> None:
        create_with_row(lakehouse, later, 2)

    @dg.asset(key=later, deps=[earlier], metadata=table_metadata(write_mode="append"))
    def appended() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    @dg.asset_check(asset=appended)
    def is_positive(rows: pl.DataFrame) -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=sorted(rows["n"]) == [1, 2])

    with project(lakehouse, earlier, appended, is_positive) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED


@pytest.mark.parametrize("in_step", [True, False], ids=["in its step", "in a later step"])
def test_the_asset_s_own_code_may_change_its_table(
    lakehouse: Lakehouse, namespace: str, in_step: bool
) -> None:
    key = dg.AssetKey([namespace, "own"])
    specs = [dg.AssetCheckSpec("good", asset=key)] if in_step else []

    @dg.asset(key=key, check_specs=specs)
    def own(lakehouse: LakehouseResource) -> dg.MaterializeResult:  # type: ignore[type-arg]
        create_with_row(lakehouse, key, 1)
        results = [dg.AssetCheckResult(check_name="good", passed=True)] if in_step else []
        return dg.MaterializeResult(check_results=results)

    @dg.asset_check(asset=own)
    def is_positive() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    with project(lakehouse, own, *([] if in_step else [is_positive])) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED


@pytest.mark.spark
def test_sql_of_a_later_step_that_changes_a_checked_table_is_not_published(
    lakehouse: Lakehouse, namespace: str, checked: dg.AssetsDefinition
) -> None:
    @dg.asset(key=[namespace, "other"], deps=[checked], metadata=FREE)
    def other(spark: BranchSparkResource) -> None:
        spark.spark_session.sql(f"INSERT INTO nessie.{namespace}.checked VALUES (-1)")

    with project(lakehouse, checked, check_of(checked), other) as p:
        outcome = p.settle(p.run())
        assert (outcome.state, outcome.codes) == (RunState.BLOCKED, ("check_before_write",))
