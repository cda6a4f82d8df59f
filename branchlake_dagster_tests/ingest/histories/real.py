"""A history with servers and processes of its own, which are killed: live runs, publishers, Kafka, Nessie, Spark."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from random import Random

import dagster as dg
import pytest
from pyiceberg.exceptions import CommitFailedException

from branchlake_dagster.cleanup.jobs import reap_branches
from branchlake_dagster.embedded import process
from branchlake_dagster.embedded.servers import NESSIE, SPARK
from branchlake_dagster.ingest.embedded_kafka import EmbeddedKafka
from branchlake_dagster.ingest.kafka_topics import KafkaTopics
from branchlake_dagster.ingest.live import LiveIngestion
from branchlake_dagster.ingest.record_frames import KafkaRecords
from branchlake_dagster.internals.dagster_sqlite import STORAGES
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.reconciler import RUN_BRANCH_FILTER
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings
from branchlake_dagster.waiting import holds_within
from branchlake_dagster_tests.dagster_internals import COMPUTE_LOGS
from branchlake_dagster_tests.ingest.histories.play import Played
from branchlake_dagster_tests.ingest.histories.tokens import KINDS, PARTITIONS, Tokens, ingestion
from branchlake_dagster_tests.ingest.histories.worker import work
from branchlake_dagster_tests.ingest.project import NAME, TOPICS
from branchlake_dagster_tests.suite.kafka import Broker
from branchlake_dagster_tests.suite.lakes import copy_jar_lists

# Captured logs need processes beside each step, which would outlive a killed one.
_CONFIGURATION = f"telemetry: {{enabled: false}}\n{COMPUTE_LOGS}\n"
_PATIENCE_S = 240.0
_PRELOADED = ("branchlake_dagster_tests.ingest.histories.worker", "alembic.command", *STORAGES)
ALL = (
    "kill the live run",
    "kill it before its publication",
    "kill it after its publication",
    "pause it while another one works",
    "run one batch",
    "kill a run of one batch",
    "kill Kafka",
    "kill Nessie",
    "kill Spark",
    "roll a table back",
)


@contextmanager
def stack(
    folder: Path, known: Path | None = None
) -> Iterator[tuple[Lakehouse, EmbeddedKafka, dict[str, str]]]:
    """A lake, a broker and Dagster's home in a folder; all of it stops on leaving. `known` may have lists of the jars."""
    home = folder / "dagster"
    if known is not None:
        copy_jar_lists(known, folder / "state")
    home.mkdir(parents=True)
    (home / "dagster.yaml").write_text(_CONFIGURATION)
    environment = {
        "BRANCHLAKE_STATE_DIR": str(folder / "state"),
        "BRANCHLAKE_HEARTBEAT_INTERVAL_S": "0.3",
        "BRANCHLAKE_DISCARD_GRACE_H": "0.000001",
        "DAGSTER_HOME": str(home),
    }
    with pytest.MonkeyPatch.context() as patch, ExitStack() as ending:
        for name in [name for name in os.environ if name.startswith("BRANCHLAKE_")]:
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        lake, kafka = Lakehouse(Settings()), EmbeddedKafka(Settings())
        ending.callback(lake.servers.stop_all)
        ending.callback(kafka.down)
        lake.endpoints()
        ensure_main_has_commit(lake.nessie)
        kafka.up()
        with dg.DagsterInstance.get():
            pass  # it makes its databases, and cannot do so in several processes at once
        yield lake, kafka, environment


