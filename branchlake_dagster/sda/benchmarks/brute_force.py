"""Find close approaches by brute force: the reference with which the screening is compared.

The module imports nothing else of this package. It reads GP files and computes states with the `sgp4` package
alone, at every tenth second. A k-d tree gives all pairs of objects that are near each other at such an
instant. If the distance of a pair has a minimum between two instants, Brent's method finds the root of the
range rate, with SGP4 evaluated at each iteration: no state is interpolated.

The kinds of events are those of the documentation (docs/space-conjunctions.md). Minutes are counted from the
start of the span:

- `together`: The pair is within the threshold at both ends of a minute. A pair has one such event for all of
  these minutes, with the closest moment in them.
- `encounter`: A minimum of the distance within the threshold, in a minute that is not `together`.
- `edge`: The pair is within the threshold and closest at the start or the end of the span.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Self

import numpy as np
import numpy.typing as npt
import polars as pl
from scipy.optimize import brentq
from scipy.spatial import KDTree
from sgp4 import omm
from sgp4.api import Satrec, SatrecArray, jday

_Vectors = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.int64]

STEP_S = 10.0
_STEPS_PER_MINUTE = 6
_STEPS_AT_ONCE = 60
"""The number of steps that are computed together.

It bounds the memory: 26,834 objects at 62 instants take 80 MB.
"""
_MAX_ACCELERATION_KM_S2 = 0.0105
"""An upper bound of an object's acceleration. Gravity at an altitude of zero is 0.0098 km/s²."""
_MARGIN_KM = 1.0
_ROOT_TOLERANCE_S = 1e-7
_MEASURES = ("time_s", "miss_km", "speed_km_s")

EVENT_SCHEMA = {
    "first": pl.Int64,
    "second": pl.Int64,
    "kind": pl.String,
    "time_s": pl.Float64,
    "miss_km": pl.Float64,
    "speed_km_s": pl.Float64,
    "minutes": pl.Int64,
}
"""Columns of events.

`first` and `second` are catalog numbers, first < second. `time_s` is in seconds after the start; `miss_km`
and `speed_km_s` are the distance and the relative speed at that time. `minutes` is the number of minutes
together, 0 for the other kinds.
"""


@dataclass(frozen=True)
class ReferenceCatalog:
    """SGP4 records, sorted by their catalog numbers (n,)."""

    numbers: _Indices
    records: tuple[Satrec, ...]

    def take(self, numbers: _Indices) -> ReferenceCatalog:
        """Return the records of the given catalog numbers."""
        rows = np.flatnonzero(np.isin(self.numbers, numbers))
        return ReferenceCatalog(self.numbers[rows], tuple(self.records[row] for row in rows.tolist()))


def read_reference_catalog(content: bytes) -> ReferenceCatalog:
    """Read a GP file: OMM in CSV, or TLE (two-line element sets) with or without names; plain or gzipped.

    If an object has several element sets, the newest is kept. Raises KeyError or ValueError for damaged
    records.
    """
    text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode()
    newest: dict[int, Satrec] = {}
    for number, record in _csv_records(text) if "NORAD_CAT_ID" in text[:2_000] else _tle_records(text):
        other = newest.get(number)
        if other is None or _epoch(other) < _epoch(record):
            newest[number] = record
    numbers = sorted(newest)
    return ReferenceCatalog(np.array(numbers, np.int64), tuple(newest[number] for number in numbers))


def _csv_records(text: str) -> Iterator[tuple[int, Satrec]]:
    for fields in csv.DictReader(io.StringIO(text)):
        record = Satrec()
        # A record's own field for the catalog number is too small for nine digits.
        omm.initialize(record, {**fields, "NORAD_CAT_ID": "0"})
        yield int(fields["NORAD_CAT_ID"]), record


def _tle_records(text: str) -> Iterator[tuple[int, Satrec]]:
    first_line = ""
    for line in text.splitlines():
        if line.startswith("1 "):
            first_line = line
        elif line.startswith("2 ") and first_line:
            record = Satrec.twoline2rv(first_line, line)
            yield int(record.satnum), record


def _epoch(record: Satrec) -> float:
    return float(record.jdsatepoch + record.jdsatepochF)


