from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from branchlake_dagster_tests.remote import postgres, stack


@pytest.fixture(scope="session")
def remote_stack(state_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[stack.Stack]:
    """The whole stack of deploy/compose.yaml on loopback; skipped where there is no Postgres."""
    programs = postgres.programs()
    if programs is None:
        pytest.skip("no Postgres on this machine (Debian: apt install postgresql)")
    with stack.running(programs, tmp_path_factory.mktemp("remote"), state_dir) as found:
        yield found


@pytest.fixture(scope="module")
def remote_environment(
    remote_stack: stack.Stack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[pytest.MonkeyPatch]:
    """This process set up as one of the compose file's Dagster containers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in remote_stack.environment.items():
            patch.setenv(name, value)
        folder = tmp_path_factory.mktemp("remote-dagster")
        patch.setenv("DAGSTER_HOME", str(stack.dagster_home(folder / "home")))
        patch.setenv("BRANCHLAKE_STATE_DIR", str(folder / "state"))
        yield patch
