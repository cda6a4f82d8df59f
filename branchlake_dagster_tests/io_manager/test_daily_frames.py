"""Frames as they come every day, on real Iceberg tables without Spark: nulls, types, zones, ops, names."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import dagster as dg
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.tables import arrow_frames
from branchlake_dagster.tables.arrow_frames import to_arrow
from branchlake_dagster.tables.errors import (
    ColumnUnsupported,
    PartitionMismatch,
    SchemaMismatch,
    UpsertKeyInvalid,
)
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.raised import raising

lakehouse = memory.lakehouse

APPEND = table_metadata(write_mode="append", require_checks=False)
UPSERT = table_metadata(write_mode="upsert", keys=["k"], require_checks=False)
MAP = pa.map_(pa.string(), pa.int64())


def of(frames: list[Any], namespace: str, **options: Any) -> dg.AssetsDefinition:
    """The asset `t`, which returns the first of `frames` and takes it off."""

    @dg.asset(key=[namespace, "t"], **options)
    def t() -> Any:
        return frames.pop(0)

    return t


def types(p: Project, namespace: str) -> dict[str, str]:
    table = p.lake.catalog().load_table((namespace, "t"))
    return {field.name: str(field.field_type) for field in table.schema().fields}


def written(
    lakehouse: Lakehouse, namespace: str, frames: Sequence[Any], metadata: Any = APPEND
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The table's types and rows after the frames were published one after the other."""
    left = list(frames)
    with project(lakehouse, of(left, namespace, metadata=metadata)) as p:
        while left:
            p.settle(p.run())
        return types(p, namespace), p.rows(namespace, "t")


def refused(
    lakehouse: Lakehouse,
    namespace: str,
    frames: Sequence[Any],
    kind: type[BranchlakeError],
    *texts: str,
    metadata: Any = APPEND,
) -> None:
    """All frames but the last are published, and the last one is refused."""
    left = list(frames)
    with project(lakehouse, of(left, namespace, metadata=metadata)) as p:
        while len(left) > 1:
            p.settle(p.run())
        p.run(ok=False)
        p.failed_with(kind, f"{namespace}.t", *texts)


# -- no rows, no columns, no values --------------------------------------------------------------------


@pytest.mark.parametrize(
    "empty",
    [
        pd.DataFrame({"k": pd.Series([], dtype="int64"), "v": pd.Series([], dtype="object")}),
        pl.DataFrame(schema={"k": pl.Int64, "v": pl.String}),
        pa.table({"k": pa.array([], pa.int64()), "v": pa.array([], pa.string())}),
    ],
    ids=["pandas", "polars", "arrow"],
)
def test_an_upsert_of_no_rows_changes_none(lakehouse: Lakehouse, namespace: str, empty: Any) -> None:
    left = [pa.table({"k": [1], "v": ["a"]})]
    with project(lakehouse, of(left, namespace, metadata=APPEND)) as p:
        p.settle(p.run())
    with project(lakehouse, of([empty], namespace, metadata=UPSERT)) as p:
        p.settle(p.run())
        assert p.rows(namespace, "t") == [{"k": 1, "v": "a"}]
        (event,) = p.last.get_asset_materialization_events()
        assert event.materialization.metadata["branchlake/rows_on_branch"].value == 1


def test_an_upsert_of_no_rows_makes_the_table_and_still_needs_its_keys(
    lakehouse: Lakehouse, namespace: str
) -> None:
    empty = pl.DataFrame(schema={"k": pl.Int64})
    assert written(lakehouse, namespace, [empty], UPSERT) == ({"k": "long"}, [])
    refused(
        lakehouse,
        namespace,
        [pl.DataFrame(schema={"n": pl.Int64})],
        UpsertKeyInvalid,
        "lacks key column k",
        metadata=UPSERT,
    )


@pytest.mark.parametrize(
    ("total", "files", "rows"), [("0", 0, False), ("0", 1, True), ("3", 1, True), (None, 0, True)]
)
def test_that_a_table_has_no_rows_is_not_taken_from_a_summary_alone(
    total: str | None, files: int, rows: bool
) -> None:
    """Whoever writes a summary may count wrong, and rows would be added beside those with their keys."""
    told = SimpleNamespace(additional_properties={} if total is None else {"total-records": total})
    table: Any = SimpleNamespace(
        current_snapshot=lambda: SimpleNamespace(summary=told),
        scan=lambda **_: SimpleNamespace(
            plan_files=lambda: [SimpleNamespace(file=SimpleNamespace(record_count=0))] * files
        ),
    )
    assert bool(arrow_frames.count_candidate_rows(table)) is rows


