"""Views, functions and whatever else a run changes besides tables: the gate sees them, and treats all alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import (
    Content,
    ContentKey,
    DiffEntry,
    IcebergTable,
    Namespace,
    OtherContent,
    Put,
)
from branchlake_dagster.publication.ledger import Refused, changed_tables
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.publication.workbench import Workbench
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

TABLE = IcebergTable("t", "file:/t", 1, 0, 0, 0)
VIEW = OtherContent("v", "ICEBERG_VIEW", {"metadataLocation": "file:/v", "versionId": 1, "schemaId": 0})
NAMESPACE = Namespace("n", ("shop",))


@pytest.mark.parametrize(
    ("before", "after", "seen"),
    [
        (None, TABLE, True),
        (TABLE, None, True),
        (None, VIEW, True),
        (VIEW, None, True),
        (TABLE, VIEW, True),
        (VIEW, TABLE, True),
        (NAMESPACE, VIEW, True),
        (TABLE, NAMESPACE, True),
        (None, OtherContent("u", "UDF", {}), True),
        (None, NAMESPACE, False),
        (NAMESPACE, None, False),
        (NAMESPACE, Namespace("n", ("shop",), {"owner": "me"}), False),
    ],
)
def test_every_changed_content_but_namespaces_is_in_the_write_set(
    before: Content | None, after: Content | None, seen: bool
) -> None:
    changes = (DiffEntry(ContentKey(("shop", "x")), before, after),)
    assert changed_tables(changes) == (("shop.x",) if seen else ())


def view_at(location: str) -> OtherContent:
    return OtherContent(None, "ICEBERG_VIEW", {"metadataLocation": location, "versionId": 1, "schemaId": 0})


def put(
    lake: Lakehouse,
    branch: str,
    key: ContentKey,
    content: Content,
    properties: Mapping[str, str] = MappingProxyType({}),
) -> None:
    lake.nessie.commit(
        branch,
        expected_hash=lake.nessie.reference(branch).hash,
        operations=[Put(key, content)],
        message="put",
        properties=properties,
    )


def with_view(namespace: str, *, table: bool) -> dg.AssetsDefinition:
    """An asset that makes a view on its run's branch; with `table` it also returns rows."""

    @dg.asset(key=[namespace, "t"], metadata=table_metadata(write_mode="append", require_checks=False))
    def made(lakehouse: LakehouseResource) -> Any:
        catalog = lakehouse.catalog()
        catalog.create_namespace_if_not_exists((namespace,))
        view = view_at(f"file:/{namespace}/v")
        # A commit of the run's own code names the run.
        put(
            lakehouse.lakehouse, catalog.ref, ContentKey((namespace, "v")), view, lakehouse.maker_properties()
        )
        return pl.DataFrame({"n": [1]}) if table else dg.MaterializeResult()

    return made


def contents(p: Project, *path: str) -> Content | None:
    key = ContentKey(path)
    return p.lake.nessie.contents(MAIN, [key]).get(key)


@pytest.mark.parametrize("table", [True, False], ids=["with a table", "alone"])
def test_a_view_without_an_asset_is_blocked(lakehouse: Lakehouse, namespace: str, table: bool) -> None:
    with project(lakehouse, with_view(namespace, table=table)) as p:
        run_id = p.run()
        outcome = p.settle(run_id)
        assert outcome.state is RunState.BLOCKED
        assert outcome.verdict is not None
        (reason,) = outcome.verdict.reasons
        assert f"{namespace}.v" in reason
        assert contents(p, namespace, "v") is None
        assert contents(p, namespace, "t") is None


def test_where_no_checks_are_required_a_view_is_published(lakehouse: Lakehouse, namespace: str) -> None:
    free = Lakehouse(lakehouse.settings.model_copy(update={"require_checks": False}))
    with project(free, with_view(namespace, table=False)) as p:
        run_id = p.run()
        assert p.settle(run_id).state is RunState.PUBLISHED
        assert isinstance(contents(p, namespace, "v"), OtherContent)
        assert run_branch_name(run_id) not in p.branches()


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    found = Workbench(lakehouse, namespace)
    yield found
    found.clean()


def test_a_run_whose_table_is_on_main_without_its_view_is_not_published(bench: Workbench) -> None:
    """Somebody has transplanted the commit of the table, and not that of the view: nothing is called published."""
    bench.seeded([("a", 0)])
    run = bench.run()
    run.append([("a", 1)])
    client, key = bench.lake.nessie, bench.key()
    table = client.contents(run.name, [key])[key]
    put(bench.lake, run.name, ContentKey((bench.namespace, "v")), view_at("file:/v"))
    put(bench.lake, MAIN, key, table)
    (result,) = bench.publish(run)
    assert isinstance(result, Refused)
