"""Outliers among the observations of an object: they are found, counted and not used."""

import numpy as np
import polars as pl
import pytest
from scipy.stats import chi2

from branchlake_dagster.sda.estimation.editing import choose_observations, studentized_distances
from branchlake_dagster.sda.estimation.preference import MAX_EDITED_SHARE
from branchlake_dagster_tests.sda.estimation.test_prior import (
    HOUR,
    fuse,
    known_errors,
    observe,
    position_errors,
)
from branchlake_dagster_tests.sda.estimation.test_prior import catalogs as catalogs
from branchlake_dagster_tests.sda.estimation.test_prior import timing_us as timing_us


@pytest.mark.parametrize("seed", range(5))
def test_the_distance_is_that_from_an_estimate_without_the_observation(seed):
    """Compared with estimates that leave out one observation each."""
    rng = np.random.default_rng(seed)
    design, residual = rng.standard_normal((9, 6, 6)), rng.standard_normal((9, 6))
    normal = np.einsum("nij,nik->jk", design, design)
    covariance = np.linalg.inv(normal)
    estimate = covariance @ np.einsum("nij,ni->j", design, residual)
    left = residual - design @ estimate
    found = studentized_distances(design, left, np.broadcast_to(covariance, (9, 6, 6)), np.ones(9, np.bool_))
    for one in range(9):
        others = np.arange(9) != one
        reduced = np.linalg.inv(np.einsum("nij,nik->jk", design[others], design[others]))
        at = reduced @ np.einsum("nij,ni->j", design[others], residual[others])
        miss = residual[one] - design[one] @ at
        spread = np.eye(6) + design[one] @ reduced @ design[one].T
        expected = miss @ np.linalg.solve(spread, miss)
        # The share of the noise that the estimate does not absorb has a minimum, so distances may be less.
        assert 0.5 * expected < found[one] <= expected * (1 + 1e-9)


def test_understated_noise_edits_nothing_and_one_outlier_is_found():
    row = np.repeat([0, 1, 2], [6, 6, 2])
    widths = np.full(14, 4)
    usual = chi2.median(4)
    distance = np.full(14, usual)
    distance[:6] *= 9.0
    distance[8] = 60.0
    distance[13] = 60.0
    everything = np.ones(14, np.bool_)
    used = choose_observations(row, 3, distance, widths, everything, everything)
    assert np.flatnonzero(~used).tolist() == [8, 13]
    # An observation that fits again is used again.
    distance[8] = usual
    assert choose_observations(row, 3, distance, widths, used, everything)[8]


@pytest.fixture(scope="module")
def spoiled(catalogs) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Observations, and the same with one of each radar track 3 km and 0.2 degrees off."""
    clean = observe(catalogs).filter(source_kind="radar").sort("sat_no", "sensor_timestamp")
    clean = clean.filter(pl.len().over("sat_no") >= 6)
    is_chosen = pl.int_range(pl.len()).over("sat_no") == 2
    return clean, clean.with_columns(
        range_km=pl.col("range_km") + pl.when(is_chosen).then(3.0).otherwise(0.0),
        elevation_deg=pl.col("elevation_deg") + pl.when(is_chosen).then(0.2).otherwise(0.0),
    )


@pytest.mark.parametrize("has_prior", [True, False])
def test_outliers_are_counted_and_do_not_move_the_track(catalogs, timing_us, spoiled, has_prior):
    prior = known_errors(catalogs) if has_prior else None
    before, after = (fuse(one, catalogs, prior) for one in spoiled)
    assert before.height > 150
    joined = before.join(after, on="sat_no", suffix="_after")
    assert joined.height == before.height
    assert (joined["n_edited_after"] >= 1).mean() > 0.97
    assert (joined["n_edited_after"] > 2).mean() < 0.02
    assert (joined["n_radar"] + joined["n_edited"]).equals(joined["n_radar_after"] + joined["n_edited_after"])
    epoch = catalogs.start + HOUR // 2
    clean, spoiled_error = (position_errors(one, catalogs.truth, epoch, timing_us) for one in (before, after))
    assert np.median(spoiled_error) < 1.3 * np.median(clean)


def test_a_track_that_lost_too_many_observations_is_not_preferred(catalogs, spoiled):
    clean, _ = spoiled
    order = pl.int_range(pl.len()).over("sat_no")
    # Every third is as far off as an observation of another object.
    worse = clean.with_columns(
        range_km=pl.col("range_km") + pl.when(order % 3 == 0).then(20.0 + 9.0 * order).otherwise(0.0)
    )
    tracks = fuse(worse, catalogs, known_errors(catalogs))
    total = pl.sum_horizontal("n_radar", "n_optical", "n_isl", "n_edited")
    lost = tracks.filter(pl.col("n_edited") > MAX_EDITED_SHARE * total)
    assert lost.height > 0.5 * tracks.height
    assert not lost["is_preferred"].any()
