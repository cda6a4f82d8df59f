"""Compute the state of each object (such as tracked, stale or decayed) and the facts known about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

import polars as pl

from branchlake_dagster.sda.registry.merge import is_epoch_plausible
from branchlake_dagster.sda.registry.sources import feed_name

STALE_AFTER = timedelta(days=30)
"""An object is stale if its element set is older than this at the newest pull. Space-Track's
current catalog has the same limit."""

GONE_AFTER = timedelta(days=3)
"""An object is stale if its feed has continued without it for longer than this. Feeds often drop objects for
some hours."""

DECAY_TOLERANCE = timedelta(days=1)
"""Decays have a date without a time. An epoch after the end of that day shows that the object still flies."""

STATES = ("tracked", "stale", "decayed", "invalid", "untracked")
"""The possible states of an object:

- tracked: the object may be propagated.
- stale: its elements are old, or its feed has dropped it.
- decayed: the satellite catalog states a decay, and there are no later elements.
- invalid: it has only elements with epochs in the future.
- untracked: it has no elements.
"""

OBJECT_COLUMNS: dict[str, pl.DataType] = {
    "sat_no": pl.Int64(),
    "object_name": pl.String(),
    "object_id": pl.String(),
    "state": pl.String(),
    "first_seen": pl.Datetime("us", "UTC"),
    "last_seen": pl.Datetime("us", "UTC"),
    "feed": pl.String(),
    "epoch": pl.Datetime("us", "UTC"),
    "source": pl.String(),
    "owner": pl.String(),
    "object_type": pl.String(),
    "launch_date": pl.Date(),
    "decay_date": pl.Date(),
    "rcs_m2": pl.Float64(),
    "rcs_size": pl.String(),
    "satcat_at": pl.Datetime("us", "UTC"),
}
"""One row per object. ``satcat_at`` is the collection time of the satellite catalog with its facts."""

FACT_COLUMNS = ("owner", "object_type", "launch_date", "decay_date", "rcs_m2", "rcs_size")


@dataclass(frozen=True)
class LatestSightings:
    """The newest times at which pulled files listed objects. The states of all objects depend on them.

    ``by_feed`` is the last sighting of any object that was last seen in the feed. ``newest`` is the latest
    collection time of the element sets and satellite catalog entries of all objects; None without objects.
    """

    by_feed: Mapping[str, datetime]
    newest: datetime | None


def update_objects(
    objects: pl.DataFrame,
    winners: pl.DataFrame,
    pulled_sets: pl.DataFrame,
    entries: pl.DataFrame,
    latest: LatestSightings,
) -> pl.DataFrame:
    """Return all objects (``OBJECT_COLUMNS``) after one or more pulls, sorted by ``sat_no``.

    The order of pulls does not matter: each column is a minimum, a maximum or the newest value by collection
    time. Only the state depends on other objects, by `latest`, so the rows of some objects can be updated
    apart from the others.

    Args:
        objects: the objects before, ``OBJECT_COLUMNS``.
        winners: the merged catalog, see `CatalogueMerge`.
        pulled_sets: the element sets of the pulls, ``PULLED_COLUMNS``.
        entries: rows of satellite catalogs, ``ENTRY_COLUMNS`` with ``collected_at``.
        latest: the latest sightings of all objects, those of these pulls included.

    """
    sightings = _update_sightings(objects, pulled_sets)
    facts = _latest_facts(objects, entries)
    current_sets = winners.select(
        "sat_no", "epoch", "source", _name="object_name", _id="object_id", _collected="collected_at"
    )
    sat_nos = pl.concat([sightings["sat_no"], facts["sat_no"], current_sets["sat_no"]]).unique().sort()
    joined = (
        sat_nos.to_frame()
        .join(sightings, on="sat_no", how="left")
        .join(current_sets, on="sat_no", how="left")
        .join(facts, on="sat_no", how="left")
        .with_columns(
            object_name=pl.coalesce("_satcat_name", "_name"), object_id=pl.coalesce("_satcat_id", "_id")
        )
    )
    return joined.with_columns(state=_state_expression(latest)).select(
        pl.col(name).cast(kind) for name, kind in OBJECT_COLUMNS.items()
    )


def _update_sightings(objects: pl.DataFrame, pulled_sets: pl.DataFrame) -> pl.DataFrame:
    """Return the first and last sighting of each object, and the feed of the last one."""
    feeds = {name: feed_name(name) for name in pulled_sets["snapshot_id"].unique()}
    new_sightings = pulled_sets.select(
        "sat_no",
        first_seen="collected_at",
        last_seen="collected_at",
        feed=pl.col("snapshot_id").replace_strict(feeds, return_dtype=pl.String),
    )
    old_sightings = objects.filter(pl.col("last_seen").is_not_null()).select(new_sightings.columns)
    sightings = pl.concat([old_sightings, new_sightings]).sort("last_seen", "feed")
    return sightings.group_by("sat_no").agg(
        pl.col("first_seen").min(), pl.col("last_seen").last(), pl.col("feed").last()
    )


def _latest_facts(objects: pl.DataFrame, entries: pl.DataFrame) -> pl.DataFrame:
    """Return the facts about each object from the newest satellite catalog that lists it."""
    names = ["sat_no", "satcat_at", *FACT_COLUMNS]
    old_facts = objects.filter(pl.col("satcat_at").is_not_null()).select(
        *names, _satcat_name="object_name", _satcat_id="object_id"
    )
    new_facts = entries.select(
        "sat_no", *FACT_COLUMNS, satcat_at="collected_at", _satcat_name="object_name", _satcat_id="object_id"
    ).select(old_facts.columns)
    facts = pl.concat([old_facts, new_facts])
    if not new_facts.height:
        return facts
    # Catalogs with the same collection time are ordered by their content, so that the result is unique.
    ordered = facts.sort("satcat_at", *FACT_COLUMNS, "_satcat_name", "_satcat_id", nulls_last=False)
    return ordered.unique("sat_no", keep="last", maintain_order=True)


def _state_expression(latest: LatestSightings) -> pl.Expr:
    newest = pl.lit(latest.newest, dtype=OBJECT_COLUMNS["last_seen"])
    last_of_feed = pl.col("feed").replace_strict(
        dict(latest.by_feed), default=None, return_dtype=OBJECT_COLUMNS["last_seen"]
    )
    is_decayed = pl.col("decay_date").is_not_null() & (
        pl.col("epoch").is_null() | (pl.col("epoch") <= _midnight_utc(pl.col("decay_date")) + DECAY_TOLERANCE)
    )
    is_gone = last_of_feed - pl.col("last_seen") > GONE_AFTER
    is_old = newest - pl.col("epoch") > STALE_AFTER
    return (
        pl.when(is_decayed)
        .then(pl.lit("decayed"))
        .when(pl.col("epoch").is_null())
        .then(pl.lit("untracked"))
        .when(~is_epoch_plausible("_collected"))
        .then(pl.lit("invalid"))
        .when(is_gone.fill_null(False) | is_old)
        .then(pl.lit("stale"))
        .otherwise(pl.lit("tracked"))
    )


def _midnight_utc(date: pl.Expr) -> pl.Expr:
    return date.cast(pl.Datetime("us")).dt.replace_time_zone("UTC")
