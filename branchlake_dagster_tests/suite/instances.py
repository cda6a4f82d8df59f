"""Dagster instances on disk whose databases were not migrated anew and which do not capture output.

Making the three databases of an instance takes Dagster 0.3 s of CPU, as much as a run does. They are made once in a process, by
Dagster; every test's instance starts from a copy. So does the database of each run, which is an eighth of a small run. To capture the output of one run in the test's process, Dagster starts two `tail`
and two Python processes and waits for their end: a third of a small run's time, for what pytest captures anyway.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic_settings.sources import base as settings_source
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.pool import NullPool

from branchlake_dagster_tests.dagster_internals import (
    MODULES_WITH_MODEL_FIELDS,
    NO_COMPUTE_LOGS,
    SqliteEventLogStorage,
)


@contextmanager
def new_instance(copied_from: Path | None = None) -> Iterator[dg.DagsterInstance]:
    """As `dg.instance_for_test()`: SQLite in a folder of its own, which is DAGSTER_HOME and goes.

    The output of steps is not captured. `copied_from`: the folder of another instance, whose runs and events
    this one has as well.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if copied_from is not None:
            shutil.copytree(copied_from, folder, dirs_exist_ok=True)
        else:
            for name, content in _empty_databases().items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        with dg.instance_for_test(overrides=NO_COMPUTE_LOGS, temp_dir=folder) as instance:
            yield instance


@cache
def _empty_databases() -> Mapping[str, bytes]:
    """Path below the instance's folder -> the database, by which no instance has been known yet."""
    with tempfile.TemporaryDirectory() as folder:
        with dg.instance_for_test(temp_dir=folder) as instance:
            # Each is made when it is first asked. Its id is not asked for: every copy gets its own.
            instance.get_runs(limit=1)
            instance.fetch_observations(dg.AssetKey("none"), limit=1)
        found: dict[str, bytes] = {}
        for path in Path(folder).rglob("*.db"):
            # A kept connection leaves what was committed in the write-ahead log.
            with closing(sqlite3.connect(path)) as connection:
                assert connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
            found[str(path.relative_to(folder))] = path.read_bytes()
        return found


def copy_run_databases() -> None:
    """Let the database of a run's events start from a copy of the first one that Dagster makes in this process."""
    make: Callable[[SqliteEventLogStorage, Engine, bool], None] = SqliteEventLogStorage._initdb

    @cache
    def empty_database(storage_class: type[SqliteEventLogStorage]) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "run.db")
            engine = create_engine(f"sqlite:///{path}", poolclass=NullPool)
            make(storage_class(folder), engine, False)
            with closing(sqlite3.connect(path)) as connection:
                assert connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
            return path.read_bytes()

    def copy_or_make(self: SqliteEventLogStorage, engine: Engine, for_index_shard: bool = False) -> None:
        file = Path(engine.url.database or "")
        if for_index_shard or file.exists():
            return make(self, engine, for_index_shard)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix="copied-") as copied:
            copied.write(empty_database(type(self)))
            copied.flush()
            try:
                os.link(copied.name, file)
            except FileExistsError:  # another process was faster
                make(self, engine, for_index_shard)

    SqliteEventLogStorage._initdb = copy_or_make  # type: ignore[method-assign]


def without_waiting_for_the_disk(engine: Engine) -> None:
    """Let the connections of an SQLite engine leave it to the system when the disk has what was committed.

    What a killed process has committed is there all the same, and no test takes the power away.
    """
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=OFF"))


def prepare_engine(engine: Engine) -> None:
    """As `without_waiting_for_the_disk`; the engine shares its compiled statements with all others."""
    without_waiting_for_the_disk(engine)
    _share_compiled_statements(engine)


def _share_compiled_statements(engine: Engine) -> None:
    """Let the engines of all databases use one cache of statements: each run has its own database and engine."""
    model = _connected_engine()
    engine.dialect = model.dialect  # a part of each key
    engine._compiled_cache = model._compiled_cache


@cache
def _connected_engine() -> Engine:
    """An engine whose dialect a first connection has initialized."""
    engine = create_engine("sqlite://")
    with engine.connect():
        return engine


def remember_model_fields() -> None:
    """Let Dagster wrap the fields of a class of resources once, and Pydantic look once at the type of a setting.

    They do it anew for each resource and each settings object, an eighth of what a small test computes.
    """
    wrap = cache(MODULES_WITH_MODEL_FIELDS[0].model_fields)
    for module in MODULES_WITH_MODEL_FIELDS:
        module.model_fields = wrap
    is_complex: Callable[..., bool] = settings_source._annotation_is_complex
    is_complex_alone = cache(lambda annotation: is_complex(annotation, []))

    def look_once(annotation: Any, metadata: list[Any], init_state: Any = None) -> bool:
        if metadata or not isinstance(annotation, Hashable):
            return is_complex(annotation, metadata, init_state)
        return is_complex_alone(annotation)

    settings_source._annotation_is_complex = look_once


def do_not_wait_for_the_disk() -> None:
    """Let files that this process writes be durable as soon as the system has them."""
    os.fsync = lambda _: None
