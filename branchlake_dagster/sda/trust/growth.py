"""Error against age as figures: by class of orbit from robust statistics, by object as a factor on its class.

In a class the error along an axis is what 68.27 % of the absolute differences of an age do not exceed: one
sigma if they were Gaussian, and of the middle of the distribution only, whatever its tail is. To the ages
a curve is fitted that cannot fall, ``sigma0 + rate * age^power``, by relative least squares. An object's
factor is the same quantile of its own differences over its class's curve, drawn towards one as far as it has
few of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.trust.classes import CLASSES, OWN_CLASSES, WIDER, OrbitClass
from branchlake_dagster.sda.trust.differences import MAX_AGE_DAYS, MIN_AGE_DAYS

AXES = ("r", "t", "n", "a", "i")
"""Radial, transverse, normal, km; semi-major axis, km; inclination, degrees."""
EDGES_DAYS = (MIN_AGE_DAYS, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 14.0, MAX_AGE_DAYS)
BINS = len(EDGES_DAYS) - 1
ONE_SIGMA = 0.682_689_492
MIN_SAMPLES = 60
"""Of a bin, or it is not used."""
MIN_BINS = 4
"""Of a class, or it takes the figures of the wider one."""
SHRINK_SAMPLES = 8
"""With so many differences an object's factor is half its own."""
MAX_FACTOR = 20.0
MAX_SIGMA_KM = 500.0
"""Along the track. Beyond it the arc bends away from its tangent by 18 km in low orbit, and an ellipsoid says
nothing of a position any more: the class's curve ends there."""
_POWERS = np.arange(0.25, 3.01, 0.05)
_FLOORS = np.array([0.005, 0.02, 0.005, 1e-4, 1e-5])
"""Below it no element set is right: five metres, the resolution of the lines along the track."""


@dataclass(frozen=True)
class Growth:
    """Curves by class and axis, the classes in the order of `CLASSES`, the axes in that of `AXES`.

    ``sigma0``, ``rate``, ``power`` (c, 5): NaN where there are none. ``taken_from`` (c,) the class that the
    figures are of, -1: none. ``until_days`` (c,) the oldest age with samples. ``count`` (c, b) and ``sigma``,
    ``p95``, ``median`` (c, b, 5) are the statistics by age; NaN where there are too few samples.
    """

    sigma0: Floats
    rate: Floats
    power: Floats
    taken_from: npt.NDArray[np.int64]
    until_days: Floats
    count: npt.NDArray[np.int64]
    age_days: Floats
    sigma: Floats
    p95: Floats
    median: Floats

    def at(self, classes: npt.NDArray[np.int64], age_days: Floats) -> Floats:
        """One sigma of each axis (k, 5) of objects of these classes at these ages; NaN where unknown."""
        return curve(
            self.sigma0[classes], self.rate[classes], self.power[classes], self.until_days[classes], age_days
        )


def curve(sigma0: Floats, rate: Floats, power: Floats, until_days: Floats, age_days: Floats) -> Floats:
    """``sigma0 + rate * age^power`` of k curves with any number of axes; NaN at ages beyond ``until_days``.

    An instant before the epoch is as uncertain as one that is as long after it.
    """
    age = np.abs(age_days)[:, None]
    known = age <= np.maximum(until_days, 0.0)[:, None]
    return np.asarray(np.where(known, sigma0 + rate * age**power, np.nan))


