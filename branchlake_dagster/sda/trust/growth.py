"""Fit curves of the error against age for each orbit class, and a factor on them for each object.

The error of a class along an axis at some age is the 68.27 % quantile of the absolute differences. For a
Gaussian distribution this is one standard deviation (sigma), and outliers do not change it. A curve that
cannot decrease, ``sigma0 + rate * age^power``, is fitted to the ages by relative least squares. The factor of
an object is the same quantile of its own differences divided by the curve of its class. The fewer differences
an object has, the closer its factor is to one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.trust.classes import CLASSES, OWN_CLASSES, WIDER_CLASS, OrbitClass
from branchlake_dagster.sda.trust.differences import MAX_AGE_DAYS, MIN_AGE_DAYS

AXES = ("r", "t", "n", "a", "i")
"""The axes of errors: radial, transverse, normal (km), semi-major axis (km) and inclination (degrees)."""
AGE_EDGES_DAYS = (MIN_AGE_DAYS, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 14.0, MAX_AGE_DAYS)
AGE_BINS = len(AGE_EDGES_DAYS) - 1
ONE_SIGMA_QUANTILE = 0.682_689_492
MIN_SAMPLES = 60
"""Age bins with fewer samples are not used."""
MIN_BINS = 4
"""Classes with fewer used bins take the figures of a wider class."""
SHRINK_SAMPLES = 8
"""With this number of differences the weight of an object's own factor is one half."""
MAX_FACTOR = 20.0
MAX_SIGMA_KM = 500.0
"""Maximum error along the track at which a class's curve ends. At 500 km in low orbit the arc deviates from
its tangent by 18 km, so an ellipsoid no longer describes the position."""
_POWERS = np.arange(0.25, 3.01, 0.05)
_MIN_SIGMA0 = np.array([0.005, 0.02, 0.005, 1e-4, 1e-5])
"""Minimum errors by axis: five meters, and along the track the resolution of TLEs."""


@dataclass(frozen=True)
class BinStatistics:
    """Statistics of differences by class (c, in the order of `CLASSES`), age bin (b) and axis (as in `AXES`).

    ``count`` and ``age_days`` are (c, b); ``sigma``, ``p95`` and ``median`` are (c, b, 5). All but ``count``
    are NaN where there are too few samples.
    """

    count: npt.NDArray[np.int64]
    age_days: Floats
    sigma: Floats
    p95: Floats
    median: Floats

    @classmethod
    def without_samples(cls) -> BinStatistics:
        """Return the statistics of no differences, to be filled in."""
        shape = (len(CLASSES), AGE_BINS)
        return cls(
            np.zeros(shape, np.int64),
            np.full(shape, np.nan),
            *(np.full((*shape, len(AXES)), np.nan) for _ in range(3)),
        )


@dataclass(frozen=True)
class ErrorGrowth:
    """Error curves by class (c, in the order of `CLASSES`) and axis (5, as in `AXES`), and their statistics.

    ``sigma0``, ``rate`` and ``power`` (c, 5) are the curves, NaN if unknown. ``source_class`` (c,) is the
    index of the class with the samples of the curve, or -1. ``until_days`` (c,) is the maximum age of the
    curve.
    """

    sigma0: Floats
    rate: Floats
    power: Floats
    source_class: npt.NDArray[np.int64]
    until_days: Floats
    statistics: BinStatistics

    def sigma_at(self, classes: npt.NDArray[np.int64], age_days: Floats) -> Floats:
        """Return one sigma of each axis (k, 5) for objects of these classes and ages; NaN where unknown."""
        return evaluate_curve(
            self.sigma0[classes], self.rate[classes], self.power[classes], self.until_days[classes], age_days
        )


def evaluate_curve(
    sigma0: Floats, rate: Floats, power: Floats, until_days: Floats, age_days: Floats
) -> Floats:
    """Evaluate ``sigma0 + rate * age^power`` of k curves; the result is NaN at ages above ``until_days``.

    A negative age, of an instant before the epoch, is as uncertain as the same age after the epoch.
    """
    age = np.abs(age_days)[:, None]
    is_covered = age <= np.maximum(until_days, 0.0)[:, None]
    return np.asarray(np.where(is_covered, sigma0 + rate * age**power, np.nan))


def find_age_bins(age_days: Floats) -> npt.NDArray[np.int64]:
    """Return the index of the age bin (k,) of each age between `MIN_AGE_DAYS` and `MAX_AGE_DAYS`."""
    return np.asarray(np.digitize(age_days, AGE_EDGES_DAYS) - 1, np.int64)


def summarize_bins(classes: npt.NDArray[np.int64], age_days: Floats, values: Floats) -> BinStatistics:
    """Summarize differences of element sets by class and age bin.

    The statistics of a bin depend on the differences of this bin only, in any order.

    Args:
        classes: (k,) The orbit class of each difference, an index of `CLASSES`.
        age_days: (k,) The age of the older set, days.
        values: (k, 5) The differences along `AXES`.
    """
    statistics = BinStatistics.without_samples()
    bins = find_age_bins(age_days)
    for age_bin in range(AGE_BINS):
        in_bin = np.flatnonzero(bins == age_bin)
        for code, name in enumerate(CLASSES):
            rows = in_bin[member_classes(name)[classes[in_bin]]]
            statistics.count[code, age_bin] = len(rows)
            if len(rows) >= MIN_SAMPLES:
                magnitude = np.abs(values[rows])
                statistics.age_days[code, age_bin] = np.median(age_days[rows])
                statistics.sigma[code, age_bin], statistics.p95[code, age_bin] = np.quantile(
                    magnitude, [ONE_SIGMA_QUANTILE, 0.95], axis=0
                )
                statistics.median[code, age_bin] = np.median(values[rows], axis=0)
    return statistics


