"""Runs whose tags say that they repeat checks for the publisher: they read one prepared state and write nothing."""

import dagster as dg
import polars as pl
import pytest
from pyspark.errors import IllegalArgumentException

from branchlake_dagster.errors import ReadOnlyReference
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.branch_owner import find_check_reference
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.errors import InvalidCheckRun
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

PUBLICATION = "publish-01234567-89ab-4def-8123-456789abcdef"
HASH = "0123456789abcdef"
FREE = table_metadata(require_checks=False)


@pytest.mark.parametrize(
    ("branch", "hash_"),
    [
        ("main", HASH),
        ("run-01234567-89ab-4def-8123-456789abcdef", HASH),
        ("publish-q3-report", HASH),
        (PUBLICATION, ""),
        (PUBLICATION, "main"),
        (f"{PUBLICATION}\n", HASH),
    ],
)
def test_only_a_publication_branch_at_a_hash_is_accepted(branch: str, hash_: str) -> None:
    with pytest.raises(InvalidCheckRun) as refused:
        find_check_reference("r", {RunTag.CHECK_REF: branch, RunTag.CHECK_HASH: hash_})
    assert (refused.value.branch, refused.value.run_id) == (branch, "r")


def test_other_runs_are_not_check_runs() -> None:
    assert find_check_reference("r", {RunTag.CHECK_HASH: HASH}) is None


@pytest.fixture
def prepared(lakehouse: Lakehouse, namespace: str) -> dict[str, str]:
    """The tags of a check run on a prepared state, whose branch moves on afterwards."""
    name = f"publish-{namespace[1:9]}-0000-4000-8000-000000000000"
    client = lakehouse.nessie
    client.create_branch(name, from_ref=MAIN, from_hash=client.reference(MAIN).hash)
    catalog = lakehouse.catalog(name)
    catalog.create_namespace(namespace)
    catalog.create_table((namespace, "t"), pl.DataFrame({"n": [0]}).to_arrow().schema)
    pinned = client.reference(name).hash
    catalog.load_table((namespace, "t")).append(pl.DataFrame({"n": [1]}).to_arrow())
    return {RunTag.CHECK_REF: name, RunTag.CHECK_HASH: pinned}


def test_a_tag_that_names_main_makes_the_run_fail_and_main_stays(
    lakehouse: Lakehouse, namespace: str
) -> None:
    @dg.asset(key=[namespace, "t"], metadata=FREE)
    def t() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    head = lakehouse.nessie.reference(MAIN).hash
    with project(lakehouse, t) as p:
        p.run(ok=False, tags={RunTag.CHECK_REF: MAIN, RunTag.CHECK_HASH: head})
    assert lakehouse.nessie.reference(MAIN).hash == head


def test_an_asset_is_not_materialized_in_a_check_run(
    lakehouse: Lakehouse, namespace: str, prepared: dict[str, str]
) -> None:
    @dg.asset(key=[namespace, "t"], metadata=FREE)
    def t() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, t) as p:
        p.run(ok=False, tags=prepared)
        p.failed_with(ReadOnlyReference)


@pytest.mark.spark
def test_catalog_and_spark_session_of_a_check_run_read_the_pinned_state_and_refuse_writes(
    lakehouse: Lakehouse, namespace: str, prepared: dict[str, str]
) -> None:
    rows: list[int] = []
    heads: list[str] = []

    @dg.asset(key=[namespace, "other"], metadata=FREE)
    def other(lakehouse: LakehouseResource, spark: BranchSparkResource) -> None:
        table = lakehouse.catalog().load_table((namespace, "t"))
        session = spark.spark_session
        rows.extend((table.scan().count(), session.table(f"nessie.{namespace}.t").count()))
        with pytest.raises(ReadOnlyReference):
            table.append(pl.DataFrame({"n": [2]}).to_arrow())
        with pytest.raises(IllegalArgumentException):
            session.sql(f"INSERT INTO nessie.{namespace}.t VALUES (2)")
        heads.append(lakehouse.lakehouse.nessie.reference(prepared[RunTag.CHECK_REF]).hash)

    head = lakehouse.nessie.reference(prepared[RunTag.CHECK_REF]).hash
    with project(lakehouse, other) as p:
        p.run(tags=prepared)
    assert rows == [0, 0]
    assert heads == [head] == [lakehouse.nessie.reference(prepared[RunTag.CHECK_REF]).hash]
