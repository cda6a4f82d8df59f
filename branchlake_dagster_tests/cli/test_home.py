"""Dagster's home as the commands prepare it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from branchlake_dagster.cli.dagster_home import dagster_home, open_instance
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.suite.raised import raising

MAKE = (
    "from branchlake_dagster.cli.dagster_home import dagster_home\n"
    "from branchlake_dagster.settings import Settings\n"
    "print(dagster_home(Settings()))"
)


def heads(home: Path) -> dict[str, list[tuple[str]]]:
    """Database -> the versions of its tables."""
    found = {}
    for path in home.rglob("*.db"):
        with sqlite3.connect(path) as database:
            found[path.name] = database.execute("select version_num from alembic_version").fetchall()
        database.close()
    return found


@pytest.mark.long
def test_the_databases_of_a_fresh_home_are_made_once_however_many_begin_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster makes them when they are first used, and several processes at once leave two versions in one."""
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(tmp_path))
    begun = [subprocess.Popen([sys.executable, "-c", MAKE], stdout=subprocess.PIPE) for _ in range(2)]
    told = [one.communicate(timeout=240)[0].decode().strip() for one in begun]
    home = tmp_path / "dagster"
    assert told == [str(home)] * 2
    found = heads(home)
    assert {*found} == {"runs.db", "index.db", "schedules.db"}
    assert [len(one) for one in found.values()] == [1, 1, 1]
    assert not (home / ".preparing").exists()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def opened(state_dir: Path) -> int:
    """Open the instance as a command does, and count its runs."""
    with open_instance(Settings(state_dir=state_dir)) as instance:
        return instance.get_runs_count()


def test_a_folder_of_others_is_neither_created_nor_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "theirs"
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", "before")
    with raising(ConfigurationError, reason="dagster_home_missing", subject=str(home)):
        opened(tmp_path / "state")
    assert not home.exists()
    home.mkdir()
    assert opened(tmp_path / "state") == 0
    assert "dagster.yaml" not in names(home)
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    assert opened(tmp_path / "state") == 0
    assert (home / "dagster.yaml").read_text() == "telemetry: {enabled: false}\n"


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_command_that_changes_nothing_prepares_no_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_folder: bool
) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", "before")
    state_dir = tmp_path / "state"
    if has_folder:
        (state_dir / "dagster").mkdir(parents=True)
    with open_instance(Settings(state_dir=state_dir), read_only=True) as instance:
        assert instance.get_runs_count() == 0
    assert [*tmp_path.rglob("*")] == ([state_dir, state_dir / "dagster"] if has_folder else [])


def test_a_command_that_changes_nothing_writes_nothing_to_a_named_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster would create its databases in a folder that was named by mistake."""
    home = tmp_path / "somebodys"
    home.mkdir()
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", "before")
    with open_instance(Settings(state_dir=tmp_path / "state"), read_only=True) as instance:
        assert instance.get_runs_count() == 0
    assert [*tmp_path.rglob("*")] == [home]


@pytest.mark.parametrize("is_named", [False, True])
def test_the_home_in_the_state_folder_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_named: bool
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", "before")
    if not is_named:
        monkeypatch.delenv("DAGSTER_HOME")
    assert opened(tmp_path) == 0
    assert "dagster.yaml" in names(tmp_path / "dagster")
    assert os.environ["DAGSTER_HOME"] == str(tmp_path / "dagster")
    assert os.environ["BRANCHLAKE_STATE_DIR"] == str(tmp_path)


@pytest.mark.parametrize(
    "config", ["{", "unknown: 1", "run_storage: {module: nowhere, class: Storage, config: {}}"]
)
def test_an_instance_that_cannot_be_opened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    (tmp_path / "dagster.yaml").write_text(config)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", "before")
    with raising(ConfigurationError, reason="dagster_unavailable", subject=str(tmp_path)) as caught:
        opened(tmp_path / "state")
    assert "\n" not in caught.value.message


def test_an_error_inside_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", "before")
    with pytest.raises(KeyError), open_instance(Settings(state_dir=tmp_path / "state")):
        raise KeyError


def test_a_home_of_ones_own_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(tmp_path / "state"))
    assert dagster_home(Settings()) == tmp_path
    assert sorted(one.name for one in tmp_path.iterdir()) == ["dagster.yaml", "state"]
