"""Estimate states by weighted least squares on measurements, for many objects at once.

For each object the unknown is the offset (km, km/s, in TEME) of its true state from that of its element set
at one epoch, the middle of the window. The two-body transition matrix converts the offset at the epoch to an
offset at each measurement. Gauss-Newton iterates on the measurement equations (Tapley, Schutz and Born,
Statistical Orbit Determination, section 4.3).

The element set is the prior of the offset, with the error that is published for its age. An object whose
element set has an unknown error has no prior: it gets an estimate only if its measurements alone determine
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.estimation.editing import Rows, choose_observations, studentized_distances
from branchlake_dagster.sda.estimation.prior import ElementPrior, error_directions, prior_information
from branchlake_dagster.sda.orbits.frames import Floats, Micros
from branchlake_dagster.sda.orbits.propagation import Elements, Ephemeris, propagate_satellites, time_grid
from branchlake_dagster.sda.orbits.two_body import MU_KM3_S2, transition_matrices
from branchlake_dagster.sda.sensors.measurement import Stations, wrap_angle
from branchlake_dagster.sda.sensors.models import MAX_WIDTH, MeasurementModel

REFERENCE_STEP_S = 30.0
APPROACH_ITERATIONS = 3
"""Iterations that estimate the error along the track, before the reference is shifted by it."""
SETTLING_ITERATIONS = 2
EDITING_ROUNDS = 6
FINAL_ITERATIONS = 2
MIN_OBSERVATIONS = 3
"""The smallest number of used observations for objects without a prior."""
MAX_POSITION_SIGMA_KM = 20.0
"""The largest standard deviation of an estimate without a prior.

