"""Simulate observations that do not name their objects, some with wrong track numbers, and clutter.

Clutter are false measurements. The simulation's track numbers contain the object's number, which a real
sensor does not know. So they are replaced, and only links between satellites name their partner. The truth is
returned as a separate table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from branchlake_dagster.sda.orbits.frames import Floats, sidereal_angle
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.sensors.native import SOURCE_KINDS
from branchlake_dagster.sda.sensors.network import Tasking
from branchlake_dagster.sda.sensors.simulate import simulate

CLUTTER = -1
"""The value of ``true_sat_no`` for false measurements."""
_DONOR_DRAWS = 12


@dataclass(frozen=True)
class Scene:
    """Observations and their truth.

    ``truth`` has the columns ``observation_id``, ``source_kind``, ``true_sat_no`` and ``has_wrong_tag``.
    """

    observations: pl.DataFrame
    truth: pl.DataFrame


def simulate_scene(
    elements: Elements,
    start: int,
    end: int,
    *,
    seed: int,
    wrong_tag_share: float = 0.05,
    clutter_share: float = 0.01,
    tasking: Tasking | None = None,
) -> Scene:
    """Simulate all kinds of sensors over a window (UTC microseconds since 1970).

    Args:
        elements: The true objects, sorted by ``sat_no``.
        start: The start of the window.
        end: The end of the window.
        seed: The seed of all random numbers.
        wrong_tag_share: The share of observations that carry the track number and the partner of another
            track of the same sensor. The other track is near in time.
        clutter_share: The number of false measurements divided by the number of true ones. About half of them
            carry the number of a real track, the others a separate number.
        tasking: How much the sensors observe.
    """
    generator = np.random.default_rng([seed, 91])
    native = pl.concat(
        [
            simulate(elements, kind=kind, start=start, end=end, seed=seed, tasking=tasking)
            for kind in SOURCE_KINDS
        ]
    ).with_columns(true_sat_no=pl.col("sat_no"))
    false = _clutter(native, clutter_share, generator)
    tagged = _replace_tracks(native, generator)
    tagged, has_wrong_tag = _exchange_tags(tagged, wrong_tag_share, generator)
    false = _tag_clutter(false, tagged, generator)
    rows = pl.concat(
        [
            tagged.with_columns(has_wrong_tag=pl.Series(has_wrong_tag)),
            false.with_columns(has_wrong_tag=pl.lit(False)).select([*tagged.columns, "has_wrong_tag"]),
        ]
    ).with_columns(
        observation_id=pl.Series([f"o{k:08d}" for k in generator.permutation(len(tagged) + len(false))])
    )
    return Scene(
        to_envelope(rows),
        rows.select("observation_id", "source_kind", "true_sat_no", "has_wrong_tag"),
    )


def _replace_tracks(native: pl.DataFrame, generator: np.random.Generator) -> pl.DataFrame:
    """Give each track a random number, and remove the catalog number except from links."""
    names = native.select("orig_sensor_id", "track_id").unique(maintain_order=True)
    numbers = pl.Series(generator.permutation(len(names)))
    names = names.with_columns(new_track=pl.format("{}-t{}", "orig_sensor_id", numbers))
    return (
        native.join(names, on=["orig_sensor_id", "track_id"], how="left", maintain_order="left")
        .with_columns(
            track_id=pl.col("new_track"),
            sat_no=pl.when(pl.col("source_kind") == "isl").then("sat_no"),
        )
        .drop("new_track")
    )


def _exchange_tags(
    tagged: pl.DataFrame, share: float, generator: np.random.Generator
) -> tuple[pl.DataFrame, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Give some observations the track and the claim of another object's observation of the same sensor.

    The other observation is one of the five before or after it in the order of time.
    """
    count = len(tagged)
    sensor = tagged["orig_sensor_id"].cast(pl.Categorical).to_physical().to_numpy()
    true_objects = tagged["true_sat_no"].to_numpy()
    order = np.lexsort((tagged["timestamp_ns"].to_numpy(), sensor))
    rank = np.empty(count, np.int64)
    rank[order] = np.arange(count)
    chosen = np.sort(generator.permutation(count)[: round(share * count)])
    source = np.arange(count)
    waiting = chosen
    for _ in range(_DONOR_DRAWS):
        step = generator.integers(1, 6, len(waiting)) * generator.choice([-1, 1], len(waiting))
        donor = order[np.clip(rank[waiting] + step, 0, count - 1)]
        is_possible = (sensor[donor] == sensor[waiting]) & (true_objects[donor] != true_objects[waiting])
        source[waiting[is_possible]] = donor[is_possible]
        waiting = waiting[~is_possible]
    given = tagged.select("track_id", "sat_no")[source.tolist()]
    has_wrong_tag = source != np.arange(count)
    return tagged.with_columns(given["track_id"], given["sat_no"]), has_wrong_tag


