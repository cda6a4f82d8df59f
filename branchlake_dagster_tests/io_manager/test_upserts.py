"""Upserts of pandas, Polars and Arrow frames into tables with rows, on real Iceberg tables without Spark."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import dagster as dg
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.stored_names import EventMetadata, RunTag
from branchlake_dagster.tables.errors import PartitionMismatch, UpsertKeyInvalid
from branchlake_dagster.tables.specification import parse_table_spec, table_metadata
from branchlake_dagster.tables.upsert_engine import SparkReason
from branchlake_dagster_tests.harness import Project, project, retry
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.raised import raising

lakehouse = memory.lakehouse

UPSERT = table_metadata(write_mode="upsert", keys=["kind", "id"], require_checks=False)


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that another test left running would answer: no session may be asked for."""

    def refuse(_: object) -> Any:
        raise AssertionError("Spark was asked for")

    monkeypatch.setattr(BranchSparkResource, "own_session", refuse)


def of(frames: list[Any], namespace: str, **options: Any) -> dg.AssetsDefinition:
    """The asset `t`, which returns the first of `frames` and takes it off."""

    @dg.asset(key=[namespace, "t"], **options)
    def t() -> Any:
        return frames.pop(0)

    return t


def settled(p: Project, **options: Any) -> str:
    run_id = p.run(**options)
    assert p.settle(run_id).state is RunState.PUBLISHED
    return run_id


def engine_of(p: Project) -> tuple[object, object]:
    """The engine that the last run's materialization reports, and why it was Spark."""
    (event,) = p.last.get_asset_materialization_events()
    found = event.materialization.metadata
    return tuple(
        found[name].value if name in found else None
        for name in (EventMetadata.UPSERT_ENGINE, EventMetadata.UPSERT_BY_SPARK_BECAUSE)
    )


def by_id(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["id"])


@pytest.mark.usefixtures("no_spark")
def test_frames_of_every_kind_are_upserted_without_spark(lakehouse: Lakehouse, namespace: str) -> None:
    at = datetime(2026, 11, 1, 12, tzinfo=UTC)
    left: list[Any] = [
        pl.DataFrame({"kind": ["a", "a"], "id": [1, 2], "at": [at, None]}),
        pl.DataFrame({"kind": ["a", "a"], "id": [2, 3], "at": [at, None]}),
        pl.LazyFrame({"kind": ["a"], "id": [1], "at": [None]}),
        pd.DataFrame({"kind": ["a", "b"], "id": [4, 1], "at": pd.to_datetime([at, at])}),
        pa.table({"kind": ["a"], "id": pa.array([4], pa.int32()), "at": pa.nulls(1), "vat": [19]}),
    ]
    with project(lakehouse, of(left, namespace, metadata=UPSERT)) as p:
        settled(p)
        assert engine_of(p) == (None, None)
        while left:
            settled(p)
            assert engine_of(p) == ("PyIceberg", None)
        rows = sorted(p.rows(namespace, "t"), key=lambda row: (row["kind"], row["id"]))
    assert [(row["kind"], row["id"], row["at"], row["vat"]) for row in rows] == [
        ("a", 1, None, None),
        ("a", 2, at, None),
        ("a", 3, None, None),
        ("a", 4, None, 19),
        ("b", 1, at, None),
    ]


@pytest.mark.usefixtures("no_spark")
def test_the_snapshot_has_the_counts_of_a_merge(lakehouse: Lakehouse, namespace: str) -> None:
    left: list[Any] = [pa.table({"kind": ["a"], "id": [number], "n": [number]}) for number in (1, 2, 1)]
    with project(lakehouse, of(left, namespace, metadata=UPSERT, code_version="v3")) as p:
        settled(p)
        for operation, rows in (("append", 2), ("overwrite", 2)):
            run_id = p.run()
            table = lakehouse.catalog(run_branch_name(run_id)).load_table((namespace, "t"))
            summary = table.current_snapshot().summary
            told = summary.additional_properties
            assert {key: value for key, value in told.items() if key.startswith("branchlake.")} == {
                "branchlake.run_id": run_id,
                "branchlake.root_run_id": run_id,
                "branchlake.asset": f"{namespace}/t",
                "branchlake.code_version": "v3",
                "branchlake.base_hash": p.instance.get_run_by_id(run_id).tags[RunTag.BASE_HASH],
                "branchlake.write_mode": "upsert",
                "branchlake.keys": "kind,id",
                "branchlake.step": f"{namespace}__t",
                "branchlake.attempt": "1",
            }
            assert (summary.operation.value, told["total-records"]) == (operation, str(rows))
            assert p.settle(run_id).state is RunState.PUBLISHED


