"""Contracts of close approaches: the risks of one hour, the list of the next hours, and the alerts."""

# No `from __future__ import annotations`: pandera reads the annotations.
import pyspark.sql.types as T  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.sda.alerts.entry_names import ENTRY_KINDS, PRIORITIES, REASONS
from branchlake_dagster.sda.conjunctions.risks import STATE_SOURCES
from branchlake_dagster.sda.conjunctions.screening import Kind
from branchlake_dagster.sda.contracts.fields import (
    UUID5_PATTERN,
    Contract,
    catalogue_number,
    optional_column,
    required_column,
    window_column,
)
from branchlake_dagster.sda.trust.assessment import NO_PROBABILITY_REASONS
from branchlake_dagster.sda.trust.radii import RADIUS_SOURCES
from branchlake_dagster.sda.trust.tables import COVARIANCE_SOURCE


class CloseApproach(Contract):
    """A close approach of two catalog objects.

    Source: CDM, CCSDS 508.0-B-1, with kilometers where it has meters. Object 1 has the smaller number.
    """

    kind: T.StringType = required_column(
        "encounter: a minimum of the distance; edge: closest at the start or end of the screening; together:"
        " minutes within the threshold.",
        isin=[kind.value for kind in Kind],
    )
    tca: T.TimestampType = required_column("Time of closest approach, UTC.")
    sat1_object_designator: T.LongType = catalogue_number("object 1")
    sat2_object_designator: T.LongType = catalogue_number("object 2")
    miss_distance_km: T.DoubleType = required_column("Distance at the closest approach.", "km", ge=0.0)
    relative_speed_km_s: T.DoubleType = required_column(
        "Relative speed at the closest approach.", "km/s", ge=0.0, le=25.0
    )
    relative_position_r_km: T.DoubleType = required_column(
        "Object 2 from object 1, along its radial axis.", "km"
    )
    relative_position_t_km: T.DoubleType = required_column(
        "Object 2 from object 1, along its transverse (in-track) axis.", "km"
    )
    relative_position_n_km: T.DoubleType = required_column(
        "Object 2 from object 1, along its normal (cross-track) axis.", "km"
    )
    relative_velocity_r_km_s: T.DoubleType = required_column(
        "Velocity of object 2 relative to object 1, along its radial axis.", "km/s"
    )
    relative_velocity_t_km_s: T.DoubleType = required_column(
        "Velocity of object 2 relative to object 1, along its transverse axis.", "km/s"
    )
    relative_velocity_n_km_s: T.DoubleType = required_column(
        "Velocity of object 2 relative to object 1, along its normal axis.", "km/s"
    )
    together_min: T.LongType = required_column(
        "Minutes at whose both ends the two are within the threshold; 0 for other kinds.", "min", ge=0
    )
    sat1_element_epoch: T.TimestampType = required_column("Epoch of object 1's element set, UTC.")
    sat2_element_epoch: T.TimestampType = required_column("Epoch of object 2's element set, UTC.")


