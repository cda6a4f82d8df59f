"""The undo of a publication gives the rows of a history without it, in one commit, or it is refused."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyiceberg.expressions import EqualTo
from pyiceberg.types import StringType

from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieOutcomeUnknown, NessieUnavailable
from branchlake_dagster.publication.ledger import Publication, iter_publications, parse_publications
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.publication.table_change import ChangeMode, SnapshotChange
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables import upserts
from branchlake_dagster.tables.replaced_rows import ReplacedRows, StringSet, to_json
from branchlake_dagster.tables.specification import TableSpec
from branchlake_dagster.undo import later_steps, superseding_steps, table_undo
from branchlake_dagster.undo.find_publication import (
    PublicationNotFound,
    UndoNotReversible,
    find_publication,
)
from branchlake_dagster.undo.publication_undo import PublicationUndo, UndoUnknown
from branchlake_dagster.undo.result import Undo, UndoRefused
from branchlake_dagster_tests.publication.workbench import BY_DAY, FLAT, Rows, Run, Workbench, frame
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.soak import soaking

lakehouse = memory.lakehouse
pytestmark = pytest.mark.filterwarnings("ignore:Delete operation did not match")


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    bench = Workbench(lakehouse, namespace)
    yield bench
    bench.clean()


def publication_of(bench: Workbench, run: Run) -> Publication:
    return find_publication(bench.lake.nessie, run.run_id)


def undoer(bench: Workbench, client: NessieClient | None = None) -> PublicationUndo:
    return PublicationUndo(client or bench.lake.nessie, IcebergTableFormat(bench.lake.catalog()))


def undo(bench: Workbench, run: Run, **options: bool) -> Undo:
    return undoer(bench).undo(publication_of(bench, run), **options)


def refused(bench: Workbench, run: Run, **options: bool) -> UndoRefused:
    head, rows = bench.lake.nessie.reference(MAIN).hash, bench.rows()
    with pytest.raises(UndoRefused) as caught:
        undo(bench, run, **options)
    assert (bench.lake.nessie.reference(MAIN).hash, bench.rows()) == (head, rows)
    return caught.value


def codes(error: UndoRefused) -> set[str]:
    return {dependency.reason.code for dependency in error.dependencies}


def run_ids(error: UndoRefused) -> set[str]:
    return {run_id for dependency in error.dependencies for run_id in dependency.run_ids}


def replaced(run: Run, day: str, rows: Rows, name: str = "t") -> None:
    """As the IO manager replaces a partition: its name and its predicate are recorded."""
    table = run.table(name)
    predicate = ReplacedRows(((StringSet(table.schema().find_field("day").field_id, frozenset({day})),),))
    properties = run.properties("replace_partitions")
    properties |= {LakeProperty.PARTITION: day, LakeProperty.REPLACED: to_json(predicate)}
    transaction = table.transaction()
    transaction.overwrite(frame(rows), overwrite_filter=EqualTo("day", day), snapshot_properties=properties)
    transaction.commit_transaction()


def appended(bench: Workbench, rows: Rows, name: str = "t") -> Run:
    run = bench.run()
    run.append(rows, name)
    bench.published(run)
    return run


@memory.ON_BOTH
def test_an_append_is_undone_and_later_ones_stay(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    wrong = appended(bench, [("a", 2), ("b", 3)])
    appended(bench, [("a", 4)])
    done = undo(bench, wrong)
    assert bench.rows() == [("a", 1), ("a", 4)]
    (table,) = done.tables
    assert (table.action, table.removed_files, table.removed_rows, table.restored_files) == (
        "changed",
        2,
        2,
        0,
    )
    entry = next(iter(bench.lake.nessie.log(MAIN)))
    assert entry.commit.hash == done.commit
    assert entry.commit.properties[LakeProperty.UNDONE_RUNS] == wrong.run_id
    assert parse_publications(entry) == []
    # Another call finds the undo.
    again = undo(bench, wrong)
    assert (again.commit, again.is_new) == (done.commit, False)
    assert bench.rows() == [("a", 1), ("a", 4)]
    # The next run works on the result.
    appended(bench, [("a", 5)])
    assert bench.rows() == [("a", 1), ("a", 4), ("a", 5)]


def test_a_run_that_began_before_the_undo_is_published_after_it(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    wrong = appended(bench, [("a", 2)])
    waiting = bench.run()
    waiting.append([("b", 7)])
    undo(bench, wrong)
    bench.published(waiting)
    assert bench.rows() == [("a", 1), ("b", 7)]


def test_a_dry_run_changes_nothing(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    wrong = appended(bench, [("a", 2)])
    head = bench.lake.nessie.reference(MAIN).hash
    files = bench.main().inspect.metadata_log_entries().num_rows
    planned = undoer(bench).plan(publication_of(bench, wrong))
    assert (planned.commit, planned.tables[0].removed_rows, planned.dependencies) == (None, 1, ())
    assert bench.lake.nessie.reference(MAIN).hash == head
    assert bench.main().inspect.metadata_log_entries().num_rows == files


@pytest.mark.parametrize("record", [replaced, Run.replace], ids=["recorded", "files alone"])
def test_rows_of_a_replaced_partition_come_back(
    bench: Workbench, record: Callable[[Run, str, Rows], None]
) -> None:
    bench.seeded([("a", 1), ("b", 2)])
    wrong = bench.run()
    record(wrong, "a", [("a", 10), ("a", 11)])
    bench.published(wrong)
    appended(bench, [("a", 4), ("c", 5)])
    (table,) = undo(bench, wrong).tables
    assert (table.removed_rows, table.restored_rows) == (2, 1)
    assert bench.rows() == [("a", 1), ("a", 4), ("b", 2), ("c", 5)]


def test_nothing_is_left_of_a_partition_that_was_replaced_again(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 2)])
    wrong, right = bench.run(), None
    replaced(wrong, "a", [("a", 10)])
    bench.published(wrong)
    right = bench.run()
    replaced(right, "a", [("a", 20)])
    bench.published(right)
    done = undo(bench, wrong)
    assert (done.commit, done.tables[0].action) == (None, "unchanged")
    assert done.tables[0].superseded_by == (right.run_id,)
    assert bench.rows() == [("a", 20), ("b", 2)]


def test_another_partition_that_was_replaced_is_independent(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 2)])
    wrong = bench.run()
    replaced(wrong, "a", [("a", 10)])
    bench.published(wrong)
    other = bench.run()
    replaced(other, "b", [("b", 20)])
    bench.published(other)
    undo(bench, wrong)
    assert bench.rows() == [("a", 1), ("b", 20)]


def test_rows_that_were_updated_since_are_followed(bench: Workbench) -> None:
    bench.seeded([("a", 1)], spec=FLAT)
    wrong = appended(bench, [("a", 2)])
    later = bench.run()
    later.upsert([("z", 2)], "id")
    bench.published(later)
    last = appended(bench, [("c", 9)])
    error = refused(bench, wrong)
    assert (codes(error), run_ids(error)) == ({"rewritten_since"}, {later.run_id})
    done = undo(bench, wrong, with_followers=True)
    assert [one.run_id for one in done.publications] == [later.run_id, wrong.run_id]
    assert bench.rows() == [("a", 1), ("c", 9)]
    assert last.run_id not in {one.run_id for one in done.publications}
    assert undo(bench, later).is_new is False


def test_an_upsert_may_not_meet_restored_rows_of_its_keys(bench: Workbench) -> None:
    """Without the wrong run, the later upsert would have updated the row that the wrong run removed."""
    bench.seeded([("a", 1), ("b", 50)], spec=FLAT)
    wrong = bench.run()
    wrong.replace_table([("b", 50)])
    bench.published(wrong)
    later = bench.run()
    later.upsert([("z", 1)], "id")
    bench.published(later)
    assert run_ids(refused(bench, wrong)) == {later.run_id}
    undo(bench, wrong, with_followers=True)
    assert bench.rows() == [("a", 1), ("b", 50)]


def test_a_statement_of_a_user_may_concern_restored_rows(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 2)])
    wrong = bench.run()
    wrong.replace("a", [])
    bench.published(wrong)
    later = bench.run()
    later.table().delete(EqualTo("id", 2), snapshot_properties=later.properties(None))
    bench.published(later)
    assert codes(refused(bench, wrong)) == {"rows_changed_since"}


def test_a_created_table_goes_and_one_that_others_use_stays(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    alone, shared = bench.run(), bench.run()
    for run, name in ((alone, "alone"), (shared, "shared")):
        run.create(name)
        run.append([("a", 1)], name)
        bench.published(run)
    appended(bench, [("b", 2)], "shared")
    (dropped,) = undo(bench, alone).tables
    assert (dropped.action, dropped.removed_files, dropped.removed_rows) == ("dropped", 1, 1)
    assert undo(bench, shared).tables[0].action == "changed"
    namespace = bench.namespace
    assert [key[-1] for key in bench.lake.catalog().list_tables((namespace,))] == ["shared", "t"]
    assert bench.rows("shared") == [("b", 2)]
    assert bench.main("shared").properties.get("gc.enabled") == "false"


def test_a_created_table_whose_metadata_was_removed_goes(bench: Workbench) -> None:
    run = bench.run()
    run.create("new")
    run.append([("a", 1)], "new")
    bench.published(run)
    Path(bench.main("new").metadata_location.removeprefix("file://")).unlink()
    (dropped,) = undo(bench, run).tables
    assert (dropped.action, dropped.removed_files, dropped.removed_rows) == ("dropped", 0, None)
    assert bench.lake.catalog().list_tables((bench.namespace,)) == []


def test_a_dropped_table_comes_back(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    wrong = bench.run()
    wrong.catalog.drop_table((bench.namespace, "t"))
    bench.published(wrong)
    (restored,) = undo(bench, wrong).tables
    assert (restored.action, restored.restored_files, restored.restored_rows) == ("restored", 1, 1)
    assert (restored.removed_files, restored.removed_rows) == (0, 0)
    assert bench.rows() == [("a", 1)]
    appended(bench, [("a", 2)])
    assert bench.rows() == [("a", 1), ("a", 2)]


def test_a_dropped_table_that_was_created_again_stays_as_it_is(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    wrong = bench.run()
    wrong.catalog.drop_table((bench.namespace, "t"))
    bench.published(wrong)
    later = bench.run()
    later.create()
    later.append([("b", 2)])
    bench.published(later)
    error = refused(bench, wrong)
    assert (codes(error), run_ids(error)) == ({"changed_since"}, {later.run_id})
    undo(bench, wrong, with_followers=True)
    assert bench.rows() == [("a", 1)]


def test_a_renamed_table_gets_its_name_back(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    wrong = bench.run()
    wrong.catalog.rename_table((bench.namespace, "t"), (bench.namespace, "u"))
    bench.published(wrong)
    tables = undo(bench, wrong).tables
    assert [table.action for table in tables] == ["restored", "dropped"]
    assert {(table.removed_rows, table.restored_rows) for table in tables} == {(0, 0)}
    assert {(table.removed_files, table.restored_files) for table in tables} == {(0, 0)}
    assert [key[-1] for key in bench.lake.catalog().list_tables((bench.namespace,))] == ["t"]
    assert bench.rows() == [("a", 1)]


def test_new_columns_are_reverted_unless_somebody_used_them(bench: Workbench) -> None:
    bench.seeded([("a", 1)])

    def add_column() -> Run:
        run = bench.run()
        with run.table().update_schema() as update:
            update.add_column("note", StringType())
        run.append([("b", 2)])
        bench.published(run)
        return run

    wrong = add_column()
    undo(bench, wrong)
    assert bench.main().schema().column_names == ["day", "id"]
    assert bench.rows() == [("a", 1)]
    wrong = add_column()
    later = appended(bench, [("c", 3)])
    error = refused(bench, wrong)
    assert (codes(error), run_ids(error)) == ({"columns_used"}, {later.run_id})


def test_all_tables_of_a_publication_in_one_commit(bench: Workbench) -> None:
    names = [f"t{number}" for number in range(10)]
    for name in names:
        bench.seeded([("a", 1)], name=name)
    wrong = bench.run()
    for name in names:
        wrong.append([("a", 2)], name)
    bench.published(wrong)
    before = bench.lake.nessie.reference(MAIN).hash
    done = undo(bench, wrong)
    assert [entry.commit.hash for entry in bench.lake.nessie.log(MAIN, since=before)] == [done.commit]
    assert all(bench.rows(name) == [("a", 1)] for name in names)


def test_one_table_that_others_use_keeps_all_tables(bench: Workbench) -> None:
    bench.seeded([("a", 1)], spec=FLAT)
    bench.seeded([("a", 1)], name="u")
    wrong = bench.run()
    wrong.append([("a", 2)])
    wrong.append([("a", 2)], "u")
    bench.published(wrong)
    later = bench.run()
    later.upsert([("z", 2)], "id")
    bench.published(later)
    refused(bench, wrong)
    assert bench.rows("u") == [("a", 1), ("a", 2)]


def test_one_publication_of_a_commit_with_several(bench: Workbench) -> None:
    bench.seeded([("x", 0)])
    runs = [bench.run() for _ in range(3)]
    for number, run in enumerate(runs):
        run.append([("a", number), ("b", number)])
        run.table().transaction().set_properties(
            {f"{LakeProperty.OFFSETS_PREFIX}{number}": "1"}
        ).commit_transaction()
    hashes = {result.hash for result in bench.published(*runs)}
    assert len(hashes) == 1
    with pytest.raises(PublicationNotFound):
        find_publication(bench.lake.nessie, hashes.pop())
    undo(bench, runs[1])
    assert bench.rows() == [("a", 0), ("a", 2), ("b", 0), ("b", 2), ("x", 0)]


def ingest(bench: Workbench, rows: Rows, offset: int) -> Run:
    """As a batch of an ingestion: the offsets are in the snapshot and in the table's property."""
    run = bench.run()
    append_batch(run, rows, offset)
    bench.published(run)
    return run


