"""Time the one job against pandera's own backend on one Iceberg table.

Run against any Spark Connect server with a `nessie` catalogue:
`python -m branchlake_dagster_tests.checks.timing sc://localhost:15002/;token=… NAMESPACE [ROWS]`.
Leaves nothing behind.
"""

from __future__ import annotations

import os
import sys
import time

import pyspark.sql.types as pst
from pandera.pyspark import DataFrameModel, Field
from pyspark.sql import SparkSession

from branchlake_dagster.checks.compiler import compile_schema
from branchlake_dagster.checks.judge import ConstraintGroup, FrameRows, judge_constraints


class Observed(DataFrameModel):
    norad_id: pst.LongType = Field(ge=1)
    source: pst.StringType = Field(isin=["radar", "optical", "isl"])
    ra_deg: pst.DoubleType = Field(in_range={"min_value": 0, "max_value": 360, "include_max": False})
    dec_deg: pst.DoubleType = Field(in_range={"min_value": -90, "max_value": 90})
    sigma: pst.DoubleType = Field(gt=0, nullable=True)
    tag: pst.StringType = Field(str_matches="^obs-", str_length={"min_value": 5, "max_value": 20})


class ObservedOnce(Observed):
    class Config:
        unique = ["norad_id", "tag"]  # noqa: RUF012


def main(remote: str, namespace: str, size: int) -> None:
    """Print seconds for both, three times each, on `size` rows of which none fails or one in a thousand."""
    spark = SparkSession.builder.remote(remote).create()
    # As the embedded server has it; with Spark's default of 200 the grouping is 400 tasks of nothing.
    spark.conf.set("spark.sql.shuffle.partitions", str(max(2, os.cpu_count() or 2)))
    table = f"nessie.{namespace}.timing"
    spark.sql(f"CREATE NAMESPACE IF NOT EXISTS nessie.{namespace}")
    for label, bad in (("all pass", "false"), ("1 in 1000 fails", "id % 1000 = 0")):
        spark.range(size).selectExpr(
            f"id % 20000 + if({bad}, -30000, 1) AS norad_id",
            f"if({bad}, 'sonar', 'radar') AS source",
            "cast(id % 360 AS double) AS ra_deg",
            "cast(id % 180 - 90 AS double) AS dec_deg",
            f"if({bad}, -1.0d, rand(1) + 0.1d) AS sigma",
            "concat('obs-', id) AS tag",
        ).writeTo(table).createOrReplace()
        rows = spark.table(table)
        for model in (Observed, ObservedOnce):
            schema = model.to_schema()
            constraints = compile_schema(schema)
            ours, theirs = [], []
            for _ in range(3):
                start = time.perf_counter()
                judge_constraints(
                    FrameRows(rows), [ConstraintGroup(schema, constraints, 5)], view="branchlake_timing"
                )
                ours.append(round(time.perf_counter() - start, 2))
                start = time.perf_counter()
                schema.validate(rows)
                theirs.append(round(time.perf_counter() - start, 2))
            print(f"{size} rows, {label}, {len(constraints)} checks: one job {ours} s, pandera {theirs} s")  # noqa: T201
    spark.sql(f"DROP TABLE {table}")
    spark.sql(f"DROP NAMESPACE nessie.{namespace}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1_000_000)
