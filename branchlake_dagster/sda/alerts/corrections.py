"""Derive alert entries from changes of the conjunction risks, on Spark.

A conjunction risk is a row about one close approach of two objects: its time (`tca`, the time of closest
approach), the miss distance and, if it is known, the probability of a collision.

The log of alerts only grows. An entry is an ``insert`` or a ``retract`` of one alert, with a sequence number:
``insert`` 0, and for each correction ``retract`` N and then ``insert`` N + 1. If the last entry of an alert
is a ``retract``, the approach is no longer expected. Ordered by alert, sequence and kind (insert before
retract of the same number), the entries of an alert alternate between ``insert`` and ``retract``.

An alert is about one approach of a pair. Its id is a hash of the ordered pair and of the ten minutes in which
the approach was first expected, so it survives corrections. Risks of a pair whose times are at most
`SAME_APPROACH` apart are the same approach: two objects meet at most once per half revolution, and
corrections move the time by seconds.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.sda.alerts.entry_names import (
    CANCELED,
    CORRECTED,
    EXPECTED_AGAIN,
    HIGH,
    INSERT,
    LOW,
    MEDIUM,
    NEW,
    RETRACT,
)
from branchlake_dagster.sda.conjunctions.screening import Kind
from branchlake_dagster.sda.trust.assessment import TOO_SLOW
from branchlake_dagster.sda.uuid_sql import uuid5_sql

ALERT_NAMESPACE = uuid.UUID("0c1b5d3a-6a3e-5a5b-8f0e-2d9f4c7b6e11")
"""The namespace of alert ids. If it changed, every alert would get a new id."""
SAME_APPROACH = timedelta(minutes=10)
"""The largest time between two risks of a pair that are the same approach."""

ALERT_FIELDS = (
    *("window_start", "sat1_object_designator", "sat2_object_designator", "priority", "tca"),
    *("miss_distance_km", "relative_speed_km_s", "collision_probability", "max_collision_probability"),
    *("hard_body_radius_m", "sat1_state_source", "sat2_state_source"),
)
"""The facts of an alert. A correction is a change of one of these after rounding."""
ENTRY_COLUMNS = ("alert_id", "sequence", "kind", "reason", *ALERT_FIELDS)

_PAIR = ("sat1_object_designator", "sat2_object_designator")
_SAME_MICROS = SAME_APPROACH // timedelta(microseconds=1)


@dataclass(frozen=True)
class AlertRules:
    """Rules that decide which risks become alerts, and with which priority.

    An encounter (a pass of two objects with a clear minimum of the distance) becomes an alert if its
    probability is at least ``min_probability``. Without a probability it becomes an alert if its miss
    distance is at most ``max_distance_km``, except if the probability is missing because the objects move
    together too slowly, as in formations. From ``high_probability`` on, the priority is high. Its default is
    1e-4, the probability from which NASA's conjunction assessment mitigates risks (NASA/SP-20230002470).
    """

    min_probability: float = 1e-5
    high_probability: float = 1e-4
    max_distance_km: float = 1.0

    @property
    def condition(self) -> str:
        """The SQL condition that is true for risks which become alerts."""
        return (
            f"kind = '{Kind.ENCOUNTER.value}' AND (collision_probability >= {self.min_probability!r}D"
            " OR (collision_probability IS NULL AND no_probability_because <> "
            f"'{TOO_SLOW}' AND miss_distance_km <= {self.max_distance_km!r}D))"
        )

    @property
    def priority(self) -> str:
        """The SQL expression of an alert's priority: high, medium or, without a probability, low."""
        return (
            f"CASE WHEN collision_probability >= {self.high_probability!r}D THEN '{HIGH}'"
            f" WHEN collision_probability IS NOT NULL THEN '{MEDIUM}' ELSE '{LOW}' END"
        )


