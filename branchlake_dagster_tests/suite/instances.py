"""Dagster instances on disk that are cheap to create and do not capture output.

Dagster needs 0.3 s of CPU to create the three databases of an instance, as much as for a run. So Dagster creates
them once per process, and the instance of every test starts from a copy. The same holds for the database of each
run, which is an eighth of the cost of a small run.

To capture the output of a run in the test's process, Dagster starts two `tail` and two Python processes and waits
for their end. That is a third of the time of a small run, and pytest captures the output anyway.
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
    """Like `dg.instance_for_test()`: SQLite in a temporary folder, which is DAGSTER_HOME within the block.

    The output of steps is not captured. `copied_from` is the folder of another instance, whose runs and events
    are copied.
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
    """Return the empty databases of an instance, by path relative to its folder. They contain no instance id."""
    with tempfile.TemporaryDirectory() as folder:
        with dg.instance_for_test(temp_dir=folder) as instance:
            # Dagster creates each database at its first query. The id is not queried, so every copy gets its own.
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
    """From now on, create the event database of each run by copying the first one that Dagster creates."""
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

    SqliteEventLogStorage._initdb = copy_or_make


def without_waiting_for_the_disk(engine: Engine) -> None:
    """Make the connections of an SQLite engine commit without waiting until the data is on the disk.

    Commits still survive a killed process. They do not survive a power failure, which no test simulates.
    """
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=OFF"))


def prepare_engine(engine: Engine) -> None:
    """Apply `without_waiting_for_the_disk`, and share compiled statements with all other engines."""
    without_waiting_for_the_disk(engine)
    _share_compiled_statements(engine)


def _share_compiled_statements(engine: Engine) -> None:
    """Use one cache of compiled statements for all engines, because each run has its own database and engine."""
    model = _connected_engine()
    engine.dialect = model.dialect  # part of each cache key
    engine._compiled_cache = model._compiled_cache


@cache
def _connected_engine() -> Engine:
    """Return an engine whose dialect was initialized by a first connection."""
    engine = create_engine("sqlite://")
    with engine.connect():
        return engine


def remember_model_fields() -> None:
    """Cache two pure functions: how Dagster wraps the fields of a resource class, and Pydantic's inspection of types.

    Both libraries repeat this for each resource and each settings object, which is an eighth of the CPU time of a
    small test.
    """
    wrap = cache(MODULES_WITH_MODEL_FIELDS[0].model_fields)
    for module in MODULES_WITH_MODEL_FIELDS:
        module.model_fields = wrap
    is_complex: Callable[..., bool] = settings_source._annotation_is_complex
    is_complex_alone = cache(lambda annotation: is_complex(annotation, []))

    def inspect_once(annotation: Any, metadata: list[Any], init_state: Any = None) -> bool:
        if metadata or not isinstance(annotation, Hashable):
            return is_complex(annotation, metadata, init_state)
        return is_complex_alone(annotation)

    settings_source._annotation_is_complex = inspect_once


def do_not_wait_for_the_disk() -> None:
    """Turn `os.fsync` of this process into a no-op. No test simulates a power failure."""
    os.fsync = lambda _: None
