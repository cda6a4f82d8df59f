"""Select the current element set of each object from the element sets of all sources.

An element set has the parameters of an object's orbit at one time, its epoch. The rules below depend on data
only, not on the time or order of runs, and always select exactly one set:

1. The newest epoch wins. 2. At equal epochs the source of higher priority wins (see `SOURCES`). 3. Of
different sets of one source at one epoch, the set whose **first collection** is the latest wins. A correction
comes after the set that it corrects, and a mirror that repeats the old set does not restore it. 4. At equal
collection times the greater snapshot id wins, then the greater elements.

The catalog holds each winner as it was first collected, so a pull that repeats known sets changes nothing.
Rule 3 needs more than the current winner, so the few objects that it concerns are looked up in all pulls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import polars as pl

from branchlake_dagster.sda.gp.records import ELEMENT_COLUMNS
from branchlake_dagster.sda.gp.rules import MAX_EPOCH_LEAD
from branchlake_dagster.sda.registry.sources import source_rank

ELEMENT_VALUES = (
    *("mean_motion", "eccentricity", "inclination", "ra_of_asc_node", "arg_of_pericenter", "mean_anomaly"),
    *("bstar", "mean_motion_dot", "mean_motion_ddot"),
)
"""Two sets of one epoch are different if one of these columns differs."""

SET_KEY = ("sat_no", "epoch", "source", *ELEMENT_VALUES)
"""The columns that identify an element set."""

PULLED_COLUMNS: dict[str, pl.DataType] = {
    "snapshot_id": pl.String(),
    **ELEMENT_COLUMNS,
    "data_mode": pl.String(),
    "source": pl.String(),
    "collected_at": pl.Datetime("us", "UTC"),
}
"""Columns of pulled and merged element sets, one row per snapshot and object."""

CATALOGUE_COLUMNS: dict[str, pl.DataType] = {**PULLED_COLUMNS, "state": pl.String()}
"""Columns of the catalog, one row per object."""

AUDIT_COLUMNS: dict[str, pl.DataType] = {
    "snapshot_id": pl.String(),
    "sat_no": pl.Int64(),
    "source": pl.String(),
    "epoch": pl.Datetime("us", "UTC"),
    "outcome": pl.String(),
    "conflict": pl.Boolean(),
    "winner_source": pl.String(),
    "winner_snapshot_id": pl.String(),
    "winner_epoch": pl.Datetime("us", "UTC"),
}
OUTCOMES = ("won", "repeated", "older", "outranked", "superseded")
"""The outcome of a pulled set, compared with the winner of its object:

- won: the set is the winner.
- repeated: the set has the same elements, epoch and source, but is from another snapshot.
- older: the set has an older epoch.
- outranked: the set has the same epoch, but is from a source of lower priority.
- superseded: the set has the same source and epoch, but was corrected.
"""

SetLookup = Callable[[pl.Series], pl.DataFrame]
"""Returns the rows (``PULLED_COLUMNS``) of catalog numbers in all pulls, this run's pulls included."""


@dataclass(frozen=True)
class CatalogueMerge:
    """The result of a merge.

    ``winners`` (``PULLED_COLUMNS``) is the whole catalog, one row per object, sorted by ``sat_no``.
    ``audit`` (``AUDIT_COLUMNS``) has a row for each pulled set, in their order. ``uncertain_sat_nos`` are the
    objects that were looked up in all pulls.
    """

    winners: pl.DataFrame
    audit: pl.DataFrame
    uncertain_sat_nos: pl.Series


def is_epoch_plausible(collected_at: str = "collected_at") -> pl.Expr:
    """Return the condition that an epoch is at most `MAX_EPOCH_LEAD` after its set's collection."""
    return pl.col("epoch") <= pl.col(collected_at) + MAX_EPOCH_LEAD


def merge_pulled_sets(
    current: pl.DataFrame, pulled_sets: pl.DataFrame, snapshot_ids: Sequence[str], lookup: SetLookup
) -> CatalogueMerge:
    """Merge pulled element sets into the catalog.

    The result does not depend on the order of pulls, nor on their repetition. Objects are independent of each
    other, so the rows of some objects can be merged apart from the others.

    Args:
        current: the catalog before, ``PULLED_COLUMNS``.
        pulled_sets: element sets of one or more pulls.
        snapshot_ids: the snapshots of the pulls.
        lookup: called at most once, with the objects for which rule 3 or a withdrawn set needs all pulls.

    """
    names = list(PULLED_COLUMNS)
    pulled_sets = pulled_sets.select(names)
    # A set with an epoch too far in the future would never be replaced, so it does not compete.
    future_sets = current.filter(~is_epoch_plausible())
    current_sets = current.select(names).filter(is_epoch_plausible())
    current_sets, withdrawn_sat_nos = _drop_withdrawn_sets(current_sets, pulled_sets, snapshot_ids)
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
    return CatalogueMerge(winners, _build_audit(pulled_sets, winners), uncertain_sat_nos)


def _is_top_ranked() -> pl.Expr:
    """Select each object's rows of the newest epoch, and among them those of the highest-ranked source."""
    newest = pl.col("epoch") == pl.col("epoch").max().over("sat_no")
    rank = pl.when(newest).then(pl.col("_rank"))
    return newest & (pl.col("_rank") == rank.min().over("sat_no"))


def _drop_withdrawn_sets(
    current_sets: pl.DataFrame, pulled_sets: pl.DataFrame, snapshot_ids: Sequence[str]
) -> tuple[pl.DataFrame, pl.Series]:
    """Drop current sets that a repeated pull of the same GP snapshot no longer contains.

    Returns the remaining sets and the catalog numbers of the dropped ones. A GP snapshot is a provider's file
    of one collection time.
    """
    sets_of_snapshots = current_sets.filter(pl.col("snapshot_id").is_in(list(snapshot_ids)))
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
    joined = pulled_sets.join(winner_values, on="sat_no", how="left", maintain_order="left")
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
