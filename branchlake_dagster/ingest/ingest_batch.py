"""The ingestion of one planned batch: its passes, its dead letters and its commit on the branch."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import reduce

import pyarrow as pa
from pyiceberg.table import Table
from pyspark.sql import DataFrame

from branchlake_dagster.errors import OutcomeUnknown, Transient
from branchlake_dagster.ingest.batch_commit import (
    BatchTableChange,
    commit_tables,
    create_staging_table,
    list_staging_tables,
    merge_staged_rows,
    remove_expired_records,
    staging_columns,
)
from branchlake_dagster.ingest.batch_context import BatchContext, IngestionTables, PlannedBatch
from branchlake_dagster.ingest.batch_tables import BatchTargets, Identifier
from branchlake_dagster.ingest.binary_formats import RegistryAvro
from branchlake_dagster.ingest.declaration import ExpandedIngest
from branchlake_dagster.ingest.errors import ColumnsUnknown
from branchlake_dagster.ingest.formats import Format
from branchlake_dagster.ingest.offsets import (
    Offsets,
    Ranges,
    TableProgress,
    format_ranges,
    merge_offsets,
    topic_id,
)
from branchlake_dagster.ingest.planning import (
    BatchPlan,
    compute_valid_through_ms,
    merge_latest_times,
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
    delete_staging_metadata,
    scan_records,
)
from branchlake_dagster.ingest.schema_evolution import SchemaEvolution, build_targets, evolve_until_stable
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
from branchlake_dagster.nessie.model import Reference
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.stored_names import LakeProperty


@dataclass(frozen=True)
class BatchResult:
    """The result of a batch on its branch.

    `commit_id` identifies the batch, and `head` is the branch after its commit. `targets` are the tables in
    the state in which their rows were written. `progress` is the ingestion's progress after the batch.
    `notes` are sentences for the user, for example about skipped records.
    """

    commit_id: str
    ingest: ExpandedIngest
    plan: BatchPlan
    targets: BatchTargets
    scan_result: ScanResult
    progress: TableProgress
    head: Reference
    notes: tuple[str, ...] = ()

    @property
    def record_count(self) -> int:
        """The number of records that were read."""
        return self.scan_result.counts["records"]

    @property
    def current_offsets(self) -> Offsets:
        """The offsets that the tables have reached, without those of earlier incarnations of the topics."""
        current_partitions = {one for topic in self.plan.topics.values() for one in topic.partitions()}
        return {one: offset for one, offset in self.progress.offsets.items() if one in current_partitions}

    @property
    def dead_letter_count(self) -> int:
        """The number of dead letters that were written."""
        return self.scan_result.counts["dead"]

    @property
    def expired_record_count(self) -> int:
        """The number of kept records that the batch removed because of their age."""
        return self.scan_result.counts["expired"]

    def count_rows(self, number: int) -> int:
        """Return the number of rows that were written for the target with this index in `targets`.

        These are dead letters or kept records if the target is the table of those.
        """
        if number == self.targets.dead_letter_number:
            return self.dead_letter_count
        if number == self.targets.kept_records_number:
            return self.scan_result.counts["kept"]
        return self.scan_result.count_rows(number)


def ingest_batch(
    planned_batch: PlannedBatch,
    batch_context: BatchContext,
    records: Records,
    *,
    tasks: int,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    commit_id: str | None = None,
    tables: IcebergTableFormat | None = None,
) -> BatchResult:
    """Ingest a planned batch: one commit on the branch adds the rows of all tables and their new offsets.

    Nothing is published to `main`. Rows of `upsert` and `changes` tables are staged and merged in earlier
    commits on the branch. If records need new columns or new tables, these are created and the batch is read
    again. `tasks` is the largest number of Spark tasks that read the records. `commit_id` is the id of the
    batch, which must be new; None creates one.

    If records make the batch fail, it is divided until each failing record is alone, in at most `MAX_PASSES`
    passes. These records become dead letters. If the passes do not suffice, or if the remaining records fail
    only together, only the first part of the batch is written, and the result's plan has only its offsets.

    Files that no table keeps are deleted: data files of earlier passes, of staged rows after the merge, of
    failed scans, and of a batch that certainly failed, and the metadata of dropped staging tables.

    Raises the errors of `evolve_until_stable`; LandingDamaged if files do not have the records that their
    names state; TopicReplaced if a topic was recreated during the batch; and EarlierAttemptLate if an
    earlier attempt of the step committed during the batch.
    """
    batch_id = commit_id or str(uuid.uuid4())
    iceberg_tables = tables or IcebergTableFormat(batch_context.catalog)
    ingest = planned_batch.ingest
    record_format = (
        ingest.format.with_empty_cache() if isinstance(ingest.format, RegistryAvro) else ingest.format
    )
    started_us = int(clock().timestamp() * 1_000_000)
    if not planned_batch.plan.ranges:
        targets = build_targets(planned_batch.ingestion_tables, batch_context, None, record_format)
        return _finish_batch(
            planned_batch,
            batch_context,
            targets,
            ScanResult(),
            {},
            [],
            batch_id,
            iceberg_tables,
            started_us=started_us,
        )
    passes = _BatchPasses(
        planned_batch, batch_context, records, record_format, tasks, batch_id, started_us, iceberg_tables
    )
    # Passes may create tables and columns. If records make the first one fail, they are reset to this hash.
    start_hash = batch_context.lake.nessie.reference(batch_context.branch).hash
    try:
        pass_result = passes.run_on_ranges([planned_batch.plan.ranges], planned_batch.ingestion_tables)
    except Exception as error:
        if not is_caused_by_records(error):
            raise
        planned_batch, pass_result = _ingest_divided_batch(planned_batch, passes, start_hash, error)
    finally:
        passes.failed_scans.delete_files()
    evolution = pass_result.evolution
    scan_result, written_targets = evolution.scanned, evolution.targets
    with delete_on_failure(scan_result, written_targets):
        records.require_complete(planned_batch.plan.ranges, scan_result.counts["records"])
    planned_batch, notes = (
        replace(planned_batch, ingestion_tables=evolution.ingestion_tables),
        (*evolution.left_out, *pass_result.notes),
    )
    # Files of staging tables may be in a commit on the branch; the sweep of a discarded branch deletes those.
    with delete_on_failure(
        scan_result, written_targets, {*scan_result.files} - {*pass_result.staging_identifiers}
    ):
        result = _finish_batch(
            planned_batch,
            batch_context,
            written_targets,
            scan_result,
            pass_result.staging_identifiers,
            passes.staging_tables,
            batch_id,
            iceberg_tables,
            notes,
            started_us=started_us,
        )
    delete_files(scan_result, written_targets, {*pass_result.staging_identifiers})
    delete_staging_metadata(passes.staging_tables)
    return result


@dataclass(frozen=True)
class _PassResult:
    """The result of a successful pass.

    `staging_identifiers` has the staging tables by the index of their target. `notes` are sentences about
    records that the pass could not read.
    """

    evolution: SchemaEvolution
    staging_identifiers: Mapping[int, Identifier]
    notes: tuple[str, ...] = ()


class _BatchPasses:
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

    def run_on_ranges(self, pieces: Sequence[Ranges], ingestion_tables: IngestionTables) -> _PassResult:
        """Make a pass over the records of these ranges: write their rows and dead letters to data files.

        The pass commits only new tables and columns and empty staging tables, not the data files.
        """
        frames = [
            self._records.load_frame(self._batch_context.session(), one, tasks=self._tasks) for one in pieces
        ]
        frame = reduce(DataFrame.unionAll, frames)
        if self._planned_batch.progress.replay_offsets:
            frame = with_waiting_tables(
                frame, self._planned_batch.ingestion_tables.dead_letter_table, join_ranges(pieces)
            )
        return self._run_on_frame(frame, ingestion_tables)

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

    def _run_on_frame(self, frame: DataFrame, ingestion_tables: IngestionTables) -> _PassResult:
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
                    frame, ingestion_tables.ingest, self._record_format, targets, min_offsets, work
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
        return _PassResult(evolution, {number: identifier for number, (identifier, _) in staged.items()})

    def build_empty_result(self) -> _PassResult:
        """Return the result of a pass over no records, which makes no pass. Tables may be created."""
        ingestion_tables = self._planned_batch.ingestion_tables.without_unknown_columns()
        targets = build_targets(ingestion_tables, self._batch_context, None, self._record_format)
        return _PassResult(SchemaEvolution(ingestion_tables, targets, ScanResult()), {})

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
        self, pass_result: _PassResult, unwritable: Mapping[RecordPosition, Exception]
    ) -> _PassResult:
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
        """Return the rows of kept records for these records, without records that were kept earlier.

        `min_offsets` has the offsets below which each table takes no records. The result has no rows if the
        ingestion keeps no records.
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


