"""The sensor on `main`'s log, with a Nessie in memory and runs that Dagster has recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, IcebergTable, Namespace, Put
from branchlake_dagster.publication import new_publications
from branchlake_dagster.publication.ledger import Publication, publication_id, publication_properties
from branchlake_dagster.publication.new_publications import PublishedAssets, published_sensor
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.simulation.nessie import InMemoryNessie
from branchlake_dagster_tests.simulation.transport import DirectTransport
from branchlake_dagster_tests.suite.raised import raising

PRICES, STOCK = dg.AssetKey(["shop", "prices"]), dg.AssetKey(["shop", "stock"])
DAYS = dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-08-11")


def assets(partitions: dg.PartitionsDefinition[Any] | None = None) -> list[dg.AssetsDefinition]:
    @dg.asset(key=PRICES, partitions_def=partitions)
    def prices() -> None: ...

    @dg.asset(key=STOCK, partitions_def=partitions)
    def stock() -> None: ...

    @dg.asset(key="report", partitions_def=partitions)
    def report() -> None: ...

    return [prices, stock, report]


report_job = dg.define_asset_job("report_job", selection=["report"])


@dataclass
class Shop:
    """A code location with a sensor, its cursor, and a lake whose `main` others publish to."""

    instance: dg.DagsterInstance
    partitions: dg.PartitionsDefinition[Any] | None = None
    cursor: str | None = None
    numbers: int = 0
    nessie: NessieClient = field(
        default_factory=lambda: NessieClient("", transport=DirectTransport(InMemoryNessie()))
    )

    def __post_init__(self) -> None:
        names = [("shop",), ("lake",)]
        self.commit([Put(ContentKey(name), Namespace(None, name, {})) for name in names], {})

    def commit(self, operations: list[Put], properties: dict[str, str]) -> str:
        head = self.nessie.reference("main").hash
        return self.nessie.commit(
            "main", expected_hash=head, operations=operations, message="m", properties=properties
        ).hash

    def run(self, *keys: dg.AssetKey, partition: str | None = None) -> str:
        return dg.materialize(
            assets(self.partitions), selection=list(keys), instance=self.instance, partition_key=partition
        ).run_id

    def publish(self, *runs: str, tables: tuple[str, ...] = ("shop.prices",)) -> str:
        """One commit for these runs, each of which changed `tables`."""
        told = [Publication(f"run-{run}", run, run, "passed", "00", tables) for run in runs]
        return self.touch(tables, publication_properties(told))

    def touch(self, tables: tuple[str, ...] = ("shop.prices",), told: dict[str, str] | None = None) -> str:
        self.numbers += 1
        keys = [ContentKey.from_path(table) for table in tables]
        there = self.nessie.contents("main", keys)
        puts = [
            Put(
                key,
                IcebergTable(
                    there[key].content_id if key in there else None, f"m{self.numbers}", -1, 0, 0, 0
                ),
            )
            for key in keys
        ]
        return self.commit(puts, told or {})

    def tick(self, sensor: dg.SensorDefinition) -> tuple[list[dg.RunRequest], str]:
        """The requests and the reason for none."""
        result = sensor.evaluate_tick(self.context(sensor))
        self.cursor = result.cursor
        return list(result.run_requests or []), result.skip_message or ""

    def context(self, sensor: dg.SensorDefinition) -> dg.SensorEvaluationContext:
        defs = dg.Definitions(assets=assets(self.partitions), jobs=[report_job], sensors=[sensor])
        return dg.build_sensor_context(
            self.instance,
            cursor=self.cursor,
            repository_def=defs.get_repository_def(),
            resources={
                "lakehouse": SimpleNamespace(
                    lakehouse=SimpleNamespace(nessie=self.nessie, settings=Settings())
                )
            },
        )


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def shop(instance: dg.DagsterInstance) -> Shop:
    return Shop(instance)


@pytest.fixture
def daily(instance: dg.DagsterInstance) -> Shop:
    return Shop(instance, DAYS)


def follow(**options: Any) -> dg.SensorDefinition:
    return published_sensor("follow", **{"assets": [PRICES], "job": report_job} | options)


def test_it_starts_at_the_present_and_requests_one_run_per_publication_in_order(shop: Shop) -> None:
    sensor = follow()
    shop.publish("before")
    requests, why = shop.tick(sensor)
    assert requests == []
    assert why.startswith("The sensor starts at main's current commit")
    first, second = shop.publish("a"), shop.publish("b")
    shop.publish("c", tables=("shop.stock",))
    requests, _ = shop.tick(sensor)
    assert [request.run_key for request in requests] == [publication_id("run-a"), publication_id("run-b")]
    assert [request.tags["branchlake/after_publication"] for request in requests] == [first, second]
    assert [request.tags["branchlake/after_run"] for request in requests] == ["a", "b"]
    assert {request.job_name for request in requests} == {"report_job"}
    requests, why = shop.tick(sensor)
    assert (requests, why) == ([], "0 commits on main since the last tick, none of them for these assets.")


def test_the_publications_of_one_commit_are_requests_of_their_own(shop: Shop) -> None:
    sensor = follow()
    shop.tick(sensor)
    shop.publish("a", "b", tables=("shop.prices", "shop.stock"))
    requests, _ = shop.tick(sensor)
    assert [request.tags["branchlake/after_run"] for request in requests] == ["a", "b"]


def test_a_commit_that_is_no_publication_launches_nothing(shop: Shop) -> None:
    sensor = follow()
    shop.tick(sensor)
    shop.touch()
    assert shop.tick(sensor) == ([], "1 commit on main since the last tick, none of them for these assets.")


def test_a_tick_that_is_repeated_asks_for_the_same_runs(shop: Shop) -> None:
    """The daemon died before it kept the cursor; Dagster drops run keys that it has seen."""
    sensor = follow()
    shop.tick(sensor)
    before = shop.cursor
    shop.publish("a")
    first, _ = shop.tick(sensor)
    shop.cursor = before
    again, _ = shop.tick(sensor)
    assert [request.run_key for request in first] == [request.run_key for request in again]


def test_a_backlog_is_worked_off_over_several_ticks(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_publications, "COMMITS_PER_TICK", 3)
    sensor = follow()
    shop.tick(sensor)
    runs = [f"r{number}" for number in range(7)]
    for run in runs:
        shop.publish(run)
    found = [[request.tags["branchlake/after_run"] for request in shop.tick(sensor)[0]] for _ in range(4)]
    assert found == [runs[:3], runs[3:6], runs[6:], []]


def test_a_rewritten_history_starts_anew_and_says_so(shop: Shop) -> None:
    sensor = follow()
    shop.tick(sensor)
    shop.cursor = "ab" * 32
    head = shop.publish("a")
    requests, why = shop.tick(sensor)
    assert requests == []
    assert "its history was rewritten" in why
    assert shop.cursor == head
    shop.publish("b")
    assert [request.run_key for request in shop.tick(sensor)[0]] == [publication_id("run-b")]


@pytest.mark.parametrize("cursor", ["", "garbage", '{"x": 1}', "ab" * 40])
def test_a_cursor_that_somebody_set_to_something_else_starts_anew(shop: Shop, cursor: str) -> None:
    sensor, shop.cursor = follow(), cursor
    head = shop.publish("a")
    requests, why = shop.tick(sensor)
    assert (requests, shop.cursor) == ([], head)
    assert "is not a commit" in why
    shop.publish("b")
    assert [request.run_key for request in shop.tick(sensor)[0]] == [publication_id("run-b")]


def test_a_selection_of_assets_and_a_key_without_prefix(shop: Shop) -> None:
    chosen = follow(assets=dg.AssetSelection.groups("default"))
    report = follow(assets=["report"])
    shop.tick(chosen)
    start = shop.cursor
    shop.publish("a", tables=("shop.stock",))
    shop.publish("b", tables=("lake.report",))
    shop.publish("c", tables=("lake.other",))
    assert [r.tags["branchlake/after_run"] for r in shop.tick(chosen)[0]] == ["a", "b"]
    shop.cursor = start
    assert [r.tags["branchlake/after_run"] for r in shop.tick(report)[0]] == ["b"]


# -- partitions ----------------------------------------------------------------------------------------


def test_a_partitioned_job_gets_the_published_partitions(daily: Shop) -> None:
    sensor = follow(assets=[PRICES, STOCK])
    daily.tick(sensor)
    one = daily.run(PRICES, partition="2026-08-02")
    other = daily.run(PRICES, STOCK, partition="2026-08-04")
    daily.publish(one)
    daily.publish(other, tables=("shop.prices", "shop.stock"))
    requests, _ = daily.tick(sensor)
    assert [request.partition_key for request in requests] == ["2026-08-02", "2026-08-04"]
    assert requests[0].run_key == f"{publication_id(f'run-{one}')}:2026-08-02"


def test_only_partitions_of_watched_assets_count(daily: Shop) -> None:
    sensor = follow(assets=[PRICES])
    daily.tick(sensor)
    run = daily.run(STOCK, partition="2026-08-02")
    daily.publish(run, tables=("shop.prices",))
    requests, why = daily.tick(sensor)
    assert requests == []
    assert why == f"No partition to launch after run {run}: its partitions are unknown or deleted."


def test_the_runs_of_another_dagster_are_reported_as_unknown(daily: Shop) -> None:
    sensor = follow()
    daily.tick(sensor)
    daily.publish("elsewhere")
    assert "unknown or deleted" in daily.tick(sensor)[1]


def test_dynamic_partitions(instance: dg.DagsterInstance) -> None:
    shop = Shop(instance, dg.DynamicPartitionsDefinition(name="shops"))
    sensor = follow()
    shop.tick(sensor)
    instance.add_dynamic_partitions("shops", ["here", "gone"])
    for name in ("here", "gone"):
        shop.publish(shop.run(PRICES, partition=name))
    instance.delete_dynamic_partition("shops", "gone")
    # Called like a function: a context made for tests lacks the store that Dagster looks tags up in.
    result = sensor(shop.context(sensor))
    assert [request.partition_key for request in result.run_requests] == ["here"]


@pytest.mark.filterwarnings("ignore:Non-compliant tag keys like .'dagster/partition:DeprecationWarning")
def test_two_dimensions(instance: dg.DagsterInstance) -> None:
    both = dg.MultiPartitionsDefinition({"day": DAYS, "kind": dg.StaticPartitionsDefinition(["x", "y"])})
    shop = Shop(instance, both)
    sensor = follow()
    shop.tick(sensor)
    shop.publish(shop.run(PRICES, partition="2026-08-02|y"))
    (request,) = shop.tick(sensor)[0]
    assert request.partition_key == "2026-08-02|y"
    assert request.tags["dagster/partition/kind"] == "y"


def test_a_job_with_other_partitions_needs_a_function(daily: Shop) -> None:
    with raising(ConfigurationError, "request=", reason="other_partitions", subject="other"):
        daily.tick(follow(assets=[PRICES, "other"]))


# -- the user's function -------------------------------------------------------------------------------


def test_a_function_decides(daily: Shop) -> None:
    seen: list[PublishedAssets] = []

    def decide(event: PublishedAssets) -> dg.RunRequest | dg.SkipReason | None:
        seen.append(event)
        match event.publication.run_id:
            case "skipped":
                return dg.SkipReason("not on Sundays")
            case "ignored":
                return None
            case "named":
                return dg.RunRequest("mine", partition_key="2026-08-09")
        return dg.RunRequest(partition_key="2026-08-01", tags={"a": "b"})

    sensor = follow(request=decide, assets=[PRICES, "other"])
    daily.tick(sensor)
    run = daily.run(PRICES, partition="2026-08-02")
    daily.publish("skipped")
    daily.publish("ignored")
    requests, why = daily.tick(sensor)
    assert (requests, why) == ([], "not on Sundays No request for the publication of run ignored.")
    daily.publish(run)
    daily.publish("named", tables=("lake.other",))
    requests, _ = daily.tick(sensor)
    assert [(r.run_key, r.partition_key) for r in requests] == [
        (publication_id(f"run-{run}"), "2026-08-01"),
        ("mine", "2026-08-09"),
    ]
    assert requests[0].tags["a"] == "b"
    assert seen[-2].partitions == {PRICES: {"2026-08-02"}}
    assert seen[-1].partitions == {dg.AssetKey("other"): frozenset()}


def test_a_function_that_fails_keeps_the_publication_for_the_next_tick(shop: Shop) -> None:
    calls: list[str] = []

    def fails_once(event: PublishedAssets) -> dg.RunRequest:
        calls.append(event.publication.run_id)
        if len(calls) == 1:
            raise RuntimeError("no answer")
        return dg.RunRequest()

    sensor = follow(request=fails_once)
    shop.tick(sensor)
    shop.publish("a")
    with raising(RuntimeError, "no answer"):
        shop.tick(sensor)
    assert [request.run_key for request in shop.tick(sensor)[0]] == [publication_id("run-a")]


@pytest.mark.parametrize(("options", "reason"), [({"assets": []}, "no_assets"), ({"job": None}, "no_job")])
def test_what_cannot_work_is_refused_at_once(options: dict[str, Any], reason: str) -> None:
    with raising(ConfigurationError, reason=reason):
        follow(**options)
