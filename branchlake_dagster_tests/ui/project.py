"""A code location with assets that pass their check and assets that do not."""

import os
import runpy
from pathlib import Path

import dagster as dg
import polars as pl
from pyspark.sql import DataFrame

from branchlake_dagster import BranchSparkResource, branchlake_definitions, sql_check, table_metadata

BAD_DAY = "BRANCHLAKE_TEST_BAD_DAY"
"""Names a file; while it exists, the next runs of `daily` write a negative number."""

READERS_FILE = "BRANCHLAKE_TEST_READERS_FILE"
"""Names the `my_lake.py` that the reader of docs/getting-started.md has written."""

DAYS = dg.StaticPartitionsDefinition(["mon", "tue", "wed"])


@dg.asset(key=["ui", "good"], kinds={"iceberg", "spark"}, owners=["team:lake"])
def good(spark: BranchSparkResource) -> DataFrame:
    """Numbers from 0 to 9."""
    return spark.spark_session.range(10)


@dg.asset(key=["ui", "bad"], kinds={"iceberg", "spark"})
def bad(spark: BranchSparkResource) -> DataFrame:
    """Numbers from -3 to 6."""
    return spark.spark_session.range(-3, 7)


@dg.asset(
    key=["ui", "daily"],
    kinds={"iceberg", "polars"},
    partitions_def=DAYS,
    metadata=table_metadata(partition_by="day"),
)
def daily(context: dg.AssetExecutionContext) -> pl.DataFrame:
    """Two numbers a day."""
    bad_day = Path(os.environ.get(BAD_DAY, "/nowhere")).exists()
    return pl.DataFrame({"day": [context.partition_key] * 2, "id": [1, -2 if bad_day else 2]})


NEGATIVE = "select * from {this} where id < 0"

readers_file = runpy.run_path(os.environ[READERS_FILE]) if READERS_FILE in os.environ else None

defs = branchlake_definitions(
    definitions=dg.Definitions(
        assets=[good, bad, daily, *([readers_file["prices"]] if readers_file else [])],
        asset_checks=[
            *(sql_check(asset, "not_negative", NEGATIVE) for asset in (good, bad, daily)),
            *([readers_file["prices_are_positive"]] if readers_file else []),
        ],
        executor=dg.in_process_executor,
    ),
)
