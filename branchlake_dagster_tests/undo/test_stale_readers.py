"""Tables that were computed from undone rows: found, shown in Dagster, and computed again."""

import json
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import dagster as dg
import polars as pl
import pytest
from click.testing import CliRunner

from branchlake_dagster import on_publication, published_sensor, table_metadata
from branchlake_dagster.automation.incremental_sensor import incremental_sensor
from branchlake_dagster.cli.main import main as command
from branchlake_dagster.internals.dagster import PARTITION_TAG
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.stored_names import EventMetadata, RunTag
from branchlake_dagster.undo.find_publication import find_publication
from branchlake_dagster.undo.publication_undo import PublicationUndo
from branchlake_dagster.undo.recomputation import report_stale_readers, request_recomputation
from branchlake_dagster.undo.report import report_undo
from branchlake_dagster.undo.result import Undo
from branchlake_dagster.undo.stale_readers import (
    Recomputation,
    StaleReader,
    StaleReaders,
    find_stale_readers,
)
from branchlake_dagster.undo.summary import list_reader_columns
from branchlake_dagster.undo.undo_job import undo_job
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published, values
from branchlake_dagster_tests.incremental.test_incremental_assets import copy_of, spent_of
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.json_contract import check_output

lakehouse = memory.lakehouse

DAYS = dg.StaticPartitionsDefinition(["a", "b", "c"])


def run_of(p: Project, asset: dg.AssetsDefinition, **options: Any) -> str:
    published(p, asset, **options)
    return str(p.last.run_id)


def undo(lake: Lakehouse, run_id: str, *, dry_run: bool = False) -> Undo:
    undoer = PublicationUndo.of_lake(lake)
    return (undoer.plan if dry_run else undoer.undo)(find_publication(lake.nessie, run_id))


def find(p: Project, done: Undo, *sensors: dg.SensorDefinition) -> StaleReaders:
    definitions = dg.Definitions.merge(p.definitions, dg.Definitions(sensors=sensors))
    return find_stale_readers(p.lake, done, [definitions.get_repository_def()], p.instance)


def by_name(stale: StaleReaders) -> Mapping[str, StaleReader]:
    return {reader.table.rpartition(".")[2]: reader for reader in stale.readers}


def whole_reader(source: dg.AssetsDefinition, namespace: str, name: str, **how: Any) -> dg.AssetsDefinition:
    """An asset that reads all rows of `source` and writes their number."""
    condition = how.pop("condition", None)

    @dg.asset(
        key=[namespace, name],
        ins={"source": dg.AssetIn(source.key)},
        metadata=table_metadata(**FREE, **how),
        automation_condition=condition,
    )
    def reader(source: pl.DataFrame) -> pl.DataFrame:
        return pl.DataFrame({"count": [source.height]})

    return reader


def test_each_reader_is_listed_with_what_computes_it_again(lakehouse: Lakehouse, namespace: str) -> None:
    orders = Source(namespace)
    source = orders.asset
    copy = copy_of(orders, namespace)
    spent = spent_of(orders, namespace)
    total = whole_reader(source, namespace, "total")
    following = whole_reader(source, namespace, "following", condition=on_publication())
    log = whole_reader(source, namespace, "log", write_mode="append")
    page = whole_reader(total, namespace, "page")
    # It consumes the orders, and reads the number of orders whole.
    mixed = copy_of(orders, namespace, name="mixed", deps=[total], when_removed="deliver")
    other = Source(namespace, "other")
    # Its consumed input is correct, the one that it reads whole is not.
    joined = copy_of(other, namespace, name="joined", deps=[total])
    early = whole_reader(source, namespace, "early")
    readers = [copy, spent, total, following, log, page, mixed, joined]
    with project(lakehouse, source, other.asset, *readers, early) as p:
        other.publish(p, ("a", 1))
        orders.publish(p, ("a", 1))
        published(p, early)
        orders.publish(p, ("b", 2))
        wrong = str(p.last.run_id)
        run_ids = {asset.key.path[-1]: run_of(p, asset) for asset in readers}
        planned = undo(lakehouse, wrong, dry_run=True)
        found = by_name(find(p, planned))
        assert {name: reader.run_ids for name, reader in found.items()} == {
            name: (run_id,) for name, run_id in run_ids.items()
        }
        assert {name: reader.recomputation for name, reader in found.items()} == {
            "copy": Recomputation.REBUILD,
            "spent": Recomputation.MATERIALIZE,
            "total": Recomputation.MATERIALIZE,
            "following": Recomputation.BY_ITSELF,
            "log": Recomputation.UNDO_ITS_RUNS,
            "page": Recomputation.MATERIALIZE,
            "mixed": Recomputation.MATERIALIZE,
            "joined": Recomputation.MATERIALIZE,
        }
        assert found["page"].after == found["page"].inputs == (f"{namespace}.total",)
        assert found["total"].after == ()
        assert found["total"].inputs == (f"{namespace}.orders",)
        # Sensors that launch an asset count, whether they watch changes or publications.
        job = dg.define_asset_job("total_job", selection=[total.key])
        watching = published_sensor("watching", assets=[source.key], job=job)
        changes = incremental_sensor(target=[spent.key, mixed.key, joined.key], name="changes")
        launched = by_name(find(p, planned, watching, changes))
        assert launched["total"].recomputation is Recomputation.BY_ITSELF
        assert launched["spent"].recomputation is Recomputation.BY_ITSELF
        assert launched["mixed"].recomputation is Recomputation.BY_ITSELF
        assert launched["joined"].recomputation is Recomputation.MATERIALIZE
        # Tables without a loaded asset are known if they record what they have consumed.
        unknown = find_stale_readers(lakehouse, planned, [], p.instance)
        assert not unknown.knows_code
        assert {(name, reader.recomputation) for name, reader in by_name(unknown).items()} == {
            ("copy", Recomputation.UNKNOWN),
            ("spent", Recomputation.UNKNOWN),
            ("mixed", Recomputation.UNKNOWN),
        }


