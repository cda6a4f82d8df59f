"""Faster starts of embedded servers: in a thread while a command imports modules, and from class archives.

A rehearsal starts both servers once, gives them a small workload and stops them. Java then stores the classes
that they loaded in archives (class data sharing, or an AOT cache of newer Java versions). A later server
loads these classes from its archive, and all other classes from its jars.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa

from branchlake_dagster.embedded import process
from branchlake_dagster.embedded.java import Archive, lock_archives
from branchlake_dagster.embedded.servers import EmbeddedServers
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings
from branchlake_dagster.spark.session import warm_up

_log = logging.getLogger(__name__)


class BackgroundServerStart:
    """Starts the lake's servers in a thread, and then warms up Spark if the servers were not running."""

    def __init__(self, settings: Settings, *, say: Callable[[str], None]) -> None:
        self.began = time.monotonic()
        self._settings = settings
        self._say = say
        self._answer = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="starting", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the servers answer. Raise the error if they did not start.

        Spark may still be warming up.
        """
        self._answer.wait()
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait until the servers have started and the warm-up has ended. Raises no error."""
        self._thread.join()

    def _run(self) -> None:
        servers = EmbeddedServers(self._settings, notify=self._say)
        try:
            is_fresh = servers.find_endpoints() is None
            endpoints = servers.endpoints()
        except Exception as error:  # noqa: BLE001 - `wait` raises it
            self._error = error
            return
        finally:
            self._answer.set()
        if not is_fresh:
            return
        try:
            from branchlake_dagster.spark.session import warm_up

            self._say("Warming up Spark with a temporary table …")
            warm_up(self._settings, endpoints)
        except Exception as error:  # noqa: BLE001 - a run will report it if it persists
            _log.info("The warm-up failed: %s", error)


_REHEARSAL_BRANCH = "rehearsal"
_REHEARSAL_TABLE = f"nessie.{_REHEARSAL_BRANCH}.t"
_GRACE_S = 300.0
"""Seconds that a server may take to end, because it writes its archive at its end."""


def prepare_starts(settings: Settings, *, say: Callable[[str], None]) -> list[Path]:
    """Create the class archives that the servers of `settings` do not have yet, and return their paths.

    Uses two processors for half a minute.

    Raises:
        OSError: The archives cannot be stored.
        ServerDidNotStart: A server did not start. Errors of Nessie and Spark are raised, too.
    """
    servers = EmbeddedServers(settings, notify=say)
    if not _missing_archives(servers):
        return []
    with lock_archives(), TemporaryDirectory(prefix="branchlake-rehearsal-") as folder:
        missing = _missing_archives(servers)  # another process may have created them meanwhile
        if missing:
            say("Preparing archives of the servers (40 s), so that later starts take half as long …")
            _rehearse_start(settings, Path(folder))
        return [path for archive in missing if (path := archive.store_recording())]


def _missing_archives(servers: EmbeddedServers) -> list[Archive]:
    return [archive for archive in servers.archives().values() if not archive.find_file()]


def _rehearse_start(settings: Settings, folder: Path) -> None:
    # Only the settings that change the JVM or its start.
    rehearsal_settings = Settings(
        state_dir=folder,
        spark_master=settings.spark_master,
        spark_driver_memory=settings.spark_driver_memory,
        ivy_settings=settings.ivy_settings,
        startup_timeout_s=settings.startup_timeout_s,
    )
    shutil.copytree(settings.state_dir / "jars", folder / "jars")
    recording_servers = EmbeddedServers(rehearsal_settings, recording=True)
    try:
        lake = Lakehouse(rehearsal_settings)
        with ThreadPoolExecutor(1) as pool:
            warm_up_future = pool.submit(warm_up, rehearsal_settings, recording_servers.endpoints())
            _use_nessie(lake)
            warm_up_future.result()
        _use_spark(lake)
    finally:
        running = [record for record in recording_servers.status().values() if record]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda record: process.stop_process(record, grace_s=_GRACE_S), running))


def _use_nessie(lake: Lakehouse) -> None:
    """Write a table on a branch and merge the branch, as a run does."""
    nessie = lake.nessie
    nessie.create_branch(_REHEARSAL_BRANCH, from_ref=MAIN, from_hash=ensure_main_has_commit(nessie))
    catalog = lake.catalog(_REHEARSAL_BRANCH)
    catalog.create_namespace(_REHEARSAL_BRANCH)
    rows = pa.table({"n": [1, 2]})
    catalog.create_table((_REHEARSAL_BRANCH, "t"), schema=rows.schema).append(rows)
    branch_ref = nessie.reference(_REHEARSAL_BRANCH)
    list(nessie.diff(MAIN, _REHEARSAL_BRANCH))
    main_hash = nessie.reference(MAIN).hash
    nessie.merge(
        from_name=_REHEARSAL_BRANCH,
        from_hash=branch_ref.hash,
        into=MAIN,
        expected_hash=main_hash,
        message=_REHEARSAL_BRANCH,
    )
    nessie.delete_branch(_REHEARSAL_BRANCH, expected_hash=branch_ref.hash)


def _use_spark(lake: Lakehouse) -> None:
    session = lake.spark_session(MAIN)
    try:
        session.sql("SELECT CAST(3 AS BIGINT) AS n").writeTo(_REHEARSAL_TABLE).append()
        session.table(_REHEARSAL_TABLE).toPandas()
    finally:
        session.stop()
