"""The undo of publications that changed the partition spec of a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyiceberg.expressions import EqualTo
from pyiceberg.table import Table
from pyiceberg.table.update import RemovePartitionSpecsUpdate
from pyiceberg.types import StringType

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.publication.workbench import Rows, Run, Workbench, frame
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.undo.test_undo import appended, codes, refused, run_ids, undo

lakehouse = memory.lakehouse
pytestmark = pytest.mark.filterwarnings("ignore:Delete operation did not match")


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    bench = Workbench(lakehouse, namespace)
    yield bench
    bench.clean()


def add_id(table: Table) -> None:
    with table.update_spec() as update:
        update.add_identity("id")


def remove_id(table: Table) -> None:
    with table.update_spec() as update:
        update.remove_field("id")


def repartitioned(bench: Workbench, rows: Rows = ()) -> Run:
    """A publication that partitions by `id`, too, and appends rows."""
    run = bench.run()
    add_id(run.table())
    if rows:
        run.append(rows)
    bench.published(run)
    return run


def spec_names(bench: Workbench) -> list[str]:
    return [field.name for field in bench.main().spec().fields]


@memory.ON_BOTH
@pytest.mark.parametrize("rows", [(), (("a", 7), ("c", 8))], ids=["spec alone", "with rows"])
def test_the_earlier_spec_becomes_the_default_again(bench: Workbench, rows: Rows) -> None:
    bench.seeded([("a", 1), ("b", 2)])
    wrong = repartitioned(bench, rows)
    assert spec_names(bench) == ["day", "id"]
    (table,) = undo(bench, wrong).tables
    assert (table.action, table.restores_spec, table.removed_rows) == ("changed", True, len(rows))
    assert (spec_names(bench), bench.rows()) == (["day"], [("a", 1), ("b", 2)])
    assert undo(bench, wrong).is_new is False
    # Later runs write files of the earlier spec, and the spec can be added again.
    appended(bench, [("c", 3)])
    assert {file.spec_id for file in data_files(bench)} == {0}
    undo(bench, repartitioned(bench, [("a", 4)]))
    assert bench.rows() == [("a", 1), ("b", 2), ("c", 3)]


def data_files(bench: Workbench) -> list[Any]:
    return [task.file for task in bench.main().scan().plan_files()]


def test_a_later_step_that_wrote_files_of_the_new_spec_depends_on_it(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    wrong = repartitioned(bench)
    later = appended(bench, [("a", 2)])
    error = refused(bench, wrong)
    assert (codes(error), run_ids(error)) == ({"partition_spec_used"}, {later.run_id})
    undo(bench, wrong, with_followers=True)
    assert (spec_names(bench), bench.rows()) == (["day"], [("a", 1)])


def test_a_later_step_that_was_undone_does_not_count(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    wrong = repartitioned(bench)
    undo(bench, appended(bench, [("a", 2)]))
    undo(bench, wrong)
    assert (spec_names(bench), bench.rows()) == (["day"], [("a", 1)])


def test_a_later_step_that_only_removed_files_is_independent(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 2)])
    wrong = repartitioned(bench)
    later = bench.run()
    later.table().delete(EqualTo("day", "b"), snapshot_properties=later.properties(None))
    bench.published(later)
    undo(bench, wrong)
    assert (spec_names(bench), bench.rows()) == (["day"], [("a", 1)])


def test_a_writer_that_is_not_a_run_cannot_be_undone(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    wrong = repartitioned(bench)
    bench.main().append(frame([("a", 2)]))
    error = refused(bench, wrong, with_followers=True)
    assert (codes(error), run_ids(error)) == ({"partition_spec_used"}, set())


def test_a_spec_that_was_changed_since_stays(bench: Workbench) -> None:
    """Also if it is the spec of the publication again: without the publication, the last change would set it."""
    bench.seeded([("a", 1)])
    wrong = repartitioned(bench)
    for change in (remove_id, add_id):
        later = bench.run()
        change(later.table())
        bench.published(later)
        assert codes(refused(bench, wrong)) == {"partition_spec_changed_since"}


def test_a_publication_that_also_changed_columns_stays(bench: Workbench) -> None:
    """The spec stays in the metadata, and readers may need its column."""
    bench.seeded([("a", 1)])
    wrong = bench.run()
    table = wrong.table()
    with table.update_schema() as columns:
        columns.add_column("note", StringType())
    with table.update_spec() as update:
        update.add_identity("note")
    bench.published(wrong)
    assert codes(refused(bench, wrong)) == {"partition_spec"}


def test_files_of_the_new_spec_do_not_come_back(bench: Workbench) -> None:
    """A publication that set a former spec again may have replaced files of that spec."""
    bench.seeded([("a", 1)])
    repartitioned(bench, [("a", 2)])
    former = bench.run()
    remove_id(former.table())
    bench.published(former)
    wrong = bench.run()
    add_id(wrong.table())
    wrong.table().delete(EqualTo("id", 2), snapshot_properties=wrong.properties(None))
    bench.published(wrong)
    assert bench.rows() == [("a", 1)]
    assert codes(refused(bench, wrong)) == {"partition_spec"}


def test_files_of_the_earlier_spec_do_not_come_back(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    wrong = bench.run()
    add_id(wrong.table())
    wrong.replace_table([("a", 2)])
    bench.published(wrong)
    assert codes(refused(bench, wrong)) == {"older_partition_spec"}


def test_a_table_that_was_rolled_back_since_stays(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    appended(bench, [("a", 2)])
    wrong = repartitioned(bench)
    table = bench.main()
    table.manage_snapshots().set_current_snapshot(table.metadata.snapshots[0].snapshot_id).commit()
    assert codes(refused(bench, wrong)) == {"history_lost"}


def test_a_spec_that_was_removed_from_the_table_stays_away(bench: Workbench) -> None:
    bench.seeded([])
    wrong = repartitioned(bench)
    transaction = bench.main().transaction()
    transaction._apply((RemovePartitionSpecsUpdate(spec_ids=[0]),))
    transaction.commit_transaction()
    assert codes(refused(bench, wrong)) == {"partition_spec"}


def test_a_run_with_files_of_the_undone_spec_is_refused(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    wrong = repartitioned(bench)
    waiting = bench.run()
    waiting.append([("a", 2)])
    undo(bench, wrong)
    assert bench.refused(waiting).codes == ("partition_spec",)


def test_a_spec_that_another_publication_set_in_between_stays(bench: Workbench) -> None:
    """Both publications are undone together; the spec of the publication between them is not theirs."""
    bench.seeded([("a", 1)])
    wrong = repartitioned(bench, [("a", 2)])
    between = bench.run()
    remove_id(between.table())
    bench.published(between)
    later = bench.run()
    add_id(later.table())
    later.append([("b", 3)])
    bench.published(later)
    assert run_ids(refused(bench, wrong)) == {later.run_id}
    assert codes(refused(bench, wrong, with_followers=True)) == {"partition_spec"}
