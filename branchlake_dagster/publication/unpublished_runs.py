"""A sensor that alerts people to runs which ended and were not published.

It searches Dagster's run storage by the tag that the publisher writes last. So it finds a run whether the run
was judged in its own process or by the publication sensor, and whether or not the daemon ran at that moment.

No postponed annotations here: Dagster compares the annotation of `context` with the class itself.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import requests
from dagster import (
    AssetKey,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DefaultSensorStatus,
    EnvVar,
    RunsFilter,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    sensor,
)

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Transient
from branchlake_dagster.publication.new_publications import load_run_partitions
from branchlake_dagster.publication.outcome import find_other_location
from branchlake_dagster.runs.run_tags import RunState, is_opened_by
from branchlake_dagster.stored_names import EventMetadata, RunTag
from branchlake_dagster.wording import format_count

STATES = (str(RunState.BLOCKED), str(RunState.REFUSED), str(RunState.PARKED))
"""The states that cause an alert: a check failed, the run met a conflict, or publishing it failed
repeatedly."""


_MAX_ALERT_ATTEMPTS = 5
"""The most attempts to alert for one run. The failed ticks show that a receiver is down for longer."""
_PAGE = 100
_CLOCK_SKEW = timedelta(seconds=30)
"""How far the clocks of the processes that write to Dagster's database may differ."""
_TICK_S = 30.0
"""The seconds after which a tick sends no further alert; the next tick continues with the remaining runs.

Dagster ends an evaluation after 60 s.
"""
_MAX_EVENTS = 50
"""The number of newest engine events in a run's log that are searched for the publisher's report."""


