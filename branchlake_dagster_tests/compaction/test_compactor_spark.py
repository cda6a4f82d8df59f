"""Compactions by Spark beside writers, and what happens if one is killed or Spark does not do its work."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.expressions import AlwaysTrue, EqualTo
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import StringType
from pyspark.sql import SparkSession

from branchlake_dagster.compaction.compaction_branch import remove_abandoned_branches
from branchlake_dagster.compaction.compaction_plan import (
    CompactionOptions,
    CompactionPlan,
    PlannedPartition,
    Strategy,
)
from branchlake_dagster.compaction.compactor import Compactor, plan_compactions
from branchlake_dagster.compaction.errors import CompactionRowsDiffer, RewriteFailed
from branchlake_dagster.compaction.file_measures import measure_table
from branchlake_dagster.compaction.result import CompactedTable, CompactionProgress, CompactionResult
from branchlake_dagster.compaction.spark_rewrite import rewrite_partitions
from branchlake_dagster.compaction.summary import (
    RESULT_HEADERS,
    format_result,
    list_result_rows,
    result_to_json,
)
from branchlake_dagster.history.capture import capture_change, current_position
from branchlake_dagster.ingest.ingest_batch import ingest_batch
from branchlake_dagster.internals.pyiceberg import commit_compaction, write_data_files
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.model import ContentKey
from branchlake_dagster.publication.ledger import Published
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster_tests.compaction.compacting import discard_open_runs, open_run
from branchlake_dagster_tests.ingest.test_landing_source import LandingDriver, an_ingest, land
from branchlake_dagster_tests.ingest.test_landing_source import values as records
from branchlake_dagster_tests.publication.workbench import Run, Workbench, frame

pytestmark = pytest.mark.spark

NOW_HOT: dict[str, Any] = {"max_small_files": 2, "include_hot": True}
MERGE_ON_READ = "ALTER TABLE {t} SET TBLPROPERTIES ('write.delete.mode'='merge-on-read')"
ROWS = sorted([*(("a", number) for number in range(8)), *(("b", number) for number in range(4))])


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    """A table with four files in each of two partitions, in a lake without open runs."""
    discard_open_runs(lakehouse)
    bench = Workbench(lakehouse, namespace)
    bench.seeded([])
    run = bench.run()
    for number in range(4):
        run.append([("a", number), ("a", number + 4), ("b", number)])
    bench.published(run)
    yield bench
    bench.clean()


def planned(bench: Workbench, **options: Any) -> CompactionPlan:
    return plan_compactions(bench.lake, [f"{bench.namespace}.t"], CompactionOptions(**{**NOW_HOT, **options}))


Rewrite = Callable[[Any, ContentKey, Sequence[PlannedPartition], CompactionOptions], None]


def compacted(bench: Workbench, rewrite: Rewrite = rewrite_partitions, **options: Any) -> CompactedTable:
    compactor = Compactor(bench.lake, IcebergTableFormat(bench.lake.catalog()), rewrite=rewrite)
    (table,) = compactor.run(planned(bench, **options)).tables
    return table


def left(table: CompactedTable) -> dict[str, str]:
    return {one.partition: one.reason.code for one in table.left}


def numbers(table: CompactedTable) -> dict[str, tuple[int, int, int]]:
    return {one.partition: (one.removed_files, one.added_files, one.rows) for one in table.partitions}


def test_small_files_become_one_for_each_partition(bench: Workbench) -> None:
    position = current_position(bench.main())
    reported: list[CompactionProgress] = []
    result = Compactor.of_lake(bench.lake).run(planned(bench), report=reported.append)
    (table,) = result.tables
    assert (table.error, table.left, table.is_rebased) == (None, (), False)
    assert numbers(table) == {"day=a": (4, 1, 8), "day=b": (4, 1, 4)}
    assert bench.rows() == ROWS
    assert [one.step for one in reported] == ["rewrite", "prove", "publish", "done"]
    assert capture_change(bench.main(), position, name="t").files_changed == 0
    assert planned(bench).partitions == ()
    assert [len(row) for row in list_result_rows(result)] == [len(RESULT_HEADERS)]
    assert format_result(result)
    assert result_to_json(result)["tables"][0]["commit"] == table.commit


def test_large_files_beside_small_ones_stay(bench: Workbench) -> None:
    run = bench.run()
    run.append([("a", number) for number in range(100, 3_000)])
    bench.published(run)
    table = compacted(bench, small_file_bytes=5_000)
    assert numbers(table) == {"day=a": (4, 1, 8), "day=b": (4, 1, 4)}
    assert len(bench.rows()) == len(ROWS) + 2_900


@pytest.mark.parametrize("strategy", [Strategy.SORT, Strategy.Z_ORDER])
def test_rows_are_ordered(bench: Workbench, strategy: Strategy) -> None:
    columns = ("id DESC",) if strategy is Strategy.SORT else ("id", "day")
    table = compacted(bench, strategy=strategy, sort_columns=columns)
    assert numbers(table) == {"day=a": (4, 1, 8), "day=b": (4, 1, 4)}
    for task in bench.main().scan().plan_files():
        ids = pq.read_table(task.file.file_path.removeprefix("file:").replace("//", "/"))["id"].to_pylist()
        assert ids == sorted(ids, reverse=strategy is Strategy.SORT)
    assert bench.rows() == ROWS


def test_deletes_are_folded_in_and_their_rows_stay_away(bench: Workbench) -> None:
    bench.sql(MERGE_ON_READ, "DELETE FROM {t} WHERE id IN (1, 6)")
    rows = [row for row in ROWS if row[1] not in (1, 6)]
    idle = open_run(bench)
    table = compacted(bench, max_small_files=100)
    assert (table.commit, left(table)) == (None, {"day=a": "runs_open", "day=b": "runs_open"})
    bench.lake.nessie.delete_branch(idle.name, expected_hash=idle.base)
    table = compacted(bench, max_small_files=100)
    assert numbers(table) == {"day=a": (4, 1, 6), "day=b": (4, 1, 3)}
    assert [one.folded_rows for one in table.partitions] == [2, 1]
    assert bench.rows() == rows
    assert planned(bench, max_small_files=100).partitions == ()
    snapshot = bench.main().current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary["total-delete-files"] == "0"


@pytest.mark.filterwarnings("ignore:Merge on read is not yet supported")
@pytest.mark.parametrize(
    "is_older_spec",
    [True, pytest.param(False, marks=pytest.mark.soak)],  # the same files of the present spec
)
def test_delete_files_without_data_files_go_with_the_next_compaction(
    bench: Workbench, is_older_spec: bool
) -> None:
    """PyIceberg's overwrite keeps the delete files of the data files that it replaces.

    Without older data files of another partition, Iceberg drops them with any commit, whatever their spec.
    """
    bench.sql(MERGE_ON_READ, "DELETE FROM {t} WHERE day = 'a' AND id IN (1, 6)")
    if is_older_spec:
        with bench.main().update_spec() as update:
            update.add_field("id", BucketTransform(1), "id_bucket")
    condition = AlwaysTrue() if is_older_spec else EqualTo("day", "a")
    bench.main().overwrite(frame([("a", 0)]), condition)
    for number in range(1, 5):
        bench.main().append(frame([("a", number)]))
    measures = measure_table(bench.main(), "t", small_file_bytes=10**6)
    assert {measured.delete_files for measured in measures} == {0}
    assert {measured.dangling_deletes for measured in measures} == {count_delete_files(bench)}
    assert count_delete_files(bench) > 0
    rows = bench.rows()
    table = compacted(bench, max_small_files=4)
    assert (table.error, table.commit is not None, len(table.partitions)) == (None, True, 1)
    assert count_delete_files(bench) == 0
    assert bench.rows() == rows


def count_delete_files(bench: Workbench) -> int:
    snapshot = bench.main().current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    return int(snapshot.summary["total-delete-files"] or 0)


def test_deletion_vectors_are_folded_in(bench: Workbench) -> None:
    bench.sql(
        "ALTER TABLE {t} SET TBLPROPERTIES ('format-version'='3')",
        MERGE_ON_READ,
        "DELETE FROM {t} WHERE id = 1",
    )
    table = compacted(bench, max_small_files=100)
    assert table.error is None
    assert sum(one.folded_rows for one in table.partitions) == 2
    session = bench.lake.spark_session()
    try:
        found = sorted(tuple(row) for row in session.table(f"nessie.{bench.namespace}.t").collect())
    finally:
        session.stop()
    assert found == [row for row in ROWS if row[1] != 1]


# -- beside writers ------------------------------------------------------------------------------------


def beside(*actions: Callable[[], object]) -> Rewrite:
    """Rewrite on Spark, and let others act before the result is published."""

    def rewrite(
        session: Any, key: ContentKey, unit: Sequence[PlannedPartition], options: CompactionOptions
    ) -> None:
        rewrite_partitions(session, key, unit, options)
        for action in actions:
            action()

    return rewrite


@pytest.mark.parametrize(
    ("is_published_first", "by"),
    [
        (True, "PyIceberg"),
        (False, "Spark"),
        # The other engine in each order; `test_table_publication.py` has both orders, too.
        pytest.param(True, "Spark", marks=pytest.mark.soak),
        pytest.param(False, "PyIceberg", marks=pytest.mark.soak),
    ],
)
def test_an_append_and_an_upsert_meanwhile(bench: Workbench, by: str, is_published_first: bool) -> None:
    upserting, appending = bench.run(), bench.run()

    def write() -> None:
        upserting.upsert([("a", 2), ("a", 50)], "day", "id", by=by)
        appending.append([("b", 60)])
        bench.published(appending)
        if is_published_first:
            bench.published(upserting)

    table = compacted(bench, beside(write))
    assert table.is_rebased
    if is_published_first:
        assert left(table) == {"day=a": "same_files"}
        assert numbers(table).keys() == {"day=b"}
    else:
        assert numbers(table).keys() == {"day=a", "day=b"}
        bench.published(upserting)
    assert bench.rows() == sorted([*ROWS, ("a", 50), ("b", 60)])


def test_a_merge_on_read_run_in_both_orders(bench: Workbench) -> None:
    bench.sql(MERGE_ON_READ)
    first, second = open_run(bench), open_run(bench)
    first.sql("DELETE FROM {t} WHERE id = 2")
    table = compacted(bench)
    assert (table.commit, set(left(table).values())) == (None, {"run_wrote_delete_files"})
    bench.published(first)
    rows = [row for row in ROWS if row[1] != 2]
    assert bench.rows() == rows
    for run in (first, second):
        delete_branch(bench, run)
    third = open_run(bench)
    assert compacted(bench, fold_deletes_beside_runs=True).commit is not None
    third.sql("DELETE FROM {t} WHERE id = 3")
    bench.published(third)
    assert bench.rows() == [row for row in rows if row[1] != 3]
    delete_branch(bench, third)


def delete_branch(bench: Workbench, run: Run) -> None:
    nessie = bench.lake.nessie
    if nessie.has_reference(run.name):
        nessie.delete_branch(run.name, expected_hash=nessie.reference(run.name).hash)


def test_an_ingestion_is_never_refused(
    lakehouse: Lakehouse, spark_session: SparkSession, tmp_path: Path
) -> None:
    driver = LandingDriver(lakehouse, tmp_path, an_ingest(), spark_session)
    for number in range(3):
        land(tmp_path, "a", [*records(number), b"no"])
        driver.batch()
    names = [".".join(identifier) for identifier in driver.wanted.values()]
    land(tmp_path, "a", [*records(3), b"no"])
    base_hash, place = lakehouse.nessie.reference("main").hash, driver.place()
    ingest_batch(driver.look(place.branch), place, driver.records, tasks=1)
    plan = plan_compactions(lakehouse, names, CompactionOptions(**NOW_HOT))
    result = Compactor.of_lake(lakehouse).run(plan)
    assert result.errors == ()
    assert {table.table for table in result.tables if table.commit} == set(names)
    assert isinstance(driver.publish_run(place, base_hash), Published)
    land(tmp_path, "a", records(4))
    driver.batch()
    assert [row["id"] for row in driver.rows(by="id")] == [0, 1, 2, 3, 4]
    assert len(driver.dead()) == 4


# -- mistakes ------------------------------------------------------------------------------------------


def test_success_without_a_rewritten_file_is_not_reported_as_done(bench: Workbench) -> None:
    table = compacted(bench, lambda *_: None)
    assert (table.commit, table.partitions, table.error) == (None, (), None)
    assert left(table) == {"day=a": "nothing_rewritten", "day=b": "nothing_rewritten"}


def rewrite_by_hand(bench: Workbench, change: Callable[[Any], Any], *, deletes: bool = True) -> Rewrite:
    """Rewrite through PyIceberg, with changed rows, or without regard to delete files."""

    def rewrite(session: Any, *_: Any) -> None:
        branch = session.conf.get("spark.sql.catalog.nessie.ref")
        table = bench.lake.catalog(branch).load_table((bench.namespace, "t"))
        transaction, commit_id, counter = table.transaction(), uuid.uuid4(), itertools.count()
        producer = transaction.update_snapshot().overwrite(commit_uuid=commit_id)
        for task in list(table.scan().plan_files()):
            producer.delete_data_file(task.file)
            if not deletes:
                task.delete_files.clear()
            scan = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue())
            rows = change(scan.to_table([task]))
            for file in write_data_files(table.metadata, rows, table.io, commit=commit_id, numbers=counter):
                producer.append_data_file(file)
        commit_compaction(transaction, producer)

    return rewrite


def test_other_rows_are_never_published(bench: Workbench) -> None:
    bench.sql(MERGE_ON_READ, "DELETE FROM {t} WHERE id = 1")
    before = bench.main().metadata_location
    mistakes: dict[str, Rewrite] = {
        "deleted rows come back": rewrite_by_hand(bench, lambda rows: rows, deletes=False),
        "a row is lost": rewrite_by_hand(bench, lambda rows: rows.slice(1)),
        "as many rows, but others": rewrite_by_hand(
            bench, lambda rows: rows.set_column(1, "id", pa.array([9] * len(rows), pa.int64()))
        ),
    }
    for mistake, rewrite in mistakes.items():
        table = compacted(bench, rewrite)
        assert isinstance(table.error, CompactionRowsDiffer), mistake
        assert "day=a" in table.error.partitions
        assert (table.commit, bench.main().metadata_location) == (None, before)


def test_an_error_of_spark_concerns_its_table_alone(bench: Workbench) -> None:
    before = compaction_branches(bench)
    table = compacted(bench, strategy=Strategy.SORT, sort_columns=("bucket(2, nobody)",))
    assert isinstance(table.error, RewriteFailed)
    assert bench.rows() == ROWS
    assert compaction_branches(bench) == before


def test_an_error_of_one_unit_does_not_discard_the_others(bench: Workbench) -> None:
    def fail_first(
        session: Any, key: ContentKey, unit: Sequence[PlannedPartition], options: CompactionOptions
    ) -> None:
        if unit[0].measured.partition == "day=a":
            raise RewriteFailed("no memory", table=key.name)
        rewrite_partitions(session, key, unit, options)

    table = compacted(bench, fail_first, unit_bytes=1)
    assert isinstance(table.error, RewriteFailed)
    assert table.commit is not None
    assert numbers(table) == {"day=b": (4, 1, 4)}
    assert left(table) == {"day=a": "rewrite_failed"}
    assert bench.rows() == ROWS


def test_columns_that_changed_since_the_last_write(bench: Workbench) -> None:
    """Spark reads a snapshot with its own schema, which lacks the new column."""
    with bench.main().update_schema() as update:
        update.add_column("note", StringType())
        update.rename_column("id", "number")
    table = compacted(bench)
    assert table.error is None
    assert numbers(table) == {"day=a": (4, 1, 8), "day=b": (4, 1, 4)}
    assert bench.main().scan(selected_fields=("day", "number")).to_arrow().num_rows == len(ROWS)


def test_a_table_with_files_of_an_older_partition_spec_is_left(bench: Workbench) -> None:
    with bench.main().update_spec() as update:
        update.add_field("id", BucketTransform(2), "id_bucket")
    bench.main().append(frame([("a", 100), ("a", 101)]))
    bench.main().append(frame([("a", 102), ("a", 103)]))
    plan = planned(bench, max_small_files=0)
    assert plan.partitions == ()
    assert {skipped.reason.code for skipped in plan.skipped} == {"older_partition_spec"}


def compaction_branches(bench: Workbench) -> set[str]:
    return {ref.name for ref in bench.lake.nessie.references() if ref.name.startswith("compact-")}


def test_a_pause_publishes_what_is_finished(bench: Workbench) -> None:
    answers = iter([True, False])
    result = Compactor.of_lake(bench.lake).run(
        planned(bench, unit_bytes=1), may_continue=lambda: next(answers)
    )
    (table,) = result.tables
    assert (len(table.partitions), list(left(table).values())) == (1, ["not_reached"])
    assert result.stopped is not None
    assert result.stopped.code == "paused"
    assert bench.rows() == ROWS
    rest = Compactor.of_lake(bench.lake).run(planned(bench, max_seconds=0.0))
    assert isinstance(rest, CompactionResult)
    assert (rest.tables, rest.stopped.code if rest.stopped else "") == ((), "out_of_time")


_KILLED = """
import os, signal, sys, threading
from branchlake_dagster import Lakehouse
from branchlake_dagster.compaction.compaction_plan import CompactionOptions
from branchlake_dagster.compaction.compactor import Compactor, plan_compactions
lake, name, step = Lakehouse(start=False), sys.argv[1], sys.argv[2]
plan = plan_compactions(lake, [name], CompactionOptions(max_small_files=2, include_hot=True))
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def report(progress):
    if progress.step == step:
        die()
    if (progress.step, step) == ("rewrite", "while Spark rewrites"):
        threading.Timer(0.5, die).start()
    if (progress.step, step) == ("prove", "while Spark rewrites"):
        die()
