"""Plan and run all maintenance of a lake: compaction, expiry of snapshots, collection of unreachable files.

The parts run in this order: after a compaction, only older snapshots need the old files; the expiry removes
these snapshots; the collection deletes files that nothing needs. An error of one part does not stop the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TypeVar

from branchlake_dagster.compaction.compaction_plan import CompactionOptions
from branchlake_dagster.compaction.compactor import Compactor, plan_compactions
from branchlake_dagster.compaction.result import CompactionProgress, CompactionResult
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.expiry.manifest_rewrite import ManifestRewriter, RewrittenManifests
from branchlake_dagster.expiry.result import ExpiryResult
from branchlake_dagster.expiry.retention import ExpiryPolicy
from branchlake_dagster.expiry.snapshot_expiry import SnapshotExpirer
from branchlake_dagster.garbage_collection.collector import FileCollector
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.maintenance.maintenance_result import (
    ALL_PARTS,
    MaintenancePart,
    MaintenancePlan,
    MaintenanceResult,
)
from branchlake_dagster.maintenance.metrics import record_result
from branchlake_dagster.settings import Settings
from branchlake_dagster.wording import format_count

T = TypeVar("T")


@dataclass(frozen=True)
class MaintenanceOptions:
    """Options of the maintenance: of compaction and expiry, and a time limit.

    Args:
        compaction (CompactionOptions): Which partitions are compacted, how, and within which budgets.
        expiry (Optional[ExpiryPolicy]): How long snapshots are kept. (default:
            `BRANCHLAKE_SNAPSHOT_KEEP_COUNT`, `BRANCHLAKE_SNAPSHOT_KEEP_DAYS`, `BRANCHLAKE_UNDO_DAYS` and
            `BRANCHLAKE_POSITION_DAYS`)
        max_seconds (Optional[float]): Seconds after which a compaction begins no further work. A collection
            has the same limit, from when all live files are found. Finished compactions are published. The
            `max_seconds` of `compaction` has priority. An expiry has no limit. (default: no limit for a
            compaction, `BRANCHLAKE_COLLECTION_BUDGET_S` for a collection)

    Raises:
        ConfigurationError: `max_seconds` is not positive.

    Examples:
        .. code-block:: python

            from branchlake_dagster import CompactionOptions, MaintenanceOptions, maintenance_definitions

            options = MaintenanceOptions(CompactionOptions(max_partitions=50), max_seconds=1800)
            maintenance = maintenance_definitions(["shop"], options=options)
    """

    compaction: CompactionOptions = field(default_factory=CompactionOptions)
    expiry: ExpiryPolicy | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ConfigurationError(
                f"max_seconds of the maintenance is {self.max_seconds}.",
                hint="Set a positive number, or leave it out.",
                reason="not_positive",
                subject="max_seconds",
            )

    def choose_policy(self, settings: Settings) -> ExpiryPolicy:
        """Return the expiry policy of these options, or else the policy of the settings.

        Raises ConfigurationError if `undo_age` of these options exceeds the history horizon, because an undo
        reads an earlier commit of `main`. Other ages may be longer: they need only the snapshots in the
        newest metadata of a table.
        """
        if self.expiry is None:
            return ExpiryPolicy.from_settings(settings)
        horizon = settings.history_horizon
        if self.expiry.undo_age > horizon:
            raise ConfigurationError(
                f"undo_age of the ExpiryPolicy is {self.expiry.undo_age}, but earlier commits stay readable"
                f" for {horizon}.",
                hint="Shorten it, or raise BRANCHLAKE_HISTORY_HORIZON_DAYS.",
                reason="horizon_too_short",
                subject="undo_age",
            )
        return self.expiry


def plan_maintenance(
    lake: Lakehouse,
    parts: Collection[MaintenancePart] = ALL_PARTS,
    *,
    tables: Sequence[str] | None = None,
    options: MaintenanceOptions | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> MaintenancePlan:
    """Plan the given parts of the maintenance. Nothing is changed, and Spark is not needed.

    `tables` are dotted names; None means all tables of `main`. The collection always plans for the whole
    lake. An error of a part is in `MaintenancePlan.errors`, except ConfigurationError, which is raised.
    """
    options = options or MaintenanceOptions()
    policy = options.choose_policy(lake.settings)
    guard = _Parts(parts)
    compaction = guard.call(
        MaintenancePart.COMPACTION, lambda: plan_compactions(lake, tables, _limit_compaction(options))
    )
    expiry = guard.call(MaintenancePart.EXPIRY, lambda: SnapshotExpirer.of_lake(lake).plan(tables, policy))
    collection = guard.call(
        MaintenancePart.COLLECTION, lambda: _build_collector(lake, options, progress).plan()
    )
    return MaintenancePlan(compaction, expiry, collection, guard.errors)


def run_maintenance(
    lake: Lakehouse,
    parts: Collection[MaintenancePart] = ALL_PARTS,
    *,
    tables: Sequence[str] | None = None,
    options: MaintenanceOptions | None = None,
    adopt_journal: bool = False,
    may_continue: Callable[[], bool] = lambda: True,
    progress: Callable[[str], None] = lambda _: None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> MaintenanceResult:
    """Run the given parts of the maintenance, one after the other.

    May be interrupted at any point and called again. `tables` are dotted names; None means all tables of
    `main`. The collection always runs for the whole lake. `adopt_journal` accepts the journal of a Nessie
    that was restored. `may_continue` is called before each rewrite of a compaction and before each part; if
    it returns False, this work is skipped. The result is added to the metrics in the state folder. An error
    of a part is in `MaintenanceResult.errors`, except ConfigurationError, which is raised.
    """
    options = options or MaintenanceOptions()
    policy = options.choose_policy(lake.settings)
    guard = _Parts(parts, may_continue)
    compaction = guard.call(
        MaintenancePart.COMPACTION, lambda: _run_compaction(lake, tables, options, may_continue, progress)
    )
    expiry = guard.call(MaintenancePart.EXPIRY, lambda: _run_expiry(lake, tables, policy, progress))
    manifests = guard.call(MaintenancePart.EXPIRY, lambda: _merge_manifests(lake, tables))
    collection = guard.call(
        MaintenancePart.COLLECTION,
        lambda: _build_collector(lake, options, progress).run(adopt_journal=adopt_journal),
    )
    result = MaintenanceResult(compaction, expiry, manifests or (), collection, guard.errors)
    try:
        record_result(lake.settings.state_dir, result, now())
    except (OSError, ConfigurationError) as error:
        progress(f"The metrics in {lake.settings.state_dir} were not updated: {error}")
    return result


class _Parts:
    """Calls the work of requested parts, and stores an error of a part in `errors`.

    After an error, its part is not called again; the other parts are. ConfigurationError is raised. No work
    begins while `may_continue` returns False.
    """

    def __init__(
        self, parts: Collection[MaintenancePart], may_continue: Callable[[], bool] = lambda: True
    ) -> None:
        self._parts = parts
        self._may_continue = may_continue
        self.errors: dict[MaintenancePart, Exception] = {}

    def call(self, part: MaintenancePart, work: Callable[[], T]) -> T | None:
        if part not in self._parts or part in self.errors or not self._may_continue():
            return None
        try:
            return work()
        except ConfigurationError:
            raise
        except Exception as error:  # noqa: BLE001 - reported as the part's error; the other parts go on
            self.errors[part] = error
            return None


def _limit_compaction(options: MaintenanceOptions) -> CompactionOptions:
    if options.max_seconds is None or options.compaction.max_seconds is not None:
        return options.compaction
    return replace(options.compaction, max_seconds=options.max_seconds)


def _run_compaction(
    lake: Lakehouse,
    tables: Sequence[str] | None,
    options: MaintenanceOptions,
    may_continue: Callable[[], bool],
    progress: Callable[[str], None],
) -> CompactionResult:
    def report(one: CompactionProgress) -> None:
        partitions = f"{one.partitions_done:,} of {format_count(one.partitions, 'partition')}"
        progress(f"{one.table}: {one.step}, {partitions}, {one.bytes_done / 1e6:,.1f} MB")

    plan = plan_compactions(lake, tables, _limit_compaction(options))
    return Compactor.of_lake(lake).run(plan, may_continue=may_continue, report=report)


def _run_expiry(
    lake: Lakehouse,
    tables: Sequence[str] | None,
    policy: ExpiryPolicy,
    progress: Callable[[str], None],
) -> ExpiryResult:
    expirer = SnapshotExpirer.of_lake(lake)
    plan = expirer.plan(tables, policy)
    return expirer.run(
        plan,
        report=lambda table: progress(
            f"{table.table}: {format_count(table.expired_count, 'snapshot')} expired"
        ),
    )


def _merge_manifests(lake: Lakehouse, tables: Sequence[str] | None) -> tuple[RewrittenManifests, ...]:
    """Merge manifests. Return the outcomes of tables with a commit or an error, not of unchanged tables."""
    results = ManifestRewriter.of_lake(lake).run(tables)
    return tuple(table for table in results if table.commit is not None or table.error is not None)


def _build_collector(
    lake: Lakehouse, options: MaintenanceOptions, progress: Callable[[str], None]
) -> FileCollector:
    return FileCollector.of_lake(lake, budget_s=options.max_seconds, progress=progress)