def with_current_risks(changed: DataFrame, current: DataFrame) -> DataFrame:
    """Return the removed risks, and all current risks of the pairs that have a changed one.

    All current risks of a pair are needed because an approach near the boundary of two hours can have a risk
    in each hour. If one of the two is removed, the other one still keeps the alert.

    Args:
        changed: Risks that were added or removed, with ``_change_type`` (``INSERT`` or ``DELETE``).
        current: The present risks from `SAME_APPROACH` before the first changed one to the same time after
            the last.

    Returns:
        DataFrame: The current risks of the pairs with the ``_change_type`` ``INSERT``, and the removed risks.
    """
    pairs = changed.select(*_PAIR).distinct()
    of_pairs = current.join(F.broadcast(pairs), on=list(_PAIR), how="left_semi")
    removed = changed.where("_change_type = 'DELETE'")
    return of_pairs.withColumn("_change_type", F.lit("INSERT")).unionByName(removed)


def select_reportable(risks: DataFrame, rules: AlertRules) -> DataFrame:
    """Return the risks that become alerts and all removed risks, with rounded `ALERT_FIELDS`.

    All removed risks are kept because earlier rules may have reported them. All columns stay, and
    ``priority`` is added.

    Distances are rounded to 10 m, speeds to 1 m/s, times to 0.1 s and probabilities to two digits, so that
    insignificant changes do not correct an alert.
    """
    reportable = risks.where(f"_change_type = 'DELETE' OR ({rules.condition})")
    reportable = reportable.withColumn("priority", F.expr(rules.priority))
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
    """Return the new entries (`ENTRY_COLUMNS`) that make the log of alerts agree with the risks.

    Each approach keeps the alert of the log that is nearest in time, or gets a new alert. Cost: one shuffle,
    of the changed risks and of the log's entries about the same time.

    Args:
        changed: Rows of `select_reportable`. ``_change_type`` is ``INSERT`` for risks that are expected and
            ``DELETE`` for those that were removed.
        reported: The log of alerts, or None if there is none. It must have at least all entries of the alerts
            that are within `SAME_APPROACH` of a risk.
        is_whole: Whether ``changed`` has all risks, so that every alert without a risk is canceled. Otherwise
            only alerts of removed risks are canceled.
    """
    rows = changed.select(
        *_PAIR, "tca", "_change_type", F.expr(_FIELDS), F.expr(f"cast(NULL AS {_ENTRY_TYPE}) AS entry")
    )
    if reported is not None:
        entry = F.expr(f"struct(alert_id, sequence, kind = '{RETRACT}' AS is_retracted) AS entry")
        rows = rows.unionByName(
            reported.select(*_PAIR, "tca", F.lit("LOG").alias("_change_type"), F.expr(_FIELDS), entry)
        )
    micros = F.unix_micros("tca")
    by_time = Window.partitionBy(*_PAIR).orderBy("tca")
    is_next = F.coalesce(micros - F.lag(micros).over(by_time) > _SAME_MICROS, F.lit(True)).cast("int")
    until_here = by_time.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    numbered = rows.withColumn("is_next", is_next).withColumn("approach", F.sum("is_next").over(until_here))
    approaches = numbered.groupBy(*_PAIR, "approach").agg(
        F.expr(f"min_by(fields, {_SEVERITY}) FILTER (WHERE _change_type = 'INSERT') AS expected"),
        F.expr("collect_list(unix_micros(tca)) FILTER (WHERE _change_type = 'DELETE') AS removed"),
        F.expr("collect_list(struct(entry.*, fields)) FILTER (WHERE _change_type = 'LOG') AS log"),
    )
    decided = (
        approaches.withColumn("alerts", F.expr(_LAST_ENTRIES))
        .withColumn("matched", F.expr(_nearest_alert("unix_micros(expected.tca)")))
        .withColumn("new_id", F.expr(_NEW_ID))
        .withColumn("canceled", F.expr(_canceled(is_whole=is_whole)))
        .withColumn("new_entry", F.explode(F.expr(_NEW_ENTRIES)))
    )
    return decided.select(
        *(f"new_entry.{name}" for name in ("alert_id", "sequence", "kind", "reason")), "new_entry.fields.*"
    )


