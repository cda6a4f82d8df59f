"""Launching a backfill's first stage through Dagster's daemon; what follows launches itself."""

from __future__ import annotations

from collections.abc import Sequence

from dagster import AssetKey, DagsterInstance

from branchlake_dagster.incremental.step_consumption import REBUILD_TAG
from branchlake_dagster.internals.dagster import AssetGraph, add_asset_backfill
from branchlake_dagster.runs.run_tags import APPROVAL_TAG, FOLLOWS_TAG, REQUIRED

BACKFILL_TAG = "branchlake/backfill"
"""On the runs of the first stage, and of what is launched again: why."""
RETRY_OF_TAG = "branchlake/retry_of"
"""On the runs that launch partitions of a backfill again: the id of the backfill."""
BASE_TAG = "branchlake/backfill_base"
"""On a backfill and its runs: the commit of `main` with which its stages are compared."""


def launch(
    graph: AssetGraph,
    instance: DagsterInstance,
    root: AssetKey,
    partitions: Sequence[str] | None,
    *,
    why: str,
    base_hash: str,
    approval: bool = False,
    at: float,
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
        tags={REBUILD_TAG: "true", BACKFILL_TAG: why[:200], BASE_TAG: base_hash}
        | ({APPROVAL_TAG: REQUIRED} if approval else {}),
        title=f"Backfill of {root.to_user_string()}",
        description=why,
        at=at,
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
    at: float,
) -> str:
    """Request a backfill of partitions of a stage of backfill `backfill_id`, and return its own id.

    Its runs consume what is left; with `rebuild` they compute everything anew in their partitions.
    With `approval`, the stages after them wait until their results are approved.
    """
    why = f"Retry of backfill {backfill_id}"
    return add_asset_backfill(
        graph,
        instance,
        asset,
        partitions,
        tags={RETRY_OF_TAG: backfill_id, BACKFILL_TAG: why}
        | ({REBUILD_TAG: "true"} if rebuild else {})
        | ({APPROVAL_TAG: REQUIRED, FOLLOWS_TAG: backfill_id} if approval else {}),
        title=f"{why}: {asset.to_user_string()}",
        description=why,
        at=at,
    )
