"""The four results on passes made by hand: SGP4 itself is the truth."""

import numpy as np
import polars as pl
import pytest

from branchlake_dagster.sda.association.predictions import MAX_IN_TRACK_SIGMA_KM, PredictedCatalog
from branchlake_dagster_tests.sda.association.scenes import (
    DEFAULT_SIGMA_KM,
    END,
    START,
    associated,
    catalog_of,
    changed,
    observe,
    overhead,
    predicted,
    seconds,
)

KINDS = ("radar", "optical", "isl")
TRACK = seconds(-60, -30, -5, 20, 45, 70)
LATER = seconds(-50, -25, 0, 25, 50, 75)


def results(found: pl.DataFrame) -> list[tuple[str, int | None]]:
    return list(found.select("result", "sat_no").iter_rows())


@pytest.mark.parametrize("kind", KINDS)
def test_one_object_is_confirmed(kind):
    orbit = overhead(60)
    found = associated(catalog_of(orbit), observe(kind, orbit, TRACK, "t", noise=1.0, seed=1))
    assert results(found) == [("confirmed", 101)] * 6
    assert found["reason"].null_count() == 6
    assert found["degrees_of_freedom"].to_list() == [{"radar": 4, "optical": 2, "isl": 6}[kind]] * 6
    assert (found["normalized_distance"] < 5).all()
    assert found["candidates"].to_list() == [1] * 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("along_km", [-12.0, 9.0])
def test_an_error_along_the_track_stays_within_the_gate(kind, along_km):
    orbit = overhead(60)
    late = changed(orbit, mean_anomaly=np.degrees(along_km / 6_940))
    found = associated(catalog_of(orbit), observe(kind, late, TRACK, "t", noise=1.0, seed=2))
    assert results(found) == [("confirmed", 101)] * 6
    # One measurement has one error along the track, of 1.5 times 5 km: the distance is that of this error.
    expected = abs(along_km) / 7.5
    assert (found["normalized_distance"] - expected).abs().max() < 3


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_outside_the_gate_is_uncorrelated(kind):
    orbit = overhead(60)
    far = changed(orbit, mean_anomaly=np.degrees(90 / 6_940))
    found = associated(catalog_of(orbit), observe(kind, far, TRACK, "t"))
    assert results(found) == [("uncorrelated", None)] * 6
    assert found["reason"].unique().to_list() == ["outside_gate"]
    assert found["normalized_distance"].null_count() == 6


@pytest.mark.parametrize("kind", KINDS)
def test_two_crossing_objects_keep_their_tracks(kind):
    """Both are over the station within the same seconds, a few kilometers apart."""
    first, second = overhead(60), overhead(100)
    found = associated(
        catalog_of(first, second),
        observe(kind, first, TRACK, "a", noise=1.0, seed=3),
        observe(kind, second, LATER, "b", noise=1.0, seed=4),
    )
    assert results(found) == [("confirmed", 101)] * 6 + [("confirmed", 102)] * 6


@pytest.mark.parametrize("kind", KINDS)
def test_observations_with_a_wrong_track_number_are_reassigned(kind):
    first, second = overhead(60), overhead(100)
    tracks = [
        observe(kind, first, np.delete(TRACK, 3), "a", noise=1.0, seed=5),
        observe(kind, first, TRACK[3:4], "b", noise=1.0, seed=6),
        observe(kind, second, LATER, "b", noise=1.0, seed=7),
    ]
    found = associated(catalog_of(first, second), *tracks)
    assert results(found) == [
        *[("confirmed", 101)] * 5,
        ("reassigned", 101),
        *[("confirmed", 102)] * 6,
    ]


def test_clutter_in_a_track_is_uncorrelated():
    orbit, nowhere = overhead(60), changed(overhead(75), mean_anomaly=3.0)
    found = associated(
        catalog_of(orbit),
        observe("radar", orbit, TRACK, "t", noise=1.0, seed=8),
        observe("radar", nowhere, LATER[2:3], "t"),
        observe("radar", nowhere, LATER[3:4], None),
    )
    assert results(found) == [("confirmed", 101)] * 6 + [("uncorrelated", None)] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_is_confirmed_or_reassigned(kind):
    first, second = overhead(60), overhead(100)
    catalog = catalog_of(first, second)
    right = associated(catalog, observe(kind, first, TRACK, "t", claim=101, noise=1.0, seed=9))
    wrong = associated(catalog, observe(kind, first, TRACK, "t", claim=102, noise=1.0, seed=9))
    assert results(right) == [("confirmed", 101)] * 6
    assert results(wrong) == [("reassigned", 101)] * 6
    assert wrong["claimed_sat_no"].to_list() == [102] * 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_without_elements_is_kept_untested(kind):
    known, unknown = overhead(60), overhead(100)
    found = associated(
        catalog_of(known),
        observe(kind, unknown, TRACK, "t", claim=999),
        observe(kind, unknown, LATER, "u"),
    )
    assert results(found) == [("claimed", 999)] * 6 + [("uncorrelated", None)] * 6
    assert found["normalized_distance"].null_count() == 12
    assert found["element_age_days"].null_count() == 12


def test_an_untested_claim_yields_to_an_object_with_a_track_of_the_same_sensor():
    known, unknown = overhead(60), overhead(100)
    found = associated(
        catalog_of(known),
        observe("isl", known, TRACK[:5], "a", claim=101, noise=1.0, seed=1),
        observe("isl", known, TRACK[5:], "u", claim=999, noise=1.0, seed=2),
        observe("isl", unknown, LATER, "u", claim=999),
    )
    assert results(found) == [("confirmed", 101)] * 5 + [("reassigned", 101)] + [("claimed", 999)] * 6


