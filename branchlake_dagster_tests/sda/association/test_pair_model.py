"""The measurement model of a prediction: known errors are found again, and candidates are complete."""

import numpy as np
import pytest

from branchlake_dagster.sda.association.arrow import tracked_observations
from branchlake_dagster.sda.association.candidates import find_candidates
from branchlake_dagster.sda.association.passes import fit_passes
from branchlake_dagster.sda.association.predictions import (
    PredictedCatalog,
    model_pairs,
)
from branchlake_dagster.sda.association.rules import AssociationRules
from branchlake_dagster.sda.benchmarks.association import simulate_catalogs
from branchlake_dagster.sda.benchmarks.association_scene import simulate_scene
from branchlake_dagster_tests.sda.association.scenes import (
    END,
    MODELS,
    START,
    catalog_of,
    changed,
    observe,
    overhead,
    predicted,
    seconds,
)

KINDS = {kind: code for code, kind in enumerate(MODELS)}
TRACK = seconds(-90, -60, -30, 0, 30, 60, 90)
RADIUS_KM = 6_940.0


def fitted(kind: str, true_orbit: np.ndarray, sigma_km=(1.0, 50.0, 1.0), share: float = 1e-3):
    """The fit of the predicted orbit to a noiseless pass of the true one."""
    catalog = predicted(catalog_of(overhead(60)), sigma_km)
    table = observe(kind, true_orbit, TRACK, "t").to_arrow()
    observations = tracked_observations(table, MODELS)
    count = len(TRACK)
    pairs = np.arange(count), np.zeros(count, np.int64)
    model = model_pairs(
        catalog,
        observations.measured,
        np.zeros(count),
        pairs,
        KINDS[kind],
        sigma_factor=1.0,
        independent_share=share,
    )
    track = np.zeros(count, np.int64)
    reference = np.array([TRACK[count // 2]])
    return model, fit_passes(model, track, track, reference, AssociationRules())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("along_km", [-80.0, -1.0, 0.0, 20.0, 150.0])
def test_a_known_error_along_the_track_is_found(kind, along_km):
    _, fits = fitted(kind, changed(overhead(60), mean_anomaly=np.degrees(along_km / RADIUS_KM)))
    assert fits.is_member.all()
    assert fits.estimate[0, 2] * 50.0 == pytest.approx(along_km, rel=0.01, abs=0.05)
    # One error of the prediction, and no noise: the joint distance is that of the error.
    assert fits.distance[0] == pytest.approx((along_km / 50.0) ** 2, rel=0.05, abs=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_a_known_error_across_the_plane_is_found(kind):
    """An inclination error moves the orbit by a r sin(u): u is the angle from the node."""
    orbit = overhead(60)
    across_km = 0.8
    _, fits = fitted(kind, changed(orbit, inclination=np.degrees(across_km / RADIUS_KM)))
    angle = np.arcsin(np.sin(np.radians(40.0)) / np.sin(np.radians(60.0)))
    assert abs(fits.estimate[0, 3]) == pytest.approx(across_km * np.sin(angle), abs=0.05)
    if kind != "radar":  # its angles are too coarse for the change of this error within three minutes
        assert abs(fits.estimate[0, 4]) == pytest.approx(across_km * np.cos(angle), abs=0.15)


@pytest.mark.parametrize("kind", ["radar", "isl"])
def test_a_known_radial_error_is_found(kind):
    """An eccentricity error lifts the orbit by -a e cos(M), M being the angle from perigee."""
    orbit = overhead(60)
    radial_km = 0.7
    _, fits = fitted(kind, changed(orbit, eccentricity=radial_km / RADIUS_KM), share=0.02)
    angle = np.arcsin(np.sin(np.radians(40.0)) / np.sin(np.radians(60.0)))
    assert fits.estimate[0, 0] == pytest.approx(-radial_km * np.cos(angle), abs=0.1)
    assert fits.estimate[0, 1] == pytest.approx(radial_km * np.sin(angle), abs=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_joint_distance_is_that_of_the_full_covariance(kind):
    """The Woodbury identity against the covariance of all measurements of the pass at once."""
    shifted = changed(overhead(60), mean_anomaly=np.degrees(30 / RADIUS_KM), inclination=0.005)
    model, fits = fitted(kind, shifted, share=0.1)
    count, width = model.residual.shape
    design = model.design(np.repeat(fits.reference_micros, count)).reshape(count * width, 6)
    covariance = design @ design.T
    for k in range(count):
        block = slice(k * width, (k + 1) * width)
        covariance[block, block] += np.linalg.inv(model.weight[k])
    residual = model.residual.ravel()
    assert fits.distance[0] == pytest.approx(residual @ np.linalg.solve(covariance, residual), rel=1e-4)
    assert fits.log_det[0] == pytest.approx(np.linalg.slogdet(covariance)[1], abs=1e-4)


def test_an_error_of_the_clock_is_an_error_of_the_time():
    """A late clock moves links along the track, and the distance allows for its sigma."""
    orbit = overhead(60)
    catalog = predicted(catalog_of(orbit), (0.01, 0.02, 0.01))
    late = observe("isl", orbit, TRACK + 200_000, "t").to_arrow()
    on_time = observe("isl", orbit, TRACK, "t").to_arrow()
    time_column = late.schema.get_field_index("sensor_timestamp")
    stamped = late.set_column(time_column, "sensor_timestamp", on_time.column("sensor_timestamp"))
    observations = tracked_observations(stamped, MODELS)
    pairs = np.arange(len(TRACK)), np.zeros(len(TRACK), np.int64)
    for sigma_s, expected in ((0.1, 4.0), (0.2, 1.0), (0.4, 0.25)):
        model = model_pairs(
            catalog,
            observations.measured,
            np.full(len(TRACK), sigma_s),
            pairs,
            KINDS["isl"],
            sigma_factor=1.0,
            independent_share=0.1,
        )
        np.testing.assert_allclose(model.own_distances(), expected, rtol=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_contain_every_pair_within_the_gate(kind):
    catalogs = simulate_catalogs(150, 5)
    start, end = catalogs.start, catalogs.start + 1_800_000_000
    sigma_km = np.exp(np.random.default_rng(2).normal(0, 1, (150, 3))) * np.array([0.3, 20.0, 0.3])
    catalog = PredictedCatalog.predict(catalogs.earlier, sigma_km, start, end)
    rows = simulate_scene(catalogs.truth, start, end, seed=5).observations.filter(source_kind=kind)
    rows = rows.sort("source_id", "track_id", "sensor_timestamp", "observation_id").head(250)
    observations = tracked_observations(rows.to_arrow(), MODELS)
    rules = AssociationRules()
    every = np.flatnonzero(catalog.is_usable)
    all_pairs = np.repeat(np.arange(len(rows)), len(every)), np.tile(every, len(rows))
    code = KINDS[kind]
    model = model_pairs(
        catalog,
        observations.measured,
        observations.clock_sigma_s,
        all_pairs,
        code,
        sigma_factor=rules.sigma_factor,
        independent_share=rules.independent_share,
    )
    within = model.own_distances() <= float(rules.gate(MODELS[kind].width))
    expected = {(int(i), int(j)) for i, j in zip(all_pairs[0][within], all_pairs[1][within], strict=True)}
    found = set()
    for i, j in find_candidates(
        catalog,
        observations.measured,
        observations.clock_sigma_s,
        np.arange(len(rows)),
        code,
        claimed_rows=np.full(len(rows), -1),
        reach=rules.reach,
        sigma_factor=rules.sigma_factor,
    ):
        found |= set(zip(i.tolist(), j.tolist(), strict=True))
    assert len(expected) > 100
    assert expected <= found
    assert len(found) < 0.5 * len(rows) * len(every)


def test_the_catalog_is_sorted_and_unknown_numbers_have_no_row():
    elements = catalog_of(overhead(60), overhead(80), overhead(100))
    catalog = PredictedCatalog.predict(
        elements.take(np.array([2, 0, 1])), np.diag([1.0, 2.0, 3.0]) + 0.1, START, END
    )
    assert catalog.elements.sat_no.tolist() == [101, 102, 103]
    assert np.argmax(catalog.sigma_km, axis=1).tolist() == [1, 2, 0]
    assert catalog.usable_rows(np.array([103, 5, -1, 101])).tolist() == [2, -1, -1, 0]
