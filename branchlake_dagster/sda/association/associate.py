"""Associate observations with catalog objects: candidates, fits of passes, assignment, single observations.

Each observation is compared with the prediction of an object, by the squared Mahalanobis distance: the
squared difference in units of its standard deviations. The gate is the largest such distance at which an
observation can belong to the object. Each observation gets one of four results:

- ``confirmed``: The observation belongs to the object that it claims.
- ``reassigned``: It belongs to an object other than the claimed one, which fits clearly better. Or its track
  has no object, and it fits an object of which the same sensor has another track.
- ``claimed``: It claims an object without a usable prediction, so the claim could not be tested. The claim is
  kept, unless the observation fits an object of which the same sensor has a track: then the observation is
  reassigned.
- ``uncorrelated``: It belongs to no object. Either several objects fit about equally well (the reason
  `ambiguous`), or it was not assigned for another reason (`outside_gate`): for example, no object is within
  the gate, or a value is missing.

The claim of an observation is the catalog number that its source states: links between satellites name their
partner, and laser stations their target. An observation without such a number claims the object to which its
local track was assigned.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.association.assignment import assign_tracks, number_passes
from branchlake_dagster.sda.association.candidates import find_candidates
from branchlake_dagster.sda.association.passes import PassFits, fit_passes
from branchlake_dagster.sda.association.predictions import (
    PairModel,
    PredictedCatalog,
    Rows,
    model_pairs,
    solve_distances,
)
from branchlake_dagster.sda.association.rules import AssociationRules
from branchlake_dagster.sda.estimation.batch import Observations
from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.sensors.models import MAX_RANGE_KM, MeasurementModel

_BATCH_PAIRS = 100_000
_NO_NUMBER = -1
"""Catalog number of an observation without claim or without object."""


class Result(IntEnum):
    """The result of an association. Tables store its name in lower case."""

    CLAIMED = 0
    CONFIRMED = 1
    REASSIGNED = 2
    UNCORRELATED = 3


class Reason(IntEnum):
    """Why an observation is uncorrelated. Tables store its name in lower case, and null for `NONE`."""

    NONE = 0
    OUTSIDE_GATE = 1
    AMBIGUOUS = 2


RESULT_NAMES = tuple(result.name.lower() for result in Result)
REASON_NAMES = tuple(reason.name.lower() for reason in Reason)


@dataclass(frozen=True)
class TrackedObservations:
    """Observations of any number of sensors in one window, n rows.

    ``measured`` has the measurements; its ``row`` is the local track, 0 to tracks - 1. All observations of a
    track have the same ``sensor`` (n,) and the same kind. ``claimed_sat_no`` (n,) is -1 for observations
    without a claim. ``clock_sigma_s`` (n,) is one standard deviation of the sensor's clock.
    """

    measured: Observations
    sensor: Rows
    claimed_sat_no: Rows
    clock_sigma_s: Floats

    def __len__(self) -> int:
        return len(self.sensor)


@dataclass(frozen=True)
class Associations:
    """The results of n observations.

    ``sat_no`` (n,) is the object's catalog number, or -1. ``distance`` (n,) is the normalized distance (the
    square root of the squared Mahalanobis distance) of the single observation from the prediction of that
    object; NaN without a tested object. ``degrees_of_freedom`` (n,) is the number of measured values.
    ``candidates`` (n,) is the number of objects within the gate. ``result`` and ``reason`` (n,) are codes of
    `Result` and `Reason`.
    """

    sat_no: Rows
    result: npt.NDArray[np.int8]
    reason: npt.NDArray[np.int8]
    distance: Floats
    degrees_of_freedom: Rows
    candidates: Rows


def associate(
    catalog: PredictedCatalog, observations: TrackedObservations, rules: AssociationRules | None = None
) -> Associations:
    """Associate the observations of a window with the objects of a catalog.

    The assignment is made per sensor. The result of an observation does not depend on the order of the rows,
    nor on observations of other sensors; only rows of the same instant, sensor and track must always come in
    the same order. Observations with missing values or uncertainties are not compared with any object.

    Memory: a few hundred bytes for each observation and each pair within the gate, one batch of pairs, and
    the catalog's ephemeris (the objects' positions over the window).
    """
    rules = rules or AssociationRules()
    count = len(observations)
    claimed_rows = catalog.usable_rows(observations.claimed_sat_no)
    is_untested = (observations.claimed_sat_no != _NO_NUMBER) & (claimed_rows < 0)
    widths = observations.measured.widths
    is_complete = _has_all_values(observations.measured, widths)
    found = _Found.empty(count)
    for kind in range(len(observations.measured.models)):
        rows = np.flatnonzero((observations.measured.kind == kind) & is_complete)
        if len(rows):
            _associate_kind(catalog, observations, claimed_rows, is_untested, rows, kind, rules, found)
    claim = np.where(
        observations.claimed_sat_no != _NO_NUMBER, observations.claimed_sat_no, found.track_sat_no
    )
    result = np.full(count, Result.REASSIGNED, np.int8)
    result[found.sat_no == claim] = Result.CONFIRMED
    result[found.sat_no == _NO_NUMBER] = Result.UNCORRELATED
    stands = is_untested & (found.sat_no == _NO_NUMBER)
    result[stands] = Result.CLAIMED
    is_ambiguous = found.is_ambiguous & (result == Result.UNCORRELATED)
    reason = np.where(
        is_ambiguous, Reason.AMBIGUOUS, np.where(result == Result.UNCORRELATED, Reason.OUTSIDE_GATE, 0)
    )
    return Associations(
        np.where(stands, observations.claimed_sat_no, found.sat_no),
        result,
        reason.astype(np.int8),
        np.sqrt(found.distance),
        widths,
        found.candidates,
    )


def _has_all_values(measured: Observations, widths: Rows) -> npt.NDArray[np.bool_]:
    """Return which observations (n,) have all values of their kind, with positive uncertainties.

    Positions beyond `MAX_RANGE_KM` do not count as values: the search for neighbors would overflow.
    """
    is_used = np.arange(measured.values.shape[1]) < widths[:, None]
    is_valid = np.abs(measured.values) < MAX_RANGE_KM
    is_valid &= np.isfinite(measured.sigma) & (measured.sigma > 0)
    return np.asarray((is_valid | ~is_used).all(axis=1))


@dataclass(frozen=True)
class _Found:
    """The object of each observation (n,), filled kind by kind."""

    sat_no: Rows
    track_sat_no: Rows
    is_ambiguous: npt.NDArray[np.bool_]
    distance: Floats
    candidates: Rows

    @classmethod
    def empty(cls, count: int) -> _Found:
        return cls(
            np.full(count, _NO_NUMBER),
            np.full(count, _NO_NUMBER),
            np.zeros(count, np.bool_),
            np.full(count, np.nan),
            np.zeros(count, np.int64),
        )


@dataclass(frozen=True)
class _Pairs:
    """The pairs of observations and objects within the gate, sorted by track, object and observation."""

    observation: Rows
    object_row: Rows
    track: Rows
    model: PairModel
    distance: Floats

    def take(self, rows: Rows) -> _Pairs:
        """Return the given pairs."""
        return _Pairs(
            self.observation[rows],
            self.object_row[rows],
            self.track[rows],
            self.model.take(rows),
            self.distance[rows],
        )


def _associate_kind(
    catalog: PredictedCatalog,
    observations: TrackedObservations,
    claimed_rows: Rows,
    is_untested: npt.NDArray[np.bool_],
    rows: Rows,
    kind: int,
    rules: AssociationRules,
    found: _Found,
) -> None:
    """Associate the observations `rows`, all of one kind, and write the results to ``found``.

    Observations whose claim cannot be tested take no part in the assignment of tracks.
    """
    pairs = _pairs_within_gate(catalog, observations, claimed_rows, rows, kind, rules)
    found.candidates[rows] = np.bincount(pairs.observation, minlength=len(observations))[rows]
    if not len(pairs.observation):
        return
    track_of_row = observations.measured.row
    tracks = int(track_of_row.max()) + 1
    all_pairs, pairs = pairs, pairs.take(np.flatnonzero(~is_untested[pairs.observation]))
    rows = rows[~is_untested[rows]]
    if not len(pairs.observation):
        return
    track_size = np.bincount(track_of_row[rows], minlength=tracks)
    fits = fit_passes(
        pairs.model,
        pairs.track,
        pairs.object_row,
        _track_references(observations, rows, tracks),
        rules,
    )
    track_claim = _track_claims(track_of_row[rows], claimed_rows[rows], tracks)
    track_sensor = np.zeros(tracks, np.int64)
    track_sensor[track_of_row[rows]] = observations.sensor[rows]
    measurement = observations.measured.models[kind]
    chosen, is_ambiguous = _choose_fits(fits, track_size, track_claim, track_sensor, measurement, rules)
    track_object = np.where(chosen >= 0, fits.object_row[chosen], -1)
    sat_no = catalog.elements.sat_no
    assigned = np.flatnonzero(track_object[track_of_row[rows]] >= 0)
    found.track_sat_no[rows[assigned]] = sat_no[track_object[track_of_row[rows[assigned]]]]
    found.is_ambiguous[rows] = is_ambiguous[track_of_row[rows]]
    is_used = fits.is_member & (chosen[pairs.track] == fits.group)
    _write(found, pairs, np.flatnonzero(is_used), sat_no)
    is_stray = found.sat_no[all_pairs.observation] == _NO_NUMBER
    strays = all_pairs.take(np.flatnonzero(is_stray))
    _associate_strays(strays, observations.sensor, fits, chosen, track_sensor, rules, found, sat_no)


def _write(found: _Found, pairs: _Pairs, pair_rows: Rows, sat_no: Rows) -> None:
    rows = pairs.observation[pair_rows]
    found.sat_no[rows] = sat_no[pairs.object_row[pair_rows]]
    found.distance[rows] = pairs.distance[pair_rows]


def _pairs_within_gate(
    catalog: PredictedCatalog,
    observations: TrackedObservations,
    claimed_rows: Rows,
    rows: Rows,
    kind: int,
    rules: AssociationRules,
) -> _Pairs:
    measured, clock = observations.measured, observations.clock_sigma_s
    width = measured.models[kind].width
    gate = float(rules.gate(width))
    parts: list[tuple[Rows, Rows, PairModel, Floats]] = []
    waiting: list[tuple[Rows, Rows]] = []

    def flush() -> None:
        if not waiting:
            return
        pair = np.concatenate([p[0] for p in waiting]), np.concatenate([p[1] for p in waiting])
        waiting.clear()
        for begin in range(0, len(pair[0]), _BATCH_PAIRS):
            batch = pair[0][begin : begin + _BATCH_PAIRS], pair[1][begin : begin + _BATCH_PAIRS]
            model = model_pairs(
                catalog,
                measured,
                clock,
                batch,
                kind,
                sigma_factor=rules.sigma_factor,
                independent_share=rules.independent_share,
            )
            distance = model.own_distances()
            keep = np.flatnonzero(distance <= gate)
            parts.append((batch[0][keep], batch[1][keep], model.take(keep), distance[keep]))

    size = 0
    for candidate in find_candidates(
        catalog,
        measured,
        clock,
        rows,
        kind,
        claimed_rows=claimed_rows,
        reach=rules.reach,
        sigma_factor=rules.sigma_factor,
    ):
        waiting.append(candidate)
        size += len(candidate[0])
        if size >= _BATCH_PAIRS:
            flush()
            size = 0
    flush()
    if not parts:
        nothing = np.zeros(0, np.int64)
        return _Pairs(nothing, nothing, nothing, _empty_model(width), np.zeros(0))
    observation, object_row = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
    distance = np.concatenate([part[3] for part in parts])
    track = measured.row[observation]
    order = np.lexsort((observation, measured.stations.micros[observation], object_row, track))
    model = PairModel.concatenate([part[2] for part in parts]).take(order)
    return _Pairs(observation[order], object_row[order], track[order], model, distance[order])


def _empty_model(width: int) -> PairModel:
    m = width
    shapes = ((m,), (m, 6), (6,), (m,), (m, m), (), (6,), (), ())
    return PairModel(*(np.zeros((0, *shape)) for shape in shapes))


def _track_references(observations: TrackedObservations, rows: Rows, tracks: int) -> Rows:
    """Return the median time (tracks,) of each track. A few wrong track numbers hardly move a median."""
    track, micros = observations.measured.row[rows], observations.measured.stations.micros[rows]
    order = np.lexsort((micros, track))
    counts = np.bincount(track, minlength=tracks)
    ends = np.cumsum(counts)
    middle = np.minimum(ends - counts + counts // 2, len(rows) - 1)
    return np.asarray(np.where(counts > 0, micros[order][middle], 0))


def _track_claims(track: Rows, claimed_rows: Rows, tracks: int) -> Rows:
    """Return the object row (tracks,) that most observations of a track claim, or -1.

    If several objects have equally many claims, the one with the lower catalog number is returned.
    """
    claims = np.full(tracks, -1)
    claiming = np.flatnonzero(claimed_rows >= 0)
    if len(claiming):
        unique, counts = np.unique(
            np.stack([track[claiming], claimed_rows[claiming]]), axis=1, return_counts=True
        )
        order = np.lexsort((unique[1], -counts, unique[0]))
        first = order[np.unique(unique[0][order], return_index=True)[1]]
        claims[unique[0][first]] = unique[1][first]
    return claims


def _choose_fits(
    fits: PassFits,
    track_size: Rows,
    track_claim: Rows,
    track_sensor: Rows,
    measurement: MeasurementModel,
    rules: AssociationRules,
) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """Choose the fit (tracks,) of each track, or -1, and report which tracks (tracks,) are ambiguous.

    The gain of a fit is the logarithm of the ratio of two likelihoods. In the first hypothesis the members of
    the fit belong to the object and the other observations of the track are strays. In the second all are
    false measurements. A claimed object gets an additional gain of a clear margin, so that another object is
    chosen only if it fits clearly better.
    """
    width = measurement.width
    size = track_size[fits.track]
    is_option = fits.is_within_gate & (fits.members >= rules.min_track_share * size) & (fits.members > 0)
    volume_cost = 2 * np.log(measurement.clutter_volume)
    gain = (
        fits.members * (volume_cost - width * np.log(2 * np.pi) + 2 * np.log(1 - rules.stray_share))
        + (size - fits.members) * 2 * np.log(rules.stray_share)
        - fits.distance
        - fits.log_det
    )
    is_claim = track_claim[fits.track] == fits.object_row
    is_option &= is_claim | (np.abs(fits.in_track_km) <= rules.max_in_track_km)
    gain = gain + np.where(is_claim, rules.clear_margin, 0.0)
    options = np.flatnonzero(is_option & (gain > 0))
    # Numbers of passes are ordered by sensor, object and time, so ties go to the lower catalog number.
    target = number_passes(
        track_sensor[fits.track[options]],
        fits.object_row[options],
        fits.first_micros[options],
        fits.last_micros[options],
    )
    assignment = assign_tracks(fits.track[options], target, gain[options], len(track_size))
    has_option = assignment.option >= 0
    chosen = np.full(len(track_size), -1)
    chosen[has_option] = options[assignment.option[has_option]]
    is_confirmed_claim = has_option & is_claim[chosen]
    is_ambiguous = has_option & ~is_confirmed_claim & (assignment.margin < rules.clear_margin)
    chosen[is_ambiguous] = -1
    return chosen, is_ambiguous


def _associate_strays(
    strays: _Pairs,
    sensor: Rows,
    fits: PassFits,
    chosen: Rows,
    track_sensor: Rows,
    rules: AssociationRules,
    found: _Found,
    sat_no: Rows,
) -> None:
    """Associate observations that do not belong to their track's object one by one; write to ``found``.

    An object is considered only if the same sensor has a track of it. That track has corrected the object's
    prediction, which is then accurate enough for a single observation.
    """
    own, fit = _nearest_fits(
        fits, chosen, track_sensor, sensor[strays.observation], strays.object_row, strays.model.micros
    )
    if not len(own):
        return
    strays = strays.take(own)
    model = strays.model
    design = model.design(fits.reference_micros[fit])
    residual = model.residual - np.einsum("kmp,kp->km", design, fits.estimate[fit])
    distance, log_det = solve_distances(model.total_covariance(design, fits.covariance[fit]), residual)
    within = np.flatnonzero(distance <= rules.gate(model.residual.shape[1]))
    if not len(within):
        return
    observation, cost = strays.observation[within], (distance + log_det)[within]
    order = np.lexsort((strays.object_row[within], cost, observation))
    starts = np.flatnonzero(np.diff(observation[order], prepend=-1))
    best = order[starts]
    next_cost = np.append(cost[order], np.inf)[starts + 1]
    has_second = np.diff(np.append(starts, len(order))) > 1
    is_clear = ~has_second | (next_cost - cost[best] >= rules.clear_margin)
    found.is_ambiguous[observation[best]] = ~is_clear
    _write(found, strays, within[best[is_clear]], sat_no)


def _nearest_fits(
    fits: PassFits, chosen: Rows, track_sensor: Rows, sensor: Rows, object_row: Rows, micros: Rows
) -> tuple[Rows, Rows]:
    """Find, for pairs (k,), the chosen fit of the same sensor and object that is nearest in time.

    Returns the rows of the pairs for which such a fit exists, and these fits.
    """
    used = chosen[chosen >= 0]
    if not len(used) or not len(object_row):
        return used[:0], used[:0]
    keys = np.stack([track_sensor[fits.track[used]], fits.object_row[used]])
    order = np.lexsort((fits.track[used], fits.reference_micros[used], keys[1], keys[0]))
    used, keys = used[order], keys[:, order]
    # One key per sensor and object, in the order of both.
    span = int(max(keys[1].max(), object_row.max())) + 1
    code, wanted = keys[0] * span + keys[1], sensor * span + object_row
    low, high = np.searchsorted(code, wanted, "left"), np.searchsorted(code, wanted, "right")
    own = np.flatnonzero(high > low)
    counts = (high - low)[own]
    index = (
        np.repeat(low[own], counts) + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    )
    pair = np.repeat(np.arange(len(own)), counts)
    apart = np.abs(fits.reference_micros[used[index]] - np.repeat(micros[own], counts))
    by_distance = np.lexsort((index, apart, pair))
    first = by_distance[np.unique(pair[by_distance], return_index=True)[1]]
    return own, used[index[first]]
