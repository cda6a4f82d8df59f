"""Observations with less than the first kinds measure: ranges alone, and positions without a track."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from branchlake_dagster.sda.association.arrow import OBSERVATION_INPUT, associate_batches, associate_table
from branchlake_dagster.sda.sensor_kinds.registered import SENSOR_KINDS, measurement_models
from branchlake_dagster.sda.sensors.models import measurement_model
from branchlake_dagster_tests.sda.association.scenes import (
    END,
    START,
    catalog_of,
    changed,
    observe,
    overhead,
    predicted,
    seconds,
)

TIMES = seconds(-120, -60, 0, 60, 120)
MODELS = {
    **measurement_models(SENSOR_KINDS),
    "camera": measurement_model(("azimuth_deg", "elevation_deg")),
}
LASER = ("range_km", "range_unc_km")
SWEEP = (*LASER, "azimuth_deg", "azimuth_unc_deg", "elevation_deg", "elevation_unc_deg")
STATION = ("sensor_lat_deg", "sensor_lon_deg", "sensor_alt_km")
KEYS = ("observation_id", "source_kind", "source_id", "track_id", "sensor_timestamp", "sat_no", "max_skew_s")


def seen(kind: str, orbit: np.ndarray, measured: tuple[str, ...], claim: int | None = None) -> pl.DataFrame:
    """What a station measures of an orbit, with no more than some of a radar's values, and no track."""
    rows = observe("radar", orbit, TIMES, None, claim=claim, noise=1.0, seed=4)
    kept = {*KEYS, *STATION, *measured}
    return rows.with_columns(
        pl.lit(kind).alias("source_kind"),
        *(pl.lit(None, pl.Float64).alias(name) for name in OBSERVATION_INPUT if name not in kept),
    )


def associated(rows: pl.DataFrame, *orbits: np.ndarray) -> pl.DataFrame:
    catalog = predicted(catalog_of(*orbits))
    return pl.DataFrame(associate_table(rows.to_arrow(), catalog, START, MODELS))


TRUE, OTHER = overhead(60), overhead(75, 14.2)


def test_a_range_confirms_its_claim_with_one_degree_of_freedom() -> None:
    found = associated(seen("laser", changed(TRUE, mean_anomaly=0.02), LASER, claim=101), TRUE, OTHER)
    assert set(found["result"]) == {"confirmed"}
    assert set(found["sat_no"]) == {101}
    assert set(found["degrees_of_freedom"]) == {1}


def test_a_range_that_contradicts_its_claim_has_no_object() -> None:
    found = associated(seen("laser", TRUE, LASER, claim=102), TRUE, OTHER)
    assert set(found["result"]) == {"uncorrelated"}
    assert set(found["reason"]) == {"outside_gate"}
    assert found["sat_no"].null_count() == len(TIMES)


def test_a_range_without_a_claim_finds_no_object_even_the_only_one() -> None:
    found = associated(seen("laser", TRUE, LASER), TRUE)
    assert set(found["result"]) == {"uncorrelated"}
    assert set(found["candidates"]) == {0}


def test_a_claim_that_cannot_be_tested_is_kept() -> None:
    found = associated(seen("laser", TRUE, LASER, claim=999), TRUE)
    assert set(found["result"]) == {"claimed"}


@pytest.mark.parametrize(("kind", "measured"), [("sweep_radar", SWEEP), ("camera", SWEEP[2:])])
def test_single_observations_with_a_direction_find_their_object(kind: str, measured: tuple[str, ...]) -> None:
    orbit = changed(TRUE, mean_anomaly=0.02)
    found = associated(seen(kind, orbit, measured), OTHER, TRUE)
    assert found["track_id"].n_unique() == len(TIMES)
    assert set(found["result"]) == {"confirmed"}
    assert set(found["sat_no"]) == {102}
    assert set(found["degrees_of_freedom"]) == {len(measured) // 2}


def test_observations_of_a_kind_without_a_declaration_are_left_out() -> None:
    catalog = catalog_of(TRUE)
    rows = pl.concat([seen("sonar", TRUE, SWEEP), seen("sweep_radar", TRUE, SWEEP)])
    sigma_km = np.full((1, 3), 1.0)
    function = associate_batches(catalog, sigma_km, START, END, MODELS)
    (batch,) = function(iter(rows.to_arrow().to_batches()))
    assert set(batch.column("source_kind").to_pylist()) == {"sweep_radar"}
    only = function(iter(rows.filter(source_kind="sonar").to_arrow().to_batches()))
    assert list(only) == []
