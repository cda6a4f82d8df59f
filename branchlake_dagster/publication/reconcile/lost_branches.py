"""Runs that wait for a verdict although their branch is gone: somebody deleted it, or Nessie was restored."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter

from branchlake_dagster.branching.branch.owner import continuing_runs
from branchlake_dagster.branching.branch.run_tags import (
    FENCED,
    LAKE_TAG,
    PUBLICATION_TAG,
    STATUS_TAG,
    VERDICT_TAG,
    Place,
    Status,
    place_of,
)
from branchlake_dagster.branching.fencing.discard import discarded_name
from branchlake_dagster.branching.fencing.report_end import report_end
from branchlake_dagster.branching.fencing.taken_back import fail_unpublished, status_without_verdict
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.publication.commit.publisher import Publisher
from branchlake_dagster.publication.gate.verdict import Decision
from branchlake_dagster.publication.reconcile.backlog import other_location
from branchlake_dagster.publication.reconcile.outcome import Outcome, PublicationAction

_LIMIT = 100
"""Runs in one pass; the next passes report the others."""
_FINISHED = [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED]
_REASON = (
    "its branch is gone although nobody judged the run: somebody deleted the branch, or Nessie was restored"
    " from a copy that does not have it"
)


class LostBranches:
    """Finds finished runs that show *pending* and have no branch, and reports each of them once.

    `lake_id` and `location` are the reconciler's. Runs of other lakes and code locations are left alone.
    """

    def __init__(
        self,
        client: NessieClient,
        publisher: Publisher,
        instance: DagsterInstance,
        *,
        lake_id: str,
        location: str | None,
    ) -> None:
        self._client = client
        self._publisher = publisher
        self._instance = instance
        self._lake_id = lake_id
        self._location = location

    def report(self, existing_branches: Collection[str]) -> Iterator[Outcome]:
        """Report the runs whose branch is not among `existing_branches`, as listed before this call.

        Costs one query to Dagster's run storage, and three requests to Nessie for each run without a branch.
        """
        waiting = self._instance.get_runs(
            RunsFilter(tags={STATUS_TAG: str(Status.PENDING)}, statuses=_FINISHED), limit=_LIMIT
        )
        for run in waiting:
            place = place_of(run.tags, run.run_id)
            if place is None or place.unbranched or place.branch in existing_branches:
                continue
            if run.tags.get(LAKE_TAG, self._lake_id) != self._lake_id or other_location(run, self._location):
                continue
            if not self._is_lost(place):
                continue
            yield self._reported(run, place)

    def _is_lost(self, place: Place) -> bool:
        """Whether nobody has the run's work in hand: no branch, no discarded state, no retry.

        A state whose files are being deleted comes back to nobody, and may stay for as long as it takes.
        """
        if any(map(self._client.has_reference, (place.branch, discarded_name(place.branch)))):
            return False
        return not any(continuing_runs(self._instance, [place.branch]))

    def _reported(self, run: DagsterRun, place: Place) -> Outcome:
        if done := self._publisher.already_published(place.branch, place.base_hash):
            self._instance.report_engine_event(f"Published as {done.hash}.", run)
            published = {STATUS_TAG: str(Status.PUBLISHED), VERDICT_TAG: str(Decision.PASSED)}
            self._instance.add_run_tags(run.run_id, {**published, PUBLICATION_TAG: done.hash})
            action, detail = PublicationAction.PUBLISHED, "by a publisher that died before it could report it"
            return Outcome(place.branch, run.run_id, action, detail, None, done.hash)
        action, status = PublicationAction.DISCARDED, status_without_verdict(run)
        if run.is_success:
            action, status = PublicationAction.REFUSED, Status.REFUSED
            fail_unpublished(self._instance, run.run_id, _REASON)
        report_end(self._instance, run.run_id, place.branch, verdict=FENCED, reason=_REASON, status=status)
        return Outcome(place.branch, run.run_id, action, _REASON)
