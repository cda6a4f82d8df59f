"""External assets for topics and receivers, and the observations on them: lag and oldest record."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

import dagster as dg

from branchlake_dagster.ingest.batch_context import PlannedBatch
from branchlake_dagster.ingest.batch_report import to_utc_datetime
from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.ingest.kafka_topics import Topics
from branchlake_dagster.ingest.offsets import TableProgress, Topic, TopicPartition
from branchlake_dagster.receivers.metrics_client import MonitorReport, TopicCounts, sum_by_topic
from branchlake_dagster.stored_names import EventMetadata, LakeProperty


def receiver_key(monitor: str) -> dg.AssetKey:
    """Return the asset key of the receiver process whose monitor is at `http://host:9464`."""
    return dg.AssetKey(["receivers", urlsplit(monitor).netloc or monitor])


def receiver_spec(monitor: str) -> dg.AssetSpec:
    """Build the asset of a receiver process."""
    return dg.AssetSpec(
        receiver_key(monitor),
        description=f"A process of receivers. Its monitor is at {monitor}.",
        kinds={"receiver"},
        group_name="receivers",
    )


def receiver_observations(
    monitors: Iterable[MonitorReport], topics: Collection[str]
) -> list[dg.AssetObservation]:
    """Build an observation for each receiver of one of the topics, and for each receiver without an answer.

    It is not known which topics a silent receiver has.
    """
    return [
        dg.AssetObservation(receiver_key(report.address), metadata=_receiver_metadata(report))
        for report in monitors
        if report.silent or not report.counts.keys().isdisjoint(topics)
    ]


def counts_metadata(counts: TopicCounts) -> dict[str, Any]:
    """Build the metadata of counts since the receivers' start, and of their buffers.

    The counts are those of one receiver over all its topics, or of one topic over all its receivers.
    """
    metadata: dict[str, Any] = {
        EventMetadata.RECEIVED: dg.MetadataValue.int(counts.received),
        EventMetadata.HANDED_OVER: dg.MetadataValue.int(counts.handed_over),
        EventMetadata.DROPPED: dg.MetadataValue.int(counts.dropped.total()),
    }
    for reason, number in sorted(counts.dropped.items()):
        metadata[f"branchlake/dropped_{reason}"] = dg.MetadataValue.int(number)
    metadata[EventMetadata.RECEIVER_BUFFERED] = dg.MetadataValue.int(counts.waiting)
    if counts.buffer_capacity:
        # The waiting records include those that the sink is writing.
        used = min(counts.waiting / counts.buffer_capacity, 1.0)
        metadata[EventMetadata.RECEIVER_BUFFER_USED] = dg.MetadataValue.float(round(used, 4))
    return metadata


def _receiver_metadata(monitor: MonitorReport) -> dict[str, Any]:
    metadata: dict[str, Any] = {EventMetadata.STATE: dg.MetadataValue.text(monitor.state)}
    if monitor.silent:
        return metadata
    totals = TopicCounts()
    for counts in monitor.counts.values():
        totals.add(counts)
    metadata[EventMetadata.TOPICS] = dg.MetadataValue.text(", ".join(sorted(monitor.counts)))
    if monitor.reasons:
        metadata[EventMetadata.REASONS] = dg.MetadataValue.text("; ".join(monitor.reasons))
    return {**metadata, **counts_metadata(totals)}


def topic_key(ingest: Ingest, topic: str) -> dg.AssetKey:
    """Return the asset key of a topic. Both Kafka's names and parts of Dagster's keys may contain dots."""
    return dg.AssetKey([ingest.source, topic])


def topic_spec(ingest: Ingest, topic: str) -> dg.AssetSpec:
    """Build the external asset of a topic."""
    if ingest.source == "landing":
        description = f"The topic {topic} of the landing folder. A receiver writes its files."
        return dg.AssetSpec(
            topic_key(ingest, topic), description=description, kinds={"parquet"}, group_name="landing"
        )
    return dg.AssetSpec(
        topic_key(ingest, topic),
        description=f"The Kafka topic {topic}.",
        kinds={"kafka"},
        group_name="kafka",
    )


def build_observations(
    ingest: Ingest,
    planned_batch: PlannedBatch,
    topics: Topics,
    monitors: Sequence[MonitorReport],
    *,
    clock: Callable[[], float] = time.time,
) -> list[dg.AssetObservation]:
    """Build one observation for each topic of an ingestion, and one for each receiver of such a topic.

    `monitors` are the reports of the receivers. Raises the errors of `topics`.
    """
    counts, silent = sum_by_topic(monitors), [report.address for report in monitors if report.silent]
    topic_observations = []
    for name, topic in sorted(planned_batch.topics.items()):
        waiting = _waiting_offsets(planned_batch, topic)
        metadata: dict[str, Any] = {
            EventMetadata.LAG: dg.MetadataValue.int(
                sum(topic.ends[partition.partition] - at for partition, at in waiting.items())
            ),
            EventMetadata.PARTITIONS: dg.MetadataValue.int(len(topic.ends)),
            EventMetadata.TOPIC_ID: dg.MetadataValue.text(topic.incarnation),
            **_oldest_metadata(topics.earliest_time(waiting) if waiting else None, clock()),
            **_valid_through_metadata(ingest, planned_batch, clock()),
            **_received_metadata(counts.get(name), silent),
        }
        topic_observations.append(dg.AssetObservation(topic_key(ingest, name), metadata=metadata))
    return [*topic_observations, *receiver_observations(monitors, ingest.topics)]


def build_offline_observations(
    ingest: Ingest, monitors: Sequence[MonitorReport]
) -> list[dg.AssetObservation]:
    """Build observations from the receivers' reports alone. Buffers fill up while brokers are unreachable."""
    counts, silent = sum_by_topic(monitors), [report.address for report in monitors if report.silent]
    metadata_by_topic = {name: _received_metadata(counts.get(name), silent) for name in sorted(ingest.topics)}
    topic_observations = [
        dg.AssetObservation(topic_key(ingest, name), metadata=metadata)
        for name, metadata in metadata_by_topic.items()
        if metadata
    ]
    return [*topic_observations, *receiver_observations(monitors, ingest.topics)]


