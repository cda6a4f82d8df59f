"""Assign local tracks to objects: the assignment of a whole window with the least total cost.

A local track is a group of observations that the sensor itself took for one object. A sensor cannot see an
object twice at the same time. So at most one of several tracks of a sensor that overlap in time can belong to
an object. Tracks that share no candidate object, directly or through other tracks, are independent: each such
component is solved by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from branchlake_dagster.sda.association.predictions import Rows
from branchlake_dagster.sda.orbits.frames import Floats, Micros

_TIE_STEP = 1e-9
"""A cost that is added per target number, so that the lower number wins between equal gains."""
_FORBIDDEN = 1e12


@dataclass(frozen=True)
class Assignment:
    """The chosen option of each track, where an option is a pair of a track and a target.

    ``option`` (tracks,) is the index of the chosen option, or -1. ``margin`` (tracks,) is how much more the
    best assignment would cost without that option; it is infinite for tracks without an option.
    """

    option: Rows
    margin: Floats


def number_passes(sensor: Rows, object_row: Rows, first_micros: Micros, last_micros: Micros) -> Rows:
    """Number the passes of objects over sensors.

    An option is a pair of a track and an object to which the track may belong. Options of one sensor and
    object that overlap in time, directly or through others, are one pass and get the same number (k,).
    Numbers are ordered by sensor, object and time.

    Args:
        sensor: (k,) The sensor of each option.
        object_row: (k,) The object of each option.
        first_micros: (k,) The time of the first observation of each option, microseconds.
        last_micros: (k,) The time of the last observation of each option.
    """
    order = np.lexsort((last_micros, first_micros, object_row, sensor))
    key_changes = np.ones(len(order), np.bool_)
    key_changes[1:] = (np.diff(sensor[order]) != 0) | (np.diff(object_row[order]) != 0)
    # Within a key, a pass ends where a start is later than all earlier ends. Keys are shifted apart, so that
    # one running maximum serves all of them.
    key = np.cumsum(key_changes) - 1
    origin = int(first_micros.min()) if len(order) else 0
    span = int(last_micros.max()) - origin + 2 if len(order) else 1
    start = first_micros[order] - origin + key * span
    end = np.maximum.accumulate(last_micros[order] - origin + key * span)
    begins = np.ones(len(order), np.bool_)
    begins[1:] = start[1:] > end[:-1]
    numbers = np.zeros(len(order), np.int64)
    numbers[order] = np.cumsum(begins) - 1
    return numbers


def assign_tracks(track: Rows, target: Rows, gain: Floats, tracks: int) -> Assignment:
    """Choose options so that their total gain is largest.

    Each track and each target is used at most once. A track may stay without an option, with a gain of zero.

    Args:
        track: (k,) The track of each option, 0 to tracks - 1.
        target: (k,) The target of each option. At equal gains the lower number is chosen.
        gain: (k,) The gain of each option. Every gain must be positive.
        tracks: The number of tracks.
    """
    option, margin = np.full(tracks, -1), np.full(tracks, np.inf)
    if not len(track):
        return Assignment(option, margin)
    _, column = np.unique(target, return_inverse=True)
    nodes = tracks + int(column.max()) + 1
    graph = coo_array((np.ones(len(track)), (track, tracks + column)), shape=(nodes, nodes))
    component = connected_components(graph, directed=False)[1][track]
    order = np.lexsort((target, track, component))
    starts = np.flatnonzero(np.diff(component[order], prepend=-1))
    sizes = np.diff(np.append(starts, len(order)))
    alone = order[starts[sizes == 1]]
    option[track[alone]], margin[track[alone]] = alone, gain[alone]
    for begin, size in zip(starts[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
        _assign_component(order[begin : begin + size], track, target, gain, option, margin)
    return Assignment(option, margin)


def _assign_component(
    options: Rows, track: Rows, target: Rows, gain: Floats, option: Rows, margin: Floats
) -> None:
    """Solve one component. Write the results of its tracks to ``option`` and ``margin``."""
    row_tracks, row = np.unique(track[options], return_inverse=True)
    column_targets, column = np.unique(target[options], return_inverse=True)
    height, width = len(row_tracks), len(column_targets)
    # Each track may also stay unassigned, in a column of its own.
    cost = np.full((height, width + height), _FORBIDDEN)
    cost[row, column] = _TIE_STEP * column - gain[options]
    cost[np.arange(height), width + np.arange(height)] = 0.0
    option_at = np.full((height, width), -1)
    option_at[row, column] = options
    chosen = linear_sum_assignment(cost)[1]
    best = cost[np.arange(height), chosen].sum()
    for one in range(height):
        if chosen[one] < width:
            option[row_tracks[one]] = option_at[one, chosen[one]]
            restricted = cost.copy()
            restricted[one, chosen[one]] = _FORBIDDEN
            margin[row_tracks[one]] = restricted[linear_sum_assignment(restricted)].sum() - best
