"""How the graph is cut: GP snapshots, hourly windows, and windows by source kind."""

from __future__ import annotations

import warnings

import dagster as dg

from branchlake_dagster.sda.sensors.native import SOURCE_KINDS

FIRST_WINDOW = "2026-08-08-00:00"
"""Start of the first hourly window, UTC: when the simulated catalogue and the sample snapshots begin."""

gp_snapshots = dg.DynamicPartitionsDefinition(name="gp_snapshots")
"""One partition per GP file; the key is the snapshot id (see `sources`)."""


def pulls_of(context: dg.AssetExecutionContext) -> list[str]:
    """The snapshots of a run: one, or those of a backfill."""
    return [context.partition_key] if context.has_partition_key else list(context.partition_keys)


windows = dg.HourlyPartitionsDefinition(start_date=FIRST_WINDOW, timezone="UTC")
source_kinds = dg.StaticPartitionsDefinition(SOURCE_KINDS)
windows_by_kind = dg.MultiPartitionsDefinition({"window": windows, "source_kind": source_kinds})

whole_catalogue = dg.AllPartitionMapping()
"""A window reads the whole current catalogue, whichever snapshots it came from."""

with warnings.catch_warnings():
    # The mapping is a beta of Dagster 1.13; a test of ours holds what we need of it.
    warnings.simplefilter("ignore", dg.BetaWarning)
    all_kinds_of_window = dg.MultiToSingleDimensionPartitionMapping(partition_dimension_name="window")
