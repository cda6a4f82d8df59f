"""Logs are rotated while their servers write to them."""

from __future__ import annotations

import errno
import fcntl
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from branchlake_dagster.embedded import process
from branchlake_dagster.embedded import process as rotation
from branchlake_dagster.embedded.process import (
    EARLIER_FILES,
    ProcessRecord,
    rotate_by_copy,
    rotate_by_rename,
    rotate_folder,
)
from branchlake_dagster.embedded.servers import NESSIE, SPARK, EmbeddedServers
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.settings import Settings
from branchlake_dagster.waiting import holds_within
from branchlake_dagster_tests.suite.lakes import copy_jar_lists

LIMIT = 20_000
CHATTY = "i=0; while :; do i=$((i+1)); echo line $i of a server that says much; done"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "LIMIT_BYTES", LIMIT)


@pytest.fixture
def chatty(tmp_path: Path) -> Iterator[tuple[ProcessRecord, Path]]:
    """A process that writes to its log as fast as it can, and the log."""
    log = tmp_path / "logs" / "chatty.log"
    record = process.launch_server("chatty", ["/bin/sh", "-c", CHATTY], log=log, environment={}, port=1)
    yield record, log
    process.stop_process(record)


def oldest_first(log: Path) -> list[Path]:
    earlier = [log.with_name(f"{log.name}.{number}") for number in range(EARLIER_FILES, 0, -1)]
    return [path for path in (*earlier, log) if path.exists()]


@pytest.mark.usefixtures("small")
def test_a_small_log_stays(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"x" * LIMIT)
    assert not rotate_by_copy(log)
    assert not rotate_by_rename(log)
    assert not rotate_by_copy(tmp_path / "absent.log")
    rotate_folder(tmp_path / "absent")
    assert [path.name for path in tmp_path.iterdir()] == ["x.log"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("rotate", [rotate_by_copy, rotate_by_rename])
def test_the_oldest_file_goes(tmp_path: Path, rotate: Any) -> None:
    log = tmp_path / "x.log"
    for number in range(EARLIER_FILES + 2):
        log.write_text(f"{number}" + "x" * LIMIT)
        assert rotate(log)
    log.write_text("now")
    newest = EARLIER_FILES + 1
    assert [path.read_text()[0] for path in oldest_first(log)] == [*map(str, range(2, newest + 1)), "n"]
    assert len([*tmp_path.iterdir()]) == EARLIER_FILES + 1


@pytest.mark.usefixtures("small")
def test_a_server_that_writes_for_days_is_bounded(chatty: tuple[ProcessRecord, Path]) -> None:
    """Several processes rotate its log, as several work on a lake."""
    record, log = chatty

    def rotate_often(_: int) -> int:
        end, times = time.monotonic() + 2.0, 0
        while time.monotonic() < end:
            times += rotate_by_copy(log)
        return times

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(rotate_often, range(4))) > EARLIER_FILES
    assert record.is_alive()
    process.stop_process(record)
    files = oldest_first(log)
    assert len(files) == EARLIER_FILES + 1
    assert {path.stat().st_mode & 0o777 for path in files[:-1]} == {0o600}
    told = [path.read_bytes() for path in files]
    assert not any(b"\x00" in content for content in told)
    numbers = [int(n) for content in told for n in re.findall(rb"^line (\d+) of", content, re.MULTILINE)]
    assert numbers == sorted(set(numbers))
    assert not [*log.parent.glob("*.copy")]


@pytest.mark.usefixtures("small")
def test_a_log_is_rotated_when_its_server_starts(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "sleep.log"
    log.parent.mkdir()
    log.write_bytes(b"x" * (LIMIT + 1))
    process.stop_process(
        process.launch_server("sleep", ["/bin/sleep", "60"], log=log, environment={}, port=1)
    )
    assert log.stat().st_size < 100
    assert log.with_name("sleep.log.1").stat().st_size == LIMIT + 1


@pytest.mark.usefixtures("small")
def test_a_full_disk_does_not_let_a_log_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"x" * (LIMIT + 1))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    assert rotate_by_copy(log)
    assert log.stat().st_size == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.log"]


@pytest.mark.usefixtures("small")
def test_only_one_of_several_processes_rotates(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"x" * (LIMIT + 1))
    with log.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not rotate_by_copy(log)
        assert not rotate_by_rename(log)
    assert rotate_by_copy(log)


# -- the servers ---------------------------------------------------------------------------------------


@pytest.mark.nessie
def test_nessie_goes_on_in_its_rotated_log(
    tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_jar_lists(state_dir, tmp_path)
    servers = Lakehouse(Settings(state_dir=tmp_path, session_kind="classic")).servers
    log = servers.log_path(NESSIE)
    try:
        servers.endpoints()
        monkeypatch.setattr(rotation, "LIMIT_BYTES", 300)
        servers.endpoints()
        assert log.stat().st_size < 300
        assert b"Listening on" in log.with_name("nessie.log.1").read_bytes()
    finally:
        servers.stop_all()
    # Only its end is in the emptied log, without a hole before it.
    assert b"stopped in" in log.read_bytes()
    assert b"\x00" not in log.read_bytes()


@pytest.mark.spark
def test_spark_goes_on_in_its_rotated_log(
    lakehouse: Lakehouse, spark_session: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = lakehouse.servers.log_path(SPARK)
    state = lakehouse.settings.state_dir
    if (state / "run" / "spark.borrowed").exists():
        # Workers of pytest-xdist use the server of the session, whose folder is around theirs.
        log = state.parent / "logs" / log.name

    def write_line() -> str:
        marker = uuid.uuid4().hex
        with pytest.raises(PySparkException):
            spark_session.sql(f"SELECT raise_error('{marker}')").collect()
        return marker

    def is_rotated() -> bool:
        # Other workers use the server too. One of them may just have rotated the log, or do it now.
        write_line()
        return rotate_by_copy(log)

    with monkeypatch.context() as patched:
        patched.setattr(rotation, "LIMIT_BYTES", 1)
        assert holds_within(30, is_rotated, every_s=0.1)
    marker = write_line()
    assert holds_within(30, lambda: marker.encode() in log.read_bytes(), every_s=0.1)
    assert b"\x00" not in log.read_bytes()
    assert EmbeddedServers(lakehouse.settings).status()[SPARK] is not None
