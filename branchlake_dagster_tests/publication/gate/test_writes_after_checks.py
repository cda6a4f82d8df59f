"""Tables that the code of a step changes after, or while, a check of them ran: the check proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.table import Table
from pyiceberg.types import StringType
from pyspark.sql import DataFrame

from branchlake_dagster import LakehouseResource, NessieCatalog, table_metadata
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.outcome import Outcome
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.spark_deletes import delete_files, open_session, spark_like

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


def drop(catalog: NessieCatalog, table: Table) -> None:
    catalog.drop_table(table.name())


def drop_and_create_again(catalog: NessieCatalog, table: Table) -> None:
    catalog.drop_table(table.name())
    catalog.create_table(table.name(), table.schema())


def rename(catalog: NessieCatalog, table: Table) -> None:
    catalog.rename_table(table.name(), (*table.name()[:-1], "elsewhere"))


def add_column(_: NessieCatalog, table: Table) -> None:
    table.update_schema().add_column("extra", StringType()).commit()


def rename_column(_: NessieCatalog, table: Table) -> None:
    table.update_schema().rename_column("n", "m").commit()


def set_property(_: NessieCatalog, table: Table) -> None:
    with table.transaction() as transaction:
        transaction.set_properties({"owner": "nobody"})


def roll_back(_: NessieCatalog, table: Table) -> None:
    parent = table.snapshots()[0].snapshot_id
    table.manage_snapshots().rollback_to_snapshot(parent).commit()


def comment_column(_: NessieCatalog, table: Table) -> None:
    table.update_schema().update_column("n", doc="A number.").commit()


def partition(_: NessieCatalog, table: Table) -> None:
    table.update_spec().add_identity("n").commit()


def set_writer_properties(_: NessieCatalog, table: Table) -> None:
    """As Spark does in each commit, and in `WRITE ORDERED BY`."""
    with table.transaction() as transaction:
        transaction.set_properties({"nessie.commit.id": "0" * 64, "write.distribution-mode": "range"})


def tag_snapshot(_: NessieCatalog, table: Table) -> None:
    table.manage_snapshots().create_tag(table.snapshots()[0].snapshot_id, "kept").commit()


Change = Callable[[NessieCatalog, Table], None]
CATALOGS = pytest.mark.parametrize(
    "open_catalog", [spark_like, LakehouseResource.catalog], ids=["spark", "own"]
)


def run_with_later_change(
    lakehouse: Lakehouse,
    namespace: str,
    open_catalog: Callable[[LakehouseResource], NessieCatalog],
    change: Change,
) -> Outcome:
    """The outcome of a run that changes a published table of two snapshots after its check."""

    @dg.asset(key=[namespace, "checked"], metadata=table_metadata(write_mode="append"))
    def checked() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    @dg.asset(key=[namespace, "other"], deps=[checked], metadata=FREE)
    def other(lakehouse: LakehouseResource) -> pl.DataFrame:
        catalog = open_catalog(lakehouse)
        change(catalog, catalog.load_table(tuple(checked.key.path)))
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, checked, check_of(checked)) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
    with project(lakehouse, checked, check_of(checked), other) as p:
        return p.settle(p.run())


@CATALOGS
@pytest.mark.parametrize(
    "change", [drop, drop_and_create_again, rename, add_column, rename_column, set_property, roll_back]
)
def test_a_changed_table_is_not_published_whoever_committed_the_change(
    lakehouse: Lakehouse,
    namespace: str,
    open_catalog: Callable[[LakehouseResource], NessieCatalog],
    change: Change,
) -> None:
    outcome = run_with_later_change(lakehouse, namespace, open_catalog, change)
    assert outcome.state is RunState.BLOCKED
    assert outcome.codes[0] == "check_before_write"


@CATALOGS
@pytest.mark.parametrize("change", [comment_column, partition, set_writer_properties, tag_snapshot])
def test_changes_that_no_check_can_read_are_published(
    lakehouse: Lakehouse,
    namespace: str,
    open_catalog: Callable[[LakehouseResource], NessieCatalog],
    change: Change,
) -> None:
    assert run_with_later_change(lakehouse, namespace, open_catalog, change).state is RunState.PUBLISHED


@pytest.mark.parametrize("in_step", [True, False], ids=["in its step", "in a later step"])
def test_the_asset_s_own_code_may_change_its_table(
    lakehouse: Lakehouse, namespace: str, in_step: bool
) -> None:
    key = dg.AssetKey([namespace, "own"])
    specs = [dg.AssetCheckSpec("good", asset=key)] if in_step else []

    @dg.asset(key=key, check_specs=specs)
    def own(lakehouse: LakehouseResource) -> dg.MaterializeResult:
        create_with_row(lakehouse, key, 1)
        catalog = spark_like(lakehouse)
        add_column(catalog, catalog.load_table(tuple(key.path)))
        results = [dg.AssetCheckResult(check_name="good", passed=True)] if in_step else []
        return dg.MaterializeResult(check_results=results)

    @dg.asset_check(asset=own, blocking=True)
    def is_positive() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    @dg.asset(key=[namespace, "other"], deps=[own], metadata=FREE)
    def other(lakehouse: LakehouseResource) -> pl.DataFrame:
        catalog = spark_like(lakehouse)
        rename_column(catalog, catalog.load_table(tuple(key.path)))
        return pl.DataFrame({"n": [1]})

    checks = [] if in_step else [is_positive]
    with project(lakehouse, own, *checks) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
        p.lake.catalog().drop_table(tuple(key.path))
    with project(lakehouse, own, *checks, other) as p:
        assert p.settle(p.run()).codes == ("check_before_write",)


def test_a_check_that_alters_its_table_without_naming_its_step_is_not_published(
    lakehouse: Lakehouse, checked: dg.AssetsDefinition
) -> None:
    @dg.asset_check(asset=checked)
    def changes(checked: pl.DataFrame, lakehouse: LakehouseResource) -> dg.AssetCheckResult:
        catalog = spark_like(lakehouse)
        rename_column(catalog, catalog.load_table(tuple(changes.check_key.asset_key.path)))
        return dg.AssetCheckResult(passed=True)

    with project(lakehouse, checked, changes) as p:
        assert p.settle(p.run()).codes == ("check_before_write",)


def test_a_table_that_an_earlier_step_loaded_names_that_step_but_is_not_published(
    lakehouse: Lakehouse, namespace: str
) -> None:
    key, tables = dg.AssetKey([namespace, "checked"]), []

    @dg.asset(key=[namespace, "earlier"], metadata=FREE)
    def earlier(lakehouse: LakehouseResource) -> pl.DataFrame:
        tables.append(lakehouse.catalog().load_table(tuple(key.path)))
        return pl.DataFrame({"n": [1]})

    @dg.asset(key=key, deps=[earlier], metadata=table_metadata(write_mode="append"))
    def checked() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    @dg.asset(key=[namespace, "later"], deps=[checked], metadata=FREE)
    def later() -> pl.DataFrame:
        tables[-1].refresh().append(BAD_ROW)
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, checked, check_of(checked)) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
    with project(lakehouse, checked, check_of(checked), earlier, later) as p:
        outcome = p.settle(p.run())
        assert (outcome.state, outcome.codes) == (RunState.BLOCKED, ("check_before_write",))


@pytest.mark.parametrize("when", ["earlier step", "later step", "own step", "check"])
def test_files_that_spark_deleted_are_published_unless_a_check_has_read_them(
    lakehouse: Lakehouse, namespace: str, when: str
) -> None:
    key = dg.AssetKey([namespace, "checked"])

    @dg.asset(key=[namespace, "earlier"], metadata=FREE)
    def earlier(lakehouse: LakehouseResource) -> pl.DataFrame:
        if when == "earlier step" and lakehouse.catalog().table_exists(tuple(key.path)):
            open_session(lakehouse)
            delete_files(lakehouse, key)
        return pl.DataFrame({"n": [1]})

    @dg.asset(key=key, deps=[earlier], metadata=table_metadata(write_mode="append"))
    def checked(lakehouse: LakehouseResource) -> pl.DataFrame:
        if when == "own step" and lakehouse.catalog().table_exists(tuple(key.path)):
            open_session(lakehouse)
            delete_files(lakehouse, key)
        return pl.DataFrame({"n": [1]})

    @dg.asset_check(asset=checked, blocking=True)
    def is_positive(checked: pl.DataFrame, lakehouse: LakehouseResource) -> dg.AssetCheckResult:
        if when == "check" and len(checked) > 1:
            open_session(lakehouse)
            delete_files(lakehouse, key)
        return dg.AssetCheckResult(passed=True)

    @dg.asset(key=[namespace, "later"], deps=[checked], metadata=FREE)
    def later(lakehouse: LakehouseResource) -> pl.DataFrame:
        if when == "later step":
            open_session(lakehouse)
            delete_files(lakehouse, key)
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, earlier, checked, is_positive) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
    with project(lakehouse, earlier, checked, is_positive, later) as p:
        outcome = p.settle(p.run())
        if when in ("earlier step", "own step"):
            assert outcome.state is RunState.PUBLISHED, outcome
            assert p.rows(namespace, "checked") == [{"n": 1}]
        else:
            assert (outcome.state, outcome.codes) == (RunState.BLOCKED, ("check_before_write",))


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


@pytest.mark.spark
def test_sql_through_the_session_of_an_input_names_the_step_that_ran_it(
    lakehouse: Lakehouse, namespace: str, checked: dg.AssetsDefinition
) -> None:
    @dg.asset(key=[namespace, "other"], deps=[checked], metadata=FREE)
    def other(spark: BranchSparkResource) -> pl.DataFrame:
        spark.spark_session.sql("SELECT 1").collect()
        return pl.DataFrame({"n": [1]})

    @dg.asset(key=[namespace, "later"], ins={"rows": dg.AssetIn(other.key)}, deps=[checked], metadata=FREE)
    def later(rows: DataFrame) -> None:
        rows.sparkSession.sql(f"INSERT INTO nessie.{namespace}.checked VALUES (-1)")

    with project(lakehouse, checked, check_of(checked), other, later) as p:
        run = p.run()
        table = p.lake.catalog(f"run-{run}").load_table((namespace, "checked"))
        snapshot = table.current_snapshot()
        assert snapshot is not None
        assert snapshot.summary is not None
        assert snapshot.summary.additional_properties[LakeProperty.CODE_OF_STEP] == f"{namespace}__later"
        assert p.settle(run).codes == ("check_before_write",)
