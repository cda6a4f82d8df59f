"""Undos of delete files, partition specs and columns, beside later changes that would make a result wrong."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable

import pyarrow as pa
import pytest
from pyiceberg.expressions import EqualTo
from pyiceberg.manifest import ManifestContent
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.types import StringType

from branchlake_dagster.history.capture import capture_change, current_position
from branchlake_dagster.history.change import ChangeLost, LossReason
from branchlake_dagster.history.manifests import read_live_files
from branchlake_dagster.internals.pyiceberg import build_snapshot, write_data_files
from branchlake_dagster.publication.ledger import Refused
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.undo.result import UndoRefused
from branchlake_dagster_tests.publication.rebase.deleting import (
    commit_deletes,
    delete_at,
    delete_equal,
    write_position_deletes,
)
from branchlake_dagster_tests.publication.workbench import ARROW, BY_DAY, FLAT, Rows, Run, Workbench, frame
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.undo import test_undo_deletes
from branchlake_dagster_tests.undo.test_undo import appended, codes, refused, replaced, undo
from branchlake_dagster_tests.undo.test_undo_deletes import (
    deleted_by_position,
    live_deletes,
    path_of,
    published,
)

lakehouse = memory.lakehouse
bench = test_undo_deletes.bench
pytestmark = pytest.mark.filterwarnings("ignore:Delete operation did not match")


def change_table(bench: Workbench, change: Callable[[Table], None]) -> Run:
    return published(bench, lambda run: change(run.table()))


def insert_unseen(run: Run, rows: Rows) -> None:
    """What an upsert does with keys whose rows it does not see."""
    run.table().append(frame(rows), snapshot_properties=run.properties("upsert", "id"))


def update_by_position(run: Run, new_rows: Rows) -> None:
    """Replace the first row of the only file by `new_rows`, as an UPDATE by merge-on-read."""
    table = run.table()
    (task,) = table.scan().plan_files()
    delete_file = write_position_deletes(table, task.file, [0])
    rows = frame(new_rows).cast(ARROW)
    added = write_data_files(table.metadata, rows, table.io, commit=uuid.uuid4(), numbers=itertools.count())
    commit_deletes(table, [delete_file], properties=run.properties(None), added=list(added))


def add_column(table: Table) -> None:
    with table.update_schema() as update:
        update.add_column("note", StringType())


# -- open runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [FLAT, BY_DAY])
@pytest.mark.parametrize("is_update", [False, True])
def test_an_open_upsert_that_did_not_see_a_returning_row_is_refused(
    bench: Workbench, spec: PartitionSpec, is_update: bool
) -> None:
    bench.seeded([("a", 1), ("a", 2)], spec=spec)
    if is_update:
        path = ""
        wrong = published(bench, lambda run: update_by_position(run, [("a", 900)]))
    else:
        (task,) = bench.main().scan().plan_files()
        path = str(task.file.file_path)
        wrong = deleted_by_position(bench, path, 0)
    upserting = bench.run()
    insert_unseen(upserting, [("a", 1)])
    appended(bench, [("z", 1000)])
    undo(bench, wrong)
    rows = bench.rows()
    assert ("a", 1) in rows
    (result,) = bench.publish(upserting)
    assert isinstance(result, Refused)
    assert result.codes == ("same_keys",)
    assert bench.rows() == rows


# -- consumers -----------------------------------------------------------------------------------------


def test_a_consumer_learns_that_replaced_deletes_were_undone(bench: Workbench) -> None:
    """The removed delete file repeats the positions of one that the consumer had read."""
    bench.seeded([("a", 1), ("a", 2), ("a", 3)], spec=FLAT)
    (task,) = bench.main().scan().plan_files()
    path, start = str(task.file.file_path), current_position(bench.main())
    first = deleted_by_position(bench, path, 0)
    (earlier,) = live_deletes(bench)
    after_first = current_position(bench.main())
    published(
        bench,
        lambda run: delete_at(run.table(), path, 0, 1, properties=run.properties(None), replaces=[earlier]),
    )
    undo(bench, first, with_followers=True)
    assert bench.rows() == [("a", 1), ("a", 2), ("a", 3)]
    for position in (start, after_first):
        with pytest.raises(ChangeLost) as caught:
            capture_change(bench.main(), position, name="t")
        assert caught.value.loss is LossReason.DELETES_UNDONE


def test_a_consumer_learns_that_two_statements_of_a_run_were_undone(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("a", 2), ("a", 3)], spec=FLAT)
    (task,) = bench.main().scan().plan_files()
    path, start = str(task.file.file_path), current_position(bench.main())

    def delete_twice(run: Run) -> None:
        delete_at(run.table(), path, 0, properties=run.properties(None))
        table = run.table()
        (earlier,) = read_live_files(table.io, table.current_snapshot(), ManifestContent.DELETES)
        delete_at(table, path, 0, 1, properties=run.properties(None), replaces=[earlier])

    wrong = published(bench, delete_twice)
    undo(bench, wrong)
    assert bench.rows() == [("a", 1), ("a", 2), ("a", 3)]
    with pytest.raises(ChangeLost) as caught:
        capture_change(bench.main(), start, name="t")
    assert caught.value.loss is LossReason.DELETES_UNDONE


# -- replaced since ------------------------------------------------------------------------------------


def test_a_statement_that_did_not_see_removed_rows_would_have_moved_them(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("c", 5)])
    wrong = published(bench, lambda run: replaced(run, "a", [("a", 9)]))

    def move_to_b(run: Run) -> None:
        """`UPDATE t SET day = 'b' WHERE id IN (1, 5)`, which sees only row 5."""
        table = run.table()
        (task,) = table.scan(EqualTo("day", "c")).plan_files()
        rows = frame([("b", 5)]).cast(ARROW)
        added = write_data_files(
            table.metadata, rows, table.io, commit=uuid.uuid4(), numbers=itertools.count()
        )
        updates = build_snapshot(
            table,
            added=list(added),
            removed=[task.file],
            operation=Operation.OVERWRITE,
            properties=run.properties(None),
            written_paths=[],
        )
        transaction = table.transaction()
        transaction._apply(updates)
        transaction.commit_transaction()

    published(bench, move_to_b)
    published(bench, lambda run: replaced(run, "a", [("a", 7)]))
    assert codes(refused(bench, wrong)) == {"rows_changed_since"}


def test_an_upsert_may_have_skipped_keys_of_rows_that_were_replaced_since(bench: Workbench) -> None:
    bench.seeded([("c", 5)])
    wrong = published(bench, lambda run: replaced(run, "a", [("a", 1)]))

    def keep_existing(run: Run) -> None:
        """An upsert of (b, 1) and (b, 2) that keeps the row with key 1."""
        properties = {**run.properties("upsert", "id"), LakeProperty.WHEN_MATCHED: "keep"}
        run.table().append(frame([("b", 2)]), snapshot_properties=properties)

    published(bench, keep_existing)
    published(bench, lambda run: replaced(run, "a", [("a", 7)]))
    assert codes(refused(bench, wrong)) == {"keys_skipped"}


# -- specs and columns ---------------------------------------------------------------------------------


def test_the_spec_of_a_column_that_was_dropped_since_does_not_return(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 2)])

    def remove_field(table: Table) -> None:
        with table.update_spec() as update:
            update.remove_field("day")

    def drop_column(table: Table) -> None:
        with table.update_schema(allow_incompatible_changes=True) as update:
            update.delete_column("day")

    wrong = change_table(bench, remove_field)
    change_table(bench, drop_column)
    assert codes(refused(bench, wrong)) == {"columns_used"}


def test_a_column_that_a_later_spec_uses_is_not_removed(bench: Workbench) -> None:
    bench.seeded([("a", 1)])

    def partition_by_note(table: Table) -> None:
        with table.update_spec() as update:
            update.add_identity("note")

    wrong = change_table(bench, add_column)
    change_table(bench, partition_by_note)
    assert codes(refused(bench, wrong)) == {"columns_used"}


def test_a_column_that_later_delete_files_use_is_not_removed(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 2)])

    def write_notes(run: Run) -> None:
        add_column(run.table())
        schema = ARROW.append(pa.field("note", pa.string()))
        rows = pa.table({"day": ["a"], "id": [7], "note": ["x"]}, schema=schema)
        run.table().append(rows, snapshot_properties=run.properties("append"))

    wrong = published(bench, write_notes)
    published(bench, lambda run: delete_equal(run.table(), "note", "x", "a", run.properties(None)))
    with pytest.raises(UndoRefused) as caught:  # PyIceberg cannot read the rows
        undo(bench, wrong)
    assert codes(caught.value) == {"columns_used"}


def test_replaced_delete_files_of_another_spec_do_not_return(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("a", 2), ("a", 3)])
    path = path_of(bench, "a")
    deleted_by_position(bench, path, 0)
    (earlier,) = live_deletes(bench)

    def add_id(table: Table) -> None:
        with table.update_spec() as update:
            update.add_identity("id")

    def remove_id_and_delete(run: Run) -> None:
        with run.table().update_spec() as update:
            update.remove_field("id")
        delete_at(run.table(), path, 0, 1, properties=run.properties(None), replaces=[earlier])

    change_table(bench, add_id)
    wrong = published(bench, remove_id_and_delete)
    assert codes(refused(bench, wrong)) == {"partition_spec"}


def test_columns_can_be_undone_after_the_undo_of_a_later_delete_file(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("a", 2)])
    path = path_of(bench, "a")
    wrong = change_table(bench, add_column)
    later = deleted_by_position(bench, path, 0)
    assert codes(refused(bench, wrong)) == {"columns_used"}
    undo(bench, later)
    undo(bench, wrong)
    assert bench.rows() == [("a", 1), ("a", 2)]
    assert not any(field.name == "note" for field in bench.main().schema().fields)
