"""The end of a judged run: what became of it is told where people look, then its branch and its claim go."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime

from dagster import DagsterInstance, DagsterRun

from branchlake_dagster.branching.branch.retention import keep_failed_hours
from branchlake_dagster.branching.branch.run_tags import Status
from branchlake_dagster.branching.fencing.finish_branch import drop_branch, finish_branch
from branchlake_dagster.branching.fencing.taken_back import FAILS, fail_unpublished, status_without_verdict
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.publication.commit.publisher import Publisher
from branchlake_dagster.publication.gate.next_step import LAUNCH_AGAIN, look_at_rows
from branchlake_dagster.publication.ledger.candidate import Published, Refused
from branchlake_dagster.publication.reconcile.assess import NO_TABLE, Assessed
from branchlake_dagster.publication.reconcile.main_view import MainView
from branchlake_dagster.publication.reconcile.outcome import Outcome, PublicationAction
from branchlake_dagster.publication.reconcile.report import RunReport, report_outcome
from branchlake_dagster.settings import Settings
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
