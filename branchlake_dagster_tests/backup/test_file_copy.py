"""Copies of folders and databases, without a server."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from branchlake_dagster.backup import database_copy, file_copy
from branchlake_dagster.backup.database_copy import copy_database
from branchlake_dagster.backup.errors import BackupFailed
from branchlake_dagster.backup.file_copy import copy_folder, remove_folder
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
        return original_copy(path, *others)

    monkeypatch.setattr(file_copy, "_copy_file", copy_late)
    count = copy_folder(source, tmp_path / "copy")
    assert (count.files, count.vanished_files) == (1, 1)


@pytest.mark.parametrize(
    ("code", "number"), [(sqlite3.SQLITE_FULL, errno.ENOSPC), (sqlite3.SQLITE_IOERR, errno.EIO)]
)
def test_an_error_of_sqlite_is_one_of_the_operating_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, number: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        error = sqlite3.OperationalError("it failed")
        error.sqlite_errorcode = code
        raise error

    (tmp_path / "lake").mkdir()
    sqlite3.connect(tmp_path / "lake" / "runs.db").execute("CREATE TABLE runs (id TEXT)").connection.close()
    monkeypatch.setattr(file_copy.sqlite3, "connect", fail)
    with raising(OSError, errno=number):
        copy_folder(tmp_path / "lake", tmp_path / "copy", has_databases=True)


def test_a_database_that_vanishes_during_the_copy_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lake").mkdir()
    database = tmp_path / "lake" / "runs.db"
    sqlite3.connect(database).execute("CREATE TABLE runs (id TEXT)").connection.close()
    connect = sqlite3.connect

    def remove(*arguments: Any, **options: Any) -> sqlite3.Connection:
        database.unlink(missing_ok=True)
        return connect(*arguments, **options)

    monkeypatch.setattr(file_copy.sqlite3, "connect", remove)
    count = copy_folder(tmp_path / "lake", tmp_path / "copy", has_databases=True)
    assert (count.files, count.vanished_files) == (0, 1)


def test_links_to_files_are_copied_as_files_and_other_links_are_named(tmp_path: Path) -> None:
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    (source / "below").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "config").write_text("on a shared disk")
    (source / "below" / "config").symlink_to(elsewhere / "config")
    (source / "below" / "folder").symlink_to(elsewhere)
    (source / "nothing").symlink_to(tmp_path / "nothing")
    (source / "loop").symlink_to(source / "loop")
    (tmp_path / "root").symlink_to(source)
    count = copy_folder(tmp_path / "root", tmp_path / "copy")
    copy = tmp_path / "copy" / "below" / "config"
    assert (count.files, copy.is_symlink(), copy.read_text()) == (1, False, "on a shared disk")
    assert sorted(count.skipped_links) == ["below/folder", "loop", "nothing"]
    assert copy_folder(source, tmp_path / "second", previous=tmp_path / "copy").linked_files == 1


def test_a_database_behind_a_link_is_copied_with_its_pending_changes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "runs.db").symlink_to(tmp_path / "runs.db")
    with closing(sqlite3.connect(tmp_path / "runs.db", isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode=wal")
        writer.execute("CREATE TABLE t (n INTEGER)")
        copy_folder(source, tmp_path / "first", has_databases=True)
        writer.execute("INSERT INTO t VALUES (1)")
        copy_folder(source, tmp_path / "second", previous=tmp_path / "first", has_databases=True)
    with closing(sqlite3.connect(tmp_path / "second" / "runs.db")) as copy:
        assert copy.execute("SELECT n FROM t").fetchall() == [(1,)]


def read_mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_keep_their_permissions_also_empty_and_read_only_ones(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    modes = {"shared": 0o2775, "shared/empty": 0o711, "fixed": 0o500, "fixed/deep": 0o500}
    for name in modes:
        (source / name).mkdir(parents=True)
    (source / "fixed" / "deep" / "file").write_text("1")
    source.chmod(0o750)
    for name in reversed(modes):
        (source / name).chmod(modes[name])
    assert copy_folder(source, copy).files == 1
    assert {name: read_mode(copy / name) for name in modes} == modes
    assert read_mode(copy) == 0o750
    remove_folder(copy)
    assert not copy.exists()
    remove_folder(source)


def test_a_file_that_changes_during_the_copy_is_copied_again_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    file = source / "one"
    file.write_text("old")
    os.utime(file, ns=(0, 10**18))
    original_copy = shutil.copy2

    def copy_during_change(path: Path, copy: Path) -> None:
        original_copy(path, copy)
        path.write_text("new")  # the same size
        shutil.copystat(
            path, copy
        )  # as if the content had been read before the change, and the time after it

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copy2", copy_during_change)
        copy_folder(source, tmp_path / "first")
    assert copy_folder(source, tmp_path / "second", previous=tmp_path / "first").linked_files == 0
    assert (tmp_path / "second" / "one").read_text() == "new"


def test_files_are_copied_if_the_disk_has_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "one").write_text("1")
    with closing(sqlite3.connect(source / "runs.db")) as writer:
        writer.execute("CREATE TABLE t (n INTEGER)")
    copy_folder(source, tmp_path / "first", has_databases=True)

    def refuse_link(*_: object) -> None:
        raise OSError(errno.EMLINK, "Too many links")

    monkeypatch.setattr(os, "link", refuse_link)
    count = copy_folder(source, tmp_path / "second", previous=tmp_path / "first", has_databases=True)
    assert (count.files, count.linked_files) == (2, 0)
    assert (tmp_path / "second" / "one").read_text() == "1"


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
    yield ProcessRecord("nessie", process.pid, start_s, 0)
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


BUSY_PROGRAM = """
import os, threading
def write():
    descriptor = os.open(os.devnull, os.O_WRONLY)
    while True:
        os.write(descriptor, bytes(1 << 16))
