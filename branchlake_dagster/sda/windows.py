"""The time window of a run, in UTC microseconds since 1970."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import dagster as dg

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_microseconds(instant: datetime) -> int:
    """Convert a time to UTC microseconds since 1970, exactly (a float timestamp would round)."""
    return (instant - _EPOCH) // timedelta(microseconds=1)


def window_of(context: dg.AssetExecutionContext) -> tuple[int, int]:
    """Return the start and the end of the run's window in UTC microseconds since 1970."""
    window = context.partition_time_window
    return to_microseconds(window.start), to_microseconds(window.end)
