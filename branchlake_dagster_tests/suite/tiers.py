"""The tier of a test: the servers that it needs. Each test has exactly one tier, which is also its marker.

The tier follows from the fixtures of the test. A test that opens a Spark session or starts servers without a
fixture is marked by hand. The highest tier of all fixtures and marks counts.
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
"""Name -> description, from the lowest tier to the highest."""

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
    """Return the tier of a test with these marks and fixtures, including indirect fixtures."""
    used_fixtures = {*fixtures}
    if "in_memory_nessie" in used_fixtures:
        used_fixtures.discard("lakehouse")  # this fixture depends on the tier
    tiers = {*marks} & {*TIERS} | {_OF_FIXTURE[name] for name in used_fixtures if name in _OF_FIXTURE}
    return max(tiers, key=[*TIERS].index, default="unit")


def assign(items: Sequence[pytest.Item]) -> None:
    """Mark each test with its tier and remove other marks of tiers."""
    tiers = [
        tier([mark.name for mark in item.iter_markers()], getattr(item, "fixturenames", ())) for item in items
    ]
    for node in {node for item in items for node in item.listchain()}:
        # A module's mark is the minimum for its tests. With it, `-m` would also select tests of higher tiers.
        node.own_markers[:] = [mark for mark in node.own_markers if mark.name not in TIERS]
    for item, item_tier in zip(items, tiers, strict=True):
        item.add_marker(item_tier)


def tier_of(item: pytest.Item) -> str:
    """Return the tier of a collected test."""
    return next(mark.name for mark in item.iter_markers() if mark.name in TIERS)


def has_spark(item: pytest.Item) -> bool:
    """Whether the tier of the test includes a Spark server."""
    return [*TIERS].index(tier_of(item)) >= [*TIERS].index("spark")
