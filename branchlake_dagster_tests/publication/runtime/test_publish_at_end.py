"""A job that publishes as its last act, and races with the sensor."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click
import dagster as dg
import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.errors import NessieUnavailable
from branchlake_dagster.publication import run_publication as publish_at_end
from branchlake_dagster.publication.ledger import iter_publications
from branchlake_dagster.publication.outcome import Outcome
from branchlake_dagster.publication.publisher import Publisher
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.publication.run_publication import LEFT_TO_SENSOR, RunPublication
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.dagster_internals import ReconstructableRepository
from branchlake_dagster_tests.publication.runtime import publish_at_end_project
from branchlake_dagster_tests.publication.runtime.publish_at_end_project import TOKEN_VARIABLE
from branchlake_dagster_tests.suite.instances import new_instance


@pytest.fixture
def environment(lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(lakehouse.settings.state_dir))
    return monkeypatch


@pytest.fixture
def token(environment: pytest.MonkeyPatch) -> int:
    """The one row this test's run appends."""
    found = next(publish_at_end_project.tokens)
    environment.setenv(TOKEN_VARIABLE, str(found))
    return found


@contextmanager
def instance() -> Iterator[dg.DagsterInstance]:
    with new_instance() as found:
        yield found


def run(instance: dg.DagsterInstance) -> dg.JobExecutionResult:
    """Through a reconstructable job: so its own executor runs it, unlike `execute_in_process`."""
    repository = ReconstructableRepository.for_module(
        "branchlake_dagster_tests.publication.runtime.publish_at_end_project", "defs"
    )
    job = repository.get_reconstructable_job("publishing_job")
    return dg.execute_job(job, instance=instance, raise_on_error=False)


@contextmanager
def dagsters_command(name: str) -> Iterator[None]:
    """As inside a command of Dagster's own."""
    with click.Context(click.Command(name), info_name=name).scope():
        yield


def reconciler(lakehouse: Lakehouse, instance: dg.DagsterInstance) -> Reconciler:
    graph = publish_at_end_project.defs.get_repository_def().asset_graph
    return Reconciler.from_lake(lakehouse, instance, graph)


def publication(lakehouse: Lakehouse, instance: dg.DagsterInstance) -> RunPublication:
    graph = publish_at_end_project.defs.get_repository_def().asset_graph
    return RunPublication.from_lake(lakehouse, instance, graph)


def times(lakehouse: Lakehouse, token: int) -> int:
    """How often the token is on `main`."""
    catalog, identifier = lakehouse.catalog(), (publish_at_end_project.NAMESPACE, "t")
    if not catalog.table_exists(identifier):
        return 0
    table = catalog.load_table(identifier)
    found: list[int] = table.scan().to_arrow()["n"].to_pylist()
    return found.count(token)


def test_a_run_publishes_itself(
    lakehouse: Lakehouse,
    environment: pytest.MonkeyPatch,
    token: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with dagsters_command("execute_run"):
        publish_at_end._print_on_command_line("a run worker says nothing")
    with dagsters_command("materialize"), instance() as store, run(store) as result:
        assert result.success
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("Run ", "a run"))]
        assert said == [publish_at_end.format_run_outcome(outcome_of(store, result.run_id))]
        assert times(lakehouse, token) == 1
        found = store.get_run_by_id(result.run_id)
        assert found is not None
        (entry,) = [p for p in iter_publications(lakehouse.nessie, limit=5) if p.run_id == result.run_id]
        assert found.tags[RunTag.PUBLICATION] == entry.hash
        assert reconciler(lakehouse, store).reconcile_run(result.run_id) is None


def outcome_of(store: dg.DagsterInstance, run_id: str) -> Outcome:
    found = store.get_run_by_id(run_id)
    assert found is not None
    action, publication = RunState.PUBLISHED, found.tags[RunTag.PUBLICATION]
    return Outcome(run_branch_name(run_id), run_id, action, "", None, publication)


@pytest.mark.parametrize("action", [*RunState])
def test_the_line_names_the_run_and_what_to_look_at(action: RunState) -> None:
    reasons = "check positive on t failed.\nMore lines"
    told = publish_at_end.format_run_outcome(Outcome("run-1", "1234", action, reasons, next_step=""))
    assert "1234" in told
    assert "\n" not in told
    assert "branchlake status" in told or action is RunState.DISCARDED
    if action is RunState.BLOCKED:
        rows = Outcome("run-1", "1234", action, reasons, next_step="Look at the rows: branchlake sql.")
        assert publish_at_end.format_run_outcome(rows).endswith("branchlake sql.")


def test_a_blocked_run_fails_and_says_why(
    lakehouse: Lakehouse, environment: pytest.MonkeyPatch, token: int
) -> None:
    environment.setenv(TOKEN_VARIABLE, str(-token))
    with instance() as store, run(store) as result:
        assert not result.success
        (failure,) = [event for event in result.all_events if event.is_run_failure]
        assert "NotPublished" in str(failure.event_specific_data)
        assert "check positive on" in str(failure.event_specific_data)
        found = store.get_run_by_id(result.run_id)
        assert found is not None
        assert "check positive on" in found.tags[RunTag.REASON]
        assert times(lakehouse, -token) == 0


