"""Builds the reports of an ingestion to Dagster: metadata and check results of batches, and observations.

The observations belong to external assets for topics and receivers. They contain the lag and the oldest
record. The functions for the reports of batches are pure.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import dagster as dg
from dagster import MetadataValue
from pyiceberg.manifest import DataFile

from branchlake_dagster.ingest.batch_context import PlannedBatch
from branchlake_dagster.ingest.declaration import ExpandedIngest, Ingest, IngestTable
from branchlake_dagster.ingest.event_days import count_rows_by_day, format_days
from branchlake_dagster.ingest.ingest_batch import BatchResult
from branchlake_dagster.ingest.kafka_topics import Topics
from branchlake_dagster.ingest.offsets import (
    OffsetRange,
    Ranges,
    TableProgress,
    Topic,
    TopicPartition,
    format_ranges,
)
from branchlake_dagster.receivers.metrics import MonitorReport, TopicCounts, sum_by_topic
from branchlake_dagster.stored_names import AssetMetadata, EventMetadata, LakeProperty
from branchlake_dagster.wording import format_count

CONVERTED_CHECK = "converted"
"""The name of the check on each table: all of its records became rows."""
TOLERATED_CHECK = "tolerated"
"""The name of the check on the dead letters: their share is within the tolerance."""


def build_ingest_check_specs(ingest: Ingest) -> list[dg.AssetCheckSpec]:
    """Return the check specifications of the declared tables and of the dead letters.

    Families have no check specification, because their tables have no asset definitions.
    """
    scope = {AssetMetadata.CHECK_SCOPE: "rows"}
    blocks = "blocks the batch" if ingest.on_contract == "block" else "warns"
    tables = [
        dg.AssetCheckSpec(
            CONVERTED_CHECK,
            asset=table.asset,
            description="Every record for this table became a row. Other records are dead letters; a broken"
            f" contract {blocks}.",
            metadata=scope,
        )
        for table in ingest.tables
        if not table.is_family
    ]
    share = f"at most {ingest.tolerance:.2%} of a batch"
    return [
        *tables,
        dg.AssetCheckSpec(
            TOLERATED_CHECK,
            asset=ingest.dead_letters_asset,
            description=f"Dead letters are {share}.",
            metadata=scope,
        ),
    ]


def iter_check_results(
    ingest: ExpandedIngest,
    counts: Mapping[str, int],
    declarations: Mapping[str, IngestTable],
    *,
    is_reprocessing: bool = False,
) -> Iterator[dg.AssetCheckResult]:
    """Yield the check results of a batch: one for each table, then that of the dead letters.

    `counts` are those of the batch's `ScanResult`. `declarations` are the tables to report, by dotted name.
    With `is_reprocessing` the records are reprocessed dead letters: the result of the dead letters always
    passes, because `tolerance` does not apply to records that fail again. A broken contract blocks them as it
    blocks new records.
    """
    broken_contracts = counts.get("dead/contract", 0) if ingest.on_contract == "block" else 0
    for name, table in declarations.items():
        dead_letter_count = counts.get(f"dead_of/{name}", 0)
        blocks = bool(broken_contracts and dead_letter_count)
        yield dg.AssetCheckResult(
            asset_key=table.asset,
            check_name=CONVERTED_CHECK,
            passed=not dead_letter_count,
            severity=dg.AssetCheckSeverity.ERROR if blocks else dg.AssetCheckSeverity.WARN,
            description=f"{format_count(dead_letter_count, 'record')} for this table could not be converted."
            if dead_letter_count
            else None,
            metadata={"failing_rows": dead_letter_count},
        )
    dead_letter_count, record_count = counts.get("dead", 0), counts.get("records", 0)
    share = dead_letter_count / record_count if record_count else 0.0
    kinds = {
        name.removeprefix("dead/"): count
        for name, count in sorted(counts.items())
        if name.startswith("dead/")
    }
    reprocessing_message = (
        f"{format_count(record_count, 'dead letter')} reprocessed; {dead_letter_count} failed again."
    )
    yield dg.AssetCheckResult(
        asset_key=ingest.dead_letters_asset,
        check_name=TOLERATED_CHECK,
        passed=is_reprocessing or share <= ingest.tolerance,
        severity=dg.AssetCheckSeverity.ERROR,
        description=reprocessing_message
        if is_reprocessing
        else _format_dead_share(dead_letter_count, record_count, share, ingest.tolerance),
        metadata={
            "failing_rows": dead_letter_count,
            **{f"dead_letters/{kind}": count for kind, count in kinds.items()},
        },
    )


def to_check_evaluation(result: dg.AssetCheckResult) -> dg.AssetCheckEvaluation:
    """Convert a check result to an evaluation, which can be logged as an event.

    This is needed for an asset without a definition, and for an asset that a plain op writes.
    """
    assert result.asset_key is not None  # noqa: S101 - the result names its asset and check
    return dg.AssetCheckEvaluation(
        asset_key=result.asset_key,
        check_name=result.check_name or CONVERTED_CHECK,
        passed=bool(result.passed),
        severity=result.severity,
        description=result.description,
        metadata=result.metadata,
    )


def _format_dead_share(
    dead_letter_count: int, record_count: int, share: float, tolerance: float
) -> str | None:
    if not dead_letter_count:
        return None
    dead_letters = format_count(dead_letter_count, "dead letter")
    records = format_count(record_count, "record")
    return f"{dead_letters} among {records} ({share:.2%}); {tolerance:.2%} is tolerated."


def find_block_reason(result: BatchResult) -> str | None:
    """Return why a batch must not be published; None if it may be.

    The text has the descriptions of the batch's failed checks of severity ERROR, separated by semicolons.
    """
    failed = [
        one
        for one in iter_check_results(result.ingest, result.scan_result.counts, result.targets.declarations)
        if not one.passed and one.severity is dg.AssetCheckSeverity.ERROR
    ]
    return "; ".join((one.description or one.check_name or "").rstrip(".") for one in failed) or None


def combine_results(results: Sequence[BatchResult]) -> BatchResult:
    """Combine consecutive batches to one result: the last one, with ranges, counts, files and notes of all.

    `results` must have at least one batch.
    """
    last_result = results[-1]
    counts: Counter[str] = Counter()
    files: dict[int, list[DataFile]] = {}
    ranges: dict[TopicPartition, OffsetRange] = {}
    for result in results:
        counts += result.scan_result.counts
        for number, written_files in result.scan_result.files.items():
            files.setdefault(number, []).extend(written_files)
        for partition, offset_range in result.plan.ranges.items():
            merged_range = ranges.get(partition, offset_range)
            ranges[partition] = OffsetRange(
                min(merged_range.start, offset_range.start), max(merged_range.end, offset_range.end)
            )
    notes = tuple(dict.fromkeys(note for one in results for note in one.notes))
    plan, scan_result = (
        replace(last_result.plan, ranges=ranges),
        replace(last_result.scan_result, counts=counts, files=files),
    )
    return replace(last_result, plan=plan, scan_result=scan_result, notes=notes)


def batch_table_metadata(result: BatchResult, number: int) -> dict[str, Any]:
    """Return Dagster's metadata of a batch's materialization of one table.

    `number` is the table's index in `result.targets`.
    """
    target = result.targets[number]
    rows = result.count_rows(number)
    metadata: dict[str, Any] = {
        EventMetadata.ROWS_OF_BATCH: MetadataValue.int(rows),
        EventMetadata.COMMIT_ID: MetadataValue.text(result.commit_id),
        EventMetadata.TABLE: MetadataValue.text(target.name),
    }
    if number < len(result.targets.tables) and (files := result.scan_result.files.get(number)):
        table = target.table.metadata
        days = count_rows_by_day(files, table, spec_id=table.default_spec_id)
        if days.rows:
            metadata[EventMetadata.DAYS] = MetadataValue.text(format_days(days))
    if number == result.targets.kept_records_number:
        metadata[EventMetadata.EXPIRED_RECORDS] = MetadataValue.int(result.expired_record_count)
    return {**metadata, **batch_metadata(result)}


def batch_metadata(result: BatchResult) -> dict[str, Any]:
    """Return the materialization metadata of a batch, which is the same for each of its tables."""
    metadata: dict[str, Any] = {
        EventMetadata.OFFSETS: offsets_table(result.plan.ranges),
        EventMetadata.LAG: MetadataValue.int(result.plan.lag),
        EventMetadata.RECORDS: MetadataValue.int(result.record_count),
        EventMetadata.DEAD_LETTERS: MetadataValue.int(result.dead_letter_count),
    }
    if result.progress.valid_through_ms is not None:
        metadata[EventMetadata.VALID_THROUGH] = MetadataValue.timestamp(
            to_utc_datetime(result.progress.valid_through_ms)
        )
    if result.notes:
        metadata[EventMetadata.NOTES] = MetadataValue.md("\n".join(f"- {note}" for note in result.notes))
    return metadata


def offsets_table(ranges: Ranges) -> dg.TableMetadataValue | dg.TextMetadataValue:
    """Return metadata with the first and last offset of each range: a table, or the text `none` if empty."""
    records = [
        dg.TableRecord(
            {"topic": one.topic, "partition": one.partition, "first": span.start, "last": span.end - 1}
        )
        for one, span in sorted(ranges.items())
    ]
    return MetadataValue.table(records) if records else MetadataValue.text("none")


def format_batch_summary(result: BatchResult) -> str:
    """Return one line for the run's log: the ranges, the numbers of records and dead letters, and the lag.

    The number of removed kept records follows, if there are any.
    """
    records = format_count(result.record_count, "record")
    dead = f", {format_count(result.dead_letter_count, 'dead letter')}" if result.dead_letter_count else ""
    expired = (
        f" {format_count(result.expired_record_count, 'kept record')} removed because of their age."
        if result.expired_record_count
        else ""
    )
    return f"{format_ranges(result.plan.ranges)}: {records}{dead}, lag {result.plan.lag}.{expired}"


def to_utc_datetime(ms: int) -> datetime:
    """Convert milliseconds since 1970 to a datetime in UTC."""
    return datetime.fromtimestamp(ms / 1000, UTC)


def receiver_key(monitor: str) -> dg.AssetKey:
    """Return the asset key of a receiver process by the address of its monitor.

    The monitor `http://host:9464` gives the key `receivers/host:9464`.
    """
    return dg.AssetKey(["receivers", urlsplit(monitor).netloc or monitor])


def receiver_spec(monitor: str) -> dg.AssetSpec:
    """Build the specification of the external asset of a receiver process.

    `monitor` is the address of its monitor, as for `receiver_key`.
    """
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

    A receiver that did not answer may belong to these topics, because its topics are unknown.
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
    """Return the asset key of a topic: its source (`kafka` or `landing`), then its name.

    The name is one part of the key even if it contains dots.
    """
    return dg.AssetKey([ingest.source, topic])


def topic_spec(ingest: Ingest, topic: str) -> dg.AssetSpec:
    """Build the specification of the external asset of a topic, in Kafka or in the landing folder.

    `ingest` is an ingestion that reads the topic; its source decides which of the two it is.
    """
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

    `monitors` are the reports of the receivers. A receiver that did not answer has an observation too,
    because its topics are unknown. Raises the errors of `topics`.
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
            **(
                _oldest_metadata(topics.earliest_time(waiting), clock())
                if waiting
                else {EventMetadata.OLDEST_WAITING_S: dg.MetadataValue.float(0.0)}
            ),
            **_valid_through_metadata(ingest, planned_batch, clock()),
            **_received_metadata(counts.get(name), silent),
        }
        topic_observations.append(dg.AssetObservation(topic_key(ingest, name), metadata=metadata))
    return [*topic_observations, *receiver_observations(monitors, ingest.topics)]


def build_offline_observations(
    ingest: Ingest, monitors: Sequence[MonitorReport]
) -> list[dg.AssetObservation]:
    """Build observations from the receivers' reports alone, for the time while the brokers are unreachable.

    A topic without any report is left out.
    """
    counts, silent = sum_by_topic(monitors), [report.address for report in monitors if report.silent]
    metadata_by_topic = {name: _received_metadata(counts.get(name), silent) for name in sorted(ingest.topics)}
    topic_observations = [
        dg.AssetObservation(topic_key(ingest, name), metadata=metadata)
        for name, metadata in metadata_by_topic.items()
        if metadata
    ]
    return [*topic_observations, *receiver_observations(monitors, ingest.topics)]


def _waiting_offsets(planned_batch: PlannedBatch, topic: Topic) -> dict[TopicPartition, int]:
    """Return the first waiting offset of each partition of the topic, without partitions that have none.

    A record waits if it is in the topic and the tables do not have it, by the progress of the planned batch.
    """
    next_offsets = {
        partition: planned_batch.progress.position.get(partition, 0) for partition in topic.partitions()
    }
    starts = {partition: max(at, topic.begins[partition.partition]) for partition, at in next_offsets.items()}
    return {partition: at for partition, at in starts.items() if at < topic.ends[partition.partition]}


def _oldest_metadata(at: datetime | None, now: float) -> Mapping[str, Any]:
    """Build the metadata of the oldest waiting record: its time `at`, and its age at `now`, in seconds.

    Empty if `at` is None: no waiting record has a valid time. `now` is in seconds since 1970.
    """
    if at is None:
        return {}
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
