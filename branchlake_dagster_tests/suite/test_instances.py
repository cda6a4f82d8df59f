from __future__ import annotations

import os
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
from sqlalchemy.pool import NullPool

from branchlake_dagster.branching.reaping.origin import instance_id
from branchlake_dagster_tests.suite.instances import new_instance, remembering


@dg.asset
def one() -> int:
    return 1


def test_each_is_another_instance_and_knows_nothing_of_the_one_before() -> None:
    ids, homes = [], []
    for _ in range(2):
        with new_instance() as instance:
            assert os.environ["DAGSTER_HOME"] == instance.root_directory
            assert instance.get_runs() == []
            assert dg.materialize([one], instance=instance).success
            assert len(instance.get_runs()) == 1
            ids.append(instance_id(instance))
            homes.append(Path(instance.root_directory))
    assert len(set(ids)) == 2
    assert None not in ids
    assert not [home for home in homes if home.exists()]


def test_it_is_what_dagster_makes() -> None:
    with new_instance() as copied, dg.instance_for_test() as made:
        for kind in ("run_storage", "event_log_storage", "schedule_storage"):
            assert type(getattr(copied, kind)) is type(getattr(made, kind))
        assert copied.get_settings("telemetry") == made.get_settings("telemetry")
        schema = "select name, sql from sqlite_master order by name"
        with copied.run_storage.connect() as one, made.run_storage.connect() as other:
            read = [[tuple(row) for row in at.exec_driver_sql(schema)] for at in (one, other)]
        assert read[0] == read[1]


def test_the_revisions_of_databases_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with dg.instance_for_test():
        pass  # all of them are known from here on
    read, load = set(), pyfiles.load_module_py
    monkeypatch.setattr(pyfiles, "load_module_py", lambda name, path: (read.add(name), load(name, path))[1])
    with dg.instance_for_test():
        pass
    assert read == {"env_py"}  # which does its work when it is read


def test_the_revisions_of_databases_are_ordered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with dg.instance_for_test():
        pass
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

    create_engine = remembering(create)
    urls = [f"sqlite:///{tmp_path / name}.db" for name in "ab"]
    for url in [*urls, *urls]:
        with create_engine(url, poolclass=NullPool, connect_args={"timeout": 5.0}).connect() as at:
            assert at.exec_driver_sql("pragma database_list").scalars().all() == [0]
            assert {Path(file.path).name for file in psutil.Process().open_files()} >= {Path(url).name}
        assert not [file for file in psutil.Process().open_files() if Path(file.path).parent == tmp_path]
    assert made == urls


def test_an_instance_made_anew_in_the_same_place_knows_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for _ in range(2):
        home.mkdir()
        with dg.instance_for_test(temp_dir=str(home)) as instance:
            assert instance.get_runs() == []
            assert dg.materialize([one], instance=instance).success
            assert len(instance.get_runs()) == 1
        shutil.rmtree(home)


def test_no_database_waits_for_the_disk() -> None:
    with new_instance() as instance:
        dg.materialize([one], instance=instance)
        storage = instance.event_log_storage
        for open_one in (
            instance.run_storage.connect,
            storage.index_connection,
            instance.schedule_storage.connect,
        ):
            with open_one() as at:
                assert at.exec_driver_sql("pragma synchronous").scalar() == 0
