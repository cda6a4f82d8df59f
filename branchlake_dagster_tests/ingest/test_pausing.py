"""Runs that fail one after the other are started ever later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest

from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.ingest_sensor import find_pause_reason
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import RunTag

JOB = "ingest_orders_live"


@dg.op
def refused() -> None:
    raise RuntimeError("refused")


@dg.job(name=JOB)
def live() -> None:
    refused()


@dg.job(name="ingest_orders_job")
def batch() -> None:
    refused()


@dg.op
def interrupted() -> None:
    raise KeyboardInterrupt


@dg.job(name=JOB)
def ended_from_outside() -> None:
    interrupted()


@dg.resource
def absent() -> None:
    raise RuntimeError("no lake")


@dg.op(required_resource_keys={"lakehouse"})
def reading() -> None:
    pass


@dg.job(name=JOB, resource_defs={"lakehouse": absent})
def without_resources() -> None:
    reading()


PLAYED = {"failed": live, "interrupted": ended_from_outside, "without resources": without_resources}


class Runs:
    """Runs of an ingestion in an instance of its own."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        table = IngestTable(key="raw/orders", columns={"id": "bigint"})
        self.ingest = Ingest(name="orders", topics=["orders"], tables=[table])

    def ended(
        self, status: str, *, name: str = "orders", job: dg.JobDefinition | None = None
    ) -> dg.DagsterRun:
        tags = {RunTag.INGESTION: name}
        if status in PLAYED:
            wanted = job or PLAYED[status]
            return wanted.execute_in_process(
                instance=self.instance, tags=tags, raise_on_error=False
            ).dagster_run
        job = job or live
        run = self.instance.create_run_for_job(job, tags=tags)
        if status == "killed":
            self.instance.report_run_failed(run)
        elif status == "blocked":  # by the publication sensor: its steps have all succeeded
            self.instance.report_run_failed(run)
            self.instance.add_run_tags(run.run_id, {RunTag.STATUS: str(RunState.BLOCKED)})
        elif status == "canceled":
            self.instance.report_run_canceled(run)
        else:
            event = dg.DagsterEvent(event_type_value="PIPELINE_SUCCESS", job_name=job.name)
            self.instance.report_dagster_event(event, run_id=run.run_id)
        return run

    def last_ended(self) -> float:
        (record,) = self.instance.get_run_records(limit=1)
        assert record.end_time is not None
        return record.end_time

    def pause(self, after_s: float) -> str | None:
        return find_pause_reason(self.instance, self.ingest, JOB, self.last_ended() + after_s)


@pytest.fixture
def runs() -> Iterator[Runs]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield Runs(instance)


def test_a_first_failure_is_followed_by_another_run_at_once(runs: Runs) -> None:
    runs.ended("failed")
    assert runs.pause(0.0) is None


@pytest.mark.parametrize(("failures", "wait"), [(2, 10), (3, 30), (4, 90), (5, 270), (6, 600), (9, 600)])
def test_each_further_one_waits_longer_up_to_a_bound(runs: Runs, failures: int, wait: float) -> None:
    for _ in range(failures):
        run = runs.ended("failed")
    told = runs.pause(wait - 0.1)
    assert told is not None
    assert run.run_id[:8] in told
    assert f"launch {JOB}" in told
    assert told.startswith("6 or more runs" if failures >= 6 else f"{failures} runs")
    assert runs.pause(wait) is None


@pytest.mark.parametrize("how", ["blocked", "without resources"])
def test_runs_without_a_failed_step_have_failed_too(runs: Runs, how: str) -> None:
    """A batch that the gate blocks, and a lake that is not there, were tried again at each tick."""
    for _ in range(3):
        runs.ended(how)
    assert runs.pause(29.9) is not None
    assert runs.pause(30.0) is None


@pytest.mark.parametrize("between", ["succeeded", "canceled", "killed", "interrupted"])
def test_what_did_not_fail_ends_the_row(runs: Runs, between: str) -> None:
    for one in ("failed", "failed", "failed", between, "failed"):
        runs.ended(one)
    assert runs.pause(0.0) is None


@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_runs_that_are_ended_from_outside_are_followed_by_others_at_once(runs: Runs, how: str) -> None:
    for _ in range(5):
        runs.ended(how)
    assert runs.pause(0.0) is None


def test_a_run_that_worked_for_long_has_failed_for_something_new(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        runs.ended("failed")
    found = runs.instance.get_run_records

    def older(*given: Any, **named: Any) -> Any:
        records = found(*given, **named)
        first = records[0]
        assert first.end_time is not None
        return [first._replace(start_time=first.end_time - 700.0), *records[1:]]

    monkeypatch.setattr(runs.instance, "get_run_records", older)
    assert find_pause_reason(runs.instance, runs.ingest, JOB, 0.0) is None


def test_other_ingestions_and_jobs_do_not_count(runs: Runs) -> None:
    runs.ended("failed")
    for _ in range(3):
        runs.ended("failed", name="others")
        runs.ended("failed", job=batch)
    assert runs.pause(0.0) is None


def test_before_any_run_there_is_nothing_to_wait_for(runs: Runs) -> None:
    assert find_pause_reason(runs.instance, runs.ingest, JOB, 0.0) is None
