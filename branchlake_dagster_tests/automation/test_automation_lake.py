"""Automation on publication with real runs, the real publisher and real Iceberg tables."""

from __future__ import annotations

from typing import Any

import dagster as dg
import polars as pl

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.conditions import on_publication
from branchlake_dagster.publication.new_publications import published_sensor
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import AssetMetadata, EventMetadata
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster.undo.find_publication import find_publication
from branchlake_dagster.undo.publication_undo import PublicationUndo
from branchlake_dagster.undo.report import report_undo
from branchlake_dagster.undo.result import Undo
from branchlake_dagster_tests.dagster_internals import AssetDaemonCursor
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.sources import Source
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

DAYS = dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-08-11")


def graph(
    namespace: str, *, daily: bool = False, passed: list[bool] | None = None
) -> tuple[dg.AssetsDefinition, dg.AssetsDefinition, dg.AssetChecksDefinition]:
    """An upstream with a check that answers `passed` run by run, and a downstream that follows it."""
    answers = passed if passed is not None else []

    def frame(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"day": [context.partition_key if daily else ""], "n": [1]})

    options: dict[str, Any] = {"partitions_def": DAYS} if daily else {}
    metadata = table_metadata(partition_by="day" if daily else None)

    @dg.asset(key=[namespace, "up"], metadata=metadata, **options)
    def up(context) -> pl.DataFrame:
        return frame(context).with_columns(pl.col("day").str.to_date(strict=False))

    @dg.asset(
        key=[namespace, "down"],
        deps=[up],
        metadata=table_metadata(partition_by="day" if daily else None, require_checks=False),
        automation_condition=on_publication(),
        **options,
    )
    def down(context) -> pl.DataFrame:
        return frame(context).with_columns(pl.col("day").str.to_date(strict=False))

    @dg.asset_check(asset=up, metadata={AssetMetadata.CHECK_SCOPE: "rows"})
    def good() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=answers.pop(0) if answers else True)

    return up, down, good


def undo(lake: Lakehouse, run_id: str) -> Undo:
    return PublicationUndo.of_lake(lake).undo(find_publication(lake.nessie, run_id))


class Evaluator:
    """The sensor's memory between two ticks."""

    def __init__(self, p: Project, down: dg.AssetsDefinition) -> None:
        self._p = p
        self._key = down.key
        self._cursor: AssetDaemonCursor | None = None

    def __call__(self) -> set[str | None]:
        result = dg.evaluate_automation_conditions(
            self._p.definitions, self._p.instance, dg.AssetSelection.all(), cursor=self._cursor
        )
        self._cursor = result.cursor
        return set(result.get_requested_partitions(self._key))


def test_the_downstream_is_requested_when_main_has_the_upstream(lakehouse: Lakehouse, namespace: str) -> None:
    up, down, good = graph(namespace)
    with project(lakehouse, up, down, good) as p:
        requested = Evaluator(p, down)
        assert requested() == set()
        run = p.run(up.key)
        assert requested() == set()
        assert p.settle(run).state is RunState.PUBLISHED
        assert requested() == {None}
        assert requested() == set()
        # The requested run is published itself, which is nobody's upstream.
        p.settle(p.run(down.key))
        assert requested() == set()


def test_blocked_and_failed_runs_request_nothing(lakehouse: Lakehouse, namespace: str) -> None:
    up, down, good = graph(namespace, passed=[False])

    @dg.asset(key=[namespace, "boom"], deps=[up])
    def boom() -> None:
        raise RuntimeError("no")

    with project(lakehouse, up, down, good, boom) as p:
        requested = Evaluator(p, down)
        requested()
        assert p.settle(p.run(up.key)).state is RunState.BLOCKED
        assert requested() == set()
        assert p.settle(p.run(up.key, boom.key, ok=False)).state is RunState.DISCARDED
        assert requested() == set()
        assert p.settle(p.run(up.key)).state is RunState.PUBLISHED
        assert requested() == {None}


def test_a_refused_run_requests_nothing(lakehouse: Lakehouse, namespace: str) -> None:
    up, down, good = graph(namespace)
    with project(lakehouse, up, down, good) as p:
        requested = Evaluator(p, down)
        p.settle(p.run(up.key))
        requested()
        first, second = p.run(up.key), p.run(up.key)
        p.settle(first)
        assert requested() == {None}
        assert p.settle(second).state is RunState.REFUSED
        assert requested() == set()


def test_a_run_of_both_requests_nothing(lakehouse: Lakehouse, namespace: str) -> None:
    up, down, good = graph(namespace)
    with project(lakehouse, up, down, good) as p:
        requested = Evaluator(p, down)
        requested()
        assert p.settle(p.run()).state is RunState.PUBLISHED
        assert requested() == set()


