"""States that cannot be true are found, those that can are left alone."""

from dataclasses import replace
from datetime import timedelta

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from branchlake_dagster.sda.assets.quarantine import of_tracked
from branchlake_dagster.sda.conjunctions.screening import Span, screen
from branchlake_dagster.sda.gp.read import read_catalogue
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH, simulated_elements
from branchlake_dagster.sda.orbits.plausible import Fault, find_state_faults
from branchlake_dagster.sda.orbits.propagation import Elements, Ephemeris, propagate_satellites, time_grid
from branchlake_dagster.sda.orbits.quarantine import QUARANTINE_INPUT, QUARANTINE_SCHEMA, quarantine_batches
from branchlake_dagster.sda.sensors.simulate import simulate
from branchlake_dagster_tests.sda.test_gp import SNAPSHOTS

START = int(np.datetime64("2026-08-08T03:00:00", "us").astype(np.int64))
HOUR = 3_600_000_000


def table(frame: pl.DataFrame):
    return frame.with_columns(snapshot_id=pl.lit("s")).to_arrow()


def quarantine(catalogue: pa.Table, start: int, end: int) -> pl.DataFrame:
    """The rows that Spark's workers compute, in this process."""
    batches = quarantine_batches(start, end)(catalogue.select(QUARANTINE_INPUT).to_batches())
    return pl.DataFrame(pa.Table.from_batches(batches, QUARANTINE_SCHEMA))


@pytest.fixture(scope="module")
def elements() -> Elements:
    return Elements.from_arrow(simulated_elements(seed=3, objects=200, epoch=REFERENCE_EPOCH).to_arrow())


@pytest.fixture
def states(elements) -> Ephemeris:
    return propagate_satellites(elements.to_satrec_array(), time_grid(START, START + HOUR, 60.0))


@pytest.mark.long
@pytest.mark.parametrize(("step_s", "hours"), [(1.0, 1), (30.0, 6), (60.0, 6), (300.0, 6), (600.0, 6)])
def test_true_states_of_all_kinds_of_orbit_are_sound(elements, step_s, hours):
    instants = time_grid(START, START + hours * HOUR, step_s)
    found = find_state_faults(propagate_satellites(elements.to_satrec_array(), instants), elements)
    assert found.plausible_states.all()
    assert np.abs(found.energy_ratio - 1).max() < 0.02


def test_one_instant_alone_is_judged_too(elements):
    assert find_state_faults(
        propagate_satellites(elements.to_satrec_array(), np.array([START])), elements
    ).plausible_states.all()


def test_each_fault_is_found_where_it_is(elements, states):
    position, velocity = states.position.copy(), states.velocity.copy()
    position[0, 5] *= 40  # far out
    position[1, 6] *= 6_400 / np.linalg.norm(position[1, 6])  # in the ground, by one percent of its height
    velocity[2, 7] *= 900  # 6,840 km/s
    velocity[3, 8:] *= 1.05
    position[4, 9], velocity[4, 9] = position[4, 10], velocity[4, 10]  # a minute ahead on its own orbit
    valid = states.valid.copy()
    valid[5, 10] = False
    found = find_state_faults(replace(states, position=position, velocity=velocity, valid=valid), elements)
    assert np.flatnonzero(~found.plausible_objects).tolist() == [0, 1, 2, 3, 4, 5]
    assert found.first_faulty_instant()[:6].tolist() == [5, 6, 7, 8, 9, 10]
    wanted = [Fault.ALTITUDE, Fault.ALTITUDE, Fault.ENERGY, Fault.ENERGY, Fault.DISPLACEMENT, Fault.SGP4]
    assert found.fault[range(6), found.first_faulty_instant()[:6]].tolist() == wanted
    # The instant after it does not fit either; all others do.
    assert np.flatnonzero(found.fault[4]).tolist() == [9, 10]


def stale() -> pl.DataFrame:
    """Low objects under strong drag, whose elements are two months old."""
    fresh = simulated_elements(seed=3, objects=200, epoch=REFERENCE_EPOCH)
    low = (pl.col("mean_motion") > 15) & (pl.int_range(pl.len()) % 3 == 0)
    return fresh.with_columns(
        epoch=pl.when(low).then(pl.col("epoch") - timedelta(days=60)).otherwise("epoch"),
        bstar=pl.when(low).then(0.1).otherwise("bstar"),
    )


def test_stale_objects_are_quarantined_with_the_reason_and_no_others():
    frame = stale()
    rows = quarantine(table(frame), START, START + HOUR)
    old = frame.filter(pl.col("bstar") == 0.1)["sat_no"]
    assert 0 < rows.height <= old.len()
    assert set(rows["sat_no"]) <= set(old)
    assert set(rows["reason"]) <= {"sgp4", "altitude", "energy", "displacement"}
    assert "altitude" in set(rows["reason"]), "SGP4 alone does not say so"
    assert rows["altitude_km"].max() > 100_000
    assert rows["element_age_days"].min() > 59
    assert rows["at"].is_between(rows["window_start"], rows["window_start"] + timedelta(hours=1)).all()
    assert quarantine(table(frame).slice(0, 0), START, START + HOUR).height == 0


def test_absurd_states_are_neither_screened_nor_observed():
    frame = stale().sort("sat_no")
    elements = Elements.from_arrow(frame.to_arrow())
    bad = set(quarantine(table(frame), START, START + HOUR)["sat_no"])
    found = screen(elements, Span.whole(START, START + HOUR), threshold_km=2_000.0)
    met = {*elements.sat_no[found.first].tolist(), *elements.sat_no[found.second].tolist()}
    assert met
    assert not met & bad
    assert np.linalg.norm(found.velocity, axis=1).max() < 25
    seen = simulate(elements, kind="radar", start=START, end=START + HOUR, seed=1)
    assert seen.height
    assert not set(seen["sat_no"]) & bad


@pytest.mark.long
@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason=f"no real snapshots in {SNAPSHOTS}")
def test_of_a_real_catalogue_only_what_is_stale_or_falling_is_quarantined():
    june, august = (sorted(SNAPSHOTS.glob("active-*.tle.gz"))[k] for k in (0, -1))
    at = int(np.datetime64("2026-08-11T08:00:00", "us").astype(np.int64))
    for path, least, most in ((august, 0, 5), (june, 300, 600)):
        frame = read_catalogue(path.read_bytes(), path.name).elements
        rows = quarantine(table(frame), at, at + HOUR)
        assert least <= rows.height <= most, rows["reason"].value_counts()


def test_only_tracked_objects_are_propagated_and_all_of_a_catalogue_without_states():
    frame = stale().head(4)
    states = pl.Series("state", ["tracked", "stale", "decayed", "tracked"])
    assert of_tracked(table(frame)).num_rows == 4
    chosen = of_tracked(table(frame.with_columns(states)))
    assert chosen.column("sat_no").to_pylist() == frame["sat_no"].gather([0, 3]).to_list()
