"""How a fork ends: what whoever wrote the code of its run may rely on, and what it is spared."""

from __future__ import annotations

import bz2
import gzip
import subprocess
import sys
import textwrap
from pathlib import Path


def _left(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What comes of a process that ends by `leave`, its output in a pipe and so in buffers."""
    program = "from branchlake_dagster.launching.worker import end_process as leave\n" + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_status_and_what_was_printed_arrive() -> None:
    ended = _left("import sys; print('out'); print('err', file=sys.stderr); leave(85)")
    assert (ended.returncode, ended.stdout, ended.stderr) == (85, "out\n", "err\n")


def test_what_is_registered_is_called_after_the_threads_have_ended() -> None:
    ended = _left("""
        import atexit, concurrent.futures, threading, time
        atexit.register(print, "registered first")
        atexit.register(print, "registered last")
        def work():
            time.sleep(0.3)
            print("thread\\n", end="")  # one write: two threads at once would mix their texts and line ends
        threading.Thread(target=work).start()
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        concurrent.futures.ThreadPoolExecutor().submit(work)
        leave(0)
    """)
    assert ended.stdout.splitlines() == ["thread", "thread", "registered last", "registered first"]


def test_files_that_nobody_closed_are_written(tmp_path: Path) -> None:
    ended = _left(
        """
        import bz2, gzip, sys
        folder = sys.argv[1]
        text, raw = open(f"{folder}/text", "w"), open(f"{folder}/raw", "wb")
        text.write("ä line")
        raw.write(b"bytes")
        closed = open(f"{folder}/closed", "w")
        closed.close()
        read = open(f"{folder}/text")
        full = open("/dev/full", "w")
        full.write("cannot be written")
        packed, tight = gzip.open(f"{folder}/gz", "wt"), bz2.open(f"{folder}/bz2", "wb")
        packed.write("packed")
        tight.write(b"tight")
        class Odd(type):
            def __subclasscheck__(cls, other):
                raise RuntimeError("asked")
        class Proxy(metaclass=Odd):
            @property
            def __class__(self):
                raise RuntimeError("asked")
        proxies = [Proxy(), [Proxy()]]
        leave(3)
        """,
        str(tmp_path),
    )
    assert (ended.returncode, ended.stderr) == (3, "")
    assert (tmp_path / "text").read_text() == "ä line"
    assert (tmp_path / "raw").read_bytes() == b"bytes"
    assert gzip.decompress((tmp_path / "gz").read_bytes()) == b"packed"
    assert bz2.decompress((tmp_path / "bz2").read_bytes()) == b"tight"


def test_files_that_were_open_before_the_fork_are_written_once_by_each(tmp_path: Path) -> None:
    ended = _left(
        """
        import gc, os, sys
        from branchlake_dagster.launching.worker import list_open_files
        audit = open(sys.argv[1], "a")
        audit.write("imported\\n")
        gc.collect()
        files = list_open_files()
        for file in files:
            if file.writable():
                file.flush()
        gc.freeze()
        for number in range(2):
            if not os.fork():
                audit.write(f"run {number}\\n")
                print("printed", number)
                leave(0, files)
            os.wait()
        """,
        str(tmp_path / "audit"),
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "audit").read_text().splitlines() == ["imported", "run 0", "run 1"]
    assert ended.stdout.splitlines() == ["printed 0", "printed 1"]


def test_a_file_whose_lock_nobody_gives_back_does_not_hold_it_up() -> None:
    ended = _left("""
        import os, threading, time
        from branchlake_dagster.launching import worker
        worker._CLOSING_S = 0.5
        end, begin = os.pipe()
        stuck = open(begin, "wb")
        threading.Thread(target=stuck.write, args=(bytes(1 << 20),), daemon=True).start()
        time.sleep(0.3)
        print("printed")
        leave(5)
    """)
    assert (ended.returncode, ended.stdout) == (5, "printed\n")


def test_a_failure_at_the_end_is_reported_and_delays_nothing_else(tmp_path: Path) -> None:
    ended = _left(
        """
        import atexit, sys
        atexit.register(lambda: open(sys.argv[1], "w").write("later") and None)
        def fails():
            raise RuntimeError("at the end")
        atexit.register(fails)
        leave(85)
        """,
        str(tmp_path / "file"),
    )
    assert ended.returncode == 85
    assert "RuntimeError: at the end" in ended.stderr
    assert (tmp_path / "file").read_text() == "later"


def test_nothing_is_taken_apart() -> None:
    ended = _left("""
        class Inherited:
            def __del__(self):
                print("freed")
        kept = Inherited()
        leave(0)
    """)
    assert ended.stdout == ""
