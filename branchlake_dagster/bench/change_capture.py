"""How fast changes are captured, and what Spark's executors do meanwhile."""

from __future__ import annotations

import json
import random
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyiceberg import types as ice
from pyiceberg.conversions import to_bytes
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, clear_manifest_cache
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.embedded import logs as spark_log
from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown
from branchlake_dagster.history.capture import capture, position_of
from branchlake_dagster.history.snapshot_files import OwnFilesCache
from branchlake_dagster.internals.pyiceberg import applied, snapshot_of, write_metadata
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse

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


FILES = {"100_files": (100, 10), "100k_files": (100_000, 100)}
"""By name the data files of a table, and the appends that made them."""
_CHANGED = 10
_PAUSED = 1_000
_DAYS = 30
_SCHEMA = Schema(
    ice.NestedField(1, "id", ice.LongType()),
    ice.NestedField(2, "day", ice.DateType()),
    ice.NestedField(3, "name", ice.StringType()),
    ice.NestedField(4, "at", ice.TimestampType()),
    *(ice.NestedField(number, f"value_{number}", ice.DoubleType()) for number in range(5, 11)),
)
_BY_DAY = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "day"))


class _Files:
    """Data files that nobody wrote, each of the rows `id` = 1,000 n, with statistics of ten columns."""

    def __init__(self) -> None:
        self._random = random.Random(0)  # noqa: S311 - names of files
        self._number = 0

    def make(self, count: int) -> list[DataFile]:
        return [self._one() for _ in range(count)]

    def _one(self) -> DataFile:
        self._number += 1
        number, day = self._number, 20_000 + self._number % _DAYS
        bounds = {
            1: to_bytes(ice.LongType(), number * 1_000),
            2: to_bytes(ice.DateType(), day),
            3: b"name-%08d" % number,
            4: to_bytes(ice.TimestampType(), day * 86_400_000_000),
            **{column: to_bytes(ice.DoubleType(), float(number)) for column in range(5, 11)},
        }
        name = uuid.UUID(int=self._random.getrandbits(128))
        found = DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=f"file:///nowhere/data/{name}.parquet",
            file_format=FileFormat.PARQUET,
            partition=Record(day),
            record_count=1,
            file_size_in_bytes=100_000 + number,
            column_sizes=dict.fromkeys(bounds, number),
            value_counts=dict.fromkeys(bounds, 1),
            null_value_counts=dict.fromkeys(bounds, 0),
            nan_value_counts={},
            lower_bounds=bounds,
            upper_bounds=bounds,
            split_offsets=[4],
        )
        found.spec_id = 0
        return found


def measure(
    lake: Lakehouse, *, rounds: int = 5, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Medians in milliseconds, of a table that is already loaded and with cold caches, for ten files of it.

    `capture_ms_100_files`, `capture_ms_100k_files`: appended. `capture_overwrite_ms_…`: replaced by ten
    others. `capture_merged_ms_…`: deleted by Spark out of manifests that it had merged before.
    `capture_again_ms_…`: appended, asked a second time. `capture_paused_ms`: of the large table, for a
    consumer that is 1,000 appends behind.
    """
    found: dict[str, Any] = {}
    catalog = lake.catalog(MAIN)
    catalog.create_namespace_if_not_exists(("bench_capture",))
    for name, (files, commits) in FILES.items():
        made = _Files()
        table = _table(catalog, f"table_{name}", files=made, count=files, commits=commits)
        head = table.current_snapshot()
        old = [
            one.fetch_manifest_entry(table.io)[0].data_file
            for one in (head.manifests(table.io) if head else ())[:_CHANGED]
        ]
        appended = _with(table, made.make(_CHANGED))
        overwritten = _with(table, made.make(_CHANGED), old)
        merged_before, merged = _merged(lake, catalog, table)
        found |= {
            f"capture_ms_{name}": _cold(table, appended, rounds, added=_CHANGED),
            f"capture_overwrite_ms_{name}": _cold(
                table, overwritten, rounds, added=_CHANGED, removed=_CHANGED
            ),
            f"capture_merged_ms_{name}": _cold(merged_before, merged, rounds, removed=_CHANGED),
            f"capture_again_ms_{name}": _warm(table, appended, rounds),
        }
        say(f"{files:,} files: ten appended ones are captured in {found[f'capture_ms_{name}']} ms")
    behind = table
    for _ in range(_PAUSED):
        behind = _with(behind, made.make(1))
    found["capture_paused_ms"] = _cold(table, behind, rounds, added=_PAUSED)
    return found


def _table(catalog: NessieCatalog, name: str, *, files: _Files, count: int, commits: int) -> Table:
    identifier = ("bench_capture", name)
    table = catalog.create_table(identifier, _SCHEMA, partition_spec=_BY_DAY)
    for _ in range(commits):
        table = _with(table, files.make(count // commits))
    location = f"{table.location()}/metadata/00001-{uuid.uuid4()}.metadata.json"
    write_metadata(catalog, table.metadata, table.io, location)
    return catalog.register_table(identifier, location, overwrite=True)


def _with(table: Table, added: Sequence[DataFile], removed: Sequence[DataFile] = ()) -> Table:
    """The table after one more snapshot, which no catalogue knows."""
    updates = snapshot_of(
        table,
        added=added,
        removed=removed,
        operation=Operation.OVERWRITE if removed else Operation.APPEND,
        properties={},
        written=[],
    )
    metadata = applied(table.metadata, updates)
    return Table(table.name(), metadata, table.metadata_location, table.io, table.catalog)


def _merged(lake: Lakehouse, catalog: NessieCatalog, table: Table) -> tuple[Table, Table]:
    """The table with few large manifests, and then without ten of its files, all of it by Spark."""
    name = ".".join(table.name())
    count = sum(one.existing_files_count or one.added_files_count or 0 for one in _manifests(table))
    numbers = [1 + place * (count // _CHANGED) for place in range(_CHANGED)]
    session = lake.spark_session(MAIN)
    try:
        session.sql(f"CALL nessie.system.rewrite_manifests('nessie.{name}')").collect()
        before = catalog.load_table(table.name())
        gone = ", ".join(str(number * 1_000) for number in numbers)
        session.sql(f"DELETE FROM nessie.{name} WHERE id IN ({gone})").collect()  # noqa: S608 - ours
    finally:
        session.stop()
    return before, catalog.load_table(table.name())


def _manifests(table: Table) -> Sequence[Any]:
    head = table.current_snapshot()
    return head.manifests(table.io) if head is not None else []


def _cold(before: Table, after: Table, rounds: int, *, added: int = 0, removed: int = 0) -> float:
    took = []
    for _ in range(rounds):
        clear_manifest_cache()
        began = time.perf_counter()
        change = capture(after, position_of(before), name="bench", cache=OwnFilesCache())
        took.append(time.perf_counter() - began)
        if (len(change.added), len(change.removed)) != (added, removed):
            raise RuntimeError(f"The benchmark captured {change.label()}.")
    return _median_ms(took)


def _warm(before: Table, after: Table, rounds: int) -> float:
    cache, took = OwnFilesCache(), []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        capture(after, position_of(before), name="bench", cache=cache)
        took.append(time.perf_counter() - began)
    return _median_ms(took[1:])


def _median_ms(took: Sequence[float]) -> float:
    return round(1000 * statistics.median(took), 2)