A less accurate estimate is worse than the element set.
"""
MAX_SHIFT_S = 120.0
"""The largest time by which the reference is shifted along the track."""

_SMALLEST_SIGMA = 1e-15
"""The smallest standard deviation that is used, in km, km/s or rad: squares of much smaller ones overflow."""
_RCOND = 1e-12


@dataclass(frozen=True)
class Observations:
    """Measurements sorted by object, n rows: values and standard deviations (n, 6) in km, km/s and rad.

    ``row`` (n,) is the index of the object. ``kind`` (n,) is the index of the row's model in ``models``;
    columns beyond the model's width are ignored. ``stations`` has the sensors' positions and the times.
    """

    row: Rows
    kind: Rows
    values: Floats
    sigma: Floats
    stations: Stations
    models: tuple[MeasurementModel, ...]

    @property
    def widths(self) -> Rows:
        """The number of measured values (n,) of each row."""
        return np.array([model.width for model in self.models], np.int64)[self.kind]


@dataclass(frozen=True)
class Tracks:
    """The estimates of k objects.

    ``row`` (k,) is the index of the object. ``position`` and ``velocity`` (k, 3) and ``covariance`` (k, 6, 6)
    are in TEME at the epoch, km and km/s; the covariance follows from the stated sensor noise and the prior.
    ``offset`` (k, 6) is the state minus that of the element set, and ``offset_ric`` (k, 3) its position along
    radial, in-track and cross-track. ``counts`` (k, kinds) are the used observations by kind,
    ``measurements`` (k,) their measured values, and ``edited`` (k,) the number of observations that were left
    out. ``chi2_per_dof`` (k,) includes the distance from the prior; ``weighted_rms`` (k,) does not.
    ``prior_sigma_km`` (k,) is one standard deviation of the element set's position, NaN if it is unknown.
    """

    row: Rows
    position: Floats
    velocity: Floats
    covariance: Floats
    offset: Floats
    offset_ric: Floats
    counts: Rows
    measurements: Rows
    edited: Rows
    chi2_per_dof: Floats
    weighted_rms: Floats
    prior_sigma_km: Floats


def estimate(
    elements: Elements,
    observations: Observations,
    *,
    start: int,
    end: int,
    prior: ElementPrior | None = None,
) -> Tracks:
    """Estimate the state of every object that its observations and the prior determine.

    Args:
        elements: One element set per object. Its trajectory is the reference of the object.
        observations: Observations sorted by ``row``, which indexes ``elements``.
        start: The start of the window, UTC microseconds since 1970. All measurements lie within the window.
        end: The end of the window.
        prior: The errors of the element sets. None means that they are unknown.
    """
    epoch = (start + end) // 2
    margin = round((REFERENCE_STEP_S + MAX_SHIFT_S) * 1e6)
    reference = propagate_satellites(
        elements.to_satrec_array(), time_grid(start - margin, end + margin, REFERENCE_STEP_S)
    )
    sigma_km = np.full((len(elements), 3), np.nan) if prior is None else prior.position_sigma(elements.sat_no)
    parameter_sigma = (
        np.full((len(elements), 6), np.nan)
        if prior is None
        else prior.parameter_sigma(elements, sigma_km, epoch)
    )
    solver = _Solver(elements, observations, reference, epoch, parameter_sigma)
    solver.iterate(APPROACH_ITERATIONS)
    solver.follow_track()
    solver.iterate(SETTLING_ITERATIONS)
    for _ in range(EDITING_ROUNDS):
        solver.edit()
        solver.iterate(1)
    solver.iterate(FINAL_ITERATIONS)
    return solver.build_tracks(np.sqrt(np.sum(sigma_km**2, axis=1)))


class _Solver:
    """The state of the iteration for all objects.

    ``offset`` (objects, 6) is relative to the reference trajectory at the epoch plus ``shift`` (objects,),
    microseconds. Objects that cannot be estimated stay in the arrays with weight zero, so that indices need
    no mapping.
    """

    def __init__(
        self,
        elements: Elements,
        observations: Observations,
        reference: Ephemeris,
        epoch: int,
        parameter_sigma: Floats,
    ) -> None:
        self.elements, self.observations = elements, observations
        self.reference, self.epoch = reference, epoch
        self.parameter_sigma = parameter_sigma
        self.has_prior = np.asarray(np.isfinite(parameter_sigma).all(axis=1))
        self.is_usable = np.asarray(reference.valid.all(axis=1))
        self.widths = observations.widths
        self.groups = _group_by_kind(observations)
        has_value = np.arange(MAX_WIDTH) < self.widths[:, None]
        has_sigma = ((observations.sigma >= _SMALLEST_SIGMA) | ~has_value).all(axis=1)
        self.is_observed = self.is_usable[observations.row] & has_sigma
        self.is_used = self.is_observed
        self.weight = np.where(
            has_value & self.is_observed[:, None], 1 / np.where(has_value, observations.sigma, 1.0), 0.0
        )
        self.shift: Micros = np.zeros(len(elements), np.int64)
        self.offset: Floats = np.zeros((len(elements), 6))
        self._update_reference()

    def _update_reference(self) -> None:
        """Compute the arrays that depend on the shifted reference."""
        self.linearization: tuple[Floats, Floats] | None = None
        row, micros = self.observations.row, self.observations.stations.micros
        everyone = np.arange(len(self.elements))
        self.epoch_r, self.epoch_v = self.reference.interpolate(everyone, self.epoch + self.shift)
        self.at_r, self.at_v = self.reference.interpolate(row, micros + self.shift[row])
        for position, velocity, is_valid in (
            (self.epoch_r, self.epoch_v, self.is_usable),
            (self.at_r, self.at_v, self.is_observed),
        ):
            position[~is_valid], velocity[~is_valid] = [7000.0, 0.0, 0.0], [0.0, 7.5, 0.0]
        self.mapping = transition_matrices(self.epoch_r[row], self.epoch_v[row], (micros - self.epoch) / 1e6)
        directions = error_directions(self.elements, self.epoch_r, self.epoch_v)
        self.information = prior_information(directions, self.parameter_sigma)
        # Only the error of time has a mean other than zero, because the element set itself is not shifted.
        gravity = -MU_KM3_S2 * self.epoch_r / np.linalg.norm(self.epoch_r, axis=1)[:, None] ** 3
        self.prior_mean = -np.concatenate([self.epoch_v, gravity], axis=1) * (self.shift / 1e6)[:, None]

    def follow_track(self) -> None:
        """Shift the reference along the track by the estimated error, so that the offsets become small.

        The shifted trajectory solves the equations of motion exactly. The transition matrix of a large offset
        does so only to first order.
        """
        seconds = np.sum(self.offset[:, :3] * self.epoch_v, axis=1) / np.sum(self.epoch_v**2, axis=1)
        state = np.concatenate([self.epoch_r, self.epoch_v], axis=1) + self.offset
        self.shift = np.round(np.clip(seconds, -MAX_SHIFT_S, MAX_SHIFT_S) * 1e6).astype(np.int64)
        self._update_reference()
        self.offset = state - np.concatenate([self.epoch_r, self.epoch_v], axis=1)

    def _linearize(self) -> tuple[Floats, Floats]:
        """Return residuals (n, 6) and derivatives (n, 6, 6) by the offset in units of the noise.

        Both are computed once for an offset: an iteration after `edit` uses them again.
        """
        if self.linearization is None:
            moved = np.einsum("nij,nj->ni", self.mapping, self.offset[self.observations.row])
            residual, slope = _residuals_and_slopes(
                self.groups, self.at_r + moved[:, :3], self.at_v + moved[:, 3:]
            )
            self.linearization = (
                self.weight * residual,
                self.weight[:, :, None] * (slope @ self.mapping),
            )
        return self.linearization

    def iterate(self, count: int) -> None:
        """Improve the offsets by Gauss-Newton steps with the used observations."""
        row, objects = self.observations.row, len(self.elements)
        for _ in range(count):
            residual, design = self._linearize()
            design = np.where(self.is_used[:, None, None], design, 0.0)
            normal = _sum_by(row, objects, np.swapaxes(design, 1, 2) @ design) + self.information
            right = _sum_by(row, objects, np.einsum("nij,ni->nj", design, residual))
            right += np.einsum("nij,nj->ni", self.information, self.prior_mean - self.offset)
            self.covariance, self.is_determined = _invert(normal)
            offset = self.offset + np.einsum("nij,nj->ni", self.covariance, right)
            # A diverging object must not overflow the others' arithmetic.
            self.offset = np.clip(np.where(self.is_determined[:, None], offset, 0.0), -1e4, 1e4)
            self.linearization = None

    def edit(self) -> None:
        """Choose the observations of the next iteration, by their distances from an estimate without them."""
        residual, design = self._linearize()
        row = self.observations.row
        distance = studentized_distances(design, residual, self.covariance[row], self.is_used)
        self.is_used = choose_observations(
            row, len(self.elements), distance, self.widths, self.is_used, self.is_observed
        )

    def build_tracks(self, prior_sigma_km: Floats) -> Tracks:
        """Return the estimates of the determined objects."""
        row, objects = self.observations.row, len(self.elements)
        residual, _ = self._linearize()
        used = np.where(self.is_used[:, None], residual, 0.0)
        squares = _sum_by(row, objects, (used**2).sum(axis=1))
        deviation = self.offset - self.prior_mean
        prior_squares = np.einsum("ni,nij,nj->n", deviation, self.information, deviation)
        models = self.observations.models
        counts = np.zeros((objects, len(models)), np.int64)
        np.add.at(counts, (row[self.is_used], self.observations.kind[self.is_used]), 1)
        total = counts @ np.array([model.width for model in models], np.int64)
        edited = np.bincount(row[self.is_observed], minlength=objects) - counts.sum(axis=1)
        sigma_km = np.sqrt(np.trace(self.covariance[:, :3, :3], axis1=1, axis2=2))
        is_enough = np.where(
            self.has_prior,
            total > 0,
            (counts.sum(axis=1) >= MIN_OBSERVATIONS) & (total > 6) & (sigma_km < MAX_POSITION_SIGMA_KM),
        )
        keep = np.flatnonzero(self.is_usable & self.is_determined & is_enough)
        # The prior counts as six more measured values.
        freedom = total[keep] - np.where(self.has_prior[keep], 0, 6)
        state = (np.concatenate([self.epoch_r, self.epoch_v], axis=1) + self.offset)[keep]
        catalog_r, catalog_v = self.reference.interpolate(keep, np.full(len(keep), self.epoch))
        offset = state - np.concatenate([catalog_r, catalog_v], axis=1)
        return Tracks(
            row=keep,
            position=state[:, :3],
            velocity=state[:, 3:],
            covariance=self.covariance[keep],
            offset=offset,
            offset_ric=_radial_in_track_cross(catalog_r, catalog_v, offset[:, :3]),
            counts=counts[keep],
            measurements=total[keep],
            edited=edited[keep],
            chi2_per_dof=(squares + prior_squares)[keep] / freedom,
            weighted_rms=np.sqrt(squares[keep] / total[keep]),
            prior_sigma_km=prior_sigma_km[keep],
        )


@dataclass(frozen=True)
class _KindGroup:
    """The measurements of one kind of sensor: their rows, values and stations, and their model."""

    rows: Rows
    values: Floats
    stations: Stations
    model: MeasurementModel


def _group_by_kind(observations: Observations) -> list[_KindGroup]:
    """Return one group for each model of the observations, in the order of the models."""
    groups = []
    for kind, model in enumerate(observations.models):
        rows = np.flatnonzero(observations.kind == kind)
        values = observations.values[rows, : model.width]
        groups.append(_KindGroup(rows, values, observations.stations.take(rows), model))
    return groups


def _residuals_and_slopes(
    groups: Sequence[_KindGroup], position: Floats, velocity: Floats
) -> tuple[Floats, Floats]:
    """Return residuals (n, 6) and derivatives (n, 6, 6) of the measurements by the state.

    Both are taken at the state of each measurement, km and km/s (n, 3).
    """
    residual = np.zeros((len(position), MAX_WIDTH))
    slope = np.zeros((len(position), MAX_WIDTH, 6))
    for group in groups:
        rows, model = group.rows, group.model
        expected, derivative = model.predict(position[rows], velocity[rows], group.stations)
        difference = group.values - expected
        angles = list(model.direction or ())
        difference[:, angles] = wrap_angle(difference[:, angles])
        residual[rows, : model.width] = difference
        slope[rows, : model.width] = derivative
    return residual, slope


def _sum_by(row: npt.NDArray[np.int64], objects: int, values: npt.NDArray[np.generic]) -> Floats:
    """Sum the rows of each object: (n, …) to (objects, …). ``row`` must be sorted."""
    total: Floats = np.zeros((objects, *values.shape[1:]), dtype=values.dtype)
    present, first = np.unique(row, return_index=True)
    if len(row):
        total[present] = np.add.reduceat(values, first, axis=0)
    return total


def _invert(normal: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return inverses (k, 6, 6) of normal matrices, and which of them are well determined.

    The matrices are first scaled to a unit diagonal: positions and velocities differ by three orders of
    magnitude, which would look like ill-conditioning. Inverses of undetermined matrices are zero.
    A matrix with a value that is not finite is undetermined.
    """
    diagonal = np.diagonal(normal, axis1=1, axis2=2)
    is_finite = np.isfinite(normal).all(axis=(1, 2))
    alive: npt.NDArray[np.bool_] = np.asarray(is_finite & (diagonal > 0).all(axis=1))
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
