"""Caches for Dagster's SQLite databases, in a process that executes one run.

Dagster has a database for each run, and opens one for each event that it stores. Each time it creates an
SQLAlchemy engine, which compiles every statement again. Twice per run it also requests the newest revision of
the databases, for which Alembic reads and orders ninety scripts. Together that was a fifth of the computing
time of a small run.

Dagster has no setting for either. So names of its modules are replaced, only in branchlake's own processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module

from alembic.config import Config
from alembic.script import ScriptDirectory
from dagster._core.storage.sql import ALEMBIC_SCRIPTS_LOCATION, get_alembic_config
from sqlalchemy import Engine
from sqlalchemy.pool import NullPool, Pool

STORAGES = (
    "dagster._core.storage.event_log.sqlite.sqlite_event_log",
    "dagster._core.storage.runs.sqlite.sqlite_run_storage",
    "dagster._core.storage.schedules.sqlite.sqlite_schedule_storage",
)
"""The modules of Dagster's default storage that create SQLite engines."""

_ENGINES = 32
"""Most engines that may be in use at once; a run uses four."""


def install_engine_cache(prepare: Callable[[Engine], None] = lambda _: None) -> None:
    """Create the engine of each of Dagster's SQLite databases once per process, and `prepare` it.

    Cached engines hold no connection: all connections are opened and closed as before.
    """
    for name in STORAGES:
        storage = import_module(name)
        setattr(storage, "create_engine", cache_engines(storage.create_engine, prepare))  # noqa: B010 - untyped


def cache_engines(
    create: Callable[..., Engine], prepare: Callable[[Engine], None] = lambda _: None
) -> Callable[..., Engine]:
    """Wrap `create` so that it caches engines which close each connection after use."""

    @lru_cache(maxsize=_ENGINES)
    def get_engine(url: str, timeout: float | None) -> Engine:
        more = {} if timeout is None else {"connect_args": {"timeout": timeout}}
        engine = create(url, poolclass=NullPool, **more)
        prepare(engine)
        return engine

    def create_cached(
        url: str, *, poolclass: type[Pool], connect_args: Mapping[str, float] | None = None, **others: object
    ) -> Engine:
        other_args = dict(connect_args or {})
        timeout = other_args.pop("timeout", None)
        if poolclass is NullPool and not other_args and not others:
            return get_engine(url, timeout)
        return create(url, poolclass=poolclass, connect_args=connect_args or {}, **others)

    return create_cached


def install_revision_cache() -> None:
    """Read the revisions of Dagster's databases now, once for this process and its forks."""
    directory = ScriptDirectory.from_config
    # All databases have the same revisions, and their configurations are equal otherwise.
    cached_directory = directory(get_alembic_config(import_module(STORAGES[0]).__file__ or ""))
    cached_directory.as_revision_number("head")  # orders the scripts

    def from_config(config: Config) -> ScriptDirectory:
        script_location = config.get_main_option("script_location")
        return cached_directory if script_location == ALEMBIC_SCRIPTS_LOCATION else directory(config)

    ScriptDirectory.from_config = from_config  # type: ignore[method-assign]
