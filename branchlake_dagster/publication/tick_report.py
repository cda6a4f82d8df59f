"""The report of a publication sensor's tick, and backfills that only seem to have succeeded.

Dagster counts a partition of an asset backfill as done once a run of the backfill has materialized it. After
Dagster has closed the backfill, its unpublished partitions are moved to the failed ones. Then "re-execute
from failure" includes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from dagster import DagsterInstance, RunsFilter

from branchlake_dagster.internals.dagster import (
    BACKFILL_ID_TAG,
    AssetGraph,
    PartitionBackfill,
    fail_backfill,
    load_closed_backfills,
)
from branchlake_dagster.publication.outcome import CheckRun, Outcome, PublicationAction
from branchlake_dagster.publication.parked_runs import format_error
from branchlake_dagster.runs.discarding import iter_materializations, load_newest_run_id
from branchlake_dagster.runs.run_tags import Status
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import format_count, pluralize

_MAX_EXAMPLES = 10
_MAX_EXAMPLE_CHARS = 300
_MAX_LOG_LINES = 500
_ONLY_COUNTED = (
    PublicationAction.WAITING,
    PublicationAction.KEPT,
    PublicationAction.UNKNOWN_RUN,
    PublicationAction.PARKED,
)
"""Actions for branches that are left as they are at every tick. In full, 4,300 branches gave 459,000
characters."""


@dataclass
class TickReport:
    """The outcomes of one pass: counts by action, the first outcomes as text, and check runs to launch."""

    counts: Counter[PublicationAction] = field(default_factory=Counter)
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
            PublicationAction.WAITING: ("waits or is running", "wait or are running"),
            PublicationAction.KEPT: ("is kept for debugging", "are kept for debugging"),
            PublicationAction.UNKNOWN_RUN: (
                "belongs to no run of this Dagster",
                "belong to no run of this Dagster",
            ),
            PublicationAction.PARKED: (
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


_CHECK_INTERVAL = timedelta(seconds=30)
_OLDEST_BACKFILL = timedelta(days=14)
_MAX_BACKFILLS = 20
_UNPUBLISHED_STATUSES = [
    str(one)
    for one in (
        Status.BLOCKED,
        Status.REFUSED,
        Status.FAILED,
        Status.CANCELED,
        Status.INTERRUPTED,
        Status.DISCARDED,
    )
]


class BackfillWatch:
    """Inspects the newest closed backfills every 30 s, because each is read completely.

    `now` is the wall clock.
    """

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._now = now
        self._last_check = datetime.min.replace(tzinfo=UTC)

    def fail_unpublished(self, instance: DagsterInstance, graph: AssetGraph) -> Iterator[str]:
        """Mark backfills with unpublished partitions as failed, and yield a sentence for each."""
        if self._now() - self._last_check < _CHECK_INTERVAL:
            return
        self._last_check = self._now()
        for backfill in load_closed_backfills(
            instance, after=self._last_check - _OLDEST_BACKFILL, limit=_MAX_BACKFILLS
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
    """Return None if everything that the backfill materialized is published."""
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
