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
from branchlake_dagster.nessie.errors import NessieError, ReferenceNotFound, may_pass
from branchlake_dagster.publication.committer import PublicationContended
from branchlake_dagster.publication.ledger import Published
from branchlake_dagster.publication.main_log import MainLog
from branchlake_dagster.publication.outcome import Outcome, PublicationAction
from branchlake_dagster.runs.branch_owner import runs_on
from branchlake_dagster.runs.claims import release_claim
from branchlake_dagster.runs.discarding import drop_branch, fail_unpublished, take_back
from branchlake_dagster.runs.run_tags import NONE, SET_ASIDE, Status, base_hash_of, opened_by, shortened
from branchlake_dagster.stored_names import RunTag

ATTEMPTS = 8
"""Passes after which a run is set aside: at twice the pause each time, ten minutes."""

_FIRST_PAUSE = timedelta(seconds=5)
_PAUSE = timedelta(minutes=1)
_log = logging.getLogger(__name__)


def said(error: BaseException) -> str:
    """The error in a sentence; of one that is not ours, its class too."""
    return str(error) if isinstance(error, BranchlakeError) else f"{type(error).__name__}: {error}"


class Troubles:
    """Notes what breaks in the run that it concerns. `now` is the wall clock."""

    def __init__(
        self, instance: DagsterInstance, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._instance = instance
        self._now = now

    def holds(self, branch: str, run: DagsterRun) -> Outcome | None:
        """Why the run is not tried in this pass; None: it is its turn."""
        due = run.tags.get(RunTag.NEXT_ATTEMPT, NONE) if opened_by(run.tags, run.run_id) else NONE
        if due == NONE:
            return None
        why = run.tags.get(RunTag.REASON, "")
        if due == SET_ASIDE:
            return Outcome(branch, run.run_id, PublicationAction.SET_ASIDE, why)
        try:
            if self._now() >= datetime.fromisoformat(due):
                return None
        except (ValueError, TypeError):
            return None  # somebody wrote the tag by hand
        return Outcome(branch, run.run_id, PublicationAction.WAITING, f"tried again at {due}: {why}")

    def note(self, branch: str, run: DagsterRun, error: Exception) -> Outcome:
        """The outcome of an attempt that broke. Counted is only what does not pass by itself.

        What concerns everybody (Nessie or its token, Dagster's database, a race) is not even noted. Other
        trouble that may pass (a store that refuses) is, and takes a pause: old runs that broke slowly at
        every tick left no time for the others.
        """
        text = said(error)
        if _everybodys(error):
            return Outcome(branch, run.run_id, PublicationAction.TRY_AGAIN, text)
        if may_pass(error):
            due = (self._now() + _PAUSE).isoformat(timespec="seconds")
            self._tell(run, {RunTag.NEXT_ATTEMPT: due, RunTag.REASON: shortened(text)})
            return Outcome(branch, run.run_id, PublicationAction.TRY_AGAIN, text)
        own = opened_by(run.tags, run.run_id)
        before = run.tags.get(RunTag.ATTEMPTS, "") if own else ""
        attempts = (int(before) if before.isdigit() else 0) + 1
        due = self._now() + _FIRST_PAUSE * 2 ** (min(attempts, ATTEMPTS) - 1)
        aside = attempts >= ATTEMPTS
        tags = {
            RunTag.ATTEMPTS: str(attempts),
            RunTag.NEXT_ATTEMPT: SET_ASIDE if aside else due.isoformat(timespec="seconds"),
            RunTag.REASON: shortened(text),
        }
        kept = f" Its branch {branch} is kept." if run.is_success and branch != MAIN else ""
        event = (
            f"Set aside after {attempts} attempts to judge, publish or tell it: {text}{kept}"
            f" `branchlake set-aside retry {run.run_id}` tries again, `end` gives it up."
        )
        self._tell(run, tags, event if aside else None)
        told = f"set aside after {attempts} attempts: {text}" if aside else text
        return Outcome(branch, run.run_id, PublicationAction.TRY_AGAIN, told)

    def _tell(self, run: DagsterRun, tags: Mapping[str, str], event: str | None = None) -> None:
        try:
            if event:
                report_engine_event(self._instance, event, run)
            self._instance.add_run_tags(run.run_id, dict(tags))
        except Exception as failure:  # noqa: BLE001 - it is tried again either way; the other runs go on
            _log.warning("Run %s could not be told of its trouble: %s", run.run_id, said(failure))


def _everybodys(error: Exception) -> bool:
    if isinstance(error, NessieError):
        return may_pass(error)
    return isinstance(error, PublicationContended | OperationalError | InterfaceError)


def set_aside(instance: DagsterInstance) -> Iterator[DagsterRun]:
    """The runs that wait for somebody to look at them, the newest first."""
    for run in instance.get_runs(RunsFilter(tags={RunTag.NEXT_ATTEMPT: SET_ASIDE})):
        if opened_by(run.tags, run.run_id):
            yield run


def give_up(client: NessieClient, instance: DagsterInstance, run: DagsterRun) -> str:
    """Discard the branch of a run that is set aside, and tell the run; what was done, in a sentence.

    A run that is on `main` all the same (the attempt that broke may have come that far) is left to the next
    pass, which tells it as that. What an unbranched run wrote to `main` stays there.
    """
    branch = run.tags[RunTag.BRANCH]
    text = "Given up by hand: nothing of it was published, and its branch was discarded."
    if branch == MAIN:
        text = "Given up by hand: it wrote to main directly, and what it wrote stays."
    else:
        if (done := _landed(client, run, branch)) is not None:
            retry(instance, run)
            return f"Run {run.run_id} is on main, as {done.hash}: the next tick of the sensor tells it."
        with contextlib.suppress(ReferenceNotFound):
            if not drop_branch(client, client.reference(branch), keep_data=False):
                return f"Run {run.run_id}: its branch is being written to. Try it once more."
    reason = f"{text} {run.tags.get(RunTag.REASON, '')}".rstrip()
    report_engine_event(instance, text, run)
    status = Status.UNBRANCHED if branch == MAIN else Status.BLOCKED
    tags = {RunTag.STATUS: str(status), RunTag.VERDICT: "blocked"}
    instance.add_run_tags(run.run_id, {**tags, RunTag.REASON: shortened(reason), RunTag.NEXT_ATTEMPT: NONE})
    if branch != MAIN:
        take_back(instance, run, [one.run_id for one in runs_on(instance, branch)] or [run.run_id])
        fail_unpublished(instance, run.run_id, reason)
        release_claim(client, branch)
    return f"Run {run.run_id}: {text}"


def _landed(client: NessieClient, run: DagsterRun, branch: str) -> Published | None:
    base = base_hash_of(run.tags, branch)
    head = None
    with contextlib.suppress(ReferenceNotFound):
        head = client.reference(branch).hash
    if base is None:
        return None
    return MainLog().on_main(client, branch, base=base, head=head)


def retry(instance: DagsterInstance, run: DagsterRun) -> None:
    """Let the next pass try the run again, from the first attempt."""
    instance.add_run_tags(run.run_id, {RunTag.ATTEMPTS: "0", RunTag.NEXT_ATTEMPT: NONE})
