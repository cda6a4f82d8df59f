"""Which element set of an object is the current one, of all that any source has ever issued.

The order is total and looks at data alone, never at when a run came by:

1. the newest epoch;
2. at equal epochs the source of higher priority (`SOURCES`);
3. of one source's different sets at one epoch the one that was **first collected last**: a correction
   follows what it corrects, and a mirror that shows the old one again does not bring it back;
4. what is left are equal times of collection: the greater snapshot id, then the elements themselves.

The row in the catalogue is the winner as it was first collected, so a pull that repeats what is known changes
nothing. Rule 3 cannot be told from the winner alone. The few objects for which it decides are looked up in
all pulls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import polars as pl

from branchlake_dagster.sda.gp.records import ELEMENT_COLUMNS
from branchlake_dagster.sda.gp.rules import MAX_EPOCH_LEAD
from branchlake_dagster.sda.registry.sources import source_rank

ELEMENT_VALUES = (
    *("mean_motion", "eccentricity", "inclination", "ra_of_asc_node", "arg_of_pericenter", "mean_anomaly"),
    *("bstar", "mean_motion_dot", "mean_motion_ddot"),
)
"""What makes two sets of one epoch different."""

SET_KEY = ("sat_no", "epoch", "source", *ELEMENT_VALUES)
"""What an element set is known by."""

PULLED_COLUMNS: dict[str, pl.DataType] = {
    "snapshot_id": pl.String(),
    **ELEMENT_COLUMNS,
    "data_mode": pl.String(),
    "source": pl.String(),
    "collected_at": pl.Datetime("us", "UTC"),
}
"""Element sets as they are pulled and merged; one row per snapshot and object."""

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
"""What became of a pulled set: it is the current one; says the same as it; has an older epoch; is of a source
of lower priority at the same epoch; is of the same source and epoch, and was corrected."""

SetLookup = Callable[[pl.Series], pl.DataFrame]
"""From catalogue numbers to all their rows (``PULLED_COLUMNS``) in all pulls, those of the run included."""


@dataclass(frozen=True)
class CatalogueMerge:
    """``winners`` (``PULLED_COLUMNS``) is the whole catalogue, one row per object, sorted by ``sat_no``.

    ``audit`` (``AUDIT_COLUMNS``) has a row for each pulled set, ``lookup_count`` counts the objects looked up.
    """

    winners: pl.DataFrame
    audit: pl.DataFrame
    lookup_count: int


def is_epoch_plausible(collected_at: str = "collected_at") -> pl.Expr:
    """Whether an epoch is not of a time that its pull could not know of."""
    return pl.col("epoch") <= pl.col(collected_at) + MAX_EPOCH_LEAD


def merge_pulled_sets(current: pl.DataFrame, pulled_sets: pl.DataFrame, lookup: SetLookup) -> CatalogueMerge:
    """The catalogue after pulls, in whatever order and how often they come.

    Args:
        current: the catalogue before, ``PULLED_COLUMNS``.
        pulled_sets: element sets of one pull or of several.
        lookup: asked once, for the objects that the winner alone does not decide.

    """
    names = list(PULLED_COLUMNS)
    pulled_sets = pulled_sets.select(names)
    # A set that froze its object by an epoch of the future does not compete any more.
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
    # A frozen object that has no other set stays as it is, for its state to tell.
    unreplaced_sets = future_sets.select(names).join(winners, on="sat_no", how="anti")
    winners = pl.concat([winners, unreplaced_sets]).sort("sat_no")
    return CatalogueMerge(winners, _build_audit(pulled_sets, winners), uncertain_sat_nos.len())


def _is_top_ranked() -> pl.Expr:
    """Of each object the rows of its newest epoch, and of these those of the source to believe."""
    newest = pl.col("epoch") == pl.col("epoch").max().over("sat_no")
    rank = pl.when(newest).then(pl.col("_rank"))
    return newest & (pl.col("_rank") == rank.min().over("sat_no"))


def _drop_withdrawn_sets(
    current_sets: pl.DataFrame, pulled_sets: pl.DataFrame
) -> tuple[pl.DataFrame, pl.Series]:
    """What is known, without rows of snapshots that are pulled again and do not have them any more."""
    snapshot_ids = pulled_sets["snapshot_id"].unique()
    sets_of_snapshots = current_sets.filter(pl.col("snapshot_id").is_in(snapshot_ids.implode()))
    withdrawn_sat_nos = sets_of_snapshots.join(
        pulled_sets, on=["snapshot_id", *SET_KEY], how="anti", nulls_equal=True
    )["sat_no"]
    return current_sets.filter(~pl.col("sat_no").is_in(withdrawn_sat_nos.implode())), withdrawn_sat_nos


def _find_uncertain_objects(top_sets: pl.DataFrame, current_sets: pl.DataFrame) -> pl.Series:
    """Objects with different sets of one epoch and source, or with a winner collected earlier than known."""
    competing_sets = top_sets.filter(pl.len().over("sat_no") > 1)
    set_counts = competing_sets.group_by("sat_no").agg(pl.struct(ELEMENT_VALUES).n_unique().alias("sets"))
    current_keys = current_sets.select("sat_no", "epoch", "source", _known="collected_at", _id="snapshot_id")
    earlier_sets = competing_sets.join(current_keys, on=["sat_no", "epoch", "source"]).filter(
        (pl.col("collected_at") < pl.col("_known"))
        | ((pl.col("collected_at") == pl.col("_known")) & (pl.col("snapshot_id") < pl.col("_id")))
    )
    return pl.concat([set_counts.filter(pl.col("sets") > 1)["sat_no"], earlier_sets["sat_no"]]).unique()


def _select_winners(top_sets: pl.DataFrame) -> pl.DataFrame:
    """One row per object of rows that agree on epoch and source."""
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
    """What became of each pulled set."""
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
    """Of pulled sets those that are not in the history, each as it was first collected."""
    first_collected = pulled_sets.sort("collected_at", "snapshot_id").unique(
        list(SET_KEY), keep="first", maintain_order=True
    )
    return first_collected.join(history, on=list(SET_KEY), how="anti", nulls_equal=True).sort(
        "sat_no", "epoch"
    )
