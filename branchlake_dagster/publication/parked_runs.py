"""Runs that cannot be judged or published because something breaks: tried later and later, then set aside.

One run's error is its own: an empty metadata file on one branch once ended every pass, for other tables too.
How often it was tried and when it is again stands in the run's tags; nothing else remembers it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta

from dagster import DagsterInstance, DagsterRun, RunsFilter
from sqlalchemy.exc import InterfaceError, OperationalError

from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.internals.dagster import report_engine_event
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieError, ReferenceNotFound, may_succeed_later
from branchlake_dagster.publication.committer import PublicationContended
from branchlake_dagster.publication.ledger import Published
from branchlake_dagster.publication.main_log import MainLog
from branchlake_dagster.publication.outcome import Outcome, PublicationAction
from branchlake_dagster.runs.branch_owner import load_runs_on_branch
from branchlake_dagster.runs.claims import release_claim
from branchlake_dagster.runs.discarding import (
    end_judged_branch,
    fail_unpublished_run,
    revoke_materializations,
)
from branchlake_dagster.runs.run_tags import (
    NO_VALUE,
    PARKED,
    Status,
    find_recorded_base,
    is_opened_by,
    shorten_tag_value,
)
from branchlake_dagster.stored_names import RunTag

MAX_ATTEMPTS = 8
"""Passes after which a run is set aside: at twice the pause each time, ten minutes."""

_FIRST_PAUSE = timedelta(seconds=5)
_RETRY_PAUSE = timedelta(minutes=1)
_log = logging.getLogger(__name__)


def format_error(error: BaseException) -> str:
    """The error in a sentence; of one that is not ours, its class too."""
    return str(error) if isinstance(error, BranchlakeError) else f"{type(error).__name__}: {error}"


class FailedAttempts:
    """Notes what breaks in the run that it concerns. `now` is the wall clock."""

    def __init__(
        self, instance: DagsterInstance, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._instance = instance
        self._now = now

    def waiting_outcome(self, branch: str, run: DagsterRun) -> Outcome | None:
        """Why the run is not tried in this pass; None: it is its turn."""
        next_attempt = (
            run.tags.get(RunTag.NEXT_ATTEMPT, NO_VALUE) if is_opened_by(run.tags, run.run_id) else NO_VALUE
        )
        if next_attempt == NO_VALUE:
            return None
        reason = run.tags.get(RunTag.REASON, "")
        if next_attempt == PARKED:
            return Outcome(branch, run.run_id, PublicationAction.PARKED, reason)
        try:
            if self._now() >= datetime.fromisoformat(next_attempt):
                return None
        except (ValueError, TypeError):
            return None  # somebody wrote the tag by hand
        return Outcome(
            branch, run.run_id, PublicationAction.WAITING, f"tried again at {next_attempt}: {reason}"
        )

    def record(self, branch: str, run: DagsterRun, error: Exception) -> Outcome:
        """The outcome of an attempt that broke. Counted is only what does not pass by itself.

        What concerns everybody (Nessie or its token, Dagster's database, a race) is not even noted. Other
        trouble that may pass (a store that refuses) is, and takes a pause: old runs that broke slowly at
        every tick left no time for the others.
        """
        message = format_error(error)
        if _affects_all_runs(error):
            return Outcome(branch, run.run_id, PublicationAction.TRY_AGAIN, message)
        if may_succeed_later(error):
            next_attempt = (self._now() + _RETRY_PAUSE).isoformat(timespec="seconds")
            self._write_tags(
                run, {RunTag.NEXT_ATTEMPT: next_attempt, RunTag.REASON: shorten_tag_value(message)}
            )
            return Outcome(branch, run.run_id, PublicationAction.TRY_AGAIN, message)
        has_own_tags = is_opened_by(run.tags, run.run_id)
        previous_count = run.tags.get(RunTag.ATTEMPTS, "") if has_own_tags else ""
        attempts = (int(previous_count) if previous_count.isdigit() else 0) + 1
        next_attempt = self._now() + _FIRST_PAUSE * 2 ** (min(attempts, MAX_ATTEMPTS) - 1)
        is_parked = attempts >= MAX_ATTEMPTS
        tags = {
            RunTag.ATTEMPTS: str(attempts),
            RunTag.NEXT_ATTEMPT: PARKED if is_parked else next_attempt.isoformat(timespec="seconds"),
            RunTag.REASON: shorten_tag_value(message),
        }
        branch_note = f" Its branch {branch} is kept." if run.is_success and branch != MAIN else ""
        event = (
            f"Set aside after {attempts} attempts to judge, publish or tell it: {message}{branch_note}"
            f" `branchlake set-aside retry {run.run_id}` tries again, `end` gives it up."
        )
        self._write_tags(run, tags, event if is_parked else None)
        detail = f"set aside after {attempts} attempts: {message}" if is_parked else message
        return Outcome(branch, run.run_id, PublicationAction.TRY_AGAIN, detail)

    def _write_tags(self, run: DagsterRun, tags: Mapping[str, str], event: str | None = None) -> None:
        try:
            if event:
                report_engine_event(self._instance, event, run)
            self._instance.add_run_tags(run.run_id, dict(tags))
        except Exception as failure:  # noqa: BLE001 - it is tried again either way; the other runs go on
            _log.warning("Run %s could not be told of its trouble: %s", run.run_id, format_error(failure))


def _affects_all_runs(error: Exception) -> bool:
    if isinstance(error, NessieError):
        return may_succeed_later(error)
    return isinstance(error, PublicationContended | OperationalError | InterfaceError)


def iter_parked_runs(instance: DagsterInstance) -> Iterator[DagsterRun]:
    """The runs that wait for somebody to look at them, the newest first."""
    for run in instance.get_runs(RunsFilter(tags={RunTag.NEXT_ATTEMPT: PARKED})):
        if is_opened_by(run.tags, run.run_id):
            yield run


def discard_parked_run(client: NessieClient, instance: DagsterInstance, run: DagsterRun) -> str:
    """Discard the branch of a run that is set aside, and tell the run; what was done, in a sentence.

    A run that is on `main` all the same (the attempt that broke may have come that far) is left to the next
    pass, which tells it as that. What an unbranched run wrote to `main` stays there.
    """
    branch = run.tags[RunTag.BRANCH]
    message = "Given up by hand: nothing of it was published, and its branch was discarded."
    if branch == MAIN:
        message = "Given up by hand: it wrote to main directly, and what it wrote stays."
    else:
        if (publication := _find_publication(client, run, branch)) is not None:
            retry_parked_run(instance, run)
            return (
                f"Run {run.run_id} is on main, as {publication.hash}: the next tick of the sensor tells it."
            )
        with contextlib.suppress(ReferenceNotFound):
            if not end_judged_branch(client, client.reference(branch), keep_data=False):
                return f"Run {run.run_id}: its branch is being written to. Try it once more."
    reason = f"{message} {run.tags.get(RunTag.REASON, '')}".rstrip()
    report_engine_event(instance, message, run)
    status = Status.UNBRANCHED if branch == MAIN else Status.BLOCKED
    tags = {RunTag.STATUS: str(status), RunTag.VERDICT: "blocked"}
    instance.add_run_tags(
        run.run_id, {**tags, RunTag.REASON: shorten_tag_value(reason), RunTag.NEXT_ATTEMPT: NO_VALUE}
    )
    if branch != MAIN:
        revoke_materializations(
            instance,
            run,
            [branch_run.run_id for branch_run in load_runs_on_branch(instance, branch)] or [run.run_id],
        )
        fail_unpublished_run(instance, run.run_id, reason)
        release_claim(client, branch)
    return f"Run {run.run_id}: {message}"


def _find_publication(client: NessieClient, run: DagsterRun, branch: str) -> Published | None:
    base = find_recorded_base(run.tags, branch)
    head = None
    with contextlib.suppress(ReferenceNotFound):
        head = client.reference(branch).hash
    if base is None:
        return None
    return MainLog().find_on_main(client, branch, base_hash=base, head_hash=head)


def retry_parked_run(instance: DagsterInstance, run: DagsterRun) -> None:
    """Let the next pass try the run again, from the first attempt."""
    instance.add_run_tags(run.run_id, {RunTag.ATTEMPTS: "0", RunTag.NEXT_ATTEMPT: NO_VALUE})
