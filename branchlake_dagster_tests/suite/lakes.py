"""Where the lakes of a test session are: a Nessie and a warehouse for each worker, one Spark server and one
Kafka broker for all.

A worker's lake is its own, so a test that reaps, sweeps or counts what is on `main` meets no other worker's
branches. Spark is the dear one, to start and to keep, and needs no worker of its own: a session is given its
catalogue when it is opened.
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
"""Where its class path stands; the jars are in Ivy's cache."""
_LENT = (Path("run", "spark.json"), Path("run", "spark.token"))
_BORROWED = Path("run", "spark.borrowed")
"""There while what is lent is somebody else's."""
_NOWHERE = "http://127.0.0.1:1/api/v2"
"""The Nessie that Spark itself is told: no session may rely on it."""


@dataclass(frozen=True)
class Lakes:
    """The state folders of a session. `worker` is empty where there is only one process.

    `kept`: the folder is the user's (`BRANCHLAKE_TEST_STATE_DIR`), and its servers run on for the next session.
    """

    shared: Path
    worker: str = ""
    kept: bool = False

    @property
    def own(self) -> Path:
        """The state folder of this process."""
        return self.shared / self.worker if self.worker else self.shared

    def prepare(self) -> Path:
        """`own`, knowing where the jars are if anybody does, which saves a JVM."""
        for known in (self.shared, Settings().state_dir):
            copy_jar_lists(known, self.own)
        return self.own

    def join_spark(self) -> None:
        """Let the lake of this process use the shared Spark server, which starts if it does not run."""
        if not self.worker or self._has_its_own():
            return
        self.lend_spark(self.own)
        (self.own / _BORROWED).touch()

    def lend_spark(self, folder: Path) -> None:
        """Let the lake in a state folder use the shared Spark server, which starts if it does not run.

        Whoever stops that lake's servers calls `take_spark_back` before, as it would stop this one too.
        """
        EmbeddedServers(Settings(state_dir=self.shared, nessie_uri=_NOWHERE, warehouse=None)).endpoints()
        for part in _LENT:
            (folder / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.shared / part, folder / part)

    @staticmethod
    def take_spark_back(folder: Path) -> None:
        """Let the lake in a state folder forget the shared Spark server."""
        for part in (*_LENT, _BORROWED):
            (folder / part).unlink(missing_ok=True)

    def kafka(self) -> KafkaCluster:
        """The broker of the session, which starts if it does not run. Topics part the tests."""
        return EmbeddedKafka(Settings(state_dir=self.shared)).cluster()

    def _has_its_own(self) -> bool:
        """Whether a test of this worker started a Spark server here: to forget it would be to leave it running."""
        return (self.own / _LENT[0]).exists() and not (self.own / _BORROWED).exists()

    def leave(self) -> None:
        """Stop the servers of this process alone."""
        if self.kept:
            return
        if self.worker and not self._has_its_own():
            self.take_spark_back(self.own)
        _down(self.own)

    def end(self) -> None:
        """Stop all servers, also those of workers that died."""
        if self.kept:
            return
        for folder in self.shared.glob("gw*"):
            Lakes(self.shared, folder.name).leave()
        _down(self.shared)
        EmbeddedKafka(Settings(state_dir=self.shared)).down()


def copy_jar_lists(known: Path, folder: Path) -> None:
    """Let servers of the state folder `folder` find the jars that those of `known` have found, which saves a JVM each."""
    if (known / BROKER_JARS).is_dir() and not (folder / BROKER_JARS).exists():
        shutil.copytree(known / BROKER_JARS, folder / BROKER_JARS)
    if (known / _LISTING).is_file() and not (folder / _LISTING).exists():
        (folder / _LISTING).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(known / _LISTING, folder / _LISTING)


def _down(folder: Path) -> None:
    if not (folder / "run").is_dir():
        return  # nothing was started there
    EmbeddedServers(Settings(state_dir=folder)).stop_all()


def kept_folder() -> Path | None:
    """The folder that the user wants to be kept."""
    named = os.environ.get("BRANCHLAKE_TEST_STATE_DIR")
    return Path(named).absolute() if named else None
