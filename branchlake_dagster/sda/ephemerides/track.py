"""Convert a segment of an ephemeris to polynomials of time, one between two consecutive states, in TEME.

Each polynomial is the interpolation that the segment declares, through the states around it: of positions and
velocities (Hermite), or of positions alone (Lagrange, linear). Its derivative is the velocity. It is stored
as coefficients of u, which runs from 0 to 1 between the two states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.messages.errors import UnreadableMessage
from branchlake_dagster.sda.messages.oem import Method, Segment, time_of
from branchlake_dagster.sda.orbits.frames import Floats, Micros
from branchlake_dagster.sda.orbits.inertial import Frame, rotate_to_frame

MAX_ACCELERATION_KM_S2 = 0.1
"""The largest acceleration of an accepted interpolation: ten times free fall at the Earth's surface.

An interpolation with a larger one oscillates, because the states do not suit its degree.
"""
_AT_ONCE = 10_000
"""The number of polynomials that are computed together. It bounds the memory."""


@dataclass(frozen=True)
class Track:
    """An object's interpolated positions: a sequence of n polynomials of time without gaps.

    ``knots`` (n + 1,) are UTC microseconds; the track is valid between the first and the last of them. Each
    polynomial counts time from ``origins`` (n,) in units of ``lengths`` (n,) s, and has ``coefficients`` (n,
    m, 3) of the powers of u, km. It is used for u from 0 to 1.
    """

    knots: Micros
    origins: Micros
    lengths: Floats
    coefficients: Floats

    @property
    def begin(self) -> int:
        """The first instant, UTC microseconds."""
        return int(self.knots[0])

    @property
    def end(self) -> int:
        """The last instant, UTC microseconds."""
        return int(self.knots[-1])

    @classmethod
    def from_segment(cls, segment: Segment) -> Track:
        """Interpolate the usable time of a segment.

        Raises:
            UnreadableMessage: The states cannot be interpolated as the segment declares.
        """
        first = max(0, int(np.searchsorted(segment.micros, segment.begin, side="right")) - 1)
        last = min(len(segment.micros) - 1, int(np.searchsorted(segment.micros, segment.end, side="left")))
        position, velocity = (
            rotate_to_frame(one, segment.micros, segment.frame, Frame.TEME)
            for one in (segment.position, segment.velocity)
        )
        pieces = np.arange(first, last)
        count = segment.points
        starts = np.clip(pieces - (count - 1) // 2, 0, len(segment.micros) - count)
        with_velocity = segment.method is Method.HERMITE
        parts = [
            _interpolants(
                segment.micros,
                position,
                velocity if with_velocity else None,
                pieces[k : k + _AT_ONCE],
                starts[k : k + _AT_ONCE],
                count,
            )
            for k in range(0, len(pieces), _AT_ONCE)
        ]
        origins = segment.micros[pieces]
        knots = np.concatenate([[segment.begin], origins[1:], [segment.end]])
        lengths = (segment.micros[pieces + 1] - origins) / 1e6
        found = cls(knots, origins, lengths, np.concatenate(parts))
        bound, _, _ = found.bounds()
        # The comparison is negated so that NaN counts as too large.
        wild = np.flatnonzero(~(bound <= MAX_ACCELERATION_KM_S2))
        if len(wild):
            raise UnreadableMessage(
                f"The ephemeris of {segment.object_name} cannot be interpolated as it says from "
                f"{time_of(int(origins[wild[0]])):%Y-%m-%dT%H:%M:%S} on: {segment.method} of degree "
                f"{segment.degree} swings by {float(bound[wild[0]]):.3g} km/s².",
                hint="Give states that are evenly spaced, or a lower degree.",
                reason="interpolation",
                subject=segment.object_name,
            )
        return found

    def at(self, micros: Micros) -> tuple[Floats, Floats]:
        """Return position (km) and velocity (km/s), both (k, 3), at instants (k,).

        Outside of the track it is NaN.
        """
        piece = np.clip(np.searchsorted(self.knots, micros, side="right") - 1, 0, len(self.lengths) - 1)
        position, velocity = self._evaluate_piece(piece, micros)
        outside = (micros < self.begin) | (micros > self.end)
        position[outside], velocity[outside] = np.nan, np.nan
        return position, velocity

    def _evaluate_piece(self, piece: npt.NDArray[np.int64], micros: Micros) -> tuple[Floats, Floats]:
        h = self.lengths[piece][:, None]
        u = ((micros - self.origins[piece]) / 1e6)[:, None] / h
        position, velocity = np.zeros((len(micros), 3)), np.zeros((len(micros), 3))
        for power in reversed(range(self.coefficients.shape[1])):
            velocity = velocity * u + position
            position = position * u + self.coefficients[piece, power]
        return position, velocity / h

    def bounds(self) -> tuple[Floats, Floats, Floats]:
        """Return upper bounds of each polynomial's acceleration (n,), km/s², and the jumps at its end.

        The jumps (n,) are those of position (km) and velocity (km/s) to the next polynomial. The second
        derivative of a polynomial lies within the convex hull of its Bernstein coefficients, so it is nowhere
        longer than the longest of them.
        """
        degree = self.coefficients.shape[1] - 1
        bound = np.zeros(len(self.lengths))
        second = [(j + 2) * (j + 1) * self.coefficients[:, j + 2] for j in range(degree - 1)]
        for k in range(degree - 1):
            bernstein = np.sum([comb(k, j) / comb(degree - 2, j) * second[j] for j in range(k + 1)], axis=0)
            bound = np.maximum(bound, np.linalg.norm(bernstein, axis=1) / self.lengths**2)
        pieces = np.arange(len(bound) - 1)
        before, after = (self._evaluate_piece(one, self.knots[1:-1]) for one in (pieces, pieces + 1))
        jumps = [np.append(np.linalg.norm(b - a, axis=1), 0.0) for a, b in zip(before, after, strict=True)]
        return bound, jumps[0], jumps[1]


def tracks_of(segments: Sequence[Segment]) -> list[Track]:
    """Convert segments of one object, ordered by time, to tracks. Segments that touch become one track."""
    found: list[Track] = []
    for segment in segments:
        track = Track.from_segment(segment)
        if found and found[-1].end == track.begin:
            track = _join_tracks(found.pop(), track)
        found.append(track)
    return found


def _join_tracks(first: Track, second: Track) -> Track:
    terms = max(one.coefficients.shape[1] for one in (first, second))
    padded = (
        np.pad(one.coefficients, ((0, 0), (0, terms - one.coefficients.shape[1]), (0, 0)))
        for one in (first, second)
    )
    return Track(
        np.concatenate([first.knots, second.knots[1:]]),
        np.concatenate([first.origins, second.origins]),
        np.concatenate([first.lengths, second.lengths]),
        np.concatenate(list(padded)),
    )


def _interpolants(
    micros: Micros,
    position: Floats,
    velocity: Floats | None,
    pieces: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    count: int,
) -> Floats:
    """Return coefficients (p, m, 3) of polynomials, each through ``count`` states from its start."""
    rows = starts[:, None] + np.arange(count)
    begin = micros[pieces]
    h = (micros[pieces + 1] - begin) / 1e6
    # The variable runs from -1 to 1 over the states used. Powers of u would lose precision by rounding.
    low, high = (micros[rows[:, k]] - begin for k in (0, -1))
    middle, half = (low + high) / 2e6, (high - low) / 2e6
    w = ((micros[rows] - begin[:, None]) / 1e6 - middle[:, None]) / half[:, None]
    origin = position[pieces]
    values = position[rows] - origin[:, None]
    terms = count * (1 if velocity is None else 2)
    powers = np.arange(terms)
    system = w[..., None] ** powers
    if velocity is not None:
        slope = powers * w[..., None] ** np.maximum(powers - 1, 0)
        system = np.concatenate([system, slope], axis=1)
        values = np.concatenate([values, velocity[rows] * half[:, None, None]], axis=1)
    try:
        found = np.linalg.solve(system, values)
    except np.linalg.LinAlgError:
        # Two of the states have nearly the same time.
        found = np.full((len(pieces), terms, 3), np.nan)
    # w = a + b u
    a, b = -middle / half, h / half
    shifted = np.zeros_like(found)
    for i in range(terms):
        for j in range(i + 1):
            shifted[:, j] += (comb(i, j) * a ** (i - j) * b**j)[:, None] * found[:, i]
    shifted[:, 0] += origin
    return shifted