for _ in range(15):
    threading.Thread(target=write).start()
print("ready", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the states of threads in /proc")
def test_no_thread_of_the_server_runs_during_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[str] = []

    def record_states(*_: object) -> None:
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            states.append((thread / "stat").read_text().rpartition(")")[2].split()[0])

    monkeypatch.setattr(database_copy, "_link_files", record_states)
    command = [sys.executable, "-c", BUSY_PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            server = ProcessRecord("nessie", process.pid, find_start_s(process.pid) or 0.0, 0)
            for number in range(30):
                copy_database(tmp_path, tmp_path / f"copy{number}", server=server)
            assert not is_suspended(process.pid)
        finally:
            process.kill()
    assert len(states) >= 30 * 16
    assert set(states) == {"T"}


@pytest.mark.parametrize("moment", ["_stop_threads", "_link_files"])
def test_the_server_continues_after_an_interruption(
    tmp_path: Path, sleeper: ProcessRecord, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    original_function = getattr(database_copy, moment)

    def interrupt(*arguments: object) -> None:
        original_function(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(database_copy, moment, interrupt)
    with pytest.raises(KeyboardInterrupt):
        copy_database(make_store(tmp_path / "store"), tmp_path / "copy", server=sleeper)
    assert not is_suspended(sleeper.pid)


def test_a_server_that_ended_is_no_server_to_copy(tmp_path: Path, sleeper: ProcessRecord) -> None:
    ended = ProcessRecord("nessie", sleeper.pid, sleeper.started_s + 10, 0)
    with raising(BackupFailed, reason="server_ended"):
        copy_database(make_store(tmp_path / "store"), tmp_path / "copy", server=ended)
    assert not is_suspended(sleeper.pid)


def test_a_server_that_does_not_stop_is_not_copied(
    tmp_path: Path, sleeper: ProcessRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_copy, "_is_stopped", lambda _: False)
    with raising(BackupFailed, reason="not_suspended"):
        copy_database(make_store(tmp_path / "store"), tmp_path / "copy", server=sleeper, limit_s=0.2)
    assert not is_suspended(sleeper.pid)


def test_an_early_file_is_read_before_its_folder_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = tmp_path / "landing" / "topic" / "0"
    partition.mkdir(parents=True)
    (partition / "mark").write_text("1")
    (partition / "file-0").touch()
    scan = os.scandir

    def scan_while_a_receiver_writes(folder: Path) -> Any:
        # Between the reading of the mark and the listing, the receiver finishes a file.
        if Path(folder) == partition:
            (partition / "file-1").touch()
            (partition / "mark").write_text("2")
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scan_while_a_receiver_writes)
    count = copy_folder(tmp_path / "landing", tmp_path / "copy", early_files={"mark"})
    copied = tmp_path / "copy" / "topic" / "0"
    assert (copied / "mark").read_text() == "1"
    assert sorted(path.name for path in copied.iterdir()) == ["file-0", "file-1", "mark"]
    assert (count.files, count.bytes) == (3, 1)
