"""The registry as one process computed it: the reference for the registry on Spark's workers.

It calls no function of the merge. Many of its rules are equal to those that the workers apply today, so a
comparison shows that their distribution changes nothing, and not that the rules are right.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import polars as pl

from branchlake_dagster.sda.gp.rules import MAX_EPOCH_LEAD
from branchlake_dagster.sda.registry.life_cycle import (
    DECAY_TOLERANCE,
    FACT_COLUMNS,
    GONE_AFTER,
    OBJECT_COLUMNS,
    STALE_AFTER,
)
from branchlake_dagster.sda.registry.merge import AUDIT_COLUMNS, ELEMENT_VALUES, PULLED_COLUMNS, SET_KEY
from branchlake_dagster.sda.registry.sources import SOURCES

_TIME_SUFFIX = re.compile(r"[-_.]?\d{8}(T\d{4,6}Z?)?")


def feed_name(snapshot_id: str) -> str:
    """Return the feed of a snapshot: its id without the time."""
    return _TIME_SUFFIX.sub("", snapshot_id, count=1) or "unnamed"


def source_rank(column: str = "source") -> pl.Expr:
    """Return the rank of a source: the smallest rank wins, and unknown sources come last."""
    ranks = {name: rank for rank, name in enumerate(SOURCES)}
    return pl.col(column).replace_strict(ranks, default=len(SOURCES), return_dtype=pl.Int8)


SetLookup = Callable[[pl.Series], pl.DataFrame]
"""Returns the rows (``PULLED_COLUMNS``) of catalog numbers in all pulls, this run's pulls included."""


@dataclass(frozen=True)
class CatalogueMerge:
    """The result of a merge.

    ``winners`` (``PULLED_COLUMNS``) is the whole catalog, one row per object, sorted by ``sat_no``.
    ``audit`` (``AUDIT_COLUMNS``) has a row for each pulled set. ``lookup_count`` is the number of objects
    that were looked up in all pulls.
    """

    winners: pl.DataFrame
    audit: pl.DataFrame
    lookup_count: int


def is_epoch_plausible(collected_at: str = "collected_at") -> pl.Expr:
    """Return the condition that an epoch is at most `MAX_EPOCH_LEAD` after its set's collection."""
    return pl.col("epoch") <= pl.col(collected_at) + MAX_EPOCH_LEAD


def merge_pulled_sets(current: pl.DataFrame, pulled_sets: pl.DataFrame, lookup: SetLookup) -> CatalogueMerge:
    """Merge pulled element sets into the catalog.

    The result does not depend on the order of pulls, nor on their repetition.

    Args:
        current: the catalog before, ``PULLED_COLUMNS``.
        pulled_sets: element sets of one or more pulls.
        lookup: called at most once, with the objects for which rule 3 or a withdrawn set needs all pulls.

    """
    names = list(PULLED_COLUMNS)
    pulled_sets = pulled_sets.select(names)
    # A set with an epoch too far in the future would never be replaced, so it does not compete.
    future_sets = current.filter(~is_epoch_plausible())
    current_sets = current.select(names).filter(is_epoch_plausible())
    current_sets, withdrawn_sat_nos = _drop_withdrawn_sets(current_sets, pulled_sets)
    candidates = pl.concat([current_sets, pulled_sets.filter(is_epoch_plausible())]).with_columns(
        _rank=source_rank()
    )
    top_sets = candidates.filter(_is_top_ranked())
    uncertain_sat_nos = pl.concat(
        [_find_uncertain_objects(top_sets, current_sets), withdrawn_sat_nos, future_sets["sat_no"]]
    ).unique()
    if uncertain_sat_nos.len():
        looked_up_sets = (
            lookup(uncertain_sat_nos)
            .select(names)
            .filter(is_epoch_plausible())
            .with_columns(_rank=source_rank())
        )
        certain_sets = top_sets.join(uncertain_sat_nos.to_frame("sat_no"), on="sat_no", how="anti")
        uncertain_sets = pl.concat(
            [candidates.join(uncertain_sat_nos.to_frame("sat_no"), on="sat_no", how="semi"), looked_up_sets]
        )
        top_sets = pl.concat([certain_sets, uncertain_sets.filter(_is_top_ranked())])
    winners = _select_winners(top_sets).select(names)
    # An object without any other set keeps its row; its state becomes invalid.
    unreplaced_sets = future_sets.select(names).join(winners, on="sat_no", how="anti")
    winners = pl.concat([winners, unreplaced_sets]).sort("sat_no")
    return CatalogueMerge(winners, _build_audit(pulled_sets, winners), uncertain_sat_nos.len())


def _is_top_ranked() -> pl.Expr:
    """Select each object's rows of the newest epoch, and among them those of the highest-ranked source."""
    newest = pl.col("epoch") == pl.col("epoch").max().over("sat_no")
    rank = pl.when(newest).then(pl.col("_rank"))
    return newest & (pl.col("_rank") == rank.min().over("sat_no"))


