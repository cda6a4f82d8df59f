"""Dagster instances on disk whose databases were not migrated anew.

Making the three databases of an instance takes Dagster 0.3 s of CPU, as much as a run does. They are made once in a process, by
Dagster; every test's instance starts from a copy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import alembic.util
import dagster as dg


@contextmanager
def new_instance() -> Iterator[dg.DagsterInstance]:
    """As `dg.instance_for_test()`: SQLite in a folder of its own, which is DAGSTER_HOME and goes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name, content in _empty_databases().items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        with dg.instance_for_test(temp_dir=folder) as instance:
            yield instance


@cache
def _empty_databases() -> Mapping[str, bytes]:
    """Path below the instance's folder -> the database, by which no instance has been known yet."""
    with tempfile.TemporaryDirectory() as folder:
        with dg.instance_for_test(temp_dir=folder) as instance:
            # Each is made when it is first asked. Its id is not asked for: every copy gets its own.
            instance.get_runs(limit=1)
            instance.fetch_observations(dg.AssetKey("none"), limit=1)
        return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*.db")}


def remember_revisions() -> None:
    """Let this process read the revisions of Dagster's databases once, instead of for each database.

    Every run has one; reading them for it was a tenth of what the tests computed.
    """
    read = alembic.util.load_python_file
    known: dict[Path, ModuleType] = {}

    def load(folder: Any, name: Any) -> ModuleType:
        path = Path(folder, name)
        if path.parent.name != "versions":
            return read(folder, name)  # `env.py` does its work when it is read
        if path not in known:
            known[path] = read(folder, name)
        return known[path]

    alembic.util.load_python_file = load
