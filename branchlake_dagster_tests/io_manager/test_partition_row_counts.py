"""Rows of a Dagster partition from manifests: exact, or not known."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
from dagster import DailyPartitionsDefinition
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation

from branchlake_dagster.internals.pyiceberg import apply_updates, build_snapshot
from branchlake_dagster.io_manager.io_manager import count_partition_rows
from branchlake_dagster_tests.history.snapshot_tables import catalogue
from branchlake_dagster_tests.internals.plain_pyiceberg import without_null_counts


def test_a_file_without_a_count_of_nulls_may_hold_rows_of_no_partition(tmp_path: Path) -> None:
    days = DailyPartitionsDefinition("2026-11-01")
    rows = pa.table({"at": pa.array([datetime(2026, 11, 2, 3, tzinfo=UTC)] * 2, pa.timestamp("us", "UTC"))})
    with catalogue(tmp_path) as catalog:
        table = catalog.create_table("shop.t", rows.schema)
        table.append(rows)
        assert count_partition_rows(table, ["2026-11-02"], days, {"": "at"}, name="t") == {"2026-11-02": 2}
        (file,) = (task.file for task in table.scan().plan_files())
        updates = build_snapshot(
            table,
            added=[without_null_counts(file)],
            removed=[file],
            operation=Operation.OVERWRITE,
            properties={},
            written_paths=[],
        )
        later = Table(table.name(), apply_updates(table.metadata, updates), "", table.io, catalog)
        assert count_partition_rows(later, ["2026-11-02"], days, {"": "at"}, name="t") is None
