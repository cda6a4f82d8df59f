"""`branchlake bench screening`: time the screening of all pairs until its publication.

Screening is the search for close approaches. It is timed again after the catalog changed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table

from branchlake_dagster.bench.own_lake import own_lake
from branchlake_dagster.internals.dagster_sqlite import keep_sqlite_connections
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.sda.assets.catalogue import CATALOGUE
from branchlake_dagster.sda.assets.conjunctions import CONJUNCTIONS, LIST_THRESHOLD_KM, newest_collection
from branchlake_dagster.sda.benchmarks.published_runs import PublishedRuns
from branchlake_dagster.sda.conjunctions.screening import MINUTE, Span
from branchlake_dagster.sda.conjunctions.tasks import Pairs, Screening, in_parts
from branchlake_dagster.sda.gp.simulated import simulated_elements
from branchlake_dagster.sda.gp.write import format_tle
from branchlake_dagster.sda.graph.code_location import build_definitions
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.partitions import gp_snapshots
from branchlake_dagster.sda.sources import snapshot_id
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag

_OBJECTS = 16_000
_CHANGED = 100
_FIRST = datetime(2026, 8, 8, tzinfo=UTC)
_TOLD = ("event_id", "first_reported", "previous_miss_distance_km")
"""Columns of a list of close approaches that depend on the list before."""


def measure_screening(
    settings: Settings, files: Sequence[Path], *, hours: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Time a full screening, and an incremental one after a second snapshot of the catalog, in seconds.

    Both run in a separate state folder, with Spark, checks and publication. `screening_s` is the time of the
    full screening from the run's start to its publication, for all pairs, `hours` ahead, within 5 km.
    `incremental_s` is the same after the second snapshot, in which `changed` objects have other elements.
    `anew_s` is a full screening of the second snapshot; `incremental_fraction` is `incremental_s` divided by
    it, and `equal` reports whether both gave the same rows. `growth` has the CPU seconds of screenings of
    some of the objects and of longer spans.

    Args:
        settings: The settings. The benchmark replaces their state folder.
        files: Two GP files, the older one first. Without them 16,000 objects are simulated, of which a
            hundred change.
        hours: How far ahead to screen.
        say: Called with lines of progress.
    """
    with own_lake(settings) as bench:
        gp = bench.state_dir / "gp"
        gp.mkdir(parents=True)
        snapshots = [_copy_to(path, gp) for path in files] if files else _write_simulated(gp)
        lake = Lakehouse(bench, say=say)
        try:
            lake.endpoints()
            keep_sqlite_connections()
            with dg.DagsterInstance.local_temp() as instance:
                runs = PublishedRuns(lake, instance, build_definitions(bench))
                return _measure_stack(_Stack(runs, hours), snapshots, hours, say)
        finally:
            lake.servers.stop_all()


