"""One embedded lakehouse for each process of a test session, shared by all its tests that need one.

`BRANCHLAKE_TEST_STATE_DIR` names a state folder whose servers are kept running between sessions, which
makes a single test start in milliseconds while one works on it.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from pyspark.sql import SparkSession

from branchlake_dagster.internals.dagster_sqlite import install_revision_cache, keep_sqlite_connections
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.suite import memory, schedule, soak, tiers
from branchlake_dagster_tests.suite.guard import guarding
from branchlake_dagster_tests.suite.instances import (
    copy_run_databases,
    do_not_wait_for_the_disk,
    prepare_engine,
    remember_model_fields,
)
from branchlake_dagster_tests.suite.json_contract import check_every_output
from branchlake_dagster_tests.suite.kafka import Broker
from branchlake_dagster_tests.suite.lakes import Lakes, kept_folder
from branchlake_dagster_tests.suite.own_project import ignore_own_project

# Many tests speak to Nessie themselves, as anybody could; embedded/test_token.py tests the token.
os.environ.setdefault("BRANCHLAKE_GUARD_NESSIE", "false")
# Servers end before what the second compiler makes pays: it would take half of their time. Without it the JVM
# reserves a fifth of the usual memory for code, and a full one ended the Spark server that all tests share.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m")
# A machine that is taken starts servers slowly.
os.environ.setdefault("BRANCHLAKE_STARTUP_TIMEOUT_S", "240")

# How long an example takes is the machine's matter.
hypothesis.settings.register_profile("branchlake", deadline=None)
hypothesis.settings.load_profile("branchlake")

pytest_plugins = ["branchlake_dagster_tests.suite.nessie_fixtures"]

LAKES: pytest.StashKey[Lakes] = pytest.StashKey()
_SHARED, _KEPT = "branchlake_shared", "branchlake_kept"


# -- the session ---------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    check_every_output()
    ignore_own_project()
    install_revision_cache()
    keep_sqlite_connections(prepare_engine)
    copy_run_databases()
    do_not_wait_for_the_disk()
    remember_model_fields()
    handed: dict[str, Any] | None = getattr(config, "workerinput", None)
    if handed is not None:
        lakes = Lakes(Path(handed[_SHARED]), handed["workerid"], handed[_KEPT])
    elif (kept := kept_folder()) is not None:
        lakes = Lakes(kept, kept=True)
    else:
        lakes = Lakes(Path(tempfile.mkdtemp(prefix="branchlake-tests-")))
    config.stash[LAKES] = lakes


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist where the session's servers are."""
    lakes = node.config.stash[LAKES]
    node.workerinput |= {_SHARED: str(lakes.shared), _KEPT: lakes.kept}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> schedule.LongestFirst:
    return schedule.LongestFirst(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, object, object]:
    """Stop the servers when the workers have ended, and when ending them broke, as it may after Ctrl-C."""
    try:
        return (yield)
    finally:
        lakes = session.config.stash[LAKES]
        lakes.leave()
        if not lakes.worker:
            lakes.end()
            # The servers' logs stay when a test failed.
            if not lakes.kept and (exitstatus == pytest.ExitCode.OK or not any(lakes.shared.iterdir())):
                shutil.rmtree(lakes.shared, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what stays until the end out of the garbage collector's rounds.

    Thousands of tests and all that they import are a million objects. To look through them again and again was a
    fifth of the collection's time, and then a part of every test's.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes that are no text by their argument alone.

    Compressed bytes hold the time at which they were made, so that the workers would collect different tests.
    """
    return argname if isinstance(val, bytes) and not (val.isascii() and val.decode().isprintable()) else None


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries tell of what is left when the interpreter ends


# -- the tests -----------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    soak.deselect(config, items)
    tiers.assign(items)
    yield  # `-m` and `-k` choose
    schedule.arrange(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with guarding(tiers.tier_of(item)):
        return (yield)


@pytest.fixture(scope="session")
def state_dir(pytestconfig: pytest.Config) -> Path:
    return pytestconfig.stash[LAKES].prepare()


@pytest.fixture(autouse=True)
def shared_spark(request: pytest.FixtureRequest) -> None:
    """Tests that have Spark find the session's server in the lake that they share."""
    if tiers.has_spark(request.node) and "lakehouse" in request.fixturenames:
        request.config.stash[LAKES].join_spark()


@pytest.fixture(scope="session")
def lakehouse(state_dir: Path) -> Lakehouse:
    """The embedded lakehouse; its `main` has a first commit."""
    lake = Lakehouse(Settings(state_dir=state_dir))
    ensure_main_has_commit(lake.nessie)
    return lake


in_memory_nessie = memory.in_memory_nessie


@pytest.fixture(scope="session")
def nessie_uri(lakehouse: Lakehouse) -> str:
    return lakehouse.endpoints(spark=False).nessie_uri


@pytest.fixture(scope="session")
def spark_session(lakehouse: Lakehouse, pytestconfig: pytest.Config) -> Iterator[SparkSession]:
    """A Connect session on `main`, for tests that write no table."""
    pytestconfig.stash[LAKES].join_spark()
    session = lakehouse.spark_session()
    yield session
    session.stop()


@pytest.fixture(scope="session")
def kafka(pytestconfig: pytest.Config) -> Broker:
    """The broker of the session, of all workers: topics of one's own are made with `kafka.topic()`."""
    return Broker(pytestconfig.stash[LAKES].kafka())


@pytest.fixture
def namespace() -> str:
    """A namespace of the test's own, so that tests may publish to the shared `main`."""
    return f"t{uuid.uuid4().hex[:12]}"
