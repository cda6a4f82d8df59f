"""Reads the records of a batch as a Spark frame, and finds records that make a batch fail.

A frame contains the records of exactly the planned offsets. Kafka's consumer groups are not used.

`find_unwritable_records` halves the offsets until one record is left. The function is pure except for the
passes, which its caller makes. To find one bad record among n, it takes about log2(n) + 3 passes, which read
about 2n records in total.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.errors import LandingUnavailable, TopicReplaced
from branchlake_dagster.ingest.kafka_cluster import KafkaCluster
from branchlake_dagster.ingest.kafka_topics import KafkaTopics, translate_spark_errors
from branchlake_dagster.ingest.offsets import (
    OffsetRange,
    Ranges,
    TopicPartition,
    count_offsets,
    format_ranges,
    topic_id,
)
from branchlake_dagster.ingest.spark_expressions import any_of
from branchlake_dagster.ingest.worker_writer import NO_TIME_US
from branchlake_dagster.receivers.landing import (
    LANDING_SCHEMA,
    Landing,
    LandingDamaged,
    LandingFile,
    requiring_whole_file,
)

RecordPosition = tuple[TopicPartition, int]
"""The position of one record: its partition and its offset."""
MAX_PASSES = 64
"""The maximum number of passes of one search. Offsets that were not reached wait for the next batches."""


@dataclass(frozen=True)
class Division:
    """The result of a search for unwritable records.

    `resolved` are the parts that the batch may take, in order: a pass over each part succeeds, or the part is
    one unwritable record. The search did not reach the offsets after them. `unwritable` maps each record that
    fails alone to its error.
    """

    resolved: Sequence[Ranges]
    unwritable: Mapping[RecordPosition, Exception] = field(default_factory=dict)


def find_unwritable_records(
    failing_ranges: Ranges, error_of: Callable[[Ranges], Exception | None], *, max_passes: int = MAX_PASSES
) -> Division:
    """Find the records that make a batch fail, in at most about `max_passes` passes.

    `failing_ranges` are the offsets of a batch that failed. `error_of` makes a pass over some of them and
    returns the error that their records caused, or None if the pass succeeds; an exception that it raises
    ends the search. A record is unwritable only if two passes over it alone fail, so that a temporary cause
    does not count.
    """
    search = _PassCounter(error_of, max_passes)
    resolved: list[Ranges] = []
    unwritable: dict[RecordPosition, Exception] = {}
    pending_parts = [(failing_ranges, True)]
    while pending_parts:
        part, fails = pending_parts.pop()
        if not fails:
            if search.is_exhausted:
                break
            if search.succeeds(part):
                resolved.append(part)
                continue
        if count_offsets(part) > 1:
            left, right = split_in_halves(part)
            if search.is_exhausted:
                break
            if search.succeeds(left):
                resolved.append(left)
                pending_parts.append((right, True))
            else:
                pending_parts += [(right, False), (left, True)]
            continue
        errors = [error for error in (search.run_pass(part), search.run_pass(part)) if error is not None]
        resolved.append(part)
        if len(errors) < _TRIES:
            continue
        unwritable[_single_record(part)] = errors[0]
        remaining_parts = [one for one, _ in reversed(pending_parts)]
        if remaining_parts and not search.is_exhausted and search.succeeds(join_ranges(remaining_parts)):
            return Division([*resolved, *remaining_parts], unwritable)
    return Division(resolved, unwritable)


_TRIES = 2


class _PassCounter:
    """Makes passes over parts of a batch and counts them."""

    def __init__(self, error_of: Callable[[Ranges], Exception | None], max_passes: int) -> None:
        self._error_of = error_of
        self._passes_left = max_passes

    @property
    def is_exhausted(self) -> bool:
        return self._passes_left <= 0

    def run_pass(self, part: Ranges) -> Exception | None:
        self._passes_left -= 1
        return self._error_of(part)

    def succeeds(self, part: Ranges) -> bool:
        return self.run_pass(part) is None


def split_in_halves(
    ranges: Ranges,
) -> tuple[dict[TopicPartition, OffsetRange], dict[TopicPartition, OffsetRange]]:
    """Split ranges into the first and the second half of their offsets, in order of partition and offset."""
    left: dict[TopicPartition, OffsetRange] = {}
    right: dict[TopicPartition, OffsetRange] = {}
    missing_records = count_offsets(ranges) // 2
    for partition, offset_range in sorted(ranges.items()):
        cut = offset_range.start + min(len(offset_range), missing_records)
        missing_records -= cut - offset_range.start
        if cut > offset_range.start:
            left[partition] = OffsetRange(offset_range.start, cut)
        if cut < offset_range.end:
            right[partition] = OffsetRange(cut, offset_range.end)
    return left, right


def join_ranges(parts: Iterable[Ranges]) -> dict[TopicPartition, OffsetRange]:
    """Join consecutive parts: each partition gets the range from its first start to its last end."""
    joined_ranges: dict[TopicPartition, OffsetRange] = {}
    for part in parts:
        for partition, offset_range in part.items():
            earlier_range = joined_ranges.get(partition, offset_range)
            joined_ranges[partition] = OffsetRange(earlier_range.start, offset_range.end)
    return joined_ranges


def exclude_records(ranges: Ranges, positions: Iterable[RecordPosition]) -> list[Ranges]:
    """Return the ranges without these records, as a list of ranges; [] if no offset remains.

    A list is needed because `Ranges` can have only one range of each partition.
    """
    ranges_by_partition = {partition: [offset_range] for partition, offset_range in ranges.items()}
    for partition, offset in sorted(positions):
        last_range = ranges_by_partition[partition].pop()
        cut_ranges = [OffsetRange(last_range.start, offset), OffsetRange(offset + 1, last_range.end)]
        ranges_by_partition[partition] += cut_ranges
    remaining = {
        partition: [offset_range for offset_range in partition_ranges if len(offset_range)]
        for partition, partition_ranges in ranges_by_partition.items()
    }
    depth = max(map(len, remaining.values()), default=0)
    return [
        {
            partition: partition_ranges[number]
            for partition, partition_ranges in remaining.items()
            if number < len(partition_ranges)
        }
        for number in range(depth)
    ]


def _single_record(part: Ranges) -> RecordPosition:
    ((partition, offset_range),) = part.items()
    return partition, offset_range.start


RECORD_COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")
"""The columns of a record in Spark's Kafka source. In a batch's frame their names begin with `__`."""

RECORD_SCHEMA = (
    "__topic string, __partition int, __offset bigint, __timestamp timestamp, __key binary, __value binary,"
    " __headers array<struct<key: string, value: binary>>"
)
"""The schema of a batch's frame in Spark's DDL."""
_FETCH_WAIT_MS = "5"
"""How long a broker delays its answer at the end of a partition. The planned records already exist, and
Spark's next request on the same connection waits for that answer. Kafka's default would cost half a second
for each partition: seventeen seconds for 64 partitions on two cores."""
_LANDING_DDL = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp,"
    " headers array<struct<key: string, value: binary>>"
)


_FIRST_MS, _END_MS = -62_135_596_800_000, 253_402_300_800_000
"""The years 1 to 9999, which are all that Python and PyIceberg support."""


_NS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}


def to_time_us(at: pa.TimestampScalar) -> int | None:
    """Return the time of a landed record in µs since 1970, or None for null.

    Receivers write microseconds. Other writers may have another unit.
    """
    return None if at.value is None else at.value * _NS[at.type.unit] // 1_000


def valid_time_us(time_us: int) -> int | None:
    """Return a record's time in µs since 1970; None if it has none, or one outside of the years 1 to 9999."""
    return time_us if _FIRST_MS <= time_us // 1_000 < _END_MS and time_us != NO_TIME_US else None


