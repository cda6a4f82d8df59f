"""pyspark 4.1 beyond what it exports: its Spark Connect client, and the daemon of its workers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn, cast

_FIRST_WAIT_MS, _GROWTH, _LONGEST_WAIT_MS = 50, 4.0, 4_000
__all__ = [
    "add_session_hook",
    "disable_session_finalizer",
    "limit_retry_time",
    "load_daemon_manager",
    "silence_connect_log",
    "translate_errors",
]


def add_session_hook(client: Any, hook: Any) -> None:
    """Let a client pass each execution through `hook` (`SparkSession.Hook`) too.

    Hooks are part of `SparkSession.Builder`, but only for sessions that it makes anew.
    """
    client._session_hooks = [*client._session_hooks, hook]


def translate_errors(client: Any, translate: Callable[[Exception], Exception | None]) -> None:
    """Let a client raise what `translate` makes of an error of a call; None leaves the error to pyspark.

    Before pyspark handles the error: it logs its text first, which would end in the step's log.
    """
    handle = cast("Callable[[Exception], NoReturn]", client._handle_error)

    def handle_error(error: Exception) -> NoReturn:
        if (replacement := translate(error)) is not None:
            raise replacement from None
        handle(error)

    client._handle_error = handle_error


def limit_retry_time(client: Any, seconds: float) -> None:
    """Let a client repeat calls to a server that does not answer for about so long, and not for ten minutes.

    Retry policies can be set on a client, but pyspark exports neither it nor them.
    """
    from pyspark.sql.connect.client.retries import DefaultPolicy

    waits_ms, attempts = 0.0, 0
    while waits_ms < 1_000 * seconds:
        waits_ms += min(_FIRST_WAIT_MS * _GROWTH**attempts, _LONGEST_WAIT_MS)
        attempts += 1
    policy = DefaultPolicy(
        max_retries=attempts,
        initial_backoff=_FIRST_WAIT_MS,
        backoff_multiplier=_GROWTH,
        max_backoff=_LONGEST_WAIT_MS,
    )
    client.set_retry_policies([policy])


def silence_connect_log() -> None:
    """Let pyspark's log of Spark Connect say nothing unless SPARK_CONNECT_LOG_LEVEL is set, as it means to.

    It switches the log off, and Dagster's configuration of logging switches each one on that there is: a
    warning of three lines stood in the demo's output, of results that were released after their session.
    """
    logging.getLogger("pyspark.sql.connect.logging").addFilter(_is_log_enabled)


def disable_session_finalizer() -> None:
    """Let the garbage collector close no session of Spark Connect: all of ours are stopped.

    It may come to one in a thread that pyspark is starting and waits for, with its lock held, which closing
    waits for: a step stood still for ten minutes, until it was killed.
    """
    from pyspark.sql.connect.session import SparkSession

    if "__del__" in vars(SparkSession):
        del SparkSession.__del__


def _is_log_enabled(_: logging.LogRecord) -> bool:
    return "SPARK_CONNECT_LOG_LEVEL" in os.environ


def load_daemon_manager(worker_module: str) -> Callable[[], None]:
    """What `python -m pyspark.daemon WORKER_MODULE` does, in a process that has pyspark imported."""
    import pyspark.daemon as daemon

    daemon.worker_main = import_module(worker_module).main
    return cast("Callable[[], None]", daemon.manager)
