"""Reads recorded positions after the consumer's partition definition was changed.

A record counts for rows, but names them by partition keys. If days become weeks, both share keys: a day that
was ahead of the common position must not count for the week with the same key. So each record names its
partition definition.
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
_DEFINED_ANEW = "its partitions were redefined after it was computed"


def partition_identity(consumer: Consumer) -> dict[str, str]:
    """Describe the consumer's partitions by dimension: their kind, and the columns that decide on them.

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
    """Return the column that decides in all inputs, or one column per input if they differ."""
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
    """Describe what a partition contains, by dimension.

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
    """Return the positions that still count under the consumer's present partition definition.

    The common position still counts for the windows and keys that it covers, unless other columns now decide
    on the partitions. Entries of single partitions under another definition do not count. They were ahead of
    the common position, so partitions that share rows with them are computed anew (`redefined_extents`). A
    table without partitions has one position for all rows; no position of a partitioned table fits it.
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
    """Whether a partition may share rows with a partition of another definition that had this extent."""
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
