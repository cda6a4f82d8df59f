"""Benchmark of change capture, and a meter of what Spark's executors use."""

from __future__ import annotations

import json
import random
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pyiceberg import types as ice
from pyiceberg.conversions import to_bytes
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.embedded import process
from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown
from branchlake_dagster.history.capture import capture_change, current_position
from branchlake_dagster.history.manifests import OwnFilesCache, read_manifest_entries, read_manifests
from branchlake_dagster.internals.pyiceberg import apply_updates, build_snapshot, write_metadata
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse

_QUIET_S = 0.3
_PATIENCE_S = 60.0
_SIZE_METRICS = (".TotalDataFileSize", ".TotalDeleteFileSize")
"""Suffixes of Iceberg's metric classes for scans. Metric classes for writes have other names."""


class MetricsMissing(BranchlakeError, OutcomeUnknown):  # noqa: N818 - named like the other outcomes
    """Spark's event log does not contain the end of a measured job."""


@dataclass(frozen=True)
class ExecutorUsage:
    """The resources that Spark tasks used: run time, CPU time, and the size of the files that scans planned.

    Spark's own metric of bytes read omits the bytes that Iceberg reads from local files.
    """

    run_s: float = 0.0
    cpu_s: float = 0.0
    bytes_scanned: int = 0

    def __add__(self, other: ExecutorUsage) -> ExecutorUsage:
        return ExecutorUsage(
            self.run_s + other.run_s, self.cpu_s + other.cpu_s, self.bytes_scanned + other.bytes_scanned
        )


def write_spark_conf(folder: Path) -> Path:
    """Write a folder for SPARK_CONF_DIR that lets a Spark server log its events, and return its path."""
    events = folder / "events"
    events.mkdir(parents=True, exist_ok=True)
    conf_folder = folder / "conf"
    process.write_log_config(conf_folder)
    conf = {"enabled": "true", "dir": events.as_uri(), "compress": "false", "rolling.enabled": "false"}
    lines = [f"spark.eventLog.{name} {value}" for name, value in conf.items()]
    (conf_folder / "spark-defaults.conf").write_text("\n".join(lines) + "\n")
    return conf_folder


class ExecutorMetrics:
    """Reads Spark's event log in `folder`, and reports the usage since the previous call."""

    def __init__(self, folder: Path) -> None:
        self._events = folder / "events"
        self._offset = 0
        self._running: set[int] = set()
        self._sizes: set[int] = set()

    def since_last(self) -> ExecutorUsage:
        """Return the usage since the previous call.

        Waits until the log contains the end of every job. Raises MetricsMissing after a minute.
        """
        usage = ExecutorUsage()
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            time.sleep(_QUIET_S)
            lines = self._read_new_lines()
            for line in lines:
                usage += self._usage_of_event(json.loads(line))
            if not lines and not self._running:
                return usage
        raise MetricsMissing(
            "Spark's event log did not record the end of a job within a minute.",
            hint="Run the benchmark again on a machine with less load.",
        )

    def _read_new_lines(self) -> list[bytes]:
        (path,) = self._events.iterdir()
        with path.open("rb") as log:
            log.seek(self._offset)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.splitlines()

    def _usage_of_event(self, event: dict[str, Any]) -> ExecutorUsage:
        kind: str = event["Event"]
        if kind == "SparkListenerJobStart":
            self._running.add(event["Job ID"])
        elif kind == "SparkListenerJobEnd":
            self._running.discard(event["Job ID"])
        elif kind == "SparkListenerTaskEnd" and (metrics := event.get("Task Metrics")):
            return ExecutorUsage(
                metrics["Executor Run Time"] / 1e3,
                metrics["Executor CPU Time"] / 1e9,
            )
        elif kind.endswith("SparkListenerDriverAccumUpdates"):
            sizes = (value for name, value in event["accumUpdates"] if name in self._sizes)
            return ExecutorUsage(bytes_scanned=sum(sizes))
        if plan := event.get("sparkPlanInfo"):
            self._sizes.update(_find_size_metrics(plan))
        return ExecutorUsage()


def _find_size_metrics(plan: dict[str, Any]) -> Iterator[int]:
    """Find the accumulators in which Iceberg's scans record the size of the files that they planned."""
    for metric in plan["metrics"]:
        if metric["metricType"].endswith(_SIZE_METRICS):
            yield metric["accumulatorId"]
    for child in plan["children"]:
        yield from _find_size_metrics(child)


FILES = {"100_files": (100, 10), "100k_files": (100_000, 100)}
"""The tables by name, with the number of data files and the number of appends that created them."""
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


