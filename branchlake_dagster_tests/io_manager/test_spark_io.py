"""Spark frames through the IO manager: write modes, keys, sessions and branches, both engines on one run."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from branchlake_dagster.cleanup.sweeper import Sweeper
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.branch_owner import load_instance_id
from branchlake_dagster.runs.discarding import discard_branch, discarded_tag_name
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.stored_names import LakeProperty, RunTag
from branchlake_dagster.tables import spark_frames
from branchlake_dagster.tables.errors import (
    ColumnsFrozen,
    ColumnUnsupported,
    ForeignSession,
    PartitionMismatch,
    SchemaMismatch,
    UnsupportedType,
    UpsertKeyInvalid,
)
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster.tables.table_files import TableFiles
from branchlake_dagster_tests.harness import Project, project

pytestmark = pytest.mark.spark

HOURLY = dg.HourlyPartitionsDefinition(start_date="2026-08-08-00:00", end_date="2026-08-09-00:00")
FREE = table_metadata(require_checks=False)
Rows = list[dict[str, Any]]


def at(hour: int, minute: int = 0) -> datetime:
    return datetime(2026, 8, 8, hour, minute, tzinfo=UTC)


def settled(p: Project, *assets: str, partition: str | None = None) -> str:
    run_id = p.run(*assets, partition=partition)
    outcome = p.settle(run_id)
    assert outcome.state is RunState.PUBLISHED, outcome
    return run_id


def sparks(namespace: str, rows: Rows, schema: str, **options: Any) -> dg.AssetsDefinition:
    """The asset `t`, a Spark frame of whatever `rows` holds when it runs."""

    @dg.asset(key=[namespace, "t"], **options)
    def t(spark: BranchSparkResource) -> DataFrame:
        return spark.spark_session.createDataFrame([tuple(row.values()) for row in rows], schema)

    return t


def by_n(rows: Rows) -> Rows:
    return sorted(rows, key=lambda row: row["n"])


# -- write modes ---------------------------------------------------------------------------------------


def test_a_partition_is_replaced_and_rows_outside_it_are_refused(
    lakehouse: Lakehouse, namespace: str
) -> None:
    rows: Rows = []
    t = sparks(
        namespace,
        rows,
        "ts timestamp, n long",
        partitions_def=HOURLY,
        metadata=table_metadata(partition_by="ts", require_checks=False),
    )
    with project(lakehouse, t) as p:
        for hour, n in ((1, 1), (2, 2), (1, 3)):
            rows[:] = [{"ts": at(hour, 30), "n": n}]
            settled(p, partition=f"2026-08-08-0{hour}:00")
        assert by_n(p.rows(namespace, "t")) == [{"ts": at(2, 30), "n": 2}, {"ts": at(1, 30), "n": 3}]
        files = lakehouse.catalog().load_table((namespace, "t")).inspect.files()
        assert files.num_rows == 2

        main = lakehouse.nessie.reference("main").hash
        rows[:] = [{"ts": at(1), "n": 4}, {"ts": at(2), "n": 5}, {"ts": None, "n": 6}]
        run_id = p.run(partition="2026-08-08-01:00", ok=False)
        p.failed_with(PartitionMismatch, "2 rows of the frame are outside", f"{namespace}.t")
        assert p.settle(run_id).state is RunState.DISCARDED
        assert lakehouse.nessie.reference("main").hash == main

        rows[:] = []  # an hour without data empties its partition and no other
        settled(p, partition="2026-08-08-01:00")
        assert p.rows(namespace, "t") == [{"ts": at(2, 30), "n": 2}]


def test_append_adds_and_a_whole_table_is_replaced(lakehouse: Lakehouse, namespace: str) -> None:
    rows: Rows = [{"n": 1}]
    t = sparks(namespace, rows, "n long", metadata=table_metadata(write_mode="append", require_checks=False))

    @dg.asset(key=[namespace, "whole"], metadata=FREE)
    def whole(spark: BranchSparkResource) -> DataFrame:
        return spark.spark_session.createDataFrame([tuple(row.values()) for row in rows], "n long")

    with project(lakehouse, t, whole) as p:
        settled(p)
        rows[:] = [{"n": 2}]
        settled(p)
        assert by_n(p.rows(namespace, "t")) == [{"n": 1}, {"n": 2}]
        assert p.rows(namespace, "whole") == [{"n": 2}]


def test_append_to_a_partition_refuses_rows_outside_it(lakehouse: Lakehouse, namespace: str) -> None:
    rows: Rows = [{"kind": "a", "n": 1}, {"kind": "b", "n": 2}]
    t = sparks(
        namespace,
        rows,
        "kind string, n long",
        partitions_def=dg.StaticPartitionsDefinition(["a", "b"]),
        metadata=table_metadata(write_mode="append", partition_by="kind"),
    )
    with project(lakehouse, t) as p:
        p.run(partition="a", ok=False)
        p.failed_with(PartitionMismatch, "1 rows of the frame are outside", f"{namespace}.t")


def test_a_new_column_evolves_the_table_and_nothing_else_does(lakehouse: Lakehouse, namespace: str) -> None:
    query = {"now": "SELECT 1L AS n"}

    @dg.asset(key=[namespace, "t"], metadata=table_metadata(write_mode="append", require_checks=False))
    def t(spark: BranchSparkResource) -> DataFrame:
        return spark.spark_session.sql(query["now"])

    @dg.asset(key=[namespace, "frozen"], metadata=FREE | table_metadata(columns="freeze"))
    def frozen(spark: BranchSparkResource) -> DataFrame:
        return spark.spark_session.sql(query["now"])

    with project(lakehouse, t, frozen) as p:
        settled(p)
        # Columns are matched by name, whatever their order.
        query["now"] = "SELECT 'x' AS extra, 2L AS n, map('k', array(1)) AS deep"
        p.settle(p.run(t.key))
        p.run(frozen.key, ok=False)
        p.failed_with(ColumnsFrozen, "extra", "deep", f"{namespace}.frozen")
        assert by_n(p.rows(namespace, "t")) == [
            {"n": 1, "extra": None, "deep": None},
            {"n": 2, "extra": "x", "deep": [("k", [1])]},
        ]
        query["now"] = "SELECT 'x' AS extra, 'two' AS n, map('k', array(1)) AS deep"
        p.run(t.key, ok=False)
        p.failed_with(SchemaMismatch, "Column n is long in the table and string in the frame")
        query["now"] = "SELECT 3L AS n, 'x' AS extra"
        p.run(t.key, ok=False)
        p.failed_with(SchemaMismatch, "lacks column deep", f"{namespace}.t")


def attempted_twice(namespace: str, metadata: dict[str, Any]) -> dg.AssetsDefinition:
    """Writes a row that names its attempt, and fails after the first."""
    attempts: list[int] = []

    @dg.asset(key=[namespace, "t"], metadata=metadata, retry_policy=dg.RetryPolicy(max_retries=1))
    def t(spark: BranchSparkResource) -> Iterator[dg.Output[DataFrame]]:
        attempts.append(1)
        yield dg.Output(spark.spark_session.createDataFrame([(len(attempts),)], "n long"))
        if len(attempts) == 1:
            raise RuntimeError("after the write")

    return t


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param(table_metadata(write_mode="append", require_checks=False), id="append"),
        # A later attempt of an upsert: the late commit of an earlier one, below.
        pytest.param(
            table_metadata(write_mode="upsert", keys=["n"], require_checks=False),
            id="upsert",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_second_attempt_replaces_what_the_first_one_added(
    lakehouse: Lakehouse, namespace: str, metadata: dict[str, Any]
) -> None:
    with project(lakehouse, attempted_twice(namespace, metadata)) as p:
        run_id = settled(p)
        assert p.rows(namespace, "t") == [{"n": 2}]
        table = lakehouse.catalog().load_table((namespace, "t"))
        told = table.current_snapshot().summary.additional_properties
        assert (told["branchlake.run_id"], told["branchlake.attempt"]) == (run_id, "2")


def test_the_files_of_a_discarded_spark_run_are_deleted(lakehouse: Lakehouse, namespace: str) -> None:
    """Spark spells the same files `file:/…` that PyIceberg spells `file:///…`."""
    rows: Rows = [{"n": 1}]
    t = sparks(namespace, rows, "n long", metadata=table_metadata(write_mode="append", require_checks=False))
    folder = Path(lakehouse.settings.warehouse_uri.removeprefix("file://")) / namespace

    def files() -> set[Path]:
        return {path for path in folder.rglob("*") if path.is_file()}

    with project(lakehouse, t) as p:
        settled(p)
        before = files()
        branch = run_branch_name(p.run())
        assert files() > before
        discard_branch(lakehouse.nessie, lakehouse.nessie.reference(branch, fetch_metadata=True))
        sweeper = Sweeper(
            lakehouse.nessie,
            TableFiles({}),
            lambda _: {},
            grace=timedelta(0),
            now=lambda: datetime.now(UTC) + timedelta(hours=1),
            ref_filter=f"ref.name == '{discarded_tag_name(branch)}'",
            instance=load_instance_id(p.instance),
        )
        (swept,) = sweeper.run()
        assert swept.done, swept
        assert files() == before
        assert p.rows(namespace, "t") == [{"n": 1}]


def test_the_properties_of_a_write_leave_the_session_as_it_was(spark_session: SparkSession) -> None:
    def values() -> list[str | None]:
        names = ("permanent", "of_this_write")
        return [spark_session.conf.get(f"spark.sql.iceberg.snapshot-property.{one}", None) for one in names]

    spark_session.conf.set("spark.sql.iceberg.snapshot-property.permanent", "before")
    with spark_frames.set_session_properties(spark_session, {"permanent": "now", "of_this_write": "1"}):
        assert values() == ["now", "1"]
    assert values() == ["before", None]
    spark_session.conf.unset("spark.sql.iceberg.snapshot-property.permanent")


# -- upserts -------------------------------------------------------------------------------------------

UPSERT = table_metadata(write_mode="upsert", keys=["kind", "id"], require_checks=False)


def test_an_upsert_updates_known_keys_and_inserts_new_ones(lakehouse: Lakehouse, namespace: str) -> None:
    rows: Rows = [{"kind": "a", "id": 1, "n": 1}, {"kind": "a", "id": 2, "n": 2}]
    t = sparks(namespace, rows, "kind string, id long, n long", metadata=UPSERT, code_version="v3")
    with project(lakehouse, t) as p:
        settled(p)
        rows[:] = [{"kind": "a", "id": 2, "n": 20}, {"kind": "b", "id": 2, "n": 30}]
        run_id = p.run()
        base = p.instance.get_run_by_id(run_id).tags[RunTag.BASE_HASH]
        snapshot = (
            lakehouse.catalog(run_branch_name(run_id)).load_table((namespace, "t")).current_snapshot().summary
        )
        assert {k: v for k, v in snapshot.additional_properties.items() if k.startswith("branchlake.")} == {
            "branchlake.run_id": run_id,
            "branchlake.root_run_id": run_id,
            "branchlake.asset": f"{namespace}/t",
            "branchlake.code_version": "v3",
            "branchlake.code_of_step": f"{namespace}__t",  # the session's, which the asset's code uses too
            "branchlake.code_attempt": "1",
            "branchlake.base_hash": base,
            "branchlake.write_mode": "upsert",
            "branchlake.keys": "kind,id",
            "branchlake.step": f"{namespace}__t",
            "branchlake.attempt": "1",
            "branchlake.instance": load_instance_id(p.instance),
        }
        assert p.settle(run_id).state is RunState.PUBLISHED
        assert by_n(p.rows(namespace, "t")) == [
            {"kind": "a", "id": 1, "n": 1},
            {"kind": "a", "id": 2, "n": 20},
            {"kind": "b", "id": 2, "n": 30},
        ]


def test_a_late_commit_of_an_earlier_attempt_takes_no_row_from_an_upsert_that_keeps_known_keys(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: Rows = [{"kind": "a", "id": 1, "n": 1}]
    keep = UPSERT | table_metadata(when_matched="keep")
    t = sparks(namespace, rows, "kind string, id long, n long", metadata=keep)
    write, late = spark_frames.write_spark_frame, []

    def write_after_another(
        frame: DataFrame, spec: Any, schema: Any, selection: Any, properties: Any, **options: Any
    ) -> None:
        if late:
            earlier = {**properties, LakeProperty.ATTEMPT: late.pop()}
            write(frame, spec, schema, selection, earlier, **options)
        write(frame, spec, schema, selection, properties, **options)

    monkeypatch.setattr(spark_frames, "write_spark_frame", write_after_another)
    with project(lakehouse, t) as p:
        late.append("0")  # both attempts append, because the table was empty when they were planned
        settled(p)
        assert p.rows(namespace, "t") == [{"kind": "a", "id": 1, "n": 1}]
        rows[:] = [{"kind": "a", "id": 1, "n": 2}, {"kind": "b", "id": 2, "n": 2}]
        late.append("0")
        settled(p)
        assert by_n(p.rows(namespace, "t")) == [
            {"kind": "a", "id": 1, "n": 1},
            {"kind": "b", "id": 2, "n": 2},
        ]
        table = lakehouse.catalog().load_table((namespace, "t"))
        assert table.current_snapshot().summary.additional_properties[LakeProperty.ATTEMPT] == "1"


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_an_upsert_that_keeps_known_keys_finds_them_in_the_hour_that_a_zone_has_twice(
    lakehouse: Lakehouse, namespace: str, zone: str
) -> None:
    keep = table_metadata(write_mode="upsert", keys=["ts"], when_matched="keep", require_checks=False)
    instants = [datetime(2026, 10, 25, hour, 30, tzinfo=UTC) for hour in (0, 1)]

    @dg.asset(key=[namespace, "t"], metadata=keep)
    def t(spark: BranchSparkResource) -> DataFrame:
        session = spark.spark_session
        session.conf.set("spark.sql.session.timeZone", zone)
        seconds = ", ".join(f"({int(one.timestamp())})" for one in instants)
        return session.sql(f"SELECT timestamp_seconds(s) AS ts FROM VALUES {seconds} AS v(s)")

    with project(lakehouse, t) as p:
        settled(p)
        settled(p)
        assert sorted(row["ts"] for row in p.rows(namespace, "t")) == instants


def test_an_upsert_that_keeps_known_keys_accepts_a_frame_whose_filter_leaves_no_row(
    lakehouse: Lakehouse, namespace: str
) -> None:
    """Spark must not evaluate the assertions of the upsert on rows that the frame leaves out."""
    keep = table_metadata(write_mode="upsert", keys=["ts", "id"], when_matched="keep", require_checks=False)
    least = [0, 100, 2]

    @dg.asset(key=[namespace, "t"], metadata=keep)
    def t(spark: BranchSparkResource) -> DataFrame:
        return spark.spark_session.sql(
            f"""
            SELECT ts, id, n FROM (
                SELECT *, row_number() OVER (PARTITION BY ts, id ORDER BY n) AS copy
                FROM VALUES (TIMESTAMP '2026-08-08 03:00:00Z', 1L, 1L),
                    (TIMESTAMP '2026-08-08 04:00:00Z', 2L, 2L) AS v(ts, id, n)
            ) WHERE copy = 1 AND n >= {least[0]}
            """
        )

    with project(lakehouse, t) as p:
        while least:
            settled(p)
            del least[0]
        assert sorted(row["id"] for row in p.rows(namespace, "t")) == [1, 2]


@pytest.mark.parametrize(
    "bounds",
    [
        spark_frames._KeyBounds(is_empty=True),
        spark_frames._KeyBounds(
            is_empty=False, by_key={"ts": ("timestamp_micros(0)", "timestamp_micros(1)")}
        ),
    ],
    ids=["no row", "other times"],
)
def test_an_upsert_that_keeps_known_keys_refuses_a_frame_that_is_computed_twice_with_other_times(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch, bounds: Any
) -> None:
    keep = table_metadata(write_mode="upsert", keys=["ts", "id"], when_matched="keep", require_checks=False)
    rows: Rows = [{"ts": at(3), "id": 1, "n": 1}]
    with project(lakehouse, sparks(namespace, rows, "ts timestamp, id long, n long", metadata=keep)) as p:
        settled(p)
        # As if the first computation of the frame, which finds the bounds, had given other rows.
        monkeypatch.setattr(spark_frames, "_time_key_bounds", lambda *_: bounds)
        rows[:] = [{"ts": at(4), "id": 2, "n": 1}]
        p.run(ok=False)
        p.failed_with(UpsertKeyInvalid, "computed twice")


def test_an_upsert_that_keeps_known_keys_reads_files_with_its_times_only(
    lakehouse: Lakehouse, namespace: str
) -> None:
    rows: Rows = [{"ts": at(3), "id": 1, "n": 1}, {"ts": at(3), "id": 2, "n": 1}]
    keep = table_metadata(write_mode="upsert", keys=["ts", "id"], when_matched="keep", require_checks=False)
    with project(lakehouse, sparks(namespace, rows, "ts timestamp, id long, n long", metadata=keep)) as p:
        settled(p)
        rows[:] = [
            {"ts": at(4), "id": 1, "n": 2},
            {"ts": at(3), "id": 2, "n": 2},
            {"ts": at(5), "id": 1, "n": 2},
        ]
        settled(p)
        # Files with later times only are not read: the next run succeeds without them.
        later = [
            Path(task.file.file_path.removeprefix("file:"))
            for task in lakehouse.catalog()
            .load_table((namespace, "t"))
            .scan(f"ts > '{at(3).isoformat()}'")
            .plan_files()
        ]
        moved = [(file, file.rename(file.with_suffix(".away"))) for file in later]
        rows[:] = [{"ts": at(3), "id": 1, "n": 3}, {"ts": at(3), "id": 9, "n": 3}]
        settled(p)
        for file, away in moved:
            away.rename(file)
        table = lakehouse.catalog().load_table((namespace, "t"))
        assert table.current_snapshot().summary.operation.value == "append"
        assert sorted((row["ts"].hour, row["id"], row["n"]) for row in p.rows(namespace, "t")) == [
            (3, 1, 1),
            (3, 2, 1),
            (3, 9, 3),
            (4, 1, 2),
            (5, 1, 2),
        ]
        rows[:] = []
        settled(p)


def test_an_upsert_whose_keys_include_the_partition_reads_no_other_partition(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: Rows = []
    t = sparks(
        namespace,
        rows,
        "hour timestamp, id long, n long",
        partitions_def=HOURLY,
        metadata=table_metadata(
            write_mode="upsert",
            keys=["hour", "id"],
            when_matched="keep",
            partition_by="hour",
            require_checks=False,
        ),
    )

    def compute_twice(*_: Any) -> None:
        raise AssertionError("The frame is computed only to find the files that may match.")

    with project(lakehouse, t) as p:
        monkeypatch.setattr(spark_frames, "_time_key_bounds", compute_twice)
        rows[:] = [{"hour": at(1), "id": 1, "n": 1}, {"hour": at(1), "id": 2, "n": 1}]
        settled(p, partition="2026-08-08-01:00")
        first_files = [
            Path(task.file.file_path.removeprefix("file:"))
            for task in lakehouse.catalog().load_table((namespace, "t")).scan().plan_files()
        ]
        moved = [(file, file.rename(file.with_suffix(".away"))) for file in first_files]
        # An hour without rows is appended, and the same ids may be there in another hour.
        for added in ([1, 2], [2, 3]):
            rows[:] = [{"hour": at(2), "id": number, "n": added[0]} for number in added]
            settled(p, partition="2026-08-08-02:00")
        for file, away in moved:
            away.rename(file)
        stored = sorted((row["hour"].hour, row["id"], row["n"]) for row in p.rows(namespace, "t"))
        assert stored == [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (2, 3, 2)]

        for bad, error in (
            ([(at(3), 7), (at(3), 7)], UpsertKeyInvalid),
            ([(at(3), None)], UpsertKeyInvalid),
            ([(at(4), 7)], PartitionMismatch),
            ([(None, 7)], UpsertKeyInvalid),
        ):
            rows[:] = [{"hour": hour, "id": number, "n": 1} for hour, number in bad]
            p.run(partition="2026-08-08-03:00", ok=False)
            p.failed_with(error, f"{namespace}.t")


def test_the_bounds_of_time_keys_are_used_if_many_rows_may_match(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: Rows = [{"hour": at(1), "id": 1, "n": 1}]
    metadata = table_metadata(
        write_mode="upsert",
        keys=["hour", "id"],
        when_matched="keep",
        partition_by="hour",
        require_checks=False,
    )
    t = sparks(namespace, rows, "hour timestamp, id long, n long", partitions_def=HOURLY, metadata=metadata)
    found: list[Any] = []
    find_bounds = spark_frames._time_key_bounds
    monkeypatch.setattr(
        spark_frames, "_time_key_bounds", lambda *args: found.append(find_bounds(*args)) or found[-1]
    )
    with project(lakehouse, t) as p:
        settled(p, partition="2026-08-08-01:00")
        assert not found
        monkeypatch.setattr(spark_frames, "_FEW_CANDIDATE_ROWS", 0)
        rows[:] = [{"hour": at(1), "id": number, "n": 2} for number in (1, 2)]
        settled(p, partition="2026-08-08-01:00")
        assert [bounds.is_empty for bounds in found] == [False]
        assert sorted((row["id"], row["n"]) for row in p.rows(namespace, "t")) == [(1, 1), (2, 2)]


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param([("a", 7, 1), ("a", 7, 2)], id="duplicate"),
        pytest.param([("a", None, 1)], id="null"),
        # Both of them at once.
        pytest.param([("a", None, 1), ("a", None, 2)], id="two nulls", marks=pytest.mark.soak),
    ],
)
def test_a_bad_key_stops_an_upsert(
    lakehouse: Lakehouse, namespace: str, bad: list[tuple[str, int | None, int]]
) -> None:
    rows: Rows = [dict(zip(("kind", "id", "n"), row, strict=True)) for row in bad]
    t = sparks(namespace, rows, "kind string, id long, n long", metadata=UPSERT)
    with project(lakehouse, t) as p:
        run_id = p.run(ok=False)
        p.failed_with(UpsertKeyInvalid, f"{namespace}.t")
        assert p.rows(namespace, "t", ref=run_branch_name(run_id)) == []


def test_an_upsert_without_its_key_column_is_refused(lakehouse: Lakehouse, namespace: str) -> None:
    t = sparks(namespace, [{"kind": "a", "n": 1}], "kind string, n long", metadata=UPSERT)
    with project(lakehouse, t) as p:
        p.run(ok=False)
        p.failed_with(UpsertKeyInvalid, "lacks key column id", f"{namespace}.t")


def test_an_upsert_stays_within_the_partitions_of_its_run(lakehouse: Lakehouse, namespace: str) -> None:
    rows: Rows = [{"ts": at(3), "id": 1}, {"ts": at(4), "id": 2}]
    t = sparks(
        namespace,
        rows,
        "ts timestamp, id long",
        partitions_def=HOURLY,
        metadata=table_metadata(write_mode="upsert", keys=["id"], partition_by="ts", require_checks=False),
    )
    with project(lakehouse, t) as p:
        p.run(partition="2026-08-08-03:00", ok=False)
        p.failed_with(PartitionMismatch, "outside the run's partitions", f"{namespace}.t")
        del rows[1]
        settled(p, partition="2026-08-08-03:00")
        assert p.rows(namespace, "t") == [{"ts": at(3), "id": 1}]


def test_an_upsert_accepts_a_frame_that_leaves_rows_of_other_partitions_out(
    lakehouse: Lakehouse, namespace: str
) -> None:
    """Spark must not evaluate the assertion of the partitions on rows that the frame leaves out."""

    @dg.asset(
        key=[namespace, "t"],
        partitions_def=HOURLY,
        metadata=table_metadata(
            write_mode="upsert", keys=["ts", "id"], partition_by="ts", require_checks=False
        ),
    )
    def t(spark: BranchSparkResource) -> DataFrame:
        return spark.spark_session.sql(
            """
            SELECT ts, id FROM (
                SELECT *, row_number() OVER (PARTITION BY ts, id ORDER BY n) AS copy
                FROM VALUES (TIMESTAMP '2026-08-08 03:00:00Z', 1L, 1L),
                    (TIMESTAMP '2026-08-08 04:00:00Z', 2L, 2L) AS v(ts, id, n)
            ) WHERE copy = 1 AND n = 1
            """
        )

    with project(lakehouse, t) as p:
        settled(p, partition="2026-08-08-03:00")
        assert p.rows(namespace, "t") == [{"ts": at(3), "id": 1}]


# -- sessions and branches -----------------------------------------------------------------------------


def test_sql_inside_an_asset_runs_on_the_runs_branch(lakehouse: Lakehouse, namespace: str) -> None:
    name = f"nessie.{namespace}.t"

    # No `-> None`: Dagster shows such an output to no IO manager, and the metadata would be missing.
    @dg.asset(key=[namespace, "t"], metadata=FREE)
    def t(spark: BranchSparkResource):
        session = spark.spark_session
        session.sql(f"CREATE NAMESPACE IF NOT EXISTS nessie.{namespace}").collect()
        session.sql(f"CREATE OR REPLACE TABLE {name} USING iceberg AS SELECT 5L AS n").collect()

    @dg.asset(key=[namespace, "silent"], deps=[t], metadata=FREE)
    def silent(spark: BranchSparkResource) -> None:
        sql = f"CREATE OR REPLACE TABLE nessie.{namespace}.silent USING iceberg AS SELECT * FROM {name}"
        spark.spark_session.sql(sql).collect()

    @dg.asset(key=[namespace, "twice"], deps=[t], metadata=FREE)
    def twice(spark: BranchSparkResource) -> DataFrame:
        return spark.spark_session.sql(f"SELECT 2 * n AS n FROM {name}")

    with project(lakehouse, t, silent, twice) as p:
        run_id = p.run()
        assert not lakehouse.catalog().table_exists((namespace, "t"))
        assert p.rows(namespace, "twice", ref=run_branch_name(run_id)) == [{"n": 10}]
        (event,) = [
            e for e in p.last.get_asset_materialization_events() if e.asset_key.path == [namespace, "t"]
        ]
        assert event.materialization.metadata["branchlake/rows_on_branch"].value == 1
        assert p.settle(run_id).state is RunState.PUBLISHED
        assert p.rows(namespace, "twice") == [{"n": 10}]
        assert p.rows(namespace, "silent") == [{"n": 5}]


def test_a_frame_of_a_session_elsewhere_is_refused(
    lakehouse: Lakehouse, namespace: str, spark_session: SparkSession
) -> None:
    @dg.asset(key=[namespace, "t"])
    def t() -> DataFrame:
        return spark_session.range(1)

    with project(lakehouse, t) as p:
        run_id = p.run(ok=False)
        p.failed_with(ForeignSession, "session on 'main'", run_branch_name(run_id), f"{namespace}.t")
        assert not lakehouse.catalog().table_exists((namespace, "t"))


def test_two_runs_in_one_process_have_a_session_and_a_branch_each(
    lakehouse: Lakehouse, namespace: str
) -> None:
    """The second run starts and ends inside the first, and each sees its own table only.

    Nested and not in threads: two threads that start runs can dead-lock in Dagster's logging set-up.
    """
    seen: dict[int, tuple[str, list[int]]] = {}

    def steps(number: int, inside: Callable[[], object]) -> tuple[dg.AssetsDefinition, dg.AssetsDefinition]:
        @dg.asset(key=[namespace, "t"])
        def t(spark: BranchSparkResource) -> DataFrame:
            return spark.spark_session.range(number, number + 1)

        @dg.asset(key=[namespace, "reads"], ins={"t": dg.AssetIn([namespace, "t"])})
        def reads(spark: BranchSparkResource, t: DataFrame) -> None:
            inside()
            session = spark.spark_session
            # A frame of the IO manager's can be joined with one of the asset's: they share the session.
            found = session.sql(f"SELECT id FROM nessie.{namespace}.t").union(t).collect()
            seen[number] = (session.session_id, [row.id for row in found])

        return t, reads

    with (
        project(lakehouse, *steps(2, lambda: None)) as second,
        project(lakehouse, *steps(1, second.run)) as first,
    ):
        first.run()
    assert [seen[number][1] for number in (1, 2)] == [[1, 1], [2, 2]]
    assert seen[1][0] != seen[2][0]


@pytest.mark.parametrize("first", ["spark", "arrow"])
def test_one_engine_reads_what_the_other_wrote_in_the_same_run(
    lakehouse: Lakehouse, namespace: str, first: str
) -> None:
    moment = at(3)

    @dg.asset(key=[namespace, "spark_made"], metadata=FREE)
    def spark_made(spark: BranchSparkResource) -> DataFrame:
        return spark.spark_session.createDataFrame([(1, "x", moment)], "n long, s string, ts timestamp")

    @dg.asset(key=[namespace, "arrow_made"], metadata=FREE)
    def arrow_made() -> pa.Table:
        return pa.table({"n": [1], "s": ["x"], "ts": [moment]})

    seen: list[Any] = []

    @dg.asset(
        key=[namespace, "by_arrow"],
        ins={"made": dg.AssetIn([namespace, "spark_made"])},
        metadata=FREE,
    )
    def by_arrow(made: pl.DataFrame) -> pl.DataFrame:
        seen.extend(made.to_dicts())
        return made

    @dg.asset(
        key=[namespace, "by_spark"],
        ins={"made": dg.AssetIn([namespace, "arrow_made"], metadata={"columns": ["ts", "s", "n"]})},
        metadata=FREE,
    )
    def by_spark(made: DataFrame) -> DataFrame:
        seen.extend(row.asDict() for row in made.collect())
        return made

    parts = (spark_made, by_arrow) if first == "spark" else (arrow_made, by_spark)
    with project(lakehouse, *parts) as p:
        settled(p)
        (row,) = seen
        assert (row["n"], row["s"]) == (1, "x")
        assert [*row] == (["n", "s", "ts"] if first == "spark" else ["ts", "s", "n"])
        sink = "by_arrow" if first == "spark" else "by_spark"
        assert p.rows(namespace, sink) == [{"n": 1, "s": "x", "ts": moment}]


# -- classic sessions ----------------------------------------------------------------------------------

CLASSIC = Path(__file__).parent / "classic_project.py"


def test_classic_spark_end_to_end(nessie_uri: str, state_dir: Path, tmp_path: Path) -> None:
    """In a process of its own: a classic session and a Connect one do not share one."""
    done = subprocess.run(
        [sys.executable, str(CLASSIC)],
        env={
            **os.environ,
            "PYTHONPATH": str(CLASSIC.parents[2]),
            "BRANCHLAKE_STATE_DIR": str(state_dir),
            "BRANCHLAKE_SESSION_KIND": "classic",
            "BRANCHLAKE_SPARK_DRIVER_MEMORY": "1g",
            "BRANCHLAKE_SPARK_MASTER": "local[2]",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.splitlines()[-1] == "ok"


# -- frames as they come every day ---------------------------------------------------------------------


def frames(namespace: str, queries: list[str], **options: Any) -> dg.AssetsDefinition:
    """The asset `t`, the first of `queries`, which is taken off."""

    @dg.asset(key=[namespace, "t"], **options)
    def t(spark: BranchSparkResource) -> DataFrame:
        return spark.spark_session.sql(queries.pop(0))

    return t


def test_an_upsert_of_no_rows_changes_none(lakehouse: Lakehouse, namespace: str) -> None:
    queries = ["SELECT 1L AS n, 'a' AS s", "SELECT 2L AS n, 'b' AS s WHERE false"]
    metadata = table_metadata(write_mode="upsert", keys=["n"], require_checks=False)
    with project(lakehouse, frames(namespace, queries, metadata=metadata)) as p:
        settled(p)
        settled(p)
        assert p.rows(namespace, "t") == [{"n": 1, "s": "a"}]


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_spark_frame_widens_its_table_and_fits_a_wider_one(
    lakehouse: Lakehouse, namespace: str, mode: Any
) -> None:
    """Nulls without type, narrow and wide numbers, decimals, structs in another order with a new field."""
    queries = [
        "SELECT 1L AS n, null AS s, 1 AS i, 0.5f AS f, 1.5BD AS d, named_struct('a', 1, 'b', 'x') AS st",
        "SELECT 2 AS n, null AS s, 1099511627776L AS i, 0.1d AS f, 100.5BD AS d,"
        " named_struct('c', 1, 'b', 'y', 'a', 2L) AS st",
        "SELECT 3 AS n, 'a' AS s, 3 AS i, null AS f, null AS d, null AS st",
    ]
    metadata = table_metadata(write_mode=mode, keys=["n"] if mode == "upsert" else [], require_checks=False)
    with project(lakehouse, frames(namespace, queries, metadata=metadata)) as p:
        while queries:
            settled(p)
        table = lakehouse.catalog().load_table((namespace, "t"))
        types = {field.name: str(field.field_type) for field in table.schema().fields}
        assert {name: types[name] for name in "nsifd"} == {
            "n": "long", "s": "string", "i": "long", "f": "double", "d": "decimal(4, 1)",
        }  # fmt: skip
        found = by_n(p.rows(namespace, "t"))
        assert [(row["n"], row["s"], row["i"], row["f"]) for row in found] == [
            (1, None, 1, 0.5),
            (2, None, 2**40, 0.1),
            (3, "a", 3, None),
        ]
        assert [row["st"] for row in found] == [
            {"a": 1, "b": "x", "c": None},
            {"a": 2, "b": "y", "c": 1},
            None,
        ]


def test_spark_types_that_have_no_place_are_refused_by_column(lakehouse: Lakehouse, namespace: str) -> None:
    for n, (query, kind, text) in enumerate(
        [
            ("SELECT INTERVAL '1' DAY AS i", ColumnUnsupported, "Column i is"),
            ("SELECT 1 AS ok, make_interval(1) AS i", ColumnUnsupported, "Column i is"),
            ("SELECT null AS a", SchemaMismatch, "All columns (a) are null"),
        ]
    ):
        asset = frames(f"{namespace}{n}", [query], metadata=FREE)
        with project(lakehouse, asset) as p:
            p.run(ok=False)
            p.failed_with(kind, f"{namespace}{n}.t", text)


def test_a_spark_frame_between_ops_is_refused(lakehouse: Lakehouse, namespace: str) -> None:
    @dg.op
    def rows(spark: BranchSparkResource) -> DataFrame:
        return spark.spark_session.range(1)

    @dg.op
    def same(rows: Any) -> Any:
        return rows

    @dg.graph_asset(key=[namespace, "t"])
    def t() -> Any:
        return same(rows())

    with project(lakehouse, t) as p:
        p.run(ok=False)
        p.failed_with(UnsupportedType, "rows.result is a Spark frame", "Return a pandas, Polars or Arrow")


def test_spark_keeps_long_partition_keys_and_counts_their_rows(lakehouse: Lakehouse, namespace: str) -> None:
    key = "k" * 300
    queries = [f"SELECT '{key}' AS kind, id FROM range({n})" for n in (2, 3)]
    asset = frames(
        namespace,
        queries,
        partitions_def=dg.StaticPartitionsDefinition([key, "b"]),
        metadata=table_metadata(partition_by="kind", require_checks=False),
    )
    with project(lakehouse, asset) as p:
        for rows in (2, 3):
            settled(p, partition=key)
            (event,) = p.last.get_asset_materialization_events()
            assert event.materialization.metadata["branchlake/partition_rows_on_branch"].value == rows
