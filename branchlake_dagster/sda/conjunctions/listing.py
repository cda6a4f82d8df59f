"""Build the rows of the list of close approaches, by a function for Spark's ``mapInArrow``.

The ids, the merged minutes and the probability of an event depend only on the rows of its pair, in this list
and in the earlier one. So workers build the list pair by pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import polars as pl
import pyarrow as pa

from branchlake_dagster.sda.conjunctions.arrow import ENCOUNTER_SCHEMA, as_batch, merge_together
from branchlake_dagster.sda.conjunctions.identity import add_event_ids
from branchlake_dagster.sda.conjunctions.rescreening import EarlierRows, Rescreening
from branchlake_dagster.sda.conjunctions.screening import Kind, Span
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.trust.assessment import assess_approaches
from branchlake_dagster.sda.trust.radii import ObjectRadii
from branchlake_dagster.sda.trust.tables import POSITION_AXES, PublishedErrors

_UTC = pa.timestamp("us", "UTC")
_DAY_MICROS = 86_400_000_000
_MAX_BATCH_ROWS = 50_000

LIST_INPUT_SCHEMA = pa.schema(
    [
        *ENCOUNTER_SCHEMA,
        pa.field("event_id", pa.string()),
        pa.field("first_reported", _UTC),
        pa.field("is_earlier", pa.bool_()),
    ]
)
"""Close approaches that tasks found, and rows of the earlier list, for which ``is_earlier`` is true.

Only rows of the earlier list have an ``event_id`` and ``first_reported``.
"""

CONJUNCTION_SCHEMA = pa.schema(
    [
        *ENCOUNTER_SCHEMA,
        pa.field("event_id", pa.string()),
        *(pa.field(f"sat{k}_element_age_days", pa.float64()) for k in (1, 2)),
        pa.field("first_reported", _UTC),
        pa.field("previous_miss_distance_km", pa.float64()),
        pa.field("screened_from", _UTC),
        pa.field("screened_until", _UTC),
        pa.field("threshold_km", pa.float64()),
        pa.field("max_element_age_days", pa.float64()),
        *(pa.field(f"sat{k}_sigma_{axis}_km", pa.float64()) for k in (1, 2) for axis in POSITION_AXES),
        pa.field("covariance_source", pa.string()),
        *(
            pa.field(f"sat{k}_{name}", kind)
            for k in (1, 2)
            for name, kind in (("radius_m", pa.float64()), ("radius_source", pa.string()))
        ),
        *(
            pa.field(name, pa.float64())
            for name in (
                "default_radius_m",
                "hard_body_radius_m",
                "sigma_minor_km",
                "sigma_major_km",
                "collision_probability",
                "max_collision_probability",
            )
        ),
        pa.field("probability_diluted", pa.bool_()),
        pa.field("no_probability_because", pa.string()),
        pa.field("error_model_id", pa.string()),
    ]
)
"""The columns of `Conjunction`."""


@dataclass(frozen=True)
class ListBuilder:
    """Builds the rows of the list from close approaches and the earlier list. Spark ships it to the workers.

    Args:
        elements: The screened element sets, sorted by ``sat_no``.
        span: The whole screened time.
        threshold_km: The largest miss distance. It becomes a column.
        max_element_age_days: The largest age of an element set. It becomes a column.
        rescreening: Selects the rows of the earlier list that stay. If it is None, no row stays, and the
            earlier list only supplies the ids of events.
        published_errors: The error model, or None if there is none.
        radii: The hard-body radii of the objects.
    """

    elements: Elements
    span: Span
    threshold_km: float
    max_element_age_days: float
    rescreening: Rescreening | None
    published_errors: PublishedErrors | None
    radii: ObjectRadii

    def build_batches(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Convert batches of `LIST_INPUT_SCHEMA` to batches of `CONJUNCTION_SCHEMA`.

        All rows of a pair must be in one partition.
        """
        filled_batches = [batch for batch in batches if batch.num_rows]
        if not filled_batches:
            return
        # Spark delivers times in the time zone of the session.
        rows = pl.DataFrame(pl.from_arrow(pa.Table.from_batches(filled_batches).cast(LIST_INPUT_SCHEMA)))
        is_earlier = pl.col("is_earlier")
        found = rows.filter(~is_earlier).select(ENCOUNTER_SCHEMA.names)
        table = self.build(found, rows.filter(is_earlier)).to_arrow(compat_level=pl.CompatLevel.oldest())
        yield from table.cast(CONJUNCTION_SCHEMA).to_batches(max_chunksize=_MAX_BATCH_ROWS)

    def build(self, found: pl.DataFrame, earlier: pl.DataFrame) -> pl.DataFrame:
        """Return rows with the columns of `CONJUNCTION_SCHEMA`.

        Args:
            found: Close approaches that the tasks of the plan found, with the columns of `ENCOUNTER_SCHEMA`.
            earlier: The rows of the earlier list for the same pairs. It may be empty.
        """
        complete = merge_together(pl.concat([found, *self._take_over(found, earlier)]))
        rows = build_rows(complete, earlier, self.span, self.threshold_km, self.max_element_age_days)
        return assess_approaches(rows, self.elements, self.published_errors, self.radii)

    def _take_over(self, found: pl.DataFrame, earlier: pl.DataFrame) -> Iterator[pl.DataFrame]:
        """Yield the earlier rows that stay, and the approaches that are screened again for the others."""
        if self.rescreening is None or earlier.is_empty():
            return
        pairs = earlier.select("sat1_object_designator", "sat2_object_designator").to_numpy()
        times = earlier["tca"].dt.epoch("us").to_numpy()
        is_together = (earlier["kind"] == Kind.TOGETHER.value).to_numpy()
        stays, again = self.rescreening.rescreen(EarlierRows(pairs, times, is_together))
        for rows in (earlier[stays], pl.DataFrame(pl.from_arrow(as_batch(again, self.elements)))):
            yield rows.select(pl.col(name).cast(kind) for name, kind in found.schema.items())


def build_rows(
    found: pl.DataFrame,
    earlier: pl.DataFrame | None,
    span: Span,
    threshold_km: float,
    max_element_age_days: float,
) -> pl.DataFrame:
    """Return close approaches with the columns of `Conjunction` except the assessment, by time and event id.

    Args:
        found: Close approaches with the columns of `ENCOUNTER_SCHEMA`.
        earlier: The rows of the earlier list, from which known events keep their ids; or None.
        span: The screened time.
        threshold_km: The largest miss distance, km. It becomes a column.
        max_element_age_days: The largest age of an element set, days. It becomes a column.
    """
    moment = pl.Datetime("us", "UTC")
    begin, end = (pl.lit(one).cast(moment) for one in (span.start, span.end))
    age = [
        ((pl.col("tca") - pl.col(f"sat{k}_element_epoch")).dt.total_microseconds() / _DAY_MICROS).alias(
            f"sat{k}_element_age_days"
        )
        for k in (1, 2)
    ]
    named = add_event_ids(found.with_columns(pl.col(pl.Datetime).cast(moment)), earlier, reported=begin)
    return named.select(
        *found.columns,
        "event_id",
        *age,
        "first_reported",
        "previous_miss_distance_km",
        begin.alias("screened_from"),
        end.alias("screened_until"),
        pl.lit(threshold_km).alias("threshold_km"),
        pl.lit(max_element_age_days).alias("max_element_age_days"),
    ).sort("tca", "event_id")
