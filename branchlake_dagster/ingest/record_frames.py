"""The records of a batch as a Spark frame: exactly the planned offsets, nothing by a consumer group."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.division import Position
from branchlake_dagster.ingest.errors import LandingUnavailable, TopicReplaced
from branchlake_dagster.ingest.kafka_cluster import Cluster
from branchlake_dagster.ingest.kafka_topics import KafkaTopics, reading
from branchlake_dagster.ingest.offsets import Ranges, in_words, records, topic_id
from branchlake_dagster.ingest.spark_expressions import any_of
from branchlake_dagster.receivers.landing import Landing, LandingDamaged

COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")
"""What a record has, as Spark's source calls it; in a batch's frame with two underscores before it."""

RECORD_SCHEMA = (
    "__topic string, __partition int, __offset bigint, __timestamp timestamp, __key binary, __value binary,"
    " __headers array<struct<key: string, value: binary>>"
)
"""The same in Spark's DDL."""
_FETCH_WAIT_MS = "5"
"""How long a broker holds back its answer at a partition's end. What is asked for is there already, and
Spark's next question on the same connection waits behind it: by Kafka's default half a second for each
partition, seventeen seconds for 64 partitions on two cores."""
_LANDED = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp,"
    " headers array<struct<key: string, value: binary>>"
)


_FIRST_MS, _END_MS = -62_135_596_800_000, 253_402_300_800_000
"""The years 1 to 9999, which is what Python and PyIceberg have of times."""


@dataclass(frozen=True)
class RawRecord:
    """One record as its source has it.

    `timestamp_us` is µs since 1970; None outside of the years 1 to 9999.
    """

    topic: str
    partition: int
    offset: int
    timestamp_us: int | None
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()


class Records(Protocol):
    """Where a batch's records are read from."""

    def frame(self, session: SparkSession, ranges: Ranges, *, tasks: int) -> DataFrame:
        """The records of the ranges, with the columns of `COLUMNS` behind two underscores."""

    def reading(self) -> AbstractContextManager[None]:
        """Around what reads them: its failures as errors of ours, where they are the source's."""

    def fetch(self, positions: Iterable[Position]) -> list[RawRecord]:
        """Read single records without Spark, for dead letters of what Spark cannot read.

        Raises KafkaUnavailable or LandingUnavailable where one of them does not come.
        """

    def require(self, ranges: Ranges, count: int) -> None:
        """Look whether so many records may be those of the ranges, after they were read.

        Raises TopicReplaced where a topic is not the one any more whose ranges they are.
        """


class KafkaRecords:
    """`Records` of a cluster, read by Spark's source."""

    def __init__(self, cluster: Cluster, topics: KafkaTopics) -> None:
        self._cluster = cluster
        self._topics = topics

    def frame(self, session: SparkSession, ranges: Ranges, *, tasks: int) -> DataFrame:
        """See `Records`. A record that is gone meanwhile fails the batch."""
        starts, ends = _by_topic(ranges, "start"), _by_topic(ranges, "end")
        options = {
            **self._cluster.spark_options(),
            "assign": json.dumps({topic: [int(one) for one in parts] for topic, parts in starts.items()}),
            "startingOffsets": json.dumps(starts),
            "endingOffsets": json.dumps(ends),
            "includeHeaders": "true",
            "failOnDataLoss": "true",
            "kafka.isolation.level": "read_committed",
            "kafka.fetch.max.bytes": str(64 << 20),
            "kafka.max.partition.fetch.bytes": str(16 << 20),
            "kafka.fetch.max.wait.ms": _FETCH_WAIT_MS,
            "minPartitions": str(tasks),
        }
        frame = session.read.format("kafka").options(**options).load().coalesce(tasks)
        return frame.select(*(F.col(name).alias(f"__{name}") for name in COLUMNS))

    def reading(self) -> AbstractContextManager[None]:
        """Raises KafkaUnavailable, KafkaRefused or RecordsDeleted."""
        return reading(self._cluster)

    def fetch(self, positions: Iterable[Position]) -> list[RawRecord]:
        """See `Records`. One request for each record."""
        return [
            RawRecord(
                one.topic,
                one.partition,
                offset,
                timestamp_ms * 1_000 if _FIRST_MS <= timestamp_ms < _END_MS else None,
                key,
                value,
                headers,
            )
            for one, offset in sorted(positions)
            for timestamp_ms, key, value, headers in [self._topics.record(one, offset)]
        ]

    def require(self, ranges: Ranges, count: int) -> None:  # noqa: ARG002 - see its first sentence
        """See `Records`. Their number says nothing: transactions and compaction leave out offsets."""
        _require_same(ranges, self._topics.ids({one.topic for one in ranges}))


