"""Rows that `main` deleted with delete files do not come back with a replayed change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyiceberg.table import Table

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.ledger import Published
from branchlake_dagster_tests.publication.rebase.deleting import delete_equal
from branchlake_dagster_tests.publication.workbench import FLAT, Run, Workbench

pytestmark = pytest.mark.spark

MERGE_ON_READ = {f"write.{what}.mode": "merge-on-read" for what in ("delete", "update", "merge")}
COMPACTION = "CALL nessie.system.rewrite_data_files(table => '{name}', options => map('rewrite-all', 'true'))"
DELETES_REWRITTEN = "CALL nessie.system.rewrite_position_delete_files(table => '{name}', options => map('rewrite-all', 'true'))"
UPSERT = (
    "MERGE INTO {t} USING (SELECT 'a' AS day, 1L AS id) s ON {t}.day = s.day AND {t}.id = s.id"
    " WHEN MATCHED THEN UPDATE SET id = 100"
)


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    bench = Workbench(lakehouse, namespace)
    yield bench
    bench.clean()


def seen(bench: Workbench) -> list[tuple[object, ...]]:
    """The rows of `main` as Spark reads them: PyIceberg does not apply equality deletes."""
    session = bench.lake.spark_session()
    try:
        return sorted(tuple(row) for row in session.table(f"nessie.{bench.namespace}.t").collect())
    finally:
        session.stop()


def set_properties(table: Table, properties: dict[str, str]) -> None:
    with table.transaction() as change:
        change.set_properties(properties)


def seeded(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("a", 2), ("b", 3), ("b", 4)])
    set_properties(bench.main(), MERGE_ON_READ)


def rewriting(run: Run, how: str) -> None:
    """A change of the run's that removes the file of partition `a`, copy-on-write."""
    set_properties(run.table(), {"write.merge.mode": "copy-on-write"})
    if how == "compaction":
        run.sql(COMPACTION)
    elif how == "upsert":
        run.sql(UPSERT, mode="upsert", keys="day,id")
    elif how == "replacement":
        run.replace("a", [("a", 10)])
    else:
        run.sql("DELETE FROM {t} WHERE day = 'a'")


@pytest.mark.parametrize("how", ["compaction", "upsert", "replacement", "deletion"])
def test_what_main_deleted_does_not_come_back(bench: Workbench, how: str) -> None:
    """PyIceberg's own validation asks for deletes after the head: the append behind hides this one."""
    seeded(bench)
    run = bench.run()
    rewriting(run, how)
    bench.sql(
        "DELETE FROM {t} WHERE id = 2",
        "INSERT INTO {t} VALUES ('b', 5)",
    )
    refused = bench.refused(run)
    assert refused.codes == ("main_wrote_delete_files",)
    assert "day=a" in refused.partitions
    assert seen(bench) == [("a", 1), ("b", 3), ("b", 4), ("b", 5)]


def test_a_compaction_of_main_after_its_deletes_does_not_hide_them(bench: Workbench) -> None:
    seeded(bench)
    run, other = bench.run(), bench.run()
    rewriting(run, "compaction")
    rewriting(other, "upsert")
    bench.sql("DELETE FROM {t} WHERE id = 2", "INSERT INTO {t} VALUES ('b', 5)", COMPACTION)
    for one in (run, other):
        assert bench.refused(one).codes == ("compacted",)
    assert seen(bench) == [("a", 1), ("b", 3), ("b", 4), ("b", 5)]


def test_deletes_in_other_partitions_cause_no_refusal(bench: Workbench) -> None:
    seeded(bench)
    run = bench.run()
    rewriting(run, "replacement")
    bench.sql("DELETE FROM {t} WHERE id = 4")
    bench.published(run)
    assert seen(bench) == [("a", 10), ("b", 3)]


@pytest.mark.parametrize("partitioned", [True, False])
def test_equality_deletes_stop_what_they_may_hit(bench: Workbench, partitioned: bool) -> None:
    rows = [("a", 1), ("a", 2), ("b", 3), ("b", 4)]
    bench.seeded(rows) if partitioned else bench.seeded(rows, spec=FLAT)
    one, two = bench.run(), bench.run()
    one.replace("a", [("a", 10)])
    two.replace("b", [("b", 30)])
    delete_equal(bench.main(), "id", 2, "a")
    assert bench.refused(one).codes == ("main_wrote_delete_files",)
    if partitioned:
        bench.published(two)
        assert seen(bench) == [("a", 1), ("b", 30)]
    else:
        assert bench.refused(two).codes == ("main_wrote_delete_files",)
        assert seen(bench) == [("a", 1), ("b", 3), ("b", 4)]


