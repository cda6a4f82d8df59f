"""What Dagster makes anew for each event and each run, kept by processes of ours. This session's is one."""

from __future__ import annotations

import shutil
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

from branchlake_dagster.internals.dagster_launching import cache_engines
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


def test_a_database_has_one_engine_that_keeps_nothing_open(tmp_path: Path) -> None:
    made: list[str] = []

    def create(url: str, **options: Any) -> sqlalchemy.Engine:
        made.append(url)
        return sqlalchemy.create_engine(url, **options)

    create_engine = cache_engines(create)
    urls = [f"sqlite:///{tmp_path / name}.db" for name in "ab"]
    for url in [*urls, *urls]:
        with create_engine(url, poolclass=NullPool, connect_args={"timeout": 5.0}).connect() as at:
            assert at.exec_driver_sql("pragma database_list").scalars().all() == [0]
            assert {Path(file.path).name for file in psutil.Process().open_files()} >= {Path(url).name}
        assert not [file for file in psutil.Process().open_files() if Path(file.path).parent == tmp_path]
    assert made == urls


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
