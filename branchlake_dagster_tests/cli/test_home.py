"""Dagster's home as the commands prepare it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from branchlake_dagster.cli.dagster_home import dagster_home
from branchlake_dagster.settings import Settings

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
    begun = [subprocess.Popen([sys.executable, "-c", MAKE], stdout=subprocess.PIPE) for _ in range(3)]
    told = [one.communicate(timeout=240)[0].decode().strip() for one in begun]
    home = tmp_path / "dagster"
    assert told == [str(home)] * 3
    found = heads(home)
    assert {*found} == {"runs.db", "index.db", "schedules.db"}
    assert [len(one) for one in found.values()] == [1, 1, 1]
    assert not (home / ".preparing").exists()


def test_a_home_of_ones_own_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(tmp_path / "state"))
    assert dagster_home(Settings()) == tmp_path
    assert sorted(one.name for one in tmp_path.iterdir()) == ["dagster.yaml", "state"]