def append_batch(run: Run, rows: Rows, offset: int) -> None:
    name = f"{LakeProperty.OFFSETS_PREFIX}flights"
    transaction = run.table().transaction()
    transaction.append(frame(rows), snapshot_properties={**run.properties("append"), name: str(offset)})
    transaction.set_properties({name: str(offset)})
    transaction.commit_transaction()


def test_offsets_move_back_with_the_rows_unless_they_shall_stay(bench: Workbench) -> None:
    name = f"{LakeProperty.OFFSETS_PREFIX}flights"
    bench.seeded([("a", 0)])
    first = ingest(bench, [("a", 1)], 10)
    undone = undo(bench, ingest(bench, [("a", 2)], 20))
    assert undone.tables[0].properties == (name,)
    assert bench.main().properties[name] == "10"
    undo(bench, ingest(bench, [("a", 3)], 20), keep_positions=True)
    assert (bench.main().properties[name], bench.rows()) == ("20", [("a", 0), ("a", 1)])
    undo(bench, first, keep_positions=True)
    assert (bench.main().properties[name], bench.rows()) == ("20", [("a", 0)])


def test_batches_after_the_undone_one_are_its_followers(bench: Workbench) -> None:
    name = f"{LakeProperty.OFFSETS_PREFIX}flights"
    bench.seeded([("a", 0)])
    runs = [ingest(bench, [("a", number)], 10 * number) for number in (1, 2, 3)]
    error = refused(bench, runs[1])
    assert (codes(error), run_ids(error)) == ({"positions_moved"}, {runs[2].run_id})
    done = undo(bench, runs[1], with_followers=True)
    assert [one.run_id for one in done.publications] == [runs[2].run_id, runs[1].run_id]
    assert (bench.main().properties[name], bench.rows()) == ("10", [("a", 0), ("a", 1)])
    undo(bench, runs[0])
    assert name not in bench.main().properties


