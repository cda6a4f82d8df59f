"""What a rebase carries of a change to a table's metadata, what it refuses by name, and that `main`'s stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import SortField, SortOrder
from pyiceberg.table.statistics import StatisticsFile
from pyiceberg.table.update import (
    AddSortOrderUpdate,
    SetCurrentSchemaUpdate,
    SetDefaultSortOrderUpdate,
    SetLocationUpdate,
)
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.publication.workbench import SCHEMA, Run, Workbench
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    bench = Workbench(lakehouse, namespace)
    yield bench
    bench.clean()


def tag(run: Run) -> None:
    table = run.table()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    table.manage_snapshots().create_tag(snapshot.snapshot_id, "audited").commit()


def branch(run: Run) -> None:
    table = run.table()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    table.manage_snapshots().create_branch(snapshot.snapshot_id, "audit").commit()


def sort(run: Run) -> None:
    order = SortOrder(SortField(2, IdentityTransform()), order_id=1)
    with run.table().transaction() as change:
        change._apply((AddSortOrderUpdate(sort_order=order), SetDefaultSortOrderUpdate(sort_order_id=-1)))


def location(run: Run) -> None:
    with run.table().transaction() as change:
        change._apply((SetLocationUpdate(location=f"{run.table().location()}-elsewhere"),))


def statistics(run: Run) -> None:
    table = run.table()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    with table.update_statistics() as update:
        update.set_statistics(
            StatisticsFile(
                snapshot_id=snapshot.snapshot_id,
                statistics_path=f"{table.location()}/metadata/none.stats",
                file_size_in_bytes=1,
                file_footer_size_in_bytes=1,
                blob_metadata=[],
            )
        )


def upgrade(run: Run) -> None:
    run.sql("ALTER TABLE {t} SET TBLPROPERTIES ('format-version'='3')")


def expire(run: Run) -> None:
    run.append([("c", 9)])
    snapshot = run.table().snapshots()[0]
    run.table().maintenance.expire_snapshots().by_id(snapshot.snapshot_id).commit()


def partition(run: Run) -> None:
    with run.table().update_spec() as update:
        update.add_identity("id")


def roll_back(run: Run) -> None:
    first = run.table().snapshots()[0]
    run.table().manage_snapshots().rollback_to_snapshot(first.snapshot_id).commit()


NOT_CARRIED: list[tuple[Callable[[Run], None], str]] = [
    (tag, "tags_and_branches_changed"),
    (branch, "tags_and_branches_changed"),
    (sort, "sort_order_changed"),
    (location, "location_changed"),
    (statistics, "statistics_changed"),
    (expire, "snapshots_expired"),
    (partition, "partition_spec"),
    (roll_back, "history_lost"),
    pytest.param(
        upgrade,
        "format_version_changed",
        marks=pytest.mark.spark,
    ),
]


def seeded(bench: Workbench) -> None:
    """A table with two snapshots."""
    bench.seeded([("a", 1)])
    more = bench.run()
    more.append([("a", 2)])
    bench.published(more)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("change", "code"), NOT_CARRIED)
def test_what_is_not_carried_is_refused_by_name(
    bench: Workbench, change: Callable[[Run], None], code: str, alone: bool
) -> None:
    """Also when nothing else was done: such a run has no snapshot of its own."""
    seeded(bench)
    other, run = bench.run(), bench.run()
    if not alone:
        run.append([("b", 3)])
    change(run)
    other.append([("b", 4)])
    bench.published(other)
    refused = bench.refused(run)
    assert refused.codes == (code,)
    assert refused.conflicts.keys() == {f"{bench.namespace}.t"}
    assert refused.only_expired == (change is expire)
    assert bench.rows() == [("a", 1), ("a", 2), ("b", 4)]


@pytest.mark.parametrize(("change", "code"), NOT_CARRIED)
def test_without_a_rebase_all_of_it_is_published(
    bench: Workbench, change: Callable[[Run], None], code: str
) -> None:
    seeded(bench)
    run = bench.run()
    change(run)
    wanted = run.table().metadata
    bench.published(run)
    assert bench.main().metadata == wanted


def add_column(run: Run) -> None:
    with run.table().update_schema() as update:
        update.add_column("n", LongType(), doc="how many")


def rename_column(run: Run) -> None:
    with run.table().update_schema() as update:
        update.rename_column("id", "number")


def document_column(run: Run) -> None:
    with run.table().update_schema() as update:
        update.update_column("id", doc="the number")


def move_column(run: Run) -> None:
    with run.table().update_schema() as update:
        update.move_first("id")


def drop_column(run: Run) -> None:
    with run.table().update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("id")


CARRIED = [add_column, rename_column, document_column, move_column, drop_column]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("change", CARRIED)
def test_all_there_is_to_columns_is_carried(
    bench: Workbench, change: Callable[[Run], None], alone: bool
) -> None:
    bench.seeded([("a", 1)])
    other, run = bench.run(), bench.run()
    if not alone:
        run.append([("b", 3)])
    change(run)
    wanted = run.table().schema()
    other.append([("b", 4)])
    bench.published(other)
    bench.published(run)
    assert bench.main().schema() == wanted
    assert bench.main().schema().column_names == wanted.column_names
    assert len(bench.main().scan().to_arrow()) == (2 if alone else 3)


def test_identifier_fields_are_carried(bench: Workbench) -> None:
    schema = Schema(
        NestedField(1, "day", StringType(), required=False), NestedField(2, "id", LongType(), required=True)
    )
    first = bench.run()
    first.create(schema=schema)
    bench.published(first)
    other, run = bench.run(), bench.run()
    with run.table().update_schema() as update:
        update.set_identifier_fields("id")
    other.table().transaction().set_properties({"owner": "x"}).commit_transaction()
    bench.published(other)
    bench.published(run)
    assert bench.main().schema().identifier_field_names() == {"id"}
    assert bench.main().properties["owner"] == "x"


@pytest.mark.parametrize("mine", [document_column, rename_column, add_column])
def test_both_changed_the_columns(bench: Workbench, mine: Callable[[Run], None]) -> None:
    bench.seeded([("a", 1)])
    other, same, run = bench.run(), bench.run(), bench.run()
    mine(run)
    for one in (other, same):
        with one.table().update_schema() as update:
            update.update_column("day", doc="UTC")
        bench.published(one)
    assert bench.refused(run).codes == ("column_details" if mine is document_column else "columns",)


def test_both_created_it_with_different_documentation(bench: Workbench) -> None:
    one, two = bench.run(), bench.run()
    one.create()
    documented = Schema(SCHEMA.fields[0], SCHEMA.fields[1].model_copy(update={"doc": "the number"}))
    two.create(schema=documented)
    bench.published(one)
    assert bench.refused(two).codes == ("created_with_other_details",)


@pytest.mark.parametrize("change", [tag, branch, sort, location, statistics, document_column])
def test_what_main_changed_survives_the_rebase(bench: Workbench, change: Callable[[Run], None]) -> None:
    seeded(bench)
    other, run, after = bench.run(), bench.run(), bench.run()
    change(other)
    other.append([("b", 4)])
    run.append([("b", 3)])
    after.replace("a", [("a", 10)])
    bench.published(other)
    before = bench.main().metadata
    bench.published(run)
    bench.published(after)
    now = bench.main().metadata
    assert now.location == before.location
    assert now.statistics == before.statistics
    assert now.sort_order() == before.sort_order()
    assert now.schema() == before.schema()
    assert now.table_uuid == before.table_uuid
    assert {name: ref for name, ref in now.refs.items() if name != "main"} == {
        name: ref for name, ref in before.refs.items() if name != "main"
    }
    assert bench.rows() == [("a", 10), ("b", 3), ("b", 4)]


def test_the_id_of_a_schema_may_be_taken_on_main(bench: Workbench) -> None:
    """Main tried another schema and went back: the id of the run's schema is that one's."""
    bench.seeded([("a", 1)])
    run, same, tried = bench.run(), bench.run(), bench.run()
    for one in (run, same):
        document_column(one)
        one.append([("a", 2)])
    with tried.table().update_schema() as update:
        update.update_column("day", doc="UTC")
    with tried.table().transaction() as change:
        change._apply((SetCurrentSchemaUpdate(schema_id=0),))
    tried.append([("a", 3)])
    bench.published(tried)
    bench.published(run)
    bench.published(same)
    schemas = bench.main().metadata.schemas
    assert [schema.schema_id for schema in schemas] == [0, 1, 2]
    assert [schema.find_field("day").doc for schema in schemas] == [None, "UTC", None]
    assert bench.main().schema() == schemas[2] == run.table().schema()
    assert bench.rows() == [("a", 1), ("a", 2), ("a", 2), ("a", 3)]


@pytest.mark.spark
@pytest.mark.parametrize("gone", ["RENAME COLUMN id TO number", "DROP COLUMN id"])
def test_a_key_column_that_main_renamed_or_dropped_is_named(bench: Workbench, gone: str) -> None:
    """It was a ValueError of PyIceberg's, at each pass again."""
    bench.seeded([("a", 1), ("b", 2)])
    run = bench.run()
    run.sql(
        "MERGE INTO {t} USING (SELECT 'a' AS day, 1L AS id) s ON {t}.day = s.day AND {t}.id = s.id"
        " WHEN MATCHED THEN UPDATE SET *",
        mode="upsert",
        keys="day,id",
    )
    bench.sql(f"ALTER TABLE {{t}} {gone}", "INSERT INTO {t} SELECT * FROM {t} WHERE day = 'b'")
    (code,) = bench.refused(run).codes
    assert code in ("key_column_gone", "column_dropped")


@pytest.mark.spark
def test_a_renamed_partition_column_is_named(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 2)])
    run = bench.run()
    run.replace("a", [("a", 3)])
    bench.sql("ALTER TABLE {t} RENAME COLUMN day TO date", "INSERT INTO {t} VALUES ('b', 4)")
    assert bench.refused(run).codes == ("partition_column_renamed",)
