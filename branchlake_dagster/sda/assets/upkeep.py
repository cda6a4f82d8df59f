"""The owners of the tables, and how old their data may be."""

from __future__ import annotations

from datetime import timedelta

import dagster as dg

OWNERS = ("team:sda",)

MAX_CATALOGUE_AGE = timedelta(days=7)
"""The largest age of the catalog.

Older elements predict positions that are kilometers off, so the schedules then launch nothing.
"""

OF_SNAPSHOTS = dg.FreshnessPolicy.time_window(fail_window=MAX_CATALOGUE_AGE, warn_window=timedelta(days=1))
"""Freshness of tables from GP catalogs.

Providers issue them several times a day. When this policy fails, the hourly schedules have stopped too.
"""


def live_freshness(allowed_lateness_s: float) -> dg.FreshnessPolicy:
    """Return the freshness policy of the raw table of a sensor kind.

    Sensors measure all the time: five minutes without a row mean that a receiver, a broker or a run is down.
    For kinds whose measurements usually arrive later, the warning comes after twice `allowed_lateness_s`. The
    policy fails after three times the time of the warning.
    """
    warn = max(timedelta(minutes=5), timedelta(seconds=2 * allowed_lateness_s))
    return dg.FreshnessPolicy.time_window(fail_window=3 * warn, warn_window=warn)


OF_WINDOWS = dg.FreshnessPolicy.time_window(
    fail_window=timedelta(minutes=150), warn_window=timedelta(minutes=90)
)
"""Freshness of hourly tables.

The warning comes when a window is half an hour late, the failure when a second window is missing.
"""
