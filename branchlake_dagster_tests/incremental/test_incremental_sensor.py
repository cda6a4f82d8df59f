"""Which runs the sensor launches for which changes, on real Iceberg tables without Spark."""

from datetime import date
from typing import Any

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster import (
    consumer_backlog,
    consumes,
    incremental_sensor,
    table_metadata,
    unconsumed_change,
)
from branchlake_dagster.automation.backfill_stages import approve_results
from branchlake_dagster.automation.backlog import ConsumerBacklog
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_tags import APPROVAL_REQUIRED, RunState
from branchlake_dagster.stored_names import EventMetadata, RunTag
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published, values
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.raised import raising

lakehouse = memory.lakehouse

DAYS = dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-08-05")


class Ticks:
    """A sensor with its cursor."""

    def __init__(self, p: Project, **options: Any) -> None:
        self._p = p
        self._sensor = incremental_sensor(**options)
        self._cursor: str | None = None
        self.why = ""
        self.told: list[dg.AssetObservation] = []

    def tick(self) -> list[dg.RunRequest]:
        with dg.build_sensor_context(
            self._p.instance,
            cursor=self._cursor,
            repository_def=self._p.definitions.get_repository_def(),
            resources={"lakehouse": LakehouseResource.from_settings(self._p.lake.settings)},
        ) as context:
            found = self._sensor(context)
        assert isinstance(found, dg.SensorResult)
        self._cursor = found.cursor
        self.why = found.skip_reason.skip_message or "" if found.skip_reason else ""
        self.told = [one for one in found.asset_events or () if isinstance(one, dg.AssetObservation)]
        return list(found.run_requests or ())


@pytest.fixture
def orders(namespace: str) -> Source:
    return Source(namespace)


def spent_of(orders: Source, namespace: str, **options: Any) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, "spent"],
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=table_metadata(write_mode="upsert", keys=["account"], **FREE)
        | consumes({orders.key: "keys"}, keys=["account"], **options),
    )
    def spent(orders: pl.DataFrame) -> pl.DataFrame:
        return orders.group_by("account").agg(pl.col("price").sum())

    return spent


def test_a_schedule_makes_no_empty_runs(lakehouse: Lakehouse, namespace: str, orders: Source) -> None:
    spent = spent_of(orders, namespace)

    @dg.schedule(cron_schedule="*/5 * * * *", target=[spent])
    def often(lakehouse: LakehouseResource) -> dg.RunRequest | dg.SkipReason:
        left = consumer_backlog(spent, lakehouse)
        return dg.RunRequest() if left.has_any else dg.SkipReason(left.format_summary())

    def tick() -> Any:
        resources = {"lakehouse": LakehouseResource.from_settings(lakehouse.settings)}
        with dg.build_schedule_context(p.instance, resources=resources) as context:
            return often(context)

    with project(lakehouse, orders.asset, spent) as p:
        assert "no table" in tick().skip_message
        orders.append(p, ("a", 1))
        assert isinstance(tick(), dg.RunRequest)
        published(p, spent)
        assert tick().skip_message == "nothing"
        orders.append(p, ("a", 2), ("b", 3))
        left = consumer_backlog(spent, LakehouseResource.from_settings(lakehouse.settings))
        assert (left.rows, left.files, left.whole) == (2, 1, False)
        with raising(ConfigurationError, "consumes(", reason="consumes_nothing"):
            consumer_backlog(orders.asset, LakehouseResource.from_settings(lakehouse.settings))


def test_a_change_is_launched_once(lakehouse: Lakehouse, namespace: str, orders: Source) -> None:
    spent = spent_of(orders, namespace)
    with project(lakehouse, orders.asset, spent) as p:
        ticks = Ticks(p, target=[spent])
        assert ticks.tick() == []
        assert "no table" in str(ticks.told[0].metadata[EventMetadata.UNCONSUMED].value)
        orders.publish(p, ("a", 1))
        (first,) = ticks.tick()
        assert first.asset_selection == [spent.key]
        (again,) = ticks.tick()  # Dagster launches one run for a key
        assert again.run_key == first.run_key
        published(p, spent)
        assert ticks.tick() == []
        assert "nothing to consume" in ticks.why
        assert ticks.tick() == []
        assert ticks.why == "Nothing was published since the last tick."
        orders.publish(p, ("b", 2))
        (second,) = ticks.tick()
        assert second.run_key != first.run_key
        (told,) = ticks.told
        assert (told.asset_key, told.metadata[EventMetadata.UNCONSUMED_ROWS].value) == (spent.key, 1)


