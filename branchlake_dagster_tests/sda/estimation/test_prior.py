"""The element set as prior: its covariance against sampled element sets, and tracks that it makes possible."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from branchlake_dagster.sda.association.rules import AssociationRules
from branchlake_dagster.sda.benchmarks.association import simulate_catalogs
from branchlake_dagster.sda.benchmarks.association_scene import to_envelope
from branchlake_dagster.sda.benchmarks.tracks import element_frame
from branchlake_dagster.sda.estimation.arrow import ELEMENT_INPUT, fuse_batches, track_schema
from branchlake_dagster.sda.estimation.prior import ElementPrior, error_directions, prior_information
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements, propagate_satellites
from branchlake_dagster.sda.orbits.two_body import MU_KM3_S2, propagate_two_body
from branchlake_dagster.sda.sensor_kinds.registered import DEFAULT_SENSOR_KINDS, measurement_models
from branchlake_dagster.sda.sensors.native import SOURCE_KINDS
from branchlake_dagster.sda.sensors.simulate import Scene, simulate
from branchlake_dagster.sda.trust.differences import DAY_MICROS

HOUR = 3_600_000_000
MODELS = measurement_models(DEFAULT_SENSOR_KINDS)


@pytest.fixture(scope="module")
def catalogs():
    return simulate_catalogs(300, 5)


@pytest.fixture(scope="module")
def states(catalogs):
    found = propagate_satellites(catalogs.truth.to_satrec_array(), np.array([catalogs.start]))
    return found.position[:, 0], found.velocity[:, 0]


def semi_major_axis(position, velocity):
    return 1 / (2 / np.linalg.norm(position, axis=1) - np.sum(velocity**2, axis=1) / MU_KM3_S2)


def test_only_the_sixth_parameter_changes_the_period(catalogs, states):
    position, velocity = states
    directions = error_directions(catalogs.truth, position, velocity)
    before = semi_major_axis(position, velocity)
    for parameter in range(6):
        step = 1e-3 * directions[:, :, parameter]
        change = (semi_major_axis(position + step[:, :3], velocity + step[:, 3:]) - before) / 1e-3
        expected = 1.0 if parameter == 5 else 0.0
        # The osculating axis differs from that of the mean motion by the oblateness.
        np.testing.assert_allclose(change, expected, atol=0.02)


def test_the_error_of_time_is_a_later_state(catalogs, states):
    position, velocity = states
    column = error_directions(catalogs.truth, position, velocity)[:, :, 2]
    speed = np.linalg.norm(velocity, axis=1)
    later = propagate_two_body(position, velocity, np.full(len(position), 0.1))
    moved = np.concatenate([later[0] - position, later[1] - velocity], axis=1)
    np.testing.assert_allclose(column * (0.1 * speed)[:, None], moved, atol=2e-4)


def test_the_sigma_of_the_axis_explains_the_error_along_the_track(catalogs):
    epoch = int(catalogs.truth.epoch_micros.max() + 2 * DAY_MICROS)
    age_days = (epoch - catalogs.truth.epoch_micros) / DAY_MICROS
    sat_no = catalogs.truth.sat_no
    prior = ElementPrior.from_sigma(sat_no[::-1], np.tile([0.1, 6.0, 0.2], (300, 1)), 1.5)
    sigma = prior.parameter_sigma(catalogs.truth, prior.position_sigma(sat_no), epoch)
    np.testing.assert_allclose(sigma[:, :5], np.tile([0.15, 0.15, 9.0, 0.3, 0.3], (300, 1)))
    rate = catalogs.truth.values[:, ELEMENT_FIELDS.index("mean_motion")] * 2 * np.pi
    np.testing.assert_allclose(1.5 * rate * sigma[:, 5] * age_days, 9.0)


def test_the_information_is_the_inverse_covariance_and_zero_if_unknown(catalogs, states):
    directions = error_directions(catalogs.truth, *states)
    sigma = np.tile([0.2, 0.2, 5.0, 0.3, 0.3, 0.01], (300, 1))
    sigma[7] = np.nan
    information = prior_information(directions, sigma)
    assert (information[7] == 0).all()
    scaled = directions * sigma[:, None, :]
    product = information @ scaled @ np.swapaxes(scaled, 1, 2)
    known = np.arange(300) != 7
    np.testing.assert_allclose(product[known], np.tile(np.eye(6), (299, 1, 1)), atol=1e-4)


def observe(catalogs, **options) -> pl.DataFrame:
    start = catalogs.start
    native = pl.concat(
        [
            simulate(catalogs.truth, kind=kind, start=start, end=start + HOUR, seed=5, **options)
            for kind in SOURCE_KINDS
        ]
    )
    return to_envelope(native.with_columns(observation_id=pl.format("o{}", pl.int_range(pl.len()))))


def fuse(observations: pl.DataFrame, catalogs, prior: ElementPrior | None) -> pl.DataFrame:
    joined = observations.join(element_frame(catalogs.earlier).select(ELEMENT_INPUT), on="sat_no")
    function = fuse_batches(catalogs.start, catalogs.start + HOUR, MODELS, prior)
    batches = function(joined.to_arrow().to_batches())
    return pl.concat(
        [pl.DataFrame(batch) for batch in batches] or [pl.DataFrame(track_schema(list(MODELS)).empty_table())]
    )


def known_errors(catalogs) -> ElementPrior:
    return ElementPrior.from_sigma(
        catalogs.earlier.sat_no, catalogs.sigma_km, AssociationRules().sigma_factor
    )


def position_errors(tracks: pl.DataFrame, elements: Elements, epoch: int, timing_us) -> np.ndarray:
    rows = np.searchsorted(elements.sat_no, tracks["sat_no"].to_numpy())
    true = [
        propagate_satellites(elements.take(rows[k : k + 1]).to_satrec_array(), np.array([epoch + shift]))
        for k, shift in enumerate(timing_us[rows])
    ]
    position = np.concatenate([state.position[0] for state in true])
    return np.linalg.norm(tracks.select("x_km", "y_km", "z_km").to_numpy() - position, axis=1)


@pytest.fixture(scope="module")
def observations(catalogs) -> pl.DataFrame:
    return observe(catalogs)


@pytest.fixture(scope="module")
def timing_us(catalogs):
    return Scene(catalogs.truth, catalogs.start, catalogs.start + HOUR, seed=5, kind="radar").timing_us


def test_one_observation_is_enough_with_a_prior(catalogs, observations, timing_us):
    first = observations.filter(source_kind="radar").unique("sat_no", keep="first", maintain_order=True)
    assert fuse(first, catalogs, None).is_empty()
    tracks = fuse(first, catalogs, known_errors(catalogs))
    assert tracks.height > 0.98 * first.height
    assert (tracks["n_measurements"] == 4).all()
    error = position_errors(tracks, catalogs.truth, catalogs.start + HOUR // 2, timing_us)
    assert np.median(error) < 0.5 * np.median(tracks["catalogue_miss_km"])
    # Three components: the median of chi-squared is 2.4, and errors are below the widened sigmas.
    ratio = error / tracks["position_sigma_km"].to_numpy()
    assert 0.3 < np.median(ratio) < 1.1


def test_a_prior_makes_tracks_better_and_many_of_them_preferred(catalogs, observations, timing_us):
    epoch = catalogs.start + HOUR // 2
    alone = fuse(observations, catalogs, None)
    tracks = fuse(observations, catalogs, known_errors(catalogs))
    assert set(alone["sat_no"]) <= set(tracks["sat_no"])
    assert not alone["is_preferred"].any()
    assert alone["prior_sigma_km"].null_count() == alone.height
    common = tracks.filter(pl.col("sat_no").is_in(alone["sat_no"].implode()))
    error_alone, error_with = (
        position_errors(one, catalogs.truth, epoch, timing_us) for one in (alone, common)
    )
    assert np.mean(error_with) < np.mean(error_alone)
    preferred = tracks.filter("is_preferred")
    assert preferred.height > 0.4 * tracks.height
    error = position_errors(preferred, catalogs.truth, epoch, timing_us)
    earlier = propagate_satellites(catalogs.earlier.to_satrec_array(), np.array([epoch])).position[:, 0]
    rows = np.searchsorted(catalogs.earlier.sat_no, preferred["sat_no"].to_numpy())
    set_error = np.linalg.norm(earlier[rows] - preferred.select("x_km", "y_km", "z_km").to_numpy(), axis=1)
    assert np.mean(error < set_error) >= 0.95


def test_a_large_error_along_the_track_is_followed(catalogs):
    """An element set 80 km behind is no linear problem: the arc bends by half a kilometer."""
    values = catalogs.truth.values.copy()
    values[:, ELEMENT_FIELDS.index("mean_anomaly")] -= np.degrees(80 / 7000)
    behind = replace(catalogs.truth, values=values)
    far = catalogs._replace(earlier=behind, sigma_km=np.tile([0.2, 60.0, 0.2], (300, 1)))
    tracks = fuse(observe(catalogs), far, known_errors(far))
    assert tracks.height > 200
    assert tracks["catalogue_miss_km"].median() > 60
    # The prior takes part: sigmas of 0.2 km against errors of none leave it below one.
    assert 0.6 < tracks["chi2_per_dof"].median() < 1.1
    assert tracks["n_edited"].sum() <= 0.01 * observations_count(tracks)


def observations_count(tracks: pl.DataFrame) -> int:
    return int(tracks.select(pl.sum_horizontal("n_radar", "n_optical", "n_isl").sum()).item())


def test_an_object_without_a_known_error_keeps_its_rule(catalogs, observations):
    without = fuse(observations, catalogs, None)
    of_others = ElementPrior.from_sigma(catalogs.truth.sat_no + 1_000_000, catalogs.sigma_km, 1.5)
    zero = ElementPrior.from_sigma(catalogs.truth.sat_no, catalogs.sigma_km * [1.0, 0.0, 1.0], 1.5)
    nobody = ElementPrior.from_sigma(np.zeros(0, np.int64), np.zeros((0, 3)), 1.5)
    for unknown in (of_others, zero, nobody):
        assert fuse(observations, catalogs, unknown).equals(without)
    assert without.height > 100
