"""The servers of a test session: a Nessie and a warehouse for each worker, one Spark server and one Kafka broker for all.

Each worker has its own lake, so a test that reaps, sweeps or counts commits on `main` does not see the branches of
other workers. Spark is the most expensive server. All workers share it, because each session gets its catalog when
it is opened.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from branchlake_dagster.embedded.servers import EmbeddedServers
from branchlake_dagster.ingest.embedded_kafka import EmbeddedKafka
from branchlake_dagster.ingest.kafka_cluster import KafkaCluster
from branchlake_dagster.settings import Settings

_LISTING = Path("jars", "jars.classpath")
BROKER_JARS = Path("jars", "kafka")
"""The folder of the broker's class path. The jars are in Ivy's cache."""
_LENT = (Path("run", "spark.json"), Path("run", "spark.token"))
_BORROWED = Path("run", "spark.borrowed")
"""This marker file exists while the lake uses the shared Spark server."""
_NOWHERE = "http://127.0.0.1:1/api/v2"
"""The Nessie address in the configuration of the shared Spark server. No session may rely on it."""


@dataclass(frozen=True)
class Lakes:
    """The state folders of a session. `worker` is empty if there is only one process.

    If `kept` is set, the folder is `BRANCHLAKE_TEST_STATE_DIR`, and its servers keep running for the next session.
    """

    shared: Path
    worker: str = ""
    kept: bool = False

    @property
    def own(self) -> Path:
        """The state folder of this process."""
        return self.shared / self.worker if self.worker else self.shared

    def prepare(self) -> Path:
        """Return `own` after copying known lists of jars to it, so that no JVM has to find them again."""
        for known in (self.shared, Settings().state_dir):
            copy_jar_lists(known, self.own)
        return self.own

    def join_spark(self) -> None:
        """Make the lake of this process use the shared Spark server. Starts the server if it is not running."""
        if not self.worker or self._has_its_own():
            return
        self.lend_spark(self.own)
        (self.own / _BORROWED).touch()

    def lend_spark(self, folder: Path) -> None:
        """Make the lake in a state folder use the shared Spark server. Starts the server if it is not running.

        Call `take_spark_back` before the servers of that lake are stopped; otherwise the shared one is stopped too.
        """
        EmbeddedServers(Settings(state_dir=self.shared, nessie_uri=_NOWHERE, warehouse=None)).endpoints()
        for part in _LENT:
            (folder / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.shared / part, folder / part)

    @staticmethod
    def take_spark_back(folder: Path) -> None:
        """Remove the shared Spark server from the lake in a state folder."""
        for part in (*_LENT, _BORROWED):
            (folder / part).unlink(missing_ok=True)

    def kafka(self) -> KafkaCluster:
        """Return the broker of the session. Starts it if it is not running. Each test has its own topics."""
        return EmbeddedKafka(Settings(state_dir=self.shared)).cluster()

    def _has_its_own(self) -> bool:
        """Whether a test of this worker started its own Spark server here, which must be stopped and not forgotten."""
        return (self.own / _LENT[0]).exists() and not (self.own / _BORROWED).exists()

    def leave(self) -> None:
        """Stop the servers of this process only."""
        if self.kept:
            return
        if self.worker and not self._has_its_own():
            self.take_spark_back(self.own)
        _down(self.own)

    def end(self) -> None:
        """Stop all servers, including those of workers that died."""
        if self.kept:
            return
        for folder in self.shared.glob("gw*"):
            Lakes(self.shared, folder.name).leave()
        _down(self.shared)
        EmbeddedKafka(Settings(state_dir=self.shared)).down()


def copy_jar_lists(known: Path, folder: Path) -> None:
    """Copy the lists of jars from the state folder `known` to `folder`. Saves one JVM per server."""
    if (known / BROKER_JARS).is_dir() and not (folder / BROKER_JARS).exists():
        shutil.copytree(known / BROKER_JARS, folder / BROKER_JARS)
    if (known / _LISTING).is_file() and not (folder / _LISTING).exists():
        (folder / _LISTING).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(known / _LISTING, folder / _LISTING)


def _down(folder: Path) -> None:
    if not (folder / "run").is_dir():
        return  # no server was started in this folder
    EmbeddedServers(Settings(state_dir=folder)).stop_all()


def kept_folder() -> Path | None:
    """Return the folder of `BRANCHLAKE_TEST_STATE_DIR`, or None if it is not set."""
    folder = os.environ.get("BRANCHLAKE_TEST_STATE_DIR")
    return Path(folder).absolute() if folder else None