@pytest.mark.parametrize("pattern", ["rows", "keys"])
def test_recomputed_tables_are_as_without_the_publication(
    lakehouse: Lakehouse, namespace: str, pattern: str
) -> None:
    orders = Source(namespace)
    copy = copy_of(orders, namespace) if pattern == "rows" else spent_of(orders, namespace)
    total = whole_reader(orders.asset, namespace, "total")
    with project(lakehouse, orders.asset, copy, total) as p:
        orders.publish(p, ("a", 1))
        wrong = str(p.last.run_id)
        orders.publish(p, ("b", 2))
        for asset in (copy, total):
            published(p, asset)
        done = undo(lakehouse, wrong)
        stale = find(p, done)
        assert by_name(stale).keys() == {copy.key.path[-1], "total"}
        assert find(p, undo(lakehouse, wrong)).readers == stale.readers  # not yet computed again
        for reader in stale.readers:
            assert reader.asset is not None
            p.settle(p.run(reader.asset, tags={RunTag.REBUILD: "true"} if pattern == "rows" else {}))
        assert [row[:2] for row in values(p, copy)] == [("b", 2)]
        assert values(p, total) == [(1,)]
        assert find(p, undo(lakehouse, wrong)).readers == ()


@pytest.fixture
def days(lakehouse: Lakehouse, namespace: str) -> Iterator[tuple[Project, list[dg.AssetsDefinition]]]:
    metadata = table_metadata(partition_by="day", **FREE)

    @dg.asset(key=[namespace, "days"], partitions_def=DAYS, metadata=metadata)
    def days(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"day": [context.partition_key], "run": [context.run.run_id]})

    @dg.asset(
        key=[namespace, "reports"],
        partitions_def=DAYS,
        metadata=metadata,
        ins={"days": dg.AssetIn(days.key)},
    )
    def reports(days: pl.DataFrame) -> pl.DataFrame:
        return days

    with project(lakehouse, days, reports) as p:
        yield p, [days, reports]


def test_only_partitions_that_depend_on_undone_ones_are_stale(
    days: tuple[Project, list[dg.AssetsDefinition]], lakehouse: Lakehouse
) -> None:
    p, (source, report) = days
    runs = {day: run_of(p, source, partition=day) for day in "ab"}
    for day in "ab":
        published(p, report, partition=day)
    done = undo(lakehouse, runs["a"])
    report_undo(p.instance, lakehouse, done)
    stale = find(p, done)
    (reader,) = stale.readers
    assert (reader.asset, reader.partitions) == (report.key, ("a",))
    report_stale_readers(p.instance, done, stale)
    (shown,) = [one for one in p.observations(report.key.path) if EventMetadata.STALE_SINCE in one.metadata]
    assert shown.partition == "a"
    assert shown.metadata[EventMetadata.STALE_SINCE].value == done.commit
    assert shown.metadata[EventMetadata.ON_MAIN].value is True
    published(p, source, partition="a")
    published(p, report, partition="a")
    assert find(p, undo(lakehouse, runs["a"])).readers == ()