def _ingest_divided_batch(
    planned_batch: PlannedBatch, passes: _BatchPasses, start_hash: str, error: Exception
) -> tuple[PlannedBatch, _PassResult]:
    """Ingest a failed batch without the records that make it fail; those become dead letters.

    Returns the batch with the offsets that the result has, and the result of the pass.
    `start_hash` is the branch's hash before the first pass, and `error` the error of that pass. If the
    remaining records fail together, only the first part of the batch is written. Raises `error` if a pass
    over one empty record fails too, or if no part of the batch can be written.
    """
    # If every pass fails, a wrongly declared table may be the cause, although each record fails alone.
    any_pass_succeeded = len(planned_batch.ingestion_tables.without_unknown_columns().identifiers) == len(
        planned_batch.ingestion_tables.identifiers
    )

    def error_of(ranges: Ranges) -> Exception | None:
        nonlocal any_pass_succeeded
        try:
            evolution = passes.run_on_ranges([ranges], planned_batch.ingestion_tables).evolution
            delete_files(evolution.scanned, evolution.targets)
            any_pass_succeeded = True
        except ColumnsUnknown:
            return None  # only the batch as a whole may have the columns of a new table
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
    if not any_pass_succeeded:
        raise error
    for parts in (division.resolved, division.resolved[:1]):
        ranges = join_ranges(parts)
        unwritable = {one: cause for one, cause in division.unwritable.items() if _is_in_ranges(one, ranges)}
        pieces = exclude_records(ranges, unwritable)
        try:
            pass_result = (
                passes.run_on_ranges(pieces, planned_batch.ingestion_tables)
                if pieces
                else passes.build_empty_result()
            )
        except Exception as failure:
            passes.undo_table_changes(start_hash)
            if not is_caused_by_records(failure):
                raise
            continue
        planned_batch = replace(planned_batch, plan=narrow_plan(planned_batch.plan, ranges))
        with delete_on_failure(pass_result.evolution.scanned, pass_result.evolution.targets):
            return planned_batch, passes.with_dead_letters(pass_result, unwritable)
    raise error


