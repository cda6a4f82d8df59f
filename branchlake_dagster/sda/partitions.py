"""The partitions of the graph: GP snapshots, and hourly windows of event time."""

from __future__ import annotations

import dagster as dg

FIRST_WINDOW = "2026-08-08-00:00"
"""The start of the first hourly window, UTC. The simulated catalog and the sample snapshots begin then."""

gp_snapshots = dg.DynamicPartitionsDefinition(name="gp_snapshots")
"""One partition per GP file; the key is the snapshot id (see `sources`)."""


def pulls_of(context: dg.AssetExecutionContext) -> list[str]:
    """Return the snapshot ids of a run: one, or several in a backfill."""
    return [context.partition_key] if context.has_partition_key else list(context.partition_keys)


windows = dg.HourlyPartitionsDefinition(start_date=FIRST_WINDOW, timezone="UTC", end_offset=1)
"""The hours of event time, including the present hour."""

whole_catalogue = dg.AllPartitionMapping()
"""The partition mapping of windows that read the whole catalog, from whichever snapshots it was merged."""
