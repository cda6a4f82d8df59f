"""Reports which days of event time batches have changed, as partitions of a second asset for each table.

An ingested table has no Dagster partitions: a batch has records of any days, and which ones is known only
after it was read. So a table with `days_from` has a second asset, `<key>/days`, with a partition for each
day. A sensor compares the table on `main` with the state that it reported last, by the partition values in
manifests. So every publication counts, of batches, of live runs and of reprocessing, and no other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from itertools import islice

import dagster as dg
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import DayTransform, HourTransform

from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.history.capture import capture_change, current_position
from branchlake_dagster.history.change import ChangeLost, Position
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import EventMetadata
from branchlake_dagster.tables.specification import format_table_name, table_identifier
from branchlake_dagster.wording import format_count

MAX_EVENTS = 100
"""The largest number of days that one tick of the sensor reports. Others are reported by the next ticks."""
MAX_LISTED_DAYS = 31
"""The largest number of days that the metadata of a batch lists."""
_FUTURE_DAYS = 31
"""Number of days after the present day that wait until they are partitions.

Such days occur because clocks run ahead, and because some records are about planned events."""
_EPOCH = date(1970, 1, 1)


def days_key(table: IngestTable) -> dg.AssetKey:
    """Return the key of the asset of a table's days: `<key>/days`."""
    return dg.AssetKey([*table.asset.path, "days"])


def days_partitions(table: IngestTable) -> dg.DailyPartitionsDefinition:
    """Return the partitions of the asset of a table's days: from `days_from` to the present day, in UTC."""
    assert table.days_from is not None  # noqa: S101 - only called for tables with days
    return dg.DailyPartitionsDefinition(start_date=table.days_from.isoformat(), end_offset=1)


def days_spec(ingest: Ingest, table: IngestTable) -> dg.AssetSpec:
    """Build the specification of the asset of a table's days. A sensor materializes the days, no run does.

    `ingest` is the ingestion that fills the table; the asset is in its group.
    """
    return dg.AssetSpec(
        days_key(table),
        deps=[table.asset],
        partitions_def=days_partitions(table),
        description=f"The days of event time of {table.asset.to_user_string()}. A day is materialized when a"
        " published batch has changed its rows.",
        kinds={"iceberg"},
        group_name=f"ingest_{ingest.name}",
    )


@dataclass
class DayCounts:
    """The number of rows by day. `outside` is the number of rows in files without a valid day."""

    rows: Counter[date] = field(default_factory=Counter)
    outside: int = 0


def count_rows_by_day(
    files: Iterable[DataFile], metadata: TableMetadata, *, spec_id: int | None = None
) -> DayCounts:
    """Count the rows of files by day, as their partition values show it. Reads no file.

    The day is that of the first partition field with the transform day or hour. `spec_id` is the id of the
    partition spec of files that are in no manifest yet. (default: the id that each file has)
    """
    positions: dict[int, tuple[int, int] | None] = {}
    for spec in metadata.partition_specs:
        hours = [
            (number, 24 if isinstance(part.transform, HourTransform) else 1)
            for number, part in enumerate(spec.fields)
            if isinstance(part.transform, DayTransform | HourTransform)
        ]
        positions[spec.spec_id] = hours[0] if hours else None
    counts = DayCounts()
    for file in files:
        position = positions.get(file.spec_id if spec_id is None else spec_id)
        value = None if position is None else file.partition[position[0]]
        day = None if position is None or value is None else _to_day(value, position[1])
        if day is None:
            counts.outside += file.record_count
        else:
            counts.rows[day] += file.record_count
    return counts