@dataclass(frozen=True)
class RawRecord:
    """One record as its source returns it.

    `timestamp_us` is in µs since 1970. None if the record has no time, or one outside of the years 1 to 9999.
    """

    topic: str
    partition: int
    offset: int
    timestamp_us: int | None
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()


MAX_ARROW_RECORDS = 2_500
"""The most records that Spark sends to a worker at once."""


@dataclass(frozen=True)
class LoadedRecords:
    """Records that Spark will read.

    The columns of `frame` are `RECORD_COLUMNS` with the prefix `__`. `most_bytes` estimates the largest size
    of `MAX_ARROW_RECORDS` successive records in bytes; None if it is not known.
    """

    frame: DataFrame
    most_bytes: int | None = None


class Records(Protocol):
    """The source of a batch's records."""

    def load_frame(self, session: SparkSession, ranges: Ranges, *, tasks: int) -> LoadedRecords:
        """Return the records of the ranges. Spark reads their frame in up to `tasks` tasks."""

    def translate_errors(self) -> AbstractContextManager[None]:
        """Return a context in which failures of the source are raised as branchlake errors."""

    def fetch(self, positions: Iterable[RecordPosition]) -> list[RawRecord]:
        """Read single records without Spark, for the dead letters of records that Spark cannot read.

        Raises KafkaUnavailable if a record of a topic in Kafka does not arrive. Raises OffsetsGone or
        LandingDamaged if a landing folder does not have a record.
        """

    def require_undamaged(self, ranges: Ranges) -> None:
        """Raise LandingDamaged if a file with records of the ranges is damaged. A failed pass calls it."""

    def ranges_before_damage(self, ranges: Ranges) -> Ranges:
        """Return the first part of the ranges that can be read, after a pass over them raised LandingDamaged.

        Returns {} if there is no damage. Raises LandingDamaged if a partition of the ranges begins with it.
        """

    def require_complete(self, ranges: Ranges, count: int) -> None:
        """Check, after the read, whether `count` records can be all records of the ranges.

        Raises TopicReplaced if a topic has been deleted and created again since the plan, and LandingDamaged
        if records of a landing folder are missing.
        """


