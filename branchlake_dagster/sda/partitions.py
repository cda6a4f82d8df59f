"""How the graph is partitioned: GP snapshots, and hourly windows of event time."""

from __future__ import annotations

import dagster as dg

FIRST_WINDOW = "2026-08-08-00:00"
"""Start of the first hourly window, UTC: when the simulated catalogue and the sample snapshots begin."""

gp_snapshots = dg.DynamicPartitionsDefinition(name="gp_snapshots")
"""One partition per GP file; the key is the snapshot id (see `sources`)."""


def pulls_of(context: dg.AssetExecutionContext) -> list[str]:
    """The snapshots of a run: one, or those of a backfill."""
    return [context.partition_key] if context.has_partition_key else list(context.partition_keys)


windows = dg.HourlyPartitionsDefinition(start_date=FIRST_WINDOW, timezone="UTC", end_offset=1)
"""The hours of event time, with the one that has begun."""

whole_catalogue = dg.AllPartitionMapping()
"""A window reads the whole current catalogue, whichever snapshots it came from."""