def _clutter(native: pl.DataFrame, share: float, generator: np.random.Generator) -> pl.DataFrame:
    """Draw false measurements: true ones of which the time and all values are replaced by random ones."""
    count = round(share * len(native))
    picked = np.sort(generator.permutation(len(native))[:count])
    rows: pl.DataFrame = native[picked.tolist()]
    shift_ns = generator.integers(-30_000_000_000, 30_000_000_000, count)
    all_times = native["timestamp_ns"].to_numpy()
    time = np.clip(all_times[picked] + shift_ns, all_times.min(), all_times.max())
    elevation = np.arcsin(generator.uniform(np.sin(np.radians(10)), 1.0, count))
    azimuth = generator.uniform(0, 2 * np.pi, count)
    right_ascension, declination = _directions(rows, time // 1000, azimuth, elevation)
    # A false link reports a state near its partner.
    offset = generator.uniform(-500e3, 500e3, (count, 3))
    drift = generator.uniform(-1e3, 1e3, (count, 3))
    values: dict[str, Floats] = {
        "range_m": generator.uniform(300e3, 5_500e3, count),
        "range_rate_m_s": generator.uniform(-7e3, 7e3, count),
        "az_rad": azimuth,
        "el_rad": elevation,
        "ra_rad": right_ascension,
        "dec_rad": declination,
    }
    return rows.with_columns(
        *(
            pl.when(pl.col(name).is_not_null()).then(pl.Series(value)).alias(name)
            for name, value in values.items()
        ),
        *(pl.col(f"{a}_m") + pl.Series(offset[:, k]) for k, a in enumerate("xyz")),
        *(pl.col(f"v{a}_m_s") + pl.Series(drift[:, k]) for k, a in enumerate("xyz")),
        timestamp_ns=pl.Series(time),
        true_sat_no=pl.lit(CLUTTER, pl.Int64),
    )


def _directions(
    rows: pl.DataFrame, micros: np.ndarray[Any, np.dtype[np.int64]], azimuth: Floats, elevation: Floats
) -> tuple[Floats, Floats]:
    """Convert azimuth and elevation (rad) to right ascension and declination (rad).

    Source: Vallado, algorithm 28, reversed.
    """
    lat = np.radians(rows["sensor_lat_deg"].fill_null(0.0).to_numpy())
    lon = np.radians(rows["sensor_lon_deg"].fill_null(0.0).to_numpy())
    sin_dec = np.sin(elevation) * np.sin(lat) + np.cos(elevation) * np.cos(lat) * np.cos(azimuth)
    declination = np.arcsin(np.clip(sin_dec, -1, 1))
    hour_angle = np.arctan2(
        -np.sin(azimuth) * np.cos(elevation),
        np.sin(elevation) * np.cos(lat) - np.cos(elevation) * np.sin(lat) * np.cos(azimuth),
    )
    return np.asarray((sidereal_angle(micros) + lon - hour_angle) % (2 * np.pi)), np.asarray(declination)


def _tag_clutter(false: pl.DataFrame, tagged: pl.DataFrame, generator: np.random.Generator) -> pl.DataFrame:
    """Give about half of the false measurements the track and claim of a true one of their sensor."""
    count = len(false)
    own = pl.format("{}-c{}", "orig_sensor_id", pl.int_range(pl.len()))
    donors = tagged.group_by("orig_sensor_id", maintain_order=True).agg(
        donor_track=pl.col("track_id"), donor_claim=pl.col("sat_no")
    )
    index = pl.Series(generator.integers(0, 1 << 30, count))
    with_donor: pl.DataFrame = false.join(
        donors, on="orig_sensor_id", how="left", maintain_order="left"
    ).with_columns(
        donor=index % pl.col("donor_track").list.len(), is_own=pl.Series(generator.uniform(size=count) < 0.5)
    )
    return with_donor.with_columns(
        track_id=pl.when("is_own").then(own).otherwise(pl.col("donor_track").list.get(pl.col("donor"))),
        sat_no=pl.when(~pl.col("is_own")).then(pl.col("donor_claim").list.get(pl.col("donor"))),
    ).select(tagged.columns)


def to_envelope(native: pl.DataFrame) -> pl.DataFrame:
    """Convert simulated measurements to the columns of observations that the association reads.

    The conversions of units and the clock errors are those of the pipeline's table `observations`.
    """
    degrees = 180 / np.pi
    c = pl.col
    age = c("clock_sync_age_s")
    return native.select(
        "observation_id",
        "source_kind",
        "track_id",
        "sat_no",
        "sensor_lat_deg",
        "sensor_lon_deg",
        "sensor_alt_km",
        source_id=c("orig_sensor_id"),
        sensor_timestamp=(c("timestamp_ns") // 1000).cast(pl.Datetime("us", "UTC")),
        max_skew_s=pl.when(c("clock_source") == "gps")
        .then(1e-6)
        .when(c("clock_source") == "ntp")
        .then(0.010 + 0.001 * (age / 60).floor())
        .when(c("clock_source") == "onboard")
        .then(1e-4 * age)
        .otherwise(5.0),
        range_km=c("range_m") / 1e3,
        range_unc_km=c("sigma_range_m") / 1e3,
        range_rate_km_s=c("range_rate_m_s") / 1e3,
        range_rate_unc_km_s=c("sigma_range_rate_m_s") / 1e3,
        azimuth_deg=c("az_rad") * degrees,
        azimuth_unc_deg=c("sigma_angle_rad") * degrees / c("el_rad").cos(),
        elevation_deg=c("el_rad") * degrees,
        elevation_unc_deg=c("sigma_angle_rad") * degrees,
        ra_deg=c("ra_rad") * degrees,
        ra_unc_deg=c("sigma_arcsec") / 3600 / c("dec_rad").cos(),
        declination_deg=c("dec_rad") * degrees,
        declination_unc_deg=c("sigma_arcsec") / 3600,
        position_unc_km=c("sigma_position_m") / 1e3,
        velocity_unc_km_s=c("sigma_velocity_m_s") / 1e3,
        **{f"pos_{a}_km": c(f"{a}_m") / 1e3 for a in "xyz"},
        **{f"vel_{a}_km_s": c(f"v{a}_m_s") / 1e3 for a in "xyz"},
    )
