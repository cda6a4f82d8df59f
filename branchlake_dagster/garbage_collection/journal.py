"""The journal of the garbage collection: Iceberg tables on a Nessie branch of their own.

The branch shares no commit with `main`, so `main`'s log and conditions do not see it, and it keeps no
table of `main` alive. The tables are:

- `branchlake.deleted_files`: one row per file and state (`planned`, then `deleted`, `missing`, `failed`
  or `kept`). The newest row counts.
- `branchlake.collections`: one row per event of a pass or plan, with parameters and metrics.
- `branchlake.table_folders`: the folders of all tables that were ever found. These folders are also
  searched for files of dropped tables.

A pass only appends rows, and the row that makes a plan valid is written after the plan's files. So a pass
may be killed at any point. `trim` removes rows of old plans and old snapshots; their files are collected
like those of any other table, after the history horizon.

A marker file in the warehouse contains the id of the warehouse's journal and the journal's number of passes.
If Nessie has no journal, another journal or fewer passes, Nessie was replaced or restored from a backup.
Then files of commits that Nessie has lost look unreachable, so nothing is deleted.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import polars as pl
import pyarrow as pa
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NoSuchTableError,
    TableAlreadyExistsError,
    ValidationException,
)
from pyiceberg.expressions import AlwaysTrue, BooleanExpression, EqualTo, In, LessThan
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionField, PartitionSpec
from pyiceberg.schema import assign_fresh_schema_ids
from pyiceberg.table import Table, TableProperties
from pyiceberg.transforms import IdentityTransform

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.catalog.options import NAMESPACE_CREATE
from branchlake_dagster.catalog.stored_files import StoredFile, StoredFileDamaged, file_errors
from branchlake_dagster.errors import BranchlakeError, Terminal, Transient
from branchlake_dagster.garbage_collection.collection_plan import OpenPlan, PlannedFile
from branchlake_dagster.garbage_collection.warehouse_files import (
    WarehouseFiles,
    to_microseconds,
    to_time,
)
from branchlake_dagster.history.manifests import read_live_files
from branchlake_dagster.internals.pyiceberg import to_iceberg_schema
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieAlreadyExists, ReferenceNotFound
from branchlake_dagster.stored_names import JOURNAL_BRANCH, LakeProperty

_NAMESPACE = "branchlake"
_TIME = pa.timestamp("us", tz="UTC")
_FILES = pa.schema(
    [
        ("plan_id", pa.string()),
        ("path", pa.string()),
        ("table", pa.string()),
        ("reason", pa.string()),
        ("size", pa.int64()),
        ("modified", _TIME),
        ("last_root", pa.string()),
        ("state", pa.string()),
        ("error", pa.string()),
        ("time", _TIME),
    ]
)
_EVENTS = pa.schema(
    [
        ("pass_id", pa.string()),
        ("plan_id", pa.string()),
        ("event", pa.string()),
        ("time", _TIME),
        ("digest", pa.string()),
        ("rules_digest", pa.string()),
        ("heads_digest", pa.string()),
        ("file_count", pa.int64()),
        ("size_bytes", pa.int64()),
        ("details", pa.string()),
    ]
)
_FOLDERS = pa.schema([("folder", pa.string()), ("table", pa.string()), ("time", _TIME)])
_TABLES = {"deleted_files": _FILES, "collections": _EVENTS, "table_folders": _FOLDERS}
_ATTEMPTS = 8
_KEPT_SNAPSHOTS = 10
_KEEP_ROWS = timedelta(days=90)


class JournalLost(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The journal in Nessie is not the one that belongs to the warehouse, so Nessie may have lost commits."""


