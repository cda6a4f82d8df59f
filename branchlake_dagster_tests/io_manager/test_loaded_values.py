"""Tests values that the code of a step loads by key, with `load_asset_value`, and inputs that no asset here writes."""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster import LakehouseResource, table_metadata
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.lakehouse_resource import _step_holds
from branchlake_dagster.runs.run_events import event_metadata
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.spark.plan_reads import PlanReads
from branchlake_dagster.stored_names import EventMetadata
from branchlake_dagster_tests import harness
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

UNCHECKED = table_metadata(require_checks=False)
SERIALIZABLE = table_metadata(require_checks=False, isolation="serializable")


def test_a_step_loads_what_its_run_has_written(lakehouse: Lakehouse) -> None:
    prices = iter([1, 2])

    @dg.asset(metadata=UNCHECKED)
    def price() -> pl.DataFrame:
        return pl.DataFrame({"eur": [next(prices)]})

    @dg.asset(metadata=UNCHECKED, deps=[price])
    def doubled(context: dg.AssetExecutionContext) -> pl.DataFrame:
        frame: pl.DataFrame = context.load_asset_value(dg.AssetKey("price"), python_type=pl.DataFrame)
        return frame * 2

    @dg.asset(metadata=table_metadata(write_mode="append", require_checks=False), deps=[doubled])
    def log() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    with harness.project(lakehouse, price, doubled, log) as p:
        for eur in (2, 4):
            assert p.settle(p.run()).state is RunState.PUBLISHED
            assert p.rows("lake", "doubled") == [{"eur": eur}]
        assert p.branches() == {"main"}


def test_a_step_without_a_lake_resource_loads_from_a_branch_of_its_run(lakehouse: Lakehouse) -> None:
    loaded = []

    @dg.asset(metadata=UNCHECKED)
    def price() -> pl.DataFrame:
        return pl.DataFrame({"eur": [1]})

    @dg.asset(io_manager_key="memory", deps=[price])
    def report(context: dg.AssetExecutionContext) -> None:
        loaded.append(context.load_asset_value(dg.AssetKey("price"), python_type=pl.DataFrame))

    with harness.project(lakehouse, price, report, resources={"memory": dg.mem_io_manager}) as p:
        p.settle(p.run("price"))
        run_id = p.run("report")
        assert p.branches() == {"main", f"run-{run_id}"}
        assert p.settle(run_id).codes == ()
        assert p.branches() == {"main"}
    assert [frame.to_dicts() for frame in loaded] == [[{"eur": 1}]]


def test_resources_that_a_step_builds_write_to_its_runs_branch(lakehouse: Lakehouse) -> None:
    @dg.asset(metadata=UNCHECKED)
    def price(context: dg.AssetExecutionContext) -> pl.DataFrame:
        resource = LakehouseResource.from_settings(lakehouse.settings)
        with dg.build_resources({"lakehouse": resource}, instance=context.instance) as resources:
            catalog = resources.lakehouse.catalog()
            catalog.create_namespace("built")
            catalog.create_table("built.notes", pl.DataFrame({"text": ["a"]}).to_arrow().schema)
        return pl.DataFrame({"eur": [1]})

    with harness.project(lakehouse, price) as p:
        run_id = p.run()
        assert not lakehouse.catalog().table_exists(("built", "notes"))
        assert p.settle(run_id).codes == ("table_of_no_asset",)
        assert not lakehouse.catalog().table_exists(("built", "notes"))


def test_a_value_that_a_serializable_asset_loads_is_in_its_read_set(lakehouse: Lakehouse) -> None:
    @dg.asset(metadata=UNCHECKED)
    def price() -> pl.DataFrame:
        return pl.DataFrame({"eur": [1]})

    @dg.asset(metadata=SERIALIZABLE)
    def total(context: dg.AssetExecutionContext) -> pl.DataFrame:
        # A dependency would be in the read set anyway.
        frame = p.definitions.load_asset_value("price", python_type=pl.DataFrame, instance=context.instance)
        assert isinstance(frame, pl.DataFrame)
        return frame.sum()

    with harness.project(lakehouse, price, total) as p:
        p.settle(p.run("price"))
        run_id = p.run("total")
        p.settle(p.run("price"))
        outcome = p.settle(run_id)
        assert (outcome.state, outcome.codes) == (RunState.REFUSED, ("read_and_changed",))


