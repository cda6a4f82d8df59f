"""The IO manager on real Iceberg tables, without Spark: types, partitions, write modes, schema, fences."""

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.io import load_file_io
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType, TimestamptzType

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.catalog.options import NAMESPACE_CREATE
from branchlake_dagster.catalog.stored_files import list_prefixes, load_prefixes
from branchlake_dagster.errors import BranchlakeError, ConfigurationError
from branchlake_dagster.io_manager.loading import select_input_partitions
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables import arrow_frames
from branchlake_dagster.tables.errors import (
    ColumnsFrozen,
    PartitionMismatch,
    RunBranchGone,
    SchemaMismatch,
    TableMissing,
    UnsupportedType,
)
from branchlake_dagster.tables.selection import Selection, TimeRange
from branchlake_dagster.tables.specification import TableSpec, table_metadata
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

HOURLY = dg.HourlyPartitionsDefinition(start_date="2026-08-08-00:00", end_date="2026-08-09-00:00")


def at(hour: int, minute: int = 0) -> datetime:
    return datetime(2026, 8, 8, hour, minute, tzinfo=UTC)


def cause(p: Project) -> Any:
    """The error our code raised inside the failed step, as Dagster recorded it."""
    (failure,) = [e for e in p.last.all_events if e.is_step_failure]
    error = failure.step_failure_data.error
    while error.cause and error.cls_name.startswith("Dagster"):
        error = error.cause
    return error


def failed_with(p: Project, kind: type[BranchlakeError], *texts: str) -> None:
    error = cause(p)
    assert error.cls_name == kind.__name__, error.message
    for text in texts:
        assert text in error.message


@pytest.mark.parametrize(
    "frame",
    [
        pa.table({"n": [1, 2], "s": ["a", None]}),
        pd.DataFrame({"n": [1, 2], "s": ["a", None]}),
        pl.DataFrame({"n": [1, 2], "s": ["a", None]}),
        pl.LazyFrame({"n": [1, 2], "s": ["a", None]}),
    ],
    ids=lambda frame: type(frame).__module__.split(".")[0] + type(frame).__name__,
)
def test_frames_go_in_and_come_out_by_annotation(lakehouse: Lakehouse, namespace: str, frame: object) -> None:
    kind = type(frame)

    @dg.asset(key=[namespace, "source"])
    def source():
        return frame

    seen = {}

    @dg.asset(key=[namespace, "sink"], ins={"source": dg.AssetIn([namespace, "source"])})
    def sink(source: kind) -> None:
        seen["kind"] = type(source)
        seen["rows"] = (source.collect() if isinstance(source, pl.LazyFrame) else source).shape

    with project(lakehouse, source, sink) as p:
        run_id = p.run()
        assert seen == {"kind": kind, "rows": (2, 2)}
        assert p.rows(namespace, "source", ref=run_branch_name(run_id)) == [
            {"n": 1, "s": "a"},
            {"n": 2, "s": None},
        ]


def test_metadata_and_snapshot_name_their_origin(lakehouse: Lakehouse, namespace: str) -> None:
    @dg.asset(
        key=[namespace, "t"],
        partitions_def=HOURLY,
        metadata=table_metadata(partition_by="ts"),
        code_version="v7",
    )
    def t() -> pl.DataFrame:
        return pl.DataFrame({"ts": [at(3), at(3, 30)]})

    with project(lakehouse, t) as p:
        run_id = p.run(partition="2026-08-08-03:00")
        base = p.instance.get_run_by_id(run_id).tags[RunTag.BASE_HASH]
        (event,) = p.last.get_asset_materialization_events()
        told = {key: value.value for key, value in event.materialization.metadata.items()}
        table = lakehouse.catalog(run_branch_name(run_id)).load_table((namespace, "t"))
        assert told["branchlake/rows_on_branch"] == told["branchlake/partition_rows_on_branch"] == 2
        assert told["dagster/table_name"] == f"{namespace}.t"
        assert [column.name for column in told["dagster/column_schema"].columns] == ["ts"]
        assert told["dagster/uri"] == table.location()
        assert told["branchlake/branch"] == run_branch_name(run_id)
        assert told["branchlake/base_hash"] == base
        assert told["branchlake/snapshot_id"] == str(table.current_snapshot().snapshot_id)
        summary = table.current_snapshot().summary.additional_properties
        assert {key: value for key, value in summary.items() if key.startswith("branchlake.")} == {
            "branchlake.run_id": run_id,
            "branchlake.root_run_id": run_id,
            "branchlake.asset": f"{namespace}/t",
            "branchlake.partition": "2026-08-08-03:00",
            "branchlake.replaced": '{"v":1,"any":[[[1,"time",1786158000000000,1786161600000000]]]}',
            "branchlake.code_version": "v7",
            "branchlake.base_hash": base,
            "branchlake.write_mode": "replace_partitions",
            "branchlake.step": f"{namespace}__t",
            "branchlake.attempt": "1",
        }
        assert table.properties["gc.enabled"] == "false"


