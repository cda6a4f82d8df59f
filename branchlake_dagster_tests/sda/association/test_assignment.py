"""The assignment of tracks against every possible assignment."""

import itertools

import numpy as np
import pytest

from branchlake_dagster.sda.association.assignment import assign_tracks, number_passes


def best_total(options: dict[tuple[int, int], float], tracks: int) -> float:
    """The largest total gain, by trying all choices."""
    choices = [[None, *(target for track, target in options if track == one)] for one in range(tracks)]
    best = 0.0
    for chosen in itertools.product(*choices):
        used = [target for target in chosen if target is not None]
        if len(set(used)) == len(used):
            best = max(best, sum(options[t, c] for t, c in enumerate(chosen) if c is not None))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_total_and_the_margins_are_those_of_all_assignments(seed):
    generator = np.random.default_rng(seed)
    tracks, targets = 5, 5
    pairs = [(t, c) for t in range(tracks) for c in range(targets) if generator.uniform() < 0.45]
    options = {pair: float(generator.uniform(0.1, 30)) for pair in pairs}
    track, target = (np.array([pair[k] for pair in pairs], np.int64) for k in (0, 1))
    gain = np.array(list(options.values()))
    found = assign_tracks(track, target, gain, tracks)
    chosen = found.option[found.option >= 0]
    assert len(set(target[chosen])) == len(chosen)
    assert (track[chosen] == np.flatnonzero(found.option >= 0)).all()
    total = best_total(options, tracks)
    assert gain[chosen].sum() == pytest.approx(total, abs=1e-6)
    for one in range(tracks):
        if found.option[one] < 0:
            assert found.margin[one] == np.inf
        else:
            others = {pair: g for pair, g in options.items() if pair != pairs[found.option[one]]}
            assert found.margin[one] == pytest.approx(total - best_total(others, tracks), abs=1e-6)


def test_equal_gains_go_to_the_lower_target():
    track, target = np.array([0, 0, 0]), np.array([9, 4, 7])
    found = assign_tracks(track, target, np.full(3, 5.0), 1)
    assert target[found.option].tolist() == [4]
    assert found.margin[0] == pytest.approx(0.0, abs=1e-6)


def test_no_options_leave_every_track_unassigned():
    nothing = np.zeros(0, np.int64)
    found = assign_tracks(nothing, nothing, np.zeros(0), 3)
    assert found.option.tolist() == [-1, -1, -1]


def test_passes_are_the_unions_of_overlapping_times():
    sensor = np.array([0, 0, 0, 0, 1, 0])
    objects = np.array([5, 5, 5, 5, 5, 6])
    first = np.array([0, 8, 25, 15, 0, 0])
    last = np.array([10, 12, 30, 24, 50, 9])
    numbers = number_passes(sensor, objects, first, last)
    assert numbers[0] == numbers[1]
    assert len({int(n) for n in numbers}) == 5
    # The order is that of sensor, object and time.
    assert np.argsort(numbers[[0, 3, 2, 5, 4]], kind="stable").tolist() == [0, 1, 2, 3, 4]


def test_one_long_track_joins_the_passes_it_spans():
    numbers = number_passes(
        np.zeros(3, np.int64), np.zeros(3, np.int64), np.array([0, 20, 5]), np.array([9, 30, 25])
    )
    assert len(set(numbers.tolist())) == 1
