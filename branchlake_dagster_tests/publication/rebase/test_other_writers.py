"""Somebody works on `main` beside open runs, with Spark and without asking: what is on `main` afterwards, exactly."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import dagster as dg
import polars as pl
import pytest
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
from sqlalchemy import Engine, event

from branchlake_dagster.errors import BranchlakeError, Transient
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.ledger import Published, Refused
from branchlake_dagster.publication.replay import TableFilesUnreadable
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import EventMetadata
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import assign_main, project
from branchlake_dagster_tests.publication.workbench import FLAT, Run, Workbench
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

COMPACTION = "CALL nessie.system.rewrite_data_files(table => '{name}', options => map('rewrite-all', 'true'))"
MANIFESTS = "CALL nessie.system.rewrite_manifests(table => '{name}')"


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    bench = Workbench(lakehouse, namespace)
    yield bench
    bench.clean()


def refused(bench: Workbench, run: Run, *partitions: str, code: str = "") -> None:
    """The run is refused, and the refusal names the table, the partitions and what was in the way."""
    result = bench.refused(run)
    assert [*result.conflicts] == [f"{bench.namespace}.t"]
    assert {*partitions} <= {*result.partitions}
    assert not code or result.codes == (code,)


# -- rows ----------------------------------------------------------------------------------------------


STATEMENTS: dict[str, tuple[bool, list[tuple[str, int]]]] = {
    "INSERT INTO {t} VALUES ('a', 3)": (False, [("a", 1), ("a", 2), ("a", 3), ("b", 4)]),
    "INSERT INTO {t} VALUES ('b', 5)": (True, [("a", 10), ("b", 4), ("b", 5)]),
    "UPDATE {t} SET id = 7 WHERE id = 2": (False, [("a", 1), ("a", 7), ("b", 4)]),
    "UPDATE {t} SET id = 7 WHERE id = 4": (True, [("a", 10), ("b", 7)]),
    "UPDATE {t} SET day = 'a' WHERE id = 4": (False, [("a", 1), ("a", 2), ("a", 4)]),
    "DELETE FROM {t} WHERE id = 2": (False, [("a", 1), ("b", 4)]),
    "DELETE FROM {t} WHERE day = 'b'": (True, [("a", 10)]),
    "DELETE FROM {t}": (False, []),
    "TRUNCATE TABLE {t}": (False, []),
    "INSERT OVERWRITE {t} PARTITION (day = 'b') SELECT 6": (True, [("a", 10), ("b", 6)]),
}
"""Statement -> whether a run that replaced partition `a` is published after it, and the rows of `main` then."""


@pytest.mark.spark
def test_rows_changed_copy_on_write(bench: Workbench) -> None:
    """A run that replaced partition `a` is replayed unless `main` changed it; an append always is.

    Each statement has a table of its own, and all of them one session.
    """
    tables = {f"t{number}": statement for number, statement in enumerate(STATEMENTS)}
    first = bench.run()
    for name in tables:
        first.create(name)
        first.append([("a", 1), ("a", 2), ("b", 4)], name)
    bench.published(first)
    replacing, appending = ({name: bench.run() for name in tables} for _ in range(2))
    for name in tables:
        replacing[name].replace("a", [("a", 10)], name)
        appending[name].append([("a", 99)], name)
    bench.sql(*(text.format(t=f"nessie.{bench.namespace}.{name}") for name, text in tables.items()))
    for name, statement in tables.items():
        is_replayed, main = STATEMENTS[statement]
        (result,) = bench.publish(replacing[name])
        assert isinstance(result, Published if is_replayed else Refused), (statement, result)
        if isinstance(result, Refused):
            assert [*result.conflicts] == [f"{bench.namespace}.{name}"], statement
        assert bench.rows(name) == main, statement
        bench.published(appending[name])
        assert bench.rows(name) == sorted([*main, ("a", 99)]), statement


# -- maintenance ---------------------------------------------------------------------------------------


@pytest.mark.spark
def test_a_replacement_of_rows_that_were_compacted_is_mapped(bench: Workbench) -> None:
    """The run removed all files of its partitions; the new ones hold nothing else."""
    bench.seeded([("a", 1), ("b", 4)])
    more = bench.run()
    more.append([("a", 2), ("b", 5)])
    bench.published(more)
    replacing, deleting, upserting = bench.run(), bench.run(), bench.run()
    replacing.replace("a", [("a", 10)])
    deleting.replace("b", [])
    upserting.sql("UPDATE {t} SET id = id + 1 WHERE day = 'b'", mode="upsert", keys="day,id")
    bench.sql(COMPACTION)
    bench.published(replacing)
    assert bench.rows() == [("a", 10), ("b", 4), ("b", 5)]
    bench.sql(COMPACTION)
    bench.published(upserting)
    assert bench.rows() == [("a", 10), ("b", 5), ("b", 6)]
    refused(bench, deleting, "day=b")
    assert bench.rows() == [("a", 10), ("b", 5), ("b", 6)]


@pytest.mark.spark
def test_a_whole_rewrite_of_an_unpartitioned_table_is_mapped_too(bench: Workbench) -> None:
    bench.seeded([("a", 1)], spec=FLAT)
    more = bench.run()
    more.append([("a", 2)])
    bench.published(more)
    run, own = bench.run(), bench.run()
    run.sql("UPDATE {t} SET id = id + 10", mode="upsert", keys="id")
    own.sql(COMPACTION)
    bench.sql(COMPACTION)
    bench.published(own)
    bench.published(run)
    assert bench.rows() == [("a", 11), ("a", 12)]


@pytest.mark.spark
def test_one_of_the_compacted_files_is_restored_with_the_others(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    more = bench.run()
    more.append([("a", 2)])
    bench.published(more)
    run = bench.run()
    run.sql("UPDATE {t} SET id = 20 WHERE id = 2")
    bench.sql(COMPACTION)
    bench.published(run)
    assert bench.rows() == [("a", 1), ("a", 20)]


@pytest.mark.spark
@pytest.mark.parametrize("also", ["INSERT INTO {t} VALUES ('a', 3)", "DELETE FROM {t} WHERE id = 1"])
def test_where_the_rows_cannot_be_proved_the_same_it_is_refused(bench: Workbench, also: str) -> None:
    bench.seeded([("a", 1)])
    more = bench.run()
    more.append([("a", 2)])
    bench.published(more)
    run = bench.run()
    run.replace("a", [("a", 10)])
    bench.sql("ALTER TABLE {t} SET TBLPROPERTIES ('write.delete.mode'='merge-on-read')", also)
    bench.sql(COMPACTION)
    before = bench.rows()
    refused(bench, run, "day=a")
    assert bench.rows() == before


@pytest.mark.spark
def test_rewritten_manifests_cause_no_refusal(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    for number in (2, 3):
        more = bench.run()
        more.append([("b", number)])
        bench.published(more)
    replacing, appending, compacting = bench.run(), bench.run(), bench.run()
    replacing.replace("a", [("a", 10)])
    appending.append([("b", 99)])
    compacting.sql(COMPACTION)
    bench.sql(MANIFESTS)
    bench.published(appending)
    bench.published(compacting)
    bench.sql(MANIFESTS)
    bench.published(replacing)
    assert bench.rows() == [("a", 10), ("b", 2), ("b", 3), ("b", 99)]


@pytest.mark.spark
def test_a_run_that_rewrote_manifests_only(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    more = bench.run()
    more.append([("b", 2)])
    bench.published(more)
    run = bench.run()
    run.sql(MANIFESTS)
    bench.sql("INSERT INTO {t} VALUES ('a', 3)")
    bench.published(run)
    assert bench.rows() == [("a", 1), ("a", 3), ("b", 2)]


# -- columns and tables --------------------------------------------------------------------------------


@pytest.mark.spark
def test_renamed_columns_are_followed_by_their_ids(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 2)])
    appending, replacing = bench.run(), bench.run()
    appending.append([("a", 3)])
    replacing.replace("b", [("b", 20)])
    bench.sql("ALTER TABLE {t} RENAME COLUMN id TO number", "INSERT INTO {t} VALUES ('c', 4)")
    bench.published(appending, replacing)
    assert bench.rows() == [("a", 1), ("a", 3), ("b", 20), ("c", 4)]
    assert bench.main().schema().column_names == ["day", "number"]


@pytest.mark.spark
def test_a_dropped_column_is_refused_by_name(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 2)])
    appending = bench.run()
    appending.append([("a", 3)])
    bench.sql("ALTER TABLE {t} DROP COLUMN id", "INSERT INTO {t} VALUES ('c')")
    refused(bench, appending, code="column_dropped")
    assert bench.rows() == [("a",), ("b",), ("c",)]


@pytest.mark.spark
def test_dropped_and_created_again(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    appending, replacing = bench.run(), bench.run()
    appending.append([("a", 3)])
    replacing.replace("a", [("a", 10)])
    bench.sql(
        "DROP TABLE {t}",
        "CREATE TABLE {t} (day string, id bigint) USING iceberg PARTITIONED BY (day)",
        "INSERT INTO {t} VALUES ('z', 26)",
    )
    for run in (appending, replacing):
        refused(bench, run, code="created_again")
    assert bench.rows() == [("z", 26)]


@pytest.mark.spark
def test_a_replaced_definition_is_refused(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    appending, replacing = bench.run(), bench.run()
    appending.append([("a", 3)])
    replacing.replace("a", [("a", 10)])
    bench.sql("CREATE OR REPLACE TABLE {t} USING iceberg AS SELECT 'z' AS day, 26L AS id")
    for run in (appending, replacing):
        refused(bench, run)
    assert bench.rows() == [("z", 26)]


# -- files ---------------------------------------------------------------------------------------------


def test_a_data_file_that_is_gone_from_main_concerns_its_readers_only(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 2)])
    appending, replacing = bench.run(), bench.run()
    appending.append([("b", 3)])
    replacing.replace("a", [("a", 10)])
    (lost,) = [
        task.file.file_path for task in bench.main().scan().plan_files() if "day=a" in task.file.file_path
    ]
    bench.main().io.delete(lost)
    bench.published(appending)
    bench.published(replacing)  # the one that repairs it
    assert bench.rows() == [("a", 10), ("b", 2), ("b", 3)]


Fails = Callable[[], None]


@contextmanager
def failing_writes(monkeypatch: pytest.MonkeyPatch, code: int, *, after: int = 0) -> Iterator[list[str]]:
    """The store takes `after` more files and then refuses: full, or read-only. Deletions work if it is full."""
    real, delete = PyArrowFile.create, PyArrowFileIO.delete
    tried: list[str] = []

    def create(self: PyArrowFile, *args: Any, **options: Any) -> Any:
        tried.append(self.location)
        if len(tried) > after:
            raise OSError(code, errno.errorcode[code], self.location)
        return real(self, *args, **options)

    def refuse(self: PyArrowFileIO, location: Any) -> None:
        if code == errno.EROFS:
            raise OSError(code, errno.errorcode[code], str(location))
        delete(self, location)

    with monkeypatch.context() as patch:
        patch.setattr(PyArrowFile, "create", create)
        patch.setattr(PyArrowFileIO, "delete", refuse)
        yield tried


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("after", range(6))
def test_a_warehouse_that_takes_no_files(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, code: int, after: int
) -> None:
    """Nothing is published and nothing lost; a full store is left as full as it was.

    The replay writes six files, the table's metadata last.
    """
    bench.seeded([("a", 1), ("b", 2)])
    other, run, third = bench.run(), bench.run(), bench.run()
    other.append([("a", 3)])
    run.replace("b", [("b", 20)])
    third.append([("a", 4)])
    bench.published(other)
    base = bench.lake.nessie.reference(MAIN).hash
    with failing_writes(monkeypatch, code, after=after) as tried:
        (result,) = bench.publish(run)
    assert isinstance(result, TableFilesUnreadable)
    assert isinstance(result, Transient)
    for text in (
        f"{bench.namespace}.t",
        run.name,
        run.run_id,
        errno.errorcode[code],
        "Nothing was published",
    ):
        assert text in str(result)
    assert bench.lake.nessie.reference(MAIN).hash == base
    if code == errno.ENOSPC:
        left = [path for path in tried if Path(urlparse(path).path).exists()]
        assert left == []
    bench.published(run, third)
    assert bench.rows() == [("a", 1), ("a", 3), ("a", 4), ("b", 20)]


# -- references ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lakehouse]:
    """A lake whose `main` may be set back; no Spark."""
    settings = Settings(state_dir=tmp_path_factory.mktemp("set-back"), session_kind="classic")
    lake = Lakehouse(settings)
    ensure_main_has_commit(lake.nessie)
    yield lake
    lake.servers.stop_all()


@pytest.mark.nessie
def test_main_set_back_to_before_a_publication(own_lake: Lakehouse, namespace: str) -> None:
    """Whoever sets it back takes those rows out; a run from before goes on."""
    bench = Workbench(own_lake, namespace)
    bench.seeded([("a", 1)])
    base = own_lake.nessie.reference(MAIN).hash
    one, two = bench.run(), bench.run()
    one.append([("a", 2)])
    two.append([("a", 3)])
    bench.published(one)
    assign_main(own_lake, base)
    bench.published(two)
    assert bench.rows() == [("a", 1), ("a", 3)]


@pytest.mark.nessie
def test_main_set_back_below_a_runs_base(own_lake: Lakehouse, namespace: str) -> None:
    """Its base is not in main's history: what it saw is gone. It is refused, not tried again for ever."""
    bench = Workbench(own_lake, namespace)
    bench.seeded([("a", 1)])
    below = own_lake.nessie.reference(MAIN).hash
    more = bench.run()
    more.append([("a", 2)])
    bench.published(more)
    run = bench.run()
    run.append([("a", 3)])
    assign_main(own_lake, below)
    (result,) = bench.publish(run)
    assert isinstance(result, Refused), result
    assert bench.rows() == [("a", 1)]


