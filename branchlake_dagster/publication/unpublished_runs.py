"""A sensor that alerts people to runs which ended and were not published.

It asks Dagster's run storage for runs by the tag that the publisher writes last, so a run is found whether it
was judged in its own process or by the publication sensor, and whether the daemon was up at that moment.

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
from branchlake_dagster.publication.written_partitions import load_run_partitions
from branchlake_dagster.runs.run_tags import PARKED, Status, is_opened_by
from branchlake_dagster.stored_names import EventMetadata, RunTag
from branchlake_dagster.wording import format_count

STATES = (str(Status.BLOCKED), str(Status.REFUSED), PARKED)
"""What a run can be alerted for: a check failed, it met another run's change, or publishing it breaks."""


_MAX_ALERT_ATTEMPTS = 5
"""Attempts to alert for one run. The ticks of a receiver that is away for longer are red anyway."""
_PAGE = 100
_CLOCK_SKEW = timedelta(seconds=30)
"""How far the clocks of the processes that write to Dagster's database may differ."""
_TICK_S = 30.0
"""Dagster ends an evaluation after 60 s; the next tick goes on with the runs that are left."""
_MAX_EVENTS = 50
"""The newest events of a run's log among which the publisher's report is looked for."""


class AlertFailed(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """An alert could not be delivered. The sensor tries the run again at its next ticks, five times in all.

    Its text names the host, never the whole address, which is a secret of many services.

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
        job_name (str): Its job; `__ASSET_JOB` for assets that were materialized without one.
        state (str): `blocked` (a check failed or is missing), `refused` (another run changed the same rows on
            `main` first), or `set aside` (judging or publishing it failed eight times).
        message (str): What happened and what to do, as the run's log has it.
        reasons (Sequence[str]): The same without advice, one for each check or conflict.
        partitions (Mapping[AssetKey, Set[str | None]]): What the run had written, by asset; None stands for
            an asset without partitions.
        url (Optional[str]): The run's page, if the sensor knows the address of Dagster's UI.

    Examples:
        .. code-block:: python

            def tell_the_owner(run: UnpublishedRun) -> None:
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
        """One line for a person: assets and partitions, message, run."""
        written = ", ".join(_format_asset(key, keys) for key, keys in sorted(self.partitions.items()))
        return f"{written or self.job_name}: {self.message} Run {self.url or self.run_id[:8]}"

    def to_json(self) -> dict[str, Any]:
        """The same as plain values, for a webhook."""
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

    The body has `text`, which incoming webhooks of Slack, Mattermost and Google Chat show, and beside it
    `state`, `run_id`, `job`, `reasons`, `assets` and `url` for programs. Redirects are not followed.

    Args:
        url (str | EnvVar): The address. Many services put a secret into it: use an `EnvVar`, which is read
            at each alert.
        headers (Optional[Mapping[str, str]]): More headers, such as `Authorization`.
        timeout_s (float): Seconds to wait for a connection and for an answer. (default: 10)

    Returns:
        Callable[[UnpublishedRun], None]: Raises `AlertFailed` when the answer is not 2xx or does not come.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import on_blocked, webhook_alert

            alerts = on_blocked(webhook_alert(dg.EnvVar("SLACK_WEBHOOK_URL")))
    """

    def post(run: UnpublishedRun) -> None:
        address = url.get_value() if isinstance(url, EnvVar) else url
        if not address:
            raise ConfigurationError("The address of the webhook is empty.", hint="Set its variable.")
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
            # Its text has the address, and with it the secret.
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

    Each run is alerted once. If the process dies between the alert and its record, the alert is repeated; if
    `alert` raises, the tick fails, the other runs are alerted, and the run is tried again at the next four
    ticks. The first tick starts at the present. A run whose *step* failed is an ordinary failure, for
    Dagster's own `run_failure_sensor`.

    Args:
        alert (Callable[[UnpublishedRun], object]): Called with each run; its result is ignored.
        name (str): The sensor's name; several need names of their own. (default: `on_blocked`)
        states (Sequence[str]): Which of `blocked`, `refused` and `set aside`. (default: all)
        dagster_url (Optional[str]): The address of Dagster's UI, for links such as
            `https://dagster.example.org`.
        all_code_locations (bool): Alert for runs of other code locations of the instance as well.
            (default: False)
        minimum_interval_seconds (int): Seconds between two ticks. (default: 10)
        default_status (DefaultSensorStatus): Whether it starts as running. (default: RUNNING)

    Returns:
        SensorDefinition: With a cursor, the time up to which runs were looked at. A tick costs two queries
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
        description=f"Alerts to runs that were not published: {', '.join(states)}.",
    )
    def alert_sensor(context: SensorEvaluationContext) -> SkipReason:
        now = datetime.now(UTC)
        cursor = _Cursor.parse(context.cursor)
        if cursor is None:
            context.update_cursor(_Cursor(now, now).format())
            return SkipReason("Starts with runs that end from now on.")
        location = None if all_code_locations else _sensor_location(context)
        tag = f"{RunTag.ALERT_PREFIX}{name}"
        sent_count, failures, deadline = 0, list[tuple[DagsterRun, Exception]](), time.monotonic() + _TICK_S
        for run, state in _find_unpublished(context.instance, states, cursor.search_from()):
            attempts = _parse_attempts(run.tags.get(tag, ""), run.run_id)
            if attempts is None or attempts >= _MAX_ALERT_ATTEMPTS:
                continue
            if location is not None and _run_location(run) not in (None, location):
                continue
            if time.monotonic() > deadline:
                return SkipReason(f"{format_count(sent_count, 'alert')} sent, the next tick goes on.")
            try:
                alert(_build_unpublished_run(context.instance, run, state, dagster_url))
            except Exception as error:  # raised below; the other runs are alerted
                context.log.exception("No alert for run %s, attempt %d.", run.run_id, attempts + 1)
                failures.append((run, error))
                context.instance.add_run_tags(run.run_id, {tag: f"{run.run_id} failed {attempts + 1}"})
            else:
                sent_count += 1
                context.instance.add_run_tags(run.run_id, {tag: f"{run.run_id} sent"})
        if failures:
            # The cursor stays, so that the next tick finds these runs again; the tags tell which are done.
            run_ids = ", ".join(run.run_id[:8] for run, _ in failures)
            raise AlertFailed(
                f"{format_count(len(failures), 'alert')} failed, for {run_ids}.",
                hint="The tick's log has each error. A run is tried five times.",
            ) from failures[0][1]
        context.update_cursor(_Cursor(cursor.start, now).format())
        return SkipReason(
            f"{format_count(sent_count, 'alert')} sent." if sent_count else "Every ended run was published."
        )

    return alert_sensor