def fit_growth(statistics: BinStatistics, *, max_sigma_km: float = MAX_SIGMA_KM) -> ErrorGrowth:
    """Fit curves of the error against age to the statistics of all classes.

    Args:
        statistics: The statistics of all bins.
        max_sigma_km: A curve ends before the age at which the error along the track exceeds this value.
    """
    n, axes = len(CLASSES), len(AXES)
    age, sigma = statistics.age_days, statistics.sigma
    curve_parameters = np.full((3, n, axes), np.nan)
    until_days = np.zeros(n)
    source_class = np.full(n, -1)
    for code in range(n):
        is_usable = np.isfinite(age[code]) & (np.nan_to_num(sigma[code, :, 1]) <= max_sigma_km)
        # The used bins are contiguous in age: all bins after the first unusable one are left out.
        unusable_bins = np.flatnonzero(np.isfinite(age[code]) & ~is_usable)
        used_bins = np.flatnonzero(is_usable[: unusable_bins[0]] if len(unusable_bins) else is_usable)
        if len(used_bins) >= MIN_BINS:
            source_class[code], until_days[code] = code, AGE_EDGES_DAYS[used_bins[-1] + 1]
            for axis in range(axes):
                curve_parameters[:, code, axis] = fit_curve(
                    age[code, used_bins], sigma[code, used_bins, axis], _MIN_SIGMA0[axis]
                )
    for code, name in reversed(list(enumerate(CLASSES))):
        if source_class[code] < 0 and name in WIDER_CLASS:
            wider = CLASSES.index(WIDER_CLASS[name])
            source_class[code], until_days[code], curve_parameters[:, code] = (
                source_class[wider],
                until_days[wider],
                curve_parameters[:, wider],
            )
    sigma0, rate, power = curve_parameters
    return ErrorGrowth(sigma0, rate, power, source_class, until_days, statistics)


def member_classes(name: OrbitClass) -> npt.NDArray[np.bool_]:
    """Return which of `CLASSES` (c,) belong to this class. Only classes in `OWN_CLASSES` are marked."""
    is_member = np.zeros(len(CLASSES), np.bool_)
    for code, own_class in enumerate(OWN_CLASSES):
        is_member[code] = name in (own_class, WIDER_CLASS[own_class], OrbitClass.ALL)
    return is_member


def fit_curve(age_days: Floats, sigma: Floats, min_sigma0: float = 0.0) -> tuple[float, float, float]:
    """Fit the curve ``sigma0 + rate * age^power`` by least squares of relative residuals.

    Args:
        age_days: (b,) Ages, days.
        sigma: (b,) Errors at these ages.
        min_sigma0: The lower limit of ``sigma0``. ``rate`` is never negative.

    Returns:
        ``sigma0``, ``rate`` and ``power``.
    """
    y = np.maximum(sigma, max(min_sigma0, 1e-12))
    best = (np.inf, 0.0, 0.0, 1.0)
    for power in _POWERS:
        a, b = 1 / y, age_days**power / y
        # The optimum is the unconstrained one if it is feasible, else the better one on the two bounds.
        interior = _solve_normal_equations(a, b)
        rate_at_min = max(0.0, float(b @ (1 - a * min_sigma0) / (b @ b)))
        candidates = [(min_sigma0, rate_at_min), (max(min_sigma0, float(a.sum() / (a @ a))), 0.0)]
        if interior[0] >= min_sigma0 and interior[1] >= 0:
            candidates.append(interior)
        for sigma0, rate in candidates:
            residual = float(np.sum((a * sigma0 + b * rate - 1) ** 2))
            if residual < best[0]:
                best = (residual, sigma0, rate, float(power))
    return best[1:]


def _solve_normal_equations(a: Floats, b: Floats) -> tuple[float, float]:
    """Solve ``a x + b y = 1`` for x and y by least squares; return -1, -1 if the system is singular."""
    aa, ab, bb = a @ a, a @ b, b @ b
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:
        return -1.0, -1.0
    x, y = bb * a.sum() - ab * b.sum(), aa * b.sum() - ab * a.sum()
    return float(x / determinant), float(y / determinant)


def object_factors(
    object_index: npt.NDArray[np.int64], count: int, ratio: Floats, quantile: float = ONE_SIGMA_QUANTILE
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Compute each object's number of samples (count,) and its factors (count, 5) on its class's curves.

    Args:
        object_index: (k,) the object of each difference, 0 to count - 1.
        count: the number of objects.
        ratio: (k, 5) absolute difference divided by the class's sigma; NaN where the class has no curve.
        quantile: the quantile of an object's ratios that corresponds to the curve of its class.

    """
    is_valid = np.isfinite(ratio).all(axis=1)
    object_index, ratio = object_index[is_valid], ratio[is_valid]
    samples = np.bincount(object_index, minlength=count)
    first = np.cumsum(samples) - samples
    has_samples = samples > 0
    # Positions count from each object's first ratio, so that rounding does not depend on the other objects.
    position = quantile * (samples[has_samples] - 1)
    low = np.floor(position).astype(np.int64)
    upper_weight = position - low
    low_row = first[has_samples] + low
    high_row = first[has_samples] + np.minimum(low + 1, samples[has_samples] - 1)
    factors = np.ones((count, ratio.shape[1]))
    for axis in range(ratio.shape[1]):
        ordered = ratio[np.lexsort((ratio[:, axis], object_index)), axis]
        factors[has_samples, axis] = ordered[low_row] * (1 - upper_weight) + ordered[high_row] * upper_weight
    own_weight = samples / (samples + SHRINK_SAMPLES)
    bounded_factors = np.clip(factors, 1 / MAX_FACTOR, MAX_FACTOR)
    return samples, np.asarray(bounded_factors ** own_weight[:, None])
