"""What a machine may lack, and what a CI machine may not."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def absent(what: str, *, hint: str) -> NoReturn:
    """Skip the test because a program is absent; with `CI` set, where nobody reads what was skipped, fail."""
    told = f"{what} is missing; {hint}"
    if os.environ.get("CI"):
        pytest.fail(told)
    pytest.skip(told)