def test_the_first_rows_of_an_upsert_need_no_spark_and_are_checked(
    lakehouse: Lakehouse, namespace: str
) -> None:
    empty, first = pl.DataFrame(schema={"k": pl.Int64}), pl.DataFrame({"k": [1, 2]})
    assert written(lakehouse, namespace, [first], UPSERT) == ({"k": "long"}, [{"k": 1}, {"k": 2}])
    assert written(lakehouse, f"{namespace}e", [empty, first], UPSERT)[1] == [{"k": 1}, {"k": 2}]
    for wrong in ({"k": [1, 1]}, {"k": [1, None]}):
        refused(
            lakehouse,
            f"{namespace}w",
            [pl.DataFrame(wrong)],
            UpsertKeyInvalid,
            metadata=UPSERT,
        )


@pytest.mark.parametrize(
    "nothing", [pl.DataFrame({"s": [None]}), pd.DataFrame({"s": [np.nan]}), pa.table({"s": [None]})]
)
def test_a_column_without_values_keeps_the_tables_type(
    lakehouse: Lakehouse, namespace: str, nothing: Any
) -> None:
    found, rows = written(lakehouse, namespace, [pl.DataFrame({"s": ["a"]}), nothing])
    assert found == {"s": "string"}
    assert [row["s"] for row in rows] == [None, "a"]


def test_a_column_without_values_joins_the_table_with_its_first_value(
    lakehouse: Lakehouse, namespace: str
) -> None:
    frames = [
        pd.DataFrame({"n": [1], "s": [None], "l": [[]]}).drop(columns="l"),
        pd.DataFrame({"n": [2], "s": [None]}),
        pd.DataFrame({"n": [3], "s": ["a"]}),
    ]
    found, rows = written(lakehouse, namespace, frames)
    assert found == {"n": "long", "s": "string"}
    assert sorted((row["n"], row["s"]) for row in rows) == [(1, None), (2, None), (3, "a")]


def test_a_table_needs_columns_and_types(lakehouse: Lakehouse, namespace: str) -> None:
    for frame, kind, text in (
        (pd.DataFrame(index=[1, 2]), SchemaMismatch, "The frame has no columns"),
        (pl.DataFrame({"a": [None], "b": [None]}), SchemaMismatch, "All columns (a, b) are null"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), SchemaMismatch, "several columns with the same name: a"),
        (pl.DataFrame({"a": [[]]}), ColumnUnsupported, "Column a is list"),
    ):
        refused(lakehouse, namespace, [frame], kind, text)
    null_key = pl.DataFrame({"k": [None], "v": [1]})
    refused(lakehouse, namespace, [null_key], SchemaMismatch, "Column k is null in all rows", metadata=UPSERT)
    with project(lakehouse) as p:
        assert not p.lake.catalog().table_exists((namespace, "t"))


# -- schema changes that lose nothing ------------------------------------------------------------------


def column(values: list[Any], kind: pa.DataType) -> pa.Table:
    return pa.table({"c": pa.array(values, kind)})


@pytest.mark.parametrize(
    ("first", "second", "type_", "values"),
    [
        (column([1], pa.int32()), column([2**40], pa.int64()), "long", [1, 2**40]),
        (column([2**40], pa.int64()), column([1], pa.int32()), "long", [2**40, 1]),
        (column([0.5], pa.float32()), column([0.1], pa.float64()), "double", [0.5, 0.1]),
        (column([0.1], pa.float64()), column([0.5], pa.float32()), "double", [0.1, 0.5]),
        (
            column([Decimal("1.50")], pa.decimal128(3, 2)),
            column([Decimal("1234.5")], pa.decimal128(5, 1)),
            "decimal(6, 2)",
            [Decimal("1.50"), Decimal("1234.50")],
        ),
        (
            column([{"a": 1, "b": "x"}], pa.struct({"a": pa.int32(), "b": pa.string()})),
            column(
                [{"n": 0.5, "b": "y", "a": 2}],
                pa.struct({"n": pa.float64(), "b": pa.string(), "a": pa.int64()}),
            ),
            None,
            [{"a": 1, "b": "x", "n": None}, {"a": 2, "b": "y", "n": 0.5}],
        ),
        (
            column([[{"a": 1}]], pa.list_(pa.struct({"a": pa.int32()}))),
            column([[{"b": 2, "a": 2**40}]], pa.list_(pa.struct({"b": pa.int32(), "a": pa.int64()}))),
            None,
            [[{"a": 1, "b": None}], [{"a": 2**40, "b": 2}]],
        ),
    ],
    ids=["int-long", "int-in-long", "float-double", "float-in-double", "decimal", "struct", "list"],
)
def test_changes_that_lose_nothing_are_made(
    lakehouse: Lakehouse, namespace: str, first: Any, second: Any, type_: str | None, values: list[Any]
) -> None:
    found, rows = written(lakehouse, namespace, [first, second])
    assert type_ is None or found == {"c": type_}
    assert [row["c"] for row in rows] == values[::-1]


