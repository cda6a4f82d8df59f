"""Both ways to run an ingestion, through a real daemon: what its sensors start, and how a live run ends."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path

import dagster as dg
import pytest
import requests

from branchlake_dagster.bench.launched_run import start_sensor
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.launching.worker import WorkerProcess
from branchlake_dagster.runs.branch_owner import BatchBranch
from branchlake_dagster.runs.heartbeats import HeartbeatStore
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.daemon import daemon_of, wait_for
from branchlake_dagster_tests.ingest.histories.tokens import ingestion
from branchlake_dagster_tests.ingest.project import NAME, TOPICS
from branchlake_dagster_tests.ingest.test_live import ids, record, run_branches
from branchlake_dagster_tests.suite.kafka import Broker, as_environment
from branchlake_dagster_tests.suite.soak import soaking

pytestmark = [pytest.mark.daemon, pytest.mark.timeout(600)]

MODULE = "branchlake_dagster_tests.ingest.project"
TERMINATE = "mutation ($of: String!) { terminateRun(runId: $of) { __typename } }"


def terminated(url: str, run: dg.DagsterRun) -> bool:
    """Whether the UI takes the order."""
    told = {"query": TERMINATE, "variables": {"of": run.run_id}}
    ((_, reply),) = requests.post(f"{url}/graphql", json=told, timeout=60).json()["data"].items()
    return str(reply["__typename"]) == "TerminateRunSuccess"


def stop_sensor(instance: dg.DagsterInstance, name: str) -> None:
    state = next(one for one in instance.all_instigator_state() if one.name == name)
    instance.update_instigator_state(state.with_status(type(state.status).STOPPED))


def begun_by(lake: Lakehouse, run: dg.DagsterRun) -> list[str]:
    """The branches of a live run's batches that are still there."""
    batches = {name: BatchBranch.from_name(name) for name in run_branches(lake)}
    return [name for name, batch in batches.items() if batch and batch.run_id == run.run_id]


def kill(run: dg.DagsterRun) -> None:
    worker = WorkerProcess.from_tag(run.tags[RunTag.WORKER])
    assert worker is not None
    os.kill(worker.pid, signal.SIGKILL)


def test_sensors_start_batches_and_keep_a_live_run_going(
    lakehouse: Lakehouse, spark_session: object, kafka: Broker, tmp_path: Path
) -> None:
    topic = kafka.topic(partitions=2)
    ingest = ingestion([topic], f"i{uuid.uuid4().hex[:8]}")
    more = {NAME: ingest.name, TOPICS: topic, **as_environment(kafka.cluster)}
    batch, live = f"ingest_{ingest.name}_sensor", f"ingest_{ingest.name}_live_sensor"

    def sent_and_there(*numbers: int) -> None:
        kafka.send(topic, [record(number) for number in numbers])
        wait_for(
            lambda: (
                lakehouse.catalog("main").table_exists((ingest.name, "a"))
                and ids(lakehouse, ingest, "a") == list(range(1, numbers[-1] + 1))
            )
        )

    with (
        daemon_of(MODULE, lakehouse, ingest.name, tmp_path, more=more) as url,
        dg.DagsterInstance.get() as instance,
    ):

        def runs(job: str) -> list[dg.DagsterRun]:
            return list(instance.get_runs(dg.RunsFilter(job_name=f"ingest_{ingest.name}_{job}")))

        def at_work(not_one_of: list[dg.DagsterRun]) -> dg.DagsterRun:
            known = {one.run_id for one in not_one_of}
            (found,) = wait_for(
                lambda: [
                    one
                    for one in runs("live")
                    if one.run_id not in known and one.status is dg.DagsterRunStatus.STARTED
                ]
            )
            return found

        start_sensor(url, MODULE, batch)
        sent_and_there(1, 2)
        wait_for(lambda: all(one.is_finished for one in runs("job")))
        stop_sensor(instance, batch)
        assert [one.is_success for one in runs("job")] == [True]

        start_sensor(url, MODULE, live)
        first = at_work([])
        sent_and_there(3)
        kill(first)
        second = at_work([first])
        ended = instance.get_run_by_id(first.run_id)
        assert ended is not None
        assert ended.is_failure
        sent_and_there(4, 5)

        def told() -> bool:
            found = instance.fetch_materializations(dg.AssetKey([ingest.name, "a"]), limit=1).records[0]
            assert found.asset_materialization is not None
            metadata = found.asset_materialization.metadata
            return found.run_id == second.run_id and metadata["branchlake/rows_of_batch"].value > 0

        wait_for(told)
        stop_sensor(instance, live)
        kafka.send(topic, [record(6)])
        assert terminated(url, second)
        wait_for(lambda: not [one for one in runs("live") if not one.is_finished])
        ended = instance.get_run_by_id(second.run_id)
        assert ended is not None
        assert ended.status is dg.DagsterRunStatus.CANCELED
        assert ids(lakehouse, ingest, "a") in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6])
        runs_after_kill = [second]
        if soaking():  # The sensor has replaced a run once already, after the kill.
            start_sensor(url, MODULE, live)
            third = at_work([first, second])
            runs_after_kill.append(third)
            sent_and_there(7)
            assert terminated(url, third)
            wait_for(lambda: instance.get_run_by_id(third.run_id).is_finished)  # type: ignore[union-attr]
    # What was killed may have been in the middle of a batch; that one is the reaper's.
    assert [begun_by(lakehouse, run) for run in runs_after_kill] == [[] for _ in runs_after_kill]
    assert len(begun_by(lakehouse, first)) <= 1
    # So is the beat of the killed one, which the sensor of dead writers takes when it has been silent for long.
    mine = {one.run_id for one in runs_after_kill}
    assert not [
        beat for beat in HeartbeatStore.from_settings(lakehouse.settings).all() if beat.run_id in mine
    ]
