"""How long a backfill of fifty partitions takes until all rows are on `main`, beside a plain IO manager's."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import dagster as dg

from branchlake_dagster.bench.launched_run import BenchFailed, launch_backfill
from branchlake_dagster.bench.parts_project import ASSETS, LAYOUT, NAMESPACE, PARTITIONS, ROWS, SCHEMA
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.waiting import holds_within

_TIMEOUT_S = 1_800.0
_ROUNDS = 3


def backfill_ratios(
    lake: Lakehouse, instance: dg.DagsterInstance, url: str, *, say: Callable[[str], None]
) -> dict[str, float]:
    """Seconds of the four backfills, and ours over the plain one's as fifty runs and as one.

    Medians of three. All through one daemon, launcher and queue, ours and the plain one in turns, into tables
    that exist and are empty. The clock starts with the creation of the first run: that depends on when the
    backfill daemon looks around, which it does every 30 seconds. A run waits for the queue besides, which is
    looked at every second: nothing to fifty runs, and up to half of the time of one.
    """
    lake.catalog(MAIN).create_namespace_if_not_exists((NAMESPACE,))
    took: dict[tuple[bool, bool], float] = {}
    for one_run in (False, True):
        samples: dict[bool, list[float]] = {False: [], True: []}
        for number in range(_ROUNDS):
            for plain in (bool(number % 2), not number % 2):
                key = ASSETS[plain, one_run].key
                _empty(lake, key)
                samples[plain].append(_timed(lake, instance, url, key))
                how = "plain IO manager" if plain else "on branches"
                say(f"backfill, {'one run' if one_run else 'fifty runs'}, {how}: {samples[plain][-1]:.1f} s")
        took |= {(plain, one_run): median(found) for plain, found in samples.items()}
    return {
        "backfill_50_s": round(took[False, False], 1),
        "backfill_50_plain_s": round(took[True, False], 1),
        "backfill_50_ratio": round(took[False, False] / took[True, False], 2),
        "backfill_50_one_run_s": round(took[False, True], 1),
        "backfill_50_one_run_plain_s": round(took[True, True], 1),
        "backfill_50_one_run_ratio": round(took[False, True] / took[True, True], 2),
    }


def _empty(lake: Lakehouse, key: dg.AssetKey) -> None:
    catalog, identifier = lake.catalog(MAIN), tuple(key.path)
    if catalog.table_exists(identifier):
        catalog.drop_table(identifier)
    catalog.create_table(identifier, SCHEMA, partition_spec=LAYOUT)


def _timed(lake: Lakehouse, instance: dg.DagsterInstance, url: str, key: dg.AssetKey) -> float:
    """Seconds from the creation of the backfill's first run until all its rows are on `main`."""
    backfill = launch_backfill(url, key.path, PARTITIONS)
    of_backfill = {"dagster/backfill": backfill}
    wanted = len(PARTITIONS) * ROWS
    failed: list[str] = []

    def settled() -> bool:
        runs = instance.get_runs(dg.RunsFilter(tags=of_backfill, statuses=[dg.DagsterRunStatus.FAILURE]))
        failed.extend(run.run_id for run in runs)
        return bool(failed) or _rows(lake, key) == wanted

    if not holds_within(_TIMEOUT_S, settled, every_s=0.25) or failed:
        raise BenchFailed(
            f"The backfill of {key.to_user_string()} left {_rows(lake, key)} rows of {wanted} on main;"
            f" {len(set(failed))} runs failed."
        )
    ended = time.time()
    records = instance.get_run_records(dg.RunsFilter(tags=of_backfill))
    return ended - min(record.create_timestamp.timestamp() for record in records)


def _rows(lake: Lakehouse, key: dg.AssetKey) -> int:
    snapshot = lake.catalog(MAIN).load_table(tuple(key.path)).current_snapshot()
    summary = snapshot.summary if snapshot else None
    return int(summary.additional_properties.get("total-records", 0)) if summary else 0
