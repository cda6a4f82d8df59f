"""One pass at a time on one machine, and a pass that stands still stops no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from branchlake_dagster.file_lock import try_file_lock
from branchlake_dagster.publication.reconciler import acquire_pass_lock, longest_pass_s
from branchlake_dagster.settings import Settings

HOLD = """
import sys
from pathlib import Path
from branchlake_dagster.publication.reconciler import acquire_pass_lock
from branchlake_dagster.settings import Settings
with acquire_pass_lock(Settings(state_dir=Path(sys.argv[1]))) as mine:
    print(mine, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path)


@pytest.fixture
def stopped(settings: Settings) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock and is stopped."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(settings.state_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.communicate("")


def later(settings: Settings) -> float:
    """A time at which the stopped process has held the lock for too long."""
    return time.time() + longest_pass_s(settings) + 1


def holder(settings: Settings) -> dict[str, float]:
    (path,) = (settings.state_dir / "run").glob("publication-*.lock")
    return dict(json.loads(path.read_text()))


def test_the_lock_records_its_holder(settings: Settings) -> None:
    with acquire_pass_lock(settings, now=lambda: 5.0):
        assert holder(settings) == {"pid": os.getpid(), "since": 5.0}


def test_a_pass_that_works_is_waited_for_and_later_ones_continue_beside_a_stopped_one(
    settings: Settings, stopped: subprocess.Popen[str]
) -> None:
    with acquire_pass_lock(settings) as mine:
        assert not mine
    assert holder(settings)["pid"] == stopped.pid
    with acquire_pass_lock(settings, now=lambda: later(settings)) as mine:
        assert mine
        with acquire_pass_lock(settings, now=lambda: later(settings)) as third:
            assert not third  # one at a time still
        stopped.send_signal(signal.SIGCONT)
        stopped.communicate("")
        with acquire_pass_lock(settings, now=lambda: later(settings)) as fourth:
            assert not fourth  # the end of the stopped pass frees nothing
    with acquire_pass_lock(settings) as fifth:
        assert fifth


def test_a_holder_without_a_record_is_as_old_as_its_file(settings: Settings) -> None:
    with acquire_pass_lock(settings) as mine:
        assert mine
        (lock,) = (settings.state_dir / "run").glob("publication-*.lock")
        lock.write_bytes(b"")
        with acquire_pass_lock(settings) as young:
            assert not young
        os.utime(lock, (0, 0))
        with acquire_pass_lock(settings) as beside:
            assert beside


def test_the_record_of_the_last_pass_is_not_taken_for_that_of_a_new_holder(settings: Settings) -> None:
    with acquire_pass_lock(settings, now=lambda: 5.0):
        (lock,) = (settings.state_dir / "run").glob("publication-*.lock")
    with lock.open("r+b") as new_holder:
        assert try_file_lock(new_holder.fileno())

        def replace_the_record(_: float) -> None:
            lock.write_text(json.dumps({"pid": 1, "since": time.time()}))

        with acquire_pass_lock(settings, sleep=replace_the_record) as beside:
            assert not beside
    assert holder(settings)["pid"] == 1
