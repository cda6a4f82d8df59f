"""Decide whether to launch a run for a consumer now, to retry it, or why not to launch it.

The decision depends only on the arguments; this module reads neither Dagster nor the lake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from dagster import DagsterRun, DagsterRunStatus

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.incremental.positions import Unconsumed
from branchlake_dagster.runs.run_tags import UNJUDGED, RunState, find_publication, find_run_location
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import pluralize

_LONGEST_DELAY_S = 86_400.0


class LaunchOutcome(StrEnum):
    """The outcome of a run that was launched for one state of a consumer's inputs."""

    UNFINISHED = "unfinished"
    AWAITS_VERDICT = "awaits its verdict"
    PUBLISHED = "published"
    FAILED = "failed"
    """A step or a check crashed, the run's process died, or its branch was discarded without a verdict."""
    REFUSED = "refused"
    """The run passed its checks, but `main` had an overlapping change meanwhile."""
    BLOCKED = "blocked"
    """The run's checks failed. With the same data they would fail again."""
    CANCELED = "canceled"
    UNDONE = "undone"
    """The run's publication was undone later. The same code would write the same rows again."""
    ENDED = "ended without a publication"
    """The run ended without a publication of its own.

    It changed no table, wrote to `main` without a branch, or a re-execution continued its work.
    """


RETRYABLE_OUTCOMES = frozenset({LaunchOutcome.FAILED, LaunchOutcome.REFUSED})
"""The outcomes after which another attempt with the same data may succeed."""


class LaunchState(StrEnum):
    """The reason why a run is launched for a consumer's partition, or why it is not launched."""

    DUE = "due"
    NOTHING_LEFT = "nothing left"
    WAITS_FOR_MORE = "waits for min_rows, min_files or max_age_s"
    BEING_COMPUTED = "being computed"
    AWAITS_VERDICT = "awaits a verdict"
    WAITS_FOR_RETRY = "waits for a retry"
    NOT_RETRIED = "not retried"
    WAITS_FOR_INPUT = "waits for an input"
    WAITS_FOR_EARLIER = "waits for an earlier partition"
    WAITS_FOR_APPROVAL = "waits for approval"
    UNKNOWN = "unknown"
    NO_SENSOR = "no sensor"
    SENSOR_STOPPED = "the sensor is stopped"
    SENSOR_NEVER_RAN = "the sensor never ran"


STUCK_STATES = frozenset({LaunchState.WAITS_FOR_RETRY, LaunchState.NOT_RETRIED, LaunchState.UNKNOWN})
"""The states of a partition after a failure: it waits for a retry or a person, or its change is unknown."""


@dataclass(frozen=True)
class LaunchPolicy:
    """The sizes at which a change is launched, and the number and delay of retries.

    A change is worth a run if it has at least `min_rows` rows and `min_files` files, or if it is `max_age_s`
    seconds old. With `when_inputs_idle`, each change is worth a run while no run computes an input.

    `retries` is the number of further runs for one state of the inputs. The first retry comes `retry_delay_s`
    seconds after the failed run ended. The delay doubles with each retry, up to a day. Raises
    ConfigurationError for a negative number of retries or seconds.
    """

    min_rows: int = 1
    min_files: int = 1
    max_age_s: float = 3600.0
    retries: int = 0
    retry_delay_s: float = 60.0
    when_inputs_idle: bool = False

    def __post_init__(self) -> None:
        if self.retries < 0 or self.retry_delay_s < 0:
            raise ConfigurationError(
                f"An incremental sensor was declared with retries={self.retries} and"
                f" retry_delay_seconds={self.retry_delay_s:g}. Both must be 0 or more.",
                hint="Omit retries to launch each change once.",
            )

    def while_inputs_are(self, *, idle: bool) -> LaunchPolicy:
        """Return the policy that applies while no run computes an input (`idle`), or while a run does."""
        return replace(self, min_rows=1, min_files=1) if self.when_inputs_idle and idle else self

    def is_reached(self, unconsumed: Unconsumed, now: datetime) -> bool:
        """Return whether the unconsumed change is large or old enough for a run.

        Always True for a change that is not counted (`whole`, `new`), and False if there is none.
        """
        if not unconsumed.has_any:
            return False
        enough = unconsumed.rows >= self.min_rows and unconsumed.files >= self.min_files
        return unconsumed.whole or unconsumed.new or enough or unconsumed.age_s(now) >= self.max_age_s

    def delay_before_retry(self, retry_number: int) -> timedelta:
        """Return the delay from the end of the failed attempt to retry `retry_number`, counted from 1."""
        doubled = self.retry_delay_s * 2.0 ** min(retry_number - 1, 60)
        return timedelta(seconds=min(doubled, max(_LONGEST_DELAY_S, self.retry_delay_s)))


@dataclass(frozen=True)
class Attempt:
    """A run for one state of a consumer's inputs. Number 0 is the first run; higher numbers are retries."""

    number: int
    run_id: str
    outcome: LaunchOutcome
    ended_at: datetime
    """The time when the run ended. For an unfinished run, the time of its last update."""
    reason: str = ""
    """The reason why the run was not published, from its tags."""