class RealHistory:
    """One history on a stack. `say` is told what is done."""

    def __init__(
        self,
        lake: Lakehouse,
        broker: EmbeddedKafka,
        environment: dict[str, str],
        seed: int,
        *,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.random = Random(seed)
        self.lake = lake
        self.broker = broker
        self.cluster = broker.cluster()
        self.kafka = Broker(self.cluster)
        self.say = say
        self.played = Played(seed)
        self.tokens = Tokens([self.kafka.topic(partitions=PARTITIONS) for _ in range(2)], self.random)
        self.ingest = ingestion(self.tokens.topics, f"i{uuid.uuid4().hex[:8]}")
        self.environment = environment | {NAME: self.ingest.name, TOPICS: ",".join(self.tokens.topics)}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(_PRELOADED))
        self._processes: list[ForkServerProcess] = []
        self._live: ForkServerProcess | None = None

    def play(self, actions: Sequence[str]) -> Played:
        """Do all of it; an error is a problem too."""
        try:
            for action in actions:
                self.tokens.send(self.kafka, self.random.randrange(20, 60))
                self._going()
                self.say(action)
                self._do(action)
                self.played.seen[action] += 1
            self.tokens.send(self.kafka, 20)
            self._end()
            self._drain()
            self.played.problems += self.tokens.problems(self.lake, self.ingest)
            self.played.problems += self._left()
        except Exception:  # noqa: BLE001 - with its seed
            self.played.problems.append(traceback.format_exc())
        finally:
            self._end()
        return self.played

    def _going(self) -> ForkServerProcess:
        """The live run, which its sensor starts again when it has ended."""
        if self._live is None or not self._live.is_alive():
            self._live = self._start("live")
        return self._live

    def _do(self, action: str) -> None:
        pause = self.random.uniform(0, 3)
        if action == "kill the live run":
            self._published(1)
            self.tokens.send(self.kafka, 10)
            time.sleep(pause)
            self._kill(self._going())
        elif action.startswith("kill it "):
            self._kill(self._going())
            self.tokens.send(self.kafka, 5)
            dying = self._start("live", dies=action.split()[2])
            dying.join(_PATIENCE_S)
            assert dying.exitcode == -signal.SIGKILL, f"it ended with {dying.exitcode}"
        elif action == "pause it while another one works":
            self._published(1)
            self.tokens.send(self.kafka, 10)
            time.sleep(pause)
            live = self._going()
            os.kill(live.pid or 0, signal.SIGSTOP)
            other = self._start("live")
            self.tokens.send(self.kafka, 10)
            self._published(2)
            os.kill(live.pid or 0, signal.SIGCONT)
            self.tokens.send(self.kafka, 10)
            time.sleep(pause)
            self._kill(self.random.choice([live, other]))
            self._live = other if other.is_alive() else live
        elif action.endswith("run one batch"):
            self._start("batch").join(_PATIENCE_S)
        elif action == "kill a run of one batch":
            batch = self._start("batch")
            time.sleep(2 * pause)
            self._kill(batch)
        elif action == "roll a table back":
            self._published(1)
            self._roll_back()
        elif action == "kill Kafka":
            time.sleep(pause)
            record = self.broker.record
            assert record is not None
            self._kill_server(record)
            time.sleep(pause)
            assert self.broker.up() == self.cluster.bootstrap
        else:
            time.sleep(pause)
            record = self.lake.servers.status()[NESSIE if action.endswith("Nessie") else SPARK]
            if record is not None:
                self._kill_server(record)
            self.lake.endpoints()

    def _start(self, what: str, *, dies: str = "") -> ForkServerProcess:
        log = str(self.lake.settings.state_dir.parent / f"{what}-{len(self._processes)}.log")
        made = self._context.Process(target=work, args=(what, self.environment, log, dies))
        made.start()
        self._processes.append(made)
        return made

    @staticmethod
    def _kill(one: ForkServerProcess) -> None:
        one.kill()
        one.join()

    @staticmethod
    def _kill_server(record: process.ProcessRecord) -> None:
        os.kill(record.pid, signal.SIGKILL)
        process._reap_child(record.pid)
        # Its last threads may hold the port for a moment, and the next one would take another.
        gone = holds_within(
            60, lambda: not (record.is_alive() or process.is_listening(record.port)), every_s=0.05
        )
        assert gone, f"{record.name} does not end"

    def _published(self, batches: int) -> None:
        """Wait until so many batches more are on `main`, or nothing is left to publish."""
        before = self.lake.nessie.reference(MAIN).hash

        def come() -> bool:
            self._going()  # one whose Spark was killed ends a moment later
            log = []
            for entry in self.lake.nessie.log(MAIN):
                if entry.commit.hash == before or len(log) >= batches:
                    break
                log.append(entry)
            return len(log) >= batches or not self.tokens.problems(self.lake, self.ingest)

        assert holds_within(_PATIENCE_S, come, every_s=0.3), "nothing is published"

    def _roll_back(self) -> None:
        kind, chance = self.random.choice(KINDS), self.random.random()

        def done() -> bool:
            table = self.lake.catalog(MAIN).load_table((self.ingest.name, kind))
            snapshots = [one.snapshot_id for one in table.history()][:-1]
            if not snapshots:
                return True
            try:
                to = snapshots[int(chance * len(snapshots))]
                table.manage_snapshots().rollback_to_snapshot(to).commit()
            except CommitFailedException:
                return False  # the live run has published meanwhile
            return True

        assert holds_within(60, done, every_s=0.05)

    def _end(self) -> None:
        for one in self._processes:
            if one.is_alive():
                self._kill(one)

    def _drain(self) -> None:
        one = LiveIngestion(
            self.ingest,
            self.lake,
            str(uuid.uuid4()),
            topics := KafkaTopics(self.cluster),
            KafkaRecords(self.cluster, topics),
            session_at=self.lake.spark_session,
            tasks=2,
            properties={},
        )
        while one.publish_next_batch() is not None:
            pass
        one.close()

    def _left(self) -> list[str]:
        """Branches that the reaper does not end, once it may."""
        later = datetime.now(UTC) + timedelta(days=30)
        with dg.DagsterInstance.get() as instance:
            told = [str(one) for one in reap_branches(self.lake, instance, now=lambda: later)]
        left = [one.name for one in self.lake.nessie.references(filter=RUN_BRANCH_FILTER)]
        return [f"branches are left: {left}; {told}"] if left else []
