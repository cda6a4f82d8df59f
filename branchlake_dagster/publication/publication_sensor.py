"""The publication sensor: it publishes run branches that passed their checks and discards the others.

Each tick also judges the runs that wrote to `main` directly, because their branch could not be created. There
is nothing to publish or to revoke, but their checks count. A failure is reported as clearly as possible: the
run is marked as failed and asks for manual validation.

Dagster counts a partition of an asset backfill as done once a run of the backfill has materialized it. After
Dagster has closed the backfill, a tick moves its unpublished partitions to the failed ones. Then "re-execute
from failure" includes them.

No postponed annotations here: Dagster compares the annotation of `context` with the class itself.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain

from dagster import (
    AssetSelection,
    DagsterInstance,
    DagsterRun,
    DefaultSensorStatus,
    RunsFilter,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    sensor,
)

from branchlake_dagster.internals.dagster import (
    BACKFILL_ID_TAG,
    AssetGraph,
    PartitionBackfill,
    fail_backfill,
    load_closed_backfills,
)
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.assessment import collect_evidence
from branchlake_dagster.publication.conditions import never_evaluated
from branchlake_dagster.publication.finishing import FINISHED_STATUSES, MAX_RUNS_PER_PASS
from branchlake_dagster.publication.outcome import (
    CheckRun,
    MainView,
    Outcome,
    RunReport,
    find_other_location,
    report_outcome,
)
from branchlake_dagster.publication.parked_runs import FailedAttempts, format_error
from branchlake_dagster.publication.reconciler import Reconciler, acquire_pass_lock
from branchlake_dagster.publication.verdict import judge_evidence
from branchlake_dagster.runs.discarding import iter_materializations, load_newest_run_id
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_tags import PENDING, RunState, is_opened_by
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import format_count, pluralize

MANUAL_VALIDATION = (
    "Manual validation needed: the run wrote to main directly, so its rows are visible already"
)


def judge_unbranched_runs(
    lake: Lakehouse,
    instance: DagsterInstance,
    graph: AssetGraph,
    *,
    location: str | None = None,
) -> Iterator[Outcome]:
    """Judge the finished unbranched runs that were not judged yet, and yield an outcome for each of them.

    An unbranched run wrote to `main` directly. At most `MAX_RUNS_PER_PASS` runs are read. With `location`,
    runs of other code locations are skipped. An error is recorded on its run and does not stop the others.
    """
    failed_attempts = FailedAttempts(instance)
    run_filter = RunsFilter(
        tags={RunTag.UNBRANCHED: "true", RunTag.VERDICT: PENDING}, statuses=FINISHED_STATUSES
    )
    for run in instance.get_runs(run_filter, limit=MAX_RUNS_PER_PASS):
        if is_opened_by(run.tags, run.run_id) and find_other_location(run, location) is None:
            if (waiting := failed_attempts.waiting_outcome(MAIN, run)) is not None:
                yield waiting
                continue
            try:
                yield _judge_run(lake, instance, run, graph)
            except Exception as error:  # noqa: BLE001 - the error concerns this run alone
                yield failed_attempts.record(MAIN, run, error)


def _judge_run(
    lake: Lakehouse,
    instance: DagsterInstance,
    run: DagsterRun,
    graph: AssetGraph,
) -> Outcome:
    settings = lake.settings
    evidence = collect_evidence(
        instance,
        [run],
        graph,
        write_set=None,
        default_namespace=settings.default_namespace,
        require_checks=settings.require_checks,
    )
    verdict = judge_evidence(evidence, strict_tables=False)
    message = "Written to main directly, without a branch, because Nessie was unavailable; its checks passed."
    why = None
    # Automation follows reports of publications. The name is that of the run, because it has no branch.
    publication: str | None = lake.nessie.reference(MAIN).hash
    if verdict.blocked:
        publication = None
        why = f"{MANUAL_VALIDATION}. {verdict.format_summary()}"
        message = why
        if run.is_success:
            instance.report_run_failed(run, f"{MANUAL_VALIDATION}. {'; '.join(verdict.reasons)}")
    name = f"{MAIN} (run {run.run_id})"
    report = RunReport(
        run,
        evidence,
        verdict,
        name,
        RunState.UNBRANCHED,
        took_s=0.0,
        at=time.time(),
        publication=publication,
        why=why,
        message=message,
        on_main=True,
    )
    report_outcome(instance, report, MainView(lake))
    return Outcome(MAIN, run.run_id, RunState.UNBRANCHED, message, verdict, publication)


# -- backfills that only seem to have succeeded ---------------------------------------------------------

_CHECK_INTERVAL = timedelta(seconds=30)
_OLDEST_BACKFILL = timedelta(days=14)
_MAX_BACKFILLS = 20
_UNPUBLISHED_STATUSES = [
    str(one)
    for one in (
        RunState.BLOCKED,
        RunState.REFUSED,
        RunState.FAILED,
        RunState.CANCELED,
        RunState.INTERRUPTED,
        RunState.DISCARDED,
    )
]


class BackfillWatch:
    """Inspects the newest closed backfills, at most every 30 s because all events of their runs are read.

    At most 20 backfills of the last 14 days are inspected. `now` returns the wall clock time.
    """

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._now = now
        self._last_check = datetime.min.replace(tzinfo=UTC)

    def fail_unpublished(self, instance: DagsterInstance, graph: AssetGraph) -> Iterator[str]:
        """Mark backfills with unpublished partitions as failed, and yield a sentence for each.

        Yields nothing if the last inspection was less than 30 s ago.
        """
        if self._now() - self._last_check < _CHECK_INTERVAL:
            return
        self._last_check = self._now()
        for backfill in load_closed_backfills(
            instance, graph, after=self._last_check - _OLDEST_BACKFILL, limit=_MAX_BACKFILLS
        ):
            try:
                message = _fail_if_unpublished(instance, graph, backfill)
            except Exception as error:  # noqa: BLE001 - the error concerns this backfill alone
                message = f"Backfill {backfill.backfill_id} could not be inspected: {format_error(error)}"
            if message:
                yield message


def _fail_if_unpublished(
    instance: DagsterInstance, graph: AssetGraph, backfill: PartitionBackfill
) -> str | None:
    """Mark a backfill as failed if some of its partitions are not published.

    A partition is not published if its newest materialization is by a run of this backfill that was blocked,
    refused or ended otherwise without publication. Returns a sentence for the log; None if all partitions
    are published.
    """
    run_tags = {BACKFILL_ID_TAG: backfill.backfill_id, RunTag.STATUS: _UNPUBLISHED_STATUSES}
    runs = instance.get_runs(RunsFilter(tags=run_tags))
    missing = {
        (key, partition)
        for run in runs
        for key, partition, _ in iter_materializations(instance, run.run_id)
        if graph.has(key) and load_newest_run_id(instance, key, partition) == run.run_id
    }
    if not missing:
        return None
    fail_backfill(instance, backfill, graph, missing)
    count_phrase = f"{format_count(len(missing), 'partition')} of it {pluralize(len(missing), 'is', 'are')}"
    return f"Backfill {backfill.backfill_id}: {count_phrase} not on main, so it is shown as failed."


# -- the report of a tick --------------------------------------------------------------------------------

_MAX_EXAMPLES = 10
_MAX_EXAMPLE_CHARS = 300
_MAX_LOG_LINES = 500
_ONLY_COUNTED = (
    RunState.WAITING,
    RunState.KEPT,
    RunState.UNKNOWN_RUN,
    RunState.PARKED,
)
"""States of branches that every tick leaves as they are. The report only counts these branches: with a line
for each, 4,300 branches gave 459,000 characters."""


@dataclass
class PassReport:
    """The outcomes of one pass: counts by state, the first ten outcomes as text, and check runs to launch."""

    counts: Counter[RunState] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    check_runs: list[CheckRun] = field(default_factory=list)

    def add(self, outcome: Outcome) -> bool:
        """Add an outcome. Returns whether the tick's log should have a line for it.

        False for states that are only counted, and after 500 lines.
        """
        self.counts[outcome.state] += 1
        if outcome.check_run:
            self.check_runs.append(outcome.check_run)
        if outcome.state in _ONLY_COUNTED:
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
            f"{count} {pluralize(count, *phrases[state])}"
            for state in phrases
            if (count := self.counts[state])
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
        reported_counts = {state: count for state, count in self.counts.items() if state not in _ONLY_COUNTED}
        return (
            ", ".join(f"{state} {count}" for state, count in reported_counts.items()) or "nothing to publish"
        )

    def _count_reported(self) -> int:
        return sum(count for state, count in self.counts.items() if state not in _ONLY_COUNTED)


# -- the sensor ----------------------------------------------------------------------------------------

_PATIENCE_S = 5.0
"""Seconds to wait for runs that publish themselves. Longer than their own wait, so that they do not starve
the sensor."""
_NO_SENSOR_HINT = "Add publication_automation_sensor() to the definitions."


def publication_sensor(
    settings: Settings, lakehouse_key: str = "lakehouse", prefix: str = ""
) -> SensorDefinition:
    """Build the sensor that makes one pass over the lake's run branches per tick.

    `lakehouse_key` is the resource key of the lake. `prefix` is put before the sensor's name.
    """
    backfills = BackfillWatch()

    @sensor(
        name=f"{prefix}publication_sensor",
        required_resource_keys={lakehouse_key},
        minimum_interval_seconds=settings.publish_interval_s,
        default_status=DefaultSensorStatus.RUNNING,
        description="Publishes the branches of finished runs whose checks passed; discards the others.",
        # The sensor launches only checks: those of whole tables that a rebase has changed.
        asset_selection=AssetSelection.all_asset_checks(),
    )
    def publication_sensor_(context: SensorEvaluationContext, **_: object) -> SensorResult | SkipReason:
        # `_`: when a test calls the sensor like a function, Dagster also passes the resources by name.
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        with acquire_pass_lock(resource.lakehouse.settings, patience_s=_PATIENCE_S) as is_acquired:
            if not is_acquired:
                busy = "Another pass over this lake is running."
                return SensorResult(skip_reason=SkipReason(busy), cursor="another pass is running")
            return _run_tick(context, resource.lakehouse, backfills)

    return publication_sensor_


def _run_tick(
    context: SensorEvaluationContext, lake: Lakehouse, backfills: BackfillWatch
) -> SensorResult | SkipReason:
    """Make one pass, within the time budget of the settings, and return the sensor's result.

    The result requests the check runs that rebased states need. Without such requests it is skipped, with the
    report of the pass as the reason.
    """
    repository = context.repository_def
    assert repository is not None  # noqa: S101 - the daemon always evaluates within a code location
    origin = context.code_location_origin
    graph, location = repository.asset_graph, origin.location_name if origin else None
    reconciler = Reconciler.from_lake(lake, context.instance, graph, location=location)
    unbranched_outcomes = judge_unbranched_runs(lake, context.instance, graph, location=location)
    for key in never_evaluated(repository):
        context.log.warning(
            f"{key.to_user_string()} follows publications, but no sensor evaluates it: {_NO_SENSOR_HINT}"
        )
    for message in backfills.fail_unpublished(context.instance, graph):
        context.log.warning(message)
    tick_report = PassReport()
    for outcome in chain(
        reconciler.reconcile_branches(budget_s=lake.settings.publish_budget_s), unbranched_outcomes
    ):
        if tick_report.add(outcome):
            context.log.info(str(outcome))
    if tick_report.check_runs:
        requests = [check_run.to_run_request() for check_run in tick_report.check_runs]
        return SensorResult(run_requests=requests, cursor=tick_report.format_row())
    return SensorResult(skip_reason=SkipReason(tick_report.format_message()), cursor=tick_report.format_row())
