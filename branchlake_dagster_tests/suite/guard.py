"""A test that starts a server which its tier does not have fails where it starts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from branchlake_dagster_tests.suite.tiers import TIERS

_AT_LEAST = {
    "nessie": lambda words: "-jar" in words and any("nessie-quarkus" in Path(word).name for word in words),
    "spark": lambda words: (
        any(Path(word).name.startswith(("spark-submit", "spark-class")) for word in words)
        or "kafka.Kafka" in words
    ),
    # Postgres is stopped by pg_ctl as well, at the end of the session, whichever test is the last.
    "daemon": lambda words: words[2:4] == ["dagster", "dev"] or Path(words[0]).name == "initdb",
}
"""Tier -> which commands only tests of it and above may start."""

_order = [*TIERS]
_current: list[str] = []


def needed(command: Sequence[str]) -> str:
    """The lowest tier whose tests may start this command."""
    return next((tier for tier, fits in [*_AT_LEAST.items()][::-1] if fits([*command])), "unit")


@contextmanager
def guarding(tier: str) -> Iterator[None]:
    """Let this process start what `tier` has, and no more, until the end of the block."""
    if not _installed:
        sys.addaudithook(_look)
        _installed.append(True)
    _current.append(tier)
    try:
        yield
    finally:
        _current.pop()


_installed: list[bool] = []


def _look(event: str, arguments: tuple[Any, ...]) -> None:
    # Whoever starts a process in Python comes by here; hooks can only be added.
    if event not in ("subprocess.Popen", "os.posix_spawn") or not _current:
        return
    _, command, *_ = arguments
    words = [command] if isinstance(command, str | bytes | os.PathLike) else [*command]
    wanted = needed([os.fsdecode(word) for word in words])
    if _order.index(wanted) > _order.index(_current[-1]):
        # Not an Exception, so that the code under test does not handle it.
        pytest.fail(f"A test of tier {_current[-1]} starts what tests of tier {wanted} have: {words[:4]}")
