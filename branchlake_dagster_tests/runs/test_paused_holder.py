"""The holder of a lease stands still for longer than its time, another one takes over, the first wakes up.

`BRANCHLAKE_TEST_PAUSE_S=11` is the pause of the incident that the rule is from; the suite takes a shorter one.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest

from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.runs.leases import Lease, lease_keys
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import LakeProperty

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

PAUSE_S = float(os.environ.get("BRANCHLAKE_TEST_PAUSE_S", "2.5"))
_PROJECT = "branchlake_dagster_tests.runs.paused_project"


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    while not condition():
        assert process.poll() is None, "the process has ended"
        time.sleep(0.02)


@pytest.fixture
def place(
    lakehouse: Lakehouse, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """The environment of both writers: three missed heartbeats are three quarters of the pause."""
    home = tmp_path / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}")
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("TEST_NAMESPACE", namespace)
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    return {
        **os.environ,
        "BRANCHLAKE_STATE_DIR": str(lakehouse.settings.state_dir),
        "BRANCHLAKE_HEARTBEAT_INTERVAL_S": str(PAUSE_S / 4),
    }


def test_a_holder_that_stood_still_for_too_long_writes_nothing(
    lakehouse: Lakehouse, namespace: str, place: dict[str, str], tmp_path: Path
) -> None:
    # Both import what they need at once; the second one begins when it is told to.
    first, other = (
        subprocess.Popen([sys.executable, "-m", _PROJECT], env={**place, "TEST_WRITER": writer})
        for writer in ("first", "second")
    )
    try:
        until((tmp_path / "holds").exists, first)
        first.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        # The second one asks while the first is thought to be alive, waits out its silence and publishes.
        (tmp_path / "stopped").touch()
        assert other.wait(200) == 0
        second = (tmp_path / "second.run").read_text()
        from branchlake_dagster_tests.runs.paused_project import defs

        graph = defs.get_repository_def().asset_graph
        with dg.DagsterInstance.get() as instance:
            reconciler = Reconciler.from_lake(lakehouse, instance, graph)
            outcome = reconciler.reconcile_run(second)
            assert outcome is not None
            assert outcome.state is RunState.PUBLISHED, outcome
            time.sleep(max(0.0, PAUSE_S - (time.monotonic() - stopped)))

            first.send_signal(signal.SIGCONT)
            (tmp_path / "go").touch()
            assert first.wait(100) == 1
            said = (tmp_path / "first.log").read_text()
            assert "LeaseLost" in said
            assert (
                f"{run_branch_name(second)} has taken over the exclusive lease '{namespace}' with fencing token 2"
                in said
            )
            ended = reconciler.reconcile_run((tmp_path / "holds").read_text())
            assert ended is not None
            assert ended.state is RunState.DISCARDED
    finally:
        for process in (first, other):
            process.kill()
            process.wait()
    found = lakehouse.catalog(MAIN).load_table((namespace, "merged")).scan().to_arrow()
    assert found.column("writer").to_pylist() == ["second"]
    contents = lakehouse.nessie.contents(MAIN, lease_keys([namespace]))
    assert Lease.from_contents(namespace, contents) == Lease(namespace, 2, run_branch_name(second))
    told = [
        entry.commit.properties[LakeProperty.FENCING_TOKEN]
        for entry in lakehouse.nessie.log(MAIN, limit=50)
        if entry.commit.properties.get(LakeProperty.RUN_ID) == second
    ]
    assert told == [f"{namespace}=2"]
