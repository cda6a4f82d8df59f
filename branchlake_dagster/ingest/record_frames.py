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
from branchlake_dagster.ingest.division import RecordPosition
from branchlake_dagster.ingest.errors import LandingUnavailable, TopicReplaced
from branchlake_dagster.ingest.kafka_cluster import KafkaCluster
from branchlake_dagster.ingest.kafka_topics import KafkaTopics, translate_spark_errors
from branchlake_dagster.ingest.offsets import Ranges, count_offsets, format_ranges, topic_id
from branchlake_dagster.ingest.spark_expressions import any_of
from branchlake_dagster.receivers.landing import Landing, LandingDamaged

RECORD_COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")
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
_LANDING_DDL = (
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

    def load_frame(self, session: SparkSession, ranges: Ranges, *, tasks: int) -> DataFrame:
        """The records of the ranges, with the columns of `RECORD_COLUMNS` behind two underscores."""

    def translate_errors(self) -> AbstractContextManager[None]:
        """Around what reads them: its failures as errors of ours, where they are the source's."""

    def fetch(self, positions: Iterable[RecordPosition]) -> list[RawRecord]:
        """Read single records without Spark, for dead letters of what Spark cannot read.

        Raises KafkaUnavailable or LandingUnavailable where one of them does not come.
        """

    def require_complete(self, ranges: Ranges, count: int) -> None:
        """Look whether so many records may be those of the ranges, after they were read.

        Raises TopicReplaced where a topic is not the one any more whose ranges they are.
        """


class KafkaRecords:
    """`Records` of a cluster, read by Spark's source."""

    def __init__(self, cluster: KafkaCluster, topics: KafkaTopics) -> None:
        self._cluster = cluster
        self._topics = topics

    def load_frame(self, session: SparkSession, ranges: Ranges, *, tasks: int) -> DataFrame:
        """See `Records`. A record that is gone meanwhile fails the batch."""
        starts, ends = _offsets_by_topic(ranges, "start"), _offsets_by_topic(ranges, "end")
        options = {
            **self._cluster.spark_options(),
            "assign": json.dumps(
                {topic: [int(number) for number in parts] for topic, parts in starts.items()}
            ),
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
        return frame.select(*(F.col(name).alias(f"__{name}") for name in RECORD_COLUMNS))

    def translate_errors(self) -> AbstractContextManager[None]:
        """Raises KafkaUnavailable, KafkaRefused or RecordsDeleted."""
        return translate_spark_errors(self._cluster)

    def fetch(self, positions: Iterable[RecordPosition]) -> list[RawRecord]:
        """See `Records`. One request for each record."""
        return [
            RawRecord(
                partition.topic,
                partition.partition,
                offset,
                timestamp_ms * 1_000 if _FIRST_MS <= timestamp_ms < _END_MS else None,
                key,
                value,
                headers,
            )
            for partition, offset in sorted(positions)
            for timestamp_ms, key, value, headers in [self._topics.fetch_record(partition, offset)]
        ]

    def require_complete(self, ranges: Ranges, count: int) -> None:  # noqa: ARG002 - see its first sentence
        """See `Records`. Their number says nothing: transactions and compaction leave out offsets."""
        _require_same_topics(ranges, self._topics.topic_ids({partition.topic for partition in ranges}))


class LandingRecords:
    """`Records` of a landing folder, which Spark's workers must see under the same path."""

    def __init__(self, folder: Path) -> None:
        if special_characters := sorted(set(str(folder)) & set("{}[]*?\\")):
            raise ConfigurationError(
                f"The landing folder {folder} has {' '.join(special_characters)} in it: Spark takes it for a"
                " pattern.",
                hint="Choose another one with BRANCHLAKE_LANDING.",
                reason="pattern_characters",
                subject=str(folder),
            )
        self._landing = Landing(folder)

    def load_frame(self, session: SparkSession, ranges: Ranges, *, tasks: int) -> DataFrame:
        """See `Records`. Raises LandingDamaged or OffsetsGone, LandingUnavailable or TopicReplaced.

        A file that goes meanwhile fails the batch.
        """
        _require_same_topics(ranges, self._topic_ids(ranges))
        files = [
            file
            for partition, offset_range in sorted(ranges.items())
            for file in self._landing.files_with_offsets(
                partition.topic, partition.partition, offset_range.start, offset_range.end
            )
        ]
        for file in files:
            if (rows := pq.read_metadata(file.path).num_rows) != file.rows:
                raise LandingDamaged(
                    f"{file.path} has {rows} records, and by its name {file.rows}.",
                    hint="Restore it from a backup.",
                    reason="record_count",
                    subject=str(file.path),
                )
        conditions = [
            (F.col("topic") == partition.topic)
            & (F.col("partition") == partition.partition)
            & F.col("offset").between(offset_range.start, offset_range.end - 1)
            for partition, offset_range in sorted(ranges.items())
        ]
        reader = session.read.schema(_LANDING_DDL).options(
            ignoreMissingFiles="false", ignoreCorruptFiles="false"
        )
        frame = reader.parquet(*(f"file://{file.path.absolute()}" for file in files))
        frame = frame.where(any_of(conditions)).coalesce(tasks)
        return frame.select(*(F.col(name).alias(f"__{name}") for name in RECORD_COLUMNS))

    def _topic_ids(self, ranges: Ranges) -> dict[str, str]:
        """Ids by topic. Raises LandingUnavailable for a folder that has gone meanwhile."""
        try:
            return {partition.topic: self._landing.topic_id(partition.topic) for partition in ranges}
        except (ConfigurationError, OSError) as error:
            raise LandingUnavailable(
                f"The landing folder of {format_ranges(ranges)} has gone while a batch read it: {error}",
                hint="Is it still mounted? Nothing of the batch is kept; the next one looks again.",
                reason="folder_gone",
                subject=format_ranges(ranges),
            ) from error

    def translate_errors(self) -> AbstractContextManager[None]:
        """Nothing is told otherwise."""
        return nullcontext()

    def fetch(self, positions: Iterable[RecordPosition]) -> list[RawRecord]:
        """See `Records`. Reads the whole file of each record."""
        fetched = []
        for partition, offset in sorted(positions):
            (file,) = self._landing.files_with_offsets(
                partition.topic, partition.partition, offset, offset + 1
            )
            rows = pq.read_table(file.path, partitioning=None)
            row = rows.filter(pc.equal(rows["offset"], offset))
            time_us = row["timestamp"].cast("int64")[0].as_py()
            is_valid_time = time_us is not None and _FIRST_MS <= time_us // 1_000 < _END_MS
            (values,) = row.drop_columns(["timestamp"]).to_pylist()
            headers = [(header["key"], header["value"]) for header in values["headers"] or ()]
            key, value = values["key"], values["value"]
            fetched.append(
                RawRecord(
                    partition.topic,
                    partition.partition,
                    offset,
                    time_us if is_valid_time else None,
                    key,
                    value,
                    headers,
                )
            )
        return fetched

    def require_complete(self, ranges: Ranges, count: int) -> None:
        """Each offset is there. Raises LandingDamaged: of files at another place than theirs none is read."""
        _require_same_topics(ranges, self._topic_ids(ranges))
        if count != (expected_count := count_offsets(ranges)):
            raise LandingDamaged(
                f"The files of {format_ranges(ranges)} have {count} of these {expected_count} records: what"
                " they hold says"
                " another topic, partition or offset than their place.",
                hint="Put files and folders back to where their receiver wrote them.",
                reason="records_missing",
                subject=format_ranges(ranges),
            )


def _require_same_topics(ranges: Ranges, ids: Mapping[str, str]) -> None:
    """Raise TopicReplaced: Spark's source and file names know a topic by its name alone."""
    replaced_topics = sorted(
        {partition.topic for partition in ranges if ids[partition.topic] != topic_id(partition.incarnation)}
    )
    if replaced_topics:
        raise TopicReplaced(
            f"Topic {', '.join(replaced_topics)} was deleted and made again while a batch read it.",
            hint="Nothing of the batch is kept. The next one begins with what the rules of the ingestion say"
            " of a topic that was made again.",
            subject=", ".join(replaced_topics),
        )


def _offsets_by_topic(ranges: Ranges, end: str) -> dict[str, dict[str, int]]:
    offsets: dict[str, dict[str, int]] = {}
    for partition, offset_range in sorted(ranges.items()):
        offsets.setdefault(partition.topic, {})[str(partition.partition)] = getattr(offset_range, end)
    return offsets
