"""What a table records as consumed of its inputs, also after its partition definition has changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pyiceberg.table.metadata import TableMetadata

from branchlake_dagster.history.capture import contains_snapshot
from branchlake_dagster.history.change import Position
from branchlake_dagster.incremental.valid_through import InputTime, ValidThrough, earliest_time, ingested_time
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.errors import PositionUnreadable


@dataclass(frozen=True)
class ConsumptionRecord:
    """How far each input was consumed, by its dotted name, and by which run; `base_hash` is the hash it began at.

    `coverage` are the partitions that there were then, see `affected.coverage`: of one that came later
    nothing has been consumed, though its rows may have been there before it.
    """

    inputs: Mapping[str, Position]
    run_id: str = ""
    base_hash: str = ""
    coverage: Mapping[str, Any] = field(default_factory=dict)
    snapshot_id: int | None = None
    """The snapshot of the consumer's own table that was computed from it; None: none, or not told."""
    partition_identity: Mapping[str, str] = field(default_factory=dict)
    """What the partitions were then, see `redefinition.identity`; empty: not recorded, or there were none."""
    extent: Mapping[str, str] = field(default_factory=dict)
    """Of one partition: what it held then, see `redefinition.extent`."""
    predecessor_run: str = ""
    """Of one partition that is computed from the one before it: the run that had computed that one then."""
    toggle: bool = False
    """Says nothing, and is the other way round after each run that left the floor: see `advance_positions`."""
    valid_through: ValidThrough | None = None
    """Up to which time the inputs had all records then, and the table after the run; None: not known."""

    def inputs_time_ms(self, inputs: Iterable[str], sources: frozenset[str]) -> int | None:
        """Up to which time these inputs had all records when they were consumed, ms since 1970.

        None if that is not known, if one of them was not consumed, or if they came from other sources than
        `sources`: then rows may be older that were not consumed.
        """
        recorded = self.valid_through
        if recorded is None or recorded.sources != sources or not self.inputs.keys() >= {*inputs}:
            return None
        return recorded.inputs_ms

    def to_json(self) -> str:
        """As a property's value."""
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
        """Back again. Raises ValueError, KeyError or TypeError."""
        values = json.loads(content)
        inputs = {name: Position.from_dict(position) for name, position in values["inputs"].items()}
        return cls(
            inputs,
            values["run"],
            values["base"],
            values.get("covers", {}),
            values.get("at"),
            values.get("definition", {}),
            values.get("extent", {}),
            values.get("follows", ""),
            values.get("turned", False),
            ValidThrough.from_dict(values["valid_through"]) if "valid_through" in values else None,
        )


@dataclass(frozen=True)
class Positions:
    """All that a table has consumed: `common_position` counts for all partitions that have no entry of their own."""

    common_position: ConsumptionRecord | None = None
    partitions: Mapping[str, ConsumptionRecord] = field(default_factory=dict)
    void_partitions: frozenset[str] = frozenset()
    """Partitions whose entries count for nothing and are still to be taken away."""
    restart_reason: str = ""
    """Why something that was consumed counts for nothing, as a clause; empty: all of it counts."""
    may_hold_old_rows: bool = False
    """Whether the table may hold rows of any partition that were computed before."""
    redefined_extents: tuple[Mapping[str, str], ...] = ()
    """The extents of partitions that were ahead of the floor under another definition: see `redefinition`."""

    def without_lost(self, is_current: Callable[[int | None], bool]) -> Positions:
        """Only what was consumed for rows that are still there; `is_current` tells it by `Consumed.snapshot_id`."""
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
        """What was consumed for a partition, or for a table without partitions; None: nothing.

        `is_covered` returns whether it is among the partitions that the floor speaks of.
        """
        if partition is None:
            return self.common_position
        if partition in self.partitions:
            return self.partitions[partition]
        return self.common_position if self.common_position is not None and is_covered() else None

    def run_of(self, partition: str, is_covered: Callable[[], bool]) -> str:
        """The run that computed a partition, as far as the positions tell it; empty: none did.

        Partitions that stand where the table as a whole does have the run that moved the table.
        """
        record = self.find_record(partition, is_covered)
        return record.run_id if record is not None else ""


def property_name(partition: str | None) -> str:
    """The name of the property."""
    return LakeProperty.CONSUMED if partition is None else f"{LakeProperty.CONSUMED_PREFIX}{partition}"


def read_positions(properties: Mapping[str, str], *, table: str) -> Positions:
    """The positions in a table's properties. Raises PositionUnreadable."""
    common_position: ConsumptionRecord | None = None
    partitions: dict[str, ConsumptionRecord] = {}
    for name, value in properties.items():
        if name != LakeProperty.CONSUMED and not name.startswith(LakeProperty.CONSUMED_PREFIX):
            continue
        try:
            record = ConsumptionRecord.from_json(value)
        except (ValueError, KeyError, TypeError) as error:
            raise PositionUnreadable(
                f"The property {name} cannot be read, so what was consumed is not known.",
                table=table,
                hint="Compute everything anew: launch the asset with the run tag branchlake/rebuild=true.",
            ) from error
        if name == LakeProperty.CONSUMED:
            common_position = record
        else:
            partitions[name.removeprefix(LakeProperty.CONSUMED_PREFIX)] = record
    return Positions(common_position, partitions)


def recorded_time(metadata: TableMetadata, name: str) -> InputTime | None:
    """Up to which time a table has all records by its own properties; None if they do not tell.

    For a consumer's table that is the latest time that one of its runs has recorded, if the table holds the
    results of all of them. It may be further: what its inputs have since then is not read.
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
    """The latest time; None if a run recorded none, or the inputs or the partitions were declared anew.

    A run without a time may have consumed an input that had lost rows, whatever an earlier run recorded.
    """
    times: list[InputTime] = []
    for record in records:
        recorded = record.valid_through
        if recorded is None or recorded.table_ms is None:
            return None
        times.append(InputTime(recorded.table_ms, recorded.sources).with_partitions(name, record.coverage))
    latest = max(times, key=lambda one: one.ms)
    return latest if all(one.sources == latest.sources for one in times) else None


@dataclass(frozen=True)
class PropertyUpdate:
    """Properties to set and to remove."""

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
    """The properties after a run that consumed up to `record` for these partitions.

    `remaining` are the partitions for which the table as a whole has something left to consume up to there;
    None when that is not known. With nothing left, the whole table stands at `record` and no partition needs
    an entry of its own; `keep_entries` sets those of the run all the same, so that it meets every other run
    of one
    of them. And a run that leaves the floor turns it, so that it meets those that moved it meanwhile: they
    may have taken away the entries that it would have met. Two that turn it say the same.
    `extents` are what the partitions hold, `predecessor_runs` the runs that had computed the partitions
    before them, where each is computed from the one before it.
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
