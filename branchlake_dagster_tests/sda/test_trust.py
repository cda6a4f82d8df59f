"""Error of element sets against age: what is put in is found again, and jumps are told from errors."""

from dataclasses import replace
from datetime import date

import numpy as np
import polars as pl
import pytest

from branchlake_dagster.sda.benchmarks.whole_history_model import build_error_model
from branchlake_dagster.sda.gp.read import read_catalogue
from branchlake_dagster.sda.orbits.frames import julian_dates
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.trust.classes import (
    CLASSES,
    OWN_CLASSES,
    OrbitClass,
    orbit_class_codes,
    semi_major_axis,
)
from branchlake_dagster.sda.trust.differences import DAY_MICROS, FirstPairs, compute_differences, count_pairs
from branchlake_dagster.sda.trust.growth import (
    AGE_EDGES_DAYS,
    MAX_SIGMA_KM,
    fit_curve,
    fit_growth,
    member_classes,
    object_factors,
    summarize_bins,
)
from branchlake_dagster.sda.trust.jumps import JUMP_SIGNS, JumpKind, JumpSign
from branchlake_dagster_tests.sda.test_screening import SNAPSHOTS
from branchlake_dagster_tests.sda.whole_history_tables import element_jumps

START = 1_786_000_000_000_000
FIELD = {name: place for place, name in enumerate(ELEMENT_FIELDS)}


def orbits(count: int, seed: int = 0) -> Elements:
    """Drag-free orbits between 750 and 1,150 km, each of its own number, at `START`."""
    generator = np.random.default_rng(seed)
    values = np.zeros((count, len(ELEMENT_FIELDS)))
    values[:, FIELD["mean_motion"]] = generator.uniform(13.5, 14.3, count)
    values[:, FIELD["eccentricity"]] = generator.uniform(1e-3, 2e-2, count)
    values[:, FIELD["inclination"]] = generator.uniform(40, 100, count)
    for name in ("ra_of_asc_node", "arg_of_pericenter", "mean_anomaly"):
        values[:, FIELD[name]] = generator.uniform(0, 360, count)
    return Elements(np.arange(1, count + 1), np.full(count, START), values)


def advanced(elements: Elements, micros: int) -> Elements:
    """The same orbits with the epoch moved: SGP4's own mean elements at that time."""
    values = elements.values.copy()
    day, rest = julian_dates(np.array([micros]))
    for row, record in enumerate(elements.to_satrecs()):
        record.sgp4(day[0], rest[0])
        told = {"ra_of_asc_node": record.Om, "arg_of_pericenter": record.om, "mean_anomaly": record.mm}
        for name, angle in told.items():
            values[row, FIELD[name]] = np.degrees(angle) % 360
    return Elements(elements.sat_no, np.full(len(elements), micros), values)


def joined(parts: list[Elements]) -> Elements:
    """A history, sorted."""
    sat_no, epoch, values = (
        np.concatenate([getattr(one, name) for one in parts]) for name in ("sat_no", "epoch_micros", "values")
    )
    order = np.lexsort((epoch, sat_no))
    return Elements(sat_no[order], epoch[order], values[order])


def history(count: int, sets: int, days: float, sigma_deg: float, seed: int = 1) -> list[Elements]:
    """Sets ``days`` apart, each with a mean anomaly that is wrong by its own Gaussian error."""
    generator = np.random.default_rng(seed)
    true, found = orbits(count), []
    for k in range(sets):
        now = advanced(true, START + round(k * days * DAY_MICROS))
        values = now.values.copy()
        values[:, FIELD["mean_anomaly"]] += generator.normal(size=count) * sigma_deg
        found.append(replace(now, values=values))
    return found


def changed(part: Elements, row: int, **by: float) -> Elements:
    values = part.values.copy()
    for name, step in by.items():
        values[row, FIELD[name]] += step
    return replace(part, values=values)


