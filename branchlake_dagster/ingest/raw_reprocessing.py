"""Reprocessing of kept records: the ingestion's present decoder reads the bytes of an interval again.

The records are processed in slices of whole batches, in the order of their receipt. Each slice is decoded to
staging tables on the run's branch, then compared with the rows that the tables have of the same records. Only
rows that differ are written, so a repetition changes nothing, and consumers get only real changes.

A row is identified by the position of its record: topic, partition and offset, in columns that the table
fills from `attributes`.

Dead letters are compared in the same way. A waiting dead letter that the decoder would write again is left as
it is. The other waiting dead letters of the slice's records are marked as reprocessed, as in `reprocessing`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import and_, or_

from pyiceberg.table import Table
from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.batch_commit import (
    EPOCH,
    RECEIVED_AT,
    BatchTableChange,
    commit_tables,
    create_staging_table,
    list_staging_tables,
)
from branchlake_dagster.ingest.batch_context import BatchContext, IngestionTables, load_ingestion_tables
from branchlake_dagster.ingest.batch_tables import DEAD_LETTER_SCHEMA, BatchTargets, Identifier, Target
from branchlake_dagster.ingest.binary_formats import RegistryAvro
from branchlake_dagster.ingest.declaration import ExpandedIngest, Ingest
from branchlake_dagster.ingest.errors import RowsNotIdentified
from branchlake_dagster.ingest.formats import Format
from branchlake_dagster.ingest.offsets import Offsets, topic_id
from branchlake_dagster.ingest.progress import reprocessing_runs
from branchlake_dagster.ingest.record_frames import RECORD_COLUMNS
from branchlake_dagster.ingest.reprocessing import position_properties, require_reprocessable_tables
from branchlake_dagster.ingest.scan import (
    FailedScans,
    ScanResult,
    build_worker_targets,
    delete_files,
    delete_on_failure,
    delete_staging_metadata,
    scan_records,
)
from branchlake_dagster.ingest.schema_evolution import SchemaEvolution, evolve_until_stable
from branchlake_dagster.ingest.spark_expressions import any_of, join_balanced
from branchlake_dagster.ingest.unwritable_records import UNWRITABLE
from branchlake_dagster.ingest.worker_writer import Work
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.spark.session import quote_spark_name, quote_spark_path
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.spark_frames import set_session_properties
from branchlake_dagster.wording import format_count

_RECORD_POSITION = ("topic", "incarnation", "partition", "offset")
"""The columns that identify a record among dead letters and kept records."""
_ACTION = "__action"


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


@dataclass
class RawReprocessingResult:
    """The result of a reprocessing on its branch. `counts` are those of all slices.

    `targets` are all tables of the last slice, also those that were not changed.
    """

    ingest: ExpandedIngest
    targets: BatchTargets
    counts: dict[str, int] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    """The dotted names of the tables with changed rows or dead letters."""


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
        one = _SliceReprocessing(
            ingestion_tables, batch_context, session, raw_slice, position, number, tables, clock
        ).run()
        if one is None:
            continue
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
    """Return a clause with the numbers of changed rows and dead letters.

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


@dataclass(frozen=True)
class _Slice:
    """The kept records that were received from `first` to `last`, both inclusive."""

    first: datetime
    last: datetime


