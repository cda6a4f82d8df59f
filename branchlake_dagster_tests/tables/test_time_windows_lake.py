"""Windows that cut through hours and days, through the IO manager, with both engines."""

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import dagster as dg
import polars as pl
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the library's own abbreviation

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.tables.selection import select_partitions, to_sql_predicate
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.tables.time_windows import (
    CLOCK_CHANGES,
    OF_DAYS,
    OF_HOURS,
    SCHEMA,
    noon,
    windows_of,
)

pytestmark = pytest.mark.spark

Rows = list[dict[str, Any]]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def test_sparks_predicates_say_what_dagsters_windows_say(spark_session: SparkSession) -> None:
    """One job for all kinds of windows, twice: the session's time zone must not matter."""
    cases = []
    moments: set[datetime] = set()
    days: set[date] = set()
    for zone, (around, _) in CLOCK_CHANGES.items():
        for build in (*OF_DAYS.values(), *OF_HOURS.values()):
            definition = build(around, zone)
            windows = windows_of(definition)
            key = list(windows)[len(windows) // 2]
            for column in ("instant", "wall", *(["day"] if build in OF_DAYS.values() else [])):
                selection = select_partitions([key], definition, {"": column}, schema=SCHEMA, table_name="t")
                cases.append((zone, column, windows[key], to_sql_predicate(selection, SCHEMA)))
            for end in windows[key]:
                moments |= {EPOCH + timedelta(seconds=end, microseconds=off) for off in (-1, 0, 1)}
                days |= {(EPOCH + timedelta(seconds=end, days=off)).date() for off in (-1, 0, 1)}
    zone_before = spark_session.conf.get("spark.sql.session.timeZone")
    try:
        for session_zone in ("America/New_York", "Asia/Kolkata"):
            spark_session.conf.set("spark.sql.session.timeZone", session_zone)
            frame = spark_session.createDataFrame(
                pl.DataFrame({"instant": sorted(moments)})
                .with_columns(wall=pl.col("instant").dt.replace_time_zone(None))
                .to_arrow()
            )
            of_days = spark_session.createDataFrame(pl.DataFrame({"day": sorted(days)}).to_arrow())
            found = frame.select([F.expr(sql) for _, column, _, sql in cases if column != "day"]).collect()
            told = [case for case in cases if case[1] != "day"]
            for moment, answers in zip(sorted(moments), found, strict=True):
                at = (moment - EPOCH) / timedelta(seconds=1)
                assert [*answers] == [start <= at < end for _, _, (start, end), _ in told], moment
            found = of_days.select([F.expr(sql) for _, column, _, sql in cases if column == "day"]).collect()
            told = [case for case in cases if case[1] == "day"]
            for day, answers in zip(sorted(days), found, strict=True):
                assert [*answers] == [start <= noon(day, zone) < end for zone, _, (start, end), _ in told], (
                    day
                )
    finally:
        spark_session.conf.set("spark.sql.session.timeZone", zone_before or "UTC")


def settled(p: Project, *assets: str, partition: str | None = None, **options: Any) -> str:
    run_id = p.run(*assets, partition=partition, **options)
    outcome = p.settle(run_id)
    assert outcome.state is RunState.PUBLISHED, outcome
    return run_id


def polars_asset(namespace: str, rows: Callable[[list[str]], Rows], definition: Any) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, "t"],
        partitions_def=definition,
        metadata=table_metadata(partition_by="at", require_checks=False),
    )
    def t(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame(rows(list(context.partition_keys)))

    return t


def spark_asset(namespace: str, rows: Callable[[list[str]], Rows], definition: Any) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, "t"],
        partitions_def=definition,
        metadata=table_metadata(partition_by="at", require_checks=False),
    )
    def t(context: dg.AssetExecutionContext, spark: BranchSparkResource) -> DataFrame:
        return spark.spark_session.createDataFrame(
            pl.DataFrame(rows(list(context.partition_keys))).to_arrow()
        )

    return t


