"""The ingestion of one planned batch: its result and its commit on the branch."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from pyiceberg.table import Table

from branchlake_dagster.ingest.batch_commit import (
    BatchTableChange,
    commit_tables,
    list_staging_tables,
    merge_staged_rows,
    remove_expired_records,
)
from branchlake_dagster.ingest.batch_context import BatchContext, PlannedBatch
from branchlake_dagster.ingest.batch_passes import BatchPasses, PassResult, ingest_divided_batch
from branchlake_dagster.ingest.batch_tables import BatchTargets, Identifier
from branchlake_dagster.ingest.binary_formats import RegistryAvro
from branchlake_dagster.ingest.declaration import ExpandedIngest
from branchlake_dagster.ingest.offsets import (
    Offsets,
    TableProgress,
    format_ranges,
    merge_offsets,
)
from branchlake_dagster.ingest.planning import (
    BatchPlan,
    compute_valid_through_ms,
    merge_latest_times,
    narrow_plan,
)
from branchlake_dagster.ingest.record_frames import (
    Records,
)
from branchlake_dagster.ingest.scan import (
    ScanResult,
    delete_files,
    delete_on_failure,
    delete_staging_metadata,
)
from branchlake_dagster.ingest.schema_evolution import build_targets
from branchlake_dagster.ingest.unwritable_records import (
    is_caused_by_records,
)
from branchlake_dagster.nessie.model import Reference
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.receivers.landing import LandingDamaged
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
        """The next offset of each partition after the batch; earlier records were ingested or skipped.

        Partitions of earlier incarnations of the topics are left out.
        """
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

    If a file of a landing folder is damaged, only the records before it are written, with a note.

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
        # Only records show the columns of a table that declares none.
        ingestion_tables = planned_batch.ingestion_tables.without_unknown_columns()
        targets = build_targets(ingestion_tables, batch_context, None, record_format)
        return _finish_batch(
            replace(planned_batch, ingestion_tables=ingestion_tables),
            batch_context,
            targets,
            ScanResult(),
            {},
            [],
            batch_id,
            iceberg_tables,
            started_us=started_us,
        )
    passes = BatchPasses(
        planned_batch, batch_context, records, record_format, tasks, batch_id, started_us, iceberg_tables
    )
    # Passes may create tables and columns. If records make the first one fail, they are reset to this hash.
    start_hash = batch_context.lake.nessie.reference(batch_context.branch).hash
    try:
        planned_batch, pass_result = _run_passes(planned_batch, passes, records, start_hash)
    except LandingDamaged as damage:
        # The damaged file does not stop the records before it. The next batch begins at it, and fails.
        if not (readable := records.ranges_before_damage(planned_batch.plan.ranges)):
            raise
        passes.undo_table_changes(start_hash)
        delete_staging_metadata(passes.staging_tables)
        plan = narrow_plan(planned_batch.plan, readable)
        note = f"Only the records before a damaged file were read. {damage}"
        return ingest_batch(
            replace(planned_batch, plan=replace(plan, notes=(*plan.notes, note))),
            batch_context,
            records,
            tasks=tasks,
            clock=clock,
            commit_id=batch_id,
            tables=iceberg_tables,
        )
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


def _run_passes(
    planned_batch: PlannedBatch, passes: BatchPasses, records: Records, start_hash: str
) -> tuple[PlannedBatch, PassResult]:
    """Make a pass over the whole batch, and divide the batch if its records make that pass fail.

    Returns the batch with the offsets that the result has, and the result of the last pass. `start_hash` is
    the branch's hash before the first pass.
    """
    try:
        ranges = planned_batch.plan.ranges
        return planned_batch, passes.run_on_ranges([ranges], planned_batch.ingestion_tables)
    except Exception as error:
        if not is_caused_by_records(error):
            raise
        # No division finds records in a damaged file.
        records.require_undamaged(planned_batch.plan.ranges)
        return ingest_divided_batch(planned_batch, passes, start_hash, error)


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