def test_a_loaded_input_reports_its_table_and_branch(lakehouse: Lakehouse, namespace: str) -> None:
    """The read set of a run is in the event log, without an observation that automation would react to."""

    @dg.asset(key=[namespace, "t"], partitions_def=HOURLY, metadata=table_metadata(partition_by="ts"))
    def t(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"ts": [window.start for window in [context.partition_time_window]]})

    @dg.asset(key=[namespace, "all"], ins={"t": dg.AssetIn([namespace, "t"])})
    def everything(t: pl.DataFrame) -> None: ...

    with project(lakehouse, t, everything) as p:
        first = p.run(dg.AssetKey([namespace, "t"]), partition="2026-08-08-01:00")
        lakehouse.nessie.merge(
            from_name=run_branch_name(first),
            from_hash=lakehouse.nessie.reference(run_branch_name(first)).hash,
            into="main",
            expected_hash=lakehouse.nessie.reference("main").hash,
            message="test",
        )
        run_id = p.run(dg.AssetKey([namespace, "all"]))
        (loaded,) = [e for e in p.last.all_events if e.event_type == dg.DagsterEventType.LOADED_INPUT]
        told = {key: value.value for key, value in loaded.event_specific_data.metadata.items()}
        assert told == {"branchlake/table": f"{namespace}.t", "branchlake/ref": run_branch_name(run_id)}
        assert p.observations([namespace, "t"]) == []


def test_a_partition_is_replaced_and_the_others_stay(lakehouse: Lakehouse, namespace: str) -> None:
    value = {"n": 1}

    @dg.asset(
        key=[namespace, "t"],
        partitions_def=HOURLY,
        metadata=table_metadata(partition_by="ts", require_checks=False),
    )
    def t(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"ts": [context.partition_time_window.start.astimezone(UTC)], "n": [value["n"]]})

    with project(lakehouse, t) as p:
        for partition, n in (("2026-08-08-01:00", 1), ("2026-08-08-02:00", 2), ("2026-08-08-01:00", 3)):
            value["n"] = n
            p.settle(p.run(partition=partition))
        assert sorted((row["ts"].hour, row["n"]) for row in p.rows(namespace, "t")) == [(1, 3), (2, 2)]


def test_several_partitions_in_one_run(lakehouse: Lakehouse, namespace: str) -> None:
    multi = dg.MultiPartitionsDefinition(
        {"window": HOURLY, "kind": dg.StaticPartitionsDefinition(["a", "b"])}
    )

    @dg.asset(
        key=[namespace, "t"],
        partitions_def=multi,
        metadata=table_metadata(partition_by={"window": "ts", "kind": "kind"}, require_checks=False),
    )
    def t(context: dg.AssetExecutionContext) -> pd.DataFrame:
        keys = [key.keys_by_dimension for key in context.partition_keys]
        return pd.DataFrame(
            {
                "ts": pd.to_datetime([key["window"] for key in keys], format="%Y-%m-%d-%H:%M", utc=True),
                "kind": [key["kind"] for key in keys],
            }
        )

    @dg.asset(
        key=[namespace, "down"],
        partitions_def=HOURLY,
        metadata=table_metadata(partition_by="ts", require_checks=False),
        ins={
            "t": dg.AssetIn(
                [namespace, "t"],
                partition_mapping=dg.MultiToSingleDimensionPartitionMapping(
                    partition_dimension_name="window"
                ),
            )
        },
    )
    def down(t: pd.DataFrame) -> pd.DataFrame:
        return t.groupby("ts", as_index=False).agg(kinds=("kind", "nunique"))

    keys = multi.get_partition_keys()
    with project(lakehouse, t, down) as p:
        tags = {"dagster/asset_partition_range_start": keys[0], "dagster/asset_partition_range_end": keys[-1]}
        p.settle(p.run(dg.AssetKey([namespace, "t"]), tags=tags))
        assert len(p.rows(namespace, "t")) == 48
        p.settle(p.run(dg.AssetKey([namespace, "down"]), partition="2026-08-08-05:00"))
        assert p.rows(namespace, "down") == [{"ts": at(5), "kinds": 2}]


