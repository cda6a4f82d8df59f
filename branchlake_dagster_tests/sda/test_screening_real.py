"""Screening of real objects for a day against brute force: no sieve, no interpolation, SGP4 alone.

`BRANCHLAKE_TEST_SCREENED` says how many objects; 1,500 take minutes.
"""

import os

import numpy as np
import pytest

from branchlake_dagster.sda.conjunctions.screening import Kind, Span, screen
from branchlake_dagster.sda.ephemerides.screening import screen_tracks
from branchlake_dagster.sda.ephemerides.track import tracks_of
from branchlake_dagster.sda.gp.read import read_catalogue
from branchlake_dagster.sda.messages.oem_read import read_oem
from branchlake_dagster.sda.orbits.frames import julian_dates
from branchlake_dagster.sda.orbits.propagation import Elements, propagate_satellites
from branchlake_dagster_tests.sda.test_ephemerides import message, of_one, same, segment
from branchlake_dagster_tests.sda.test_gp import SNAPSHOTS

OBJECTS = int(os.environ.get("BRANCHLAKE_TEST_SCREENED", "220"))
START = int(np.datetime64("2026-08-08T03:00:00", "us").astype(np.int64))
STEP_S, HOURS, THRESHOLD_KM = 20, 24, 10.0
BEND_KM = 0.5 * 0.02 * (STEP_S / 2) ** 2 * 4
"""What two accelerations can bend a straight line by within a step."""


def brute_force(elements: Elements) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """(seconds, km) of each minimum of each pair's distance, by bisection of SGP4's own states."""
    candidates = []
    before: np.ndarray | None = None
    satellites, records = elements.to_satrec_array(), elements.to_satrecs()
    for begin in range(0, HOURS * 3600 + 1, 60 * STEP_S):
        instants = np.arange(begin, min(begin + 60 * STEP_S, HOURS * 3600 + 1), STEP_S)
        states = propagate_satellites(satellites, START + instants * 1_000_000)
        for k, instant in enumerate(instants.tolist()):
            r, v = states.position[:, k], states.velocity[:, k]
            cross = r @ v.T
            own = np.diag(cross)
            rate = own[:, None] + own[None, :] - cross - cross.T
            if before is not None:
                i, j = np.nonzero(np.triu((before < 0) & (rate >= 0), 1))
                apart, speed = r[j] - r[i], v[j] - v[i]
                line = np.sum(apart * speed, axis=1) / np.sum(speed * speed, axis=1)
                miss = np.linalg.norm(apart - speed * np.clip(line, 0, STEP_S)[:, None], axis=1)
                near = miss <= THRESHOLD_KM + BEND_KM
                candidates += [
                    (a, b, instant) for a, b in zip(i[near].tolist(), j[near].tolist(), strict=True)
                ]
            before = rate
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for i, j, end in candidates:
        low, high = float(end - STEP_S), float(end)
        for _ in range(24):
            middle = (low + high) / 2
            apart, speed = relative(records[i], records[j], middle)
            low, high = (middle, high) if apart @ speed < 0 else (low, middle)
        miss = float(np.linalg.norm(relative(records[i], records[j], high)[0]))
        if miss <= THRESHOLD_KM:
            found.setdefault((i, j), []).append((high, miss))
    return found


def relative(one, other, seconds: float):
    whole, fraction = julian_dates(np.array([START + round(seconds * 1e6)]))
    (_, r1, v1), (_, r2, v2) = (record.sgp4(whole[0], fraction[0]) for record in (one, other))
    return np.subtract(r2, r1), np.subtract(v2, v1)


@pytest.mark.long
@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason=f"no real snapshots in {SNAPSHOTS}")
def test_a_day_of_real_objects_is_brute_force():
    content = (SNAPSHOTS / "active-20260808T0220Z.tle.gz").read_bytes()
    every = Elements.from_arrow(read_catalogue(content, "real").elements.to_arrow())
    # Neighbours in the catalogue were launched together: half of them are, so that some stay together.
    mixed = np.random.default_rng(8).permutation(len(every))[: OBJECTS // 2]
    chosen = np.unique(np.concatenate([mixed, np.arange(OBJECTS - len(mixed))]))
    elements = every.take(chosen)
    span = Span.whole(START, START + HOURS * 3600 * 1_000_000)
    found = screen(elements, span, threshold_km=THRESHOLD_KM)
    assert set(found.kinds) >= {Kind.ENCOUNTER, Kind.TOGETHER}
    reference = brute_force(elements)
    together = {}
    for i, j, kind, tca, miss in zip(
        found.first.tolist(),
        found.second.tolist(),
        found.kinds,
        ((found.tca_micros - START) / 1e6).tolist(),
        found.miss_km.tolist(),
        strict=True,
    ):
        if kind is Kind.TOGETHER:
            together[i, j] = miss
        if kind is not Kind.ENCOUNTER:
            continue
        times = reference[i, j]
        nearest = min(times, key=lambda one: abs(one[0] - tca))
        assert nearest[0] == pytest.approx(tca, abs=0.1), (i, j)
        assert nearest[1] == pytest.approx(miss, abs=0.01), (i, j)
        times.remove(nearest)
    left = {pair: times for pair, times in reference.items() if times}
    assert set(left) <= set(together), "each minimum that is no encounter is among minutes together"
    for pair, times in left.items():
        assert together[pair] <= min(miss for _, miss in times) + 1e-3


@pytest.mark.long
@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason=f"no real snapshots in {SNAPSHOTS}")
def test_an_ephemeris_of_a_real_object_has_its_close_approaches():
    content = (SNAPSHOTS / "active-20260808T0220Z.tle.gz").read_bytes()
    every = Elements.from_arrow(read_catalogue(content, "real").elements.sort("sat_no").to_arrow())
    # The station, and one object in eight of the others.
    elements = every.take(np.flatnonzero((every.sat_no == 25544) | (np.arange(len(every)) % 8 == 0)))
    end = START + HOURS * 3600 * 1_000_000
    numbers = [25544, *elements.sat_no[[900, 1500]].tolist()]
    subjects = np.isin(elements.sat_no, numbers)
    whole = screen(elements, Span.whole(START, end), threshold_km=20.0, subjects=subjects, step_s=120.0)
    rows = np.searchsorted(elements.sat_no, numbers).tolist()
    assert sum(len(of_one(whole, row)) for row in rows) > 10
    for row in rows:
        read = read_oem(message(segment(elements, row, begin=START, end=end)), "real")
        others = np.delete(np.arange(len(elements)), row)
        mine = screen_tracks(tracks_of(read.segments), elements.take(others), START, end, threshold_km=20.0)
        same(mine, others, of_one(whole, row), km=0.03, s=0.1)
