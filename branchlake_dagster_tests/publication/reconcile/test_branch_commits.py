"""Only what a run wrote and its checks saw is published: branches that somebody else changed are refused."""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster.catalog.options import COMMIT_PROPERTY
from branchlake_dagster.cleanup.jobs import reap_branches
from branchlake_dagster.cleanup.reaper_rules import ReapingAction
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import Project, assign_main, project
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.spark_deletes import APPLICATION, delete_files, open_session

lakehouse = memory.lakehouse

FREE = table_metadata(require_checks=False)


def asset(namespace: str, name: str) -> dg.AssetsDefinition:
    @dg.asset(key=[namespace, name], metadata=FREE)
    def table() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    return table


@pytest.fixture
def p(lakehouse: Lakehouse, namespace: str) -> Iterator[Project]:
    with project(lakehouse, asset(namespace, "t")) as found:
        yield found


def append(lakehouse: Lakehouse, ref: str, *identifier: str) -> None:
    """As another client does that knows nothing of the run."""
    table = lakehouse.catalog(ref).load_table(identifier)
    table.append(pl.DataFrame({"n": [99]}).to_arrow())


def set_back(lakehouse: Lakehouse, branch: str, to: str) -> None:
    """Let a branch be at another commit, as somebody with Nessie's tools, or a restored Nessie, does."""
    client = lakehouse.nessie
    client.delete_branch(branch, expected_hash=client.reference(branch).hash)
    client.create_branch(branch, from_ref=MAIN, from_hash=to)


def base_of(p: Project, run_id: str) -> str:
    run = p.instance.get_run_by_id(run_id)
    assert run is not None
    return run.tags[RunTag.BASE_HASH]


def status(p: Project, run_id: str) -> tuple[str, bool]:
    run = p.instance.get_run_by_id(run_id)
    assert run is not None
    return run.tags[RunTag.STATUS], run.is_success


def refused(p: Project, run_id: str) -> None:
    outcome = p.settle(run_id)
    assert outcome.state is RunState.REFUSED, outcome
    assert status(p, run_id) == (RunState.REFUSED, False)


def test_rows_that_another_client_added_while_the_run_waited_are_not_published(
    lakehouse: Lakehouse, namespace: str, p: Project
) -> None:
    run_id = p.run()
    append(lakehouse, run_branch_name(run_id), namespace, "t")
    refused(p, run_id)
    assert not lakehouse.catalog().table_exists((namespace, "t"))


def test_a_branch_that_lost_the_run_s_commits_is_not_published(
    lakehouse: Lakehouse, namespace: str, p: Project
) -> None:
    run_id = p.run()
    set_back(lakehouse, run_branch_name(run_id), base_of(p, run_id))
    refused(p, run_id)


@contextmanager
def two_assets(lakehouse: Lakehouse, namespace: str, between: list[str]) -> Iterator[Project]:
    """`first`, then `second`, which does something to the branch before it writes."""
    first = asset(namespace, "first")

    @dg.asset(key=[namespace, "second"], deps=[first], metadata=FREE)
    def second(context: dg.AssetExecutionContext) -> pl.DataFrame:
        branch = run_branch_name(context.run.run_id)
        if "append" in between:
            append(lakehouse, branch, namespace, "first")
        if "set back" in between:
            run = context.instance.get_run_by_id(context.run.run_id)
            assert run is not None
            set_back(lakehouse, branch, run.tags[RunTag.BASE_HASH])
        return pl.DataFrame({"n": [2]})

    with project(lakehouse, first, second) as found:
        yield found


@pytest.mark.parametrize("between", ["append", "set back"])
def test_a_branch_that_somebody_changed_while_the_run_worked_is_not_published(
    lakehouse: Lakehouse, namespace: str, between: str
) -> None:
    with two_assets(lakehouse, namespace, [between]) as p:
        refused(p, p.run())
    assert not lakehouse.catalog().table_exists((namespace, "second"))


def test_two_assets_of_one_run_are_published(lakehouse: Lakehouse, namespace: str) -> None:
    with two_assets(lakehouse, namespace, []) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED


def test_a_passed_run_whose_branch_was_deleted_is_reported(lakehouse: Lakehouse, p: Project) -> None:
    run_id = p.run()
    head = lakehouse.nessie.reference(run_branch_name(run_id)).hash
    lakehouse.nessie.delete_branch(run_branch_name(run_id), expected_hash=head)
    outcomes = {one.run_id: one for one in p.reconciler().reconcile_branches()}
    assert outcomes[run_id].state is RunState.REFUSED
    assert status(p, run_id) == (RunState.REFUSED, False)
    assert run_id not in {one.run_id for one in p.reconciler().reconcile_branches()}  # once


@pytest.fixture
def restored(lakehouse: Lakehouse, p: Project) -> str:
    """A published run whose branch is there again, and whose publication `main` has lost: Nessie was restored."""
    run_id = p.run()
    client = lakehouse.nessie
    before, head = client.reference(MAIN).hash, client.reference(run_branch_name(run_id)).hash
    assert p.settle(run_id).state is RunState.PUBLISHED
    client.create_branch(run_branch_name(run_id), from_ref=MAIN, from_hash=head)
    assign_main(lakehouse, before)
    return run_id


