"""The end of a judged run, and runs whose branch is gone before they were judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from datetime import datetime

from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter

from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.publication.assessment import NO_TABLE, Assessed
from branchlake_dagster.publication.ledger import Published, Refused
from branchlake_dagster.publication.outcome import Outcome, PublicationAction, other_location
from branchlake_dagster.publication.publisher import Publisher
from branchlake_dagster.publication.report import MainView, RunReport, report_outcome
from branchlake_dagster.publication.verdict import LAUNCH_AGAIN, Decision, look_at_rows
from branchlake_dagster.runs.branch_owner import continuing_runs
from branchlake_dagster.runs.discarding import (
    FAILS,
    discarded_name,
    drop_branch,
    fail_unpublished,
    finish_branch,
    report_end,
    status_without_verdict,
)
from branchlake_dagster.runs.run_tags import FENCED, Place, Status, keep_failed_hours, place_of
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import agree, counted

_SET_BACK = "it was on main, and main was set back meanwhile"
"""Between the look at the ledger and the report, by hand."""
_STATUS = {
    PublicationAction.BLOCKED: Status.BLOCKED,
    PublicationAction.REFUSED: Status.REFUSED,
}


class Finisher:
    """Tells and cleans up. Every step can be repeated; telling many partitions goes on where it stopped.

    `view` is what the reports say of `main` (None: nothing); `settings` say how long the branch of a run that
    was not published stays for debugging, if the run has not recorded it. `clock` counts seconds, `now` is
    the wall clock.
    """

    def __init__(
        self,
        client: NessieClient,
        publisher: Publisher,
        instance: DagsterInstance,
        view: MainView | None,
        settings: Settings,
        *,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._client = client
        self._publisher = publisher
        self._instance = instance
        self._view = view
        self._settings = settings
        self._clock = clock
        self._now = now

    def finish(self, one: Assessed, result: Published | Refused | None, *, until: float) -> Outcome:
        """The outcome of a judged run. None as `result`: it is no candidate. `until` is the clock's end."""
        refused = result if isinstance(result, Refused) else None
        if (refused or (result is None and one.claimed)) and not self._keep_hours(one.run):
            # Another publisher, perhaps inside the run, may still be at it: only of a branch that is gone it
            # is certain that it was not published.
            drop_branch(self._client, one.branch, keep_data=False)
        done = result if isinstance(result, Published) else self._already_published(one)
        if done is not None and done.by_hand and (refused or one.why or one.verdict.blocked):
            # Its rows are there, and this must not read as though they were not.
            why = refused.reason() if refused else one.why or one.verdict.summary()
            merged = f"{why.rstrip('.')}. But somebody merged its branch into main by hand, as {done.hash}"
            held = one.action is PublicationAction.PUBLISHED  # as the ledger has it, whatever the verdict
            action = PublicationAction.BLOCKED if held else one.action
            if refused:
                action = PublicationAction.REFUSED
            codes = (*(refused.codes if refused else one.verdict.codes), "merged_outside")
            return self._report_unpublished(one, merged, action, on_main=True, codes=codes)
        if done is not None:
            return self._report_published(one, done, until)
        if refused:
            reason = refused.reason()
            return self._report_unpublished(
                one, reason, PublicationAction.REFUSED, next_step=LAUNCH_AGAIN, codes=refused.codes
            )
        if one.action is PublicationAction.PUBLISHED:
            return self._report_unpublished(one, _SET_BACK, PublicationAction.REFUSED, next_step=LAUNCH_AGAIN)
        blocked = one.action is PublicationAction.BLOCKED
        rows = look_at_rows(one.verdict.failed_tables, one.run.run_id) if blocked else ""
        return self._report_unpublished(one, one.why, one.action, next_step=rows)

    def _already_published(self, one: Assessed) -> Published | None:
        """What `main` has of a run that this pass did not publish."""
        if one.candidate is None and not one.claimed and not one.evidence.write_set:
            return None
        return self._publisher.already_published(one.branch.name, one.base_hash, one.branch.hash)

    def _report_published(self, one: Assessed, done: Published, until: float) -> Outcome:
        tables = one.candidate.tables if one.candidate else ()
        again = f", rebased {', '.join(done.rebased)}" if done.rebased else ""
        by_hand = ", merged by hand" if done.by_hand else ""
        detail = f"{', '.join(tables)} as {done.hash[:12]}{by_hand}, {one.verdict.summary()}{again}"
        left = self._announce(one, until, Status.PUBLISHED, publication=done)
        if left:
            detail += f"; {counted(left, 'partition')} {agree(left, 'is', 'are')} told by the next ticks"
        else:
            finish_branch(self._client, one.branch, keep_data=True)
        return self._outcome(one, PublicationAction.PUBLISHED, detail, done.hash, tables)

    def _report_unpublished(
        self,
        one: Assessed,
        why: str | None,
        action: PublicationAction,
        *,
        on_main: bool = False,
        next_step: str = "",
        codes: tuple[str, ...] | None = None,
    ) -> Outcome:
        ended = status_without_verdict(one.run)
        status = Status.UNCHANGED if why == NO_TABLE else _STATUS.get(action, ended)
        if status in FAILS:
            # First of all: whoever comes after a publisher that died here must not find a green run.
            reason = why or "; ".join(one.verdict.reasons)
            fail_unpublished(self._instance, one.run.run_id, reason, next_step)
        # A few examples are told, and always all of them: the branch goes now, and nobody comes again.
        self._announce(one, math.inf, status, why=why, on_main=on_main, next_step=next_step)
        if not self._keep_hours(one.run):
            finish_branch(self._client, one.branch, keep_data=False)
        told = one.verdict.codes if codes is None else codes
        return self._outcome(one, action, why or one.verdict.summary(), None, (), next_step, told)

    def _announce(
        self,
        one: Assessed,
        until: float,
        status: Status,
        *,
        publication: Published | None = None,
        why: str | None = None,
        on_main: bool = False,
        next_step: str = "",
    ) -> int:
        report = RunReport(
            one.run,
            one.evidence,
            one.verdict,
            one.branch.name,
            status,
            took_s=self._clock() - one.began,
            at=self._now().timestamp(),
            publication=publication.hash if publication else None,
            by_hand=publication.by_hand if publication else False,
            rebased=publication.rebased if publication else (),
            why=why,
            kept_hours=0.0 if publication else self._keep_hours(one.run),
            on_main=on_main,
            next_step=next_step,
        )
        return report_outcome(self._instance, report, self._view, more=lambda: self._clock() < until)

    def _keep_hours(self, run: DagsterRun) -> float:
        return keep_failed_hours(run.tags, run.run_id, self._settings)

    @staticmethod
    def _outcome(
        one: Assessed,
        action: PublicationAction,
        detail: str,
        publication: str | None,
        tables: tuple[str, ...],
        next_step: str = "",
        codes: tuple[str, ...] = (),
    ) -> Outcome:
        return Outcome(
            one.branch.name,
            one.run.run_id,
            action,
            detail,
            one.verdict,
            publication,
            tables,
            next_step=next_step,
            codes=codes,
        )


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
            RunsFilter(tags={RunTag.STATUS: str(Status.PENDING)}, statuses=_FINISHED), limit=_LIMIT
        )
        for run in waiting:
            place = place_of(run.tags, run.run_id)
            if place is None or place.unbranched or place.branch in existing_branches:
                continue
            if run.tags.get(RunTag.LAKE, self._lake_id) != self._lake_id or other_location(
                run, self._location
            ):
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
            published = {RunTag.STATUS: str(Status.PUBLISHED), RunTag.VERDICT: str(Decision.PASSED)}
            self._instance.add_run_tags(run.run_id, {**published, RunTag.PUBLICATION: done.hash})
            action, detail = PublicationAction.PUBLISHED, "by a publisher that died before it could report it"
            return Outcome(place.branch, run.run_id, action, detail, None, done.hash)
        action, status = PublicationAction.DISCARDED, status_without_verdict(run)
        if run.is_success:
            action, status = PublicationAction.REFUSED, Status.REFUSED
            fail_unpublished(self._instance, run.run_id, _REASON)
        report_end(self._instance, run.run_id, place.branch, verdict=FENCED, reason=_REASON, status=status)
        return Outcome(place.branch, run.run_id, action, _REASON)
