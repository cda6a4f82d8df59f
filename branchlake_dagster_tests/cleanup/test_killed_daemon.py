"""A machine that went down: worker, code server and daemon are gone at once, and come back without the run.

A worker killed alone is ended by the code server that started it, within two seconds; measured with the same
project.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import requests

from branchlake_dagster.cli.dagster_home import dagster_dev, dagster_home
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.heartbeats import Heartbeat, HeartbeatStore
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import PENDING
from branchlake_dagster.stored_names import RunTag

pytestmark = [pytest.mark.daemon, pytest.mark.timeout(1200)]

MODULE = "branchlake_dagster_tests.cleanup.killed_project"
LAUNCH = """
mutation Launch($params: ExecutionParams!) {
  launchRun(executionParams: $params) { __typename ... on LaunchRunSuccess { run { runId } } }
}
"""


def wait_for(what: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_run_that_died_with_its_code_server_ends_by_itself(
    lakehouse: Lakehouse, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {
        "BRANCHLAKE_STATE_DIR": str(lakehouse.settings.state_dir),
        "BRANCHLAKE_HEARTBEAT_INTERVAL_S": "0.5",
        "BRANCHLAKE_WATCH_INTERVAL_S": "1",
        # Of a forked worker the daemon sees itself that it is gone (test_launcher); the heartbeat is for a
        # worker whose process nobody can see.
        "BRANCHLAKE_RUN_LAUNCHER": "dagster",
        "TEST_NAMESPACE": namespace,
        "TEST_READY": str(tmp_path / "ready"),
    }
    for name, value in {**environment, "DAGSTER_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    dagster_home(lakehouse.settings)
    store = HeartbeatStore.from_settings(lakehouse.settings)

    def launched(url: str) -> Heartbeat:
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
        reply = requests.post(f"{url}/graphql", json=body, timeout=300).json()
        run_id = str(reply["data"]["launchRun"]["run"]["runId"])
        ready = tmp_path / "ready"
        wait_for(lambda: ready.exists() and ready.read_text() == run_id, 300)
        return next(beat for beat in store.all() if beat.run_id == run_id)

    with dagster_dev(MODULE, home=tmp_path, environment=environment) as url:
        dead = launched(url)
        # The code server first: it would end the run.
        os.kill(parent_of(dead.pid), signal.SIGKILL)
        os.kill(dead.pid, signal.SIGKILL)
    with dg.DagsterInstance.get() as here, dagster_dev(MODULE, home=tmp_path, environment=environment):

        def ended() -> bool:
            run = here.get_run_by_id(dead.run_id)
            return run is not None and run.status is dg.DagsterRunStatus.FAILURE

        wait_for(ended, 300)
        records = here.get_records_for_run(dead.run_id).records
        told = [record.event_log_entry.message for record in records]
        assert any(f"no heartbeat of process {dead.pid} on " in message for message in told)
        wait_for(lambda: here.get_run_by_id(dead.run_id).tags[RunTag.VERDICT] != PENDING, 300)
    names = {ref.name for ref in lakehouse.nessie.references()}
    assert run_branch_name(dead.run_id) not in names
