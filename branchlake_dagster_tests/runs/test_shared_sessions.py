"""Sessions that several resources of a run share name the step and the attempt that use them."""

from typing import Any, cast

import dagster as dg
import polars as pl
import pytest
from pyspark.sql import SparkSession

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs import spark_resource
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.provenance import find_running_step
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.runs.spark_resource import _SharedSessions
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


class FakeSession:
    """A session with settings only. If it `is_dead`, they cannot be changed."""

    def __init__(self) -> None:
        self.is_dead = False
        self.values: dict[str, str] = {}
        self.conf = self

    def set(self, name: str, value: str) -> None:
        if self.is_dead:
            raise ConnectionError("the session is closed")
        self.values[name] = value

    def names(self) -> tuple[str | None, str | None]:
        """The step and the attempt that the session names."""
        prefix = "spark.sql.iceberg.snapshot-property."
        step, attempt = (f"{prefix}{name}" for name in (LakeProperty.CODE_OF_STEP, LakeProperty.CODE_ATTEMPT))
        return self.values.get(step), self.values.get(attempt)


def open_session(sessions: _SharedSessions, key: tuple[str, str]) -> FakeSession:
    session = FakeSession()
    sessions.acquire(key, lambda: cast(SparkSession, session))
    return session


def test_an_attempt_renames_only_sessions_of_its_own_run() -> None:
    sessions = _SharedSessions()
    own, other = open_session(sessions, ("run-a", "")), open_session(sessions, ("run-b", ""))
    sessions.name_step(("run-a", ""), "t", 1)
    sessions.name_step(("run-b", ""), "t", 3)
    sessions.start_attempt("run-a", "t", 2)
    assert (own.names(), other.names()) == (("t", "2"), ("t", "3"))


def test_a_session_that_could_not_name_an_attempt_names_it_at_its_next_use() -> None:
    sessions, key = _SharedSessions(), ("run-a", "")
    session = open_session(sessions, key)
    sessions.name_step(key, "t", 1)
    session.is_dead = True
    sessions.start_attempt("run-a", "t", 2)
    with pytest.raises(ConnectionError):
        sessions.name_step(key, "t", 2)
    session.is_dead = False
    session.values.clear()
    sessions.name_step(key, "t", 2)
    assert session.names() == ("t", "2")


def test_sessions_may_end_while_an_attempt_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_resource, "is_connect", lambda session: False)
    sessions, keys = _SharedSessions(), [("run-a", str(number)) for number in range(3)]
    opened = [open_session(sessions, key) for key in keys]
    for key in keys:
        sessions.name_step(key, "t", 1)

    def end_last(name: str, value: str) -> None:
        opened[0].values[name] = value
        sessions.release(keys[2])

    monkeypatch.setattr(opened[0], "set", end_last)
    sessions.start_attempt("run-a", "t", 2)
    assert [session.names()[1] for session in opened] == ["2", "2", "1"]


def test_a_step_whose_session_has_died_can_be_retried_without_spark(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions, metadata = _SharedSessions(), table_metadata(require_checks=False)
    monkeypatch.setattr(spark_resource, "_sessions", sessions)

    @dg.asset(key=[namespace, "t"], metadata=metadata, retry_policy=dg.RetryPolicy(max_retries=1))
    def t(context: dg.AssetExecutionContext, lakehouse: LakehouseResource) -> Any:
        if context.retry_number == 0:
            key = (lakehouse.open_branch(), "")
            session = open_session(sessions, key)
            sessions.name_step(key, find_running_step().key or "", 1)
            session.is_dead = True
            raise RuntimeError("Spark is gone")
        return pl.DataFrame({"n": [2]})

    with project(lakehouse, t) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
        assert p.rows(namespace, "t") == [{"n": 2}]