def _is_in_ranges(position: RecordPosition, ranges: Ranges) -> bool:
    offset_range = ranges.get(position[0])
    return offset_range is not None and offset_range.start <= position[1] < offset_range.end


def _finish_batch(
    planned_batch: PlannedBatch,
    batch_context: BatchContext,
    targets: BatchTargets,
    scan_result: ScanResult,
    staging_identifiers: Mapping[int, Identifier],
    staged_tables: list[Table],
    batch_id: str,
    tables: IcebergTableFormat,
    more_notes: Sequence[str] = (),
    *,
    started_us: int,
) -> BatchResult:
    notes = (*planned_batch.plan.notes, *more_notes)
    progress = _build_progress(
        planned_batch, scan_result, batch_id, batch_context.run_id, now_ms=started_us // 1000
    )
    if targets.kept_records is not None:
        scan_result.counts["expired"] += remove_expired_records(
            planned_batch.ingest,
            batch_context,
            targets.kept_records,
            now=datetime.fromtimestamp(started_us / 1_000_000, UTC),
            tables=tables,
        )
    head = _commit_targets(
        planned_batch,
        batch_context,
        targets,
        scan_result,
        progress,
        staging_identifiers,
        staged_tables,
        tables,
    )
    return BatchResult(
        batch_id, planned_batch.ingest, planned_batch.plan, targets, scan_result, progress, head, notes
    )


def _commit_targets(
    planned_batch: PlannedBatch,
    batch_context: BatchContext,
    targets: BatchTargets,
    scan_result: ScanResult,
    progress: TableProgress,
    staging_identifiers: Mapping[int, Identifier],
    staged_tables: list[Table],
    tables: IcebergTableFormat,
) -> Reference:
    dead_letter_number, ingest = targets.dead_letter_number, planned_batch.ingest
    changes = []
    for number, target in enumerate(targets):
        files = scan_result.files.get(number, [])
        if number in staging_identifiers or not (
            files or number == dead_letter_number or target.name in planned_batch.progress.replay_offsets
        ):
            continue
        # A table that is filled again records its progress even if the batch has no rows for it.
        write_properties = {
            LakeProperty.WRITE_MODE: "append",
            LakeProperty.ASSET: "/".join(target.identifier),
        }
        changes.append(
            BatchTableChange(
                target.identifier,
                target.table,
                files,
                planned_batch.progress.table_progress(target.name, progress, planned_batch.plan),
                {**batch_context.snapshot_properties, **write_properties},
                planned_batch.ingestion_tables.changed_properties if number == dead_letter_number else {},
            )
        )
    if any(scan_result.files.get(number) for number in staging_identifiers):
        staged_tables += _merge_staged(
            planned_batch, batch_context, targets, scan_result, progress, staging_identifiers, tables
        )
    merge_identifiers = [
        one.identifier for one in targets if one.declaration and one.declaration.mode != "append"
    ]
    for number in staging_identifiers:
        target = targets[number]
        if scan_result.files.get(number) or target.name in planned_batch.progress.replay_offsets:
            merged_table = batch_context.catalog.load_table(target.identifier)
            table_progress = planned_batch.progress.table_progress(target.name, progress, planned_batch.plan)
            changes.append(BatchTableChange(target.identifier, merged_table, (), table_progress))
    return commit_tables(
        batch_context.lake.nessie,
        batch_context.catalog,
        batch_context.branch,
        changes,
        ingestion=ingest.name,
        message=f"Ingest {ingest.name}: {format_ranges(planned_batch.plan.ranges)}",
        properties=batch_context.commit_properties,
        tables=tables,
        keep_snapshots=ingest.keep_snapshots if batch_context.expires_snapshots else None,
        # This includes staging tables of abandoned attempts that arrived late: none of them may be published.
        tables_to_drop=list_staging_tables(
            batch_context.lake.nessie, batch_context.branch, merge_identifiers
        ),
    )


