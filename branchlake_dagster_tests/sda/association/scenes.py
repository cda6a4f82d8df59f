"""Orbits over a station, and rows of the envelope that sensors there would deliver."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa

from branchlake_dagster.sda.association.arrow import OBSERVATION_INPUT, associate_table
from branchlake_dagster.sda.association.predictions import PredictedCatalog
from branchlake_dagster.sda.association.rules import AssociationRules
from branchlake_dagster.sda.orbits.frames import julian_dates, sidereal_angle
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.sensor_kinds.registered import DEFAULT_SENSOR_KINDS, measurement_models
from branchlake_dagster.sda.sensors import measurement

START = int(np.datetime64("2026-08-08T03:00:00", "us").astype(np.int64))
END = START + 3_600_000_000
PASS = START + 1_800_000_000
MODELS = measurement_models(DEFAULT_SENSOR_KINDS)
LAT_DEG, LON_DEG, ALT_KM = 40.0, -75.0, 0.1
FIELD = {name: place for place, name in enumerate(ELEMENT_FIELDS)}
DEFAULT_SIGMA_KM = (0.2, 5.0, 0.2)


def overhead(inclination_deg: float, mean_motion: float = 15.0, micros: int = PASS) -> np.ndarray:
    """Elements (9,) of a circular orbit that passes over the station at an instant, northwards."""
    inclination, lat = np.radians(inclination_deg), np.radians(LAT_DEG)
    along = np.arcsin(np.sin(lat) / np.sin(inclination))
    from_node = np.arctan2(np.cos(inclination) * np.sin(along), np.cos(along))
    longitude = np.radians(LON_DEG) + float(sidereal_angle(np.array([micros]))[0])
    values = np.zeros(len(ELEMENT_FIELDS))
    values[FIELD["eccentricity"]] = 1e-4
    values[FIELD["inclination"]] = inclination_deg
    values[FIELD["mean_anomaly"]] = np.degrees(along) % 360
    values[FIELD["mean_motion"]] = mean_motion
    values[FIELD["ra_of_asc_node"]] = np.degrees(longitude - from_node) % 360
    return values


def changed(values: np.ndarray, **changes: float) -> np.ndarray:
    """The same elements with some of them increased."""
    values = values.copy()
    for name, change in changes.items():
        values[FIELD[name]] += change
    return values


def catalog_of(*objects: np.ndarray, first: int = 101) -> Elements:
    """The objects of numbers 101, 102 and so on, with the epoch at the pass."""
    return Elements(np.arange(first, first + len(objects)), np.full(len(objects), PASS), np.stack(objects))


def states(values: np.ndarray, micros: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """States (k, 3) by SGP4 itself, without interpolation."""
    (record,) = catalog_of(values).to_satrecs()
    days, rests = julian_dates(micros)
    found = [record.sgp4(day, rest) for day, rest in zip(days.tolist(), rests.tolist(), strict=True)]
    return np.array([r for _, r, _ in found]), np.array([v for _, _, v in found])


def seconds(*values: float) -> np.ndarray:
    """Instants around the pass."""
    return PASS + np.round(np.array(values) * 1e6).astype(np.int64)


def observe(
    kind: str,
    values: np.ndarray,
    micros: np.ndarray,
    track: str | None,
    *,
    claim: int | None = None,
    sensor: str | None = None,
    noise: float = 0.0,
    seed: int = 0,
) -> pl.DataFrame:
    """Rows of the envelope: what a sensor at the station, or a link, measures of an object."""
    count = len(micros)
    position, velocity = states(values, micros)
    lat, lon, alt = (np.full(count, value) for value in (LAT_DEG, LON_DEG, ALT_KM))
    stations = measurement.Stations(lat, lon, alt, micros)
    draw = np.random.default_rng(seed).standard_normal((count, 6)) * noise
    source = sensor or f"{kind}-01"
    columns: dict[str, object] = {}
    if kind == "radar":
        measured, _ = measurement.predict_radar(position, velocity, stations)
        sigma = np.array([0.015, 5e-5, np.degrees(3e-4), np.degrees(3e-4)])
        measured[:, 2:] = np.degrees(measured[:, 2:])
        measured += draw[:, :4] * sigma
        names = ("range_km", "range_rate_km_s", "azimuth_deg", "elevation_deg")
        uncertain = ("range_unc_km", "range_rate_unc_km_s", "azimuth_unc_deg", "elevation_unc_deg")
    elif kind == "optical":
        measured, _ = measurement.predict_optical(position, velocity, stations)
        measured, sigma = np.degrees(measured), np.full(2, 1 / 3600)
        measured += draw[:, :2] * sigma
        names, uncertain = ("ra_deg", "declination_deg"), ("ra_unc_deg", "declination_unc_deg")
    else:
        measured = np.concatenate([position, velocity], axis=1) + draw * np.repeat([0.03, 1e-4], 3)
        sigma = np.array([0.03, 1e-4])
        names = (*(f"pos_{a}_km" for a in "xyz"), *(f"vel_{a}_km_s" for a in "xyz"))
        uncertain = ("position_unc_km", "velocity_unc_km_s")
    columns |= {name: measured[:, k] for k, name in enumerate(names)}
    columns |= {name: np.full(count, sigma[k]) for k, name in enumerate(uncertain)}
    if kind != "isl":
        columns |= {"sensor_lat_deg": lat, "sensor_lon_deg": lon, "sensor_alt_km": alt}
    frame = pl.DataFrame(columns).with_columns(
        observation_id=pl.Series([f"{source}/{track}/{at}" for at in micros.tolist()], dtype=pl.String),
        source_kind=pl.lit(kind),
        source_id=pl.lit(source),
        track_id=pl.lit(track, pl.String),
        sensor_timestamp=pl.Series(micros).cast(pl.Datetime("us", "UTC")),
        sat_no=pl.lit(claim, pl.Int64),
        max_skew_s=pl.lit({"radar": 1e-6, "optical": 0.01, "isl": 0.1}[kind]),
    )
    missing = [name for name in OBSERVATION_INPUT if name not in frame.columns]
    return frame.with_columns(pl.lit(None, pl.Float64).alias(name) for name in missing).select(
        OBSERVATION_INPUT
    )


def predicted(
    elements: Elements, sigma_km: tuple[float, float, float] = DEFAULT_SIGMA_KM
) -> PredictedCatalog:
    """The catalog with the same error for all objects."""
    return PredictedCatalog.predict(elements, np.tile(np.array(sigma_km), (len(elements), 1)), START, END)


def associated(
    elements: Elements | PredictedCatalog, *parts: pl.DataFrame, rules: AssociationRules | None = None
) -> pl.DataFrame:
    """The associations of some observations, in the order of their parts."""
    catalog = predicted(elements) if isinstance(elements, Elements) else elements
    rows = pl.concat(parts)
    found: pa.Table = associate_table(rows.to_arrow(), catalog, START, MODELS, rules)
    return rows.select("observation_id").join(
        pl.DataFrame(found), on="observation_id", how="left", maintain_order="left"
    )