class LandingRecords:
    """`Records` of a landing folder, which Spark's workers must see under the same path."""

    def __init__(self, folder: Path) -> None:
        if found := sorted(set(str(folder)) & set("{}[]*?\\")):
            raise ConfigurationError(
                f"The landing folder {folder} has {' '.join(found)} in it: Spark takes it for a pattern.",
                hint="Choose another one with BRANCHLAKE_LANDING.",
                reason="pattern_characters",
                subject=str(folder),
            )
        self._landing = Landing(folder)

    def frame(self, session: SparkSession, ranges: Ranges, *, tasks: int) -> DataFrame:
        """See `Records`. Raises LandingDamaged or OffsetsGone, LandingUnavailable or TopicReplaced.

        A file that goes meanwhile fails the batch.
        """
        _require_same(ranges, self._ids(ranges))
        held = [
            file
            for one, span in sorted(ranges.items())
            for file in self._landing.files_of(one.topic, one.partition, span.start, span.end)
        ]
        for file in held:
            if (rows := pq.read_metadata(file.path).num_rows) != file.rows:
                raise LandingDamaged(
                    f"{file.path} has {rows} records, and by its name {file.rows}.",
                    hint="Restore it from a backup.",
                    reason="record_count",
                    subject=str(file.path),
                )
        wanted = [
            (F.col("topic") == one.topic)
            & (F.col("partition") == one.partition)
            & F.col("offset").between(span.start, span.end - 1)
            for one, span in sorted(ranges.items())
        ]
        reader = session.read.schema(_LANDED).options(ignoreMissingFiles="false", ignoreCorruptFiles="false")
        frame = reader.parquet(*(f"file://{file.path.absolute()}" for file in held))
        frame = frame.where(any_of(wanted)).coalesce(tasks)
        return frame.select(*(F.col(name).alias(f"__{name}") for name in COLUMNS))

    def _ids(self, ranges: Ranges) -> dict[str, str]:
        """Ids by topic. Raises LandingUnavailable for a folder that has gone meanwhile."""
        try:
            return {one.topic: self._landing.topic_id(one.topic) for one in ranges}
        except (ConfigurationError, OSError) as error:
            raise LandingUnavailable(
                f"The landing folder of {in_words(ranges)} has gone while a batch read it: {error}",
                hint="Is it still mounted? Nothing of the batch is kept; the next one looks again.",
                reason="folder_gone",
                subject=in_words(ranges),
            ) from error

    def reading(self) -> AbstractContextManager[None]:
        """Nothing is told otherwise."""
        return nullcontext()

    def fetch(self, positions: Iterable[Position]) -> list[RawRecord]:
        """See `Records`. Reads the whole file of each record."""
        fetched = []
        for one, offset in sorted(positions):
            (file,) = self._landing.files_of(one.topic, one.partition, offset, offset + 1)
            rows = pq.read_table(file.path, partitioning=None)
            row = rows.filter(pc.equal(rows["offset"], offset))
            time_us = row["timestamp"].cast("int64")[0].as_py()
            inside = time_us is not None and _FIRST_MS <= time_us // 1_000 < _END_MS
            (told,) = row.drop_columns(["timestamp"]).to_pylist()
            headers = [(header["key"], header["value"]) for header in told["headers"] or ()]
            key, value = told["key"], told["value"]
            fetched.append(
                RawRecord(one.topic, one.partition, offset, time_us if inside else None, key, value, headers)
            )
        return fetched

    def require(self, ranges: Ranges, count: int) -> None:
        """Each offset is there. Raises LandingDamaged: of files at another place than theirs none is read."""
        _require_same(ranges, self._ids(ranges))
        if count != (wanted := records(ranges)):
            raise LandingDamaged(
                f"The files of {in_words(ranges)} have {count} of these {wanted} records: what they hold says"
                " another topic, partition or offset than their place.",
                hint="Put files and folders back to where their receiver wrote them.",
                reason="records_missing",
                subject=in_words(ranges),
            )


def _require_same(ranges: Ranges, ids: Mapping[str, str]) -> None:
    """Raise TopicReplaced: Spark's source and file names know a topic by its name alone."""
    replaced = sorted({one.topic for one in ranges if ids[one.topic] != topic_id(one.incarnation)})
    if replaced:
        raise TopicReplaced(
            f"Topic {', '.join(replaced)} was deleted and made again while a batch read it.",
            hint="Nothing of the batch is kept. The next one begins with what the rules of the ingestion say"
            " of a topic that was made again.",
            subject=", ".join(replaced),
        )


def _by_topic(ranges: Ranges, end: str) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for one, span in sorted(ranges.items()):
        found.setdefault(one.topic, {})[str(one.partition)] = getattr(span, end)
    return found