@dataclass(frozen=True)
class AttemptHistory:
    """The attempts for one state of a consumer's inputs, by ascending number.

    `run_key` is the Dagster run key of attempt 0.
    """

    run_key: str
    attempts: tuple[Attempt, ...] = ()


@dataclass(frozen=True)
class RunUnderWay:
    """A run that computes a partition and is not judged yet.

    If `is_finished` is True, its steps have ended and it waits for its verdict.
    """

    run_id: str
    is_finished: bool


@dataclass(frozen=True)
class LaunchDecision:
    """The decision about a consumer's partition. `run_key` is set only if a run is due.

    `run_id` is the run that caused the state, and `outcome` is its outcome. `due_at` is the time of the next
    retry, `retry_number` its number from 1, and `retries_left` the number of remaining retries, including
    this one. `reason` is the reason why the run was not published, or why the remaining change is unknown,
    or the message about a missing input. For a change that waits for approval, `reason` has the approval
    ids, separated by commas.
    `earlier_partition` is the partition that has to be published first.
    """

    state: LaunchState
    run_key: str | None = None
    run_id: str | None = None
    outcome: LaunchOutcome | None = None
    due_at: datetime | None = None
    retries_left: int = 0
    retry_number: int = 0
    reason: str = ""
    earlier_partition: str = ""

    def format_state(self, policy: LaunchPolicy) -> str:
        """Return the state as part of a sentence, such as `is being computed by run 3f2a90c1`.

        `policy` is the launch policy of the sensor: a change that is too small for a run is described with
        the policy's thresholds.
        """
        run = f"run {(self.run_id or '')[:8]}"
        cause = f" ({self.reason})" if self.reason else ""
        if self.state is LaunchState.WAITS_FOR_MORE:
            files = f" and min_files={policy.min_files}" if policy.min_files > 1 else ""
            idle = ", or for the end of the runs that compute its inputs" if policy.when_inputs_idle else ""
            return f"waits for min_rows={policy.min_rows}{files}, or max_age_s={policy.max_age_s:g}{idle}"
        if self.state is LaunchState.BEING_COMPUTED:
            return f"is being computed by {run}"
        if self.state is LaunchState.AWAITS_VERDICT:
            return f"waits for the verdict on {run}"
        if self.state is LaunchState.WAITS_FOR_RETRY:
            due_text = f"{self.due_at:%Y-%m-%d %H:%M:%S %Z}" if self.due_at else ""
            return f"{run} {self.outcome}; retries left: {self.retries_left}, the next at {due_text}{cause}"
        if self.state is LaunchState.NOT_RETRIED:
            return f"{run} {self.outcome}; no retries left: correct the cause, then launch it{cause}"
        if self.state is LaunchState.WAITS_FOR_EARLIER:
            return f"waits until the partition before it, {self.earlier_partition}, is published"
        if self.state is LaunchState.WAITS_FOR_APPROVAL:
            return format_approval(self.reason.split(","))
        if self.state is LaunchState.DUE:
            return "is launched at the sensor's next tick"
        clauses = {
            LaunchState.NOTHING_LEFT: "nothing is left",
            LaunchState.NO_SENSOR: "no incremental_sensor() launches this asset",
            LaunchState.SENSOR_STOPPED: "its sensor is stopped: start it under Automation",
            LaunchState.SENSOR_NEVER_RAN: "its sensor never ran: start Dagster's daemon",
        }
        return clauses.get(self.state) or self.reason or str(self.state)


def format_approval(approval_ids: Sequence[str], *, plural: bool = False) -> str:
    """Return part of a sentence about a change that waits for approval, with the command that approves it.

    The command names the first of `approval_ids`; the others follow in parentheses. Without ids, the command
    names none. `plural` is true if the subject of the clause is plural: "wait" instead of "waits".
    """
    waits = pluralize(2 if plural else 1, "waits", "wait")
    command = (
        f"branchlake backfill approve {approval_ids[0]}" if approval_ids else "branchlake backfill approve"
    )
    more = f" (and {', '.join(approval_ids[1:])})" if approval_ids[1:] else ""
    return f"{waits} for approval: {command}{more}"


def apply_sensor_state(decision: LaunchDecision, sensor_state: LaunchState | None) -> LaunchDecision:
    """Return the decision with the state `sensor_state`, if it waits only for a tick of the sensor.

    `sensor_state` is the reason why the sensor does not tick; None if it does. Other decisions are returned
    unchanged.
    """
    needs_tick = decision.state in (LaunchState.DUE, LaunchState.WAITS_FOR_RETRY, LaunchState.WAITS_FOR_MORE)
    return replace(decision, state=sensor_state, run_key=None) if sensor_state and needs_tick else decision


def attempt_key(first_key: str, attempt_number: int) -> str:
    """Return the Dagster run key of an attempt. `first_key` is the key of attempt 0."""
    return f"{first_key}-retry{attempt_number}" if attempt_number else first_key


