"""`branchlake columns`: what is refused, what is listed, and what comes to `main`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
from click.testing import CliRunner
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.sorting import SortField, SortOrder
from pyiceberg.transforms import DayTransform, IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType, StructType, TimestampType

from branchlake_dagster import consumes, keys, table_metadata
from branchlake_dagster.automation.progress import iter_code_dependents, list_asset_columns
from branchlake_dagster.cleanup.jobs import reap_branches
from branchlake_dagster.cleanup.reaper_rules import ReapingAction
from branchlake_dagster.cli.main import main
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.errors import NessieOutcomeUnknown
from branchlake_dagster.publication import column_changes
from branchlake_dagster.publication.column_changes import (
    BY_COMMAND,
    ColumnChange,
    ColumnChangeRefused,
    change_columns,
    validate_column_change,
)
from branchlake_dagster.publication.ledger import iter_publications
from branchlake_dagster.runs.branch_owner import load_instance_id
from branchlake_dagster.runs.run_branch import run_id_of_branch
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published
from branchlake_dagster_tests.suite.raised import raising

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "at", TimestampType()),
    NestedField(3, "who", StructType(NestedField(4, "name", StringType()))),
    NestedField(5, "measured", StringType()),
    NestedField(6, "extra", StringType()),
    identifier_field_ids=[1],
)


LOCATION = """
import dagster as dg

from branchlake_dagster import table_metadata


@dg.asset(key=["{namespace}", "orders"], metadata=table_metadata(write_mode="upsert", keys=["account"]))
def orders(): ...


@dg.asset(key=["{namespace}", "copy"], deps=[orders])
def copy(): ...


defs = dg.Definitions(assets=[orders, copy])
"""


def metadata(schema: Schema = SCHEMA) -> TableMetadata:
    return new_table_metadata(
        schema,
        PartitionSpec(PartitionField(2, 1000, DayTransform(), "at_day")),
        SortOrder(SortField(4, IdentityTransform())),
        "file:///t",
        {"write.metadata.metrics.column.measured": "full"},
    )


def change(*columns: str, new_name: str | None = None) -> ColumnChange:
    return ColumnChange(("shop", "orders"), columns, new_name)


@pytest.mark.parametrize("column", ["id", "at", "who", "measured", "unknown", "used"])
@pytest.mark.parametrize("new_name", [None, "other"])
def test_a_column_that_the_table_needs_is_refused(column: str, new_name: str | None) -> None:
    used = Schema(*SCHEMA.fields, NestedField(7, "used", StringType()), identifier_field_ids=[1])
    with pytest.raises(ColumnChangeRefused) as caught:
        validate_column_change(change(column, new_name=new_name), metadata(used), ["used"])
    assert caught.value.columns == (column,)
    assert caught.value.table == "shop.orders"


@pytest.mark.parametrize(("name", "existing"), [("", ""), ("ID", "id"), ("at", "at")])
def test_a_new_name_belongs_to_no_other_column(name: str, existing: str) -> None:
    with raising(ColumnChangeRefused, existing):
        validate_column_change(change("extra", new_name=name), metadata())
    validate_column_change(change("extra", new_name="Extra"), metadata())


def test_a_table_keeps_a_column() -> None:
    plain = new_table_metadata(
        Schema(NestedField(1, "a", LongType())), PartitionSpec(), SortOrder(), "file:///t"
    )
    with pytest.raises(ColumnChangeRefused):
        validate_column_change(change("a"), plain)


def test_dependents_in_the_code_are_listed() -> None:
    days = dg.DailyPartitionsDefinition("2026-01-01")

    @dg.asset(
        key=["shop", "orders"],
        partitions_def=days,
        metadata=table_metadata(write_mode="upsert", keys=["id"], partition_by="at"),
    )
    def orders() -> None: ...

    @dg.asset_check(asset=orders)
    def good() -> Any: ...

    @dg.asset(
        key=["shop", "spent"],
        deps=[orders],
        metadata=table_metadata(write_mode="upsert", keys=["who"])
        | consumes({orders.key: keys("account")}, keys=["who"]),
    )
    def spent() -> None: ...

    @dg.asset(key=["shop", "report"], deps=[orders])
    def report() -> None: ...

    graph = dg.Definitions(assets=[orders, spent, report], asset_checks=[good]).resolve_asset_graph()
    asked = change("account", "extra")
    assert [(one.kind, one.name, one.declares) for one in iter_code_dependents(graph, asked, "lake")] == [
        ("check", "shop/orders:good", ()),
        ("asset", "shop/report", ()),
        ("asset", "shop/spent", ("account",)),
    ]
    assert list_asset_columns(graph, asked, "lake") == {"id", "at"}


@contextmanager
def without_metadata(lakehouse: Lakehouse, *identifier: str) -> Iterator[None]:
    """Inside the block the table's metadata file is missing. The lake is shared, so it comes back."""
    location = lakehouse.catalog().load_table(identifier).metadata_location
    path = Path(location.removeprefix("file://"))
    path.rename(path.with_suffix(".away"))
    try:
        yield
    finally:
        path.with_suffix(".away").rename(path)


