"""The public fixtures, as a project has them; what needs Spark takes the session's server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import dagster as dg
import pytest

from branchlake_dagster.testing.fixtures import branchlake_server, lake, lake_settings
from branchlake_dagster_tests.suite.instances import new_instance

__all__ = ["branchlake_server", "lake", "lake_settings"]


@pytest.fixture(autouse=True)
def copied_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the instances of throwaway lakes start from copied databases and capture no output.

    Those of test_documented.py are Dagster's own: its tests run in another process.
    """
    make: Callable[..., AbstractContextManager[dg.DagsterInstance]] = dg.instance_for_test

    def copy_or_make(**options: Any) -> AbstractContextManager[dg.DagsterInstance]:
        return make(**options) if options else new_instance()

    monkeypatch.setattr(dg, "instance_for_test", copy_or_make)