def growth(
    classes: npt.NDArray[np.int64], age_days: Floats, values: Floats, *, max_sigma_km: float = MAX_SIGMA_KM
) -> Growth:
    """Curves of differences: their classes (k,), ages (k,) and values (k, 5)."""
    n, axes = len(CLASSES), values.shape[1]
    count = np.zeros((n, BINS), np.int64)
    age = np.full((n, BINS), np.nan)
    sigma, p95, median = (np.full((n, BINS, axes), np.nan) for _ in range(3))
    bins = np.digitize(age_days, EDGES_DAYS) - 1
    for code, name in enumerate(CLASSES):
        mine = members(name)[classes]
        for one in range(BINS):
            rows = np.flatnonzero(mine & (bins == one))
            count[code, one] = len(rows)
            if len(rows) >= MIN_SAMPLES:
                size = np.abs(values[rows])
                age[code, one] = np.median(age_days[rows])
                sigma[code, one], p95[code, one] = np.quantile(size, [ONE_SIGMA, 0.95], axis=0)
                median[code, one] = np.median(values[rows], axis=0)
    fitted = np.full((3, n, axes), np.nan)
    until = np.zeros(n)
    taken = np.full(n, -1)
    for code in range(n):
        told = np.isfinite(age[code]) & (np.nan_to_num(sigma[code, :, 1]) <= max_sigma_km)
        # Of ages one after the other: what comes after one that tells nothing is left out.
        last = np.flatnonzero(np.isfinite(age[code]) & ~told)
        used = np.flatnonzero(told[: last[0]] if len(last) else told)
        if len(used) >= MIN_BINS:
            taken[code], until[code] = code, EDGES_DAYS[used[-1] + 1]
            for axis in range(axes):
                fitted[:, code, axis] = fit(age[code, used], sigma[code, used, axis], _FLOORS[axis])
    for code, name in reversed(list(enumerate(CLASSES))):
        if taken[code] < 0 and name in WIDER:
            wider = CLASSES.index(WIDER[name])
            taken[code], until[code], fitted[:, code] = taken[wider], until[wider], fitted[:, wider]
    return Growth(fitted[0], fitted[1], fitted[2], taken, until, count, age, sigma, p95, median)


def members(name: OrbitClass) -> npt.NDArray[np.bool_]:
    """Which classes (c,), as an object's own, a class consists of."""
    inside = np.zeros(len(CLASSES), np.bool_)
    for code, one in enumerate(OWN_CLASSES):
        inside[code] = name in (one, WIDER[one], OrbitClass.ALL)
    return inside


def fit(age_days: Floats, sigma: Floats, floor: float = 0.0) -> tuple[float, float, float]:
    """``sigma0 >= floor``, ``rate >= 0`` and ``power`` with the least squares of the relative residuals."""
    y = np.maximum(sigma, max(floor, 1e-12))
    best = (np.inf, 0.0, 0.0, 1.0)
    for power in _POWERS:
        a, b = 1 / y, age_days**power / y
        # The best inside, if it is inside; else one of the best on the two edges.
        inside = _both(a, b)
        at_floor = max(0.0, float(b @ (1 - a * floor) / (b @ b)))
        candidates = [(floor, at_floor), (max(floor, float(a.sum() / (a @ a))), 0.0)]
        if inside[0] >= floor and inside[1] >= 0:
            candidates.append(inside)
        for sigma0, rate in candidates:
            rest = float(np.sum((a * sigma0 + b * rate - 1) ** 2))
            if rest < best[0]:
                best = (rest, sigma0, rate, float(power))
    return best[1:]


def _both(a: Floats, b: Floats) -> tuple[float, float]:
    """The coefficients x, y of the least squares of ``a x + b y = 1``."""
    aa, ab, bb = a @ a, a @ b, b @ b
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:
        return -1.0, -1.0
    x, y = bb * a.sum() - ab * b.sum(), aa * b.sum() - ab * a.sum()
    return float(x / determinant), float(y / determinant)


def object_factors(
    owner: npt.NDArray[np.int64], count: int, ratio: Floats, quantile: float = ONE_SIGMA
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Samples (count,) and factors (count, 5) of objects, from absolute differences over their class's sigma.

    Args:
        owner: (k,) each difference's object, 0 to count - 1.
        count: objects.
        ratio: (k, 5) NaN where the class has no curve.
        quantile: of an object's ratios that its class's curve stands for.

    """
    good = np.isfinite(ratio).all(axis=1)
    owner, ratio = owner[good], ratio[good]
    samples = np.bincount(owner, minlength=count)
    ends = np.cumsum(samples)
    place = (ends - samples) + quantile * np.maximum(samples - 1, 0)
    some = samples > 0
    factors = np.ones((count, ratio.shape[1]))
    for axis in range(ratio.shape[1]):
        ordered = ratio[np.lexsort((ratio[:, axis], owner)), axis]
        low = np.floor(place[some]).astype(np.int64)
        high = np.minimum(low + 1, ends[some] - 1)
        share = place[some] - low
        factors[some, axis] = ordered[low] * (1 - share) + ordered[high] * share
    trust = samples / (samples + SHRINK_SAMPLES)
    clipped = np.clip(factors, 1 / MAX_FACTOR, MAX_FACTOR)
    return samples, np.asarray(clipped ** trust[:, None])
