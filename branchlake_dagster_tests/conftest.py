"""One embedded lakehouse for each process of a test session, shared by all its tests that need one.

`BRANCHLAKE_TEST_STATE_DIR` names a state folder whose servers keep running between sessions. A single test then
starts in milliseconds.
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
from branchlake_dagster_tests.suite import extended, memory, schedule, soak, tiers
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

# Many tests call Nessie directly, without the token; embedded/test_token.py tests the token.
os.environ.setdefault("BRANCHLAKE_GUARD_NESSIE", "false")
# The servers end before the second JIT compiler pays off: it would take half of their CPU time. Without it the JVM
# reserves only a fifth of the usual code cache, and a full code cache once stopped the shared Spark server.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m")
# A busy machine starts servers slowly.
os.environ.setdefault("BRANCHLAKE_STARTUP_TIMEOUT_S", "240")

# The time of an example depends on the machine.
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
    worker_input: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker_input is not None:
        lakes = Lakes(Path(worker_input[_SHARED]), worker_input["workerid"], worker_input[_KEPT])
    elif (kept := kept_folder()) is not None:
        lakes = Lakes(kept, kept=True)
    else:
        lakes = Lakes(Path(tempfile.mkdtemp(prefix="branchlake-tests-")))
    config.stash[LAKES] = lakes


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the location of the session's servers to a worker of pytest-xdist."""
    lakes = node.config.stash[LAKES]
    node.workerinput |= {_SHARED: str(lakes.shared), _KEPT: lakes.kept}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> schedule.LongestFirst:
    return schedule.LongestFirst(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, object, object]:
    """Stop the servers after the workers, even if stopping the workers failed, for example after Ctrl-C."""
    try:
        return (yield)
    finally:
        lakes = session.config.stash[LAKES]
        lakes.leave()
        if not lakes.worker:
            lakes.end()
            # Keep the logs of the servers if a test failed.
            if not lakes.kept and (exitstatus == pytest.ExitCode.OK or not any(lakes.shared.iterdir())):
                shutil.rmtree(lakes.shared, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the objects that live until the end from garbage collection.

    Thousands of tests and their imports are a million objects. Scanning them repeatedly took a fifth of the time of
    the collection, and a part of the time of every test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name binary parameters by their argument only.

    Compressed bytes contain the time of compression, so the workers would collect tests with different names.
    """
    return argname if isinstance(val, bytes) and not (val.isascii() and val.decode().isprintable()) else None


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries report unreleased objects when the interpreter ends


# -- the tests -----------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    soak.deselect(config, items)
    extended.mark(items)
    tiers.assign(items)
    yield  # pytest applies `-m` and `-k`
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
    """Connect the lake of a test that uses Spark to the session's Spark server."""
    if tiers.has_spark(request.node) and "lakehouse" in request.fixturenames:
        request.config.stash[LAKES].join_spark()


@pytest.fixture(scope="session")
def lakehouse(state_dir: Path) -> Lakehouse:
    """The embedded lakehouse. `main` has a first commit."""
    lake = Lakehouse(Settings(state_dir=state_dir))
    ensure_main_has_commit(lake.nessie)
    return lake


in_memory_nessie = memory.in_memory_nessie


@pytest.fixture(scope="session")
def nessie_uri(lakehouse: Lakehouse) -> str:
    return lakehouse.endpoints(spark=False).nessie_uri


@pytest.fixture(scope="session")
def spark_session(lakehouse: Lakehouse, pytestconfig: pytest.Config) -> Iterator[SparkSession]:
    """A Spark Connect session on `main`, for tests that write no table."""
    pytestconfig.stash[LAKES].join_spark()
    session = lakehouse.spark_session()
    yield session
    session.stop()


@pytest.fixture(scope="session")
def kafka(pytestconfig: pytest.Config) -> Broker:
    """The broker that all workers share. `kafka.topic()` creates a topic for one test."""
    return Broker(pytestconfig.stash[LAKES].kafka())


@pytest.fixture
def namespace() -> str:
    """A new namespace, so that tests can publish to the shared `main` without conflicts."""
    return f"t{uuid.uuid4().hex[:12]}"
