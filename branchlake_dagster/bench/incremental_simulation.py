"""Days go by: events arrive, both pipelines run and are published, and what each stage used is noted."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import dagster as dg
from pyspark.sql import SparkSession

from branchlake_dagster.bench.change_capture import Used
from branchlake_dagster.bench.incremental_feed import WINDOW, Size, arrive, create, day_number
from branchlake_dagster.bench.incremental_pipeline import Pipeline, pipeline
from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.definitions import branchlake_definitions
from branchlake_dagster.publication.outcome import PublicationAction
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource

_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
_RANGE = "dagster/asset_partition_range"
WAYS = ("lookback", "changes")
STAGES = ("daily", "daily_agg")


class SimulationFailed(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """A run of the benchmark's pipeline failed, or was not published."""


@dataclass(frozen=True)
class StageRun:
    """One stage on one day: `lookback` or `changes`, seconds from launch to published, and executors' use."""

    way: str
    stage: str
    day: int
    wall_s: float
    used: Used = field(default_factory=Used)


class Simulation:
    """Both pipelines in a namespace of `lake`, whose servers run.

    `used` tells what executors used since the last time it was asked.
    """

    def __init__(
        self, lake: Lakehouse, namespace: str, size: Size, *, used: Callable[[], Used] = Used
    ) -> None:
        self._lake = lake
        self._namespace = namespace
        self._size = size
        self._used = used
        self.pipeline: Pipeline = pipeline(namespace)
        resource = LakehouseResource.of(lake.settings)
        self._definitions = dg.Definitions.merge(
            branchlake_definitions(lake.settings, lakehouse=resource),
            dg.Definitions(assets=self.pipeline.assets, executor=dg.in_process_executor),
        )
        self._job = self._definitions.resolve_implicit_global_asset_job_def()
        self._graph = self._definitions.get_repository_def().asset_graph

    def begin(
        self, instance: dg.DagsterInstance, *, days: int = WINDOW, ways: Collection[str] = WAYS
    ) -> list[StageRun]:
        """The first days' events, and pipelines on all of them: what there is before it is measured."""
        with self._session() as session:
            session.sql(f"CREATE NAMESPACE IF NOT EXISTS nessie.{self._namespace}")
            create(session, self._table("playback"))
            for number in range(days):
                arrive(session, self._table("playback"), self._size, number)
        return self._runs(instance, days - 1, ways)

    def day(self, instance: dg.DagsterInstance, number: int) -> list[StageRun]:
        """One more day; who goes first changes from day to day."""
        with self._session() as session:
            arrive(session, self._table("playback"), self._size, number)
        return self._runs(instance, number)

    def differences(self) -> dict[str, int]:
        """By stage the rows that one way has and the other has not, as multisets."""
        with self._session() as session:
            found = {}
            for stage in STAGES:
                sides = [session.table(self._table(f"{way}_{stage}")) for way in ("lookback", "changes")]
                one, other = sides[0], sides[1].select(*sides[0].columns)
                found[stage] = one.exceptAll(other).count() + other.exceptAll(one).count()
            return found

    def _runs(
        self, instance: dg.DagsterInstance, number: int, ways: Collection[str] = WAYS
    ) -> list[StageRun]:
        self._used()
        assets = {"lookback": self.pipeline.lookback, "changes": self.pipeline.changes}
        first = day_number(max(0, number - WINDOW + 1)).isoformat()
        tags = {f"{_RANGE}_start": first, f"{_RANGE}_end": day_number(number).isoformat()}
        found = []
        for way in sorted(ways, reverse=bool(number % 2)):
            for stage, asset in zip(STAGES, assets[way], strict=True):
                began = time.perf_counter()
                self._publish(instance, asset.key, tags if way == "lookback" else {})
                took = time.perf_counter() - began
                found.append(StageRun(way, stage, number, took, self._used()))
        return found

    def _publish(self, instance: dg.DagsterInstance, key: dg.AssetKey, tags: dict[str, str]) -> None:
        done = self._job.execute_in_process(
            instance=instance, asset_selection=[key], run_config=_QUIET, tags=tags
        )
        outcome = Reconciler.of(self._lake, instance, self._graph).run_one(done.run_id)
        if outcome is None or outcome.action is not PublicationAction.PUBLISHED:
            raise SimulationFailed(
                f"{key.to_user_string()} was not published: {outcome}.", run_id=done.run_id
            )

    def _session(self) -> _Session:
        return _Session(self._lake)

    def _table(self, name: str) -> str:
        return f"nessie.{self._namespace}.{name}"


class _Session:
    """A session on `main`, ended with the block."""

    def __init__(self, lake: Lakehouse) -> None:
        self._session = lake.spark_session(MAIN)

    def __enter__(self) -> SparkSession:
        return self._session

    def __exit__(self, *_: object) -> None:
        self._session.stop()
