"""Fit the observations of a local track to each object that the track may belong to.

All observations of a pass (the time in which an object crosses a sensor's field of view) share the errors of
the prediction. A sum of the single observations' distances would count these errors once per observation. So
the shared errors are estimated as parameters with a prior, and the distance of the track is computed from all
its measurements under their joint covariance (by the Woodbury identity).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from branchlake_dagster.sda.association.predictions import IN_TRACK, PARAMETERS, Flags, PairModel, Rows
from branchlake_dagster.sda.association.rules import AssociationRules
from branchlake_dagster.sda.orbits.frames import Floats, Micros


@dataclass(frozen=True)
class PassFits:
    """The fits of g passes: a fit treats a local track as observations of one object.

    ``track`` and ``object_row`` (g,) identify a fit; fits are sorted by both. ``group`` (k,) is the fit of
    each pair of an observation and an object. ``is_member`` (k,) is false for pairs that were removed because
    they do not fit the others. ``reference_micros`` (g,) is the reference time. ``estimate`` (g, 6) and
    ``covariance`` (g, 6, 6) are the shared parameters in units of their standard deviations. ``distance``
    (g,) is the squared distance of the members, ``log_det`` (g,) the log determinant of its covariance, and
    ``members`` (g,) the number of members. ``in_track_km`` (g,) is the estimated error along the track.
    ``first_micros`` and ``last_micros`` (g,) are the times of the first and the last member.
    ``is_within_gate`` (g,) is true if ``distance`` is within the gate.
    """

    track: Rows
    object_row: Rows
    group: Rows
    is_member: Flags
    reference_micros: Micros
    estimate: Floats
    covariance: Floats
    distance: Floats
    log_det: Floats
    members: Rows
    in_track_km: Floats
    first_micros: Micros
    last_micros: Micros
    is_within_gate: Flags


def fit_passes(
    model: PairModel,
    pair_track: Rows,
    pair_object: Rows,
    track_reference_micros: Micros,
    rules: AssociationRules,
) -> PassFits:
    """Fit every combination of a track and an object that occurs among the pairs.

    A fit outside its gate loses its worst pair, up to ``rules.max_removal_rounds`` times.

    Args:
        model: The measurement model of the k pairs, sorted by track and object.
        pair_track: (k,) The track of each pair.
        pair_object: (k,) The object row of each pair.
        track_reference_micros: (tracks,) The reference time of each track.
        rules: The gate and the number of removals.
    """
    is_start = np.ones(len(pair_track), np.bool_)
    is_start[1:] = (np.diff(pair_track) != 0) | (np.diff(pair_object) != 0)
    starts = np.flatnonzero(is_start)
    group = np.cumsum(is_start) - 1
    track, object_row = pair_track[starts], pair_object[starts]
    reference = track_reference_micros[track]
    width = model.residual.shape[1]
    design = model.design(reference[group])
    weighted = np.swapaxes(design, 1, 2) @ model.weight
    information = weighted @ design
    projected = np.einsum("kpm,km->kp", weighted, model.residual)
    own_square = np.einsum("km,kmn,kn->k", model.residual, model.weight, model.residual)
    is_member = np.ones(len(pair_track), np.bool_)
    for rounds in range(rules.max_removal_rounds + 1):
        mask = is_member.astype(np.float64)
        normal = np.eye(PARAMETERS) + _sum_groups(information * mask[:, None, None], starts)
        right = _sum_groups(projected * mask[:, None], starts)
        covariance = np.asarray(np.linalg.inv(normal), np.float64)
        estimate = np.einsum("gpq,gq->gp", covariance, right)
        distance = _sum_groups(own_square * mask, starts) - np.sum(right * estimate, axis=1)
        members = np.add.reduceat(is_member.astype(np.int64), starts)
        is_within_gate = distance <= rules.gate(np.maximum(members, 1) * width)
        shrinks = ~is_within_gate & (members > 1)
        if rounds == rules.max_removal_rounds or not shrinks.any():
            break
        is_member &= ~_worst_members(model, design, estimate, group, is_member, starts, shrinks)
    log_det = _sum_groups(model.noise_log_det * mask, starts) + np.linalg.slogdet(normal)[1]
    far = np.iinfo(np.int64).max
    return PassFits(
        track,
        object_row,
        group,
        is_member,
        reference,
        estimate,
        covariance,
        distance,
        log_det,
        members,
        estimate[:, IN_TRACK] * model.scale[starts, IN_TRACK],
        np.minimum.reduceat(np.where(is_member, model.micros, far), starts),
        np.maximum.reduceat(np.where(is_member, model.micros, -far), starts),
        is_within_gate,
    )


def _worst_members(
    model: PairModel,
    design: Floats,
    estimate: Floats,
    group: Rows,
    is_member: Flags,
    starts: Rows,
    shrinks: Flags,
) -> Flags:
    """Mark the worst member (k,) of each group (g,) for which ``shrinks`` is true.

    The worst member has the largest distance from the estimate by all members. At equal distances it is the
    first pair.
    """
    left = model.residual - np.einsum("kmp,kp->km", design, estimate[group])
    size = np.einsum("km,kmn,kn->k", left, model.weight, left)
    size = np.where(is_member & shrinks[group], size, -np.inf)
    largest = np.maximum.reduceat(size, starts)
    rows = np.flatnonzero(np.isfinite(size) & (size == largest[group]))
    is_worst = np.zeros(len(group), np.bool_)
    is_worst[rows[np.unique(group[rows], return_index=True)[1]]] = True
    return is_worst


def _sum_groups(values: Floats, starts: Rows) -> Floats:
    return np.asarray(np.add.reduceat(values, starts, axis=0))
