"""`branchlake consumers` on a lake with a consumer that has something left, and one that is lost."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.manifest import DataFile, DataFileContent
from rich.console import Console

from branchlake_dagster import consumes, table_metadata
from branchlake_dagster.automation.progress import InputBacklog
from branchlake_dagster.cli.consumers import (
    _backlog_to_dict,
    _format_unconsumed,
    gather_consumers,
    show_consumers,
)
from branchlake_dagster.history.change import ChangedFile, ChangeSet, Position
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published
from branchlake_dagster_tests.suite.json_contract import check_output


def test_consumers_are_shown_with_what_they_have_left(lakehouse: Lakehouse, namespace: str) -> None:
    orders = Source(namespace)

    @dg.asset(
        key=[namespace, "copy"],
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=table_metadata(write_mode="append", **FREE) | consumes({orders.key: "rows"}),
    )
    def copy(orders: pl.DataFrame) -> pl.DataFrame:
        return orders

    def mine() -> dict[str, Any]:
        gathered = gather_consumers(lakehouse.settings)
        check_output(["consumers", "--json"], json.dumps(gathered))
        (found,) = [one for one in gathered["consumers"] if one["table"].startswith(namespace)]
        return found

    with project(lakehouse, orders.asset, copy) as p:
        orders.publish(p, ("a", 1))
        published(p, copy)
        assert (mine()["unconsumed_files"], mine()["unconsumed_age_s"]) == (0, None)
        orders.publish(p, ("b", 2), ("c", 3))
        found = mine()
        assert (found["input"], found["unconsumed_rows"], found["trouble"]) == (
            f"{namespace}.orders",
            2,
            None,
        )
        lakehouse.catalog().drop_table((namespace, "orders"))
        assert mine()["trouble"] == "The table of the input no longer exists."
        console = Console(width=200, record=True, file=io.StringIO(), markup=False)
        show_consumers(
            {"consumers": [found], "unreadable": [{"table": "x.odd", "trouble": "lost [table x.odd]"}]},
            console,
        )
        shown = console.export_text()
        assert "2 rows in 1 file" in shown
        assert "x.odd" in shown
        assert "lost [table x.odd]" in shown


def changed_file(rows: int, content: DataFileContent = DataFileContent.DATA) -> ChangedFile:
    file = DataFile.from_args(file_path=str(uuid4()), content=content, record_count=rows)
    return ChangedFile(file, 1, 1)


@pytest.mark.parametrize(
    ("added", "removed", "deletes", "shown"),
    [
        ([2], [], [], "2 rows in 1 file"),
        # One row was deleted from three files, or rewritten in one.
        ([5], [6], [], "at most 11 rows in 2 files"),
        ([], [], [DataFileContent.POSITION_DELETES], "at most 1 row in 1 file"),
        ([], [], [DataFileContent.EQUALITY_DELETES], "1 row and deleted values in 1 file"),
        ([], [], [], "nothing"),
    ],
)
def test_the_number_of_rows_says_what_it_is(
    added: list[int], removed: list[int], deletes: list[DataFileContent], shown: str
) -> None:
    change = ChangeSet(
        "t",
        Position("u", 1),
        Position("u", 2),
        (),
        tuple(map(changed_file, added)),
        tuple(map(changed_file, removed)),
        tuple(changed_file(1, content) for content in deletes),
    )
    told = _backlog_to_dict(InputBacklog("t", "input", "run", Position("u", 1), 0, change), datetime.now(UTC))
    assert _format_unconsumed(told) == shown


def test_a_table_whose_metadata_is_gone_stops_no_other(lakehouse: Lakehouse, namespace: str) -> None:
    orders = Source(namespace)

    @dg.asset(
        key=[namespace, "copy"],
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=table_metadata(write_mode="append", **FREE) | consumes({orders.key: "rows"}),
    )
    def copy(orders: pl.DataFrame) -> pl.DataFrame:
        return orders

    with project(lakehouse, orders.asset, copy) as p:
        orders.publish(p, ("a", 1))
        published(p, copy)
        broken = lakehouse.catalog().create_table((namespace, "broken"), pa.schema([("n", pa.int64())]))
        where = {"orders": lakehouse.catalog().load_table((namespace, "orders")), "broken": broken}
        try:
            for table in where.values():
                path = Path(table.metadata_location.removeprefix("file://"))
                path.rename(path.with_suffix(".away"))
            found = gather_consumers(lakehouse.settings)
            check_output(["consumers", "--json"], json.dumps(found))
            (lost,) = [one for one in found["unreadable"] if one["table"] == f"{namespace}.broken"]
            assert "cannot be read" in lost["trouble"]
            (mine,) = [one for one in found["consumers"] if one["table"] == f"{namespace}.copy"]
            assert "its metadata cannot be read" in mine["trouble"]
            assert mine["unconsumed_rows"] is None
        finally:  # the lake is shared
            for table in where.values():
                path = Path(table.metadata_location.removeprefix("file://"))
                path.with_suffix(".away").rename(path)
