"""The code location of `branchlake bench`: the assets of the product, and one small asset.

Sensors that launch runs are left out: the benchmark launches and times each run itself.
"""

import dagster as dg
from pandera.pyspark import DataFrameModel, Field
from pyspark.sql import DataFrame
from pyspark.sql.types import LongType

from branchlake_dagster.bench.parts_project import parts_definitions
from branchlake_dagster.checks import pandera_checks
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.sda.graph.code_location import build_definitions
from branchlake_dagster.settings import Settings

SMALL = dg.AssetKey(["bench", "small"])


class SmallContract(DataFrameModel):  # type: ignore[type-arg]  # generic in its stubs only
    """The contract of the small table: `id` is not negative."""

    id: LongType = Field(ge=0, unique=False)


@dg.asset(key=SMALL, group_name="bench")
def small(spark: BranchSparkResource) -> DataFrame:
    """A thousand rows that Spark generates."""
    return spark.spark_session.range(1_000)


small_job = dg.define_asset_job("small_job", selection=dg.AssetSelection.assets(SMALL))

_KEPT_SENSORS = ("publication_sensor", "dead_writer_sensor")


def _without_launching_sensors(definitions: dg.Definitions) -> dg.Definitions:
    sensors = {sensor.name: sensor for sensor in definitions.sensors or ()}
    return dg.Definitions(
        assets=definitions.assets,
        asset_checks=definitions.asset_checks,
        schedules=definitions.schedules,
        sensors=[sensors[name] for name in _KEPT_SENSORS],
        jobs=definitions.jobs,
        resources=definitions.resources,
        executor=definitions.executor,
        loggers=definitions.loggers,
    )


defs = dg.Definitions.merge(
    _without_launching_sensors(build_definitions(Settings())),
    parts_definitions(Settings()),
    dg.Definitions(assets=[small], asset_checks=[pandera_checks(small, SmallContract)], jobs=[small_job]),
)
