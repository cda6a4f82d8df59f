"""Records the origin of each snapshot, and the tables that each step reads.

`build_snapshot_properties` returns the entries of a snapshot's summary that name its run.
`materialization_metadata` describes the snapshot of a materialization in Dagster.

`ReadSet` records what a step reads by its own SQL or through the catalog. Only steps that write a
serializable asset are recorded. The record is an engine event in the run's log. It is stored before the rows
are read, so it survives the step. Unlike an observation of an asset, it does not trigger automation. Several
processes can add events at once, but they could not add to the same tag.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from dagster import (
    AssetKey,
    DagsterInstance,
    DagsterRun,
    InputContext,
    MetadataValue,
    OutputContext,
    TableColumn,
    TableColumnConstraints,
    TableSchema,
    TimeWindowPartitionsDefinition,
)
from pyiceberg.table import Table
from pyiceberg.typedef import Identifier

from branchlake_dagster.internals.dagster import (
    add_loaded_input_metadata,
    find_context_of_run,
    find_function_assets,
    find_output_assets,
    get_running_context,
    report_engine_event,
)
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.runs.run_branch import RunBranch
from branchlake_dagster.spark.plan_reads import PlanReads
from branchlake_dagster.stored_names import AssetMetadata, EventMetadata, LakeProperty
from branchlake_dagster.tables.recorded_partitions import format_partitions
from branchlake_dagster.tables.specification import TableSpec, unwrap_metadata


def build_snapshot_properties(
    *,
    spec: TableSpec,
    asset: str,
    partitions: tuple[str, ...],
    code_version: str | None,
    run: RunBranch | None,
    root_run_id: str | None,
    step: str | None = None,
    attempt: int | None = None,
    replaced: str | None = None,
) -> dict[str, str]:
    """Return the entries that a write adds to a snapshot's summary, all with the prefix `branchlake.`.

    `step` and `attempt` (from 1) distinguish the attempts of one step. `replaced` is the JSON record of the
    replaced rows (`replaced_rows.to_json`). `run` is the run's branch; None outside of a run. `partitions`
    are the written partition keys, empty without partitions.
    """
    entries = {
        LakeProperty.ASSET: asset,
        LakeProperty.WRITE_MODE: spec.write_mode,
        LakeProperty.KEYS: ",".join(spec.keys),
        LakeProperty.WHEN_MATCHED: "keep" if spec.keeps_matched else None,
        LakeProperty.PARTITION: format_partitions(partitions),
        LakeProperty.REPLACED: replaced,
        LakeProperty.CODE_VERSION: code_version,
        LakeProperty.STEP: step,
        LakeProperty.ATTEMPT: str(attempt) if attempt else None,
    }
    if run is not None:
        entries |= {
            LakeProperty.RUN_ID: run.run_id,
            LakeProperty.ROOT_RUN_ID: root_run_id or run.run_id,
            LakeProperty.BASE_HASH: run.open().base_hash,
        }
        entries[LakeProperty.UNBRANCHED] = "true" if run.open().unbranched else None
    return {name: value for name, value in entries.items() if value}


def materialization_metadata(
    table: Table,
    spec: TableSpec,
    run: RunBranch | None,
    *,
    partition_rows: int | None,
    branch_head: str | None = None,
) -> dict[str, Any]:
    """Return Dagster's table metadata plus branch, head, base hash and snapshot id. Reads no data.

    `partition_rows` are the rows of the one written partition; None if several or none were written.
    `branch_head` is the hash of the branch that holds this state of the table.
    """
    snapshot = table.current_snapshot()
    metadata: dict[str, Any] = {
        "dagster/table_name": spec.name,
        "dagster/column_schema": _column_schema(table),
        "dagster/uri": MetadataValue.path(table.location()),
        "dagster/storage_kind": "iceberg",
        EventMetadata.WRITE_MODE: spec.write_mode,
    }
    if (rows := count_rows(table)) is not None:
        metadata[EventMetadata.ROWS_ON_BRANCH] = MetadataValue.int(rows)
    if partition_rows is not None:
        metadata[EventMetadata.PARTITION_ROWS_ON_BRANCH] = MetadataValue.int(partition_rows)
    if snapshot is not None:
        # Text, because snapshot ids exceed the integers of a browser.
        metadata[EventMetadata.SNAPSHOT_ID] = MetadataValue.text(str(snapshot.snapshot_id))
    if run is not None:
        location = run.open()
        metadata[EventMetadata.BRANCH] = MetadataValue.text(location.branch)
        metadata[EventMetadata.BASE_HASH] = MetadataValue.text(location.base_hash)
        if branch_head is not None and not location.unbranched:
            metadata[EventMetadata.BRANCH_HEAD] = MetadataValue.text(branch_head)
            run.note_recorded_head(branch_head)
        if location.unbranched:
            metadata[EventMetadata.UNBRANCHED] = MetadataValue.bool(True)
    return metadata


def count_rows(table: Table) -> int | None:
    """Count the rows of a table from its current snapshot's summary; 0 if it has no snapshot.

    Returns None if the summary has no total, or if another engine wrote equality deletes.
    """
    snapshot = table.current_snapshot()
    if snapshot is None:
        return 0
    summary: Mapping[str, str] = snapshot.summary.additional_properties if snapshot.summary else {}
    if "total-records" not in summary or int(summary.get("total-equality-deletes", 0)):
        return None
    return int(summary["total-records"]) - int(summary.get("total-position-deletes", 0))


def _column_schema(table: Table) -> TableSchema:
    return TableSchema(
        columns=[
            TableColumn(
                name=field.name,
                type=str(field.field_type),
                description=field.doc,
                constraints=TableColumnConstraints(nullable=field.optional),
            )
            for field in table.schema().fields
        ]
    )


def output_partition_keys(context: OutputContext) -> tuple[str, ...]:
    """Return the keys of the partitions that this output writes; empty if the asset is not partitioned.

    All attempts of a step get them in the same order: Dagster returns keys that are not time windows in
    another order in each process.
    """
    if not context.has_asset_partitions:
        return ()
    keys = context.asset_partition_keys
    is_ordered = isinstance(context.asset_partitions_def, TimeWindowPartitionsDefinition)
    return tuple(keys if is_ordered else sorted(keys))


def report_read(context: InputContext, spec: TableSpec, ref: str) -> None:
    """Add the table and the reference to the input's LOADED_INPUT event.

    These events form a run's read set.
    """
    metadata = {
        EventMetadata.TABLE: MetadataValue.text(spec.name),
        EventMetadata.REF: MetadataValue.text(ref),
    }
    add_loaded_input_metadata(context, metadata)


_SELECTOR_PATTERN = re.compile(r"(?:snapshot_id_|at_timestamp_|branch_|tag_)\S+|changes|rewrite|use_ref_\S+")
_METADATA_TABLES = frozenset(
    {
        *("entries", "files", "data_files", "delete_files", "history", "metadata_log_entries", "snapshots"),
        *("refs", "manifests", "partitions", "position_deletes", "all_data_files", "all_delete_files"),
        *("all_files", "all_manifests", "all_entries"),
    }
)

_merge_target: ContextVar[Identifier | None] = ContextVar("branchlake_merging", default=None)


@dataclass(frozen=True)
class RunningStep:
    """The step that runs, and whether it writes a serializable asset.

    `key` is None if no step is known. `is_serializable` is None in threads that user code started, because
    such a thread may still run in a later step. `attempt` counts from 1 within the run. `assets` are the
    selected assets that the step outputs: of the steps of a graph, only the last ones have such assets.
    `other_assets` are the outputs of the step's function or graph that this step does not write.
    """

    key: str | None
    is_serializable: bool | None
    attempt: int = 1
    assets: frozenset[AssetKey] = frozenset()
    other_assets: frozenset[AssetKey] = frozenset()


def find_running_step(run_id: str | None = None) -> RunningStep:
    """Return the step that Dagster executes in this thread.

    In a thread that user code started, this is the step of the run `run_id` that executes in this process.
    Without `run_id`, or if the run has several steps here, no step is known.
    """
    own_context = get_running_context()
    context = own_context
    if context is None and run_id is not None:
        context = find_context_of_run(run_id)
    if context is None:
        return RunningStep(None, None)
    step = context.op_execution_context.get_step_execution_context()
    assets = step.job_def.asset_layer.get_assets_def_for_node(step.node_handle)
    is_serializable = assets is not None and any(
        unwrap_metadata(spec.metadata.get(AssetMetadata.ISOLATION)) == "serializable" for spec in assets.specs
    )
    written_assets = frozenset() if assets is None else find_output_assets(step) & assets.keys
    return RunningStep(
        step.step.key,
        None if own_context is None else is_serializable,
        step.previous_attempt_count + 1,
        written_assets,
        frozenset() if assets is None else find_function_assets(assets) - written_assets,
    )


@contextlib.contextmanager
def mark_merge_target(identifier: Identifier) -> Iterator[None]:
    """Mark the table that the IO manager merges into, so that the merge's own read of it is not recorded.

    `identifier` is (namespace…, table). The mark applies to this thread while the body runs.
    """
    token = _merge_target.set(tuple(identifier))
    try:
        yield
    finally:
        _merge_target.reset(token)


class ReportedReads:
    """The reads that a process has reported to the log of one run: pairs of step and table name.

    The read sets of a run's resources share them. `lock` is held while a read is reported. It is reentrant,
    because a finalizer that runs meanwhile may read a table.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pairs: set[tuple[str | None, object]] = set()


