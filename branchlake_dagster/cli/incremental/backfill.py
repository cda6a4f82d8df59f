"""What `branchlake backfill` does: the code location and what the options mean, plan, launch, progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from dagster import AssetKey, DagsterInstance

from branchlake_dagster.automation.backfill_comparison import StageComparison, compare_stage, hash_before
from branchlake_dagster.automation.backfill_launch import RETRY_OF_TAG, launch
from branchlake_dagster.automation.backfill_plan import Stage, plan
from branchlake_dagster.automation.backfill_progress import (
    Progress,
    progress,
    requested_partitions,
    require_backfill,
)
from branchlake_dagster.automation.backfill_retry import RetryPlan, launch_retry, lost_partitions, plan_retry
from branchlake_dagster.automation.incremental_sensor import DeclaredSensor, declared_sensors
from branchlake_dagster.automation.stale_partitions import stale_partitions
from branchlake_dagster.cli.local.home import dagster_home
from branchlake_dagster.cli.local.location import required_location
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.dagster import AssetGraph, backfills_tagged
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource


@dataclass(frozen=True)
class Place:
    """The code location, the lake and the Dagster instance that a backfill is about."""

    graph: AssetGraph
    lake: LakehouseResource
    instance: DagsterInstance
    sensors: Mapping[AssetKey, DeclaredSensor] = field(default_factory=dict)
    """The incremental sensor of each asset that has one."""


@contextmanager
def place(module: str | None) -> Iterator[Place]:
    """The code location in a module, or that of the project in the working folder, with its lake's settings.

    Raises ConfigurationError.
    """
    location, chosen = required_location(module)
    repository, settings = location.repository, chosen.settings
    dagster_home(settings)
    with DagsterInstance.get() as instance:
        sensors = declared_sensors(repository)
        yield Place(repository.asset_graph, LakehouseResource.of(settings), instance, sensors)


@dataclass(frozen=True)
class Asked:
    """Which partitions of which asset, and why."""

    key: AssetKey
    partitions: tuple[str, ...] | None
    why: str


def asked(where: Place, asset: str, partitions: Sequence[str], *, everything: bool) -> Asked | None:
    """What the options mean; None: nothing is stale. Raises ConfigurationError."""
    key = AssetKey.from_user_string(asset)
    if not where.graph.has(key):
        raise ConfigurationError(
            f"There is no asset {asset} in this code location.",
            hint="Write its key as on Dagster's page: namespace/table.",
            reason="unknown_asset",
            subject=asset,
        )
    if partitions or everything:
        given = None if everything else tuple(partitions)
        return Asked(key, given, "requested")
    stale = stale_partitions(where.graph, where.lake.lakehouse, key, instance=where.instance)
    if stale == ():
        return None
    return Asked(key, stale, f"code version {where.graph.get(key).code_version} is newer than they are")


def stages(where: Place, what: Asked) -> list[Stage]:
    """The plan."""
    return plan(
        where.graph, where.lake.lakehouse, what.key, what.partitions, why=what.why, instance=where.instance
    )


def run(where: Place, what: Asked, at: float, *, approval: bool = False) -> str:
    """Launch it; the backfill's id. With `approval`, each stage waits until the one before it is approved."""
    found = stages(where, what)[0]
    head = where.lake.lakehouse.nessie.reference(MAIN).hash
    return launch(
        where.graph,
        where.instance,
        what.key,
        found.partitions,
        why=what.why,
        base_hash=head,
        approval=approval,
        at=at,
    )


def status(where: Place, backfill_id: str) -> list[Progress]:
    """How far it has come. Raises ConfigurationError for an id that nobody knows."""
    retries = {key: one.policy.retries for key, one in where.sensors.items()}
    now = datetime.now(UTC)
    return progress(where.graph, where.lake, where.instance, backfill_id, now, retries=retries)


def is_computed(stage: Stage) -> bool:
    """Whether the backfill computes the stage, rather than naming it for somebody to launch."""
    return stage.by_itself or stage.number == 0


def compare(where: Place, backfill_id: str, asset: str | None = None) -> list[StageComparison]:
    """Compare each stage that is computed with its rows before the backfill, or only that of one asset.

    Raises ConfigurationError for an unknown id, and for an asset that the backfill does not compute, and
    EarlierStateLost.
    """
    state = require_backfill(where.instance, where.graph, backfill_id)
    lake = where.lake.lakehouse
    found = plan(where.graph, lake, state.key, state.partitions, why=state.why, instance=where.instance)
    computed = [one for one in found if is_computed(one)]
    if asset is not None:
        key = AssetKey.from_user_string(asset)
        names = ", ".join(one.asset.to_user_string() for one in computed)
        computed = [one for one in computed if one.asset == key]
        if not computed:
            raise ConfigurationError(
                f"Backfill {backfill_id} does not compute asset {asset}.", hint=f"It computes {names}."
            )
    before = hash_before(lake, state)
    return [compare_stage(where.graph, lake, one, before) for one in computed]


def compare_held(where: Place, backfill_id: str, found: Sequence[Progress]) -> list[StageComparison]:
    """Compare the stages whose results the stages that wait for approval would consume."""
    parents = {
        key for one in found if one.held_partitions for key in where.graph.get(one.stage.asset).parent_keys
    }
    names = [one.stage.asset for one in found if one.stage.asset in parents and is_computed(one.stage)]
    return [one for key in names for one in compare(where, backfill_id, key.to_user_string())]


def retry(where: Place, backfill_id: str, at: float, *, rebuild_lost: bool) -> RetryPlan:
    """Launch again what has failed, and with `rebuild_lost` what is lost; returns what was launched.

    Called again before Dagster's daemon has made the runs, it launches nothing twice. Raises
    ConfigurationError for an id that nobody knows.
    """
    found = status(where, backfill_id)
    again = backfills_tagged(where.instance, where.graph, {RETRY_OF_TAG: backfill_id})
    requested = {
        key: requested_partitions(one for one in again if one.key == key)
        for key in {one.key for one in again}
    }
    lost = lost_partitions(where.graph, where.lake, where.instance, found, requested)
    planned = plan_retry(found, lost, rebuild_lost=rebuild_lost)
    launched = launch_retry(where.graph, where.instance, backfill_id, planned, at)
    return RetryPlan(launched, planned.lost)