@pytest.mark.usefixtures("no_spark")
def test_an_upsert_writes_rows_of_its_partitions_and_matches_rows_of_all(
    lakehouse: Lakehouse, namespace: str
) -> None:
    left: list[Any] = [pl.DataFrame({"day": [day], "id": [n]}) for day, n in (("mon", 1), ("tue", 2))]
    asset = of(
        left,
        namespace,
        partitions_def=dg.StaticPartitionsDefinition(["mon", "tue"]),
        metadata=table_metadata(write_mode="upsert", keys=["id"], partition_by="day", require_checks=False),
    )
    with project(lakehouse, asset) as p:
        settled(p, partition="mon")
        settled(p, partition="tue")
        left += [
            pl.DataFrame({"day": ["tue", "mon"], "id": [1, 3]}),
            pl.DataFrame({"day": ["tue"], "id": [1]}),
        ]
        p.run(partition="tue", ok=False)
        p.failed_with(PartitionMismatch, f"{namespace}.t")
        settled(p, partition="tue")
        assert by_id(p.rows(namespace, "t")) == [{"day": "tue", "id": 1}, {"day": "tue", "id": 2}]


@pytest.mark.usefixtures("no_spark")
def test_an_upsert_without_rows_changes_nothing_also_in_a_partition_without_rows(
    lakehouse: Lakehouse, namespace: str
) -> None:
    left: list[Any] = [
        pl.DataFrame({"day": ["mon"], "id": [1]}),
        pl.DataFrame(schema={"day": str, "id": int}),
    ]
    asset = of(
        left,
        namespace,
        partitions_def=dg.StaticPartitionsDefinition(["mon", "tue"]),
        metadata=table_metadata(
            write_mode="upsert", keys=["day", "id"], partition_by="day", require_checks=False
        ),
    )
    with project(lakehouse, asset) as p:
        settled(p, partition="mon")
        first = lakehouse.catalog().load_table((namespace, "t")).metadata.snapshots
        run_id = p.run(partition="tue")
        branch = lakehouse.catalog(run_branch_name(run_id)).load_table((namespace, "t"))
        assert branch.metadata.snapshots == first


@pytest.mark.usefixtures("no_spark")
def test_a_bad_key_stops_an_upsert_into_rows(lakehouse: Lakehouse, namespace: str) -> None:
    ids: list[list[Any]] = [[1], [7, 7], [None, 8]]
    left: list[Any] = [pl.DataFrame({"kind": ["a"] * len(one), "id": one}) for one in ids]
    with project(lakehouse, of(left, namespace, metadata=UPSERT)) as p:
        settled(p)
        while left:
            run_id = p.run(ok=False)
            p.failed_with(UpsertKeyInvalid, f"{namespace}.t")
            assert p.rows(namespace, "t", ref=run_branch_name(run_id)) == [{"kind": "a", "id": 1}]


@pytest.mark.usefixtures("no_spark")
def test_a_step_that_is_attempted_again_takes_its_upsert_back(lakehouse: Lakehouse, namespace: str) -> None:
    left: list[Any] = [
        pl.DataFrame({"kind": ["a"], "id": [number], "n": [n]}) for number, n in ((1, 0), (2, 1), (3, 2))
    ]
    fails = [False, True, False]

    @dg.asset(key=[namespace, "t"], metadata=UPSERT)
    def t() -> pl.DataFrame:
        return left.pop(0)

    @dg.asset(key=[namespace, "u"], deps=[t], metadata=table_metadata(require_checks=False))
    def u() -> None:
        if fails.pop(0):
            raise RuntimeError("the step fails")

    with project(lakehouse, t, u) as p:
        settled(p)
        run_id = p.run(ok=False)
        again = retry(p, run_id, f"{namespace}__t", f"{namespace}__u")
        p.settle(again)
        assert by_id(p.rows(namespace, "t")) == [
            {"kind": "a", "id": 1, "n": 0},
            {"kind": "a", "id": 3, "n": 2},
        ]