def test_a_backfill_is_requested_once(
    days: tuple[Project, list[dg.AssetsDefinition]], lakehouse: Lakehouse
) -> None:
    p, (source, report) = days
    wrong = run_of(p, source, partition="b")
    published(p, report, partition="b")
    done = undo(lakehouse, wrong)
    repositories = [p.definitions.get_repository_def()]
    for _ in range(2):
        requested = request_recomputation(p.instance, done, find(p, done), repositories, requested_at=1.0)
        (backfill,) = p.instance.get_backfills()
        assert requested == {".".join(report.key.path): backfill.backfill_id}
    assert backfill.tags[RunTag.AFTER_PUBLICATION] == done.commit
    assert backfill.tags[RunTag.REBUILD] == "true"
    data = backfill.get_asset_backfill_data(repositories[0].asset_graph)
    assert {one.partition_key for one in data.target_subset.iterate_asset_partitions()} == {"b"}


def test_a_partition_that_was_deleted_is_not_requested(lakehouse: Lakehouse, namespace: str) -> None:
    dynamic = dg.DynamicPartitionsDefinition(name=f"{namespace}_days")

    @dg.asset(
        key=[namespace, "report"],
        partitions_def=dynamic,
        metadata=table_metadata(partition_by="day", **FREE),
    )
    def report(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"day": [context.partition_key]})

    def reader(*partitions: str) -> StaleReaders:
        table = f"{namespace}.report"
        return StaleReaders(
            (StaleReader(table, report.key, partitions, ("other.t",), ("r",), Recomputation.MATERIALIZE),)
        )

    with project(lakehouse, report) as p:
        p.instance.add_dynamic_partitions(f"{namespace}_days", ["a"])
        run_of(p, report, partition="a")
        done = Undo((), commit=lakehouse.nessie.reference("main").hash)
        repositories = [p.definitions.get_repository_def()]

        def request(stale: StaleReaders) -> dict[str, str]:
            return request_recomputation(p.instance, done, stale, repositories, requested_at=1.0)

        assert request(reader("b")) == {}
        (backfill_id,) = request(reader("a", "b")).values()
        (backfill,) = p.instance.get_backfills()
        assert backfill.backfill_id == backfill_id
        data = backfill.get_asset_backfill_data(repositories[0].asset_graph)
        assert {one.partition_key for one in data.target_subset.iterate_asset_partitions()} == {"a"}


def test_many_runs_and_partitions_are_a_short_line() -> None:
    names = tuple(f"n{number}" for number in range(5_000))
    reader = StaleReader("shop.t", None, names, ("shop.u",), names, Recomputation.UNKNOWN)
    assert all(len(cell) < 100 for cell in list_reader_columns(reader, None))


def test_without_dagster_the_partitions_are_unknown(
    days: tuple[Project, list[dg.AssetsDefinition]], lakehouse: Lakehouse
) -> None:
    p, (source, report) = days
    wrong = run_of(p, source, partition="b")
    published(p, report, partition="b")
    planned = undo(lakehouse, wrong, dry_run=True)
    (reader,) = find_stale_readers(lakehouse, planned, [p.definitions.get_repository_def()], None).readers
    assert (reader.partitions, reader.can_be_requested) == (None, False)


def test_the_job_and_the_command_request_backfills(
    days: tuple[Project, list[dg.AssetsDefinition]], lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, (source, report) = days
    wrong = run_of(p, source, partition="b")
    published(p, report, partition="b")
    module = ModuleType("stale_readers_project")
    module.defs = p.definitions
    monkeypatch.setitem(sys.modules, module.__name__, module)
    settings = lakehouse.settings
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(settings.state_dir))
    monkeypatch.setenv("BRANCHLAKE_NESSIE_URI", lakehouse.nessie.uri)
    monkeypatch.setenv("DAGSTER_HOME", p.instance.root_directory)
    monkeypatch.chdir(settings.state_dir)
    words = ["undo", wrong, "-m", module.__name__, "--recompute"]
    for more in (["--dry-run"], []):
        result = CliRunner().invoke(command, [*words, *more, "--json"])
        assert result.exit_code == 0, result.output
        check_output(words, result.stdout)
        (shown,) = json.loads(result.stdout)["stale_readers"]
        assert (shown["table"], shown["partitions"]) == (".".join(report.key.path), ["b"])
        assert (shown["backfill"] is None) is bool(more)
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 0, result.output
    assert shown["backfill"] in result.stdout
    resources = p.definitions.resources
    assert resources is not None
    config = {"publication": wrong, "recompute": True}
    outcome = undo_job().execute_in_process(
        run_config={"ops": {"undo_publication_op": {"config": config}}},
        resources={"lakehouse": resources["lakehouse"]},
        instance=p.instance,
    )
    assert outcome.success
    assert len(p.instance.get_backfills()) == 1
    assert PARTITION_TAG not in outcome.dagster_run.tags
