"""`branchlake bench screening`: all objects against all, to published, and again after another snapshot."""

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
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.sda.assets.catalogue import CATALOGUE
from branchlake_dagster.sda.assets.conjunctions import CONJUNCTIONS, LIST_THRESHOLD_KM, newest_snapshot
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
"""What a list says of the one before it."""


def measure(
    settings: Settings, files: Sequence[Path], *, hours: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Two snapshots one after the other in a state folder of its own, through Spark, gate and publication.

    `files` are two GP files; without them 16,000 objects are simulated, of which a hundred change.
    `screening_s`: from the run's start to its publication, of all pairs, `hours` ahead, within 5 km.
    `incremental_s`: the same after the second snapshot, `changed` objects of which were others;
    `incremental_fraction`: over `anew_s`, that of a screening of all pairs then. `equal`: whether both gave
    the same rows. `growth`: seconds of one core for a part of the objects or of the time. Times in seconds.
    """
    with own_lake(settings) as bench:
        gp = bench.state_dir / "gp"
        gp.mkdir(parents=True)
        snapshots = [_placed(path, gp) for path in files] if files else _simulated(gp)
        lake = Lakehouse(bench, say=say)
        try:
            lake.endpoints()
            with dg.DagsterInstance.local_temp() as instance:
                runs = PublishedRuns(lake, instance, build_definitions(bench))
                return _measured(_Stack(runs, hours), snapshots, hours, say)
        finally:
            lake.servers.stop_all()


def measure_full_screening(
    settings: Settings, file: Path | None, *, objects: int, hours: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Time one screening of all pairs, from the run's start to its publication.

    Args:
        settings: the settings, of which the benchmark takes its own state folder.
        file: a GP file; without it `objects` are simulated, 30,000 at most.
        objects: the number of objects to simulate.
        hours: how far ahead, within 5 km.
        say: reports progress.

    Returns:
        ``screening_s``, and the numbers of ``objects`` in the catalog and of ``pairs_reported``.

    """
    with own_lake(settings) as bench:
        gp = bench.state_dir / "gp"
        gp.mkdir(parents=True)
        snapshot = _placed(file, gp) if file is not None else simulate_snapshot(gp, objects)
        lake = Lakehouse(bench, say=say)
        try:
            lake.endpoints()
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


def _measured(
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
    kept_up = _comparable(stack.table(CONJUNCTIONS))
    say(f"{joined.height:,} of them changed: {incremental_s:.1f} s")
    anew_s = stack.screen(anew=True)
    equal = _comparable(stack.table(CONJUNCTIONS)).equals(kept_up)
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
        "growth": _growth(catalogue, say),
    }


class _Stack:
    """Snapshots of the catalog, and screenings of all pairs."""

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


def _comparable(found: pl.DataFrame) -> pl.DataFrame:
    return found.drop(_TOLD).sort(pl.all())


def _placed(path: Path, folder: Path) -> str:
    shutil.copyfile(path, folder / path.name)
    return snapshot_id(path)


def _simulated(folder: Path) -> list[str]:
    """Two snapshots an hour apart; in the second a hundred objects have other elements."""
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


def _growth(catalogue: pl.DataFrame, say: Callable[[str], None]) -> list[dict[str, float]]:
    """On one core, without Spark: by objects and by hours."""
    every = Elements.from_arrow(catalogue.sort("sat_no").to_arrow())
    start = newest_snapshot(catalogue["snapshot_id"].unique().to_list())
    mixed = np.random.default_rng(0).permutation(len(every))
    found = []
    for share, hours in ((0.25, 2), (0.5, 2), (1.0, 2), (1.0, 4), (1.0, 8)):
        some = every.take(np.sort(mixed[: round(len(every) * share)]))
        screening = Screening.of_all(some, LIST_THRESHOLD_KM)
        (task,) = in_parts(Span.whole(start, start + hours * 60 * MINUTE), Pairs.ALL, 1)
        began = time.process_time()
        close = len(screening.done(task).first)
        took = time.process_time() - began
        say(f"{len(some):,} objects, {hours} h, one core: {took:.2f} s, {close:,} close approaches")
        found.append(
            {"objects": len(some), "hours": hours, "core_s": round(took, 2), "close_approaches": close}
        )
    return found


def show(found: dict[str, Any]) -> None:
    """Figures, then how it grows."""
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
