"""Bytes of new kinds of sensor become rows, observations, associations and tracks on the lake.

The last kind, a camera, is declared here: nothing in the package knows it.
"""

# No `from __future__ import annotations`: pandera reads the annotations.
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyspark.sql.types as T  # noqa: N812 - Spark's own abbreviation
import pytest
from pyspark import cloudpickle

from branchlake_dagster import branchlake_definitions
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.receivers.landing_sink import LandingSink
from branchlake_dagster.receivers.records import ReceiverOrigin, Record
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.sda.assets.associations import ASSOCIATIONS
from branchlake_dagster.sda.assets.catalogue import CATALOGUE, gp_ingest
from branchlake_dagster.sda.assets.observations import OBSERVATIONS, REJECTED_OBSERVATIONS
from branchlake_dagster.sda.assets.registry import registry
from branchlake_dagster.sda.assets.tracks import FUSED_TRACKS
from branchlake_dagster.sda.contracts.fields import required_column
from branchlake_dagster.sda.contracts.raw import OnGround
from branchlake_dagster.sda.estimation.arrow import ELEMENT_INPUT, fuse_table
from branchlake_dagster.sda.graph.quality import fusion_checks
from branchlake_dagster.sda.graph.sensor_graph import sensor_graph
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.sensor_kinds.declaration import ON_GROUND, SensorKind
from branchlake_dagster.sda.sensor_kinds.laser import STATIONS, marini_murray_delay
from branchlake_dagster.sda.sensor_kinds.registered import (
    DEFAULT_SENSOR_KINDS,
    SENSOR_KINDS,
    measurement_models,
)
from branchlake_dagster.sda.sensor_kinds.sweep_radar import SWEEP
from branchlake_dagster.sda.sensors import measurement
from branchlake_dagster.sda.sensors.measurement import Stations
from branchlake_dagster.sda.sensors.network import RADARS, Site, Tasking
from branchlake_dagster.sda.sensors.simulate import Scene, look, simulate
from branchlake_dagster.sda.sources import DEFAULT_SNAPSHOT, GpSource
from branchlake_dagster.sda.wire.links import LIGHT_M_S
from branchlake_dagster.sda.wire.radar import encode_radar
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.harness import Project
from branchlake_dagster_tests.ingest.test_landing_source import resource_of
from branchlake_dagster_tests.sda.test_registry_lake import empty_lake

# Spark's workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

__all__ = ["empty_lake"]

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

HOUR = "2026-08-08-03:00"
START = int(datetime(2026, 8, 8, 3, tzinfo=UTC).timestamp() * 1e6)
END = START + 3_600_000_000
SEED = 11
CATALOG_KEYS = {*gp_ingest.keys, *registry.keys}
CAMERA_SITE = Site("camera-1", 47.5, 9.3, 0.5, mask_deg=20, max_range_km=3_000)


# -- a kind of sensor that the package does not know ---------------------------------------------------


class RawCamera(OnGround):
    """A direction that a camera measured, from a line of text: time in ms, azimuth and elevation in degrees."""

    azimuth_deg: T.DoubleType = required_column("Azimuth from north over east.", "deg", ge=0.0, le=360.0)
    elevation_deg: T.DoubleType = required_column("Elevation above the horizon.", "deg", ge=-90.0, le=90.0)


def decode_camera(values: pa.BinaryArray) -> tuple[pa.RecordBatch, pa.StringArray]:
    found = pc.extract_regex(
        values.cast(pa.string()), r"^(?P<ms>\d+) (?P<azimuth>[\d.]+) (?P<elevation>[\d.]+)$"
    )
    milliseconds = pc.struct_field(found, "ms").cast(pa.int64())
    rows = len(values)
    is_point = pc.is_valid(milliseconds)
    columns = {
        "orig_sensor_id": pa.repeat("camera-1", rows),
        "track_id": pa.nulls(rows, pa.string()),
        "timestamp_ns": pc.multiply(milliseconds, 1_000_000),
        "sensor_timestamp": milliseconds.cast(pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC")),
        "clock_source": pa.repeat("gps", rows),
        "clock_sync_age_s": pa.repeat(0.0, rows),
        "sensor_lat_deg": pa.repeat(CAMERA_SITE.lat_deg, rows),
        "sensor_lon_deg": pa.repeat(CAMERA_SITE.lon_deg, rows),
        "sensor_alt_km": pa.repeat(CAMERA_SITE.alt_km, rows),
        "azimuth_deg": pc.struct_field(found, "azimuth").cast(pa.float64()),
        "elevation_deg": pc.struct_field(found, "elevation").cast(pa.float64()),
    }
    reasons = pc.if_else(is_point, pa.scalar(None, pa.string()), "not a direction")
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns)), reasons


