"""The days that published batches of an ingestion have changed, as partitions in Dagster."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.change import Position
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.definitions import ingest_definitions
from branchlake_dagster.ingest.event_days import (
    MAX_EVENTS,
    MAX_LISTED_DAYS,
    DayCounts,
    TableDays,
    build_days_sensor,
    days_key,
    days_spec,
    format_days,
    take_days,
)
from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster_tests.harness import Project
from branchlake_dagster_tests.ingest.test_landing_source import land, resource_of
from branchlake_dagster_tests.suite.raised import raising

TODAY = date(2026, 11, 20)
FIRST = date(2026, 11, 1)


def days_ingest(name: str = "days", **options: Any) -> Ingest:
    table = IngestTable(
        key=[name, "t"],
        columns={"id": "bigint", "at": "timestamp"},
        layout=["day(at)"],
        days_from=FIRST,
        **options,
    )
    return Ingest(name=name, topics=["a"], tables=[table], source="landing")


# -- pure ----------------------------------------------------------------------------------------------


def test_a_long_list_of_days_is_cut() -> None:
    counts = DayCounts()
    for number in range(MAX_LISTED_DAYS + 3):
        counts.rows[FIRST + timedelta(days=number)] = 10 if number else 1_000
    counts.outside = 4
    text = format_days(counts)
    assert text.startswith("2026-11-01: 1,000, 2026-11-02: 10, ")
    assert text.endswith(", 3 other days, without a day: 4")
    assert len(text) < 1_000


def test_waiting_days_are_reported_newest_first_and_survive_json() -> None:
    waiting = {FIRST + timedelta(days=number): (number, 0) for number in range(5)}
    state = TableDays(Position("u", 7), waiting)
    days, rest = take_days(TableDays.from_json(json.loads(json.dumps(state.to_json()))), 2, last=TODAY)
    assert [*days] == [FIRST + timedelta(days=4), FIRST + timedelta(days=3)]
    assert rest == TableDays(
        Position("u", 7), {day: rows for day, rows in waiting.items() if day not in days}
    )
    assert take_days(rest, 0, last=TODAY) == ({}, rest)


def test_a_table_must_have_days_to_report_them() -> None:
    with raising(ConfigurationError, reason="days_without_layout"):
        IngestTable(key="raw/t", days_from=FIRST, layout=["month(at)"])
    with raising(ConfigurationError, reason="days_of_family"):
        IngestTable(key="raw/{route}", days_from=FIRST, layout=["day(at)"])
    assert IngestTable(key="raw/t", days_from=FIRST, layout=["id", "hour(at)"])


def test_only_tables_that_ask_for_it_have_days() -> None:
    plain = Ingest(name="p", topics=["a"], tables=[IngestTable(key="raw/t")], source="landing")
    ingest = days_ingest()
    definitions = ingest_definitions(plain, ingest)
    graph = branchlake_definitions(definitions=definitions).resolve_asset_graph()
    assert graph.has(days_key(ingest.tables[0]))
    assert not graph.has(days_key(plain.tables[0]))
    assert graph.get(days_key(ingest.tables[0])).parent_keys == {ingest.tables[0].asset}
    names = {sensor.name for sensor in definitions.sensors or ()}
    assert "ingest_days_days_sensor" in names
    assert "ingest_p_days_sensor" not in names


# -- on a lake -----------------------------------------------------------------------------------------


class Days:
    """An ingestion from a landing folder, its batches, and the sensor of its days with its cursor."""

    def __init__(self, lake: Lakehouse, folder: Path, p: Project, ingest: Ingest) -> None:
        self.lake, self.folder, self.p, self.ingest = lake, folder, p, ingest
        self.cursor: str | None = None
        self.today = TODAY
        self._id = 0

    def batch(self, *times: str, publish: bool = True) -> str:
        """Ingest one record for each time in one run."""
        values = []
        for at in times:
            self._id += 1
            values.append(json.dumps({"id": self._id, "at": at}).encode())
        land(self.folder, "a", values, at=1_000)
        run = self.p.run(self.ingest.tables[0].asset, self.ingest.dead_letters_asset)
        if publish:
            assert self.p.settle(run).state is RunState.PUBLISHED
        return run

    def tick(self) -> list[dg.AssetMaterialization | dg.AssetObservation]:
        """What the sensor reports, with Dagster's own check of the partitions."""
        sensor = build_days_sensor(
            self.ingest, clock=lambda: datetime.combine(self.today, datetime.min.time(), UTC)
        )
        with dg.build_sensor_context(
            self.p.instance,
            cursor=self.cursor,
            resources={"lakehouse": resource_of(self.lake, self.folder)},
        ) as context:
            result = sensor.evaluate_tick(context)
        self.cursor = result.cursor
        for event in result.asset_events:
            self.p.instance.report_runless_asset_event(event)
        return list(result.asset_events)

    def days(self) -> list[tuple[str | None, int, int]]:
        """The reported days of a tick, with their added and removed rows."""
        return [
            (
                event.partition,
                event.metadata["branchlake/day_rows_added"].value,
                event.metadata["branchlake/day_rows_removed"].value,
            )
            for event in self.tick()
            if isinstance(event, dg.AssetMaterialization)
        ]


