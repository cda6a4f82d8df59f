"""Two runs that changed one table: both are published when their changes do not overlap, else one is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.table.snapshots import Operation
from pyiceberg.types import IntegerType, LongType, NestedField, StringType

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.ledger import NeedsChecks, Published, Refused, iter_publications
from branchlake_dagster.publication.replay import TableFilesMissing
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster_tests.harness import published
from branchlake_dagster_tests.internals.plain_pyiceberg import plain_pyiceberg
from branchlake_dagster_tests.publication.workbench import FLAT, Run, Workbench, frame
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    bench = Workbench(lakehouse, namespace)
    yield bench
    bench.clean()


def pair(bench: Workbench) -> tuple[Run, Run]:
    """Two runs that start from the same `main`."""
    return bench.run(), bench.run()


# -- what is replayed ----------------------------------------------------------------------------------


@memory.ON_BOTH
def test_two_appends_are_both_published_once(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    one, two = pair(bench)
    one.append([("a", 2)])
    two.append([("b", 3), ("b", 4)])
    (first,), (second,) = bench.published(one), bench.published(two)
    assert (first.rebased_tables, second.rebased_tables) == ((), (f"{bench.namespace}.t",))
    assert bench.rows() == [("a", 1), ("a", 2), ("b", 3), ("b", 4)]
    snapshots = {s.summary["branchlake.run_id"]: s for s in bench.main().snapshots() if s.summary}
    replayed = snapshots[two.run_id]
    original = two.table().current_snapshot()
    assert original is not None
    assert replayed.summary is not None
    assert replayed.summary[LakeProperty.REPLAYED_FROM] == str(original.snapshot_id)
    assert replayed.summary["branchlake.write_mode"] == "append"
    assert (replayed.summary["added-records"], replayed.summary["total-records"]) == ("2", "4")
    assert replayed.parent_snapshot_id == snapshots[one.run_id].snapshot_id
    # Publishing again, from whatever process, finds both in the ledger.
    again = bench.publish(one, two)
    assert again == [Published(first.hash, is_new=False), Published(second.hash, is_new=False)]
    assert bench.rows() == [("a", 1), ("a", 2), ("b", 3), ("b", 4)]


def test_an_append_follows_replaced_partitions(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 2)])
    one, two = pair(bench)
    one.replace("a", [("a", 10)])
    two.append([("a", 3)])
    bench.published(one)
    bench.published(two)
    assert bench.rows() == [("a", 3), ("a", 10), ("b", 2)]


def test_replaced_partitions_follow_one_another_and_stay_apart(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 2), ("c", 3)])
    one, two, three = bench.run(), bench.run(), bench.run()
    one.replace("a", [("a", 10)])
    two.replace("b", [("b", 20)])
    three.replace("c", [])
    for run in (one, two, three):
        bench.published(run)
    assert bench.rows() == [("a", 10), ("b", 20)]
    current = bench.main().current_snapshot()
    assert current is not None
    assert current.summary is not None
    assert current.summary["total-records"] == "2"
    assert current.summary["total-data-files"] == "2"


def test_both_create_the_table_of_a_backfill_on_an_empty_lake(bench: Workbench) -> None:
    one, two = pair(bench)
    for run, day in ((one, "a"), (two, "b")):
        run.create()
        run.replace(day, [(day, 1)])
    bench.published(one)
    bench.published(two)
    assert bench.rows() == [("a", 1), ("b", 1)]
    # The second's files lie in the directory it made for itself; the table is the first one's.
    assert bench.main().location() == one.table().location() != two.table().location()


def test_a_run_with_several_tables_is_all_in_or_all_out(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    bench.seeded([("a", 1)], name="u")
    one, two, three = bench.run(), bench.run(), bench.run()
    one.append([("a", 2)])
    one.append([("b", 2)], "u")
    two.append([("a", 3)])
    two.replace("a", [("a", 30)], "u")
    two.create("v")
    three.append([("a", 4)])
    three.replace("b", [("b", 40)], "u")
    bench.published(one)
    bench.published(two)
    refused = bench.refused(three)
    assert refused.partitions == ("day=b",)
    assert refused.runs == (one.run_id,)
    assert refused.conflicts.keys() == {f"{bench.namespace}.u"}
    assert bench.rows() == [("a", 1), ("a", 2), ("a", 3)]
    assert bench.rows("u") == [("a", 30), ("b", 2)]
    assert bench.rows("v") == []


def test_new_columns_travel_with_the_run(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    one, two, three = bench.run(), bench.run(), bench.run()
    one.append([("a", 2)])
    for run in (two, three):
        with run.table().update_schema() as update:
            update.add_column("n", LongType())
        columns = {"day": ["b"], "id": [3], "n": [7]}
        run.table().append(
            frame([]).schema.empty_table().append_column("n", [[]]).from_pydict(columns),
            snapshot_properties=run.properties("append"),
        )
    for run in (one, two, three):
        bench.published(run)
    assert bench.rows() == [("a", 1, None), ("a", 2, None), ("b", 3, 7), ("b", 3, 7)]


def narrow(bench: Workbench) -> None:
    """A table on `main` whose `id` and `n` are ints, with one row."""
    first = bench.run()
    fields = (("day", StringType()), ("id", IntegerType()), ("n", IntegerType()))
    columns = [NestedField(i, name, kind, required=False) for i, (name, kind) in enumerate(fields, 1)]
    first.create(spec=FLAT, schema=Schema(*columns))
    add(first, "a", 1)
    bench.published(first)


def add(run: Run, day: str, number: int, *widened: str) -> None:
    """Append a row after widening columns to long, as the IO manager does."""
    if widened:
        with run.table().update_schema() as update:
            for column in widened:
                update.update_column(column, field_type=LongType())
    table = run.table()
    rows = pa.Table.from_pylist([{"day": day, "id": number, "n": 0}])
    rows = rows.cast(table.schema().as_arrow())
    table.append(rows, snapshot_properties=run.properties("append"))


def types(bench: Workbench) -> list[str]:
    return [str(field.field_type) for field in bench.main().schema().fields]


def test_a_widened_column_travels_with_the_run_and_reads_what_was_narrow(bench: Workbench) -> None:
    """Main has moved on in the old type; then comes one that was written narrow while main was widened."""
    narrow(bench)
    stays, widens, late = bench.run(), bench.run(), bench.run()
    add(stays, "b", 2)
    add(widens, "c", 2**40, "id")
    add(late, "d", 4)
    for run in (stays, widens, late):
        bench.published(run)
    assert types(bench) == ["string", "long", "int"]
    assert bench.rows() == [("a", 1, 0), ("b", 2, 0), ("c", 2**40, 0), ("d", 4, 0)]
    assert bench.main().scan(row_filter="id < 3").to_arrow().num_rows == 2


def test_runs_that_wait_with_the_same_widening_are_all_published(bench: Workbench) -> None:
    narrow(bench)
    one, two = pair(bench)
    add(one, "b", 2**40, "id")
    add(two, "c", 2**41, "id")
    bench.published(one, two)
    assert bench.rows() == [("a", 1, 0), ("b", 2**40, 0), ("c", 2**41, 0)]


def test_of_runs_that_wait_with_different_widenings_the_second_is_refused(bench: Workbench) -> None:
    narrow(bench)
    one, two = pair(bench)
    add(one, "b", 2**40, "id")
    add(two, "c", 3, "n")
    first, second = bench.publish(one, two)
    assert isinstance(first, Published)
    assert isinstance(second, Refused)
    assert {name: why.code for name, why in second.conflicts.items()} == {f"{bench.namespace}.t": "columns"}
    assert second.runs == (one.run_id,)
    assert types(bench) == ["string", "long", "int"]
    assert bench.rows() == [("a", 1, 0), ("b", 2**40, 0)]


def test_a_snapshot_without_files_is_kept_for_its_properties(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    one, two = pair(bench)
    one.append([("a", 2)])
    two.table().append(frame([]), snapshot_properties={**two.properties("append"), "offsets": "41"})
    bench.published(one)
    bench.published(two)
    current = bench.main().current_snapshot()
    assert current is not None
    assert current.summary is not None
    assert current.summary["offsets"] == "41"
    assert bench.rows() == [("a", 1), ("a", 2)]


def test_properties_follow_unless_both_set_them(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    one, two, three = bench.run(), bench.run(), bench.run()
    for run, name, value in ((one, "owner", "x"), (two, "note", "y"), (three, "owner", "z")):
        run.table().transaction().set_properties({name: value}).commit_transaction()
        run.append([("a", 2)])
    bench.published(one)
    bench.published(two)
    assert (bench.main().properties["owner"], bench.main().properties["note"]) == ("x", "y")
    assert bench.refused(three).codes == ("same_property",)


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["branchlake.offsets.orders", "branchlake.reprocessed.orders"])
def test_what_is_recorded_hides_no_roll_back(bench: Workbench, name: str) -> None:
    bench.seeded([("a", 1)])
    first = bench.main().metadata.current_snapshot_id
    assert first is not None
    before = bench.run()
    before.append([("a", 2)])
    bench.published(before)
    run = bench.run()
    run.table().transaction().set_properties({name: "x"}).commit_transaction()
    run.append([("a", 3)])
    bench.main().manage_snapshots().rollback_to_snapshot(first).commit()
    assert bench.refused(run).codes == ("rolled_back",)


def test_the_same_partition_twice_is_refused_by_name(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 2)])
    one, two = pair(bench)
    one.replace("a", [("a", 10)])
    two.replace("a", [("a", 20)])
    bench.published(one)
    refused = bench.refused(two)
    assert {name: why.code for name, why in refused.conflicts.items()} == {
        f"{bench.namespace}.t": "same_files"
    }
    assert (refused.partitions, refused.runs) == (("day=a",), (one.run_id,))
    assert bench.rows() == [("a", 10), ("b", 2)]


def test_whole_tables_are_replaced_by_one_run_at_a_time(bench: Workbench) -> None:
    """Peers' behaviour 2: two overwrites, the second is refused and named."""
    bench.seeded([("a", 1)], spec=FLAT)
    one, two, three = bench.run(), bench.run(), bench.run()
    one.replace_table([("a", 10)])
    two.replace_table([("a", 20)])
    three.append([("a", 30)])
    bench.published(one)
    assert bench.refused(two).runs == (one.run_id,)
    bench.published(three)
    assert bench.rows() == [("a", 10), ("a", 30)]


