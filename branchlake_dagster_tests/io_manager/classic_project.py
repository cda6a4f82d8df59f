"""Run by test_spark_io.py in a process of its own: the IO manager on classic Spark sessions."""

import uuid
from collections.abc import Iterator

import dagster as dg
import polars as pl
import pyarrow as pa
from pyspark.sql import DataFrame

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.spark.session import is_connect
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import project

NAMESPACE = f"c{uuid.uuid4().hex[:12]}"
FREE = table_metadata(require_checks=False)


@dg.asset(
    key=[NAMESPACE, "t"],
    partitions_def=dg.StaticPartitionsDefinition(["a", "b"]),
    metadata=table_metadata(partition_by="kind", require_checks=False),
)
def t(context: dg.AssetExecutionContext, spark: BranchSparkResource) -> DataFrame:
    session = spark.spark_session
    assert not is_connect(session)
    assert session.conf.get("spark.sql.catalog.nessie.ref") == run_branch_name(context.run.run_id)
    return session.createDataFrame(
        [(context.partition_key, 1), (context.partition_key, 2)], "kind string, n int"
    )


def _same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


@dg.asset(
    key=[NAMESPACE, "sums"],
    ins={"t": dg.AssetIn([NAMESPACE, "t"])},
    metadata=table_metadata(write_mode="upsert", keys=["kind"], require_checks=False),
)
def sums(spark: BranchSparkResource, t: DataFrame) -> DataFrame:
    session = spark.spark_session
    session.sql(f"SELECT * FROM nessie.{NAMESPACE}.t").collect()
    # Workers need what is installed beside this process, whatever `python3` is.
    assert session.range(3).mapInArrow(_same, "id long").count() == 3
    return t.groupBy("kind").sum("n").withColumnRenamed("sum(n)", "total")


@dg.asset(key=[NAMESPACE, "frame"], ins={"sums": dg.AssetIn([NAMESPACE, "sums"])}, metadata=FREE)
def frame(sums: pl.DataFrame) -> pl.DataFrame:
    return sums


def run() -> None:
    lake = Lakehouse()
    with project(lake, t, sums, frame) as p:
        for kind in ("a", "b"):
            assert p.settle(p.run(dg.AssetKey([NAMESPACE, "t"]), partition=kind)).state is RunState.PUBLISHED
        rest = [dg.AssetKey([NAMESPACE, name]) for name in ("sums", "frame")]
        for _ in range(2):
            assert p.settle(p.run(*rest)).state is RunState.PUBLISHED
        found = sorted((row["kind"], row["total"]) for row in p.rows(NAMESPACE, "frame"))
        assert found == [("a", 3), ("b", 3)], found
        assert len(p.rows(NAMESPACE, "t")) == 4


if __name__ == "__main__":
    run()
    print("ok")  # noqa: T201 - what the test reads
