"""What only a real daemon does, on one that all these tests share: its processes are what takes long to start.

Automation by publications, a backfill through all stages, both ways to run an ingestion, and Ctrl-C at the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest
import requests
from click.testing import CliRunner

from branchlake_dagster.bench.launched_run import launch_run, start_sensor
from branchlake_dagster.cli.dagster_home import dagster_dev
from branchlake_dagster.cli.main import main
from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.launching.worker import WorkerProcess
from branchlake_dagster.runs.branch_owner import BatchBranch
from branchlake_dagster.runs.heartbeats import HeartbeatStore
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.automation.automation_project import NAMESPACE
from branchlake_dagster_tests.daemon import home_of, launch, wait_for
from branchlake_dagster_tests.dagster_internals import InstigatorState
from branchlake_dagster_tests.incremental.backfill.changed_pipeline import (
    DAYS,
    publish_unchanged_pipeline,
    sums_of,
)
from branchlake_dagster_tests.ingest.histories.tokens import ingestion
from branchlake_dagster_tests.ingest.project import NAME, TOPICS
from branchlake_dagster_tests.ingest.test_live import ids, record, run_branches
from branchlake_dagster_tests.suite.kafka import Broker, as_environment
from branchlake_dagster_tests.suite.soak import soaking

pytestmark = [pytest.mark.daemon, pytest.mark.timeout(1200)]

MODULE = "branchlake_dagster_tests.one_daemon_project"
AUTOMATION_SENSOR = "publication_automation_sensor"
TERMINATE = "mutation ($of: String!) { terminateRun(runId: $of) { __typename } }"


@dataclass
class OneDaemon:
    """The shared `dagster dev`, and the names of what its code location has."""

    url: str
    instance: dg.DagsterInstance
    release: Path
    """Runs of the job `waiting` wait for this file."""
    automation: str
    backfill: str
    ingest: Ingest
    topic: str
    _processes: ExitStack

    def end(self) -> None:
        """End it as Ctrl-C does."""
        self._processes.close()


@pytest.fixture(scope="module")
def daemon(
    lakehouse: Lakehouse, kafka: Broker, spark_session: object, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OneDaemon]:
    home = tmp_path_factory.mktemp("daemon")
    unique = uuid.uuid4().hex[:8]
    automation, backfilled, release = f"a{unique}", f"b{unique}", home / "release"
    topic = kafka.topic(partitions=2)
    ingest = ingestion([topic], f"i{unique}")
    # Before the daemon's sensor sees what is to be consumed.
    publish_unchanged_pipeline(lakehouse, backfilled)
    more = {
        NAMESPACE: automation,
        NAME: ingest.name,
        TOPICS: topic,
        "LAUNCH_TEST_RELEASE": str(release),
        **as_environment(kafka.cluster),
    }
    sys.modules.pop(MODULE, None)  # it reads its environment when it is imported
    with (
        home_of(lakehouse, backfilled, home, more=more) as environment,
        dg.DagsterInstance.get() as instance,
        ExitStack() as processes,
    ):
        url = processes.enter_context(dagster_dev(MODULE, home=home, environment=environment))
        yield OneDaemon(url, instance, release, automation, backfilled, ingest, topic, processes)


# -- a backfill that is begun --------------------------------------------------------------------------


def backfill(*arguments: str) -> Any:
    result = CliRunner().invoke(main, ["backfill", *arguments, "-m", MODULE, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def backfill_number(daemon: OneDaemon, lakehouse: Lakehouse) -> str:
    """A backfill that has been planned and begun. The daemon takes it up within half a minute, which other tests use."""
    namespace = daemon.backfill
    assert sums_of(lakehouse, namespace) == [22, 22]
    planned = backfill("plan", f"{namespace}/events")
    assert [(one["asset"].split("/")[1], one["partitions"], one["by_itself"]) for one in planned] == [
        ("events", [*DAYS], False),
        ("daily", [*DAYS], True),
        ("report", None, False),
        ("total", None, True),
    ]
    return str(backfill("run", f"{namespace}/events")["backfill"])


# -- automation ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("backfill_number")
def test_the_daemon_requests_the_downstream_of_what_it_published(
    daemon: OneDaemon, lakehouse: Lakehouse
) -> None:
    instance, namespace = daemon.instance, daemon.automation

    def state() -> InstigatorState | None:
        return next((s for s in instance.all_instigator_state() if s.name == AUTOMATION_SENSOR), None)

    def evaluated() -> bool:
        found = state()
        return found is not None and bool(getattr(found.instigator_data, "cursor", None))

    def ticks() -> int:
        found = state()
        return len(instance.get_ticks(found.instigator_origin_id, found.selector_id)) if found else 0

    def runs_of(name: str) -> list[dg.DagsterRun]:
        key = dg.AssetKey([namespace, name])
        return [run for run in instance.get_runs() if key in (run.asset_selection or ())]

    wait_for(evaluated)
    blocked = launch(daemon.url, MODULE, namespace, "blocked")
    launch(daemon.url, MODULE, namespace, "prices")
    wait_for(lambda: lakehouse.catalog().table_exists((namespace, "report")))
    rows = lakehouse.catalog().load_table((namespace, "report")).scan().to_arrow().to_pylist()
    assert rows == [{"n": 3}]
    wait_for(lambda: instance.get_run_by_id(blocked).tags.get(RunTag.VERDICT) == "blocked")
    (run,) = runs_of("report")
    assert run.tags["dagster/sensor_name"] == AUTOMATION_SENSOR
    before = ticks()
    wait_for(lambda: ticks() > before + 1)
    assert len(runs_of("report")) == 1
    assert runs_of("never") == []


# -- an ingestion --------------------------------------------------------------------------------------


def terminated(url: str, run: dg.DagsterRun) -> bool:
    """Whether the UI takes the order."""
    told = {"query": TERMINATE, "variables": {"of": run.run_id}}
    ((_, reply),) = requests.post(f"{url}/graphql", json=told, timeout=60).json()["data"].items()
    return str(reply["__typename"]) == "TerminateRunSuccess"


def stop_sensor(instance: dg.DagsterInstance, name: str) -> None:
    """A tick that is under way may still launch a run and store its state; so the end of it is awaited."""

    def is_stopped() -> bool:
        state = next(one for one in instance.all_instigator_state() if one.name == name)
        if state.is_running:
            instance.update_instigator_state(state.with_status(type(state.status).STOPPED))
            return False
        ticks = instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=1)
        return all(tick.status.value != "STARTED" for tick in ticks)

    wait_for(is_stopped)


def begun_by(lake: Lakehouse, run: dg.DagsterRun) -> list[str]:
    """The branches of a live run's batches that are still there."""
    batches = {name: BatchBranch.from_name(name) for name in run_branches(lake)}
    return [name for name, batch in batches.items() if batch and batch.run_id == run.run_id]


