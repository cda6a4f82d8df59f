"""What a test needs to run: its tier, which is also its marker. Each test has exactly one.

A tier follows from the fixtures that a test uses. A mark is set where they do not tell: a test that opens a
Spark session by itself, or starts servers of its own. What needs most wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

TIERS = {
    "unit": "starts no server; `make test-fast` runs those that are not marked `long`",
    "lake": "needs a lake, whose Nessie is in the test's process",
    "nessie": "needs a Nessie server",
    "spark": "needs a Spark server as well, or a Spark in the test's process; or a Kafka broker",
    "daemon": "starts a Dagster daemon, or the services of deploy/",
    "chaos": "kills processes, loses requests, or plays thousands of schedules",
}
"""Name -> what it says; what comes later needs more."""

IN_MEMORY = "lake"

_OF_FIXTURE = {
    "in_memory_nessie": IN_MEMORY,
    "lakehouse": "nessie",
    "nessie_uri": "nessie",
    "branchlake_server": "nessie",
    "spark_session": "spark",
    "kafka": "spark",
    "remote_stack": "daemon",
}


def tier(marks: Iterable[str], fixtures: Iterable[str]) -> str:
    """The tier of a test with these marks and fixtures, those that it takes indirectly included."""
    taken = {*fixtures}
    if "in_memory_nessie" in taken:
        taken.discard("lakehouse")  # which decides by the tier
    named = {*marks} & {*TIERS} | {_OF_FIXTURE[name] for name in taken if name in _OF_FIXTURE}
    return max(named, key=[*TIERS].index, default="unit")


def assign(items: Sequence[pytest.Item]) -> None:
    """Mark each test with its tier, and with no other one."""
    found = [
        tier([mark.name for mark in item.iter_markers()], getattr(item, "fixturenames", ())) for item in items
    ]
    for node in {node for item in items for node in item.listchain()}:
        # A module's mark says what its tests need at least; it would select those that need more as well.
        node.own_markers[:] = [mark for mark in node.own_markers if mark.name not in TIERS]
    for item, its in zip(items, found, strict=True):
        item.add_marker(its)


def tier_of(item: pytest.Item) -> str:
    """The tier of a collected test."""
    return next(mark.name for mark in item.iter_markers() if mark.name in TIERS)


def has_spark(item: pytest.Item) -> bool:
    """Whether its tier has a Spark server."""
    return [*TIERS].index(tier_of(item)) >= [*TIERS].index("spark")
