"""Upserts by PyIceberg on random tables, beside a dict of rows by their keys. No server is needed."""

from __future__ import annotations

import datetime as dt
import itertools
import mmap
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.memory import InMemoryCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform, Transform
from pyiceberg.types import LongType, StringType

from branchlake_dagster.tables import arrow_frames as frame_conversion
from branchlake_dagster.tables import upserts as candidate_files
from branchlake_dagster.tables import upserts as merge
from branchlake_dagster.tables.errors import ColumnUnsupported, PartitionMismatch, UpsertKeyInvalid
from branchlake_dagster.tables.schemas import build_iceberg_schema, stored_schema, table_arrow_schema
from branchlake_dagster.tables.selection import Selection, Values
from branchlake_dagster.tables.specification import TableSpec
from branchlake_dagster.tables.upsert_engine import SparkReason
from branchlake_dagster_tests.publication.rebase.deleting import delete_equal
from branchlake_dagster_tests.suite.raised import raising

NOON = dt.datetime(2026, 11, 1, 12, tzinfo=dt.UTC)
DAY = dt.date(2026, 11, 1)

KINDS: dict[str, tuple[pa.DataType, Callable[[int], Any]]] = {
    "int": (pa.int32(), lambda n: n - 20),
    "long": (pa.int64(), lambda n: n * 2**33),
    "text": (pa.string(), lambda n: "é" * (n % 3) + f"k{n}" + "z" * (n % 50)),
    "at": (pa.timestamp("us", tz="UTC"), lambda n: NOON + dt.timedelta(hours=n, microseconds=n)),
    "clock": (pa.timestamp("us"), lambda n: NOON.replace(tzinfo=None) - dt.timedelta(minutes=n)),
    "time": (pa.time64("us"), lambda n: dt.time(n % 24, n // 24, 1, n)),
    "date": (pa.date32(), lambda n: DAY - dt.timedelta(days=n)),
    "money": (pa.decimal128(20, 3), lambda n: Decimal(n - 30).scaleb(-3)),
    "bytes": (pa.binary(), lambda n: bytes([n, 255 - n])),
    "fixed": (pa.binary(4), lambda n: n.to_bytes(4, "big")),
    "uuid": (pa.uuid(), lambda n: uuid.UUID(int=n * 7919)),
    "flag": (pa.bool_(), lambda n: n % 2 == 0),
}
"""Types of keys, and their value of a number from 0 to 59."""

NESTED = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])
MAP = pa.map_(pa.string(), pa.int64())
CARRIED: dict[str, tuple[pa.DataType, Sequence[Any]]] = {
    "x": (pa.float64(), [None, -0.0, 1.5, float("inf")]),
    "s": (NESTED, [None, {"a": None, "b": None}, {"a": 1, "b": []}, {"a": 2, "b": ["q", None]}]),
    "m": (MAP, [None, [], [("k", None)], [("k", 1), ("l", 2)]]),
    "l": (pa.list_(pa.int64()), [None, [], [None], [1, 2]]),
}
"""Other columns, and the values that they have."""

LAYOUTS: list[list[tuple[str, Transform[Any, Any]]]] = [
    [],
    [],
    [("day", IdentityTransform())],
    [("day", IdentityTransform()), ("int", BucketTransform(4))],
    [("at", DayTransform())],
    [("text", BucketTransform(3))],
    [("clock", DayTransform()), ("flag", IdentityTransform())],
]


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    made = InMemoryCatalog("memory", warehouse=f"file://{tmp_path}")
    made.create_namespace("shop")
    return made


def spec_of(*keys: str) -> TableSpec:
    return TableSpec(identifier=("shop", "t"), write_mode="upsert", keys=keys)


def created(
    catalog: Catalog, schema: pa.Schema, layout: Sequence[tuple[str, Transform[Any, Any]]] = (), **how: str
) -> Table:
    columns = build_iceberg_schema(stored_schema(schema, table_name="t"), table_name="t")
    fields = [
        PartitionField(columns.find_field(name).field_id, 1000 + number, transform, f"part{number}")
        for number, (name, transform) in enumerate(layout)
    ]
    name = f"shop.t{uuid.uuid4().hex}"
    return catalog.create_table(name, columns, partition_spec=PartitionSpec(*fields), properties=how)


