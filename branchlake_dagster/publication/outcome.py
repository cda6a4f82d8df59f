"""The outcome of one pass for a branch, the report of a pass, and the branches that a pass has to handle.

An attempt to judge or publish a run may fail. It is repeated after growing pauses, then the run is parked.
An error that concerns one run must not stop the others: an empty metadata file on one branch once ended every
pass, also for other tables. The run's tags hold the number of attempts and the time of the next one; no other
state exists.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from dagster import AssetCheckKey, AssetKey, DagsterInstance, DagsterRun, RunRequest, RunsFilter
from sqlalchemy.exc import InterfaceError, OperationalError

from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.internals.dagster import report_engine_event
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieError, ReferenceNotFound, may_succeed_later
from branchlake_dagster.nessie.model import Reference
from branchlake_dagster.publication.committer import PublicationContended
from branchlake_dagster.publication.ledger import MainLog, Published
from branchlake_dagster.publication.verdict import Verdict
from branchlake_dagster.runs.branch_owner import load_branch_owners, load_runs_on_branch
from branchlake_dagster.runs.discarding import (
    end_judged_branch,
    fail_unpublished_run,
    release_claim,
    revoke_materializations,
)
from branchlake_dagster.runs.run_branch import run_id_of_branch
from branchlake_dagster.runs.run_tags import (
    NO_VALUE,
    RunState,
    find_recorded_base,
    is_opened_by,
    shorten_tag_value,
)
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import pluralize


@dataclass(frozen=True)
class CheckRun:
    """A Dagster run to be launched for these (asset, check) pairs only. `key` is its run key."""

    key: str
    checks: tuple[tuple[str, str], ...]
    branch: str
    tags: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        names = ", ".join(f"{check} on {asset}" for asset, check in self.checks)
        return f"requests {names} on {self.branch}, because main has changed"

    def to_run_request(self) -> RunRequest:
        """Return the run as a sensor's request."""
        return RunRequest(
            run_key=self.key,
            tags=dict(self.tags),
            asset_check_keys=[
                AssetCheckKey(AssetKey.from_user_string(asset), name) for asset, name in self.checks
            ],
        )


@dataclass(frozen=True)
class Outcome:
    """The outcome of one pass for one branch.

    `publication` is the commit on `main`; `detail` is the explanation. `check_run` is the run that a rebased
    publication needs before it can continue. `next_step` is the advice for a run that was not published.
    `codes` has the causes in snake case, such as `check_failed` or `same_files`.
    """

    branch: str
    run_id: str
    action: RunState
    detail: str
    verdict: Verdict | None = None
    publication: str | None = None
    tables: tuple[str, ...] = ()
    check_run: CheckRun | None = None
    next_step: str = ""
    codes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.branch}: {self.action}, {self.detail}"


@dataclass(frozen=True)
class EndedRun:
    """A run that has ended, with the name of its branch."""

    branch: str
    run: DagsterRun


def find_ended_runs(
    instance: DagsterInstance, branches: Sequence[Reference], *, location: str | None
) -> tuple[list[EndedRun], list[Outcome]]:
    """Return the ended runs of a code location with their branches, and outcomes for other branches.

    With None as `location` the runs of all code locations are returned. The oldest run comes first: it has
    waited longest, and a later run has seen more of other runs' changes.
    """
    ended_runs: list[tuple[float, int, EndedRun]] = []
    other_outcomes: list[Outcome] = []
    records = load_branch_owners(instance, [branch.name for branch in branches])
    for branch in branches:
        record = records[branch.name]
        if record is None:
            detail = "Dagster does not know the run; left to the reaper"
            other_outcomes.append(
                Outcome(branch.name, run_id_of_branch(branch.name), RunState.UNKNOWN_RUN, detail)
            )
            continue
        run = record.dagster_run
        if (other_name := find_other_location(run, location)) is not None:
            detail = f"the run belongs to code location {other_name}, whose own sensor judges it"
        elif not run.is_finished:
            detail = f"the run is {run.status.value.lower()}"
        else:
            ended_runs.append((record.end_time or 0.0, record.storage_id, EndedRun(branch.name, run)))
            continue
        other_outcomes.append(Outcome(branch.name, run.run_id, RunState.WAITING, detail))
    ended_runs.sort(key=lambda item: item[:2])
    return [item for _, _, item in ended_runs], other_outcomes


