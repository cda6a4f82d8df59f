"""Processes that work on a lake beside its live ingestion: readers, and a maintenance that repeats itself.

Each is a process of its own, as for users: a reader does not compete with the ingestion for one interpreter.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any, Generic, TypeVar

from branchlake_dagster.bench.launched_run import BenchFailed
from branchlake_dagster.compaction.compaction_plan import CompactionOptions
from branchlake_dagster.expiry.retention import ExpiryPolicy
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.maintenance.maintenance_run import MaintenanceOptions, run_maintenance
from branchlake_dagster.query.connection import LakeReader
from branchlake_dagster.settings import Settings
from branchlake_dagster.waiting import holds_within

QUERIES_PER_MIN = 50
_QUERY_THREADS = 2
_SPARK_EVERY_S = 10.0
_START_S, _STOP_S = 120.0, 900.0
_MAX_ERRORS = 5
_WHOLE_EVERY = 10
"""One query of so many reads the whole table; the others read its newest rows."""
_RECENT_OFFSETS = 2_500
"""How many of the newest offsets of each Kafka partition a query reads."""
_POSITION = "(CAST(partition_ AS BIGINT) * 1099511627776 + offset_)"
"""Kafka partition and offset of a row as one number. SQL of DuckDB and of Spark."""
_COUNTS = f"count(*), count(DISTINCT {_POSITION}), max(offset_)"

T = TypeVar("T")


@dataclass
class ReadFigures:
    """The reads of one reader process.

    `query_s` and `spark_s` are the seconds of each answered read, by DuckDB and by Spark. `wrong` counts the
    answers in which a row occurs twice, or that have fewer rows than an earlier answer. `failed` counts the
    reads that raised an error; `errors` describes the first five.
    """

    query_s: list[float] = field(default_factory=list)
    spark_s: list[float] = field(default_factory=list)
    wrong: int = 0
    failed: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass
class MaintenanceFigures:
    """The work of a maintenance process: how often it ran, and what all its runs did.

    `compactions` counts the commits of compactions, and `compacted_files` the data files that they replaced.
    `collected_files` counts the files that collections deleted. `errors` describes the first five errors.
    """

    rounds: int = 0
    compactions: int = 0
    compacted_files: int = 0
    expired_snapshots: int = 0
    collected_files: int = 0
    failed: int = 0
    errors: list[str] = field(default_factory=list)


class LakeProcess(Generic[T]):
    """A spawned process that calls `work(settings, ready, stop, *arguments)` and returns its result.

    `work` is a function of a module. It sets the event `ready` when it is prepared, and ends soon after the
    event `stop` is set. The process is killed if this one ends.
    """

    def __init__(self, work: Callable[..., T], settings: Settings, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._ready, self._stop = context.Event(), context.Event()
        self._results, results = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_send_result,
            args=(work, results, settings, self._ready, self._stop, *arguments),
            daemon=True,
        )
        self._process.start()
        results.close()  # so that reading ends if the process is killed

    def wait_until_ready(self) -> None:
        """Wait until the process is prepared. Raises BenchFailed if it failed, or after two minutes."""
        is_ready = holds_within(_START_S, lambda: self._ready.is_set() or self._results.poll(), every_s=0.1)
        if not is_ready:
            raise BenchFailed(f"A process of the benchmark was not ready after {_START_S:.0f} s.")
        if not self._ready.is_set():
            self.finish()

    def finish(self) -> T:
        """Let the process end, and return its result. Raises BenchFailed if it failed or does not end."""
        self._stop.set()
        try:
            if not self._results.poll(_STOP_S):
                raise BenchFailed(f"A process of the benchmark did not end within {_STOP_S:.0f} s.")
            result = self._results.recv()
        except EOFError as error:
            raise BenchFailed("A process of the benchmark was killed.") from error
        finally:
            self.kill()
        if isinstance(result, Exception):
            raise result
        done: T = result
        return done

    def kill(self) -> None:
        """End the process at once. Safe to call again."""
        self._process.kill()
        self._process.join()


def _send_result(
    work: Callable[..., T],
    results: Connection,
    settings: Settings,
    ready: Event,
    stop: Event,
    *arguments: Any,
) -> None:
    try:
        results.send(work(settings, ready, stop, *arguments))
    except Exception as error:  # noqa: BLE001 - raised in the other process
        results.send(BenchFailed(f"{work.__name__} failed with {type(error).__name__}: {error}"))


# -- readers -------------------------------------------------------------------------------------------


def read_until_stopped(settings: Settings, ready: Event, stop: Event, table: str) -> ReadFigures:
    """Read a table by two threads with DuckDB, together 50 times a minute, and by one with Spark.

    `table` is its dotted name; it must have a row. A reader that is late reads again at once.
    """
    lake, figures, lock = Lakehouse(settings, start=False), ReadFigures(), threading.Lock()
    session = lake.spark_session(MAIN)
    readers = [_DuckDbReader(LakeReader(lake), table) for _ in range(_QUERY_THREADS)]

    def read_by_spark() -> tuple[int, int]:
        rows = session.table(f"nessie.{table}")
        row = rows.selectExpr("count(*)", f"count(DISTINCT {_POSITION})").first()
        assert row is not None  # noqa: S101 - an aggregation has one row
        return int(row[0]), int(row[1])

    spark_reader = TableReader(read_by_spark)
    every_s = 60.0 * _QUERY_THREADS / QUERIES_PER_MIN
    works: list[tuple[TableReader, list[float], float]] = [
        *((reader, figures.query_s, every_s) for reader in readers),
        (spark_reader, figures.spark_s, _SPARK_EVERY_S),
    ]
    for reader, _, _ in works:
        reader.check()  # starts DuckDB and the Spark session
    threads = [
        threading.Thread(target=_repeat_reads, args=(reader, figures, seconds, period_s, lock, stop))
        for reader, seconds, period_s in works
    ]
    ready.set()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    session.stop()
    return figures


def _repeat_reads(
    reader: TableReader,
    figures: ReadFigures,
    seconds: list[float],
    every_s: float,
    lock: threading.Lock,
    stop: Event,
) -> None:
    due = time.perf_counter()
    while not stop.wait(max(0.0, due - time.perf_counter())):
        began = time.perf_counter()
        try:
            is_right = reader.check()
        except Exception as error:  # noqa: BLE001 - counted: no read may fail
            with lock:
                figures.failed += 1
                if len(figures.errors) < _MAX_ERRORS:
                    figures.errors.append(f"{type(error).__name__}: {error}"[:500])
        else:
            with lock:
                seconds.append(time.perf_counter() - began)
                figures.wrong += not is_right
        due = max(due + every_s, began)


class TableReader:
    """Reads a table again and again. `count` returns the numbers of its rows and of its distinct rows."""

    def __init__(self, count: Callable[[], tuple[int, int]]) -> None:
        self._count = count
        self._rows = 0

    def check(self) -> bool:
        """Return whether each row occurs once, and the answer has no fewer rows than the previous one."""
        rows, distinct = self._count()
        is_right = rows == distinct and rows >= self._rows
        self._rows = rows
        return is_right


class _DuckDbReader(TableReader):
    """Reads the newest rows of a table with DuckDB, and each tenth time the whole table."""

    def __init__(self, reader: LakeReader, table: str) -> None:
        super().__init__(self._count_rows)
        self._lake = reader
        self._table = table
        self._number = 0
        self._last_offset = 0

    def check(self) -> bool:
        self._number += 1
        if self._number % _WHOLE_EVERY == 1:
            return super().check()
        rows, distinct = self._count_rows(self._last_offset - _RECENT_OFFSETS)
        return 0 < rows == distinct

    def _count_rows(self, first_offset: int = 0) -> tuple[int, int]:
        query = f"FROM {self._table} SELECT {_COUNTS} WHERE offset_ >= {first_offset}"
        with self._lake.sql(query) as result:
            ((rows, distinct, last_offset),) = result.relation().fetchall()
        self._last_offset = max(self._last_offset, last_offset or 0)
        return rows, distinct


# -- maintenance ---------------------------------------------------------------------------------------


def maintain_until_stopped(
    settings: Settings, ready: Event, stop: Event, every_s: float
) -> MaintenanceFigures:
    """Compact, expire and collect all tables of a lake every `every_s` seconds, at once if it is late.

    Partitions are compacted although rows are being written to them, from 20 small files on. An expiry keeps
    the newest five snapshots of a table and those that open runs need, whatever their age.
    """
    lake, figures = Lakehouse(settings, start=False), MaintenanceFigures()
    options = MaintenanceOptions(
        CompactionOptions(include_hot=True, max_small_files=20),
        ExpiryPolicy(keep_count=5, keep_age=timedelta(0), undo_age=timedelta(0)),
    )
    ready.set()
    due = time.perf_counter()
    while not stop.wait(max(0.0, due - time.perf_counter())):
        due = time.perf_counter() + every_s
        result = run_maintenance(lake, options=options, may_continue=lambda: not stop.is_set())
        figures.rounds += 1
        errors = list(result.errors.values())
        if result.compaction is not None:
            errors += result.compaction.errors
            for table in result.compaction.tables:
                figures.compactions += table.commit is not None
                figures.compacted_files += sum(each.removed_files for each in table.partitions)
        if result.expiry is not None:
            errors += result.expiry.errors.values()
            figures.expired_snapshots += sum(table.expired_count for table in result.expiry.tables)
        errors += [table.error for table in result.manifests if table.error is not None]
        if result.collection is not None:
            figures.collected_files += result.collection.deleted
        figures.failed += result.has_failed
        described = [f"{type(error).__name__}: {error}"[:500] for error in errors]
        figures.errors = [*figures.errors, *described][:_MAX_ERRORS]
    return figures
