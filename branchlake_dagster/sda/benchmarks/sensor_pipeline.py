"""`branchlake bench sda`: time the pipeline from landing files to alerts, beside plain Spark."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
from rich.console import Console
from rich.table import Table

from branchlake_dagster.bench.launched_run import BenchFailed
from branchlake_dagster.bench.own_lake import own_lake
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.dagster_sqlite import keep_sqlite_connections
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.receivers.landing import Landing
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.sda.assets.alerts import CONJUNCTION_ALERTS
from branchlake_dagster.sda.assets.associations import ASSOCIATIONS
from branchlake_dagster.sda.assets.catalogue import CATALOGUE
from branchlake_dagster.sda.assets.observations import OBSERVATIONS
from branchlake_dagster.sda.assets.raw import raw_ingests
from branchlake_dagster.sda.assets.risks import CONJUNCTION_RISKS
from branchlake_dagster.sda.assets.tracks import FUSED_TRACKS
from branchlake_dagster.sda.benchmarks import registry, screening
from branchlake_dagster.sda.benchmarks.association import measure_association
from branchlake_dagster.sda.benchmarks.plain_observations import time_plain_observations
from branchlake_dagster.sda.benchmarks.process_memory import watch_memory
from branchlake_dagster.sda.benchmarks.published_runs import PublishedRuns
from branchlake_dagster.sda.benchmarks.screening import simulate_snapshot
from branchlake_dagster.sda.benchmarks.tracks import measure_tracks
from branchlake_dagster.sda.commands.simulate import Simulated
from branchlake_dagster.sda.commands.simulate import run_simulation as simulate_sensors
from branchlake_dagster.sda.feeds.plan import RATES
from branchlake_dagster.sda.graph.code_location import (
    GP_DIR,
    LIVE_SENSORS,
    SENSORS,
    build_definitions,
    gp_folder,
)
from branchlake_dagster.sda.partitions import gp_snapshots, windows
from branchlake_dagster.sda.sensor_kinds.registered import DEFAULT_SENSOR_KINDS
from branchlake_dagster.settings import Settings

STAGES = ("ingestion", "observations", "associations", "tracks", "risks", "alerts")
GROWTH = 4
_OBJECTS, _LARGE_OBJECTS = 16_000, 26_834
_WARM_UP_OBSERVATIONS = 5_000
_SIMULATED_S = 600.0
"""The time in which the simulated sensors measure, in seconds. It lies within one hour."""
_HOURS = tuple(datetime(2026, 8, 8, hour, tzinfo=UTC) for hour in range(1, 4))
"""The hours of the warm-up, of the input, and of the larger input."""
_REGISTRY_ROWS, _REGISTRY_ROUNDS = 500_000, 1
_SCREENING_HOURS = 24.0
_QUALITY_HOURS = 1.0


@dataclass(frozen=True)
class Input:
    """Measurements of an hour in landing files.

    Attributes:
        hour: The start of the hour.
        offsets: By source kind, the first offset and the offset after the last one.
    """

    hour: datetime
    offsets: dict[str, tuple[int, int]]

    @property
    def partition(self) -> str:
        """The partition key of the hour."""
        return self.hour.strftime(windows.fmt)

    @property
    def records(self) -> int:
        """The number of records."""
        return sum(end - start for start, end in self.offsets.values())


def measure_space_pipeline(
    settings: Settings, files: Sequence[Path], *, observations: int, seed: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the times of the whole pipeline, and the quality of its results, in separate state folders.

    `measure_throughput` describes the figures of the pipeline. The others come from other benchmarks:
    ``wrong_association_share`` from `measure_association`; ``median_error_m``, ``best_sensor_error_m``,
    ``element_set_error_m`` and ``preferred_better_share`` from `measure_tracks`; ``registry_s`` and
    ``plain_registry_s`` from `measure_registry`; ``screening_s`` and ``screening_27k_s`` from
    `screening.measure_full_screening`, a day ahead.

    Args:
        settings: The settings. The benchmark replaces their state folder.
        files: GP files for the associations, the tracks and the first screening, as for
            `measure_association`. Without them objects are simulated.
        observations: The approximate number of measurements in the smaller input.
        seed: The seed of the simulated sensors.
        say: Called with lines of progress.
    """
    figures = measure_throughput(settings, observations=observations, seed=seed, say=say)
    say("Associations and tracks against the truth …")
    association = measure_association(files, hours=_QUALITY_HOURS, seed=seed, say=say)
    (total,) = (outcome for outcome in association["kinds"] if outcome["kind"] == "all")
    track = measure_tracks(files, hours=_QUALITY_HOURS, seed=seed, say=say)
    say("The registry and plain Spark …")
    merge = registry.measure_registry(settings, rows=_REGISTRY_ROWS, rounds=_REGISTRY_ROUNDS, say=say)
    say("Screening of all pairs a day ahead …")
    day, large_day = (
        screening.measure_full_screening(settings, file, objects=objects, hours=_SCREENING_HOURS, say=say)
        for file, objects in ((files[-1] if files else None, _OBJECTS), (None, _LARGE_OBJECTS))
    )
    return {
        **figures,
        "wrong_association_share": total["wrong_share"],
        "association_objects": association["objects"],
        "association_observations": association["observations"],
        **{name: track[name] for name in ("median_error_m", "best_sensor_error_m", "element_set_error_m")},
        "preferred_better_share": track["preferred_better_share"],
        "tracks": track["tracks"],
        "registry_s": merge["registry_s"],
        "plain_registry_s": merge["registry_plain_spark_s"],
        "registry_rows": merge["rows"],
        "screening_s": day["screening_s"],
        "screening_objects": day["objects"],
        "screening_27k_s": large_day["screening_s"],
        "screening_27k_objects": large_day["objects"],
    }