CAMERA = SensorKind(
    source_kind="camera",
    name="camera",
    decode=decode_camera,
    contract=RawCamera,
    record_id=("timestamp_ns",),
    measures=("azimuth_deg", "elevation_deg"),
    envelope={
        **ON_GROUND,
        "azimuth_deg": "azimuth_deg",
        "azimuth_unc_deg": "0.01D / cos(radians(elevation_deg))",
        "elevation_deg": "elevation_deg",
        "elevation_unc_deg": "0.01D",
    },
    allowed_lateness_s=5.0,
)
ALL_KINDS = (*SENSOR_KINDS, CAMERA)


# -- the true objects, and what is measured of them ----------------------------------------------------


def at(site: Site, micros: np.ndarray) -> Stations:
    lat, lon, alt = (np.full(len(micros), one) for one in (site.lat_deg, site.lon_deg, site.alt_km))
    return Stations(lat, lon, alt, micros)


def views(scene: Scene, site: Site, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of objects, instants (ms exactly), and range, rate, azimuth, elevation, by time."""
    seen, _, _ = look(scene, site)
    objects, steps = np.nonzero(seen)
    chosen = scene.rng.permutation(len(objects))[:count]
    micros = (
        scene.ephemeris.micros[scene.steps()[steps[chosen]]]
        + scene.rng.integers(0, 29, len(chosen)) * 1_000_000
    )
    # An instant of a sensor names a measurement.
    micros, order = np.unique(micros, return_index=True)
    rows = objects[chosen][order]
    measured, _ = measurement.predict_radar(*scene.truth(rows, micros), at(site, micros))
    return rows, micros, measured


def sweeps(scene: Scene) -> tuple[list[bytes], list[int]]:
    values: list[bytes] = []
    objects: list[int] = []
    for number, site in enumerate(RADARS[:6], start=1):
        rows, micros, measured = views(scene, site, 60)
        noise = scene.rng.standard_normal((len(rows), 3))
        frames = np.zeros(len(rows), SWEEP)
        frames["sensor_id"] = number
        frames["range_km"] = measured[:, 0] + noise[:, 0] * 0.03
        elevation = np.degrees(measured[:, 3])
        azimuth = np.degrees(measured[:, 2]) + noise[:, 1] * 0.03 / np.cos(measured[:, 3])
        frames["azimuth_deg"], frames["elevation_deg"] = azimuth % 360, elevation + noise[:, 2] * 0.03
        frames["timestamp_ms"] = micros // 1_000
        values += [frame.tobytes() for frame in frames]
        objects += scene.sat_no[rows].tolist()
    return values, objects


def normal_points(scene: Scene) -> tuple[list[bytes], list[int]]:
    """Messages as stations send them, with the delay by the atmosphere, and the true objects."""
    values: list[bytes] = []
    objects: list[int] = []
    for site in STATIONS:
        rows, micros, measured = views(scene, replace(site, mask_deg=20, max_range_km=8_000), 150)
        count = len(rows)
        weather = (np.full(count, 980.0), np.full(count, 290.0), np.full(count, 50.0))
        place = (np.full(count, site.lat_deg), np.full(count, site.alt_km))
        delay = marini_murray_delay(*weather, measured[:, 3], np.full(count, 0.532), *place)
        meters = measured[:, 0] * 1e3 + delay + scene.rng.standard_normal(count) * 0.02
        flight = 2 * meters / LIGHT_M_S
        # The instants of `views` are those of the reflection. A station states that of the transmission.
        seconds = (micros - START) / 1e6 + 3 * 3_600 - flight / 2
        pad = site.sensor_id.removeprefix("laser-")
        for k, row in enumerate(rows.tolist()):
            number = int(scene.sat_no[row])
            text = (
                f"H2 STATION    {pad}  5 13  4\nH3 target 1234567 1 {number} 0 1\n"
                "H4  1 2026  8  8  3  0  0 2026  8  8  4  0  0  0 0 0 0 1 0 2 0\nC0 0 532.000 std\n"
                f"20 {seconds[k]:.3f} 980.0 290.0 50 0\n30 {seconds[k]:.3f} 0.0 {np.degrees(measured[k, 3]):.6f} 0 1 1\n"
                f"11 {seconds[k]:.9f} {flight[k]:.13f} std 2 30 100 130 0 0 0 1 0\n"
            )
            values.append(text.encode())
            objects.append(number)
    return values, objects


def directions(scene: Scene) -> tuple[list[bytes], list[int]]:
    rows, micros, measured = views(scene, CAMERA_SITE, 60)
    angles = np.degrees(measured[:, 2:])
    values = [
        f"{when // 1_000} {azimuth:.9f} {elevation:.9f}".encode()
        for when, (azimuth, elevation) in zip(micros.tolist(), angles.tolist(), strict=True)
    ]
    return values, scene.sat_no[rows].tolist()


def land(folder: Path, kind: SensorKind, values: list[bytes]) -> None:
    sink = LandingSink(folder, kind.topic, 0, ReceiverOrigin("r1", "udp"))
    sink.open(resume=False)
    sink.write([Record(value, b"k", END * 1_000, b"h:1") for value in values])
    sink.close()


@contextmanager
def code_location(
    lake: Lakehouse, folder: Path, instance: dg.DagsterInstance, kinds: tuple[SensorKind, ...]
) -> Iterator[Project]:
    resource = resource_of(lake, folder)
    settings: Settings = resource.lakehouse.settings
    graph = dg.Definitions(
        assets=[gp_ingest, registry],
        asset_checks=[
            one for one in fusion_checks if {key.asset_key for key in one.check_keys} <= CATALOG_KEYS
        ],
        resources={"gp": GpSource(simulated_objects=300)},
        executor=dg.in_process_executor,
    )
    machinery = branchlake_definitions(settings, lakehouse=resource)
    yield Project(
        resource.lakehouse, instance, dg.Definitions.merge(machinery, graph, sensor_graph(kinds, "landing"))
    )


def publish(p: Project, *keys: dg.AssetKey, partition: str | None = None) -> None:
    run_id = p.run(*keys, partition=partition)
    outcome = p.settle(run_id)
    assert outcome.state is RunState.PUBLISHED, outcome


def dead_letters(kind: SensorKind) -> dg.AssetKey:
    return dg.AssetKey(["sda", f"{kind.name}_dead_letters"])


def table(p: Project, key: dg.AssetKey) -> pl.DataFrame:
    return pl.DataFrame(pl.from_arrow(p.lake.catalog().load_table(tuple(key.path)).scan().to_arrow()))


def errors_km(tracks: pl.DataFrame, scene: Scene) -> pl.DataFrame:
    rows = np.searchsorted(scene.sat_no, tracks["sat_no"].to_numpy())
    truth, _ = scene.truth(rows, np.full(len(rows), (START + END) // 2))
    apart = tracks.select("x_km", "y_km", "z_km").to_numpy() - truth
    return tracks.select("sat_no", error_km=pl.Series(np.linalg.norm(apart, axis=1)))


def test_bytes_of_new_kinds_of_sensor_become_tracks_without_a_change_of_the_package(
    empty_lake: Lakehouse, tmp_path: Path
) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        with code_location(empty_lake, tmp_path, instance, DEFAULT_SENSOR_KINDS) as before:
            instance.add_dynamic_partitions("gp_snapshots", [DEFAULT_SNAPSHOT])
            publish(before, *CATALOG_KEYS, partition=DEFAULT_SNAPSHOT)
            catalogue = table(before, CATALOGUE).sort("sat_no")
            elements = Elements.from_arrow(catalogue.to_arrow())
            scene = Scene(elements, START, END, seed=SEED, kind="new")
            radar = DEFAULT_SENSOR_KINDS[0]
            few = Tasking(objects_per_radar=12)
            native = simulate(elements, kind="radar", start=START, end=END, seed=SEED, tasking=few)
            land(tmp_path, radar, encode_radar(native).to_pylist())
            publish(before, radar.raw_table, dead_letters(radar))
            publish(before, OBSERVATIONS, ASSOCIATIONS, FUSED_TRACKS, partition=HOUR)
            assert "n_laser" not in table(before, FUSED_TRACKS).columns
        # The same lake with more kinds: existing tables get what is new.
        with code_location(empty_lake, tmp_path, instance, ALL_KINDS) as p:
            sent = {"sweep_radar": sweeps(scene), "laser": normal_points(scene), "camera": directions(scene)}
            new = {kind.source_kind: kind for kind in ALL_KINDS if kind.source_kind in sent}
            for name, kind in new.items():
                assert len(sent[name][0]) > 30
                land(tmp_path, kind, [*sent[name][0], b"damaged"])
            publish(p, *(key for kind in new.values() for key in (kind.raw_table, dead_letters(kind))))
            for name, kind in new.items():
                assert table(p, kind.raw_table).height == len(sent[name][0])
                dead = table(p, dead_letters(kind))
                assert dead["value"].to_list() == [b"damaged"]
            publish(p, OBSERVATIONS, ASSOCIATIONS, FUSED_TRACKS, partition=HOUR)
            publish(p, REJECTED_OBSERVATIONS)
            observed = table(p, OBSERVATIONS)
            counts = dict(observed.group_by("source_kind").len().iter_rows())
            assert counts == {"radar": native.height, **{name: len(of[0]) for name, of in sent.items()}}
            assert table(p, REJECTED_OBSERVATIONS).height == 0
            associated, tracks = table(p, ASSOCIATIONS), table(p, FUSED_TRACKS)
        raw = {name: table(p, kind.raw_table).sort("topic_offset") for name, kind in new.items()}

    # Each measurement is associated with its true object, or with none.
    for name, (_, objects) in sent.items():
        # A topic's rows are in the order of sending.
        truth = raw[name].select(
            "sensor_timestamp", source_id="orig_sensor_id", true_sat_no=pl.Series(objects, dtype=pl.Int64)
        )
        rows = associated.filter(source_kind=name).join(
            truth, on=["source_id", "sensor_timestamp"], validate="1:1"
        )
        is_assigned = pl.col("result").is_in(["confirmed", "reassigned"])
        assigned = rows.filter(is_assigned)
        assert assigned.height > 0.9 * len(objects), name
        assert (assigned["sat_no"] == assigned["true_sat_no"]).mean() > 0.99, name
    laser = associated.filter(source_kind="laser")
    assert (laser["claimed_sat_no"] == laser["sat_no"]).fill_null(True).all()
    assert set(laser["degrees_of_freedom"]) == {1}

    # Tracks use them with the right weight: those with laser ranges are closer to the truth.
    for kind in ("radar", *sent):
        assert tracks[f"n_{kind}"].sum() > 0
    used = associated.filter(pl.col("result").is_in(["confirmed", "reassigned"]))
    joined = (
        observed.drop("sat_no")
        .join(used.select("observation_id", "sat_no"), on="observation_id")
        .join(catalogue.select(ELEMENT_INPUT), on="sat_no")
        .sort("sat_no", "sensor_timestamp", "observation_id")
    )
    without = fuse_table(
        joined.filter(pl.col("source_kind") != "laser").to_arrow(), START, END, measurement_models(ALL_KINDS)
    )
    ranged = tracks.filter(pl.col("n_laser") >= 4)
    both = errors_km(ranged, scene).join(
        errors_km(pl.DataFrame(without), scene), on="sat_no", suffix="_without"
    )
    assert both.height > 30
    assert both["error_km"].median() < 0.5 * both["error_km_without"].median()
    assert (both["error_km"] < both["error_km_without"]).mean() > 0.7
