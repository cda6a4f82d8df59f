"""What a consumer has consumed, after its partition definition was changed.

A position counts for rows, and it names them by partition. Days that become weeks share keys with them, and a
day that was ahead of the others is not a week that is. So each position says which definition it speaks of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from dagster import (
    DynamicPartitionsDefinition,
    MultiPartitionsDefinition,
    PartitionsDefinition,
    TimeWindowPartitionsDefinition,
)

from branchlake_dagster.incremental.affected_partitions import dimensions
from branchlake_dagster.incremental.consumer import Consumer
from branchlake_dagster.incremental.positions import Consumed, Positions

_COLUMN = " of "
_DEFINED_ANEW = "its partitions were defined anew since it was computed"


def identity(consumer: Consumer) -> dict[str, str]:
    """What the consumer's partitions are, by dimension: their kind, and the columns that decide on them.

    When the first one starts and the last one ends is not in it: they may move. Empty without partitions.
    """
    if not consumer.by_partition or consumer.definition is None:
        return {}
    parts = dimensions(consumer.definition)
    return {
        name: f"{_kind(parts[name])}{_COLUMN}{own} from {_columns_of_inputs(consumer, name)}"
        for name, own in consumer.spec.columns_by_dimension.items()
        if name in parts
    }


def _columns_of_inputs(consumer: Consumer, dimension: str) -> str:
    """The column that decides in all inputs, or by input where they differ."""
    by_input = {key: consumer.column_of_input(key, dimension) for key in consumer.inputs}
    if len({*by_input.values()}) == 1:
        return next(iter(by_input.values()))
    return ", ".join(sorted(f"{key.to_user_string()}.{column}" for key, column in by_input.items()))


def _kind(definition: PartitionsDefinition[str]) -> str:
    if isinstance(definition, TimeWindowPartitionsDefinition):
        return f"{definition.cron_schedule} {definition.timezone} {definition.fmt}"
    if isinstance(definition, DynamicPartitionsDefinition):
        return "dynamic"
    return type(definition).__name__


def extent(definition: PartitionsDefinition[str], key: str) -> dict[str, str]:
    """What a partition holds, by dimension: a window of time in UTC as `start/end`, or a key."""
    if isinstance(definition, MultiPartitionsDefinition):
        values: Mapping[str, str] = definition.get_partition_key_from_str(key).keys_by_dimension
    else:
        values = {"": key}
    found = {}
    for name, part in dimensions(definition).items():
        if isinstance(part, TimeWindowPartitionsDefinition):
            window = part.time_window_for_partition_key(values[name])
            found[name] = "/".join(one.astimezone(UTC).isoformat() for one in (window.start, window.end))
        else:
            found[name] = values[name]
    return found


def fitting(positions: Positions, consumer: Consumer) -> Positions:
    """What the positions say under the consumer's present partition definition.

    The position of the whole table holds under another definition for the windows and keys that it covers,
    unless other columns decide on the partitions. Entries of single partitions under another definition count
    for nothing: they were ahead of the whole table, so partitions that share rows with them are computed anew
    (`redefined`). Without partitions there is one position for all rows: none of a partitioned table fits.
    """
    now = identity(consumer)
    every = {**positions.partitions, **({"": positions.floor} if positions.floor else {})}
    if not now:
        partitioned = any(one.definition or one.covers for one in every.values())
        return _nothing(positions) if partitioned or positions.partitions else positions
    if any(one.definition and _columns(one.definition) != _columns(now) for one in every.values()):
        return _nothing(positions)
    others = {name: one for name, one in positions.partitions.items() if not _fits(one, now)}
    if not others:
        return positions
    kept = {name: one for name, one in positions.partitions.items() if name not in others}
    return replace(
        positions,
        partitions=kept,
        void=positions.void | others.keys(),
        restarts_because=_DEFINED_ANEW,
        redefined=tuple(one.extent for one in others.values()),
    )


def _nothing(positions: Positions) -> Positions:
    void = positions.void | positions.partitions.keys()
    return Positions(void=void, restarts_because=_DEFINED_ANEW, all_left=True)


def _fits(one: Consumed, now: Mapping[str, str]) -> bool:
    return not one.definition or dict(one.definition) == dict(now)


def _columns(definition: Mapping[str, str]) -> dict[str, str]:
    return {name: text.rpartition(_COLUMN)[2] for name, text in definition.items()}


def shares_rows(earlier: Mapping[str, str], definition: PartitionsDefinition[str], key: str) -> bool:
    """Whether a partition may have rows in common with one of another definition, by that one's extent."""
    own = extent(definition, key)
    return not earlier or all(_meet(earlier.get(name), value) for name, value in own.items())


def _meet(earlier: str | None, own: str) -> bool:
    if earlier is None:
        return True
    try:
        (start, end), (begin, close) = (map(datetime.fromisoformat, one.split("/")) for one in (earlier, own))
    except ValueError:
        return earlier == own or earlier.count("/") != own.count("/")
    return start < close and begin < end
