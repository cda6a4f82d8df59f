"""The passes over the records of a batch: they write data files and find the unwritable records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import pyarrow as pa
from pyiceberg.table import Table
from pyspark.sql import DataFrame

from branchlake_dagster.errors import OutcomeUnknown, Transient
from branchlake_dagster.ingest.batch_commit import (
    create_staging_table,
    staging_columns,
)
from branchlake_dagster.ingest.batch_context import BatchContext, IngestionTables, PlannedBatch
from branchlake_dagster.ingest.batch_tables import BatchTargets, Identifier
from branchlake_dagster.ingest.errors import ColumnsUnknown
from branchlake_dagster.ingest.formats import Format
from branchlake_dagster.ingest.offsets import (
    Offsets,
    Ranges,
    topic_id,
)
from branchlake_dagster.ingest.planning import (
    narrow_plan,
)
from branchlake_dagster.ingest.record_frames import (
    RECORD_SCHEMA,
    RecordPosition,
    Records,
    exclude_records,
    find_unwritable_records,
    join_ranges,
)
from branchlake_dagster.ingest.reprocessing import with_waiting_tables
from branchlake_dagster.ingest.scan import (
    FailedScans,
    ScanResult,
    build_worker_targets,
    delete_files,
    delete_on_failure,
    scan_records,
)
from branchlake_dagster.ingest.schema_evolution import (
    SchemaEvolution,
    build_targets,
    evolve_until_stable,
    run_without_unknown_tables,
)
from branchlake_dagster.ingest.unwritable_records import (
    UNWRITABLE,
    UnwritableRecord,
    build_dead_letters,
    build_kept_records,
    dead_letter_targets,
    error_reason,
    format_note,
    is_caused_by_records,
    restore_tables,
)
from branchlake_dagster.ingest.worker_writer import Work, write_dead_letters, write_kept_records
from branchlake_dagster.publication.replay import IcebergTableFormat


@dataclass(frozen=True)
class PassResult:
    """The result of a successful pass.

    `staging_identifiers` has the staging tables by the index of their target. `notes` are sentences about
    records that the pass could not read.
    """

    evolution: SchemaEvolution
    staging_identifiers: Mapping[int, Identifier]
    notes: tuple[str, ...] = ()


class BatchPasses:
    """Makes passes over all or some of a batch's records."""

    def __init__(
        self,
        planned_batch: PlannedBatch,
        batch_context: BatchContext,
        records: Records,
        record_format: Format,
        tasks: int,
        batch_id: str,
        started_us: int,
        tables: IcebergTableFormat,
    ) -> None:
        self._planned_batch = planned_batch
        self._batch_context = batch_context
        self._records = records
        self._record_format = record_format
        self._tasks = tasks
        self._batch_id = batch_id
        self._started_us = started_us
        self._tables = tables
        self.staging_tables: list[Table] = []
        """The staging tables of all passes: as they were created, and again after rows were appended."""
        self.failed_scans = FailedScans()

    def run_on_ranges(self, pieces: Sequence[Ranges], ingestion_tables: IngestionTables) -> PassResult:
        """Make a pass over the records of these ranges: write their rows and dead letters to data files.

        The pass commits only new tables and columns and empty staging tables, not the data files.
        """
        loaded = [
            self._records.load_frame(self._batch_context.session(), one, tasks=self._tasks) for one in pieces
        ]
        frame = reduce(DataFrame.unionAll, [one.frame for one in loaded])
        sizes = [one.most_bytes for one in loaded if one.most_bytes is not None]
        if self._planned_batch.progress.replay_offsets:
            frame = with_waiting_tables(
                frame, self._planned_batch.ingestion_tables.dead_letter_table, join_ranges(pieces)
            )
        most_bytes = sum(sizes) if len(sizes) == len(loaded) else None
        return self._run_on_frame(frame, ingestion_tables, most_bytes)

    def run_on_empty_record(self) -> None:
        """Make a pass over one record without timestamp, key, value and headers.

        If this pass fails too, the cause is not the records but Spark, the warehouse or a table's
        declaration.
        """
        first_partition = min(self._planned_batch.plan.ranges)
        record = (
            first_partition.topic,
            first_partition.partition,
            self._planned_batch.plan.ranges[first_partition].start,
            None,
            None,
            None,
            None,
        )
        frame = self._batch_context.session().createDataFrame([record], RECORD_SCHEMA)
        evolution = self._run_on_frame(
            frame, self._planned_batch.ingestion_tables.without_unknown_columns()
        ).evolution
        delete_files(evolution.scanned, evolution.targets)

    def _run_on_frame(
        self, frame: DataFrame, ingestion_tables: IngestionTables, most_bytes: int | None = None
    ) -> PassResult:
        """Make a pass over the records of `frame`. `most_bytes` is described in `LoadedRecords`."""
        staged: dict[int, tuple[Identifier, Table]] = {}

        def scan_targets(ingestion_tables: IngestionTables, targets: BatchTargets) -> ScanResult:
            nonlocal staged
            staged = {
                number: create_staging_table(self._batch_context.catalog, one, self._batch_id)
                for number, one in enumerate(targets.tables)
                if one.declaration is not None and one.declaration.mode != "append"
            }
            self.staging_tables += [table for _, table in staged.values()]
            staging_info = {
                number: (table.metadata.model_dump_json(), staging_columns(targets[number]))
                for number, (_, table) in staged.items()
            }
            work = self._build_work(targets, staging_info)
            min_offsets = self.min_offsets(targets.names)
            with self.failed_scans.remember_failure(work, targets.dead_letters.table.io):
                return scan_records(
                    frame,
                    ingestion_tables.ingest,
                    self._record_format,
                    targets,
                    min_offsets,
                    work,
                    most_bytes=most_bytes,
                )

        topics = self._planned_batch.topics
        incarnations = {name: topic_id(topic.incarnation) for name, topic in topics.items()}
        with self._records.translate_errors():
            evolution = evolve_until_stable(
                ingestion_tables,
                self._batch_context,
                frame,
                self._record_format,
                scan_targets,
                incarnations,
                self._tables,
            )
        return PassResult(evolution, {number: identifier for number, (identifier, _) in staged.items()})

    def build_empty_result(self) -> PassResult:
        """Return the result of a pass over no records, which makes no pass. Tables may be created."""
        ingestion_tables = self._planned_batch.ingestion_tables.without_unknown_columns()
        targets = build_targets(ingestion_tables, self._batch_context, None, self._record_format)
        return PassResult(SchemaEvolution(ingestion_tables, targets, ScanResult()), {})

    def min_offsets(self, tables: Sequence[str]) -> dict[str, Offsets]:
        """Return for each table the offsets below which it takes no records; {} if none is filled again."""
        return self._planned_batch.progress.min_offsets(tables, self._planned_batch.plan.ranges)

    def _build_work(
        self, targets: BatchTargets, staging_info: Mapping[int, tuple[str, Mapping[str, str]]]
    ) -> Work:
        ingest, plan = self._planned_batch.ingest, self._planned_batch.plan
        return Work(
            self._batch_id,
            list(ingest.topics),
            [plan.topics[name].incarnation for name in ingest.topics],
            build_worker_targets(targets, staging_info, keeps_records=targets.kept_records is not None),
            self._batch_context.lake.settings.worker_file_io_properties(),
            self._started_us,
            len(ingest.families),
            ingest.most_tables,
            ingest.most_columns,
            keeps_records=targets.kept_records is not None,
        )

    def undo_table_changes(self, at_hash: str) -> None:
        """Restore the tables of the branch as they were at this hash. Drops tables that passes created."""
        restore_tables(
            self._batch_context.lake.nessie,
            self._batch_context.branch,
            at_hash,
            ingestion=self._planned_batch.ingest.name,
            properties=self._batch_context.commit_properties,
        )

    def with_dead_letters(
        self, pass_result: PassResult, unwritable: Mapping[RecordPosition, Exception]
    ) -> PassResult:
        """Add dead letters for the unwritable records, which the pass did not read, to its result.

        `unwritable` maps the position of each record to its error. With `keep_value` the records are kept
        too.
        """
        if not unwritable:
            return pass_result
        targets, scan_result = pass_result.evolution.targets, pass_result.evolution.scanned
        dead_letter_table, dead_letter_table_name = (
            pass_result.evolution.ingestion_tables.dead_letter_table,
            targets.dead_letters.name,
        )
        min_offsets = self.min_offsets(targets.names)
        raw_records = {(one.topic, one.partition, one.offset): one for one in self._records.fetch(unwritable)}
        unwritable_records = [
            UnwritableRecord(
                raw_records[one.topic, one.partition, offset],
                one.incarnation,
                error,
                dead_letter_targets((one, offset), min_offsets, dead_letter_table, dead_letter_table_name),
            )
            for (one, offset), error in sorted(unwritable.items(), key=lambda item: item[0])
        ]
        columns = build_dead_letters(
            unwritable_records, batch_id=self._batch_id, received_at_us=self._started_us
        )
        count = len(columns["offset"])
        if count:
            files = write_dead_letters(self._build_work(targets, {}), columns, count)
            scan_result.files.setdefault(targets.dead_letter_number, []).extend(files)
        kept = self._kept_rows(unwritable_records, targets, min_offsets)
        if (kept_number := targets.kept_records_number) is not None and kept.num_rows:
            files = write_kept_records(
                self._build_work(targets, {}),
                {name: kept[name].combine_chunks() for name in kept.column_names},
                kept.num_rows,
            )
            scan_result.files.setdefault(kept_number, []).extend(files)
        scan_result.counts.update(
            {
                "records": len(unwritable_records),
                "dead": count,
                f"dead/{UNWRITABLE}": count,
                "kept": kept.num_rows,
            }
        )
        return replace(pass_result, notes=(format_note(unwritable),))

    def _kept_rows(
        self,
        records: Sequence[UnwritableRecord],
        targets: BatchTargets,
        min_offsets: Mapping[str, Offsets],
    ) -> pa.Table:
        """Return the rows of these records for the table of kept records, except records that it has already.

        That table has every record that batches have read. `min_offsets` has the offsets below which each
        table takes no records. The result has no rows if the ingestion keeps no records.
        """
        offsets = {} if targets.kept_records is None else min_offsets.get(targets.kept_records.name, {})
        first_offsets = {
            (one.topic, one.incarnation, one.partition): offset for one, offset in offsets.items()
        }
        new_records = [
            one
            for one in records
            if targets.kept_records is not None
            and one.record.offset
            >= first_offsets.get((one.record.topic, one.incarnation, one.record.partition), 0)
        ]
        return build_kept_records(new_records, batch_id=self._batch_id, received_at_us=self._started_us)


