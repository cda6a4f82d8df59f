"""Whether a consumer is launched now, launched again, or why it is not: decided from plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from dagster import DagsterRun, DagsterRunStatus

from branchlake_dagster.automation.backlog import Unconsumed
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.runs.run_tags import UNJUDGED, Status, place_of, publication_of
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import agree

_LONGEST_DELAY_S = 86_400.0


class Outcome(StrEnum):
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


RETRIED = frozenset({Outcome.FAILED, Outcome.REFUSED})
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


STUCK = frozenset({LaunchState.WAITS_FOR_RETRY, LaunchState.NOT_RETRIED, LaunchState.UNKNOWN})
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

    def reached(self, found: Unconsumed, now: datetime) -> bool:
        """Whether the change is worth a run."""
        if not found.any:
            return False
        enough = found.rows >= self.min_rows and found.files >= self.min_files
        return found.whole or found.new or enough or found.age_s(now) >= self.max_age_s

    def delay(self, number: int) -> timedelta:
        """The time between the end of an attempt and retry `number`, counted from 1."""
        doubled = self.retry_delay_s * 2.0 ** min(number - 1, 60)
        return timedelta(seconds=min(doubled, max(_LONGEST_DELAY_S, self.retry_delay_s)))


@dataclass(frozen=True)
class Attempt:
    """A run for one state of a consumer's inputs: number 0 is the first, the others are its retries."""

    number: int
    run_id: str
    outcome: Outcome
    ended: datetime
    """When it ended; of an unfinished run, when it last changed."""
    reason: str = ""
    """Why it was not published, as the run shows it."""


@dataclass(frozen=True)
class History:
    """The attempts for one state of a consumer's inputs, by number. `key` is the run key of the first."""

    key: str
    attempts: tuple[Attempt, ...] = ()


@dataclass(frozen=True)
class RunUnderWay:
    """A run that computes a partition. `finished`: it has ended, and nobody has judged it yet."""

    run_id: str
    finished: bool


@dataclass(frozen=True)
class LaunchDecision:
    """The state of a consumer's partition. `run_key` is set if a run is due, and is that run's key.

    `run_id` is the run that the state is about, `outcome` what became of it, `due` the time of the next
    retry, `retry` its number, counted from 1, and `retries_left` how many there are, this one included.
    `reason` is why the run was not published, or why it is unknown what is left; for a change that waits for
    approval it is the ids under which that is given. `earlier` is the partition that has to be published
    first.
    """

    state: LaunchState
    run_key: str | None = None
    run_id: str | None = None
    outcome: Outcome | None = None
    due: datetime | None = None
    retries_left: int = 0
    retry: int = 0
    reason: str = ""
    earlier: str = ""

    def text(self, policy: LaunchPolicy) -> str:
        """The state as a clause for people."""
        run = f"run {(self.run_id or '')[:8]}"
        because = f" ({self.reason})" if self.reason else ""
        if self.state is LaunchState.WAITS_FOR_MORE:
            files = f" and min_files={policy.min_files}" if policy.min_files > 1 else ""
            return f"waits for min_rows={policy.min_rows}{files}, or max_age_s={policy.max_age_s:g}"
        if self.state is LaunchState.BEING_COMPUTED:
            return f"is being computed by {run}"
        if self.state is LaunchState.AWAITS_VERDICT:
            return f"waits for the verdict on {run}"
        if self.state is LaunchState.WAITS_FOR_RETRY:
            when = f"{self.due:%Y-%m-%d %H:%M:%S %Z}" if self.due else ""
            return f"{run} {self.outcome}; retries left: {self.retries_left}, the next at {when}{because}"
        if self.state is LaunchState.NOT_RETRIED:
            return f"{run} {self.outcome}; no retries left: correct the cause, then launch it{because}"
        if self.state is LaunchState.WAITS_FOR_EARLIER:
            return f"waits until partition {self.earlier} is published, from which it is computed"
        if self.state is LaunchState.WAITS_FOR_APPROVAL:
            return approval_text(self.reason.split(","))
        if self.state is LaunchState.DUE:
            return "is launched at the sensor's next tick"
        words = {
            LaunchState.NOTHING_LEFT: "nothing is left",
            LaunchState.NO_SENSOR: "no incremental_sensor() launches this asset",
            LaunchState.SENSOR_STOPPED: "its sensor is stopped: start it under Automation",
            LaunchState.SENSOR_NEVER_RAN: "its sensor never ran: start Dagster's daemon",
        }
        return words.get(self.state) or self.reason or str(self.state)


