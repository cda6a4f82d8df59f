"""The command line: `branchlake …`."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _interrupts_without_stack_trace() -> Iterator[None]:
    """Let Ctrl-C end the process at once during the imports, as it ends a program in C.

    Nothing handles a KeyboardInterrupt yet. Does nothing outside of the main thread, or if Ctrl-C has a
    handler other than that of Python.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


with _interrupts_without_stack_trace():
    from branchlake_dagster.cli.main import main

__all__ = ["main"]
