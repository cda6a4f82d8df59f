"""Contracts of the measured errors of element sets. The column names follow no standard."""

# No `from __future__ import annotations`: pandera reads the annotations.
import pyspark.sql.types as T  # noqa: N812 - Spark's own abbreviation

from branchlake_dagster.sda.contracts.fields import (
    Contract,
    catalogue_number,
    optional_column,
    required_column,
)
from branchlake_dagster.sda.trust.classes import CLASSES, OWN_CLASSES
from branchlake_dagster.sda.trust.growth import MAX_FACTOR
from branchlake_dagster.sda.trust.jumps import JUMP_SIGNS, JumpKind

_MODEL = "The error model: newest epoch of its history, and a hash of its content."


class ElementError(Contract):
    """The error of element sets of one orbit class in one range of ages, derived from later sets."""

    orbit_class: T.StringType = required_column(
        "Class by mean altitude in km and eccentricity; LEO and all contain other classes.",
        isin=[one.value for one in CLASSES],
    )
    from_age_days: T.DoubleType = required_column("Lower limit of the ages of the element sets.", "d", ge=0.0)
    to_age_days: T.DoubleType = required_column("Upper limit of the ages, exclusive.", "d", gt=0.0)
    samples: T.LongType = required_column(
        "Number of differences in this range of ages, without those across a jump.", ge=0
    )
    age_days: T.DoubleType = optional_column(
        "Median age of the differences; empty with too few of them.", "d", ge=0.0
    )
    sigma_r_km: T.DoubleType = optional_column(
        "Radial error that 68.27 % of them do not exceed.", "km", ge=0.0
    )
    sigma_t_km: T.DoubleType = optional_column(
        "Transverse error that 68.27 % of them do not exceed.", "km", ge=0.0
    )
    sigma_n_km: T.DoubleType = optional_column(
        "Normal error that 68.27 % of them do not exceed.", "km", ge=0.0
    )
    p95_r_km: T.DoubleType = optional_column("Radial error that 95 % of them do not exceed.", "km", ge=0.0)
    p95_t_km: T.DoubleType = optional_column(
        "Transverse error that 95 % of them do not exceed.", "km", ge=0.0
    )
    p95_n_km: T.DoubleType = optional_column("Normal error that 95 % of them do not exceed.", "km", ge=0.0)
    median_r_km: T.DoubleType = optional_column("Median radial difference, older less newer.", "km")
    median_t_km: T.DoubleType = optional_column("Median transverse difference, older less newer.", "km")
    median_n_km: T.DoubleType = optional_column("Median normal difference, older less newer.", "km")
    fitted_r_km: T.DoubleType = optional_column("Radial error by the curve, at the median age.", "km", ge=0.0)
    fitted_t_km: T.DoubleType = optional_column(
        "Transverse error by the curve, at the median age.", "km", ge=0.0
    )
    fitted_n_km: T.DoubleType = optional_column("Normal error by the curve, at the median age.", "km", ge=0.0)
    sigma0_r_km: T.DoubleType = optional_column("Curve sigma0 + rate * age^power: radial.", "km", ge=0.0)
    sigma0_t_km: T.DoubleType = optional_column("Curve sigma0 + rate * age^power: transverse.", "km", ge=0.0)
    sigma0_n_km: T.DoubleType = optional_column("Curve sigma0 + rate * age^power: normal.", "km", ge=0.0)
    rate_r: T.DoubleType = optional_column("Radial rate of the curve.", "km/d^power", ge=0.0)
    rate_t: T.DoubleType = optional_column("Transverse rate of the curve.", "km/d^power", ge=0.0)
    rate_n: T.DoubleType = optional_column("Normal rate of the curve.", "km/d^power", ge=0.0)
    power_r: T.DoubleType = optional_column("Power of the age in the radial curve.", gt=0.0)
    power_t: T.DoubleType = optional_column("Power of the age in the transverse curve.", gt=0.0)
    power_n: T.DoubleType = optional_column("Power of the age in the normal curve.", gt=0.0)
    curve_of: T.StringType = optional_column(
        "Class with the samples of the curve; empty if there is no curve."
    )
    until_age_days: T.DoubleType = required_column(
        "Largest age for which the curve is valid; 0 without a curve.", "d", ge=0.0
    )
    history_from: T.TimestampType = required_column("Oldest epoch of the history, UTC.")
    history_until: T.TimestampType = required_column("Newest epoch of the history, UTC.")
    error_model_id: T.StringType = required_column(_MODEL)


class ObjectError(Contract):
    """The ratio of an object's errors to the errors that are usual in its orbit class."""

    sat_no: T.LongType = catalogue_number()
    orbit_class: T.StringType = required_column(
        "Class of its newest element set.", isin=[one.value for one in OWN_CLASSES]
    )
    samples: T.LongType = required_column(
        "Differences behind the factors; few samples give factors near 1.", ge=0
    )
    factor_r: T.DoubleType = required_column(
        "Its radial error divided by that of its class.", gt=0.0, le=MAX_FACTOR
    )
    factor_t: T.DoubleType = required_column(
        "Its transverse error divided by that of its class.", gt=0.0, le=MAX_FACTOR
    )
    factor_n: T.DoubleType = required_column(
        "Its normal error divided by that of its class.", gt=0.0, le=MAX_FACTOR
    )
    error_model_id: T.StringType = required_column(_MODEL)


class ElementJump(Contract):
    """An element set that does not continue the earlier ones: possibly a maneuver, or a wrong set."""

    sat_no: T.LongType = catalogue_number()
    epoch: T.TimestampType = required_column("Epoch of the element set that jumps, UTC.")
    previous_epoch: T.TimestampType = required_column("Epoch of the set before it, UTC.")
    kind: T.StringType = required_column(
        "manoeuvre: the next set has the new orbit; lone set: the next set has the old orbit; "
        "unconfirmed: there is no next set; swap: two objects continue each other's orbits.",
        isin=[one.value for one in JumpKind],
    )
    reason: T.StringType = required_column(
        "The quantity that shows the jump first.", isin=[one.value for one in JUMP_SIGNS]
    )
    sigmas: T.DoubleType = required_column(
        "Size of the jump as a multiple of the object's usual error at that age.", gt=0.0
    )
    semi_major_axis_change_km: T.DoubleType = required_column(
        "Change of the semi-major axis, less what drag explains.", "km"
    )
    inclination_change_deg: T.DoubleType = required_column("Change of the inclination.", "deg")
    in_track_km: T.DoubleType = required_column(
        "Transverse position by the set before, minus that by this set.", "km"
    )
    taken_for: T.LongType = catalogue_number("the other object, if both were swapped", nullable=True)
    error_model_id: T.StringType = required_column(_MODEL)
