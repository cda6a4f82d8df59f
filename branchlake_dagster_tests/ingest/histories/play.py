"""A short history in one process: batches whose process fails at a step, is overtaken, or dies there."""

from __future__ import annotations

import traceback
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from pyspark.sql import SparkSession

from branchlake_dagster.ingest.errors import Superseded
from branchlake_dagster.ingest.kafka_topics import KafkaTopics
from branchlake_dagster.ingest.live import LiveIngestion, can_continue_after
from branchlake_dagster.ingest.record_frames import KafkaRecords
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster_tests.ingest.histories.faults import (
    Died,
    Fate,
    Fault,
    FaultyLake,
    FaultyRecords,
    PassFailed,
)
from branchlake_dagster_tests.ingest.histories.tokens import KINDS, PARTITIONS, Tokens, ingestion
from branchlake_dagster_tests.suite.kafka import Broker

_ROUNDS = 3
_MOST_LIVES = 30


@dataclass
class Played:
    """A history: what is wrong, and what happened in it."""

    seed: int
    problems: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        wrong = "; ".join(self.problems) or "all is well"
        return "\n  ".join([f"Seed {self.seed}: {wrong}", *self.told])


class History:
    """One history on a lake and a broker, with a Spark session that all of its processes share."""

    def __init__(
        self, lake: Lakehouse, kafka: Broker, session: Callable[[], SparkSession], seed: int
    ) -> None:
        self.random = Random(seed)
        self.lake = lake
        self.kafka = kafka
        self.session = session
        self.tokens = Tokens([kafka.topic(partitions=PARTITIONS) for _ in range(2)], self.random)
        self.ingest = ingestion(self.tokens.topics, most_records=self.random.choice([8, 500_000]))
        self.played = Played(seed)
        self._topics = KafkaTopics(kafka.cluster)

    def play(self) -> Played:
        """All of it; an error is a problem too."""
        try:
            for _ in range(_ROUNDS):
                self.tokens.send(self.kafka, self.random.randrange(1, 12), poison=0.25)
                if self.random.random() < 0.2:
                    self._roll_back()
                self._drain(Fate.drawn(self.random, self._meanwhile))
            self.played.problems += self.tokens.problems(self.lake, self.ingest)
        except Exception:  # noqa: BLE001 - with its seed
            self.played.problems.append(traceback.format_exc())
        return self.played

    def _life(self, fate: Fate) -> LiveIngestion:
        return LiveIngestion(
            self.ingest,
            FaultyLake(self.lake.settings, fate),
            str(uuid.UUID(int=self.random.getrandbits(128))),
            self._topics,
            FaultyRecords(KafkaRecords(self.kafka.cluster, self._topics), fate),
            session_at=lambda _: self.session(),
            tasks=2,
            properties={},
            sleep=lambda _: None,
        )

    def _drain(self, fate: Fate) -> None:
        """Until nothing waits: a process with that fate, and after it healthy ones."""
        for _ in range(_MOST_LIVES):
            one = self._life(fate)
            try:
                while self._batch(one, fate):
                    pass
            except (Died, PassFailed, Superseded) as end:
                self.played.seen[type(end).__name__] += 1
            else:
                self._note(fate)
                return
            self._note(fate)
            fate = Fate()
        raise AssertionError("it does not come to an end")

    def _batch(self, one: LiveIngestion, fate: Fate) -> bool:
        """Whether there was anything; what may pass is tried again by the same process."""
        try:
            return one.publish_next_batch() is not None
        except Exception as error:
            if not can_continue_after(error):
                raise
            self.played.told.append(f"{type(error).__name__} after {fate.met[-1]}")
            return True

    def _meanwhile(self) -> None:
        """Another process of the ingestion takes more records, and publishes."""
        self.tokens.send(self.kafka, self.random.randrange(3), poison=0.25)
        self._life(Fate()).publish_next_batch()

    def _roll_back(self) -> None:
        """A person rolls a table back to an earlier state."""
        kind = self.random.choice(KINDS)
        catalog = self.lake.catalog(MAIN)
        if not catalog.table_exists((self.ingest.name, kind)):
            return
        table = catalog.load_table((self.ingest.name, kind))
        snapshots = [one.snapshot_id for one in table.history()]
        if len(snapshots) > 1:
            table.manage_snapshots().rollback_to_snapshot(self.random.choice(snapshots[:-1])).commit()
            self.played.seen["rolled back"] += 1
            self.played.told.append(f"table {kind} rolled back")

    def _note(self, fate: Fate) -> None:
        self.played.told += fate.met
        if fate.met and fate.fault is not Fault.NONE:
            self.played.seen[fate.fault] += 1
