"""Contracts of fused tracks, and of objects whose predicted states cannot be true."""

# No `from __future__ import annotations`: pandera reads the annotations.
from typing import Any

import pyspark.sql.types as T  # noqa: N812 - Spark's own abbreviation

from branchlake_dagster.sda.contracts.fields import (
    Contract,
    catalogue_number,
    optional_column,
    required_column,
    window_column,
)
from branchlake_dagster.sda.orbits.plausible import FAULT_NAMES


def variance_column(of: str, unit: str) -> Any:
    """Return a column for a diagonal element of the covariance matrix."""
    return required_column(f"Variance of {of}.", unit, gt=0.0)


def covariance_column(one: str, other: str, unit: str) -> Any:
    """Return a column for an element of the covariance matrix's lower triangle."""
    what = f"Variance of {one}." if one == other else f"Covariance of {one} and {other}."
    return optional_column(what, unit)


class TrackState(Contract):
    """The first columns of a track: its state vector (position and velocity) and its covariance matrix.

    Source: OPM, CCSDS 502.0-B-3 section 3: the state vector and the lower triangle of its covariance matrix
    (CX_X, CY_X, CY_Y …), in km and s.
    """

    window_start: T.TimestampType = window_column()
    sat_no: T.LongType = catalogue_number()
    epoch: T.TimestampType = required_column("Instant of the state, UTC: the middle of the window.")
    ref_frame: T.StringType = required_column("Reference frame of state and covariance.", isin=["TEME"])
    x_km: T.DoubleType = optional_column("Position along x.", "km")
    y_km: T.DoubleType = optional_column("Position along y.", "km")
    z_km: T.DoubleType = optional_column("Position along z.", "km")
    x_dot_km_s: T.DoubleType = optional_column("Velocity along x.", "km/s")
    y_dot_km_s: T.DoubleType = optional_column("Velocity along y.", "km/s")
    z_dot_km_s: T.DoubleType = optional_column("Velocity along z.", "km/s")
    cx_x: T.DoubleType = variance_column("x", "km²")
    cy_x: T.DoubleType = covariance_column("y", "x", "km²")
    cy_y: T.DoubleType = variance_column("y", "km²")
    cz_x: T.DoubleType = covariance_column("z", "x", "km²")
    cz_y: T.DoubleType = covariance_column("z", "y", "km²")
    cz_z: T.DoubleType = variance_column("z", "km²")
    cx_dot_x: T.DoubleType = covariance_column("x_dot", "x", "km²/s")
    cx_dot_y: T.DoubleType = covariance_column("x_dot", "y", "km²/s")
    cx_dot_z: T.DoubleType = covariance_column("x_dot", "z", "km²/s")
    cx_dot_x_dot: T.DoubleType = covariance_column("x_dot", "x_dot", "km²/s²")
    cy_dot_x: T.DoubleType = covariance_column("y_dot", "x", "km²/s")
    cy_dot_y: T.DoubleType = covariance_column("y_dot", "y", "km²/s")
    cy_dot_z: T.DoubleType = covariance_column("y_dot", "z", "km²/s")
    cy_dot_x_dot: T.DoubleType = covariance_column("y_dot", "x_dot", "km²/s²")
    cy_dot_y_dot: T.DoubleType = covariance_column("y_dot", "y_dot", "km²/s²")
    cz_dot_x: T.DoubleType = covariance_column("z_dot", "x", "km²/s")
    cz_dot_y: T.DoubleType = covariance_column("z_dot", "y", "km²/s")
    cz_dot_z: T.DoubleType = covariance_column("z_dot", "z", "km²/s")
    cz_dot_x_dot: T.DoubleType = covariance_column("z_dot", "x_dot", "km²/s²")
    cz_dot_y_dot: T.DoubleType = covariance_column("z_dot", "y_dot", "km²/s²")
    cz_dot_z_dot: T.DoubleType = covariance_column("z_dot", "z_dot", "km²/s²")


class TrackFit(Contract):
    """The last columns of a track: how well it agrees with its measurements and with the catalog."""

    n_measurements: T.LongType = required_column(
        "Measured numbers that were used: an observation has several.", gt=0
    )
    n_edited: T.LongType = required_column(
        "Observations that disagree with the others and were not used.", ge=0
    )
    chi2_per_dof: T.DoubleType = required_column(
        "Squared residuals over their variances, and squared distance from the prior, per degree of freedom.",
        ge=0.0,
    )
    weighted_rms: T.DoubleType = optional_column(
        "Root mean square of residuals over their standard deviations."
    )
    position_sigma_km: T.DoubleType = required_column(
        "One sigma of the position, widened where the residuals are larger than the stated noise.",
        "km",
        gt=0.0,
    )
    prior_sigma_km: T.DoubleType = optional_column(
        "One sigma of the element set's position by the error model, or assumed without a model; empty if"
        " it is unknown.",
        "km",
        gt=0.0,
    )
    is_preferred: T.BooleanType = required_column("Whether the state should be preferred to the element set.")
    catalogue_miss_km: T.DoubleType = required_column(
        "Distance from the position by the element set.", "km", ge=0.0
    )
    offset_radial_km: T.DoubleType = optional_column(
        "Offset from the position by the element set, radial.", "km"
    )
    offset_in_track_km: T.DoubleType = optional_column(
        "Offset from the position by the element set, in-track.", "km"
    )
    offset_cross_track_km: T.DoubleType = optional_column(
        "Offset from the position by the element set, cross-track.", "km"
    )
    catalogue_snapshot_id: T.StringType = optional_column("GP snapshot of that element set.")
    catalogue_epoch: T.TimestampType = optional_column("Epoch of that element set, UTC.")


class QuarantinedObject(Contract):
    """An object whose predicted states in a window cannot be true. The column names follow no standard."""

    window_start: T.TimestampType = window_column()
    sat_no: T.LongType = catalogue_number()
    reason: T.StringType = required_column(
        "The test that its states fail first: SGP4 itself, altitude, energy or displacement.",
        isin=list(FAULT_NAMES),
    )
    at: T.TimestampType = required_column("First instant of the window with this fault, UTC.")
    altitude_km: T.DoubleType = optional_column(
        "Height over a sphere of the equatorial radius at that instant.", "km"
    )
    energy_ratio: T.DoubleType = optional_column(
        "Specific energy at that instant divided by that of the elements."
    )
    snapshot_id: T.StringType = optional_column("GP snapshot of its element set.")
    element_epoch: T.TimestampType = required_column("Epoch of its element set, UTC.")
    element_age_days: T.DoubleType = required_column("Age of the element set at the window's start.", "d")
