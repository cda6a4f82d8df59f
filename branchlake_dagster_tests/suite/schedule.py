"""The order of the tests and their distribution to workers. The longest start first, so that no long test runs alone at the end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from branchlake_dagster_tests.suite.durations import Record, expected_s, read, split

SPREAD = frozenset(
    {"io_manager/test_daily_frames.py", "simulation/test_simulation.py", "incremental/test_model.py"}
)
"""Long modules whose tests are distributed over several workers. Their tests share no expensive fixtures."""


def module_of(nodeid: str) -> str:
    """Return the module of a test, relative to the tests' folder."""
    return split(nodeid)[0]


def scope_of(nodeid: str) -> str:
    """Return the unit that one worker runs as a whole.

    This is the module, because its fixtures may have module scope; for a module in `SPREAD` it is the test.
    """
    module = module_of(nodeid)
    return nodeid if module in SPREAD else module


def arranged(nodeids: list[str], record: Record) -> list[str]:
    """Return the tests grouped by scope, the scope with the longest expected time first.

    Within a scope the order stays as it was.
    """
    seconds: Counter[str] = Counter()
    for nodeid in nodeids:
        seconds[scope_of(nodeid)] += expected_s(record, nodeid)
    first_seen = {scope: number for number, scope in enumerate(dict.fromkeys(map(scope_of, nodeids)))}
    return sorted(nodeids, key=lambda nodeid: (-seconds[scope_of(nodeid)], first_seen[scope_of(nodeid)]))


def arrange(items: list[pytest.Item]) -> None:
    """Sort the tests of a session in place, in the order of `arranged`."""
    order = {nodeid: number for number, nodeid in enumerate(arranged([one.nodeid for one in items], read()))}
    items.sort(key=lambda item: order[item.nodeid])


class LongestFirst(LoadScopeScheduling):
    """pytest-xdist's scheduling by scope, with the scopes of `scope_of`, in the order of the collection."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