class ReadSet:
    """Records the reads of one run in this process. Each table is reported once for each step.

    `reported` has the reads that need no report; without it, the read set starts with none.
    """

    def __init__(
        self,
        report: Callable[[str, Mapping[str, MetadataValue[Any]], str | None], None],
        client: Callable[[], NessieClient],
        ref: Callable[[], str],
        reported: ReportedReads | None = None,
        *,
        step: Callable[[], RunningStep] | None = None,
    ) -> None:
        self._report = report
        self._client = client
        self._ref = ref
        self.step = step or find_running_step
        self._reported = reported or ReportedReads()

    @classmethod
    def from_run(
        cls,
        instance: DagsterInstance,
        run: DagsterRun,
        client: Callable[[], NessieClient],
        ref: Callable[[], str],
        reported: ReportedReads | None = None,
    ) -> ReadSet:
        """Return a read set that reports each read to the event log of `run`.

        `client` returns the Nessie client, and `ref` the reference from which the run reads; they are called
        when a read is reported.
        """

        def report(message: str, metadata: Mapping[str, MetadataValue[Any]], step: str | None) -> None:
            report_engine_event(instance, message, run, metadata, step_key=step)

        return cls(report, client, ref, reported)

    def is_recording(self) -> bool:
        """Return whether reads in this thread are recorded.

        False only in a step that writes no serializable asset. In a thread that user code started, the step
        is not known, so reads are recorded.
        """
        return self.step().is_serializable is not False

    def report_load(self, identifier: Identifier) -> None:
        """Report to Dagster's event log that a step loaded a table, if reads in this thread are recorded.

        `identifier` is (namespace…, table). A table is reported once in each step.
        """
        if self.is_recording():
            self.report_scan(PlanReads(frozenset({tuple(identifier)})))

    def report_scan(self, scan: PlanReads) -> None:
        """Report the reads of a query plan that this step has not reported yet.

        `scan` has table names without the catalog's name. The target of the IO manager's own merge is left
        out.
        """
        step = self.step().key
        scanned_names = scan.tables | (scan.merge_targets - {_merge_target.get()})
        with self._reported.lock:
            names = {name for name in scanned_names if (step, name) not in self._reported.pairs}
            unnamed = {what for what in scan.unnamed_reads if (step, what) not in self._reported.pairs}
            if not names and not unnamed:
                return
            tables = sorted(key.name for key in self._resolve_tables(names))
            metadata: dict[str, MetadataValue[Any]] = {EventMetadata.REF: MetadataValue.text(self._ref())}
            if tables:
                metadata[EventMetadata.READ_TABLES] = MetadataValue.text(json.dumps(tables))
            if unnamed:
                metadata[EventMetadata.UNNAMED_READS] = MetadataValue.text(json.dumps(sorted(unnamed)))
            what = ", ".join([*tables, *sorted(unnamed)])
            self._report(f"Read for a serializable asset: {what}", metadata, step)
            self._reported.pairs |= {(step, name) for name in names} | {(step, what) for what in unnamed}

    def _resolve_tables(self, names: Iterable[Identifier]) -> set[ContentKey]:
        """Return the content keys of the tables that Spark's names refer to.

        A name may include a metadata table, time travel or `@reference`. If no such table exists, the
        shortest possible key is returned.
        """
        candidates = [candidate_keys(name) for name in names]
        if not candidates:
            return set()
        contents = self._client().contents(self._ref(), sorted({key for keys in candidates for key in keys}))
        keys: set[ContentKey] = set()
        for options in candidates:
            table_keys = [key for key in options if isinstance(contents.get(key), IcebergTable)]
            keys |= set(table_keys or options[-1:])
        return keys


def candidate_keys(name: Identifier) -> list[ContentKey]:
    """Return the keys of the tables that a name in Spark may refer to, longest key first.

    The last parts of a name may be a metadata table (`files`) or time travel (`tag_…`), so keys without these
    parts are included, and keys without `@reference`.
    """
    elements = (*name[:-1], name[-1])
    names = [elements]
    while len(elements) > 2 and (
        elements[-1] in _METADATA_TABLES or _SELECTOR_PATTERN.fullmatch(elements[-1])
    ):
        elements = elements[:-1]
        names.append(elements)
    names_without_ref = [(*parts[:-1], re.split("[@#]", parts[-1])[0]) for parts in names]
    return [ContentKey(parts) for parts in dict.fromkeys([*names, *names_without_ref]) if all(parts)]
