"""What Spark's executors did, from the event log of the embedded server: its page is off, its log is a file.

A server begun with `configuration` logs the end of each task as a line of JSON, with its metrics.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from branchlake_dagster.embedded import logs as spark_log
from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown

_QUIET_S = 0.3
_PATIENCE_S = 60.0
_SIZES = (".TotalDataFileSize", ".TotalDeleteFileSize")
"""Iceberg's classes of a scan's metrics; those of a write have other names."""


class MetricsMissing(BranchlakeError, OutcomeUnknown):  # noqa: N818 - named like the other outcomes
    """Spark's event log does not tell what was measured."""


@dataclass(frozen=True)
class Used:
    """What tasks used: seconds that they ran, of these on a processor, and the size of their files.

    Spark's own count of bytes read leaves out what Iceberg reads of local files.
    """

    run_s: float = 0.0
    cpu_s: float = 0.0
    bytes_scanned: int = 0

    def __add__(self, other: Used) -> Used:
        return Used(
            self.run_s + other.run_s, self.cpu_s + other.cpu_s, self.bytes_scanned + other.bytes_scanned
        )


def configuration(folder: Path) -> Path:
    """A Spark configuration folder for a server that logs its events; for SPARK_CONF_DIR."""
    events = folder / "events"
    events.mkdir(parents=True, exist_ok=True)
    found = folder / "conf"
    spark_log.configure(found)
    conf = {"enabled": "true", "dir": events.as_uri(), "compress": "false", "rolling.enabled": "false"}
    lines = [f"spark.eventLog.{name} {value}" for name, value in conf.items()]
    (found / "spark-defaults.conf").write_text("\n".join(lines) + "\n")
    return found


class ExecutorMetrics:
    """Reads the event log in `folder` on; each call tells what was used since the one before it."""

    def __init__(self, folder: Path) -> None:
        self._events = folder / "events"
        self._offset = 0
        self._running: set[int] = set()
        self._sizes: set[int] = set()

    def since_last(self) -> Used:
        """What has been used. Waits until the log has the end of every job; raises MetricsMissing."""
        found = Used()
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            time.sleep(_QUIET_S)
            lines = self._lines()
            for line in lines:
                found += self._told(json.loads(line))
            if not lines and not self._running:
                return found
        raise MetricsMissing("A Spark job has not ended in the event log within a minute.")

    def _lines(self) -> list[bytes]:
        (path,) = self._events.iterdir()
        with path.open("rb") as log:
            log.seek(self._offset)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.splitlines()

    def _told(self, event: dict[str, Any]) -> Used:
        kind: str = event["Event"]
        if kind == "SparkListenerJobStart":
            self._running.add(event["Job ID"])
        elif kind == "SparkListenerJobEnd":
            self._running.discard(event["Job ID"])
        elif kind == "SparkListenerTaskEnd" and (told := event.get("Task Metrics")):
            return Used(
                told["Executor Run Time"] / 1e3,
                told["Executor CPU Time"] / 1e9,
            )
        elif kind.endswith("SparkListenerDriverAccumUpdates"):
            sizes = (value for name, value in event["accumUpdates"] if name in self._sizes)
            return Used(bytes_scanned=sum(sizes))
        if plan := event.get("sparkPlanInfo"):
            self._sizes.update(_sizes(plan))
        return Used()


def _sizes(plan: dict[str, Any]) -> Iterator[int]:
    """The accumulators in which Iceberg's scans tell the size of the files that they have planned."""
    for metric in plan["metrics"]:
        if metric["metricType"].endswith(_SIZES):
            yield metric["accumulatorId"]
    for child in plan["children"]:
        yield from _sizes(child)
