"""Limits of the Arrow batches that Spark sends to workers."""

from __future__ import annotations

from typing import cast

from pyspark.sql import SparkSession

from branchlake_dagster.spark.arrow_batches import DEFAULT_LIMITS, NO_BYTE_LIMIT, limit_arrow_batches


class _Session:
    """A session that records the settings that are sent to it."""

    def __init__(self) -> None:
        self.conf = self
        self.sent: list[tuple[str, str]] = []

    def set(self, name: str, value: str) -> None:
        self.sent.append((name.rpartition(".")[2], value))


def test_limits_are_sent_only_if_they_change() -> None:
    sessions = [_Session(), _Session()]
    default_bytes, default_rows = DEFAULT_LIMITS
    for session in sessions:
        limit_arrow_batches(cast("SparkSession", session), max_bytes=default_bytes, max_rows=default_rows)
        assert session.sent == []
    for _ in range(2):
        limit_arrow_batches(cast("SparkSession", sessions[0]), max_bytes=NO_BYTE_LIMIT, max_rows=2_500)
        assert sessions[0].sent == [
            ("maxRecordsPerBatch", "2500"),
            ("maxBytesPerBatch", str(NO_BYTE_LIMIT)),
        ]
    limit_arrow_batches(cast("SparkSession", sessions[0]), max_bytes=default_bytes, max_rows=default_rows)
    assert len(sessions[0].sent) == 4
    assert sessions[1].sent == []