def _merge_staged(
    planned_batch: PlannedBatch,
    batch_context: BatchContext,
    targets: BatchTargets,
    scan_result: ScanResult,
    progress: TableProgress,
    staging_identifiers: Mapping[int, Identifier],
    tables: IcebergTableFormat,
) -> list[Table]:
    """Append the staged rows to the staging tables, and merge these into their targets on the branch.

    Returns the filled staging tables; they still exist. `scan_result` has the data files of the staged rows.
    `staging_identifiers` maps the number of a target to its staging table. `progress` is the progress after
    the batch, which the merged tables record. A staging table without rows is not merged.
    """
    staged_changes = [
        BatchTableChange(identifier, batch_context.catalog.load_table(identifier), scan_result.files[number])
        for number, identifier in staging_identifiers.items()
        if scan_result.files.get(number)
    ]
    commit_tables(
        batch_context.lake.nessie,
        batch_context.catalog,
        batch_context.branch,
        staged_changes,
        ingestion=planned_batch.ingest.name,
        message=f"Ingest {planned_batch.ingest.name}: rows to merge",
        properties=batch_context.commit_properties,
        tables=tables,
    )
    filled_tables = [batch_context.catalog.load_table(one.identifier) for one in staged_changes]
    session = batch_context.session()
    for number, identifier in staging_identifiers.items():
        if not scan_result.files.get(number):
            continue
        target = targets[number]
        assert target.declaration is not None  # noqa: S101 - dead letters are not staged
        snapshot_properties = {
            **batch_context.snapshot_properties,
            **planned_batch.progress.table_progress(target.name, progress, planned_batch.plan).to_summary(
                planned_batch.ingest.name
            ),
            LakeProperty.WRITE_MODE: "upsert",
            LakeProperty.KEYS: ",".join(target.declaration.keys),
            LakeProperty.ASSET: "/".join(target.identifier),
        }
        merge_staged_rows(session, target, identifier, snapshot_properties)
    return filled_tables


def _build_progress(
    planned_batch: PlannedBatch, scan_result: ScanResult, batch_id: str, run_id: str, *, now_ms: int
) -> TableProgress:
    """Return the ingestion's progress after the batch.

    `scan_result` has the latest times of the batch's records, from which the valid-through time is computed.
    `now_ms` is the start of the batch in milliseconds since 1970.
    """
    earlier_progress, plan, idle_after = (
        planned_batch.progress,
        planned_batch.plan,
        planned_batch.ingest.idle_after,
    )
    reached_offsets, topics = earlier_progress.position_after(plan), list(plan.topics.values())
    latest_ms = merge_latest_times(earlier_progress.latest_ms, scan_result.latest_ms, topics, now_ms=now_ms)
    valid_through = compute_valid_through_ms(
        topics,
        latest_ms,
        reached_offsets,
        earlier_progress.valid_through_ms,
        now_ms=now_ms,
        idle_after_ms=None if idle_after is None else int(idle_after.total_seconds() * 1000),
    )
    return TableProgress(
        reached_offsets,
        batch_id,
        run_id,
        valid_through,
        first_offsets=merge_offsets(earlier_progress.first_offsets, plan.first_offsets),
        latest_ms=latest_ms,
        dead_letter_table_name=planned_batch.ingestion_tables.dead_letter_table_name,
    )
