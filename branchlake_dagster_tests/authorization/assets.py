"""Assets for these tests: small, with and without Spark, and a way to break them on purpose."""

import dagster as dg
import pandera.pyspark as pa
import polars as pl
from pandera.pyspark import DataFrameModel
from pyspark.sql import DataFrame
from pyspark.sql.types import LongType

from branchlake_dagster.checks import pandera_checks
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.tables.specification import table_metadata

APPEND = table_metadata(write_mode="append", require_checks=False)
FREE = table_metadata(require_checks=False)


def appending(namespace: str, name: str = "t") -> dg.AssetsDefinition:
    """Each run appends a row."""

    @dg.asset(key=[namespace, name], metadata=APPEND)
    def appended() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    return appended


def checked(namespace: str, *, passes: bool = True) -> tuple[dg.AssetsDefinition, dg.AssetChecksDefinition]:
    """A table and a check that reads it without Spark."""

    @dg.asset(key=[namespace, "checked"])
    def checked() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    @dg.asset_check(asset=checked)
    def judged(checked: pl.DataFrame) -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=passes and len(checked) == 1, description="one row")

    return checked, judged


def serializable(namespace: str, upstream: dg.AssetsDefinition) -> dg.AssetsDefinition:
    """Reads `upstream` and insists that it stays as it was."""

    @dg.asset(
        key=[namespace, "summed"],
        ins={"rows": dg.AssetIn(upstream.key)},
        metadata=table_metadata(require_checks=False, isolation="serializable"),
    )
    def summed(rows: pl.DataFrame) -> pl.DataFrame:
        return pl.DataFrame({"n": [int(rows["n"].sum())]})

    return summed


class Rows(DataFrameModel):
    """The contract of the Spark table."""

    n: LongType() = pa.Field(ge=0)


def sparked(
    namespace: str, upstream: dg.AssetsDefinition
) -> tuple[dg.AssetsDefinition, dg.AssetChecksDefinition]:
    """A Spark frame from a Spark frame and from SQL, with a contract that Spark evaluates."""

    @dg.asset(key=[namespace, "sparked"], ins={"rows": dg.AssetIn(upstream.key)})
    def made(rows: DataFrame, spark: BranchSparkResource) -> DataFrame:
        again = spark.spark_session.sql(f"SELECT n FROM nessie.{namespace}.{upstream.key.path[-1]}")
        return rows.union(again)

    return made, pandera_checks(made, Rows)