def _drop_withdrawn_sets(
    current_sets: pl.DataFrame, pulled_sets: pl.DataFrame
) -> tuple[pl.DataFrame, pl.Series]:
    """Drop the current sets of objects that a repeated pull of the same snapshot no longer contains.

    Returns the remaining sets and the catalog numbers of the dropped ones.
    """
    snapshot_ids = pulled_sets["snapshot_id"].unique()
    sets_of_snapshots = current_sets.filter(pl.col("snapshot_id").is_in(snapshot_ids.implode()))
    withdrawn_sat_nos = sets_of_snapshots.join(
        pulled_sets, on=["snapshot_id", *SET_KEY], how="anti", nulls_equal=True
    )["sat_no"]
    return current_sets.filter(~pl.col("sat_no").is_in(withdrawn_sat_nos.implode())), withdrawn_sat_nos


def _find_uncertain_objects(top_sets: pl.DataFrame, current_sets: pl.DataFrame) -> pl.Series:
    """Find objects with different sets of one epoch and source, or a set collected before the current one."""
    competing_sets = top_sets.filter(pl.len().over("sat_no") > 1)
    set_counts = competing_sets.group_by("sat_no").agg(pl.struct(ELEMENT_VALUES).n_unique().alias("sets"))
    current_keys = current_sets.select("sat_no", "epoch", "source", _known="collected_at", _id="snapshot_id")
    earlier_sets = competing_sets.join(current_keys, on=["sat_no", "epoch", "source"]).filter(
        (pl.col("collected_at") < pl.col("_known"))
        | ((pl.col("collected_at") == pl.col("_known")) & (pl.col("snapshot_id") < pl.col("_id")))
    )
    return pl.concat([set_counts.filter(pl.col("sets") > 1)["sat_no"], earlier_sets["sat_no"]]).unique()


def _select_winners(top_sets: pl.DataFrame) -> pl.DataFrame:
    """Select one row per object from rows that agree on epoch and source."""
    has_several = pl.len().over("sat_no") > 1
    single_sets, competing_sets = top_sets.filter(~has_several), top_sets.filter(has_several)
    collection_order = ("collected_at", "snapshot_id")
    first_collected = competing_sets.sort(*collection_order).unique(
        ["sat_no", *ELEMENT_VALUES], keep="first", maintain_order=True
    )
    last_correction = first_collected.sort(*collection_order, *ELEMENT_VALUES).unique(
        "sat_no", keep="last", maintain_order=True
    )
    return pl.concat([single_sets, last_correction])


def _build_audit(pulled_sets: pl.DataFrame, winners: pl.DataFrame) -> pl.DataFrame:
    """Build the audit row of each pulled set."""
    winner_columns = {name: f"winner_{name}" for name in ("source", "snapshot_id", "epoch")}
    winner_values = winners.select("sat_no", pl.col(*winner_columns, *ELEMENT_VALUES).name.prefix("winner_"))
    has_same_elements = pl.all_horizontal(pl.col(n).eq_missing(pl.col(f"winner_{n}")) for n in ELEMENT_VALUES)
    is_same_epoch = pl.col("epoch") == pl.col("winner_epoch")
    is_same_source = pl.col("source") == pl.col("winner_source")
    outcome = (
        pl.when(~is_same_epoch)
        .then(pl.lit("older"))
        .when(~is_same_source)
        .then(pl.lit("outranked"))
        .when(~has_same_elements)
        .then(pl.lit("superseded"))
        .when(pl.col("snapshot_id") != pl.col("winner_snapshot_id"))
        .then(pl.lit("repeated"))
        .otherwise(pl.lit("won"))
    )
    joined = pulled_sets.join(winner_values, on="sat_no", how="left")
    return joined.with_columns(outcome=outcome, conflict=is_same_epoch & ~has_same_elements).select(
        pl.col(name).cast(kind) for name, kind in AUDIT_COLUMNS.items()
    )


def select_new_sets(history: pl.DataFrame, pulled_sets: pl.DataFrame) -> pl.DataFrame:
    """Select the pulled sets that are not in the history, each as it was first collected."""
    first_collected = pulled_sets.sort("collected_at", "snapshot_id").unique(
        list(SET_KEY), keep="first", maintain_order=True
    )
    return first_collected.join(history, on=list(SET_KEY), how="anti", nulls_equal=True).sort(
        "sat_no", "epoch"
    )


def update_objects(
    objects: pl.DataFrame, winners: pl.DataFrame, pulled_sets: pl.DataFrame, entries: pl.DataFrame
) -> pl.DataFrame:
    """Return all objects (``OBJECT_COLUMNS``) after one or more pulls, sorted by ``sat_no``.

    The order of pulls does not matter: each column is a minimum, a maximum or the newest value by collection
    time, and the state is computed from the whole registry.

    Args:
        objects: the objects before, ``OBJECT_COLUMNS``.
        winners: the merged catalog, see `CatalogueMerge`.
        pulled_sets: the element sets of the pulls, ``PULLED_COLUMNS``.
        entries: rows of satellite catalogs, ``ENTRY_COLUMNS`` with ``collected_at``.

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
    return joined.with_columns(state=_state_expression()).select(
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


def _state_expression() -> pl.Expr:
    newest = pl.max_horizontal(pl.col("last_seen").max(), pl.col("satcat_at").max())
    is_decayed = pl.col("decay_date").is_not_null() & (
        pl.col("epoch").is_null() | (pl.col("epoch") <= _midnight_utc(pl.col("decay_date")) + DECAY_TOLERANCE)
    )
    is_gone = pl.col("last_seen").max().over("feed") - pl.col("last_seen") > GONE_AFTER
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