def measure_full_screening(
    settings: Settings, file: Path | None, *, objects: int, hours: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Time one screening of all pairs, from the run's start to its publication.

    Args:
        settings: The settings. The benchmark replaces their state folder.
        file: A GP file. Without it, `objects` objects are simulated, 30,000 at most.
        objects: The number of objects to simulate.
        hours: How far ahead to screen, within 5 km.
        say: Called with lines of progress.

    Returns:
        ``screening_s``, and the numbers of ``objects`` in the catalog and of ``pairs_reported``.
    """
    with own_lake(settings) as bench:
        gp = bench.state_dir / "gp"
        gp.mkdir(parents=True)
        snapshot = _copy_to(file, gp) if file is not None else simulate_snapshot(gp, objects)
        lake = Lakehouse(bench, say=say)
        try:
            lake.endpoints()
            keep_sqlite_connections()
            with dg.DagsterInstance.local_temp() as instance:
                runs = PublishedRuns(lake, instance, build_definitions(bench))
                stack = _Stack(runs, hours)
                stack.ingest(snapshot)
                screening_s = stack.screen()
                figures = {
                    "screening_s": round(screening_s, 2),
                    "objects": runs.count_rows(CATALOGUE),
                    "pairs_reported": runs.count_rows(CONJUNCTIONS),
                }
        finally:
            lake.servers.stop_all()
    say(f"{figures['objects']:,} objects, {hours:g} h: {screening_s:.1f} s")
    return figures


def simulate_snapshot(folder: Path, objects: int) -> str:
    """Write a GP file of simulated objects to a folder, and return its snapshot id."""
    path = folder / f"made-{_FIRST:%Y%m%dT%H%M}Z.tle"
    path.write_text(format_tle(simulated_elements(seed=2026, objects=objects, epoch=_FIRST)))
    return snapshot_id(path)


def _measure_stack(
    stack: _Stack, snapshots: Sequence[str], hours: float, say: Callable[[str], None]
) -> dict[str, Any]:
    first, second = snapshots
    stack.ingest(first)
    catalogue = stack.table(CATALOGUE)
    screening_s = stack.screen()
    pairs = stack.table(CONJUNCTIONS).height
    say(f"{catalogue.height:,} objects, {hours:g} h: {screening_s:.1f} s, {pairs:,} close approaches")
    stack.ingest(second)
    joined = stack.table(CATALOGUE).join(catalogue, on=["sat_no", "epoch"], how="anti")
    incremental_s = stack.screen()
    kept_up = _select_comparable(stack.table(CONJUNCTIONS))
    say(f"{joined.height:,} of them changed: {incremental_s:.1f} s")
    anew_s = stack.screen(anew=True)
    equal = _select_comparable(stack.table(CONJUNCTIONS)).equals(kept_up)
    say(f"all of them anew: {anew_s:.1f} s, {'the same rows' if equal else 'other rows'}")
    return {
        "screening_s": round(screening_s, 2),
        "objects": catalogue.height,
        "pairs_reported": pairs,
        "changed": joined.height,
        "incremental_s": round(incremental_s, 2),
        "anew_s": round(anew_s, 2),
        "incremental_fraction": round(incremental_s / anew_s, 3),
        "equal": equal,
        "growth": _measure_growth(catalogue, say),
    }


class _Stack:
    """Ingests snapshots of the catalog and runs screenings of all pairs."""

    def __init__(self, runs: PublishedRuns, hours: float) -> None:
        self._runs = runs
        self._ops = {"sda__conjunctions": {"config": {"horizon_h": hours}}}

    def ingest(self, snapshot: str) -> None:
        self._runs.instance.add_dynamic_partitions(gp_snapshots.name or "", [snapshot])
        self._runs.run("catalogue_job", partition=snapshot)

    def screen(self, *, anew: bool = False) -> float:
        return self._runs.run(
            "conjunctions_job", ops=self._ops, tags={RunTag.REBUILD: "true"} if anew else {}
        )

    def table(self, key: dg.AssetKey) -> pl.DataFrame:
        return self._runs.table(key)


def _select_comparable(found: pl.DataFrame) -> pl.DataFrame:
    return found.drop(_TOLD).sort(pl.all())


def _copy_to(path: Path, folder: Path) -> str:
    shutil.copyfile(path, folder / path.name)
    return snapshot_id(path)


def _write_simulated(folder: Path) -> list[str]:
    """Write two snapshots an hour apart. The second has new elements of a hundred objects."""
    names = []
    for number in range(2):
        at = _FIRST + timedelta(hours=number)
        frame = simulated_elements(seed=2026, objects=_OBJECTS, epoch=_FIRST)
        if number:
            moved = pl.col("sat_no").is_in(frame["sat_no"].gather_every(_OBJECTS // _CHANGED).implode())
            frame = frame.filter(moved).with_columns(
                (pl.col("mean_anomaly") + 0.01) % 360, pl.col("epoch").dt.offset_by("1h")
            )
        path = folder / f"made-{at:%Y%m%dT%H%M}Z.tle"
        path.write_text(format_tle(frame))
        names.append(snapshot_id(path))
    return names


def _measure_growth(catalogue: pl.DataFrame, say: Callable[[str], None]) -> list[dict[str, float]]:
    """Time screenings on one core without Spark, for several numbers of objects and hours."""
    every = Elements.from_arrow(catalogue.sort("sat_no").to_arrow())
    start = newest_collection(catalogue.to_arrow())
    mixed = np.random.default_rng(0).permutation(len(every))
    found = []
    for share, hours in ((0.25, 2), (0.5, 2), (1.0, 2), (1.0, 4), (1.0, 8)):
        some = every.take(np.sort(mixed[: round(len(every) * share)]))
        screening = Screening.of_all(some, LIST_THRESHOLD_KM)
        (task,) = in_parts(Span.whole(start, start + hours * 60 * MINUTE), Pairs.ALL, 1)
        began = time.process_time()
        close = len(screening.run_task(task).first)
        took = time.process_time() - began
        say(f"{len(some):,} objects, {hours} h, one core: {took:.2f} s, {close:,} close approaches")
        found.append(
            {"objects": len(some), "hours": hours, "core_s": round(took, 2), "close_approaches": close}
        )
    return found


def print_screening(found: dict[str, Any]) -> None:
    """Print the figures, then the times by objects and hours."""
    console = Console()
    table = Table("screening", "")
    for name, value in found.items():
        if name != "growth":
            table.add_row(name.replace("_", " "), f"{value:,}" if type(value) is int else str(value))
    console.print(table)
    growth = Table("objects", "hours", "s of one core", "close approaches", title="How it grows")
    for one in found["growth"]:
        growth.add_row(
            f"{one['objects']:,}", str(one["hours"]), f"{one['core_s']:.2f}", f"{one['close_approaches']:,}"
        )
    console.print(growth)
