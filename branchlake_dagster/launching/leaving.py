"""How a fork ends: as the interpreter would, but for taking apart all that it has inherited.

Freeing a quarter of a gigabyte of modules, page by page copied from the template, was a fifth of the CPU time
of a small run. The kernel does it at once.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

_FILE = io.IOBase.__mro__[1]
"""What all files are made from, those of C too, which only say that they are of the class that has a name."""

_CLOSING_S = 30.0


def leave(status: int, inherited: Iterable[Any] = ()) -> NoReturn:
    """End this process with `status`, after what whoever wrote the code of its run may rely on.

    Its threads have ended, except daemons; what is registered with `atexit` was called, the last one first;
    files that nobody closed are closed, `inherited` ones too. What completes its file only when it is freed,
    as an archive or a Parquet writer that was left open, does not.
    """
    closing = threading.Event()
    # A daemon's thread may hold a file's lock for ever, and be waiting for a reader that is gone.
    threading.Thread(target=_give_up, args=(closing, status), daemon=True).start()
    for last_act in (
        threading._shutdown,  # type: ignore[attr-defined]  # as multiprocessing does for its forks
        atexit._run_exitfuncs,
        closing.set,
        sys.stdout.flush,
        sys.stderr.flush,
        lambda: _close([*inherited, *open_files()]),
    ):
        _tried(last_act)
    os._exit(status)


def open_files() -> Sequence[Any]:
    """Every file object that the garbage collector lists, but for the process's own three streams."""
    listed = gc.get_objects()
    # By their types, which are few: `isinstance` asks proxies of others too, and they answer as they like.
    kinds = {kind for kind in set(map(type, listed)) if _FILE in kind.__mro__}
    return [one for one in listed if type(one) in kinds and not _is_stream(one)]


def _is_stream(file: Any) -> bool:
    try:
        return bool(file.fileno() <= 2)
    except Exception:  # noqa: BLE001 - it is closed, or none of the system's; whatever the class of it says
        return False


def _close(files: Iterable[Any]) -> None:
    """Close the files, what is written through others before those."""
    for file in sorted(files, key=_depth):
        with contextlib.suppress(Exception):  # its disk is full, or nobody reads it any more
            file.close()


def _depth(file: Any) -> int:
    if isinstance(file, io.TextIOBase):
        return 0
    if type(file).__module__ != "_io":
        return 1  # compressed, remote or somebody's own
    return 2 if isinstance(file, io.BufferedIOBase) else 3


def _tried(act: Callable[[], object]) -> None:
    try:
        act()
    except BaseException:  # noqa: BLE001 - the interpreter, too, tells of it and goes on
        with contextlib.suppress(Exception):
            traceback.print_exc()


def _give_up(closing: threading.Event, status: int) -> None:
    closing.wait()
    time.sleep(_CLOSING_S)
    os._exit(status)