class LosingClient(NessieClient):
    """Loses the replies to the next commits; `arrives` says whether the commits are made."""

    losses = 0
    arrives = True
    fails_after_loss = False
    has_lost = False

    def log(self, *arguments: Any, **options: Any) -> Any:
        if self.fails_after_loss and self.has_lost:
            raise NessieUnavailable("The server is away.")
        return super().log(*arguments, **options)

    def commit(self, *arguments: Any, **options: Any) -> Any:
        if not self.losses:
            return super().commit(*arguments, **options)
        self.losses -= 1
        self.has_lost = True
        if self.arrives:
            super().commit(*arguments, **options)
        raise NessieOutcomeUnknown("The reply was lost.")


def losing(bench: Workbench, losses: int, *, arrives: bool) -> LosingClient:
    nessie = bench.lake.nessie
    client = LosingClient(nessie.uri, transport=nessie._transport)
    client.losses, client.arrives = losses, arrives
    return client


@pytest.mark.parametrize("arrives", [True, False])
def test_a_lost_reply_undoes_once(bench: Workbench, arrives: bool) -> None:
    bench.seeded([("a", 1)])
    wrong = appended(bench, [("a", 2)])
    done = undoer(bench, losing(bench, 1, arrives=arrives)).undo(publication_of(bench, wrong))
    assert done.is_new
    assert bench.rows() == [("a", 1)]
    marks = [
        entry
        for entry in bench.lake.nessie.log(MAIN)
        if LakeProperty.UNDONE_PUBLICATIONS in entry.commit.properties
    ]
    assert [entry.commit.hash for entry in marks] == [done.commit]


