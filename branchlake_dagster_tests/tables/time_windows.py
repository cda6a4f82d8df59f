"""Partitions of all kinds in zones of all kinds, around the days on which clocks change."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import dagster as dg
from pyiceberg.schema import Schema
from pyiceberg.types import DateType, LongType, NestedField, StringType, TimestampType, TimestamptzType

CLOCK_CHANGES = {
    "UTC": (date(2026, 3, 1), date(2026, 10, 25)),
    "Europe/Berlin": (date(2026, 3, 29), date(2026, 10, 25)),
    "America/New_York": (date(2026, 3, 8), date(2026, 11, 1)),
    "Asia/Kolkata": (date(2026, 3, 1), date(2026, 10, 25)),
    "Australia/Adelaide": (date(2026, 4, 5), date(2026, 10, 4)),
    "Australia/Lord_Howe": (date(2026, 4, 5), date(2026, 10, 4)),
    "Africa/Cairo": (date(2026, 4, 24), date(2026, 10, 29)),
    "America/Havana": (date(2026, 3, 8), date(2026, 11, 1)),
    "Pacific/Kiritimati": (date(2026, 3, 1), date(2026, 10, 25)),
}
"""Zones with two days of each: those on which the clock changes, where it does."""

SCHEMA = Schema(
    NestedField(1, "instant", TimestamptzType()),
    NestedField(2, "wall", TimestampType()),
    NestedField(3, "day", DateType()),
    NestedField(4, "kind", StringType()),
    NestedField(5, "n", LongType()),
)

Build = Callable[[date, str], dg.TimeWindowPartitionsDefinition]


def _cron(schedule: str, days: int = 3) -> Build:
    def build(around: date, zone: str) -> dg.TimeWindowPartitionsDefinition:
        first = around - timedelta(days=days)
        return dg.TimeWindowPartitionsDefinition(
            start=datetime(first.year, first.month, first.day),
            end=datetime(around.year, around.month, around.day) + timedelta(days=days),
            fmt="%Y-%m-%d-%H:%M%z",
            cron_schedule=schedule,
            timezone=zone,
        )

    return build


def _hourly(minute: int) -> Build:
    def build(around: date, zone: str) -> dg.TimeWindowPartitionsDefinition:
        return dg.HourlyPartitionsDefinition(
            f"{around - timedelta(days=1)}-00:00",
            f"{around + timedelta(days=2)}-00:00",
            minute_offset=minute,
            timezone=zone,
        )

    return build


def _daily(hour: int, minute: int = 0) -> Build:
    def build(around: date, zone: str) -> dg.TimeWindowPartitionsDefinition:
        return dg.DailyPartitionsDefinition(
            str(around - timedelta(days=3)),
            str(around + timedelta(days=3)),
            hour_offset=hour,
            minute_offset=minute,
            timezone=zone,
        )

    return build


def _weekly(day: int, hour: int = 0) -> Build:
    def build(around: date, zone: str) -> dg.TimeWindowPartitionsDefinition:
        return dg.WeeklyPartitionsDefinition(
            str(around - timedelta(days=15)),
            str(around + timedelta(days=15)),
            day_offset=day,
            hour_offset=hour,
            timezone=zone,
        )

    return build


def _monthly(day: int, hour: int = 0) -> Build:
    def build(around: date, zone: str) -> dg.TimeWindowPartitionsDefinition:
        return dg.MonthlyPartitionsDefinition(
            str(around - timedelta(days=70)),
            str(around + timedelta(days=70)),
            day_offset=day,
            hour_offset=hour,
            timezone=zone,
        )

    return build


OF_DAYS: dict[str, Build] = {
    "daily": _daily(0),
    "weekly": _weekly(3),
    "monthly": _monthly(15),
    "working days": _cron("0 0 * * 1-5", days=9),
    "custom": _cron("0 0 */2 * *", days=9),
}
"""Windows of whole days."""

OF_HOURS: dict[str, Build] = {
    "hourly": _hourly(0),
    "hourly at ten past": _hourly(10),
    "daily from six": _daily(6),
    "daily from half past two": _daily(2, 30),
    "weekly from six": _weekly(0, 6),
    "monthly from six": _monthly(1, 6),
    "quarters of an hour": _cron("*/15 * * * *", days=1),
    "six hours": _cron("0 */6 * * *"),
}


def windows_of(definition: dg.TimeWindowPartitionsDefinition) -> dict[str, tuple[float, float]]:
    """Dagster's own windows, as seconds since 1970, by key."""
    keys = definition.get_partition_keys(current_time=datetime(2027, 6, 1, tzinfo=UTC))
    found = {key: definition.time_window_for_partition_key(key) for key in keys}
    return {key: (window.start.timestamp(), window.end.timestamp()) for key, window in found.items()}


def noon(day: date, zone: str) -> float:
    """A moment that is certainly within the day."""
    return datetime(day.year, day.month, day.day, 12, tzinfo=ZoneInfo(zone)).timestamp()