def approval_text(names: Sequence[str], *, plural: bool = False) -> str:
    """A clause for what waits for approval, with the command; `names` are the ids to approve."""
    waits = agree(2 if plural else 1, "waits", "wait")
    command = f"branchlake backfill approve {names[0]}" if names else "branchlake backfill approve"
    more = f" (and {', '.join(names[1:])})" if names[1:] else ""
    return f"{waits} for approval: {command}{more}"


def with_sensor(decision: LaunchDecision, sensor: LaunchState | None) -> LaunchDecision:
    """The decision, or `sensor` where only a tick of the sensor is missing; None if the sensor ticks."""
    waits = decision.state in (LaunchState.DUE, LaunchState.WAITS_FOR_RETRY, LaunchState.WAITS_FOR_MORE)
    return replace(decision, state=sensor, run_key=None) if sensor and waits else decision


def retry_key(key: str, number: int) -> str:
    """The run key of an attempt; `key` is that of the first one, number 0."""
    return f"{key}-retry{number}" if number else key


def outcome_of(run: DagsterRun) -> Outcome:
    """What became of a run, from its status and the tags that it wrote itself."""
    if not run.is_finished:
        return Outcome.UNFINISHED
    place = place_of(run.tags, run.run_id)
    if place is not None and publication_of(run.tags, place.branch):
        return Outcome.PUBLISHED
    if run.status is DagsterRunStatus.CANCELED:
        return Outcome.CANCELED
    word = run.tags.get(RunTag.STATUS, "") if place is not None else ""
    if word in (Status.REFUSED, Status.BLOCKED):
        return Outcome.REFUSED if word == Status.REFUSED else Outcome.BLOCKED
    if word in (Status.UNBRANCHED, Status.CONTINUED, Status.UNCHANGED):
        return Outcome.ENDED
    if run.status is DagsterRunStatus.FAILURE:
        return Outcome.FAILED
    waits = word == Status.PENDING and run.tags.get(RunTag.VERDICT) in UNJUDGED
    return Outcome.AWAITS_VERDICT if waits else Outcome.ENDED


def decide(
    found: Unconsumed,
    history: History,
    under_way: RunUnderWay | None,
    policy: LaunchPolicy,
    now: datetime,
    *,
    earlier: str = "",
    held: Sequence[str] = (),
) -> LaunchDecision:
    """Decide about one partition, or about an asset without partitions.

    `found` is what the consumer as a whole has left, `history` the attempts for the partition's present
    state, `under_way` a run that computes the partition, `earlier` a partition that has to be published
    before it, `held` the ids under which its change has to be approved first. The same arguments give the
    same run key, and each attempt has a key of its own, so a repeated tick launches nothing twice.
    """
    if found.trouble:
        return LaunchDecision(LaunchState.UNKNOWN, reason=found.trouble)
    if found.waiting:
        return LaunchDecision(LaunchState.WAITS_FOR_INPUT, reason=found.waiting)
    if not found.any:
        return LaunchDecision(LaunchState.NOTHING_LEFT)
    if under_way is not None:
        state = LaunchState.AWAITS_VERDICT if under_way.finished else LaunchState.BEING_COMPUTED
        return LaunchDecision(state, run_id=under_way.run_id)
    if held:
        return LaunchDecision(LaunchState.WAITS_FOR_APPROVAL, reason=",".join(held))
    if not policy.reached(found, now):
        return LaunchDecision(LaunchState.WAITS_FOR_MORE)
    if earlier:
        return LaunchDecision(LaunchState.WAITS_FOR_EARLIER, earlier=earlier)
    if not history.attempts:
        return LaunchDecision(LaunchState.DUE, history.key, retries_left=policy.retries)
    return _after(max(history.attempts, key=lambda one: one.number), history.key, policy, now)


def _after(last: Attempt, key: str, policy: LaunchPolicy, now: datetime) -> LaunchDecision:
    """Decide after the newest attempt for the present state."""
    states = {
        Outcome.UNFINISHED: LaunchState.BEING_COMPUTED,
        Outcome.AWAITS_VERDICT: LaunchState.AWAITS_VERDICT,
    }
    left = max(0, policy.retries - last.number)
    about = LaunchDecision(
        states.get(last.outcome, LaunchState.NOT_RETRIED),
        run_id=last.run_id,
        outcome=last.outcome,
        reason=last.reason,
    )
    if last.outcome not in RETRIED or not left:
        return about
    number = last.number + 1
    due = last.ended + policy.delay(number)
    if now < due:
        return replace(about, state=LaunchState.WAITS_FOR_RETRY, due=due, retries_left=left, retry=number)
    key = retry_key(key, number)
    return replace(about, state=LaunchState.DUE, run_key=key, due=due, retries_left=left, retry=number)
