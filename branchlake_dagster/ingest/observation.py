"""External assets of topics and receivers, and what is reported on them: lag, the oldest record."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

import dagster as dg

from branchlake_dagster.ingest.batch_context import Before
from branchlake_dagster.ingest.batch_report import moment
from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.ingest.kafka_topics import Topics
from branchlake_dagster.ingest.offsets import Recorded, Topic, TopicPartition
from branchlake_dagster.receivers.metrics_client import Monitored, TopicCounts, together
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
    monitors: Iterable[Monitored], topics: Collection[str]
) -> list[dg.AssetObservation]:
    """How the receivers of one of the topics are, and those that do not answer: nobody knows theirs."""
    return [
        dg.AssetObservation(receiver_key(one.address), metadata=_metadata(one))
        for one in monitors
        if one.silent or not one.counts.keys().isdisjoint(topics)
    ]


def counted(counts: TopicCounts) -> dict[str, Any]:
    """What was counted since the start, and how full the buffers are."""
    found: dict[str, Any] = {
        EventMetadata.RECEIVED: dg.MetadataValue.int(counts.received),
        EventMetadata.HANDED_OVER: dg.MetadataValue.int(counts.handed_over),
        EventMetadata.DROPPED: dg.MetadataValue.int(counts.dropped.total()),
    }
    for reason, number in sorted(counts.dropped.items()):
        found[f"branchlake/dropped_{reason}"] = dg.MetadataValue.int(number)
    found[EventMetadata.RECEIVER_BUFFERED] = dg.MetadataValue.int(counts.waiting)
    if counts.buffer:
        # What waits includes what the sink has in hand.
        used = min(counts.waiting / counts.buffer, 1.0)
        found[EventMetadata.RECEIVER_BUFFER_USED] = dg.MetadataValue.float(round(used, 4))
    return found


def _metadata(monitor: Monitored) -> dict[str, Any]:
    found: dict[str, Any] = {EventMetadata.STATE: dg.MetadataValue.text(monitor.state)}
    if monitor.silent:
        return found
    every = TopicCounts()
    for counts in monitor.counts.values():
        every.add(counts)
    found[EventMetadata.TOPICS] = dg.MetadataValue.text(", ".join(sorted(monitor.counts)))
    if monitor.reasons:
        found[EventMetadata.REASONS] = dg.MetadataValue.text("; ".join(monitor.reasons))
    return {**found, **counted(every)}


def topic_key(ingest: Ingest, topic: str) -> dg.AssetKey:
    """The external asset that stands for a topic. Kafka's names may hold dots, Dagster's parts too."""
    return dg.AssetKey([ingest.source, topic])


def topic_spec(ingest: Ingest, topic: str) -> dg.AssetSpec:
    """That asset."""
    if ingest.source == "landing":
        text = f"The topic {topic} of the landing folder, as its receiver fills it."
        return dg.AssetSpec(
            topic_key(ingest, topic), description=text, kinds={"parquet"}, group_name="landing"
        )
    return dg.AssetSpec(
        topic_key(ingest, topic),
        description=f"The Kafka topic {topic}.",
        kinds={"kafka"},
        group_name="kafka",
    )


def observations(
    ingest: Ingest,
    before: Before,
    topics: Topics,
    monitors: Sequence[Monitored],
    *,
    now: Callable[[], float] = time.time,
) -> list[dg.AssetObservation]:
    """One for each topic of an ingestion, on the topic's asset, and for each receiver of one of them.

    `monitors` are what the receivers have told. Raises what `topics` raises.
    """
    counts, silent = together(monitors), [one.address for one in monitors if one.silent]
    found = []
    for name, topic in sorted(before.topics.items()):
        waiting = _waiting(before, topic)
        metadata: dict[str, Any] = {
            EventMetadata.LAG: dg.MetadataValue.int(
                sum(topic.ends[one.partition] - at for one, at in waiting.items())
            ),
            EventMetadata.PARTITIONS: dg.MetadataValue.int(len(topic.ends)),
            EventMetadata.TOPIC_ID: dg.MetadataValue.text(topic.incarnation),
            **_oldest(topics.time_of(waiting) if waiting else None, now()),
            **_valid_through(ingest, before, now()),
            **_received(counts.get(name), silent),
        }
        found.append(dg.AssetObservation(topic_key(ingest, name), metadata=metadata))
    return [*found, *receiver_observations(monitors, ingest.topics)]


def without_brokers(ingest: Ingest, monitors: Sequence[Monitored]) -> list[dg.AssetObservation]:
    """What receivers have counted of the topics, without a look at these: they fill when brokers are away."""
    counts, silent = together(monitors), [one.address for one in monitors if one.silent]
    told = {name: _received(counts.get(name), silent) for name in sorted(ingest.topics)}
    of_topics = [
        dg.AssetObservation(topic_key(ingest, name), metadata=metadata)
        for name, metadata in told.items()
        if metadata
    ]
    return [*of_topics, *receiver_observations(monitors, ingest.topics)]


def _waiting(before: Before, topic: Topic) -> dict[TopicPartition, int]:
    """Where each partition is gone on with that has records no table has."""
    begun = {one: before.standing.position.get(one, 0) for one in topic.partitions()}
    starts = {one: max(at, topic.begins[one.partition]) for one, at in begun.items()}
    return {one: at for one, at in starts.items() if at < topic.ends[one.partition]}


def _oldest(at: datetime | None, now: float) -> Mapping[str, Any]:
    """When the oldest record that waits was received, and how long ago; 0 s where none waits."""
    if at is None:
        return {EventMetadata.OLDEST_WAITING_S: dg.MetadataValue.float(0.0)}
    return {
        EventMetadata.OLDEST_WAITING: dg.MetadataValue.timestamp(at),
        EventMetadata.OLDEST_WAITING_S: dg.MetadataValue.float(round(max(now - at.timestamp(), 0.0), 3)),
    }


def _valid_through(ingest: Ingest, before: Before, now: float) -> Mapping[str, Any]:
    """As the last batch on `main` has it, and how long ago that is, which Dagster plots.

    The table of dead letters takes part in each batch.
    """
    anchor = before.known.anchor
    text = (
        anchor.metadata.properties.get(LakeProperty.OFFSETS_PREFIX + ingest.name)
        if anchor is not None
        else None
    )
    try:
        at = Recorded.from_text(text).valid_through_ms if text else None
        valid = None if at is None else moment(at)
    except (ValueError, KeyError, TypeError, OverflowError):
        return {}  # the next batch says so
    if at is None or valid is None:
        return {}
    return {
        EventMetadata.VALID_THROUGH: dg.MetadataValue.timestamp(valid),
        f"{EventMetadata.VALID_THROUGH}_age_s": dg.MetadataValue.float(round(max(now - at / 1000, 0.0), 3)),
    }


def _received(counts: TopicCounts | None, silent: Sequence[str]) -> Mapping[str, Any]:
    """What the topic's receivers have counted since they started, and how full their buffers are."""
    found: dict[str, Any] = {}
    if silent:
        found[EventMetadata.RECEIVERS_SILENT] = dg.MetadataValue.text(", ".join(silent))
    return found if counts is None else {**found, **counted(counts)}
