"""Reprocessing of kept records: the ingestion's present decoder reads the bytes of an interval again.

The records are processed in slices of whole batches, in the order of their receipt. Each slice is decoded to
staging tables on the run's branch, then compared with the rows that the tables have of the same records. Only
rows that differ are written, so a repetition changes nothing, and consumers get only real changes.

`raw_slice` describes how rows and dead letters are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from pyspark.sql import Column as Expression
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.batch_commit import (
    EPOCH,
    RECEIVED_AT,
    BatchTableChange,
    commit_tables,
)
from branchlake_dagster.ingest.batch_context import BatchContext, IngestionTables, load_ingestion_tables
from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.ingest.errors import RowsNotIdentified
from branchlake_dagster.ingest.offsets import Offsets
from branchlake_dagster.ingest.progress import reprocessing_runs
from branchlake_dagster.ingest.raw_slice import (
    RawReprocessingResult,
    RawSlice,
    RawSliceReprocessing,
    position_columns,
)
from branchlake_dagster.ingest.reprocessing import require_reprocessable_tables
from branchlake_dagster.ingest.spark_expressions import any_of
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.spark.session import quote_spark_name, quote_spark_path
from branchlake_dagster.wording import format_count


@dataclass(frozen=True)
class RawInterval:
    """An interval of the times at which records were received: from `since` on and before `until`."""

    since: datetime
    until: datetime

    def __post_init__(self) -> None:
        if self.since >= self.until:
            raise ConfigurationError(
                f"The interval from {self.since.isoformat()} until {self.until.isoformat()} is empty.",
                hint="Give --since before --until, both in UTC.",
                reason="interval_empty",
            )

    def to_tag(self) -> str:
        """Return the interval as JSON, the value of a run tag."""
        return json.dumps({"since": self.since.isoformat(), "until": self.until.isoformat()})

    @classmethod
    def from_tag(cls, tag: str) -> RawInterval:
        """Parse the JSON of `to_tag`. Raises ConfigurationError if the interval is empty."""
        fields = json.loads(tag)
        return cls(datetime.fromisoformat(fields["since"]), datetime.fromisoformat(fields["until"]))

    def contains(self) -> Expression:
        """Return the Spark condition that a kept record was received in the interval."""
        received = F.col(RECEIVED_AT)
        return (received >= F.lit(self.since)) & (received < F.lit(self.until))


@dataclass(frozen=True)
class KeptRecordCounts:
    """The number of kept records of an interval by day of receipt, and when the first record was received.

    `by_day` has pairs of day (`2026-11-24`, UTC) and count, in the order of the days. `first_received` is the
    time of the oldest record in the whole table, or None if the table has no records or does not exist.
    """

    by_day: Sequence[tuple[str, int]] = ()
    first_received: datetime | None = None

    @property
    def total(self) -> int:
        """The number of kept records in the interval."""
        return sum(count for _, count in self.by_day)

    def note(self, interval: RawInterval) -> str | None:
        """Return a sentence if the table has no records from the begin of the interval, else None."""
        if self.first_received is None:
            return "No record is kept yet: records are kept from the first batch with keep_value on."
        if self.first_received <= interval.since:
            return None
        return (
            f"Records received before {self.first_received:%Y-%m-%dT%H:%M:%SZ} are not kept:"
            " they are too old, or keep_value was off. Their rows stay as they are."
        )


def require_kept_records(ingest: Ingest) -> None:
    """Raise ConfigurationError if the ingestion keeps no records or merges rows.

    In a merged table a newer record may have replaced the row of a record.
    """
    if not ingest.keep_value:
        raise ConfigurationError(
            f"Ingestion {ingest.name} does not keep the bytes of its records.",
            hint="Set keep_value=True. Records are kept from the next batch on.",
            reason="records_not_kept",
        )
    merged_tables = [one.asset.to_user_string() for one in ingest.tables if one.mode != "append"]
    if merged_tables:
        raise ConfigurationError(
            f"Ingestion {ingest.name} merges rows into {', '.join(merged_tables)}, where a newer record may"
            " have replaced the row of a kept record.",
            hint="Only ingestions whose tables all have mode append can decode kept records again. Produce"
            " the records again instead.",
            reason="not_reprocessable",
        )


def count_kept_records(
    session: SparkSession, ingestion_tables: IngestionTables, interval: RawInterval
) -> KeptRecordCounts:
    """Count the kept records of an interval, and find the oldest record of the table.

    Reads only the column `received_at`: for the counts only files of the interval's days.
    """
    table = ingestion_tables.kept_record_table
    name = ingestion_tables.kept_record_table_name
    if table is None or name is None:
        return KeptRecordCounts()
    records = session.table(f"nessie.{quote_spark_path(ingestion_tables.identifiers[name])}")
    # Counted from microseconds, because a remote session may have another time zone.
    day = F.expr(f"unix_micros({RECEIVED_AT}) div 86400000000")
    rows = records.where(interval.contains()).groupBy(day.alias("day")).count().orderBy("day").collect()
    by_day = [((EPOCH + timedelta(days=row[0])).isoformat(), int(row[1])) for row in rows]
    first_us = records.select(F.unix_micros(F.min(RECEIVED_AT))).collect()[0][0]
    first = None if first_us is None else datetime.fromtimestamp(first_us / 1_000_000, UTC)
    return KeptRecordCounts(by_day, first)


def reprocess_raw(
    ingest: Ingest,
    batch_context: BatchContext,
    interval: RawInterval,
    *,
    report: Callable[[str], None] = lambda _: None,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    slice_records: int | None = None,
) -> RawReprocessingResult | None:
    """Decode the kept records of the interval again, and replace their rows on the branch.

    `report` is called with a sentence after each slice. A slice has whole batches with together at most
    `slice_records` records (default: `most_records`), or a single larger batch.

    Returns None if an earlier attempt of the run has already done this, or if the interval has no records to
    decode. Raises RowsNotIdentified; PositionLost while a table is rolled back or filled again;
    ConfigurationError if the ingestion keeps no records or merges rows; and the errors of
    `evolve_until_stable`.
    """
    require_kept_records(ingest)
    tables = IcebergTableFormat(batch_context.catalog)
    namespace = batch_context.lake.settings.default_namespace
    client, catalog = batch_context.lake.nessie, batch_context.catalog
    ingestion_tables = load_ingestion_tables(ingest, client, catalog, namespace, tables)
    dead_letters = ingestion_tables.dead_letter_table
    if ingestion_tables.kept_record_table is None or dead_letters is None:
        return None
    if any(
        run.run_id == batch_context.run_id
        for run in reprocessing_runs(ingest.name, dead_letters.metadata.properties)
    ):
        return None
    position = require_reprocessable_tables(ingestion_tables, batch_context.branch)
    session = batch_context.session()
    _require_identified_rows(session, ingestion_tables, position)
    slices = _plan_slices(session, ingestion_tables, interval, slice_records or ingest.most_records)
    result: RawReprocessingResult | None = None
    for number, raw_slice in enumerate(slices, 1):
        ingestion_tables = load_ingestion_tables(ingest, client, catalog, namespace, tables)
        one = RawSliceReprocessing(
            ingestion_tables, batch_context, session, raw_slice, position, number, tables, clock
        ).run()
        if one is None:
            continue
        for note in one.notes:
            report(note)
        report(
            f"Slice {number} of {len(slices)}: {format_count(one.counts['records'], 'record')} received until"
            f" {raw_slice.last:%Y-%m-%dT%H:%M:%SZ}; {_format_changes(one.counts)}."
        )
        result = one if result is None else _combine(result, one)
    if result is not None and result.changed:
        _record_run(ingestion_tables, batch_context, result, tables)
    return result


def _record_run(
    ingestion_tables: IngestionTables,
    batch_context: BatchContext,
    result: RawReprocessingResult,
    tables: IcebergTableFormat,
) -> None:
    """Record the run in a property of the changed tables and of the dead letters.

    So a second run that reprocesses at the same time is refused, and a rollback of these tables is noticed.
    """
    names = {*result.changed, result.targets.dead_letters.name}
    changes = [
        BatchTableChange(
            target.identifier,
            batch_context.catalog.load_table(target.identifier),
            reprocessed_by=batch_context.run_id,
        )
        for target in result.targets
        if target.name in names
    ]
    commit_tables(
        batch_context.lake.nessie,
        batch_context.catalog,
        batch_context.branch,
        changes,
        ingestion=ingestion_tables.ingest.name,
        message=f"Reprocess kept records of {ingestion_tables.ingest.name}",
        properties=batch_context.commit_properties,
        tables=tables,
    )


def _format_changes(counts: Mapping[str, int]) -> str:
    """Return part of a sentence: `3 rows added, 0 rows changed, …`, with the numbers of dead letters last.

    `counts` are those of `RawReprocessingResult`, such as `rows_update` or `letters_mark`.
    """
    changed = ", ".join(
        f"{counts.get(f'rows_{action}', 0)} rows {verb}"
        for action, verb in (("insert", "added"), ("update", "changed"), ("delete", "removed"))
    )
    return (
        f"{changed}, {counts.get('letters_insert', 0)} new dead letters,"
        f" {counts.get('letters_mark', 0)} dead letters marked as reprocessed"
    )


def format_result(result: RawReprocessingResult) -> str:
    """Return the line of the whole reprocessing in the run's log, from the counts of all slices."""
    return f"{format_count(result.counts['records'], 'record')} decoded; {_format_changes(result.counts)}."


