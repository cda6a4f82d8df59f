"""A simulation of days: events arrive, both pipelines run and are published, and the usage is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import dagster as dg
from pyspark.sql import SparkSession

from branchlake_dagster.bench.change_capture import ExecutorUsage
from branchlake_dagster.bench.incremental_feed import (
    WINDOW,
    FeedSize,
    append_day,
    create_events_table,
    date_of_day,
)
from branchlake_dagster.bench.incremental_pipeline import Pipeline, build_pipeline
from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_tags import RunState

_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
_RANGE = "dagster/asset_partition_range"
WAYS = ("lookback", "changes")
STAGES = ("daily", "daily_agg")


class SimulationFailed(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """A run of the simulated pipeline was not published."""


@dataclass(frozen=True)
class StageRun:
    """The figures of one stage on one day: seconds from launch to publication, and executor usage.

    `way` is `lookback` or `changes`.
    """

    way: str
    stage: str
    day: int
    wall_s: float
    usage: ExecutorUsage = field(default_factory=ExecutorUsage)


class Simulation:
    """Runs both pipelines in a namespace of `lake`. The servers of the lake must run.

    `read_usage` returns what executors used since its previous call.
    """

    def __init__(
        self,
        lake: Lakehouse,
        namespace: str,
        size: FeedSize,
        *,
        read_usage: Callable[[], ExecutorUsage] = ExecutorUsage,
    ) -> None:
        self._lake = lake
        self._namespace = namespace
        self._size = size
        self._read_usage = read_usage
        self.pipeline: Pipeline = build_pipeline(namespace)
        resource = LakehouseResource.from_settings(lake.settings)
        self._definitions = dg.Definitions.merge(
            branchlake_definitions(lake.settings, lakehouse=resource),
            dg.Definitions(assets=self.pipeline.assets, executor=dg.in_process_executor),
        )
        self._job = self._definitions.resolve_implicit_global_asset_job_def()
        self._graph = self._definitions.get_repository_def().asset_graph

    def run_first_days(
        self, instance: dg.DagsterInstance, *, days: int = WINDOW, ways: Collection[str] = WAYS
    ) -> list[StageRun]:
        """Write the events of the first days and run the pipelines once, before anything is measured."""
        with self._open_session() as session:
            session.sql(f"CREATE NAMESPACE IF NOT EXISTS nessie.{self._namespace}")
            create_events_table(session, self._spark_table_name("playback"))
            for number in range(days):
                append_day(session, self._spark_table_name("playback"), self._size, number)
        return self._run_stages(instance, days - 1, ways)

    def run_day(self, instance: dg.DagsterInstance, number: int) -> list[StageRun]:
        """Simulate one more day. The ways run in alternating order."""
        with self._open_session() as session:
            append_day(session, self._spark_table_name("playback"), self._size, number)
        return self._run_stages(instance, number)

    def count_differences(self) -> dict[str, int]:
        """Count the rows that only one of the two ways has, by stage. Duplicates are counted."""
        with self._open_session() as session:
            counts = {}
            for stage in STAGES:
                frames = [
                    session.table(self._spark_table_name(f"{way}_{stage}")) for way in ("lookback", "changes")
                ]
                lookback_rows, change_rows = frames[0], frames[1].select(*frames[0].columns)
                counts[stage] = (
                    lookback_rows.exceptAll(change_rows).count()
                    + change_rows.exceptAll(lookback_rows).count()
                )
            return counts

    def _run_stages(
        self, instance: dg.DagsterInstance, number: int, ways: Collection[str] = WAYS
    ) -> list[StageRun]:
        self._read_usage()
        assets = {"lookback": self.pipeline.lookback, "changes": self.pipeline.changes}
        first = date_of_day(max(0, number - WINDOW + 1)).isoformat()
        tags = {f"{_RANGE}_start": first, f"{_RANGE}_end": date_of_day(number).isoformat()}
        stage_runs = []
        for way in sorted(ways, reverse=bool(number % 2)):
            for stage, asset in zip(STAGES, assets[way], strict=True):
                began = time.perf_counter()
                self._run_and_publish(instance, asset.key, tags if way == "lookback" else {})
                elapsed_s = time.perf_counter() - began
                stage_runs.append(StageRun(way, stage, number, elapsed_s, self._read_usage()))
        return stage_runs

    def _run_and_publish(self, instance: dg.DagsterInstance, key: dg.AssetKey, tags: dict[str, str]) -> None:
        run_result = self._job.execute_in_process(
            instance=instance, asset_selection=[key], run_config=_QUIET, tags=tags
        )
        outcome = Reconciler.from_lake(self._lake, instance, self._graph).reconcile_run(run_result.run_id)
        if outcome is None or outcome.state is not RunState.PUBLISHED:
            raise SimulationFailed(
                f"{key.to_user_string()} was not published: {outcome}.", run_id=run_result.run_id
            )

    def _open_session(self) -> _MainSession:
        return _MainSession(self._lake)

    def _spark_table_name(self, name: str) -> str:
        return f"nessie.{self._namespace}.{name}"


class _MainSession:
    """A Spark session on `main` that stops at the end of the block."""

    def __init__(self, lake: Lakehouse) -> None:
        self._session = lake.spark_session(MAIN)

    def __enter__(self) -> SparkSession:
        return self._session

    def __exit__(self, *_: object) -> None:
        self._session.stop()
