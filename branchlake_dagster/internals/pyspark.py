"""Uses parts of pyspark 4.1 that it does not export: its Spark Connect client, and its worker daemon.

A Connect session sends a request for each setting. The functions for settings send one request for all of
them: a write sets a dozen, and opening a session ten.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import import_module
from io import BufferedReader
from typing import Any, NoReturn, cast

_FIRST_WAIT_MS, _GROWTH, _LONGEST_WAIT_MS = 50, 4.0, 4_000
__all__ = [
    "add_session_hook",
    "bind_checkpoints",
    "disable_session_finalizer",
    "get_session_settings",
    "limit_retry_time",
    "load_daemon_manager",
    "set_session_settings",
    "silence_connect_log",
    "translate_errors",
    "unset_session_settings",
]


def add_session_hook(client: Any, hook: Any) -> None:
    """Add `hook` (`SparkSession.Hook`) to a client. It is called for each execution.

    `SparkSession.Builder` accepts hooks too, but only for sessions that it creates.
    """
    client._session_hooks = [*client._session_hooks, hook]


def bind_checkpoints(session: Any) -> None:
    """Make `DataFrame.localCheckpoint` and `checkpoint` return frames of this Connect session.

    pyspark returns frames of the thread's active session, which may be the session of another run.
    """
    from pyspark.sql.connect.dataframe import DataFrame

    execute = session.client.execute_command

    def execute_command(*args: Any, **named: Any) -> Any:
        rows, properties, info = execute(*args, **named)
        if (checkpoint := properties.get("checkpoint_command_result")) is not None:
            # The plan releases the rows in its session at the end.
            checkpoint._plan._spark_session = session
            properties["checkpoint_command_result"] = DataFrame(checkpoint._plan, session)
        return rows, properties, info

    session.client.execute_command = execute_command


def translate_errors(client: Any, translate: Callable[[Exception], Exception | None]) -> None:
    """Make a Connect client raise the error that `translate` returns instead of the original error.

    If `translate` returns None, pyspark handles the error. `translate` is called before pyspark handles the
    error, because pyspark logs the error's text, which would appear in the step's log.
    """
    handle = cast("Callable[[Exception], NoReturn]", client._handle_error)

    def handle_error(error: Exception) -> NoReturn:
        if (replacement := translate(error)) is not None:
            raise replacement from None
        handle(error)

    client._handle_error = handle_error


def limit_retry_time(client: Any, seconds: float) -> None:
    """Make a Connect client repeat calls to a silent server for about `seconds`, instead of ten minutes.

    A client accepts retry policies, but pyspark exports neither the client nor the policies.
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
    """Silence pyspark's log of Spark Connect unless SPARK_CONNECT_LOG_LEVEL is set, as pyspark intends.

    pyspark switches the log off, but Dagster's logging configuration switches every existing logger on. So
    the demo's output had a warning of three lines, about results that were released after their session.
    """
    logging.getLogger("pyspark.sql.connect.logging").addFilter(_is_log_enabled)


def disable_session_finalizer() -> None:
    """Prevent the garbage collector from closing Spark Connect sessions. branchlake stops its own sessions.

    The collector may run in a thread that pyspark is starting, and that pyspark waits for while it holds a
    lock. Closing the session waits for the same lock. A step hung for ten minutes until it was killed.
    """
    from pyspark.sql.connect.session import SparkSession

    if "__del__" in vars(SparkSession):
        del SparkSession.__del__


def _is_log_enabled(_: logging.LogRecord) -> bool:
    return "SPARK_CONNECT_LOG_LEVEL" in os.environ


def get_session_settings(session: Any, names: Collection[str]) -> dict[str, str | None]:
    """Return the values of the settings `names` of a Connect session, by name, in one request.

    A setting without value, not even a default, is None.
    """
    from pyspark.sql.connect.proto import ConfigRequest

    wanted = ConfigRequest.GetOption(keys=list(names))
    return dict(session.client.config(ConfigRequest.Operation(get_option=wanted)).pairs)


def set_session_settings(session: Any, values: Mapping[str, str]) -> None:
    """Set settings of a Connect session in the order of `values`, which maps names to values.

    Warns as `session.conf.set` does.
    """
    session.conf._set_all(dict(values), silent=False)


def unset_session_settings(session: Any, names: Collection[str]) -> None:
    """Reset the settings `names` of a Connect session to their default values, in one request."""
    from pyspark.sql.connect.proto import ConfigRequest

    session.client.config(ConfigRequest.Operation(unset=ConfigRequest.Unset(keys=list(names))))


def load_daemon_manager(
    worker_module: str, *, before_task: Callable[[], None], before_port: Callable[[], None]
) -> Callable[[], None]:
    """Return the function that `python -m pyspark.daemon WORKER_MODULE` runs.

    It works in a process that has imported pyspark already. `before_port` is called once, before Spark
    receives the daemon's port or the path of its socket. `before_task` is called in the worker when a task
    arrives, before the task's code runs.
    """
    daemon: Any = import_module("pyspark.daemon")
    run_task = import_module(worker_module).main

    def wait_and_run_task(requests: BufferedReader, replies: Any) -> None:
        if requests.peek(1):  # a worker waits here between two tasks
            before_task()
        run_task(requests, replies)

    # The first value that the daemon writes is its port, or the path of its socket.
    writers = {name: getattr(daemon, name) for name in ("write_int", "write_with_length")}

    def write_first(name: str, value: Any, stream: Any) -> None:
        vars(daemon).update(writers)
        before_port()
        writers[name](value, stream)

    vars(daemon).update({name: partial(write_first, name) for name in writers})
    daemon.worker_main = wait_and_run_task
    return cast("Callable[[], None]", daemon.manager)