@pytest.mark.parametrize("asset", [polars_asset, spark_asset])
@pytest.mark.parametrize(
    ("definition", "per_hour"),
    [
        (
            dg.DailyPartitionsDefinition("2026-08-01", "2026-08-09", timezone="Asia/Kolkata"),
            1,
        ),
        (OF_HOURS["quarters of an hour"](date(2026, 8, 2), "UTC"), 12),
    ],
    ids=["days of a half-hour zone", "quarters of an hour"],
)
def test_a_window_that_shares_files_with_its_neighbours_is_replaced_alone(
    lakehouse: Lakehouse,
    namespace: str,
    asset: Callable[..., dg.AssetsDefinition],
    definition: dg.TimeWindowPartitionsDefinition,
    per_hour: int,
) -> None:
    """A run of several windows writes files that hold rows of two; Spark refuses to replace half a file."""
    keys = list(windows_of(definition))[2:5]
    value = {"n": 1}

    def rows(keys: list[str]) -> Rows:
        found = []
        for key in keys:
            start, end = windows_of(definition)[key]
            at = start
            while at < end:
                found.append({"at": EPOCH + timedelta(seconds=at), "n": value["n"], "key": key})
                at += 3600 / per_hour / 2
        return found

    t = asset(namespace, rows, definition)

    @dg.asset(
        key=[namespace, "seen"],
        partitions_def=definition,
        metadata=table_metadata(partition_by="at"),
        ins={"t": dg.AssetIn([namespace, "t"])},
    )
    def seen(context: dg.AssetExecutionContext, t: pl.DataFrame) -> None:
        value[context.partition_key] = t.height

    with project(lakehouse, t, seen) as p:
        tags = {"dagster/asset_partition_range_start": keys[0], "dagster/asset_partition_range_end": keys[2]}
        settled(p, dg.AssetKey([namespace, "t"]), tags=tags)
        whole = sorted(rows(keys), key=lambda row: row["at"])
        assert sorted(p.rows(namespace, "t"), key=lambda row: row["at"]) == whole
        value["n"] = 2
        run_id = settled(p, dg.AssetKey([namespace, "t"]), partition=keys[1])
        found = sorted(p.rows(namespace, "t"), key=lambda row: row["at"])
        assert found == [{**row, "n": 2 if row["key"] == keys[1] else 1} for row in whole]
        assert run_branch_name(run_id) not in p.branches()
        for key in keys:
            p.run(dg.AssetKey([namespace, "seen"]), partition=key)
            assert value[key] == sum(row["key"] == key for row in whole)


def test_files_that_were_divided_are_replayed_on_what_main_has_become(
    lakehouse: Lakehouse, namespace: str
) -> None:
    definition = OF_HOURS["quarters of an hour"](date(2026, 8, 2), "UTC")
    keys = list(windows_of(definition))
    value = {"n": 1}

    def rows(keys: list[str]) -> Rows:
        starts = {key: windows_of(definition)[key][0] for key in keys}
        return [
            {"at": EPOCH + timedelta(seconds=start + away), "n": value["n"], "key": key}
            for key, start in starts.items()
            for away in (0, 899)
        ]

    with project(lakehouse, spark_asset(namespace, rows, definition)) as p:
        tags = {"dagster/asset_partition_range_start": keys[4], "dagster/asset_partition_range_end": keys[7]}
        settled(p, tags=tags)
        value["n"] = 2
        waiting = p.run(partition=keys[5])
        settled(p, partition=keys[20])
        assert p.settle(waiting).state is RunState.PUBLISHED
        found = sorted((row["key"], row["n"]) for row in p.rows(namespace, "t"))
        changed = {5: 2, 20: 2}
        assert found == sorted((keys[k], changed.get(k, 1)) for k in (4, 5, 6, 7, 20) for _ in range(2))