class KafkaRecords:
    """The `Records` of a Kafka cluster, read by Spark's source."""

    def __init__(self, cluster: KafkaCluster, topics: KafkaTopics) -> None:
        self._cluster = cluster
        self._topics = topics

    def load_frame(self, session: SparkSession, ranges: Ranges, *, tasks: int) -> LoadedRecords:
        """Return the records of the ranges; their size is not known.

        Spark reads the records later, in up to `tasks` tasks. If a record is deleted before that, the batch
        fails.
        """
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
        return LoadedRecords(_with_prefix(frame))

    def translate_errors(self) -> AbstractContextManager[None]:
        """Return a context that turns Spark's failures to read Kafka into branchlake errors.

        These are KafkaUnavailable, KafkaRefused and RecordsDeleted.
        """
        return translate_spark_errors(self._cluster)

    def fetch(self, positions: Iterable[RecordPosition]) -> list[RawRecord]:
        """Read single records with one request each, in the order of their positions.

        Raises KafkaUnavailable if a record does not arrive within a minute.
        """
        return [
            RawRecord(
                partition.topic,
                partition.partition,
                offset,
                valid_time_us(timestamp_ms * 1_000),
                key,
                value,
                headers,
            )
            for partition, offset in sorted(positions)
            for timestamp_ms, key, value, headers in [self._topics.fetch_record(partition, offset)]
        ]

    def require_undamaged(self, ranges: Ranges) -> None:
        """Do nothing: Kafka has no files that could be damaged."""

    def ranges_before_damage(self, ranges: Ranges) -> Ranges:  # noqa: ARG002 - see the docstring
        """Return {}: Kafka has no files that could be damaged."""
        return {}

    def require_complete(self, ranges: Ranges, count: int) -> None:  # noqa: ARG002 - see the docstring
        """Raise TopicReplaced if a topic has been deleted and created again since the plan.

        The count is not checked, because transactions and compaction leave gaps in the offsets.
        """
        _require_same_topics(ranges, self._topics.topic_ids({partition.topic for partition in ranges}))