def _combine(first: RawReprocessingResult, second: RawReprocessingResult) -> RawReprocessingResult:
    names = {*first.counts, *second.counts}
    counts = {name: first.counts.get(name, 0) + second.counts.get(name, 0) for name in names}
    return replace(second, counts=counts, changed=first.changed | second.changed)


# -- the plan --------------------------------------------------------------------------------------------


def _plan_slices(
    session: SparkSession, ingestion_tables: IngestionTables, interval: RawInterval, max_records: int
) -> list[RawSlice]:
    """Divide the interval into slices of whole batches, in the order of their receipt.

    All records of a batch have the same time of receipt. A slice has at most `max_records` records, or one
    batch.
    """
    name = ingestion_tables.kept_record_table_name
    assert name is not None  # noqa: S101 - the caller has loaded the table
    records = session.table(f"nessie.{quote_spark_path(ingestion_tables.identifiers[name])}")
    counts = (
        records.where(interval.contains())
        .groupBy(F.unix_micros(RECEIVED_AT).alias("us"))
        .count()
        .orderBy("us")
        .toArrow()
    )
    slices: list[RawSlice] = []
    total = 0
    for us, count in zip(counts["us"].to_pylist(), counts["count"].to_pylist(), strict=True):
        received = datetime.fromtimestamp(us // 1_000_000, UTC).replace(microsecond=us % 1_000_000)
        if slices and total + count <= max_records:
            slices[-1] = replace(slices[-1], last=received)
            total += count
        else:
            slices.append(RawSlice(received, received))
            total = count
    return slices


def _require_identified_rows(
    session: SparkSession, ingestion_tables: IngestionTables, position: Offsets
) -> None:
    """Raise RowsNotIdentified if the rows of a table may not be traced to single records.

    This is so if a topic was created again, or if a table has no columns for the position of the record, or
    has null in them.
    """
    ingest = ingestion_tables.ingest
    incarnations: dict[str, set[str]] = {}
    for partition in position:
        incarnations.setdefault(partition.topic, set()).add(partition.incarnation)
    if recreated := sorted(topic for topic, ids in incarnations.items() if len(ids) > 1):
        raise RowsNotIdentified(
            f"Topic {', '.join(recreated)} was created again, so two records may have the same offset.",
            hint="Kept records of such a topic cannot be decoded again.",
            reason="topic_recreated",
            subject=", ".join(recreated),
        )
    former_topics = sorted({*incarnations} - {*ingest.topics})
    for name, declaration in ingestion_tables.declarations.items():
        columns = position_columns(name, ingest, declaration.attributes)
        table = ingestion_tables.loaded_tables[name]
        if table is None:
            continue
        if former_topics and "topic" not in columns:
            raise RowsNotIdentified(
                f"The table also has rows of topic {', '.join(former_topics)}, which the ingestion no longer"
                " reads, and no column for the topic of a record.",
                table=name,
                hint="Kept records of this ingestion cannot be decoded again.",
                reason="topic_unknown",
                subject=", ".join(former_topics),
            )
        existing = {one.name for one in table.schema().fields}
        if missing := [column for column in columns.values() if column not in existing]:
            raise RowsNotIdentified(
                f"The table lacks column {', '.join(missing)}, which its declaration fills from the record.",
                table=name,
                hint="Add the column. Only rows that are written after that can be replaced.",
                reason="position_columns_missing",
                subject=", ".join(missing),
            )
        rows = session.table(f"nessie.{quote_spark_path(ingestion_tables.identifiers[name])}")
        unknown = any_of(F.col(quote_spark_name(column)).isNull() for column in columns.values())
        if rows.where(unknown).limit(1).count():
            raise RowsNotIdentified(
                "The table has rows without the position of their record: they were written before the"
                " columns were declared, or by another writer.",
                table=name,
                hint=f"Fill the columns {', '.join(columns.values())} of these rows, or delete the rows.",
                reason="rows_without_position",
                subject=", ".join(columns.values()),
            )
