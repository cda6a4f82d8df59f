"""Real processes that are killed or cancelled: nothing on `main`, their branches are reaped, their files go."""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest

from branchlake_dagster.cleanup.jobs import reap_branches, sweep_discarded
from branchlake_dagster.cleanup.reaper_rules import ReapingAction
from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.heartbeats import HeartbeatStore
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_branch import ensure_main_has_commit, run_branch_name
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.harness import Project, retry

pytestmark = pytest.mark.chaos

_PROJECT = "branchlake_dagster_tests.cleanup.killed_project"


class Run:
    """A run in a process of its own, at work on its second asset."""

    def __init__(self, lake: Lakehouse, namespace: str, folder: Path, *, dies: str = "") -> None:
        self.lake = lake
        ready = folder / "ready"
        home = folder / "dagster"
        home.mkdir()
        (home / "dagster.yaml").write_text("telemetry: {enabled: false}")
        self.environment = {
            **os.environ,
            "DAGSTER_HOME": str(home),
            "TEST_NAMESPACE": namespace,
            "TEST_READY": str(ready),
            "TEST_DIES": dies,
            "BRANCHLAKE_STATE_DIR": str(lake.settings.state_dir),
            "BRANCHLAKE_HEARTBEAT_INTERVAL_S": "0.3",
            "BRANCHLAKE_DISCARD_GRACE_H": str(lake.settings.discard_grace_h),
        }
        self.main = lake.nessie.reference(MAIN).hash
        self.process = subprocess.Popen([sys.executable, "-m", _PROJECT], env=self.environment)
        until(lambda: (ready.exists() and ready.read_text() != "") or self.process.poll() is not None, 300)
        if dies:
            self.process.wait(300)
        else:
            assert self.process.poll() is None, "the run ended too early"
        self.run_id = ready.read_text()
        self.branch = run_branch_name(self.run_id)
        os.environ["DAGSTER_HOME"] = str(home)

    def end(self, how: signal.Signals) -> None:
        # Python loses an interrupt that it raises inside a finaliser; whoever cancels then asks again.
        for _ in range(5):
            self.process.send_signal(how)
            try:
                self.process.wait(60)
                return
            except subprocess.TimeoutExpired:
                continue
        raise AssertionError(f"the run goes on after {how.name}")

    def status(self, instance: dg.DagsterInstance) -> dg.DagsterRunStatus:
        run = instance.get_run_by_id(self.run_id)
        assert run is not None
        return run.status

    def tags(self, instance: dg.DagsterInstance) -> dict[str, str]:
        run = instance.get_run_by_id(self.run_id)
        assert run is not None
        return dict(run.tags)

    def files(self) -> list[Path]:
        root = Path(self.lake.settings.warehouse_uri.removeprefix("file://"))
        namespace = self.environment["TEST_NAMESPACE"]
        return [path for path in (root / namespace).rglob("*") if path.is_file()]


def until(condition: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def own_lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lakehouse]:
    """A lake of its own, so that sweeping meets nobody else's tags."""
    state = tmp_path_factory.mktemp("killed")
    lake = Lakehouse(Settings(state_dir=state, session_kind="classic", discard_grace_h=1e-6))
    ensure_main_has_commit(lake.nessie)
    yield lake
    lake.servers.stop_all()


@pytest.fixture
def run(own_lake: Lakehouse, namespace: str, tmp_path: Path) -> Iterator[Run]:
    home = os.environ.get("DAGSTER_HOME")
    found = Run(own_lake, namespace, tmp_path)
    yield found
    found.process.kill()
    found.process.wait()
    os.environ.pop("DAGSTER_HOME")
    if home is not None:
        os.environ["DAGSTER_HOME"] = home


def test_a_killed_run_is_found_dead_and_leaves_nothing(own_lake: Lakehouse, run: Run) -> None:
    with dg.DagsterInstance.get() as instance:
        # While it works, it beats and is left alone.
        (kept,) = reap_branches(own_lake, instance)
        assert (kept.action, kept.reason.code) == (ReapingAction.KEEP, "writer_alive")
        run.end(signal.SIGKILL)
        assert run.status(instance) is dg.DagsterRunStatus.STARTED
        store = HeartbeatStore.from_settings(own_lake.settings)
        assert [beat.branch for beat in store.all()] == [run.branch]
        time.sleep(1)
        (ended,) = reap_branches(own_lake, instance)
        assert (ended.branch, ended.action) == (run.branch, ReapingAction.DISCARD)
        assert ended.reason.code == "writer_dead"
        # Dagster alone would take it for running for ever.
        assert run.status(instance) is dg.DagsterRunStatus.FAILURE
        tags = run.tags(instance)
        assert tags[RunTag.VERDICT] == "fenced"
        assert "its branch was ended: Its writer is dead" in tags[RunTag.REASON]
        records = instance.get_records_for_run(run.run_id).records
        told = [record.event_log_entry.message for record in records]
        assert any(f"no heartbeat of process {run.process.pid} on " in message for message in told)
        assert store.all() == ()
        assert own_lake.nessie.reference(MAIN).hash == run.main
        assert run.files()
        (swept,) = sweep_discarded(own_lake, instance)
        assert swept.done
        assert run.files() == []
        assert {ref.name for ref in own_lake.nessie.references()} == {MAIN}