@pytest.mark.spark
def test_a_materialization_says_why_spark_wrote_an_upsert(lakehouse: Lakehouse, namespace: str) -> None:
    frames = [pl.DataFrame({"id": [0.5], "n": [1]}), pl.DataFrame({"id": [0.5, 1.0], "n": [2, 3]})]

    @dg.asset(
        key=[namespace, "t"], metadata=table_metadata(write_mode="upsert", keys=["id"], require_checks=False)
    )
    def t(spark: BranchSparkResource) -> Any:
        if frames:
            return frames.pop(0)
        found: DataFrame = spark.spark_session.createDataFrame([(0.5, 4)], "id double, n long")
        return found

    with project(lakehouse, t) as p:
        settled(p)
        settled(p)
        assert engine_of(p) == ("Spark", SparkReason.KEY_TYPE.value)
        settled(p)
        assert engine_of(p) == ("Spark", SparkReason.SPARK_FRAME.value)
        assert by_id(p.rows(namespace, "t")) == [{"id": 0.5, "n": 4}, {"id": 1.0, "n": 3}]


KEEP = table_metadata(
    write_mode="upsert", keys=["at", "id"], when_matched="keep", preview_rows=0, require_checks=False
)


@pytest.mark.usefixtures("no_spark")
def test_rows_with_known_keys_are_kept_and_new_ones_added(lakehouse: Lakehouse, namespace: str) -> None:
    at = datetime(2026, 11, 1, 12, tzinfo=UTC)
    left: list[Any] = [
        pl.DataFrame({"at": [at] * len(ids), "id": ids, "n": [n] * len(ids)})
        for n, ids in enumerate([[1, 2], [2, 3], [1, 3]])
    ]
    with project(lakehouse, of(left, namespace, metadata=KEEP)) as p:
        settled(p)
        settled(p)
        table = lakehouse.catalog().load_table((namespace, "t"))
        assert table.current_snapshot().summary.additional_properties["added-records"] == "1"
        assert table.current_snapshot().summary.operation.value == "append"
        nothing = p.run()
        assert p.settle(nothing).state is RunState.DISCARDED
        rows = by_id(p.rows(namespace, "t"))
    assert [(row["id"], row["n"]) for row in rows] == [(1, 0), (2, 0), (3, 1)]


@pytest.mark.usefixtures("no_spark")
def test_two_runs_do_not_both_add_a_key(lakehouse: Lakehouse, namespace: str) -> None:
    at = datetime(2026, 11, 1, 12, tzinfo=UTC)
    left: list[Any] = [
        pl.DataFrame({"at": [at], "id": [number], "n": [n]}) for n, number in enumerate([1, 2, 2])
    ]
    with project(lakehouse, of(left, namespace, metadata=KEEP)) as p:
        settled(p)
        first, second = p.run(), p.run()
        assert p.settle(first).state is RunState.PUBLISHED
        assert p.settle(second).state is RunState.REFUSED
        assert [(row["id"], row["n"]) for row in by_id(p.rows(namespace, "t"))] == [(1, 0), (2, 1)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"write_mode": "upsert", "keys": ["id"], "when_matched": "ignore"}, "when_matched"),
        ({"write_mode": "append", "when_matched": "keep"}, "when_matched_without_upsert"),
    ],
)
def test_a_wrong_when_matched_is_refused(options: dict[str, Any], reason: str) -> None:
    with raising(ConfigurationError, reason=reason, table="lake.t"):
        parse_table_spec(
            dg.AssetKey("t"), table_metadata(**options), default_namespace="lake", partitioned=False
        )


@pytest.mark.usefixtures("no_spark")
def test_the_rows_of_a_preview_may_be_wrapped_as_metadata(lakehouse: Lakehouse, namespace: str) -> None:
    metadata = table_metadata(require_checks=False) | {"branchlake/preview_rows": dg.MetadataValue.int(2)}

    @dg.asset(key=(namespace, "t"), metadata=metadata)
    def rows() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, rows) as p:
        settled(p)
