"""pyspark 4.1's Spark Connect client beyond what it exports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

__all__ = ["add_session_hook", "handle_errors_by"]


def add_session_hook(client: Any, hook: Any) -> None:
    """Let a client pass each execution through `hook` (`SparkSession.Hook`) too.

    Hooks are part of `SparkSession.Builder`, but only for sessions that it makes anew.
    """
    client._session_hooks = [*client._session_hooks, hook]


def handle_errors_by(client: Any, told: Callable[[Exception], Exception | None]) -> None:
    """Let a client raise what `told` makes of an error of a call; None leaves the error to pyspark.

    Before pyspark handles the error: it logs its text first, which would end in the step's log.
    """
    handle = cast("Callable[[Exception], NoReturn]", client._handle_error)

    def handling(error: Exception) -> NoReturn:
        if (instead := told(error)) is not None:
            raise instead from None
        handle(error)

    client._handle_error = handling