@pytest.mark.nessie
def test_a_published_run_whose_publication_main_lost_is_published_again(
    lakehouse: Lakehouse, namespace: str, p: Project, restored: str
) -> None:
    assert not lakehouse.catalog().table_exists((namespace, "t"))
    outcome = p.settle(restored)
    assert outcome.state is RunState.PUBLISHED
    assert p.rows(namespace, "t") == [{"n": 1}]
    run = p.instance.get_run_by_id(restored)
    assert run is not None
    assert run.tags[RunTag.PUBLICATION] == outcome.publication
    assert run_branch_name(restored) not in p.branches()


@pytest.mark.nessie
def test_the_reaper_keeps_the_branch_of_a_published_run_whose_publication_main_lost(
    lakehouse: Lakehouse, p: Project, restored: str
) -> None:
    found = {one.branch: one.action for one in reap_branches(lakehouse, p.instance, dry_run=True)}
    assert found[run_branch_name(restored)] is ReapingAction.KEEP
    p.settle(restored)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_files_that_spark_deleted_are_published_if_the_run_recorded_the_application(
    lakehouse: Lakehouse, namespace: str, p: Project, is_recorded: bool
) -> None:
    assert p.settle(p.run()).state is RunState.PUBLISHED
    written = asset(namespace, "t")

    @dg.asset(key=[namespace, "deleter"], deps=[written], metadata=FREE)
    def deleter(lakehouse: LakehouseResource) -> None:
        if is_recorded:
            open_session(lakehouse)
        delete_files(lakehouse, written.key)

    with project(lakehouse, written, deleter) as deleting:
        run_id = deleting.run()
        if is_recorded:
            assert deleting.settle(run_id).state is RunState.PUBLISHED
        else:
            refused(deleting, run_id)
        assert len(deleting.rows(namespace, "t")) == (0 if is_recorded else 1)


def test_files_that_spark_deleted_after_the_last_step_are_not_published(
    lakehouse: Lakehouse, namespace: str, p: Project
) -> None:
    assert p.settle(p.run()).state is RunState.PUBLISHED

    @dg.asset(key=[namespace, "reader"], metadata=FREE)
    def reader(lakehouse: LakehouseResource) -> pl.DataFrame:
        open_session(lakehouse)
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, reader) as reading:
        run_id = reading.run()
        late = lakehouse.catalog(
            run_branch_name(run_id), properties={f"{COMMIT_PROPERTY}application-type": "iceberg"}
        )
        late.load_table((namespace, "t")).delete(snapshot_properties={"spark.app.id": APPLICATION})
        refused(reading, run_id)


def sql_asset(namespace: str) -> dg.AssetsDefinition:
    @dg.asset(key=[namespace, "sql"], metadata=FREE)
    def written_by_sql(spark: BranchSparkResource, lakehouse: LakehouseResource) -> None:
        lakehouse.catalog().create_namespace_if_not_exists((namespace,))
        name = f"nessie.{namespace}.sql"
        spark.spark_session.sql(f"CREATE TABLE {name} (n bigint) USING iceberg")
        spark.spark_session.sql(f"INSERT INTO {name} VALUES (7)")
        spark.spark_session.sql(f"TRUNCATE TABLE {name}")
        spark.spark_session.sql(f"INSERT INTO {name} VALUES (8)")
        spark.spark_session.sql(f"DELETE FROM {name} WHERE n = 8")
        for number in range(3):
            spark.spark_session.sql(f"INSERT INTO {name} VALUES ({number})")
        spark.spark_session.sql(f"ALTER TABLE {name} ADD COLUMN note string")
        spark.spark_session.sql(f"CALL nessie.system.rewrite_data_files('{namespace}.sql')")
        spark.spark_session.sql(f"UPDATE {name} SET note = 'x' WHERE n = 1")
        lakehouse.catalog().load_table((namespace, "sql")).append(
            pl.DataFrame({"n": [9], "note": ["y"]}).to_arrow()
        )

    return written_by_sql


@pytest.mark.spark
def test_an_asset_that_writes_by_sql_and_catalog_is_published(lakehouse: Lakehouse, namespace: str) -> None:
    with project(lakehouse, sql_asset(namespace)) as p:
        outcome = p.settle(p.run())
        assert outcome.state is RunState.PUBLISHED, outcome
        assert sorted(row["n"] for row in p.rows(namespace, "sql")) == [0, 1, 2, 9]


@pytest.mark.spark
def test_rows_from_another_spark_session_are_not_published(
    lakehouse: Lakehouse, namespace: str, p: Project
) -> None:
    run_id = p.run()
    session = lakehouse.spark_session(run_branch_name(run_id))
    session.sql(f"INSERT INTO nessie.{namespace}.t VALUES (99)")
    session.stop()
    refused(p, run_id)
