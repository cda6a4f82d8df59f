"""Keep the id of an event from list to list, though its time and distance change with new element sets."""

from __future__ import annotations

from datetime import timedelta

import polars as pl

SAME_EVENT = timedelta(minutes=20)
"""The largest change of an event's time between two lists.

Two objects meet at most every forty minutes, at opposite points of their orbits. If an event's time moves
more than this, the earlier elements were useless.
"""

_PAIR = ("sat1_object_designator", "sat2_object_designator")
_COLUMNS = (*_PAIR, "kind", "tca")


def add_event_ids(found: pl.DataFrame, earlier: pl.DataFrame | None, *, reported: pl.Expr) -> pl.DataFrame:
    """Add ``event_id``, ``first_reported`` and ``previous_miss_distance_km`` to close approaches.

    An event keeps the id of the event of the same pair in the earlier list that is nearest in time, at most
    `SAME_EVENT` away. Events of the kind `together` match at any time. A new id consists of the pair and the
    second of the closest approach. The id of an event depends only on the rows of its pair in both lists, and
    not on their order.

    Args:
        found: Close approaches.
        earlier: The rows of the previous list, with ``event_id`` and ``first_reported``; None if there is
            none.
        reported: The value of ``first_reported`` for new events.
    """
    named = (
        found.sort(*_COLUMNS)
        .with_columns(
            pl.format(
                "{}-{}-{}",
                *_PAIR,
                pl.when(pl.col("kind") == "together")
                .then(pl.lit("together"))
                .otherwise(pl.col("tca").dt.strftime("%Y%m%dT%H%M%SZ")),
            ).alias("new_id")
        )
        .with_row_index("row")
    )
    if earlier is None or earlier.is_empty():
        known = named.select("row").with_columns(
            pl.lit(None, pl.String).alias("known_id"),
            pl.lit(None, pl.Datetime("us", "UTC")).alias("known_since"),
            pl.lit(None, pl.Float64).alias("previous_miss_distance_km"),
        )
    else:
        known = _match_earlier_events(named, earlier)
    return (
        named.join(known, on="row", how="left")
        .with_columns(
            pl.coalesce("known_id", "new_id").alias("event_id"),
            pl.coalesce("known_since", reported).alias("first_reported"),
        )
        .drop("row", "new_id", "known_id", "known_since")
    )


def _match_earlier_events(named: pl.DataFrame, earlier: pl.DataFrame) -> pl.DataFrame:
    """Return by row the matching event of the earlier list. Each event matches at most one row."""
    before = earlier.select(
        *_PAIR,
        (pl.col("kind") == "together").alias("together"),
        pl.col("tca").alias("known_tca"),
        pl.col("event_id").alias("known_id"),
        pl.col("first_reported").alias("known_since"),
        pl.col("miss_distance_km").alias("previous_miss_distance_km"),
    )
    both = named.select("row", *_COLUMNS, (pl.col("kind") == "together").alias("together")).join(
        before, on=[*_PAIR, "together"]
    )
    apart = (pl.col("tca") - pl.col("known_tca")).abs()
    return (
        both.with_columns(apart.alias("apart"))
        .filter(pl.col("together") | (pl.col("apart") <= SAME_EVENT))
        .sort("apart", "row", "known_tca")
        .unique("known_id", keep="first", maintain_order=True)
        .unique("row", keep="first", maintain_order=True)
        .select("row", "known_id", "known_since", "previous_miss_distance_km")
    )
