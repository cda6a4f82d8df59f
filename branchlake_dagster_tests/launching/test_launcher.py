"""Runs forked from warm processes, and whatever can end on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dagster as dg
import psutil
import pytest
from dagster import DagsterRunStatus

from branchlake_dagster.internals import dagster_sqlite
from branchlake_dagster.launching import launcher
from branchlake_dagster.launching.worker import WorkerProcess
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.dagster_internals import WorkerStatus
from branchlake_dagster_tests.launching.stack import LOCATION, Stack, stack, wait_for
from branchlake_dagster_tests.suite import soak

pytestmark = pytest.mark.chaos

LAUNCHES = 12 if soak.soaking() else 5


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCH_TEST", "of the launcher")
        with stack(tmp_path_factory.mktemp("launching")) as found:
            yield found


@pytest.fixture
def release(tmp_path: Path) -> Iterator[Path]:
    """A file for which runs wait; it is there at the end of the test at the latest."""
    path = tmp_path / "release"
    yield path
    path.touch()


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_runs_are_forks_of_one_process_that_has_imported_the_code(warm: Stack) -> None:
    runs = [warm.finished(warm.launch("telling")) for _ in range(2)]
    template = warm.template().pid
    for run in runs:
        assert run.status is DagsterRunStatus.SUCCESS
        assert run.tags["imported_by"] == run.tags["parent"] == str(template)
        assert run.tags["pid"] != str(template)
        worker = WorkerProcess.from_tag(run.tags[RunTag.WORKER])
        assert worker is not None
        assert str(worker.pid) == run.tags["pid"]
        assert run.tags["variable"] == "of the launcher"
        assert run.tags["cwd"] == str(Path.cwd())
        assert warm.workers(run.run_id) == 1
    for name in ("pid", "random", "numpy"):
        assert runs[0].tags[name] != runs[1].tags[name]


def test_a_run_has_the_revisions_and_engines_of_its_databases_kept(warm: Stack) -> None:
    run = warm.finished(warm.launch("telling"))
    assert run.tags["revisions_by"] == run.tags["engines_by"] == dagster_sqlite.__name__


def test_a_run_leaves_nothing_beside_its_database(warm: Stack) -> None:
    run_id = warm.launch("telling")
    warm.finished(run_id)
    folder = Path(warm.instance.root_directory, "history", "runs")
    dagster_sqlite.close_kept_connections()  # those of this process
    wait_for(lambda: [path.name for path in folder.glob(f"{run_id}*")] == [f"{run_id}.db"])


def test_what_a_step_prints_is_kept_as_dagster_keeps_it(warm: Stack) -> None:
    run_id = warm.launch("telling")
    warm.finished(run_id)
    records = warm.instance.all_logs(run_id, of_type=dg.DagsterEventType.LOGS_CAPTURED)
    event = records[0].dagster_event
    assert event is not None
    key = [run_id, "compute_logs", event.logs_captured_data.file_key]
    assert warm.instance.compute_log_manager.get_log_data(key).stdout == b"printed by the step\n"


def test_a_step_process_of_the_multiprocess_executor_starts_from_a_fork(warm: Stack) -> None:
    run = warm.finished(warm.launch("telling_elsewhere"))
    assert run.status is DagsterRunStatus.SUCCESS
    worker = WorkerProcess.from_tag(run.tags[RunTag.WORKER])
    assert worker is not None
    assert run.tags["imported_by"] == run.tags["pid"] != str(worker.pid)


def test_a_run_that_a_person_ends_is_canceled(warm: Stack, release: Path) -> None:
    run_id, worker = warm.waiting(release)
    assert warm.launcher.terminate(run_id)
    assert warm.finished(run_id).status is DagsterRunStatus.CANCELED
    wait_for(lambda: not worker.is_running())
    assert not warm.launcher.terminate(run_id)


def test_another_process_of_this_machine_may_end_a_run(warm: Stack, release: Path) -> None:
    """The web server ends what the daemon has launched."""
    run_id, _ = warm.waiting(release)
    with dg.DagsterInstance.from_ref(warm.instance.get_ref()) as other:
        assert other.run_launcher.terminate(run_id)
    assert warm.finished(run_id).status is DagsterRunStatus.CANCELED


def test_a_killed_worker_fails_its_run_with_the_reason(warm: Stack, release: Path) -> None:
    run_id, worker = warm.waiting(release)
    assert warm.launcher.check_run_worker_health(warm.run(run_id)).status is WorkerStatus.RUNNING
    os.kill(worker.pid, signal.SIGKILL)
    assert warm.finished(run_id).status is DagsterRunStatus.FAILURE
    assert any("terminated by signal 9 (SIGKILL)" in text for text in warm.messages(run_id))


def test_a_step_that_ends_its_process_fails_its_run(warm: Stack) -> None:
    run_id = warm.launch("leaving")
    assert warm.finished(run_id).status is DagsterRunStatus.FAILURE
    assert any("unexpectedly exited with code 0" in text for text in warm.messages(run_id))


def test_runs_outlive_a_killed_template_and_the_next_one_gets_another(warm: Stack, release: Path) -> None:
    run_id, worker = warm.waiting(release)
    dead = warm.template()
    dead.kill()
    again = warm.finished(warm.launch("telling"))
    assert again.status is DagsterRunStatus.SUCCESS
    assert again.tags["imported_by"] == str(warm.template().pid) != str(dead.pid)
    assert warm.workers(again.run_id) == 1
    assert worker.is_running()
    release.touch()
    assert warm.finished(run_id).status is DagsterRunStatus.SUCCESS


def test_run_monitoring_fails_a_run_whose_whole_family_is_dead(warm: Stack, release: Path) -> None:
    run_id, worker = warm.waiting(release)
    warm.template().kill()
    os.kill(worker.pid, signal.SIGKILL)
    wait_for(lambda: not worker.is_running())
    assert not warm.run(run_id).is_finished, "nobody was there to tell"
    warm.monitor()
    assert warm.run(run_id).status is DagsterRunStatus.FAILURE
    assert any(f"Process {worker.pid} of the run has ended." in text for text in warm.messages(run_id))


def test_a_run_that_nobody_can_interrupt_any_more_is_canceled(warm: Stack, release: Path) -> None:
    run_id, worker = warm.waiting(release)
    warm.template().kill()
    os.kill(worker.pid, signal.SIGKILL)
    wait_for(lambda: not worker.is_running())
    assert warm.launcher.terminate(run_id)
    assert warm.run(run_id).status is DagsterRunStatus.CANCELED


def test_a_template_that_does_not_answer_gives_no_second_worker(
    warm: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm.finished(warm.launch("telling"))
    stopped = warm.template()
    stopped.suspend()
    monkeypatch.setattr(launcher, "_FORK_TIMEOUT_S", 0.3)
    run_id = warm.create("telling")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher.Templates, "_load_template", once_only(launcher.Templates._load_template))
        warm.start(run_id)
    assert gone(stopped.pid)
    run = warm.finished(run_id)
    assert run.status is DagsterRunStatus.SUCCESS
    assert run.tags["imported_by"] == run.tags["pid"], "it was started in Dagster's way"
    assert RunTag.WORKER not in run.tags
    assert warm.workers(run_id) == 1
    assert any("The run starts with Dagster's own launcher." in text for text in warm.messages(run_id))


def once_only(ready):
    """The second template cannot be had."""
    calls = []

    def asked(*args):
        calls.append(args)
        if len(calls) > 1:
            raise launcher.NoWorker("There is none.")
        return ready(*args)

    return asked


def test_many_launches_at_once_are_one_worker_each(warm: Stack) -> None:
    runs = [warm.create("telling") for _ in range(LAUNCHES)]
    with ThreadPoolExecutor(LAUNCHES) as pool:
        list(pool.map(warm.start, runs))
    for run_id in runs:
        assert warm.finished(run_id).status is DagsterRunStatus.SUCCESS
        assert warm.workers(run_id) == 1
    assert len({warm.run(run_id).tags["pid"] for run_id in runs}) == LAUNCHES


def test_a_reload_gets_a_new_template_while_runs_of_the_old_one_go_on(warm: Stack, release: Path) -> None:
    run_id, worker = warm.waiting(release)
    old = warm.template()
    warm.reload()
    again = warm.finished(warm.launch("telling"))
    assert again.tags["imported_by"] == str(warm.template().pid) != str(old.pid)
    assert worker.is_running()
    assert not gone(old.pid), "it still watches its run"
    os.kill(worker.pid, signal.SIGKILL)
    assert warm.finished(run_id).status is DagsterRunStatus.FAILURE
    wait_for(lambda: gone(old.pid))


def test_an_edited_file_is_read_without_a_reload(warm: Stack) -> None:
    text = warm.file.read_text()
    assert warm.finished(warm.launch("telling")).tags["version"] == "first"
    try:
        warm.file.write_text(text.replace('VERSION = "first"', 'VERSION = "second"'))
        run = warm.finished(warm.launch("telling"))
        assert run.tags["version"] == "second"
        assert run.tags["imported_by"] == str(warm.template().pid)
    finally:
        warm.file.write_text(text)


def test_the_setting_chooses_dagsters_launcher(warm: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHLAKE_RUN_LAUNCHER", "dagster")
    run = warm.finished(warm.launch("telling"))
    assert run.tags["imported_by"] == run.tags["pid"]
    assert RunTag.WORKER not in run.tags
    assert warm.launcher.check_run_worker_health(run).status is WorkerStatus.RUNNING


@pytest.mark.parametrize(
    ("what", "value", "reason"),
    [
        ("launcher.sys.executable", "/another/python", "it runs with another Python"),
        ("launcher.sys.platform", "darwin", "cannot be forked safely"),
        ("launcher.shares_our_environment", lambda _: False, "not started by this Dagster"),
    ],
)
def test_where_a_fork_is_not_possible_it_says_why(
    warm: Stack, monkeypatch: pytest.MonkeyPatch, what: str, value: object, reason: str
) -> None:
    run_id = warm.create("telling")
    monkeypatch.setattr(f"branchlake_dagster.launching.{what}", value)
    found = warm.launcher._load_spec(warm.context(run_id))
    assert isinstance(found, str)
    assert reason in found


def test_templates_end_with_their_launcher_and_after_their_runs(
    tmp_path: Path, release: Path, warm: Stack
) -> None:
    run_id, worker = warm.waiting(release)
    template = warm.template()
    warm.launcher.dispose()
    assert LOCATION not in warm.launcher.warm_processes()
    assert worker.is_running()
    release.touch()
    assert warm.finished(run_id).status is DagsterRunStatus.SUCCESS
    wait_for(lambda: gone(template.pid))


def test_code_that_does_not_load_any_more_fails_the_run_as_it_does_with_dagster(warm: Stack) -> None:
    """The last test of the module: the file stays as it is, which spares a reload."""
    warm.file.write_text(warm.file.read_text() + "raise ValueError('half written')\n")
    run_id = warm.launch("telling")
    assert warm.finished(run_id).status is DagsterRunStatus.FAILURE
    assert any("ValueError: half written" in told for told in warm.messages(run_id))