def measure_throughput(
    settings: Settings, *, observations: int, seed: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Time the way from bytes in landing files to alerts, with warm servers.

    Simulated sensors write two inputs of one hour each. The larger input has four times as many measurements.

    Returns:
        ``stages``: the seconds of each stage of the smaller input. The time of a stage is the sum over its
            runs, from their start to their publication, with checks. ``ingestion`` has one run per kind of
            sensor, one after the other. Alerts do not depend on ``rejected_observations``.
        ``obs_per_s``: the published observations of the larger input, divided by the seconds of ingestion and
            observations; ``small_obs_per_s`` for the smaller input.
        ``plain_spark_obs_per_s``: the same for plain Spark, which writes only a table of observations from
            the same files; ``plain_spark_with_raw_obs_per_s`` also writes the raw tables and reads them.
        ``pipeline_obs_per_s``: the observations of the smaller input, divided by the seconds of all stages.
        ``growth_1m_to_4m``: the seconds of the larger input until observations, divided by those of the
            smaller. The name fits a smaller input of a million.
        ``observations`` and ``large_observations``: the numbers of published observations.
        ``peak_mb``: the largest memory of the pipeline with its servers, see `watch_memory`; None if the
            system does not report it.

    Raises:
        ConfigurationError: The environment configures another pipeline than the default one.
        BenchFailed: A run was not published, or plain Spark has another number of observations.
    """
    _require_own_pipeline(os.environ)
    with own_lake(settings) as bench:
        lake = Lakehouse(bench, say=say)
        try:
            lake.endpoints()
            ensure_main_has_commit(lake.nessie)
            folder = bench.state_dir / "gp"
            folder.mkdir()
            snapshot = simulate_snapshot(folder, _OBJECTS)
            keep_sqlite_connections()
            with dg.DagsterInstance.local_temp() as instance:
                runs = PublishedRuns(lake, instance, build_definitions(bench))
                instance.add_dynamic_partitions(gp_snapshots.name or "", [snapshot])
                runs.run("catalogue_job", partition=snapshot)
                (catalogue,) = gp_folder(bench).glob(f"{snapshot}.*")
                trial = _Trial(runs, catalogue, seed, say)
                return trial.measure(observations)
        finally:
            lake.servers.stop_all()


def _require_own_pipeline(environment: Mapping[str, str]) -> None:
    """Raise ConfigurationError if the environment configures another pipeline than the default one."""
    configured = [name for name in (GP_DIR, LIVE_SENSORS, SENSORS) if environment.get(name)]
    if configured:
        raise ConfigurationError(
            f"The benchmark times the pipeline's defaults, but {', '.join(configured)} is set.",
            hint=f"Run it without: env {' '.join(f'-u {name}' for name in configured)} branchlake bench sda",
            reason="configured_pipeline",
            subject=", ".join(configured),
        )


class _Trial:
    """Writes inputs of simulated sensors to the landing folder, and times the pipeline's runs on them."""

    def __init__(self, runs: PublishedRuns, catalogue: Path, seed: int, say: Callable[[str], None]) -> None:
        self._runs, self._catalogue, self._seed, self._say = runs, catalogue, seed, say
        self._ingests = raw_ingests("landing")
        self._folder = runs.lake.settings.landing_folder

    def measure(self, observations: int) -> dict[str, Any]:
        # An ingestion reads all existing records, so each input is written just before it is ingested.
        warm_up = self._simulate(_HOURS[0], min(_WARM_UP_OBSERVATIONS, observations))
        self._to_alerts(warm_up)
        self._time_plain(warm_up, with_raw_tables=True)
        small = self._simulate(_HOURS[1], observations)
        pids = [record.pid for record in self._runs.lake.servers.status().values() if record is not None]
        with watch_memory(pids) as small_memory:
            stages, count = self._to_alerts(small)
        large = self._simulate(_HOURS[2], GROWTH * observations)
        with watch_memory(pids) as large_memory:
            large_stages, large_count = self._to_observations(large)
        peaks_mb = [memory.peak_mb for memory in (small_memory, large_memory) if memory.peak_mb is not None]
        seconds, large_seconds = (
            found["ingestion"] + found["observations"] for found in (stages, large_stages)
        )
        plain_s, plain_with_raw_s = (
            self._time_plain(large, with_raw_tables=with_raw_tables, expected=large_count)
            for with_raw_tables in (False, True)
        )
        self._say(f"plain Spark {plain_s:.1f} s, with raw tables {plain_with_raw_s:.1f} s")
        return {
            "obs_per_s": round(large_count / large_seconds),
            "small_obs_per_s": round(count / seconds),
            "plain_spark_obs_per_s": round(large_count / plain_s),
            "plain_spark_with_raw_obs_per_s": round(large_count / plain_with_raw_s),
            "pipeline_obs_per_s": round(count / sum(stages[name] for name in STAGES)),
            "stages": {name: round(value, 2) for name, value in stages.items()},
            "large_stages": {name: round(value, 2) for name, value in large_stages.items()},
            "growth_1m_to_4m": round(large_seconds / seconds, 2),
            "peak_mb": round(max(peaks_mb)) if peaks_mb else None,
            "observations": count,
            "large_observations": large_count,
            "objects": self._runs.count_rows(CATALOGUE),
            "alerts": self._runs.count_rows(CONJUNCTION_ALERTS),
        }

    def _simulate(self, hour: datetime, size: int) -> Input:
        """Write about `size` measurements of the hour to the landing folder."""
        landing = Landing(self._folder)
        kinds = {kind.source_kind: kind.topic for kind in DEFAULT_SENSOR_KINDS}
        begins = {
            kind: landing.offsets(topic, 0)[1] if topic in landing.topics() else 0
            for kind, topic in kinds.items()
        }
        factor = size / _SIMULATED_S / sum(RATES.values())
        simulate_sensors(
            Simulated(
                rates={kind: rate * factor for kind, rate in RATES.items()},
                start=hour,
                radar=None,
                optical=None,
                isl=None,
                landing=self._folder,
                kafka=None,
                kafka_options=None,
                topics="sda.",
                paced=False,
                seconds=_SIMULATED_S,
                seed=self._seed,
                objects=_OBJECTS,
                catalogue=self._catalogue,
                duplicates=0.001,
                stragglers=0.001,
                corrupted=0.001,
                burst_every_s=0.0,
                burst_first_s=0.0,
                burst_s=0.0,
                burst_factor=1.0,
                connections=1,
                fault_every=0,
            ),
            say=self._say,
        )
        spans = {kind: (begins[kind], landing.offsets(topic, 0)[1]) for kind, topic in kinds.items()}
        landed = Input(hour, {kind: span for kind, span in spans.items() if span[1] > span[0]})
        self._say(f"{landed.records:,} records of the hour {landed.partition}")
        return landed

    def _to_observations(self, landed: Input) -> tuple[dict[str, float], int]:
        """Publish the observations of an input. Return the seconds by stage, and the number of rows."""
        before = self._runs.count_rows(OBSERVATIONS) if self._has_observations() else 0
        ingestion_s = 0.0
        for kind, ingest in zip(DEFAULT_SENSOR_KINDS, self._ingests, strict=True):
            start, end = landed.offsets.get(kind.source_kind, (0, 0))
            for _ in range(start, end, ingest.most_records):
                ingestion_s += self._runs.run(f"ingest_{ingest.name}_job")
        simulated = {"observations": {"config": {"data_mode": "SIMULATED"}}}
        observations_s = self._runs.run("observations_job", partition=landed.partition, ops=simulated)
        count = self._runs.count_rows(OBSERVATIONS) - before
        self._say(f"ingestion {ingestion_s:.1f} s, {count:,} observations {observations_s:.1f} s")
        return {"ingestion": ingestion_s, "observations": observations_s}, count

    def _to_alerts(self, landed: Input) -> tuple[dict[str, float], int]:
        """Publish all tables from an input to the alerts. Return what `_to_observations` returns."""
        seconds, count = self._to_observations(landed)
        stages = {"associations": ASSOCIATIONS, "tracks": FUSED_TRACKS, "risks": CONJUNCTION_RISKS}
        for name, asset in stages.items():
            seconds[name] = self._runs.run("tracks_job", [asset], partition=landed.partition)
            self._say(f"{name} {seconds[name]:.1f} s")
        seconds["alerts"] = self._runs.run("alerts_job")
        seconds["rejected_observations"] = self._runs.run("rejected_observations_job")
        return seconds, count

    def _time_plain(self, landed: Input, *, with_raw_tables: bool, expected: int | None = None) -> float:
        """Time plain Spark on an input. Raises BenchFailed if its number of rows is not `expected`."""
        session = self._runs.lake.spark_session(MAIN)
        try:
            seconds, count = time_plain_observations(
                session, self._folder, landed.offsets, DEFAULT_SENSOR_KINDS, with_raw_tables=with_raw_tables
            )
        finally:
            session.stop()
        if expected is not None and count != expected:
            raise BenchFailed(
                f"Plain Spark has {count:,} observations, but the pipeline published {expected:,}."
            )
        return seconds

    def _has_observations(self) -> bool:
        return bool(self._runs.lake.catalog(MAIN).table_exists(tuple(OBSERVATIONS.path)))


def show_space_pipeline(figures: dict[str, Any]) -> None:
    """Print the figures, then the seconds of each stage."""
    console = Console()
    table = Table("space pipeline", "")
    for name, value in figures.items():
        if name not in ("stages", "large_stages"):
            table.add_row(name.replace("_", " "), _format_figure(name, value))
    console.print(table)
    stages = Table("stage", "s", f"s of the larger input ({figures['large_observations']:,} observations)")
    for name, value in figures["stages"].items():
        large = figures["large_stages"].get(name)
        stages.add_row(name.replace("_", " "), f"{value:.2f}", "" if large is None else f"{large:.2f}")
    console.print(stages)


def _format_figure(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3%}" if name.endswith("_share") else f"{value:,}"
