"""Launching a backfill's first stage through Dagster's daemon; what follows launches itself."""

from __future__ import annotations

from collections.abc import Sequence

from dagster import AssetKey, DagsterInstance

from branchlake_dagster.internals.dagster import AssetGraph, add_asset_backfill
from branchlake_dagster.runs.run_tags import APPROVAL_REQUIRED
from branchlake_dagster.stored_names import RunTag


def launch_backfill(
    graph: AssetGraph,
    instance: DagsterInstance,
    root: AssetKey,
    partitions: Sequence[str] | None,
    *,
    reason: str,
    base_hash: str,
    approval: bool = False,
    requested_at: float,
) -> str:
    """Request the backfill and return its id, by which Dagster's page shows it.

    Its runs compute everything anew in their partitions, whatever was consumed for them. `base_hash` is the
    commit of `main` now. With `approval`, each stage waits until the results before it are approved.
    """
    return add_asset_backfill(
        graph,
        instance,
        root,
        partitions,
        tags={RunTag.REBUILD: "true", RunTag.BACKFILL: reason[:200], RunTag.BACKFILL_BASE: base_hash}
        | ({RunTag.APPROVAL: APPROVAL_REQUIRED} if approval else {}),
        title=f"Backfill of {root.to_user_string()}",
        description=reason,
        requested_at=requested_at,
    )


def launch_again(
    graph: AssetGraph,
    instance: DagsterInstance,
    asset: AssetKey,
    partitions: Sequence[str] | None,
    *,
    backfill_id: str,
    rebuild: bool,
    approval: bool = False,
    requested_at: float,
) -> str:
    """Request a backfill of partitions of a stage of backfill `backfill_id`, and return its own id.

    Its runs consume what is left; with `rebuild` they compute everything anew in their partitions.
    With `approval`, the stages after them wait until their results are approved.
    """
    reason = f"Retry of backfill {backfill_id}"
    return add_asset_backfill(
        graph,
        instance,
        asset,
        partitions,
        tags={RunTag.RETRY_OF: backfill_id, RunTag.BACKFILL: reason}
        | ({RunTag.REBUILD: "true"} if rebuild else {})
        | ({RunTag.APPROVAL: APPROVAL_REQUIRED, RunTag.FOLLOWS: backfill_id} if approval else {}),
        title=f"{reason}: {asset.to_user_string()}",
        description=reason,
        requested_at=requested_at,
    )
