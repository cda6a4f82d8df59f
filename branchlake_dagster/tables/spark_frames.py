"""Writing Spark frames to the run's branch, Connect and classic alike: nothing here needs py4j."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pyarrow as pa
from pyiceberg.schema import Schema
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Observation, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the library's own abbreviation
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from branchlake_dagster.spark.session import quoted
from branchlake_dagster.tables.arrow_frames import must_be, not_unique
from branchlake_dagster.tables.errors import (
    ColumnUnsupported,
    ForeignSession,
    PartitionMismatch,
    UpsertKeyInvalid,
)
from branchlake_dagster.tables.selection import Selection, to_sql
from branchlake_dagster.tables.specification import TableSpec
from branchlake_dagster.wording import named

_SNAPSHOT_PROPERTY = "snapshot-property."
_SESSION_PROPERTY = "spark.sql.iceberg.snapshot-property."
_COPIES = "__branchlake_copies"
_NOT_UNIQUE = "branchlake: upsert key not unique"
OUTSIDE = "branchlake: row outside the partitions"
_settings_lock = threading.Lock()


def arrow_schema(frame: DataFrame, *, table: str) -> pa.Schema:
    """The frame's schema; analysed, not executed. Raises ColumnUnsupported."""
    found = []
    for column in frame.schema:
        try:
            found += list(to_arrow_schema(StructType([column])))
        except (PySparkException, TypeError) as error:
            raise ColumnUnsupported(
                f"Column {column.name} is {column.dataType.simpleString()}, which the lake cannot store.",
                table=table,
                hint="Cast it to text, numbers or time stamps in the asset.",
            ) from error
    return pa.schema(found)


def require_branch(frame: DataFrame, branch: str, *, table: str) -> None:
    """Refuse a frame whose session stands elsewhere: writing it would land outside the run's branch."""
    ref = frame.sparkSession.conf.get("spark.sql.catalog.nessie.ref", "unknown")
    if ref != branch:
        raise ForeignSession(
            f"The frame belongs to a Spark session on {ref!r}.",
            table=table,
            branch=branch,
            hint="Use the run's session: a parameter `spark: BranchSparkResource`, then spark.spark_session.",
        )


def write(
    frame: DataFrame,
    spec: TableSpec,
    schema: Schema,
    selection: Selection | None,
    properties: Mapping[str, str],
) -> None:
    """Write `frame` by the spec's mode in one Spark job.

    Raises PartitionMismatch, UpsertKeyInvalid; on a branch, so what they leave behind is discarded.
    """
    columns = {field.name for field in schema.fields}
    # What is null in all rows has no type here, and the table may not have got the column yet.
    frame = frame.drop(*(name for name in frame.columns if name not in columns))
    if spec.write_mode == "upsert":
        _merge(frame, spec, schema, selection, properties)
        return
    observed, observation = _observe_outside(frame, schema, selection)
    writer = observed.writeTo(spec.spark_name)
    for key, value in properties.items():
        writer = writer.option(f"{_SNAPSHOT_PROPERTY}{key}", value)
    if spec.write_mode == "append":
        writer.append()
    elif spec.write_mode == "replace_table":
        writer.overwrite(F.lit(True))
    else:
        assert selection is not None  # noqa: S101 - the mode implies partitions
        writer.overwrite(F.expr(to_sql(selection, schema)))
    if observation is not None and selection is not None:
        # A Connect server sends what it has observed by the end of the write. On a machine that is taken its
        # listeners come later, and nothing was sent: then the rows are looked at again.
        outside = observation.get.get("outside")
        if outside is None:
            outside = frame.filter(_outside(schema, selection)).count()
        if outside:
            raise partition_mismatch(spec, schema, selection, f"{outside} rows")


def _observe_outside(
    frame: DataFrame, schema: Schema, selection: Selection | None
) -> tuple[DataFrame, Observation | None]:
    """Count rows outside the partitions while they are written, not in a pass of its own."""
    if selection is None:
        return frame, None
    observation = Observation()
    outside = F.coalesce(F.sum(_outside(schema, selection).cast("long")), F.lit(0)).alias("outside")
    return frame.observe(observation, outside), observation