def _waiting_offsets(planned_batch: PlannedBatch, topic: Topic) -> dict[TopicPartition, int]:
    """Return the next offset of each partition that has records which the tables do not have yet."""
    next_offsets = {
        partition: planned_batch.progress.position.get(partition, 0) for partition in topic.partitions()
    }
    starts = {partition: max(at, topic.begins[partition.partition]) for partition, at in next_offsets.items()}
    return {partition: at for partition, at in starts.items() if at < topic.ends[partition.partition]}


def _oldest_metadata(at: datetime | None, now: float) -> Mapping[str, Any]:
    """Build the metadata of the oldest waiting record: its time, and its age, which is 0 s if none waits."""
    if at is None:
        return {EventMetadata.OLDEST_WAITING_S: dg.MetadataValue.float(0.0)}
    return {
        EventMetadata.OLDEST_WAITING: dg.MetadataValue.timestamp(at),
        EventMetadata.OLDEST_WAITING_S: dg.MetadataValue.float(round(max(now - at.timestamp(), 0.0), 3)),
    }


def _valid_through_metadata(ingest: Ingest, planned_batch: PlannedBatch, now: float) -> Mapping[str, Any]:
    """Build the metadata of the valid-through time on `main`, and of its age, which Dagster plots.

    The time is read from the table of dead letters, which takes part in each batch.
    """
    dead_letter_table = planned_batch.ingestion_tables.dead_letter_table
    progress_json = (
        dead_letter_table.metadata.properties.get(LakeProperty.OFFSETS_PREFIX + ingest.name)
        if dead_letter_table is not None
        else None
    )
    try:
        at = TableProgress.from_json(progress_json).valid_through_ms if progress_json else None
        valid = None if at is None else to_utc_datetime(at)
    except (ValueError, KeyError, TypeError, OverflowError):
        return {}  # the next batch reports the damaged property
    if at is None or valid is None:
        return {}
    return {
        EventMetadata.VALID_THROUGH: dg.MetadataValue.timestamp(valid),
        f"{EventMetadata.VALID_THROUGH}_age_s": dg.MetadataValue.float(round(max(now - at / 1000, 0.0), 3)),
    }


def _received_metadata(counts: TopicCounts | None, silent: Sequence[str]) -> Mapping[str, Any]:
    """Build the metadata of the counts and buffers of a topic's receivers, and of silent receivers."""
    metadata: dict[str, Any] = {}
    if silent:
        metadata[EventMetadata.RECEIVERS_SILENT] = dg.MetadataValue.text(", ".join(silent))
    return metadata if counts is None else {**metadata, **counts_metadata(counts)}