def test_a_widened_column_is_still_filtered_in_old_files(lakehouse: Lakehouse, namespace: str) -> None:
    frames = [column([1, 5], pa.int32()), column([2**40], pa.int64())]
    written(lakehouse, namespace, frames)
    table = lakehouse.catalog().load_table((namespace, "t"))
    assert table.scan(row_filter="c < 3").to_arrow().to_pydict() == {"c": [1]}


def test_changes_that_lose_something_are_refused(lakehouse: Lakehouse, namespace: str) -> None:
    struct = pa.struct({"a": pa.int64(), "b": pa.int64()})
    for n, (first, second, text) in enumerate(
        [
            (
                column([1], pa.int64()),
                column([1.0], pa.float64()),
                "Column c is long in the table and double",
            ),
            (column(["a"], pa.string()), column([1], pa.int64()), "Column c is string in the table and long"),
            (
                column([Decimal("1.5")], pa.decimal128(2, 1)),
                column([Decimal("1.55")], pa.decimal128(3, 2)),
                "Column c is decimal(2, 1) in the table and decimal(3, 2)",
            ),
            (column([{"a": 1, "b": 2}], struct), pa.table({"c": [{"a": 1}]}), "The frame lacks field c.b"),
        ]
    ):
        refused(lakehouse, f"{namespace}{n}", [first, second], SchemaMismatch, text)