commit = lake.nessie.commit
def commit_and_die(branch, **options):
    result = commit(branch, **options)
    if (branch, step) == ("main", "after the commit"):
        die()
    return result
lake.nessie.commit = commit_and_die
Compactor.of_lake(lake).run(plan, report=report)
"""


@pytest.mark.parametrize(
    "step",
    [
        *["publish", "after the commit"],  # the last step before, and the first one after
        *(
            pytest.param(step, marks=pytest.mark.soak)
            for step in ("rewrite", "while Spark rewrites", "prove", "done")
        ),
    ],
)
def test_a_killed_compaction_leaves_main_before_or_after(bench: Workbench, step: str) -> None:
    settings, before = bench.lake.settings, compaction_branches(bench)
    environment = {**os.environ, "BRANCHLAKE_STATE_DIR": str(settings.state_dir)}
    ended = subprocess.run(
        [sys.executable, "-c", _KILLED, f"{bench.namespace}.t", step], env=environment, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    assert bench.rows() == ROWS
    files = list(bench.main().scan().plan_files())
    is_published = step in ("after the commit", "done")
    assert len(files) == (2 if is_published else 8)
    abandoned = compaction_branches(bench) - before
    assert len(abandoned) == (step != "done")
    removed = remove_abandoned_branches(bench.lake.nessie, now=datetime.now(UTC) + timedelta(days=2))
    assert abandoned <= set(removed)
    if not is_published:
        assert compacted(bench).commit is not None
    assert bench.rows() == ROWS