class JournalContended(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Eight attempts to write to the journal failed: by changes of others, or with an unknown outcome."""


@dataclass(frozen=True)
class JournaledPlan:
    """An open plan with its digests: of the plan's files, of the rules and of Nessie's heads."""

    plan: OpenPlan
    digest: str
    rules_digest: str
    heads_digest: str


class CollectionJournal:
    """The journal of one lake. `open` creates its branch and tables.

    Methods raise NessieError and OSError.
    """

    def __init__(
        self, client: NessieClient, catalog: Callable[[], NessieCatalog], files: WarehouseFiles
    ) -> None:
        self._client = client
        self._make_catalog = catalog
        self._files = files
        self._id = ""

    @classmethod
    def of_lake(cls, lake: Lakehouse, files: WarehouseFiles) -> CollectionJournal:
        """Create the object for the journal of a lake. Nothing is read or written."""
        properties = {NAMESPACE_CREATE: "true"}
        return cls(lake.nessie, lambda: lake.catalog(JOURNAL_BRANCH, properties=properties), files)

    # -- identity --------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Return whether Nessie has the journal's branch."""
        return self._client.has_reference(JOURNAL_BRANCH)

    def open(self, *, adopt: bool = False) -> datetime:
        """Create the journal if the lake has none, and compare it with the warehouse.

        Write the marker file, and return its time by the store's clock. With `adopt`, any journal of Nessie
        is accepted, or a new journal is created, also in place of one whose files are missing. Raises
        JournalLost if the journal does not match the warehouse.
        """
        marker = self.read_marker()
        self.verify(marker, adopt=adopt)
        if adopt and not self._is_readable():
            journal = self._client.reference(JOURNAL_BRANCH)
            self._client.delete_branch(JOURNAL_BRANCH, expected_hash=journal.hash)
        if not self.exists():
            with contextlib.suppress(NessieAlreadyExists):  # another pass created it
                self._client.create_branch(
                    JOURNAL_BRANCH, from_ref=MAIN, from_hash=self._client.no_ancestor_hash
                )
        self._id = self._journal_id() or self._create_tables()
        return self._write_marker()

    def verify(self, marker: Mapping[str, Any] | None, *, adopt: bool = False) -> None:
        """Raise JournalLost if Nessie's journal is missing, has another id or has fewer passes than `marker`.

        Also if files of the journal are missing: the collector deletes them when they are older than the
        history horizon, so Nessie was restored from an older backup. `marker` is the result of
        `read_marker`. With None, or with `adopt`, nothing is checked.
        """
        if marker is None or adopt:
            return
        if not self._is_readable():
            raise self._lost("Files of the journal are missing or damaged.", "unreadable_journal")
        journal_id = self._journal_id()
        if journal_id is None:
            raise self._lost(
                "Nessie has no journal of a garbage collection, but the warehouse had one.",
                "no_journal",
            )
        if journal_id != marker.get("journal"):
            raise self._lost("The warehouse belongs to the journal of another Nessie.", "other_journal")
        if self.count_passes() < int(marker.get("passes", 0)):
            raise self._lost(
                "Nessie's journal is older than the one that the warehouse had.", "older_journal"
            )

    def _lost(self, message: str, reason: str) -> JournalLost:
        return JournalLost(
            message,
            branch=JOURNAL_BRANCH,
            reason=reason,
            hint="Nothing was deleted. If Nessie was replaced or restored from a backup, files of commits"
            " that it lost look unreachable. Copy what you need, then run: branchlake maintain run --only"
            " collection --adopt-journal",
        )

    def read_marker(self) -> dict[str, Any] | None:
        """Return the marker file as a dict with `journal` (an id) and `passes`; None if it does not exist.

        For a damaged file, `journal` is an id that no journal has.
        """
        content = self._files.read_marker()
        if content is None:
            return None
        try:
            return dict(json.loads(content))
        except (ValueError, TypeError):
            return {"journal": "damaged"}

    def _write_marker(self) -> datetime:
        marker = {"journal": self._id, "passes": self.count_passes()}
        return self._files.write_marker(json.dumps(marker).encode())

    def _is_readable(self) -> bool:
        """Return whether all files of the journal's tables exist. A missing table has none.

        Reads the manifests of the current snapshots, and no rows.
        """
        try:
            tables = list(filter(None, map(self._find_table, _TABLES)))
            stored_files = [
                StoredFile(table.io, file.file_path, file.file_size_in_bytes)
                for table in tables
                for file in read_live_files(table.io, table.current_snapshot())
            ]
        except (FileNotFoundError, StoredFileDamaged):
            return False
        errors = filter(None, file_errors(stored_files))
        return not any(isinstance(error, FileNotFoundError | StoredFileDamaged) for error in errors)

    def _journal_id(self) -> str | None:
        table = self._find_table("collections")
        return table.metadata.properties.get(LakeProperty.JOURNAL_ID) if table is not None else None

    def _create_tables(self) -> str:
        journal_id = uuid.uuid4().hex
        catalog = self._make_catalog()
        properties = {
            LakeProperty.JOURNAL_ID: journal_id,
            TableProperties.METADATA_PREVIOUS_VERSIONS_MAX: str(_KEPT_SNAPSHOTS),
        }
        for name, schema in _TABLES.items():
            spec = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "plan_id"))
            try:
                catalog.create_table(
                    (_NAMESPACE, name),
                    assign_fresh_schema_ids(to_iceberg_schema(schema, 2)),
                    partition_spec=spec if name == "deleted_files" else UNPARTITIONED_PARTITION_SPEC,
                    properties=properties,
                )
            except TableAlreadyExistsError:
                continue  # a pass that was killed here, or another one
        return self._journal_id() or journal_id

    # -- writing ---------------------------------------------------------------------------------------

    def record_event(
        self,
        pass_id: str,
        event: str,
        now: datetime,
        *,
        plan: JournaledPlan | None = None,
        plan_id: str = "",
        details: Mapping[str, object] | None = None,
    ) -> None:
        """Append an event of a pass or plan.

        The event `started` also updates the number of passes in the marker file.
        """
        row = _build_event_row(pass_id, event, now, plan=plan, plan_id=plan_id, details=details)
        self._append("collections", [row])
        if event == "started":
            self._write_marker()

    def record_files(
        self,
        plan_id: str,
        files: Iterable[PlannedFile],
        state: str,
        now: datetime,
        errors: Mapping[str, str] | None = None,
    ) -> None:
        """Append a row with the same state for each file. `errors` maps paths to error texts."""
        rows = [
            {
                "plan_id": plan_id,
                "path": file.path,
                "table": file.table,
                "reason": file.reason,
                "size": file.size,
                "modified": to_time(file.modified_us),
                "last_root": file.last_root,
                "state": state,
                "error": (errors or {}).get(file.path, ""),
                "time": now,
            }
            for file in files
        ]
        self._append("deleted_files", rows)

    def record_folders(self, folders: Mapping[str, str], now: datetime) -> None:
        """Append the folders that the journal does not have yet.

        `folders` maps a folder to its table's name.
        """
        known_folders = self.load_folders()
        rows = [
            {"folder": folder, "table": table, "time": now}
            for folder, table in folders.items()
            if folder not in known_folders
        ]
        self._append("table_folders", rows)

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        frame = pa.Table.from_pylist([dict(row) for row in rows], schema=_TABLES[name])
        self._change(name, lambda table: table.append(frame))

    def _change(self, name: str, change: Callable[[Table], object]) -> None:
        """Call `change` with the journal table `name` until its commit succeeds, at most eight times.

        After a conflict or an unknown outcome, the table is loaded and changed again. So a row may be stored
        twice, which means the same as one row. Raises JournalContended after the eighth failed attempt.
        """
        for _ in range(_ATTEMPTS):
            try:
                change(self._load_table(name))
                return
            except (CommitFailedException, CommitStateUnknownException, ValidationException):
                # A ValidationException: another pass has removed the same rows.
                continue
        raise JournalContended(
            f"The table {_NAMESPACE}.{name} could not be changed in {_ATTEMPTS} attempts. Each attempt met"
            " another change, or its outcome is unknown.",
            branch=JOURNAL_BRANCH,
            hint="Run the collection again: branchlake maintain run --only collection.",
        )

    # -- reading ---------------------------------------------------------------------------------------

    def count_passes(self) -> int:
        """Return the number of passes that were ever started, including those whose rows `trim` removed."""
        events = self._load("collections", columns=("event", "details"))
        removed = [
            int(json.loads(row["details"]).get("passes", 0)) for row in events if row["event"] == "trimmed"
        ]
        started: int = sum(row["event"] == "started" for row in events)
        return started + max(removed, default=0)

    def load_events(self) -> list[dict[str, Any]]:
        """Return all rows of `collections` as dicts, oldest first. `details` is parsed JSON."""
        events = self._load("collections")
        for event in events:
            event["details"] = json.loads(event["details"])
        return sorted(events, key=lambda event: event["time"])

    def open_plans(self) -> list[JournaledPlan]:
        """Return the plans that were neither executed nor abandoned, oldest first."""
        events = self.load_events()
        closed_ids = {each["plan_id"] for each in events if each["event"] in ("executed", "abandoned")}
        plans: dict[str, JournaledPlan] = {}
        for event in events:
            if event["event"] == "planned" and event["plan_id"] not in closed_ids:
                due_at = datetime.fromisoformat(event["details"]["due_at"])
                plan = OpenPlan(
                    event["plan_id"], event["time"], due_at, event["file_count"], event["size_bytes"]
                )
                plans[plan.plan_id] = JournaledPlan(
                    plan, event["digest"], event["rules_digest"], event["heads_digest"]
                )
        return list(plans.values())

    def load_plan_files(self, plan_id: str) -> tuple[list[PlannedFile], frozenset[str]]:
        """Return all files of a plan, and the paths of those that were deleted, missing, kept or failed."""
        rows = self._load("deleted_files", EqualTo("plan_id", plan_id))
        files = {
            row["path"]: PlannedFile(
                row["path"],
                row["table"],
                row["reason"],
                row["size"],
                to_microseconds(row["modified"]),
                row["last_root"],
            )
            for row in rows
            if row["state"] == "planned"
        }
        done_paths = frozenset(row["path"] for row in rows if row["state"] != "planned")
        return list(files.values()), done_paths

    def load_planned_paths(self) -> frozenset[str]:
        """Return the paths of all files in open plans that are still to be deleted."""
        paths: set[str] = set()
        for plan in self.open_plans():
            files, done_paths = self.load_plan_files(plan.plan.plan_id)
            paths |= {file.path for file in files} - done_paths
        return frozenset(paths)

    def load_planned_bytes(self) -> dict[str, int]:
        """Return the bytes of files in open plans that are still to be deleted, by the table's name."""
        sizes: Counter[str] = Counter()
        for plan in self.open_plans():
            files, done_paths = self.load_plan_files(plan.plan.plan_id)
            for file in files:
                if file.path not in done_paths:
                    sizes[file.table] += file.size
        return dict(sizes)

    def find_file(self, path: str) -> list[dict[str, Any]]:
        """Return all rows of `deleted_files` with this path as dicts, oldest first."""
        return sorted(self._load("deleted_files", EqualTo("path", path)), key=lambda row: row["time"])

    def load_folders(self) -> dict[str, str]:
        """Return the recorded folders of tables: folder -> table name."""
        return {row["folder"]: row["table"] for row in self._load("table_folders")}

    def count_deleted(self) -> tuple[int, int]:
        """Return the number and the total bytes of files that the journal records as deleted."""
        rows = self._load("deleted_files", EqualTo("state", "deleted"), columns=("path", "size"))
        frame = pl.DataFrame(rows, schema={"path": pl.String, "size": pl.Int64})
        return frame.height, int(frame["size"].sum())

    def last_main_hash(self) -> str | None:
        """Return the head of `main` that the last finished pass has read; None before the first pass."""
        events = self.load_events()
        hashes = [event["details"].get("main_hash") for event in events if event["event"] == "finished"]
        return next((each for each in reversed(hashes) if each), None)

    def last_folder_position(self) -> str:
        """Return the folder at which the last finished pass stopped listing; empty if it listed all."""
        events = [event for event in self.load_events() if event["event"] == "finished"]
        return str(events[-1]["details"].get("next_folder", "")) if events else ""

    def _load(
        self, name: str, row_filter: BooleanExpression | None = None, columns: tuple[str, ...] = ("*",)
    ) -> list[dict[str, Any]]:
        table = self._find_table(name)
        if table is None:
            return []
        scan = table.scan(row_filter=row_filter or AlwaysTrue(), selected_fields=columns)
        rows: list[dict[str, Any]] = scan.to_arrow().to_pylist()
        return rows

    def _load_table(self, name: str) -> Table:
        return self._make_catalog().load_table((_NAMESPACE, name))

    def _find_table(self, name: str) -> Table | None:
        try:
            return self._load_table(name)
        except (NoSuchTableError, ReferenceNotFound):
            return None

    # -- size ------------------------------------------------------------------------------------------

    def trim(self, pass_id: str, now: datetime) -> None:
        """Remove old rows: events older than 90 days, and files of plans that were closed before that.

        Also expires all snapshots of each journal table except the last ten. The files of a plan are one
        partition, so removing them rewrites no data file.
        """
        oldest = now - _KEEP_ROWS
        events = self.load_events()
        old_passes = sum(event["event"] == "started" and event["time"] < oldest for event in events)
        old_plans = [
            event["plan_id"]
            for event in events
            if event["event"] in ("executed", "abandoned") and event["time"] < oldest
        ]
        if old_plans:
            self._change("deleted_files", lambda table: table.delete(In("plan_id", old_plans)))
        if old_passes:
            removed = [event["details"]["passes"] for event in events if event["event"] == "trimmed"]
            total = old_passes + max(removed, default=0)
            row = _build_event_row(pass_id, "trimmed", now, details={"passes": total})
            trimmed = pa.Table.from_pylist([row], schema=_TABLES["collections"])

            def replace_old_rows(table: Table) -> None:
                # One commit: another pass that starts in between would count the old passes twice, write that
                # number to the marker, and later refuse the journal as too old.
                with table.transaction() as transaction:
                    transaction.delete(LessThan("time", oldest.isoformat()))
                    transaction.append(trimmed)

            self._change("collections", replace_old_rows)
        for name in _TABLES:
            self._change(name, _expire_snapshots)


