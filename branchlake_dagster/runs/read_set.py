"""Record what a step reads by its own SQL or through the catalog in its run's read set.

Only steps that write a serializable asset are recorded. The record is an engine event in the run's log. It is
stored before the rows are read, so it survives the step. Unlike an observation of an asset, it does not
trigger automation. Unlike tags, several processes can add events at once.
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

from dagster import DagsterInstance, DagsterRun, MetadataValue
from pyiceberg.typedef import Identifier

from branchlake_dagster.internals.dagster import get_running_context, report_engine_event
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.spark.plan_reads import PlanReads
from branchlake_dagster.stored_names import AssetMetadata, EventMetadata

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
    """The step that runs in this thread, and whether it writes a serializable asset.

    Both are None in threads that user code started. `attempt` counts from 1 within the run.
    """

    key: str | None
    is_serializable: bool | None
    attempt: int = 1


def find_running_step() -> RunningStep:
    """Find the step that Dagster executes in this thread.

    Threads that user code started have no known step.
    """
    context = get_running_context()
    if context is None:
        return RunningStep(None, None)
    step = context.op_execution_context.get_step_execution_context()
    assets = step.job_def.asset_layer.get_assets_def_for_node(step.node_handle)
    is_serializable = assets is not None and any(
        _unwrap_metadata(spec.metadata.get(AssetMetadata.ISOLATION)) == "serializable"
        for spec in assets.specs
    )
    return RunningStep(step.step.key, is_serializable, step.previous_attempt_count + 1)


def _unwrap_metadata(value: Any) -> Any:
    return getattr(value, "value", value)


@contextlib.contextmanager
def mark_merge_target(identifier: Identifier) -> Iterator[None]:
    """Mark the table that the IO manager merges into, so that the merge's own read of it is not recorded."""
    token = _merge_target.set(tuple(identifier))
    try:
        yield
    finally:
        _merge_target.reset(token)


class ReadSet:
    """Records the reads of one run in this process. Each table is reported once for each step."""

    def __init__(
        self,
        report: Callable[[str, Mapping[str, MetadataValue[Any]], str | None], None],
        client: Callable[[], NessieClient],
        ref: Callable[[], str],
        *,
        step: Callable[[], RunningStep] | None = None,
    ) -> None:
        self._report = report
        self._client = client
        self._ref = ref
        self.step = step or find_running_step
        self._lock = threading.Lock()
        self._reported: set[tuple[str | None, object]] = set()

    @classmethod
    def from_run(
        cls,
        instance: DagsterInstance,
        run: DagsterRun,
        client: Callable[[], NessieClient],
        ref: Callable[[], str],
    ) -> ReadSet:
        """Return a read set that reports to the run's event log."""

        def report(message: str, metadata: Mapping[str, MetadataValue[Any]], step: str | None) -> None:
            report_engine_event(instance, message, run, metadata, step_key=step)

        return cls(report, client, ref)

    def is_recording(self) -> bool:
        """Return whether a read in this thread may belong to the read set."""
        return self.step().is_serializable is not False

    def report_load(self, identifier: Identifier) -> None:
        """Report that a table was loaded through the catalog."""
        if self.is_recording():
            self.report_scan(PlanReads(frozenset({tuple(identifier)})))

    def report_scan(self, scan: PlanReads) -> None:
        """Report the new reads of a scan. Table names are without the catalog's name."""
        step = self.step().key
        scanned_names = scan.tables | (scan.merge_targets - {_merge_target.get()})
        with self._lock:
            names = {name for name in scanned_names if (step, name) not in self._reported}
            unnamed = {what for what in scan.unnamed_reads if (step, what) not in self._reported}
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
            self._reported |= {(step, name) for name in names} | {(step, what) for what in unnamed}

    def _resolve_tables(self, names: Iterable[Identifier]) -> set[ContentKey]:
        """Resolve Spark's names to tables.

        A name may include a metadata table, time travel or `@reference`.
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
    """Return the tables that a name may refer to, longest name first."""
    elements = (*name[:-1], name[-1])
    names = [elements]
    while len(elements) > 2 and (
        elements[-1] in _METADATA_TABLES or _SELECTOR_PATTERN.fullmatch(elements[-1])
    ):
        elements = elements[:-1]
        names.append(elements)
    names_without_ref = [(*parts[:-1], re.split("[@#]", parts[-1])[0]) for parts in names]
    return [ContentKey(parts) for parts in dict.fromkeys([*names, *names_without_ref]) if all(parts)]