def test_dynamic_partitions_and_the_whole_of_them(lakehouse: Lakehouse, namespace: str) -> None:
    files = dg.DynamicPartitionsDefinition(name=f"files_{namespace}")

    @dg.asset(
        key=[namespace, "t"],
        partitions_def=files,
        metadata=table_metadata(partition_by="file", require_checks=False),
    )
    def t(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"file": [context.partition_key]})

    seen = []

    @dg.asset(
        key=[namespace, "all"],
        ins={"t": dg.AssetIn([namespace, "t"])},
        metadata=table_metadata(require_checks=False),
    )
    def everything(t: pl.DataFrame) -> None:
        seen.extend(sorted(t["file"]))

    with project(lakehouse, t, everything) as p:
        p.instance.add_dynamic_partitions(files.name, ["x", "y"])
        for key in ("x", "y"):
            p.settle(p.run(dg.AssetKey([namespace, "t"]), partition=key))
        p.run(dg.AssetKey([namespace, "all"]))
        assert seen == ["x", "y"]


def loads(source: dg.AssetKey, namespace: str, seen: list[Any]) -> dg.AssetsDefinition:
    """An asset without partitions that notes the values `n` that it gets of all partitions of `source`."""

    @dg.asset(
        key=[namespace, "all"], ins={"t": dg.AssetIn(source)}, metadata=table_metadata(require_checks=False)
    )
    def everything(t: pl.DataFrame) -> None:
        seen.append(sorted(t["n"]))

    return everything


def numbered(namespace: str, definition: dg.PartitionsDefinition[str]) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, "t"],
        partitions_def=definition,
        metadata=table_metadata(partition_by="part", require_checks=False),
    )
    def t(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"part": [context.partition_key], "n": [ord(context.partition_key)]})

    return t


def test_rows_of_partitions_that_exist_no_more_are_not_loaded(lakehouse: Lakehouse, namespace: str) -> None:
    seen: list[Any] = []
    letters = dg.DynamicPartitionsDefinition(name=f"letters_{namespace}")
    t = numbered(namespace, letters)
    everything = loads(t.key, namespace, seen)
    with project(lakehouse, t, everything) as p:
        p.instance.add_dynamic_partitions(letters.name, ["a", "b"])
        for key in ("a", "b"):
            p.settle(p.run(t.key, partition=key))
        p.instance.delete_dynamic_partition(letters.name, "b")
        p.run(everything.key)
        p.instance.delete_dynamic_partition(letters.name, "a")
        p.run(everything.key)
    for keys in (["a", "b"], ["b"], ["c"]):
        with project(lakehouse, numbered(namespace, dg.StaticPartitionsDefinition(keys)), everything) as p:
            p.run(everything.key)
    assert seen == [[97], [], [97, 98], [98], []]