def test_a_truncation_is_known_without_a_recorded_mode(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 2)])
    one, two = pair(bench)
    one.append([("c", 3)])
    two.table().delete()
    bench.published(one)
    assert bench.refused(two).codes == ("run_replaced_table",)


def test_a_deleted_partition_is_replayed_as_a_deletion(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 2)])
    one, two = pair(bench)
    one.append([("a", 3)])
    two.table().delete("day == 'b'")
    bench.published(one)
    bench.published(two)
    assert bench.rows() == [("a", 1), ("a", 3)]
    current = bench.main().current_snapshot()
    assert current is not None
    assert current.summary is not None
    assert current.summary.operation is Operation.DELETE


def compact(run: Run) -> None:
    """The same rows in another file, as a maintenance job does."""
    run.sql(
        "CALL nessie.system.rewrite_data_files(table => '{t}', options => map('rewrite-all', 'true'))".replace(
            "{t}", f"{run.bench.namespace}.t"
        )
    )


@pytest.mark.spark
def test_compaction_on_main_meets_appends_and_replacements(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 2)])
    one, two, three = bench.run(), bench.run(), bench.run()
    compact(one)
    two.append([("a", 3)])
    three.replace("b", [("b", 20)])
    bench.published(one)
    bench.published(two)
    bench.published(three)  # it removed all of what was rewritten into the new file of its partition
    assert bench.rows() == [("a", 1), ("a", 3), ("b", 20)]


