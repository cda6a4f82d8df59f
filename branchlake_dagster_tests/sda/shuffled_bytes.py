"""A few hours of simulated bytes, and the tables that follow from them in any order and in any cuts."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl

from branchlake_dagster import branchlake_definitions
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.receivers.landing_sink import LandingSink
from branchlake_dagster.receivers.records import ReceiverOrigin, Record
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.sda.alerts.corrections import ALERT_FIELDS, INSERT
from branchlake_dagster.sda.assets.alerts import CONJUNCTION_ALERTS
from branchlake_dagster.sda.assets.associations import ASSOCIATIONS
from branchlake_dagster.sda.assets.catalogue import gp_ingest
from branchlake_dagster.sda.assets.observations import OBSERVATIONS, REJECTED_OBSERVATIONS
from branchlake_dagster.sda.assets.registry import registry
from branchlake_dagster.sda.assets.risks import CONJUNCTION_RISKS
from branchlake_dagster.sda.assets.tracks import FUSED_TRACKS
from branchlake_dagster.sda.feeds.direct import run_into
from branchlake_dagster.sda.feeds.feed import Feed
from branchlake_dagster.sda.feeds.plan import Burst, Plan, Tally
from branchlake_dagster.sda.gp.simulated import simulated_elements
from branchlake_dagster.sda.gp.write import format_tle
from branchlake_dagster.sda.graph.definitions import fusion_assets, fusion_checks
from branchlake_dagster.sda.graph.sensor_graph import sensor_graph
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.partitions import windows
from branchlake_dagster.sda.sensor_kinds.declaration import SensorKind
from branchlake_dagster.sda.sensor_kinds.registered import DEFAULT_SENSOR_KINDS
from branchlake_dagster.sda.sources import GpSource, snapshot_id
from branchlake_dagster.sda.windows import to_microseconds
from branchlake_dagster_tests.harness import Project
from branchlake_dagster_tests.ingest.test_landing_source import resource_of

CATALOG_KEYS = [*gp_ingest.keys, *registry.keys]
RAW_TABLES = [kind.raw_table for kind in DEFAULT_SENSOR_KINDS]
DEAD_LETTERS = [dg.AssetKey(["sda", f"{kind.name}_dead_letters"]) for kind in DEFAULT_SENSOR_KINDS]
KEPT_RECORDS = [dg.AssetKey(["sda", f"{kind.name}_kept_records"]) for kind in DEFAULT_SENSOR_KINDS]
BY_HOUR = [ASSOCIATIONS, FUSED_TRACKS, CONJUNCTION_RISKS]
_FROM_BYTES = [
    *RAW_TABLES,
    *DEAD_LETTERS,
    *KEPT_RECORDS,
    *(OBSERVATIONS, REJECTED_OBSERVATIONS, *BY_HOUR, CONJUNCTION_ALERTS),
]
GP_FOLDER = "TEST_GP_FOLDER"
"""In the environment of processes: the folder of GP files."""
_RANGE = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")
LARGE_OBJECTS = {"sda__conjunction_risks": {"config": {"default_radius_m": 2_000.0}}}
"""So large that encounters of two precise tracks have a probability, and become alerts."""
EVERY_RISK = {"sda__conjunction_alerts": {"config": {"max_distance_km": 5.0}}}
QUIET: dict[str, Any] = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


@dataclass(frozen=True)
class SimulatedBytes:
    """Records of all kinds of sensors, each with its time of receipt, and the account of the simulator."""

    start: datetime
    hours: int
    records: list[tuple[str, Record]]
    tallies: Mapping[str, Tally]

    @property
    def partitions(self) -> list[str]:
        """The partition keys of the hours, in their order."""
        return [(self.start + timedelta(hours=hour)).strftime(windows.fmt) for hour in range(self.hours)]

    @property
    def next_partition(self) -> str:
        """The partition key of the hour after them. Its risks depend on the tracks of the last one."""
        return (self.start + timedelta(hours=self.hours)).strftime(windows.fmt)


def crossing_objects(start: datetime, *, pairs: int, seed: int) -> pl.DataFrame:
    """Simulate element sets of pairs whose orbits cross at their nodes, where both arrive together."""
    frame = simulated_elements(seed=seed, objects=4 * pairs, epoch=start)
    # With one epoch at the start, the nodes of a pair have not moved apart yet.
    epoch = pl.lit(start).cast(pl.Datetime("us", "UTC"))
    chosen = frame.filter(pl.col("mean_motion") > 12).head(pairs).with_columns(epoch=epoch)
    tilted = chosen.with_columns(pl.col("sat_no") + 5_000, inclination=(pl.col("inclination") - 4).abs())
    return pl.concat([chosen, tilted]).sort("sat_no")


def simulate_bytes(
    elements: pl.DataFrame, start: datetime, *, hours: int, per_s: Mapping[str, float], seed: int
) -> SimulatedBytes:
    """Simulate 0.1 % duplicates, 1 % damaged records, 1 % stragglers and a burst in each hour."""
    plan = Plan(
        rates=dict(per_s),
        seconds=hours * 3_600.0,
        seed=seed,
        duplicates=0.001,
        stragglers=0.01,
        corrupted=0.01,
        burst=Burst(every_s=3_600.0, first_s=600.0, length_s=60.0, factor=10.0),
    )
    feed = Feed(Elements.from_arrow(elements.to_arrow()), plan, to_microseconds(start) * 1_000)
    records: list[tuple[str, Record]] = []

    def collect(kind: str) -> Any:
        return lambda messages: records.extend((kind, Record(*message)) for message in messages)

    run_into(feed, {kind: collect(kind) for kind in per_s}, paced=False)
    return SimulatedBytes(start, hours, records, feed.tallies)


def cut(chance: random.Random, records: Sequence[Any], pieces: int) -> list[list[Any]]:
    """Shuffle records and cut them into pieces of random sizes, none of them empty."""
    order = list(records)
    chance.shuffle(order)
    ends = [0, *sorted(chance.sample(range(1, len(order)), pieces - 1)), len(order)]
    return [order[first:last] for first, last in pairwise(ends)]


@dataclass
class Tables:
    """The rows of the tables that follow from bytes, without the columns that depend on their order."""

    frames: dict[str, pl.DataFrame] = field(default_factory=dict)

    def differences(self, other: Tables) -> list[str]:
        """Return a sentence for each table that differs."""
        found = []
        for name, frame in self.frames.items():
            theirs = other.frames[name]
            if not frame.equals(theirs):
                lost, new = (
                    frame.join(theirs, on=frame.columns, how="anti", nulls_equal=True),
                    theirs.join(frame, on=frame.columns, how="anti", nulls_equal=True),
                )
                found.append(f"{name}: {frame.height} and {theirs.height} rows\n{lost}\n{new}")
        return found


def space_pipeline(
    resource: LakehouseResource,
    gp_folder: str,
    *,
    kinds: Sequence[SensorKind] = DEFAULT_SENSOR_KINDS,
    keep_value: bool = False,
) -> dg.Definitions:
    """Build the code location of the space pipeline that reads landing files and a folder of GP files."""
    graph = dg.Definitions(
        assets=fusion_assets,
        asset_checks=fusion_checks,
        resources={"gp": GpSource(catalogue_dir=gp_folder)},
        executor=dg.in_process_executor,
    )
    return dg.Definitions.merge(
        branchlake_definitions(resource.lakehouse.settings, lakehouse=resource),
        graph,
        sensor_graph(kinds, "landing", data_mode="SIMULATED", keep_value=keep_value),
    )


class Pipeline:
    """The space pipeline on a lake with a catalog, from which tables of bytes can be removed."""

    def __init__(self, lake: Lakehouse, folder: Path) -> None:
        self.lake, self.landing, self.gp = lake, folder / "landing", folder / "gp"
        self.gp.mkdir()

    @contextmanager
    def project(self, instance: dg.DagsterInstance | None = None, **options: Any) -> Iterator[Project]:
        """Return the code location, with a Dagster instance of its own unless given one.

        `options` are those of `space_pipeline`.
        """
        resource = resource_of(self.lake, self.landing)
        definitions = space_pipeline(resource, str(self.gp), **options)
        with nullcontext(instance) if instance else dg.DagsterInstance.ephemeral() as its_instance:
            yield Project(resource.lakehouse, its_instance, definitions)

    def publish_catalog(self, elements: pl.DataFrame, start: datetime) -> None:
        """Publish a catalog of element sets."""
        path = self.gp / f"made-{start:%Y%m%dT%H%M}Z.tle"
        path.write_text(format_tle(elements))
        with self.project() as p:
            p.instance.add_dynamic_partitions("gp_snapshots", [snapshot_id(path)])
            publish(p, *CATALOG_KEYS, partition_key=snapshot_id(path))

    def remove_measurements(self) -> None:
        """Remove the landing files and all tables that follow from bytes."""
        shutil.rmtree(self.landing, ignore_errors=True)
        catalog = self.lake.catalog(MAIN)
        for key in _FROM_BYTES:
            if catalog.table_exists(tuple(key.path)):
                catalog.drop_table(tuple(key.path))

    def compute(self, simulated: SimulatedBytes, chance: random.Random | None, pieces: int) -> Tables:
        """Ingest the bytes in a shuffle and in cuts, and return the tables that follow.

        After each piece but the last, chance decides how far down the tables follow. Without `chance` the
        order is that of the simulation.
        """
        self.remove_measurements()
        parts = [simulated.records] if chance is None else cut(chance, simulated.records, pieces)
        with self.project() as p:
            for number, part in enumerate(parts, start=1):
                steps = 3 if number == len(parts) or chance is None else chance.randint(0, 3)
                self.land(part)
                self.ingest(p)
                if steps >= 1:
                    self._observe(p, simulated.partitions)
                for hour in simulated.partitions if steps >= 2 else []:
                    if p.lake.catalog().table_exists(tuple(OBSERVATIONS.path)):
                        settle(p, *BY_HOUR, partition_key=hour, ops=LARGE_OBJECTS)
                if steps >= 3:
                    self.finish(p, simulated)
        return self.read()

    def finish(self, p: Project, simulated: SimulatedBytes) -> None:
        """Compute the risks of the hour after the simulated ones, then the alerts."""
        settle(p, CONJUNCTION_RISKS, partition_key=simulated.next_partition, ops=LARGE_OBJECTS)
        settle(p, CONJUNCTION_ALERTS, ops=EVERY_RISK)

    def read(self) -> Tables:
        """Read the tables, without the columns that depend on the order of arrival."""
        observations = self.rows(OBSERVATIONS).drop("ingest_timestamp")
        rejected = self.rows(REJECTED_OBSERVATIONS)
        tracks = self.rows(FUSED_TRACKS)
        return Tables(
            {
                "dead_letters": pl.concat(
                    [
                        self.rows(key)
                        .filter(pl.col("reprocessed_in").is_null())
                        .select("value", "error_kind", "error")
                        for key in DEAD_LETTERS
                    ]
                ).sort(pl.all()),
                "observations": observations.sort("observation_id"),
                "rejected_observations": rejected.drop(
                    "ingest_timestamp", "topic_partition", "topic_offset"
                ).sort("observation_id"),
                "associations": self.rows(ASSOCIATIONS).sort("observation_id"),
                "tracks": tracks.sort("window_start", "sat_no"),
                "risks": self.rows(CONJUNCTION_RISKS).sort(pl.all()),
                "net_alerts": net_alerts(self.rows(CONJUNCTION_ALERTS)),
            }
        )

    def log(self) -> pl.DataFrame:
        """Return the log of alerts."""
        return self.rows(CONJUNCTION_ALERTS)

    def land(self, records: Sequence[tuple[str, Record]]) -> None:
        """Write records to landing files, a file for each kind of sensor."""
        for kind in DEFAULT_SENSOR_KINDS:
            mine = [record for name, record in records if name == kind.source_kind]
            sink = LandingSink(self.landing, kind.topic, 0, ReceiverOrigin("shuffled", "udp"))
            sink.open(resume=False)
            if mine:
                sink.write(mine)
            sink.close()

    def ingest(self, p: Project, *more: dg.AssetKey) -> None:
        """Ingest the landed records of all kinds in one run. `more` are the tables of kept records."""
        settle(p, *RAW_TABLES, *DEAD_LETTERS, *more)

    def _observe(self, p: Project, hours: Sequence[str]) -> None:
        tags = dict(zip(_RANGE, (hours[0], hours[-1]), strict=True))
        settle(p, OBSERVATIONS, tags=tags)
        settle(p, REJECTED_OBSERVATIONS)

    def rows(self, key: dg.AssetKey) -> pl.DataFrame:
        """Return all rows of a table on `main`."""
        return pl.DataFrame(self.lake.catalog(MAIN).load_table(tuple(key.path)).scan().to_arrow())


def net_alerts(log: pl.DataFrame) -> pl.DataFrame:
    """Return the alerts that hold, without the entries' numbers, which depend on the corrections."""
    # An alert is retracted by an entry with the sequence of its insert.
    last = log.sort("alert_id", "sequence", pl.col("kind") != INSERT).group_by(
        "alert_id", maintain_order=True
    )
    return last.last().filter(pl.col("kind") == INSERT).select("alert_id", *ALERT_FIELDS).sort("alert_id")


def publish(p: Project, *keys: dg.AssetKey, **options: Any) -> None:
    """Compute assets in one run, which must be published."""
    assert run_quietly(p, *keys, **options) is RunState.PUBLISHED


def settle(p: Project, *keys: dg.AssetKey, **options: Any) -> None:
    """Compute assets in one run, which is published unless it changed nothing."""
    assert run_quietly(p, *keys, **options) in (RunState.PUBLISHED, RunState.DISCARDED)


def run_quietly(
    p: Project, *keys: dg.AssetKey, ops: Mapping[str, Any] | None = None, **options: Any
) -> RunState:
    """Compute assets in one run without its log, and return what became of it."""
    job = p.definitions.resolve_implicit_global_asset_job_def()
    run_config = {**QUIET, "ops": dict(ops or {})}
    done = job.execute_in_process(
        instance=p.instance, asset_selection=[*keys], run_config=run_config, **options
    )
    return p.settle(done.run_id).state
