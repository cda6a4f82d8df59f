"""How a fork ends: what whoever wrote the code of its run may rely on, and what it is spared."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path


def _left(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What comes of a process that ends by `leave`, its output in a pipe and so in buffers."""
    program = "from branchlake_dagster.launching.leaving import leave\n" + textwrap.dedent(code)
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
            print("thread")
        threading.Thread(target=work).start()
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        concurrent.futures.ThreadPoolExecutor().submit(work)
        leave(0)
    """)
    assert ended.stdout.splitlines() == ["thread", "thread", "registered last", "registered first"]


def test_files_that_nobody_closed_are_written(tmp_path: Path) -> None:
    ended = _left(
        """
        import sys
        folder = sys.argv[1]
        text, raw = open(f"{folder}/text", "w"), open(f"{folder}/raw", "wb")
        text.write("ä line")
        raw.write(b"bytes")
        closed = open(f"{folder}/closed", "w")
        closed.close()
        read = open(f"{folder}/text")
        full = open("/dev/full", "w")
        full.write("cannot be written")
        leave(3)
        """,
        str(tmp_path),
    )
    assert (ended.returncode, ended.stderr) == (3, "")
    assert (tmp_path / "text").read_text() == "ä line"
    assert (tmp_path / "raw").read_bytes() == b"bytes"


def test_what_fails_at_the_end_is_told_and_keeps_nothing_else_back(tmp_path: Path) -> None:
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
