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

import dagster as dg
from sqlalchemy import Engine, event


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


def without_waiting_for_the_disk(engine: Engine) -> None:
    """Let the connections of an SQLite engine leave it to the system when the disk has what was committed.

    What a killed process has committed is there all the same, and no test takes the power away.
    """
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=OFF"))