@pytest.mark.nessie
def test_nessie_restored_from_an_older_backup(own_lake: Lakehouse, namespace: str, tmp_path: Path) -> None:
    """The run's branch and its base are unknown to the server; `main` is as it was backed up."""
    bench = Workbench(own_lake, namespace)
    bench.seeded([("a", 1)])
    store = own_lake.settings.state_dir / "nessie"
    own_lake.servers.stop_all()
    shutil.copytree(store, tmp_path / "backup")
    more = bench.run()
    more.append([("a", 2)])
    bench.published(more)
    run = bench.run()
    run.append([("a", 3)])
    lost = run.candidate()
    own_lake.servers.stop_all()
    shutil.rmtree(store)
    shutil.copytree(tmp_path / "backup", store)
    results = bench.publisher.publish([lost])
    assert isinstance(results[run.name], BranchlakeError | Refused), results
    assert bench.rows() == [("a", 1)]
    after = bench.run()
    after.append([("a", 4)])
    assert isinstance(bench.publish(after)[0], Published)
    assert bench.rows() == [("a", 1), ("a", 4)]


# -- Dagster's database --------------------------------------------------------------------------------


@contextmanager
def impatient_databases() -> Iterator[None]:
    """SQLite waits 0.1 s for a locked database and not 5 s."""

    def set_timeout(connection: Any, _: object) -> None:
        connection.execute("PRAGMA busy_timeout=100")

    event.listen(Engine, "connect", set_timeout)
    try:
        yield
    finally:
        event.remove(Engine, "connect", set_timeout)


def test_dagsters_database_is_locked_while_a_pass_works(
    lakehouse: Lakehouse, namespace: str, tmp_path: Path
) -> None:
    """Nothing is published twice and nothing lost: a later pass does what this one could not."""

    @dg.asset(key=[namespace, "t"], metadata=table_metadata(require_checks=False))
    def t() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    with impatient_databases(), project(lakehouse, t) as p:
        run_id = p.run()
        database = Path(p.instance.storage_directory()).parent / "history" / "runs.db"
        assert database.exists()
        other = sqlite3.connect(database, isolation_level=None)
        try:
            other.execute("BEGIN EXCLUSIVE")
            outcome = p.reconciler().reconcile_run(run_id)
            assert outcome is not None
            assert outcome.state is RunState.TRY_AGAIN
            assert run_id in str(outcome)
        finally:
            other.execute("ROLLBACK")
            other.close()
        assert p.settle(run_id).state is RunState.PUBLISHED
        assert p.rows(namespace, "t") == [{"n": 1}]
        # The first pass could not note that it had told it; whoever follows publications knows them by name.
        told = {one.metadata[EventMetadata.PUBLICATION].value for one in p.observations([namespace, "t"])}
        assert len(told) == 1