def _to_day(value: int | date, units_per_day: int) -> date | None:
    """Convert a partition value to a date. Return None for a day after year 9999 or before year 1.

    `units_per_day` is 1 for days since 1970, and 24 for hours.
    """
    if isinstance(value, date):
        return value
    try:
        return _EPOCH + timedelta(days=value // units_per_day)
    except OverflowError:
        return None


def format_days(counts: DayCounts) -> str:
    """Format the days with the most rows in the order of time, then the number of the other days.

    Example: `2026-11-24: 1,200, 2026-11-25: 80, 3 other days, without a day: 5`.
    """
    listed = sorted(day for day, _ in counts.rows.most_common(MAX_LISTED_DAYS))
    parts = [f"{day.isoformat()}: {counts.rows[day]:,}" for day in listed]
    if others := len(counts.rows) - len(listed):
        parts.append(f"{format_count(others, 'other day')}")
    if counts.outside:
        parts.append(f"without a day: {counts.outside:,}")
    return ", ".join(parts)


@dataclass(frozen=True)
class TableDays:
    """The state of the reports of one table, which the sensor keeps in its cursor.

    `position` is the snapshot of the table up to which changes were found. `waiting` has the changed days
    that were not reported yet, each with the numbers of rows in added and in removed files.
    """

    position: Position | None = None
    waiting: Mapping[date, tuple[int, int]] = field(default_factory=dict)

    def to_json(self) -> object:
        """Return the state as a dictionary that `json.dumps` accepts."""
        waiting = {day.isoformat(): list(rows) for day, rows in self.waiting.items()}
        return {"at": None if self.position is None else self.position.as_dict(), "days": waiting}

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> TableDays:
        """Parse the dictionary of `to_json`. Raises KeyError, TypeError or ValueError if it is damaged."""
        position, waiting = value["at"], value["days"]
        if not isinstance(waiting, Mapping):
            raise TypeError
        days = {
            date.fromisoformat(day): (int(added), int(removed)) for day, (added, removed) in waiting.items()
        }
        return cls(Position.from_dict(position) if isinstance(position, Mapping) else None, days)


@dataclass(frozen=True)
class DayChanges:
    """The result of `find_changed_days`: the new state of a table's reports.

    `outside` is the number of added rows whose day is not a partition, or not known.
    """

    state: TableDays
    outside: int = 0


def find_changed_days(table: Table, reported: TableDays, *, first: date, last: date) -> DayChanges:
    """Find the days of a table that have changed since a report, and add them to the waiting days.

    `first` and `last` are the first day and the present day of the partitions. Days from `first` to 31 days
    after `last` wait until they are reported. The rows of all other days are only counted. All days of the
    table count as changed if the change since the report is no longer known, because the table was rolled
    back or its snapshots have expired. Reads manifests only.
    """
    name = format_table_name(table.name())
    try:
        change = capture_change(table, reported.position, name=name)
    except ChangeLost:
        change = capture_change(table, None, name=name)
    added = count_rows_by_day((one.file for one in change.added), table.metadata)
    removed = count_rows_by_day((one.file for one in (*change.removed, *change.deletes)), table.metadata)
    waiting = dict(reported.waiting)
    outside = added.outside
    for day in {*added.rows, *removed.rows}:
        if first <= day and day.toordinal() <= last.toordinal() + _FUTURE_DAYS:
            before = waiting.get(day, (0, 0))
            waiting[day] = before[0] + added.rows[day], before[1] + removed.rows[day]
        else:
            outside += added.rows[day]
    return DayChanges(TableDays(current_position(table), waiting), outside)


def take_days(state: TableDays, most: int, *, last: date) -> tuple[dict[date, tuple[int, int]], TableDays]:
    """Return some of the waiting days, and the state without them.

    The result has at most `most` days up to `last`, the newest ones, with their numbers of rows.
    """
    past_days = sorted((day for day in state.waiting if day <= last), reverse=True)
    days = {day: state.waiting[day] for day in islice(past_days, most)}
    waiting = {day: rows for day, rows in state.waiting.items() if day not in days}
    return days, TableDays(state.position, waiting)


def build_day_events(
    table: IngestTable, name: str, days: Mapping[date, tuple[int, int]], outside: int, main_hash: str
) -> Iterator[dg.AssetMaterialization | dg.AssetObservation]:
    """Yield a materialization for each day, and an observation if `outside` is not 0.

    `days` has the numbers of added and removed rows by day. `outside` is the number of rows of other days.
    `name` is the dotted name of the table, and `main_hash` the commit of `main` at which it was read.
    """
    common = {
        EventMetadata.TABLE: dg.MetadataValue.text(name),
        EventMetadata.REF: dg.MetadataValue.text(f"{MAIN}@{main_hash}"),
    }
    for day, (added, removed) in sorted(days.items()):
        metadata = {
            **common,
            EventMetadata.DAY_ROWS_ADDED: dg.MetadataValue.int(added),
            EventMetadata.DAY_ROWS_REMOVED: dg.MetadataValue.int(removed),
        }
        yield dg.AssetMaterialization(days_key(table), partition=day.isoformat(), metadata=metadata)
    if outside:
        yield dg.AssetObservation(
            days_key(table),
            description="Published rows have days that are no partitions, or no day.",
            metadata={**common, EventMetadata.ROWS_OUTSIDE_DAYS: dg.MetadataValue.int(outside)},
        )


class _Tick:
    """One tick of the sensor: the state of each table at a commit of `main`, and the events.

    `errors` has the errors of tables that cannot be read, by name. These tables keep their state, and the
    next tick reads them again.
    """

    def __init__(self, lake: Lakehouse, cursor: str | None) -> None:
        self._lake = lake
        self.events: list[dg.AssetMaterialization | dg.AssetObservation] = []
        self.errors: dict[str, BranchlakeError | OSError] = {}
        self._states: dict[str, TableDays] = {}
        self._reported_hash = ""
        try:
            stored = json.loads(cursor or "{}")
            self._reported_hash = str(stored.get("main", ""))
            tables = stored.get("tables", {})
            self._states = {name: TableDays.from_json(value) for name, value in tables.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            self._reported_hash, self._states = "", {}  # all days are reported anew

    def report(self, tables: Sequence[IngestTable], today: date) -> str:
        """Read the tables if `main` has changed, collect their events, and return the new cursor as JSON.

        `today` is the present day in UTC: later days are not reported. `events` has the events afterwards. A
        table that cannot be read has its error in `errors`, and is read again at the next tick.
        """
        main_hash = self._lake.nessie.reference(MAIN).hash
        for table in tables:
            identifier = table_identifier(table.asset, self._lake.settings.default_namespace)
            name = format_table_name(identifier)
            state, outside = self._states.get(name, TableDays()), 0
            if main_hash != self._reported_hash:
                try:
                    loaded = self._lake.catalog(f"{MAIN}@{main_hash}").load_table(identifier)
                    assert table.days_from is not None  # noqa: S101 - the sensor's tables have days
                    changes = find_changed_days(loaded, state, first=table.days_from, last=today)
                except NoSuchTableError:
                    self._states.pop(name, None)
                    continue
                except (BranchlakeError, OSError) as error:
                    self.errors[name] = error
                    continue
                state, outside = changes.state, changes.outside
            days, self._states[name] = take_days(state, max(0, MAX_EVENTS - len(self.events)), last=today)
            self.events += build_day_events(table, name, days, outside, main_hash)
        states = {name: state.to_json() for name, state in self._states.items()}
        reported_hash = "" if self.errors else main_hash
        return json.dumps({"main": reported_hash, "tables": states}, sort_keys=True)


def build_days_sensor(
    ingest: Ingest,
    *,
    lakehouse_key: str = "lakehouse",
    interval_s: int = 30,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> dg.SensorDefinition:
    """Build the sensor that reports the days of an ingestion's tables that were changed on `main`.

    It starts no run. While nothing is published, a tick costs one request to Nessie. `interval_s` is the
    number of seconds between two ticks.
    """
    tables = [table for table in ingest.tables if table.days_from is not None]

    @dg.sensor(
        name=f"ingest_{ingest.name}_days_sensor",
        minimum_interval_seconds=interval_s,
        required_resource_keys={lakehouse_key},
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Reports which days published batches of {ingest.name} have changed.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        tick = _Tick(resource.lakehouse, context.cursor)
        cursor = tick.report(tables, clock().astimezone(UTC).date())
        days = sum(isinstance(event, dg.AssetMaterialization) for event in tick.events)
        reason = f"{format_count(days, 'day')} reported." if days else "No day has changed."
        for name, error in tick.errors.items():
            context.log.error(f"The days of {name} are not reported, because it cannot be read: {error}")
            reason += f" {name} cannot be read: {error}"
        return dg.SensorResult(skip_reason=reason, cursor=cursor, asset_events=tick.events)

    return sensor
