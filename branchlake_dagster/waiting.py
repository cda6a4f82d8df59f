"""Waiting for a condition that nobody announces: a port that answers, a process that ends."""

from __future__ import annotations

from collections.abc import Callable

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed


def holds_within(timeout_s: float, condition: Callable[[], bool], *, every_s: float) -> bool:
    """Whether `condition` came true within `timeout_s` seconds; asked at once, then every `every_s`.

    What it raises passes through.
    """
    return Retrying(
        retry=retry_if_result(lambda holds: not holds),
        stop=stop_after_delay(timeout_s),
        wait=wait_fixed(every_s),
        retry_error_callback=lambda _: False,
    )(condition)
