"""Asset `conjunction_alerts`: a log of alerts that follows the conjunction risks, with corrections."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
from datetime import UTC, datetime, timedelta

import dagster as dg
from pydantic import Field
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster import (
    LakehouseResource,
    column_metadata,
    computes_everything,
    consumes,
    table_metadata,
)
from branchlake_dagster.sda.alerts.corrections import (
    ENTRY_COLUMNS,
    SAME_APPROACH,
    AlertRules,
    add_observations,
    derive_entries,
    select_reportable,
    with_current_risks,
)
from branchlake_dagster.sda.assets.associations import ASSOCIATIONS
from branchlake_dagster.sda.assets.risks import CONJUNCTION_RISKS, GROUP
from branchlake_dagster.sda.assets.upkeep import OWNERS
from branchlake_dagster.sda.contracts import ConjunctionAlert

CONJUNCTION_ALERTS = dg.AssetKey(["sda", "conjunction_alerts"])
ALERT_COLUMNS = (
    *ENTRY_COLUMNS,
    *("reported_at", "sat1_observation_ids", "sat2_observation_ids"),
)
_RULES = AlertRules()


class AlertConfig(dg.Config):
    """The run configuration of the rules by which risks become alerts."""

    min_probability: float = Field(
        _RULES.min_probability, gt=0, description="Smallest probability of collision that is reported."
    )
    high_probability: float = Field(
        _RULES.high_probability, gt=0, description="Smallest probability of an alert of high priority."
    )
    max_distance_km: float = Field(
        _RULES.max_distance_km,
        gt=0,
        description="Largest miss distance that is reported if there is no probability, km.",
    )


@dg.asset(
    key=CONJUNCTION_ALERTS,
    group_name=GROUP,
    owners=OWNERS,
    kinds={"iceberg", "spark"},
    ins={"risks": dg.AssetIn(CONJUNCTION_RISKS, partition_mapping=dg.AllPartitionMapping())},
    deps=[ASSOCIATIONS],
    metadata=table_metadata(write_mode="append", layout=["day(tca)"], require_checks=True)
    | consumes({CONJUNCTION_RISKS: "rows"}, when_removed="deliver")
    | column_metadata(ConjunctionAlert),
)
def conjunction_alerts(
    context: dg.AssetExecutionContext,
    config: AlertConfig,
    risks: DataFrame,
    lakehouse: LakehouseResource,
) -> DataFrame:
    """Insert, correct and retract alerts, so that they agree with the published conjunction risks.

    Each change of the risks is consumed once. A risk that was computed again with the same result does not
    count as a change.
    """
    rules = AlertRules(config.min_probability, config.high_probability, config.max_distance_km)
    session = risks.sparkSession
    is_whole = computes_everything(context, lakehouse)
    # The log on `main`: the run's branch may have entries of an earlier attempt of this step. If another run
    # extends the log meanwhile, this run is refused, because its position in the risks is not the last one.
    log = _load_log(session, lakehouse)
    micros = F.unix_micros("tca")
    first, last = risks.agg(F.min(micros), F.max(micros)).collect()[0]
    changed, reported = risks, log
    if first is None and not is_whole:
        reported = None
    elif not is_whole:
        current = session.table(_spark_name(CONJUNCTION_RISKS)).where(_is_between(first, last, SAME_APPROACH))
        changed = with_current_risks(risks, current)
        reported = None if log is None else _alerts_near(log, first, last)
    entries = derive_entries(select_reportable(changed, rules), reported, is_whole=is_whole)
    associations = None if first is None else _load_associations(session, lakehouse, first, last)
    reports = add_observations(entries, associations, datetime.now(UTC)).select(*ALERT_COLUMNS)
    return reports if log is None or not is_whole else log.unionByName(reports)


def _is_between(first: int, last: int, margin: timedelta, column: str = "tca") -> Column:
    """Return the condition that a time column is between two instants, widened by `margin` on both sides.

    The instants are UTC microseconds since 1970.
    """
    micros = margin // timedelta(microseconds=1)
    low, high = (F.timestamp_micros(F.lit(one)) for one in (first - micros, last + micros))
    return F.col(column).between(low, high)


def _alerts_near(log: DataFrame, first: int, last: int) -> DataFrame:
    """Return all entries of the alerts to which risks between two instants may belong."""
    near = log.where(_is_between(first, last, 2 * SAME_APPROACH)).select("alert_id").distinct()
    # Corrections move an alert by seconds, so entries within a day are enough.
    return log.where(_is_between(first, last, timedelta(days=1))).join(near, "alert_id", "left_semi")


def _load_log(session: SparkSession, lakehouse: LakehouseResource) -> DataFrame | None:
    if not lakehouse.lakehouse.catalog().table_exists(tuple(CONJUNCTION_ALERTS.path)):
        return None
    return session.table("nessie.sda.`conjunction_alerts@main`").select(*ALERT_COLUMNS)


def _load_associations(
    session: SparkSession, lakehouse: LakehouseResource, first: int, last: int
) -> DataFrame | None:
    """Return the associations of the hours with approaches between two instants.

    None if the table of associations does not exist.
    """
    if not lakehouse.catalog().table_exists(tuple(ASSOCIATIONS.path)):
        return None
    hours = _is_between(first, last, timedelta(hours=1) + SAME_APPROACH, "window_start")
    return session.table(_spark_name(ASSOCIATIONS)).where(hours)


def _spark_name(key: dg.AssetKey) -> str:
    return ".".join(("nessie", *key.path))
