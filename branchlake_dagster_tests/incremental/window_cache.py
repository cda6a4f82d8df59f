"""A cache of the time windows of Dagster's partitions, for a process that plays thousands of histories.

Dagster computes the windows by cron expressions each time. They depend only on the definition and the time at which they begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from dagster import TimeWindow, TimeWindowPartitionsDefinition


class _Windows:
    """Consecutive windows, each of which Dagster computes once."""

    def __init__(self, source: Iterator[TimeWindow]) -> None:
        self._source = source
        self._computed: list[TimeWindow] = []

    def __iter__(self) -> Iterator[TimeWindow]:
        number = 0
        while True:
            if number == len(self._computed):
                following = next(self._source, None)
                if following is None:
                    return
                self._computed.append(following)
            yield self._computed[number]
            number += 1


def cache_windows() -> None:
    """Compute each window once in this process, which must have one thread."""
    compute = TimeWindowPartitionsDefinition._iterate_time_windows

    @lru_cache(maxsize=4096)
    def get_windows(
        definition: TimeWindowPartitionsDefinition, start_timestamp: float, ignore_exclusions: bool
    ) -> _Windows:
        return _Windows(iter(compute(definition, start_timestamp, ignore_exclusions)))

    def iterate(
        self: TimeWindowPartitionsDefinition, start_timestamp: float, ignore_exclusions: bool = False
    ) -> Iterator[TimeWindow]:
        return iter(get_windows(self, start_timestamp, ignore_exclusions))

    TimeWindowPartitionsDefinition._iterate_time_windows = iterate
