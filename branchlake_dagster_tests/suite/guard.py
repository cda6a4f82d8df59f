"""Fails a test that starts a server which its tier does not include, at the call that starts it."""

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
    # `pg_ctl` is not listed: it also stops Postgres at the end of the session, after a test of any tier.
    "daemon": lambda words: words[2:4] == ["dagster", "dev"] or Path(words[0]).name == "initdb",
}
"""Tier -> predicate of the commands that only tests of this tier and higher ones may start."""

_order = [*TIERS]
_current: list[str] = []


def needed(command: Sequence[str]) -> str:
    """Return the lowest tier whose tests may start this command."""
    return next((tier for tier, fits in [*_AT_LEAST.items()][::-1] if fits([*command])), "unit")


@contextmanager
def guarding(tier: str) -> Iterator[None]:
    """Within the block, fail the test if this process starts a server that `tier` does not include."""
    if not _installed:
        sys.addaudithook(_check_started_command)
        _installed.append(True)
    _current.append(tier)
    try:
        yield
    finally:
        _current.pop()


_installed: list[bool] = []


def _check_started_command(event: str, arguments: tuple[Any, ...]) -> None:
    # Python calls audit hooks for every started process. A hook cannot be removed, so there is one for all tests.
    if event not in ("subprocess.Popen", "os.posix_spawn") or not _current:
        return
    _, command, *_ = arguments
    words = [command] if isinstance(command, str | bytes | os.PathLike) else [*command]
    required_tier = needed([os.fsdecode(word) for word in words])
    if _order.index(required_tier) > _order.index(_current[-1]):
        # Not an Exception, so that the code under test does not handle it.
        pytest.fail(f"A test of tier {_current[-1]} starts a server of tier {required_tier}: {words[:4]}")
