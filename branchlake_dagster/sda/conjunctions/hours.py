"""Decide which hour owns an approach near the end of an hour.

Each hour is screened by the states of its own tracks. So two hours may disagree whether a pair is closest
before or after the instant between them. Without a rule, such an approach could be missing, or exist twice.

An approach belongs to the hour of its time of closest approach, rounded as in `RISK_SCHEMA`. If the two hours
disagree, the earlier one decides:

- An hour has the approaches that its own states put before its end.
- The next hour has all others. It is also screened in the last minute before its start, and leaves out the
  approaches that the table has in the earlier hour. So its first approaches may be up to `OVERLAP` before its
  start.

An hour thus depends on the rows of the hour before it, and must be computed again if those change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import polars as pl
import pyarrow as pa

from branchlake_dagster.sda.conjunctions.arrow import PAIR
from branchlake_dagster.sda.conjunctions.screening import MINUTE, Kind, Span
from branchlake_dagster.sda.conjunctions.tasks import Pairs, Task

OVERLAP = MINUTE
"""Microseconds before its start that an hour is screened too. Two hours may differ by this about an approach.

An error of 10 km along the track moves the time of an approach by about a second.
"""
EARLIER_COLUMNS = (*PAIR, "kind", "tca")
"""The columns of the earlier hour's rows that `HourOwnership` needs."""


@dataclass(frozen=True)
class HourOwnership:
    """Selects the risks that belong to an hour. Spark ships it to the workers.

    ``start`` and ``end`` limit the hour, UTC microseconds since 1970. ``earlier`` has the encounters of the
    hour before in its last two minutes: the columns `PAIR` and ``earlier_tca``, in microseconds.
    """

    start: int
    end: int
    earlier: pl.DataFrame

    @classmethod
    def build(cls, start: int, end: int, earlier_rows: pa.Table | None) -> Self:
        """Build the rule for an hour.

        Args:
            start: The start of the hour, UTC microseconds since 1970.
            end: The end of the hour.
            earlier_rows: The risks of the hour before (`EARLIER_COLUMNS`), or None if it has none.
        """
        rows = pl.DataFrame(schema=dict.fromkeys((*PAIR, "tca"), pl.Int64))
        if earlier_rows is not None:
            rows = _with_micros(earlier_rows).filter(
                pl.col("kind") == Kind.ENCOUNTER.value, pl.col("tca") >= start - 2 * OVERLAP
            )
        return cls(start, end, rows.select(*PAIR, earlier_tca="tca"))

    @property
    def overlap_task(self) -> Task:
        """The part of the hour before that is screened by the states of this hour."""
        return Task(Span(self.start - OVERLAP, self.start, self.start - OVERLAP, self.end), Pairs.ALL)

    def select_in_hour(self, risks: pa.Table) -> pa.Table:
        """Return the hour's own rows among risks (`RISK_SCHEMA`) that were found within the hour."""
        rows = _with_micros(risks.select(list(EARLIER_COLUMNS)))
        is_encounter = pl.col("kind") == Kind.ENCOUNTER.value
        is_own = rows.select(~is_encounter | (pl.col("tca") < self.end)).to_series()
        return risks.filter((is_own & ~self._is_owned_earlier(rows)).to_arrow())

    def select_in_overlap(self, risks: pa.Table) -> pa.Table:
        """Return the hour's own rows among risks (`RISK_SCHEMA`) that `overlap_task` found.

        Minutes together belong to the hour before.
        """
        rows = _with_micros(risks.select(list(EARLIER_COLUMNS)))
        is_encounter = rows.get_column("kind") == Kind.ENCOUNTER.value
        return risks.filter((is_encounter & ~self._is_owned_earlier(rows)).to_arrow())

    def _is_owned_earlier(self, rows: pl.DataFrame) -> pl.Series:
        """Mark the encounters (`EARLIER_COLUMNS`) that the hour before has, too."""
        numbered = rows.with_row_index("row").filter(
            pl.col("kind") == Kind.ENCOUNTER.value, pl.col("tca") < self.start + OVERLAP
        )
        apart = (pl.col("tca") - pl.col("earlier_tca")).abs()
        owned = numbered.join(self.earlier, on=list(PAIR)).filter(apart <= OVERLAP)
        return pl.Series(range(rows.height), dtype=pl.UInt32).is_in(owned.get_column("row").to_list())


def _with_micros(rows: pa.Table) -> pl.DataFrame:
    """Convert rows to a frame whose ``tca`` is in microseconds since 1970."""
    return pl.DataFrame(pl.from_arrow(rows)).with_columns(pl.col("tca").dt.epoch("us"))