def test_the_partitions_of_an_external_input_need_a_column(lakehouse: Lakehouse) -> None:
    shops = dg.StaticPartitionsDefinition(["berlin", "paris"])
    catalog = lakehouse.catalog()
    catalog.create_namespace("lake")
    stored = pl.DataFrame({"shop": ["berlin", "paris"]}).to_arrow()
    catalog.create_table("lake.sales", stored.schema).append(stored)

    @dg.asset(partitions_def=shops, metadata=table_metadata(partition_by="shop", require_checks=False))
    def report(sales: pl.DataFrame) -> pl.DataFrame:
        return sales

    with harness.project(lakehouse, dg.AssetSpec("sales", partitions_def=shops), report) as p:
        p.run("report", partition="paris", ok=False)
        p.failed_with(ConfigurationError, "lake.sales", "AssetSpec")
        assert p.branches() == {"main"}

    sales = dg.AssetSpec("sales", partitions_def=shops, metadata=table_metadata(partition_by="shop"))
    with harness.project(lakehouse, sales, report) as p:
        p.settle(p.run("report", partition="paris"))
        assert p.rows("lake", "report") == [{"shop": "paris"}]


@pytest.mark.parametrize("writes_later", [True, False])
@pytest.mark.parametrize("io_manager_key", ["io_manager", "memory"])
def test_a_step_writes_after_it_has_loaded_a_value(
    lakehouse: Lakehouse, io_manager_key: str, writes_later: bool
) -> None:
    @dg.asset(metadata=UNCHECKED)
    def price() -> pl.DataFrame:
        return pl.DataFrame({"eur": [1]})

    @dg.asset(io_manager_key=io_manager_key, deps=[price])
    def copy(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        def write() -> None:
            catalog.load_table("lake.price").append(pl.DataFrame({"eur": [2]}).to_arrow())

        resource = LakehouseResource.from_settings(lakehouse.settings)
        with dg.build_resources({"lakehouse": resource}, instance=context.instance) as resources:
            catalog = resources.lakehouse.catalog()
            if not writes_later:
                context.load_asset_value(dg.AssetKey("price"), python_type=pl.DataFrame)
                write()
        if writes_later:
            write()
        return dg.MaterializeResult()

    with harness.project(lakehouse, price, copy, resources={"memory": dg.mem_io_manager}) as p:
        p.settle(p.run("price"))
        # A run whose writes are not recorded would be refused. This one writes to the table of another asset.
        assert p.settle(p.run("copy")).state is RunState.BLOCKED


def test_a_step_writes_by_its_own_catalog_after_it_has_loaded_a_value(lakehouse: Lakehouse) -> None:
    @dg.asset(metadata=UNCHECKED)
    def price() -> pl.DataFrame:
        return pl.DataFrame({"eur": [1]})

    @dg.asset(metadata=UNCHECKED, deps=[price])
    def stock(context: dg.AssetExecutionContext, lakehouse: LakehouseResource) -> dg.MaterializeResult[None]:
        catalog = lakehouse.catalog()
        frame: pl.DataFrame = context.load_asset_value(dg.AssetKey("price"), python_type=pl.DataFrame)
        catalog.create_table("lake.stock", frame.to_arrow().schema)
        catalog.load_table("lake.stock").append(frame.to_arrow())
        return dg.MaterializeResult()

    with harness.project(lakehouse, price, stock) as p:
        p.settle(p.run("price"))
        assert p.settle(p.run("stock")).state is RunState.PUBLISHED
        assert p.rows("lake", "stock") == [{"eur": 1}]


def test_an_ended_resource_leaves_no_heartbeat(lakehouse: Lakehouse) -> None:
    @dg.asset(metadata=UNCHECKED)
    def price() -> pl.DataFrame:
        return pl.DataFrame({"eur": [1]})

    @dg.asset(metadata=SERIALIZABLE)
    def total(context: dg.AssetExecutionContext) -> pl.DataFrame:
        resource = LakehouseResource.from_settings(lakehouse.settings)
        with dg.build_resources({"lakehouse": resource}, instance=context.instance) as resources:
            reads = resources.lakehouse.read_set
        assert is_beating(context.run.run_id)
        reads.report_scan(PlanReads(frozenset({("lake", "price")})))
        return pl.DataFrame({"eur": [1]})

    def is_beating(run_id: str) -> bool:
        return any(thread.name == f"heartbeat-run-{run_id}" for thread in threading.enumerate())

    with harness.project(lakehouse, price, total) as p:
        p.settle(p.run("price"))
        run_id = p.run("total")
        assert not is_beating(run_id)


@pytest.mark.parametrize("io_manager_key", ["io_manager", "memory"])
@pytest.mark.parametrize("has_branch", [True, False])
def test_a_step_reads_another_lake_from_main(
    lakehouse: Lakehouse, tmp_path: Path, io_manager_key: str, has_branch: bool
) -> None:
    references = []
    other_lake = LakehouseResource.from_settings(
        lakehouse.settings.model_copy(update={"warehouse": tmp_path.as_uri()})
    )

    @dg.asset(metadata=UNCHECKED)
    def price() -> pl.DataFrame:
        return pl.DataFrame({"eur": [1]})

    @dg.asset(io_manager_key=io_manager_key, deps=[price], metadata=UNCHECKED)
    def copy(context: dg.AssetExecutionContext) -> pl.DataFrame:
        with dg.build_resources({"other": other_lake}, instance=context.instance) as resources:
            references.append(resources.other.open_branch())
        return pl.DataFrame({"n": [1]})

    with harness.project(lakehouse, price, copy, resources={"memory": dg.mem_io_manager}) as p:
        p.run(*([] if has_branch else ["copy"]))
    assert references == ["main"]


@pytest.mark.parametrize("own_lake", [True, False])
def test_of_two_declared_lakes_a_step_without_a_branch_reads_main(
    lakehouse: Lakehouse, tmp_path: Path, own_lake: bool
) -> None:
    references = []
    own = LakehouseResource.from_settings(lakehouse.settings)
    other = LakehouseResource.from_settings(
        lakehouse.settings.model_copy(update={"warehouse": tmp_path.as_uri()})
    )

    @dg.asset(io_manager_key="memory")
    def copy(context: dg.AssetExecutionContext) -> None:
        with dg.build_resources(
            {"built": own if own_lake else other}, instance=context.instance
        ) as resources:
            references.append(resources.built.open_branch())

    with harness.project(lakehouse, copy, resources={"memory": dg.mem_io_manager, "other": other}) as p:
        p.run()
    assert references == ["main"]


def test_a_resource_with_other_settings_removes_nothing_of_a_repeated_step(lakehouse: Lakehouse) -> None:
    rows = pl.DataFrame({"n": [1]}).to_arrow()

    @dg.asset(metadata=UNCHECKED, retry_policy=dg.RetryPolicy(max_retries=1))
    def log(context: dg.AssetExecutionContext, lakehouse: LakehouseResource) -> dg.MaterializeResult[None]:
        catalog = lakehouse.catalog()
        catalog.create_namespace_if_not_exists("lake")
        catalog.create_table_if_not_exists("lake.log", rows.schema).append(rows)
        if not context.retry_number:
            raise RuntimeError
        settings = lakehouse.lakehouse.settings.model_copy(update={"preview_rows": 7})
        built = LakehouseResource.from_settings(settings)
        with dg.build_resources({"built": built}, instance=context.instance) as resources:
            assert resources.built.open_branch() == f"run-{context.run.run_id}"
        return dg.MaterializeResult()

    with harness.project(lakehouse, log) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
        assert p.rows("lake", "log") == [{"n": 1}]


def test_a_loader_that_is_kept_follows_the_run_that_uses_it(lakehouse: Lakehouse) -> None:
    loaded, loaders, prices = [], [], iter([1, 2])

    @dg.asset(metadata=UNCHECKED)
    def price() -> pl.DataFrame:
        return pl.DataFrame({"eur": [next(prices)]})

    @dg.asset(metadata=UNCHECKED, deps=[price])
    def copy(context: dg.AssetExecutionContext) -> pl.DataFrame:
        if not loaders:
            loaders.append(p.definitions.get_asset_value_loader(context.instance))
        frame = loaders[0].load_asset_value("price", python_type=pl.DataFrame)
        assert isinstance(frame, pl.DataFrame)
        loaded.append(frame["eur"].to_list())
        return frame

    with harness.project(lakehouse, price, copy) as p:
        for _ in range(2):
            p.run()
        assert loaded == [[1], [2]]


@pytest.mark.parametrize("is_built", [True, False])
def test_a_resource_is_refused_to_the_step_of_another_run(lakehouse: Lakehouse, is_built: bool) -> None:
    resources: list[LakehouseResource] = []

    @dg.asset(metadata=UNCHECKED)
    def price(context: dg.AssetExecutionContext, lakehouse: LakehouseResource) -> pl.DataFrame:
        if not resources and is_built:
            built = dg.build_resources(
                {"lake": LakehouseResource.from_settings(lakehouse.lakehouse.settings)},
                instance=context.instance,
            )
            resources.append(stack.enter_context(built).lake)
        elif not resources:
            resources.append(lakehouse)
        resources[0].catalog()
        return pl.DataFrame({"eur": [1]})

    with harness.project(lakehouse, price) as p, contextlib.ExitStack() as stack:
        p.run()
        stack.close()
        with pytest.raises(ConfigurationError):
            resources[0].open_branch()
        p.run(ok=False)
        p.failed_with(ConfigurationError)


def test_a_resource_of_a_step_can_be_used_in_its_threads_after_it_has_ended(lakehouse: Lakehouse) -> None:
    references = []

    @dg.asset(metadata=UNCHECKED)
    def price(context: dg.AssetExecutionContext) -> pl.DataFrame:
        resource = LakehouseResource.from_settings(lakehouse.settings)
        with dg.build_resources({"lake": resource}, instance=context.instance) as resources:
            pass
        thread = threading.Thread(target=lambda: references.append(resources.lake.open_branch()))
        thread.start()
        thread.join()
        return pl.DataFrame({"eur": [1]})

    with harness.project(lakehouse, price) as p:
        assert references == [f"run-{run_id}" for run_id in [p.run()]]


class ReleasedLate:
    """Leaves something to the end of the step when it is collected."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave

    def __del__(self) -> None:
        self._leave()


def test_a_finalizer_may_use_the_holds_of_its_step(lakehouse: Lakehouse) -> None:
    released: list[int] = []

    @dg.asset(metadata=UNCHECKED)
    def price(context: dg.AssetExecutionContext) -> pl.DataFrame:
        run_id = context.run.run_id
        branch: Any = ReleasedLate(lambda: _step_holds.release_later(run_id, lambda: released.append(1)))
        _step_holds.hold_branch(run_id, branch)
        return pl.DataFrame({"eur": [1]})

    with harness.project(lakehouse, price) as p:
        thread = threading.Thread(target=p.run, daemon=True)
        thread.start()
        thread.join(timeout=60)
        assert released == [1]


def test_a_repeated_load_reports_its_read_once(lakehouse: Lakehouse) -> None:
    @dg.asset(metadata=UNCHECKED)
    def price() -> pl.DataFrame:
        return pl.DataFrame({"eur": [1]})

    @dg.asset(metadata=SERIALIZABLE)
    def total(context: dg.AssetExecutionContext) -> pl.DataFrame:
        for _ in range(3):
            p.definitions.load_asset_value("price", python_type=pl.DataFrame, instance=context.instance)
        return pl.DataFrame({"eur": [1]})

    @dg.asset(metadata=SERIALIZABLE, deps=[total])
    def later(context: dg.AssetExecutionContext) -> pl.DataFrame:
        p.definitions.load_asset_value("price", python_type=pl.DataFrame, instance=context.instance)
        return pl.DataFrame({"eur": [1]})

    with harness.project(lakehouse, price, total, later) as p:
        p.settle(p.run("price"))
        run_id = p.run("total", "later")
        reads = [
            entry.step_key
            for entry in p.instance.all_logs(run_id)
            if entry.dagster_event is not None
            and EventMetadata.READ_TABLES in event_metadata(entry.dagster_event)
        ]
        assert reads == ["total", "later"]
