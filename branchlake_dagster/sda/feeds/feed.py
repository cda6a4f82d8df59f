"""Simulate the messages of a sensor network for a catalog of objects, window after window.

Geometry, noise and true orbits come from `sensors.simulate`. The feed determines how many measurements are
made and when: at each instant a sensor measures one of the objects that it sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from branchlake_dagster.sda.feeds.damage import encode_with_damage
from branchlake_dagster.sda.feeds.plan import Batch, Plan, Tally
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.sensors.native import NATIVE_COLUMNS
from branchlake_dagster.sda.sensors.network import ALLOWED_LATENESS_S, Noise, Tasking
from branchlake_dagster.sda.sensors.simulate import (
    STEP_S,
    Scene,
    isl_links,
    measured_by_link,
    measured_by_radar,
    measured_by_telescope,
    seen_by_radars,
    seen_by_telescopes,
)

Rows = npt.NDArray[np.int64]

WINDOW_S = round(STEP_S)
"""The length of a window, s. Which sensor sees which object is computed once per window."""

_RELEASE_S = 5.0
"""The interval, in seconds, at which a telescope's site releases its measurements."""


class Feed:
    """The messages of the simulated network from an instant on.

    Args:
        elements: The element sets of the objects, sorted by ``sat_no``.
        plan: Rates, duration and faults.
        start_ns: The first instant, nanoseconds since 1970 UTC.
    """

    def __init__(self, elements: Elements, plan: Plan, start_ns: int) -> None:
        self.elements, self.plan, self.start_ns = elements, plan, start_ns
        self.tallies = {kind: Tally() for kind in plan.rates}
        self._late = {kind: Batch.empty() for kind in plan.rates}
        # The fraction of a measurement that is still due, so that rates below one per second are met.
        self._owed = dict.fromkeys(plan.rates, 0.0)

    def windows(self) -> Iterator[tuple[int, dict[str, Batch]]]:
        """Yield for each window its end (ns since 1970), and by kind the messages to send before that.

        A last window has the late messages, which are sent after the end.
        """
        seconds = self.plan.seconds
        number = 0
        while seconds is None or number * WINDOW_S < seconds:
            begin = number * WINDOW_S
            length = WINDOW_S if seconds is None else min(WINDOW_S, seconds - begin)
            end_ns = self.start_ns + round((begin + length) * 1e9)
            yield end_ns, {kind: self._window(kind, begin, length, end_ns) for kind in self.plan.rates}
            number += 1
        last = max((int(late.send_ns[-1]) for late in self._late.values() if len(late)), default=0)
        if last:
            late, self._late = self._late, {kind: Batch.empty() for kind in self.plan.rates}
            yield last + 1, late

    def _window(self, kind: str, begin: float, length: float, end_ns: int) -> Batch:
        times = self._times(kind, begin, length)
        start = (self.start_ns // 1_000) + round(begin * 1e6)
        scene = Scene(
            self.elements, start, start + WINDOW_S * 1_000_000, seed=self.plan.seed, kind=f"feed-{kind}"
        )
        native = _simulate_measurements(scene, kind, start + times)
        made = self._make_batch(kind, native, scene.rng) if native.height else Batch.empty()
        both = Batch.concatenate([self._late[kind], made])
        now = int(np.searchsorted(both.send_ns, end_ns))
        rows = np.arange(len(both))
        self._late[kind] = both.take(rows[now:])
        return both.take(rows[:now])

    def _times(self, kind: str, begin: float, length: float) -> Rows:
        """Return the times of a window's measurements, microseconds after its start, in order."""
        found = []
        for second in np.arange(0, length, 1.0):
            part = min(1.0, length - second)
            factor = self.plan.burst.factors(np.array([begin + second]))[0]
            self._owed[kind] += self.plan.rates[kind] * factor * part
            number = int(self._owed[kind])
            self._owed[kind] -= number
            # Measurements are spread evenly, so that each part of a second has the demanded rate.
            found.append((second + (np.arange(number) + 0.5) / max(number, 1) * part) * 1e6)
        return np.concatenate(found).astype(np.int64)

    def _make_batch(self, kind: str, native: pl.DataFrame, rng: np.random.Generator) -> Batch:
        """Return the messages to send, some of them late, duplicated or damaged as the plan demands."""
        number, plan, tally = native.height, self.plan, self.tallies[kind]
        drawn = rng.random((number, 2))
        damaged = np.flatnonzero(drawn[:, 0] < plan.corrupted)
        twice = np.flatnonzero(
            (drawn[:, 0] >= plan.corrupted) & (drawn[:, 0] < plan.corrupted + plan.duplicates)
        )
        straggling = np.flatnonzero(drawn[:, 1] < plan.stragglers)
        measured = native["timestamp_ns"].to_numpy()
        send = measured + _delays(kind, measured, rng)
        latest = round(ALLOWED_LATENESS_S[kind] * 1e9)
        send[straggling] = (
            measured[straggling] + latest + (rng.random(len(straggling)) * latest).astype(np.int64)
        )
        values, reasons = encode_with_damage(kind, native, damaged, rng)
        again = send[twice] + (rng.random(len(twice)) * 1e9).astype(np.int64)
        sensor = native["orig_sensor_id"].str.extract(r"(\d+)$").cast(pl.Int64).to_numpy()
        tally.measured += number
        tally.duplicates += len(twice)
        tally.stragglers += len(straggling)
        tally.corrupted.update(reasons)
        rows = np.concatenate([np.arange(number), twice])
        whole = Batch(send, measured, values, sensor).take(rows)
        send = np.concatenate([send, again])
        order = np.argsort(send, kind="stable")
        return Batch(send, whole.measured_ns, whole.values, whole.sensor).take(order)


def _delays(kind: str, measured: Rows, rng: np.random.Generator) -> Rows:
    """Return the time from measurement to sending, ns.

    Radars have random delays, so that messages arrive in another order. All links have the same delay.
    """
    if kind == "radar":
        latest = ALLOWED_LATENESS_S[kind]
        return (np.minimum(rng.exponential(latest / 5, len(measured)), latest) * 1e9).astype(np.int64)
    if kind == "optical":
        release = round(_RELEASE_S * 1e9)
        return release - measured % release
    return np.full(len(measured), 50_000_000)


def _simulate_measurements(scene: Scene, kind: str, micros: Rows) -> pl.DataFrame:
    """Return measurements at the given times, sorted by time. Each is of an object that a sensor sees."""
    noise, rng = Noise(), scene.rng
    parts: list[dict[str, Any]] = []
    if kind == "isl":
        observers, partners = isl_links(scene, scene.start, Tasking())
        if len(observers):
            link = rng.integers(0, len(observers), len(micros))
            parts = [measured_by_link(scene, observers[link], partners[link], micros, noise, scene.start)]
    else:
        seeing, measure = (
            (seen_by_radars, measured_by_radar)
            if kind == "radar"
            else (seen_by_telescopes, measured_by_telescope)
        )
        seen = [(site, np.flatnonzero(found.any(axis=1))) for site, found in seeing(scene)]
        seen = [(site, rows) for site, rows in seen if len(rows)]
        for number, (site, rows) in enumerate(seen):
            site_micros = micros[number :: len(seen)]
            if len(site_micros):
                parts.append(
                    measure(
                        scene, site, rows[rng.integers(0, len(rows), len(site_micros))], site_micros, noise
                    )
                )
    return _frame(parts)


def _frame(parts: Sequence[dict[str, Any]]) -> pl.DataFrame:
    frames = [pl.DataFrame(part) for part in parts]
    wanted = {name: NATIVE_COLUMNS[name] for name in NATIVE_COLUMNS if frames and name in frames[0].columns}
    if not frames:
        return pl.DataFrame(schema=NATIVE_COLUMNS)
    return pl.concat(frame.select(pl.col(n).cast(k) for n, k in wanted.items()) for frame in frames).sort(
        "timestamp_ns", maintain_order=True
    )
