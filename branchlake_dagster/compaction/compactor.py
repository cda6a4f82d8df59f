"""Compact tables: plan, rewrite on a branch by Spark, prove, and publish each table by one commit.

Each table gets its own branch at the head of `main`. If the process is killed, `main` contains a table's
compaction either completely or not at all, and the branch is removed later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from pyiceberg.table import Table

from branchlake_dagster.compaction.compaction_branch import open_branch, remove_abandoned_branches
from branchlake_dagster.compaction.compaction_plan import (
    CompactionOptions,
    CompactionPlan,
    PlannedPartition,
    plan_partitions,
    split_into_units,
)
from branchlake_dagster.compaction.errors import RewriteFailed
from branchlake_dagster.compaction.file_measures import PartitionFiles, measure_table
from branchlake_dagster.compaction.result import (
    CompactedTable,
    CompactionProgress,
    CompactionResult,
    LeftPartition,
    describe_partition,
)
from branchlake_dagster.compaction.rewritten_files import RewrittenPartition, list_rewritten_partitions
from branchlake_dagster.compaction.row_proof import RowProof
from branchlake_dagster.compaction.spark_rewrite import join_predicates, rewrite_partitions
from branchlake_dagster.compaction.table_publication import RewrittenTable, TablePublisher
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import ContentKey, IcebergTable, Reference
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.tables.errors import TableMissing
from branchlake_dagster.wording import CodedReason

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def plan_compactions(
    lake: Lakehouse,
    tables: Iterable[str] | None = None,
    options: CompactionOptions | None = None,
    *,
    now: datetime | None = None,
) -> CompactionPlan:
    """Measure tables on `main` and plan what to compact. Changes nothing, and needs no Spark.

    `tables` are dotted names; None means all tables. `now` is the present time, which decides which
    partitions are hot. Reads each table's metadata and manifests. A table that cannot be read is in
    `unreadable` of the plan, and the other tables are planned. Raises TableMissing for a name that `main`
    does not have, and ConfigurationError if a table lacks a column of the options.
    """
    chosen_options = options or CompactionOptions()
    measures: list[PartitionFiles] = []
    unreadable: dict[str, Exception] = {}
    for name, table in _open_tables(lake, tables):
        try:
            loaded = table()
            _require_columns(loaded, name, chosen_options.sort_columns)
            measures += measure_table(loaded, name, small_file_bytes=chosen_options.small_file_bytes)
        except ConfigurationError:
            raise
        except Exception as error:  # noqa: BLE001 - PyIceberg raises many classes for hostile metadata
            unreadable[name] = error
    plan = plan_partitions(measures, chosen_options, now=now or datetime.now(UTC))
    return replace(plan, unreadable=unreadable)


def _open_tables(lake: Lakehouse, tables: Iterable[str] | None) -> Iterator[tuple[str, Callable[[], Table]]]:
    """Yield the names of tables on `main`, each with a function that loads the table."""
    client, table_format = lake.nessie, IcebergTableFormat(lake.catalog())
    keys = (
        [entry.key for entry in client.entries(MAIN, filter="entry.contentType == 'ICEBERG_TABLE'")]
        if tables is None
        else [ContentKey.from_path(name) for name in tables]
    )
    contents = client.contents(MAIN, keys) if keys else {}
    for key in keys:
        content = contents.get(key)
        if not isinstance(content, IcebergTable):
            raise TableMissing(f"Main has no table {key.name}.", table=key.name, hint="Check the name.")
        yield key.name, partial(_load_table, table_format, key, content)


def _load_table(table_format: IcebergTableFormat, key: ContentKey, content: IcebergTable) -> Table:
    return table_format.open(key, content).table


def _require_columns(table: Table, name: str, sort_columns: Sequence[str]) -> None:
    """Raise ConfigurationError if the table lacks a column. Terms such as `bucket(8, id)` are not checked."""
    known_names = {column.lower() for column in table.schema().column_names}
    for term in sort_columns:
        column = term.split()[0].strip("`")
        if "(" not in term and column.lower() not in known_names:
            raise ConfigurationError(
                f"The table {name} has no column {column}.",
                hint=f"Its columns are {', '.join(table.schema().column_names)}.",
                table=name,
                reason="unknown_column",
                subject=column,
            )


@dataclass
class _Pass:
    """The limits of one pass. `stopped` is the reason why it must stop; None until then."""

    may_continue: Callable[[], bool]
    deadline: float | None
    monotonic: Callable[[], float]
    stopped: CodedReason | None = field(default=None)

    def may_go_on(self) -> bool:
        """Return whether another rewrite may begin."""
        if self.stopped is None and not self.may_continue():
            self.stopped = CodedReason("the pass was paused", "paused")
        if self.stopped is None and self.deadline is not None and self.monotonic() >= self.deadline:
            self.stopped = CodedReason("the time limit was reached", "out_of_time")
        return self.stopped is None


class Compactor:
    """Compacts tables of one lake. `rewrite` rewrites the files; tests replace it."""

    def __init__(
        self,
        lake: Lakehouse,
        tables: IcebergTableFormat,
        *,
        rewrite: Callable[..., None] = rewrite_partitions,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lake = lake
        self._tables = tables
        self._publisher = TablePublisher(lake.nessie, tables)
        self._rewrite = rewrite
        self._monotonic = monotonic

    @classmethod
    def of_lake(cls, lake: Lakehouse) -> Compactor:
        """Create the compactor of a lake."""
        return cls(lake, IcebergTableFormat(lake.catalog()))

    def run(
        self,
        plan: CompactionPlan,
        *,
        may_continue: Callable[[], bool] = lambda: True,
        report: Callable[[CompactionProgress], None] = lambda _: None,
    ) -> CompactionResult:
        """Compact the partitions of a plan, table by table.

        `may_continue` is called before each table and each further rewrite; if it returns False, finished
        rewrites are published and the pass ends. `report` is called when a step begins. The error of one
        table is recorded in its outcome and does not stop the others. Removes branches that earlier passes
        abandoned.
        """
        started = self._monotonic()
        seconds = plan.options.max_seconds
        limits = _Pass(may_continue, None if seconds is None else started + seconds, self._monotonic)
        removed_branches = remove_abandoned_branches(self._lake.nessie, now=datetime.now(UTC))
        compacted_tables = [CompactedTable(name, error=error) for name, error in plan.unreadable.items()]
        for name in plan.tables:
            if not limits.may_go_on():
                break
            partitions = [one for one in plan.partitions if one.measured.table == name]
            table_started = self._monotonic()
            try:
                compacted = self._compact_table(name, partitions, plan.options, limits, report)
            except Exception as error:  # noqa: BLE001 - Spark's client raises classes that nobody declared
                compacted = CompactedTable(name, error=error)
            report(CompactionProgress(name, "done", len(compacted.partitions), len(partitions)))
            compacted_tables.append(replace(compacted, seconds=self._monotonic() - table_started))
        return CompactionResult(
            tuple(compacted_tables), limits.stopped, tuple(removed_branches), self._monotonic() - started
        )

    def _compact_table(
        self,
        name: str,
        partitions: Sequence[PlannedPartition],
        options: CompactionOptions,
        limits: _Pass,
        report: Callable[[CompactionProgress], None],
    ) -> CompactedTable:
        key = ContentKey.from_path(name)
        with open_branch(self._lake.nessie) as branch:
            before = self._lake.nessie.contents(branch.name, [key]).get(key)
            if not isinstance(before, IcebergTable):
                raise TableMissing(
                    f"Main no longer has the table {name}.", table=name, hint="Plan the compaction again."
                )
            session = self._lake.spark_session(branch.name)
            try:
                started = self._monotonic()
                done, failed = self._rewrite_units(session, key, partitions, options, limits, report)
                rewrite_seconds = self._monotonic() - started
                report(CompactionProgress(name, "prove", len(done), len(partitions)))
                rewritten = self._load_rewritten(key, branch, before)
                started = self._monotonic()
                if rewritten.partitions:
                    proof = RowProof(self._lake.nessie, self._tables, session)
                    rewritten_names = {one.partition for one in rewritten.partitions}
                    # A unit may fail after its files were rewritten.
                    proved = [one for one in partitions if one.measured.partition in rewritten_names]
                    proof.prove(rewritten, join_predicates(proved or done))
                proof_seconds = self._monotonic() - started
            finally:
                session.stop()
            report(CompactionProgress(name, "publish", len(done), len(partitions)))
            compacted = CompactedTable(
                name,
                read_bytes=sum(
                    file.handle.file_size_in_bytes for one in rewritten.partitions for file in one.removed
                ),
                rewrite_seconds=rewrite_seconds,
                proof_seconds=proof_seconds,
                error=next(iter(failed.values()), None),
            )
            return self._publish(compacted, rewritten, partitions, (done, failed), options)

    def _rewrite_units(
        self,
        session: SparkSession,
        key: ContentKey,
        partitions: Sequence[PlannedPartition],
        options: CompactionOptions,
        limits: _Pass,
        report: Callable[[CompactionProgress], None],
    ) -> tuple[list[PlannedPartition], dict[str, RewriteFailed]]:
        """Rewrite the partitions unit by unit, until the pass must stop.

        Return the partitions that Spark rewrote, and a dict with the errors of failed partitions. Partitions
        that were not reached are in neither. Raises RewriteFailed if every unit failed.
        """
        done: list[PlannedPartition] = []
        failed: dict[str, RewriteFailed] = {}
        for unit in split_into_units(partitions, unit_bytes=options.unit_bytes):
            if (done or failed) and not limits.may_go_on():
                break
            size = sum(planned.bytes for planned in done)
            report(CompactionProgress(key.name, "rewrite", len(done), len(partitions), size))
            try:
                self._rewrite(session, key, unit, options)
            except RewriteFailed as error:
                failed |= {planned.measured.partition: error for planned in unit}
            else:
                done += unit
        if failed and not done:
            raise next(iter(failed.values()))
        return done, failed

    def _load_rewritten(self, key: ContentKey, branch: Reference, before: IcebergTable) -> RewrittenTable:
        """Return the files that were rewritten, from the branch's manifests. Spark's report is not used."""
        after = self._lake.nessie.contents(branch.name, [key])[key]
        assert isinstance(after, IcebergTable)  # noqa: S101 - the branch had it before
        rewritten = list_rewritten_partitions(key.name, self._tables.load_change(key, before, after))
        return RewrittenTable(key, branch.name, branch.hash, before, after, tuple(rewritten))

    def _publish(
        self,
        compacted: CompactedTable,
        rewritten: RewrittenTable,
        partitions: Sequence[PlannedPartition],
        passed: tuple[Sequence[PlannedPartition], Mapping[str, RewriteFailed]],
        options: CompactionOptions,
    ) -> CompactedTable:
        """Publish the rewritten partitions. Return `compacted` with each planned partition's outcome.

        `passed` is the result of `_rewrite_units`.
        """
        done, failed = passed
        reasons = {
            name: CodedReason(f"Spark failed: {error}", "rewrite_failed") for name, error in failed.items()
        }
        if not rewritten.partitions:
            return replace(compacted, left=tuple(_leave(partitions, done, reasons, rewritten.partitions)))
        publication = self._publisher.publish(
            rewritten, fold_deletes_beside_runs=options.fold_deletes_beside_runs
        )
        return replace(
            compacted,
            commit=publication.commit,
            partitions=tuple(map(describe_partition, publication.committed)),
            left=tuple(_leave(partitions, done, {**reasons, **publication.given_way}, publication.committed)),
            is_rebased=publication.is_rebased,
        )


def _leave(
    partitions: Sequence[PlannedPartition],
    done: Sequence[PlannedPartition],
    reasons: Mapping[str, CodedReason],
    committed: Sequence[RewrittenPartition],
) -> Iterable[LeftPartition]:
    """Yield the planned partitions that were not committed, each with the reason."""
    committed_names = {one.partition for one in committed}
    passed_names = {planned.measured.partition for planned in done}
    for planned in partitions:
        name = planned.measured.partition
        if name in committed_names:
            continue
        if name in reasons:
            yield LeftPartition(name, reasons[name])
        elif name in passed_names:
            yield LeftPartition(name, CodedReason("Spark rewrote none of its files", "nothing_rewritten"))
        else:
            yield LeftPartition(name, CodedReason("the compaction ended before", "not_reached"))