class ConjunctionRisk(Contract):
    """A close approach of two objects within an hour, by their best known states, with its probability.

    Source: CDM, CCSDS 508.0-B-1, with kilometers where it has meters. The key is the pair and
    ``risk_window_start``. Distances are rounded to 1 m, times to 1 ms, probabilities to three digits.
    """

    window_start: T.TimestampType = window_column()
    risk_window_start: T.TimestampType = required_column(
        "Start of the 30 s window that has the closest approach, UTC."
    )
    sat1_object_designator: T.LongType = catalogue_number("object 1, the smaller number")
    sat2_object_designator: T.LongType = catalogue_number("object 2")
    kind: T.StringType = required_column(
        "An encounter, or minutes spent together.", isin=[Kind.ENCOUNTER.value, Kind.TOGETHER.value]
    )
    tca: T.TimestampType = required_column("Time of closest approach, UTC.")
    miss_distance_km: T.DoubleType = required_column("Distance at the closest approach.", "km", ge=0.0)
    relative_speed_km_s: T.DoubleType = required_column(
        "Relative speed at the closest approach.", "km/s", ge=0.0, le=25.0
    )
    relative_position_r_km: T.DoubleType = required_column(
        "Object 2 from object 1, along its radial axis.", "km"
    )
    relative_position_t_km: T.DoubleType = required_column(
        "Object 2 from object 1, along its transverse (in-track) axis.", "km"
    )
    relative_position_n_km: T.DoubleType = required_column(
        "Object 2 from object 1, along its normal (cross-track) axis.", "km"
    )
    relative_velocity_r_km_s: T.DoubleType = required_column(
        "Velocity of object 2 relative to object 1, along its radial axis.", "km/s"
    )
    relative_velocity_t_km_s: T.DoubleType = required_column(
        "Velocity of object 2 relative to object 1, along its transverse axis.", "km/s"
    )
    relative_velocity_n_km_s: T.DoubleType = required_column(
        "Velocity of object 2 relative to object 1, along its normal axis.", "km/s"
    )
    together_min: T.LongType = required_column(
        "Minutes at whose both ends the two are within the threshold; 0 for other kinds.", "min", ge=0
    )
    sat1_state_source: T.StringType = required_column(
        "Whether object 1's state is from its track or its element set.", isin=list(STATE_SOURCES)
    )
    sat2_state_source: T.StringType = required_column(
        "Whether object 2's state is from its track or its element set.", isin=list(STATE_SOURCES)
    )
    sat1_element_epoch: T.TimestampType = required_column("Epoch of object 1's element set, UTC.")
    sat2_element_epoch: T.TimestampType = required_column("Epoch of object 2's element set, UTC.")
    hard_body_radius_m: T.DoubleType = required_column(
        "Radius of both objects together: the sum.", "m", gt=0.0
    )
    sigma_minor_km: T.DoubleType = optional_column(
        "Error of both together across the relative velocity, along its narrow axis.", "km", ge=0.0
    )
    sigma_major_km: T.DoubleType = optional_column(
        "Error of both together across the relative velocity, along its wide axis.", "km", ge=0.0
    )
    collision_probability: T.DoubleType = optional_column(
        "Probability that the two come nearer than the radius.", ge=0.0, le=1.0
    )
    max_collision_probability: T.DoubleType = optional_column(
        "The largest probability if both errors were larger or smaller by one factor.", ge=0.0, le=1.0
    )
    no_probability_because: T.StringType = optional_column(
        "Why there is no probability.", isin=list(NO_PROBABILITY_REASONS)
    )
    error_model_id: T.StringType = optional_column("The error model of element sets, as in element_errors.")


class ConjunctionAlert(Contract):
    """An entry of the log of alerts: the insert or the retract of an alert.

    An alert's entries have sequence numbers: insert 0, retract 0, insert 1, retract 1 … The last entry is the
    valid one.
    """

    alert_id: T.StringType = required_column(
        "UUID version 5 of the pair and the ten minutes in which the approach was first expected.",
        str_matches=UUID5_PATTERN,
    )
    sequence: T.LongType = required_column("Number of the alert's version, from 0.", ge=0)
    kind: T.StringType = required_column(
        "Whether this entry inserts or retracts the version.", isin=list(ENTRY_KINDS)
    )
    reason: T.StringType = required_column("Why the entry was made.", isin=list(REASONS))
    window_start: T.TimestampType = window_column()
    sat1_object_designator: T.LongType = catalogue_number("object 1, the smaller number")
    sat2_object_designator: T.LongType = catalogue_number("object 2")
    priority: T.StringType = required_column("How urgent it is.", isin=list(PRIORITIES))
    tca: T.TimestampType = required_column("Time of closest approach, UTC, to 0.1 s.")
    miss_distance_km: T.DoubleType = required_column(
        "Distance at the closest approach, to 10 m.", "km", ge=0.0
    )
    relative_speed_km_s: T.DoubleType = required_column(
        "Relative speed at the closest approach, to 1 m/s.", "km/s", ge=0.0, le=25.0
    )
    collision_probability: T.DoubleType = optional_column(
        "Probability that the two come nearer than the radius, to two digits.", ge=0.0, le=1.0
    )
    max_collision_probability: T.DoubleType = optional_column(
        "The largest probability if both errors were larger or smaller by one factor.", ge=0.0, le=1.0
    )
    hard_body_radius_m: T.DoubleType = required_column(
        "Radius of both objects together: the sum.", "m", gt=0.0
    )
    sat1_state_source: T.StringType = required_column(
        "Whether object 1's state is from its track or its element set.", isin=list(STATE_SOURCES)
    )
    sat2_state_source: T.StringType = required_column(
        "Whether object 2's state is from its track or its element set.", isin=list(STATE_SOURCES)
    )
    reported_at: T.TimestampType = required_column("When the entry was made, UTC.")
    sat1_observation_ids: T.ArrayType = optional_column(
        "The observations of the hour that belong to object 1, if its state is a track's; for an insert.",
        dtype_kwargs={"elementType": T.StringType(), "containsNull": True},
    )
    sat2_observation_ids: T.ArrayType = optional_column(
        "The observations of the hour that belong to object 2, if its state is a track's; for an insert.",
        dtype_kwargs={"elementType": T.StringType(), "containsNull": True},
    )


