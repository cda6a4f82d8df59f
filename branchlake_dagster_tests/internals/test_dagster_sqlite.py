"""What Dagster opens and makes for each event and each run is kept by processes of ours, as by this session."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest
import sqlalchemy
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.script.revision import RevisionMap
from alembic.util import pyfiles
from sqlalchemy.pool import NullPool, StaticPool

from branchlake_dagster.internals.dagster_sqlite import cache_engines, close_kept_connections
from branchlake_dagster_tests.suite.instances import new_instance


@dg.asset
def one() -> int:
    return 1


def test_the_revisions_of_databases_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read, load = set(), pyfiles.load_module_py
    monkeypatch.setattr(pyfiles, "load_module_py", lambda name, path: (read.add(name), load(name, path))[1])
    with dg.instance_for_test():
        pass
    assert read == {"env_py"}  # which does its work when it is read


def test_the_revisions_of_databases_are_ordered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RevisionMap, "__init__", lambda *_, **__: pytest.fail("ordered anew"))
    with new_instance() as instance:
        assert dg.materialize([one], instance=instance).success


def test_the_revisions_of_others_are_read_as_ever(tmp_path: Path) -> None:
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    assert ScriptDirectory.from_config(config) is not ScriptDirectory.from_config(config)


def open_files_in(folder: Path) -> set[str]:
    return {path.name for file in psutil.Process().open_files() if (path := Path(file.path)).parent == folder}


def test_a_database_has_one_engine_that_keeps_its_connection(tmp_path: Path) -> None:
    made: list[str] = []

    def create(url: str, **options: Any) -> sqlalchemy.Engine:
        made.append(url)
        return sqlalchemy.create_engine(url, **options)

    create_engine = cache_engines(create)
    opened = []
    urls = [f"sqlite:///{tmp_path / name}.db" for name in "ab"]
    for url in [*urls, *urls]:
        engine = create_engine(url, poolclass=NullPool, connect_args={"timeout": 5.0})
        with engine.begin() as at:
            opened.append(id(at.connection.dbapi_connection))
            at.exec_driver_sql("pragma journal_mode=wal")
            at.exec_driver_sql("create table if not exists t (n int)")
        engine.dispose()
    assert made == urls
    assert opened[:2] == opened[2:]
    assert {path.name for path in tmp_path.iterdir()} >= {"a.db", "a.db-wal", "b.db", "b.db-wal"}
    close_kept_connections()
    assert {path.name for path in tmp_path.iterdir()} == {"a.db", "b.db"}
    assert open_files_in(tmp_path) == set()


def test_a_database_that_was_replaced_is_opened_again(tmp_path: Path) -> None:
    engine = cache_engines(sqlalchemy.create_engine)(f"sqlite:///{tmp_path / 'a.db'}", poolclass=NullPool)
    for _ in range(2):
        with engine.begin() as at:
            assert at.exec_driver_sql("select * from sqlite_master").all() == []
            at.exec_driver_sql("create table t (n int)")
        (tmp_path / "a.db").unlink()


def test_a_fork_opens_connections_of_its_own(tmp_path: Path) -> None:
    engine = cache_engines(sqlalchemy.create_engine)(f"sqlite:///{tmp_path / 'a.db'}", poolclass=NullPool)
    with engine.begin() as at:
        at.exec_driver_sql("pragma journal_mode=wal")
        at.exec_driver_sql("create table t (n int)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
        pid = os.fork()
    if not pid:
        status = 1
        with contextlib.suppress(Exception), engine.begin() as at:
            at.exec_driver_sql("insert into t values (1)")
            # What the parent has open is not closed here, and its log is not removed under it.
            close_kept_connections()
            status = 0
        os._exit(status)
    for _ in range(100):
        with engine.begin() as at:
            at.exec_driver_sql("insert into t values (2)")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with engine.begin() as at:
        counts = dict(at.exec_driver_sql("select n, count(*) from t group by n").all())
        assert counts == {1: 1, 2: 100}
        assert at.exec_driver_sql("pragma integrity_check").scalar() == "ok"


@pytest.mark.parametrize(
    "options",
    [
        {"poolclass": StaticPool},
        {"poolclass": NullPool, "connect_args": {"timeout": 5.0, "uri": True}},
        {"poolclass": NullPool, "echo": True},
    ],
)
def test_an_engine_of_another_kind_is_made_anew(options: dict[str, Any]) -> None:
    create_engine = cache_engines(sqlalchemy.create_engine)
    first, second = (create_engine("sqlite://", **options) for _ in range(2))
    assert first is not second
    assert type(first.pool) is options["poolclass"]


def test_an_instance_made_anew_in_the_same_place_knows_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for _ in range(2):
        home.mkdir()
        with dg.instance_for_test(temp_dir=str(home)) as instance:
            assert instance.get_runs() == []
            assert dg.materialize([one], instance=instance).success
            assert len(instance.get_runs()) == 1
        shutil.rmtree(home)
