"""What cannot be meant by a run, a time or a hash is told before anything is asked."""

from __future__ import annotations

from typing import cast

import pytest

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieRefused
from branchlake_dagster.query.reference import LakeState
from branchlake_dagster_tests.suite.raised import raising

NOBODY = cast("NessieClient", None)


@pytest.mark.parametrize("run", ["", "xyz", "a8960", "a8960950' || 'x", "run-a8960950"])
def test_what_is_no_run_id(run: str) -> None:
    with raising(ConfigurationError, reason="run_id", subject=run):
        LakeState.find(NOBODY, run=run)


@pytest.mark.parametrize("at", ["", "yesterday", "2026-13-01", "12:00", "abc"])
def test_what_is_neither_a_time_nor_a_hash(at: str) -> None:
    with raising(ConfigurationError, reason="neither_time_nor_hash", subject=at):
        LakeState.find(NOBODY, at=at)


def test_an_empty_branch_is_not_main() -> None:
    """As of a shell's variable that is not set."""
    with raising(NessieRefused, reason="reference_name", subject=""):
        LakeState.find(NessieClient("http://nobody.invalid/api/v2"), branch="")


def test_one_state_at_a_time() -> None:
    with raising(ConfigurationError, reason="several_states"):
        LakeState.find(NOBODY, branch="main", at="2026-11-20")
