"""Dagster instances on disk whose databases were not migrated anew.

Making the three databases of an instance takes Dagster 0.3 s of CPU, as much as a run does. They are made once in a process, by
Dagster; every test's instance starts from a copy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import alembic.util
import dagster as dg
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, event
from sqlalchemy.pool import NullPool, Pool

from branchlake_dagster_tests.dagster_internals import STORAGES


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

    Every run has one, and asks twice for the newest revision; reading and ordering them for it was a third of what
    a small run computed.
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
    directory = ScriptDirectory.from_config
    ordered: dict[str, ScriptDirectory] = {}

    def from_config(config: Config) -> ScriptDirectory:
        place = config.get_main_option("script_location") or ""
        if not place.startswith("dagster:"):
            return directory(config)  # another library's, or a test's own
        if place not in ordered:
            ordered[place] = directory(config)  # it orders them when it is first asked
        return ordered[place]

    ScriptDirectory.from_config = from_config


def remember_engines() -> None:
    """Let this process make SQLAlchemy's engine of each of Dagster's SQLite databases once.

    Dagster makes one for each event that it stores, and each compiles every statement anew. None holds a connection:
    all are opened and closed as before.
    """
    for name in STORAGES:
        storage = import_module(name)
        storage.create_engine = remembering(storage.create_engine)


def remembering(create: Callable[..., Engine]) -> Callable[..., Engine]:
    """As `create`, which gives an engine for a database and closes each of its connections after use."""

    # As many as may be in use: each run has a database of its own.
    @lru_cache(maxsize=32)
    def made(url: str, timeout: float | None) -> Engine:
        more = {} if timeout is None else {"connect_args": {"timeout": timeout}}
        engine = create(url, poolclass=NullPool, **more)
        event.listen(engine, "connect", _without_waiting_for_the_disk)
        return engine

    def remembered(
        url: str, *, poolclass: type[Pool], connect_args: Mapping[str, float] | None = None
    ) -> Engine:
        assert poolclass is NullPool, "its connections are closed with each use"
        return made(url, (connect_args or {}).get("timeout"))

    return remembered


def _without_waiting_for_the_disk(connection: Any, _: object) -> None:
    # What a killed process has committed is there all the same, and no test takes the power away.
    connection.execute("PRAGMA synchronous=OFF")
