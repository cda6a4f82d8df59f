"""Limit the Arrow batches that Spark sends to its Python workers."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession

_ARROW = "spark.sql.execution.arrow"
DEFAULT_LIMITS = (64 << 20, 10_000)
"""Spark's own limits: bytes and rows."""
NO_BYTE_LIMIT = (1 << 31) - 1
"""The byte limit with which Spark counts no bytes. To count them, it adds up all columns after each row."""
_limits: WeakKeyDictionary[SparkSession, tuple[int, int]] = WeakKeyDictionary()
"""The limits that this process has set, by session."""


def limit_arrow_batches(session: SparkSession, *, max_bytes: int, max_rows: int) -> None:
    """Limit the Arrow batches that the session sends to workers from now on.

    Without a byte limit, a column of a batch must have less than 2 GiB. Sends a request only if the limits
    differ from those that this function has set before.
    """
    limits = (max_bytes, max_rows)
    if _limits.get(session, DEFAULT_LIMITS) != limits:
        session.conf.set(f"{_ARROW}.maxRecordsPerBatch", str(max_rows))
        session.conf.set(f"{_ARROW}.maxBytesPerBatch", str(max_bytes))
        _limits[session] = limits
