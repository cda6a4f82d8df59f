"""External assets of topics and receivers, and what is reported on them: lag, the oldest record."""

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
    """The asset of the process whose monitor is at `http://host:9464`."""
    return dg.AssetKey(["receivers", urlsplit(monitor).netloc or monitor])


def receiver_spec(monitor: str) -> dg.AssetSpec:
    """That asset."""
    return dg.AssetSpec(
        receiver_key(monitor),
        description=f"A process of receivers, with its monitor at {monitor}.",
        kinds={"receiver"},
        group_name="receivers",
    )


def receiver_observations(
    monitors: Iterable[MonitorReport], topics: Collection[str]
) -> list[dg.AssetObservation]:
    """How the receivers of one of the topics are, and those that do not answer: nobody knows theirs."""
    return [
        dg.AssetObservation(receiver_key(report.address), metadata=_receiver_metadata(report))
        for report in monitors
        if report.silent or not report.counts.keys().isdisjoint(topics)
    ]


def counts_metadata(counts: TopicCounts) -> dict[str, Any]:
    """What was counted since the start, and how full the buffers are."""
    metadata: dict[str, Any] = {
        EventMetadata.RECEIVED: dg.MetadataValue.int(counts.received),
        EventMetadata.HANDED_OVER: dg.MetadataValue.int(counts.handed_over),
        EventMetadata.DROPPED: dg.MetadataValue.int(counts.dropped.total()),
    }
    for reason, number in sorted(counts.dropped.items()):
        metadata[f"branchlake/dropped_{reason}"] = dg.MetadataValue.int(number)
    metadata[EventMetadata.RECEIVER_BUFFERED] = dg.MetadataValue.int(counts.waiting)
    if counts.buffer_capacity:
        # What waits includes what the sink has in hand.
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
    """The external asset that stands for a topic. Kafka's names may hold dots, Dagster's parts too."""
    return dg.AssetKey([ingest.source, topic])


def topic_spec(ingest: Ingest, topic: str) -> dg.AssetSpec:
    """That asset."""
    if ingest.source == "landing":
        description = f"The topic {topic} of the landing folder, as its receiver fills it."
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
    """One for each topic of an ingestion, on the topic's asset, and for each receiver of one of them.

    `monitors` are what the receivers have told. Raises what `topics` raises.
    """
    counts, silent = sum_by_topic(monitors), [one.address for one in monitors if one.silent]
    topic_observations = []
    for name, topic in sorted(planned_batch.topics.items()):
        waiting = _waiting_offsets(planned_batch, topic)
        metadata: dict[str, Any] = {
            EventMetadata.LAG: dg.MetadataValue.int(
                sum(topic.ends[one.partition] - at for one, at in waiting.items())
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
    """What receivers have counted of the topics, without a look at these: they fill when brokers are away."""
    counts, silent = sum_by_topic(monitors), [report.address for report in monitors if report.silent]
    metadata_by_topic = {name: _received_metadata(counts.get(name), silent) for name in sorted(ingest.topics)}
    topic_observations = [
        dg.AssetObservation(topic_key(ingest, name), metadata=metadata)
        for name, metadata in metadata_by_topic.items()
        if metadata
    ]
    return [*topic_observations, *receiver_observations(monitors, ingest.topics)]


def _waiting_offsets(planned_batch: PlannedBatch, topic: Topic) -> dict[TopicPartition, int]:
    """Where each partition is gone on with that has records no table has."""
    next_offsets = {
        partition: planned_batch.progress.position.get(partition, 0) for partition in topic.partitions()
    }
    starts = {partition: max(at, topic.begins[partition.partition]) for partition, at in next_offsets.items()}
    return {partition: at for partition, at in starts.items() if at < topic.ends[partition.partition]}


def _oldest_metadata(at: datetime | None, now: float) -> Mapping[str, Any]:
    """When the oldest record that waits was received, and how long ago; 0 s where none waits."""
    if at is None:
        return {EventMetadata.OLDEST_WAITING_S: dg.MetadataValue.float(0.0)}
    return {
        EventMetadata.OLDEST_WAITING: dg.MetadataValue.timestamp(at),
        EventMetadata.OLDEST_WAITING_S: dg.MetadataValue.float(round(max(now - at.timestamp(), 0.0), 3)),
    }


def _valid_through_metadata(ingest: Ingest, planned_batch: PlannedBatch, now: float) -> Mapping[str, Any]:
    """As the last batch on `main` has it, and how long ago that is, which Dagster plots.

    The table of dead letters takes part in each batch.
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
        return {}  # the next batch says so
    if at is None or valid is None:
        return {}
    return {
        EventMetadata.VALID_THROUGH: dg.MetadataValue.timestamp(valid),
        f"{EventMetadata.VALID_THROUGH}_age_s": dg.MetadataValue.float(round(max(now - at / 1000, 0.0), 3)),
    }


def _received_metadata(counts: TopicCounts | None, silent: Sequence[str]) -> Mapping[str, Any]:
    """What the topic's receivers have counted since they started, and how full their buffers are."""
    metadata: dict[str, Any] = {}
    if silent:
        metadata[EventMetadata.RECEIVERS_SILENT] = dg.MetadataValue.text(", ".join(silent))
    return metadata if counts is None else {**metadata, **counts_metadata(counts)}
