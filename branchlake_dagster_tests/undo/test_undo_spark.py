"""The undo of batches of an ingestion, and of changes that Spark wrote."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from branchlake_dagster.errors import UndoRefused
from branchlake_dagster.ingest.batch_context import BatchContext
from branchlake_dagster.ingest.ingest_batch import ingest_batch
from branchlake_dagster.ingest.progress import reprocessing_runs
from branchlake_dagster.ingest.reprocessing import DeadLetterSelection, reprocess_batch
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.ledger import Published
from branchlake_dagster.stored_names import LakeProperty
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
def test_the_marks_of_dead_letters_are_undone_with_their_rows(
    lakehouse: Lakehouse, spark_session: SparkSession, tmp_path: Path
) -> None:
    """A record is a row or a waiting dead letter, and never both, whatever is undone."""
    ingest = an_ingest(route_by="to")
    ingest = replace(ingest, tables=[replace(ingest.tables[0], route="a")])
    driver = LandingDriver(lakehouse, tmp_path, ingest, spark_session)
    record_numbers = itertools.count()
    run_numbers = itertools.count()

    def land_records(*routes: str) -> None:
        lines = [json.dumps({"id": next(record_numbers), "to": route}).encode() for route in routes]
        land(tmp_path, "a", lines)

    def publish(step: Callable[[BatchContext], object]) -> str:
        base_hash = lakehouse.nessie.reference(MAIN).hash
        place = replace(driver.place(), run_id=f"run-{driver.ingest.name}-{next(run_numbers)}")
        place = replace(place, snapshot_properties={LakeProperty.RUN_ID: place.run_id})
        assert step(place) is not None
        assert isinstance(driver.publish_run(place, base_hash), Published)
        return place.run_id

    def batch() -> str:
        return publish(lambda place: ingest_batch(driver.look(place.branch), place, driver.records, tasks=1))

    def reprocess_on(place: BatchContext) -> object:
        session = lakehouse.spark_session(place.branch)
        try:
            place = replace(place, session=lambda: session)
            return reprocess_batch(driver.ingest, place, DeadLetterSelection())
        finally:
            session.stop()

    def reprocess() -> str:
        return publish(reprocess_on)

    def state() -> tuple[list[int], list[int]]:
        """Return the ids of the rows, and the offsets of the waiting dead letters."""
        waiting = [row["offset"] for row in driver.dead() if row["reprocessed_in"] is None]
        return [row["id"] for row in driver.rows(by="id")], waiting

    land_records("a", "b")
    batch()
    assert state() == ([0], [1])
    driver.ingest = replace(driver.ingest, tables=[replace(driver.ingest.tables[0], route="a|b")])
    first = reprocess()
    assert state() == ([0, 1], [])
    undo(lakehouse, first)
    assert state() == ([0], [1])
    second = reprocess()
    land_records("b", "c")
    newest = batch()
    assert state() == ([0, 1, 2], [3])
    undo(lakehouse, second, keep_positions=True)  # beside a batch that was published since
    assert state() == ([0, 2], [1, 3])
    for table in (driver.table(0), driver.table(-1)):
        assert reprocessing_runs(driver.ingest.name, table.metadata.properties) == []
    reprocess()
    assert state() == ([0, 1, 2], [3])
    driver.ingest = replace(driver.ingest, tables=[replace(driver.ingest.tables[0], route="a|b|c")])
    third = reprocess()
    assert state() == ([0, 1, 2, 3], [])
    with pytest.raises(UndoRefused):
        undo(lakehouse, newest)
    done = undo(lakehouse, newest, with_followers=True)
    assert third in {one.run_id for one in done.publications}
    batch()
    assert state() == ([0, 2, 3], [1])  # the run that reprocessed 1 had also marked 3, which failed again
    assert driver.look().plan.is_empty
    reprocess()
    assert state() == ([0, 1, 2, 3], [])


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
