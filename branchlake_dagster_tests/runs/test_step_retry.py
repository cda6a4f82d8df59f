"""What a step writes by its own code, by SQL or through the catalog, is there once however often it is attempted."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dagster as dg
import polars as pl
import pytest
from pyiceberg.types import StringType

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.internals.dagster import report_engine_event
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.stored_names import EventMetadata
from branchlake_dagster.tables.errors import OneLakeOnly, RetryNeedsFullRun
from branchlake_dagster.tables.specification import WriteMode, table_metadata
from branchlake_dagster_tests.harness import Project, project, retry, retry_failed_assets
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.spark_deletes import APPLICATION, delete_files, open_session, spark_like

lakehouse = memory.lakehouse

FREE = table_metadata(require_checks=False)
ONE = dg.RetryPolicy(max_retries=1)


def rows(p: Project, *identifier: str, ref: str = "main") -> list[int]:
    return sorted(row["n"] for row in p.rows(*identifier, ref=ref))


def seed(namespace: str) -> dg.AssetsDefinition:
    @dg.asset(key=[namespace, "t"], metadata=FREE)
    def t() -> pl.DataFrame:
        return pl.DataFrame({"n": [0]})

    return t


def add(lakehouse: LakehouseResource, namespace: str, n: int) -> None:
    lakehouse.catalog().load_table((namespace, "t")).append(pl.DataFrame({"n": [n]}).to_arrow())


@pytest.mark.parametrize("in_pool", [False, True])
def test_an_append_through_the_catalog_exists_once_after_a_retry_of_the_step(
    lakehouse: Lakehouse, namespace: str, in_pool: bool
) -> None:
    first = seed(namespace)

    @dg.asset(key=[namespace, "writer"], deps=[first], metadata=FREE, retry_policy=ONE)
    def writer(context: dg.AssetExecutionContext, lakehouse: LakehouseResource) -> None:
        if in_pool:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(add, lakehouse, namespace, 1).result()
        else:
            add(lakehouse, namespace, 1)
        if context.retry_number == 0:
            raise RuntimeError("after the append")

    with project(lakehouse, first, writer) as p:
        run_id = p.run()
        assert p.settle(run_id).state is RunState.PUBLISHED
        assert rows(p, namespace, "t") == [0, 1]


def test_a_table_that_a_failed_attempt_created_is_gone_before_the_next_one(
    lakehouse: Lakehouse, namespace: str
) -> None:
    @dg.asset(key=[namespace, "made"], metadata=FREE, retry_policy=ONE)
    def made(context: dg.AssetExecutionContext, lakehouse: LakehouseResource) -> None:
        catalog = lakehouse.catalog()
        catalog.create_namespace_if_not_exists((namespace,))
        frame = pl.DataFrame({"n": [1]}).to_arrow()
        catalog.create_table((namespace, "made"), frame.schema).append(frame)
        if context.retry_number == 0:
            raise RuntimeError("after the append")

    with project(lakehouse, made) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
        assert rows(p, namespace, "made") == [1]


def test_a_retry_from_failure_takes_out_what_the_failed_run_wrote(
    lakehouse: Lakehouse, namespace: str
) -> None:
    first = seed(namespace)
    fails = [True]

    @dg.asset(key=[namespace, "writer"], deps=[first], metadata=FREE)
    def writer(lakehouse: LakehouseResource) -> None:
        add(lakehouse, namespace, 1)
        if fails[0]:
            raise RuntimeError("after the append")

    with project(lakehouse, first, writer) as p:
        parent = p.run(ok=False)
        again = retry(p, parent, ok=False)
        fails[0] = False
        child = retry(p, again)
        assert rows(p, namespace, "t", ref=run_branch_name(child)) == [0, 1]
        assert p.settle(child).state is RunState.PUBLISHED


def test_a_retry_is_refused_by_name_if_another_step_wrote_to_the_table_since(
    lakehouse: Lakehouse, namespace: str
) -> None:
    first = seed(namespace)

    @dg.asset(key=[namespace, "writer"], deps=[first], metadata=FREE)
    def writer(lakehouse: LakehouseResource) -> None:
        add(lakehouse, namespace, 1)

    @dg.asset(key=[namespace, "other"], deps=[writer], metadata=FREE)
    def other(lakehouse: LakehouseResource) -> None:
        add(lakehouse, namespace, 2)
        raise RuntimeError("after the append")

    with project(lakehouse, first, writer, other) as p:
        parent = p.run(ok=False)
        retry(p, parent, f"{namespace}__writer", ok=False)
        p.failed_with(RetryNeedsFullRun, f"{namespace}.t")


def test_what_other_steps_wrote_before_and_to_other_tables_stays(
    lakehouse: Lakehouse, namespace: str
) -> None:
    first = seed(namespace)

    @dg.asset(key=[namespace, "earlier"], deps=[first], metadata=FREE)
    def earlier(lakehouse: LakehouseResource) -> pl.DataFrame:
        add(lakehouse, namespace, 1)
        return pl.DataFrame({"n": [7]})

    @dg.asset(key=[namespace, "writer"], deps=[earlier], metadata=FREE, retry_policy=ONE)
    def writer(context: dg.AssetExecutionContext, lakehouse: LakehouseResource) -> pl.DataFrame:
        add(lakehouse, namespace, 2)
        if context.retry_number == 0:
            raise RuntimeError("after the append")
        return pl.DataFrame({"n": [8]})

    with project(lakehouse, first, earlier, writer) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
        assert rows(p, namespace, "t") == [0, 1, 2]
        assert (rows(p, namespace, "earlier"), rows(p, namespace, "writer")) == ([7], [8])


def test_a_retry_of_single_assets_keeps_what_the_step_had_finished(
    lakehouse: Lakehouse, namespace: str
) -> None:
    fails = [True]
    names = ("t", "u")

    @dg.multi_asset(specs=[dg.AssetSpec([namespace, name], metadata=FREE) for name in names], can_subset=True)
    def both(
        context: dg.AssetExecutionContext, lakehouse: LakehouseResource
    ) -> Iterator[dg.MaterializeResult[None]]:
        catalog = lakehouse.catalog()
        catalog.create_namespace_if_not_exists((namespace,))
        for name in names:
            key = dg.AssetKey([namespace, name])
            if key in context.selected_asset_keys:
                frame = pl.DataFrame({"n": [1]}).to_arrow()
                catalog.create_table_if_not_exists((namespace, name), frame.schema).append(frame)
                if name == "u" and fails[0]:
                    raise RuntimeError("after the append")
                yield dg.MaterializeResult(asset_key=key)

    with project(lakehouse, both) as p:
        again = retry_failed_assets(p, p.run(ok=False), ok=False)
        fails[0] = False
        assert p.settle(retry_failed_assets(p, again)).state is RunState.PUBLISHED
        assert (rows(p, namespace, "t"), rows(p, namespace, "u")) == ([1], [1])


def test_a_retry_of_single_assets_takes_out_what_a_step_with_another_key_wrote(
    lakehouse: Lakehouse, namespace: str
) -> None:
    """Dagster splits a step if another asset lies between its assets. A retry of the last one is not split."""
    middle_key = dg.AssetKey([namespace, "middle"])
    attempts: list[dg.AssetKey] = []

    @dg.multi_asset(
        specs=[
            dg.AssetSpec([namespace, "first"], metadata=FREE),
            dg.AssetSpec([namespace, "last"], deps=[middle_key], metadata=FREE),
        ],
        can_subset=True,
    )
    def ends(
        context: dg.AssetExecutionContext, lakehouse: LakehouseResource
    ) -> Iterator[dg.MaterializeResult[None]]:
        (key,) = context.selected_asset_keys
        attempts.append(key)
        catalog = lakehouse.catalog()
        catalog.create_namespace_if_not_exists((namespace,))
        frame = pl.DataFrame({"n": [len(attempts)]}).to_arrow()
        catalog.create_table_if_not_exists(tuple(key.path), frame.schema).append(frame)
        if len(attempts) == 2:
            raise RuntimeError("after the append")
        yield dg.MaterializeResult(asset_key=key)

    @dg.asset(key=middle_key, deps=[[namespace, "first"]], metadata=FREE)
    def middle() -> pl.DataFrame:
        return pl.DataFrame({"n": [0]})

    with project(lakehouse, ends, middle) as p:
        child = retry_failed_assets(p, p.run(ok=False))
        assert len(attempts) == 3
        assert p.settle(child).state is RunState.PUBLISHED
        assert (rows(p, namespace, "first"), rows(p, namespace, "last")) == ([1], [3])


def append_row(lakehouse: LakehouseResource, key: dg.AssetKey, n: int) -> None:
    catalog, frame = lakehouse.catalog(), pl.DataFrame({"n": [n]}).to_arrow()
    catalog.create_namespace_if_not_exists((*key.path[:-1],))
    catalog.create_table_if_not_exists((*key.path,), frame.schema).append(frame)


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_table_whose_materialization_a_failed_step_logged_exists_once_after_a_retry(
    lakehouse: Lakehouse, namespace: str, in_graph: bool
) -> None:
    side_key = dg.AssetKey([namespace, "side"])
    attempts: list[int] = []

    def write_side(context: dg.OpExecutionContext | dg.AssetExecutionContext) -> pl.DataFrame:
        attempts.append(1)
        append_row(context.resources.lakehouse, side_key, len(attempts))
        context.log_event(dg.AssetMaterialization(side_key))
        if len(attempts) == 1:
            raise RuntimeError("after the materialization")
        return pl.DataFrame({"n": [len(attempts)]})

    @dg.op(required_resource_keys={"lakehouse"})
    def first_op(context: dg.OpExecutionContext) -> int:
        return write_side(context).height

    @dg.op
    def last_op(rows: int) -> pl.DataFrame:
        return pl.DataFrame({"n": [rows]})

    @dg.graph_asset(key=[namespace, "written"], metadata=FREE)
    def by_graph() -> pl.DataFrame:
        return last_op(first_op())  # type: ignore[no-any-return]

    @dg.asset(key=[namespace, "written"], metadata=FREE, required_resource_keys={"lakehouse"})
    def by_function(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return write_side(context)

    side = dg.AssetSpec(side_key, metadata=FREE)
    with project(lakehouse, by_graph if in_graph else by_function, side) as p:
        child = retry(p, p.run(ok=False))
        assert p.settle(child).state is RunState.PUBLISHED
        assert rows(p, namespace, "side") == [2]


@pytest.mark.parametrize("again", ["step", "run"])
def test_files_that_a_failed_attempt_deleted_by_spark_are_back(
    lakehouse: Lakehouse, namespace: str, again: str
) -> None:
    first, fails = seed(namespace), [True]

    @dg.asset(key=[namespace, "other"], deps=[first], metadata=FREE)
    def other(lakehouse: LakehouseResource) -> pl.DataFrame:
        open_session(lakehouse)
        return pl.DataFrame({"n": [7]})

    @dg.asset(
        key=[namespace, "writer"],
        deps=[other],
        metadata=FREE,
        retry_policy=ONE if again == "step" else None,
    )
    def writer(lakehouse: LakehouseResource) -> None:
        lakehouse.open_branch()
        if fails[0]:
            fails[0] = False
            open_session(lakehouse)
            delete_files(lakehouse, first.key)
            raise RuntimeError("after the delete")

    with project(lakehouse, first, other, writer) as p:
        run_id = p.run() if again == "step" else retry(p, p.run(ok=False))
        outcome = p.settle(run_id)
        assert outcome.state is RunState.PUBLISHED, outcome
        assert rows(p, namespace, "t") == [0]


def drop(catalog: NessieCatalog, namespace: str) -> None:
    catalog.drop_table((namespace, "t"))


def rename(catalog: NessieCatalog, namespace: str) -> None:
    catalog.rename_table((namespace, "t"), (namespace, "renamed"))


def add_column(catalog: NessieCatalog, namespace: str) -> None:
    with catalog.load_table((namespace, "t")).update_schema() as change:
        change.add_column("more", StringType())


def create(catalog: NessieCatalog, namespace: str) -> None:
    catalog.create_table((namespace, "made"), pl.DataFrame({"n": [1]}).to_arrow().schema)


def drop_and_create(catalog: NessieCatalog, namespace: str) -> None:
    drop(catalog, namespace)
    catalog.create_table((namespace, "t"), pl.DataFrame({"other": [1]}).to_arrow().schema)


def drop_with_namespace(catalog: NessieCatalog, namespace: str) -> None:
    drop(catalog, namespace)
    catalog.drop_namespace((namespace,))


@pytest.mark.parametrize("change", [drop, rename, add_column, create, drop_and_create, drop_with_namespace])
@pytest.mark.parametrize("again", ["step", "run"])
def test_tables_are_as_before_a_failed_attempt_that_changed_them_by_spark(
    lakehouse: Lakehouse, namespace: str, again: str, change: Callable[[NessieCatalog, str], None]
) -> None:
    first, attempts = seed(namespace), []

    @dg.asset(
        key=[namespace, "writer"], deps=[first], metadata=FREE, retry_policy=ONE if again == "step" else None
    )
    def writer(lakehouse: LakehouseResource) -> None:
        attempts.append(1)
        if len(attempts) == 1:
            open_session(lakehouse)
            change(spark_like(lakehouse), namespace)
            raise RuntimeError("after the change")

    with project(lakehouse, first, writer) as p:
        run_id = p.run() if again == "step" else retry(p, p.run(ok=False))
        outcome = p.settle(run_id)
        assert outcome.state is RunState.PUBLISHED, outcome
        table = lakehouse.catalog().load_table((namespace, "t"))
        assert [column.name for column in table.schema().fields] == ["n"]
        assert rows(p, namespace, "t") == [0]
        assert not lakehouse.catalog().table_exists((namespace, "made"))
        assert not lakehouse.catalog().table_exists((namespace, "renamed"))


@pytest.mark.parametrize("change", [add_column, rename, create])
@pytest.mark.parametrize("by_spark", [False, True])
def test_a_published_table_that_a_failed_attempt_changed_is_not_changed_by_the_run(
    lakehouse: Lakehouse, namespace: str, change: Callable[[NessieCatalog, str], None], by_spark: bool
) -> None:
    first, attempts = seed(namespace), []

    @dg.asset(key=[namespace, "writer"], metadata=FREE, retry_policy=dg.RetryPolicy(max_retries=2))
    def writer(lakehouse: LakehouseResource) -> pl.DataFrame:
        attempts.append(1)
        if len(attempts) < 3:
            open_session(lakehouse)
            change(spark_like(lakehouse) if by_spark else lakehouse.catalog(), namespace)
            raise RuntimeError("after the change")
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, first) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
    with project(lakehouse, writer) as p:
        outcome = p.settle(p.run())
        assert outcome.state is RunState.PUBLISHED, outcome
        assert rows(p, namespace, "t") == [0]
        assert rows(p, namespace, "writer") == [1]
        assert not lakehouse.catalog().table_exists((namespace, "renamed"))


def test_a_changed_table_to_which_another_step_has_written_since_stays_as_it_is(
    lakehouse: Lakehouse, namespace: str
) -> None:
    first, attempts = seed(namespace), []

    @dg.asset(key=[namespace, "changer"], deps=[first], metadata=FREE)
    def changer(lakehouse: LakehouseResource) -> None:
        attempts.append(1)
        if len(attempts) == 1:
            open_session(lakehouse)
            add_column(spark_like(lakehouse), namespace)

    @dg.asset(key=[namespace, "writer"], deps=[changer], metadata=FREE)
    def writer(lakehouse: LakehouseResource) -> None:
        add(lakehouse, namespace, 1)
        if len(attempts) == 1:
            raise RuntimeError("after the append")

    with project(lakehouse, first, changer, writer) as p:
        parent = p.run(ok=False)
        child = retry(p, parent, f"{namespace}__changer", f"{namespace}__writer")
        assert p.settle(child).state is RunState.PUBLISHED
        assert rows(p, namespace, "t") == [0, 1]
        table = lakehouse.catalog().load_table((namespace, "t"))
        assert [column.name for column in table.schema().fields] == ["n", "more"]


def test_a_step_without_tables_is_retried_although_its_parent_is_published(
    lakehouse: Lakehouse, namespace: str
) -> None:
    first = seed(namespace)

    @dg.asset(key=[namespace, "mail"], deps=[first], metadata=FREE)
    def mail(lakehouse: LakehouseResource) -> None: ...

    with project(lakehouse, first, mail) as p:
        parent = p.run()
        assert p.settle(parent).state is RunState.PUBLISHED
        retry(p, parent, f"{namespace}__mail")


def test_a_table_that_another_step_may_have_changed_by_spark_stays_as_it_is(
    lakehouse: Lakehouse, namespace: str
) -> None:
    first, attempts = seed(namespace), []

    @dg.asset(key=[namespace, "earlier"], deps=[first], metadata=FREE)
    def earlier(lakehouse: LakehouseResource) -> None:
        open_session(lakehouse)
        add_column(spark_like(lakehouse), namespace)

    @dg.asset(key=[namespace, "writer"], deps=[earlier], metadata=FREE, retry_policy=ONE)
    def writer(lakehouse: LakehouseResource) -> None:
        open_session(lakehouse)
        add(lakehouse, namespace, 1)
        attempts.append(1)
        if len(attempts) == 1:
            raise RuntimeError("after the append")

    with project(lakehouse, first, earlier, writer) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
        assert rows(p, namespace, "t") == [0, 1]
        table = lakehouse.catalog().load_table((namespace, "t"))
        assert [column.name for column in table.schema().fields] == ["n", "more"]


def test_files_that_an_earlier_step_deleted_by_spark_stay_deleted(
    lakehouse: Lakehouse, namespace: str
) -> None:
    first, fails = seed(namespace), [True]

    @dg.asset(key=[namespace, "earlier"], deps=[first], metadata=FREE)
    def earlier(lakehouse: LakehouseResource) -> None:
        open_session(lakehouse)
        delete_files(lakehouse, first.key)

    @dg.asset(key=[namespace, "writer"], deps=[earlier], metadata=FREE, retry_policy=ONE)
    def writer(lakehouse: LakehouseResource) -> None:
        open_session(lakehouse)
        add(lakehouse, namespace, 1)
        if fails[0]:
            fails[0] = False
            raise RuntimeError("after the append")

    with project(lakehouse, first, earlier, writer) as p:
        run_id = p.run()
        assert p.settle(run_id).state is RunState.PUBLISHED
        assert rows(p, namespace, "t") == [1]


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_retry_is_refused_if_the_step_that_deleted_files_is_not_certain(
    lakehouse: Lakehouse, namespace: str, is_recorded: bool
) -> None:
    first = seed(namespace)

    @dg.asset(key=[namespace, "writer"], deps=[first], metadata=FREE)
    def writer(context: dg.AssetExecutionContext, lakehouse: LakehouseResource) -> None:
        if is_recorded:
            open_session(lakehouse)
            metadata = {EventMetadata.SPARK_APPLICATION: APPLICATION}
            report_engine_event(context.instance, "A thread uses Spark, too.", context.run, metadata)
        delete_files(lakehouse, first.key)
        raise RuntimeError("after the delete")

    with project(lakehouse, first, writer) as p:
        retry(p, p.run(ok=False), ok=False)
        p.failed_with(RetryNeedsFullRun, f"{namespace}.t")


@pytest.mark.spark
def test_sql_exists_once_after_a_retry_of_the_step(lakehouse: Lakehouse, namespace: str) -> None:
    first = seed(namespace)

    @dg.asset(
        key=[namespace, "writer"], deps=[first], metadata=FREE, retry_policy=dg.RetryPolicy(max_retries=2)
    )
    def writer(context: dg.AssetExecutionContext, spark: BranchSparkResource) -> None:
        session = spark.spark_session
        session.sql(f"CREATE TABLE nessie.{namespace}.made (n INT) USING iceberg")
        if context.retry_number == 0:
            session.sql(f"ALTER TABLE nessie.{namespace}.t ADD COLUMN more INT")
            session.sql(f"DELETE FROM nessie.{namespace}.t")
            raise RuntimeError("after the delete")
        session.sql(f"DROP TABLE nessie.{namespace}.made")
        session.sql(f"INSERT INTO nessie.{namespace}.t VALUES (1)")
        session.sql(f"UPDATE nessie.{namespace}.t SET n = n + 10")
        if context.retry_number == 1:
            raise RuntimeError("after the update")

    with project(lakehouse, first, writer) as p:
        outcome = p.settle(p.run())
        assert outcome.state is RunState.PUBLISHED, outcome
        assert rows(p, namespace, "t") == [10, 11]


@pytest.mark.parametrize("mode", ["append", "replace_table"])
def test_a_later_attempt_that_returns_nothing_takes_out_what_the_earlier_one_returned(
    lakehouse: Lakehouse, namespace: str, mode: WriteMode
) -> None:
    attempts: list[int] = []

    @dg.multi_asset(
        outs={"t": dg.AssetOut(key=[namespace, "t"], metadata={**FREE, **table_metadata(write_mode=mode)})},
        retry_policy=ONE,
    )
    def stored() -> Iterator[dg.Output]:
        attempts.append(len(attempts))
        frame = pl.DataFrame({"n": [len(attempts)]})
        yield dg.Output(None if len(attempts) == 3 else frame, output_name="t")
        if len(attempts) == 2:
            raise RuntimeError("after the output")

    with project(lakehouse, stored) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
        run_id = p.run()
        assert len(attempts) == 3
        assert rows(p, namespace, "t", ref=run_branch_name(run_id)) == [1]
        assert p.settle(run_id).state is RunState.PUBLISHED
        assert rows(p, namespace, "t") == [1]


@pytest.mark.parametrize("by_re_execution", [False, True])
def test_a_later_attempt_that_does_not_use_the_lake_takes_out_what_the_earlier_one_wrote(
    lakehouse: Lakehouse, namespace: str, by_re_execution: bool
) -> None:
    first = seed(namespace)
    attempts: list[int] = []

    @dg.asset(
        key=[namespace, "writer"],
        deps=[first],
        metadata=FREE,
        retry_policy=None if by_re_execution else ONE,
    )
    def writer(lakehouse: LakehouseResource) -> None:
        attempts.append(1)
        if len(attempts) == 1:
            add(lakehouse, namespace, 1)
            raise RuntimeError("after the append")

    with project(lakehouse, first, writer) as p:
        run_id = p.run(ok=not by_re_execution)
        run_id = retry(p, run_id) if by_re_execution else run_id
        assert p.settle(run_id).state is RunState.PUBLISHED
        assert rows(p, namespace, "t") == [0]


@pytest.mark.parametrize("by_re_execution", [False, True])
@pytest.mark.parametrize("used", ["lakehouse", "other_lake"])
def test_with_two_lakes_what_an_earlier_attempt_wrote_to_one_of_them_is_taken_out(
    lakehouse: Lakehouse, namespace: str, tmp_path: Path, used: str, by_re_execution: bool
) -> None:
    """A run works on one lake. The first attempt fails when it also opens the other one."""
    attempts: list[int] = []

    @dg.asset(key=[namespace, "writer"], metadata=FREE, retry_policy=None if by_re_execution else ONE)
    def writer(lakehouse: LakehouseResource, other_lake: LakehouseResource) -> None:
        attempts.append(1)
        if len(attempts) == 1:
            own, foreign = (lakehouse, other_lake) if used == "lakehouse" else (other_lake, lakehouse)
            add(own, namespace, 1)
            foreign.open_branch()

    with memory.serve(memory.SharedNessie()) as client:
        other = memory.open_lake(client, tmp_path / "other")
        for lake in (lakehouse, other):
            frame = pl.DataFrame({"n": [0]}).to_arrow()
            lake.catalog().create_namespace_if_not_exists((namespace,))
            lake.catalog().create_table((namespace, "t"), frame.schema).append(frame)
        resources = {"other_lake": LakehouseResource.from_settings(other.settings)}
        with project(lakehouse, writer, resources=resources) as p:
            run_id = p.run(ok=not by_re_execution)
            if by_re_execution:
                p.failed_with(OneLakeOnly)
                run_id = retry(p, run_id)
            assert len(attempts) == 2
            own, foreign = (lakehouse, other) if used == "lakehouse" else (other, lakehouse)
            branch = run_branch_name(run_id)
            table = own.catalog(branch).load_table((namespace, "t"))
            assert table.scan().to_arrow()["n"].to_pylist() == [0]
            assert not foreign.nessie.has_reference(branch)
