"""How long a backfill of fifty partitions takes until all rows are on `main`, beside a plain IO manager's."""

from __future__ import annotations

import time
from collections.abc import Callable

import dagster as dg

from branchlake_dagster.cli.bench.daemon.parts import ASSETS, LAYOUT, NAMESPACE, PARTITIONS, ROWS, SCHEMA
from branchlake_dagster.cli.bench.daemon.ui import BenchFailed, launch_backfill
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.waiting import holds_within

_TIMEOUT_S = 1_800.0


def backfill_ratios(
    lake: Lakehouse, instance: dg.DagsterInstance, url: str, *, say: Callable[[str], None]
) -> dict[str, float]:
    """Seconds of the four backfills, and ours over the plain one's as fifty runs and as one.

    All through one daemon, launcher and queue, one after the other, into tables that exist and are empty.
    """
    catalog = lake.catalog(MAIN)
    catalog.create_namespace_if_not_exists((NAMESPACE,))
    for asset in ASSETS.values():
        catalog.create_table(tuple(asset.key.path), SCHEMA, partition_spec=LAYOUT)
    took = {}
    for (plain, one_run), asset in ASSETS.items():
        took[plain, one_run] = _timed(lake, instance, url, asset.key)
        how = "plain IO manager" if plain else "on branches"
        say(f"backfill, {'one run' if one_run else 'fifty runs'}, {how}: {took[plain, one_run]:.1f} s")
    return {
        "backfill_50_s": round(took[False, False], 1),
        "backfill_50_plain_s": round(took[True, False], 1),
        "backfill_50_ratio": round(took[False, False] / took[True, False], 2),
        "backfill_50_one_run_s": round(took[False, True], 1),
        "backfill_50_one_run_plain_s": round(took[True, True], 1),
        "backfill_50_one_run_ratio": round(took[False, True] / took[True, True], 2),
    }


def _timed(lake: Lakehouse, instance: dg.DagsterInstance, url: str, key: dg.AssetKey) -> float:
    began = time.perf_counter()
    backfill = launch_backfill(url, key.path, PARTITIONS)
    wanted = len(PARTITIONS) * ROWS
    failed: list[str] = []

    def settled() -> bool:
        runs = instance.get_runs(
            dg.RunsFilter(tags={"dagster/backfill": backfill}, statuses=[dg.DagsterRunStatus.FAILURE])
        )
        failed.extend(run.run_id for run in runs)
        return bool(failed) or _rows(lake, key) == wanted

    if not holds_within(_TIMEOUT_S, settled, every_s=0.25) or failed:
        raise BenchFailed(
            f"The backfill of {key.to_user_string()} left {_rows(lake, key)} rows of {wanted} on main;"
            f" {len(set(failed))} runs failed."
        )
    return time.perf_counter() - began


def _rows(lake: Lakehouse, key: dg.AssetKey) -> int:
    snapshot = lake.catalog(MAIN).load_table(tuple(key.path)).current_snapshot()
    summary = snapshot.summary if snapshot else None
    return int(summary.additional_properties.get("total-records", 0)) if summary else 0