@contextmanager
def reading_landing_file(file: LandingFile) -> Iterator[None]:
    """Raise LandingDamaged if the file turns out to be empty, cut short or of another kind.

    Raises LandingUnavailable (reason `unreadable`) if the file has disappeared or the operating system cannot
    read it.
    """
    try:
        with requiring_whole_file(file):
            yield
    except OSError as error:
        raise LandingUnavailable(
            f"{file.path} cannot be read: {error}.",
            hint="Check the mount and the permissions of the folder, and whether the file or what it links to"
            " still exists. The next batch tries again.",
            reason="unreadable",
            subject=str(file.path),
        ) from error


_NEEDED_COLUMNS = ("topic", "partition", "offset", "value")
"""Other columns of a landing file may be missing. Spark reads them as null."""


def _check_offsets(file: LandingFile) -> int | None:
    """Raise LandingDamaged if the file does not have the offsets of its name in order. Return its size.

    The size is that of the columns without compression, in bytes. It is None if the footer does not show it,
    because repeated values are in a dictionary, as other writers than receivers store them.

    The number of records does not suffice: in a batch with several files, a copy of one file under the name
    of another one has as many records. Reads the footer and the column of offsets. Raises the errors of
    `reading_landing_file` too.
    """
    with reading_landing_file(file), _open_file(file) as parquet:
        missing_columns = [name for name in _NEEDED_COLUMNS if name not in parquet.schema_arrow.names]
        if missing_columns:
            raise LookupError(f"it has no column {', '.join(missing_columns)}")
        metadata = parquet.metadata
        rows = metadata.num_rows
        offsets = (
            parquet.read(columns=["offset"], use_threads=False)["offset"].to_numpy()
            if rows == file.rows
            else None
        )
    if offsets is None:
        raise LandingDamaged(
            f"{file.path} has {rows} records, but its name gives {file.rows}.",
            hint="Restore the file from a backup.",
            reason="record_count",
            subject=str(file.path),
        )
    if not np.array_equal(offsets, np.arange(file.first, file.last + 1)):
        raise LandingDamaged(
            f"{file.path} does not have the offsets {file.first} to {file.last} of its name in order.",
            hint="Restore the file from a backup. It may be a copy of another file.",
            reason="offsets_differ",
            subject=str(file.path),
        )
    row_groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    has_dictionary = any(
        not _DICTIONARY_ENCODINGS.isdisjoint(chunk.encodings)
        for group in row_groups
        for chunk in map(group.column, range(group.num_columns))
        if chunk.path_in_schema == "value"
    )
    return None if has_dictionary else sum(group.total_byte_size for group in row_groups)


_DICTIONARY_ENCODINGS = frozenset({"PLAIN_DICTIONARY", "RLE_DICTIONARY"})


def estimate_most_bytes(files: Iterable[tuple[int, int | None]]) -> int | None:
    """Return the most bytes that `MAX_ARROW_RECORDS` successive records can have; None if it is not known.

    `files` has the number of records of each file, and its bytes if they are known. Spark reads the records
    of a file in order, but the files in any order. So such records are some whole files with fewer records,
    and parts of two more files.
    """
    total_bytes = largest_file = 0
    largest_mean = 0.0
    for rows, size in files:
        if size is None:
            return None
        total_bytes += size
        largest_file = max(largest_file, size)
        if 0 < rows < MAX_ARROW_RECORDS:
            largest_mean = max(largest_mean, size / rows)
    return min(total_bytes, 2 * largest_file + math.ceil(MAX_ARROW_RECORDS * largest_mean))


