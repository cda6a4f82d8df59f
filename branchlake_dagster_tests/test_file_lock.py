"""Locks on files, between processes and threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from branchlake_dagster.file_lock import file_lock, try_file_lock


def test_a_held_lock_is_refused_and_a_released_one_is_given(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with file_lock(path), path.open() as other:
        assert not try_file_lock(other.fileno())
    with path.open() as other:
        assert try_file_lock(other.fileno())


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    path, order = tmp_path / "lock", []

    def wait() -> None:
        with file_lock(path):
            order.append("second")

    with file_lock(path):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from branchlake_dagster.file_lock import file_lock\n"
        "with file_lock(Path(sys.argv[1])):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with path.open() as handle:
            assert not try_file_lock(handle.fileno())
        holder.kill()
        holder.wait()
        with path.open() as handle:
            assert try_file_lock(handle.fileno())


def test_the_content_of_a_locked_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("content")
    with file_lock(path):
        assert path.read_text() == "content"


def test_a_folder_cannot_be_locked_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(OSError), file_lock(tmp_path):  # noqa: PT011 - any of them
        pass
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        assert try_file_lock(descriptor)
    finally:
        os.close(descriptor)
