"""One slice of reprocessed kept records: decode it, and replace the rows and dead letters that differ.

A row is identified by the position of its record: topic, partition and offset, in columns that the table
fills from `attributes`.

Dead letters are compared in the same way. A waiting dead letter that the decoder would write again is left as
it is. The other waiting dead letters of the slice's records are marked as reprocessed, as in `reprocessing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import reduce
from operator import and_, or_

from pyiceberg.table import Table
from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.ingest.batch_commit import (
    RECEIVED_AT,
    BatchTableChange,
    commit_tables,
    create_staging_table,
    list_staging_tables,
)
from branchlake_dagster.ingest.batch_context import BatchContext, IngestionTables
from branchlake_dagster.ingest.batch_tables import DEAD_LETTER_SCHEMA, BatchTargets, Identifier, Target
from branchlake_dagster.ingest.binary_formats import RegistryAvro
from branchlake_dagster.ingest.declaration import ExpandedIngest, Ingest
from branchlake_dagster.ingest.divided_reprocessing import (
    StoredPass,
    add_unwritable_dead_letters,
    require_all_read,
    run_divided_pass,
)
from branchlake_dagster.ingest.errors import RowsNotIdentified
from branchlake_dagster.ingest.formats import Format
from branchlake_dagster.ingest.offsets import Offsets, topic_id
from branchlake_dagster.ingest.record_frames import RECORD_COLUMNS
from branchlake_dagster.ingest.reprocessing import position_properties
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

_RECORD_POSITION = ("topic", "incarnation", "partition", "offset")
"""The columns that identify a record among dead letters and kept records."""
_ACTION = "__action"


@dataclass(frozen=True)
class RawSlice:
    """The kept records that were received from `first` to `last`, both inclusive."""

    first: datetime
    last: datetime


@dataclass
class RawReprocessingResult:
    """The result of a reprocessing, or of one slice, on its branch. `counts` are those of all slices.

    `targets` are all tables of the last slice, also those that were not changed.
    """

    ingest: ExpandedIngest
    targets: BatchTargets
    counts: dict[str, int] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    """The dotted names of the tables with changed rows or dead letters."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about records that made the reprocessing fail."""


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


class RawSliceReprocessing:
    """Decodes the records of one slice, and replaces the rows and dead letters that differ on the branch."""

    def __init__(
        self,
        ingestion_tables: IngestionTables,
        batch_context: BatchContext,
        session: SparkSession,
        raw_slice: RawSlice,
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
        stored_pass = self._decode(records, ranges)
        evolution = stored_pass.evolution
        scanned, targets = evolution.scanned, evolution.targets
        with delete_on_failure(scanned, targets):
            if stored_pass.reached is not None:
                records = records.where(stored_pass.reached)
                ranges = _find_ranges(records)
            require_all_read(stored_pass, sum(one.count for one in ranges), self._batch_context)
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
        return RawReprocessingResult(
            evolution.ingestion_tables.ingest, targets, counts, changed, stored_pass.notes()
        )

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

    def _decode(self, records: DataFrame, ranges: Sequence[_PositionRange]) -> StoredPass:
        """Decode the slice, and write its rows and dead letters to data files of staging tables.

        A record that makes the slice fail gives no rows and one dead letter of kind unwritable.
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

        def build_work(targets: BatchTargets) -> Work:
            staging_info: dict[int, tuple[str, Mapping[str, str]]] = {
                number: (table.metadata.model_dump_json(), {}) for number, (_, table) in self._staged.items()
            }
            return Work(
                batch_context.run_id,
                [topic for topic, _ in pairs],
                [incarnation for _, incarnation in pairs],
                build_worker_targets(targets, staging_info),
                batch_context.lake.settings.worker_file_io_properties(),
                self._received_us,
                len(self._ingestion_tables.ingest.families),
                ingest.most_tables,
                ingest.most_columns,
            )

        def evolve(records: DataFrame, tables_before: IngestionTables) -> SchemaEvolution:
            def scan_targets(ingestion_tables: IngestionTables, targets: BatchTargets) -> ScanResult:
                self._create_staging_tables(targets)
                work = build_work(targets)
                with failed_scans.remember_failure(work, targets.dead_letters.table.io):
                    return scan_records(records, ingestion_tables.ingest, record_format, targets, {}, work)

            return evolve_until_stable(
                tables_before, batch_context, records, record_format, scan_targets, ids, self._tables
            )

        ids = {topic: topic_id(incarnation) for topic, incarnation in pairs}
        try:
            stored_pass = run_divided_pass(frame, self._ingestion_tables, batch_context, evolve)
        finally:
            failed_scans.delete_files()
        add_unwritable_dead_letters(stored_pass, frame, build_work)
        return stored_pass

    def _create_staging_tables(self, targets: BatchTargets) -> None:
        """Create the staging tables of a pass for all tables and the dead letters, in `self._staged`."""
        staged_targets = [*enumerate(targets.tables), (targets.dead_letter_number, targets.dead_letters)]
        self._staged = {
            number: create_staging_table(
                self._batch_context.catalog, target, self._batch_id, with_attributes=False
            )
            for number, target in staged_targets
        }
        self._staging_tables += [table for _, table in self._staged.values()]

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
    """The first and last offset of a slice's records in one partition, and the number of these records."""

    topic: str
    incarnation: str
    partition: int
    first: int
    last: int
    count: int

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
    offsets = (F.min("offset"), F.max("offset"), F.count("offset"))
    rows = records.groupBy("topic", "incarnation", "partition").agg(*offsets).collect()
    return sorted((_PositionRange(*row) for row in rows), key=lambda one: (one.topic, one.partition))