@pytest.mark.parametrize("days", [1, 60])
def test_rows_of_no_partition_are_loaded_by_checks_of_the_whole_table_only(
    lakehouse: Lakehouse, namespace: str, days: int
) -> None:
    first = date(2026, 1, 1)
    older, last, later = first - timedelta(1), first + timedelta(days - 1), first + timedelta(days)
    catalog = lakehouse.catalog()
    catalog.create_namespace_if_not_exists((namespace,))
    adopted = pa.table({"day": pa.array([older, None, last, later], pa.date32()), "n": [1, 2, 3, 4]})
    catalog.create_table((namespace, "t"), adopted.schema).append(adopted)
    definition = dg.DailyPartitionsDefinition(str(first), end_date=str(later))
    seen: list[Any] = []

    @dg.asset(
        key=[namespace, "t"],
        partitions_def=definition,
        metadata=table_metadata(partition_by="day", write_mode="append"),
    )
    def t() -> pl.DataFrame:
        return pl.DataFrame({"day": [last], "n": [5]})

    @dg.asset_check(asset=t, partitions_def=definition)
    def of_the_run(t: pl.DataFrame) -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=sorted(t["n"]) == [3, 5])

    @dg.asset_check(asset=t, metadata={"branchlake/scope": "table"})
    def of_the_table(t: pl.DataFrame) -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=sorted(t["n"]) == [1, 2, 3, 4, 5])

    everything = loads(t.key, namespace, seen)
    with project(lakehouse, t, of_the_run, of_the_table, everything) as p:
        assert p.settle(p.run(t.key, partition=str(last))).state is RunState.PUBLISHED
        p.run(everything.key)
    assert seen == [[3, 5]]


def test_all_windows_are_one_range_without_those_that_are_excluded() -> None:
    schema = Schema(NestedField(1, "at", TimestamptzType()))
    spec = TableSpec(("shop", "t"), "append", (), {"": "at"})

    def selected(definition: dg.TimeWindowPartitionsDefinition) -> Selection:
        return select_input_partitions(definition.get_partition_keys(), definition, spec, schema)

    (hours,) = selected(HOURLY).slices
    assert hours == (TimeRange("at", at(0), at(0) + timedelta(days=1)),)
    excluding = dg.TimeWindowPartitionsDefinition(
        start=HOURLY.start,
        end=HOURLY.end,
        fmt="%Y-%m-%d-%H:%M",
        cron_schedule="0 * * * *",
        exclusions=[at(3)],
    )
    assert selected(excluding).slices == (
        (TimeRange("at", at(0), at(3)),),
        (TimeRange("at", at(4), at(0) + timedelta(days=1)),),
    )
    assert select_input_partitions([], HOURLY, spec, schema).slices == ()


def test_null_structs_with_required_fields_are_stored(lakehouse: Lakehouse, namespace: str) -> None:
    kind = pa.struct([pa.field("a", pa.int64(), nullable=False), ("b", pa.large_string())])

    @dg.asset(key=[namespace, "t"], metadata=table_metadata(write_mode="append", require_checks=False))
    def t() -> pa.Table:
        return pa.table({"s": pa.array([None, {"a": 1, "b": "c"}], kind)})

    with project(lakehouse, t) as p:
        for _ in range(2):
            p.settle(p.run(t.key))
        assert p.rows(namespace, "t") == [{"s": None}, {"s": {"a": 1, "b": "c"}}] * 2


def test_append_keeps_existing_rows(lakehouse: Lakehouse, namespace: str) -> None:
    @dg.asset(key=[namespace, "t"], metadata=table_metadata(write_mode="append", require_checks=False))
    def t() -> pa.Table:
        return pa.table({"n": [1]})

    with project(lakehouse, t) as p:
        p.settle(p.run())
        p.settle(p.run())
        assert p.rows(namespace, "t") == [{"n": 1}, {"n": 1}]


def test_a_new_table_has_the_declared_layout_and_properties(lakehouse: Lakehouse, namespace: str) -> None:
    @dg.asset(
        key=[namespace, "orders"],
        metadata=table_metadata(
            write_mode="append",
            layout=["month(day)", "bucket(4, account)"],
            properties={"write.merge.mode": "merge-on-read"},
            require_checks=False,
        ),
    )
    def orders() -> pl.DataFrame:
        days = pl.Series("day", ["2026-01-05", "2026-02-06"]).str.to_date()
        return pl.DataFrame({"account": ["a", "b"], "price": [1, 2]}).with_columns(days)

    with project(lakehouse, orders) as p:
        for _ in range(2):
            p.settle(p.run(orders.key))
        table = lakehouse.catalog().load_table((namespace, "orders"))
        assert [field.name for field in table.spec().fields] == ["day_month", "account_bucket"]
        assert table.properties["write.merge.mode"] == "merge-on-read"
        assert {task.file.partition[0] for task in table.scan().plan_files()} == {672, 673}
        assert table.scan().count() == 4


