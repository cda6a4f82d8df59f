"""Reads and writes a table's consumption records, which state how far the table has consumed its inputs.

The records are properties of the table.

A record counts for rows, but it names them by partition keys. If the asset's partitions change from days to
weeks, days and weeks share keys. A day that was ahead of the common position must not count for the week with
the same key. So each record names its partition definition, and `fit_positions` returns the positions that
still count under the present definition.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from dagster import (
    DynamicPartitionsDefinition,
    MultiPartitionsDefinition,
    PartitionsDefinition,
    TimeWindowPartitionsDefinition,
)
from pyiceberg.table.metadata import TableMetadata

from branchlake_dagster.history.capture import contains_snapshot
from branchlake_dagster.history.change import Position
from branchlake_dagster.incremental.affected_partitions import dimension_definitions
from branchlake_dagster.incremental.declaration import Consumer
from branchlake_dagster.incremental.valid_through import InputTime, ValidThrough, earliest_time, ingested_time
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.errors import PositionUnreadable
from branchlake_dagster.tables.specification import format_table_name
from branchlake_dagster.wording import format_count

_T = TypeVar("_T")


@dataclass(frozen=True)
class ConsumptionRecord:
    """The positions up to which a run has consumed each input, by dotted table name.

    `base_hash` is the hash of `main` at which the run began. `coverage` describes the partitions that existed
    then, see `partition_coverage`. Nothing was consumed for a partition that was created later, even if its
    rows existed.
    """

    inputs: Mapping[str, Position]
    run_id: str = ""
    base_hash: str = ""
    coverage: Mapping[str, Any] = field(default_factory=dict)
    snapshot_id: int | None = None
    """The snapshot of the consumer's table with the run's result; None if there is none or it is unknown."""
    partition_identity: Mapping[str, str] = field(default_factory=dict)
    """How the partitions were defined then, see `partition_identity`.

    Empty if it was not recorded, or if there were no partitions.
    """
    extent: Mapping[str, str] = field(default_factory=dict)
    """For the record of one partition: which window or keys it had then, see `partition_extent`."""
    predecessor_run: str = ""
    """If partitions are computed in order: the id of the run that had computed the previous partition."""
    toggle: bool = False
    """A value without meaning that each appending run reverses if it does not move the common position.

    It makes such a run conflict with a run that moves the common position, see `advance_positions`.
    """
    valid_through: ValidThrough | None = None
    """The times up to which the inputs, and the table after the run, were complete; None if not known."""

    def inputs_time_ms(self, inputs: Iterable[str], sources: frozenset[str]) -> int | None:
        """Return the time up to which all inputs were complete when they were consumed, in ms since 1970.

        None if the time is not known, if one of `inputs` was not consumed, or if the recorded sources (the
        ingestions from which the inputs are derived) are not exactly `sources`: then older rows may exist
        that were not consumed.
        """
        recorded = self.valid_through
        if recorded is None or recorded.sources != sources or not self.inputs.keys() >= {*inputs}:
            return None
        return recorded.inputs_ms

    def to_json(self) -> str:
        """Return the record as the value of a table property."""
        return json.dumps(
            {
                "inputs": {name: position.as_dict() for name, position in sorted(self.inputs.items())},
                "run": self.run_id,
                "base": self.base_hash,
                **({"covers": dict(self.coverage)} if self.coverage else {}),
                **({"at": self.snapshot_id} if self.snapshot_id is not None else {}),
                **({"definition": dict(self.partition_identity)} if self.partition_identity else {}),
                **({"extent": dict(self.extent)} if self.extent else {}),
                **({"follows": self.predecessor_run} if self.predecessor_run else {}),
                **({"turned": True} if self.toggle else {}),
                **({"valid_through": self.valid_through.as_dict()} if self.valid_through else {}),
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, content: str) -> ConsumptionRecord:
        """Parse the result of `to_json`, the value of a table property.

        Raises ValueError for a text that is not JSON, KeyError for a missing field, and TypeError for JSON
        that is not an object, or for a field of another type.
        """
        try:
            values = _require_type(json.loads(content), dict)
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error
        valid_through = values.get("valid_through")
        return cls(
            {
                name: Position.from_dict(position)
                for name, position in _require_type(values["inputs"], dict).items()
            },
            _require_type(values["run"], str),
            _require_type(values["base"], str),
            _require_type(values.get("covers", {}), dict),
            None if values.get("at") is None else _require_type(values["at"], int),
            _require_type(values.get("definition", {}), dict),
            _require_type(values.get("extent", {}), dict),
            _require_type(values.get("follows", ""), str),
            _require_type(values.get("turned", False), bool),
            None if valid_through is None else ValidThrough.from_dict(valid_through),
        )


def _require_type(value: object, kind: type[_T]) -> _T:
    """Return a field of a parsed record. Raises TypeError if it does not have the type `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


@dataclass(frozen=True)
class Unconsumed:
    """The published change that a consumer has not consumed: `rows` in `files` changed since `oldest`.

    `whole` means that the consumer has consumed nothing yet or must start again; then nothing is counted.
    `new` means that no file changed, but a run is needed: some partitions were defined later than their rows,
    or are computed from a recomputed partition, or a lost change is skipped. `trouble` is the reason why the
    change is unknown. `missing_input` is a message about an input that does not exist. Rows outside all
    partitions do not count.
    """

    files: int = 0
    rows: int = 0
    oldest: datetime | None = None
    whole: bool = False
    new: bool = False
    trouble: str | None = None
    missing_input: str | None = None

    @property
    def has_any(self) -> bool:
        """Whether there is something to consume."""
        return self.whole or self.new or self.files > 0

    @property
    def any(self) -> bool:
        """The former name of `has_any`. It works until 1.0."""
        return self.has_any

    def text(self) -> str:
        """Return `format_summary()`, of which this is the former name. It works until 1.0."""
        return self.format_summary()

    def age_s(self, now: datetime) -> float:
        """Return the seconds since the oldest unconsumed change was written; 0 if nothing is left."""
        return max(0.0, (now - self.oldest).total_seconds()) if self.oldest else 0.0

    def format_summary(self) -> str:
        """Format the unconsumed change as a phrase for people, or return the reason why it is unknown."""
        if self.trouble or self.missing_input:
            return str(self.trouble or self.missing_input)
        if self.whole:
            return "everything, for the first time or again"
        if self.new:
            return (
                "all rows of partitions that are new, redefined, or computed from a recomputed partition; or"
                " the record that a lost change is skipped"
            )
        return (
            f"{format_count(self.rows, 'row')} in {format_count(self.files, 'file')}"
            if self.files
            else "nothing"
        )


@dataclass(frozen=True)
class Positions:
    """The positions up to which a table has consumed its inputs.

    `partitions` has the records of single partitions. `common_position` applies to all other partitions that
    it covers, or to a table without partitions; None if it was never recorded.
    """

    common_position: ConsumptionRecord | None = None
    partitions: Mapping[str, ConsumptionRecord] = field(default_factory=dict)
    void_partitions: frozenset[str] = frozenset()
    """Partitions whose records do not count any more.

    The next update that moves the common position removes their properties.
    """
    restart_reason: str = ""
    """Why a recorded position does not count any more, as part of a sentence; empty if all of them count."""
    may_hold_old_rows: bool = False
    """Whether the table may have rows of any partition that were computed before."""
    redefined_extents: tuple[Mapping[str, str], ...] = ()
    """The extents of partitions that were ahead of the common position under another definition.

    `fit_positions` computes them.
    """

    def recorded_column_ids(self, input_name: str, table_uuid: str) -> dict[str, int]:
        """Return the field ids of columns of an input that any record has, by name; the highest id of each.

        Ids of another table than the one with this UUID do not count.
        """
        records = [*self.partitions.values(), *([self.common_position] if self.common_position else [])]
        recorded = [record.inputs[input_name] for record in records if input_name in record.inputs]
        ids = [pair for one in recorded if one.table_uuid == table_uuid for pair in one.column_ids]
        return dict(sorted(ids))

    def without_lost(self, is_current: Callable[[int | None], bool]) -> Positions:
        """Return the positions without those whose result is no longer in the table.

        `is_current` gets the `snapshot_id` of a record, which may be None, and returns whether the table
        still has its result.
        """
        partitions = {
            name: record for name, record in self.partitions.items() if is_current(record.snapshot_id)
        }
        common_position = (
            self.common_position
            if self.common_position is not None and is_current(self.common_position.snapshot_id)
            else None
        )
        void_partitions = self.void_partitions | (self.partitions.keys() - partitions.keys())
        has_lost = common_position != self.common_position or partitions != self.partitions
        reason = "the asset's own table was rolled back" if has_lost else self.restart_reason
        may_hold_old_rows = self.may_hold_old_rows or common_position != self.common_position
        return replace(
            self,
            common_position=common_position,
            partitions=partitions,
            void_partitions=void_partitions,
            restart_reason=reason,
            may_hold_old_rows=may_hold_old_rows,
        )

    def find_record(self, partition: str | None, is_covered: Callable[[], bool]) -> ConsumptionRecord | None:
        """Return the consumption record that applies to a partition; None if nothing was consumed for it.

        `is_covered` returns whether the common position applies to the partition. For a table without
        partitions, `partition` is None.
        """
        if partition is None:
            return self.common_position
        if partition in self.partitions:
            return self.partitions[partition]
        return self.common_position if self.common_position is not None and is_covered() else None

    def run_of(self, partition: str, is_covered: Callable[[], bool]) -> str:
        """Return the id of the run that computed a partition; the empty string if no record applies to it.

        For a partition at the common position, this is the run that recorded the common position. For
        `is_covered` see `find_record`.
        """
        record = self.find_record(partition, is_covered)
        return record.run_id if record is not None else ""


def property_name(partition: str | None) -> str:
    """Return the name of the table property for a partition, or for the common position (None)."""
    return LakeProperty.CONSUMED if partition is None else f"{LakeProperty.CONSUMED_PREFIX}{partition}"


def read_positions(properties: Mapping[str, str], *, table: str) -> Positions:
    """Read the positions from a table's properties; empty if nothing is recorded.

    Raises PositionUnreadable. `table` is the table's name for the message.
    """
    common_position: ConsumptionRecord | None = None
    partitions: dict[str, ConsumptionRecord] = {}
    for name, value in properties.items():
        if name != LakeProperty.CONSUMED and not name.startswith(LakeProperty.CONSUMED_PREFIX):
            continue
        try:
            record = ConsumptionRecord.from_json(value)
        except (ValueError, KeyError, TypeError) as error:
            raise PositionUnreadable(
                f"Property {name} cannot be read, so it is not known what the table has consumed.",
                table=table,
                hint="Launch the asset with the run tag branchlake/rebuild=true to compute everything anew.",
            ) from error
        if name == LakeProperty.CONSUMED:
            common_position = record
        else:
            partitions[name.removeprefix(LakeProperty.CONSUMED_PREFIX)] = record
    return Positions(common_position, partitions)


def recorded_time(metadata: TableMetadata, name: str) -> InputTime | None:
    """Return the time up to which a table is complete by its own properties; None if they do not show it.

    For a consumer's table, this is the latest time that one of its runs has recorded, if the table still has
    the results of all of these runs. The table may be complete up to a later time, because newer records of
    its inputs are not read. `name` is the dotted name of the table, which is among the sources of the time.
    """
    times = (
        [ingested_time(metadata, name)]
        if any(key.startswith(LakeProperty.OFFSETS_PREFIX) for key in metadata.properties)
        else []
    )
    try:
        positions = read_positions(metadata.properties, table=name)
    except PositionUnreadable:
        return None
    records = [
        *positions.partitions.values(),
        *([positions.common_position] if positions.common_position else []),
    ]
    if records:
        times.append(
            _latest_time(records, name)
            if all(contains_snapshot(metadata, record.snapshot_id) for record in records)
            else None
        )
    return earliest_time(times)


def _latest_time(records: Iterable[ConsumptionRecord], name: str) -> InputTime | None:
    """Return the latest time, or None if one record has no time, or the sources of the records differ.

    A run without a time may have consumed an input that had lost rows, whatever an earlier run recorded.
    """
    times: list[InputTime] = []
    for record in records:
        recorded = record.valid_through
        if recorded is None or recorded.table_ms is None:
            return None
        times.append(InputTime(recorded.table_ms, recorded.sources).with_partitions(name, record.coverage))
    latest = max(times, key=lambda time: time.ms)
    return latest if all(time.sources == latest.sources for time in times) else None


@dataclass(frozen=True)
class PropertyUpdate:
    """Table properties to set and to remove."""

    set: Mapping[str, str]
    remove: tuple[str, ...] = ()


def advance_positions(
    positions: Positions,
    record: ConsumptionRecord,
    partitions: Iterable[str],
    remaining: Iterable[str] | None,
    *,
    keep_entries: bool = False,
    extents: Mapping[str, Mapping[str, str]] | None = None,
    predecessor_runs: Mapping[str, str] | None = None,
) -> PropertyUpdate:
    """Return the property changes of a run that consumed its inputs up to `record` for these partitions.

    `remaining` are the partitions that still have something to consume up to `record`, or None if they are
    not known. If all of them belong to the run, `record` becomes the common position, and partitions need no
    entries of their own.

    `keep_entries` sets the entries of the run's partitions even then, so that two runs of one partition
    always conflict. A run that does not move the common position then reverses its `toggle`, so that it
    conflicts with a run that moves the common position in the meantime and removes entries. Two runs that
    reverse it set the same value and do not conflict.

    `extents` describes the window or keys of each partition. `predecessor_runs` maps each partition to the
    run that had computed the previous partition, if partitions are computed in order.
    """
    entries = {
        partition: replace(
            record,
            extent=(extents or {}).get(partition, {}),
            predecessor_run=(predecessor_runs or {}).get(partition, ""),
        )
        for partition in partitions
    }
    own_properties = {property_name(partition): entry.to_json() for partition, entry in entries.items()}
    if own_properties and (
        remaining is None
        or not {property_name(partition) for partition in remaining} <= own_properties.keys()
    ):
        common_position = positions.common_position if keep_entries else None
        return PropertyUpdate(
            own_properties
            | (
                {LakeProperty.CONSUMED: replace(common_position, toggle=not common_position.toggle).to_json()}
                if common_position
                else {}
            )
        )
    entry_properties = own_properties if keep_entries else {}
    removed_names = {
        property_name(partition) for partition in (*positions.partitions, *positions.void_partitions)
    } - entry_properties.keys()
    return PropertyUpdate(
        {LakeProperty.CONSUMED: record.to_json(), **entry_properties}, tuple(sorted(removed_names))
    )


_COLUMN = " of "
_DEFINED_ANEW = "its partitions were redefined after it was computed"


def partition_identity(consumer: Consumer) -> dict[str, str]:
    """Describe how the consumer's partitions are defined, by dimension: kind, own column, input columns.

    The first start and the last end are not included, because they may move. Empty without partitions.
    """
    if not consumer.tracks_partitions or consumer.definition is None:
        return {}
    parts = dimension_definitions(consumer.definition)
    return {
        name: f"{_partition_kind(parts[name])}{_COLUMN}{own_column}"
        f" from {_format_input_columns(consumer, name)}"
        for name, own_column in consumer.spec.columns_by_dimension.items()
        if name in parts
    }


def _format_input_columns(consumer: Consumer, dimension: str) -> str:
    """Return the input column of a partition dimension, if all inputs have a column of the same name.

    Otherwise return the columns of all inputs as `input.column`, separated by commas.
    """
    by_input = {key: consumer.column_of_input(key, dimension) for key in consumer.inputs}
    if len({*by_input.values()}) == 1:
        return next(iter(by_input.values()))
    return ", ".join(sorted(f"{key.to_user_string()}.{column}" for key, column in by_input.items()))


def _partition_kind(definition: PartitionsDefinition[str]) -> str:
    if isinstance(definition, TimeWindowPartitionsDefinition):
        return f"{definition.cron_schedule} {definition.timezone} {definition.fmt}"
    if isinstance(definition, DynamicPartitionsDefinition):
        return "dynamic"
    return type(definition).__name__


def partition_extent(definition: PartitionsDefinition[str], key: str) -> dict[str, str]:
    """Describe which rows a partition contains, by dimension.

    A time window is `start/end` in UTC; any other dimension has its key.
    """
    if isinstance(definition, MultiPartitionsDefinition):
        values: Mapping[str, str] = definition.get_partition_key_from_str(key).keys_by_dimension
    else:
        values = {"": key}
    by_dimension = {}
    for name, part in dimension_definitions(definition).items():
        if isinstance(part, TimeWindowPartitionsDefinition):
            window = part.time_window_for_partition_key(values[name])
            by_dimension[name] = "/".join(
                border.astimezone(UTC).isoformat() for border in (window.start, window.end)
            )
        else:
            by_dimension[name] = values[name]
    return by_dimension


def fit_positions(positions: Positions, consumer: Consumer) -> Positions:
    """Return the positions that are still valid under the consumer's present partition definition.

    If other columns now decide on the partitions, no position is valid. Otherwise the common position remains
    valid for the windows and keys that it covers, but entries of single partitions under another definition
    do not. They were ahead of the common position, so partitions that share rows with them are computed anew
    (`redefined_extents`). A table without partitions has one position for all rows; no position of a
    partitioned table fits it.

    Of the column ids in the records, only those of columns count that decide what the consumer consumes now.
    """
    positions = _with_declared_columns(positions, consumer)
    identity = partition_identity(consumer)
    records = {
        **positions.partitions,
        **({"": positions.common_position} if positions.common_position else {}),
    }
    if not identity:
        is_partitioned = any(record.partition_identity or record.coverage for record in records.values())
        return _void_positions(positions) if is_partitioned or positions.partitions else positions
    if any(
        record.partition_identity
        and _identity_columns(record.partition_identity) != _identity_columns(identity)
        for record in records.values()
    ):
        return _void_positions(positions)
    other_records = {
        name: record for name, record in positions.partitions.items() if not _has_identity(record, identity)
    }
    if not other_records:
        return positions
    partitions = {name: record for name, record in positions.partitions.items() if name not in other_records}
    return replace(
        positions,
        partitions=partitions,
        void_partitions=positions.void_partitions | other_records.keys(),
        restart_reason=_DEFINED_ANEW,
        redefined_extents=tuple(record.extent for record in other_records.values()),
    )


def _with_declared_columns(positions: Positions, consumer: Consumer) -> Positions:
    columns_by_input = {
        format_table_name(identifier): consumer.deciding_columns(key)
        for key, identifier in consumer.inputs.items()
    }

    def fit_record(record: ConsumptionRecord) -> ConsumptionRecord:
        return replace(
            record,
            inputs={
                name: position.with_columns(columns_by_input.get(name, ()))
                for name, position in record.inputs.items()
            },
        )

    return replace(
        positions,
        common_position=fit_record(positions.common_position) if positions.common_position else None,
        partitions={name: fit_record(record) for name, record in positions.partitions.items()},
    )


def _void_positions(positions: Positions) -> Positions:
    void_partitions = positions.void_partitions | positions.partitions.keys()
    return Positions(void_partitions=void_partitions, restart_reason=_DEFINED_ANEW, may_hold_old_rows=True)


def _has_identity(record: ConsumptionRecord, identity: Mapping[str, str]) -> bool:
    return not record.partition_identity or dict(record.partition_identity) == dict(identity)


def _identity_columns(identity: Mapping[str, str]) -> dict[str, str]:
    return {name: description.rpartition(_COLUMN)[2] for name, description in identity.items()}


def shares_rows(earlier_extent: Mapping[str, str], definition: PartitionsDefinition[str], key: str) -> bool:
    """Whether a partition may share rows with a partition of another definition that had this extent.

    `earlier_extent` is a result of `partition_extent`. If it is empty, the extent is unknown, and the result
    is True.
    """
    own_extent = partition_extent(definition, key)
    return not earlier_extent or all(
        _is_overlapping(earlier_extent.get(name), value) for name, value in own_extent.items()
    )


def _is_overlapping(earlier: str | None, own: str) -> bool:
    if earlier is None:
        return True
    try:
        (start, end), (begin, close) = (
            map(datetime.fromisoformat, value.split("/")) for value in (earlier, own)
        )
    except ValueError:
        return earlier == own or earlier.count("/") != own.count("/")
    return start < close and begin < end
