"""Which column metrics are relied upon, in scans, deletes and overwrites through PyIceberg, and which are written."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg import types as ice
from pyiceberg.catalog.memory import InMemoryCatalog
from pyiceberg.conversions import to_bytes
from pyiceberg.expressions import BooleanExpression, EqualTo, GreaterThanOrEqual, LessThan, NotEqualTo
from pyiceberg.io import pyarrow as arrow_files
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record

from branchlake_dagster.internals.column_metrics import (
    DATA_PATH,
    ReliableInclusiveEvaluator,
    ReliableStrictEvaluator,
    data_paths,
    reliable_metrics,
)
from branchlake_dagster_tests.internals.plain_pyiceberg import plain_pyiceberg
from branchlake_dagster_tests.suite.raised import raising

LONG_TEXTS = ["bcd", "bcd", "a" * 5000, "z" * 6000]
"""With two rows in a row group, Arrow writes no bounds for the second: a value has over 4 kB."""
TWO_ROWS_A_GROUP = {"write.parquet.row-group-limit": "2"}


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[InMemoryCatalog]:
    found = InMemoryCatalog("memory", warehouse=tmp_path.as_uri())
    found.create_namespace("db")
    yield found
    found.close()


@pytest.fixture
def plain_writer() -> Iterator[None]:
    with plain_pyiceberg():
        yield


@pytest.fixture(params=["plain", "own"])
def writer(request: pytest.FixtureRequest) -> str:
    if request.param == "plain":
        request.getfixturevalue("plain_writer")
    return str(request.param)


def table_of(
    catalog: InMemoryCatalog, columns: Mapping[str, Any], properties: Mapping[str, str] = TWO_ROWS_A_GROUP
) -> Table:
    rows = pa.table(dict(columns))
    table = catalog.create_table("db.t", rows.schema, properties=dict(properties))
    table.append(rows)
    return table


def planned(table: Table, condition: str | BooleanExpression | None = None) -> list[DataFile]:
    scan = table.scan() if condition is None else table.scan(condition)
    return [task.file for task in scan.plan_files()]


def rows_of(table: Table, column: str) -> list[Any]:
    return sorted(table.scan().to_arrow().column(column).to_pylist(), key=str)


# -- scans and deletes through PyIceberg -------------------------------------------------------------------


@pytest.mark.usefixtures("writer")
def test_a_scan_finds_rows_of_row_groups_without_bounds(catalog: InMemoryCatalog) -> None:
    table = table_of(catalog, {"t": LONG_TEXTS})
    for condition, rows in (("t >= 'y'", 1), ("t < 'b'", 1), ("t = 'bcd'", 2), ("t > 'bcd'", 1)):
        assert table.scan(condition).to_arrow().num_rows == rows


@pytest.mark.usefixtures("writer")
@pytest.mark.parametrize("kind", [pa.binary(), pa.binary(5000)], ids=str)
def test_a_scan_opens_files_with_long_values_of_bytes(catalog: InMemoryCatalog, kind: pa.DataType) -> None:
    texts = ["b" * 5000, "b" * 5000, "a" * 5000, "z" * 5000] if kind != pa.binary() else LONG_TEXTS
    table = table_of(catalog, {"b": pa.array([text.encode() for text in texts], kind)})
    (file,) = planned(table)
    field = table.schema().find_field("b")
    assert reliable_metrics(file, [field]).lower_bounds == {}


@pytest.mark.usefixtures("writer")
def test_a_delete_keeps_rows_of_row_groups_without_bounds(catalog: InMemoryCatalog) -> None:
    table = table_of(catalog, {"t": LONG_TEXTS})
    table.delete("t >= 'bcd' and t < 'c'")
    assert rows_of(table, "t") == LONG_TEXTS[2:]


def test_an_overwrite_keeps_rows_of_row_groups_without_bounds(catalog: InMemoryCatalog, writer: str) -> None:
    table = table_of(catalog, {"t": LONG_TEXTS})
    table.overwrite(pa.table({"t": ["new"]}), overwrite_filter=EqualTo("t", "bcd"))
    assert rows_of(table, "t") == ["a" * 5000, "new", "z" * 6000]


@pytest.mark.parametrize(
    ("column", "condition", "kept"),
    [
        (pa.array([1.0, float("nan")]), LessThan("x", 5.0), 1),
        (pa.array([7.0, float("nan")]), GreaterThanOrEqual("x", 7.0), 1),
        (pa.array([7, None]), NotEqualTo("x", 5), 1),
        (pa.array([7, None]), GreaterThanOrEqual("x", 7), 1),
        (pa.array([7, 8]), NotEqualTo("x", 5), 0),
    ],
)
def test_a_delete_keeps_rows_that_are_null_or_nan(
    catalog: InMemoryCatalog, column: pa.Array, condition: BooleanExpression, kept: int
) -> None:
    table = table_of(catalog, {"x": column}, {})
    table.delete(condition)
    assert table.scan().to_arrow().num_rows == kept


def test_a_delete_of_whole_files_opens_none(
    catalog: InMemoryCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(catalog, {"t": ["a", "b"]}, {})
    monkeypatch.setattr(arrow_files.ArrowScan, "to_table", None)
    table.delete("t >= 'a' and t < 'c'")
    assert planned(table) == []


def test_files_of_this_package_are_skipped_by_their_text_bounds(catalog: InMemoryCatalog) -> None:
    table = table_of(catalog, {"t": ["a", "b", "c", "d"]})
    assert planned(table, "t > 'd'") == []
    assert planned(table, "t = 'b'") == planned(table)


@pytest.mark.usefixtures("plain_writer")
def test_files_of_plain_pyiceberg_are_skipped_if_they_have_one_row_group(catalog: InMemoryCatalog) -> None:
    """The cost of reading them: text bounds of larger files are not used, those of numbers are."""
    table = table_of(catalog, {"t": ["a", "b", "c", "d"], "n": [1, 2, 3, 4]}, {})
    assert planned(table, "t > 'd'") == []
    with table.transaction() as change:
        change.set_properties(TWO_ROWS_A_GROUP)
    table.overwrite(table.scan().to_arrow())
    assert len(planned(table, "t > 'd'")) == 1
    assert planned(table, "n > 4") == []


def test_no_module_of_pyiceberg_has_another_evaluator() -> None:
    evaluators = {
        "_InclusiveMetricsEvaluator": ReliableInclusiveEvaluator,
        "_StrictMetricsEvaluator": ReliableStrictEvaluator,
    }
    others = [
        (module.__name__, name)
        for module in [one for key, one in sys.modules.items() if key.startswith("pyiceberg")]
        for name, evaluator in evaluators.items()
        if getattr(module, name, evaluator) is not evaluator
    ]
    assert others == []


# -- what is written -----------------------------------------------------------------------------------------


def test_bounds_that_leave_a_row_group_out_are_not_written(catalog: InMemoryCatalog) -> None:
    columns = {
        "t": LONG_TEXTS,
        "b": [text.encode() for text in LONG_TEXTS],
        "short": ["d", None, "a", "c"],
        "half": ["d", "a", None, None],
        "n": [1, 2, 3, 4],
    }
    (file,) = planned(table_of(catalog, columns))
    assert len(file.split_offsets or ()) == 2
    assert {number: bytes(bound) for number, bound in file.lower_bounds.items()} == {
        3: b"a",
        4: b"a",
        5: struct.pack("<q", 1),
    }
    assert file.upper_bounds.keys() == {3, 4, 5}
    assert dict(file.null_value_counts.items()) == {1: 0, 2: 0, 3: 1, 4: 2, 5: 0}


def test_the_sort_order_id_shows_which_files_have_whole_bounds(catalog: InMemoryCatalog, writer: str) -> None:
    """A PyIceberg that writes one by itself must leave partial bounds out as well, or the rule has to go."""
    (file,) = planned(table_of(catalog, {"t": ["a"]}))
    assert file.sort_order_id == (0 if writer == "own" else None)


@pytest.mark.parametrize("partitioned", [False, True])
def test_files_that_are_added_get_no_partial_bounds(
    catalog: InMemoryCatalog, tmp_path: Path, partitioned: bool
) -> None:
    path = tmp_path / "added.parquet"
    pq.write_table(pa.table({"t": LONG_TEXTS}), path, row_group_size=2)
    by = PartitionField(source_id=1, field_id=1000, transform=IdentityTransform(), name="t")
    table = catalog.create_table(
        "db.t",
        Schema(ice.NestedField(1, "t", ice.StringType())),
        partition_spec=PartitionSpec(by) if partitioned else PartitionSpec(),
    )
    if partitioned:  # the bounds of the first row group alone name one partition
        with raising(ValueError, "column t"):
            table.add_files([path.as_uri()])
        return
    table.add_files([path.as_uri()])
    (file,) = planned(table)
    assert not file.lower_bounds
    assert not file.upper_bounds


@pytest.mark.parametrize("last", ["\ud7ff", "\U0010ffff", "\uffff"])
def test_a_text_whose_upper_bound_has_no_next_character_is_written(
    catalog: InMemoryCatalog, last: str
) -> None:
    text = "x" * 15 + last + "more"
    table = table_of(catalog, {"t": [text]})
    assert table.scan(EqualTo("t", text)).to_arrow().num_rows == 1


# -- what is relied upon ---------------------------------------------------------------------------------------

COLUMN = 1


def entry(**known: Any) -> DataFile:
    """Four rows; a column without nulls."""
    values: dict[str, Any] = {
        "content": DataFileContent.DATA,
        "file_path": "file:///f.parquet",
        "file_format": FileFormat.PARQUET,
        "partition": Record(),
        "record_count": 4,
        "file_size_in_bytes": 1,
        "value_counts": {COLUMN: 4},
        "null_value_counts": {COLUMN: 0},
        "lower_bounds": {COLUMN: b"a"},
        "upper_bounds": {COLUMN: b"b"},
    }
    return DataFile.from_args(**{**values, **known})


def column(kind: ice.IcebergType) -> ice.NestedField:
    return ice.NestedField(COLUMN, "c", kind, required=False)


@pytest.mark.parametrize(
    ("known", "relied"),
    [
        ({"split_offsets": [4]}, True),
        ({"split_offsets": [4, 900]}, False),
        ({"split_offsets": None}, False),
        ({"split_offsets": [4, 900], "sort_order_id": 0}, True),
        ({"split_offsets": None, "sort_order_id": 3}, True),
    ],
)
def test_text_bounds_need_one_row_group_or_a_writer_that_covers_all(
    known: dict[str, Any], relied: bool
) -> None:
    for kind in (ice.StringType(), ice.BinaryType(), ice.FixedType(1)):
        metrics = reliable_metrics(entry(**known), [column(kind)])
        assert (metrics.lower_bounds, metrics.upper_bounds) == (
            ({COLUMN: b"a"}, {COLUMN: b"b"}) if relied else ({}, {})
        )
        asked = reliable_metrics(entry(**known), [column(kind)], lambda *_: True)
        assert asked.lower_bounds == {COLUMN: b"a"}


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        (ice.LongType(), b""),
        (ice.IntegerType(), struct.pack("<q", 1)),
        (ice.TimestamptzType(), struct.pack("<i", 20000)),  # it was a date
        (ice.DoubleType(), struct.pack("<d", float("nan"))),
        (ice.FloatType(), struct.pack("<f", float("nan"))),
        (ice.StringType(), b"\xff"),
        (ice.UUIDType(), b"short"),
        (ice.UnknownType(), b"a"),
    ],
)
def test_bounds_that_cannot_be_read_are_left_out(kind: ice.PrimitiveType, stored: bytes) -> None:
    file = entry(lower_bounds={COLUMN: stored}, upper_bounds={COLUMN: stored}, sort_order_id=0)
    metrics = reliable_metrics(file, [column(kind)])
    assert (metrics.lower_bounds, metrics.upper_bounds) == ({}, {})


@pytest.mark.parametrize("values", [None, {}, {COLUMN: 3}])
def test_counts_that_are_not_of_the_rows_are_left_out(values: dict[int, int] | None) -> None:
    metrics = reliable_metrics(entry(value_counts=values), [column(ice.LongType())])
    assert (metrics.value_counts, metrics.null_value_counts) == ({}, {})


LOW, HIGH = to_bytes(ice.DoubleType(), 1.0), to_bytes(ice.DoubleType(), 2.0)


@pytest.mark.parametrize(
    ("nulls", "nan", "proved"),
    [
        ({COLUMN: 0}, {COLUMN: 0}, True),
        ({COLUMN: 0}, {COLUMN: 1}, False),
        ({COLUMN: 0}, {}, False),
        ({COLUMN: 0}, None, False),
        ({COLUMN: 1}, {COLUMN: 0}, False),
        ({}, {COLUMN: 0}, False),
        (None, {COLUMN: 0}, False),
    ],
)
def test_no_file_is_dropped_whole_that_may_hold_nulls_or_nan(
    nulls: dict[int, int] | None, nan: dict[int, int] | None, proved: bool
) -> None:
    file = entry(
        null_value_counts=nulls,
        nan_value_counts=nan,
        lower_bounds={COLUMN: LOW},
        upper_bounds={COLUMN: HIGH},
    )
    schema = Schema(column(ice.DoubleType()))
    for condition in (LessThan("c", 5.0), GreaterThanOrEqual("c", 1.0), NotEqualTo("c", 9.0)):
        assert ReliableStrictEvaluator(schema, condition).eval(file) is proved
    # Rows that are null or NaN match no comparison, so files are skipped by the others' bounds.
    assert not ReliableInclusiveEvaluator(schema, LessThan("c", 1.0)).eval(file)


# -- delete files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "named"),
    [
        (b"s3://b/f1", b"s3://b/f1", {"s3://b/f1"}),
        (b"s3://b/f1", b"s3://b/f2", {"s3://b/f1", "s3://b/f2"}),
        (b"s3://b/f", b"s3://b/g", {"s3://b/f1", "s3://b/f2", "s3://b/fé"}),  # cut, the end counted up
        (b"s3://b/f", b"s3://b/f", {"s3://b/f1", "s3://b/f2", "s3://b/fé"}),  # cut only
        (b"s3://b/f\xc3", b"s3://b/f\xc3", {"s3://b/fé"}),  # cut within a character
        (None, b"s3://b/f2", {"s3://b/f1", "s3://b/f2", "s3://b/fé", "s3://a"}),
    ],
)
def test_the_paths_of_delete_files_may_be_cut(low: bytes | None, high: bytes, named: set[str]) -> None:
    file = entry(
        content=DataFileContent.POSITION_DELETES,
        lower_bounds={} if low is None else {DATA_PATH: low},
        upper_bounds={DATA_PATH: high},
    )
    paths = data_paths(file)
    candidates = {"s3://b/f1", "s3://b/f2", "s3://b/fé", "s3://a"}
    assert {one for one in candidates if paths is None or paths.may_name(one)} == named
