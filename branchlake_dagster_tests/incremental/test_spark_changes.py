"""Changes as Spark frames, small and large, and what their change tables leave behind: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from pyiceberg.expressions import EqualTo
from pyiceberg.table import Table
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the library's own abbreviation

from branchlake_dagster import consumes, table_metadata
from branchlake_dagster.cleanup.jobs import reap_branches, sweep_discarded
from branchlake_dagster.history.change import RowsUnreadable
from branchlake_dagster.incremental import spark_inputs
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import CHANGE_TABLE_INFIX
from branchlake_dagster_tests.dagster_internals import COMPUTE_LOGS
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.history.snapshot_tables import counted
from branchlake_dagster_tests.publication.rebase.deleting import delete_equal

pytestmark = pytest.mark.spark

COLUMNS = pa.schema([("day", pa.date32()), ("account", pa.string()), ("price", pa.int64())])
FREE: dict[str, Any] = {"require_checks": False}


def frame(*rows: tuple[int, str, int]) -> pa.Table:
    told = [{"day": date(2026, 8, day), "account": account, "price": price} for day, account, price in rows]
    return pa.Table.from_pylist(told, schema=COLUMNS)


class Shop:
    """An input that anybody writes, and consumers of each pattern that get Spark frames."""

    def __init__(self, lake: Lakehouse, namespace: str, *, make: bool = True) -> None:
        self.lake, self.namespace = lake, namespace
        self.breaks = False
        if make:
            lake.catalog().create_namespace(namespace)
            lake.catalog().create_table((namespace, "orders"), COLUMNS)

        @dg.asset(key=[namespace, "orders"], metadata=table_metadata(write_mode="append", **FREE))
        def orders() -> pa.Table:
            return frame()

        ins = {"orders": dg.AssetIn(orders.key)}

        @dg.asset(
            key=[namespace, "copy"],
            ins=ins,
            metadata=table_metadata(write_mode="append", **FREE)
            | consumes({orders.key: "rows"}, when_removed="deliver"),
        )
        def copy(orders: DataFrame) -> DataFrame:
            if self.breaks:
                raise RuntimeError("broken")
            return orders

        @dg.asset(
            key=[namespace, "spent"],
            ins=ins,
            metadata=table_metadata(write_mode="upsert", keys=["account"], **FREE)
            | consumes({orders.key: "keys"}, keys=["account"]),
        )
        def spent(orders: DataFrame) -> DataFrame:
            return orders.groupBy("account").agg(F.sum("price").alias("price"))

        @dg.asset(
            key=[namespace, "daily"],
            ins=ins,
            metadata=table_metadata(**FREE) | consumes({orders.key: "range"}, on="day"),
        )
        def daily(orders: DataFrame) -> DataFrame:
            return orders.groupBy("day").agg(F.sum("price").alias("price"))

        self.assets = [orders, copy, spent, daily]
        self.consumers = [copy.key, spent.key, daily.key]

    @property
    def table(self) -> Table:
        return self.lake.catalog().load_table((self.namespace, "orders"))

    def sql(self, *statements: str) -> None:
        session = self.lake.spark_session()
        try:
            for statement in statements:
                session.sql(statement.format(t=f"nessie.{self.namespace}.orders")).collect()
        finally:
            session.stop()

    def consumed(self, p: Project, *consumers: dg.AssetKey) -> None:
        """A run of these consumers (all), after which each holds what a full computation gives."""
        chosen = consumers or tuple(self.consumers)
        run_id = p.run(*chosen)
        assert self.left() == (set(), set()), run_id
        branch = p.lake.nessie.entries(f"run-{run_id}")
        assert not [entry.key.name for entry in branch if CHANGE_TABLE_INFIX in entry.key.name]
        assert p.settle(run_id).state is RunState.PUBLISHED
        full = counted(self.table.scan().to_arrow())
        if self.consumers[0] in chosen:
            self.require_copy(p, full)
        for key, column in ((self.consumers[1], 1), (self.consumers[2], 0)):
            if key in chosen:
                sums = Counter[Any]()
                for row, count in full.items():
                    sums[row[column]] += row[2] * count
                held = {tuple(row.values()) for row in p.rows(*key.path)}
                assert held == set(sums.items()), key

    def require_copy(self, p: Project, full: Counter[tuple[Any, ...]]) -> None:
        """The copy's rows, of which each came or went, add up to those of the input."""
        log = Counter[tuple[Any, ...]]()
        for row in p.rows(self.namespace, "copy"):
            kind = row.pop("_change_type")
            log[tuple(row.values())] += 1 if kind == "INSERT" else -1
        assert Counter({row: count for row, count in log.items() if count}) == full

    def left(self) -> tuple[set[Path], set[str]]:
        """Files of change tables, and data files of the input that are gone."""
        root = Path(self.lake.settings.warehouse_uri.removeprefix("file://"))
        changes = {
            path
            for folder in (root / "_branchlake" / "changes").glob(f"{self.namespace}.*")
            for path in folder.rglob("*")
            if path.is_file()
        }
        known = self.table.inspect.all_data_files()["file_path"].to_pylist()
        return changes, {
            path for path in known if not Path(path.removeprefix("file:").replace("///", "/")).exists()
        }


@pytest.fixture
def shop(lakehouse: Lakehouse, namespace: str) -> Shop:
    return Shop(lakehouse, namespace)


