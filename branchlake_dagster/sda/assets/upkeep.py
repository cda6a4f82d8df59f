"""Who keeps the tables, and how old they may be."""

from __future__ import annotations

from datetime import timedelta

import dagster as dg

OWNERS = ("team:sda",)

MAX_CATALOGUE_AGE = timedelta(days=7)
"""Elements older than that are kilometres off; the schedules then do nothing rather than publish fiction."""

OF_SNAPSHOTS = dg.FreshnessPolicy.time_window(fail_window=MAX_CATALOGUE_AGE, warn_window=timedelta(days=1))
"""GP catalogues are issued several times a day; when it fails, the hourly schedules have stopped too."""


def live_freshness(allowed_lateness_s: float) -> dg.FreshnessPolicy:
    """Return how old the newest batch of a kind of sensor may be.

    Sensors measure all the time: five minutes without a row is a receiver, a broker or a run that is down.
    Kinds whose measurements usually come later have twice that lateness before the warning.
    """
    warn = max(timedelta(minutes=5), timedelta(seconds=2 * allowed_lateness_s))
    return dg.FreshnessPolicy.time_window(fail_window=3 * warn, warn_window=warn)


OF_WINDOWS = dg.FreshnessPolicy.time_window(
    fail_window=timedelta(minutes=150), warn_window=timedelta(minutes=90)
)
"""A window a run an hour: a warning is one that is half an hour late, a failure a second one missing."""
