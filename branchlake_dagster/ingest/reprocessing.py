"""Reprocessing of dead letters, and the dead letters that wait while their table is filled again.

Reprocessing may be repeated safely. Each dead letter is marked with the run that selects it
(`reprocessed_in`), and only dead letters without a mark are selected. Marks and rows are on one branch, so
`main` gets both in one commit or neither.

Two runs may select the same dead letters at once. Then both rewrite the same data files of the dead letter
table and set its property `branchlake.reprocessed.…` to different values. So the second run is not published.
A second attempt of the same run finds its own property and does nothing.

Tables that took rows have that property too, with the snapshot. So a rollback of these tables, or of the
marks, is noticed, although offsets cannot show it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from operator import and_

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.table import Table
from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.batch_commit import BatchTableChange, commit_tables
from branchlake_dagster.ingest.batch_context import BatchContext, IngestionTables, load_ingestion_tables
from branchlake_dagster.ingest.batch_tables import BatchTargets
from branchlake_dagster.ingest.binary_formats import RegistryAvro
from branchlake_dagster.ingest.declaration import ExpandedIngest, Ingest
from branchlake_dagster.ingest.divided_reprocessing import (
    add_unwritable_dead_letters,
    require_all_read,
    run_divided_pass,
)
from branchlake_dagster.ingest.errors import DeadLettersLeftOut, PositionLost
from branchlake_dagster.ingest.offsets import (
    OffsetRange,
    Offsets,
    Ranges,
    TableProgress,
    TopicPartition,
    topic_id,
)
from branchlake_dagster.ingest.prepared_records import FOR_TABLE, WAITING_TABLES
from branchlake_dagster.ingest.progress import (
    OnRollback,
    read_progress,
    reprocessing_runs,
    require_reprocessed_rows,
)
from branchlake_dagster.ingest.scan import (
    FailedScans,
    ScanResult,
    build_worker_targets,
    delete_on_failure,
    scan_records,
)
from branchlake_dagster.ingest.schema_evolution import SchemaEvolution, evolve_until_stable
from branchlake_dagster.ingest.worker_writer import Work
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.spark.session import quote_spark_path
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.spark_frames import set_session_properties


@dataclass(frozen=True)
class DeadLetterSelection:
    """A selection of dead letters by kinds of errors, by dotted table name, and by the time of their receipt.

    The time of receipt is from `since` on and before `until`. A field that is None or empty does not restrict
    the selection. Dead letters that were reprocessed before are never selected.
    """

    kinds: Sequence[str] = ()
    table: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def to_tag(self) -> str:
        """Return the selection as JSON, the value of a run tag."""
        times = {name: moment and moment.isoformat() for name, moment in self._times().items()}
        return json.dumps({"kinds": list(self.kinds), "table": self.table, **times})

    @classmethod
    def from_tag(cls, tag: str) -> DeadLetterSelection:
        """Parse the JSON of `to_tag`."""
        fields = json.loads(tag)
        times = {
            name: datetime.fromisoformat(fields[name]) if fields[name] else None
            for name in ("since", "until")
        }
        return cls(tuple(fields["kinds"]), fields["table"], **times)

    def _times(self) -> dict[str, datetime | None]:
        return {"since": self.since, "until": self.until}

    def to_sql(self, ingestion_tables: IngestionTables) -> tuple[str, dict[str, object]]:
        """Return the selection as a SQL condition with named parameters, and their values.

        The condition excludes dead letters of tables that do not have mode append, because a newer record may
        have replaced the row. Raises ConfigurationError if `table` is not a table of the ingestion with mode
        append.
        """
        ingest = ingestion_tables.ingest
        names = [name for name, table in ingestion_tables.declarations.items() if table.mode == "append"]
        if self.table is not None and self.table not in names:
            raise ConfigurationError(
                f"Ingestion {ingest.name} cannot reprocess dead letters of {self.table}.",
                table=self.table,
                hint=f"Name one of its tables of mode append: {', '.join(names) or 'it has none'}. In other"
                " tables a newer record may have replaced the row; produce the record again instead.",
                reason="not_reprocessable",
            )
        parts = ["reprocessed_in IS NULL"]
        arguments: dict[str, object] = {}
        table_names = names if self.table is None else [self.table]
        own_condition = " OR ".join(f"table = :table{number}" for number in range(len(table_names)))
        arguments |= {f"table{number}": name for number, name in enumerate(table_names)}
        null_condition = "table IS NULL" if self.table is None else "false"
        parts.append(f"({null_condition}{' OR ' + own_condition if own_condition else ''})")
        if self.kinds:
            parts.append(f"error_kind IN ({', '.join(f':kind{n}' for n in range(len(self.kinds)))})")
            arguments |= {f"kind{number}": kind for number, kind in enumerate(self.kinds)}
        for sign, name, moment in ((">=", "since", self.since), ("<", "until", self.until)):
            if moment is not None:
                parts.append(f"received_at {sign} :{name}")
                arguments[name] = moment
        return " AND ".join(parts), arguments


@dataclass(frozen=True)
class ReprocessingResult:
    """The result of reprocessing dead letters: the tables, and the files and counts that were written.

    `notes` are sentences for the user about dead letters that made the reprocessing fail.
    """

    ingest: ExpandedIngest
    targets: BatchTargets
    scanned: ScanResult
    notes: tuple[str, ...] = ()


def count_dead_letters(
    session: SparkSession, ingestion_tables: IngestionTables, selection: DeadLetterSelection
) -> list[tuple[str | None, str, int]]:
    """Count the selected dead letters. Returns tuples of table, kind and count, in this order.

    The table is None for dead letters that no table has taken.
    """
    condition, arguments = selection.to_sql(ingestion_tables)
    table_sql = quote_spark_path(ingestion_tables.dead_letter_identifier)
    counts = session.sql(
        f"SELECT table, error_kind, count(*) FROM nessie.{table_sql} WHERE {condition}"  # noqa: S608 - by name
        " GROUP BY 1, 2 ORDER BY 1, 2",
        args=arguments,
    )
    return [(row[0], row[1], row[2]) for row in counts.collect()]


def reprocess_batch(
    ingest: Ingest,
    batch_context: BatchContext,
    selection: DeadLetterSelection,
    *,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> ReprocessingResult | None:
    """Reprocess the selected dead letters on the branch. A record that fails again is a new dead letter.

    If records make the reprocessing fail, it is divided until each of them is alone, as a batch is.

    Returns None if an earlier attempt of the run has already done this, or if no dead letters are selected.
    Raises PositionLost while a table is rolled back or filled again, because this may add the same records,
    or if marks of reprocessed dead letters were lost. Raises ConfigurationError for a selected table without
    mode append, DeadLettersLeftOut, RecordsUnread, EarlierAttemptLate and the errors of
    `evolve_until_stable`.
    """
    tables, default_namespace = (
        IcebergTableFormat(batch_context.catalog),
        batch_context.lake.settings.default_namespace,
    )
    ingestion_tables = load_ingestion_tables(
        ingest, batch_context.lake.nessie, batch_context.catalog, default_namespace, tables
    )
    if ingestion_tables.dead_letter_table is None:
        return None
    if any(
        run.run_id == batch_context.run_id
        for run in reprocessing_runs(ingest.name, ingestion_tables.dead_letter_table.metadata.properties)
    ):
        return None
    position = require_reprocessable_tables(ingestion_tables, batch_context.branch)
    session = batch_context.session()
    frame = _mark_selected(session, ingestion_tables, batch_context, selection, position)
    counts = {(row[0], row[1]): int(row[2]) for row in _count_by_topic(frame)}
    if not counts:
        return None
    pairs = [*counts]
    record_format = (
        ingest.format.with_empty_cache() if isinstance(ingest.format, RegistryAvro) else ingest.format
    )
    failed_scans = FailedScans()

    def build_work(targets: BatchTargets) -> Work:
        return Work(
            batch_context.run_id,
            [topic for topic, _ in pairs],
            [incarnation for _, incarnation in pairs],
            build_worker_targets(targets, {}),
            batch_context.lake.settings.worker_file_io_properties(),
            int(clock().timestamp() * 1_000_000),
            len(ingestion_tables.ingest.families),
            ingest.most_tables,
            ingest.most_columns,
            is_reprocessing=True,
        )

    def evolve(records: DataFrame, tables_before: IngestionTables) -> SchemaEvolution:
        def scan_targets(ingestion_tables: IngestionTables, targets: BatchTargets) -> ScanResult:
            work = build_work(targets)
            with failed_scans.remember_failure(work, targets.dead_letters.table.io):
                return scan_records(records, ingestion_tables.ingest, record_format, targets, {}, work)

        return evolve_until_stable(
            tables_before, batch_context, records, record_format, scan_targets, ids, tables
        )

    ids = {topic: topic_id(incarnation) for topic, incarnation in pairs}
    try:
        stored_pass = run_divided_pass(frame, ingestion_tables, batch_context, evolve)
    finally:
        failed_scans.delete_files()
    evolution = stored_pass.evolution
    add_unwritable_dead_letters(stored_pass, frame, build_work)
    with delete_on_failure(evolution.scanned, evolution.targets):
        all_count, reached_count = sum(counts.values()), stored_pass.reached_count
        require_all_read(stored_pass, all_count if reached_count is None else reached_count, batch_context)
        if stored_pass.reached is not None:
            _unmark_others(session, ingestion_tables, batch_context, stored_pass.reached, position)
        if left_out := evolution.scanned.counts["left_out"]:
            raise DeadLettersLeftOut(
                f"{left_out} of {evolution.scanned.counts['records']} dead letters would give neither a row"
                f" nor a dead letter, so ingestion {ingest.name} reprocesses none of them.",
                branch=batch_context.branch,
                run_id=batch_context.run_id,
                hint="Select others with --table, --error-kind or --since, and report this dead letter with"
                " its record.",
            )
        _commit_rows(evolution, batch_context, position, tables)
    return ReprocessingResult(
        evolution.ingestion_tables.ingest, evolution.targets, evolution.scanned, stored_pass.notes()
    )


def _count_by_topic(frame: DataFrame) -> list[Row]:
    """Return rows of topic, incarnation and the number of its records."""
    return frame.groupBy("__topic", "__incarnation").count().collect()


def require_reprocessable_tables(ingestion_tables: IngestionTables, branch: str) -> Offsets:
    """Raise PositionLost if dead letters cannot be reprocessed now; return the tables' reached offsets.

    They cannot while a table is rolled back or filled again, or if marks of dead letters were lost.
    """
    ingest = ingestion_tables.ingest
    require_reprocessed_rows(
        ingest.name,
        ingestion_tables.loaded_tables,
        on_rollback=ingest.on_rollback,
        branch=branch,
        dead_letter_table_name=ingestion_tables.dead_letter_table_name,
        is_reprocessing=True,
    )
    # With "skip", lost records are not read again, so a row from a dead letter cannot be added twice.
    rule: OnRollback = "skip" if ingest.on_rollback == "skip" else "replay"
    progress = read_progress(ingest.name, ingestion_tables.loaded_tables, on_rollback=rule)
    if replay_offsets := progress.replay_offsets:
        raise PositionLost(
            "The table is being filled again, which may add the rows of these dead letters.",
            table=next(iter(replay_offsets)),
            hint="Let the ingestion run until the table has caught up, then reprocess.",
            reason="replay_pending",
        )
    return progress.position


def position_properties(ingest: Ingest, position: Offsets, run_id: str) -> dict[str, str]:
    """Return the entry of a snapshot's summary that shows which records the table had at that time.

    A replay without this position would start before batches that had nothing for the table, and would read
    the reprocessed records again. A rebase sees by it that later batches concern other records.
    """
    progress = TableProgress(position, run_id, run_id)
    return {LakeProperty.REPROCESSED_PREFIX + ingest.name: progress.to_json()}


def _mark_selected(
    session: SparkSession,
    ingestion_tables: IngestionTables,
    batch_context: BatchContext,
    selection: DeadLetterSelection,
    position: Offsets,
) -> DataFrame:
    """Mark the selected dead letters on the branch, and return them as a frame of records.

    The frame includes the dead letters that an earlier attempt of the run has marked. Its column `FOR_TABLE`
    has the table of each dead letter.
    """
    condition, arguments = selection.to_sql(ingestion_tables)
    table_sql = f"nessie.{quote_spark_path(ingestion_tables.dead_letter_identifier)}"
    with set_session_properties(session, _mark_properties(ingestion_tables, batch_context, position)):
        session.sql(
            f"UPDATE {table_sql} SET reprocessed_in = :run WHERE {condition}",  # noqa: S608 - by name
            args={**arguments, "run": batch_context.run_id},
        )
    dead_letters = session.table(table_sql).filter(F.col("reprocessed_in") == batch_context.run_id)
    columns = ("topic", "incarnation", "partition", "offset", "timestamp", "key", "value", "headers")
    return dead_letters.select(
        *(F.col(name).alias(f"__{name}") for name in columns), F.col("table").alias(FOR_TABLE)
    )


def _mark_properties(
    ingestion_tables: IngestionTables, batch_context: BatchContext, position: Offsets
) -> dict[str, str]:
    """Return the snapshot properties of an update of the marks."""
    return {
        **batch_context.snapshot_properties,
        **position_properties(ingestion_tables.ingest, position, batch_context.run_id),
        LakeProperty.WRITE_MODE: "upsert",
    }


def _unmark_others(
    session: SparkSession,
    ingestion_tables: IngestionTables,
    batch_context: BatchContext,
    reached: Expression,
    position: Offsets,
) -> None:
    """Remove the run's mark from the dead letters that it did not reach, so that they wait again.

    `reached` is the condition that the run has reached a dead letter.
    """
    table_sql = f"nessie.{quote_spark_path(ingestion_tables.dead_letter_identifier)}"
    is_marked = F.col("reprocessed_in") == batch_context.run_id
    others = (
        session.table(table_sql)
        .where(is_marked & ~F.coalesce(reached, F.lit(False)))
        .select(*(F.col(name).alias(f"other_{name}") for name in _RECORD_POSITION))
        .distinct()
    )
    is_same = [F.col(f"{table_sql}.{name}") == F.col(f"other_{name}") for name in _RECORD_POSITION]
    with set_session_properties(session, _mark_properties(ingestion_tables, batch_context, position)):
        merge = others.mergeInto(table_sql, reduce(and_, is_same))
        is_own_mark = F.col(f"{table_sql}.reprocessed_in") == batch_context.run_id
        merge.whenMatched(is_own_mark).update({"reprocessed_in": F.lit(None).cast("string")}).merge()


def _commit_rows(
    evolution: SchemaEvolution, batch_context: BatchContext, position: Offsets, tables: IcebergTableFormat
) -> None:
    changes, ingest = [], evolution.ingestion_tables.ingest
    at_position = position_properties(ingest, position, batch_context.run_id)
    for number, target in enumerate(evolution.targets):
        files, is_dead_letters = (
            evolution.scanned.files.get(number, []),
            target is evolution.targets.dead_letters,
        )
        if files or is_dead_letters:
            mode = {LakeProperty.WRITE_MODE: "append", LakeProperty.ASSET: "/".join(target.identifier)}
            table_properties, snapshot_properties = (
                evolution.ingestion_tables.changed_properties if is_dead_letters else {},
                {**batch_context.snapshot_properties, **mode, **at_position},
            )
            changes.append(
                BatchTableChange(
                    target.identifier,
                    target.table,
                    files,
                    None,
                    snapshot_properties,
                    table_properties,
                    reprocessed_by=batch_context.run_id,
                )
            )
    commit_tables(
        batch_context.lake.nessie,
        batch_context.catalog,
        batch_context.branch,
        changes,
        ingestion=ingest.name,
        message=f"Reprocess dead letters of {ingest.name}",
        properties=batch_context.commit_properties,
        tables=tables,
    )


_POSITION_COLUMNS = ("topic", "partition", "offset")
_RECORD_POSITION = (*_POSITION_COLUMNS, "incarnation")


def with_waiting_tables(records: DataFrame, dead_letter_table: Table | None, ranges: Ranges) -> DataFrame:
    """Add the column `WAITING_TABLES`: an array of the tables for which a dead letter of the record waits.

    The text "" in it stands for any table. The column is missing if no record has a waiting dead letter.
    A table that is filled again may by now be able to take such a record. Its dead letter would then add the
    row a second time when it is reprocessed. Cost: reads all waiting dead letters, and keeps those of the
    ranges.
    """
    if dead_letter_table is None:
        return records
    columns = (*_POSITION_COLUMNS, "incarnation", "table")
    waiting_rows = dead_letter_table.scan(
        row_filter="reprocessed_in is null", selected_fields=columns
    ).to_arrow()
    parts = [
        waiting_rows.filter(_is_in_range(waiting_rows, partition, offset_range))
        for partition, offset_range in ranges.items()
    ]
    dead_letters = pa.concat_tables(parts) if parts else waiting_rows.slice(0, 0)
    if not dead_letters.num_rows:
        return records
    positions = dead_letters.select([*_POSITION_COLUMNS]).append_column(
        WAITING_TABLES, pc.fill_null(dead_letters["table"], "")
    )
    grouped = positions.group_by([*_POSITION_COLUMNS]).aggregate([(WAITING_TABLES, "list")])
    named = grouped.rename_columns(
        [*(f"_{WAITING_TABLES}_{name}" for name in _POSITION_COLUMNS), WAITING_TABLES]
    )
    waiting = records.sparkSession.createDataFrame(named)
    is_same_record = [F.col(f"__{name}") == F.col(f"_{WAITING_TABLES}_{name}") for name in _POSITION_COLUMNS]
    joined = records.join(F.broadcast(waiting), is_same_record, "left")
    return joined.drop(*(f"_{WAITING_TABLES}_{name}" for name in _POSITION_COLUMNS))


def _is_in_range(
    dead_letters: pa.Table, partition: TopicPartition, offset_range: OffsetRange
) -> pa.ChunkedArray:
    """Return which dead letters come from this offset range of a partition."""
    conditions = [
        pc.equal(dead_letters["topic"], partition.topic),
        pc.equal(dead_letters["incarnation"], partition.incarnation),
        pc.equal(dead_letters["partition"], partition.partition),
        pc.greater_equal(dead_letters["offset"], offset_range.start),
        pc.less(dead_letters["offset"], offset_range.end),
    ]
    return pc.fill_null(reduce(pc.and_, conditions), fill_value=False)
