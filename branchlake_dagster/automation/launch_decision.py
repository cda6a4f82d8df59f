"""Whether a consumer is launched now, launched again, or why it is not: decided from plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from dagster import DagsterRun, DagsterRunStatus

from branchlake_dagster.automation.backlog import Unconsumed
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.runs.run_tags import UNJUDGED, Status, find_publication, find_run_location
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import pluralize

_LONGEST_DELAY_S = 86_400.0


class LaunchOutcome(StrEnum):
    """What became of a run that was launched for a state of a consumer's inputs."""

    UNFINISHED = "unfinished"
    AWAITS_VERDICT = "awaits its verdict"
    PUBLISHED = "published"
    FAILED = "failed"
    """A step or a check crashed, its process died, or its branch was discarded unjudged."""
    REFUSED = "refused"
    """It passed its checks, and `main` had an overlapping change meanwhile."""
    BLOCKED = "blocked"
    """Its checks failed; with the same data they would fail again."""
    CANCELED = "canceled"
    ENDED = "ended without a publication"
    """It changed no table, wrote to `main` without a branch, or its work was taken over by a re-execution."""


RETRYABLE_OUTCOMES = frozenset({LaunchOutcome.FAILED, LaunchOutcome.REFUSED})
"""The outcomes that another attempt with the same data may change."""


class LaunchState(StrEnum):
    """Why a run is launched for a consumer's partition, or why none is."""

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
"""The states in which something went wrong."""


@dataclass(frozen=True)
class LaunchPolicy:
    """When a change is worth a run, and how often a run that failed is launched again.

    A change is worth a run with at least `min_rows` rows and `min_files` files, or when it is `max_age_s`
    seconds old. `retries` is the number of further runs for one state of the inputs; the first comes
    `retry_delay_s` seconds after the failed run ended, and each later one after twice the delay of the one
    before it, up to a day. Raises ConfigurationError for a negative number of retries or seconds.
    """

    min_rows: int = 1
    min_files: int = 1
    max_age_s: float = 3600.0
    retries: int = 0
    retry_delay_s: float = 60.0

    def __post_init__(self) -> None:
        if self.retries < 0 or self.retry_delay_s < 0:
            raise ConfigurationError(
                f"An incremental sensor was declared with retries={self.retries} and"
                f" retry_delay_seconds={self.retry_delay_s:g}; both must be 0 or more.",
                hint="Leave retries out to launch each change once.",
            )

    def is_reached(self, unconsumed: Unconsumed, now: datetime) -> bool:
        """Whether the change is worth a run."""
        if not unconsumed.any:
            return False
        enough = unconsumed.rows >= self.min_rows and unconsumed.files >= self.min_files
        return unconsumed.whole or unconsumed.new or enough or unconsumed.age_s(now) >= self.max_age_s

    def delay_before_retry(self, retry_number: int) -> timedelta:
        """The time between the end of an attempt and retry `retry_number`, counted from 1."""
        doubled = self.retry_delay_s * 2.0 ** min(retry_number - 1, 60)
        return timedelta(seconds=min(doubled, max(_LONGEST_DELAY_S, self.retry_delay_s)))


@dataclass(frozen=True)
class Attempt:
    """A run for one state of a consumer's inputs: number 0 is the first, the others are its retries."""

    number: int
    run_id: str
    outcome: LaunchOutcome
    ended_at: datetime
    """When it ended; of an unfinished run, when it last changed."""
    reason: str = ""
    """Why it was not published, as the run shows it."""


@dataclass(frozen=True)
class AttemptHistory:
    """The attempts for one state of a consumer's inputs, by number. `run_key` is the run key of the first."""

    run_key: str
    attempts: tuple[Attempt, ...] = ()


@dataclass(frozen=True)
class RunUnderWay:
    """A run that computes a partition. `is_finished`: it has ended, and nobody has judged it yet."""

    run_id: str
    is_finished: bool


