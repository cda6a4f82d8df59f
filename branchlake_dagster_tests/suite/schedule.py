"""Which worker gets what, and in which sequence: the longest first, so that none of them is left for the end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from branchlake_dagster_tests.suite.durations import Record, expected_s, read, split

SPREAD = frozenset(
    {"io_manager/test_daily_frames.py", "simulation/test_simulation.py", "incremental/test_model.py"}
)
"""Long modules whose tests go to several workers. They share nothing that is dear to make."""


def module_of(nodeid: str) -> str:
    """The module of a test, below the tests' folder."""
    return split(nodeid)[0]


def scope_of(nodeid: str) -> str:
    """What goes to one worker as a whole: a module, as its fixtures may have the scope of one, or a test."""
    module = module_of(nodeid)
    return nodeid if module in SPREAD else module


def arranged(nodeids: list[str], record: Record) -> list[str]:
    """Tests by scope, the scope that is expected to take longest first; in a scope as they were."""
    seconds: Counter[str] = Counter()
    for nodeid in nodeids:
        seconds[scope_of(nodeid)] += expected_s(record, nodeid)  # type: ignore[assignment]
    place = {scope: number for number, scope in enumerate(dict.fromkeys(map(scope_of, nodeids)))}
    return sorted(nodeids, key=lambda nodeid: (-seconds[scope_of(nodeid)], place[scope_of(nodeid)]))


def arrange(items: list[pytest.Item]) -> None:
    """Put the tests of a session into the sequence of `arranged`."""
    place = {nodeid: number for number, nodeid in enumerate(arranged([one.nodeid for one in items], read()))}
    items.sort(key=lambda item: place[item.nodeid])


class LongestFirst(LoadScopeScheduling):
    """pytest-xdist's scheduling by scope, with our scopes, in the sequence of the collection."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