def upserted(table: Table, rows: pa.Table, *keys: str, selection: Selection | None = None) -> Table:
    """The table after an upsert by PyIceberg."""
    spec = spec_of(*keys)
    frame = frame_conversion.cast_columns(
        rows, table_arrow_schema(table.schema(), table_name="t"), table_name="t"
    )
    planned = merge.plan_upsert(frame, table, spec, selection)
    assert isinstance(planned, merge.UpsertPlan), planned
    return merge.write_upsert(planned, {"branchlake.write_mode": "upsert"})


def rows_of(table: Table) -> list[dict[str, Any]]:
    return [dict(row) for row in table.scan().to_arrow().to_pylist()]


def by_text(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted(repr(sorted(row.items())) for row in rows)


# -- against a model -----------------------------------------------------------------------------------


def random_rows(
    rng: random.Random, keys: Sequence[str], count: int, first: int, last: int
) -> list[dict[str, Any]]:
    """Rows with distinct keys made of numbers from `first` to `last`. Columns beside the key are random."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for _ in range(count):
        row: dict[str, Any] = {"day": rng.choice(["mon", "tue", "wed", None])}
        for name, (_, value) in KINDS.items():
            row[name] = value(rng.randint(first, last)) if name in keys or rng.random() < 0.9 else None
        row |= {name: rng.choice(values) for name, (_, values) in CARRIED.items()}
        if all(row[key] is not None for key in keys):
            found[tuple(row[key] for key in keys)] = row
    return list(found.values())


@pytest.mark.parametrize("seed", range(18))
def test_upserts_leave_what_a_dict_of_rows_holds(
    catalog: Catalog, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(candidate_files, "_MAX_LISTED_VALUES", rng.choice([0, 200]))
    names = ["day", *KINDS]
    keys = [names[1 + seed % len(KINDS)]] if seed < len(KINDS) else rng.sample(names, rng.randint(2, 3))
    schema = pa.schema(
        [("day", pa.string())]
        + [(name, kind) for name, (kind, _) in KINDS.items()]
        + [(name, kind) for name, (kind, _) in CARRIED.items()]
    )
    table = created(catalog, schema, rng.choice(LAYOUTS))
    model: dict[tuple[Any, ...], dict[str, Any]] = {}
    without_key: list[dict[str, Any]] = []
    for first in (0, 30):  # files with ranges of their own
        rows = random_rows(rng, keys, 12, first, first + 29)
        rows = [row for row in rows if tuple(row[key] for key in keys) not in model]
        model |= {tuple(row[key] for key in keys): row for row in rows}
        nulls = [{**row, keys[0]: None} for row in random_rows(rng, keys, 2, 0, 59)]
        without_key += nulls
        table.append(pa.Table.from_pylist([*rows, *nulls], schema))
    for _ in range(2):
        low = rng.randint(0, 59)
        rows = random_rows(rng, keys, rng.choice([1, 5, 20]), low, min(low + rng.choice([0, 10, 59]), 59))
        if rng.random() < 0.5 and "more" not in schema.names:
            with table.update_schema() as change:
                change.add_column("more", LongType())
            schema = schema.append(pa.field("more", pa.int64()))
            for row in (*model.values(), *without_key):
                row["more"] = None
        for row in rows:
            row |= {"more": rng.randint(0, 9)} if "more" in schema.names else {}
        if not rows:
            continue
        table = upserted(table, pa.Table.from_pylist(rows, schema), *keys)
        model |= {tuple(row[key] for key in keys): row for row in rows}
        expected = pa.Table.from_pylist([*model.values(), *without_key], schema).to_pylist()
        assert by_text(rows_of(table)) == by_text(expected)
        summary = table.current_snapshot().summary
        assert summary is not None
        assert summary["total-records"] == str(len(expected))
        assert summary["branchlake.write_mode"] == "upsert"


# -- which files ---------------------------------------------------------------------------------------

PLAIN = pa.schema([("day", pa.string()), ("id", pa.int64()), ("n", pa.int64())])
BY_DAY = [("day", IdentityTransform())]


def plain(*rows: tuple[str | None, int | None, int]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(PLAIN.names, row, strict=True)) for row in rows], PLAIN)


def paths(table: Table) -> set[str]:
    return {task.file.file_path for task in table.scan().plan_files()}


def tuples(table: Table) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in rows_of(table))


def test_only_files_that_hold_one_of_the_keys_are_written_again(catalog: Catalog) -> None:
    table = created(catalog, PLAIN)
    for first in (0, 100, 200):
        table.append(plain(*[("mon", first + number, 0) for number in range(0, 50, 2)]))
    before = paths(table)
    table = upserted(table, plain(("mon", 102, 1), ("mon", 203, 1)), "id")  # 203 is within bounds, not there
    assert len(before & paths(table)) == 2
    assert len(paths(table)) == 3
    assert table.current_snapshot().summary.operation is Operation.OVERWRITE
    table = upserted(table, plain(("mon", 999, 1)), "id")
    assert table.current_snapshot().summary.operation is Operation.APPEND
    assert len(paths(table)) == 4


def test_more_keys_than_a_predicate_lists_are_compared_with_the_bounds_of_files(catalog: Catalog) -> None:
    table = created(catalog, PLAIN)
    for first in (0, 1000, 2000):
        table.append(plain(("mon", first, 0), ("mon", first + 99, 0)))
    keys = [*range(100), *range(2000, 2200)]
    frame = plain(*[("mon", key, 1) for key in keys])
    assert len(keys) > candidate_files._MAX_LISTED_VALUES
    assert len(candidate_files.find_candidate_files(table, frame.select(["id"]))) == 2
    assert len(rows_of(upserted(table, frame, "id"))) == 302


def test_a_row_moves_to_the_partition_that_it_has_in_the_frame(catalog: Catalog) -> None:
    table = created(catalog, PLAIN, BY_DAY)
    table.append(plain(("mon", 1, 0), ("mon", 2, 0), ("tue", 3, 0)))
    table = upserted(table, plain(("wed", 1, 1)), "id")
    assert tuples(table) == [("mon", 2, 0), ("tue", 3, 0), ("wed", 1, 1)]


def test_rows_of_other_partitions_are_matched_but_not_inserted(catalog: Catalog) -> None:
    table = created(catalog, PLAIN, BY_DAY)
    table.append(plain(("mon", 1, 0), ("tue", 2, 0)))
    tuesday = Selection(((Values("day", ("tue",)),),))
    with pytest.raises(PartitionMismatch):
        upserted(table, plain(("mon", 1, 1)), "id", selection=tuesday)
    table = upserted(table, plain(("tue", 1, 1)), "id", selection=tuesday)
    assert tuples(table) == [("tue", 1, 1), ("tue", 2, 0)]


def test_keys_that_are_null_or_repeated_are_refused(catalog: Catalog) -> None:
    table = created(catalog, PLAIN)
    table.append(plain(("mon", 1, 0), ("mon", None, 0)))
    with raising(UpsertKeyInvalid, reason="null_key", subject="id"):
        upserted(table, plain(("mon", None, 1)), "id")
    with raising(UpsertKeyInvalid, reason="duplicate_key"):
        upserted(table, plain(("mon", 2, 1), ("tue", 2, 2)), "id")
    assert len(table.snapshots()) == 1


STRUCT, LIST = pa.struct([("a", pa.int64())]), pa.list_(pa.float64())


@pytest.mark.parametrize(
    ("kind", "keys", "unique"),
    [
        (STRUCT, [{"a": 1}, {"a": 2}], True),
        (STRUCT, [{"a": 1}, {"a": 1}], False),
        (STRUCT, [{"a": 1}, {"a": None}], True),
        (STRUCT, [{"a": 1}, None], False),
        (LIST, [[1.0], [1.0, None]], True),
        (LIST, [[1.0, -0.0], [1.0, 0.0]], False),
        (pa.float64(), [0.5, 1.5], True),
        (pa.float64(), [0.0, -0.0], False),
        (pa.float32(), [float("nan"), float("nan")], False),
        (pa.uuid(), [uuid.UUID(int=1).bytes, uuid.UUID(int=2).bytes], True),
        (pa.int64(), [], True),
    ],
    ids=repr,
)
def test_keys_of_any_type_are_equal_as_in_spark(kind: pa.DataType, keys: list[Any], *, unique: bool) -> None:
    frame = pa.table({"id": pa.array(keys, kind), "kind": pa.array(["x"] * len(keys), pa.string())})
    spec = TableSpec(("shop", "t"), "upsert", ("id", "kind"))
    if unique:
        frame_conversion.require_unique_keys(frame, spec)
    else:
        with pytest.raises(UpsertKeyInvalid):
            frame_conversion.require_unique_keys(frame, spec)


@pytest.mark.parametrize("kind", [pa.large_string(), pa.large_binary()], ids=str)
def test_text_of_more_than_two_gibibytes_is_stored_in_several_chunks(kind: pa.DataType) -> None:
    size, count = 2**31 + 5, 7
    zeros = pa.py_buffer(mmap.mmap(-1, size))  # pages that nobody touches take no memory
    ends = [size * number // count for number in range(count)] + [size]
    offsets = pa.py_buffer(np.array(ends, np.int64))
    some = pa.array([True, False] + [True] * (count - 2)).buffers()[1]
    values = pa.Array.from_buffers(kind, count, [some, offsets, zeros])
    frame = pa.table({"s": pa.chunked_array([values, values[1:3], values[:0], values[5:]])})
    stored = frame_conversion.to_arrow(frame, None, table_name="shop.t")["s"]
    assert stored.type in (pa.string(), pa.binary())
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    lengths[1] = None
    assert pc.binary_length(stored).to_pylist() == [*lengths, *lengths[1:3], *lengths[5:]]
    one = pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(np.array([0, size], np.int64)), zeros])
    with pytest.raises(ColumnUnsupported):
        frame_conversion.to_arrow(pa.table({"s": one}), None, table_name="shop.t")


def test_the_text_of_each_row_is_kept_where_a_column_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_conversion, "_MAX_CHUNK_BYTES", 7)
    rows = ["abc", None, "", "defg", "éh", "1234567", None, "x", "yz"]
    column = pa.chunked_array([pa.array(rows, pa.large_string()), pa.array(rows, pa.large_string())[3:8]])
    stored = frame_conversion.to_arrow(pa.table({"s": column}), None, table_name="shop.t")["s"]
    assert stored.to_pylist() == [*rows, *rows[3:8]]
    stored.validate(full=True)
    assert all(sum(len(text.encode()) for text in chunk.to_pylist() if text) <= 7 for chunk in stored.chunks)


# -- the commit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [1, 7], ids=["into a file", "only new rows"])
def test_a_table_that_changed_meanwhile_is_not_written(catalog: Catalog, key: int) -> None:
    """PyIceberg would repeat an append without a look at what came: two rows with one key."""
    table = created(catalog, PLAIN)
    table.append(plain(("mon", 1, 0)))
    planned = merge.plan_upsert(plain(("mon", key, 1)), table, spec_of("id"), None)
    assert isinstance(planned, merge.UpsertPlan)
    catalog.load_table(table.name()).append(plain(("mon", 7, 0)))
    with pytest.raises(CommitFailedException):
        merge.write_upsert(planned, {})
    assert tuples(catalog.load_table(table.name())) == [("mon", 1, 0), ("mon", 7, 0)]


@pytest.mark.parametrize(("merging", "least", "most"), [("true", 1, 4), ("false", 8, 20)])
def test_manifests_are_merged_as_by_merge(catalog: Catalog, merging: str, least: int, most: int) -> None:
    settings = {"commit.manifest.min-count-to-merge": "4", "commit.manifest-merge.enabled": merging}
    table = created(catalog, PLAIN, **settings)
    table.append(plain(("mon", 0, 0)))
    for number in range(1, 9):
        table = upserted(table, plain(("mon", number, number)), "id")
        table = upserted(table, plain(("mon", number - 1, number)), "id")
    snapshot = table.current_snapshot()
    assert snapshot is not None
    manifests = len(snapshot.manifests(table.io))
    assert least <= manifests <= most
    assert tuples(table) == [("mon", number, min(number + 1, 8)) for number in range(9)]


# -- what is left to Spark -----------------------------------------------------------------------------


def test_several_rows_of_the_table_with_one_key_are_left_to_spark(catalog: Catalog) -> None:
    """MERGE updates each of them; the rows of the frame would replace all by one."""
    table = created(catalog, PLAIN)
    table.append(plain(("mon", 1, 0), ("mon", 2, 0)))
    table.append(plain(("tue", 1, 0)))
    assert merge.plan_upsert(plain(("mon", 1, 1)), table, spec_of("id"), None) is SparkReason.SHARED_KEYS
    assert isinstance(merge.plan_upsert(plain(("mon", 2, 1)), table, spec_of("id"), None), merge.UpsertPlan)


def test_the_facts_of_a_table_are_read_from_its_metadata(catalog: Catalog) -> None:
    floats = pa.schema([("id", pa.float64())])
    table = created(catalog, floats)
    assert merge.plan_upsert(pa.table({"id": [1.0]}), table, spec_of("id"), None) is SparkReason.KEY_TYPE
    table = created(catalog, PLAIN, **{"write.merge.mode": "merge-on-read"})
    assert merge.plan_upsert(plain(("mon", 1, 1)), table, spec_of("id"), None) is SparkReason.MERGE_ON_READ
    table = created(catalog, PLAIN, **{"format-version": "1"})
    assert merge.plan_upsert(plain(("mon", 1, 1)), table, spec_of("id"), None) is SparkReason.FORMAT_VERSION
    table = created(catalog, PLAIN)
    with table.update_spec() as change:
        change.add_identity("day")
    assert merge.plan_upsert(plain(("mon", 1, 1)), table, spec_of("id"), None) is SparkReason.PARTITION_SPECS
    table = created(catalog, PLAIN)
    with table.update_sort_order() as order:
        order.asc("id", IdentityTransform())
    assert merge.plan_upsert(plain(("mon", 1, 1)), table, spec_of("id"), None) is SparkReason.SORT_ORDER
    table = created(catalog, PLAIN)
    table.append(plain(("mon", 1, 1)))
    with table.update_schema(allow_incompatible_changes=True) as columns:
        columns.set_identifier_fields()
        columns.update_column("n", required=True)
    assert merge.plan_upsert(plain(("mon", 1, 1)), table, spec_of("id"), None) is SparkReason.REQUIRED_COLUMNS


def test_large_candidates_are_left_to_spark(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    table = created(catalog, PLAIN)
    table.append(plain(("mon", 1, 0), ("mon", 3, 0)))
    monkeypatch.setattr("branchlake_dagster.tables.upsert_engine.MAX_CANDIDATE_VALUES", 5)
    assert merge.plan_upsert(plain(("mon", 2, 1)), table, spec_of("id"), None) is SparkReason.CANDIDATE_VALUES
    assert isinstance(merge.plan_upsert(plain(("mon", 4, 1)), table, spec_of("id"), None), merge.UpsertPlan)


def test_files_that_pyiceberg_cannot_read_are_left_to_spark(catalog: Catalog) -> None:
    """Files of a table that was migrated have no field ids, and PyIceberg needs a name mapping for them."""
    table = created(catalog, PLAIN)
    table.append(plain(("mon", 1, 0)))
    (task,) = table.scan().plan_files()
    path = Path(task.file.file_path.removeprefix("file://"))
    without_ids = pa.table(pq.read_table(path).to_pydict(), schema=PLAIN)
    pq.write_table(without_ids, path)
    assert merge.plan_upsert(plain(("mon", 1, 1)), table, spec_of("id"), None) is SparkReason.UNREADABLE
    path.unlink()
    with pytest.raises(FileNotFoundError):
        merge.plan_upsert(plain(("mon", 1, 1)), table, spec_of("id"), None)


def test_rows_of_a_table_with_delete_files_are_left_to_spark(catalog: Catalog) -> None:
    table = created(catalog, PLAIN)
    table.append(plain(("mon", 1, 0)))
    delete_equal(table, "id", 1)
    assert merge.plan_upsert(plain(("mon", 2, 1)), table, spec_of("id"), None) is SparkReason.DELETE_FILES


def test_rows_that_are_written_again_get_new_fields_and_wider_types(catalog: Catalog) -> None:
    schema = pa.schema([("id", pa.int32()), ("place", pa.struct([("lat", pa.float32())]))])
    table = created(catalog, schema)
    table.append(pa.Table.from_pylist([{"id": 1, "place": {"lat": 0.5}}, {"id": 2, "place": None}], schema))
    with table.update_schema() as change:
        change.update_column("id", LongType())
        change.add_column(("place", "name"), StringType())
    wider = pa.schema(
        [("id", pa.int64()), ("place", pa.struct([("lat", pa.float32()), ("name", pa.string())]))]
    )
    table = upserted(table, pa.Table.from_pylist([{"id": 2**40, "place": None}], wider), "id")
    table = upserted(
        table, pa.Table.from_pylist([{"id": 2, "place": {"lat": 1.0, "name": "x"}}], wider), "id"
    )
    assert sorted(rows_of(table), key=lambda row: row["id"]) == [
        {"id": 1, "place": {"lat": 0.5, "name": None}},
        {"id": 2, "place": {"lat": 1.0, "name": "x"}},
        {"id": 2**40, "place": None},
    ]
