"""Tables in memory to change and to capture from: PyIceberg's own catalogue, no server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.catalog.memory import InMemoryCatalog
from pyiceberg.expressions import EqualTo
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from branchlake_dagster.history.rows import ChangedRows
from branchlake_dagster.internals.pyiceberg import as_compaction, build_snapshot, write_data_files

SCHEMA = Schema(NestedField(1, "day", StringType()), NestedField(2, "value", LongType()))
BY_DAY = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "day"))
Rows = Sequence[tuple[str | None, int | None]]


@contextmanager
def catalogue(folder: Path) -> Iterator[InMemoryCatalog]:
    """A catalogue with the namespace `shop`, whose files are in the folder."""
    catalog = InMemoryCatalog("memory", warehouse=folder.as_uri())
    catalog.create_namespace("shop")
    try:
        yield catalog
    finally:
        catalog.close()


def frame(rows: Rows) -> pa.Table:
    days, values = ([row[0] for row in rows], [row[1] for row in rows])
    return pa.table({"day": pa.array(days, pa.string()), "value": pa.array(values, pa.int64())})


def counted(rows: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.values()) for row in rows.to_pylist())


def difference(rows: ChangedRows) -> Counter[tuple[Any, ...]]:
    """Rows that came, and with a negative count those that went."""
    found = counted(rows.added)
    found.subtract(counted(rows.removed))
    return Counter({row: count for row, count in found.items() if count})


def append(table: Table, rows: Rows, **properties: str) -> None:
    table.append(frame(rows), snapshot_properties={f"branchlake.{k}": v for k, v in properties.items()})


def replace_day(table: Table, day: str, rows: Rows) -> None:
    table.overwrite(
        frame(rows),
        overwrite_filter=EqualTo("day", day),
        snapshot_properties={"branchlake.write_mode": "replace_partitions"},
    )


def change_files(table: Table, *, added: Sequence[DataFile] = (), removed: Sequence[DataFile] = ()) -> None:
    """Commit a snapshot that adds and removes these files."""
    updates = build_snapshot(
        table, added=added, removed=removed, operation=Operation.OVERWRITE, properties={}, written_paths=[]
    )
    transaction = table.transaction()
    transaction._apply(updates)
    transaction.commit_transaction()


def compact(table: Table) -> None:
    """All rows in new files."""
    import itertools
    import uuid

    old = [task.file for task in table.scan().plan_files()]
    rows = table.scan().to_arrow()
    new = list(
        write_data_files(table.metadata, rows, table.io, commit=uuid.uuid4(), numbers=itertools.count())
    )
    updates = build_snapshot(
        table, added=new, removed=old, operation=Operation.OVERWRITE, properties={}, written_paths=[]
    )
    transaction = table.transaction()
    transaction._apply(tuple(map(as_compaction, updates)))
    transaction.commit_transaction()
