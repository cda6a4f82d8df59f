"""Dagster's SQLite databases in a process that executes one run: what Dagster makes anew each time is kept.

It has a database for each run, and opens one for each event that it stores. Each time it makes SQLAlchemy's
engine, which compiles every statement anew; and it asks twice in a run for the newest revision of the
databases, for which Alembic reads and orders ninety scripts. Together that was a fifth of what a small run
computed.

Dagster offers no place for either, so names of its modules are replaced, in processes of ours alone.
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
"""The modules of Dagster that make engines for SQLite, in its default storage."""

_ENGINES = 32
"""As many as may be in use at once; a run uses four."""


def install_engine_cache(prepare: Callable[[Engine], None] = lambda _: None) -> None:
    """Let this process make the engine of each of Dagster's SQLite databases once, and `prepare` it.

    None holds a connection: all are opened and closed as before.
    """
    for name in STORAGES:
        storage = import_module(name)
        setattr(storage, "create_engine", cache_engines(storage.create_engine, prepare))  # noqa: B010 - untyped


def cache_engines(
    create: Callable[..., Engine], prepare: Callable[[Engine], None] = lambda _: None
) -> Callable[..., Engine]:
    """As `create`, for engines that close each connection after use."""

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
    """Let this process, and those that it forks, read the revisions of Dagster's databases once: now."""
    directory = ScriptDirectory.from_config
    # Those of one are those of all; what else their configurations say does not differ.
    cached_directory = directory(get_alembic_config(import_module(STORAGES[0]).__file__ or ""))
    cached_directory.as_revision_number("head")  # orders them

    def from_config(config: Config) -> ScriptDirectory:
        script_location = config.get_main_option("script_location")
        return cached_directory if script_location == ALEMBIC_SCRIPTS_LOCATION else directory(config)

    ScriptDirectory.from_config = from_config  # type: ignore[method-assign]