def test_an_outcome_that_stays_unknown_is_no_failure(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    wrong = appended(bench, [("a", 2)])
    with pytest.raises(UndoUnknown):
        undoer(bench, losing(bench, 99, arrives=False)).undo(publication_of(bench, wrong))
    undo(bench, wrong)
    assert bench.rows() == [("a", 1)]


@pytest.mark.parametrize("arrives", [True, False])
def test_a_failure_after_a_lost_reply_leaves_the_outcome_unknown(bench: Workbench, arrives: bool) -> None:
    bench.seeded([("a", 1)])
    wrong = appended(bench, [("a", 2)])
    client = losing(bench, 1, arrives=arrives)
    client.fails_after_loss = True
    with pytest.raises(UndoUnknown):
        undoer(bench, client).undo(publication_of(bench, wrong))
    undo(bench, wrong)
    assert bench.rows() == [("a", 1)]


def test_a_publication_is_named_by_run_publication_or_commit(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    wrong = appended(bench, [("a", 2)])
    found = publication_of(bench, wrong)
    nessie = bench.lake.nessie
    assert find_publication(nessie, found.hash[:12]) == found
    assert find_publication(nessie, found.hash) == found
    assert find_publication(nessie, found.publication_id) == found
    for name in ("abc", "no-such-run", bench.namespace):
        with pytest.raises(PublicationNotFound):
            find_publication(nessie, name)
    assert found in list(iter_publications(nessie))


def test_the_commit_of_an_undo_is_refused_with_the_runs_to_launch_again(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    first = appended(bench, [("a", 2)])
    second = ingest(bench, [("b", 3)], 10)
    nessie = bench.lake.nessie
    commits = [undo(bench, run).commit or "" for run in (first, second)]
    for commit, run in zip(commits, (first, second), strict=True):
        for name in (commit, commit[:24]):
            with pytest.raises(UndoNotReversible) as caught:
                find_publication(nessie, name)
            assert (caught.value.commit, caught.value.run_ids) == (commit, (run.run_id,))
    # A run is named as before, also if its publication is undone.
    assert find_publication(nessie, first.run_id).run_id == first.run_id
    assert undo(bench, first).commit == commits[0]
    # The same rows can be published and undone again.
    undo(bench, appended(bench, [("a", 2)]))
    assert bench.rows() == [("a", 1)]


# -- what later publications did with the tables ----------------------------------------------------------


def test_a_table_that_was_renamed_since_is_found(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    wrong = appended(bench, [("a", 2)])
    later = bench.run()
    later.catalog.rename_table((bench.namespace, "t"), (bench.namespace, "u"))
    bench.published(later)
    with pytest.raises(UndoRefused) as caught:
        undo(bench, wrong)
    assert (codes(caught.value), run_ids(caught.value)) == ({"renamed"}, {later.run_id})


def test_a_table_that_was_dropped_since_would_hide_rows(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    bench.seeded([("a", 1)], name="s")
    wrong = bench.run()
    for name in ("t", "s"):
        wrong.append([("a", 2)], name)
    bench.published(wrong)
    later = bench.run()
    later.catalog.drop_table((bench.namespace, "t"))
    bench.published(later)
    with pytest.raises(UndoRefused) as caught:
        undo(bench, wrong)
    assert run_ids(caught.value) == {later.run_id}
    undo(bench, wrong, with_followers=True)
    assert (bench.rows(), bench.rows("s")) == ([("a", 1)], [("a", 1)])


def test_runs_that_created_a_table_in_one_commit(bench: Workbench) -> None:
    bench.seeded([], name="z")
    runs = [bench.run(), bench.run()]
    for number, run in enumerate(runs):
        run.create()
        run.append([("a", number)])
    assert len({result.hash for result in bench.published(*runs)}) == 1
    undo(bench, runs[0])
    assert bench.rows() == [("a", 1)]


def test_columns_of_another_run_in_the_same_commit_stay(bench: Workbench) -> None:
    bench.seeded([("x", 0)])
    columns, rows = bench.run(), bench.run()
    with columns.table().update_schema() as update:
        update.add_column("note", StringType())
    rows.append([("b", 1)])
    bench.published(columns, rows)
    assert codes(refused(bench, rows)) == {"shared_commit"}


@pytest.mark.parametrize("count", [1, 2])
def test_expired_snapshots_of_the_publication_refuse_its_undo(bench: Workbench, count: int) -> None:
    wrong = bench.run()
    wrong.create()
    for number in range(count):
        wrong.append([("a", number)])
    bench.published(wrong)
    appended(bench, [("b", 3)])
    table = bench.main()
    table.maintenance.expire_snapshots().by_ids([table.metadata.snapshots[0].snapshot_id]).commit()
    assert codes(refused(bench, wrong)) == {"history_lost"}


def test_an_upsert_that_keeps_rows_may_have_skipped_keys(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    wrong = appended(bench, [("a", 5)])
    later = bench.run()
    spec = TableSpec(identifier=(bench.namespace, "t"), write_mode="upsert", keys=("id",), keeps_matched=True)
    planned = upserts.plan_upsert(frame([("b", 5), ("b", 6)]), later.table(), spec, None)
    assert isinstance(planned, upserts.UpsertPlan)
    upserts.write_upsert(planned, later.properties("upsert", "id") | {LakeProperty.WHEN_MATCHED: "keep"})
    bench.published(later)
    error = refused(bench, wrong)
    assert (codes(error), run_ids(error)) == ({"keys_skipped"}, {later.run_id})


def test_the_undo_of_a_replacement_may_not_bring_undone_rows_back(bench: Workbench) -> None:
    """Also if the replacement was written by a failed run whose retry was published."""
    bench.seeded([("a", 1)])
    bench.seeded([("a", 1)], name="s")
    wrong = bench.run()
    replaced(wrong, "a", [("a", 2)])
    wrong.append([("z", 9)], "s")
    bench.published(wrong)
    retry = bench.run()
    failed = Run(bench, f"{retry.run_id}-failed", retry.base)
    table = retry.table()
    predicate = ReplacedRows(((StringSet(table.schema().find_field("day").field_id, frozenset({"a"})),),))
    properties = failed.properties("replace_partitions")
    properties |= {LakeProperty.PARTITION: "a", LakeProperty.REPLACED: to_json(predicate)}
    table.overwrite(frame([("a", 3)]), overwrite_filter=EqualTo("day", "a"), snapshot_properties=properties)
    bench.published(retry)
    undo(bench, wrong)
    assert codes(refused(bench, retry)) == {"hides_undone_rows"}


def test_followers_are_undone_in_their_order(bench: Workbench) -> None:
    bench.seeded([("a", 0)])
    first = ingest(bench, [("a", 1)], 10)
    second = ingest(bench, [("b", 2)], 20)
    last = bench.run()
    with last.table().update_schema() as update:
        update.add_column("note", StringType())
    last.replace("a", [("a", 7)])
    bench.published(last)
    done = undo(bench, first, with_followers=True)
    assert [one.run_id for one in done.publications] == [last.run_id, second.run_id, first.run_id]
    assert (bench.main().schema().column_names, bench.rows()) == (["day", "id"], [("a", 0)])
    again = undo(bench, first)
    assert [one.run_id for one in again.publications] == [last.run_id, second.run_id, first.run_id]
    assert [(table.table, table.action) for table in again.tables] == [(f"{bench.namespace}.t", "changed")]


def test_offsets_of_a_batch_in_a_commit_with_others_move_back(bench: Workbench) -> None:
    name = f"{LakeProperty.OFFSETS_PREFIX}flights"
    bench.seeded([("x", 0)])
    other, batch = bench.run(), bench.run()
    other.append([("a", 1)])
    append_batch(batch, [("b", 2)], 10)
    assert len({result.hash for result in bench.published(other, batch)}) == 1
    assert undo(bench, batch).tables[0].properties == (name,)
    assert (name in bench.main().properties, bench.rows()) == (False, [("a", 1), ("x", 0)])


def test_what_is_between_a_publication_and_its_replacement_does_not_matter(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 2)])
    wrong = bench.run()
    replaced(wrong, "a", [("a", 10), ("a", 11)])
    bench.published(wrong)
    between = bench.run()
    between.table().delete(EqualTo("id", 10), snapshot_properties=between.properties(None))
    bench.published(between)
    right = bench.run()
    replaced(right, "a", [("a", 20)])
    bench.published(right)
    for follow in (False, True):
        done = undo(bench, wrong, with_followers=follow)
        assert (done.commit, done.tables[0].superseded_by) == (None, (right.run_id,))
    assert bench.rows() == [("a", 20), ("b", 2)]


def test_both_publications_of_a_commit_that_created_a_table(bench: Workbench) -> None:
    bench.seeded([], name="z")
    runs = [bench.run(), bench.run()]
    for number, run in enumerate(runs):
        run.create()
        append_batch(run, [("a", number)], 10) if number else run.append([("a", number)])
    bench.published(*runs)
    undo(bench, runs[1])
    undo(bench, runs[0])
    assert bench.rows() == []


def test_a_publication_whose_earlier_metadata_was_collected_is_refused(bench: Workbench) -> None:
    """After the history horizon, the collector deletes the states before and after the publication."""
    bench.seeded([("a", 1)])
    before = Path(bench.main().metadata_location.removeprefix("file://"))
    wrong = appended(bench, [("a", 2)])
    after = Path(bench.main().metadata_location.removeprefix("file://"))
    appended(bench, [("b", 3)])
    before.unlink()
    error = refused(bench, wrong)
    assert codes(error) == {"history_lost"}
    after.unlink()
    assert codes(refused(bench, wrong)) == {"history_lost"}


def test_a_drop_whose_earlier_metadata_was_collected_is_refused(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    before = Path(bench.main().metadata_location.removeprefix("file://"))
    run = bench.run()
    run.catalog.drop_table((bench.namespace, "t"))
    bench.published(run)
    before.unlink()
    with pytest.raises(UndoRefused) as caught:
        undo(bench, run)
    assert codes(caught.value) == {"files_gone"}


def test_a_missing_file_of_main_is_an_error_of_the_storage(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    wrong = appended(bench, [("a", 2)])
    appended(bench, [("b", 3)])
    Path(bench.main().metadata_location.removeprefix("file://")).unlink()
    with pytest.raises(FileNotFoundError):
        undo(bench, wrong)


# -- random histories ----------------------------------------------------------------------------------


HISTORIES = int(os.environ.get("BRANCHLAKE_TEST_UNDO_HISTORIES", "12" if soaking() else "4"))
FIRST_SEED = int(os.environ.get("BRANCHLAKE_TEST_UNDO_SEED", "0"))


@dataclass(frozen=True)
class Step:
    """One publication of a random history. `rows` are the model's rows after it as a function of those before."""

    kind: str
    day: str
    rows: tuple[tuple[str, int], ...]

    def write(self, run: Run, name: str) -> None:
        match self.kind:
            case "append":
                run.append(self.rows, name)
            case "replace":
                replaced(run, self.day, self.rows, name)
            case "replace by files":
                run.replace(self.day, self.rows, name)
            case "upsert":
                run.upsert(self.rows, "id", name=name)
            case "upsert by day":
                run.upsert(self.rows, "day", "id", name=name)
            case "delete":
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # it may match nothing
                    run.table(name).delete(EqualTo("day", self.day), snapshot_properties=run.properties(None))
            case "replace table":
                run.replace_table(self.rows, name)

    def apply(self, rows: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        if self.kind == "append":
            kept = list(rows)
        elif self.kind in ("replace", "replace by files", "delete"):
            kept = [row for row in rows if row[0] != self.day]
        elif self.kind == "upsert":
            kept = [row for row in rows if row[1] not in {number for _, number in self.rows}]
        elif self.kind == "upsert by day":
            kept = [row for row in rows if row not in self.rows]
        else:
            kept = []
        return sorted([*kept, *self.rows])


@dataclass
class History:
    """Draws steps whose appended ids are new, so that keys are unique."""

    random: random.Random
    next_id: int = 0
    ids: list[int] = field(default_factory=list)
    upsert: str = ""

    def __post_init__(self) -> None:
        self.upsert = self.random.choice(["upsert", "upsert by day"])

    def step(self) -> Step:
        kind = self.random.choice(
            ["append", "append", "replace", "replace by files", self.upsert, "delete", "replace table"]
        )
        day = self.random.choice("abc")
        if kind == "delete":
            return Step(kind, day, ())
        count = self.random.randrange(1, 4)
        if kind.startswith("upsert") and self.ids:
            numbers = {self.random.choice(self.ids) for _ in range(count)}
        else:
            numbers = set(range(self.next_id, self.next_id + count))
            self.next_id += count
            self.ids += numbers
        if kind.startswith("replace") and kind != "replace table":
            return Step(kind, day, tuple((day, number) for number in sorted(numbers)))
        if kind == "upsert by day":
            return Step(kind, day, tuple((self.random.choice("abc"), number) for number in sorted(numbers)))
        return Step(kind, day, tuple((self.random.choice("abc"), number) for number in sorted(numbers)))


def check_history(bench: Workbench, seed: int, history_class: type[History] = History) -> int:
    """Undo the publications of a random history in another order; return how many undos were not refused.

    After each of them `main` must have the rows of the history without the undone publications.
    """
    history = history_class(random.Random(seed))
    seed_rows = [("a", -1), ("b", -2), ("c", -3)]
    name = f"t{seed}"
    bench.seeded(seed_rows, spec=FLAT if seed % 3 == 0 else BY_DAY, name=name)
    steps: list[Step] = []
    runs: list[Run] = []
    for _ in range(8):
        step, run = history.step(), bench.run()
        step.write(run, name)
        if bench.lake.nessie.reference(run.name).hash != run.base:  # a statement may match nothing
            bench.published(run)
            steps.append(step)
            runs.append(run)
    remaining, count = list(range(len(steps))), 0
    for number in history.random.sample(range(len(steps)), len(steps)):
        if number not in remaining:
            continue
        follow = history.random.random() < 0.3
        try:
            done = undo(bench, runs[number], with_followers=follow)
        except UndoRefused:
            continue
        gone = {publication.run_id for publication in done.publications}
        if done.commit is not None:
            remaining = [one for one in remaining if runs[one].run_id not in gone]
            count += 1
        expected = sorted(seed_rows)
        for one in remaining:
            if runs[one].run_id not in gone:
                expected = steps[one].apply(expected)
        assert bench.rows(name) == expected, f"{seed=}, step {number}, {follow=}, {remaining=}, {steps}"
    return count


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + HISTORIES))
def test_undone_or_refused_but_never_wrong(bench: Workbench, seed: int) -> None:
    assert check_history(bench, seed) > 0


def _forget_undone_steps(steps: Sequence[SnapshotChange]) -> list[SnapshotChange]:
    return list(steps)


def _supersede_always(step: SnapshotChange, _: SnapshotChange) -> bool:
    return step.mode in (ChangeMode.REPLACE_TABLE, ChangeMode.REPLACE_PARTITIONS)


def _follow_nothing(*_: Any) -> None:
    return None


BUGS: dict[str, tuple[int, ModuleType, str, Any]] = {
    "an earlier undo is not known": (2, table_undo, "_drop_undone_steps", _forget_undone_steps),
    "every replacement counts as complete": (1, superseding_steps, "_supersedes", _supersede_always),
    "later updates do not count": (7, table_undo, "follow_later_step", _follow_nothing),
    "restored rows meet later updates": (0, later_steps, "_require_independent_rows", _follow_nothing),
}
"""A planted bug -> the seed of a history that finds it, and what is replaced by what."""


@pytest.mark.parametrize("bug", BUGS)
def test_the_histories_find_a_planted_bug(
    bench: Workbench, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_seed, module, name, replacement = BUGS[bug]
    monkeypatch.setattr(module, name, replacement)
    found = []
    for seed in range(first_seed, 100):
        try:
            check_history(bench, seed)
        except (AssertionError, FileNotFoundError) as error:  # wrong rows, or files that are gone
            found.append((seed, error))
            break
    assert found, f"No history of 100 finds: {bug}."