def test_columns_are_dropped_and_renamed_in_one_publication_each(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    orders = Source(namespace)
    table = f"{namespace}.orders"

    @dg.asset(
        key=[namespace, "copy"],
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=table_metadata(write_mode="append", **FREE) | consumes({orders.key: "rows"}),
    )
    def copy(orders: pl.DataFrame) -> pl.DataFrame:
        return orders.select("account", "price")

    def command(*words: str) -> dict[str, Any]:
        done = CliRunner().invoke(main, ["columns", *words, "--json"])
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    with project(lakehouse, orders.asset, copy) as p:
        orders.columns["extra"] = pl.Int64
        orders.publish(p, ("a", 1, 7))
        published(p, copy)
        monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(lakehouse.settings.state_dir))
        head, branches = lakehouse.nessie.reference("main").hash, p.branches()
        tried = command("drop", table, "extra", "--dry-run")
        assert tried["publication"] is None
        assert {"kind": "consumer", "name": f"{namespace}.copy", "declares": []} in tried["dependents"]
        assert f"{namespace}.copy" not in {one["table"] for one in tried["unreadable"]}
        with without_metadata(lakehouse, namespace, "copy"):
            tried = command("drop", table, "extra", "--dry-run")
        (lost,) = [one for one in tried["unreadable"] if one["table"] == f"{namespace}.copy"]
        assert "FileNotFoundError" in lost["trouble"]
        assert f"{namespace}.copy" not in {one["name"] for one in tried["dependents"]}
        assert lakehouse.nessie.reference("main").hash == head
        monkeypatch.chdir(tmp_path)
        (tmp_path / "columns_location.py").write_text(LOCATION.format(namespace=namespace))
        tried = command("drop", table, "extra", "--dry-run", "-m", "columns_location")
        assert {one["name"] for one in tried["dependents"]} == {f"{namespace}.copy", f"{namespace}/copy"}
        refused = CliRunner().invoke(main, ["columns", "drop", table, "account", "-m", "columns_location"])
        assert refused.exit_code == 1

        done = command("drop", table, "extra")
        newest = next(iter_publications(lakehouse.nessie))
        assert (newest.hash, newest.tables, newest.verdict) == (done["publication"], (table,), BY_COMMAND)
        assert p.rows(namespace, "orders") == [{"account": "a", "price": 1}]

        command("rename", table, "price", "amount")
        assert p.rows(namespace, "orders") == [{"account": "a", "amount": 1}]
        assert p.branches() == branches
        again = CliRunner().invoke(main, ["columns", "drop", table, "extra"])
        assert again.exit_code == 1
        assert p.branches() == branches


def test_a_drop_keeps_rows_that_were_published_meanwhile(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = Source(namespace)
    with project(lakehouse, orders.asset) as p:
        orders.columns["extra"] = pl.Int64
        orders.publish(p, ("a", 1, 7))
        create = lakehouse.nessie.create_branch

        def create_late(name: str, *, from_ref: str, from_hash: str) -> Any:
            made = create(name, from_ref=from_ref, from_hash=from_hash)
            monkeypatch.undo()
            orders.publish(p, ("b", 2, 8))
            return made

        monkeypatch.setattr(lakehouse.nessie, "create_branch", create_late)
        change_columns(lakehouse, ColumnChange((namespace, "orders"), ("extra",)))
        assert sorted(row["account"] for row in p.rows(namespace, "orders")) == ["a", "b"]
        assert {*p.rows(namespace, "orders")[0]} == {"account", "price"}


def test_a_branch_of_a_command_that_died_is_not_published_and_is_reaped(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = Source(namespace)

    def dies(_: Lakehouse) -> Any:
        raise NessieOutcomeUnknown("The answer is missing.")

    with project(lakehouse, orders.asset) as p:
        orders.publish(p, ("a", 1))
        head, before = lakehouse.nessie.reference("main").hash, p.branches()
        monkeypatch.setattr(column_changes, "build_publisher", dies)
        with pytest.raises(NessieOutcomeUnknown):
            change_columns(
                lakehouse,
                ColumnChange((namespace, "orders"), ("price",)),
                instance=load_instance_id(p.instance),
            )
        (branch,) = p.branches() - before
        outcome = p.reconciler().reconcile_run(run_id_of_branch(branch))
        assert outcome is not None
        assert outcome.state is RunState.UNKNOWN_RUN
        tomorrow = datetime.now(UTC) + timedelta(days=2)
        reaped = list(reap_branches(lakehouse, p.instance, now=lambda: tomorrow, branch_names={branch}))
        assert [one.action for one in reaped] == [ReapingAction.DISCARD]
        assert lakehouse.nessie.reference("main").hash == head
        assert branch not in p.branches()
