"""Derive alert entries from changes of the conjunction risks, on Spark.

The log of alerts only grows. An entry is an ``insert`` or a ``retract`` of one alert, with a sequence number:
``insert`` 0, and for each correction ``retract`` N and then ``insert`` N + 1. A ``retract`` that is the last
entry is a tombstone: the approach is no longer expected. Ordered by alert, sequence and kind (insert before
retract of the same number), the entries of an alert alternate.

An alert is about one approach of a pair. Its id is a hash of the ordered pair and of the ten minutes in which
the approach was first expected, so it survives corrections. A changed risk belongs to the known alert of its
pair that is nearest in time, up to `SAME_APPROACH`: two objects meet at most every half revolution.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.sda.conjunctions.screening import Kind
from branchlake_dagster.sda.trust.assessment import TOO_SLOW
from branchlake_dagster.sda.uuid_sql import uuid5_sql

ALERT_NAMESPACE = uuid.UUID("0c1b5d3a-6a3e-5a5b-8f0e-2d9f4c7b6e11")
"""The namespace of alert ids. If it changed, every alert would get a new id."""
SAME_APPROACH = timedelta(minutes=10)
INSERT, RETRACT = ENTRY_KINDS = ("insert", "retract")
HIGH, MEDIUM, LOW = PRIORITIES = ("high", "medium", "low")
NEW, CORRECTED, CANCELED, EXPECTED_AGAIN = REASONS = ("new", "corrected", "canceled", "expected again")

ALERT_FIELDS = (
    *("window_start", "sat1_object_designator", "sat2_object_designator", "priority", "tca"),
    *("miss_distance_km", "relative_speed_km_s", "collision_probability", "max_collision_probability"),
    *("hard_body_radius_m", "sat1_state_source", "sat2_state_source"),
)
"""What an alert states. A correction is a change of one of these, after rounding."""
ENTRY_COLUMNS = ("alert_id", "sequence", "kind", "reason", *ALERT_FIELDS)

_PAIR = ("sat1_object_designator", "sat2_object_designator")
_SAME_MICROS = SAME_APPROACH // timedelta(microseconds=1)
_ALERT_ID = uuid5_sql(
    ALERT_NAMESPACE, "concat_ws('|', sat1_object_designator, sat2_object_designator, first_expected)"
)


@dataclass(frozen=True)
class AlertRules:
    """Which risks become alerts, and of what priority.

    An encounter is reported if its probability is at least ``min_probability``, or if it has none and its
    miss distance is at most ``max_distance_km``. NASA's conjunction assessment mitigates risks from a
    probability of 1e-4 on (NASA/SP-20230002470), so this is ``high_probability``. Encounters that are too
    slow for a probability, in formations, are not reported.
    """

    min_probability: float = 1e-5
    high_probability: float = 1e-4
    max_distance_km: float = 1.0

    @property
    def condition(self) -> str:
        """The SQL condition on a risk."""
        return (
            f"kind = '{Kind.ENCOUNTER.value}' AND (collision_probability >= {self.min_probability!r}D"
            " OR (collision_probability IS NULL AND no_probability_because <> "
            f"'{TOO_SLOW}' AND miss_distance_km <= {self.max_distance_km!r}D))"
        )

    @property
    def priority(self) -> str:
        """The SQL expression of the priority."""
        return (
            f"CASE WHEN collision_probability >= {self.high_probability!r}D THEN '{HIGH}'"
            f" WHEN collision_probability IS NOT NULL THEN '{MEDIUM}' ELSE '{LOW}' END"
        )


def select_reportable(risks: DataFrame, rules: AlertRules) -> DataFrame:
    """Return `ALERT_FIELDS` of the risks that become alerts, rounded; other columns of theirs stay.

    Distances are rounded to 10 m, speeds to 1 m/s, times to 0.1 s and probabilities to two digits, so that an
    alert is not corrected for a change without a meaning.
    """
    reportable = risks.where(rules.condition).withColumn("priority", F.expr(rules.priority))
    tenth = F.floor((F.unix_micros("tca") + 50_000) / 100_000) * 100_000
    return reportable.withColumns(
        {
            "tca": F.timestamp_micros(tenth.cast("long")),
            "miss_distance_km": F.round("miss_distance_km", 2),
            "relative_speed_km_s": F.round("relative_speed_km_s", 3),
            **{name: _two_digits(name) for name in ("collision_probability", "max_collision_probability")},
        }
    )


def _two_digits(name: str) -> Column:
    # A decimal text has no binary rounding: 0.00012 stays 0.00012.
    return F.expr(f"CASE WHEN {name} > 0 THEN cast(format_string('%.1e', {name}) AS double) ELSE {name} END")


def derive_entries(changed: DataFrame, reported: DataFrame | None, *, is_whole: bool = False) -> DataFrame:
    """Return the entries (`ENTRY_COLUMNS`) that bring the log of alerts up to date.

    Args:
        changed: reportable risks that were added or removed (`select_reportable`), with ``_change_type``
            ``INSERT`` or ``DELETE``.
        reported: the log of alerts, or None if there is none. At least the alerts of the changed pairs, from
            `SAME_APPROACH` before the first changed risk to the same time after the last one.
        is_whole: whether ``changed`` has all risks, so that alerts without a risk are canceled.

    """
    expected = changed.where("_change_type = 'INSERT'").select(*ALERT_FIELDS)
    if reported is None:
        return _new_entries(expected)
    latest = _latest_entries(reported)
    matched = _match(expected, latest)
    unknown = expected.join(matched.select(*_PAIR, "tca"), on=[*_PAIR, "tca"], how="left_anti")
    # An id that exists belongs to another risk of the same ten minutes, which is nearer to that alert.
    new = _new_entries(unknown).join(latest.select("alert_id"), on="alert_id", how="left_anti")
    known = latest.select("alert_id", "sequence", F.col("kind").alias("last_kind"), *_renamed("old"))
    corrections = matched.join(known, on="alert_id").where(
        f"last_kind = '{RETRACT}' OR NOT ({' AND '.join(f'{name} <=> old_{name}' for name in ALERT_FIELDS)})"
    )
    retracted = corrections.where(f"last_kind = '{INSERT}'")
    without_risk = known.where(f"last_kind = '{INSERT}'").join(
        matched.select("alert_id"), on="alert_id", how="left_anti"
    )
    if not is_whole:
        without_risk = _with_removed_risk(without_risk, changed.where("_change_type = 'DELETE'"))
    return (
        new.unionByName(_entries(retracted, "sequence", RETRACT, F.lit(CORRECTED), "old_"))
        .unionByName(
            _entries(
                corrections,
                "sequence + 1",
                INSERT,
                F.expr(f"if(last_kind = '{RETRACT}', '{EXPECTED_AGAIN}', '{CORRECTED}')"),
                "",
            )
        )
        .unionByName(_entries(without_risk, "sequence", RETRACT, F.lit(CANCELED), "old_"))
    )


def _renamed(prefix: str) -> list[Column]:
    return [F.col(name).alias(f"{prefix}_{name}") for name in ALERT_FIELDS]


def _entries(frame: DataFrame, sequence: str, kind: str, reason: Column, prefix: str) -> DataFrame:
    return frame.select(
        "alert_id",
        F.expr(sequence).cast("long").alias("sequence"),
        F.lit(kind).alias("kind"),
        reason.alias("reason"),
        *(F.col(f"{prefix}{name}").alias(name) for name in ALERT_FIELDS),
    )


def _latest_entries(reported: DataFrame) -> DataFrame:
    """Return the last entry of each alert."""
    order = Window.partitionBy("alert_id").orderBy(
        F.col("sequence").desc(), (F.col("kind") == RETRACT).desc()
    )
    return reported.withColumn("rank", F.row_number().over(order)).where("rank = 1").drop("rank")


def _match(expected: DataFrame, latest: DataFrame) -> DataFrame:
    """Return the expected risks that have a known alert, with its ``alert_id``; each alert at most once."""
    alerts = latest.select("alert_id", *_PAIR, F.col("tca").alias("known_tca"))
    apart = F.abs(F.unix_micros("tca") - F.unix_micros("known_tca"))
    pairs = expected.join(alerts, on=list(_PAIR)).withColumn("apart", apart).where(f"apart <= {_SAME_MICROS}")
    nearest_alert = Window.partitionBy(*_PAIR, "tca").orderBy("apart", "alert_id")
    nearest_risk = Window.partitionBy("alert_id").orderBy("apart", "tca")
    return (
        pairs.withColumn("rank", F.row_number().over(nearest_alert))
        .where("rank = 1")
        .withColumn("rank", F.row_number().over(nearest_risk))
        .where("rank = 1")
        .select("alert_id", *ALERT_FIELDS)
    )


def _new_entries(unknown: DataFrame) -> DataFrame:
    """Return the first entries of alerts that are not known; of several with one id the nearest approach."""
    named = unknown.withColumn("first_expected", F.expr(f"unix_micros(tca) div {_SAME_MICROS}")).withColumn(
        "alert_id", F.expr(_ALERT_ID)
    )
    nearest = Window.partitionBy("alert_id").orderBy("miss_distance_km", "tca")
    first = named.withColumn("rank", F.row_number().over(nearest)).where("rank = 1")
    return _entries(first, "0", INSERT, F.lit(NEW), "")


def _with_removed_risk(alerts: DataFrame, removed: DataFrame) -> DataFrame:
    """Return the alerts whose risk was removed: a risk of the same pair at about the same time."""
    risks = removed.select(
        *(F.col(name).alias(f"old_{name}") for name in _PAIR), F.col("tca").alias("removed_tca")
    )
    apart = F.abs(F.unix_micros("old_tca") - F.unix_micros("removed_tca"))
    near = alerts.join(risks, on=[f"old_{name}" for name in _PAIR]).where(apart <= _SAME_MICROS)
    return alerts.join(near.select("alert_id").distinct(), on="alert_id", how="left_semi")


def add_observations(entries: DataFrame, associations: DataFrame | None, reported_at: datetime) -> DataFrame:
    """Add the time of the report, and the observations of objects whose state is from a track.

    Args:
        entries: rows of `derive_entries`.
        associations: the associations of the entries' hours, or None.
        reported_at: the time of the report, with a zone.

    """
    stamped = entries.withColumn("reported_at", F.lit(reported_at.isoformat()).cast("timestamp"))
    if associations is None:
        return stamped.withColumns(
            {f"sat{k}_observation_ids": F.array().cast("array<string>") for k in (1, 2)}
        )
    used = (
        associations.where("result IN ('confirmed', 'reassigned')")
        .groupBy("window_start", "sat_no")
        .agg(F.array_sort(F.collect_set("observation_id")).alias("observation_ids"))
    )
    for k in (1, 2):
        of_object = used.withColumnsRenamed(
            {"sat_no": f"sat{k}_object_designator", "observation_ids": f"sat{k}_track_ids"}
        )
        stamped = (
            stamped.join(of_object, on=["window_start", f"sat{k}_object_designator"], how="left")
            .withColumn(
                f"sat{k}_observation_ids",
                F.expr(
                    f"if(sat{k}_state_source = 'track' AND kind = '{INSERT}',"
                    f" coalesce(sat{k}_track_ids, array()), cast(array() AS array<string>))"
                ),
            )
            .drop(f"sat{k}_track_ids")
        )
    return stamped