@pytest.fixture
def days(lakehouse: Lakehouse, spark_session: Any, tmp_path: Path) -> Any:
    ingest = days_ingest(f"d{uuid.uuid4().hex[:8]}")
    resource = resource_of(lakehouse, tmp_path)
    definitions = branchlake_definitions(
        lakehouse.settings,
        dg.Definitions.merge(ingest_definitions(ingest), dg.Definitions(executor=dg.in_process_executor)),
        lakehouse=resource,
    )
    with dg.DagsterInstance.ephemeral() as instance:
        yield Days(lakehouse, tmp_path, Project(resource.lakehouse, instance, definitions), ingest)


@pytest.mark.spark
def test_days_of_published_batches_are_reported_once(days: Days) -> None:
    assert days.tick() == []  # the table does not exist yet
    run = days.batch("2026-11-02T10:00:00Z", "2026-11-02T23:59:59Z", "2026-11-05T00:00:00Z", publish=False)
    assert days.tick() == []  # nothing is on main yet
    (event,) = days.p.instance.fetch_materializations(days.ingest.tables[0].asset, limit=1).records
    assert event.asset_materialization is not None
    assert event.asset_materialization.metadata["branchlake/days"].value == "2026-11-02: 2, 2026-11-05: 1"
    assert days.p.settle(run).state is RunState.PUBLISHED
    assert days.days() == [("2026-11-02", 2, 0), ("2026-11-05", 1, 0)]
    assert days.days() == []
    days.batch("2026-11-05T12:00:00Z")
    days.batch("2026-11-06T12:00:00Z")
    assert days.days() == [("2026-11-05", 1, 0), ("2026-11-06", 1, 0)]
    # A change that nobody ingested counts as well: the report is about `main`.
    days.lake.catalog(MAIN).load_table((days.ingest.name, "t")).delete("id = 3")
    assert [(day, added) for day, added, removed in days.days() if removed] == [("2026-11-05", 0)]
    reported = days.p.instance.get_materialized_partitions(days_key(days.ingest.tables[0]))
    assert reported == {"2026-11-02", "2026-11-05", "2026-11-06"}


@pytest.mark.soak  # test_days_of_published_batches_are_reported_once looks before its first publication too
@pytest.mark.spark
def test_a_batch_that_is_not_published_reports_no_day(days: Days) -> None:
    days.batch("2026-11-02T10:00:00Z")
    assert [day for day, _, _ in days.days()] == ["2026-11-02"]
    run = days.batch("2026-11-03T10:00:00Z", publish=False)
    # Somebody else ingests the same records first.
    second = days.p.run(days.ingest.tables[0].asset, days.ingest.dead_letters_asset)
    assert days.p.settle(second).state is RunState.PUBLISHED
    assert days.p.settle(run).state is RunState.REFUSED
    assert days.days() == [("2026-11-03", 1, 0)]


