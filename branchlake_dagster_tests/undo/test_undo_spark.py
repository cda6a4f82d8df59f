"""The undo of batches of an ingestion, and of changes that Spark wrote."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from branchlake_dagster.errors import UndoRefused
from branchlake_dagster.ingest.ingest_batch import ingest_batch
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.ledger import Published
from branchlake_dagster_tests.ingest.test_landing_source import LandingDriver, an_ingest, land
from branchlake_dagster_tests.ingest.test_landing_source import values as records
from branchlake_dagster_tests.publication.workbench import FLAT, Run, Workbench
from branchlake_dagster_tests.undo.test_undo_lake import undo


@pytest.mark.spark
def test_an_ingestion_reads_the_records_of_an_undone_batch_again(
    lakehouse: Lakehouse, spark_session: SparkSession, tmp_path: Path
) -> None:
    driver = LandingDriver(lakehouse, tmp_path, an_ingest(), spark_session)

    def batch() -> str:
        base_hash, place = lakehouse.nessie.reference(MAIN).hash, driver.place()
        ingest_batch(driver.look(place.branch), place, driver.records, tasks=1)
        outcome = driver.publish_run(place, base_hash)
        assert isinstance(outcome, Published)
        return outcome.hash

    land(tmp_path, "a", records(1, 2))
    undo(lakehouse, batch())
    first = batch()
    assert [row["id"] for row in driver.rows(by="id")] == [1, 2]
    land(tmp_path, "a", [*records(3), b"no"])
    undo(lakehouse, batch())
    assert ([row["id"] for row in driver.rows(by="id")], driver.dead()) == ([1, 2], [])
    batch()
    assert [row["id"] for row in driver.rows(by="id")] == [1, 2, 3]
    assert len(driver.dead()) == 1
    with pytest.raises(UndoRefused):
        undo(lakehouse, first)


@pytest.mark.spark
def test_changes_by_spark(lakehouse: Lakehouse, namespace: str) -> None:
    bench = Workbench(lakehouse, namespace)
    bench.seeded([("a", 1), ("a", 2), ("b", 3)], spec=FLAT)
    merge = (
        "MERGE INTO {t} USING (SELECT 'z' AS day, 2L AS id UNION ALL SELECT 'n', 9L) s ON {t}.id = s.id"
        " WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
    )

    def statement(text: str) -> Any:
        run = bench.run()
        run.sql(text)
        bench.published(run)
        return run

    undo(lakehouse, statement(merge).run_id)
    assert bench.rows() == [("a", 1), ("a", 2), ("b", 3)]
    undo(lakehouse, statement("DELETE FROM {t} WHERE id = 1").run_id)
    assert bench.rows() == [("a", 1), ("a", 2), ("b", 3)]
    appending = statement("INSERT INTO {t} VALUES ('c', 4)")
    bench.sql(
        "ALTER TABLE {t} SET TBLPROPERTIES ('write.delete.mode'='merge-on-read')",
        "DELETE FROM {t} WHERE id = 1",
    )
    undo(lakehouse, appending.run_id)
    assert bench.rows() == [("a", 2), ("b", 3)]
    undo(lakehouse, statement("DELETE FROM {t} WHERE id = 2").run_id)
    assert bench.rows() == [("a", 2), ("b", 3)]
    replacing = statement("INSERT OVERWRITE {t} VALUES ('x', 1)")
    with pytest.raises(UndoRefused) as caught:
        undo(lakehouse, replacing.run_id)
    assert {dependency.reason.code for dependency in caught.value.dependencies} == {"deleted_rows"}
    bench.clean()


@pytest.mark.spark
def test_delete_files_by_spark(lakehouse: Lakehouse, namespace: str) -> None:
    """Spark reads the result, too. Without partitions, all rows are in one data file at first."""
    bench = Workbench(lakehouse, namespace)
    bench.seeded([("a", 1), ("a", 2), ("b", 3), ("b", 4)], spec=FLAT)
    modes = ", ".join(f"'write.{name}.mode'='merge-on-read'" for name in ("delete", "update", "merge"))
    bench.sql(f"ALTER TABLE {{t}} SET TBLPROPERTIES ({modes})")

    def statement(text: str) -> Run:
        run = bench.run()
        run.sql(text)
        bench.published(run)
        return run

    def spark_rows() -> list[tuple[Any, ...]]:
        session = lakehouse.spark_session(MAIN)
        try:
            return sorted(tuple(row) for row in session.table(f"nessie.{namespace}.t").collect())
        finally:
            session.stop()

    first = statement("DELETE FROM {t} WHERE id = 1")
    wrong = statement("DELETE FROM {t} WHERE id = 3")
    statement("INSERT INTO {t} VALUES ('c', 5)")
    (table,) = undo(lakehouse, wrong.run_id).tables
    assert table.removed_delete_files == 1
    assert spark_rows() == bench.rows() == [("a", 2), ("b", 3), ("b", 4), ("c", 5)]
    undo(lakehouse, first.run_id)
    assert spark_rows() == bench.rows() == [("a", 1), ("a", 2), ("b", 3), ("b", 4), ("c", 5)]
    # Updated and merged rows: the new versions go, the former ones come back.
    undo(lakehouse, statement("UPDATE {t} SET day = 'z' WHERE id > 3").run_id)
    merge = (
        "MERGE INTO {t} USING (SELECT 'y' AS day, 2L AS id UNION ALL SELECT 'n', 9L) s ON {t}.id = s.id"
        " WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
    )
    undo(lakehouse, statement(merge).run_id)
    assert spark_rows() == bench.rows() == [("a", 1), ("a", 2), ("b", 3), ("b", 4), ("c", 5)]
    # A compaction applies the deletes, and a later statement may have missed the rows.
    compacted = statement("DELETE FROM {t} WHERE id = 2")
    bench.sql(
        "CALL nessie.system.rewrite_data_files(table => '{name}', options => map('rewrite-all', 'true'))"
    )
    with pytest.raises(UndoRefused) as caught:
        undo(lakehouse, compacted.run_id)
    assert {dependency.reason.code for dependency in caught.value.dependencies} == {"compacted"}
    missed = statement("DELETE FROM {t} WHERE id = 3")
    later = statement("DELETE FROM {t} WHERE id = 4")
    with pytest.raises(UndoRefused) as caught:
        undo(lakehouse, missed.run_id)
    assert [dependency.run_ids for dependency in caught.value.dependencies] == [(later.run_id,)]
    undo(lakehouse, missed.run_id, with_followers=True)
    assert spark_rows() == bench.rows() == [("a", 1), ("b", 3), ("b", 4), ("c", 5)]
    bench.clean()
