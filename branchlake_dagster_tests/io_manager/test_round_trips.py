"""How often one materialisation asks Nessie: what was read or written is known, and not asked again."""

from typing import Any

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.types import LongType

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.transport import HttpTransport
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.tables.errors import RunBranchGone
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import project

DAILY = dg.DailyPartitionsDefinition("2026-01-01")
FREE = table_metadata(require_checks=False)

OPENED = ["read reference main", "create branch"]
"""Where `main` is, and the branch."""
WRITTEN = ["read contents", "commit to"]
"""The table with its namespaces, and what was written."""


class Calls(list[str]):
    """What was asked of Nessie, in order, without the names of branches."""

    def clear_after(self) -> list[str]:
        found = [
            " ".join(one.split()[:3] if one.startswith("read reference") else one.split()[:2]) for one in self
        ]
        self.clear()
        return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found, send = Calls(), HttpTransport.send

    def counted(transport: HttpTransport, *args: Any, action: str, **kwargs: Any) -> Any:
        found.append(action)
        return send(transport, *args, action=action, **kwargs)

    monkeypatch.setattr(HttpTransport, "send", counted)
    return found


def test_a_first_and_a_later_write(lakehouse: Lakehouse, namespace: str, calls: Calls) -> None:
    """Namespaces two deep, the table and its first rows are one commit."""

    @dg.asset(
        key=[namespace, "deep", "day"],
        partitions_def=DAILY,
        metadata=table_metadata(partition_by="day", require_checks=False),
    )
    def day(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"day": [context.partition_time_window.start.date()], "n": [1]})

    with project(lakehouse, day) as p:
        for partition in ("2026-01-01", "2026-01-02", "2026-01-02"):
            calls.clear()
            run_id = p.run(partition=partition)
            assert calls.clear_after() == OPENED + WRITTEN, partition
            p.settle(run_id)
        assert len(p.rows(namespace, "deep", "day")) == 2


def test_every_mode_asks_as_little(lakehouse: Lakehouse, namespace: str, calls: Calls) -> None:
    @dg.asset(key=[namespace, "added"], metadata=table_metadata(write_mode="append", require_checks=False))
    def added() -> pa.Table:
        return pa.table({"n": [1]})

    @dg.asset(key=[namespace, "whole"], metadata=FREE)
    def whole() -> pa.Table:
        return pa.table({"n": [1]})

    with project(lakehouse, added, whole) as p:
        p.settle(p.run())
        calls.clear()
        p.settle(p.run())
        asked = calls.clear_after()
        assert asked[:6] == OPENED + WRITTEN + WRITTEN
        assert (len(p.rows(namespace, "added")), len(p.rows(namespace, "whole"))) == (2, 1)


def test_the_users_of_one_run_share_its_branch(lakehouse: Lakehouse, namespace: str, calls: Calls) -> None:
    """An asset's own resource and the IO manager's are copies; the second does not look for the branch."""

    @dg.asset(key=[namespace, "first"], metadata=FREE)
    def first(lakehouse: LakehouseResource) -> pa.Table:
        lakehouse.open_branch()
        return pa.table({"n": [1]})

    @dg.asset(key=[namespace, "second"], ins={"first": dg.AssetIn([namespace, "first"])}, metadata=FREE)
    def second(lakehouse: LakehouseResource, first: pa.Table) -> pa.Table:
        lakehouse.open_branch()
        return first

    with project(lakehouse, first, second) as p:
        p.run()
        assert calls.clear_after() == [*OPENED, *WRITTEN, "read contents", *WRITTEN]


def test_a_new_column_is_one_commit_more(lakehouse: Lakehouse, namespace: str, calls: Calls) -> None:
    columns = {"n": [1]}

    @dg.asset(key=[namespace, "grows"], metadata=FREE)
    def grows() -> pa.Table:
        return pa.table(columns)

    with project(lakehouse, grows) as p:
        p.settle(p.run())
        columns["m"] = [2]
        calls.clear()
        p.run()
        assert calls.clear_after() == [*OPENED, *WRITTEN, "commit to"]


def test_a_writer_that_lost_its_branch_is_fenced(lakehouse: Lakehouse, namespace: str) -> None:
    """Also the one that remembers the table, and so does not look before it commits."""
    lost = False

    @dg.asset(key=[namespace, "late"], metadata=FREE)
    def late(lakehouse: LakehouseResource) -> pa.Table:
        branch = lakehouse.open_branch()
        if lost:
            client = lakehouse.lakehouse.nessie
            client.delete_branch(branch, expected_hash=client.reference(branch).hash)
        return pa.table({"n": [1]})

    with project(lakehouse, late) as p:
        p.settle(p.run())
        lost = True
        run_id = p.run(ok=False)
        p.failed_with(RunBranchGone, "fenced")
        assert run_branch_name(run_id) not in p.branches()


def test_what_is_remembered_is_no_base_for_a_lost_race(
    lakehouse: Lakehouse, namespace: str, calls: Calls
) -> None:
    """A table that moved since it was loaded: the commit is refused, the rest is PyIceberg's decision."""
    client = lakehouse.nessie
    name = f"test/{namespace}"
    client.create_branch(name, from_ref="main", from_hash=client.reference("main").hash)
    mine, other = lakehouse.catalog(name), lakehouse.catalog(name)
    try:
        other.create_namespace(namespace)
        other.create_table((namespace, "t"), pa.schema([("n", pa.int64())]))
        table = mine.load_table((namespace, "t"))
        other.load_table((namespace, "t")).append(pa.table({"n": [1]}))
        table.append(pa.table({"n": [2]}))
        assert sorted(mine.load_table((namespace, "t")).scan().to_arrow()["n"].to_pylist()) == [1, 2]

        table = mine.load_table((namespace, "t"))
        slower = table.update_schema().add_column("x", LongType())
        other.load_table((namespace, "t")).update_schema().add_column("x", LongType()).commit()
        with pytest.raises(CommitFailedException):
            slower.commit()
        assert [field.name for field in other.load_table((namespace, "t")).schema().fields] == ["n", "x"]
    finally:
        client.delete_branch(name, expected_hash=client.reference(name).hash)