def test_widening_is_a_setting(lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHLAKE_WIDEN_COLUMNS", "false")
    frames = [column([1], pa.int32()), column([1], pa.int64())]
    refused(lakehouse, namespace, frames, SchemaMismatch, "int in the table and long", "widen_columns is off")


# -- types ---------------------------------------------------------------------------------------------


def test_types_that_have_no_place_are_refused_by_column(lakehouse: Lakehouse, namespace: str) -> None:
    for frame, *texts in (
        (pl.DataFrame({"n": [2**63]}, schema={"n": pl.UInt64}), "Column n", "decimal(20, 0)"),
        (pd.DataFrame({"t": pd.to_datetime([1], unit="ns")}), "Column t", "microseconds", "floor('us')"),
        (
            pd.DataFrame({"d": pd.to_timedelta([1], unit="s")}),
            "Column d is duration[ns]",
            "int64 microseconds",
        ),
        (pl.DataFrame({"d": [dt.timedelta(seconds=1)]}), "Column d is duration[us]", "int64 microseconds"),
        (pd.DataFrame({"ok": [1, 2], "x": [1, "a"]}), "Column x (object)", "one type"),
        (pd.DataFrame({"p": pd.period_range("2026-01", periods=1, freq="M")}), "Column p", "Cast it"),
        (pd.DataFrame({"c": [1j]}), "Column c (complex128)"),
        (pl.DataFrame({"o": [object()]}), "Column o holds Python objects"),
        (pl.DataFrame({"ok": [1], "i": [1]}, schema={"ok": pl.Int8, "i": pl.Int128}), "Column i"),
        (pl.DataFrame({"l": [[1]]}, schema={"l": pl.List(pl.Int128)}), "Column l"),
        (pa.table({"s": [{"d": dt.timedelta(seconds=1)}]}), "Column s.d is duration[us]"),
    ):
        refused(lakehouse, namespace, [frame], ColumnUnsupported, *texts)


NOT_UTF8 = pa.Array.from_buffers(
    pa.string(), 3, [None, pa.py_buffer(np.array([0, 1, 3, 4], np.int32)), pa.py_buffer(b"a\xff\xfez")]
)
NESTED_BAD_NAME = pa.ListArray.from_arrays(
    [0, 1], pa.StructArray.from_arrays([pa.array([1])], fields=[pa.field(b"\xff", pa.int64())])
)
YEAR_29350 = 10_000_000
"""In days since 1970."""


@pytest.mark.parametrize(
    ("frame", "kind", "reason", "subject"),
    [
        (
            pa.table({"c": pa.array([0, YEAR_29350], pa.date32())}),
            ColumnUnsupported,
            "year_out_of_range",
            "c",
        ),
        (
            pd.DataFrame({"c": np.array(["20000-12-31"], "datetime64[s]")}),
            ColumnUnsupported,
            "year_out_of_range",
            "c",
        ),
        (
            pa.table({"c": pa.array([[{"at": -YEAR_29350}]], pa.list_(pa.struct({"at": pa.date32()})))}),
            ColumnUnsupported,
            "year_out_of_range",
            "c",
        ),
        (pa.table({"ok": ["a", "b", "c"], "c": NOT_UTF8}), ColumnUnsupported, "invalid_values", "c"),
        (pd.DataFrame({"\ud800": [1]}), SchemaMismatch, "name_not_unicode", "\ud800"),
        (
            pd.DataFrame({"c": pd.Series(pd.arrays.ArrowExtensionArray(NOT_UTF8))}),
            ColumnUnsupported,
            "invalid_values",
            "c",
        ),
        (
            pa.table({"c": pa.array([[(YEAR_29350, 1)]], pa.map_(pa.date32(), pa.int32()))}),
            ColumnUnsupported,
            "year_out_of_range",
            "c",
        ),
        (
            pa.table({"c": pa.array([[(1, 2**60)]], pa.map_(pa.int32(), pa.timestamp("us")))}),
            ColumnUnsupported,
            "year_out_of_range",
            "c",
        ),
        (pa.table({b"\xff": [1]}), SchemaMismatch, "name_not_unicode", repr(b"\xff")),
        (
            pa.table({"c": NESTED_BAD_NAME}),
            SchemaMismatch,
            "name_not_unicode",
            repr(b"\xff"),
        ),
        (pl.DataFrame({"good": [1], "a\0b": [1]}), ColumnUnsupported, "null_in_name", "a\0b"),
        (pl.DataFrame({"good": [1], "c": [[{"a\0b": 1}]]}), ColumnUnsupported, "null_in_name", "c"),
    ],
)
def test_values_and_names_that_no_reader_can_read_are_refused(
    frame: Any, kind: type[BranchlakeError], reason: str, subject: str | None
) -> None:
    with raising(kind, reason=reason, subject=subject):
        to_arrow(frame, None, table_name="shop.t")


Wrap = Callable[[Any, pa.DataType], tuple[Any, pa.DataType]]


def nested(wrap: Wrap, depth: int) -> tuple[Any, pa.DataType]:
    """A value of the given depth, and its type."""
    value, kind = 1, pa.int64()
    for _ in range(depth):
        value, kind = wrap(value, kind)
    return value, kind


@pytest.mark.parametrize(
    ("wrap", "most"),
    [
        (lambda value, kind: ([value], pa.list_(kind)), 49),
        (lambda value, kind: ([("a", value)], pa.map_(pa.string(), kind)), 49),
        (lambda value, kind: ({"a": value}, pa.struct([("a", kind)])), 60),
    ],
    ids=["list", "map", "struct"],
)
def test_a_column_is_nested_as_deeply_as_it_can_be_read(
    lakehouse: Lakehouse, namespace: str, wrap: Wrap, most: int
) -> None:
    value, kind = nested(wrap, most)
    rows = pa.table({"k": [1], "deep": pa.array([value], kind)})
    assert len(written(lakehouse, namespace, [rows])[1]) == 1
    for depth in (most + 1, 300):
        too_deep = pa.schema([("deep", nested(wrap, depth)[1])]).empty_table()
        with raising(ColumnUnsupported, reason="nested_too_deeply", subject="deep"):
            to_arrow(too_deep, None, table_name="t")


def test_a_polars_column_of_many_lists_is_refused() -> None:
    kind: Any = pl.Int64
    for _ in range(300):
        kind = pl.List(kind)
    with raising(ColumnUnsupported, "deep"):
        to_arrow(pl.DataFrame(schema={"deep": kind}), None, table_name="t")


def test_the_hint_for_an_invalid_value_depends_on_its_type() -> None:
    day = pa.array([86_400_000_000], pa.time64("us"))
    time_of_day = pa.Array.from_buffers(pa.date64(), 1, [None, pa.py_buffer(np.array([1]))])
    number = pa.array([10**6]).cast(pa.decimal128(19)).cast(pa.decimal128(38))
    small_number = pa.Array.from_buffers(pa.decimal128(2), 1, number.buffers())
    hints = []
    for column in (NOT_UTF8, day, time_of_day, small_number):
        with raising(ColumnUnsupported, reason="invalid_values", subject="c") as caught:
            to_arrow(pa.table({"c": column}), None, table_name="shop.t")
        hints.append(caught.value.hint)
    assert len({*hints}) == len(hints)
    assert ["binary" in hint for hint in hints] == [True, False, False, False]


def test_maps_of_dates_and_times_are_stored() -> None:
    maps = pa.array(
        [[(dt.date.max, dt.datetime.min)], None, [], [(dt.date.min, None)]],
        pa.map_(pa.date32(), pa.timestamp("us")),
    )
    stored = to_arrow(pa.table({"c": maps}), None, table_name="shop.t")
    assert stored["c"].to_pylist() == maps.to_pylist()


def test_the_first_and_the_last_day_are_stored() -> None:
    days = [dt.date.min, None, dt.date.max]
    times = [dt.datetime.min, None, dt.datetime.max]
    frame = pl.DataFrame({"day": days, "at": times, "list": [days, None, []]})
    assert to_arrow(frame, None, table_name="shop.t").to_pydict() == frame.to_dict(as_series=False)


def test_types_that_only_look_foreign_are_stored(lakehouse: Lakehouse, namespace: str) -> None:
    frame = pl.DataFrame(
        {"u": [2**62], "t": [dt.time(1, 2)], "l": [[1, 2]], "e": ["a"]},
        schema={"u": pl.UInt64, "t": pl.Time, "l": pl.Array(pl.Int64, 2), "e": pl.Enum(["a"])},
    )
    found, rows = written(lakehouse, namespace, [frame])
    assert found == {"u": "long", "t": "time", "l": "list<long>", "e": "string"}
    assert rows == [{"u": 2**62, "t": dt.time(1, 2), "l": [1, 2], "e": "a"}]
    days = pd.DataFrame({"t": pd.to_datetime(["2026-01-01"]).as_unit("ns")})
    assert written(lakehouse, f"{namespace}b", [days])[0] == {"t": "timestamp"}


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame({"m": [{"b": 2}]}),
        pd.DataFrame({"m": [[("b", 2)]]}),
        pl.DataFrame({"m": [[{"key": "b", "value": 2}]]}),
    ],
    ids=["dicts", "pairs", "polars"],
)
def test_a_map_is_filled_from_what_frames_without_maps_have(
    lakehouse: Lakehouse, namespace: str, frame: Any
) -> None:
    found, rows = written(lakehouse, namespace, [pa.table({"m": pa.array([{"a": 1}], MAP)}), frame])
    assert found == {"m": "map<string, long>"}
    assert [row["m"] for row in rows] == [[("b", 2)], [("a", 1)]]


