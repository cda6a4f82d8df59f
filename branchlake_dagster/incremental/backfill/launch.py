"""Launching a backfill's first stage through Dagster's daemon; what follows launches itself."""

from __future__ import annotations

from collections.abc import Sequence

from dagster import AssetKey, DagsterInstance

from branchlake_dagster.branching.consuming.steps import REBUILD_TAG
from branchlake_dagster.library_internals.dagster import AssetGraph, add_asset_backfill

BACKFILL_TAG = "branchlake/backfill"
"""On the runs of the first stage."""


def launch(
    graph: AssetGraph,
    instance: DagsterInstance,
    root: AssetKey,
    partitions: Sequence[str] | None,
    *,
    why: str,
    at: float,
) -> str:
    """Request the backfill and return its id, by which Dagster's page shows it.

    Its runs compute everything anew in their partitions, whatever was consumed for them.
    """
    return add_asset_backfill(
        graph,
        instance,
        root,
        partitions,
        tags={REBUILD_TAG: "true", BACKFILL_TAG: why[:200]},
        title=f"Backfill of {root.to_user_string()}",
        description=why,
        at=at,
    )