def manoeuvred(parts: list[Elements], begin: int, row: int, mean_motion: float) -> list[Elements]:
    """The same, but one object flies on with another mean motion from a set on."""
    new = changed(parts[begin], row, mean_motion=mean_motion)
    found = list(parts)
    for k in range(begin, len(parts)):
        values = found[k].values.copy()
        values[row] = advanced(new.take(np.array([row])), int(found[k].epoch_micros[0])).values[0]
        found[k] = replace(found[k], values=values)
    return found


def test_an_anomaly_that_is_too_large_is_an_error_along_the_track():
    true = orbits(40)
    later = advanced(true, START + DAY_MICROS)
    exact = compute_differences(joined([true, later]))
    assert len(exact) == 40
    assert np.abs(exact.values).max() < 1e-3, "the same orbits, told at two epochs"
    degrees = 0.1
    ahead = true.values.copy()
    ahead[:, FIELD["mean_anomaly"]] += degrees
    found = compute_differences(joined([replace(true, values=ahead), later]))
    along = semi_major_axis(true)[found.older // 2] * np.radians(degrees)
    # An anomaly's degree is longer at the pericentre.
    assert found.values[:, 1] == pytest.approx(along, rel=0.06)
    assert np.abs(found.values[:, 2]).max() < 0.02
    assert np.all((found.age_days > 0.9) & (found.age_days <= 1.0)), "within the revolution before the epoch"


def test_the_drag_that_the_elements_state_is_no_jump_of_the_axis():
    true = orbits(5)
    later = advanced(true, START + 2 * DAY_MICROS)
    falling, fallen = true.values.copy(), later.values.copy()
    falling[:, FIELD["mean_motion_dot"]] = fallen[:, FIELD["mean_motion_dot"]] = 1e-4
    fallen[:, FIELD["mean_motion"]] += 2 * 1e-4 * 2
    found = compute_differences(joined([replace(true, values=falling), replace(later, values=fallen)]))
    assert np.abs(found.values[:, 3]).max() < 1e-6


def test_sets_of_another_object_or_of_nearly_the_same_epoch_are_not_compared():
    true = orbits(3)
    again = replace(true, epoch_micros=true.epoch_micros + 60_000_000)
    assert len(compute_differences(joined([true, again]))) == 0
    assert len(compute_differences(true)) == 0
    assert len(compute_differences(true.take(np.zeros(0, np.int64)))) == 0


def test_classes_go_by_altitude_and_eccentricity():
    motion = [15.9, 15.2, 14.0, 12.8, 2.0, 1.0027, 0.9, 2.2]
    eccentricity = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.7]
    values = np.zeros((8, len(ELEMENT_FIELDS)))
    values[:, FIELD["mean_motion"]], values[:, FIELD["eccentricity"]] = motion, eccentricity
    found = orbit_class_codes(Elements(np.arange(8), np.zeros(8, np.int64), values))
    wanted = [*OWN_CLASSES[:6], OrbitClass.HEO, OrbitClass.HEO]
    assert [CLASSES[code] for code in found] == wanted
    assert member_classes(OrbitClass.LEO).sum() == 4
    assert member_classes(OrbitClass.ALL).sum() == len(OWN_CLASSES)
    assert member_classes(OrbitClass.GEO).sum() == 1


