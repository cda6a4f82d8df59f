"""Runs that wrote to `main` directly because their branch could not be made.

There is nothing to publish or to take back. Their checks are judged all the same, and a failure is as loud
as it can be: the run is marked failed and asks for manual validation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter

from branchlake_dagster.internals.dagster import AssetGraph
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.evidence import collect
from branchlake_dagster.publication.outcome import Outcome, PublicationAction, other_location
from branchlake_dagster.publication.parked_runs import Troubles
from branchlake_dagster.publication.report import MainView, RunReport, report_outcome
from branchlake_dagster.publication.verdict import judge
from branchlake_dagster.runs.run_tags import PENDING, Status, opened_by
from branchlake_dagster.stored_names import RunTag

_FINISHED = [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED]
_AT_MOST = 100
"""In one pass; the newest first, as Dagster lists them."""

MANUAL = "Manual validation needed: the run wrote to main directly, so what it wrote is visible already"


def settle_unbranched(
    lake: Lakehouse,
    instance: DagsterInstance,
    graph: AssetGraph,
    *,
    location: str | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Iterator[Outcome]:
    """Judge the finished unbranched runs that nobody has judged yet. `now` is the wall clock."""
    troubles = Troubles(instance)
    waiting = RunsFilter(tags={RunTag.UNBRANCHED: "true", RunTag.VERDICT: PENDING}, statuses=_FINISHED)
    for run in instance.get_runs(waiting, limit=_AT_MOST):
        if opened_by(run.tags, run.run_id) and other_location(run, location) is None:
            if (held := troubles.holds(MAIN, run)) is not None:
                yield held
                continue
            try:
                yield _settle(lake, instance, run, graph, now())
            except Exception as error:  # noqa: BLE001 - it concerns this run, not the others
                yield troubles.note(MAIN, run, error)


def _settle(
    lake: Lakehouse,
    instance: DagsterInstance,
    run: DagsterRun,
    graph: AssetGraph,
    now: datetime,
) -> Outcome:
    settings = lake.settings
    evidence = collect(
        instance,
        [run],
        graph,
        write_set=frozenset(),
        default_namespace=settings.default_namespace,
        require_checks=settings.require_checks,
    )
    verdict = judge(evidence, strict_tables=False)
    text = "Written to main directly, without a branch, because Nessie was unavailable; its checks passed."
    why = None
    # Automation goes on from what is told as published; the name is the run's own, for there is no branch.
    publication: str | None = lake.nessie.reference(MAIN).hash
    if verdict.blocked:
        publication = None
        why = f"{MANUAL}. {verdict.summary()}"
        text = why
        if run.is_success:
            instance.report_run_failed(run, f"{MANUAL}. {'; '.join(verdict.reasons)}")
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
        text=text,
        on_main=True,
    )
    report_outcome(instance, report, MainView(lake))
    return Outcome(MAIN, run.run_id, PublicationAction.UNBRANCHED, text, verdict, publication)