def test_a_change_waits_until_a_table_that_is_read_whole_exists(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    accounts = Source(namespace, "accounts")

    @dg.asset(key=[namespace, "rates"], io_manager_key="values")
    def rates() -> float:
        return 2.0

    @dg.asset(
        key=[namespace, "spent"],
        ins={one.key.path[-1]: dg.AssetIn(one.key) for one in (orders, accounts, rates)},
        deps=[dg.AssetKey([namespace, "never"])],
        metadata=table_metadata(write_mode="append", **FREE) | consumes({orders.key: "rows"}),
    )
    def spent(orders: pl.DataFrame, accounts: pl.DataFrame, rates: float) -> pl.DataFrame:
        return orders.join(accounts, on="account").with_columns(pl.col("price") * int(rates))

    outside = dg.with_resources([rates], {"values": dg.mem_io_manager})
    with project(lakehouse, orders.asset, accounts.asset, *outside, spent) as p:
        orders.append(p, ("a", 1))
        ticks = Ticks(p, target=[spent])
        assert ticks.tick() == []
        (told,) = ticks.told
        assert accounts.key.to_user_string() in str(told.metadata[EventMetadata.UNCONSUMED].value)
        assert accounts.key.to_user_string() in ticks.why
        accounts.append(p, ("a", 1))
        assert len(ticks.tick()) == 1


def test_a_small_change_waits_until_it_is_old(lakehouse: Lakehouse, namespace: str, orders: Source) -> None:
    spent = spent_of(orders, namespace)
    with project(lakehouse, orders.asset, spent) as p:
        orders.append(p, ("a", 1))
        published(p, spent)
        orders.append(p, ("b", 2))
        patient = Ticks(p, target=[spent], min_rows=2)
        assert patient.tick() == []
        assert "change for asset" in patient.why
        assert len(Ticks(p, target=[spent], min_rows=2, max_age_s=0.0).tick()) == 1
        orders.append(p, ("c", 3))
        assert len(patient.tick()) == 1


def test_a_small_change_waits_no_longer_than_the_runs_that_compute_its_input(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    spent = spent_of(orders, namespace)
    with project(lakehouse, orders.asset, spent) as p:
        orders.append(p, ("a", 1))
        published(p, spent)

        def launches(**options: Any) -> int:
            ticks = Ticks(p, target=[spent], min_rows=10, when_inputs_idle=True, **options)
            return len(ticks.tick())

        orders.append(p, ("b", 2))
        assert launches() == 1
        orders.rows = [("c", 3)]
        pending = p.run(orders.key)
        ticks = Ticks(p, target=[spent], min_rows=10, when_inputs_idle=True)
        assert ticks.tick() == []
        (observation,) = ticks.told
        (row,) = observation.metadata[EventMetadata.UNCONSUMED_PARTITIONS].records
        assert "runs that compute its inputs" in str(row.data["launch"])
        assert launches(max_age_s=0.0) == 1
        p.instance.add_run_tags(pending, {RunTag.NEXT_ATTEMPT: str(RunState.PARKED)})
        assert launches() == 1
        p.settle(pending)
        assert len(ticks.tick()) == 1
        assert Ticks(p, target=[spent], min_rows=10).tick() == []


def test_only_unfinished_runs_of_an_input_delay_a_small_change(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    spent = spent_of(orders, namespace)
    with project(lakehouse, orders.asset, spent) as p:
        orders.append(p, ("a", 1))
        published(p, spent)
        orders.append(p, ("b", 2))
        ticks = Ticks(p, target=[spent], min_rows=10, when_inputs_idle=True)
        without_assets = p.definitions.resolve_job_def("reap_branches")
        p.instance.create_run_for_job(without_assets, status=dg.DagsterRunStatus.STARTED)
        assert len(ticks.tick()) == 1
        job = p.definitions.resolve_implicit_global_asset_job_def()
        of_input = p.instance.create_run_for_job(
            job, asset_selection=frozenset({orders.key}), status=dg.DagsterRunStatus.STARTED
        )
        assert ticks.tick() == []
        p.instance.report_run_canceled(of_input)
        assert len(ticks.tick()) == 1


def test_what_waits_for_its_verdict_is_not_launched_again(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    spent = spent_of(orders, namespace)
    with project(lakehouse, orders.asset, spent) as p:
        orders.append(p, ("a", 1))
        run = p.run(spent.key)
        ticks = Ticks(p, target=[spent])
        assert ticks.tick() == []
        p.settle(run)
        assert ticks.tick() == []
        assert values(p, spent) == [("a", 1)]


def test_trouble_of_one_consumer_stops_no_other(lakehouse: Lakehouse, namespace: str, orders: Source) -> None:
    spent = spent_of(orders, namespace)

    @dg.asset(
        key=[namespace, "other"],
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=table_metadata(write_mode="append", **FREE)
        | consumes({orders.key: "rows"}, when_lost="rebuild"),
    )
    def other(orders: pl.DataFrame) -> pl.DataFrame:
        return orders

    with project(lakehouse, orders.asset, spent, other) as p:
        orders.append(p, ("a", 1))
        published(p, spent)
        published(p, other)
        lakehouse.catalog().drop_table(tuple(orders.key.path))
        orders.append(p, ("b", 2))
        ticks = Ticks(p, target=[spent, other])
        (request,) = ticks.tick()
        assert request.asset_selection == [other.key]
        told = {one.asset_key: str(one.metadata[EventMetadata.UNCONSUMED].value) for one in ticks.told}
        assert "dropped and created again" in told[spent.key]


def test_only_affected_partitions_are_launched(lakehouse: Lakehouse, namespace: str) -> None:
    events = Source(namespace, "events")
    events.columns = {"day": pl.Date, "price": pl.Int64}

    @dg.asset(
        key=[namespace, "daily"],
        partitions_def=DAYS,
        ins={"events": dg.AssetIn(events.key)},
        metadata=table_metadata(partition_by="day", **FREE) | consumes({events.key: "range"}),
    )
    def daily(events: pl.DataFrame) -> pl.DataFrame:
        return events.group_by("day").agg(pl.col("price").sum())

    def launched(ticks: Ticks) -> list[str | None]:
        found = ticks.tick()
        for request in found:
            published(p, daily, partition=request.partition_key)
        return sorted(request.partition_key or "" for request in found)

    with project(lakehouse, events.asset, daily) as p:
        for row in ((date(2026, 8, 1), 1), (date(2026, 8, 3), 2), (date(2027, 1, 1), 3)):
            events.append(p, row)  # one file each: the bounds of a file that has all of them hold all days
        ticks = Ticks(p, target=[daily])
        assert launched(ticks) == ["2026-08-01", "2026-08-03"]
        assert launched(ticks) == []
        events.append(p, (date(2026, 8, 2), 4), (date(2026, 8, 2), 5))
        assert launched(ticks) == ["2026-08-02"]
        assert launched(ticks) == []
        assert [row[1] for row in values(p, daily)] == [1, 9, 2]


def test_a_condition_is_true_while_there_is_something_left(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    spent = spent_of(orders, namespace).map_asset_specs(
        lambda spec: spec.replace_attributes(automation_condition=unconsumed_change(lakehouse.settings))
    )

    def requested(p: Project) -> int:
        return dg.evaluate_automation_conditions(
            defs=[orders.asset, spent],
            instance=p.instance,
            asset_selection=dg.AssetSelection.assets(spent.key),
        ).total_requested

    with project(lakehouse, orders.asset, spent) as p:
        assert requested(p) == 0  # there is no table to consume
        orders.publish(p, ("a", 1))
        assert requested(p) == 1
        published(p, spent)
        assert requested(p) == 0
        orders.rows = [("b", 2)]
        run = p.run(orders.key, tags={RunTag.APPROVAL: APPROVAL_REQUIRED})
        p.settle(run)
        assert requested(p) == 0  # it waits for approval
        approve_results(p.instance, run)
        assert requested(p) == 1


def test_a_run_of_something_else_holds_nothing_up(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    spent = spent_of(orders, namespace)
    with project(lakehouse, orders.asset, spent) as p:
        orders.append(p, ("a", 1))
        reaper = p.definitions.resolve_job_def("reap_branches")
        p.instance.create_run_for_job(reaper, status=dg.DagsterRunStatus.STARTED)
        assert len(Ticks(p, target=[spent]).tick()) == 1
        everything = p.definitions.resolve_implicit_global_asset_job_def()
        p.instance.create_run_for_job(everything, status=dg.DagsterRunStatus.STARTED)
        assert Ticks(p, target=[spent]).tick() == []


def test_a_consumer_that_comes_later_is_looked_at(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    spent = spent_of(orders, namespace)
    with project(lakehouse, orders.asset) as p:
        orders.append(p, ("a", 1))
        ticks = Ticks(p, target=[orders.key, spent.key])
        ticks.tick()
        assert ticks.tick() == []
        assert ticks.why == "Nothing was published since the last tick."
        with project(lakehouse, orders.asset, spent) as again:
            ticks._p = again
            assert len(ticks.tick()) == 1


def test_partitions_whose_runs_failed_hold_up_no_others(lakehouse: Lakehouse, namespace: str) -> None:
    events = Source(namespace, "events")
    events.columns = {"day": pl.Date, "price": pl.Int64}

    @dg.asset(
        key=[namespace, "daily"],
        partitions_def=DAYS,
        ins={"events": dg.AssetIn(events.key)},
        metadata=table_metadata(partition_by="day", **FREE) | consumes({events.key: "range"}),
    )
    def daily(events: pl.DataFrame) -> pl.DataFrame:
        raise ValueError("it fails")

    with project(lakehouse, events.asset, daily) as p:
        for number in (1, 2, 3):
            events.append(p, (date(2026, 8, number), number))
        ticks, seen = Ticks(p, target=[daily], max_runs=1), []
        for _ in range(4):
            for request in ticks.tick():
                seen.append(request.partition_key)
                tags = {"dagster/run_key": str(request.run_key)}
                p.settle(p.run(daily.key, partition=request.partition_key, tags=tags, ok=False))
        assert seen == ["2026-08-01", "2026-08-02", "2026-08-03"]


def test_an_error_of_any_class_is_reported_and_nothing_counts_as_consumed(
    lakehouse: Lakehouse, namespace: str, orders: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: ConsumerBacklog) -> None:
        raise KeyError("metadata")

    spent = spent_of(orders, namespace)
    with project(lakehouse, orders.asset, spent) as p:
        ticks = Ticks(p, target=[spent])
        with monkeypatch.context() as patched:
            patched.setattr(ConsumerBacklog, "unconsumed", property(broken))
            assert ticks.tick() == []
            assert KeyError.__name__ in ticks.why
        orders.append(p, ("a", 1))
        assert len(ticks.tick()) == 1


def test_one_run_computes_an_asset_and_those_that_consume_it(lakehouse: Lakehouse, namespace: str) -> None:
    raw = Source(namespace, "raw")
    raw.columns = {"day": pl.Date, "price": pl.Int64}

    def daily(name: str, upstream: dg.AssetKey, definition: dg.PartitionsDefinition[str] | None) -> Any:
        partitioned = {} if definition is None else {"partition_by": "day"}

        @dg.asset(
            key=[namespace, name],
            ins={
                "rows": dg.AssetIn(
                    upstream, partition_mapping=dg.AllPartitionMapping() if definition is None else None
                )
            },
            partitions_def=definition,
            metadata=table_metadata(**partitioned, **FREE) | consumes({upstream: "range"}, on="day"),
        )
        def copied(rows: pl.DataFrame) -> pl.DataFrame:
            return rows.select("day", "price")

        return copied

    # By name the last one comes first.
    first = daily("c", raw.key, DAYS)
    second = daily("b", first.key, DAYS)
    third = daily("a", second.key, DAYS)
    total = daily("total", third.key, None)
    target = dg.AssetSelection.assets(first.key, second.key, third.key, total.key)
    with project(lakehouse, raw.asset, first, second, third, total) as p:
        ticks = Ticks(p, target=target, with_downstream=True)
        raw.append(p, (date(2026, 8, 1), 1), (date(2026, 8, 2), 3))
        chain = [first.key, second.key, third.key]
        for day in ("2026-08-01", "2026-08-02"):
            (request,) = [one for one in ticks.tick() if one.asset_selection != [total.key]]
            assert (request.asset_selection, request.partition_key) == (chain, day)
            pending = p.run(*chain, partition=day)
            # Beside this run, the next one would be refused.
            assert {one.asset_selection[0] for one in ticks.tick() if one.asset_selection} <= {total.key}
            assert p.settle(pending).publication
        assert values(p, third) == [(date(2026, 8, 1), 1), (date(2026, 8, 2), 3)]
        # Another partition definition has a run of its own, and the chain has nothing left.
        (after,) = ticks.tick()
        assert after.asset_selection == [total.key]
        p.settle(p.run(total.key))
        # What changes in the middle of the chain is computed from there on.
        p.settle(p.run(second.key, partition="2026-08-01", tags={RunTag.REBUILD: "true"}))
        (last,) = ticks.tick()
        assert (last.asset_selection, last.partition_key) == ([third.key], "2026-08-01")
        p.settle(p.run(third.key, partition="2026-08-01"))
        raw.append(p, (date(2026, 8, 1), 5))
        p.settle(p.run(first.key, partition="2026-08-01"))
        (middle,) = [one for one in ticks.tick() if one.asset_selection != [total.key]]
        assert middle.asset_selection == [second.key, third.key]
        assert middle.partition_key == "2026-08-01"


def test_a_partition_of_a_chain_waits_while_a_later_asset_of_it_is_computed(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    first = spent_of(orders, namespace)

    @dg.asset(
        key=[namespace, "listed"],
        ins={"spent": dg.AssetIn(first.key)},
        metadata=table_metadata(write_mode="upsert", keys=["account"], **FREE)
        | consumes({first.key: "keys"}, keys=["account"]),
    )
    def listed(spent: pl.DataFrame) -> pl.DataFrame:
        return spent

    with project(lakehouse, orders.asset, first, listed) as p:
        ticks = Ticks(p, with_downstream=True)
        orders.append(p, ("a", 1))
        (request,) = ticks.tick()
        assert request.asset_selection == [first.key, listed.key]
        p.settle(p.run(first.key, listed.key))
        orders.append(p, ("a", 2))
        pending = p.run(listed.key)  # it has no verdict yet
        assert ticks.tick() == []
        p.settle(pending)
        assert [one.asset_selection for one in ticks.tick()] == [[first.key, listed.key]]


def test_a_partition_of_a_chain_that_always_fails_holds_up_no_others(
    lakehouse: Lakehouse, namespace: str
) -> None:
    """Each publication of the input gives all partitions a new key, as if they had never failed."""
    events = Source(namespace, "events")
    events.columns = {"day": pl.Date, "price": pl.Int64}

    def daily(name: str, upstream: dg.AssetKey, *, fails: bool) -> Any:
        @dg.asset(
            key=[namespace, name],
            partitions_def=DAYS,
            ins={"rows": dg.AssetIn(upstream)},
            metadata=table_metadata(partition_by="day", **FREE) | consumes({upstream: "range"}, on="day"),
        )
        def copied(context: dg.AssetExecutionContext, rows: pl.DataFrame) -> pl.DataFrame:
            if fails and context.partition_key == "2026-08-01":
                raise ValueError("it fails")
            return rows.select("day", "price")

        return copied

    first = daily("first", events.key, fails=True)
    second = daily("second", first.key, fails=False)
    target = dg.AssetSelection.assets(first.key, second.key)

    def run(p: Project, ticks: Ticks) -> str | None:
        (request,) = ticks.tick()
        assert request.asset_selection == [first.key, second.key]
        fails = request.partition_key == "2026-08-01"
        tags = {"dagster/run_key": str(request.run_key)}
        p.settle(p.run(first.key, second.key, partition=request.partition_key, tags=tags, ok=not fails))
        return request.partition_key

    with project(lakehouse, events.asset, first, second) as p:
        ticks = Ticks(p, target=target, with_downstream=True, retry_delay_seconds=3600)
        events.append(p, (date(2026, 8, 1), 1))
        seen = []
        for number in range(3):
            events.append(p, (date(2026, 8, 2), number))
            seen.append(run(p, ticks))
        assert seen == ["2026-08-01", "2026-08-02", "2026-08-02"]
        # Alone, or after its delay, it has its turn.
        assert run(p, ticks) == "2026-08-01"
        events.append(p, (date(2026, 8, 2), 4))
        impatient = Ticks(p, target=target, with_downstream=True, retry_delay_seconds=0)
        assert run(p, impatient) == "2026-08-01"
        assert values(p, second) == [(date(2026, 8, 2), number) for number in range(3)]
