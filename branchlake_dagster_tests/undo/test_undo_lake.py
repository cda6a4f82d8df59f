"""The undo as users meet it: on Dagster's pages, by the command, under consumers, ingestions and Spark."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import dagster as dg
import polars as pl
import pytest
from click.testing import CliRunner

from branchlake_dagster import publish, table_metadata
from branchlake_dagster.cli.main import main as command
from branchlake_dagster.errors import DroppedTableUnreadable, TableNotDropped
from branchlake_dagster.internals.dagster import RUN_KEY_TAG
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.approval import is_on_main
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import EventMetadata, ReferencePrefix, RunTag
from branchlake_dagster.undo import report as undo_report
from branchlake_dagster.undo import undrop
from branchlake_dagster.undo.find_publication import find_publication
from branchlake_dagster.undo.publication_undo import PublicationUndo
from branchlake_dagster.undo.report import report_undo
from branchlake_dagster.undo.result import Undo
from branchlake_dagster.undo.undo_job import undo_job
from branchlake_dagster.undo.undrop import undrop_table
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published, values
from branchlake_dagster_tests.incremental.test_incremental_assets import copy_of, spent_of
from branchlake_dagster_tests.incremental.test_incremental_sensor import Ticks
from branchlake_dagster_tests.publication.workbench import Workbench
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.json_contract import check_output

lakehouse = memory.lakehouse


def undo(lake: Lakehouse, name: str, **options: bool) -> Undo:
    return PublicationUndo.of_lake(lake).undo(find_publication(lake.nessie, name), **options)


def last_run(p: Project) -> str:
    return str(p.last.run_id)


# -- consumers -----------------------------------------------------------------------------------------


def test_consumers_get_the_undo_as_a_change(lakehouse: Lakehouse, namespace: str) -> None:
    orders = Source(namespace)
    spent = spent_of(orders, namespace)
    with project(lakehouse, orders.asset, spent) as p:
        orders.publish(p, ("a", 1), ("b", 2))
        published(p, spent)
        orders.publish(p, ("a", 100), ("c", 7))
        wrong = last_run(p)
        published(p, spent)
        assert values(p, spent) == [("a", 101), ("b", 2), ("c", 7)]
        undo(lakehouse, wrong)
        orders.publish(p, ("b", 3))
        published(p, spent)
        assert [row for row in values(p, spent) if row[0] != "c"] == [("a", 1), ("b", 5)]


def test_a_consumer_reads_again_what_its_undone_run_had_read(lakehouse: Lakehouse, namespace: str) -> None:
    orders = Source(namespace)
    copy = copy_of(orders, namespace)
    with project(lakehouse, orders.asset, copy) as p:
        orders.publish(p, ("a", 1))
        published(p, copy)
        orders.publish(p, ("b", 2))
        published(p, copy)
        undo(lakehouse, last_run(p))
        assert values(p, copy) == [("a", 1, 1)]
        orders.publish(p, ("c", 3))
        published(p, copy)
        assert values(p, copy) == [("a", 1, 1), ("b", 2, 2), ("c", 3, 2)]
        undo(lakehouse, last_run(p), keep_positions=True)
        orders.publish(p, ("d", 4))
        published(p, copy)
        assert values(p, copy) == [("a", 1, 1), ("d", 4, 1)]


def test_the_sensor_does_not_launch_an_undone_run_again(lakehouse: Lakehouse, namespace: str) -> None:
    orders = Source(namespace)
    spent = spent_of(orders, namespace)
    with project(lakehouse, orders.asset, spent) as p:
        ticks = Ticks(p, retries=3)
        orders.publish(p, ("a", 1))
        (request,) = ticks.tick()
        published(p, spent, tags={**request.tags, RUN_KEY_TAG: request.run_key})
        report_undo(p.instance, lakehouse, undo(lakehouse, last_run(p)))
        assert ticks.tick() == []
        orders.publish(p, ("b", 2))
        (request,) = ticks.tick()
        published(p, spent, tags={**request.tags, RUN_KEY_TAG: request.run_key})
        assert values(p, spent) == [("a", 1), ("b", 2)]


# -- Dagster -------------------------------------------------------------------------------------------

DAYS = dg.StaticPartitionsDefinition(["a", "b"])


@pytest.fixture
def days(lakehouse: Lakehouse, namespace: str) -> Iterator[tuple[Project, dg.AssetsDefinition]]:
    @dg.asset(
        key=[namespace, "days"],
        partitions_def=DAYS,
        metadata=table_metadata(partition_by="day", **FREE),
    )
    def days(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"day": [context.partition_key], "run": [context.run.run_id]})

    with project(lakehouse, days) as p:
        yield p, days


def test_run_asset_and_partition_show_the_undo(
    days: tuple[Project, dg.AssetsDefinition], lakehouse: Lakehouse
) -> None:
    p, asset = days
    for partition in "ab":
        p.settle(p.run(asset.key, partition=partition))
    run_id = last_run(p)
    done = undo(lakehouse, run_id)
    assert report_undo(p.instance, lakehouse, done) == 1
    run = p.instance.get_run_by_id(run_id)
    assert run is not None
    assert run.tags[RunTag.STATUS] == RunState.UNDONE
    newest = p.observations(asset.key.path)[0]
    assert newest.partition == "b"
    assert newest.metadata[EventMetadata.ON_MAIN].value is False
    assert newest.metadata[EventMetadata.UNDONE_BY].value == done.commit
    assert newest.metadata[EventMetadata.TABLE_ROWS].value == 1
    outcome = publish(run_id, p.definitions, instance=p.instance)
    assert (outcome.published, outcome.status) == (False, RunState.UNDONE)
    # Later ticks of the sensor leave it so.
    list(p.reconciler().reconcile_branches())
    run = p.instance.get_run_by_id(run_id)
    assert run is not None
    assert run.tags[RunTag.STATUS] == RunState.UNDONE
    assert [row["day"] for row in p.rows(*asset.key.path)] == ["a"]


def test_a_partition_that_was_materialized_since_stays_as_it_is_shown(
    days: tuple[Project, dg.AssetsDefinition], lakehouse: Lakehouse
) -> None:
    p, asset = days
    p.settle(p.run(asset.key, partition="a"))
    run_id = last_run(p)
    report_undo(p.instance, lakehouse, undo(lakehouse, run_id))
    p.settle(p.run(asset.key, partition="a"))
    again = undo(lakehouse, run_id)
    assert not again.is_new
    report_undo(p.instance, lakehouse, again)
    assert p.observations(asset.key.path)[0].metadata[EventMetadata.ON_MAIN].value is True
    run = p.instance.get_run_by_id(run_id)
    assert run is not None
    assert not is_on_main(run)


def test_the_job_undoes_the_publication_of_its_configuration(
    days: tuple[Project, dg.AssetsDefinition], lakehouse: Lakehouse
) -> None:
    p, asset = days
    p.settle(p.run(asset.key, partition="a"))
    run_id = last_run(p)
    config = {"publication": run_id[:8], "dry_run": True}
    for is_dry in (True, False):
        config["dry_run"] = is_dry
        resources = p.definitions.resources
        assert resources is not None
        result = undo_job().execute_in_process(
            run_config={"ops": {"undo_publication_op": {"config": config}}},
            resources={"lakehouse": resources["lakehouse"]},
            instance=p.instance,
        )
        assert result.success
        assert lakehouse.catalog().table_exists(tuple(asset.key.path)) is is_dry


def test_the_command(
    days: tuple[Project, dg.AssetsDefinition], lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, asset = days
    for partition in "ab":
        p.settle(p.run(asset.key, partition=partition))
    settings = lakehouse.settings
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(settings.state_dir))
    monkeypatch.setenv("BRANCHLAKE_NESSIE_URI", lakehouse.nessie.uri)
    monkeypatch.setenv("DAGSTER_HOME", str(settings.state_dir / "dagster"))
    monkeypatch.chdir(settings.state_dir)
    words = ["undo", last_run(p), "--json"]
    for more in (["--dry-run"], [], []):
        result = CliRunner().invoke(command, [*words, *more])
        assert result.exit_code == 0, result.output
        check_output(words, result.stdout)
    shown = json.loads(result.stdout)
    assert shown["is_new"] is False
    result = CliRunner().invoke(command, ["undo", "ffffffff"])
    assert result.exit_code == 1
    assert [row["day"] for row in p.rows(*asset.key.path)] == ["a"]


def test_the_command_reports_an_undo_whose_report_fails(
    days: tuple[Project, dg.AssetsDefinition],
    lakehouse: Lakehouse,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    p, asset = days
    for partition in "ab":
        p.settle(p.run(asset.key, partition=partition))
    settings, home = lakehouse.settings, tmp_path / "home"
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(settings.state_dir))
    monkeypatch.setenv("BRANCHLAKE_NESSIE_URI", lakehouse.nessie.uri)
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    main_hash = lakehouse.nessie.reference("main").hash
    result = CliRunner().invoke(command, ["undo", last_run(p)])  # no instance that it could be reported to
    assert (result.exit_code, lakehouse.nessie.reference("main").hash) == (1, main_hash)
    home.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(undo_report, "report_undo", lambda *_: 1 / 0)
        result = CliRunner().invoke(command, ["undo", last_run(p), "--json"])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "ZeroDivisionError" in result.stderr
    shown = json.loads(result.stdout)
    assert shown["commit"] == lakehouse.nessie.reference("main").hash != main_hash
    again = CliRunner().invoke(command, ["undo", last_run(p), "--json"])
    assert (again.exit_code, json.loads(again.stdout)["commit"]) == (0, shown["commit"])


def undrop_tags(lake: Lakehouse) -> list[str]:
    return [ref.name for ref in lake.nessie.references() if ref.name.startswith(ReferencePrefix.UNDROP)]


def test_a_tag_keeps_the_files_while_a_table_comes_back(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Workbench(lakehouse, namespace)
    bench.seeded([("a", 1)])
    dropped_from = lakehouse.nessie.reference("main").hash
    lakehouse.catalog().drop_table((namespace, "t"))
    kept_heads: list[list[str]] = []
    find = undrop.find_missing_file

    def find_and_record(table: Any) -> Exception | None:
        kept_heads.append(
            [ref.hash for ref in lakehouse.nessie.references() if ref.name in {*undrop_tags(lakehouse)}]
        )
        return find(table)

    monkeypatch.setattr(undrop, "find_missing_file", find_and_record)
    undrop_table(lakehouse, f"{namespace}.t")
    assert kept_heads == [[dropped_from]] * 2  # before the commit and after it
    assert undrop_tags(lakehouse) == []
    bench.clean()


@pytest.mark.parametrize("which", ["data", "metadata"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_table_whose_files_are_deleted_stays_dropped(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch, which: str, moment: str
) -> None:
    """A collection that had begun deletes them: before the restoration, or between its check and its commit."""
    bench = Workbench(lakehouse, namespace)
    bench.seeded([("a", 1)])
    table = lakehouse.catalog().load_table((namespace, "t"))
    (task,) = table.scan().plan_files()
    location = task.file.file_path if which == "data" else table.metadata_location
    lakehouse.catalog().drop_table((namespace, "t"))
    path = Path(urlparse(location).path)
    commit = type(lakehouse.nessie).commit

    def delete_and_commit(client: Any, *arguments: Any, **options: Any) -> Any:
        path.unlink(missing_ok=True)
        return commit(client, *arguments, **options)

    if moment == "before":
        path.unlink()
    else:
        monkeypatch.setattr(type(lakehouse.nessie), "commit", delete_and_commit)
    with pytest.raises(DroppedTableUnreadable):
        undrop_table(lakehouse, f"{namespace}.t")
    assert not lakehouse.catalog().table_exists((namespace, "t"))
    assert undrop_tags(lakehouse) == []


def test_a_renamed_table_is_not_dropped(lakehouse: Lakehouse, namespace: str) -> None:
    bench = Workbench(lakehouse, namespace)
    bench.seeded([("a", 1)])
    catalog = lakehouse.catalog()
    catalog.rename_table((namespace, "t"), (namespace, "renamed"))
    with pytest.raises(TableNotDropped):
        undrop_table(lakehouse, f"{namespace}.t")
    assert not catalog.table_exists((namespace, "t"))
    with pytest.raises(TableNotDropped):
        undrop_table(lakehouse, namespace)
    catalog.drop_table((namespace, "renamed"))
    undrop_table(lakehouse, f"{namespace}.renamed")
    bench.clean()


def test_a_table_that_was_dropped_outside_a_run_comes_back(lakehouse: Lakehouse, namespace: str) -> None:
    bench = Workbench(lakehouse, namespace)
    bench.seeded([("a", 1)])
    with pytest.raises(TableNotDropped):
        undrop_table(lakehouse, f"{namespace}.t")
    lakehouse.catalog().drop_table((namespace, "t"))
    undrop_table(lakehouse, f"{namespace}.t")
    assert bench.rows() == [("a", 1)]
    catalog = lakehouse.catalog()
    catalog.update_namespace_properties((namespace,), updates={"owner": "flights"})
    catalog.drop_table((namespace, "t"))
    catalog.drop_namespace((namespace,))
    undrop_table(lakehouse, f"{namespace}.t")
    assert catalog.load_namespace_properties((namespace,)) == {"owner": "flights"}
    with pytest.raises(TableNotDropped):
        undrop_table(lakehouse, f"{namespace}.never")
    bench.clean()
