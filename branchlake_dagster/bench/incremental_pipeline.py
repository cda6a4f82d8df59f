"""The pipeline of the benchmark in two ways: with a look-back of 14 days, and with changes.

Both ways use the same transformations. They differ in the input rows of an asset and in the rows that its
result replaces.
"""

from dataclasses import dataclass
from typing import Any

import dagster as dg
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the library's own abbreviation

from branchlake_dagster.bench.incremental_feed import FIRST_DAY
from branchlake_dagster.incremental.declaration import consumes
from branchlake_dagster.tables.specification import table_metadata

_NO_CHECKS: dict[str, Any] = {"require_checks": False, "preview_rows": 0}
_DAYS = dg.DailyPartitionsDefinition(str(FIRST_DAY), end_date="2027-01-01")
_BODY = "title STRING, device STRING, agent STRING, watched_ms BIGINT, length_ms BIGINT"

Stages = tuple[dg.AssetsDefinition, dg.AssetsDefinition]


@dataclass(frozen=True)
class Pipeline:
    """The assets of the benchmark: the raw events, and two stages in each of the two ways."""

    playback: dg.AssetKey
    lookback: Stages
    changes: Stages

    @property
    def assets(self) -> list[dg.AssetsDefinition | dg.AssetSpec]:
        """All assets, for a code location."""
        return [dg.AssetSpec(self.playback), *self.lookback, *self.changes]


def playback_daily(events: DataFrame) -> DataFrame:
    """The first stage: parse the body of each event."""
    body = F.from_json("body", _BODY)
    return events.withColumn("body", body).select(
        "event_id",
        "day",
        "at",
        "account",
        F.col("body.title").alias("title"),
        F.col("body.device").alias("device"),
        F.regexp_extract("body.agent", r"^app/(\d+)\.", 1).cast("int").alias("version"),
        F.col("body.watched_ms").alias("watched_ms"),
        (F.col("body.watched_ms") >= 0.9 * F.col("body.length_ms")).alias("completed"),
        F.sha2(F.concat_ws("/", "account", "body.device", "day"), 256).alias("session"),
    )


def playback_daily_agg(daily: DataFrame) -> DataFrame:
    """The second stage: aggregate by account and day. Needs all events of each: it counts distinct titles."""
    return daily.groupBy("day", "account").agg(
        F.count(F.lit(1)).alias("plays"),
        F.sum("watched_ms").alias("watched_ms"),
        F.count_distinct("title").alias("titles"),
        F.max("at").alias("last_at"),
        F.sum(F.col("completed").cast("int")).alias("completed"),
    )


def build_pipeline(namespace: str) -> Pipeline:
    """Build the assets of both ways in one namespace."""
    playback = dg.AssetKey([namespace, "playback"])
    return Pipeline(
        playback, _build_lookback_stages(namespace, playback), _build_change_stages(namespace, playback)
    )


def _build_lookback_stages(namespace: str, playback: dg.AssetKey) -> Stages:
    """Build the stages that recompute and overwrite the last 14 partitions in each run."""
    key = dg.AssetKey([namespace, "lookback_daily"])
    single, days = dg.BackfillPolicy.single_run(), table_metadata(partition_by="day", **_NO_CHECKS)

    @dg.asset(
        key=key,
        partitions_def=_DAYS,
        backfill_policy=single,
        metadata=days,
        ins={"events": dg.AssetIn(playback)},
    )
    def lookback_daily(context: dg.AssetExecutionContext, events: DataFrame) -> DataFrame:
        window = context.partition_time_window
        first, end = F.lit(window.start.date()), F.lit(window.end.date())
        return playback_daily(events.filter((F.col("day") >= first) & (F.col("day") < end)))

    @dg.asset(
        key=[namespace, "lookback_daily_agg"],
        partitions_def=_DAYS,
        backfill_policy=single,
        metadata=days,
        ins={"daily": dg.AssetIn(key)},
    )
    def lookback_daily_agg(daily: DataFrame) -> DataFrame:
        return playback_daily_agg(daily)

    return lookback_daily, lookback_daily_agg


def _build_change_stages(namespace: str, playback: dg.AssetKey) -> Stages:
    """Build the stages by changes: the first gets new events, the second all events of the changed keys."""
    key = dg.AssetKey([namespace, "changes_daily"])

    @dg.asset(
        key=key,
        metadata=table_metadata(write_mode="append", layout=["day"], **_NO_CHECKS)
        | consumes({playback: "rows"}),
        ins={"events": dg.AssetIn(playback)},
    )
    def changes_daily(events: DataFrame) -> DataFrame:
        return playback_daily(events)

    @dg.asset(
        key=[namespace, "changes_daily_agg"],
        # A change affects a few rows in many files. Merge-on-read marks them as deleted and keeps the files.
        metadata=table_metadata(
            write_mode="upsert",
            keys=["day", "account"],
            layout=["day"],
            properties={"write.merge.mode": "merge-on-read"},
            **_NO_CHECKS,
        )
        | consumes({key: "keys"}, keys=["day", "account"]),
        ins={"daily": dg.AssetIn(key)},
    )
    def changes_daily_agg(daily: DataFrame) -> DataFrame:
        return playback_daily_agg(daily)

    return changes_daily, changes_daily_agg