def _outside(schema: Schema, selection: Selection) -> Column:
    """Whether a row is of none of the selection's partitions."""
    return ~F.coalesce(F.expr(to_sql(selection, schema)), F.lit(False))


def _merge(
    frame: DataFrame,
    spec: TableSpec,
    schema: Schema,
    selection: Selection | None,
    properties: Mapping[str, str],
) -> None:
    """MERGE by the keys. A key that is null or occurs twice stops the job: Iceberg would insert both."""
    check_keys(spec, frame.columns)
    copies = F.count(F.lit(1)).over(Window.partitionBy(*map(quoted, spec.keys)))
    present = " AND ".join(f"{quoted(key)} IS NOT NULL" for key in spec.keys)
    unique = f"assert_true({_COPIES} = 1 AND {present}, '{_NOT_UNIQUE}') IS NULL"
    # The window shuffles by the keys, which the merge's join needs anyway.
    source = frame.withColumn(_COPIES, copies).filter(F.expr(unique))
    if selection is not None:
        source = source.filter(asserted_inside(selection, schema))
    source = source.drop(_COPIES).alias("incoming")
    on = " AND ".join(f"{spec.spark_name}.{quoted(key)} = incoming.{quoted(key)}" for key in spec.keys)
    columns = {quoted(name): F.col(f"incoming.{quoted(name)}") for name in frame.columns}
    with session_properties(frame.sparkSession, properties):
        try:
            (
                source.mergeInto(spec.spark_name, F.expr(on))
                .whenMatched()
                .update(columns)
                .whenNotMatched()
                .insert(columns)
                .merge()
            )
        except Exception as error:
            if _NOT_UNIQUE in str(error):
                raise not_unique(spec) from error
            if OUTSIDE in str(error):
                raise partition_mismatch(spec, schema, selection, "Rows") from error
            raise


def partition_mismatch(
    spec: TableSpec, schema: Schema, selection: Selection | None, rows: str
) -> PartitionMismatch:
    """The error for rows outside the run's partitions. `rows`: which, as the sentence begins."""
    return PartitionMismatch(
        f"{rows} of the frame are outside the run's partitions.",
        table=spec.name,
        hint=must_be(selection, schema) if selection else None,
    )


def asserted_inside(selection: Selection, schema: Schema) -> Column:
    """Lets every row of the run's partitions through; another row fails the job with OUTSIDE."""
    inside = f"coalesce({to_sql(selection, schema)}, false)"
    return F.expr(f"assert_true({inside}, '{OUTSIDE}') IS NULL")


def check_keys(spec: TableSpec, columns: list[str]) -> None:
    """Raise UpsertKeyInvalid when a key is no column."""
    absent = [key for key in spec.keys if key not in columns]
    if absent:
        raise UpsertKeyInvalid(f"The frame lacks {named('key column', absent)}.", table=spec.name)


@contextmanager
def session_properties(session: SparkSession, properties: Mapping[str, str]) -> Iterator[None]:
    """MERGE takes no write options; Iceberg reads these from the session instead."""
    names = {key: f"{_SESSION_PROPERTY}{key}" for key in properties}
    with _settings_lock:
        # The session itself names its run, by a property that is among these.
        before: dict[str, str | None] = {name: session.conf.get(name, None) for name in names.values()}
        for key, value in properties.items():
            session.conf.set(names[key], value)
        try:
            yield
        finally:
            for name, earlier in before.items():
                if earlier is None:
                    session.conf.unset(name)
                else:
                    session.conf.set(name, earlier)


def read(session: SparkSession, spec: TableSpec, schema: Schema, selection: Selection | None) -> DataFrame:
    """The table's rows of the selection, lazily."""
    frame = session.table(spec.spark_name)
    return frame if selection is None else frame.filter(to_sql(selection, schema))