@pytest.mark.spark
def test_hostile_times_make_few_events_and_no_error(days: Days) -> None:
    hostile = ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "1969-12-31T23:00:00Z", "2026-11-21T00:00:00Z"]
    chance = random.Random(1)
    many = [
        (date(1900, 1, 1) + timedelta(days=number)).isoformat() + "T00:00:00Z"
        for number in chance.sample(range(40_000), 200)
    ]
    good = ["2026-11-01T00:00:00Z", "2026-11-20T23:00:00Z"]
    days.batch(*hostile, *many, *good)
    events = days.tick()
    inside = [at for at in (*hostile, *many, *good) if FIRST.isoformat() <= at[:10] <= TODAY.isoformat()]
    reported = [event.partition for event in events if isinstance(event, dg.AssetMaterialization)]
    assert reported == sorted({at[:10] for at in inside})
    (outside,) = [event for event in events if isinstance(event, dg.AssetObservation)]
    # A day that is still to come waits until it is a partition.
    rows = len(hostile) - 1 + len(many) + len(good) - len(inside)
    assert outside.metadata["branchlake/rows_outside_days"].value == rows
    days.today += timedelta(days=1)
    assert days.days() == [("2026-11-21", 1, 0)]
    (record,) = days.p.instance.fetch_materializations(days.ingest.tables[0].asset, limit=1).records
    assert record.asset_materialization is not None
    assert len(str(record.asset_materialization.metadata["branchlake/days"].value)) < 1_000


@pytest.mark.spark
def test_more_days_than_a_tick_reports_come_with_the_next_ticks(days: Days) -> None:
    days.ingest = days_ingest(days.ingest.name)
    days.today = FIRST + timedelta(days=400)
    count = MAX_EVENTS + 20
    days.batch(*[(FIRST + timedelta(days=number)).isoformat() + "T00:00:00Z" for number in range(count)])
    first, second = days.days(), days.days()
    assert (len(first), len(second), days.days()) == (MAX_EVENTS, 20, [])
    assert len({day for day, _, _ in (*first, *second)}) == count


@pytest.mark.spark
def test_a_rolled_back_table_reports_all_its_days_anew(days: Days) -> None:
    days.batch("2026-11-02T10:00:00Z")
    days.batch("2026-11-03T10:00:00Z")
    assert len(days.days()) == 2
    table = days.lake.catalog(MAIN).load_table((days.ingest.name, "t"))
    table.manage_snapshots().rollback_to_snapshot(table.metadata.snapshots[0].snapshot_id).commit()
    assert days.days() == [("2026-11-02", 1, 0)]
    days.cursor = "damaged"
    assert days.days() == [("2026-11-02", 1, 0)]


@pytest.mark.spark
def test_a_daily_asset_is_computed_for_the_days_that_batches_have_changed(days: Days) -> None:
    days_asset = days_key(days.ingest.tables[0])
    partitions = dg.DailyPartitionsDefinition(FIRST.isoformat(), end_offset=1)

    @dg.asset(
        deps=[days_asset],
        partitions_def=partitions,
        automation_condition=dg.AutomationCondition.any_deps_updated(),
    )
    def revenue() -> None: ...

    defs = dg.Definitions(assets=[days_spec(days.ingest, days.ingest.tables[0]), revenue])

    def wanted(cursor: Any) -> tuple[Any, Sequence[str]]:
        at = datetime.combine(TODAY, datetime.min.time())
        result = dg.evaluate_automation_conditions(
            defs,
            days.p.instance,
            asset_selection=dg.AssetSelection.assets(revenue),
            cursor=cursor,
            evaluation_time=at,
        )
        return result.cursor, sorted(result.get_requested_partitions(revenue.key))

    cursor, requested = wanted(None)
    assert requested == []
    days.batch("2026-11-02T10:00:00Z", "2026-11-05T10:00:00Z")
    days.tick()
    cursor, requested = wanted(cursor)
    assert requested == ["2026-11-02", "2026-11-05"]
    assert wanted(cursor)[1] == []
