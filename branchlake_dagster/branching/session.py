"""The run's Spark session as a Dagster resource, configured through dagster-pyspark."""

from __future__ import annotations

from typing import Any

from dagster import InitResourceContext
from dagster_pyspark import PySparkResource
from dagster_spark.utils import flatten_dict
from pyspark.sql import SparkSession

from branchlake_dagster.branching.resource import LakehouseResource


class BranchSparkResource(PySparkResource):
    """dagster-pyspark's session resource, with a session per run that stands on the run's branch.

    `spark_config` is dagster-pyspark's (nested or dotted Spark settings, `spark.remote` included).
    The base class calls `getOrCreate()`: two runs in one process would share a session and its branch.
    """

    lakehouse: LakehouseResource
    spark_config: dict[str, Any] = {}  # noqa: RUF012 - a pydantic field, copied per instance

    def setup_for_execution(self, context: InitResourceContext) -> None:
        """Nothing yet: the session and the branch are made at their first use."""

    def teardown_after_execution(self, context: InitResourceContext) -> None:  # noqa: ARG002 - Dagster's signature
        """Give the session's memory on the server back."""
        session, self._spark_session = self._spark_session, None
        if session is not None and self.lakehouse.lakehouse.settings.session_kind == "connect":
            session.stop()

    @property
    def spark_session(self) -> SparkSession:
        """The session of this run; `spark.sql(…)` in it reads and writes the run's branch."""
        if self._spark_session is None:
            conf = {key: str(value) for key, value in flatten_dict(self.spark_config)}  # type: ignore[no-untyped-call]
            self._spark_session = self.lakehouse.lakehouse.spark_session(self.lakehouse.ref(), conf=conf)
        session: SparkSession = self._spark_session
        return session
