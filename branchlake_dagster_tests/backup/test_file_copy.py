"""Copies of folders and databases, without a server."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from branchlake_dagster.backup import file_copy
from branchlake_dagster.backup.database_copy import copy_database
from branchlake_dagster.backup.errors import BackupFailed
from branchlake_dagster.backup.file_copy import copy_folder
from branchlake_dagster.embedded.process import ProcessRecord, find_start_s
from branchlake_dagster.waiting import holds_within
from branchlake_dagster_tests.suite.raised import raising


def same_inode(first: Path, second: Path) -> bool:
    return first.stat().st_ino == second.stat().st_ino


def test_unchanged_files_are_linked_to_the_previous_copy_and_never_to_the_source(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a b" / "ä").mkdir(parents=True)
    unchanged, changed = source / "a b" / "ä" / "one", source / "two"
    unchanged.write_text("1")
    changed.write_text("2")
    copy_folder(source, tmp_path / "first")
    changed.write_text("3")
    os.utime(changed, ns=(0, 10**18))  # the same size, another time
    count = copy_folder(source, tmp_path / "second", previous=tmp_path / "first")
    assert (count.files, count.bytes, count.linked_files, count.vanished_files) == (2, 2, 1, 0)
    assert (tmp_path / "second" / "two").read_text() == "3"
    assert (tmp_path / "first" / "two").read_text() == "2"
    copy = tmp_path / "second" / "a b" / "ä" / "one"
    assert same_inode(copy, tmp_path / "first" / "a b" / "ä" / "one")
    assert not same_inode(copy, unchanged)


def test_a_file_that_vanishes_during_the_copy_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("one", "two"):
        (source / name).write_text(name)
    original_copy = file_copy._copy_file

    def copy_late(path: Path, *others: object) -> bool:
        if path.name == "one":
            path.unlink()
        return original_copy(path, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(file_copy, "_copy_file", copy_late)
    count = copy_folder(source, tmp_path / "copy")
    assert (count.files, count.vanished_files) == (1, 1)


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_database_in_use_is_copied_whole(tmp_path: Path, mode: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with closing(sqlite3.connect(source / "runs.db", isolation_level=None)) as writer:
        writer.execute(f"PRAGMA journal_mode={mode}")
        writer.execute("CREATE TABLE t (n INTEGER)")
        writer.execute("INSERT INTO t VALUES (1)")
        copy_folder(source, tmp_path / "first", has_databases=True)
        writer.execute("INSERT INTO t VALUES (2)")  # in WAL mode, the database file itself stays as it was
        copy_folder(source, tmp_path / "second", previous=tmp_path / "first", has_databases=True)
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t VALUES (3)")
        copy_folder(source, tmp_path / "third", previous=tmp_path / "second", has_databases=True)
        writer.execute("ROLLBACK")
    for name, expected in [("first", 1), ("second", 2), ("third", 2)]:
        assert [path.name for path in (tmp_path / name).iterdir()] == ["runs.db"]
        with closing(sqlite3.connect(tmp_path / name / "runs.db")) as copy:
            assert copy.execute("SELECT max(n) FROM t").fetchone() == (expected,)


@pytest.fixture
def sleeper() -> ProcessRecord:
    process = subprocess.Popen(["sleep", "60"])
    start_s = find_start_s(process.pid)
    assert start_s is not None
    yield ProcessRecord("nessie", process.pid, start_s, 0)  # type: ignore[misc]
    process.kill()
    process.wait()


def is_suspended(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def make_store(folder: Path) -> Path:
    folder.mkdir()
    for name in ("000009.sst", "000012.log", "MANIFEST-000011", "CURRENT", "LOCK", "LOG", "LOG.old.1"):
        (folder / name).write_text(name)
    return folder


def test_the_server_continues_after_the_copy(tmp_path: Path, sleeper: ProcessRecord) -> None:
    store = make_store(tmp_path / "store")
    copy_database(store, tmp_path / "copy", server=sleeper)
    assert not is_suspended(sleeper.pid)
    names = {path.name for path in (tmp_path / "copy").iterdir()}
    assert names == {"000009.sst", "000012.log", "MANIFEST-000011", "CURRENT"}
    assert same_inode(store / "000009.sst", tmp_path / "copy" / "000009.sst")
    assert not same_inode(store / "000012.log", tmp_path / "copy" / "000012.log")


def test_the_server_continues_after_a_failed_copy(tmp_path: Path, sleeper: ProcessRecord) -> None:
    with pytest.raises(FileNotFoundError):
        copy_database(tmp_path / "absent", tmp_path / "copy", server=sleeper)
    assert not is_suspended(sleeper.pid)


def test_a_copy_that_took_too_long_is_no_backup(tmp_path: Path, sleeper: ProcessRecord) -> None:
    times = iter([0.0, 10.5])
    with raising(BackupFailed, reason="too_slow"):
        copy_database(
            make_store(tmp_path / "store"), tmp_path / "copy", server=sleeper, clock=lambda: next(times)
        )


def test_the_server_continues_if_the_backup_is_killed_meanwhile(
    tmp_path: Path, sleeper: ProcessRecord
) -> None:
    code = (
        "import os, time, pathlib\n"
        "from branchlake_dagster.backup import database_copy\n"
        "from branchlake_dagster.embedded.process import ProcessRecord\n"
        "database_copy._link_files = lambda *_: time.sleep(60)\n"
        f"record = ProcessRecord('nessie', {sleeper.pid}, {sleeper.started_s}, 0)\n"
        f"database_copy.copy_database(pathlib.Path('.'), pathlib.Path({str(tmp_path / 'copy')!r}),"
        " server=record, limit_s=1.0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as backup:
        assert holds_within(30, lambda: is_suspended(sleeper.pid), every_s=0.01)
        backup.kill()
    started_s = time.monotonic()
    assert holds_within(30, lambda: not is_suspended(sleeper.pid), every_s=0.01)
    assert time.monotonic() - started_s < 30
