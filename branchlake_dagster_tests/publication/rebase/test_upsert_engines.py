"""What an upsert leaves behind, and what a rebase sees of it, is the same by Spark and by PyIceberg."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform, Transform

from branchlake_dagster.incremental.spark_inputs import from_arrow
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.snapshot_files import SnapshotFiles
from branchlake_dagster.publication.table_change import SnapshotChange, load_table_change
from branchlake_dagster.tables import arrow_frames as frame_conversion
from branchlake_dagster.tables import spark_frames
from branchlake_dagster.tables import upserts as merge
from branchlake_dagster.tables.schemas import build_iceberg_schema, stored_schema, table_arrow_schema
from branchlake_dagster.tables.specification import TableSpec
from branchlake_dagster_tests.publication.workbench import Run, Workbench

SCHEMA = pa.schema(
    [
        ("day", pa.string()),
        ("id", pa.int64()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("price", pa.decimal128(9, 2)),
        ("raw", pa.binary()),
        ("tags", pa.list_(pa.string())),
        ("place", pa.struct([("lat", pa.float64()), ("name", pa.string())])),
        ("counts", pa.map_(pa.string(), pa.int32())),
    ]
)
AT = dt.datetime(2026, 11, 1, tzinfo=dt.UTC)
LAYOUTS: Mapping[str, Sequence[tuple[str, Transform[Any, Any]]]] = {
    "flat": [],
    "by_day": [("day", IdentityTransform())],
    "by_time": [("at", DayTransform()), ("id", BucketTransform(2))],
}


def rows(*numbers: int, day: str, price: int) -> pa.Table:
    """A row for each number. Of the columns that are not keys some are null, some empty."""
    return pa.Table.from_pylist(
        [
            {
                "day": day,
                "id": number,
                "at": AT + dt.timedelta(hours=7 * number),
                "price": None if number % 5 == 0 else Decimal(price),
                "raw": bytes([number % 256]),
                "tags": [None, [], ["a", None]][number % 3],
                "place": [None, {"lat": None, "name": None}, {"lat": -0.0, "name": "é"}][number % 3],
                "counts": [None, [], [("k", None), ("l", number)]][number % 3],
            }
            for number in numbers
        ],
        SCHEMA,
    )


MOVING = rows(2, 13, 99, day="tue", price=7), ("id",)  # 2 was in mon, 99 is new
NEW = rows(500, 501, day="thu", price=8), ("id",)
MATCHING = rows(5, day="mon", price=9), ("day", "id")
OF_ANOTHER_DAY = rows(5, day="tue", price=9), ("day", "id")  # 5 of mon is another key
UPSERTS = {
    "flat": [MOVING, NEW],
    "by_day": [MOVING, MATCHING, OF_ANOTHER_DAY],
    "by_time": [MOVING],
}


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    bench = Workbench(lakehouse, namespace)
    yield bench
    bench.clean()


def seeded(run: Run, name: str, layout: Sequence[tuple[str, Transform[Any, Any]]]) -> Table:
    columns = build_iceberg_schema(stored_schema(SCHEMA, table_name=name), table_name=name)
    fields = [
        PartitionField(columns.find_field(column).field_id, 1000 + number, transform, f"part{number}")
        for number, (column, transform) in enumerate(layout)
    ]
    run.catalog.create_namespace_if_not_exists((run.bench.namespace,))
    table = run.catalog.create_table(
        (run.bench.namespace, name), columns, partition_spec=PartitionSpec(*fields)
    )
    table.append(rows(*range(1, 10), day="mon", price=1))
    table.append(rows(*range(10, 20), day="tue", price=2))
    table.append(rows(*range(20, 30), day="wed", price=3))
    return table


def step(before: Table, after: Table) -> SnapshotChange:
    (found,) = load_table_change(before, after, SnapshotFiles().reader_for(after)).steps
    return found


def seen_by_rebase(found: SnapshotChange) -> dict[str, Any]:
    """All that a rebase compares, with files by their rows and the bounds of their keys."""
    return {
        "mode": found.mode,
        "keys": found.key_columns,
        "run": found.run_id,
        "properties": {
            key: value for key, value in found.properties.items() if key.startswith("branchlake.")
        },
        **{
            side: sorted((file.partition, file.rows, file.bounds("id"), file.bounds("day")) for file in files)
            for side, files in (("added", found.added), ("removed", found.removed))
        },
    }


def text_of(table: Table) -> list[str]:
    return sorted(map(repr, table.scan().to_arrow().to_pylist()))


@pytest.mark.spark
def test_both_engines_leave_the_same_rows_and_the_same_change(bench: Workbench) -> None:
    run = bench.run()
    for name, layout in LAYOUTS.items():
        for suffix in ("_by_spark", "_by_pyiceberg"):
            seeded(run, name + suffix, layout)
    session = bench.lake.spark_session(run.name)
    try:
        for name in LAYOUTS:
            for frame, keys in UPSERTS[name]:
                properties = run.properties("upsert", ",".join(keys))
                before = {by: run.table(f"{name}_by_{by}") for by in ("spark", "pyiceberg")}
                spec = TableSpec((bench.namespace, f"{name}_by_spark"), "upsert", keys)
                schema = before["spark"].schema()
                spark_frames.write_spark_frame(from_arrow(session, frame), spec, schema, None, properties)
                table = run.table(f"{name}_by_pyiceberg")
                spec = TableSpec((bench.namespace, f"{name}_by_pyiceberg"), "upsert", keys)
                cast = frame_conversion.cast_columns(
                    frame, table_arrow_schema(table.schema(), table_name="t"), table_name="t"
                )
                planned = merge.plan_upsert(cast, table, spec, None)
                assert isinstance(planned, merge.UpsertPlan)
                merge.write_upsert(planned, properties)
                after = {by: run.table(f"{name}_by_{by}") for by in before}
                assert text_of(after["spark"]) == text_of(after["pyiceberg"])
                ours, theirs = (step(before[by], after[by]) for by in ("pyiceberg", "spark"))
                assert seen_by_rebase(ours) == seen_by_rebase(theirs), (name, keys)
                operations = {one.current_snapshot().summary.operation for one in after.values()}
                assert len(operations) == 1, (name, keys, operations)
    finally:
        session.stop()
