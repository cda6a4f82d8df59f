"""Polling for a condition that sends no signal, such as a port that answers or a process that ends."""

from __future__ import annotations

from collections.abc import Callable

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed


def holds_within(timeout_s: float, condition: Callable[[], bool], *, every_s: float) -> bool:
    """Return whether `condition` becomes true within `timeout_s` seconds.

    Calls `condition` at once and then every `every_s` seconds. Exceptions of `condition` are not caught.
    """
    return Retrying(
        retry=retry_if_result(lambda holds: not holds),
        stop=stop_after_delay(timeout_s),
        wait=wait_fixed(every_s),
        retry_error_callback=lambda _: False,
    )(condition)
