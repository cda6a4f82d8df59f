"""Ingestions on the lake and the broker of the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from pyspark.sql import SparkSession

from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.ingest.driving import Driver
from branchlake_dagster_tests.suite.kafka import Broker

Driving = Callable[[Ingest], Driver]


@pytest.fixture
def driving(lakehouse: Lakehouse, kafka: Broker, spark_session: SparkSession) -> Iterator[Driving]:
    """Drives an ingestion batch by batch. Sessions that a failed batch left open are stopped after the test."""
    drivers: list[Driver] = []

    def make(ingest: Ingest) -> Driver:
        drivers.append(Driver(lakehouse, kafka, spark_session, ingest))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.stop_sessions()
