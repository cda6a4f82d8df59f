"""What is changed of pyspark's Spark Connect client."""

from __future__ import annotations

import logging

import pyspark.sql.connect.logging
import pytest
from pyspark.sql.connect.session import SparkSession

from branchlake_dagster.internals.pyspark import (
    disable_session_finalizer,
    silence_connect_log,
)
from branchlake_dagster.lakehouse.lakehouse import Lakehouse


@pytest.mark.parametrize("level", [None, "WARNING"])
def test_it_says_something_only_where_it_is_asked_to(
    level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It switches itself off; what Dagster does to all logs switched it on again."""
    monkeypatch.delenv("SPARK_CONNECT_LOG_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("SPARK_CONNECT_LOG_LEVEL", level)
    log = pyspark.sql.connect.logging.logger
    monkeypatch.setattr(log, "disabled", False)
    for _ in range(2):
        silence_connect_log()
    record = log.makeRecord(log.name, logging.WARNING, "", 0, "ReleaseExecute failed", (), None)
    assert bool(log.filter(record)) is (level is not None)


def test_the_garbage_collector_closes_no_session() -> None:
    """Where it came to one while pyspark started a thread, both waited for each other."""
    for _ in range(2):
        disable_session_finalizer()
    assert not hasattr(SparkSession, "__del__")


@pytest.mark.spark
def test_a_checkpoint_belongs_to_the_session_of_its_frame(lakehouse: Lakehouse) -> None:
    """The first session of a thread is its active one, for which pyspark takes every checkpoint."""
    sessions = [lakehouse.spark_session() for _ in range(2)]
    for session in sessions:
        numbers = session.range(3).localCheckpoint()
        both = numbers.union(session.range(2))
        assert both.sparkSession is session
        assert both.count() == 5
        del numbers, both
    for session in sessions:
        session.stop()
