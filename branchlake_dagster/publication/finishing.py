"""Reports and cleanup at the end of a judged run, and reports on runs that lost their branch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from datetime import datetime

from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter

from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.publication.assessment import NO_TABLE_CHANGED, AssessedRun
from branchlake_dagster.publication.ledger import Published, Refused
from branchlake_dagster.publication.outcome import (
    MainView,
    Outcome,
    RunReport,
    find_other_location,
    report_outcome,
)
from branchlake_dagster.publication.publisher import Publisher
from branchlake_dagster.publication.verdict import LAUNCH_AGAIN, Decision, format_rows_hint
from branchlake_dagster.runs.branch_owner import iter_continuing_runs
from branchlake_dagster.runs.discarding import (
    FAILING_STATUSES,
    discarded_tag_name,
    end_branch_and_claim,
    end_judged_branch,
    fail_unpublished_run,
    report_branch_end,
    status_without_verdict,
)
from branchlake_dagster.runs.run_tags import (
    FENCED,
    RunState,
    build_status_tag,
    find_keep_failed_hours,
    find_run_location,
)
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import format_count

_MAIN_WAS_SET_BACK = "it was on main, and main was set back meanwhile"
"""The reason if somebody set `main` back between the search in the ledger and the report."""


class Finisher:
    """Reports the outcome of a judged run and removes its branch.

    Every step can be repeated; reports on many partitions continue where they stopped. `main_view` supplies
    row counts and commit links of `main`; if it is None, reports omit them. `settings` hold the hours that
    the branch of an unpublished run is kept for debugging, if the run has not recorded them. `clock` counts
    seconds, `now` is the wall clock.
    """

    def __init__(
        self,
        client: NessieClient,
        publisher: Publisher,
        instance: DagsterInstance,
        main_view: MainView | None,
        settings: Settings,
        *,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._client = client
        self._publisher = publisher
        self._instance = instance
        self._main_view = main_view
        self._settings = settings
        self._clock = clock
        self._now = now

    def finish(
        self, assessed_run: AssessedRun, result: Published | Refused | None, *, deadline: float
    ) -> Outcome:
        """Report a judged run, remove its branch, and return the outcome.

        `result` is the publisher's answer; None if the run was not a candidate. When the clock reaches
        `deadline`, reports on partitions of a published run stop until the next pass, and the branch stays.
        The branch of an unpublished run stays if it is kept for debugging.
        """
        refusal = result if isinstance(result, Refused) else None
        if (refusal or (result is None and assessed_run.was_claimed)) and not self._keep_hours(
            assessed_run.run
        ):
            # Another publisher, perhaps inside the run, may still be working on the branch. A deleted branch
            # cannot be merged. A publisher inside the run sends no commit for it either, because it checks
            # the branch immediately before the request.
            end_judged_branch(self._client, assessed_run.branch, keep_data=False)
        publication = result if isinstance(result, Published) else self._find_publication(assessed_run)
        if (
            publication is not None
            and publication.merged_outside
            and (refusal or assessed_run.reason or assessed_run.verdict.blocked)
        ):
            # The rows are on main, and the report must not deny that.
            failure_reason = (
                refusal.format_reason()
                if refusal
                else assessed_run.reason or assessed_run.verdict.format_summary()
            )
            message = (
                f"{failure_reason.rstrip('.')}. But its branch was merged into main outside branchlake,"
                f" as {publication.hash}"
            )
            # The assessment says "published" if it found the rows on main, whatever the verdict is.
            was_found = assessed_run.state is RunState.PUBLISHED
            state = RunState.BLOCKED if was_found else assessed_run.state
            if refusal:
                state = RunState.REFUSED
            codes = (*(refusal.codes if refusal else assessed_run.verdict.codes), "merged_outside")
            return self._report_unpublished(assessed_run, message, state, on_main=True, codes=codes)
        if publication is not None:
            return self._report_published(assessed_run, publication, deadline)
        if refusal:
            reason = refusal.format_reason()
            return self._report_unpublished(
                assessed_run, reason, RunState.REFUSED, next_step=LAUNCH_AGAIN, codes=refusal.codes
            )
        if assessed_run.state is RunState.PUBLISHED:
            return self._report_unpublished(
                assessed_run, _MAIN_WAS_SET_BACK, RunState.REFUSED, next_step=LAUNCH_AGAIN
            )
        is_blocked = assessed_run.state is RunState.BLOCKED
        next_step = (
            format_rows_hint(assessed_run.verdict.failed_tables, assessed_run.run.run_id)
            if is_blocked
            else ""
        )
        return self._report_unpublished(
            assessed_run, assessed_run.reason, assessed_run.state, next_step=next_step
        )

    def _find_publication(self, assessed_run: AssessedRun) -> Published | None:
        """Return the publication on `main` of a run that this pass did not publish; None if there is none."""
        if (
            assessed_run.candidate is None
            and not assessed_run.was_claimed
            and not assessed_run.evidence.write_set
        ):
            return None
        return self._publisher.find_publication(
            assessed_run.branch.name, assessed_run.base_hash, assessed_run.branch.hash
        )

    def _report_published(
        self, assessed_run: AssessedRun, publication: Published, deadline: float
    ) -> Outcome:
        tables = assessed_run.candidate.tables if assessed_run.candidate else ()
        rebase_note = (
            f", rebased {', '.join(publication.rebased_tables)}" if publication.rebased_tables else ""
        )
        merge_note = ", merged outside branchlake" if publication.merged_outside else ""
        summary = assessed_run.verdict.format_summary()
        detail = f"{', '.join(tables)} as {publication.hash[:12]}{merge_note}, {summary}{rebase_note}"
        remaining = self._report_outcome(assessed_run, deadline, RunState.PUBLISHED, publication=publication)
        if remaining:
            detail += f"; the next ticks report {format_count(remaining, 'more partition')}"
        else:
            end_branch_and_claim(self._client, assessed_run.branch, keep_data=True)
        return assessed_run.to_outcome(
            RunState.PUBLISHED, detail, publication=publication.hash, tables=tables
        )

    def _report_unpublished(
        self,
        assessed_run: AssessedRun,
        reason: str | None,
        state: RunState,
        *,
        on_main: bool = False,
        next_step: str = "",
        codes: tuple[str, ...] | None = None,
    ) -> Outcome:
        default_status = status_without_verdict(assessed_run.run)
        final_state = state if state in FAILING_STATUSES else default_status
        status = RunState.UNCHANGED if reason == NO_TABLE_CHANGED else final_state
        if status in FAILING_STATUSES:
            # Fail the run first: if this publisher stops here, the next one must not find a successful run.
            failure_reason = reason or "; ".join(assessed_run.verdict.reasons)
            fail_unpublished_run(self._instance, assessed_run.run.run_id, failure_reason, next_step)
        # Report without a deadline: the branch is deleted now, and no later pass continues the report.
        self._report_outcome(
            assessed_run, math.inf, status, reason=reason, on_main=on_main, next_step=next_step
        )
        if not self._keep_hours(assessed_run.run):
            end_branch_and_claim(self._client, assessed_run.branch, keep_data=False)
        return assessed_run.to_outcome(
            state,
            reason or assessed_run.verdict.format_summary(),
            next_step=next_step,
            codes=assessed_run.verdict.codes if codes is None else codes,
        )

    def _report_outcome(
        self,
        assessed_run: AssessedRun,
        deadline: float,
        status: RunState,
        *,
        publication: Published | None = None,
        reason: str | None = None,
        on_main: bool = False,
        next_step: str = "",
    ) -> int:
        report = RunReport(
            assessed_run.run,
            assessed_run.evidence,
            assessed_run.verdict,
            assessed_run.branch.name,
            status,
            took_s=self._clock() - assessed_run.start_time,
            at=self._now().timestamp(),
            publication=publication.hash if publication else None,
            merged_outside=publication.merged_outside if publication else False,
            rebased=publication.rebased_tables if publication else (),
            why=reason,
            retention_hours=0.0 if publication else self._keep_hours(assessed_run.run),
            on_main=on_main,
            next_step=next_step,
        )
        return report_outcome(
            self._instance, report, self._main_view, has_time=lambda: self._clock() < deadline
        )

    def _keep_hours(self, run: DagsterRun) -> float:
        return find_keep_failed_hours(run.tags, run.run_id, self._settings)


MAX_RUNS_PER_PASS = 100
"""The number of runs without a branch that are reported in one pass; the next passes report the others."""
FINISHED_STATUSES = [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED]
_LOST_BRANCH_REASON = (
    "its branch no longer exists although the run was not judged: somebody deleted the branch, or Nessie was"
    " restored from a copy that does not have it"
)


def report_lost_branches(
    client: NessieClient,
    publisher: Publisher,
    instance: DagsterInstance,
    existing_branches: Collection[str],
    *,
    lake_id: str,
    location: str | None,
) -> Iterator[Outcome]:
    """Report the finished runs without a verdict whose branch no longer exists; yield an outcome for each.

    Such a run has the state *pending*. If `main` has its publication, it is reported as published, else as
    refused or, if the run failed, discarded. Runs of other lakes and code locations are skipped, as are runs
    whose branch was discarded or continued by a retry. `existing_branches` are the names of the run branches,
    listed before this call. Costs one query to Dagster's run storage, and three requests to Nessie for each
    run without a branch.
    """
    pending_runs = instance.get_runs(
        RunsFilter(tags={RunTag.STATUS: str(RunState.PENDING)}, statuses=FINISHED_STATUSES),
        limit=MAX_RUNS_PER_PASS,
    )
    for run in pending_runs:
        run_branch = find_run_location(run.tags, run.run_id)
        if run_branch is None or run_branch.unbranched or run_branch.branch in existing_branches:
            continue
        if run.tags.get(RunTag.LAKE, lake_id) != lake_id or find_other_location(run, location):
            continue
        branch = run_branch.branch
        # A tag whose files are being deleted does not count, because it cannot be restored.
        if any(map(client.has_reference, (branch, discarded_tag_name(branch)))):
            continue
        if any(iter_continuing_runs(instance, [branch])):
            continue
        publication = publisher.find_publication(branch, run_branch.base_hash)
        yield _report_lost_branch(instance, run, branch, publication)


def _report_lost_branch(
    instance: DagsterInstance, run: DagsterRun, branch: str, publication: Published | None
) -> Outcome:
    if publication is not None:
        instance.report_engine_event(f"Published as {publication.hash}.", run)
        published_tags = {**build_status_tag(RunState.PUBLISHED), RunTag.VERDICT: str(Decision.PASSED)}
        instance.add_run_tags(run.run_id, {**published_tags, RunTag.PUBLICATION: publication.hash})
        detail = "by a publisher that died before it could report it"
        return Outcome(branch, run.run_id, RunState.PUBLISHED, detail, None, publication.hash)
    state, status = RunState.DISCARDED, status_without_verdict(run)
    if run.is_success:
        state, status = RunState.REFUSED, RunState.REFUSED
        fail_unpublished_run(instance, run.run_id, _LOST_BRANCH_REASON)
    report_branch_end(instance, run.run_id, branch, verdict=FENCED, reason=_LOST_BRANCH_REASON, status=status)
    return Outcome(branch, run.run_id, state, _LOST_BRANCH_REASON)
