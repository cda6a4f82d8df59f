"""Screen for close approaches on Spark's workers, and build the list of conjunctions there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.sda.conjunctions.arrow import ENCOUNTER_SCHEMA, PAIR, as_batch, merge_batches
from branchlake_dagster.sda.conjunctions.listing import CONJUNCTION_SCHEMA, LIST_INPUT_SCHEMA, ListBuilder
from branchlake_dagster.sda.conjunctions.rescreening import Plan
from branchlake_dagster.sda.conjunctions.tasks import Screening, Task
from branchlake_dagster.sda.shipping import map_in_arrow


def close_approaches(session: SparkSession, screening: Screening, tasks: Sequence[Task]) -> DataFrame:
    """Return the close approaches of all tasks, computed by Spark, with the columns of `ENCOUNTER_SCHEMA`.

    Rows of the kind `together` from several tasks are merged into one row per pair.
    """
    by_pair = _run_tasks(session, screening, tasks).repartition(*PAIR)
    return map_in_arrow(by_pair, merge_batches, ENCOUNTER_SCHEMA)


def list_conjunctions(
    session: SparkSession, plan: Plan, earlier: DataFrame | None, builder: ListBuilder
) -> DataFrame:
    """Return the rows of the list (`CONJUNCTION_SCHEMA`), computed by Spark.

    Tasks search the pairs that the plan names. Their rows and those of the earlier list are shuffled by pair.
    Then workers take over the earlier rows of unchanged pairs, merge, name and assess all rows.

    Args:
        session: The session of the run.
        plan: The plan of the screening.
        earlier: The earlier list with the columns of `LIST_INPUT_SCHEMA` except ``is_earlier``, or None.
        builder: Builds the rows from the approaches of the tasks and the earlier rows.
    """
    found = _run_tasks(session, plan.screening, plan.tasks).select(
        *ENCOUNTER_SCHEMA.names,
        F.lit(None).cast("string").alias("event_id"),
        F.lit(None).cast("timestamp").alias("first_reported"),
        F.lit(False).alias("is_earlier"),
    )
    if earlier is not None:
        found = found.unionByName(earlier.withColumn("is_earlier", F.lit(True)))
    by_pair = found.select(*LIST_INPUT_SCHEMA.names).repartition(*PAIR)
    return map_in_arrow(by_pair, builder.build_batches, CONJUNCTION_SCHEMA)


def _run_tasks(session: SparkSession, screening: Screening, tasks: Sequence[Task]) -> DataFrame:
    """Return the close approaches of all tasks, without merging."""
    # A range has one row in each partition. A shuffle could put several tasks into one partition.
    numbers = session.range(0, len(tasks), 1, max(1, len(tasks)))
    return map_in_arrow(numbers, _batches(screening, tasks), ENCOUNTER_SCHEMA)


def _batches(
    screening: Screening, tasks: Sequence[Task]
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function that runs the tasks whose indexes are in the column ``id`` of its batches."""

    def close(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                yield as_batch(screening.run_task(tasks[number]), screening.elements)

    return close
