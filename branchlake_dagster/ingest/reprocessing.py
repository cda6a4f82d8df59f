"""Dead letters that are reprocessed, and those that wait while their table is filled again.

Dead letters put back through the input, after whatever kept them out was put right.

Why it may be done twice: a letter is marked with the batch that takes it up (`reprocessed_in`), and only
letters without a mark are taken up. Mark and rows are on one branch, and come to `main` in one commit or not
at all. Of two that take up the same letters at once both rewrite the same data files of the dead letters'
table, and set its property `branchlake.reprocessed.…` to different values: the second one is not published.
An attempt of the same run that comes after one which had committed finds its own property, and does nothing.
Tables that took rows have that property too, with the snapshot: so a roll-back of these, or of the marks, is
seen, by no offset of theirs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.table import Table
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.batch_commit import BatchTableChange, commit_tables
from branchlake_dagster.ingest.batch_context import BatchContext, IngestionTables, load_ingestion_tables
from branchlake_dagster.ingest.batch_tables import Target
from branchlake_dagster.ingest.binary_formats import RegistryAvro
from branchlake_dagster.ingest.declaration import ExpandedIngest, Ingest
from branchlake_dagster.ingest.errors import LettersLeftOut, PositionLost
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
from branchlake_dagster.ingest.scan import FailedScans, ScanResult, build_worker_targets, scan_records
from branchlake_dagster.ingest.schema_evolution import SchemaEvolution, evolve_until_stable
from branchlake_dagster.ingest.worker_writer import Work
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.spark.session import quote_spark_path
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.spark_frames import set_session_properties


@dataclass(frozen=True)
class DeadLetterSelection:
    """Which dead letters: of these kinds, of this table, received from `since` on and before `until`.

    What is None or empty does not choose. Letters that were taken up before are never chosen.
    """

    kinds: Sequence[str] = ()
    table: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def to_tag(self) -> str:
        """As a tag of a run has it."""
        times = {name: moment and moment.isoformat() for name, moment in self._times().items()}
        return json.dumps({"kinds": list(self.kinds), "table": self.table, **times})

    @classmethod
    def from_tag(cls, tag: str) -> DeadLetterSelection:
        """Back again."""
        fields = json.loads(tag)
        times = {
            name: datetime.fromisoformat(fields[name]) if fields[name] else None
            for name in ("since", "until")
        }
        return cls(tuple(fields["kinds"]), fields["table"], **times)

    def _times(self) -> dict[str, datetime | None]:
        return {"since": self.since, "until": self.until}

    def to_sql(self, ingestion_tables: IngestionTables) -> tuple[str, dict[str, object]]:
        """The condition in SQL, and its arguments.

        Without the letters of tables whose rows take each other's place: a newer record may have.
        """
        ingest = ingestion_tables.ingest
        names = [
            n
            for n, table in zip(ingestion_tables.identifiers, ingest.tables, strict=False)
            if table.mode == "append"
        ]
        if self.table is not None and self.table not in names:
            raise ConfigurationError(
                f"Letters of {self.table} cannot be put back by ingestion {ingest.name}.",
                table=self.table,
                hint=f"Name one of its tables of mode append: {', '.join(names) or 'there is none'}. Into the"
                " others a newer record may have been merged since; produce the record again instead.",
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
    """What became of the letters that were put back."""

    ingest: ExpandedIngest
    targets: Sequence[Target]
    scanned: ScanResult


def count_dead_letters(
    session: SparkSession, ingestion_tables: IngestionTables, selection: DeadLetterSelection
) -> list[tuple[str | None, str, int]]:
    """How many letters are chosen, by table and kind."""
    condition, arguments = selection.to_sql(ingestion_tables)
    table_sql = quote_spark_path(list(ingestion_tables.identifiers.values())[-1])
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
    """Put the chosen dead letters into their tables on the branch; what fails again is a new dead letter.

    None: the branch has it from an earlier attempt, or there are none. Raises PositionLost while a table is
    rolled back or filled again, which would add the same records, and where letters were marked and are not
    any more; LettersLeftOut; what `evolve_until_stable` raises; and EarlierAttemptLate.
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
    require_reprocessed_rows(
        ingest.name,
        ingestion_tables.loaded_tables,
        on_rollback=ingest.on_rollback,
        branch=batch_context.branch,
        dead_letter_table_name=ingestion_tables.dead_letter_table_name,
        is_reprocessing=True,
    )
    # What is left out on purpose is not read again, so no letter's row comes twice.
    rule: OnRollback = "skip" if ingest.on_rollback == "skip" else "replay"
    progress = read_progress(ingest.name, ingestion_tables.loaded_tables, on_rollback=rule)
    if replay_offsets := progress.replay_offsets:
        raise PositionLost(
            "The table is to be filled again, which may add what these dead letters would.",
            table=next(iter(replay_offsets)),
            hint="Let the ingestion read until the table has caught up, then reprocess.",
            reason="replay_pending",
        )
    session = batch_context.session()
    frame = _mark_selected(session, ingestion_tables, batch_context, selection)
    pairs = [tuple(row) for row in frame.select("__topic", "__incarnation").distinct().collect()]
    if not pairs:
        return None
    record_format = (
        ingest.format.with_empty_cache() if isinstance(ingest.format, RegistryAvro) else ingest.format
    )
    failed_scans = FailedScans()

    def scan_targets(ingestion_tables: IngestionTables, targets: Sequence[Target]) -> ScanResult:
        work = Work(
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
        with failed_scans.remember_failure(work, targets[-1].table.io):
            return scan_records(frame, ingestion_tables.ingest, record_format, targets, {}, work)

    ids = {topic: topic_id(incarnation) for topic, incarnation in pairs}
    try:
        evolution = evolve_until_stable(
            ingestion_tables, batch_context, frame, record_format, scan_targets, ids, tables
        )
    finally:
        failed_scans.delete_files()
    if left_out := evolution.scanned.counts["left_out"]:
        raise LettersLeftOut(
            f"Of {evolution.scanned.counts['records']} dead letters {left_out} would give neither a row nor a"
            f" dead letter; ingestion {ingest.name} puts none back.",
            branch=batch_context.branch,
            run_id=batch_context.run_id,
            hint="Choose others with --table, --error-kind or --since, and report this one with its record.",
        )
    _commit_rows(evolution, batch_context, progress.position, tables)
    return ReprocessingResult(evolution.ingestion_tables.ingest, evolution.targets, evolution.scanned)


def _mark_selected(
    session: SparkSession,
    ingestion_tables: IngestionTables,
    batch_context: BatchContext,
    selection: DeadLetterSelection,
) -> DataFrame:
    """The chosen letters as records, marked on the branch. Also those that an earlier attempt has marked."""
    condition, arguments = selection.to_sql(ingestion_tables)
    table_sql = f"nessie.{quote_spark_path(list(ingestion_tables.identifiers.values())[-1])}"
    with set_session_properties(
        session, {**batch_context.snapshot_properties, LakeProperty.WRITE_MODE: "upsert"}
    ):
        session.sql(
            f"UPDATE {table_sql} SET reprocessed_in = :run WHERE {condition}",  # noqa: S608 - by name
            args={**arguments, "run": batch_context.run_id},
        )
    dead_letters = session.table(table_sql).filter(F.col("reprocessed_in") == batch_context.run_id)
    columns = ("topic", "incarnation", "partition", "offset", "timestamp", "key", "value", "headers")
    return dead_letters.select(
        *(F.col(name).alias(f"__{name}") for name in columns), F.col("table").alias(FOR_TABLE)
    )


def _commit_rows(
    evolution: SchemaEvolution, batch_context: BatchContext, position: Offsets, tables: IcebergTableFormat
) -> None:
    changes, ingest = [], evolution.ingestion_tables.ingest
    # A replay would begin before what batches told that had nothing for a table, and their letters are in it.
    position_properties = {
        LakeProperty.REPROCESSED_PREFIX + ingest.name: TableProgress(
            position, batch_context.run_id, batch_context.run_id
        ).to_json()
    }
    for number, target in enumerate(evolution.targets):
        files, is_dead_letters = evolution.scanned.files.get(number, []), target is evolution.targets[-1]
        if files or is_dead_letters:
            mode = {LakeProperty.WRITE_MODE: "append", LakeProperty.ASSET: "/".join(target.identifier)}
            table_properties, snapshot_properties = (
                evolution.ingestion_tables.changed_properties if is_dead_letters else {},
                {**batch_context.snapshot_properties, **mode, **position_properties},
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


def with_waiting_tables(records: DataFrame, dead_letter_table: Table | None, ranges: Ranges) -> DataFrame:
    """The records, with a column of the tables for which a letter of them waits; "" is one for any table.

    A table that is filled again may take by now what it could not then: its letter would add the row once
    more when it is put back. All letters that wait are read, and those of the ranges count.
    """
    if dead_letter_table is None:
        return records
    columns = (*_POSITION_COLUMNS, "incarnation", "table")
    waiting_rows = dead_letter_table.scan(
        row_filter="reprocessed_in is null", selected_fields=columns
    ).to_arrow()
    parts = [
        waiting_rows.filter(_is_in_range(waiting_rows, one, offset_range))
        for one, offset_range in ranges.items()
    ]
    dead_letters = pa.concat_tables(parts) if parts else waiting_rows.slice(0, 0)
    if not dead_letters.num_rows:
        return records
    positions = dead_letters.select([*_POSITION_COLUMNS]).append_column(
        WAITING_TABLES, pc.fill_null(dead_letters["table"], "")
    )
    grouped = positions.group_by([*_POSITION_COLUMNS]).aggregate([(WAITING_TABLES, "list")])
    named = grouped.rename_columns(
        [*(f"_{WAITING_TABLES}_{one}" for one in _POSITION_COLUMNS), WAITING_TABLES]
    )
    waiting = records.sparkSession.createDataFrame(named)
    is_same_record = [F.col(f"__{one}") == F.col(f"_{WAITING_TABLES}_{one}") for one in _POSITION_COLUMNS]
    joined = records.join(F.broadcast(waiting), is_same_record, "left")
    return joined.drop(*(f"_{WAITING_TABLES}_{one}" for one in _POSITION_COLUMNS))


def _is_in_range(
    dead_letters: pa.Table, partition: TopicPartition, offset_range: OffsetRange
) -> pa.ChunkedArray:
    """Of which letters the records are in this range of a partition."""
    conditions = [
        pc.equal(dead_letters["topic"], partition.topic),
        pc.equal(dead_letters["incarnation"], partition.incarnation),
        pc.equal(dead_letters["partition"], partition.partition),
        pc.greater_equal(dead_letters["offset"], offset_range.start),
        pc.less(dead_letters["offset"], offset_range.end),
    ]
    return pc.fill_null(reduce(pc.and_, conditions), fill_value=False)
