"""Signal handling that lets a command clean up before it ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Run the `finally` clauses of the block after SIGTERM and SIGHUP, as after Ctrl-C.

    The exit code is 128 plus the signal number. Otherwise, a benchmark that a job scheduler ends would
    leave its servers and its folder behind.
    """

    def exit_process(number: int, _: FrameType | None) -> None:
        # A second signal must not interrupt the clean-up.
        for ending_signal in _ENDING_SIGNALS:
            signal.signal(ending_signal, signal.SIG_IGN)
        sys.exit(128 + number)

    old_handlers = {one: signal.signal(one, exit_process) for one in _ENDING_SIGNALS}
    try:
        yield
    finally:
        for ending_signal, handler in old_handlers.items():
            signal.signal(ending_signal, handler)


_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_POOL_CLASSES = ("NullPool", "QueuePool", "SingletonThreadPool", "StaticPool")


def _is_unrelated_record(record: logging.LogRecord) -> bool:
    """Return whether a log record is unrelated to Ctrl-C.

    An SQLAlchemy pool that is closing a connection logs the interrupt as an error with a stack trace, and
    raises it.
    """
    return record.exc_info is None or not isinstance(record.exc_info[1], KeyboardInterrupt)


@contextmanager
def interrupts_for_us_alone() -> Iterator[None]:
    """Let Ctrl-C interrupt this process, but not the processes that Dagster starts for each step.

    The terminal sends SIGINT to all of them, and they would print their own stack traces. Child processes
    inherit blocked signals, so SIGINT is blocked here. A thread waits for SIGINT and sends SIGUSR1 to the
    main thread.
    """
    main_thread_id = threading.main_thread().ident
    if main_thread_id is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle_interrupt(_: int, frame: FrameType | None) -> None:
        # Call the current handler: inside a step it is the handler of Dagster.
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            handler(signal.SIGINT, frame)

    def relay_interrupts() -> None:
        while True:
            signal.sigwait({signal.SIGINT})
            signal.pthread_kill(main_thread_id, signal.SIGUSR1)

    for name in _POOL_CLASSES:
        logging.getLogger(f"sqlalchemy.pool.impl.{name}").addFilter(_is_unrelated_record)
    old_handler = signal.signal(signal.SIGUSR1, handle_interrupt)
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=relay_interrupts, name="interrupts", daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        print("Interrupted. To stop the servers: branchlake down", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # All resources of branchlake are closed. A normal exit would wait several seconds for gRPC.
        os._exit(128 + signal.SIGINT)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        signal.signal(signal.SIGUSR1, old_handler)
