"""A code location with one asset that passes its check and one that does not."""

import dagster as dg
from pyspark.sql import DataFrame

from branchlake_dagster.branching.resources.spark_resource import BranchSparkResource
from branchlake_dagster.checks import sql_check
from branchlake_dagster.publication.runtime.definitions import branchlake_definitions


@dg.asset(key=["ui", "good"])
def good(spark: BranchSparkResource) -> DataFrame:
    """Numbers from 0 to 9."""
    return spark.spark_session.range(10)


@dg.asset(key=["ui", "bad"])
def bad(spark: BranchSparkResource) -> DataFrame:
    """Numbers from -3 to 6."""
    return spark.spark_session.range(-3, 7)


NEGATIVE = "select * from {this} where id < 0"

defs = dg.Definitions.merge(
    branchlake_definitions(),
    dg.Definitions(
        assets=[good, bad],
        asset_checks=[sql_check(good, "not_negative", NEGATIVE), sql_check(bad, "not_negative", NEGATIVE)],
        executor=dg.in_process_executor,
    ),
)