@pytest.mark.spark
def test_a_compaction_of_the_runs_own_follows_an_append(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    one, two = pair(bench)
    one.append([("a", 2)])
    compact(two)
    bench.published(one)
    bench.published(two)
    assert bench.rows() == [("a", 1), ("a", 2)]
    current = bench.main().current_snapshot()
    assert current is not None
    assert current.summary is not None
    assert current.summary.operation is Operation.REPLACE


def test_a_new_partition_spec_on_main_is_refused(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    one, two = pair(bench)
    with one.table().update_spec() as update:
        update.add_identity("id")
    two.append([("a", 3)])
    bench.published(one)
    assert bench.refused(two).codes == ("partition_spec",)


@pytest.mark.parametrize("what", ["drop", "rename"])
def test_a_table_that_is_gone_or_elsewhere_is_refused(bench: Workbench, what: str) -> None:
    bench.seeded([("a", 1)])
    one, two, three = bench.run(), bench.run(), bench.run()
    identifier = (bench.namespace, "t")
    for run in (one, three):
        if what == "drop":
            run.catalog.drop_table(identifier)
        else:
            run.catalog.rename_table(identifier, (bench.namespace, f"t_{run.run_id[-8:]}"))
    two.append([("a", 2)])
    bench.published(two)
    assert bench.refused(one).codes == ("dropped_and_changed",)
    four = bench.run()
    four.append([("a", 4)])
    five = bench.run()
    if what == "drop":
        five.catalog.drop_table(identifier)
    else:
        five.catalog.rename_table(identifier, (bench.namespace, "elsewhere"))
    bench.published(five)
    assert bench.refused(four).codes == ("renamed" if what == "rename" else "dropped",)


@memory.ON_BOTH
def test_a_rename_is_published_with_its_rows(bench: Workbench) -> None:
    """Nessie 0.99 merges a branch with a rename as though the table had been dropped."""
    bench.seeded([("a", 1)])
    run = bench.run()
    run.catalog.rename_table((bench.namespace, "t"), (bench.namespace, "u"))
    run.append([("a", 2)], "u")
    bench.published(run)
    assert bench.rows("u") == [("a", 1), ("a", 2)]
    assert not bench.lake.catalog().table_exists((bench.namespace, "t"))


@memory.ON_BOTH
def test_dropped_and_created_again_is_refused(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    one, two = pair(bench)
    one.catalog.drop_table((bench.namespace, "t"))
    one.create()
    two.append([("a", 2)])
    bench.published(one)
    assert bench.refused(two).codes == ("created_again",)


def test_a_namespace_that_is_gone_is_refused(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    one, two = pair(bench)
    one.catalog.drop_table((bench.namespace, "t"))
    one.catalog.drop_namespace((bench.namespace,))
    two.create("u")
    bench.published(one)
    assert bench.refused(two).codes == ("namespace_dropped",)


@memory.ON_BOTH
def test_both_drop_it(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    one, two = pair(bench)
    for run in (one, two):
        run.catalog.drop_table((bench.namespace, "t"))
        bench.published(run)
    assert not bench.lake.catalog().table_exists((bench.namespace, "t"))
    assert [p.run_id for p in iter_publications(bench.lake.nessie, limit=1)] == [two.run_id]


def test_checks_on_the_whole_table_are_asked_for_only_when_it_was_rebased(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    one, two = pair(bench)
    one.append([("a", 2)])
    two.append([("a", 3)])
    checked = frozenset({bench.key()})
    results = bench.publisher.publish([one.candidate(checked)])
    assert isinstance(results[one.name], Published)
    results = bench.publisher.publish([two.candidate(checked)])
    assert results[two.name] == NeedsChecks((f"{bench.namespace}.t",))
    assert bench.rows() == [("a", 1), ("a", 2)]


# -- Spark's own changes -------------------------------------------------------------------------------

ENGINES = pytest.mark.parametrize("by", ["PyIceberg", pytest.param("Spark", marks=pytest.mark.spark)])


@ENGINES
def test_upserts_meet_by_partition_and_by_key(bench: Workbench, by: str) -> None:
    bench.seeded([("a", 1), ("b", 2)])
    one, two, three = bench.run(), bench.run(), bench.run()
    one.upsert([("a", 1)], "day", "id", by=by)
    two.upsert([("b", 5)], "day", "id", by=by)
    three.upsert([("a", 1)], "day", "id", by=by)
    bench.published(one)
    bench.published(two)
    assert bench.refused(three).partitions == ("day=a",)
    assert bench.rows() == [("a", 1), ("b", 2), ("b", 5)]


@pytest.mark.spark
def test_sparks_own_notes_in_the_table_are_no_conflict(bench: Workbench) -> None:
    """Iceberg's Java catalogue writes the commit it started from into the properties, at each commit."""
    bench.seeded([("a", 1)])
    one, two = pair(bench)
    for run, day in ((one, "a"), (two, "b")):
        for number in (2, 3):
            run.sql(f"INSERT INTO {{t}} VALUES ('{day}', {number}{len(run.run_id)})", mode="append")
    bench.published(one)
    bench.published(two)
    assert len(bench.rows()) == 5


@ENGINES
def test_upserts_without_partitions_meet_by_the_bounds_of_their_keys(bench: Workbench, by: str) -> None:
    bench.seeded([], spec=FLAT)
    for rows in ([("a", 1), ("a", 9)], [("a", 100), ("a", 109)]):
        more = bench.run()
        more.append(rows)
        bench.published(more)
    one, two, three = bench.run(), bench.run(), bench.run()
    one.upsert([("a", 9)], "id", by=by)
    two.upsert([("a", 109)], "id", by=by)
    three.upsert([("a", 5)], "id", by=by)
    bench.published(one)
    bench.published(two)
    assert bench.refused(three).codes == ("same_keys",)
    assert bench.rows() == [("a", 1), ("a", 9), ("a", 100), ("a", 109)]


def test_an_upsert_of_new_keys_meets_rows_that_were_appended(bench: Workbench) -> None:
    """It only adds files, but it is no append: after other rows it might have matched them."""
    bench.seeded([("a", 1)], spec=FLAT)
    appending, near, far = bench.run(), bench.run(), bench.run()
    appending.append([("a", 5), ("a", 9)])
    near.upsert([("a", 7)], "id")
    far.upsert([("a", 70)], "id")
    bench.published(appending)
    bench.published(far)
    assert bench.refused(near).codes == ("same_keys",)
    assert bench.rows() == [("a", 1), ("a", 5), ("a", 9), ("a", 70)]


def test_an_upsert_that_moves_a_row_meets_the_partition_that_it_left(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 2)])
    moving, replacing = pair(bench)
    moving.upsert([("c", 1)], "id")
    replacing.replace("a", [("a", 10)])
    bench.published(moving)
    assert bench.refused(replacing).partitions == ("day=a",)
    assert bench.rows() == [("b", 2), ("c", 1)]


def test_upserts_meet_in_a_row_group_that_the_bounds_leave_out(bench: Workbench) -> None:
    """PyIceberg in another process: the bounds of the first file are those of its first row group."""
    first = bench.run()
    with first.create(spec=FLAT).transaction() as change:
        change.set_properties({"write.parquet.row-group-limit": "2"})
    bench.published(first)
    one, two = pair(bench)
    with plain_pyiceberg():
        for run, keys in ((one, ["m", "m", "a" * 5000, "q"]), (two, ["q"])):
            rows = [(key, number) for number, key in enumerate(keys)]
            run.table().append(frame(rows), snapshot_properties=run.properties("upsert", "day"))
    bench.published(one)
    assert bench.refused(two).conflicts.keys() == {f"{bench.namespace}.t"}


@pytest.mark.spark
def test_update_and_delete_in_sql(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("a", 2), ("b", 3), ("b", 4)])
    one, two, three = bench.run(), bench.run(), bench.run()
    one.sql("UPDATE {t} SET id = 10 WHERE day = 'a' AND id = 1")
    two.sql("DELETE FROM {t} WHERE day = 'b' AND id = 4")
    three.sql("DELETE FROM {t} WHERE day = 'a' AND id = 2")
    bench.published(one)
    bench.published(two)
    assert bench.refused(three).partitions == ("day=a",)
    assert bench.rows() == [("a", 2), ("a", 10), ("b", 3)]


@pytest.mark.spark
def test_merge_on_read_is_refused(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("a", 2), ("b", 3)])
    change = bench.run()
    change.sql("ALTER TABLE {t} SET TBLPROPERTIES ('write.delete.mode'='merge-on-read')")
    bench.published(change)
    one, two, three = bench.run(), bench.run(), bench.run()
    one.sql("DELETE FROM {t} WHERE id = 2")
    two.append([("b", 4)])
    three.sql("DELETE FROM {t} WHERE id = 1")
    bench.published(one)
    bench.published(two)  # an append follows delete files too
    assert bench.refused(three).codes == ("run_wrote_delete_files",)
    assert bench.rows() == [("a", 1), ("b", 3), ("b", 4)]


# -- several at once -----------------------------------------------------------------------------------


@memory.ON_BOTH
def test_waiting_runs_go_in_one_commit_and_a_refused_one_delays_no_other(bench: Workbench) -> None:
    bench.seeded([("a", 0)])
    base = bench.lake.nessie.reference("main").hash
    runs = [bench.run() for _ in range(8)]
    for number, run in enumerate(runs, start=1):
        if number in (3, 5):
            run.replace("a", [("a", number)])
        else:
            run.append([("b", number)])
    results = bench.publish(*runs)
    hashes = {result.hash for result in results if isinstance(result, Published)}
    assert len(hashes) == 1
    assert [number for number, r in enumerate(results, start=1) if isinstance(r, Refused)] == [5]
    refused = results[4]
    assert isinstance(refused, Refused)
    assert (refused.partitions, refused.runs) == (("day=a",), (runs[2].run_id,))
    assert bench.rows() == [("a", 3), *[("b", n) for n in (1, 2, 4, 6, 7, 8)]]
    told = published(bench.lake.nessie, [run.name for run in runs])
    assert told.keys() == {run.name for run in runs} - {runs[4].name}
    assert {one.hash for one in told.values()} == hashes
    assert all(one.tables == (f"{bench.namespace}.t",) and one.base_hash == base for one in told.values())
    assert len(bench.main().snapshots()) == 1 + 6 + 1 + 1  # a replacement is a deletion and an append


def test_a_run_whose_files_are_gone_delays_no_other_run(bench: Workbench) -> None:
    bench.seeded([("a", 0)])
    one, two, three = bench.run(), bench.run(), bench.run()
    for run in (one, two, three):
        run.append([("b", 1)])
    snapshot = two.table().current_snapshot()
    assert snapshot is not None
    two.table().io.delete(snapshot.manifest_list)
    first, lost, third = bench.publish(one, two, three)
    assert (type(first), type(third)) == (Published, Published)
    assert isinstance(lost, TableFilesMissing)
    assert (lost.run_id, lost.table) == (two.run_id, f"{bench.namespace}.t")
    assert len(bench.rows()) == 3


def test_runs_that_create_the_same_table_go_in_one_commit(bench: Workbench) -> None:
    runs = [bench.run() for _ in range(3)]
    for number, run in enumerate(runs):
        run.create()
        run.replace(f"d{number}", [(f"d{number}", number)])
    assert len({one.hash for one in bench.published(*runs)}) == 1
    assert bench.rows() == [("d0", 0), ("d1", 1), ("d2", 2)]


def test_a_refused_group_member_leaves_no_files_behind(bench: Workbench) -> None:
    bench.seeded([("a", 0)])
    bench.seeded([("a", 0)], name="u")
    one, two, three = bench.run(), bench.run(), bench.run()
    one.append([("a", 1)])
    one.replace("a", [("a", 1)], "u")
    two.append([("a", 2)])
    two.replace("a", [("a", 2)], "u")
    three.append([("a", 3)])
    results = bench.publish(one, two, three)
    assert [type(result) for result in results] == [Published, Refused, Published]
    assert bench.rows() == [("a", 0), ("a", 1), ("a", 3)]
    assert bench.rows("u") == [("a", 1)]


# -- serializable --------------------------------------------------------------------------------------


def skew(bench: Workbench, *, serializable: bool) -> list[object]:
    """Each run reads what the other one writes."""
    bench.seeded([("a", 1)])
    bench.seeded([("a", 1)], name="u")
    one = bench.run(reads=["u"] if serializable else None)
    two = bench.run(reads=["t"] if serializable else None)
    one.append([("a", 2)], "t")
    two.append([("a", 2)], "u")
    return [*bench.publish(one), *bench.publish(two)]


def test_write_skew_is_possible_under_snapshot_isolation(bench: Workbench) -> None:
    assert [type(result) for result in skew(bench, serializable=False)] == [Published, Published]


def test_write_skew_is_refused_under_serializable_isolation(bench: Workbench) -> None:
    first, second = skew(bench, serializable=True)
    assert isinstance(first, Published)
    assert isinstance(second, Refused)
    assert second.conflicts.keys() == {f"{bench.namespace}.t"}
    assert second.codes == ("read_and_changed",)
    assert bench.rows("u") == [("a", 1)]


def test_a_serializable_run_is_rebased_when_only_its_target_moved(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    bench.seeded([("a", 1)], name="u")
    one, two = bench.run(), bench.run(reads=["u", "absent"])
    one.append([("a", 2)])
    two.append([("a", 3)])
    bench.published(one)
    assert bench.published(two)[0].rebased_tables == (f"{bench.namespace}.t",)
    assert bench.rows() == [("a", 1), ("a", 2), ("a", 3)]


def test_a_table_that_appears_where_a_run_found_none_is_a_changed_read(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    one, two = bench.run(), bench.run(reads=["new"])
    one.create("new")
    two.append([("a", 3)])
    bench.published(one)
    assert bench.refused(two).conflicts.keys() == {f"{bench.namespace}.new"}


def test_serializable_runs_in_one_group_see_each_other(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    bench.seeded([("a", 1)], name="u")
    one, two, three = bench.run(reads=["u"]), bench.run(reads=["t"]), bench.run(reads=["t"])
    one.append([("a", 2)])
    two.append([("a", 2)])
    two.append([("a", 2)], "u")
    three.append([("a", 3)], "u")
    results = bench.publish(one, two, three)
    assert [type(result) for result in results] == [Published, Refused, Refused]
