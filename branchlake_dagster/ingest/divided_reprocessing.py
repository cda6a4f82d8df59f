"""The division of stored records, dead letters or kept records, that make a reprocessing fail.

Some records end the worker that decodes them, and so every pass that contains them. As in a batch, the passes
are divided until each such record is alone. It then becomes a dead letter of kind `unwritable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.errors import OutcomeUnknown, Transient
from branchlake_dagster.ingest.batch_context import BatchContext, IngestionTables
from branchlake_dagster.ingest.batch_tables import BatchTargets
from branchlake_dagster.ingest.errors import ColumnsUnknown, RecordsUnread
from branchlake_dagster.ingest.offsets import OffsetRange, Ranges, TopicPartition
from branchlake_dagster.ingest.prepared_records import FOR_TABLE, INCARNATION
from branchlake_dagster.ingest.record_frames import (
    RECORD_SCHEMA,
    RawRecord,
    RecordPosition,
    find_unwritable_records,
    join_ranges,
    valid_time_us,
)
from branchlake_dagster.ingest.scan import ScanResult, delete_files, delete_on_failure
from branchlake_dagster.ingest.schema_evolution import SchemaEvolution, run_without_unknown_tables
from branchlake_dagster.ingest.spark_expressions import any_of
from branchlake_dagster.ingest.unwritable_records import (
    UNWRITABLE,
    UnwritableRecord,
    build_dead_letters,
    error_reason,
    format_note,
    is_caused_by_records,
    restore_tables,
)
from branchlake_dagster.ingest.worker_writer import Work, write_dead_letters

EvolveFrame = Callable[[DataFrame, IngestionTables], SchemaEvolution]
"""Makes the passes over the records of a frame until the tables fit them, as `evolve_until_stable` does."""


@dataclass(frozen=True)
class StoredPass:
    """The result of the passes over stored records.

    `unwritable` maps the position of each record that fails alone to its error. The pass did not read these
    records. `reached` is the condition that a record belongs to the result, and `reached_count` their number;
    both are None if all do.
    """

    evolution: SchemaEvolution
    unwritable: Mapping[RecordPosition, Exception] = field(default_factory=dict)
    reached: Expression | None = None
    reached_count: int | None = None

    def notes(self) -> tuple[str, ...]:
        """Return sentences for the user about unwritable records and records that were not reached."""
        notes = (format_note(self.unwritable),) if self.unwritable else ()
        if self.reached is None:
            return notes
        return (
            *notes,
            "Too many records made the reprocessing fail, so it ended before the last selected records."
            " These stay as they are: reprocess again.",
        )


def run_divided_pass(
    frame: DataFrame, ingestion_tables: IngestionTables, batch_context: BatchContext, evolve: EvolveFrame
) -> StoredPass:
    """Make the passes over stored records; if records make them fail, leave these records out.

    `frame` has the columns `RECORD_COLUMNS` with the prefix `__`, and `INCARNATION`. Raises the error
    of a pass that records did not cause, also if a pass over one empty record fails after it, and the first
    error if no part can be written.
    """
    start_hash = batch_context.lake.nessie.reference(batch_context.branch).hash
    try:
        return StoredPass(evolve(frame, ingestion_tables))
    except Exception as error:
        if not is_caused_by_records(error):
            raise
        return _Division(frame, ingestion_tables, batch_context, evolve, start_hash).run(error)


class _Division:
    """The division of stored records whose first pass has failed."""

    def __init__(
        self,
        frame: DataFrame,
        ingestion_tables: IngestionTables,
        batch_context: BatchContext,
        evolve: EvolveFrame,
        start_hash: str,
    ) -> None:
        self._frame = frame
        self._ingestion_tables = ingestion_tables
        self._batch_context = batch_context
        self._evolve = evolve
        self._start_hash = start_hash
        known_tables = ingestion_tables.without_unknown_columns()
        # If no pass writes to a new table, its wrong declaration may be the cause, although each record fails
        # alone.
        self._unwritten = ingestion_tables.identifiers.keys() - known_tables.identifiers.keys()

    def run(self, error: Exception) -> StoredPass:
        self._undo_table_changes()
        count_by_position = _count_positions(self._frame)
        positions = [*count_by_position]
        self._require_empty_record_passes(positions[0], error)

        # The records are numbered, so that gaps between their offsets cost no passes.
        def error_of(part: Ranges) -> Exception | None:
            return self._error_of(_select(positions, part))

        division = find_unwritable_records({_NUMBERS: OffsetRange(0, len(positions))}, error_of)
        if self._unwritten:
            raise error
        unwritable = {positions[number]: cause for (_, number), cause in division.unwritable.items()}
        for parts in (division.resolved, division.resolved[:1]):
            reached_positions = _select(positions, join_ranges(parts))
            failing = {one: unwritable[one] for one in reached_positions if one in unwritable}
            try:
                evolution = self._run_without(reached_positions, failing)
            except Exception as failure:
                self._undo_table_changes()
                if not is_caused_by_records(failure):
                    raise
                continue
            if len(reached_positions) == len(positions):
                return StoredPass(evolution, failing)
            count = sum(count_by_position[one] for one in reached_positions)
            return StoredPass(evolution, failing, _is_between(reached_positions, prefix=""), count)
        raise error

    def _undo_table_changes(self) -> None:
        """Restore the tables of the branch as they were before the first pass."""
        restore_tables(
            self._batch_context.lake.nessie,
            self._batch_context.branch,
            self._start_hash,
            ingestion=self._ingestion_tables.ingest.name,
            properties=self._batch_context.commit_properties,
        )

    def _require_empty_record_passes(self, position: RecordPosition, error: Exception) -> None:
        """Raise `error` if a pass over one record without a value fails too: records do not cause it then.

        Transient errors of that pass and those with an unknown outcome pass through.
        """
        partition, offset = position
        values: list[object] = [partition.topic, partition.partition, offset, None, None, None, None]
        values.append(partition.incarnation)
        schema = f"{RECORD_SCHEMA}, {INCARNATION} string"
        if FOR_TABLE in self._frame.columns:
            values.append(None)
            schema = f"{schema}, {FOR_TABLE} string"
        frame = self._batch_context.session().createDataFrame([tuple(values)], schema)
        try:
            evolution = self._evolve(frame, self._ingestion_tables.without_unknown_columns())
            delete_files(evolution.scanned, evolution.targets)
        except Exception as other:
            if isinstance(other, Transient | OutcomeUnknown):
                raise
            error.add_note(f"A pass over one record without a value failed too: {error_reason(other)}")
            raise error from other
        finally:
            self._undo_table_changes()

    def _error_of(self, positions: Sequence[RecordPosition]) -> Exception | None:
        try:
            frame = self._frame.where(_is_between(positions))
            evolution = self._evolve_known(frame)
            delete_files(evolution.scanned, evolution.targets)
            self._unwritten -= evolution.ingestion_tables.identifiers.keys()
        except ColumnsUnknown:
            return None  # a table of a family, which only the records name
        except Exception as failure:
            if not is_caused_by_records(failure):
                raise
            if len(positions) == 1:
                # Workers or a store that fail only for some time must not make dead letters of good records.
                self._undo_table_changes()
                self._require_empty_record_passes(positions[0], failure)
            return failure
        finally:
            self._undo_table_changes()
        return None

    def _run_without(
        self, positions: Sequence[RecordPosition], failing: Mapping[RecordPosition, Exception]
    ) -> SchemaEvolution:
        """Make the passes over the records at these positions without the failing ones."""
        if len(failing) == len(positions):
            no_records = self._frame.where(F.lit(False))
            return self._evolve(no_records, self._ingestion_tables.without_unknown_columns())
        frame = self._frame.where(_is_between(positions))
        return self._evolve_known(frame.where(~_is_one_of(failing)) if failing else frame)

    def _evolve_known(self, frame: DataFrame) -> SchemaEvolution:
        """Make the passes over a part of the records, which may lack those of a new table."""
        return run_without_unknown_tables(lambda tables: self._evolve(frame, tables), self._ingestion_tables)


def add_unwritable_dead_letters(
    stored_pass: StoredPass,
    frame: DataFrame,
    build_work: Callable[[BatchTargets], Work],
) -> None:
    """Write a dead letter for each unwritable record of `frame`, and add the files and counts to the pass.

    A dead letter in the frame stays one for its own table. `build_work` builds the work of a scan, from whose
    targets the files are written. If this raises, the data files of the pass are deleted.
    """
    unwritable = stored_pass.unwritable
    if not unwritable:
        return
    targets, scanned = stored_pass.evolution.targets, stored_pass.evolution.scanned
    with delete_on_failure(scanned, targets):
        work = build_work(targets)
        records = _load_unwritable_records(frame, unwritable)
        columns = build_dead_letters(records, batch_id=work.batch_id, received_at_us=work.received_at_us)
        count = len(columns["offset"])
        files = write_dead_letters(work, columns, count)
        scanned.files.setdefault(targets.dead_letter_number, []).extend(files)
        _count_dead_letters(scanned, columns["table"], count)


def require_all_read(stored_pass: StoredPass, record_count: int, batch_context: BatchContext) -> None:
    """Raise RecordsUnread if the pass and its unwritable records are fewer than `record_count` records.

    `record_count` is the number of selected records that the pass has reached. Were a record left out, a
    dead letter would count as reprocessed, and the rows of a kept record would be removed.
    """
    read_count = stored_pass.evolution.scanned.counts["records"]
    if read_count < record_count:
        raise RecordsUnread(
            f"Only {read_count} of {record_count} selected records were read.",
            branch=batch_context.branch,
            run_id=batch_context.run_id,
            hint="Nothing is published. Reprocess again, and report the error if it comes again.",
        )


def _count_dead_letters(scanned: ScanResult, tables: pa.Array, count: int) -> None:
    scanned.counts.update({"records": count, "dead": count, f"dead/{UNWRITABLE}": count})
    scanned.counts.update(f"dead_of/{name or ''}" for name in tables.to_pylist())


def _load_unwritable_records(
    frame: DataFrame, unwritable: Mapping[RecordPosition, Exception]
) -> list[UnwritableRecord]:
    """Load the unwritable records of a frame: one for each of its rows."""
    times = F.unix_micros("__timestamp").alias("__timestamp_us")
    rows = frame.where(_is_one_of(unwritable)).withColumn("__timestamp_us", times).drop("__timestamp")
    records = []
    for row in rows.toArrow().to_pylist():
        partition = TopicPartition(row["__topic"], row[INCARNATION], row["__partition"])
        headers = [(header["key"], header["value"]) for header in row["__headers"] or ()]
        time_us = row["__timestamp_us"]
        record = RawRecord(
            partition.topic,
            partition.partition,
            row["__offset"],
            None if time_us is None else valid_time_us(time_us),
            row["__key"],
            row["__value"],
            headers,
        )
        table = row.get(FOR_TABLE)
        error = unwritable[partition, record.offset]
        records.append(
            UnwritableRecord(record, partition.incarnation, error, None if table is None else (table,))
        )
    return records


_NUMBERS = TopicPartition("", "", 0)
"""The partition whose offsets stand for the numbers of the records in the order of their positions."""


def _count_positions(frame: DataFrame) -> dict[RecordPosition, int]:
    """Return the number of a frame's records at each position, in the order of the positions."""
    names = ("__topic", INCARNATION, "__partition", "__offset")
    rows = frame.groupBy(*names).count().orderBy(*names).toArrow()
    columns = [rows[name].to_pylist() for name in (*names, "count")]
    return {
        (TopicPartition(topic, incarnation, partition), offset): count
        for topic, incarnation, partition, offset, count in zip(*columns, strict=True)
    }


def _select(positions: Sequence[RecordPosition], part: Ranges) -> Sequence[RecordPosition]:
    numbers = part[_NUMBERS]
    return positions[numbers.start : numbers.end]


def _is_between(positions: Sequence[RecordPosition], prefix: str = "__") -> Expression:
    """Return the condition that a record is one of these, which are consecutive positions of the frame."""
    first: dict[TopicPartition, int] = {}
    last: dict[TopicPartition, int] = {}
    for partition, offset in positions:
        first.setdefault(partition, offset)
        last[partition] = offset
    return any_of(
        _is_in_partition(partition, prefix) & F.col(f"{prefix}offset").between(start, last[partition])
        for partition, start in first.items()
    )


def _is_one_of(positions: Mapping[RecordPosition, Exception]) -> Expression:
    return any_of(
        _is_in_partition(partition) & (F.col("__offset") == offset) for partition, offset in positions
    )


def _is_in_partition(partition: TopicPartition, prefix: str = "__") -> Expression:
    return (
        (F.col(f"{prefix}topic") == partition.topic)
        & F.col(f"{prefix}incarnation").eqNullSafe(partition.incarnation)
        & (F.col(f"{prefix}partition") == partition.partition)
    )
