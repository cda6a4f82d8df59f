"""A worker killed under a real daemon: what Dagster's launcher ends, and what only the heartbeat tells."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import requests

from branchlake_dagster.branching.beats import Beat, HeartbeatStore
from branchlake_dagster.branching.run_branch import branch_name
from branchlake_dagster.cli.dagster_dev import dagster_dev
from branchlake_dagster.cli.home import dagster_home
from branchlake_dagster.lakehouse.lakehouse import Lakehouse

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

MODULE = "branchlake_dagster_tests.publication.killed_project"
LAUNCH = """
mutation Launch($params: ExecutionParams!) {
  launchRun(executionParams: $params) { __typename ... on LaunchRunSuccess { run { runId } } }
}
"""
LAUNCHERS_OWN_S = 15.0
"""Longer than Dagster's launcher takes to see the end of a process; it looks every second."""


def wait_for(what: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_dead_worker_ends_with_and_without_its_code_server(
    lakehouse: Lakehouse, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {
        "BRANCHLAKE_STATE_DIR": str(lakehouse.settings.state_dir),
        "BRANCHLAKE_HEARTBEAT_INTERVAL_S": "0.5",
        "BRANCHLAKE_WATCH_INTERVAL_S": "1",
        "TEST_NAMESPACE": namespace,
        "TEST_READY": str(tmp_path / "ready"),
    }
    for name, value in {**environment, "DAGSTER_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    dagster_home(lakehouse.settings)
    store = HeartbeatStore.of(lakehouse.settings)

    def launched(url: str) -> Beat:
        """A run at work on its second asset, by its heartbeat."""
        selector = {
            "repositoryLocationName": MODULE,
            "repositoryName": "__repository__",
            "jobName": "__ASSET_JOB",
            "assetSelection": [{"path": [namespace, name]} for name in ("first", "second")],
        }
        body = {
            "query": LAUNCH,
            "variables": {"params": {"selector": selector, "runConfigData": {}}},
        }
        reply = requests.post(f"{url}/graphql", json=body, timeout=60).json()
        run_id = str(reply["data"]["launchRun"]["run"]["runId"])
        ready = tmp_path / "ready"
        wait_for(lambda: ready.exists() and ready.read_text() == run_id, 60)
        return next(beat for beat in store.all() if beat.run_id == run_id)

    with dagster_dev(MODULE, home=tmp_path, environment=environment) as url, dg.DagsterInstance.get() as here:

        def failed(beat: Beat) -> bool:
            run = here.get_run_by_id(beat.run_id)
            return run is not None and run.status is dg.DagsterRunStatus.FAILURE

        first = launched(url)
        os.kill(first.pid, signal.SIGKILL)
        wait_for(lambda: failed(first), LAUNCHERS_OWN_S)

        second = launched(url)
        os.kill(parent_of(second.pid), signal.SIGKILL)
        os.kill(second.pid, signal.SIGKILL)
        wait_for(lambda: failed(second), 90)
        run = here.get_run_by_id(second.run_id)
        assert run is not None
        wait_for(
            lambda: branch_name(second.run_id) not in {ref.name for ref in lakehouse.nessie.references()}, 30
        )
        records = here.get_records_for_run(second.run_id).records
        told = [record.event_log_entry.message for record in records]
        assert any(f"no heartbeat of process {second.pid} on " in message for message in told)
