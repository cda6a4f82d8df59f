"""Judge runs that wrote to `main` directly, because their branch could not be created.

There is nothing to publish or to revoke. Their checks are judged nevertheless. A failure is reported as
clearly as possible: the run is marked as failed and asks for manual validation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter

from branchlake_dagster.internals.dagster import AssetGraph
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.evidence import collect_evidence
from branchlake_dagster.publication.outcome import Outcome, PublicationAction, find_other_location
from branchlake_dagster.publication.parked_runs import FailedAttempts
from branchlake_dagster.publication.report import MainView, RunReport, report_outcome
from branchlake_dagster.publication.verdict import judge_evidence
from branchlake_dagster.runs.run_tags import PENDING, Status, is_opened_by
from branchlake_dagster.stored_names import RunTag

_FINISHED = [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED]
_MAX_RUNS = 100
"""Most runs in one pass; the newest first, as Dagster lists them."""

MANUAL_VALIDATION = (
    "Manual validation needed: the run wrote to main directly, so its rows are visible already"
)


def judge_unbranched_runs(
    lake: Lakehouse,
    instance: DagsterInstance,
    graph: AssetGraph,
    *,
    location: str | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Iterator[Outcome]:
    """Judge the finished unbranched runs that were not judged yet. `now` is the wall clock."""
    failed_attempts = FailedAttempts(instance)
    run_filter = RunsFilter(tags={RunTag.UNBRANCHED: "true", RunTag.VERDICT: PENDING}, statuses=_FINISHED)
    for run in instance.get_runs(run_filter, limit=_MAX_RUNS):
        if is_opened_by(run.tags, run.run_id) and find_other_location(run, location) is None:
            if (waiting := failed_attempts.waiting_outcome(MAIN, run)) is not None:
                yield waiting
                continue
            try:
                yield _judge_run(lake, instance, run, graph, now())
            except Exception as error:  # noqa: BLE001 - the error concerns this run alone
                yield failed_attempts.record(MAIN, run, error)


def _judge_run(
    lake: Lakehouse,
    instance: DagsterInstance,
    run: DagsterRun,
    graph: AssetGraph,
    now: datetime,
) -> Outcome:
    settings = lake.settings
    evidence = collect_evidence(
        instance,
        [run],
        graph,
        write_set=frozenset(),
        default_namespace=settings.default_namespace,
        require_checks=settings.require_checks,
    )
    verdict = judge_evidence(evidence, strict_tables=False)
    message = "Written to main directly, without a branch, because Nessie was unavailable; its checks passed."
    why = None
    # Automation follows reports of publications. The name is that of the run, because it has no branch.
    publication: str | None = lake.nessie.reference(MAIN).hash
    if verdict.blocked:
        publication = None
        why = f"{MANUAL_VALIDATION}. {verdict.format_summary()}"
        message = why
        if run.is_success:
            instance.report_run_failed(run, f"{MANUAL_VALIDATION}. {'; '.join(verdict.reasons)}")
    name = f"{MAIN} (run {run.run_id})"
    report = RunReport(
        run,
        evidence,
        verdict,
        name,
        Status.UNBRANCHED,
        took_s=0.0,
        at=now.timestamp(),
        publication=publication,
        why=why,
        message=message,
        on_main=True,
    )
    report_outcome(instance, report, MainView(lake))
    return Outcome(MAIN, run.run_id, PublicationAction.UNBRANCHED, message, verdict, publication)
