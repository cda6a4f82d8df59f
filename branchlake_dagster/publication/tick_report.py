"""What a tick of the publication sensor reports, and backfills that only seem to have succeeded.

Backfills whose runs were not published must not read as successes.

Dagster counts a partition of an asset backfill as done once a run of the backfill has materialised it. When
it has closed the backfill, what was not published is put where it belongs: among what failed, so that
"re-execute from failure" takes it.
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
"""Said of branches that are left alone, at every tick again: 4,300 of them gave 459,000 characters."""


@dataclass
class TickReport:
    """The outcomes of one pass: counted, the first ones in words, and the runs to launch."""

    counts: Counter[PublicationAction] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    check_runs: list[CheckRun] = field(default_factory=list)

    def add(self, outcome: Outcome) -> bool:
        """Whether the outcome is worth a line in the log."""
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
        """All of it in at most a few thousand characters."""
        phrases = {
            PublicationAction.WAITING: ("waits or is at work", "wait or are at work"),
            PublicationAction.KEPT: ("is kept for debugging", "are kept for debugging"),
            PublicationAction.UNKNOWN_RUN: (
                "belongs to no run of this Dagster",
                "belong to no run of this Dagster",
            ),
            PublicationAction.PARKED: (
                "is set aside (`branchlake set-aside`)",
                "are set aside (`branchlake set-aside`)",
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
        """The same in a few words, for the tick's row in Dagster's list: it shows a tick's cursor there."""
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
    """Looks at the newest closed backfills, every 30 s: each is read whole. `now` is the wall clock."""

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._now = now
        self._last_check = datetime.min.replace(tzinfo=UTC)

    def fail_unpublished(self, instance: DagsterInstance, graph: AssetGraph) -> Iterator[str]:
        """A sentence for each backfill that is shown as failed from now on."""
        if self._now() - self._last_check < _CHECK_INTERVAL:
            return
        self._last_check = self._now()
        for backfill in load_closed_backfills(
            instance, after=self._last_check - _OLDEST_BACKFILL, limit=_MAX_BACKFILLS
        ):
            try:
                message = _fail_if_unpublished(instance, graph, backfill)
            except Exception as error:  # noqa: BLE001 - it concerns this backfill, not the publications
                message = f"Backfill {backfill.backfill_id} could not be looked at: {format_error(error)}"
            if message:
                yield message


def _fail_if_unpublished(
    instance: DagsterInstance, graph: AssetGraph, backfill: PartitionBackfill
) -> str | None:
    """None: all that the backfill has materialised is published."""
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
