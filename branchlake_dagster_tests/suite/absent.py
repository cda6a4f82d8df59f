"""Programs that a developer's machine may lack, but a CI machine may not."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def absent(what: str, *, hint: str) -> NoReturn:
    """Skip the test because a program is missing. Fail if `CI` is set, where nobody reads about skipped tests."""
    message = f"{what} is missing; {hint}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
