"""How a fork ends: as the interpreter would, but for taking apart all that it has inherited.

Freeing a quarter of a gigabyte of modules, page by page copied from the template, was a third of the CPU time
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
import traceback
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """End this process with `status`, after what whoever wrote the code of its run may rely on.

    Its threads have ended, except daemons; what is registered with `atexit` was called, the last one first;
    what was written to files that nobody closed is in them.
    """
    for last_act in (
        threading._shutdown,  # type: ignore[attr-defined]  # as multiprocessing does for its forks
        atexit._run_exitfuncs,
        _write_out,
    ):
        try:
            last_act()
        except BaseException:  # noqa: BLE001 - the interpreter, too, tells of it and goes on
            traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        sys.stderr.flush()
    os._exit(status)


def _write_out() -> None:
    """Flush every file that is open for writing, texts first: their buffers are files of their own.

    Those of the template are not among what the collector lists, since it has frozen them; they are empty.
    """
    listed = gc.get_objects()
    # By their types, which are few: `isinstance` asks proxies of others too, and they answer as they like.
    kinds = {kind for kind in set(map(type, listed)) if issubclass(kind, io.IOBase)}
    files = [one for one in listed if type(one) in kinds]
    for file in [sys.stdout, *sorted(files, key=lambda one: not isinstance(one, io.TextIOBase))]:
        with contextlib.suppress(Exception):  # closed, detached, not for writing, or its disk is full
            if not file.closed:
                file.flush()
