"""The benchmark `branchlake bench maintenance`: collection, compaction, histories, live ingestion."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pyarrow as pa
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import Table
from pyiceberg.typedef import Record
from rich.console import Console
from rich.table import Table as ConsoleTable

from branchlake_dagster.bench.live_maintenance import measure_live_maintenance
from branchlake_dagster.bench.own_lake import own_lake
from branchlake_dagster.bench.publication_workloads import (
    measure_ledger_ms,
    measure_long_expiry,
    measure_publish_ms,
    measure_rebase_ms,
)
from branchlake_dagster.compaction.compaction_plan import CompactionOptions
from branchlake_dagster.compaction.compactor import Compactor, plan_compactions
from branchlake_dagster.garbage_collection.collection_plan import CollectionPlan
from branchlake_dagster.garbage_collection.collector import FileCollector
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings

_NAMESPACE = "bench"
_FILES_PER_SNAPSHOT = 1_000
_ORPHAN_SHARE = 0.1
_PUBLICATIONS = 40
_AGE = timedelta(days=20)
"""How old the links are by the time of their content, for Iceberg's own procedure."""


def measure_maintenance(
    settings: Settings,
    *,
    files: int,
    references: int,
    small_files: int,
    rounds: int,
    commits: int,
    snapshots: int,
    live_minutes: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure all figures in temporary lakes. Each key ends in the unit of its figure.

    A tenth of `files` are orphans. `small_files` files of 1 MB each are compacted, by branchlake and by
    Spark's own procedure. A live ingestion runs for `live_minutes` minutes without maintenance and for as
    long beside it; with 0, it is left out.
    """
    with own_lake(settings) as bench_settings:
        # Deletes without the delay of a day, which users cannot set. A clock that is set ahead would not
        # help: passes take the slowest of all clocks.
        # No grace: a link makes a file as young as the link, whatever its time is set to.
        rules = {"deletion_delay_h": 0.0, "orphan_file_grace_h": 0.0}
        lake = Lakehouse(bench_settings.model_copy(update=rules), say=say)
        try:
            ensure_main_has_commit(lake.nessie)
            lake.catalog().create_namespace((_NAMESPACE,))
            figures = _measure_collection(lake, files, references, say)
            figures |= _measure_compaction(lake, small_files, rounds, say)
            figures["peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
            say("Rebasing on tables of 50 and of 5,000 snapshots …")
            figures["rebase_50_ms"] = measure_rebase_ms(lake, 50)
            figures["rebase_5000_ms"] = measure_rebase_ms(lake, 5_000)
            figures["publish_p50_ms"] = measure_publish_ms(lake, 50, _PUBLICATIONS)
            say(f"Expiring the snapshots of a table that has {snapshots:,} …")
            figures |= measure_long_expiry(lake, snapshots)
            say(f"Looking up a publication behind {commits:,} commits …")
            first_ms, next_ms, _ = measure_ledger_ms(lake, commits, say=say)
            figures |= {"ledger_50k_ms": first_ms, "ledger_50k_next_process_ms": next_ms}
        finally:
            lake.servers.stop_all()
    if live_minutes:
        figures |= measure_live_maintenance(settings, minutes=live_minutes, say=say)
    return {
        **figures,
        "files": files,
        "references": references,
        "small_files": small_files,
        "commits": commits,
        "snapshots": snapshots,
    }


# -- collection ----------------------------------------------------------------------------------------


def _measure_collection(
    lake: Lakehouse, files: int, references: int, say: Callable[[str], None]
) -> dict[str, Any]:
    orphans = int(files * _ORPHAN_SHARE)
    say(f"Creating a table of {files - orphans:,} files, and {orphans:,} orphans …")
    table = _create_table_of_links(lake, "links", files - orphans)
    _create_orphans(table, orphans)
    say("Collecting with one reference …")
    one_s, plan = _time_plan(lake)
    _require(plan.file_count == orphans, f"{plan.file_count} files were planned instead of {orphans}")
    say("Removing orphan files by Iceberg's own procedure (dry run) …")
    iceberg_s = _time_iceberg(lake, "links", orphans)
    say(f"Creating {references - 1:,} branches with a commit each …")
    _create_branches(lake, "links", references - 1)
    say(f"Collecting with {references:,} references …")
    many_s, plan = _time_plan(lake)
    _require(plan.file_count == orphans, f"{plan.file_count} files were planned instead of {orphans}")
    say("Journaling the plan, and deleting the files …")
    began = time.perf_counter()
    FileCollector.of_lake(lake).run()
    journal_s = time.perf_counter() - began
    result = FileCollector.of_lake(lake).run()
    _require(result.deleted == orphans, f"{result.deleted} files were deleted instead of {orphans}")
    delete_s = result.plan.metrics.delete_s
    again_s, _ = _time_plan(lake)
    return {
        "collect_100k_files_1_ref_s": round(one_s, 2),
        "collect_100k_files_100_refs_s": round(many_s, 2),
        "remove_orphan_files_one_ref_s": round(iceberg_s, 2),
        "collect_and_journal_s": round(journal_s, 2),
        "collect_again_s": round(again_s, 2),
        "deletes_per_s": round(orphans / delete_s),
    }


def _require(is_right: bool, problem: str) -> None:
    if not is_right:
        raise RuntimeError(f"The benchmark is wrong: {problem}.")


def _time_plan(lake: Lakehouse) -> tuple[float, CollectionPlan]:
    began = time.perf_counter()
    plan = FileCollector.of_lake(lake).plan()
    return time.perf_counter() - began, plan


def _folder(table: Table) -> Path:
    return Path(urlparse(table.location()).path) / "data"


def _age_file(path: Path) -> None:
    moment = (datetime.now(UTC) - _AGE).timestamp()
    os.utime(path, (moment, moment))


def _create_table_of_links(lake: Lakehouse, name: str, count: int) -> Table:
    """Create a table whose data files have one row each.

    The data files of a snapshot are hard links to one file, because ext4 allows 65,000 links to a file.
    """
    rows = pa.table({"n": pa.array([1], pa.int64())})
    table = lake.catalog().create_table((_NAMESPACE, name), schema=rows.schema)
    table.append(rows)
    (task,) = table.scan().plan_files()
    original = Path(urlparse(task.file.file_path).path)
    _age_file(original)
    remaining = count - 1
    while remaining > 0:
        number = min(remaining, _FILES_PER_SNAPSHOT)
        remaining -= number
        source = _copy_file(original)
        with table.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
            for _ in range(number):
                path = original.with_name(f"{uuid.uuid4()}.parquet")
                path.hardlink_to(source)
                append.append_data_file(_describe_link(task.file, f"file://{path}"))
        source.unlink()
    return table


def _copy_file(original: Path) -> Path:
    """Copy a data file and its times to a hidden file in the same folder, and return its path."""
    return Path(shutil.copy2(original, original.with_name(f".{uuid.uuid4()}.parquet")))


def _describe_link(original: DataFile, location: str) -> DataFile:
    link = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=location,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=original.record_count,
        file_size_in_bytes=original.file_size_in_bytes,
    )
    link.spec_id = original.spec_id
    return link


def _create_orphans(table: Table, count: int) -> None:
    """Write files that no table names.

    They are not hard links, because a deletion makes all other links of the file younger than the plan.
    """
    folder = _folder(table)
    content = next(folder.glob("*.parquet")).read_bytes()
    for _ in range(count):
        path = folder / f"orphan-{uuid.uuid4()}.parquet"
        path.write_bytes(content)
        _age_file(path)


def _create_branches(lake: Lakehouse, name: str, count: int) -> None:
    main_hash = lake.nessie.reference(MAIN).hash
    for number in range(count):
        branch = f"work-{number}"
        lake.nessie.create_branch(branch, from_ref=MAIN, from_hash=main_hash)
        table = lake.catalog(branch).load_table((_NAMESPACE, name))
        table.append(pa.table({"n": pa.array([number], pa.int64())}))


def _time_iceberg(lake: Lakehouse, name: str, orphans: int) -> float:
    """Time Iceberg's procedure on `main`. It needs `gc.enabled`, which is set back afterwards."""
    session = lake.spark_session(MAIN)
    table = f"nessie.{_NAMESPACE}.{name}"
    session.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('gc.enabled' = 'true')")
    older_than = (datetime.now(UTC) - _AGE / 2).strftime("%Y-%m-%d %H:%M:%S")
    call = (
        f"CALL nessie.system.remove_orphan_files(table => '{_NAMESPACE}.{name}', dry_run => true,"
        f" older_than => TIMESTAMP '{older_than}')"
    )
    began = time.perf_counter()
    found = session.sql(call).count()
    seconds = time.perf_counter() - began
    _require(found == orphans, f"Iceberg found {found} orphans instead of {orphans}")
    session.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('gc.enabled' = 'false')")
    session.stop()  # else the process repeats its end, in vain and for minutes, after the servers are gone
    return seconds


# -- compaction ----------------------------------------------------------------------------------------


def _measure_compaction(
    lake: Lakehouse, small_files: int, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Compact the same files by branchlake and by Spark's procedure.

    They take turns in being first. A first round does not count, because Spark's JVM compiles its code then.
    """
    own_rates, rewrite_rates, spark_rates, after = [], [], [], 0
    for number in range(rounds + 1):
        own, other = f"own_{number}", f"spark_{number}"
        for name in (own, other):
            _create_small_files(lake, name, small_files)
        spark_rate = _time_spark_rewrite(lake, other) if number % 2 else None
        own_rate, rewrite_rate, after = _time_own_compaction(lake, own)
        if spark_rate is None:
            spark_rate = _time_spark_rewrite(lake, other)
        rates = f"{own_rate:.1f} MB/s, its rewrite {rewrite_rate:.1f} MB/s, Spark alone {spark_rate:.1f} MB/s"
        say(f"round {number} of {rounds}: {rates}")
        if number:
            own_rates.append(own_rate)
            rewrite_rates.append(rewrite_rate)
            spark_rates.append(spark_rate)
    return {
        "compact_mb_per_s": round(statistics.median(own_rates), 1),
        "compact_without_proof_mb_per_s": round(statistics.median(rewrite_rates), 1),
        "spark_rewrite_mb_per_s": round(statistics.median(spark_rates), 1),
        "files_after_compaction": after,
    }


def _create_small_files(lake: Lakehouse, name: str, count: int) -> None:
    """Create a table with files of about 1 MB: digests, which cannot be compressed."""
    session = lake.spark_session(MAIN)
    session.sql(f"CREATE TABLE nessie.{_NAMESPACE}.{name} (id BIGINT, payload BINARY) USING iceberg")
    frame = session.range(count * 1_000).selectExpr(
        "id",
        "unhex(concat("
        + ", ".join(f"sha2(concat(id, '-{part}'), 512)" for part in range(16))
        + ")) AS payload",
    )
    frame.repartition(count, "id").writeTo(f"nessie.{_NAMESPACE}.{name}").option(
        "distribution-mode", "none"
    ).append()
    session.stop()


def _count_bytes(lake: Lakehouse, name: str) -> int:
    files = lake.catalog().load_table((_NAMESPACE, name)).scan().plan_files()
    return sum(task.file.file_size_in_bytes for task in files)


def _time_own_compaction(lake: Lakehouse, name: str) -> tuple[float, float, int]:
    """Return MB/s of the whole compaction, MB/s without the proof of equal rows, and the new files."""
    size = _count_bytes(lake, name)
    began = time.perf_counter()
    plan = plan_compactions(
        lake, [f"{_NAMESPACE}.{name}"], CompactionOptions(include_hot=True, max_small_files=0)
    )
    result = Compactor.of_lake(lake).run(plan)
    seconds = time.perf_counter() - began
    result.raise_first_error()
    _require(any(table.commit for table in result.tables), "nothing was compacted")
    files = len(list(lake.catalog().load_table((_NAMESPACE, name)).scan().plan_files()))
    proof_seconds = sum(table.proof_seconds for table in result.tables)
    return size / 1e6 / seconds, size / 1e6 / (seconds - proof_seconds), files


def _time_spark_rewrite(lake: Lakehouse, name: str) -> float:
    session, size = lake.spark_session(MAIN), _count_bytes(lake, name)
    began = time.perf_counter()
    session.sql(f"CALL nessie.system.rewrite_data_files(table => '{_NAMESPACE}.{name}')").collect()
    seconds = time.perf_counter() - began
    session.stop()
    return size / 1e6 / seconds


def show_maintenance(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    table = ConsoleTable("what", "value", title="Maintenance")
    for name, value in figures.items():
        table.add_row(name, str(value))
    Console().print(table)
