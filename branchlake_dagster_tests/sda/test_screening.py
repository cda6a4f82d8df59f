"""Screening is brute force, whatever way it is cut; and screening again what has changed is screening all."""

from collections import Counter
from dataclasses import fields, replace

import numpy as np
import polars as pl
import pytest

from branchlake_dagster.sda.conjunctions import screening
from branchlake_dagster.sda.conjunctions.closest import MINUTE_S, States, find_closest
from branchlake_dagster.sda.conjunctions.rescreening import EarlierLimits, EarlierRows, Plan, plan
from branchlake_dagster.sda.conjunctions.screening import MINUTE, Encounters, Kind, Span, screen, screen_pairs
from branchlake_dagster.sda.conjunctions.sieve import near_pairs
from branchlake_dagster.sda.conjunctions.tasks import Pairs, Screening, in_parts
from branchlake_dagster.sda.gp.read import read_catalogue
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH, simulated_elements
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements, propagate_satellites
from branchlake_dagster_tests.sda.test_gp import SNAPSHOTS
from branchlake_dagster_tests.suite.raised import raising

START = int(np.datetime64("2026-08-08T03:00:00", "us").astype(np.int64))
HOUR = 60 * MINUTE
MOTION, ANOMALY, INCLINATION = (
    ELEMENT_FIELDS.index(n) for n in ("mean_motion", "mean_anomaly", "inclination")
)


def minutes(count: int, start: int = START) -> Span:
    return Span.whole(start, start + count * MINUTE)


@pytest.fixture(scope="module")
def elements() -> Elements:
    frame = simulated_elements(seed=11, objects=1500, epoch=REFERENCE_EPOCH)
    # Only low orbits, so that a short span holds enough encounters.
    low = Elements.from_arrow(frame.filter(pl.col("mean_motion") > 11).head(350).to_arrow())
    # And four that follow the first ones: in formation, further back, docked, and in a plane that is tilted to it.
    added = low.take(np.arange(4))
    values = added.values.copy()
    values[0, ANOMALY] += 0.01
    values[1, ANOMALY] += 0.16
    values[3, INCLINATION] += 0.1
    followers = Elements(added.sat_no + 100_000_000, added.epoch_micros, values)
    return Elements(
        *(np.concatenate([getattr(one, f.name) for one in (low, followers)]) for f in fields(low))
    )


def brute_force(elements: Elements, seconds: int, threshold_km: float) -> list[tuple[int, int, float, float]]:
    """Local minima of every pair's distance on a grid of one second: (first, second, time in s, km)."""
    instants = START + 1_000_000 * np.arange(-1, seconds + 2, dtype=np.int64)
    states = propagate_satellites(elements.to_satrec_array(), instants)
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


def of_kind(found: Encounters, *kinds: Kind) -> list[tuple[int, int, float, float]]:
    rows = zip(
        found.kinds,
        found.first.tolist(),
        found.second.tolist(),
        ((found.tca_micros - START) / 1e6).tolist(),
        found.miss_km.tolist(),
        strict=True,
    )
    return sorted(row[1:] for row in rows if row[0] in kinds)


def assert_same(found: Encounters, expected: Encounters) -> None:
    for one in fields(Encounters):
        np.testing.assert_array_equal(getattr(found, one.name), getattr(expected, one.name), one.name)


@pytest.mark.long
def test_finds_what_brute_force_finds(elements):
    found = screen(elements, minutes(15), threshold_km=30.0)
    together = {row[:2] for row in of_kind(found, Kind.TOGETHER)}
    assert together >= {(0, 350), (1, 351), (2, 352), (3, 353)}
    expected = [one for one in brute_force(elements, 900, 30.0) if one[:2] not in together]
    assert len(expected) > 20
    rows = of_kind(found, Kind.ENCOUNTER)
    assert [r[:2] for r in rows] == [e[:2] for e in expected]
    for row, reference in zip(rows, expected, strict=True):
        assert row[2] == pytest.approx(reference[2], abs=0.02)
        assert row[3] == pytest.approx(reference[3], abs=0.01)


@pytest.mark.parametrize("step_s", [30.0, 60.0, 120.0, 240.0, 97.0])
def test_how_it_is_searched_does_not_change_the_answer(elements, step_s):
    reference = screen(elements, minutes(120), threshold_km=20.0)
    assert len(reference.first) > 40
    assert_same(screen(elements, minutes(120), threshold_km=20.0, step_s=step_s), reference)