@dataclass(frozen=True)
class _Cursor:
    """When the sensor ran first, and the time up to which it has looked at runs."""

    start: datetime
    since: datetime

    @classmethod
    def parse(cls, value: str | None) -> "_Cursor | None":
        if not value:
            return None
        values = json.loads(value)
        return cls(datetime.fromisoformat(values["start"]), datetime.fromisoformat(values["since"]))

    def format(self) -> str:
        return json.dumps({"start": self.start.isoformat(), "since": self.since.isoformat()})

    def search_from(self) -> datetime:
        """Some seconds are looked at twice, since another machine's clock may be behind; the tag knows."""
        return max(self.start, self.since - _CLOCK_SKEW)


# -- finding runs --------------------------------------------------------------------------------------


def _find_unpublished(
    instance: DagsterInstance, states: Sequence[str], since: datetime
) -> Iterator[tuple[DagsterRun, str]]:
    """The runs that have come into one of `states` and were changed after `since`, and the state."""
    statuses = [state for state in states if state != PARKED]
    if statuses:
        for run in _load_changed_runs(instance, {RunTag.STATUS: statuses}, since):
            yield run, run.tags[RunTag.STATUS]
    if PARKED in states:
        for run in _load_changed_runs(instance, {RunTag.NEXT_ATTEMPT: PARKED}, since):
            yield run, PARKED


def _load_changed_runs(
    instance: DagsterInstance, tags: Mapping[str, str | list[str]], since: datetime
) -> Iterator[DagsterRun]:
    """All of them are read before the first is given: an alert changes its run, which would come again."""
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
    """How many alerts for this run have failed; None if one was sent. A re-execution inherits the tag."""
    owner, _, state = value.partition(" ")
    if owner != run_id:
        return 0
    return None if state == "sent" else int(state.removeprefix("failed "))


def _sensor_location(context: SensorEvaluationContext) -> str | None:
    origin = context.code_location_origin
    return origin.location_name if origin else None


def _run_location(run: DagsterRun) -> str | None:
    origin = run.remote_job_origin
    return origin.repository_origin.code_location_origin.location_name if origin else None


# -- describing a run ----------------------------------------------------------------------------------


def _build_unpublished_run(
    instance: DagsterInstance, run: DagsterRun, state: str, dagster_url: str | None
) -> UnpublishedRun:
    if state == PARKED:
        reason = run.tags.get(RunTag.REASON, "")
        command = f"`branchlake set-aside retry {run.run_id[:8]}`"
        message = f"Set aside: {reason.rstrip('.')}. Correct the cause, then {command}."
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
    """What the publisher has written into the run's log, and its reasons; the tag's short text otherwise."""
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
