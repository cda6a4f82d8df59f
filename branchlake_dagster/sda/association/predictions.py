"""Predict what a sensor measures of a catalog object, with the covariance of the prediction.

An element set is the orbit of an object, from which SGP4 computes its position at any time. The error of that
position is described along three axes: R (radial, away from the Earth), T (along the track) and N (normal to
the plane of the orbit). It changes smoothly along the orbit, so all observations of one pass share it. Its
model has six parameters that are the same for all observations of a pass:

- ``R0`` and ``R1`` (km): amplitudes of the radial error, ``R0 cos(phi) + R1 sin(phi)``
- ``T0`` (km): the error along the track, which is an error of time
- ``N0`` and ``N1`` (km): amplitudes of the error across the plane, ``N0 cos(phi) + N1 sin(phi)``
- the error of the sensor's clock (s)

``phi`` is the angle along the orbit from a reference time of the pass. This is the solution of Hill's
equations without secular drift (Clohessy and Wiltshire 1960; Vallado, section 6.8), with the instantaneous
angular rate as mean motion.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.estimation.batch import Observations
from branchlake_dagster.sda.orbits.frames import Floats, Micros
from branchlake_dagster.sda.orbits.plausible import find_state_faults
from branchlake_dagster.sda.orbits.propagation import Elements, Ephemeris, propagate_satellites, time_grid
from branchlake_dagster.sda.orbits.two_body import MU_KM3_S2
from branchlake_dagster.sda.sensors.measurement import Stations
from branchlake_dagster.sda.sensors.models import MeasurementModel
from branchlake_dagster.sda.trust.differences import rtn_axes

Rows = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

EPHEMERIS_STEP_S = 30.0
MAX_IN_TRACK_SIGMA_KM = 100.0
"""Objects with a larger standard deviation along the track have no usable prediction.

Neighbors in one orbital plane of a constellation are a few hundred kilometers apart, so such a prediction
would fit several of them.
"""
MAX_SHIFT_S = 120.0
"""The largest error of time along the track that is applied before a prediction is linearized.

