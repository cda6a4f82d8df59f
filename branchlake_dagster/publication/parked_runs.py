"""Failed attempts to judge or publish a run: retried after growing pauses, then parked.

An error that concerns one run must not stop the others. An empty metadata file on one branch once ended every
pass, also for other tables. The run's tags hold the number of attempts and the time of the next one; no other
state exists.
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
from branchlake_dagster.publication.ledger import MainLog, Published
from branchlake_dagster.publication.outcome import Outcome
from branchlake_dagster.publication.publisher import PublicationContended
from branchlake_dagster.runs.branch_owner import load_runs_on_branch
from branchlake_dagster.runs.discarding import (
    end_judged_branch,
    fail_unpublished_run,
    release_claim,
    revoke_materializations,
)
from branchlake_dagster.runs.run_tags import (
    NO_VALUE,
    RunState,
    build_status_tag,
    find_recorded_base,
    is_opened_by,
    shorten_tag_value,
)
from branchlake_dagster.stored_names import RunTag

MAX_ATTEMPTS = 8
"""A run is parked after this many failed passes. The pause doubles each time, so that takes ten minutes."""

_FIRST_PAUSE = timedelta(seconds=5)
_RETRY_PAUSE = timedelta(minutes=1)
_log = logging.getLogger(__name__)


def format_error(error: BaseException) -> str:
    """Format an error as a sentence; errors of other libraries include their class."""
    return str(error) if isinstance(error, BranchlakeError) else f"{type(error).__name__}: {error}"


class FailedAttempts:
    """Records failed attempts in the tags of the run that they concern.

    `now` is the wall clock.
    """

    def __init__(
        self, instance: DagsterInstance, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._instance = instance
        self._now = now

    def waiting_outcome(self, branch: str, run: DagsterRun) -> Outcome | None:
        """Return the outcome PARKED or WAITING if this pass must skip the run; None if it may try the run."""
        next_attempt = (
            run.tags.get(RunTag.NEXT_ATTEMPT, NO_VALUE) if is_opened_by(run.tags, run.run_id) else NO_VALUE
        )
        if next_attempt == NO_VALUE:
            return None
        reason = run.tags.get(RunTag.REASON, "")
        if next_attempt == RunState.PARKED:
            return Outcome(branch, run.run_id, RunState.PARKED, reason)
        try:
            if self._now() >= datetime.fromisoformat(next_attempt):
                return None
        except (ValueError, TypeError):
            return None  # the tag was edited outside branchlake
        return Outcome(branch, run.run_id, RunState.WAITING, f"next attempt at {next_attempt}: {reason}")

    def record(self, branch: str, run: DagsterRun, error: Exception) -> Outcome:
        """Record a failed attempt, and return `TRY_AGAIN`. Only errors that persist are counted.

        The eighth counted attempt parks the run; its outcome says so in the detail.

        Errors that concern all runs (Nessie or its token, Dagster's database, a race) are not recorded. Other
        errors that may pass, such as a storage that refuses a request, delay the next attempt by a minute.
        Without that pause, old runs that failed slowly at every tick left no time for the others.
        """
        message = format_error(error)
        if _affects_all_runs(error):
            return Outcome(branch, run.run_id, RunState.TRY_AGAIN, message)
        if may_succeed_later(error):
            next_attempt = (self._now() + _RETRY_PAUSE).isoformat(timespec="seconds")
            self._write_tags(
                run, {RunTag.NEXT_ATTEMPT: next_attempt, RunTag.REASON: shorten_tag_value(message)}
            )
            return Outcome(branch, run.run_id, RunState.TRY_AGAIN, message)
        has_own_tags = is_opened_by(run.tags, run.run_id)
        previous_count = run.tags.get(RunTag.ATTEMPTS, "") if has_own_tags else ""
        attempts = (int(previous_count) if previous_count.isdigit() else 0) + 1
        next_attempt = self._now() + _FIRST_PAUSE * 2 ** (min(attempts, MAX_ATTEMPTS) - 1)
        is_parked = attempts >= MAX_ATTEMPTS
        tags = {
            RunTag.ATTEMPTS: str(attempts),
            RunTag.NEXT_ATTEMPT: str(RunState.PARKED)
            if is_parked
            else next_attempt.isoformat(timespec="seconds"),
            RunTag.REASON: shorten_tag_value(message),
        }
        branch_note = f" Its branch {branch} is kept." if run.is_success and branch != MAIN else ""
        event = (
            f"Parked after {attempts} failed attempts to judge, publish or report the run: {message}"
            f"{branch_note}"
            f" `branchlake set-aside retry {run.run_id}` tries again; `branchlake set-aside end {run.run_id}`"
            " discards the run."
        )
        self._write_tags(run, tags, event if is_parked else None)
        detail = f"parked after {attempts} attempts: {message}" if is_parked else message
        return Outcome(branch, run.run_id, RunState.TRY_AGAIN, detail)

    def _write_tags(self, run: DagsterRun, tags: Mapping[str, str], event: str | None = None) -> None:
        try:
            if event:
                report_engine_event(self._instance, event, run)
            self._instance.add_run_tags(run.run_id, dict(tags))
        except Exception as failure:  # noqa: BLE001 - the next pass retries anyway, and other runs must go on
            reason = format_error(failure)
            _log.warning("The failed attempt could not be recorded on run %s: %s", run.run_id, reason)


def _affects_all_runs(error: Exception) -> bool:
    if isinstance(error, NessieError):
        return may_succeed_later(error)
    return isinstance(error, PublicationContended | OperationalError | InterfaceError)


def iter_parked_runs(instance: DagsterInstance) -> Iterator[DagsterRun]:
    """Iterate over the parked runs, newest first. They wait for an operator."""
    for run in instance.get_runs(RunsFilter(tags={RunTag.NEXT_ATTEMPT: str(RunState.PARKED)})):
        if is_opened_by(run.tags, run.run_id):
            yield run


def discard_parked_run(client: NessieClient, instance: DagsterInstance, run: DagsterRun) -> str:
    """Discard the branch of a parked run, record that on the run, and return a sentence for the operator.

    If the failed attempt has published the run, nothing is discarded and the next pass reports the run as
    published. If a writer still changes the branch, nothing is discarded and the sentence asks to repeat the
    command. Rows that an unbranched run wrote to `main` stay there.
    """
    branch = run.tags[RunTag.BRANCH]
    message = "Discarded by an operator: nothing was published, and its branch was discarded."
    if branch == MAIN:
        message = "Discarded by an operator: the run wrote to main directly, and its rows stay there."
    else:
        if (publication := _find_publication(client, run, branch)) is not None:
            retry_parked_run(instance, run)
            return (
                f"Run {run.run_id} is on main, as {publication.hash}."
                " The next tick of the publication sensor reports it."
            )
        with contextlib.suppress(ReferenceNotFound):
            if not end_judged_branch(client, client.reference(branch), keep_data=False):
                return f"Run {run.run_id}: a writer still changes its branch. Run the command again."
    reason = f"{message} {run.tags.get(RunTag.REASON, '')}".rstrip()
    report_engine_event(instance, message, run)
    status = RunState.UNBRANCHED if branch == MAIN else RunState.BLOCKED
    tags = {**build_status_tag(status), RunTag.VERDICT: "blocked"}
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
    """Reset the attempts of a parked or waiting run, so that the next pass tries to publish it again."""
    instance.add_run_tags(run.run_id, {RunTag.ATTEMPTS: "0", RunTag.NEXT_ATTEMPT: NO_VALUE})