@dataclass(frozen=True)
class LaunchDecision:
    """The state of a consumer's partition. `run_key` is set if a run is due, and is that run's key.

    `run_id` is the run that the state is about, `outcome` what became of it, `due_at` the time of the next
    retry, `retry_number` its number, counted from 1, and `retries_left` how many there are, this one
    included.
    `reason` is why the run was not published, or why it is unknown what is left; for a change that waits for
    approval it is the ids under which that is given. `earlier_partition` is the partition that has to be
    published first.
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
        """The state as a clause for people."""
        run = f"run {(self.run_id or '')[:8]}"
        cause = f" ({self.reason})" if self.reason else ""
        if self.state is LaunchState.WAITS_FOR_MORE:
            files = f" and min_files={policy.min_files}" if policy.min_files > 1 else ""
            return f"waits for min_rows={policy.min_rows}{files}, or max_age_s={policy.max_age_s:g}"
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
            return f"waits until partition {self.earlier_partition} is published, from which it is computed"
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
    """A clause for what waits for approval, with the command; `approval_ids` are the ids to approve."""
    waits = pluralize(2 if plural else 1, "waits", "wait")
    command = (
        f"branchlake backfill approve {approval_ids[0]}" if approval_ids else "branchlake backfill approve"
    )
    more = f" (and {', '.join(approval_ids[1:])})" if approval_ids[1:] else ""
    return f"{waits} for approval: {command}{more}"


def apply_sensor_state(decision: LaunchDecision, sensor_state: LaunchState | None) -> LaunchDecision:
    """The decision, or `sensor_state` where only a tick of the sensor is missing; None if the sensor ticks."""
    needs_tick = decision.state in (LaunchState.DUE, LaunchState.WAITS_FOR_RETRY, LaunchState.WAITS_FOR_MORE)
    return replace(decision, state=sensor_state, run_key=None) if sensor_state and needs_tick else decision


def attempt_key(first_key: str, attempt_number: int) -> str:
    """The run key of an attempt; `first_key` is that of the first one, number 0."""
    return f"{first_key}-retry{attempt_number}" if attempt_number else first_key


def launch_outcome(run: DagsterRun) -> LaunchOutcome:
    """What became of a run, from its status and the tags that it wrote itself."""
    if not run.is_finished:
        return LaunchOutcome.UNFINISHED
    location = find_run_location(run.tags, run.run_id)
    if location is not None and find_publication(run.tags, location.branch):
        return LaunchOutcome.PUBLISHED
    if run.status is DagsterRunStatus.CANCELED:
        return LaunchOutcome.CANCELED
    status = run.tags.get(RunTag.STATUS, "") if location is not None else ""
    if status in (Status.REFUSED, Status.BLOCKED):
        return LaunchOutcome.REFUSED if status == Status.REFUSED else LaunchOutcome.BLOCKED
    if status in (Status.UNBRANCHED, Status.CONTINUED, Status.UNCHANGED):
        return LaunchOutcome.ENDED
    if run.status is DagsterRunStatus.FAILURE:
        return LaunchOutcome.FAILED
    awaits_verdict = status == Status.PENDING and run.tags.get(RunTag.VERDICT) in UNJUDGED
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
    """Decide about one partition, or about an asset without partitions.

    `unconsumed` is what the consumer as a whole has left, `history` the attempts for the partition's present
    state, `under_way` a run that computes the partition, `earlier_partition` a partition that has to be
    published
    before it, `approval_ids` the ids under which its change has to be approved first. The same arguments give
    the same run key, and each attempt has a key of its own, so a repeated tick launches nothing twice.
    """
    if unconsumed.trouble:
        return LaunchDecision(LaunchState.UNKNOWN, reason=unconsumed.trouble)
    if unconsumed.missing_input:
        return LaunchDecision(LaunchState.WAITS_FOR_INPUT, reason=unconsumed.missing_input)
    if not unconsumed.any:
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
        max(history.attempts, key=lambda one: one.number), history.run_key, policy, now
    )


def _decide_after_attempt(
    last_attempt: Attempt, run_key: str, policy: LaunchPolicy, now: datetime
) -> LaunchDecision:
    """Decide after the newest attempt for the present state."""
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
