"""Benchmark of backfills of fifty partitions, on run branches and with a plain IO manager."""

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


def measure_backfill_ratios(
    lake: Lakehouse, instance: dg.DagsterInstance, url: str, *, say: Callable[[str], None]
) -> dict[str, float]:
    """Measure backfills as fifty runs and as one run, on branches and with the plain IO manager.

    The figures are medians of three rounds in seconds, and the ratios of branches to the plain IO manager.
    All backfills use the same daemon, launcher and queue. They take turns, and write into empty tables.

    A measurement starts when the first run is created, because the backfill daemon polls only every 30
    seconds. It includes the run queue, which is polled every second. That is negligible for fifty runs, but
    up to half of the time of a single run.
    """
    lake.catalog(MAIN).create_namespace_if_not_exists((NAMESPACE,))
    medians: dict[tuple[bool, bool], float] = {}
    for single_run in (False, True):
        samples: dict[bool, list[float]] = {False: [], True: []}
        for number in range(_ROUNDS):
            for plain in (bool(number % 2), not number % 2):
                key = ASSETS[plain, single_run].key
                _recreate_table(lake, key)
                samples[plain].append(_time_backfill(lake, instance, url, key))
                way = "plain IO manager" if plain else "on branches"
                say(
                    f"backfill, {'one run' if single_run else 'fifty runs'}, {way}: {samples[plain][-1]:.1f}"
                    " s"
                )
        medians |= {(plain, single_run): median(durations) for plain, durations in samples.items()}
    return {
        "backfill_50_s": round(medians[False, False], 1),
        "backfill_50_plain_s": round(medians[True, False], 1),
        "backfill_50_ratio": round(medians[False, False] / medians[True, False], 2),
        "backfill_50_one_run_s": round(medians[False, True], 1),
        "backfill_50_one_run_plain_s": round(medians[True, True], 1),
        "backfill_50_one_run_ratio": round(medians[False, True] / medians[True, True], 2),
    }


def _recreate_table(lake: Lakehouse, key: dg.AssetKey) -> None:
    catalog, identifier = lake.catalog(MAIN), tuple(key.path)
    if catalog.table_exists(identifier):
        catalog.drop_table(identifier)
    catalog.create_table(identifier, SCHEMA, partition_spec=LAYOUT)


def _time_backfill(lake: Lakehouse, instance: dg.DagsterInstance, url: str, key: dg.AssetKey) -> float:
    """Return the seconds from the creation of the first run until all rows are on `main`."""
    backfill_id = launch_backfill(url, key.path, PARTITIONS)
    backfill_tags = {"dagster/backfill": backfill_id}
    expected_rows = len(PARTITIONS) * ROWS
    failed_run_ids: list[str] = []

    def has_ended() -> bool:
        runs = instance.get_runs(dg.RunsFilter(tags=backfill_tags, statuses=[dg.DagsterRunStatus.FAILURE]))
        failed_run_ids.extend(run.run_id for run in runs)
        return bool(failed_run_ids) or _count_rows(lake, key) == expected_rows

    if not holds_within(_TIMEOUT_S, has_ended, every_s=0.25) or failed_run_ids:
        raise BenchFailed(
            f"The backfill of {key.to_user_string()} wrote {_count_rows(lake, key)} of {expected_rows} rows"
            f" to main. Failed runs: {len(set(failed_run_ids))}."
        )
    end_time = time.time()
    records = instance.get_run_records(dg.RunsFilter(tags=backfill_tags))
    return end_time - min(record.create_timestamp.timestamp() for record in records)


def _count_rows(lake: Lakehouse, key: dg.AssetKey) -> int:
    snapshot = lake.catalog(MAIN).load_table(tuple(key.path)).current_snapshot()
    summary = snapshot.summary if snapshot else None
    return int(summary.additional_properties.get("total-records", 0)) if summary else 0
