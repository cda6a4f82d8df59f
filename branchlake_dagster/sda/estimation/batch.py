"""Weighted least squares on native measurements, for many objects at once.

For each object the unknown is the offset (km, km/s, TEME) of its true state from the catalogue's at one
epoch, the middle of the window. The two-body transition matrix carries the offset from the epoch to each
measurement; Gauss-Newton iterates on the measurement equations themselves (Tapley, Schutz and Born,
Statistical Orbit Determination, section 4.3). No a-priori information enters: an object that its
measurements do not determine gets no estimate, rather than one that repeats an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import Elements, propagate_satellites, time_grid
from branchlake_dagster.sda.orbits.two_body import transition_matrices
from branchlake_dagster.sda.sensors.measurement import Stations, wrap
from branchlake_dagster.sda.sensors.models import MAX_WIDTH, MeasurementModel

REFERENCE_STEP_S = 30.0
ITERATIONS = 5
MIN_OBSERVATIONS = 3
MAX_POSITION_SIGMA_KM = 20.0
"""A wider estimate says less than the element set it would correct."""

_RCOND = 1e-12


@dataclass(frozen=True)
class Observations:
    """Measurements sorted by object, n rows: values and standard deviations (n, 6) in km, km/s and rad.

    ``kind`` is the index of a row's model in ``models``; columns beyond its width are ignored. ``row`` is the
    index of the object.
    """

    row: npt.NDArray[np.int64]
    kind: npt.NDArray[np.int64]
    values: Floats
    sigma: Floats
    stations: Stations
    models: tuple[MeasurementModel, ...]

    @property
    def widths(self) -> npt.NDArray[np.int64]:
        """The number of measured values (n,) of each row."""
        return np.array([model.width for model in self.models], np.int64)[self.kind]


@dataclass(frozen=True)
class Tracks:
    """Estimates of the determined objects, k rows; ``row`` is the index of the object.

    States (k, 3) and covariance (k, 6, 6) are TEME at the epoch, km and km/s; the covariance is the formal
    one, from the stated sensor noise alone. ``offset`` (k, 6) is the state minus the catalogue's and
    ``offset_ric`` (k, 3) its position part along radial, in-track and cross-track. ``counts`` (k, kinds) are
    the observations of each kind.
    """

    row: npt.NDArray[np.int64]
    position: Floats
    velocity: Floats
    covariance: Floats
    offset: Floats
    offset_ric: Floats
    counts: npt.NDArray[np.int64]
    measurements: npt.NDArray[np.int64]
    chi2_per_dof: Floats


def estimate(elements: Elements, observations: Observations, *, start: int, end: int) -> Tracks:
    """Estimate every object of ``elements`` that ``observations`` determine.

    Args:
        elements: one element set per object, the reference trajectories.
        observations: sorted by ``row``, which indexes ``elements``.
        start: window start, UTC microseconds since 1970; all measurements lie within the window.
        end: window end.

    """
    objects = len(elements)
    row, micros = observations.row, observations.stations.micros
    margin = round(REFERENCE_STEP_S * 1e6)
    reference = propagate_satellites(
        elements.to_satrec_array(), time_grid(start - margin, end + margin, REFERENCE_STEP_S)
    )
    epoch = (start + end) // 2
    everyone = np.arange(objects)
    epoch_r, epoch_v = reference.interpolate(everyone, np.full(objects, epoch))
    counts = np.zeros((objects, len(observations.models)), np.int64)
    np.add.at(counts, (row, observations.kind), 1)
    usable = reference.valid.all(axis=1) & (counts.sum(axis=1) >= MIN_OBSERVATIONS)
    # Objects without a reference stay in the arrays with weight zero, so that indices need no mapping.
    here = usable[row]
    at_r, at_v = reference.interpolate(row, micros)
    at_r[~here], at_v[~here] = [7000.0, 0.0, 0.0], [0.0, 7.5, 0.0]
    start_r = np.where(usable[:, None], epoch_r, [7000.0, 0.0, 0.0])
    start_v = np.where(usable[:, None], epoch_v, [0.0, 7.5, 0.0])
    mapping = transition_matrices(start_r[row], start_v[row], (micros - epoch) / 1e6)
    used = np.arange(MAX_WIDTH) < observations.widths[:, None]
    weight = np.where(used & here[:, None], 1 / np.where(used, observations.sigma, 1.0), 0.0)
    offset = np.zeros((objects, 6))
    for _ in range(ITERATIONS):
        residual, slope = _linearise(observations, at_r, at_v, mapping, offset)
        design = weight[:, :, None] * (slope @ mapping)
        normal = _sum_by(row, objects, np.swapaxes(design, 1, 2) @ design)
        right = _sum_by(row, objects, np.einsum("nij,ni->nj", design, weight * residual))
        covariance, determined = _invert(normal)
        offset = offset + np.einsum("nij,nj->ni", covariance, right)
        # A diverging object must not overflow the others' arithmetic.
        offset = np.clip(np.where(determined[:, None], offset, 0.0), -1e4, 1e4)
    residual, _ = _linearise(observations, at_r, at_v, mapping, offset)
    chi2 = _sum_by(row, objects, ((weight * residual) ** 2).sum(axis=1))
    total = _sum_by(row, objects, (weight > 0).sum(axis=1)).astype(np.int64)
    sigma_km = np.sqrt(np.trace(covariance[:, :3, :3], axis1=1, axis2=2))
    good = usable & determined & (total > 6) & (sigma_km < MAX_POSITION_SIGMA_KM)
    keep = np.flatnonzero(good)
    position, velocity = epoch_r[keep] + offset[keep, :3], epoch_v[keep] + offset[keep, 3:]
    return Tracks(
        row=keep,
        position=position,
        velocity=velocity,
        covariance=covariance[keep],
        offset=offset[keep],
        offset_ric=_radial_in_track_cross(epoch_r[keep], epoch_v[keep], offset[keep, :3]),
        counts=counts[keep],
        measurements=total[keep],
        chi2_per_dof=chi2[keep] / (total[keep] - 6),
    )


def _linearise(
    obs: Observations, at_r: Floats, at_v: Floats, mapping: Floats, offset: Floats
) -> tuple[Floats, Floats]:
    """Residuals (n, 6) and measurement slopes (n, 6, 6) at the reference plus the mapped offset."""
    moved = np.einsum("nij,nj->ni", mapping, offset[obs.row])
    r, v = at_r + moved[:, :3], at_v + moved[:, 3:]
    residual = np.zeros((len(r), MAX_WIDTH))
    slope = np.zeros((len(r), MAX_WIDTH, 6))
    for kind, model in enumerate(obs.models):
        rows = np.flatnonzero(obs.kind == kind)
        s = obs.stations
        where = Stations(s.lat_deg[rows], s.lon_deg[rows], s.alt_km[rows], s.micros[rows])
        expected, derivative = model.predict(r[rows], v[rows], where)
        difference = obs.values[rows, : model.width] - expected
        angles = list(model.direction or ())
        difference[:, angles] = wrap(difference[:, angles])
        residual[rows, : model.width] = difference
        slope[rows, : model.width] = derivative
    return residual, slope


def _sum_by(row: npt.NDArray[np.int64], objects: int, values: npt.NDArray[np.generic]) -> Floats:
    """Sums over each object's rows: (n, …) to (objects, …)."""
    total: Floats = np.zeros((objects, *values.shape[1:]), dtype=values.dtype)
    present, first = np.unique(row, return_index=True)
    if len(row):
        total[present] = np.add.reduceat(values, first, axis=0)
    return total


