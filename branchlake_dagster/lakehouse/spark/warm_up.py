"""A first write and read on the embedded Spark server, so that the first run does not wait for its classes.

A query plan is compiled by code that the server loads and compiles itself when it first meets it: the first
write takes ten seconds longer than the second.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from branchlake_dagster.lakehouse.embedded.servers import Endpoints
from branchlake_dagster.lakehouse.spark.session import open_session
from branchlake_dagster.settings import Settings

_CATALOG = "warming"
_TABLE = f"{_CATALOG}.up.t"
_ROWS = "SELECT id AS key, id % 7 AS n, CAST(id AS STRING) AS word FROM range(100)"


def warm_up(settings: Settings, endpoints: Endpoints) -> None:
    """Create, merge into, count and replace a table; nothing of it is left.

    In a catalogue of the session's own, whose folder is in the server's scratch space: not in the lake, and
    without Nessie. Does nothing when the Spark server is not ours.
    """
    if not settings.embedded_spark:
        return
    folder = settings.state_dir / "spark" / "warming"
    conf = {
        f"spark.sql.catalog.{_CATALOG}": "org.apache.iceberg.spark.SparkCatalog",
        f"spark.sql.catalog.{_CATALOG}.type": "hadoop",
        f"spark.sql.catalog.{_CATALOG}.warehouse": folder.as_uri(),
        f"spark.sql.catalog.{_CATALOG}.cache-enabled": "false",
    }
    session = open_session(settings, endpoints, ref="main", conf=conf)
    try:
        session.sql(f"CREATE TABLE {_TABLE} USING iceberg PARTITIONED BY (n) AS {_ROWS}")
        session.sql(
            f"MERGE INTO {_TABLE} t USING ({_ROWS}) s ON t.key = s.key"
            " WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        )
        measures = ("count(*)", "sum(CAST(n > 3 AS BIGINT))", "count(DISTINCT key)", "max(word)")
        session.table(_TABLE).selectExpr(*measures).collect()
    finally:
        session.stop()
        shutil.rmtree(Path(folder), ignore_errors=True)