Up to this value, the prediction follows the curved orbit instead of its tangent.
"""
PARAMETERS = 6
IN_TRACK = 2
"""The index of ``T0`` among the parameters."""
_CLOCK_STEP_S = 0.05
MAX_ROUNDS = 4
_SHIFT_TOLERANCE_S = 0.05
_HOPELESS_DISTANCE = 1e4
"""Squared distance above which another iteration cannot bring a pair within its gate."""


@dataclass(frozen=True)
class PredictedCatalog:
    """The n objects of a catalog and their predicted states over a window.

    ``elements`` are sorted by ``sat_no``. ``sigma_km`` (n, 3) is one standard deviation along R, T and N.
    ``ephemeris`` has positions and velocities on a grid of times. ``is_usable`` (n,) is false if an object
    has implausible states in the window, or an error that is unknown or larger than `MAX_IN_TRACK_SIGMA_KM`.
    """

    elements: Elements
    sigma_km: Floats
    ephemeris: Ephemeris
    is_usable: Flags

    @classmethod
    def predict(cls, elements: Elements, sigma_km: Floats, start: int, end: int) -> PredictedCatalog:
        """Propagate one element set per object over a window (UTC microseconds since 1970).

        ``sigma_km`` (n, 3) belongs to the rows of ``elements``; NaN marks an unknown error. To propagate
        means to compute positions and velocities from the element sets.
        """
        order = np.argsort(elements.sat_no, kind="stable")
        elements, sigma_km = elements.take(order), sigma_km[order]
        margin = round((EPHEMERIS_STEP_S + MAX_SHIFT_S) * 1e6)
        ephemeris = propagate_satellites(
            elements.to_satrec_array(), time_grid(start - margin, end + margin, EPHEMERIS_STEP_S)
        )
        is_plausible = find_state_faults(ephemeris, elements).plausible_objects
        is_certain = np.isfinite(sigma_km).all(axis=1) & (sigma_km[:, 1] <= MAX_IN_TRACK_SIGMA_KM)
        return cls(elements, sigma_km, ephemeris, is_plausible & is_certain)

    def usable_rows(self, sat_no: Rows) -> Rows:
        """Return the rows of objects by catalog number (k,), or -1 where no usable prediction exists."""
        if not len(self.elements):
            return np.full(len(sat_no), -1)
        rows = np.minimum(np.searchsorted(self.elements.sat_no, sat_no), len(self.elements) - 1)
        is_predicted = (self.elements.sat_no[rows] == sat_no) & self.is_usable[rows]
        return np.asarray(np.where(is_predicted, rows, -1))


@dataclass(frozen=True)
class PairModel:
    """The linear measurement model of k pairs of an observation and an object, of one kind of sensor.

    - ``residual`` (k, m): the measurement minus its prediction
    - ``local_slope`` (k, m, 6): the derivative of the measurement by position (km) and velocity (km/s) along
      the object's R, T and N
    - ``time_slope`` (k, 6): the derivative of that local state by ``T0``
    - ``clock_slope`` (k, m): the derivative of the measurement by time
    - ``weight`` (k, m, m): the inverse covariance of the errors that observations of a pass do not share
    - ``noise_log_det`` (k,): the log determinant of that covariance
    - ``scale`` (k, 6): one standard deviation of each parameter
    - ``rate`` (k,): the object's angular rate, rad/s
    - ``micros`` (k,): the time of the observation
    """

    residual: Floats
    local_slope: Floats
    time_slope: Floats
    clock_slope: Floats
    weight: Floats
    noise_log_det: Floats
    scale: Floats
    rate: Floats
    micros: Micros

    def take(self, rows: Rows | Flags) -> PairModel:
        """Return the pairs of the given rows."""
        return PairModel(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    @classmethod
    def concatenate(cls, parts: list[PairModel]) -> PairModel:
        """Join models of the same kind of sensor."""
        return cls(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__)
        )

    def design(self, reference_micros: Micros) -> Floats:
        """Return the derivatives (k, m, 6) of the measurements by the parameters in units of their sigma.

        Sigma is one standard deviation, here of the parameter. ``reference_micros`` (k,) is the reference
        time of each pair's pass.
        """
        phase = self.rate * (self.micros - reference_micros) / 1e6
        c, s, n = np.cos(phase), np.sin(phase), self.rate
        state = np.zeros((len(phase), 6, 5))
        state[:, 0, 0], state[:, 0, 1] = c, s
        state[:, 1, 0], state[:, 1, 1] = -2 * s, -2 * (1 - c)
        state[:, 2, 3], state[:, 2, 4] = c, s
        # Velocities are inertial: the rates of change along the axes, and the rotation of the axes.
        state[:, 3, 0], state[:, 3, 1] = n * s, n * (2 - c)
        state[:, 4, 0], state[:, 4, 1] = -n * c, -n * s
        state[:, 5, 3], state[:, 5, 4] = -n * s, n * c
        state[:, :, IN_TRACK] = self.time_slope
        slope = np.concatenate([self.local_slope @ state, self.clock_slope[:, :, None]], axis=2)
        return np.asarray(slope * self.scale[:, None, :])

    def own_distances(self) -> Floats:
        """Return the squared Mahalanobis distance (k,) of each observation without the others of its pass."""
        covariance = self.total_covariance(self.design(self.micros), None)
        return solve_distances(covariance, self.residual)[0]

    def total_covariance(self, design: Floats, parameter_covariance: Floats | None) -> Floats:
        """Return the covariance (k, m, m) of the residuals, from noise and from the parameters' uncertainty.

        ``design`` (k, m, 6) is the result of `design`. ``parameter_covariance`` (k, 6, 6) is in units of the
        sigmas; None means the prior, which is the identity.
        """
        spread = design if parameter_covariance is None else design @ parameter_covariance
        return np.asarray(np.linalg.inv(self.weight) + spread @ np.swapaxes(design, 1, 2))


def solve_distances(covariance: Floats, residual: Floats) -> tuple[Floats, Floats]:
    """Return squared Mahalanobis distances (k,) and log determinants (k,) of covariances (k, m, m).

    ``residual`` is (k, m).
    """
    solved = np.linalg.solve(covariance, residual[..., None])[..., 0]
    return np.sum(residual * solved, axis=1), np.linalg.slogdet(covariance)[1]


def predict_measurements(
    measured: MeasurementModel, position: Floats, velocity: Floats, stations: Stations
) -> tuple[Floats, Floats]:
    """Return the measured values (k, m) of states (k, 3) and their derivatives (k, m, 6) by the state.

    Positions are in km and velocities in km/s, in TEME. The derivatives of azimuth and right ascension are
    multiplied by the cosine of the elevation or declination, so that they are arcs on the sphere, as the
    differences of `subtract_measurements` are.
    """
    values, slope = measured.predict(position, velocity, stations)
    if measured.direction is not None:
        longitude, latitude = measured.direction
        slope[:, longitude] *= np.cos(values[:, latitude])[:, None]
    return values, slope


def subtract_measurements(measured: MeasurementModel, values: Floats, predicted: Floats) -> Floats:
    """Return the difference (k, m) of measured and predicted values.

    Directions are subtracted in the plane that touches the sphere at the predicted direction. So the result
    is also correct at the zenith and the pole, where azimuth and right ascension change fast.
    """
    difference = values - predicted
    if measured.direction is not None:
        longitude, latitude = measured.direction
        turn, low, high = difference[:, longitude], predicted[:, latitude], values[:, latitude]
        difference[:, latitude] = np.sin(high) * np.cos(low) - np.cos(high) * np.sin(low) * np.cos(turn)
        difference[:, longitude] = np.cos(high) * np.sin(turn)
    return difference


def model_pairs(
    catalog: PredictedCatalog,
    observations: Observations,
    clock_sigma_s: Floats,
    pairs: tuple[Rows, Rows],
    kind: int,
    *,
    sigma_factor: float,
    independent_share: float,
) -> PairModel:
    """Build the measurement model of pairs of observations and objects of one kind.

    The model is linearized at the position that the object would have if the observation alone corrected the
    object's time along the track. So the model follows the arc of the orbit for errors of time up to
    `MAX_SHIFT_S`.

    Args:
        catalog: The predicted objects.
        observations: The observations.
        clock_sigma_s: (observations,) One standard deviation of the sensor's clock.
        pairs: Rows of the observations and rows of the objects, both (k,).
        kind: The kind of all these observations, an index of `Observations.models`.
        sigma_factor: A factor on the catalog's standard deviations.
        independent_share: The share of the radial and normal error that observations of one pass do not
            share.
    """
    rows, objects = pairs
    stations = observations.stations.take(rows)

    def linearize(chosen: Rows, shift: Micros) -> PairModel:
        return _linearize(
            catalog,
            observations,
            clock_sigma_s,
            (rows[chosen], objects[chosen]),
            kind,
            stations.take(chosen),
            shift,
            sigma_factor,
            independent_share,
        )

    shift = np.zeros(len(rows), np.int64)
    active = np.arange(len(rows))
    model = linearize(active, shift)
    _, velocity = catalog.ephemeris.interpolate(objects, stations.micros)
    speed = np.linalg.norm(velocity, axis=1)
    for rounds in range(MAX_ROUNDS):
        if not len(active):
            break
        along_km, distance = _along_track_offsets(model.take(active))
        shift_s = np.clip(along_km / speed[active], -MAX_SHIFT_S, MAX_SHIFT_S)
        new_shift = np.round(shift_s * 1e6).astype(np.int64)
        changes = np.abs(new_shift - shift[active]) > _SHIFT_TOLERANCE_S * 1e6
        if rounds:
            changes &= distance < _HOPELESS_DISTANCE
        active, new_shift = active[changes], new_shift[changes]
        shift[active] = new_shift
        shifted = linearize(active, new_shift)
        # The residual is referred back to the unshifted prediction, so that T0 keeps its prior of mean zero.
        time_column = np.einsum("kmi,ki->km", shifted.local_slope, shifted.time_slope)
        shifted.residual[:] += time_column * (new_shift / 1e6 * speed[active])[:, None]
        for name in PairModel.__dataclass_fields__:
            getattr(model, name)[active] = getattr(shifted, name)
    return model


def _along_track_offsets(model: PairModel) -> tuple[Floats, Floats]:
    """Return ``T0`` (k,) in km as each observation alone estimates it, and its squared distance (k,)."""
    design = model.design(model.micros)
    covariance = model.total_covariance(design, None)
    solved = np.linalg.solve(covariance, model.residual[..., None])[..., 0]
    along = np.einsum("km,km->k", design[:, :, IN_TRACK], solved) * model.scale[:, IN_TRACK]
    return along, np.sum(model.residual * solved, axis=1)


def _linearize(
    catalog: PredictedCatalog,
    observations: Observations,
    clock_sigma_s: Floats,
    pairs: tuple[Rows, Rows],
    kind: int,
    stations: Stations,
    shift_micros: Micros,
    sigma_factor: float,
    independent_share: float,
) -> PairModel:
    rows, objects = pairs
    measured = observations.models[kind]
    width = measured.width
    position, velocity = catalog.ephemeris.interpolate(objects, stations.micros + shift_micros)
    radius, speed = np.linalg.norm(position, axis=1), np.linalg.norm(velocity, axis=1)
    acceleration = -MU_KM3_S2 * position / radius[:, None] ** 3
    predicted, slope = predict_measurements(measured, position, velocity, stations)
    later = Stations(
        stations.lat_deg,
        stations.lon_deg,
        stations.alt_km,
        stations.micros + round(_CLOCK_STEP_S * 1e6),
    )
    ahead, _ = predict_measurements(
        measured, position + velocity * _CLOCK_STEP_S, velocity + acceleration * _CLOCK_STEP_S, later
    )
    axes = rtn_axes(position, velocity)
    local_slope = np.concatenate(
        [slope[:, :, :3] @ np.swapaxes(axes, 1, 2), slope[:, :, 3:] @ np.swapaxes(axes, 1, 2)], axis=2
    )
    along = np.concatenate(
        [np.einsum("kij,kj->ki", axes, velocity), np.einsum("kij,kj->ki", axes, acceleration)], axis=1
    )
    sigma = catalog.sigma_km[objects] * sigma_factor
    radial, transverse, normal = sigma.T
    # Along the track the radial error appears twice (Hill's equations).
    slack = independent_share * np.stack([radial, 2 * radial, normal], axis=1)
    spread = local_slope[:, :, :3] * slack[:, None, :]
    noise = spread @ np.swapaxes(spread, 1, 2)
    diagonal = np.arange(width)
    sigma_measured = observations.sigma[rows, :width].copy()
    if measured.direction is not None:
        longitude, latitude = measured.direction
        sigma_measured[:, longitude] *= np.cos(observations.values[rows, latitude])
    noise[:, diagonal, diagonal] += sigma_measured**2
    return PairModel(
        residual=subtract_measurements(measured, observations.values[rows, :width], predicted),
        local_slope=local_slope,
        time_slope=along / speed[:, None],
        clock_slope=subtract_measurements(measured, ahead, predicted) / _CLOCK_STEP_S,
        weight=np.asarray(np.linalg.inv(noise), np.float64),
        noise_log_det=np.linalg.slogdet(noise)[1],
        scale=np.stack([radial, radial, transverse, normal, normal, clock_sigma_s[rows]], axis=1),
        rate=np.linalg.norm(np.cross(position, velocity), axis=1) / radius**2,
        micros=stations.micros,
    )
