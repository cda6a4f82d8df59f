"""An incremental consumer: it reads the change of a table since its stored position, and advances that.

Its table `copy` has the rows of `t` up to the position. The position is a property of `copy`, so undo, expiry
and rebases treat it as the product's own. What the change delivers is compared with the rows of `t`, which
are read without the code that is tested.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta

from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table

from branchlake_dagster.history.capture import capture_change, contains_snapshot, current_position
from branchlake_dagster.history.change import ChangeLost, LossReason, Position
from branchlake_dagster.history.rows import RowReader
from branchlake_dagster.incremental.positions import ConsumptionRecord, read_positions
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster_tests.maintenance_simulation.players import Players, Work
from branchlake_dagster_tests.maintenance_simulation.row_changes import ChangeKind, Row, RowChange, Rows
from branchlake_dagster_tests.maintenance_simulation.world import COPY, NAMESPACE, World
from branchlake_dagster_tests.publication.workbench import frame

INPUT = "t"
_INPUT_NAME = f"{NAMESPACE}.{INPUT}"


@dataclass(frozen=True)
class _ReadState:
    """The rows of the input at a position, and the time of the position's snapshot."""

    rows: Rows
    time: datetime


@dataclass(frozen=True)
class _Delivery:
    """What a consumer has read: the input's rows now, and what it has to write to `copy`."""

    position: Position
    change: RowChange | None
    """None if the input has no new snapshot."""


class PositionConsumer:
    """The consumer of one world. Several of its runs may be open at once."""

    def __init__(self, world: World, players: Players) -> None:
        self._world = world
        self._players = players
        self._states: dict[int | None, _ReadState] = {}
        """What was read at each snapshot of the input."""

    def consume(self) -> None:
        """Read the change since the stored position on a branch, and write it with the new position."""
        players, world = self._players, self._world
        work = players.add_run([])
        players.consumer_runs.add(work.run.run_id)
        with players.ends_with_errors("consumer failed", lambda: players.fail(work)):
            players.begin(work)
            source, own = work.run.table(INPUT), work.run.table(COPY)
            delivery = self._read(source, own)
            if delivery.change is not None:
                self._write(work, own, delivery, delivery.change)
                work.done_changes.append(delivery.change)
                world.note("change consumed", str(delivery.change))
            players.complete(work)

    def check(self) -> None:
        """Require that the change since the position on `main` can be read. Nobody is at work."""
        catalog = self._world.calm_lake.catalog(MAIN)
        try:
            self._read(catalog.load_table((NAMESPACE, INPUT)), catalog.load_table((NAMESPACE, COPY)))
        except NoSuchTableError:
            return  # the input was dropped

    def _read(self, source: Table, own: Table) -> _Delivery:
        """Read the change of `source` since the position in `own`, and compare it with the rows."""
        world = self._world
        rows = world.states.rows(source.metadata_location)
        own_rows = world.states.rows(own.metadata_location)
        positions = read_positions(own.metadata.properties, table=COPY)
        kept = positions.without_lost(lambda snapshot_id: contains_snapshot(own.metadata, snapshot_id))
        world.require(kept == positions, f"{COPY} has lost the result of {positions}")
        record, position = positions.common_position, current_position(source)
        since = record.inputs[_INPUT_NAME] if record is not None else None
        self._note_state(source, rows)
        before = self._states[since.snapshot_id].rows if since is not None else ()
        is_exact = self._players.has_exact_positions()
        world.require(
            own_rows == before or not is_exact,
            f"{COPY} has {own_rows} at a position at which {INPUT} had {before}",
        )
        try:
            added, removed = self._read_change(source, since)
        except ChangeLost as error:
            self._require_legitimate(error, since)
            world.note("change lost", str(error))
            return _Delivery(position, RowChange(COPY, ChangeKind.REPLACE_TABLE, rows))
        delivered = Counter(before)
        delivered.update(added)
        delivered.subtract(removed)
        difference = {row: count for row, count in delivered.items() if count != rows.count(row)}
        world.require(
            not difference and set(rows) <= delivered.keys(),
            f"the change of {INPUT} since {since} gives {dict(delivered)} instead of {rows}",
        )
        if position == since:
            return _Delivery(position, None)
        if removed or (added and not is_exact):
            return _Delivery(position, RowChange(COPY, ChangeKind.REPLACE_TABLE, rows))
        kind = ChangeKind.APPEND if added else ChangeKind.NOTHING
        return _Delivery(position, RowChange(COPY, kind, added))

    def _read_change(self, source: Table, since: Position | None) -> tuple[Rows, Rows]:
        """Return the added and the removed rows since a position. Raises ChangeLost."""
        change = capture_change(source, since, name=_INPUT_NAME)
        self._world.scheduler.pause()
        changed = RowReader(source, change).read()
        return _list_rows(changed.added.to_pylist()), _list_rows(changed.removed.to_pylist())

    def _note_state(self, source: Table, rows: Rows) -> None:
        snapshot = source.current_snapshot()
        moment = datetime.fromtimestamp(snapshot.timestamp_ms / 1000, self._world.now().tzinfo)
        self._states.setdefault(snapshot.snapshot_id, _ReadState(rows, moment))

    def _require_legitimate(self, error: ChangeLost, since: Position | None) -> None:
        """Require that a change is lost only after the time for which positions keep their snapshots.

        If the position's snapshot alone has expired, the change is known, but files that it removed are gone.
        """
        world = self._world
        age = world.now() - self._states[since.snapshot_id].time if since is not None else timedelta(0)
        is_old = age >= timedelta(days=world.lake.settings.position_days)
        world.require(
            error.loss in (LossReason.EXPIRED, LossReason.FILES_GONE) and is_old,
            f"the change of {INPUT} since {since}, which is {age} old, is lost: {error.loss}",
        )

    def _write(self, work: Work, own: Table, delivery: _Delivery, change: RowChange) -> None:
        """Write the change of `copy` and the new position in one commit, as the IO manager does."""
        run, transaction = work.run, own.transaction()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if change.kind is ChangeKind.APPEND:
                transaction.append(frame(change.rows), snapshot_properties=run.properties("append"))
            elif change.kind is ChangeKind.REPLACE_TABLE:
                transaction.overwrite(frame(change.rows), snapshot_properties=run.properties("replace_table"))
        record = ConsumptionRecord(
            {_INPUT_NAME: delivery.position},
            run.run_id,
            run.base,
            snapshot_id=transaction.table_metadata.current_snapshot_id,
        )
        transaction.set_properties({LakeProperty.CONSUMED: record.to_json()})
        transaction.commit_transaction()


def _list_rows(records: list[dict[str, object]]) -> Rows:
    rows: list[Row] = [(str(record["day"]), int(str(record["id"]))) for record in records]
    return tuple(sorted(rows))
