import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from branchlake_dagster.fusion.conjunctions.arrow import CANDIDATE_SCHEMA, screen_batches
from branchlake_dagster.fusion.conjunctions.screening import screen
from branchlake_dagster.fusion.gp.simulated import REFERENCE_EPOCH, simulated_elements
from branchlake_dagster.fusion.orbits.propagation import Elements, propagate

START = int(np.datetime64("2026-08-08T03:00:00", "us").astype(np.int64))


@pytest.fixture(scope="module")
def elements() -> Elements:
    frame = simulated_elements(seed=11, objects=1500, epoch=REFERENCE_EPOCH)
    # Only low orbits, so that a short span holds enough encounters.
    return Elements.from_arrow(frame.filter(pl.col("mean_motion") > 11).head(350).to_arrow())


def brute_force(elements: Elements, seconds: int, threshold_km: float) -> list[tuple[int, int, float, float]]:
    """Local minima of every pair's distance on a grid of one second: (first, second, time in s, km)."""
    instants = START + 1_000_000 * np.arange(-1, seconds + 2, dtype=np.int64)
    states = propagate(elements.satellites(), instants)
    found = []
    for i in range(len(elements) - 1):
        apart = np.linalg.norm(states.position[i + 1 :] - states.position[i], axis=2)
        turning = (apart[:, 1:-1] < apart[:, :-2]) & (apart[:, 1:-1] <= apart[:, 2:])
        # At 15 km/s half a second is 7.5 km: the grid's own minimum must be looked for further out.
        for j, k in zip(*np.nonzero(turning & (apart[:, 1:-1] < threshold_km + 9)), strict=True):
            relative = states.position[i + 1 + j, k + 1] - states.position[i, k + 1]
            rate = states.velocity[i + 1 + j, k + 1] - states.velocity[i, k + 1]
            shift = -(relative @ rate) / (rate @ rate)
            miss = float(np.linalg.norm(relative + rate * shift))
            time = k + shift
            if miss <= threshold_km and 0 <= time < seconds:
                found.append((i, int(i + 1 + j), float(time), miss))
    return sorted(found)


def test_finds_what_brute_force_finds(elements):
    expected = brute_force(elements, 1800, 30.0)
    assert len(expected) > 20
    found = screen(elements, start=START, cells=60, threshold_km=30.0)
    rows = sorted(
        zip(
            found.first.tolist(),
            found.second.tolist(),
            ((found.tca_micros - START) / 1e6).tolist(),
            found.miss_km.tolist(),
            strict=True,
        )
    )
    assert [r[:2] for r in rows] == [e[:2] for e in expected]
    for row, reference in zip(rows, expected, strict=True):
        assert row[2] == pytest.approx(reference[2], abs=0.05)
        assert row[3] == pytest.approx(reference[3], abs=0.01)


@pytest.mark.parametrize("step_s", [10.0, 20.0, 60.0])
def test_the_step_does_not_change_the_answer(elements, step_s):
    reference = screen(elements, start=START, cells=60, step_s=30.0)
    other = screen(elements, start=START, cells=round(1800 / step_s), step_s=step_s)
    assert len(other.first) == len(reference.first)
    order, usual = np.argsort(other.tca_micros), np.argsort(reference.tca_micros)
    np.testing.assert_allclose(other.miss_km[order], reference.miss_km[usual], atol=2e-3)


def test_chunks_find_each_encounter_once(elements):
    batch = pa.RecordBatch.from_pydict({"first_cell": [0, 17, 40], "cells": [17, 23, 20]})
    chunked = pa.Table.from_batches(
        screen_batches(elements, start=START, step_s=30.0, threshold_km=20.0)([batch]), CANDIDATE_SCHEMA
    )
    whole = screen(elements, start=START, cells=60, threshold_km=20.0)
    assert chunked.num_rows == len(whole.first) > 5
    pairs = chunked.select(["sat1_object_designator", "sat2_object_designator", "tca"])
    assert pairs.group_by(pairs.column_names).aggregate([]).num_rows == chunked.num_rows
    first = chunked.column("sat1_object_designator").to_numpy()
    assert (first < chunked.column("sat2_object_designator").to_numpy()).all()
    relative = np.stack([chunked.column(f"relative_position_{a}_km").to_numpy() for a in "rtn"], axis=1)
    np.testing.assert_allclose(
        np.linalg.norm(relative, axis=1), chunked.column("miss_distance_km").to_numpy(), atol=1e-9
    )


@pytest.mark.parametrize("objects", [0, 1])
def test_too_few_objects_for_an_encounter(elements, objects):
    found = screen(elements.take(np.arange(objects)), start=START, cells=3)
    assert len(found.first) == 0


def test_an_object_that_cannot_be_propagated_is_left_out(elements):
    values = elements.values.copy()
    values[0, 7] = 40.0
    broken = Elements(elements.sat_no, elements.epoch_micros, values)
    found = screen(broken, start=START, cells=60, threshold_km=30.0)
    assert len(found.first) > 0
    assert 0 not in found.first
