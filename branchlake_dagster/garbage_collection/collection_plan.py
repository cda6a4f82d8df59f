"""Plans and results of the garbage collection: data classes without behavior."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta

from branchlake_dagster.garbage_collection.live_history import HistoryHorizon
from branchlake_dagster.settings import Settings


@dataclass(frozen=True)
class CollectionRules:
    """The settings of a collection. A plan that was made with other rules is not executed.

    Attributes:
        grace: The age that an unreachable file must have before it is an orphan.
        horizon: How long earlier commits of a reference stay readable.
        delay: The time between planning and deletion.
    """

    grace: timedelta = timedelta(days=7)
    horizon: HistoryHorizon = field(default_factory=lambda: HistoryHorizon(timedelta(days=30)))
    delay: timedelta = timedelta(days=1)

    @classmethod
    def from_settings(
        cls, settings: Settings, horizons: Mapping[str, timedelta] | None = None
    ) -> CollectionRules:
        """Create the rules of a lake. `horizons` maps patterns of reference names to history horizons."""
        return cls(
            settings.orphan_file_grace,
            HistoryHorizon(settings.history_horizon, tuple((horizons or {}).items())),
            timedelta(hours=settings.deletion_delay_h),
        )

    def to_json(self) -> dict[str, object]:
        """Return the rules as JSON, with durations in seconds."""
        return {
            "grace_s": self.grace.total_seconds(),
            "horizon_s": self.horizon.default.total_seconds(),
            "horizons_s": {name: each.total_seconds() for name, each in self.horizon.by_pattern},
            "delay_s": self.delay.total_seconds(),
        }

    @property
    def digest(self) -> str:
        """The SHA-256 of the rules, in hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class PlannedFile:
    """A file that a plan will delete. `modified_us` is its time in µs since 1970.

    `reason` is `removed` if a live manifest lists the file as removed; then `last_root` names the snapshot
    that removed it. Otherwise `reason` is `unreferenced` and `last_root` is empty.
    """

    path: str
    table: str
    reason: str
    size: int
    modified_us: int
    last_root: str = ""


def plan_digest(heads_digest: str, rules_digest: str, files: Iterable[PlannedFile]) -> str:
    """Return the SHA-256 of the heads and rules that a plan was made from, and of its files."""
    digest = hashlib.sha256(f"{heads_digest} {rules_digest}".encode())
    for file in sorted(files, key=lambda each: each.path):
        digest.update(f"\n{file.path}\t{file.size}\t{file.modified_us}".encode(errors="replace"))
    return digest.hexdigest()


@dataclass(frozen=True)
class PassMetrics:
    """Numbers of one pass. Durations are in seconds.

    `skipped_folders` is the number of folders that were not listed because the budget ended. `left_files` is
    the number of orphans that did not fit into the plan. `kept` has the number of listed files by the verdict
    that kept them. `claimants` are the living writers whose claims were considered. `unreadable` are the
    metadata files, manifest lists and manifests that could not be read: all files of their tables are kept.
    `unreadable_states` are the metadata files in the warehouse among them: if there are any, nothing is
    planned or deleted.
    """

    references: int = 0
    commits: int = 0
    states: int = 0
    reachable_files: int = 0
    listed_files: int = 0
    listed_folders: int = 0
    skipped_folders: int = 0
    kept: Mapping[str, int] = field(default_factory=dict)
    claimants: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    unreadable_states: tuple[str, ...] = ()
    left_files: int = 0
    walk_s: float = 0.0
    mark_s: float = 0.0
    list_s: float = 0.0
    delete_s: float = 0.0


@dataclass(frozen=True)
class CollectionPlan:
    """Files that nothing can read any more, and when they may be deleted.

    `plan_id` is empty if no file is to be deleted, or for a dry run, which is not journaled. The plan may be
    executed from `due_at` on. `sample` are the 20 largest files.
    """

    plan_id: str
    created_at: datetime
    due_at: datetime
    file_count: int
    size_bytes: int
    digest: str
    files_by_table: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Number and bytes of the files by table."""
    sample: tuple[PlannedFile, ...] = ()
    metrics: PassMetrics = PassMetrics()


@dataclass(frozen=True)
class ExecutedPlan:
    """What happened to a due plan.

    `state` is `executed`, `open` (the budget ended: the next pass continues), `outdated` (made by other
    rules) or `damaged` (its files in the journal do not match its digest). An outdated or damaged plan is
    abandoned. `missing` counts files that were gone already, `kept` counts files that are reachable again,
    changed or claimed. `deleted_by_table` counts the deleted files by table name; the name is empty if the
    table of the file's folder is unknown.
    """

    plan_id: str
    state: str
    deleted: int = 0
    deleted_bytes: int = 0
    missing: int = 0
    kept: int = 0
    failed: int = 0
    errors: tuple[str, ...] = ()
    """The first ten errors of files that could not be deleted, as `path: error`."""
    deleted_by_table: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectionResult:
    """The outcome of one pass: the due plans that it executed or abandoned, and the new plan."""

    pass_id: str
    started_at: datetime
    ended_at: datetime
    executed: tuple[ExecutedPlan, ...]
    plan: CollectionPlan

    @property
    def deleted(self) -> int:
        """The number of deleted files."""
        return sum(each.deleted for each in self.executed)


@dataclass(frozen=True)
class OpenPlan:
    """A journaled plan that was neither executed completely nor abandoned."""

    plan_id: str
    created_at: datetime
    due_at: datetime
    file_count: int
    size_bytes: int


@dataclass(frozen=True)
class CollectionStatus:
    """A summary of the journal.

    `last_pass_ended_at` is None if the last pass is running or was killed. `last_metrics` are those of the
    last finished pass; empty before the first.
    """

    open_plans: tuple[OpenPlan, ...] = ()
    passes: int = 0
    last_pass_started_at: datetime | None = None
    last_pass_ended_at: datetime | None = None
    last_metrics: Mapping[str, object] = field(default_factory=dict)
    deleted_files: int = 0
    deleted_bytes: int = 0


def metrics_to_json(metrics: PassMetrics) -> dict[str, object]:
    """Return the metrics as JSON."""
    return {**asdict(metrics), "kept": dict(metrics.kept)}
