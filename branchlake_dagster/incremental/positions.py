"""What a table records as consumed of its inputs, also after its partition definition has changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pyiceberg.table.metadata import TableMetadata

from branchlake_dagster.history.capture import holds
from branchlake_dagster.history.change import Position
from branchlake_dagster.incremental.valid_through import InputTime, ValidThrough, ingested_time, together
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.errors import PositionUnreadable


@dataclass(frozen=True)
class Consumed:
    """How far each input was consumed, by its dotted name, and by which run; `base` is the hash it began at.

    `covers` are the partitions that there were then, see `affected.coverage`: of one that came later nothing
    has been consumed, though its rows may have been there before it.
    """

    inputs: Mapping[str, Position]
    run_id: str = ""
    base: str = ""
    covers: Mapping[str, Any] = field(default_factory=dict)
    at: int | None = None
    """The snapshot of the consumer's own table that was computed from it; None: none, or not told."""
    definition: Mapping[str, str] = field(default_factory=dict)
    """What the partitions were then, see `redefinition.identity`; empty: not recorded, or there were none."""
    extent: Mapping[str, str] = field(default_factory=dict)
    """Of one partition: what it held then, see `redefinition.extent`."""
    follows: str = ""
    """Of one partition that is computed from the one before it: the run that had computed that one then."""
    turned: bool = False
    """Says nothing, and is the other way round after each run that left the floor: see `advance`."""
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

    def text(self) -> str:
        """As a property's value."""
        return json.dumps(
            {
                "inputs": {name: one.as_dict() for name, one in sorted(self.inputs.items())},
                "run": self.run_id,
                "base": self.base,
                **({"covers": dict(self.covers)} if self.covers else {}),
                **({"at": self.at} if self.at is not None else {}),
                **({"definition": dict(self.definition)} if self.definition else {}),
                **({"extent": dict(self.extent)} if self.extent else {}),
                **({"follows": self.follows} if self.follows else {}),
                **({"turned": True} if self.turned else {}),
                **({"valid_through": self.valid_through.as_dict()} if self.valid_through else {}),
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_text(cls, text: str) -> Consumed:
        """Back again. Raises ValueError, KeyError or TypeError."""
        told = json.loads(text)
        inputs = {name: Position.from_dict(one) for name, one in told["inputs"].items()}
        return cls(
            inputs,
            told["run"],
            told["base"],
            told.get("covers", {}),
            told.get("at"),
            told.get("definition", {}),
            told.get("extent", {}),
            told.get("follows", ""),
            told.get("turned", False),
            ValidThrough.from_dict(told["valid_through"]) if "valid_through" in told else None,
        )


@dataclass(frozen=True)
class Positions:
    """All that a table has consumed: `floor` counts for all partitions that have no entry of their own."""

    floor: Consumed | None = None
    partitions: Mapping[str, Consumed] = field(default_factory=dict)
    void: frozenset[str] = frozenset()
    """Partitions whose entries count for nothing and are still to be taken away."""
    restarts_because: str = ""
    """Why something that was consumed counts for nothing, as a clause; empty: all of it counts."""
    all_left: bool = False
    """Whether the table may hold rows of any partition that were computed before."""
    redefined: tuple[Mapping[str, str], ...] = ()
    """The extents of partitions that were ahead of the floor under another definition: see `redefinition`."""

    def without_lost(self, holds: Callable[[int | None], bool]) -> Positions:
        """Only what was consumed for rows that are still there; `holds` tells it by `Consumed.at`."""
        kept = {name: one for name, one in self.partitions.items() if holds(one.at)}
        floor = self.floor if self.floor is not None and holds(self.floor.at) else None
        void = self.void | (self.partitions.keys() - kept.keys())
        lost = floor != self.floor or kept != self.partitions
        because = "the asset's own table was rolled back" if lost else self.restarts_because
        left = self.all_left or floor != self.floor
        return replace(self, floor=floor, partitions=kept, void=void, restarts_because=because, all_left=left)

    def of(self, partition: str | None, covered: Callable[[], bool]) -> Consumed | None:
        """What was consumed for a partition, or for a table without partitions; None: nothing.

        `covered` returns whether it is among the partitions that the floor speaks of.
        """
        if partition is None:
            return self.floor
        if partition in self.partitions:
            return self.partitions[partition]
        return self.floor if self.floor is not None and covered() else None

    def run_of(self, partition: str, covered: Callable[[], bool]) -> str:
        """The run that computed a partition, as far as the positions tell it; empty: none did.

        Partitions that stand where the table as a whole does have the run that moved the table.
        """
        consumed = self.of(partition, covered)
        return consumed.run_id if consumed is not None else ""


def property_of(partition: str | None) -> str:
    """The name of the property."""
    return LakeProperty.CONSUMED if partition is None else f"{LakeProperty.CONSUMED_PREFIX}{partition}"


def read(properties: Mapping[str, str], *, table: str) -> Positions:
    """The positions in a table's properties. Raises PositionUnreadable."""
    floor: Consumed | None = None
    partitions: dict[str, Consumed] = {}
    for name, value in properties.items():
        if name != LakeProperty.CONSUMED and not name.startswith(LakeProperty.CONSUMED_PREFIX):
            continue
        try:
            found = Consumed.from_text(value)
        except (ValueError, KeyError, TypeError) as error:
            raise PositionUnreadable(
                f"The property {name} cannot be read, so what was consumed is not known.",
                table=table,
                hint="Compute everything anew: launch the asset with the run tag branchlake/rebuild=true.",
            ) from error
        if name == LakeProperty.CONSUMED:
            floor = found
        else:
            partitions[name.removeprefix(LakeProperty.CONSUMED_PREFIX)] = found
    return Positions(floor, partitions)


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
        positions = read(metadata.properties, table=name)
    except PositionUnreadable:
        return None
    every = [*positions.partitions.values(), *([positions.floor] if positions.floor else [])]
    if every:
        times.append(_latest(every, name) if all(holds(metadata, one.at) for one in every) else None)
    return together(times)


def _latest(every: Iterable[Consumed], name: str) -> InputTime | None:
    """The latest time; None if a run recorded none, or the inputs or the partitions were declared anew.

    A run without a time may have consumed an input that had lost rows, whatever an earlier run recorded.
    """
    times: list[InputTime] = []
    for one in every:
        recorded = one.valid_through
        if recorded is None or recorded.table_ms is None:
            return None
        times.append(InputTime(recorded.table_ms, recorded.sources).partitioned(name, one.covers))
    latest = max(times, key=lambda one: one.ms)
    return latest if all(one.sources == latest.sources for one in times) else None


@dataclass(frozen=True)
class Update:
    """Properties to set and to remove."""

    set: Mapping[str, str]
    remove: tuple[str, ...] = ()


def advance(
    positions: Positions,
    now: Consumed,
    partitions: Iterable[str],
    affected: Iterable[str] | None,
    *,
    each: bool = False,
    extents: Mapping[str, Mapping[str, str]] | None = None,
    follows: Mapping[str, str] | None = None,
) -> Update:
    """The properties after a run that consumed up to `now` for these partitions.

    `affected` are the partitions for which the table as a whole has something left to consume up to there;
    None when that is not known. With nothing left, the whole table stands at `now` and no partition needs
    an entry of its own; `each` sets those of the run all the same, so that it meets every other run of one
    of them. And a run that leaves the floor turns it, so that it meets those that moved it meanwhile: they
    may have taken away the entries that it would have met. Two that turn it say the same.
    `extents` are what the partitions hold, `follows` the runs that had computed the partitions before them,
    where each is computed from the one before it.
    """
    entries = {
        one: replace(now, extent=(extents or {}).get(one, {}), follows=(follows or {}).get(one, ""))
        for one in partitions
    }
    mine = {property_of(one): entry.text() for one, entry in entries.items()}
    if mine and (affected is None or not {property_of(one) for one in affected} <= mine.keys()):
        floor = positions.floor if each else None
        return Update(
            mine | ({LakeProperty.CONSUMED: replace(floor, turned=not floor.turned).text()} if floor else {})
        )
    kept = mine if each else {}
    gone = {property_of(one) for one in (*positions.partitions, *positions.void)} - kept.keys()
    return Update({LakeProperty.CONSUMED: now.text(), **kept}, tuple(sorted(gone)))