def ingest_divided_batch(
    planned_batch: PlannedBatch, passes: BatchPasses, start_hash: str, error: Exception
) -> tuple[PlannedBatch, PassResult]:
    """Ingest a failed batch without the records that make it fail; those become dead letters.

    Returns the batch with the offsets that the result has, and the result of the pass.
    `start_hash` is the branch's hash before the first pass, and `error` the error of that pass. If the
    remaining records fail together, only the first part of the batch is written. Raises `error` if a pass
    over one empty record fails too, or if no part of the batch can be written.
    """
    # If no pass writes to a new table, its wrong declaration may be the cause, although each record fails
    # alone.
    all_tables = planned_batch.ingestion_tables
    unwritten = all_tables.identifiers.keys() - all_tables.without_unknown_columns().identifiers.keys()

    def error_of(ranges: Ranges) -> Exception | None:
        nonlocal unwritten
        try:
            evolution = run_without_unknown_tables(
                lambda tables: passes.run_on_ranges([ranges], tables), planned_batch.ingestion_tables
            ).evolution
            delete_files(evolution.scanned, evolution.targets)
            unwritten -= evolution.ingestion_tables.identifiers.keys()
        except ColumnsUnknown:
            return None  # a table of a family, which only the records name
        except Exception as failure:
            if not is_caused_by_records(failure):
                raise
            return failure
        finally:
            passes.undo_table_changes(start_hash)
        return None

    passes.undo_table_changes(start_hash)
    try:
        passes.run_on_empty_record()
    except Exception as other:
        if isinstance(other, Transient | OutcomeUnknown):
            raise  # Spark, Nessie or Kafka has failed meanwhile, and not because of a record
        error.add_note(f"A pass over one record without a value failed too: {error_reason(other)}")
        raise error from other
    finally:
        passes.undo_table_changes(start_hash)
    division = find_unwritable_records(planned_batch.plan.ranges, error_of)
    if unwritten:
        raise error
    for parts in (division.resolved, division.resolved[:1]):
        ranges = join_ranges(parts)
        unwritable = {one: cause for one, cause in division.unwritable.items() if _is_in_ranges(one, ranges)}
        pieces = exclude_records(ranges, unwritable)
        try:
            # Without a new table, its records would be lost: this pass fails if it does not show the columns.
            pass_result = (
                passes.run_on_ranges(pieces, planned_batch.ingestion_tables)
                if pieces
                else passes.build_empty_result()
            )
        except Exception as failure:
            passes.undo_table_changes(start_hash)
            if not is_caused_by_records(failure) and not isinstance(failure, ColumnsUnknown):
                raise
            continue
        planned_batch = replace(planned_batch, plan=narrow_plan(planned_batch.plan, ranges))
        with delete_on_failure(pass_result.evolution.scanned, pass_result.evolution.targets):
            return planned_batch, passes.with_dead_letters(pass_result, unwritable)
    raise error


def _is_in_ranges(position: RecordPosition, ranges: Ranges) -> bool:
    offset_range = ranges.get(position[0])
    return offset_range is not None and offset_range.start <= position[1] < offset_range.end
