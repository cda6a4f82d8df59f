"""Runs that wrote to `main` directly because their branch could not be made.

There is nothing to publish or to take back. Their checks are judged all the same, and a failure is as loud
as it can be: the run is marked failed and asks for manual validation.
"""

from __future__ import annotations

from collections.abc import Iterator

from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter

from branchlake_dagster.branching.branch.run_tags import PENDING, UNBRANCHED_TAG, VERDICT_TAG, opened_by
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.lakehouse.nessie.client import NessieClient
from branchlake_dagster.library_internals.dagster import AssetGraph
from branchlake_dagster.publication.gate.evidence import collect
from branchlake_dagster.publication.gate.verdict import judge
from branchlake_dagster.publication.reconcile import report
from branchlake_dagster.publication.reconcile.backlog import other_location
from branchlake_dagster.publication.reconcile.outcome import Outcome, PublicationAction
from branchlake_dagster.publication.reconcile.trouble import Troubles
from branchlake_dagster.settings import Settings

_FINISHED = [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED]
_AT_MOST = 100
"""In one pass; the newest first, as Dagster lists them."""

MANUAL = "Manual validation needed: the run wrote to main directly, so what it wrote is visible already"


def settle_unbranched(
    client: NessieClient,
    instance: DagsterInstance,
    graph: AssetGraph,
    settings: Settings,
    *,
    location: str | None = None,
) -> Iterator[Outcome]:
    """Judge the finished unbranched runs that nobody has judged yet."""
    troubles = Troubles(instance)
    waiting = RunsFilter(tags={UNBRANCHED_TAG: "true", VERDICT_TAG: PENDING}, statuses=_FINISHED)
    for run in instance.get_runs(waiting, limit=_AT_MOST):
        if opened_by(run.tags, run.run_id) and other_location(run, location) is None:
            if (held := troubles.holds(MAIN, run)) is not None:
                yield held
                continue
            try:
                yield _settle(client, instance, run, graph, settings)
            except Exception as error:  # noqa: BLE001 - it concerns this run, not the others
                yield troubles.note(MAIN, run, error)


def _settle(
    client: NessieClient,
    instance: DagsterInstance,
    run: DagsterRun,
    graph: AssetGraph,
    settings: Settings,
) -> Outcome:
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
    publication: str | None = client.reference(MAIN).hash
    if verdict.blocked:
        publication = None
        why = f"{MANUAL}. {verdict.summary()}"
        text = why
        if run.is_success:
            instance.report_run_failed(run, f"{MANUAL}. {'; '.join(verdict.reasons)}")
    name = f"{MAIN} (run {run.run_id})"
    report.report_outcome(
        instance, run, evidence, verdict, branch=name, publication=publication, why=why, text=text, took_s=0.0
    )
    return Outcome(MAIN, run.run_id, PublicationAction.UNBRANCHED, text, verdict, publication)