def test_rows_that_are_sent_keep_their_types_and_may_be_none(spark_session: SparkSession) -> None:
    rows = pa.table(
        {
            "at": pa.array([datetime(2026, 8, 1, 3)], pa.timestamp("us")),
            "instant": pa.array([datetime(2026, 8, 1, 3)], pa.timestamp("us", "UTC")),
            "name": pa.array(["x"], pa.large_string()),
        }
    )
    for some in (rows, rows.slice(0, 0)):
        found = spark_inputs.from_arrow(spark_session, some)
        assert found.schema.simpleString() == "struct<at:timestamp_ntz,instant:timestamp,name:string>"
        assert [row["at"] for row in found.collect()] == some["at"].to_pylist()


def test_each_pattern_gets_a_spark_frame_of_the_change(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    with project(shop.lake, *shop.assets) as p:
        shop.table.append(frame((1, "a", 1), (1, "b", 2), (2, "c", 3), (3, "d", 4)))
        shop.consumed(p)
        shop.table.append(frame((1, "a", 10)))
        shop.table.delete(EqualTo("account", "b"))
        shop.consumed(p)  # a few rows: sent with the query
        monkeypatch.setattr(spark_inputs, "MAX_SENT_ROWS", 0)
        shop.table.append(frame((4, "e", 5), (4, "e", 5)))
        shop.table.overwrite(frame((2, "c", 7)), overwrite_filter=EqualTo("account", "c"))
        shop.sql(
            "ALTER TABLE {t} SET TBLPROPERTIES ('write.delete.mode'='merge-on-read')",
            "DELETE FROM {t} WHERE account = 'd' OR price = 10",
        )
        shop.consumed(p)  # whole files, and rows that delete files hit, copied
        shop.consumed(p, shop.consumers[0])  # nothing is left


def test_a_step_that_fails_leaves_no_change_table_and_takes_no_file_along(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lakehouse(shop.lake.settings.model_copy(update={"discard_grace_h": 1e-6}))
    copy = shop.consumers[0]
    monkeypatch.setattr(spark_inputs, "MAX_SENT_ROWS", 0)
    with project(lake, *shop.assets) as p:
        shop.table.append(frame((1, "a", 1), (1, "b", 2)))
        shop.consumed(p, copy)
        shop.table.append(frame((2, "c", 3)))
        shop.table.delete(EqualTo("account", "a"))
        shop.breaks = True
        run_id = p.run(copy, ok=False)
        changes, gone = shop.left()
        assert changes
        assert not gone
        assert p.settle(run_id).state is RunState.DISCARDED
        list(sweep_discarded(lake, p.instance))
        assert shop.left() == (set(), set())
        shop.breaks = False
        shop.consumed(p, copy)


def test_a_process_killed_before_its_write_leaves_nothing_and_takes_no_file_along(
    shop: Shop, tmp_path: Path
) -> None:
    lake = Lakehouse(shop.lake.settings.model_copy(update={"discard_grace_h": 1e-6}))
    (tmp_path / "dagster.yaml").write_text(f"telemetry: {{enabled: false}}\n{COMPUTE_LOGS}\n")
    with project(lake, *shop.assets) as p:
        shop.table.append(frame((1, "a", 1), (1, "b", 2)))
        shop.consumed(p)
        shop.table.append(frame((2, "c", 3)))
        shop.table.delete(EqualTo("account", "a"))
        killed = subprocess.run(
            [sys.executable, "-m", "branchlake_dagster_tests.incremental.killed_spark_consumer"],
            env={
                **os.environ,
                "DAGSTER_HOME": str(tmp_path),
                "BRANCHLAKE_STATE_DIR": str(lake.settings.state_dir),
                "BRANCHLAKE_HEARTBEAT_INTERVAL_S": "0.3",
                "BRANCHLAKE_DISCARD_GRACE_H": str(lake.settings.discard_grace_h),
                "BRANCHLAKE_TEST_NAMESPACE": shop.namespace,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stdout
        with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
            (run,) = instance.get_runs()
            branch = run_branch_name(run.run_id)
            names = [entry.key.name for entry in lake.nessie.entries(branch)]
            assert len([name for name in names if CHANGE_TABLE_INFIX in name]) == 2
            changes, gone = shop.left()
            assert changes
            assert not gone
            later = datetime.now(UTC) + timedelta(hours=7)
            list(reap_branches(lake, instance, now=lambda: later, branch_names=[branch]))
            list(sweep_discarded(lake, instance, now=lambda: later))
        assert branch not in p.branches()
        assert shop.left() == (set(), set())
        shop.consumed(p)


def test_rows_deleted_by_value_stop_rows_and_keys_and_no_range(shop: Shop) -> None:
    with project(shop.lake, *shop.assets) as p:
        shop.table.append(frame((1, "a", 1), (1, "b", 2), (2, "a", 3)))
        shop.consumed(p)
        delete_equal(shop.table, "account", "a")
        copy, spent, daily = shop.consumers
        for key in (copy, spent):
            p.run(key, ok=False)
            p.failed_with(RowsUnreadable, "by value", "branchlake/rebuild")
        assert p.settle(p.run(daily)).state is RunState.PUBLISHED
        assert [tuple(row.values()) for row in p.rows(shop.namespace, "daily")] == [(date(2026, 8, 1), 2)]