class Conjunction(CloseApproach):
    """A close approach in the list of predicted approaches, computed from the current catalog."""

    event_id: T.StringType = required_column("The event's id. The same event keeps it in later lists.")
    sat1_element_age_days: T.DoubleType = required_column("Age of object 1's element set at that time.", "d")
    sat2_element_age_days: T.DoubleType = required_column("Age of object 2's element set at that time.", "d")
    first_reported: T.TimestampType = required_column(
        "Start of the first screening that found the event, UTC."
    )
    previous_miss_distance_km: T.DoubleType = optional_column("The distance in the previous list.", "km")
    screened_from: T.TimestampType = required_column("Start of the screened time, UTC.")
    screened_until: T.TimestampType = required_column("End of the screened time, UTC.")
    threshold_km: T.DoubleType = required_column("Largest miss distance of the screening.", "km", gt=0.0)
    max_element_age_days: T.DoubleType = required_column(
        "Objects with older element sets were left out of the screening.", "d", gt=0.0
    )
    sat1_sigma_r_km: T.DoubleType = optional_column(
        "Object 1's radial error expected at that age.", "km", gt=0.0
    )
    sat1_sigma_t_km: T.DoubleType = optional_column(
        "Object 1's transverse error expected at that age.", "km", gt=0.0
    )
    sat1_sigma_n_km: T.DoubleType = optional_column(
        "Object 1's normal error expected at that age.", "km", gt=0.0
    )
    sat2_sigma_r_km: T.DoubleType = optional_column(
        "Object 2's radial error expected at that age.", "km", gt=0.0
    )
    sat2_sigma_t_km: T.DoubleType = optional_column(
        "Object 2's transverse error expected at that age.", "km", gt=0.0
    )
    sat2_sigma_n_km: T.DoubleType = optional_column(
        "Object 2's normal error expected at that age.", "km", gt=0.0
    )
    covariance_source: T.StringType = optional_column(
        "The origin of these errors. They are never measured.", isin=[COVARIANCE_SOURCE]
    )
    sat1_radius_m: T.DoubleType = required_column("Hard-body radius of object 1.", "m", gt=0.0)
    sat1_radius_source: T.StringType = required_column(
        "Source of object 1's radius.", isin=list(RADIUS_SOURCES)
    )
    sat2_radius_m: T.DoubleType = required_column("Hard-body radius of object 2.", "m", gt=0.0)
    sat2_radius_source: T.StringType = required_column(
        "Source of object 2's radius.", isin=list(RADIUS_SOURCES)
    )
    default_radius_m: T.DoubleType = required_column("Radius of objects of unknown size.", "m", gt=0.0)
    hard_body_radius_m: T.DoubleType = required_column(
        "Radius of both objects together: the sum.", "m", gt=0.0
    )
    sigma_minor_km: T.DoubleType = optional_column(
        "Error of both together across the relative velocity, along its narrow axis.", "km", gt=0.0
    )
    sigma_major_km: T.DoubleType = optional_column(
        "Error of both together across the relative velocity, along its wide axis.", "km", gt=0.0
    )
    collision_probability: T.DoubleType = optional_column(
        "Probability that the two come nearer than the radius, by these errors.", ge=0.0, le=1.0
    )
    max_collision_probability: T.DoubleType = optional_column(
        "The largest probability if both errors were larger or smaller by one factor.", ge=0.0, le=1.0
    )
    probability_diluted: T.BooleanType = optional_column(
        "Whether the probability is diluted: smaller errors would first increase it."
    )
    no_probability_because: T.StringType = optional_column(
        "Why there is no probability.", isin=list(NO_PROBABILITY_REASONS)
    )
    error_model_id: T.StringType = optional_column("The error model that was used, as in element_errors.")
