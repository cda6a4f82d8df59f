"""The servers start and Spark warms up while this process still imports what it will run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from branchlake_dagster.embedded.servers import EmbeddedServers
from branchlake_dagster.settings import Settings

_log = logging.getLogger(__name__)


class Starting:
    """Starts the lake's servers in a thread; imports nothing that takes long."""

    def __init__(self, settings: Settings, *, say: Callable[[str], None]) -> None:
        self.began = time.monotonic()
        self._settings = settings
        self._say = say
        self._answer = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="starting", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the servers answer; raise what kept them from it. Spark may still be warming up."""
        self._answer.wait()
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Return when the warm-up is over, too."""
        self._thread.join()

    def _run(self) -> None:
        servers = EmbeddedServers(self._settings, say=self._say)
        try:
            fresh = servers.running() is None
            endpoints = servers.endpoints()
        except Exception as error:  # noqa: BLE001 - it is raised where somebody waits
            self._error = error
            return
        finally:
            self._answer.set()
        if not fresh:
            return
        try:
            from branchlake_dagster.spark.session import warm_up

            self._say("Warming Spark up, in a table that is thrown away …")
            warm_up(self._settings, endpoints)
        except Exception as error:  # noqa: BLE001 - a run will meet it, if it is more than a slow start
            _log.info("The warm-up failed: %s", error)