EAST = dt.timezone(dt.timedelta(hours=5))
NOON = dt.datetime(2026, 1, 1, 12)


@pytest.mark.parametrize(
    "values",
    [
        [NOON.date(), NOON],
        [NOON, NOON.replace(tzinfo=EAST)],
        [NOON.replace(tzinfo=EAST), NOON],
        [[NOON, NOON.replace(tzinfo=EAST)]],
        [{"at": NOON.date()}, {"at": NOON}],
        [dt.time(12, tzinfo=EAST)],
        [pd.Timestamp(1001)],
        [{"at": [pd.Timestamp(1001)]}],
        ["text", b"bytes"],
        [{"data": b"bytes"}, {"data": "text"}],
    ],
)
def test_objects_that_arrow_would_change_are_refused(values: list[Any]) -> None:
    frame = pd.DataFrame({"x": pd.Series(values, dtype=object)})
    with pytest.raises(ColumnUnsupported) as refusal:
        arrow_frames.to_arrow(frame, None, table_name="shop.t")
    assert (refusal.value.reason, refusal.value.subject) == ("value_changed", "x")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int64(), 1.5),
        (pa.int64(), Decimal("1.5")),
        (pa.list_(pa.int64()), [1.5]),
        (pa.float32(), 0.1),
        (pa.string(), b"bytes"),
        (pa.binary(), "text"),
        (pa.date32(), NOON),
        (pa.date32(), 1),
        (pa.timestamp("us"), NOON.replace(tzinfo=EAST)),
        (pa.timestamp("us", "UTC"), NOON),
        (pa.timestamp("us"), pd.Timestamp(1001)),
        (pa.timestamp("us"), 1),
    ],
)
def test_objects_that_a_map_would_change_are_refused(kind: pa.DataType, value: Any) -> None:
    frame = pd.DataFrame({"x": [{"a": value}]})
    stored = pa.schema({"x": pa.map_(pa.string(), kind)})
    with pytest.raises(ColumnUnsupported) as refusal:
        arrow_frames.to_arrow(frame, stored, table_name="shop.t")
    assert (refusal.value.reason, refusal.value.subject) == ("value_changed", "x")