@pytest.mark.parametrize("parts", [2, 7, 120])
def test_how_it_is_divided_does_not_change_the_answer(elements, parts):
    whole = screen(elements, minutes(120), threshold_km=20.0)
    screening = Screening.of_all(elements, 20.0)
    tasks = in_parts(minutes(120), Pairs.ALL, parts)
    assert len(tasks) == parts
    assert_same(Encounters.of(screening.run_task(task) for task in tasks), whole)


def test_the_pairs_of_some_are_those_of_all_with_one_of_them(elements):
    subjects = np.arange(len(elements)) % 9 == 0
    whole = screen(elements, minutes(90), threshold_km=25.0)
    mine = subjects[whole.first] | subjects[whole.second]
    found = screen(elements, minutes(90), threshold_km=25.0, subjects=subjects)
    assert 10 < len(found.first) < len(whole.first)
    for one in fields(Encounters):
        np.testing.assert_array_equal(getattr(found, one.name), getattr(whole, one.name)[mine])
    assert not len(screen(elements, minutes(9), subjects=np.zeros(len(elements), np.bool_)).first)


def test_an_approach_cut_by_an_end_is_reported_as_an_edge(elements):
    encounters = of_kind(screen(elements, minutes(60), threshold_km=30.0), Kind.ENCOUNTER)
    inner = [one for one in encounters if 120 < one[2] < 3480 and 1 < one[2] % 60 < 59]
    edges = Counter()
    for i, j, time, _ in inner[:30]:
        pair = np.array([[i, j]])
        before, after = START + int(time // 60) * MINUTE, START + int(time // 60 + 1) * MINUTE
        for name, span in (("end", Span.whole(START, before)), ("start", Span.whole(after, START + HOUR))):
            found = screen_pairs(elements, span, pair, threshold_km=30.0)
            for kind, tca in zip(found.kinds, found.tca_micros.tolist(), strict=True):
                if kind is Kind.EDGE:
                    assert tca in (span.start, span.end)
                    edges[name] += 1
            whole = screen(elements.take(pair[0]), span, threshold_km=30.0)
            assert whole.tca_micros.tolist() == found.tca_micros.tolist()
            assert whole.kinds == found.kinds
    assert edges["end"] + edges["start"] > 0


def test_pairs_that_stay_together_are_one_row_with_their_minutes(elements):
    found = screen(elements, minutes(120), threshold_km=5.0)
    rows = {
        (i, j): (kind, count, miss)
        for i, j, kind, count, miss in zip(
            found.first.tolist(),
            found.second.tolist(),
            found.kinds,
            found.minutes.tolist(),
            found.miss_km.tolist(),
            strict=True,
        )
        if j >= 350
    }
    assert rows[0, 350] == (Kind.TOGETHER, 120, pytest.approx(1.2, abs=0.2))
    assert rows[2, 352] == (Kind.TOGETHER, 120, 0.0)
    # A tilted plane: they meet where the planes cross, and part in between.
    assert rows[3, 353][1] < 120
    assert (1, 351) not in rows, "20 km behind"


def test_the_relative_state_is_along_the_axes_of_the_first(elements):
    found = screen(elements, minutes(60), threshold_km=30.0)
    np.testing.assert_allclose(np.linalg.norm(found.position, axis=1), found.miss_km, atol=1e-12)
    inside = np.array([kind is Kind.ENCOUNTER for kind in found.kinds])
    closing = np.einsum("ij,ij->i", found.position, found.velocity)[inside]
    assert np.abs(closing / np.linalg.norm(found.velocity[inside], axis=1)).max() < 1e-6
    behind = (found.first == 0) & (found.second == 350)
    radial, transverse, normal = found.position[behind][0]
    assert transverse > 1.0, "it is ahead by a larger mean anomaly"
    assert abs(radial) + abs(normal) < 0.05


def test_an_object_that_cannot_be_propagated_is_left_out(elements):
    values = elements.values.copy()
    values[0, MOTION] = 40.0
    broken = Elements(elements.sat_no, elements.epoch_micros, values)
    found = screen(broken, minutes(60), threshold_km=30.0)
    assert len(found.first) > 0
    assert 0 not in found.first


@pytest.mark.parametrize("objects", [0, 1])
def test_too_few_objects_for_an_encounter(elements, objects):
    assert len(screen(elements.take(np.arange(objects)), minutes(3)).first) == 0


@pytest.mark.parametrize("bounds", [(START + 1, START + MINUTE), (START, START), (START + MINUTE, START)])
def test_a_span_is_of_whole_minutes(bounds):
    with raising(ValueError):
        Span.whole(*bounds)


def test_the_sieve_loses_no_pair_of_straight_lines():
    generator = np.random.default_rng(5)
    for _ in range(20):
        count = int(generator.integers(2, 400))
        r = generator.normal(size=(count, 3)) * 800
        v = generator.normal(size=(count, 3)) * 5
        bound = np.full(count, 0.0001)
        h, d = float(generator.choice([20, 60, 200])), float(generator.choice([1, 40]))
        i, j = np.triu_indices(count, 1)
        dr, dv = r[j] - r[i], v[j] - v[i]
        t = np.clip(-np.sum(dr * dv, axis=1) / np.sum(dv * dv, axis=1), -h / 2, h / 2)
        near = np.linalg.norm(dr + dv * t[:, None], axis=1) <= d
        subjects = generator.random(count) < 0.3
        for chosen in (None, subjects):
            first, second = near_pairs(r, v, bound, h=h, threshold_km=d, subjects=chosen)
            found = set(zip(first.tolist(), second.tolist(), strict=True))
            assert len(found) == len(first), "each once"
            mine = near if chosen is None else near & (chosen[i] | chosen[j])
            wanted = set(zip(i[mine].tolist(), j[mine].tolist(), strict=True))
            assert wanted <= found
            if chosen is not None:
                assert all(chosen[a] or chosen[b] for a, b in found)


def test_the_minute_is_that_of_sgp4(elements):
    """Between the ends of a minute, too; a time that is 0.1 s off would be seen at any relative speed."""
    instants = START + MINUTE // 4 * np.arange(5, dtype=np.int64)
    states = propagate_satellites(elements.to_satrec_array(), instants)
    one, other = np.arange(0, 300), np.arange(1, 301)
    begin, end = (
        tuple(States(states.position[rows, k], states.velocity[rows, k]) for rows in (one, other))
        for k in (0, 4)
    )
    found = find_closest(begin, end)
    assert np.all((found.fraction >= 0) & (found.fraction <= 1))
    middle = propagate_satellites(
        elements.to_satrec_array(), START + np.round(found.fraction * MINUTE_S * 1e6).astype(np.int64)
    )
    k = np.arange(300)
    apart = middle.position[other, k] - middle.position[one, k]
    assert np.linalg.norm(apart - found.relative.position, axis=1).max() < 1e-3


def with_kept(
    planned: Plan, known: Encounters, before: Elements, now: Elements, *, parts: int = 1
) -> Encounters:
    """What is found now and what is kept of the earlier list, by rows of the elements of now.

    The earlier list is divided by pairs into parts, as Spark divides it.
    """
    found = [planned.screening.run_task(task) for task in planned.tasks]
    part_of_row = (before.sat_no[known.first] + before.sat_no[known.second]) % parts
    for part in range(parts):
        listed = take(known, np.flatnonzero(part_of_row == part))
        stays, again = planned.rescreening.rescreen(earlier_rows(before, listed))
        kept = take(listed, stays)
        first, second = (np.searchsorted(now.sat_no, before.sat_no[one]) for one in (kept.first, kept.second))
        found += [again, replace(kept, first=first, second=second)]
    return Encounters.of(found)


def take(found: Encounters, rows: np.ndarray) -> Encounters:
    return Encounters(*(getattr(found, one.name)[rows] for one in fields(found)))


def earlier_rows(elements: Elements, found: Encounters) -> EarlierRows:
    return EarlierRows(
        np.stack([elements.sat_no[found.first], elements.sat_no[found.second]], axis=1),
        found.tca_micros,
        np.array([kind is Kind.TOGETHER for kind in found.kinds], np.bool_),
    )


@pytest.mark.parametrize("seed", range(12))
def test_screening_again_what_has_changed_is_screening_all(elements, seed):
    generator = np.random.default_rng(seed)
    threshold = float(generator.choice([8.0, 25.0]))
    before = minutes(90)
    known = screen(elements, before, threshold_km=threshold)
    values = elements.values.copy()
    moved = generator.random(len(elements)) < generator.choice([0.0, 0.01, 0.3])
    values[moved, ANOMALY] += generator.normal(size=int(moved.sum())) * 0.2
    now = replace(elements, values=values)
    stays = generator.random(len(elements)) < 0.97  # the others are gone, or too old by now
    now = now.take(np.flatnonzero(stays))
    start = START + int(generator.integers(0, 89)) * MINUTE
    span = Span.whole(start, start + int(generator.integers(5, 120)) * MINUTE)
    planned = plan(
        now,
        span,
        threshold,
        earlier=EarlierLimits(before.start, before.end, threshold),
        changed=elements.sat_no[moved],
        parts=3,
    )
    assert "all pairs" not in planned.why
    expected = screen(now, span, threshold_km=threshold)
    for parts in (1, 5):
        assert_same(with_kept(planned, known, elements, now, parts=parts), expected)


def test_an_approach_that_rounds_to_the_end_of_its_minute_stays_in_it(elements, monkeypatch):
    def closest_at_end(begin, end):
        return find_closest(begin, end)._replace(fraction=np.full(len(begin[0].position), 1 - 1e-10))

    monkeypatch.setattr(screening, "find_closest", closest_at_end)
    before = minutes(20)
    known = screen(elements, before, threshold_km=25.0)
    passing = np.flatnonzero([kind is Kind.ENCOUNTER for kind in known.kinds])
    owners = known.tca_micros[passing] // MINUTE * MINUTE
    assert len(passing) > 5
    for minute in np.unique(owners):
        found = screen(elements, minutes(1, int(minute)), threshold_km=25.0)
        assert found.kinds.count(Kind.ENCOUNTER) == np.count_nonzero(owners == minute)
    start = int(owners[len(owners) // 2])
    span = Span.whole(start, before.end)
    known_list = EarlierLimits(before.start, before.end, 25.0)
    planned = plan(elements, span, 25.0, earlier=known_list, changed=elements.sat_no[:0], parts=2)
    expected = screen(elements, span, threshold_km=25.0)
    assert_same(with_kept(planned, known, elements, elements), expected)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("none", "no earlier list"),
        ("threshold", "of 7 km"),
        ("before", "another time"),
        ("after", "another time"),
        ("many", "100% of the objects"),
    ],
)
def test_a_list_that_is_of_no_use_is_made_anew(elements, case, why):
    known = EarlierLimits(START, START + HOUR, 7.0 if case == "threshold" else 5.0)
    span = minutes(10, START + {"before": -HOUR, "after": HOUR}.get(case, 0))
    changed = elements.sat_no if case == "many" else elements.sat_no[:3]
    planned = plan(elements, span, 5.0, earlier=None if case == "none" else known, changed=changed, parts=2)
    assert why in planned.why
    assert {task.pairs for task in planned.tasks} == {Pairs.ALL}
    assert planned.rescreening is None


@pytest.mark.long
@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason=f"no real snapshots in {SNAPSHOTS}")
def test_real_neighbors_are_reported_as_together_and_a_real_change_as_all():
    first, second = (
        Elements.from_arrow(read_catalogue(path.read_bytes(), path.name).elements.to_arrow())
        for path in (SNAPSHOTS / f"active-{name}.tle.gz" for name in ("20260810T0233Z", "20260810T0803Z"))
    )
    start = int(np.datetime64("2026-08-10T08:03:00", "us").astype(np.int64))
    span = minutes(20, start)
    known = screen(first, span, threshold_km=5.0)
    names = {
        tuple(sorted((int(first.sat_no[i]), int(first.sat_no[j]))))
        for i, j, kind in zip(known.first, known.second, known.kinds, strict=True)
        if kind is Kind.TOGETHER
    }
    assert (25544, 49044) in names, "the ISS and its module Nauka"
    rows = {
        tuple(one): row
        for row, one in zip(
            np.column_stack([first.epoch_micros, first.values]), first.sat_no[:, None], strict=True
        )
    }
    changed = [
        number
        for number, row in zip(
            second.sat_no.tolist(), np.column_stack([second.epoch_micros, second.values]), strict=True
        )
        if (number,) not in rows or (rows[number,] != row).any()
    ]
    assert 0 < len(changed) < 100
    later = minutes(25, start + 5 * MINUTE)
    planned = plan(
        second,
        later,
        5.0,
        earlier=EarlierLimits(span.start, span.end, 5.0),
        changed=np.array(changed, np.int64),
        parts=2,
    )
    found = with_kept(planned, known, first, second)
    assert_same(found, screen(second, later, threshold_km=5.0))
