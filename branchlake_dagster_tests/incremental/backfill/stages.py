"""The pipeline of the backfill tests: three stages, and an ordinary asset beside them; what is done with it."""

import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl

from branchlake_dagster import consumes, incremental_sensor, table_metadata
from branchlake_dagster.cli import backfill
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster_tests.harness import Project
from branchlake_dagster_tests.incremental.sources import FREE

DAYS = dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-08-05")


class Pipeline:
    """Events by day, their sums by day, and a total that consumes the sums; beside it an ordinary report."""

    def __init__(self, namespace: str, *, factor: int = 1, broken_while: Path | None = None) -> None:
        """The sums fail as long as the file `broken_while` is there."""
        self.factor = factor
        self.days = DAYS
        self.broken = False
        """Whether the sums fail."""

        @dg.asset(
            key=[namespace, "events"],
            partitions_def=DAYS,
            metadata=table_metadata(partition_by="day", **FREE),
            code_version=str(factor),
        )
        def events(context: dg.AssetExecutionContext) -> pl.DataFrame:
            day = date.fromisoformat(context.partition_key)
            return pl.DataFrame({"day": [day, day], "price": [self.factor, 10 * self.factor]})

        @dg.asset(
            key=[namespace, "daily"],
            partitions_def=DAYS,
            ins={"events": dg.AssetIn(events.key)},
            metadata=table_metadata(partition_by="day", **FREE) | consumes({events.key: "range"}),
        )
        def daily(events: pl.DataFrame) -> pl.DataFrame:
            if self.broken or (broken_while is not None and broken_while.exists()):
                raise ValueError("The sums are broken.")
            return events.group_by("day").agg(pl.col("price").sum())

        @dg.asset(
            key=[namespace, "total"],
            ins={"daily": dg.AssetIn(daily.key)},
            metadata=table_metadata(write_mode="upsert", keys=["day"], **FREE)
            | consumes({daily.key: "keys"}, keys=["day"]),
        )
        def total(daily: pl.DataFrame) -> pl.DataFrame:
            return daily.with_columns(pl.col("price") * 2)

        @dg.asset(
            key=[namespace, "report"], ins={"daily": dg.AssetIn(daily.key)}, metadata=table_metadata(**FREE)
        )
        def report(daily: pl.DataFrame) -> pl.DataFrame:
            return daily

        self.events, self.daily, self.total, self.report = events, daily, total, report

    @property
    def assets(self) -> list[dg.AssetsDefinition]:
        return [self.events, self.daily, self.total, self.report]


def follow(p: Project) -> list[str]:
    """What the sensor launches, run and published until there is nothing more; in order."""
    sensor, cursor, done = incremental_sensor(), None, []
    for _ in range(10):
        with dg.build_sensor_context(
            p.instance,
            cursor=cursor,
            repository_def=p.definitions.get_repository_def(),
            resources={"lakehouse": LakehouseResource.from_settings(p.lake.settings)},
        ) as context:
            found = sensor(context)
        assert isinstance(found, dg.SensorResult)
        cursor = found.cursor
        if not found.run_requests:
            return done
        for request in found.run_requests:
            (key,) = request.asset_selection or ()
            p.settle(p.run(key, partition=request.partition_key))
            done.append(f"{key.path[-1]} {request.partition_key or ''}".strip())
    raise AssertionError(f"it goes on and on: {done}")


def place(p: Project) -> backfill.LocationContext:
    return backfill.LocationContext(p.graph, LakehouseResource.from_settings(p.lake.settings), p.instance)


def requested(p: Project, pipeline: Pipeline, *days: str, **options: Any) -> tuple[str, Mapping[str, str]]:
    """A backfill of the events, with the tags that Dagster's daemon gives its runs."""
    where = place(p)
    what = backfill.build_request(where, pipeline.events.key.to_user_string(), days, everything=False)
    assert what is not None
    number = backfill.launch_request(where, what, time.time(), **options)
    found = p.instance.get_backfill(number)
    assert found is not None
    return number, {**found.tags, "dagster/backfill": number}
