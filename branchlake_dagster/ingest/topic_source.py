"""Where the topics of an ingestion are: a Kafka cluster, or a folder of landing files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.ingest.embedded_kafka import cluster_of
from branchlake_dagster.ingest.errors import LandingUnavailable
from branchlake_dagster.ingest.kafka_topics import KafkaTopics, Topics
from branchlake_dagster.ingest.offsets import Offsets, Topic, TopicPartition
from branchlake_dagster.ingest.record_frames import KafkaRecords, LandingRecords, Records
from branchlake_dagster.receivers.landing import Landing, LandingFile
from branchlake_dagster.settings import Settings


class LandingTopics:
    """`Topics` of a folder. The incarnation is the folder's `topic-id`."""

    def __init__(self, folder: Path) -> None:
        self._landing = Landing(folder)

    def describe(self, names: Iterable[str]) -> dict[str, Topic]:
        """See `Topics`. Raises LandingUnavailable for one that no receiver has made yet; LandingDamaged."""
        return {name: self._topic(name) for name in sorted(set(names))}

    def _topic(self, name: str) -> Topic:
        try:
            incarnation = self._landing.topic_id(name)
            numbers = self._landing.partitions(name)
            spans = {number: self._landing.offsets(name, number) for number in numbers}
        except (ConfigurationError, OSError) as error:
            # A folder that is not mounted looks the same as a topic that nobody has received yet.
            raise LandingUnavailable(
                f"Landing folder {self._landing.folder} has no topic {name}.",
                hint="Start its receiver (branchlake sda receive --landing …), or correct BRANCHLAKE_LANDING."
                f" There are: {', '.join(self._landing.topics()) or 'none'}.",
                reason="unknown_topic",
                subject=name,
            ) from error
        begins = {number: span[0] for number, span in spans.items()}
        return Topic(name, incarnation, begins, {number: span[1] for number, span in spans.items()})

    def at_time(self, topic: Topic, moment: datetime) -> Offsets:
        """See `Topics`. A record's time is its receipt."""
        return {one: self._first_since(topic, one.partition, moment) for one in topic.partitions()}

    def _first_since(self, topic: Topic, partition: int, moment: datetime) -> int:
        for file in self._landing.files(topic.name, partition):
            rows = pq.read_table(file.path, columns=["offset", "timestamp"], partitioning=None)
            since = rows.filter(pc.greater_equal(rows["timestamp"], moment))
            if since.num_rows:
                return int(since["offset"][0].as_py())
        return topic.ends[partition]

    def committed(self, group: str, topics: Iterable[str]) -> Mapping[str, Mapping[int, int]]:
        """See `Topics`. Raises ConfigurationError."""
        raise ConfigurationError(
            f"A landing folder has no consumer groups: {group} cannot have offsets in {', '.join(topics)}.",
            hint='Give the offsets themselves: start=StartingOffsets({"orders": {0: 120}}).',
        )

    def time_of(self, offsets: Offsets) -> datetime | None:
        """See `Topics`."""
        found = []
        for one, offset in offsets.items():
            file = self._holding(one.topic, one.partition, offset)
            if file is not None:
                times = pq.read_table(file.path, columns=["timestamp"], partitioning=None)["timestamp"]
                found.append(_moment(times[max(offset - file.first, 0)]))
        return min((at for at in found if at is not None), default=None)

    def _holding(self, topic: str, partition: int, offset: int) -> LandingFile | None:
        first, end = self._landing.offsets(topic, partition)
        at = max(offset, first)
        return self._landing.files_of(topic, partition, at, at + 1)[0] if at < end else None

    def report(self, group: str, offsets: Offsets) -> None:
        """See `Topics`. A folder has no consumer groups: the lag is on the topic's asset."""


def _moment(at: pa.TimestampScalar) -> datetime | None:
    """The time; None: there is none, or no calendar has it."""
    try:
        found: datetime | None = at.as_py()
    except (ValueError, OverflowError):
        return None
    return found and found.astimezone(UTC)


def least(known: Iterable[Offsets]) -> dict[TopicPartition, int]:
    """Up to where every one of several ingestions has read; what one of them has not begun is left out."""
    every = list(known)
    shared = set.intersection(*(set(one) for one in every)) if every else set()
    return {one: min(offsets[one] for offsets in every) for one in shared}


def remove_read(
    landing: Landing, topics: Iterable[Topic], read: Offsets, *, finished_before: float
) -> list[LandingFile]:
    """Remove the files that are read and were finished before a time (seconds since 1970); say which.

    `read` are offsets that `main` holds, by the incarnation that it has them of: of another one nothing is
    removed. The newest file of a partition stays, for it says where offsets go on.
    """
    removed = []
    for topic in topics:
        for one in topic.partitions():
            cut = _cut(landing.files(one.topic, one.partition), read.get(one, 0), finished_before)
            removed += landing.remove_before(one.topic, one.partition, cut)
    return removed


def _cut(files: list[LandingFile], read: int, finished_before: float) -> int:
    """The first offset that stays."""
    cut = 0
    for file in files:
        if file.last >= read or file.path.stat().st_mtime >= finished_before:
            break
        cut = file.last + 1
    return cut


@dataclass(frozen=True)
class Source:
    """The topics, and how their records are read."""

    topics: Topics
    records: Records


def source_of(ingest: Ingest, settings: Settings) -> Source:
    """Kafka or the landing folder. Raises ConfigurationError, SecretWithoutTls or MissingExtra."""
    if ingest.source == "landing":
        folder = settings.landing_folder
        return Source(LandingTopics(folder), LandingRecords(folder))
    cluster = cluster_of(settings)
    if cluster.password is not None:
        settings.require_tls_to_spark(f"Kafka's password for {cluster.bootstrap}")
    topics = KafkaTopics(cluster)
    return Source(topics, KafkaRecords(cluster, topics))