def test_the_next_request_waits_until_the_last_one_is_judged(lakehouse: Lakehouse, namespace: str) -> None:
    """Without waiting the second run of `down` would not see the first one's rows, and be refused."""
    up, down, good = graph(namespace)
    with project(lakehouse, up, down, good) as p:
        requested = Evaluator(p, down)
        requested()
        p.settle(p.run(up.key))
        assert requested() == {None}
        mine = p.run(down.key)
        p.settle(p.run(up.key))
        assert requested() == set()
        assert p.settle(mine).state is RunState.PUBLISHED
        assert requested() == {None}
        assert p.settle(p.run(down.key)).state is RunState.PUBLISHED
        assert requested() == set()


def test_a_backfill_in_many_runs_requests_each_day_once(lakehouse: Lakehouse, namespace: str) -> None:
    up, down, good = graph(namespace, daily=True)
    days = [f"2026-08-0{day}" for day in range(1, 6)]
    with project(lakehouse, up, down, good) as p:
        requested = Evaluator(p, down)
        requested()
        runs = [p.run(up.key, partition=day) for day in days]
        assert requested() == set()
        assert p.settle(runs[0]).state is RunState.PUBLISHED
        assert requested() == {days[0]}
        # The others at once, as the publication sensor finds them: rebased, in one commit.
        outcomes = [one for one in p.reconciler().reconcile_branches() if one.run_id in runs]
        assert {one.state for one in outcomes} == {RunState.PUBLISHED}
        assert requested() == set(days[1:])
        assert requested() == set()


def test_an_undo_requests_the_downstream(lakehouse: Lakehouse, namespace: str) -> None:
    up, down, good = graph(namespace, daily=True)
    day, other_day = "2026-08-01", "2026-08-02"
    with project(lakehouse, up, down, good) as p:
        requested = Evaluator(p, down)
        requested()
        runs = [p.run(up.key, partition=day) for day in (day, other_day)]
        # This run writes the downstream too. Its undo takes both back, but others may have read the upstream.
        runs.append(p.run(partition="2026-08-03"))
        for run in runs:
            p.settle(run)
        assert requested() == {day, other_day}
        assert requested() == set()
        for run in (runs[0], runs[2]):
            report_undo(p.instance, lakehouse, undo(lakehouse, run))
        assert requested() == {day, "2026-08-03"}
        assert requested() == set()


def test_the_undo_of_an_earlier_append_requests_the_downstream(lakehouse: Lakehouse, namespace: str) -> None:
    """Another run has appended to the table since, so it is that run whose result the page shows."""
    orders = Source(namespace)

    @dg.asset(key=[namespace, "down"], deps=[orders.asset], automation_condition=on_publication())
    def down() -> None: ...

    with project(lakehouse, orders.asset, down) as p:
        requested = Evaluator(p, down)
        orders.publish(p, ("a", 1))
        first = str(p.last.run_id)
        orders.publish(p, ("b", 2))
        requested()
        assert report_undo(p.instance, lakehouse, undo(lakehouse, first)) == 1
        assert requested() == {None}
        newest = p.observations(orders.key.path)[0].metadata
        assert (newest[EventMetadata.ON_MAIN].value, newest[EventMetadata.TABLE_ROWS].value) == (True, 1)


def test_the_sensor_on_mains_log_launches_by_partition(lakehouse: Lakehouse, namespace: str) -> None:
    up, down, good = graph(namespace, daily=True)
    job = dg.define_asset_job("down_job", selection=[down.key])
    sensor = published_sensor("follow", assets=[up.key], job=job)
    days = [f"2026-08-0{day}" for day in range(1, 4)]
    with project(lakehouse, up, down, good) as p:
        defs = dg.Definitions.merge(p.definitions, dg.Definitions(jobs=[job], sensors=[sensor]))
        resources = {"lakehouse": (p.definitions.resources or {})["lakehouse"]}

        def tick(cursor: str | None) -> tuple[list[dg.RunRequest], str | None]:
            with dg.build_sensor_context(
                p.instance, cursor=cursor, repository_def=defs.get_repository_def(), resources=resources
            ) as context:
                found = sensor.evaluate_tick(context)
                return list(found.run_requests or []), found.cursor

        _, start = tick(None)
        runs = [p.run(up.key, partition=day) for day in days]
        assert tick(start) == ([], start)
        outcomes = {
            one.run_id: one.state for one in p.reconciler().reconcile_branches() if one.run_id in runs
        }
        assert set(outcomes.values()) == {RunState.PUBLISHED}
        requests, after = tick(start)
        found = {request.partition_key: request.tags["branchlake/after_run"] for request in requests}
        assert found == dict(zip(days, runs, strict=True))
        assert tick(after) == ([], after)
        undone = undo(lakehouse, runs[1])
        (request,), end = tick(after)
        assert (request.partition_key, request.tags["branchlake/after_publication"]) == (
            days[1],
            undone.commit,
        )
        assert request.run_key not in {request.run_key for request in requests}
        assert tick(end) == ([], end)