def _read_whole_file(file: LandingFile) -> None:
    """Read the columns of the records, batch by batch. Raises LandingDamaged or LandingUnavailable."""
    _check_offsets(file)
    with reading_landing_file(file), _open_file(file) as parquet:
        names = [name for name in LANDING_SCHEMA.names if name in parquet.schema_arrow.names]
        for _ in parquet.iter_batches(columns=names):
            pass


def _open_file(file: LandingFile) -> pq.ParquetFile:
    # Reading ahead costs more than it saves in small files.
    return pq.ParquetFile(file.path, pre_buffer=False, page_checksum_verification=True)


class LandingRecords:
    """The `Records` of a landing folder. Spark's workers must see the folder under the same path."""

    def __init__(self, folder: Path) -> None:
        if special_characters := sorted(set(str(folder)) & set("{}[]*?\\")):
            raise ConfigurationError(
                f"The landing folder {folder} contains {' '.join(special_characters)}, which Spark takes"
                " for a pattern.",
                hint="Set BRANCHLAKE_LANDING to a folder without these characters.",
                reason="pattern_characters",
                subject=str(folder),
            )
        self._landing = Landing(folder)

    def load_frame(self, session: SparkSession, ranges: Ranges, *, tasks: int) -> LoadedRecords:
        """Return the records of the ranges. Their size is estimated from the footers of their files.

        Spark reads the files later; if one is removed before that, the batch fails. Raises LandingDamaged,
        OffsetsGone, LandingUnavailable or TopicReplaced.
        """
        _require_same_topics(ranges, self._topic_ids(ranges))
        files = [
            file
            for partition, offset_range in sorted(ranges.items())
            for file in self._files_of_range(partition, offset_range)
        ]
        most_bytes = estimate_most_bytes([(file.rows, _check_offsets(file)) for file in files])
        conditions = [
            (F.col("topic") == partition.topic)
            & (F.col("partition") == partition.partition)
            & F.col("offset").between(offset_range.start, offset_range.end - 1)
            for partition, offset_range in sorted(ranges.items())
        ]
        reader = session.read.schema(_LANDING_DDL).options(
            ignoreMissingFiles="false",
            ignoreCorruptFiles="false",
            **{"parquet.page.verify-checksum.enabled": "true"},
        )
        frame = reader.parquet(*(f"file://{file.path.absolute()}" for file in files))
        frame = frame.where(any_of(conditions)).coalesce(tasks)
        return LoadedRecords(_with_prefix(frame), most_bytes)

    def _files_of_range(self, partition: TopicPartition, offset_range: OffsetRange) -> list[LandingFile]:
        return self._landing.files_with_offsets(
            partition.topic, partition.partition, offset_range.start, offset_range.end
        )

    def require_undamaged(self, ranges: Ranges) -> None:
        """Read the files with records of the ranges without Spark. Raise LandingDamaged if one is damaged.

        Spark's error does not show whether a file or a record is the cause. Raises the errors of
        `load_frame` too.
        """
        for partition, offset_range in sorted(ranges.items()):
            for file in self._files_of_range(partition, offset_range):
                _read_whole_file(file)

    def ranges_before_damage(self, ranges: Ranges) -> Ranges:
        """Return the ranges up to the first damaged file of each partition. Reads the files.

        Returns {} if no file is damaged. Raises LandingDamaged for the first file of a partition, and
        LandingUnavailable, OffsetsGone or LandingDamaged if the files cannot be listed or read.
        """
        readable: dict[TopicPartition, OffsetRange] = {}
        for partition, offset_range in ranges.items():
            end = offset_range.end
            for file in self._files_of_range(partition, offset_range):
                try:
                    _read_whole_file(file)
                except LandingDamaged:
                    if file.first <= offset_range.start:
                        raise
                    end = file.first
                    break
            readable[partition] = OffsetRange(offset_range.start, end)
        return {} if readable == ranges else readable

    def _topic_ids(self, ranges: Ranges) -> dict[str, str]:
        """Return the ids of the topics in the folder, by topic.

        Raises LandingUnavailable if the folder has disappeared meanwhile.
        """
        try:
            return {partition.topic: self._landing.topic_id(partition.topic) for partition in ranges}
        except (ConfigurationError, OSError) as error:
            raise LandingUnavailable(
                f"The landing folder of {format_ranges(ranges)} disappeared while a batch read it: {error}",
                hint="Check that the folder is mounted. The batch was discarded; the next batch tries again.",
                reason="folder_gone",
                subject=format_ranges(ranges),
            ) from error

    def translate_errors(self) -> AbstractContextManager[None]:
        """Return a context that translates no errors: Spark's failures to read files pass through."""
        return nullcontext()

    def fetch(self, positions: Iterable[RecordPosition]) -> list[RawRecord]:
        """Read single records, in the order of their positions. Reads the whole file of each record.

        Raises OffsetsGone or LandingDamaged if a file is missing, and LandingDamaged if it cannot be read.
        """
        fetched = []
        for partition, offset in sorted(positions):
            (file,) = self._landing.files_with_offsets(
                partition.topic, partition.partition, offset, offset + 1
            )
            with reading_landing_file(file):
                rows = pq.read_table(file.path, partitioning=None, page_checksum_verification=True)
                row = rows.filter(pc.equal(rows["offset"], offset))
                has_time = "timestamp" in row.column_names
                time_us = to_time_us(row["timestamp"][0]) if has_time else None
                kept_columns = [name for name in ("key", "value", "headers") if name in row.column_names]
                (values,) = row.select(kept_columns).to_pylist()
            headers = [(header["key"], header["value"]) for header in values.get("headers") or ()]
            key, value = values.get("key"), values["value"]
            fetched.append(
                RawRecord(
                    partition.topic,
                    partition.partition,
                    offset,
                    None if time_us is None else valid_time_us(time_us),
                    key,
                    value,
                    headers,
                )
            )
        return fetched

    def require_complete(self, ranges: Ranges, count: int) -> None:
        """Raise LandingDamaged if `count` is not the number of offsets: landing files have no gaps.

        Records are missing if their topic, partition or offset differs from the location of their file: the
        read ignores them. Raises TopicReplaced or LandingUnavailable too.
        """
        _require_same_topics(ranges, self._topic_ids(ranges))
        if count != (expected_count := count_offsets(ranges)):
            raise LandingDamaged(
                f"The files of {format_ranges(ranges)} have {count} of the {expected_count} expected"
                " records. The others give a topic, partition or offset that differs from the location of"
                " their file.",
                hint="Move files and folders back to where their receiver wrote them.",
                reason="records_missing",
                subject=format_ranges(ranges),
            )


def _with_prefix(frame: DataFrame) -> DataFrame:
    return frame.select(*(F.col(name).alias(f"__{name}") for name in RECORD_COLUMNS))


def _require_same_topics(ranges: Ranges, ids: Mapping[str, str]) -> None:
    """Raise TopicReplaced if a topic of `ranges` has another id now: Spark and file paths have only its name.

    `ids` has the present id of each of these topics, by name.
    """
    replaced_topics = sorted(
        {partition.topic for partition in ranges if ids[partition.topic] != topic_id(partition.incarnation)}
    )
    if replaced_topics:
        raise TopicReplaced(
            f"Topic {', '.join(replaced_topics)} was deleted and created again while a batch read it.",
            hint="The batch was discarded. The next batch follows the ingestion's on_recreated rule.",
            subject=", ".join(replaced_topics),
        )


def _offsets_by_topic(ranges: Ranges, end: str) -> dict[str, dict[str, int]]:
    offsets: dict[str, dict[str, int]] = {}
    for partition, offset_range in sorted(ranges.items()):
        offsets.setdefault(partition.topic, {})[str(partition.partition)] = getattr(offset_range, end)
    return offsets