_SEVERITY = "struct(-coalesce(fields.collision_probability, -1D), fields.miss_distance_km, tca)"
"""SQL by which the risk of an alert is chosen if an approach has several: the smallest value.

The most probable risk comes first, then the nearest one. Risks without a probability come last.
"""
_FIELDS = f"struct({', '.join(ALERT_FIELDS)}) AS fields"
_ENTRY_TYPE = "struct<alert_id: string, sequence: bigint, is_retracted: boolean>"
_LAST_ENTRIES = """
    filter(log, entry -> NOT exists(log, other_entry -> other_entry.alert_id = entry.alert_id
        AND struct(other_entry.sequence, other_entry.is_retracted)
            > struct(entry.sequence, entry.is_retracted)))"""
"""SQL of the last entry of each alert of the approach: nearly always there is one alert."""


def _nearest_alert(micros: str) -> str:
    """Return SQL of the alert that is nearest in time to an instant; null without an alert or an instant.

    `micros` is SQL of the instant, in microseconds since 1970.
    """
    apart = f"abs(unix_micros(alert.fields.tca) - {micros})"
    ordered = f"transform(alerts, alert -> struct({apart} AS apart, alert.alert_id AS alert_id))"
    is_nearest = f"alert.alert_id = array_min({ordered}).alert_id"
    return f"if({micros} IS NULL, NULL, get(filter(alerts, alert -> {is_nearest}), 0))"


def _canceled(*, is_whole: bool) -> str:
    """Return SQL of the alerts that are canceled because they no longer have a risk.

    With `is_whole`, all risks of the pair are known, and these are all alerts that no risk matches. Otherwise
    only changed risks are known, and these are the alerts without a match to which a removed risk belonged.
    """
    is_open = "NOT alert.is_retracted AND NOT (alert.alert_id <=> matched.alert_id)"
    if is_whole:
        return f"filter(alerts, alert -> {is_open})"
    # A removed risk belongs to the alert that is nearest to it.
    nearest = _nearest_alert("at")
    of_removed = f"transform(removed, at -> {nearest}.alert_id)"
    return f"filter(alerts, alert -> {is_open} AND array_contains({of_removed}, alert.alert_id))"


_NEW_ID = (
    "if(expected IS NOT NULL AND matched IS NULL, "
    + uuid5_sql(
        ALERT_NAMESPACE,
        "concat_ws('|', expected.sat1_object_designator, expected.sat2_object_designator,"
        f" unix_micros(expected.tca) div {_SAME_MICROS})",
    )
    + ", NULL)"
)


def _entry(alert_id: str, sequence: str, kind: str, reason: str, fields: str) -> str:
    return (
        f"named_struct('alert_id', {alert_id}, 'sequence', cast({sequence} AS bigint), 'kind', '{kind}',"
        f" 'reason', '{reason}', 'fields', {fields})"
    )


_RETRACTED = _entry("matched.alert_id", "matched.sequence", RETRACT, CORRECTED, "matched.fields")
_CORRECTED = _entry("matched.alert_id", "matched.sequence + 1", INSERT, CORRECTED, "expected")
_EXPECTED_AGAIN = _entry("matched.alert_id", "matched.sequence + 1", INSERT, EXPECTED_AGAIN, "expected")
_CANCELED = _entry("alert.alert_id", "alert.sequence", RETRACT, CANCELED, "alert.fields")
_NEW_ENTRIES = f"""concat(
    CASE WHEN expected IS NULL THEN array()
        WHEN matched IS NULL THEN array({_entry("new_id", "0", INSERT, NEW, "expected")})
        WHEN matched.is_retracted THEN array({_EXPECTED_AGAIN})
        WHEN matched.fields = expected THEN array()
        ELSE array({_RETRACTED}, {_CORRECTED}) END,
    transform(canceled, alert -> {_CANCELED}))"""


def add_observations(entries: DataFrame, associations: DataFrame | None, reported_at: datetime) -> DataFrame:
    """Add the time of the report, and the ids of the observations on which the objects' states are based.

    ``sat1_observation_ids`` and ``sat2_observation_ids`` are empty for retracts, and for objects whose state
    is from an element set instead of a track.

    Args:
        entries: Rows of `derive_entries`.
        associations: The associations of the entries' hours, or None. Without them all lists are empty.
        reported_at: The time of the report, with a time zone.
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
