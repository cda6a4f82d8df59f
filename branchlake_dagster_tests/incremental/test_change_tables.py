"""Change tables, without Spark: who reads them, and what becomes of them when it goes wrong."""

from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from branchlake_dagster import LakehouseResource, connect, consumes, read_changes, table_metadata
from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.incremental.sql_changes import Changes
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import CHANGE_TABLE_INFIX
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.sources import FREE, Source, values
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

Rows = list[tuple[Any, ...]]


class Reader:
    """A consumer that reads its change tables by name, with whatever `looks` does, and writes nothing."""

    def __init__(self, source: Source, namespace: str) -> None:
        self.seen: list[Rows] = []
        self.source = source

        @dg.asset(
            key=[namespace, "reader"],
            deps=[source.key],
            metadata=table_metadata(write_mode="append", **FREE) | consumes({source.key: "rows"}),
        )
        def reader(context: dg.AssetExecutionContext, lakehouse: LakehouseResource) -> dg.MaterializeResult:
            with read_changes(context, lakehouse) as changes:
                if changes.whole:
                    schema = pa.schema([("n", pa.int64())])
                    lakehouse.own_catalog().create_table_if_not_exists((namespace, "reader"), schema)
                else:
                    self.looks(lakehouse, changes)
            return dg.MaterializeResult()

        self.asset = reader

    def looks(self, lakehouse: LakehouseResource, changes: Changes) -> None:
        lake, branch = connect(lakehouse.lakehouse.settings), lakehouse.open_branch()
        for name in (changes.added(self.source.key), changes.removed(self.source.key)):
            table = name.replace("`", "").removeprefix("nessie.")
            by_duckdb = lake.sql(f"SELECT account, price FROM {table}", branch=branch).arrow()
            by_filter = lake.sql(f"SELECT sum(price) AS s FROM {table} WHERE account > 'a'", branch=branch)
            by_polars = lake.polars(table, branch=branch).select("account", "price").collect()
            by_pyiceberg = lake.table(table, branch=branch).scan().to_arrow().select(["account", "price"])
            found = [sorted(rows(one)) for one in (by_duckdb, by_polars.to_arrow(), by_pyiceberg)]
            assert found[0] == found[1] == found[2]
            expected = sum(row[1] for row in found[0] if row[0] > "a") or None
            assert by_filter.arrow()["s"].to_pylist() == [expected]
            self.seen.append(found[0])


def rows(table: pa.Table) -> Rows:
    return [tuple(row.values()) for row in table.to_pylist()]


def consumed(p: Project, reader: Reader) -> None:
    assert p.settle(p.run(reader.asset.key)).state is RunState.PUBLISHED


def test_duckdb_polars_and_pyiceberg_read_change_tables(lakehouse: Lakehouse, namespace: str) -> None:
    orders = Source(namespace)
    reader = Reader(orders, namespace)
    with project(lakehouse, orders.asset, reader.asset) as p:
        orders.append(p, ("a", 1), ("b", 2))
        consumed(p, reader)
        table = lakehouse.catalog().load_table((namespace, "orders"))
        with table.update_schema() as update:
            update.rename_column("price", "cents")
        with table.update_schema() as update:
            update.rename_column("cents", "price")
        orders.append(p, ("c", 3), ("d", 4))
        consumed(p, reader)
        # A file of two rows is written again for one that goes.
        lakehouse.catalog().load_table((namespace, "orders")).delete("account = 'a'")
        consumed(p, reader)
        p.run(reader.asset.key)  # nothing is left
        assert reader.seen == [[("c", 3), ("d", 4)], [], [("b", 2)], [("a", 1), ("b", 2)], [], []]
        assert len(values(p, orders.asset)) == 3


def test_all_change_tables_are_tried_and_every_error_is_reported(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = Source(namespace)
    reader = Reader(orders, namespace)
    drop = NessieCatalog.drop_table
    tried: list[str] = []

    def failing(self: NessieCatalog, identifier: Any, **more: Any) -> None:
        if CHANGE_TABLE_INFIX not in identifier[-1]:
            return drop(self, identifier, **more)
        tried.append(identifier[-1])
        raise OSError(f"no {len(tried)}")

    with project(lakehouse, orders.asset, reader.asset) as p:
        orders.append(p, ("a", 1), ("b", 2))
        consumed(p, reader)
        lakehouse.catalog().load_table((namespace, "orders")).delete("account = 'a'")
        monkeypatch.setattr(NessieCatalog, "drop_table", failing)
        run_id = p.run(reader.asset.key, ok=False)
        assert len(tried) == 2
        (failure,) = [event for event in p.last.all_events if event.is_step_failure]
        error = failure.step_failure_data.error
        while error is not None and error.cause:
            error = error.cause
        assert error is not None
        assert "no 1" in error.message
        assert any("no 2" in line for line in [error.message, *error.stack])
        monkeypatch.undo()
        assert p.settle(run_id).state is RunState.DISCARDED
        consumed(p, reader)