def _plan_slices(
    session: SparkSession, ingestion_tables: IngestionTables, interval: RawInterval, max_records: int
) -> list[_Slice]:
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
    slices: list[_Slice] = []
    total = 0
    for us, count in zip(counts["us"].to_pylist(), counts["count"].to_pylist(), strict=True):
        received = datetime.fromtimestamp(us // 1_000_000, UTC).replace(microsecond=us % 1_000_000)
        if slices and total + count <= max_records:
            slices[-1] = replace(slices[-1], last=received)
            total += count
        else:
            slices.append(_Slice(received, received))
            total = count
    return slices


def position_columns(target_name: str, ingest: Ingest, attributes: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of a table that identify the record of a row: `{"offset": "record_offset", …}`.

    `attributes` are those of the table's declaration. Partition and offset are needed, and the topic if the
    ingestion reads several topics. Raises RowsNotIdentified if the table has no column for one of them.
    """
    columns = {attribute: column for column, attribute in attributes.items()}
    needed = [*(["topic"] if len(ingest.topics) > 1 else []), "partition", "offset"]
    missing = [attribute for attribute in needed if attribute not in columns]
    if missing:
        example = ", ".join(f'"record_{attribute}": "{attribute}"' for attribute in needed)
        raise RowsNotIdentified(
            f"The table has no column for the {' and '.join(missing)} of the record, so the rows of kept"
            " records cannot be found.",
            table=target_name,
            hint=f"Set the option attributes of its IngestTable: attributes={{{example}}}. An existing table"
            " needs the columns too. Only records that are read after that can be decoded again.",
            reason="position_columns_missing",
            subject=", ".join(missing),
        )
    return {attribute: columns[attribute] for attribute in needed}


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


# -- one slice -------------------------------------------------------------------------------------------


class _SliceReprocessing:
    """Decodes the records of one slice, and replaces the rows and dead letters that differ on the branch."""

    def __init__(
        self,
        ingestion_tables: IngestionTables,
        batch_context: BatchContext,
        session: SparkSession,
        raw_slice: _Slice,
        position: Offsets,
        number: int,
        tables: IcebergTableFormat,
        clock: Callable[[], datetime],
    ) -> None:
        self._ingestion_tables = ingestion_tables
        self._batch_context = batch_context
        self._session = session
        self._slice = raw_slice
        self._position = position
        self._batch_id = f"{batch_context.run_id}/{number}"
        self._tables = tables
        self._received_us = int(clock().timestamp() * 1_000_000)
        self._staging_tables: list[Table] = []
        self._staged: dict[int, tuple[Identifier, Table]] = {}

    def run(self) -> RawReprocessingResult | None:
        """Decode the slice and change the tables on the branch. Only rows that differ are written.

        Returns the counts and changed tables, or None if the slice has only unwritable records.
        """
        records = self._load_records()
        ranges = _find_ranges(records)
        if not ranges:
            return None
        evolution = self._decode(records, ranges)
        scanned, targets = evolution.scanned, evolution.targets
        counts: dict[str, int] = dict(scanned.counts)
        before = self._ingestion_tables.loaded_tables
        changed = {
            target.name
            for target in targets.tables
            if target.table.metadata_location != getattr(before.get(target.name), "metadata_location", None)
        }
        with delete_on_failure(scanned, targets):
            self._fill_staging_tables(scanned)
        for number, target in enumerate(targets.tables):
            actions = self._replace_rows(number, target, records, ranges)
            for action, count in actions.items():
                counts[f"rows_{action}"] = counts.get(f"rows_{action}", 0) + count
            if actions:
                changed.add(target.name)
        actions = self._replace_dead_letters(targets, records, ranges)
        counts |= {f"letters_{_LETTER_ACTIONS[action]}": count for action, count in actions.items()}
        if actions:
            changed.add(targets.dead_letters.name)
        self._end_slice(evolution)
        delete_files(scanned, targets)
        delete_staging_metadata(self._staging_tables)
        return RawReprocessingResult(evolution.ingestion_tables.ingest, targets, counts, changed)

    def _table(self, identifier: Identifier) -> DataFrame:
        """Return the frame of a table as the branch has it now.

        The table is refreshed first, because Spark's catalog caches the metadata of earlier slices.
        """
        name = f"nessie.{quote_spark_path(identifier)}"
        self._session.catalog.refreshTable(name)
        return self._session.table(name)

    def _load_records(self) -> DataFrame:
        """Return the kept records of the slice, without records that wait as dead letters of kind unwritable.

        A record that makes a batch fail would make the slice fail too. `branchlake reprocess` reprocesses it.
        """
        name = self._ingestion_tables.kept_record_table_name
        assert name is not None  # noqa: S101 - the caller has loaded the table
        received = F.col(RECEIVED_AT).between(F.lit(self._slice.first), F.lit(self._slice.last))
        records = self._table(self._ingestion_tables.identifiers[name]).where(received)
        dead_letters = self._table(self._ingestion_tables.dead_letter_identifier)
        unwritable = dead_letters.where(
            (F.col("error_kind") == UNWRITABLE) & F.col("reprocessed_in").isNull()
        ).select(*_RECORD_POSITION)
        return records.join(F.broadcast(unwritable), [*_RECORD_POSITION], "left_anti")

    def _decode(self, records: DataFrame, ranges: Sequence[_PositionRange]) -> SchemaEvolution:
        """Decode the slice, and write its rows and dead letters to data files of staging tables.

        `records` are the slice's kept records, and `ranges` are their positions, which name the topics. The
        staging tables are created on the branch, and are in `self._staged` by the number of the target.
        Raises the errors of `evolve_until_stable`.
        """
        ingest, batch_context = self._ingestion_tables.ingest, self._batch_context
        record_format: Format = (
            ingest.format.with_empty_cache() if isinstance(ingest.format, RegistryAvro) else ingest.format
        )
        columns = (*RECORD_COLUMNS, "incarnation")
        frame = records.select(*(F.col(name).alias(f"__{name}") for name in columns))
        pairs = sorted({(one.topic, one.incarnation) for one in ranges})
        failed_scans = FailedScans()

        def scan_targets(ingestion_tables: IngestionTables, targets: BatchTargets) -> ScanResult:
            staged_targets = [*enumerate(targets.tables), (targets.dead_letter_number, targets.dead_letters)]
            self._staged = {
                number: create_staging_table(
                    batch_context.catalog, target, self._batch_id, with_attributes=False
                )
                for number, target in staged_targets
            }
            self._staging_tables += [table for _, table in self._staged.values()]
            staging_info: dict[int, tuple[str, Mapping[str, str]]] = {
                number: (table.metadata.model_dump_json(), {}) for number, (_, table) in self._staged.items()
            }
            work = Work(
                batch_context.run_id,
                [topic for topic, _ in pairs],
                [incarnation for _, incarnation in pairs],
                build_worker_targets(targets, staging_info),
                batch_context.lake.settings.worker_file_io_properties(),
                self._received_us,
                len(ingestion_tables.ingest.families),
                ingest.most_tables,
                ingest.most_columns,
            )
            with failed_scans.remember_failure(work, targets.dead_letters.table.io):
                return scan_records(frame, ingestion_tables.ingest, record_format, targets, {}, work)

        ids = {topic: topic_id(incarnation) for topic, incarnation in pairs}
        try:
            return evolve_until_stable(
                self._ingestion_tables, batch_context, frame, record_format, scan_targets, ids, self._tables
            )
        finally:
            failed_scans.delete_files()

    def _fill_staging_tables(self, scanned: ScanResult) -> None:
        changes = [
            BatchTableChange(identifier, table, scanned.files[number])
            for number, (identifier, table) in self._staged.items()
            if scanned.files.get(number)
        ]
        if changes:
            self._commit(changes, "rows to compare")
            self._staging_tables += [
                self._batch_context.catalog.load_table(change.identifier) for change in changes
            ]

    def _end_slice(self, evolution: SchemaEvolution) -> None:
        """Drop the staging tables, and record the tables that the records have named, in one commit.

        `evolution` is the result of `_decode`, whose tables may be new ones.
        """
        client, branch = self._batch_context.lake.nessie, self._batch_context.branch
        ingestion_tables = evolution.ingestion_tables
        identifiers = [*ingestion_tables.identifiers.values()]
        changes = []
        if properties := ingestion_tables.changed_properties:
            identifier = ingestion_tables.dead_letter_identifier
            table = self._batch_context.catalog.load_table(identifier)
            changes.append(BatchTableChange(identifier, table, table_properties=properties))
        self._commit(changes, "drop the staged rows", list_staging_tables(client, branch, identifiers))

    def _commit(
        self, changes: Sequence[BatchTableChange], message: str, tables_to_drop: Sequence[Identifier] = ()
    ) -> None:
        name = self._ingestion_tables.ingest.name
        commit_tables(
            self._batch_context.lake.nessie,
            self._batch_context.catalog,
            self._batch_context.branch,
            changes,
            ingestion=name,
            message=f"Reprocess kept records of {name}: {message}",
            properties=self._batch_context.commit_properties,
            tables=self._tables,
            tables_to_drop=tables_to_drop,
        )

    def _replace_rows(
        self, number: int, target: Target, records: DataFrame, ranges: Sequence[_PositionRange]
    ) -> dict[str, int]:
        """Replace the table's rows of the slice's records by the decoded rows, where they differ.

        Returns the number of changed rows by action: `insert`, `update` or `delete`; {} without differences.
        """
        assert target.declaration is not None  # noqa: S101 - the tables of a batch have declarations
        positions = position_columns(
            target.name, self._ingestion_tables.ingest, target.declaration.attributes
        )
        columns = [one.name for one in target.table.schema().fields]
        keys = list(positions.values())
        decoded = self._table(self._staged[number][0])
        within = _in_ranges(one.contains(positions) for one in ranges)
        # The kept positions decide, because a range may have records that are not kept.
        kept_positions = records.select(
            *(F.col(attribute).alias(f"__kept_{attribute}") for attribute in positions)
        )
        stored = self._table(target.identifier).where(within)
        is_kept = [
            F.col(quote_spark_name(column)) == F.col(f"__kept_{attribute}")
            for attribute, column in positions.items()
        ]
        stored = stored.join(kept_positions, reduce(and_, is_kept), "left_semi")
        differences = _compare_rows(decoded, stored, keys, columns, compared=columns)
        name = f"nessie.{quote_spark_path(target.identifier)}"
        may_match = _in_ranges(one.contains(positions, f"{name}.") for one in ranges)
        return self._merge(differences, target, keys, columns, may_match)

    def _replace_dead_letters(
        self, targets: BatchTargets, records: DataFrame, ranges: Sequence[_PositionRange]
    ) -> dict[str, int]:
        """Mark waiting dead letters of the slice that no longer apply as reprocessed, and add new ones.

        Returns the number of dead letters by action: `insert` (new) or `delete` (marked).
        """
        target = targets.dead_letters
        keys = [*_RECORD_POSITION, "table", "error_kind", "error"]
        names = {attribute: attribute for attribute in ("topic", "partition", "offset")}
        within = _in_ranges(one.contains(names) for one in ranges)
        waiting = self._table(target.identifier).where(F.col("reprocessed_in").isNull() & within)
        waiting = waiting.join(records.select(*_RECORD_POSITION), [*_RECORD_POSITION], "left_semi")
        decoded = self._table(self._staged[targets.dead_letter_number][0])
        columns = list(DEAD_LETTER_SCHEMA.names)
        # Only the keys are compared: batch and time of the receipt always differ.
        differences = _compare_rows(decoded, waiting, keys, columns, compared=())
        name = f"nessie.{quote_spark_path(target.identifier)}"
        may_match = _in_ranges(one.contains(names, f"{name}.") for one in ranges)
        may_match = may_match & F.col(f"{name}.reprocessed_in").isNull()
        marked = {"reprocessed_in": F.lit(self._batch_context.run_id)}
        return self._merge(differences, target, keys, columns, may_match, instead_of_deletion=marked)

    def _merge(
        self,
        differences: DataFrame,
        target: Target,
        keys: Sequence[str],
        columns: Sequence[str],
        may_match: Expression,
        *,
        instead_of_deletion: Mapping[str, Expression] | None = None,
    ) -> dict[str, int]:
        """Merge the differences into the target, unless there are none. Return their number by action.

        `may_match` limits the rows of the target that can be matched, so that few files are read.
        `instead_of_deletion` are values to set in rows that would be deleted.
        """
        kept = differences.persist()
        try:
            counts = {row[0]: int(row[1]) for row in kept.groupBy(_ACTION).count().collect()}
            if counts:
                ingest, context = self._ingestion_tables.ingest, self._batch_context
                snapshot_properties = {
                    **context.snapshot_properties,
                    **position_properties(ingest, self._position, context.run_id),
                    LakeProperty.WRITE_MODE: "upsert",
                    LakeProperty.KEYS: ",".join(keys),
                    LakeProperty.ASSET: "/".join(target.identifier),
                }
                name = f"nessie.{quote_spark_path(target.identifier)}"
                is_same = [
                    F.expr(f"{name}.{quote_spark_name(key)} <=> incoming.{quote_spark_name(key)}")
                    for key in keys
                ]
                values = {
                    quote_spark_name(one): F.col(f"incoming.{quote_spark_name(one)}") for one in columns
                }
                action = F.col(f"incoming.{_ACTION}")
                with set_session_properties(self._session, snapshot_properties):
                    merge = kept.alias("incoming").mergeInto(name, reduce(and_, [may_match, *is_same]))
                    is_deletion = merge.whenMatched(action == "delete")
                    merge = (
                        is_deletion.delete()
                        if instead_of_deletion is None
                        else is_deletion.update(dict(instead_of_deletion))
                    )
                    merge = merge.whenMatched(action == "update").update(values)
                    merge.whenNotMatched(action != "delete").insert(values).merge()
        finally:
            kept.unpersist()
        return counts


_LETTER_ACTIONS = {"insert": "insert", "delete": "mark", "update": "mark"}
"""The names under which differences of dead letters are counted. A difference `delete` only marks the row.
"""


def _in_ranges(conditions: Iterable[Expression]) -> Expression:
    """Return whether one of the ranges contains a position; null for a null position.

    Iceberg skips files only by plain comparisons: `any_of` would hide them in a COALESCE.
    """
    return join_balanced(or_, [*conditions], F.lit(False))


def _compare_rows(
    decoded: DataFrame,
    stored: DataFrame,
    keys: Sequence[str],
    columns: Sequence[str],
    *,
    compared: Sequence[str],
) -> DataFrame:
    """Return the differences of two frames by key: the action, the keys and the decoded columns.

    The action is `insert` or `delete` if only one frame has the key, and `update` if one of the `compared`
    columns differs.
    """
    quoted = {column: quote_spark_name(column) for column in columns}
    types = dict(decoded.dtypes)
    new, old = (
        frame.select(F.struct(*(F.col(name) for name in quoted.values())).alias(side))
        for frame, side in ((decoded, "__new"), (stored, "__old"))
    )

    def of_side(side: str, column: str) -> Expression:
        return F.col(f"{side}.{quoted[column]}")

    same_key = [of_side("__new", key).eqNullSafe(of_side("__old", key)) for key in keys]
    joined = new.join(old, reduce(and_, same_key), "full_outer")
    differs = any_of(
        ~_comparable(of_side("__new", one), types[one]).eqNullSafe(
            _comparable(of_side("__old", one), types[one])
        )
        for one in compared
        if one not in keys
    )
    action = (
        F.when(F.col("__old").isNull(), "insert")
        .when(F.col("__new").isNull(), "delete")
        .when(differs, "update")
    )
    values = [
        (
            F.coalesce(of_side("__new", one), of_side("__old", one)) if one in keys else of_side("__new", one)
        ).alias(one)
        for one in columns
    ]
    differences = joined.select(action.alias(_ACTION), *values).where(F.col(_ACTION).isNotNull())
    # Were a record in a table twice, both rows would be changed by the one difference.
    return differences.dropDuplicates([*keys])


def _comparable(column: Expression, data_type: str) -> Expression:
    """Return a column that Spark can compare: as JSON if it has a map, which Spark does not compare.

    `data_type` is the column's type in Spark's DDL.
    """
    return F.to_json(F.struct(column)) if "map<" in data_type else column


@dataclass(frozen=True)
class _PositionRange:
    """The first and last offset of a slice's records in one partition."""

    topic: str
    incarnation: str
    partition: int
    first: int
    last: int

    def contains(self, columns: Mapping[str, str], prefix: str = "") -> Expression:
        """Return the Spark condition that a row comes from a record in the range.

        `columns` has the row's columns by attribute, as `position_columns` returns them. `prefix` is the
        table's name with a dot, or empty. The incarnation is not compared.
        """
        by_attribute = {one: F.col(f"{prefix}{quote_spark_name(name)}") for one, name in columns.items()}
        is_within = by_attribute["partition"] == self.partition
        is_within = is_within & by_attribute["offset"].between(self.first, self.last)
        return is_within & (by_attribute["topic"] == self.topic) if "topic" in columns else is_within


def _find_ranges(records: DataFrame) -> list[_PositionRange]:
    rows = (
        records.groupBy("topic", "incarnation", "partition").agg(F.min("offset"), F.max("offset")).collect()
    )
    return sorted((_PositionRange(*row) for row in rows), key=lambda one: (one.topic, one.partition))
