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
from branchlake_dagster.sda.gp.rules import MAX_AHEAD
from branchlake_dagster.sda.registry.sources import priority

ELEMENTS = (
    *("mean_motion", "eccentricity", "inclination", "ra_of_asc_node", "arg_of_pericenter", "mean_anomaly"),
    *("bstar", "mean_motion_dot", "mean_motion_ddot"),
)
"""What makes two sets of one epoch different."""

SET = ("sat_no", "epoch", "source", *ELEMENTS)
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

_BY_ORDER = ("epoch", "_rank")
Lookup = Callable[[pl.Series], pl.DataFrame]
"""From catalogue numbers to all their rows (``PULLED_COLUMNS``) in all pulls, those of the run included."""


@dataclass(frozen=True)
class Merged:
    """``winners`` (``PULLED_COLUMNS``) is the whole catalogue, one row per object, sorted by ``sat_no``.

    ``audit`` (``AUDIT_COLUMNS``) has a row for each pulled set, ``looked_up`` counts the objects looked up.
    """

    winners: pl.DataFrame
    audit: pl.DataFrame
    looked_up: int


def believable(collected_at: str = "collected_at") -> pl.Expr:
    """Whether an epoch is not of a time that its pull could not know of."""
    return pl.col("epoch") <= pl.col(collected_at) + MAX_AHEAD


def merge(current: pl.DataFrame, pulled: pl.DataFrame, lookup: Lookup) -> Merged:
    """The catalogue after pulls, in whatever order and how often they come.

    Args:
        current: the catalogue before, ``PULLED_COLUMNS``.
        pulled: element sets of one pull or of several.
        lookup: asked once, for the objects that the winner alone does not decide.

    """
    names = list(PULLED_COLUMNS)
    pulled = pulled.select(names)
    # A set that froze its object by an epoch of the future does not compete any more.
    frozen = current.filter(~believable())
    known = current.select(names).filter(believable())
    known, withdrawn = _withdrawn(known, pulled)
    contenders = pl.concat([known, pulled.filter(believable())]).with_columns(_rank=priority())
    top = contenders.filter(_is_top())
    unsure = pl.concat([_unsure(top, known), withdrawn, frozen["sat_no"]]).unique()
    if unsure.len():
        found = lookup(unsure).select(names).filter(believable()).with_columns(_rank=priority())
        sure = top.join(unsure.to_frame("sat_no"), on="sat_no", how="anti")
        again = pl.concat([contenders.join(unsure.to_frame("sat_no"), on="sat_no", how="semi"), found])
        top = pl.concat([sure, again.filter(_is_top())])
    winners = _winners(top).select(names)
    # A frozen object that has no other set stays as it is, for its state to tell.
    without = frozen.select(names).join(winners, on="sat_no", how="anti")
    winners = pl.concat([winners, without]).sort("sat_no")
    return Merged(winners, _audit(pulled, winners), unsure.len())


def _is_top() -> pl.Expr:
    """Of each object the rows of its newest epoch, and of these those of the source to believe."""
    newest = pl.col("epoch") == pl.col("epoch").max().over("sat_no")
    rank = pl.when(newest).then(pl.col("_rank"))
    return newest & (pl.col("_rank") == rank.min().over("sat_no"))


def _withdrawn(known: pl.DataFrame, pulled: pl.DataFrame) -> tuple[pl.DataFrame, pl.Series]:
    """What is known, without rows of snapshots that are pulled again and do not have them any more."""
    again = pulled["snapshot_id"].unique()
    mine = known.filter(pl.col("snapshot_id").is_in(again.implode()))
    gone = mine.join(pulled, on=["snapshot_id", *SET], how="anti", nulls_equal=True)["sat_no"]
    return known.filter(~pl.col("sat_no").is_in(gone.implode())), gone


def _unsure(top: pl.DataFrame, known: pl.DataFrame) -> pl.Series:
    """Objects with different sets of one epoch and source, or with a winner collected earlier than known."""
    several = top.filter(pl.len().over("sat_no") > 1)
    differs = several.group_by("sat_no").agg(pl.struct(ELEMENTS).n_unique().alias("sets"))
    first = known.select("sat_no", "epoch", "source", _known="collected_at", _id="snapshot_id")
    earlier = several.join(first, on=["sat_no", "epoch", "source"]).filter(
        (pl.col("collected_at") < pl.col("_known"))
        | ((pl.col("collected_at") == pl.col("_known")) & (pl.col("snapshot_id") < pl.col("_id")))
    )
    return pl.concat([differs.filter(pl.col("sets") > 1)["sat_no"], earlier["sat_no"]]).unique()


def _winners(top: pl.DataFrame) -> pl.DataFrame:
    """One row per object of rows that agree on epoch and source."""
    several = pl.len().over("sat_no") > 1
    alone, rest = top.filter(~several), top.filter(several)
    sightings = ("collected_at", "snapshot_id")
    first = rest.sort(*sightings).unique(["sat_no", *ELEMENTS], keep="first", maintain_order=True)
    last = first.sort(*sightings, *ELEMENTS).unique("sat_no", keep="last", maintain_order=True)
    return pl.concat([alone, last])


def _audit(pulled: pl.DataFrame, winners: pl.DataFrame) -> pl.DataFrame:
    """What became of each pulled set."""
    told = {name: f"winner_{name}" for name in ("source", "snapshot_id", "epoch")}
    side = winners.select("sat_no", pl.col(*told, *ELEMENTS).name.prefix("winner_"))
    same = pl.all_horizontal(pl.col(n).eq_missing(pl.col(f"winner_{n}")) for n in ELEMENTS)
    at_once = pl.col("epoch") == pl.col("winner_epoch")
    own = pl.col("source") == pl.col("winner_source")
    outcome = (
        pl.when(~at_once)
        .then(pl.lit("older"))
        .when(~own)
        .then(pl.lit("outranked"))
        .when(~same)
        .then(pl.lit("superseded"))
        .when(pl.col("snapshot_id") != pl.col("winner_snapshot_id"))
        .then(pl.lit("repeated"))
        .otherwise(pl.lit("won"))
    )
    joined = pulled.join(side, on="sat_no", how="left")
    return joined.with_columns(outcome=outcome, conflict=at_once & ~same).select(
        pl.col(name).cast(kind) for name, kind in AUDIT_COLUMNS.items()
    )


def not_in(history: pl.DataFrame, pulled: pl.DataFrame) -> pl.DataFrame:
    """Of pulled sets those that are not in the history, each as it was first collected."""
    first = pulled.sort("collected_at", "snapshot_id").unique(list(SET), keep="first", maintain_order=True)
    return first.join(history, on=list(SET), how="anti", nulls_equal=True).sort("sat_no", "epoch")
