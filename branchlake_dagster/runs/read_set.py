"""What a step reads by its own SQL or through the catalogue becomes part of its run's read set.

Only steps that write a serializable asset are watched. The evidence is an engine event in the run's log,
stored before the rows flow, so that it outlives the step: it makes no observation of an asset, which
automation would react to, and steps in several processes may add theirs at once, unlike tags.
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

from branchlake_dagster.internals.dagster import report_engine_event, running_context
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.spark.plan_reads import Scanned
from branchlake_dagster.stored_names import AssetMetadata, EventMetadata

_SELECTORS = re.compile(r"(?:snapshot_id_|at_timestamp_|branch_|tag_)\S+|changes|rewrite|use_ref_\S+")
_METADATA_TABLES = frozenset(
    {
        *("entries", "files", "data_files", "delete_files", "history", "metadata_log_entries", "snapshots"),
        *("refs", "manifests", "partitions", "position_deletes", "all_data_files", "all_delete_files"),
        *("all_files", "all_manifests", "all_entries"),
    }
)

_merging: ContextVar[Identifier | None] = ContextVar("branchlake_merging", default=None)


@dataclass(frozen=True)
class RunningStep:
    """The step that runs here now, and whether it writes a serializable asset; both None in own threads.

    `attempt` counts from 1 within the run.
    """

    key: str | None
    strict: bool | None
    attempt: int = 1


def running_step() -> RunningStep:
    """What Dagster executes in this thread. In a thread of the user's own nobody knows."""
    context = running_context()
    if context is None:
        return RunningStep(None, None)
    step = context.op_execution_context.get_step_execution_context()
    assets = step.job_def.asset_layer.get_assets_def_for_node(step.node_handle)
    wants = assets is not None and any(
        _plain(spec.metadata.get(AssetMetadata.ISOLATION)) == "serializable" for spec in assets.specs
    )
    return RunningStep(step.step.key, wants, step.previous_attempt_count + 1)


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


@contextlib.contextmanager
def merging(identifier: Identifier) -> Iterator[None]:
    """The IO manager merges into this table: its write mode says what that looks at, as for any write."""
    token = _merging.set(tuple(identifier))
    try:
        yield
    finally:
        _merging.reset(token)


class ReadSet:
    """The reads of one run in this process; each table is reported once for each step."""

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
        self.step = step or running_step
        self._lock = threading.Lock()
        self._told: set[tuple[str | None, object]] = set()

    @classmethod
    def of_run(
        cls,
        instance: DagsterInstance,
        run: DagsterRun,
        client: Callable[[], NessieClient],
        ref: Callable[[], str],
    ) -> ReadSet:
        """One that reports to the run's event log."""

        def report(message: str, metadata: Mapping[str, MetadataValue[Any]], step: str | None) -> None:
            report_engine_event(instance, message, run, metadata, step_key=step)

        return cls(report, client, ref)

    def wanted(self) -> bool:
        """Whether what is read here and now belongs to a read set."""
        return self.step().strict is not False

    def loaded(self, identifier: Identifier) -> None:
        """A table was loaded through the catalogue."""
        if self.wanted():
            self.note(Scanned(frozenset({tuple(identifier)})))

    def note(self, found: Scanned) -> None:
        """Report what was scanned, as far as it is new; names without the catalogue's."""
        step = self.step().key
        seen = found.tables | (found.merged - {_merging.get()})
        with self._lock:
            names = {name for name in seen if (step, name) not in self._told}
            untold = {what for what in found.untold if (step, what) not in self._told}
            if not names and not untold:
                return
            tables = sorted(key.name for key in self._tables(names))
            told: dict[str, MetadataValue[Any]] = {EventMetadata.REF: MetadataValue.text(self._ref())}
            if tables:
                told[EventMetadata.READ_TABLES] = MetadataValue.text(json.dumps(tables))
            if untold:
                told[EventMetadata.UNNAMED_READS] = MetadataValue.text(json.dumps(sorted(untold)))
            what = ", ".join([*tables, *sorted(untold)])
            self._report(f"Read for a serializable asset: {what}", told, step)
            self._told |= {(step, name) for name in names} | {(step, what) for what in untold}

    def _tables(self, names: Iterable[Identifier]) -> set[ContentKey]:
        """The tables behind names as Spark has them: metadata tables, time travel, `name@reference`."""
        choices = [candidates(name) for name in names]
        if not choices:
            return set()
        found = self._client().contents(self._ref(), sorted({key for keys in choices for key in keys}))
        keys: set[ContentKey] = set()
        for options in choices:
            real = [key for key in options if isinstance(found.get(key), IcebergTable)]
            keys |= set(real or options[-1:])
        return keys


def candidates(name: Identifier) -> list[ContentKey]:
    """The tables that a name may mean, the longest name first."""
    elements = (*name[:-1], name[-1])
    found = [elements]
    while len(elements) > 2 and (elements[-1] in _METADATA_TABLES or _SELECTORS.fullmatch(elements[-1])):
        elements = elements[:-1]
        found.append(elements)
    plain = [(*one[:-1], re.split("[@#]", one[-1])[0]) for one in found]
    return [ContentKey(one) for one in dict.fromkeys([*found, *plain]) if all(one)]