def test_only_a_new_nullable_column_evolves_the_table(lakehouse: Lakehouse, namespace: str) -> None:
    frames = {"now": pl.DataFrame({"n": [1]})}

    @dg.asset(key=[namespace, "t"], metadata=table_metadata(write_mode="append", require_checks=False))
    def t() -> pl.DataFrame:
        return frames["now"]

    with project(lakehouse, t) as p:
        p.settle(p.run())
        frames["now"] = pl.DataFrame({"n": [2], "extra": ["x"]})
        p.settle(p.run())
        assert p.rows(namespace, "t") == [{"n": 2, "extra": "x"}, {"n": 1, "extra": None}]
        main = lakehouse.nessie.reference("main").hash
        frames["now"] = pl.DataFrame({"n": ["two"], "extra": ["x"]})
        p.run(ok=False)
        failed_with(
            p, SchemaMismatch, "Column n is long in the table and string in the frame", f"{namespace}.t"
        )
        frames["now"] = pl.DataFrame({"n": [3]})
        p.run(ok=False)
        failed_with(p, SchemaMismatch, "lacks column extra")
        assert lakehouse.nessie.reference("main").hash == main


def test_rows_outside_the_partition_are_refused_before_the_write(
    lakehouse: Lakehouse, namespace: str
) -> None:
    @dg.asset(key=[namespace, "t"], partitions_def=HOURLY, metadata=table_metadata(partition_by="ts"))
    def t() -> pl.DataFrame:
        return pl.DataFrame({"ts": [at(3), at(4)]})

    with project(lakehouse, t) as p:
        p.run(partition="2026-08-08-03:00", ok=False)
        failed_with(p, PartitionMismatch, "1 rows of the frame are outside", f"{namespace}.t")


def test_an_unknown_partition_key_is_refused_without_a_branch(lakehouse: Lakehouse, namespace: str) -> None:
    @dg.asset(key=[namespace, "t"], partitions_def=HOURLY, metadata=table_metadata(partition_by="ts"))
    def t() -> pl.DataFrame:
        raise AssertionError("not reached")

    with project(lakehouse, t) as p:
        before = p.branches()
        with pytest.raises((dg.DagsterInvariantViolationError, dg.DagsterUnknownPartitionError)) as refused:
            p.run(partition="2031-01-01-00:00", ok=False)
        assert "2031-01-01-00:00" in str(refused.value)
        assert p.branches() == before


def test_an_input_without_table_and_a_value_without_handler_are_named(
    lakehouse: Lakehouse, namespace: str
) -> None:
    @dg.asset(key=[namespace, "loads"], ins={"x": dg.AssetIn([namespace, "nowhere"])})
    def loads(x: pl.DataFrame) -> None: ...

    @dg.asset(key=[namespace, "returns"])
    def returns():
        return {"not": "a frame"}

    with project(lakehouse, dg.AssetSpec([namespace, "nowhere"]), loads, returns) as p:
        p.run(dg.AssetKey([namespace, "loads"]), ok=False)
        failed_with(p, TableMissing, f"{namespace}.nowhere")
        p.run(dg.AssetKey([namespace, "returns"]), ok=False)
        failed_with(p, UnsupportedType, "builtins.dict", f"{namespace}.returns")


def test_a_table_of_another_format_than_parquet_is_refused_by_name(
    lakehouse: Lakehouse, namespace: str
) -> None:
    @dg.asset(key=[namespace, "t"])
    def t() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, t) as p:
        catalog = lakehouse.catalog("main", properties={NAMESPACE_CREATE: "true"})
        schema = pa.schema([pa.field("n", pa.int64())])
        catalog.create_table((namespace, "t"), schema, properties={"write.format.default": "orc"})
        p.run(ok=False)
        failed_with(p, ConfigurationError, f"{namespace}.t")


def test_a_branch_deleted_under_a_run_fences_it(lakehouse: Lakehouse, namespace: str) -> None:
    nessie = lakehouse.nessie

    @dg.asset(key=[namespace, "first"])
    def first() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    @dg.asset(key=[namespace, "second"], deps=[first])
    def second(context: dg.AssetExecutionContext) -> pl.DataFrame:
        branch = nessie.reference(run_branch_name(context.run.run_id))
        nessie.delete_branch(branch.name, expected_hash=branch.hash)
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, first, second) as p:
        main = nessie.reference("main").hash
        run_id = p.run(ok=False)
        failed_with(p, RunBranchGone, run_branch_name(run_id))
        assert run_branch_name(run_id) not in p.branches()
        assert nessie.reference("main").hash == main


