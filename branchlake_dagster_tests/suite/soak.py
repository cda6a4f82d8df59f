"""Tests that only `make test-soak` runs.

They repeat what another test shows: more variants of a parameter, more rounds, more faults.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

MARKER = "soak"
VARIABLE = "BRANCHLAKE_TEST_SOAK"


def is_left_out(marks: Sequence[str], *, expression: str, soaking: bool) -> bool:
    """Whether a test with these marks is deselected.

    `expression` is the value of `-m`; one that names the marker decides by itself.
    """
    return MARKER in marks and not soaking and MARKER not in expression


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the tests that are left out from `items`, and report them to pytest as deselected."""
    expression, soaking = str(config.option.markexpr), bool(os.environ.get(VARIABLE))
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        marks = [mark.name for mark in item.iter_markers()]
        (left_out if is_left_out(marks, expression=expression, soaking=soaking) else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