def test_rows_without_a_moment_outlive_the_replacement_of_a_window_beside_them(
    lakehouse: Lakehouse, namespace: str
) -> None:
    """A table that was made before its asset had partitions: one file of everything, nulls included."""
    definition = dg.HourlyPartitionsDefinition("2026-08-08-00:00", "2026-08-09-00:00")
    at = [datetime(2026, 8, 8, hour, 30, tzinfo=UTC) for hour in (1, 2)]

    @dg.asset(key=[namespace, "t"], metadata=table_metadata(require_checks=False))
    def before() -> pl.DataFrame:
        return pl.DataFrame({"at": [*at, None], "n": [1, 1, 1], "key": ["a", "b", "c"]})

    def rows(keys: list[str]) -> Rows:
        return [{"at": at[0], "n": 2, "key": "a"}]

    with project(lakehouse, before) as p:
        settled(p)
    for asset in (spark_asset, polars_asset):
        with project(lakehouse, asset(namespace, rows, definition)) as p:
            settled(p, partition="2026-08-08-01:00")
            assert sorted(p.rows(namespace, "t"), key=lambda row: row["key"]) == [
                {"at": at[0], "n": 2, "key": "a"},
                {"at": at[1], "n": 1, "key": "b"},
                {"at": None, "n": 1, "key": "c"},
            ]


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York"])
def test_a_date_column_is_read_and_written_by_the_calendar_of_the_partitions(
    lakehouse: Lakehouse, namespace: str, zone: str
) -> None:
    daily = dg.DailyPartitionsDefinition("2026-08-07", "2026-08-10", timezone=zone)
    loaded = {}

    @dg.asset(
        key=[namespace, "t"],
        partitions_def=daily,
        metadata=table_metadata(partition_by="day", require_checks=False),
    )
    def t(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"day": [date.fromisoformat(context.partition_key)]})

    @dg.asset(
        key=[namespace, "down"],
        partitions_def=daily,
        metadata=table_metadata(partition_by="day", require_checks=False),
        ins={"t": dg.AssetIn([namespace, "t"])},
    )
    def down(context: dg.AssetExecutionContext, t: DataFrame) -> DataFrame:
        loaded[context.partition_key] = [row.day for row in t.collect()]
        return t

    with project(lakehouse, t, down) as p:
        for key in ("2026-08-07", "2026-08-08"):
            settled(p, dg.AssetKey([namespace, "t"]), partition=key)
        settled(p, dg.AssetKey([namespace, "down"]), partition="2026-08-08")
        assert loaded == {"2026-08-08": [date(2026, 8, 8)]}
        assert p.rows(namespace, "down") == [{"day": date(2026, 8, 8)}]


def test_quarters_of_an_hour_over_a_date_column_are_refused_before_a_table_is_made(
    lakehouse: Lakehouse, namespace: str
) -> None:
    definition = OF_HOURS["quarters of an hour"](date(2026, 8, 2), "UTC")
    t = polars_asset(namespace, lambda _: [{"at": date(2026, 8, 2)}], definition)
    with project(lakehouse, t) as p:
        run_id = p.run(partition=list(windows_of(definition))[3], ok=False)
        p.failed_with(ConfigurationError, "not made of whole days", "column at holds dates", f"{namespace}.t")
        assert not lakehouse.catalog(run_branch_name(run_id)).table_exists((namespace, "t"))


def test_berlin_in_october_has_25_hours(lakehouse: Lakehouse, namespace: str) -> None:
    daily = dg.DailyPartitionsDefinition("2026-10-24", "2026-10-28", timezone="Europe/Berlin")
    zone = ZoneInfo("Europe/Berlin")
    start = datetime(2026, 10, 25, tzinfo=zone).astimezone(UTC)

    def rows(keys: list[str]) -> Rows:
        return [{"at": start + timedelta(hours=hour), "n": hour} for hour in range(25)]

    with project(lakehouse, spark_asset(namespace, rows, daily)) as p:
        settled(p, partition="2026-10-25")
        assert len(p.rows(namespace, "t")) == 25