def find_other_location(run: DagsterRun, location: str | None) -> str | None:
    """Return the code location of the run if it is not `location`, else None.

    Only a run's own code location has the definitions of its checks.
    """
    origin = run.remote_job_origin
    if location is None or origin is None:
        return None
    location_name = origin.repository_origin.code_location_origin.location_name
    return None if location_name == location else location_name


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
        """Return why this pass skips the run, or None if the pass may try it."""
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
        """Record a failed attempt and return its outcome. Only errors that persist count as attempts.

        Errors that concern all runs (Nessie or its token, Dagster's database, a race) are not recorded. Other
        errors that may pass, such as a store that refuses, delay the next attempt by a minute. Without that
        pause, old runs that failed slowly at every tick left no time for the others.
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

    If `main` holds the run already (the failed attempt may have published it), the next pass reports it as
    published. Rows that an unbranched run wrote to `main` stay there.
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
    """Reset the attempts of a run, so that the next pass tries it again."""
    instance.add_run_tags(run.run_id, {RunTag.ATTEMPTS: "0", RunTag.NEXT_ATTEMPT: NO_VALUE})


_MAX_EXAMPLES = 10
_MAX_EXAMPLE_CHARS = 300
_MAX_LOG_LINES = 500
_ONLY_COUNTED = (
    RunState.WAITING,
    RunState.KEPT,
    RunState.UNKNOWN_RUN,
    RunState.PARKED,
)
"""Actions for branches that are left as they are at every tick. In full, 4,300 branches gave 459,000
characters."""


@dataclass
class PassReport:
    """The outcomes of one pass: counts by action, the first outcomes as text, and check runs to launch."""

    counts: Counter[RunState] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    check_runs: list[CheckRun] = field(default_factory=list)

    def add(self, outcome: Outcome) -> bool:
        """Add an outcome. Returns whether it is worth a line in the tick's log."""
        self.counts[outcome.action] += 1
        if outcome.check_run:
            self.check_runs.append(outcome.check_run)
        if outcome.action in _ONLY_COUNTED:
            return False
        if len(self.examples) < _MAX_EXAMPLES:
            message = str(outcome)
            self.examples.append(
                message if len(message) <= _MAX_EXAMPLE_CHARS else f"{message[: _MAX_EXAMPLE_CHARS - 1]}…"
            )
        return self._count_reported() <= _MAX_LOG_LINES

    def format_message(self) -> str:
        """Format the report in at most a few thousand characters."""
        phrases = {
            RunState.WAITING: ("waits or is running", "wait or are running"),
            RunState.KEPT: ("is kept for debugging", "are kept for debugging"),
            RunState.UNKNOWN_RUN: (
                "belongs to no run of this Dagster",
                "belong to no run of this Dagster",
            ),
            RunState.PARKED: (
                "is parked (`branchlake set-aside`)",
                "are parked (`branchlake set-aside`)",
            ),
        }
        counts = [
            f"{count} {pluralize(count, *phrases[action])}"
            for action in phrases
            if (count := self.counts[action])
        ]
        unlisted_count = self._count_reported() - len(self.examples)
        parts = [*self.examples, *([f"and {unlisted_count} more, in the log"] if unlisted_count else [])]
        other_branches = f"Of the other branches {', '.join(counts)}." if counts else ""
        if not parts:
            return f"Nothing to publish. {other_branches}".rstrip()
        return " | ".join([*parts, *([other_branches] if other_branches else [])])

    def format_row(self) -> str:
        """Format the report in a few words, for the tick's row in Dagster's list.

        Dagster shows the tick's cursor in that row.
        """
        reported_counts = {
            action: count for action, count in self.counts.items() if action not in _ONLY_COUNTED
        }
        return (
            ", ".join(f"{action} {count}" for action, count in reported_counts.items())
            or "nothing to publish"
        )

    def _count_reported(self) -> int:
        return sum(count for action, count in self.counts.items() if action not in _ONLY_COUNTED)