@pytest.mark.parametrize(
    "values",
    [
        [NOON.date(), None, pd.NaT],
        [NOON, None, pd.NaT, pd.Timestamp(NOON)],
        [NOON.replace(tzinfo=EAST), NOON.replace(tzinfo=dt.UTC)],
        [[NOON], None, []],
        [{"at": NOON}, {"at": None}, None],
        [dt.time(12), None],
        [b"bytes", None],
        [1, 2.5],
    ],
)
def test_objects_of_one_type_are_stored_unchanged(values: list[Any]) -> None:
    frame = pd.DataFrame({"x": pd.Series(values, dtype=object)})
    rows = arrow_frames.to_arrow(frame, None, table_name="shop.t").column("x").to_pylist()
    assert rows == [None if value is pd.NaT else value for value in values]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([["a"], None, [], ["b", "c"]], pa.list_view(pa.string())),
        pa.array([["a"], None, [], ["b", "c"]], pa.large_list_view(pa.string())).slice(1),
        pa.ListViewArray.from_arrays(
            pa.array([2, 0], pa.int32()), pa.array([2, 1], pa.int32()), pa.array([*"abcd"])
        ),
        pa.array(
            [{"l": [["a"], ["b", "c"]]}, None, {"l": None}],
            pa.struct({"l": pa.list_(pa.list_view(pa.string()))}),
        ),
        pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array(["a", "b"])).slice(1),
        pa.array([], pa.list_view(pa.int8())),
    ],
    ids=["views", "large views", "views in another order", "nested views", "runs", "no rows"],
)
def test_lists_and_values_of_any_layout_are_stored(column: pa.Array) -> None:
    stored = arrow_frames.to_arrow(pa.table({"x": column}), None, table_name="shop.t").column("x")
    stored.validate(full=True)
    assert stored.to_pylist() == column.to_pylist()


@pytest.mark.parametrize(
    ("columns", "reason", "subject"),
    [
        ({"": [1]}, "empty_name", ""),
        ({"s": [{"": 1}]}, "empty_name", "s."),
        ({"a.b": [1], "a": [{"b": 2}]}, "ambiguous_name", "a.b"),
        ({"a.element.b": [1], "a": [[{"b": 2}]]}, "ambiguous_name", "a.element.b"),
    ],
)
def test_names_that_iceberg_cannot_distinguish_are_refused(
    columns: dict[str, Any], reason: str, subject: str
) -> None:
    with pytest.raises(SchemaMismatch) as refusal:
        arrow_frames.to_arrow(pa.table(columns), None, table_name="shop.t")
    assert (refusal.value.reason, refusal.value.subject) == (reason, subject)


def test_the_preview_shows_the_names_of_the_columns(lakehouse: Lakehouse, namespace: str) -> None:
    frame = pa.table({"my column": [1], "a.b": [2], "1st": [3], "ü": [4]})
    with project(lakehouse, of([frame], namespace, metadata=APPEND)) as p:
        p.run()
        (materialization,) = p.last.get_asset_materialization_events()
        preview = materialization.materialization.metadata["branchlake/preview"].value
    assert str(preview).splitlines()[0] == "| my column | a.b | 1st | ü |"


