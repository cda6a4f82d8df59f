"""The source of an ingestion's topics: a Kafka cluster, or a folder of landing files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.ingest.embedded_kafka import configured_cluster
from branchlake_dagster.ingest.errors import LandingUnavailable
from branchlake_dagster.ingest.kafka_topics import KafkaTopics, Topics
from branchlake_dagster.ingest.offsets import Offsets, Topic, TopicPartition
from branchlake_dagster.ingest.record_frames import (
    KafkaRecords,
    LandingRecords,
    Records,
    reading_landing_file,
    to_time_us,
    valid_time_us,
)
from branchlake_dagster.ingest.worker_writer import NO_TIME_US
from branchlake_dagster.receivers.landing import Landing, LandingFile
from branchlake_dagster.settings import Settings


class LandingTopics:
    """The `Topics` of a landing folder. A topic's incarnation is the id in its file `topic-id`."""

    def __init__(self, folder: Path) -> None:
        self._landing = Landing(folder)

    def describe(self, names: Iterable[str]) -> dict[str, Topic]:
        """Return the present state of these topics, by name.

        Raises LandingUnavailable for a topic that no receiver has created yet (reason `unknown_topic`), or
        that the operating system does not let us read (`unreadable`); LandingDamaged; and ConfigurationError
        for a name that no topic can have.
        """
        return {name: self._topic(name) for name in sorted(set(names))}

    def _topic(self, name: str) -> Topic:
        try:
            incarnation = self._landing.topic_id(name)
            numbers = self._landing.partitions(name)
            spans = {number: self._landing.offsets(name, number) for number in numbers}
        except (ConfigurationError, FileNotFoundError) as error:
            if isinstance(error, ConfigurationError) and error.reason != "unknown_topic":
                raise
            # An unmounted folder looks the same as a topic that no receiver has created yet.
            raise LandingUnavailable(
                f"Landing folder {self._landing.folder} has no topic {name}.",
                hint="Start its receiver (branchlake sda receive --landing …), or correct"
                " BRANCHLAKE_LANDING. The folder's topics are:"
                f" {', '.join(self._landing.topics()) or 'none'}.",
                reason="unknown_topic",
                subject=name,
            ) from error
        except OSError as error:
            raise LandingUnavailable(
                f"Topic {name} in landing folder {self._landing.folder} cannot be read: {error}.",
                hint="Check the mount and the permissions of the folder. The next tick reads it again.",
                reason="unreadable",
                subject=name,
            ) from error
        begins = {number: span[0] for number, span in spans.items()}
        return Topic(name, incarnation, begins, {number: span[1] for number, span in spans.items()})

    def offsets_at_time(self, topic: Topic, moment: datetime) -> Offsets:
        """Return the offset of the first record since a time, by partition; the end if there is none.

        The time of a record is the time of its receipt. Records without a time are passed over.
        """
        return {
            partition: self._first_since(topic, partition.partition, moment)
            for partition in topic.partitions()
        }

    def _first_since(self, topic: Topic, partition: int, moment: datetime) -> int:
        for file in self._landing.files(topic.name, partition):
            if file.first >= topic.ends[partition]:
                break  # it was written after the topic was described
            with reading_landing_file(file):
                rows = pq.read_table(file.path, columns=["offset", "timestamp"], partitioning=None)
                since = rows.filter(pc.greater_equal(rows["timestamp"], moment))
                for offset, at in zip(since["offset"], since["timestamp"], strict=True):
                    if to_time_us(at) != NO_TIME_US:
                        return int(offset.as_py())
        return topic.ends[partition]

    def committed_offsets(self, group: str, topics: Iterable[str]) -> Mapping[str, Mapping[int, int]]:
        """Raise ConfigurationError always: a landing folder has no consumer groups."""
        raise ConfigurationError(
            f"A landing folder has no consumer groups, so {group} cannot have offsets in"
            f" {', '.join(topics)}.",
            hint='Give the offsets with start=StartingOffsets({"orders": {0: 120}}).',
        )

    def earliest_time(self, offsets: Offsets) -> datetime | None:
        """Return the earliest time of the records at these offsets; None if no record has a valid time."""
        record_times = []
        for partition, offset in offsets.items():
            file = self._file_of_offset(partition.topic, partition.partition, offset)
            if file is not None:
                with reading_landing_file(file):
                    rows = pq.read_table(file.path, columns=["timestamp"], partitioning=None)
                    record_times.append(_to_datetime(rows["timestamp"][max(offset - file.first, 0)]))
        return min((at for at in record_times if at is not None), default=None)

    def _file_of_offset(self, topic: str, partition: int, offset: int) -> LandingFile | None:
        first, end = self._landing.offsets(topic, partition)
        offset_in_log = max(offset, first)
        return (
            self._landing.files_with_offsets(topic, partition, offset_in_log, offset_in_log + 1)[0]
            if offset_in_log < end
            else None
        )

    def report_offsets(self, group: str, offsets: Offsets) -> None:
        """Do nothing, because a folder has no consumer groups. The topic's asset shows the lag."""


