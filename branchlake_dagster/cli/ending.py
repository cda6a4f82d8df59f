"""Being ended from outside: what was begun is cleaned up first."""

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
    """Let SIGTERM and SIGHUP leave through the `finally` clauses, as Ctrl-C does; the exit code is 128 + n.

    Without it a bench that a job scheduler ends leaves its servers and its folder behind.
    """

    def exit_process(number: int, _: FrameType | None) -> None:
        # Once: a second signal must not break off the cleaning up.
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
    """Whether a log record is about something else than Ctrl-C.

    A pool that is just closing a connection logs the interrupt as an error, with a stack trace, and then
    raises it.
    """
    return record.exc_info is None or not isinstance(record.exc_info[1], KeyboardInterrupt)


@contextmanager
def interrupts_for_us_alone() -> Iterator[None]:
    """Let Ctrl-C reach this process and none of the helpers that Dagster starts for each step.

    The terminal sends it to all of them, and they answer with stack traces of their own. What is started
    while a signal is blocked has it blocked too, so a thread waits for it and passes it on by another name.
    """
    main_thread_id = threading.main_thread().ident
    if main_thread_id is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle_interrupt(_: int, frame: FrameType | None) -> None:
        # The handler of the moment: inside a step it is Dagster's.
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
        print("Ended. The servers go on: `branchlake down` stops them.", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Everything of ours is closed. What is left is gRPC, which takes seconds to say good-bye.
        os._exit(128 + signal.SIGINT)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        signal.signal(signal.SIGUSR1, old_handler)