def test_large_whole_numbers_beside_nulls_are_loaded_exactly() -> None:
    large, small = [2**53 + 1, None], [1, None]
    frame = arrow_frames.from_arrow(pa.table({"large": large, "small": small}), pd.DataFrame)
    assert [str(kind) for kind in frame.dtypes] == ["Int64", "float64"]
    assert frame["large"].iloc[0] == 2**53 + 1
    assert arrow_frames.to_arrow(frame, None, table_name="shop.t").column("large").to_pylist() == large


# -- time stamps without zone --------------------------------------------------------------------------


def test_time_stamps_with_and_without_zone_are_not_mixed(lakehouse: Lakehouse, namespace: str) -> None:
    zoned = pl.DataFrame({"t": [dt.datetime(2026, 1, 1, tzinfo=dt.UTC)]})
    naive = pl.DataFrame({"t": [dt.datetime(2026, 1, 1)]})
    refused(lakehouse, namespace, [zoned, naive], SchemaMismatch, "timestamptz", "dt.tz_localize(zone)")
    refused(lakehouse, f"{namespace}b", [naive, zoned], SchemaMismatch, "stores UTC without a time zone")


def test_local_clocks_in_utc_partitions_get_the_rule_in_the_error(
    lakehouse: Lakehouse, namespace: str
) -> None:
    day = dg.DailyPartitionsDefinition(
        start_date="2026-08-08", end_date="2026-08-10", timezone="Europe/Berlin"
    )
    frame = pd.DataFrame({"ts": [pd.Timestamp("2026-08-08 23:30")]})
    asset = of([frame], namespace, partitions_def=day, metadata=table_metadata(partition_by="ts"))
    with project(lakehouse, asset) as p:
        p.run(partition="2026-08-08", ok=False)
        p.failed_with(
            PartitionMismatch,
            "2026-08-07T22:00:00+00:00 <= ts < 2026-08-08T22:00:00+00:00",
            "ts has no time zone, so it is read as UTC",
        )
        (failure,) = [e for e in p.last.all_events if e.is_step_failure]
        assert "GreaterThanOrEqual" not in str(failure.step_failure_data.error)


# -- ops -----------------------------------------------------------------------------------------------


def test_a_graph_asset_of_several_ops_keeps_its_way_of_writing(lakehouse: Lakehouse, namespace: str) -> None:
    @dg.op
    def rows() -> list[int]:
        return [1, 2]

    @dg.op
    def frame(rows: list[int]) -> pl.DataFrame:
        return pl.DataFrame({"n": rows})

    @dg.graph_asset(key=[namespace, "t"], metadata=APPEND)
    def t() -> Any:
        return frame(rows())

    @dg.asset(key=[namespace, "down"], ins={"t": dg.AssetIn([namespace, "t"])}, metadata=APPEND)
    def down(t: pl.DataFrame) -> pl.DataFrame:
        return t

    with project(lakehouse, t, down) as p:
        for _ in range(2):
            p.settle(p.run())
        assert sorted(row["n"] for row in p.rows(namespace, "t")) == [1, 1, 2, 2]
        assert len(p.rows(namespace, "down")) == 6


def test_an_op_job_beside_the_assets_makes_no_branch(lakehouse: Lakehouse) -> None:
    @dg.op
    def one() -> dict[str, int]:
        return {"x": 1}

    @dg.op
    def two(value: dict[str, int]) -> int:
        return value["x"] + 1

    @dg.job
    def beside() -> None:
        two(one())

    with project(lakehouse) as p:
        definitions = dg.Definitions.merge(p.definitions, dg.Definitions(jobs=[beside]))
        before = p.branches()
        result = definitions.resolve_job_def("beside").execute_in_process(instance=p.instance)
        assert result.output_for_node("two") == 2
        assert p.branches() == before


# -- partitions and names ------------------------------------------------------------------------------


def told_rows(p: Project) -> dict[str | None, Any]:
    """`branchlake/partition_rows_on_branch` of the last run's materialisations, by partition."""
    return {
        event.partition: event.materialization.metadata["branchlake/partition_rows_on_branch"].value
        for event in p.last.get_asset_materialization_events()
        if "branchlake/partition_rows_on_branch" in event.materialization.metadata
    }