def test_what_the_run_could_not_do_the_sensor_does(
    lakehouse: Lakehouse, environment: pytest.MonkeyPatch, token: int
) -> None:
    def away(*_: object) -> None:
        raise NessieUnavailable("not now")

    with environment.context() as patch:
        patch.setattr(Publisher, "_merge", away)
        with instance() as store, run(store) as result:
            assert result.success
            told = [event.message for event in result.all_events if LEFT_TO_SENSOR in (event.message or "")]
            assert len(told) == 1
            patch.undo()
            outcome = reconciler(lakehouse, store).reconcile_run(result.run_id)
            assert outcome is not None
            assert outcome.state is RunState.PUBLISHED
            assert times(lakehouse, token) == 1


def test_an_error_of_any_class_leaves_a_passed_run_to_the_sensor(
    lakehouse: Lakehouse, environment: pytest.MonkeyPatch, token: int
) -> None:
    """A state folder that cannot be written to once made a run fail that had passed, and so lost it."""

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    with environment.context() as patch, instance() as store:
        patch.setattr("branchlake_dagster.publication.run_publication.acquire_pass_lock", read_only)
        with run(store) as result:
            assert result.success
            told = [event.message for event in result.all_events if LEFT_TO_SENSOR in (event.message or "")]
            assert "Read-only file system" in str(told)
            outcome = reconciler(lakehouse, store).reconcile_run(result.run_id)
            assert outcome is not None
            assert outcome.state is RunState.PUBLISHED
            assert times(lakehouse, token) == 1


def test_a_run_that_died_after_its_publication_is_reported_as_published(
    lakehouse: Lakehouse, environment: pytest.MonkeyPatch, token: int
) -> None:
    class Died(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Died

    with environment.context() as patch, instance() as store:
        patch.setattr("branchlake_dagster.publication.finishing.report_outcome", die)
        with contextlib.suppress(Died):
            run(store)
        assert times(lakehouse, token) == 1
        patch.undo()
        (found,) = store.get_runs()
        if not found.is_finished:
            store.report_run_failed(found)
        outcome = reconciler(lakehouse, store).reconcile_run(found.run_id)
        assert outcome is not None
        assert outcome.state is RunState.PUBLISHED
        assert outcome.publication is not None
        assert times(lakehouse, token) == 1
        assert run_branch_name(found.run_id) not in {ref.name for ref in lakehouse.nessie.references()}


def test_the_run_and_the_sensor_race_to_one_publication(
    lakehouse: Lakehouse, environment: pytest.MonkeyPatch, token: int
) -> None:
    with environment.context() as patch:
        patch.setattr(RunPublication, "publish", lambda *_, **__: None)
        with instance() as store, run(store) as result:
            patch.undo()
            found = store.get_run_by_id(result.run_id)
            assert found is not None
            barrier = threading.Barrier(4)
            outcomes = []

            def publish(inside: bool) -> None:
                mine, other = publication(lakehouse, store), reconciler(lakehouse, store)
                barrier.wait()
                outcome = mine.publish(found) if inside else other.reconcile_run(found.run_id)
                if inside or (outcome and outcome.detail != "another publisher was faster"):
                    outcomes.append(outcome)

            threads = [threading.Thread(target=publish, args=(n % 2 == 0,)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            # Who comes from outside may find the branch gone; the run itself knows how it ended.
            told = {o.state for o in outcomes if o}
            assert told <= {RunState.PUBLISHED, RunState.TRY_AGAIN}
            assert len({o.publication for o in outcomes if o and o.publication}) == 1
            assert times(lakehouse, token) == 1
            entries = [p for p in iter_publications(lakehouse.nessie, limit=10) if p.run_id == result.run_id]
            assert len(entries) == 1


def test_a_run_that_was_ended_meanwhile_does_not_publish_itself(
    lakehouse: Lakehouse, environment: pytest.MonkeyPatch, token: int
) -> None:
    """Its process was suspended, was taken for dead, and wakes up. Its branch may be kept for some hours."""
    with environment.context() as patch:
        patch.setattr(RunPublication, "publish", lambda *_, **__: None)
        with instance() as store, run(store) as result:
            patch.undo()
            found = store.get_run_by_id(result.run_id)
            assert found is not None
            assert found.is_finished
            outcome = publication(lakehouse, store).publish(found)
            assert outcome.state is RunState.TRY_AGAIN
            assert times(lakehouse, token) == 0


def test_a_publication_that_does_not_end_is_left_to_the_sensor(
    lakehouse: Lakehouse, environment: pytest.MonkeyPatch, token: int
) -> None:
    """A storage or a database that does not answer must not keep the run from ending."""
    asked, answers = threading.Event(), threading.Event()

    def waiting(*_: object, **__: object) -> None:
        asked.set()
        answers.wait()
        raise AssertionError("nobody waits for this any more")

    with instance() as store:
        with environment.context() as patch:
            patch.setattr(RunPublication, "publish", waiting)
            patch.setattr(publish_at_end, "longest_pass_s", lambda _: 0.1)
            with run(store) as result:
                assert result.success
                run_id = result.run_id
                assert asked.wait(60), "the thread that was left would publish by itself later"
        assert times(lakehouse, token) == 0
        answers.set()
        outcome = reconciler(lakehouse, store).reconcile_run(run_id)
        assert outcome is not None
        assert outcome.state is RunState.PUBLISHED
        assert times(lakehouse, token) == 1