@dataclass(frozen=True)
class _Motion:
    """SGP4 states of n objects as functions of the seconds after the start."""

    records: tuple[Satrec, ...]
    julian_date: float
    offset_s: float

    @classmethod
    def from_start(cls, records: tuple[Satrec, ...], start: datetime) -> Self:
        midnight = start.replace(hour=0, minute=0, second=0, microsecond=0)
        julian_date, _ = jday(start.year, start.month, start.day, 0, 0, 0)
        return cls(records, julian_date, (start - midnight).total_seconds())

    def grid(self, steps: _Indices) -> tuple[_Vectors, _Vectors]:
        """Return positions and velocities (n, m, 3) at steps of the grid; NaN where SGP4 reports an error."""
        fraction = (self.offset_s + steps * STEP_S) / 86_400
        days = np.full(len(steps), self.julian_date)
        error, position, velocity = SatrecArray(self.records).sgp4(days, fraction)
        position[error != 0] = np.nan
        velocity[error != 0] = np.nan
        return position, velocity

    def relative(self, seconds: float, first: int, second: int) -> tuple[list[float], list[float]]:
        """Return the second object's position and velocity relative to the first."""
        fraction = (self.offset_s + seconds) / 86_400
        _, r1, v1 = self.records[first].sgp4(self.julian_date, fraction)
        _, r2, v2 = self.records[second].sgp4(self.julian_date, fraction)
        return [b - a for a, b in zip(r1, r2, strict=True)], [b - a for a, b in zip(v1, v2, strict=True)]

    def range_rate(self, seconds: float, first: int, second: int) -> float:
        """Return half the derivative of the squared distance, km²/s. A minimum has the value zero."""
        position, velocity = self.relative(seconds, first, second)
        return math.fsum(x * u for x, u in zip(position, velocity, strict=True))


def find_events(
    catalog: ReferenceCatalog,
    start: datetime,
    *,
    minutes: int,
    threshold_km: float,
    say: Callable[[str], None] = lambda _: None,
) -> pl.DataFrame:
    """Return all events (`EVENT_SCHEMA`) of all pairs, sorted by pair and time.

    Cost: 30 ms of one core for each step of ten seconds, with 26,834 objects.

    Args:
        catalog: The n objects. An object has no events at instants for which SGP4 reports an error.
        start: The beginning of the span, UTC, a whole minute.
        minutes: The length of the span.
        threshold_km: The largest distance of an event.
        say: Called with a line of progress for each hour of the span.
    """
    motion = _Motion.from_start(catalog.records, start)
    last_step = minutes * _STEPS_PER_MINUTE
    brackets = [np.zeros((0, 3), np.int64)]
    minute_ends = []
    for begin in range(0, last_step + 1, _STEPS_AT_ONCE):
        # One step more on both sides: a minimum is between a step and one of its neighbors.
        steps = np.arange(begin - 1, min(begin + _STEPS_AT_ONCE, last_step + 1) + 1)
        position, velocity = motion.grid(steps)
        for k in range(1, len(steps) - 1):
            around = [(position[:, k + shift], velocity[:, k + shift]) for shift in (-1, 0, 1)]
            pairs = _near_pairs(*around[1], threshold_km)
            brackets.append(_find_brackets(around, pairs, int(steps[k]), threshold_km))
            if steps[k] % _STEPS_PER_MINUTE == 0:
                minute_ends.append(_pairs_within(around[1], pairs, int(steps[k]), threshold_km))
        if begin and begin * STEP_S % 3_600 == 0:
            say(f"Brute force: {begin * STEP_S / 3_600:g} of {minutes / 60:g} hours")
    every_bracket = np.concatenate(brackets)
    inside = (every_bracket[:, 2] >= 0) & (every_bracket[:, 2] < last_step)
    minima = _find_minima(motion, np.unique(every_bracket[inside], axis=0), threshold_km)
    events = _classify(pl.concat(minute_ends), minima, minutes)
    numbers = pl.Series(catalog.numbers)
    return events.select(
        numbers[events["first"]].alias("first"),
        numbers[events["second"]].alias("second"),
        *list(EVENT_SCHEMA)[2:],
    ).sort("first", "second", "time_s")


def _near_pairs(position: _Vectors, velocity: _Vectors, threshold_km: float) -> _Indices:
    """Return the pairs (k, 2) that may come within the threshold less than half a step from an instant.

    `position` and `velocity` (n, 3) are the states at the instant. Objects with NaN are left out.
    """
    valid = np.flatnonzero(np.isfinite(position[:, 0]))
    if len(valid) < 2:
        return np.zeros((0, 2), np.int64)
    largest_speed = float(np.sqrt(np.max(np.sum(velocity[valid] ** 2, axis=1))))
    # Two objects approach each other by at most twice the largest speed in half a step.
    radius = threshold_km + largest_speed * STEP_S + _MARGIN_KM
    tree = KDTree(position[valid], balanced_tree=False, compact_nodes=False)
    pairs = tree.query_pairs(radius, output_type="ndarray")
    return np.sort(valid[pairs].reshape(-1, 2), axis=1)


def _relative(states: tuple[_Vectors, _Vectors], pairs: _Indices) -> tuple[_Vectors, _Vectors]:
    """Return relative positions and velocities (k, 3) of pairs (k, 2)."""
    position, velocity = (values[pairs[:, 1]] - values[pairs[:, 0]] for values in states)
    return position, velocity


def _dot(left: _Vectors, right: _Vectors) -> _Vectors:
    return np.asarray(np.einsum("ij,ij->i", left, right))


