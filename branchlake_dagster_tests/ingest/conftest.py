"""Ingestions on the lake and the broker of the session."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pyspark.sql import SparkSession

from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.ingest.driving import Driver
from branchlake_dagster_tests.suite.kafka import Broker

Driving = Callable[[Ingest], Driver]


@pytest.fixture
def driving(lakehouse: Lakehouse, kafka: Broker, spark_session: SparkSession) -> Driving:
    """Drives an ingestion batch by batch."""
    return lambda ingest: Driver(lakehouse, kafka, spark_session, ingest)