def launch_outcome(run: DagsterRun) -> LaunchOutcome:
    """Return the outcome of a run from its status and its own tags."""
    if not run.is_finished:
        return LaunchOutcome.UNFINISHED
    location = find_run_location(run.tags, run.run_id)
    if location is not None and run.tags.get(RunTag.STATUS) == RunState.UNDONE:
        return LaunchOutcome.UNDONE
    if location is not None and find_publication(run.tags, location.branch):
        return LaunchOutcome.PUBLISHED
    if run.status is DagsterRunStatus.CANCELED:
        return LaunchOutcome.CANCELED
    status = run.tags.get(RunTag.STATUS, "") if location is not None else ""
    if status in (RunState.REFUSED, RunState.BLOCKED):
        return LaunchOutcome.REFUSED if status == RunState.REFUSED else LaunchOutcome.BLOCKED
    if status in (RunState.UNBRANCHED, RunState.CONTINUED, RunState.UNCHANGED):
        return LaunchOutcome.ENDED
    if run.status is DagsterRunStatus.FAILURE:
        return LaunchOutcome.FAILED
    awaits_verdict = status == RunState.PENDING and run.tags.get(RunTag.VERDICT) in UNJUDGED
    return LaunchOutcome.AWAITS_VERDICT if awaits_verdict else LaunchOutcome.ENDED


def decide_launch(
    unconsumed: Unconsumed,
    history: AttemptHistory,
    under_way: RunUnderWay | None,
    policy: LaunchPolicy,
    now: datetime,
    *,
    earlier_partition: str = "",
    approval_ids: Sequence[str] = (),
) -> LaunchDecision:
    """Decide whether to launch one partition, or an asset without partitions.

    Idempotent: the same arguments give the same run key, and each attempt has its own key. So a repeated tick
    launches nothing twice.

    `unconsumed` is the unconsumed change of the whole consumer. `history` has the attempts for the present
    state of the partition. `under_way` is a run that computes the partition, or None. `earlier_partition` is
    the partition that must be published before this one; empty if there is none. `approval_ids` are the ids
    under which its change has to be approved first.
    """
    if unconsumed.trouble:
        return LaunchDecision(LaunchState.UNKNOWN, reason=unconsumed.trouble)
    if unconsumed.missing_input:
        return LaunchDecision(LaunchState.WAITS_FOR_INPUT, reason=unconsumed.missing_input)
    if not unconsumed.has_any:
        return LaunchDecision(LaunchState.NOTHING_LEFT)
    if under_way is not None:
        state = LaunchState.AWAITS_VERDICT if under_way.is_finished else LaunchState.BEING_COMPUTED
        return LaunchDecision(state, run_id=under_way.run_id)
    if approval_ids:
        return LaunchDecision(LaunchState.WAITS_FOR_APPROVAL, reason=",".join(approval_ids))
    if not policy.is_reached(unconsumed, now):
        return LaunchDecision(LaunchState.WAITS_FOR_MORE)
    if earlier_partition:
        return LaunchDecision(LaunchState.WAITS_FOR_EARLIER, earlier_partition=earlier_partition)
    if not history.attempts:
        return LaunchDecision(LaunchState.DUE, history.run_key, retries_left=policy.retries)
    return _decide_after_attempt(
        max(history.attempts, key=lambda attempt: attempt.number), history.run_key, policy, now
    )


def _decide_after_attempt(
    last_attempt: Attempt, run_key: str, policy: LaunchPolicy, now: datetime
) -> LaunchDecision:
    """Decide what to do after the newest attempt for the present state: retry now, wait, or not retry.

    `run_key` is the Dagster run key of attempt 0, from which the key of a retry is derived.
    """
    state_by_outcome = {
        LaunchOutcome.UNFINISHED: LaunchState.BEING_COMPUTED,
        LaunchOutcome.AWAITS_VERDICT: LaunchState.AWAITS_VERDICT,
    }
    retries_left = max(0, policy.retries - last_attempt.number)
    decision = LaunchDecision(
        state_by_outcome.get(last_attempt.outcome, LaunchState.NOT_RETRIED),
        run_id=last_attempt.run_id,
        outcome=last_attempt.outcome,
        reason=last_attempt.reason,
    )
    if last_attempt.outcome not in RETRYABLE_OUTCOMES or not retries_left:
        return decision
    retry_number = last_attempt.number + 1
    due_at = last_attempt.ended_at + policy.delay_before_retry(retry_number)
    if now < due_at:
        return replace(
            decision,
            state=LaunchState.WAITS_FOR_RETRY,
            due_at=due_at,
            retries_left=retries_left,
            retry_number=retry_number,
        )
    run_key = attempt_key(run_key, retry_number)
    return replace(
        decision,
        state=LaunchState.DUE,
        run_key=run_key,
        due_at=due_at,
        retries_left=retries_left,
        retry_number=retry_number,
    )
