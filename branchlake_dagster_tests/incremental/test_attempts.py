"""Which runs were launched for a state of a consumer's inputs, read from Dagster by their keys."""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg
import pytest

from branchlake_dagster.automation.launch_decision import LaunchOutcome, attempt_key
from branchlake_dagster.automation.partition_backlog import iter_histories
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.suite.instances import new_instance


@dg.job
def job() -> None: ...


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with new_instance() as its:
        yield its


def launched(
    instance: dg.DagsterInstance,
    key: str,
    publication: str = "",
    status: dg.DagsterRunStatus = dg.DagsterRunStatus.FAILURE,
) -> str:
    run = instance.create_run_for_job(job, status=status, tags={"dagster/run_key": key})
    if publication:
        own = {
            RunTag.OPENED_BY: run.run_id,
            RunTag.BRANCH: f"run-{run.run_id}",
            RunTag.PUBLICATION: publication,
        }
        instance.add_run_tags(run.run_id, own)
    return run.run_id


def test_attempts_are_numbered_by_their_keys(instance: dg.DagsterInstance) -> None:
    first, second = launched(instance, "a"), launched(instance, attempt_key("a", 1))
    launched(instance, attempt_key("a", 3))  # beyond what is looked at
    (of_a, of_b) = iter_histories(instance, ["a", "b"], 2)
    assert [(one.number, one.run_id, one.outcome) for one in of_a.attempts] == [
        (0, first, LaunchOutcome.FAILED),
        (1, second, LaunchOutcome.FAILED),
    ]
    assert (of_b.run_key, of_b.attempts) == ("b", ())
    assert all(one.ended_at.tzinfo is not None for one in of_a.attempts)


def test_attempts_before_a_publication_that_main_has_lost_count_for_nothing(
    instance: dg.DagsterInstance,
) -> None:
    launched(instance, "a")
    launched(instance, attempt_key("a", 1), publication="0123456789abcdef0123")
    (history,) = iter_histories(instance, ["a"], 3)
    assert (history.run_key, history.attempts) == ("a-0123456789abcdef", ())
    again = launched(instance, history.run_key)
    (history,) = iter_histories(instance, ["a"], 3)
    assert [one.run_id for one in history.attempts] == [again]


def test_the_newest_run_of_a_key_counts(instance: dg.DagsterInstance) -> None:
    launched(instance, "a")
    newest = launched(instance, "a", status=dg.DagsterRunStatus.STARTED)
    (history,) = iter_histories(instance, ["a"], 0)
    assert [(one.run_id, one.outcome) for one in history.attempts] == [(newest, LaunchOutcome.UNFINISHED)]


def test_many_states_are_answered_in_their_order(instance: dg.DagsterInstance) -> None:
    launched(instance, "450")
    found = [*iter_histories(instance, (str(number) for number in range(600)), 4)]
    assert [one.run_key for one in found] == [*map(str, range(600))]
    assert [one.run_key for one in found if one.attempts] == ["450"]