def test_deletes_of_main_do_not_hit_rows_that_are_appended_later(bench: Workbench) -> None:
    """A replayed append gets a sequence number of its own, above those of the deletes."""
    seeded(bench)
    run = bench.run()
    run.append([("a", 2), ("a", 7)])
    delete_equal(bench.main(), "id", 2, "a")
    delete_equal(bench.main(), "id", 7, "a")
    bench.sql("DELETE FROM {t} WHERE id = 1")
    bench.published(run)
    assert seen(bench) == [("a", 2), ("a", 7), ("b", 3), ("b", 4)]


def test_deletes_from_before_the_base_are_the_runs_to_work_in(bench: Workbench) -> None:
    """The run saw them: it may compact the rows that are left, on main too."""
    seeded(bench)
    bench.sql("DELETE FROM {t} WHERE id = 2")
    one, two = bench.run(), bench.run()
    rewriting(one, "compaction")
    set_properties(two.table(), {"write.delete.mode": "copy-on-write"})
    two.replace("b", [("b", 30)])
    bench.sql("INSERT INTO {t} VALUES ('c', 5)")
    bench.published(two)
    assert bench.refused(one).codes == ("same_files",)
    three = bench.run()
    rewriting(three, "compaction")
    bench.sql("INSERT INTO {t} VALUES ('c', 6)")
    bench.published(three)
    assert seen(bench) == [("a", 1), ("b", 30), ("c", 5), ("c", 6)]


def test_deletes_of_another_file_of_the_partition_cause_no_refusal(bench: Workbench) -> None:
    """Position deletes name their files; the bounds of the paths tell them apart."""
    bench.seeded([("a", 1)])
    more = bench.run()
    more.append([("a", 2), ("a", 3)])
    bench.published(more)
    set_properties(bench.main(), MERGE_ON_READ)
    one, two = bench.run(), bench.run()
    for run, number in ((one, 1), (two, 3)):
        run.sql(COMPACTION.replace("options", f"where => 'id = {number}', options"))
        assert len(run.table().inspect.files()) == 2
    bench.sql("DELETE FROM {t} WHERE id = 2")
    bench.published(one)
    assert bench.refused(two).codes == ("main_wrote_delete_files",)
    assert seen(bench) == [("a", 1), ("a", 3)]


def test_delete_files_that_were_only_written_anew_delete_nothing_new(bench: Workbench) -> None:
    seeded(bench)
    bench.sql("DELETE FROM {t} WHERE id = 2", "DELETE FROM {t} WHERE id = 4")
    run = bench.run()
    run.replace("a", [("a", 10)])
    bench.sql(DELETES_REWRITTEN)
    bench.published(run)
    assert seen(bench) == [("a", 10), ("b", 3)]


def test_the_runs_own_delete_files_are_refused(bench: Workbench) -> None:
    seeded(bench)
    one, two = bench.run(), bench.run()
    one.sql("DELETE FROM {t} WHERE id = 2")
    delete_equal(two.table(), "id", 3, "b")
    bench.sql("INSERT INTO {t} VALUES ('b', 5)")
    for run in (one, two):
        assert bench.refused(run).codes == ("run_wrote_delete_files",)
    assert len(seen(bench)) == 5


def test_format_version_3_is_refused_by_name(bench: Workbench) -> None:
    seeded(bench)
    bench.sql("ALTER TABLE {t} SET TBLPROPERTIES ('format-version'='3')")
    alone = bench.run()
    alone.sql("DELETE FROM {t} WHERE id = 4")
    assert isinstance(bench.publish(alone)[0], Published)  # nobody else touched the table: no rebase
    one, two, three = bench.run(), bench.run(), bench.run()
    one.sql("DELETE FROM {t} WHERE id = 2")
    two.sql("INSERT INTO {t} VALUES ('a', 9)", mode="append")
    three.sql("INSERT OVERWRITE {t} PARTITION (day = 'a') SELECT 9", mode="replace_partitions")
    bench.sql("DELETE FROM {t} WHERE id = 1")
    assert bench.refused(one).codes == ("run_wrote_deletion_vectors",)
    assert bench.refused(two).codes == ("format_version_of_main",)
    assert bench.refused(three).codes == ("main_wrote_deletion_vectors",)
    assert seen(bench) == [("a", 2), ("b", 3)]