class AlertFailed(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """An alert could not be delivered. The sensor tries the run again at its next ticks, five times in all.

    The text names only the host: the whole address is a secret for many services.

    Examples:
        .. code-block:: python

            def page(run: UnpublishedRun) -> None:
                if not pager.send(run.text):
                    raise AlertFailed("The pager did not take the message.", run_id=run.run_id)
    """


@dataclass(frozen=True)
class UnpublishedRun:
    """A run that ended and was not published, as the function of an `on_blocked` sensor gets it.

    Attributes:
        run_id (str): The Dagster run.
        job_name (str): Its job; `__ASSET_JOB` for assets that were materialized without a job.
        state (str): `blocked` (a check failed or is missing), `refused` (another run changed the same rows on
            `main` first), or `set aside` (judging or publishing the run failed eight times).
        message (str): What happened and what to do, as in the run's log.
        reasons (Sequence[str]): The reasons without advice, one for each check or conflict.
        partitions (Mapping[AssetKey, Set[str | None]]): The partitions on the run's branch, by asset; None
            stands for an asset without partitions.
        url (Optional[str]): The page of the run, if the sensor knows the address of Dagster's UI.

    Examples:
        .. code-block:: python

            def notify_owners(run: UnpublishedRun) -> None:
                for key in run.partitions:
                    send_mail(OWNERS[key], subject=f"{key.to_user_string()} {run.state}", body=run.text)
    """

    run_id: str
    job_name: str
    state: str
    message: str
    reasons: Sequence[str] = ()
    partitions: Mapping[AssetKey, Set[str | None]] = field(default_factory=dict)
    url: str | None = None

    @property
    def text(self) -> str:
        """The alert as one line: the assets with partitions, the message, and the run's page or short id."""
        written = ", ".join(_format_asset(key, keys) for key, keys in sorted(self.partitions.items()))
        return f"{written or self.job_name}: {self.message} Run {self.url or self.run_id[:8]}"

    def to_json(self) -> dict[str, Any]:
        """Return the JSON body for a webhook.

        The keys are `text`, `state`, `run_id`, `job`, `reasons`, `assets` and `url`.
        """
        return {
            "text": self.text,
            "state": self.state,
            "run_id": self.run_id,
            "job": self.job_name,
            "reasons": list(self.reasons),
            "assets": {
                key.to_user_string(): sorted(part for part in keys if part is not None)
                for key, keys in sorted(self.partitions.items())
            },
            "url": self.url,
        }


def _format_asset(key: AssetKey, partitions: Set[str | None]) -> str:
    shown = sorted(part for part in partitions if part is not None)
    if len(shown) > 3:
        return f"{key.to_user_string()} ({shown[0]} to {shown[-1]}, {len(shown)} partitions)"
    return f"{key.to_user_string()} ({', '.join(shown)})" if shown else key.to_user_string()


def webhook_alert(
    url: str | EnvVar, *, headers: Mapping[str, str] | None = None, timeout_s: float = 10.0
) -> Callable[[UnpublishedRun], None]:
    """A function for `on_blocked` that posts JSON to a webhook.

    The body has `text`, which incoming webhooks of Slack, Mattermost and Google Chat show. For programs it
    also has `state`, `run_id`, `job`, `reasons`, `assets` and `url`. Redirects are not followed.

    Args:
        url (str | EnvVar): The address. Many services put a secret into it: use an `EnvVar`, which is read
            for each alert.
        headers (Optional[Mapping[str, str]]): Additional headers, such as `Authorization`.
        timeout_s (float): Seconds to wait for a connection and for an answer. (default: 10)

    Returns:
        Callable[[UnpublishedRun], None]: The function that posts. It raises `AlertFailed` if the answer is
            not 2xx or does not arrive, and `ConfigurationError` if the address is empty.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import on_blocked, webhook_alert

            alerts = on_blocked(webhook_alert(dg.EnvVar("SLACK_WEBHOOK_URL")))
    """

    def post(run: UnpublishedRun) -> None:
        address = url.get_value() if isinstance(url, EnvVar) else url
        if not address:
            raise ConfigurationError(
                "The address of the webhook is empty.",
                hint="Set the environment variable that webhook_alert(…) reads.",
            )
        host = urlsplit(address).hostname
        try:
            answer = requests.post(
                address,
                json=run.to_json(),
                headers=dict(headers or {}),
                timeout=timeout_s,
                allow_redirects=False,
            )
        except requests.RequestException as error:
            # The text of the error has the address, and with it the secret.
            raise AlertFailed(
                f"The webhook at {host} did not answer: {type(error).__name__}.", run_id=run.run_id
            ) from None
        if not 200 <= answer.status_code < 300:
            raise AlertFailed(f"The webhook at {host} answered {answer.status_code}.", run_id=run.run_id)

    return post


def on_blocked(
    alert: Callable[[UnpublishedRun], object],
    *,
    name: str = "on_blocked",
    states: Sequence[str] = STATES,
    dagster_url: str | None = None,
    all_code_locations: bool = False,
    minimum_interval_seconds: int = 10,
    default_status: DefaultSensorStatus = DefaultSensorStatus.RUNNING,
) -> SensorDefinition:
    """A sensor that calls `alert` for each run whose steps succeeded and that was not published.

    Each run is alerted once. If the process dies between the alert and its record, the alert is repeated. If
    `alert` raises, the tick fails after it has alerted the other runs, and the next four ticks try the run
    again. The first tick starts at the current time. A run with a failed *step* is an ordinary failure, for
    Dagster's own `run_failure_sensor`.

    Args:
        alert (Callable[[UnpublishedRun], object]): Called with each run; its result is ignored.
        name (str): The sensor's name; each sensor needs its own. (default: `on_blocked`)
        states (Sequence[str]): Some of `blocked`, `refused` and `set aside`. (default: all)
        dagster_url (Optional[str]): The address of Dagster's UI for links, such as
            `https://dagster.example.org`.
        all_code_locations (bool): Whether to alert for runs of other code locations of the instance too.
            (default: False)
        minimum_interval_seconds (int): Seconds between two ticks. (default: 10)
        default_status (DefaultSensorStatus): Whether the sensor starts as running. (default: RUNNING)

    Returns:
        SensorDefinition: Its cursor is the time up to which runs were inspected. A tick costs two queries
            for the runs that changed since.

    Raises:
        ConfigurationError: A state does not exist.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import branchlake_definitions, on_blocked

            alerts = on_blocked(lambda run: print(run.text), dagster_url="http://127.0.0.1:3000")
            defs = branchlake_definitions(definitions=dg.Definitions(sensors=[alerts]))
    """
    if unknown := sorted(set(states) - set(STATES)):
        raise ConfigurationError(
            f"The sensor {name} cannot alert for the state {unknown[0]!r}.",
            hint=f"States: {', '.join(STATES)}.",
        )

    @sensor(
        name=name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description=f"Alerts people to runs that were not published: {', '.join(states)}.",
    )
    def alert_sensor(context: SensorEvaluationContext) -> SkipReason:
        now = datetime.now(UTC)
        cursor = _Cursor.parse(context.cursor)
        if cursor is None:
            context.update_cursor(_Cursor(now, now).format())
            return SkipReason("The sensor starts with runs that end from now on.")
        origin = context.code_location_origin
        location = None if all_code_locations or origin is None else origin.location_name
        tag = f"{RunTag.ALERT_PREFIX}{name}"
        sent_count, failures, deadline = 0, list[tuple[DagsterRun, Exception]](), time.monotonic() + _TICK_S
        for run, state in _find_unpublished(context.instance, states, cursor.search_from()):
            attempts = _parse_attempts(run.tags.get(tag, ""), run.run_id)
            if attempts is None or attempts >= _MAX_ALERT_ATTEMPTS:
                continue
            if find_other_location(run, location) is not None:
                continue
            if time.monotonic() > deadline:
                return SkipReason(f"{format_count(sent_count, 'alert')} sent. The next tick continues.")
            try:
                alert(_build_unpublished_run(context.instance, run, state, dagster_url))
            except Exception as error:  # raised below, after the other alerts
                context.log.exception("No alert for run %s, attempt %d.", run.run_id, attempts + 1)
                failures.append((run, error))
                context.instance.add_run_tags(run.run_id, {tag: f"{run.run_id} failed {attempts + 1}"})
            else:
                sent_count += 1
                context.instance.add_run_tags(run.run_id, {tag: f"{run.run_id} sent"})
        if failures:
            # The cursor stays, so that the next tick finds these runs again. The tags show which alerts were
            # sent.
            run_ids = ", ".join(run.run_id[:8] for run, _ in failures)
            raise AlertFailed(
                f"{format_count(len(failures), 'alert')} failed, for the runs {run_ids}.",
                hint="The tick's log has each error. Each run is tried five times.",
            ) from failures[0][1]
        context.update_cursor(_Cursor(cursor.start, now).format())
        return SkipReason(
            f"{format_count(sent_count, 'alert')} sent." if sent_count else "No new unpublished runs."
        )

    return alert_sensor


@dataclass(frozen=True)
class _Cursor:
    """The time of the sensor's first tick, and the time up to which it has inspected runs."""

    start: datetime
    since: datetime

    @classmethod
    def parse(cls, value: str | None) -> "_Cursor | None":
        """Parse a stored cursor. None if there is none, or if somebody set it to something else."""
        try:
            values = json.loads(value or "{}")
            cursor = cls(datetime.fromisoformat(values["start"]), datetime.fromisoformat(values["since"]))
        except (ValueError, KeyError, TypeError):
            return None
        return cursor if cursor.start.tzinfo and cursor.since.tzinfo else None

    def format(self) -> str:
        return json.dumps({"start": self.start.isoformat(), "since": self.since.isoformat()})

    def search_from(self) -> datetime:
        """Return the time from which changed runs are searched.

        Some seconds are searched twice, because another machine's clock may be behind. The run's tag prevents
        a second alert.
        """
        return max(self.start, self.since - _CLOCK_SKEW)


# -- finding runs --------------------------------------------------------------------------------------


def _find_unpublished(
    instance: DagsterInstance, states: Sequence[str], since: datetime
) -> Iterator[tuple[DagsterRun, str]]:
    """Find the runs that came into one of `states` and changed after `since`; yield each with its state."""
    statuses = [state for state in states if state != RunState.PARKED]
    if statuses:
        for run in _load_changed_runs(instance, {RunTag.STATUS: statuses}, since):
            yield run, run.tags[RunTag.STATUS]
    if RunState.PARKED in states:
        for run in _load_changed_runs(instance, {RunTag.NEXT_ATTEMPT: str(RunState.PARKED)}, since):
            yield run, str(RunState.PARKED)


def _load_changed_runs(
    instance: DagsterInstance, tags: Mapping[str, str | list[str]], since: datetime
) -> Iterator[DagsterRun]:
    """Load the runs with these tags that changed after `since`.

    All pages are read before the first run is returned: an alert changes its run, which would then appear
    again.
    """
    runs: dict[str, DagsterRun] = {}
    while True:
        page = instance.get_run_records(
            RunsFilter(tags=dict(tags), updated_after=since),
            limit=_PAGE,
            order_by="update_timestamp",
            ascending=True,
        )
        runs |= {record.dagster_run.run_id: record.dagster_run for record in page}
        if len(page) < _PAGE or page[-1].update_timestamp <= since:
            break
        since = page[-1].update_timestamp
    # A re-execution has its parent's tags until it opens a branch of its own.
    return (run for run in runs.values() if is_opened_by(run.tags, run.run_id))


def _parse_attempts(value: str, run_id: str) -> int | None:
    """Return the number of failed alerts that the tag value records for this run; None if one was sent.

    A re-execution inherits the tag of its parent. That tag names another run and is ignored, so the result
    is 0.
    """
    owner, _, state = value.partition(" ")
    if owner != run_id:
        return 0
    return None if state == "sent" else int(state.removeprefix("failed "))


# -- describing a run ----------------------------------------------------------------------------------


def _build_unpublished_run(
    instance: DagsterInstance, run: DagsterRun, state: str, dagster_url: str | None
) -> UnpublishedRun:
    if state == RunState.PARKED:
        reason = run.tags.get(RunTag.REASON, "")
        command = f"`branchlake set-aside retry {run.run_id[:8]}`"
        message = f"Parked: {reason.rstrip('.')}. Correct the cause, then run {command}."
        reasons: Sequence[str] = (reason,)
    else:
        message, reasons = _read_report(instance, run)
    return UnpublishedRun(
        run.run_id,
        run.job_name,
        state,
        message,
        reasons,
        load_run_partitions(instance, run),
        f"{dagster_url.rstrip('/')}/runs/{run.run_id}" if dagster_url else None,
    )


def _read_report(instance: DagsterInstance, run: DagsterRun) -> tuple[str, Sequence[str]]:
    """Return the publisher's message and its reasons from the run's log.

    If the log has no report of the publisher, both are taken from the run's tag for the reason (at most 250
    characters).
    """
    reason = run.tags.get(RunTag.REASON, "")
    records = instance.get_records_for_run(
        run.run_id, of_type=DagsterEventType.ENGINE_EVENT, limit=_MAX_EVENTS, ascending=False
    ).records
    for record in records:
        event = record.event_log_entry.dagster_event
        metadata = event.engine_event_data.metadata if event else {}
        if event and event.message and EventMetadata.VERDICT in metadata:
            reasons_metadata = metadata.get(EventMetadata.REASONS)
            lines = str(reasons_metadata.value).splitlines() if reasons_metadata else [reason]
            return event.message, tuple(line.removeprefix("- ") for line in lines if line)
    return f"Not published: {reason}", (reason,) if reason else ()