class _FakeDataFiles:
    """Metadata of data files that do not exist.

    File n has one row with `id` = 1,000 n, and statistics of ten columns.
    """

    def __init__(self) -> None:
        self._random = random.Random(0)  # noqa: S311 - names of files
        self._number = 0

    def build_files(self, count: int) -> list[DataFile]:
        return [self._build_file() for _ in range(count)]

    def _build_file(self) -> DataFile:
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
        data_file = DataFile.from_args(
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
        data_file.spec_id = 0
        return data_file


def measure_capture(
    lake: Lakehouse, *, rounds: int = 5, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure the capture of a change of ten files, as medians in milliseconds.

    The table is already loaded. The caches are cold, except for `capture_again_ms_…`.

    - `capture_ms_100_files`, `capture_ms_100k_files`: ten files were appended.
    - `capture_overwrite_ms_…`: ten files were replaced by ten others.
    - `capture_merged_ms_…`: Spark deleted ten files from manifests that it had merged before.
    - `capture_again_ms_…`: ten files were appended, and the change is captured a second time.
    - `capture_paused_ms`: a consumer of the large table is 1,000 appends behind.
    """
    figures: dict[str, Any] = {}
    catalog = lake.catalog(MAIN)
    catalog.create_namespace_if_not_exists(("bench_capture",))
    for name, (files, commits) in FILES.items():
        fake_files = _FakeDataFiles()
        table = _create_table(catalog, f"table_{name}", files=fake_files, count=files, commits=commits)
        manifests = islice(read_manifests(table.io, table.current_snapshot()), _CHANGED)
        old_files = [next(read_manifest_entries(table.io, manifest)).data_file for manifest in manifests]
        appended_table = _with_snapshot(table, fake_files.build_files(_CHANGED))
        overwritten_table = _with_snapshot(table, fake_files.build_files(_CHANGED), old_files)
        before_delete, after_delete = _merge_then_delete(lake, catalog, table)
        figures |= {
            f"capture_ms_{name}": _time_cold_capture(table, appended_table, rounds, added=_CHANGED),
            f"capture_overwrite_ms_{name}": _time_cold_capture(
                table, overwritten_table, rounds, added=_CHANGED, removed=_CHANGED
            ),
            f"capture_merged_ms_{name}": _time_cold_capture(
                before_delete, after_delete, rounds, removed=_CHANGED
            ),
            f"capture_again_ms_{name}": _time_warm_capture(table, appended_table, rounds),
        }
        say(f"{files:,} files: capturing ten appended files took {figures[f'capture_ms_{name}']} ms")
    later_table = table
    for _ in range(_PAUSED):
        later_table = _with_snapshot(later_table, fake_files.build_files(1))
    figures["capture_paused_ms"] = _time_cold_capture(table, later_table, rounds, added=_PAUSED)
    return figures


def _create_table(
    catalog: NessieCatalog, name: str, *, files: _FakeDataFiles, count: int, commits: int
) -> Table:
    identifier = ("bench_capture", name)
    table = catalog.create_table(identifier, _SCHEMA, partition_spec=_BY_DAY)
    for _ in range(commits):
        table = _with_snapshot(table, files.build_files(count // commits))
    location = f"{table.location()}/metadata/00001-{uuid.uuid4()}.metadata.json"
    write_metadata(catalog, table.metadata, table.io, location)
    return catalog.register_table(identifier, location, overwrite=True)


def _with_snapshot(table: Table, added: Sequence[DataFile], removed: Sequence[DataFile] = ()) -> Table:
    """Return the table with one more snapshot, without committing it to a catalog."""
    updates = build_snapshot(
        table,
        added=added,
        removed=removed,
        operation=Operation.OVERWRITE if removed else Operation.APPEND,
        properties={},
        written_paths=[],
    )
    metadata = apply_updates(table.metadata, updates)
    return Table(table.name(), metadata, table.metadata_location, table.io, table.catalog)


def _merge_then_delete(lake: Lakehouse, catalog: NessieCatalog, table: Table) -> tuple[Table, Table]:
    """Let Spark merge the manifests of a table and then delete ten of its files.

    Returns the table after each of the two steps.
    """
    name = ".".join(table.name())
    count = sum(
        manifest.existing_files_count or manifest.added_files_count or 0
        for manifest in read_manifests(table.io, table.current_snapshot())
    )
    numbers = [1 + index * (count // _CHANGED) for index in range(_CHANGED)]
    session = lake.spark_session(MAIN)
    try:
        session.sql(f"CALL nessie.system.rewrite_manifests('nessie.{name}')").collect()
        before = catalog.load_table(table.name())
        deleted_ids = ", ".join(str(number * 1_000) for number in numbers)
        session.sql(f"DELETE FROM nessie.{name} WHERE id IN ({deleted_ids})").collect()  # noqa: S608 - ours
    finally:
        session.stop()
    return before, catalog.load_table(table.name())


def _time_cold_capture(
    before: Table, after: Table, rounds: int, *, added: int = 0, removed: int = 0
) -> float:
    durations = []
    for _ in range(rounds):
        began = time.perf_counter()
        change = capture_change(after, current_position(before), name="bench", cache=OwnFilesCache())
        durations.append(time.perf_counter() - began)
        if (len(change.added), len(change.removed)) != (added, removed):
            raise RuntimeError(f"The benchmark captured a wrong change: {change.label()}.")
    return _median_ms(durations)


def _time_warm_capture(before: Table, after: Table, rounds: int) -> float:
    cache, durations = OwnFilesCache(), []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        capture_change(after, current_position(before), name="bench", cache=cache)
        durations.append(time.perf_counter() - began)
    return _median_ms(durations[1:])


def _median_ms(durations: Sequence[float]) -> float:
    return round(1000 * statistics.median(durations), 2)
