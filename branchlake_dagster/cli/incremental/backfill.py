"""What `branchlake backfill` does: the code location and what the options mean, plan, launch, progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dagster import AssetKey, DagsterInstance

from branchlake_dagster.branching.resources.lakehouse_resource import LakehouseResource
from branchlake_dagster.cli.local.home import dagster_home
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.incremental.backfill.launch import launch
from branchlake_dagster.incremental.backfill.plan import Stage, plan
from branchlake_dagster.incremental.backfill.progress import Progress, progress
from branchlake_dagster.incremental.backfill.stale import stale_partitions
from branchlake_dagster.library_internals.dagster import AssetGraph, repository_in
from branchlake_dagster.settings import Settings


@dataclass(frozen=True)
class Place:
    """The code location, the lake and the Dagster instance that a backfill is about."""

    graph: AssetGraph
    lake: LakehouseResource
    instance: DagsterInstance


@contextmanager
def place(module: str, settings: Settings) -> Iterator[Place]:
    """From a module with `Definitions`. Raises ConfigurationError."""
    try:
        repository = repository_in(module, str(Path.cwd()))
    except (ImportError, ValueError) as error:
        raise ConfigurationError(
            f"{module} cannot be loaded as a code location: {error}",
            hint="Name the module with your Definitions: -m my_project.definitions.",
        ) from error
    dagster_home(settings)
    with DagsterInstance.get() as instance:
        yield Place(repository.asset_graph, LakehouseResource.of(settings), instance)


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
        raise ConfigurationError(f"There is no asset {asset} in this code location.")
    if partitions or everything:
        given = None if everything else tuple(partitions)
        return Asked(key, given, "asked for by hand")
    stale = stale_partitions(where.graph, where.lake.lakehouse, key, instance=where.instance)
    if stale == ():
        return None
    return Asked(key, stale, f"code version {where.graph.get(key).code_version} is newer than they are")


def stages(where: Place, what: Asked) -> list[Stage]:
    """The plan."""
    return plan(
        where.graph, where.lake.lakehouse, what.key, what.partitions, why=what.why, instance=where.instance
    )


def run(where: Place, what: Asked, at: float) -> str:
    """Launch it; the backfill's id."""
    found = stages(where, what)[0]
    return launch(where.graph, where.instance, what.key, found.partitions, why=what.why, at=at)


def status(where: Place, backfill_id: str) -> list[Progress]:
    """How far it has come."""
    return progress(where.graph, where.lake, where.instance, backfill_id, datetime.now(UTC))
