from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from branchlake_dagster.embedded.process import ProcessRecord, find_start_s
from branchlake_dagster.embedded.servers import SPARK, EmbeddedServers, Endpoints
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.suite.lakes import Lakes


def test_each_worker_has_a_folder_of_its_own(tmp_path: Path) -> None:
    assert Lakes(tmp_path).own == tmp_path
    assert {Lakes(tmp_path, name).own for name in ("gw0", "gw1")} == {tmp_path / "gw0", tmp_path / "gw1"}


def test_what_is_known_of_the_jars_is_handed_on(tmp_path: Path) -> None:
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "jars.classpath").write_text("a:b")
    assert (Lakes(tmp_path, "gw0").prepare() / "jars" / "jars.classpath").read_text() == "a:b"


def test_a_worker_that_leaves_does_not_stop_the_spark_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def running(self: EmbeddedServers, **_: object) -> Endpoints:
        """As if the server had been started: this process stands for it."""
        assert self.server_names() == (SPARK,), "its Nessie is nobody's"
        run = tmp_path / "run"
        run.mkdir(exist_ok=True)
        ProcessRecord(SPARK, os.getpid(), find_start_s(os.getpid()) or 0.0, 1).save(run / "spark.json")
        (run / "spark.token").write_text("t0ken")
        return Endpoints("", None, None)

    monkeypatch.setattr(EmbeddedServers, "endpoints", running)
    worker = Lakes(tmp_path, "gw0")
    worker.join_spark()
    lent = json.loads((worker.own / "run" / "spark.json").read_text())
    assert lent["pid"] == os.getpid()
    assert (worker.own / "run" / "spark.token").read_text() == "t0ken"

    worker.leave()  # stops what its folder names: this process, if it still did
    assert (tmp_path / "run" / "spark.json").exists()
    assert not (worker.own / "run" / "spark.json").exists()


def test_a_worker_s_own_spark_is_stopped_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Lakes(tmp_path, "gw0")
    record = worker.own / "run" / "spark.json"
    record.parent.mkdir(parents=True)
    ProcessRecord(SPARK, os.getpid(), find_start_s(os.getpid()) or 0.0, 1).save(record)
    known = []
    monkeypatch.setattr(EmbeddedServers, "stop_all", lambda _: known.append(record.exists()))
    worker.join_spark()  # a test without the shared lake was first
    worker.leave()
    assert known == [True]


def test_without_workers_there_is_nothing_to_join(tmp_path: Path) -> None:
    Lakes(tmp_path / "none").join_spark()
    assert not (tmp_path / "none").exists()


def test_what_the_user_keeps_runs_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmbeddedServers, "stop_all", lambda self: pytest.fail("stopped"))
    Lakes(tmp_path, "gw0", kept=True).leave()
    Lakes(tmp_path, kept=True).end()


@pytest.mark.spark
def test_sessions_of_the_shared_spark_stand_on_the_workers_own_lake(
    lakehouse: Lakehouse, namespace: str
) -> None:
    session = lakehouse.spark_session()
    try:
        session.sql(f"CREATE NAMESPACE nessie.{namespace}")
        session.sql(f"CREATE TABLE nessie.{namespace}.t AS SELECT 1 AS n")
    finally:
        session.stop()
    table = lakehouse.catalog().load_table((namespace, "t"))
    assert table.scan().to_arrow()["n"].to_pylist() == [1]
    assert table.location().startswith(Settings(state_dir=lakehouse.settings.state_dir).warehouse_uri)
