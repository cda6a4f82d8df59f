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
    succeeded_backfills,
)
from branchlake_dagster.publication.outcome import CheckRun, Outcome, PublicationAction
from branchlake_dagster.publication.parked_runs import said
from branchlake_dagster.runs.discarding import materialised, newest_run
from branchlake_dagster.runs.run_tags import Status
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import agree, counted

_EXAMPLES = 10
_LONGEST = 300
_LOGGED = 500
_COUNTED = (
    PublicationAction.WAITING,
    PublicationAction.KEPT,
    PublicationAction.UNKNOWN_RUN,
    PublicationAction.SET_ASIDE,
)
"""Said of branches that are left alone, at every tick again: 4,300 of them gave 459,000 characters."""


@dataclass
class Tick:
    """The outcomes of one pass: counted, the first ones in words, and the runs to launch."""

    counts: Counter[PublicationAction] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    check_runs: list[CheckRun] = field(default_factory=list)

    def add(self, outcome: Outcome) -> bool:
        """Whether the outcome is worth a line in the log."""
        self.counts[outcome.action] += 1
        if outcome.check_run:
            self.check_runs.append(outcome.check_run)
        if outcome.action in _COUNTED:
            return False
        if len(self.examples) < _EXAMPLES:
            text = str(outcome)
            self.examples.append(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…")
        return self._told() <= _LOGGED

    def message(self) -> str:
        """All of it in at most a few thousand characters."""
        others = {
            PublicationAction.WAITING: ("waits or is at work", "wait or are at work"),
            PublicationAction.KEPT: ("is kept for debugging", "are kept for debugging"),
            PublicationAction.UNKNOWN_RUN: (
                "belongs to no run of this Dagster",
                "belong to no run of this Dagster",
            ),
            PublicationAction.SET_ASIDE: (
                "is set aside (`branchlake set-aside`)",
                "are set aside (`branchlake set-aside`)",
            ),
        }
        counted = [f"{count} {agree(count, *others[one])}" for one in others if (count := self.counts[one])]
        more = self._told() - len(self.examples)
        told = [*self.examples, *([f"and {more} more, in the log"] if more else [])]
        rest = f"Of the other branches {', '.join(counted)}." if counted else ""
        if not told:
            return f"Nothing to publish. {rest}".rstrip()
        return " | ".join([*told, *([rest] if rest else [])])

    def row(self) -> str:
        """The same in a few words, for the tick's row in Dagster's list: it shows a tick's cursor there."""
        done = {action: count for action, count in self.counts.items() if action not in _COUNTED}
        return ", ".join(f"{action} {count}" for action, count in done.items()) or "nothing to publish"

    def _told(self) -> int:
        return sum(count for action, count in self.counts.items() if action not in _COUNTED)


_EVERY = timedelta(seconds=30)
_OLDEST_BACKFILL = timedelta(days=14)
_NEWEST = 20
_UNPUBLISHED = [
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
        self._looked = datetime.min.replace(tzinfo=UTC)

    def look(self, instance: DagsterInstance, graph: AssetGraph) -> Iterator[str]:
        """A sentence for each backfill that is shown as failed from now on."""
        if self._now() - self._looked < _EVERY:
            return
        self._looked = self._now()
        for backfill in succeeded_backfills(instance, after=self._looked - _OLDEST_BACKFILL, limit=_NEWEST):
            try:
                told = _fail_unpublished(instance, graph, backfill)
            except Exception as error:  # noqa: BLE001 - it concerns this backfill, not the publications
                told = f"Backfill {backfill.backfill_id} could not be looked at: {said(error)}"
            if told:
                yield told


def _fail_unpublished(
    instance: DagsterInstance, graph: AssetGraph, backfill: PartitionBackfill
) -> str | None:
    """None: all that the backfill has materialised is published."""
    wanted = {BACKFILL_ID_TAG: backfill.backfill_id, RunTag.STATUS: _UNPUBLISHED}
    runs = instance.get_runs(RunsFilter(tags=wanted))
    missing = {
        (key, partition)
        for run in runs
        for key, partition, _ in materialised(instance, run.run_id)
        if graph.has(key) and newest_run(instance, key, partition) == run.run_id
    }
    if not missing:
        return None
    fail_backfill(instance, backfill, graph, missing)
    parts = f"{counted(len(missing), 'partition')} of it {agree(len(missing), 'is', 'are')}"
    return f"Backfill {backfill.backfill_id}: {parts} not on main, so it is shown as failed."