def _invert(normal: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Inverses (k, 6, 6) of normal matrices and which of them are well determined.

    Scaled to a unit diagonal first: positions and velocities differ by three orders of magnitude, which
    would look like ill-conditioning. Undetermined ones come back as zero.
    """
    diagonal = np.diagonal(normal, axis1=1, axis2=2)
    alive: npt.NDArray[np.bool_] = np.asarray((diagonal > 0).all(axis=1))
    scale = 1 / np.sqrt(np.where(alive[:, None], diagonal, 1.0))
    scaled = np.where(alive[:, None, None], normal * scale[:, :, None] * scale[:, None, :], np.eye(6))
    spectrum = np.linalg.eigvalsh(scaled)
    determined = alive & (spectrum[:, 0] > _RCOND * spectrum[:, -1])
    inverse = np.linalg.inv(np.where(determined[:, None, None], scaled, np.eye(6)))
    inverse = inverse * scale[:, :, None] * scale[:, None, :]
    return np.where(determined[:, None, None], inverse, 0.0), determined


def _radial_in_track_cross(position: Floats, velocity: Floats, offset: Floats) -> Floats:
    radial = position / np.linalg.norm(position, axis=1, keepdims=True)
    cross = np.cross(position, velocity)
    cross = cross / np.linalg.norm(cross, axis=1, keepdims=True)
    along = np.cross(cross, radial)
    return np.stack([np.sum(offset * axis, axis=1) for axis in (radial, along, cross)], axis=1)