def _find_brackets(
    around: list[tuple[_Vectors, _Vectors]], pairs: _Indices, step: int, threshold_km: float
) -> _Indices:
    """Return rows (first, second, step) of pairs whose distance has a minimum between a step and the next.

    ``around`` holds the states at the step before, at this step and at the step after. Minima that are
    farther than half a step from this step may be left out, because the search at another step finds them.
    """
    half = STEP_S / 2
    position, velocity = _relative(around[1], pairs)
    time = np.clip(-_dot(position, velocity) / np.maximum(_dot(velocity, velocity), 1e-18), -half, half)
    # The distance of the true motion from the straight line: two accelerations over half a step.
    bend = _MAX_ACCELERATION_KM_S2 * half**2
    is_near = np.linalg.norm(position + velocity * time[:, None], axis=1) <= threshold_km + bend
    pairs = pairs[is_near]
    before, now, after = (_dot(*_relative(states, pairs)) for states in around)
    until_step, from_step = pairs[(before < 0) & (now >= 0)], pairs[(now < 0) & (after >= 0)]
    return np.concatenate([np.insert(until_step, 2, step - 1, axis=1), np.insert(from_step, 2, step, axis=1)])


def _pairs_within(
    states: tuple[_Vectors, _Vectors], pairs: _Indices, step: int, threshold_km: float
) -> pl.DataFrame:
    """Return the pairs within the threshold at the end of a minute, one row per pair.

    ``is_receding`` is true if the distance grows at that instant.
    """
    position, velocity = _relative(states, pairs)
    distance = np.linalg.norm(position, axis=1)
    within = distance <= threshold_km
    return pl.DataFrame(
        {
            "first": pairs[within, 0],
            "second": pairs[within, 1],
            "time_s": np.full(np.count_nonzero(within), step * STEP_S),
            "miss_km": distance[within],
            "speed_km_s": np.linalg.norm(velocity[within], axis=1),
            "is_receding": _dot(position, velocity)[within] >= 0,
            "minute": np.full(np.count_nonzero(within), step // _STEPS_PER_MINUTE, np.int64),
        }
    )


def _find_minima(motion: _Motion, brackets: _Indices, threshold_km: float) -> pl.DataFrame:
    """Return the minima of the distance that are within the threshold.

    The loop over pairs is intended: the reference uses the simplest method.
    """
    minima = []
    for first, second, step in brackets.tolist():
        low, high = step * STEP_S, (step + 1) * STEP_S
        time = low
        if motion.range_rate(low, first, second) < 0 <= motion.range_rate(high, first, second):
            time = brentq(motion.range_rate, low, high, args=(first, second), xtol=_ROOT_TOLERANCE_S)
        position, velocity = motion.relative(time, first, second)
        if math.hypot(*position) <= threshold_km:
            minima.append((first, second, time, math.hypot(*position), math.hypot(*velocity)))
    schema = {"first": pl.Int64, "second": pl.Int64, **dict.fromkeys(_MEASURES, pl.Float64)}
    frame = pl.DataFrame(minima, schema=schema, orient="row")
    return frame.with_columns(minute=(pl.col("time_s") // 60).cast(pl.Int64))


def _classify(minute_ends: pl.DataFrame, minima: pl.DataFrame, minutes: int) -> pl.DataFrame:
    """Derive the events of the three kinds. `first` and `second` are still rows of the catalog.

    Args:
        minute_ends: The pairs within the threshold at each whole minute (`_pairs_within`).
        minima: The minima of the distance within the threshold (`_find_minima`).
        minutes: The length of the span in minutes.
    """
    by_minute = ["first", "second", "minute"]
    begins = minute_ends.filter(pl.col("minute") < minutes)
    ends = minute_ends.with_columns(pl.col("minute") - 1)
    together = begins.join(ends.select(by_minute), on=by_minute, how="semi")
    moments = pl.concat(
        [
            one.join(together, on=by_minute, how="semi").select(*by_minute, *_MEASURES)
            for one in (begins, ends, minima)
        ]
    )
    spans = (
        moments.sort("miss_km", "time_s")
        .group_by("first", "second", maintain_order=True)
        .agg(pl.col(_MEASURES).first(), minutes=pl.col("minute").n_unique().cast(pl.Int64))
    )
    edges = pl.concat(
        [
            begins.filter(pl.col("minute") == 0, pl.col("is_receding")),
            ends.filter(pl.col("minute") == minutes - 1, ~pl.col("is_receding")),
        ]
    )
    return pl.concat(
        frame.select(
            "first", "second", pl.lit(kind).alias("kind"), *_MEASURES, length.cast(pl.Int64).alias("minutes")
        )
        for kind, frame, length in (
            ("together", spans, pl.col("minutes")),
            ("encounter", minima.join(together, on=by_minute, how="anti"), pl.lit(0)),
            ("edge", edges.join(together, on=by_minute, how="anti"), pl.lit(0)),
        )
    )
