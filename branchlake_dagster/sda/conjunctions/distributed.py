"""Run the tasks of a screening on Spark's workers, or in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import polars as pl
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects
from pyspark.sql.pandas.types import from_arrow_schema

from branchlake_dagster.sda.conjunctions.arrow import ENCOUNTER_SCHEMA, as_batch
from branchlake_dagster.sda.conjunctions.screening import Kind, Span
from branchlake_dagster.sda.conjunctions.tasks import Pairs, Screening, Task
from branchlake_dagster.sda.shipping import carried

_PAIR = ["kind", "sat1_object_designator", "sat2_object_designator"]
_NEAREST = sorted(
    (name for name in ENCOUNTER_SCHEMA.names if name not in (*_PAIR, "together_min")),
    key=lambda name: (name != "miss_distance_km", name != "tca"),
)
"""The columns by which the nearest of several rows of a `together` event is chosen, in this order."""


def close_approaches(session: SparkSession, screening: Screening, tasks: Sequence[Task]) -> DataFrame:
    """Return the close approaches of all tasks, computed by Spark, with the columns of `ENCOUNTER_SCHEMA`.

    Rows of the kind `together` from several tasks are merged into one row per pair.
    """
    columns = "first long, last long, begin long, end long, pairs string"
    rows = [(t.span.first, t.span.last, t.span.start, t.span.end, t.pairs.value) for t in tasks]
    # Rows are distributed evenly. By hash, one Spark task could get several rows, and other cores would wait.
    frame = session.createDataFrame(rows, columns).repartition(len(rows))
    found = frame.mapInArrow(carried(_batches(screening)), from_arrow_schema(ENCOUNTER_SCHEMA))
    together = F.col("kind") == Kind.TOGETHER.value
    # Several tasks may have rows of the kind `together` for one pair. Only one task finds any other event.
    own = F.when(~together, F.col("tca")).alias("own_tca")
    merged = found.groupBy(*_PAIR, own).agg(
        F.min(F.struct(*_NEAREST)).alias("nearest"), F.sum("together_min").alias("together_min")
    )
    return merged.select(*_PAIR, "together_min", "nearest.*").select(*ENCOUNTER_SCHEMA.names)


def close_approaches_here(screening: Screening, tasks: Sequence[Task]) -> pa.Table:
    """Return the same rows as `close_approaches`, computed in this process on one core."""
    parts = (as_batch(screening.done(task), screening.elements) for task in tasks)
    found = pl.DataFrame(pl.from_arrow(pa.Table.from_batches(parts, ENCOUNTER_SCHEMA)))
    together = pl.col("kind") == Kind.TOGETHER.value
    merged = (
        found.filter(together)
        .sort(_NEAREST)
        .group_by(_PAIR, maintain_order=True)
        .agg(pl.col("together_min").sum(), pl.col(_NEAREST).first())
        .select(found.columns)
    )
    return pl.concat([found.filter(~together), merged]).to_arrow().cast(ENCOUNTER_SCHEMA)


def _batches(screening: Screening) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def close(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for task in batch.to_pylist():
                span = Span(task["begin"], task["end"], task["first"], task["last"])
                yield as_batch(screening.done(Task(span, Pairs(task["pairs"]))), screening.elements)

    return close