@pytest.mark.parametrize("sigma_km", [np.nan, 1.01 * MAX_IN_TRACK_SIGMA_KM])
def test_an_unknown_or_too_large_error_is_no_prediction(sigma_km):
    orbit = overhead(60)
    elements = catalog_of(orbit)
    catalog = PredictedCatalog.predict(elements, np.array([[0.2, sigma_km, 0.2]]), START, END)
    found = associated(
        catalog, observe("radar", orbit, TRACK, "t", claim=101), observe("radar", orbit, LATER, "u")
    )
    assert results(found) == [("claimed", 101)] * 6 + [("uncorrelated", None)] * 6


def test_a_decayed_object_is_no_prediction():
    orbit = overhead(60)
    found = associated(
        catalog_of(changed(orbit, bstar=50.0, mean_motion=1.9)), observe("isl", orbit, TRACK, "t", claim=101)
    )
    assert results(found) == [("claimed", 101)] * 6


@pytest.mark.parametrize("kind", KINDS)
def test_objects_that_fly_together_are_ambiguous_without_a_claim(kind):
    orbit = overhead(60)
    twin = changed(orbit, mean_anomaly=np.degrees(0.3 / 6_940))
    found = associated(
        catalog_of(orbit, twin),
        observe(kind, orbit, TRACK, "t", noise=1.0, seed=1),
        observe(kind, orbit, TRACK, "t", claim=102, sensor="other", noise=1.0, seed=1),
    )
    assert results(found) == [("uncorrelated", None)] * 6 + [("confirmed", 102)] * 6
    assert found["reason"].to_list() == ["ambiguous"] * 6 + [None] * 6
    assert found["candidates"].to_list() == [2] * 12


def test_neighbors_are_distinguished_by_the_assignment_of_all_tracks():
    """Each track alone fits both objects; only together do they fit one way."""
    first = overhead(60)
    second = changed(first, mean_anomaly=np.degrees(12 / 6_940))
    shift = np.degrees(5.5 / 6_940)
    found = associated(
        predicted(catalog_of(first, second), (0.2, 1.5, 0.2)),
        observe("radar", changed(first, mean_anomaly=shift), TRACK, "a", noise=1.0, seed=1),
        observe("radar", changed(second, mean_anomaly=shift), LATER, "b", noise=1.0, seed=2),
    )
    assert results(found) == [("confirmed", 101)] * 6 + [("confirmed", 102)] * 6
    assert found["candidates"].to_list()[:6] == [2] * 6


def test_tracks_at_different_times_may_be_of_one_object():
    orbit = overhead(60)
    found = associated(
        catalog_of(orbit),
        observe("isl", orbit, seconds(-900, -890, -880), "a", claim=101),
        observe("isl", orbit, seconds(600, 610, 620), "b", claim=101),
    )
    assert results(found) == [("confirmed", 101)] * 6


def test_an_object_has_one_track_at_a_time():
    """Two tracks at once of what the catalog has as one object: the worse one stays uncorrelated."""
    orbit = overhead(60)
    near, far = (changed(orbit, mean_anomaly=np.degrees(km / 6_940)) for km in (8, 33))
    for companion, first in ((far, ("confirmed", 101)), (near, ("uncorrelated", None))):
        found = associated(
            catalog_of(orbit),
            observe("radar", orbit, TRACK, "a", noise=1.0, seed=1),
            observe("radar", companion, LATER, "b", noise=1.0, seed=2),
        )
        # If both fit about equally well, neither is given the object.
        assert results(found) == [first] * 6 + [("uncorrelated", None)] * 6


def test_sensors_are_independent():
    orbit = overhead(60)
    found = associated(
        catalog_of(orbit),
        *(observe("radar", orbit, TRACK, "t", sensor=f"radar-{k}", noise=1.0, seed=k) for k in range(3)),
    )
    assert results(found) == [("confirmed", 101)] * 18


def test_the_sum_over_a_track_is_not_overconfident():
    """Six observations with one error of 2 sigma along the track are as likely as one observation."""
    orbit = overhead(60)
    sigma = 1.5 * DEFAULT_SIGMA_KM[1]
    late = changed(orbit, mean_anomaly=np.degrees(3.5 * sigma / 6_940))
    dense = seconds(*np.linspace(-80, 80, 41))
    found = associated(catalog_of(orbit), observe("radar", late, dense, "t", noise=1.0, seed=3))
    assert results(found) == [("confirmed", 101)] * 41


def test_an_observation_without_an_uncertainty_harms_no_other():
    orbit = overhead(60)
    rows = observe("radar", orbit, TRACK, "t", noise=1.0, seed=1)
    is_third = pl.int_range(pl.len()) == 2
    for value in (None, float("nan"), 0.0):
        broken = rows.with_columns(
            range_unc_km=pl.when(is_third).then(pl.lit(value, pl.Float64)).otherwise("range_unc_km")
        )
        expected = [("confirmed", 101)] * 6
        expected[2] = ("uncorrelated", None)
        assert results(associated(catalog_of(orbit), broken)) == expected


def test_a_position_that_overflows_harms_no_other():
    """A damaged exponent makes a coordinate that is finite, but whose square is not."""
    orbit = overhead(60)
    rows = observe("isl", orbit, TRACK, "t", noise=1.0, seed=1)
    broken = rows.with_columns(
        pos_x_km=pl.when(pl.int_range(pl.len()) == 2).then(1e161).otherwise("pos_x_km")
    )
    expected = [("confirmed", 101)] * 6
    expected[2] = ("uncorrelated", None)
    assert results(associated(catalog_of(orbit), broken)) == expected
