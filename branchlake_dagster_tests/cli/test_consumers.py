"""`branchlake consumers` on a lake with a consumer that has something left, and one that is lost."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pyarrow as pa
from rich.console import Console

from branchlake_dagster import consumes, table_metadata
from branchlake_dagster.cli.incremental.consumers import gather, show
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published


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
        (found,) = [
            one for one in gather(lakehouse.settings)["consumers"] if one["table"].startswith(namespace)
        ]
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
        assert mine()["trouble"] == "The input has no table any more."
        console = Console(width=200, record=True, file=io.StringIO())
        show(
            {"consumers": [found], "unreadable": [{"table": "x.odd", "trouble": "lost [table x.odd]"}]},
            console,
        )
        shown = console.export_text()
        assert "2 rows in 1 file" in shown
        assert "x.odd" in shown
        assert "lost [table x.odd]" in shown


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
            found = gather(lakehouse.settings)
            (lost,) = [one for one in found["unreadable"] if one["table"] == f"{namespace}.broken"]
            assert "cannot be read" in lost["trouble"]
            (mine,) = [one for one in found["consumers"] if one["table"] == f"{namespace}.copy"]
            assert mine["trouble"].startswith("Of the input: its metadata cannot be read")
            assert mine["unconsumed_rows"] is None
        finally:  # the lake is shared
            for table in where.values():
                path = Path(table.metadata_location.removeprefix("file://"))
                path.with_suffix(".away").rename(path)
