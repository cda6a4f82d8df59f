"""Playback events of simulated days, written to `main`. A few percent of the events arrive late."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the library's own abbreviation

FIRST_DAY = date(2026, 1, 1)
WINDOW = 14
"""Days that a look-back recomputes. No event arrives more than 13 days late."""
_DAY_S = 86_400


@dataclass(frozen=True)
class FeedSize:
    """The size of a feed: events that arrive per day, and the share of them that belongs to earlier days."""

    name: str
    events_a_day: int
    late_share: float = 0.03

    @property
    def accounts(self) -> int:
        """The number of accounts. Each has about five events per day."""
        return max(10, self.events_a_day // 5)


SIZES = {
    size.name: size
    for size in (FeedSize("small", 20_000), FeedSize("medium", 200_000), FeedSize("large", 1_000_000))
}


def date_of_day(number: int) -> date:
    """Return the date of a simulated day. The first day has number 0."""
    return FIRST_DAY + timedelta(days=number)


def append_day(session: SparkSession, table: str, size: FeedSize, number: int) -> None:
    """Append the events that arrive on one day: events of this day, and late events of the 13 days before."""
    _build_events(session, size, number).writeTo(table).append()


def create_events_table(session: SparkSession, table: str) -> None:
    """Create the table of raw events, partitioned by the day of playback. `body` contains JSON."""
    session.sql(
        f"CREATE TABLE {table} (event_id BIGINT, day DATE, at TIMESTAMP, account INT, body STRING)"
        " PARTITIONED BY (day)"
    )


def _build_events(session: SparkSession, size: FeedSize, number: int) -> DataFrame:
    first = number * size.events_a_day
    days_late = F.when(
        (_random_fraction("late") < size.late_share) & F.lit(number > 0),
        1 + F.pmod(_hash_event("lag"), min(number, WINDOW - 1) or 1),
    ).otherwise(0)
    second = F.pmod(_hash_event("second"), F.lit(_DAY_S))
    body = F.to_json(
        F.struct(
            F.concat(
                F.lit("title-"), F.floor(5_000 * F.pow(_random_fraction("title"), 3)).cast("string")
            ).alias("title"),
            F.element_at(
                F.split(F.lit("tv,phone,tablet,web"), ","),
                (F.pmod(_hash_event("device"), F.lit(4)) + 1).cast("int"),
            ).alias("device"),
            F.concat(
                F.lit("app/"), F.pmod(_hash_event("major"), F.lit(9)).cast("string"), F.lit(".2 (build 77)")
            ).alias("agent"),
            F.pmod(_hash_event("watched"), F.lit(5_400_000)).alias("watched_ms"),
            F.lit(5_400_000).alias("length_ms"),
        )
    )
    day = F.date_sub(F.lit(date_of_day(number)), days_late.cast("int"))
    return (
        session.range(first, first + size.events_a_day)
        .withColumnRenamed("id", "event_id")
        .withColumn("day", day)
        .select(
            "event_id",
            "day",
            (F.col("day").cast("timestamp") + F.make_dt_interval(secs=second)).alias("at"),
            F.pmod(_hash_event("account"), F.lit(size.accounts)).cast("int").alias("account"),
            body.alias("body"),
        )
    )


def _hash_event(salt: str) -> Column:
    return F.xxhash64(F.col("event_id"), F.lit(salt))


def _random_fraction(salt: str) -> Column:
    """Return a pseudo-random number from 0 to 1 that depends only on the event and `salt`."""
    return F.pmod(_hash_event(salt), F.lit(1_000_000)) / 1_000_000