def test_a_run_sees_main_at_its_base_and_its_own_writes(lakehouse: Lakehouse, namespace: str) -> None:
    """Invariant 4: what others publish meanwhile stays invisible."""
    rows = {"source": [1]}

    @dg.asset(key=[namespace, "source"], metadata=table_metadata(require_checks=False))
    def source() -> pl.DataFrame:
        return pl.DataFrame({"n": rows["source"]})

    @dg.asset(key=[namespace, "touch"], metadata=table_metadata(require_checks=False))
    def touch() -> pl.DataFrame:
        return pl.DataFrame({"n": [0]})

    @dg.asset(
        key=[namespace, "reader"],
        deps=[touch],
        ins={"source": dg.AssetIn([namespace, "source"])},
        metadata=table_metadata(require_checks=False),
    )
    def reader(context: dg.AssetExecutionContext, source: pl.DataFrame) -> pl.DataFrame:
        return source

    with project(lakehouse, source, touch, reader) as p:
        p.settle(p.run(dg.AssetKey([namespace, "source"])))
        opened = p.run(dg.AssetKey([namespace, "touch"]))
        rows["source"] = [1, 2]
        p.settle(p.run(dg.AssetKey([namespace, "source"])))
        on_branch = p.rows(namespace, "source", ref=run_branch_name(opened))
        assert [row["n"] for row in on_branch] == [1]
        assert len(p.rows(namespace, "source")) == 2
        p.settle(opened)


