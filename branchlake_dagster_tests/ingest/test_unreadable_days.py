"""A table that cannot be read does not keep the days of the others from being reported."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from urllib.parse import urlparse

import pyarrow as pa
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import DayTransform
from pyiceberg.types import NestedField, TimestamptzType

from branchlake_dagster.ingest.declaration import IngestTable
from branchlake_dagster.ingest.event_days import _Tick
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

TODAY = date(2026, 11, 20)
SCHEMA = Schema(NestedField(1, "at", TimestamptzType(), required=False))
BY_DAY = PartitionSpec(PartitionField(1, 1000, DayTransform(), "at_day"))


def rows(day: int) -> pa.Table:
    moments = pa.array([datetime(2026, 11, day, tzinfo=UTC)], pa.timestamp("us", "UTC"))
    return pa.table({"at": moments})


def make_table(lake: Lakehouse, namespace: str, name: str) -> Table:
    table = lake.catalog().create_table((namespace, name), schema=SCHEMA, partition_spec=BY_DAY)
    table.append(rows(2))
    return table


def tick(lake: Lakehouse, tables: list[IngestTable], cursor: str | None) -> tuple[_Tick, str, list[str]]:
    one = _Tick(lake, cursor)
    cursor = one.report(tables, TODAY)
    names = [f"{event.asset_key.path[1]} {event.partition}" for event in one.events]
    return one, cursor, names


def test_a_table_that_cannot_be_read_is_read_again_by_the_next_tick(
    lakehouse: Lakehouse, namespace: str
) -> None:
    lakehouse.catalog().create_namespace((namespace,))
    broken, whole = (make_table(lakehouse, namespace, name) for name in ("broken", "whole"))
    declared = [
        IngestTable(
            key=[namespace, name],
            columns={"at": "timestamp"},
            layout=["day(at)"],
            days_from=date(2026, 11, 1),
        )
        for name in ("broken", "whole")
    ]
    snapshot = broken.current_snapshot()
    assert snapshot is not None
    manifest_list = Path(urlparse(snapshot.manifest_list).path)
    hidden = manifest_list.rename(manifest_list.with_suffix(".hidden"))
    first, cursor, names = tick(lakehouse, declared, None)
    assert names == ["whole 2026-11-02"]
    assert [*first.errors] == [f"{namespace}.broken"]
    whole.append(rows(3))
    _, cursor, names = tick(lakehouse, declared, cursor)
    assert names == ["whole 2026-11-03"]
    hidden.rename(manifest_list)
    last, cursor, names = tick(lakehouse, declared, cursor)
    assert (names, last.errors) == (["broken 2026-11-02"], {})
    assert tick(lakehouse, declared, cursor)[2] == []
