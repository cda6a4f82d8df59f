"""`branchlake backfill approve`: it needs Dagster's instance alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dagster import AssetKey, DagsterInstance

from branchlake_dagster.automation.approve_backfill import Approval, approve
from branchlake_dagster.cli.local.home import dagster_home
from branchlake_dagster.settings import Settings


def approve_backfill(settings: Settings, backfill_id: str, assets: Sequence[str]) -> Approval:
    """Approve what is on `main` of a backfill. Raises ConfigurationError for an unknown id."""
    dagster_home(settings)
    with DagsterInstance.get() as instance:
        return approve(instance, backfill_id, [AssetKey.from_user_string(one) for one in assets])


def approval_dict(found: Approval) -> dict[str, Any]:
    """For JSON: the ids of the runs."""
    return {
        "approved": [run.run_id for run in found.approved],
        "unpublished": [run.run_id for run in found.unpublished],
    }