def test_where_files_of_a_table_of_others_go_is_recorded_before_they_are_written(
    lakehouse: Lakehouse, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that dies while it writes leaves files in a folder that no table may name any more."""
    fast = (tmp_path / "fast").as_uri()
    others = NessieCatalog.from_client(
        lakehouse.nessie, "main", (tmp_path / "others").as_uri(), **{NAMESPACE_CREATE: "true"}
    )
    schema = pa.schema([("n", pa.int64())])
    table = others.create_table((namespace, "t"), schema, properties={"write.data.path": fast})
    settings = lakehouse.settings

    def recorded() -> frozenset[str]:
        io = load_file_io(settings.file_io_properties(), settings.warehouse_uri)
        return load_prefixes(io, settings.warehouse_uri)

    seen = []
    monkeypatch.setattr(arrow_frames, "write_frame", lambda *_: seen.append(recorded()))

    @dg.asset(key=[namespace, "t"])
    def t() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, t) as p:
        p.run()
    (before,) = seen
    assert before >= {*list_prefixes(table.location(), table.properties)}
    assert f"{fast}/" in before


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("append", {}),
        ("replace_table", {}),
        ("upsert", {"keys": ["n"]}),
        ("replace_partitions", {"partition_by": "s"}),
    ],
)
def test_frozen_columns_refuse_what_would_change_them(
    lakehouse: Lakehouse, namespace: str, mode: Any, options: dict[str, Any]
) -> None:
    frames = {"now": pa.table({"n": pa.array([1], pa.int32()), "s": ["a"]})}
    parts = dg.StaticPartitionsDefinition(["a"]) if mode == "replace_partitions" else None

    @dg.asset(
        key=[namespace, "t"],
        partitions_def=parts,
        metadata=table_metadata(write_mode=mode, columns="freeze", require_checks=False, **options),
    )
    def t() -> Any:
        return frames["now"]

    with project(lakehouse, t) as p:
        partition = "a" if parts else None
        p.settle(p.run(partition=partition))
        main = lakehouse.nessie.reference("main").hash
        wider = pa.table({"n": [1], "s": ["a"]})
        added = pl.DataFrame(
            {"n": [1], "s": ["a"], "extra": [1], "more": [None]}, schema_overrides={"n": pl.Int32}
        )
        for frame, named in (
            (wider, ["n"]),
            (added, ["extra", "more"]),
            (added.to_pandas(), ["extra", "more"]),
        ):
            frames["now"] = frame
            p.run(partition=partition, ok=False)
            failed_with(p, ColumnsFrozen, f"{namespace}.t", *named)
        assert lakehouse.nessie.reference("main").hash == main


def test_frozen_columns_block_a_run_that_changes_them_by_its_own_code(
    lakehouse: Lakehouse, namespace: str
) -> None:
    changes = {"now": False}

    @dg.asset(key=[namespace, "t"], metadata=table_metadata(columns="freeze", require_checks=False))
    def t(lakehouse: LakehouseResource) -> None:
        catalog = lakehouse.catalog()
        if not changes["now"]:
            catalog.create_namespace_if_not_exists((namespace,))
            catalog.create_table((namespace, "t"), pa.schema([("n", pa.int32()), ("s", pa.string())]))
            return
        with catalog.load_table((namespace, "t")).update_schema(allow_incompatible_changes=True) as update:
            update.add_column("extra", StringType())
            update.update_column("n", LongType())
            update.delete_column("s")

    with project(lakehouse, t) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
        changes["now"] = True
        outcome = p.settle(p.run())
        assert outcome.state is RunState.BLOCKED
        assert outcome.verdict is not None
        (reason,) = outcome.verdict.reasons
        for column in ("extra", "n", "s"):
            assert column in reason.split(": ")[1].replace(",", "").split()


@pytest.mark.parametrize("kind", [pa.Table, pd.DataFrame, pl.DataFrame, pl.LazyFrame])
def test_an_input_has_the_columns_that_its_metadata_names(
    lakehouse: Lakehouse, namespace: str, kind: Any
) -> None:
    wanted: dict[str, Any] = {"columns": ["c", "a"]}

    @dg.asset(key=[namespace, "t"], metadata=table_metadata(require_checks=False))
    def t() -> pa.Table:
        return pa.table({"a": [1], "b": ["x"], "c": [2.5]})

    @dg.asset(key=[namespace, "few"], ins={"t": dg.AssetIn(t.key, metadata=wanted)})
    def few(t: kind) -> None:
        seen.append(pl.DataFrame(t.collect() if isinstance(t, pl.LazyFrame) else t))

    @dg.asset(key=[namespace, "wrong"], ins={"t": dg.AssetIn(t.key, metadata={"columns": ["a", "d"]})})
    def wrong(t: kind) -> None: ...

    seen: list[pl.DataFrame] = []
    with project(lakehouse, t, few, wrong) as p:
        p.settle(p.run(t.key))
        p.run(few.key)
        assert [frame.to_dicts() for frame in seen] == [[{"c": 2.5, "a": 1}]]
        assert seen[0].columns == ["c", "a"]
        p.run(wrong.key, ok=False)
        failed_with(p, ConfigurationError, "d", f"{namespace}.t")


@pytest.mark.parametrize(
    "options",
    [
        {"partition_by": "ts"},
        {"partition_by": "ts", "write_mode": "append"},
        {"partition_by": "ts", "write_mode": "upsert", "keys": ["ts"]},
    ],
    ids=["replace_partitions", "append", "upsert"],
)
def test_a_run_without_partitions_writes_no_rows_of_a_partitioned_asset(
    lakehouse: Lakehouse, namespace: str, options: dict[str, Any]
) -> None:
    @dg.asset(
        key=[namespace, "t"],
        partitions_def=HOURLY,
        metadata=table_metadata(require_checks=False, **options),
    )
    def t(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"ts": [at(3 if context.has_partition_key else 4)]})

    with project(lakehouse, t) as p:
        p.settle(p.run(partition="2026-08-08-03:00"))
        main = lakehouse.nessie.reference("main").hash
        p.run(ok=False)

        failed_with(p, PartitionMismatch)
        assert lakehouse.nessie.reference("main").hash == main
        assert [row["ts"] for row in p.rows(namespace, "t")] == [at(3)]


def test_partitions_are_replaced_only_by_assets_that_have_partitions(
    lakehouse: Lakehouse, namespace: str
) -> None:
    @dg.asset(key=[namespace, "t"], metadata=table_metadata(partition_by="kind", require_checks=False))
    def t() -> pl.DataFrame:
        return pl.DataFrame({"kind": ["a"]})

    with project(lakehouse, t) as p:
        p.run(ok=False)
        failed_with(p, PartitionMismatch)
