"""One name for an event from list to list, though its time and distance change with each element set."""

from __future__ import annotations

from datetime import timedelta

import polars as pl

SAME_EVENT = timedelta(minutes=20)
"""How far the time of an event moves at most. Two objects meet at opposite points of their orbits, so at most
every forty minutes; what moves further has orbits of which nothing was known."""

_PAIR = ("sat1_object_designator", "sat2_object_designator")
_COLUMNS = (*_PAIR, "kind", "tca")


def identified(found: pl.DataFrame, earlier: pl.DataFrame | None, *, reported: pl.Expr) -> pl.DataFrame:
    """Close approaches with ``event_id``, ``first_reported`` and ``previous_miss_distance_km``.

    An event that the earlier list has keeps its name: the one of the same pair that is nearest in time and no
    further than `SAME_EVENT`; of minutes spent together, whenever they are. A new one is named by its pair
    and the second in which it is expected.

    Args:
        found: close approaches.
        earlier: the list before, with these three columns; None: there is none.
        reported: ``first_reported`` of what is new.

    """
    named = found.with_columns(
        pl.format(
            "{}-{}-{}",
            *_PAIR,
            pl.when(pl.col("kind") == "together")
            .then(pl.lit("together"))
            .otherwise(pl.col("tca").dt.strftime("%Y%m%dT%H%M%SZ")),
        ).alias("new_id")
    ).with_row_index("row")
    if earlier is None or earlier.is_empty():
        known = named.select("row").with_columns(
            pl.lit(None, pl.String).alias("known_id"),
            pl.lit(None, pl.Datetime("us", "UTC")).alias("known_since"),
            pl.lit(None, pl.Float64).alias("previous_miss_distance_km"),
        )
    else:
        known = _known(named, earlier)
    return (
        named.join(known, on="row", how="left")
        .with_columns(
            pl.coalesce("known_id", "new_id").alias("event_id"),
            pl.coalesce("known_since", reported).alias("first_reported"),
        )
        .drop("row", "new_id", "known_id", "known_since")
    )


def _known(named: pl.DataFrame, earlier: pl.DataFrame) -> pl.DataFrame:
    """By row the event of the earlier list that it is, each of which is one row's at most."""
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
        .sort("apart", "row")
        .unique("known_id", keep="first", maintain_order=True)
        .unique("row", keep="first", maintain_order=True)
        .select("row", "known_id", "known_since", "previous_miss_distance_km")
    )