BETA = pytest.mark.filterwarnings("ignore:Parameter `backfill_policy`")  # of Dagster's own; the subject here


@BETA
@pytest.mark.parametrize("mode", ["replace_partitions", "append"])
def test_a_backfill_of_one_run_reports_each_partitions_rows(
    lakehouse: Lakehouse, namespace: str, mode: Any
) -> None:
    days = dg.DailyPartitionsDefinition(start_date="2026-08-01", end_date="2026-08-04")
    both = dg.MultiPartitionsDefinition({"day": days, "kind": dg.StaticPartitionsDefinition(["a", "b"])})
    rows = [(1, "a"), (1, "a"), (2, "a"), (3, "b")]
    frame = pl.DataFrame(
        {"ts": [dt.datetime(2026, 8, day, 5, tzinfo=dt.UTC) for day, _ in rows], "kind": [k for _, k in rows]}
    )
    metadata = table_metadata(
        write_mode=mode, partition_by={"day": "ts", "kind": "kind"}, require_checks=False
    )
    asset = of(
        [frame, frame],
        namespace,
        partitions_def=both,
        metadata=metadata,
        backfill_policy=dg.BackfillPolicy.single_run(),
    )
    keys = both.get_partition_keys()
    tags = {"dagster/asset_partition_range_start": keys[0], "dagster/asset_partition_range_end": keys[-1]}
    expected = dict.fromkeys(keys, 0) | {"2026-08-01|a": 2, "2026-08-02|a": 1, "2026-08-03|b": 1}
    with project(lakehouse, asset) as p:
        p.settle(p.run(tags=tags))
        assert told_rows(p) == expected
        p.settle(p.run(tags=tags))
        times = 2 if mode == "append" else 1  # it is the partition's rows, not what the run added
        assert told_rows(p) == {key: rows * times for key, rows in expected.items()}


@BETA
def test_rows_that_lie_with_those_of_other_partitions_are_not_reported(
    lakehouse: Lakehouse, namespace: str
) -> None:
    quarters = dg.TimeWindowPartitionsDefinition(
        cron_schedule="*/15 * * * *", start="2026-08-08-00:00", end="2026-08-08-01:00", fmt="%Y-%m-%d-%H:%M"
    )
    frame = pl.DataFrame({"ts": [dt.datetime(2026, 8, 8, 0, m, tzinfo=dt.UTC) for m in (1, 16)]})
    metadata = table_metadata(partition_by="ts", require_checks=False)
    asset = of(
        [frame], namespace, partitions_def=quarters, metadata=metadata,
        backfill_policy=dg.BackfillPolicy.single_run(),
    )  # fmt: skip
    keys = quarters.get_partition_keys()
    tags = {"dagster/asset_partition_range_start": keys[0], "dagster/asset_partition_range_end": keys[-1]}
    with project(lakehouse, asset) as p:
        p.settle(p.run(tags=tags))
        assert told_rows(p) == {}


@pytest.mark.parametrize("key", ["k" * 300, "ü" * 300, "a#b?c&d+e%f g"], ids=["300", "300u", "signs"])
def test_partition_keys_are_long_and_of_any_sign(lakehouse: Lakehouse, namespace: str, key: str) -> None:
    frame, other = pl.DataFrame({"kind": [key]}), pl.DataFrame({"kind": ["b"]})
    metadata = table_metadata(partition_by="kind", require_checks=False)
    definition = dg.StaticPartitionsDefinition([key, "b"])
    asset = of([other, frame, frame], namespace, partitions_def=definition, metadata=metadata)
    with project(lakehouse, asset) as p:
        for partition in ("b", key, key):
            p.settle(p.run(partition=partition))
        assert sorted(row["kind"] for row in p.rows(namespace, "t")) == sorted(["b", key])
        assert told_rows(p) == {key: 1}


@pytest.mark.parametrize("name", ["a&b", "a+b", "a%41b"])
def test_table_names_with_signs(lakehouse: Lakehouse, namespace: str, name: str) -> None:
    @dg.multi_asset(outs={"signs": dg.AssetOut(key=[namespace, name], metadata=APPEND)})
    def t() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, t) as p:
        p.settle(p.run())
        assert p.rows(namespace, name) == [{"n": 1}]