def noise(generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    age = generator.uniform(AGE_EDGES_DAYS[0], 14.0, count)
    sigma = np.column_stack([0.02 + 0.1 * age, 0.3 + 1.5 * age**1.5, 0.05 + 0.05 * age, age, age])
    return age, generator.normal(size=(count, 5)) * sigma


@pytest.mark.parametrize("seed", range(4))
def test_the_curve_that_made_the_errors_is_found_whatever_the_outliers(seed):
    generator = np.random.default_rng(seed)
    age, values = noise(generator, 40_000)
    wild = generator.random(len(age)) < 0.05
    values[wild] *= 1_000
    classes = np.full(len(age), 2)
    at = np.array([0.5, 1.0, 3.0, 7.0, 12.0])
    found = fit_growth(summarize_bins(classes, age, values)).sigma_at(np.full(5, 2), at)
    assert found[:, 1] == pytest.approx(0.3 + 1.5 * at**1.5, rel=0.15)
    assert found[:, 0] == pytest.approx(0.02 + 0.1 * at, rel=0.15)


def test_a_curve_never_falls_and_a_falling_class_is_reported_as_constant():
    ages = np.array([0.1, 0.5, 1.0, 3.0, 9.0])
    sigma0, rate, _ = fit_curve(ages, np.array([5.0, 4.0, 3.0, 2.0, 1.0]))
    assert rate == 0.0
    assert sigma0 > 0
    assert fit_curve(ages, np.full(5, 1e-9), 0.02)[0] == 0.02


def test_a_class_with_too_few_samples_takes_the_figures_of_the_wider_one():
    generator = np.random.default_rng(3)
    age, values = noise(generator, 20_000)
    classes = np.full(len(age), 1)
    classes[:40] = 0
    found = fit_growth(summarize_bins(classes, age, values))
    leo = CLASSES.index(OrbitClass.LEO)
    assert found.source_class[:2].tolist() == [leo, 1]
    assert np.array_equal(found.sigma0[0], found.sigma0[leo])
    assert found.source_class[CLASSES.index(OrbitClass.GEO)] == CLASSES.index(OrbitClass.ALL)
    assert np.isfinite(found.sigma_at(np.array([0]), np.array([-3.0]))).all(), "before the epoch as after it"
    assert np.isnan(found.sigma_at(np.array([0]), np.array([15.0]))).all(), (
        "of no older age than there are samples"
    )
    nothing = fit_growth(summarize_bins(classes[:50], age[:50], values[:50]))
    assert set(nothing.source_class.tolist()) == {-1}
    assert np.isnan(nothing.sigma_at(np.array([0]), np.array([1.0]))).all()


def test_a_curve_ends_where_the_error_is_as_long_as_an_arc():
    generator = np.random.default_rng(3)
    age, values = noise(generator, 40_000)
    found = fit_growth(summarize_bins(np.full(len(age), 0), age, values * 20))
    until = found.until_days[0]
    assert until in AGE_EDGES_DAYS
    assert found.sigma_at(np.array([0]), np.array([until]))[0, 1] < 1.5 * MAX_SIGMA_KM
    assert until < 14


def test_an_objects_factor_is_its_own_as_far_as_it_has_samples():
    generator = np.random.default_rng(4)
    owner = np.repeat([0, 1, 2], [400, 400, 2])
    size = np.abs(generator.normal(size=(802, 5))) * np.array([0.5, 3.0, 3.0])[owner, None]
    samples, factors = object_factors(owner, 4, size)
    assert samples.tolist() == [400, 400, 2, 0]
    assert factors[0] == pytest.approx(0.5, rel=0.2)
    assert factors[1] == pytest.approx(3.0, rel=0.2)
    assert np.all((factors[2] < 2.0) & (factors[2] > 0.5))
    assert np.array_equal(factors[3], np.ones(5))


def test_an_objects_factor_does_not_depend_on_the_objects_before_it():
    generator = np.random.default_rng(5)
    owner = np.sort(generator.integers(0, 40, 3_000))
    size = np.abs(generator.normal(size=(3_000, 5)))
    _, factors = object_factors(owner, 40, size)
    late = owner >= 30
    _, alone = object_factors(owner[late] - 30, 10, size[late])
    assert np.array_equal(alone, factors[30:])


def test_a_part_of_a_history_gives_the_differences_of_the_whole():
    whole = joined(history(20, 9, 1.0, 0.01))
    first_pairs = FirstPairs.from_counts(*count_pairs(whole))
    differences = compute_differences(whole)
    for numbers in (np.arange(1, 8), np.array([8, 19]), np.arange(1, 21)):
        rows = np.flatnonzero(np.isin(whole.sat_no, numbers))
        part = compute_differences(whole.take(rows), first_pairs)
        wanted = differences.take(np.isin(whole.sat_no[differences.older], numbers))
        assert np.array_equal(rows[part.older], wanted.older)
        assert np.array_equal(part.age_days, wanted.age_days)
        assert np.array_equal(part.values, wanted.values)


def told(elements: Elements) -> list[tuple[int, str, JumpSign]]:
    found = build_error_model(elements)
    sets = found.differences.newer[found.jumps.pair]
    return [
        (int(elements.sat_no[one]), str(kind), JUMP_SIGNS[sign])
        for one, kind, sign in zip(sets, found.jumps.kind, found.jumps.sign, strict=True)
    ]


def test_an_orbit_that_is_raised_is_a_manoeuvre_and_one_wrong_set_is_not():
    parts = history(120, 10, 1.0, 0.01)
    assert told(joined(parts)) == []
    raised = manoeuvred(parts, 6, 5, -0.01)
    raised[4] = changed(raised[4], 30, inclination=0.5)
    raised[9] = changed(raised[9], 40, mean_motion=0.02)
    assert told(joined(raised)) == [
        (6, JumpKind.MANOEUVRE, JumpSign.SEMI_MAJOR_AXIS),
        (31, JumpKind.LONE_SET, JumpSign.INCLINATION),
        (41, JumpKind.UNCONFIRMED, JumpSign.SEMI_MAJOR_AXIS),
    ]


def test_two_objects_that_are_taken_for_each_other_are_reported():
    parts = history(120, 10, 1.0, 0.01)
    for k in range(5, 10):
        values = parts[k].values.copy()
        values[[7, 8]] = values[[8, 7]]
        parts[k] = replace(parts[k], values=values)
    elements = joined(parts)
    assert {one[:2] for one in told(elements)} == {(8, JumpKind.SWAP), (9, JumpKind.SWAP)}
    found = build_error_model(elements)
    assert elements.sat_no[found.swapped_set].tolist() == [9, 8]


def test_jumps_do_not_make_the_error_larger():
    parts = history(200, 12, 1.0, 0.01)
    quiet = build_error_model(joined(parts))
    jumped = parts
    for row in range(40):
        jumped = manoeuvred(jumped, 2 + row % 8, row, 0.01)
    noisy = build_error_model(joined(jumped))
    code, at = np.full(3, CLASSES.index(OrbitClass.LEO_1200)), np.array([1.0, 4.0, 8.0])
    assert noisy.is_affected.mean() > 0.03
    assert noisy.growth.sigma_at(code, at)[:, 1] == pytest.approx(
        quiet.growth.sigma_at(code, at)[:, 1], rel=0.15
    )


@pytest.mark.long
@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason=f"no real snapshots in {SNAPSHOTS}")
def test_of_real_history_low_orbits_grow_wrong_fastest_and_a_change_of_plane_is_seen():
    names = (
        "20260612T0502",
        "20260620T0440",
        "20260630T0433",
        "20260707T0415",
        "20260714T0331",
        "20260731T0348",
    )
    recent = ("20260805T0330", "20260808T0220", "20260809T0227", "20260810T0233", "20260811T0226")
    parts = []
    for name in (*names, *recent):
        path = SNAPSHOTS / f"active-{name}Z.tle.gz"
        found = read_catalogue(path.read_bytes(), path.name).elements
        parts.append(found.filter((pl.col("sat_no") % 8 == 0) | (pl.col("sat_no") == 44528)))
    sets = pl.concat(parts).unique(["sat_no", "epoch"]).sort("sat_no", "epoch")
    elements = Elements.from_arrow(sets.to_arrow())
    found = build_error_model(elements)
    low, middle = (CLASSES.index(one) for one in (OrbitClass.LEO_700, OrbitClass.LEO_1200))
    sigma = found.growth.sigma_at(np.array([low, middle]), np.ones(2))
    assert 1.0 < sigma[0, 1] < 20.0
    assert 0.05 < sigma[1, 1] < 2.0
    assert np.all(sigma[:, 1] > sigma[:, 0]), "along the track first of all"
    seen = element_jumps(found, elements).filter(sat_no=44528)
    # At 780 km nothing else turns a plane by a quarter of a degree in a week.
    (turned,) = seen.filter(pl.col("inclination_change_deg").abs() > 0.2).iter_rows(named=True)
    assert (turned["kind"], turned["reason"]) == ("manoeuvre", "semi-major axis")
    assert turned["epoch"].date() == date(2026, 6, 19)