def _to_datetime(at: pa.TimestampScalar) -> datetime | None:
    """Convert a time to a datetime in UTC.

    Return None for null, for -1 ms, which means no time in Kafka, and for years outside of 1 to 9999.
    """
    time_us = to_time_us(at)
    valid_us = None if time_us is None else valid_time_us(time_us)
    return None if valid_us is None else datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=valid_us)


def common_offsets(positions: Iterable[Offsets]) -> dict[TopicPartition, int]:
    """Return the least offset of each partition, for the partitions that all of `positions` have.

    `positions` are the offsets that each ingestion has reached.
    """
    offset_maps = list(positions)
    shared_partitions = (
        set.intersection(*(set(partition) for partition in offset_maps)) if offset_maps else set()
    )
    return {partition: min(offsets[partition] for offsets in offset_maps) for partition in shared_partitions}


def remove_read_files(
    landing: Landing, topics: Iterable[Topic], read_offsets: Offsets, *, finished_before: float
) -> list[LandingFile]:
    """Remove the files whose records were all read and that were finished before a time (s since 1970).

    Returns the removed files. `read_offsets` are the offsets that the tables on `main` have reached. A
    partition of another incarnation than theirs loses no files. The newest file of a partition stays, because
    its name shows the next offset.
    """
    removed = []
    for topic in topics:
        for partition in topic.partitions():
            first_kept = _first_kept_offset(
                landing.files(partition.topic, partition.partition),
                read_offsets.get(partition, 0),
                finished_before,
            )
            removed += landing.remove_before(partition.topic, partition.partition, first_kept)
    return removed


def _first_kept_offset(files: list[LandingFile], read_offset: int, finished_before: float) -> int:
    """Return the first offset that must be kept; 0 if no file may be removed.

    `files` are in the order of their offsets.
    """
    first_kept = 0
    for file in files:
        try:
            is_old = file.path.stat().st_mtime < finished_before
        except FileNotFoundError:
            is_old = True  # another removal was faster
        if file.last >= read_offset or not is_old:
            break
        first_kept = file.last + 1
    return first_kept


@dataclass(frozen=True)
class TopicSource:
    """The source of an ingestion: `topics` describes its topics, and `records` reads their records."""

    topics: Topics
    records: Records


def open_topic_source(ingest: Ingest, settings: Settings) -> TopicSource:
    """Return the source of an ingestion: the Kafka cluster or the landing folder of the settings.

    Raises ConfigurationError, MissingExtra, or SecretWithoutTls if Kafka's password would be sent to Spark
    without TLS.
    """
    if ingest.source == "landing":
        folder = settings.landing_folder
        return TopicSource(LandingTopics(folder), LandingRecords(folder))
    cluster = configured_cluster(settings)
    if cluster.password is not None:
        settings.require_tls_to_spark(f"Kafka's password for {cluster.bootstrap}")
    topics = KafkaTopics(cluster)
    return TopicSource(topics, KafkaRecords(cluster, topics))
