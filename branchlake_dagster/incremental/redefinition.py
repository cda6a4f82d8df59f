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

from branchlake_dagster.incremental.affected_partitions import dimension_definitions
from branchlake_dagster.incremental.consumer import Consumer
from branchlake_dagster.incremental.positions import ConsumptionRecord, Positions

_COLUMN = " of "
_DEFINED_ANEW = "its partitions were defined anew since it was computed"


def partition_identity(consumer: Consumer) -> dict[str, str]:
    """What the consumer's partitions are, by dimension: their kind, and the columns that decide on them.

    When the first one starts and the last one ends is not in it: they may move. Empty without partitions.
    """
    if not consumer.tracks_partitions or consumer.definition is None:
        return {}
    parts = dimension_definitions(consumer.definition)
    return {
        name: f"{_partition_kind(parts[name])}{_COLUMN}{own_column} from {_format_input_columns(consumer, name)}"
        for name, own_column in consumer.spec.columns_by_dimension.items()
        if name in parts
    }


def _format_input_columns(consumer: Consumer, dimension: str) -> str:
    """The column that decides in all inputs, or by input where they differ."""
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
    """What a partition holds, by dimension: a window of time in UTC as `start/end`, or a key."""
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
    """What the positions say under the consumer's present partition definition.

    The position of the whole table holds under another definition for the windows and keys that it covers,
    unless other columns decide on the partitions. Entries of single partitions under another definition count
    for nothing: they were ahead of the whole table, so partitions that share rows with them are computed anew
    (`redefined`). Without partitions there is one position for all rows: none of a partitioned table fits.
    """
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


def _void_positions(positions: Positions) -> Positions:
    void_partitions = positions.void_partitions | positions.partitions.keys()
    return Positions(void_partitions=void_partitions, restart_reason=_DEFINED_ANEW, may_hold_old_rows=True)


def _has_identity(record: ConsumptionRecord, identity: Mapping[str, str]) -> bool:
    return not record.partition_identity or dict(record.partition_identity) == dict(identity)


def _identity_columns(identity: Mapping[str, str]) -> dict[str, str]:
    return {name: description.rpartition(_COLUMN)[2] for name, description in identity.items()}


def shares_rows(earlier_extent: Mapping[str, str], definition: PartitionsDefinition[str], key: str) -> bool:
    """Whether a partition may have rows in common with one of another definition, by that one's extent."""
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