def test_a_cancelled_run_leaves_nothing(own_lake: Lakehouse, run: Run) -> None:
    run.end(signal.SIGINT)
    assert HeartbeatStore.from_settings(own_lake.settings).all() == ()
    with dg.DagsterInstance.get() as instance:
        assert run.status(instance) in (dg.DagsterRunStatus.CANCELED, dg.DagsterRunStatus.FAILURE)
        (ended,) = reap_branches(own_lake, instance)
        assert (ended.branch, ended.action) == (run.branch, ReapingAction.DISCARD)
        list(sweep_discarded(own_lake, instance))
    assert own_lake.nessie.reference(MAIN).hash == run.main
    assert run.files() == []
    assert {ref.name for ref in own_lake.nessie.references()} == {MAIN}


def test_a_killed_run_is_continued_by_a_retry(
    own_lake: Lakehouse, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.end(signal.SIGKILL)
    time.sleep(1)
    # As in the UI's code server, which has the definitions.
    for name in ("TEST_NAMESPACE", "BRANCHLAKE_STATE_DIR"):
        monkeypatch.setenv(name, run.environment[name])
    monkeypatch.delitem(sys.modules, _PROJECT, raising=False)  # it reads its namespace when it is imported
    definitions = importlib.import_module(_PROJECT).defs
    with dg.DagsterInstance.get() as instance:
        list(reap_branches(own_lake, instance))
        again = retry(Project(own_lake, instance, definitions), run.run_id)
        tags = run.tags(instance)
        assert tags[RunTag.VERDICT] == "continued"
        assert again in tags[RunTag.REASON]
        namespace = run.environment["TEST_NAMESPACE"]
        for name in ("first", "second"):
            table = own_lake.catalog(run_branch_name(again)).load_table((namespace, name))
            assert table.scan().to_arrow().num_rows == 1


def ticks(lake: Lakehouse, instance: dg.DagsterInstance) -> Iterator[str]:
    """What the sensor says, tick by tick, 0.4 s apart."""
    definition = (
        branchlake_definitions(lake.settings).get_repository_def().get_sensor_def("dead_writer_sensor")
    )
    resource = LakehouseResource.from_settings(lake.settings)
    cursor = None
    while True:
        with dg.build_sensor_context(
            instance=instance, cursor=cursor, resources={"lakehouse": resource}
        ) as context:
            told = definition.evaluate_tick(context)
        cursor = told.cursor
        yield told.skip_message or ""
        time.sleep(0.4)


def test_a_killed_run_ends_by_itself_while_a_healthy_one_works_on(own_lake: Lakehouse, run: Run) -> None:
    """No code server knows of this process: only its heartbeat tells that it is gone."""
    with dg.DagsterInstance.get() as instance:
        watching = ticks(own_lake, instance)
        assert {next(watching) for _ in range(4)} == {"Every writer sends heartbeats, or is being observed."}
        run.end(signal.SIGKILL)
        for _ in range(12):
            if "dead" in (told := next(watching)):
                break
        assert f"1 dead: process {run.process.pid} on " in told
        assert f"{run.branch}: discarded, its writer is dead" in told
        assert run.status(instance) is dg.DagsterRunStatus.FAILURE
        assert run.tags(instance)[RunTag.VERDICT] == "fenced"
        assert next(watching) == "Every writer sends heartbeats, or is being observed."
        assert HeartbeatStore.from_settings(own_lake.settings).all() == ()
        assert own_lake.nessie.reference(MAIN).hash == run.main
        assert run.files()
        list(sweep_discarded(own_lake, instance))
        assert run.files() == []
        assert not [ref.name for ref in own_lake.nessie.references() if run.run_id in ref.name]


@pytest.mark.parametrize(
    "place", [pytest.param("before its branch", marks=pytest.mark.soak), "after its last step"]
)
def test_a_run_that_dies_outside_of_its_steps_is_missed_too(
    own_lake: Lakehouse, namespace: str, tmp_path: Path, place: str
) -> None:
    found = Run(own_lake, namespace, tmp_path, dies=place)
    with dg.DagsterInstance.get() as instance:
        assert found.status(instance) is dg.DagsterRunStatus.STARTED
        watching = ticks(own_lake, instance)
        for _ in range(12):
            if "dead" in (told := next(watching)):
                break
        assert "1 dead: process" in told
        assert found.status(instance) is dg.DagsterRunStatus.FAILURE
        assert HeartbeatStore.from_settings(own_lake.settings).all() == ()
        left = {ref.name for ref in own_lake.nessie.references() if found.run_id in ref.name}
        assert left == (set() if place == "before its branch" else {f"discarded-{found.run_id}"})
        list(sweep_discarded(own_lake, instance))
