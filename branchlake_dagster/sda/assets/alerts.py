"""Conjunction alerts: a log that follows the conjunction risks, with corrections."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
from datetime import UTC, datetime, timedelta

import dagster as dg
from pydantic import Field
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster import LakehouseResource, column_metadata, consumes, table_metadata
from branchlake_dagster.sda.alerts.corrections import (
    ENTRY_COLUMNS,
    SAME_APPROACH,
    AlertRules,
    add_observations,
    derive_entries,
    select_reportable,
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
    """Which risks become alerts."""

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
    | consumes({CONJUNCTION_RISKS: "rows"}, on="tca", when_removed="deliver")
    | column_metadata(ConjunctionAlert),
)
def conjunction_alerts(
    context: dg.AssetExecutionContext,
    config: AlertConfig,
    risks: DataFrame,
    lakehouse: LakehouseResource,
) -> DataFrame:
    """Insert, correct and retract alerts, so that they agree with the risks that are published.

    Each change of the risks is consumed once. A risk that is computed again with the same result is no
    change.
    """
    rules = AlertRules(config.min_probability, config.high_probability, config.max_distance_km)
    session = risks.sparkSession
    changed = select_reportable(risks, rules)
    limits = changed.agg(F.min("tca"), F.max("tca"), F.collect_set("window_start")).collect()[0]
    # The log on `main`: the run's branch may have entries of an earlier attempt of this step. If another run
    # extends the log meanwhile, this run is refused, because its position in the risks is not the last one.
    log = _load_log(session, lakehouse)
    is_whole = log is None or context.run.tags.get("branchlake/rebuild") == "true"
    reported = log if log is None or is_whole or limits[0] is None else _near(log, limits[0], limits[1])
    entries = derive_entries(changed, reported, is_whole=is_whole)
    reports = add_observations(
        entries, _load_associations(session, lakehouse, limits[2]), datetime.now(UTC)
    ).select(*ALERT_COLUMNS)
    return reports if log is None or not is_whole else log.unionByName(reports)


def _near(log: DataFrame, first: datetime, last: datetime) -> DataFrame:
    # Spark's datetimes are in the session's zone; the distances are what counts.
    margin = SAME_APPROACH + timedelta(minutes=1)
    return log.where(F.col("tca").between(F.lit(first - margin), F.lit(last + margin)))


def _load_log(session: SparkSession, lakehouse: LakehouseResource) -> DataFrame | None:
    if not lakehouse.lakehouse.catalog().table_exists(tuple(CONJUNCTION_ALERTS.path)):
        return None
    return session.table("nessie.sda.`conjunction_alerts@main`").select(*ALERT_COLUMNS)


def _load_associations(
    session: SparkSession, lakehouse: LakehouseResource, windows: list[datetime]
) -> DataFrame | None:
    """Return the associations of the hours; None if there is no table or no hour."""
    if not windows or not lakehouse.catalog().table_exists(tuple(ASSOCIATIONS.path)):
        return None
    table = session.table(".".join(("nessie", *ASSOCIATIONS.path)))
    return table.where(F.col("window_start").isin([F.lit(one) for one in windows]))
