"""One embedded lakehouse per test session, shared by every integration test.

`BRANCHLAKE_TEST_STATE_DIR` names a state folder whose servers are kept running between sessions, which
makes a single test start in milliseconds while one works on it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from pyspark.sql import SparkSession

from branchlake_dagster.branching.branch.run_branch import main_with_history
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.suite import tiers
from branchlake_dagster_tests.suite.guard import guarding

# Many tests speak to Nessie themselves, as anybody could; the token is test_embedded_token's matter.
os.environ.setdefault("BRANCHLAKE_GUARD_NESSIE", "false")

# How long an example takes is the machine's matter.
hypothesis.settings.register_profile("branchlake", deadline=None)
hypothesis.settings.load_profile("branchlake")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.assign(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with guarding(tiers.tier_of(item)):
        return (yield)


@pytest.fixture(scope="session")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("BRANCHLAKE_TEST_STATE_DIR")
    return Path(kept) if kept else tmp_path_factory.mktemp("branchlake")


@pytest.fixture(scope="session")
def lakehouse(state_dir: Path) -> Iterator[Lakehouse]:
    """The embedded lakehouse; its `main` has a first commit."""
    lake = Lakehouse(Settings(state_dir=state_dir))
    main_with_history(lake.nessie)
    yield lake
    if "BRANCHLAKE_TEST_STATE_DIR" not in os.environ:
        lake.servers.down()


@pytest.fixture(scope="session")
def nessie_uri(lakehouse: Lakehouse) -> str:
    return lakehouse.endpoints(spark=False).nessie_uri


@pytest.fixture(scope="session")
def spark_session(lakehouse: Lakehouse) -> Iterator[SparkSession]:
    """A Connect session on `main`, for tests that write no table."""
    session = lakehouse.spark_session()
    yield session
    session.stop()


@pytest.fixture
def namespace() -> str:
    """A namespace of the test's own, so that tests may publish to the shared `main`."""
    return f"t{uuid.uuid4().hex[:12]}"
