"""Command groups that import the modules of their commands on demand, and the clean end of a command.

So `branchlake --help` and each command import only the modules that they need. `cli` does not import the
packages of benchmarks and of the space pipeline: the `sources` of its group name their commands.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from importlib import import_module
from types import FrameType
from typing import Any

import click

from branchlake_dagster.extras import MissingExtra


class CommandGroup(click.Group):
    """A click group that also contains commands of other modules.

    Args:
        sources: For each such command, its name and the click command as `package.module:attribute`.
        former_names: Names in `sources` that earlier versions documented. They work, but help omits them.
    """

    def __init__(
        self,
        *arguments: Any,
        sources: Mapping[str, str] | None = None,
        former_names: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._sources = sources or {}
        self._former_names = frozenset(former_names)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the sorted names of all commands, also of those in `sources`, including former names."""
        return sorted({*super().list_commands(ctx), *self._sources})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name; None if it does not exist.

        If the command is in `sources`, its module is imported now. If an extra is missing, a substitute is
        returned that raises MissingExtra when it is run.
        """
        source = self._sources.get(cmd_name)
        if source is None:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = source.partition(":")
        try:
            command: click.Command = copy(getattr(import_module(module), attribute))
        except MissingExtra as error:
            return _unavailable_command(cmd_name, error)
        command.hidden = cmd_name in self._former_names
        return command


def print_progress(message: str) -> None:
    """Print a message to standard error, because standard output may be JSON."""
    click.echo(message, err=True)


def _unavailable_command(name: str, error: MissingExtra) -> click.Command:
    """Create a substitute for a command whose packages are missing. Running it raises `error`."""

    def callback(_: tuple[str, ...]) -> None:
        raise error

    return click.Command(
        name,
        callback=callback,
        params=[click.Argument(["_"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
        help=str(error),
        short_help="Not installed: needs an extra.",
    )


_REPEATED_S = 10.0
"""Seconds after a signal in which a second one is ignored, so that it does not interrupt the clean-up."""


@contextmanager
def exit_on_signals(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit in the block, so that its `finally` clauses run.

    The exit code is 128 plus the signal number, also if code in the block swallows the exception and ends
    later. Without this, a command that a job scheduler ends would leave its servers and its folders behind.
    A second signal is ignored for ten seconds, and then raises SystemExit again. Signals that this process
    ignores, as under `nohup`, stay ignored. Outside of the main thread, this context manager does nothing.

    An interrupt that Dagster raises in a run becomes KeyboardInterrupt, or SystemExit for SIGTERM. `clock`
    returns seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, *_ENDING_SIGNALS)
    old_handlers = {number: signal.getsignal(number) for number in numbers}
    ignored_signals = {number for number in numbers if old_handlers[number] is signal.SIG_IGN}
    ending_number: int | None = None
    ignored_until = 0.0

    def exit_process(number: int, frame: FrameType | None) -> None:
        nonlocal ending_number, ignored_until
        if number in ignored_signals:
            return
        if number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        if ending_number is None or clock() >= ignored_until:
            ending_number, ignored_until = number, clock() + _REPEATED_S
            sys.exit(128 + number)

    for number in _ENDING_SIGNALS:
        if number not in ignored_signals:
            signal.signal(number, exit_process)
    # Dagster replaces the handler of SIGTERM by that of SIGINT when it is imported and around each step.
    if signal.SIGINT in ignored_signals or old_handlers[signal.SIGINT] is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_process)
    try:
        with _signal_log.open():
            yield
    except BaseException as error:
        is_of_dagster = _is_interrupt_of_dagster(error)
        if not (isinstance(error, KeyboardInterrupt) or is_of_dagster):
            raise
        if ending_number is None and _signal_log.has_sigterm():
            ending_number = signal.SIGTERM
        if ending_number is not None:
            raise SystemExit(128 + ending_number) from error
        if is_of_dagster:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if ending_number is not None:
        sys.exit(128 + ending_number)


_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def _is_interrupt_of_dagster(error: BaseException) -> bool:
    dagster = sys.modules.get("dagster")
    return dagster is not None and isinstance(error, dagster.DagsterExecutionInterruptedError)


class _SignalLog:
    """Records whether SIGTERM has arrived, whatever handlers other libraries have set.

    In a step, Dagster handles SIGTERM as SIGINT, and raises the same exception for both. Python itself writes
    the numbers of signals to a pipe (`signal.set_wakeup_fd`).
    """

    def __init__(self) -> None:
        self._received = b""
        self._reader: int | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Record signals in the block. Only for the main thread."""
        self._received = b""
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(writer, False)
        old_descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_descriptor)
            self._read()
            os.close(writer)
            os.close(self._reader)
            self._reader = None

    def has_sigterm(self) -> bool:
        """Return whether SIGTERM has arrived in the block, also after its end."""
        self._read()
        return signal.SIGTERM in self._received

    def _read(self) -> None:
        if self._reader is not None:
            with suppress(BlockingIOError):
                self._received += os.read(self._reader, 1 << 16)


_signal_log = _SignalLog()


_POOL_CLASSES = ("NullPool", "QueuePool", "SingletonThreadPool", "StaticPool")


def _is_unrelated_record(record: logging.LogRecord) -> bool:
    """Return False for a log record about a KeyboardInterrupt, to filter it out.

    If Ctrl-C interrupts an SQLAlchemy pool that closes a connection, the pool logs the interrupt as an error
    with a stack trace, although it also raises it.
    """
    return record.exc_info is None or not isinstance(record.exc_info[1], KeyboardInterrupt)


@contextmanager
def interrupts_for_us_alone() -> Iterator[None]:
    """Let Ctrl-C interrupt this process, but not the processes that Dagster starts for each step.

    The terminal sends SIGINT to all of them, and they would print their own stack traces. Child processes
    inherit blocked signals, so SIGINT is blocked here. A thread waits for SIGINT and sends SIGUSR1 to the
    main thread. After a KeyboardInterrupt in the block, this process exits with code 130, or 143 if SIGTERM
    caused it. Outside of the main thread, this context manager does nothing.
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
        os._exit(128 + (signal.SIGTERM if _signal_log.has_sigterm() else signal.SIGINT))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        signal.signal(signal.SIGUSR1, old_handler)