def _build_event_row(
    pass_id: str,
    event: str,
    now: datetime,
    *,
    plan: JournaledPlan | None = None,
    plan_id: str = "",
    details: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Return a row of the table `collections`. `plan` or `plan_id` name the plan of the event, if any."""
    return {
        "pass_id": pass_id,
        "plan_id": plan.plan.plan_id if plan is not None else plan_id,
        "event": event,
        "time": now,
        "digest": plan.digest if plan is not None else "",
        "rules_digest": plan.rules_digest if plan is not None else "",
        "heads_digest": plan.heads_digest if plan is not None else "",
        "file_count": plan.plan.file_count if plan is not None else 0,
        "size_bytes": plan.plan.size_bytes if plan is not None else 0,
        "details": json.dumps(details or {}, default=str),
    }


def _expire_snapshots(table: Table) -> None:
    """Remove all but the last snapshots. Raises CommitFailedException if another pass removes some."""
    snapshots = sorted(table.metadata.snapshots, key=lambda snapshot: snapshot.timestamp_ms)
    old_ids = [
        snapshot.snapshot_id
        for snapshot in snapshots[:-_KEPT_SNAPSHOTS]
        if snapshot.snapshot_id != table.metadata.current_snapshot_id
    ]
    if not old_ids:
        return
    try:
        table.maintenance.expire_snapshots().by_ids(old_ids).commit()
    except ValueError as error:
        # If the table has changed, PyIceberg repeats the removal on the newer state. Another pass may have
        # removed the same snapshots from it.
        raise CommitFailedException(str(error)) from error
