"""Read the entries that were added to the log of alerts since a position, publication by publication.

The position is a snapshot of the table, as for incremental assets. The reader finds files through manifests,
and opens only files of new snapshots. A compaction adds no entries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime

import polars as pl
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table

from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.history.capture import capture_change, current_position
from branchlake_dagster.history.change import (
    ChangeKind,
    ChangeLost,
    ChangeSet,
    LossReason,
    Position,
    RowsUnreadable,
    position_to_json,
)
from branchlake_dagster.history.rows import ORDINAL, SNAPSHOT, RowReader
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.query.connection import LakeReader
from branchlake_dagster.query.reference import MomentExpired, NoSuchState
from branchlake_dagster.sda.alerts.entry_names import ALERT_TABLE
from branchlake_dagster.sda.alerts.log_entries import (
    IDENTITY,
    Entry,
    find_added_entries,
    sort_entries,
    to_entries,
)
from branchlake_dagster.wording import format_count

ENTRIES_REMOVED = "entries removed"
"""A reason of `AlertLogChanged`. The other reasons are the values of `LossReason`."""


class AlertLogChanged(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The log of alerts was rebuilt or rolled back, so it does not continue the entries already delivered.

    `reason` is a `LossReason` or `ENTRIES_REMOVED`.
    """


@dataclass(frozen=True)
class Delivery:
    """New entries in order, and the subscriber's position after them.

    `entries` is empty after a compaction. Each entry has the columns of the table and `snapshot_id`, the
    snapshot that added the entry.
    """

    entries: list[Entry]
    position: Position


class AlertReader:
    """Reads new entries of the log of alerts on `main`.

    Each entry is delivered at least once, if the caller saves the position of a `Delivery` only after it has
    processed the entries. Entries are ordered by commit, alert, sequence, and insert before retract of the
    same sequence.
    """

    def __init__(self, lake: Lakehouse, *, table: str = ALERT_TABLE) -> None:
        self._lake = lake
        self._table = table

    def load_table(self, *, at: datetime | None = None) -> Table | None:
        """Load the log's table from `main` as it is now, or as it was at a time.

        None if the table does not exist, or did not exist then. Raises MomentExpired if the state of that
        time was deleted for its age.
        """
        try:
            return LakeReader(self._lake).table(self._table, at=at)
        except MomentExpired:
            raise
        except (NoSuchTableError, NoSuchState):
            return None

    def head_of_main(self) -> str:
        """Return the last commit of `main`. If it is unchanged, there are no new entries."""
        return self._lake.nessie.reference(MAIN).hash

    def position_at(self, moment: datetime | None = None) -> Position | None:
        """Return the position from which a subscriber gets the entries published after `moment`.

        Args:
            moment: A time with a time zone. None means now.

        Returns:
            The position, or None if the log did not exist at that time, so that all its entries will be new.
        """
        table = self.load_table(at=moment)
        return None if table is None else current_position(table)

    def deliveries(self, position: Position | None) -> Iterator[Delivery]:
        """Yield the entries that were published after a position, oldest first.

        Args:
            position: The position of the last delivery. None delivers the whole log.

        Raises:
            AlertLogChanged: The log was rebuilt or rolled back, or snapshots after the position have expired.
        """
        table = self.load_table()
        if table is None:
            if position is not None:
                raise _changed_error(self._table, LossReason.RECREATED, "The log of alerts was dropped.")
            return
        # If the position is before the first snapshot, the log is read by snapshots unless one expired.
        start = position or Position(str(table.metadata.table_uuid), None)
        try:
            change = capture_change(table, start, name=self._table)
            yield from self._iter_deliveries(table, change)
        except (ChangeLost, RowsUnreadable) as error:
            reason = error.loss if isinstance(error, ChangeLost) else ENTRIES_REMOVED
            raise _changed_error(self._table, reason, error.message) from error

    def _iter_deliveries(self, table: Table, change: ChangeSet) -> Iterator[Delivery]:
        steps = [step for step in change.steps if step.kind is not ChangeKind.COMPACT]
        if not change.whole and not any(step.removed or step.deletes for step in steps):
            for step in steps:
                part = replace(change, added=step.added)
                position = Position(change.up_to.table_uuid, step.snapshot_id)
                yield Delivery(self._read_entries(table, part), position)
            if change.steps and change.steps[-1].kind is ChangeKind.COMPACT:
                yield Delivery([], change.up_to)
            return
        # Entries may be in files of a later snapshot than the one that added them, so only the end is a valid
        # position.
        yield Delivery(self._read_entries(table, change), change.up_to)

    def _read_entries(self, table: Table, change: ChangeSet) -> list[Entry]:
        rows = RowReader(table, change, commits=True).read()
        added, removed = (pl.DataFrame(pl.from_arrow(side)) for side in (rows.added, rows.removed))
        marks = (ORDINAL, SNAPSHOT)
        changed = find_added_entries(added.drop(marks), removed.drop(marks))
        if changed.lost_count:
            raise _changed_error(
                self._table,
                ENTRIES_REMOVED,
                f"{format_count(changed.lost_count, 'entry', 'entries')} of the log of alerts were removed or"
                " altered.",
            )
        entries = added.join(changed.entries, on=list(IDENTITY), how="semi")
        # All entries of a run have one time of report. It keeps the order of commits in rewritten files.
        ordered = sort_entries(entries, ORDINAL, "reported_at")
        return [*to_entries(ordered.drop(ORDINAL).rename({SNAPSHOT: "snapshot_id"}))]


def _changed_error(table: str, reason: str, message: str) -> AlertLogChanged:
    return AlertLogChanged(
        message,
        table=table,
        reason=reason,
        hint="Inform whoever gets the alerts, list the alerts that hold now with"
        " `branchlake sda alerts`, and start anew with a TIME after the log was rebuilt:"
        " branchlake sda alerts --follow --restart --since TIME",
    )


def cursor_of(position: Position | None) -> str:
    """Convert a position to text for the cursor of a Dagster sensor. None gives an empty text."""
    return "" if position is None else position_to_json(position)


def position_of(cursor: str | None) -> Position | None:
    """Convert the text of `cursor_of` to a position. An empty text or None gives None."""
    return Position.from_dict(json.loads(cursor)) if cursor else None
