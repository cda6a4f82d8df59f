"""Launch the first stage of a backfill through Dagster's daemon. The later stages launch themselves."""

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
    """Request a Dagster backfill of `root` and return its id.

    Its runs compute their partitions again from all rows, whatever was consumed for them before. `base_hash`
    is the hash of `main` now. With `approval`, each stage waits until the results of the stage before it are
    approved. `requested_at` is a POSIX time in seconds.
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
    """Request a new Dagster backfill for partitions of a stage of backfill `backfill_id`; return its own id.

    Its runs consume the remaining changes. With `rebuild`, they compute their partitions again from all rows.
    With `approval`, the later stages wait until their results are approved. `requested_at` is a POSIX time in
    seconds.
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
