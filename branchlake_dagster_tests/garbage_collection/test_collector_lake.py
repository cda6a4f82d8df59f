"""Collections on the real Nessie, of tables that Spark and PyIceberg write, while both read and write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from branchlake_dagster.garbage_collection.collector import FileCollector
from branchlake_dagster.garbage_collection.explanation import FileExplanation
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import JOURNAL_BRANCH
from branchlake_dagster_tests.garbage_collection.collected_lake import DAY, ROWS, MemoryHeartbeats

pytestmark = pytest.mark.nessie


class SharedLake:
    """The session's lake, of which a collector sees one namespace's folder as the whole warehouse.

    Other tests write to the same warehouse, and their files must not be touched.
    """

    def __init__(self, lakehouse: Lakehouse, namespace: str) -> None:
        self.namespace = namespace
        self.root = Path(lakehouse.settings.warehouse_uri.removeprefix("file://")) / namespace
        self.shared = lakehouse
        values = lakehouse.settings.model_dump(exclude_unset=True)
        values |= {"warehouse": f"file://{self.root}", "nessie_uri": lakehouse.nessie.uri}
        self.lake = Lakehouse(Settings(**values), start=False)

    def collector(self, ago: timedelta = timedelta(0)) -> FileCollector:
        now = lambda: datetime.now(UTC) - ago  # noqa: E731
        collector = FileCollector.of_lake(self.lake, now=now)
        collector._heartbeats = MemoryHeartbeats()
        return collector

    def files(self) -> set[str]:
        return {
            str(path)
            for path in self.root.rglob("*")
            if path.is_file() and path.relative_to(self.root).parts[0] not in ("_branchlake", "branchlake")
        }

    def age(self, days: float = 20) -> None:
        stamp = (datetime.now(UTC) - days * DAY).timestamp()
        for path in self.root.rglob("*"):
            if path.is_file():
                os.utime(path, (stamp, stamp))

    def stray(self, folder: str, file: str = "stray.parquet") -> str:
        path = Path(folder.removeprefix("file:").replace("///", "/")) / "data" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
        return str(path)

    def collect(self) -> set[str]:
        before = self.files()
        self.collector(2 * DAY).run()
        self.collector().run()
        return before - self.files()


@pytest.fixture
def shared(lakehouse: Lakehouse, namespace: str) -> Iterator[SharedLake]:
    ensure_main_has_commit(lakehouse.nessie)
    lake = SharedLake(lakehouse, namespace)
    yield lake
    nessie = lakehouse.nessie
    for ref in list(nessie.references()):
        if ref.name == JOURNAL_BRANCH or namespace in ref.name:
            delete = nessie.delete_tag if ref.type == "TAG" else nessie.delete_branch
            delete(ref.name, expected_hash=ref.hash)


def test_orphans_of_pyiceberg_go_and_all_references_stay_readable(shared: SharedLake) -> None:
    namespace, nessie = shared.namespace, shared.lake.nessie
    catalog = shared.shared.catalog(properties={"namespace.create": "true"})
    table = catalog.create_table((namespace, "t"), ROWS.schema)
    table.append(ROWS)
    head = nessie.reference(MAIN).hash
    nessie.create_tag(f"tag-{namespace}", from_ref=MAIN, from_hash=head)
    nessie.create_branch(f"branch-{namespace}", from_ref=MAIN, from_hash=head)
    shared.shared.catalog(f"branch-{namespace}").load_table((namespace, "t")).append(ROWS)
    catalog.load_table((namespace, "t")).overwrite(ROWS.slice(0, 1))
    stray = shared.stray(table.location())
    shared.age()
    assert shared.collect() == {stray}
    counts = [
        len(shared.shared.catalog(ref).load_table((namespace, "t")).scan().to_arrow())
        for ref in (MAIN, f"tag-{namespace}", f"branch-{namespace}", f"{MAIN}@{head}")
    ]
    assert counts == [1, 3, 6, 3]
    status = shared.collector().status()
    assert (status.passes, status.deleted_files, status.open_plans) == (2, 1, ())
    log = list(nessie.log(MAIN, limit=5))
    assert all("branchlake.collections" not in entry.commit.message for entry in log)
    explained = shared.collector().explain(stray)
    assert isinstance(explained, FileExplanation)
    assert (explained.state, explained.exists) == ("deleted", False)


@pytest.mark.spark
def test_spark_tables_with_deletes_statistics_and_views(shared: SharedLake) -> None:
    namespace = shared.namespace
    session = shared.shared.spark_session()
    table = f"nessie.{namespace}.t"

    def rows(reading: SparkSession) -> list[tuple[int, str]]:
        return [tuple(row) for row in reading.sql(f"SELECT id, name FROM {table} ORDER BY id").collect()]

    expected = [(2, "a b"), (3, "x/y+z"), (4, "\u00e4%20")]
    try:
        session.sql(f"CREATE NAMESPACE nessie.{namespace}")
        session.sql(
            f"CREATE TABLE {table} (id BIGINT, name STRING) USING iceberg PARTITIONED BY (name)"
            " TBLPROPERTIES ('format-version'='2', 'write.delete.mode'='merge-on-read')"
        )
        session.sql(f"INSERT INTO {table} VALUES (1, 'a b'), (2, 'a b'), (3, 'x/y+z'), (4, '\u00e4%20')")
        session.sql(f"DELETE FROM {table} WHERE id = 1")
        session.sql(f"CALL nessie.system.compute_table_stats('{namespace}.t')")
        assert rows(session) == expected
    finally:
        session.stop()
    loaded = shared.shared.catalog().load_table((namespace, "t"))
    assert loaded.metadata.statistics
    stray = shared.stray(loaded.location())
    shared.age()
    assert shared.collect() == {stray}
    session = shared.shared.spark_session()
    try:
        assert rows(session) == expected
    finally:
        session.stop()
    assert Path(loaded.metadata.statistics[0].statistics_path.removeprefix("file:")).exists()
