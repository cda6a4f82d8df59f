"""Runs a real `dagster dev` on the shared lakehouse, and calls it as the UI does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from branchlake_dagster.cli.dagster_home import dagster_dev, dagster_home
from branchlake_dagster.lakehouse.lakehouse import Lakehouse

LAUNCH = """
mutation Launch($params: ExecutionParams!) {
  launchRun(executionParams: $params) { __typename ... on LaunchRunSuccess { run { runId } } }
}
"""


@contextmanager
def home_of(
    lake: Lakehouse, namespace: str, home: Path, *, more: Mapping[str, str] | None = None, config: str = ""
) -> Iterator[dict[str, str]]:
    """Create a Dagster home with `config` appended, and set DAGSTER_HOME within the block.

    Yields the environment variables that a daemon needs.
    """
    environment = {
        "BRANCHLAKE_STATE_DIR": str(lake.settings.state_dir),
        "BRANCHLAKE_TEST_NAMESPACE": namespace,
        **(more or {}),
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        # Set before `dagster_home` sets them, so that monkeypatch restores them.
        for name, value in {**environment, "DAGSTER_HOME": str(home)}.items():
            monkeypatch.setenv(name, value)
        dagster_home(lake.settings)
        with (home / "dagster.yaml").open("a") as file:
            file.write(config)
        yield environment


@contextmanager
def daemon_of(module: str, lake: Lakehouse, namespace: str, home: Path, **options: Any) -> Iterator[str]:
    """Start a webserver with its daemon and yield its URL. `options` are those of `home_of`."""
    with (
        home_of(lake, namespace, home, **options) as environment,
        dagster_dev(module, home=home, environment=environment) as url,
    ):
        yield url


def graphql(url: str, query: str, **params: Any) -> Any:
    variables = {"params": params}
    reply = requests.post(f"{url}/graphql", json={"query": query, "variables": variables}, timeout=300).json()
    return reply["data"]


def launch(url: str, module: str, *path: str) -> str:
    """Launch a run of one asset and return the run id."""
    selector = {
        "repositoryLocationName": module,
        "repositoryName": "__repository__",
        "jobName": "__ASSET_JOB",
        "assetSelection": [{"path": list(path)}],
    }
    return str(graphql(url, LAUNCH, selector=selector, runConfigData={})["launchRun"]["run"]["runId"])


def wait_for(what: Callable[[], Any], *, seconds: float = 300.0, every_s: float = 0.5) -> Any:
    """Call `what` until its result is true, and return the result. Each call takes CPU time from the daemon."""
    deadline = time.monotonic() + seconds
    while not (result := what()):
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        time.sleep(every_s)
    return result