def worker_of(instance: dg.DagsterInstance, run_id: str) -> WorkerProcess:
    run = instance.get_run_by_id(run_id)
    worker = WorkerProcess.from_tag(run.tags[RunTag.WORKER]) if run else None
    assert worker is not None
    return worker


def test_sensors_start_batches_and_keep_a_live_run_going(
    daemon: OneDaemon, lakehouse: Lakehouse, kafka: Broker
) -> None:
    """Both ways to run an ingestion: what its sensors start, and how a live run ends."""
    instance, ingest, url, topic = daemon.instance, daemon.ingest, daemon.url, daemon.topic
    batch, live = f"ingest_{ingest.name}_sensor", f"ingest_{ingest.name}_live_sensor"

    def sent_and_there(*numbers: int) -> None:
        kafka.send(topic, [record(number) for number in numbers])
        wait_for(
            lambda: (
                lakehouse.catalog("main").table_exists((ingest.name, "a"))
                and ids(lakehouse, ingest, "a") == list(range(1, numbers[-1] + 1))
            )
        )

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
    os.kill(worker_of(instance, first.run_id).pid, signal.SIGKILL)
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
    processes = [worker_of(instance, second.run_id)]
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
        stop_sensor(instance, live)
        processes.append(worker_of(instance, third.run_id))
        assert terminated(url, third)
        wait_for(lambda: instance.get_run_by_id(third.run_id).is_finished)
    wait_for(lambda: not any(one.is_running() for one in processes))
    # What was killed may have been in the middle of a batch; that one is the reaper's.
    assert [begun_by(lakehouse, run) for run in runs_after_kill] == [[] for _ in runs_after_kill]
    assert len(begun_by(lakehouse, first)) <= 1
    # So is the beat of the killed one, which the sensor of dead writers takes when it has been silent for long.
    mine = {one.run_id for one in runs_after_kill}
    assert not [
        beat for beat in HeartbeatStore.from_settings(lakehouse.settings).all() if beat.run_id in mine
    ]


# -- the end of the backfill ---------------------------------------------------------------------------


def test_a_change_of_the_code_goes_through_all_stages_unaided(
    daemon: OneDaemon, lakehouse: Lakehouse, backfill_number: str
) -> None:
    """Its first stage runs, and the others follow by themselves."""
    namespace, number = daemon.backfill, backfill_number

    def sums() -> list[int]:
        return sums_of(lakehouse, namespace)

    wait_for(lambda: sums() == [7 * 22, 7 * 22], seconds=300)
    # The command reads the code location anew each time.
    wait_for(lambda: all(one["told"] for one in backfill("status", number)), seconds=60, every_s=2.0)
    wait_for(lambda: not any(one["running"] for one in backfill("status", number)), seconds=120, every_s=2.0)
    runs = [
        run
        for run in daemon.instance.get_runs()
        if any(key.path[0] == namespace for key in run.asset_selection or ())
    ]
    assert all(run.is_success for run in runs)
    by_asset = {one.path[1]: 0 for run in runs for one in run.asset_selection or ()}
    for run in runs:
        for one in run.asset_selection or ():
            by_asset[one.path[1]] += 1
    assert by_asset.keys() == {"events", "daily", "total"}
    assert (by_asset["events"], by_asset["daily"]) == (2, 2)
    status = {one["asset"].split("/")[1]: one for one in backfill("status", number)}
    assert (status["events"]["done"], status["daily"]["done"], status["total"]["done"]) == (2, 2, 1)
    assert "launch it" in status["report"]["told"]
    assert backfill("plan", f"{namespace}/events") == []


# -- the end -------------------------------------------------------------------------------------------


def test_ctrl_c_leaves_nothing(daemon: OneDaemon) -> None:
    """A run that is in the middle of its step ends with the daemon, and the template that forked it."""
    run_id = launch_run(daemon.url, MODULE, "waiting")
    wait_for(Path(f"{daemon.release}.waiting").exists)
    worker = worker_of(daemon.instance, run_id)
    template = psutil.Process(psutil.Process(worker.pid).ppid())
    daemon.end()
    wait_for(lambda: not template.is_running() or template.status() == psutil.STATUS_ZOMBIE)
    wait_for(lambda: not worker.is_running())
    run = daemon.instance.get_run_by_id(run_id)
    assert run is not None
    assert run.status in (dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
