"""Requests backfills of stale readers after an undo, and shows in Dagster which partitions are stale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from dagster import (
    AssetKey,
    AssetObservation,
    DagsterInstance,
    MetadataValue,
    PartitionsDefinition,
    RepositoryDefinition,
    partition_loading_context,
)

from branchlake_dagster.automation.backfill_stages import launch_backfill
from branchlake_dagster.internals.dagster import AssetGraph, load_tagged_backfills, report_observations
from branchlake_dagster.stored_names import EventMetadata, RunTag
from branchlake_dagster.undo.result import Undo
from branchlake_dagster.undo.stale_readers import StaleReader, StaleReaders

_BATCH_SIZE = 200


def request_recomputation(
    instance: DagsterInstance,
    undo: Undo,
    stale: StaleReaders,
    repositories: Sequence[RepositoryDefinition],
    *,
    requested_at: float,
) -> dict[str, str]:
    """Request a Dagster backfill for each stale reader that `can_be_requested`; return their ids by table.

    The runs compute the stale partitions from all rows of their inputs. Partitions that were deleted since
    are left out. Backfills that an earlier call requested for the same undo are returned instead of a second
    one. Empty if the undo has no commit. `requested_at` is a POSIX time in seconds.
    """
    if undo.commit is None:
        return {}
    tags = {RunTag.AFTER_PUBLICATION: undo.commit}
    backfills: dict[str, str] = {}
    for reader in stale.readers:
        if not reader.can_be_requested or reader.asset is None:
            continue
        graph = next(
            repository.asset_graph for repository in repositories if repository.asset_graph.has(reader.asset)
        )
        partitions = _list_existing_partitions(instance, graph, reader.asset, reader.partitions or ())
        if partitions == ():
            continue
        requested = {
            backfill.key: backfill.backfill_id for backfill in load_tagged_backfills(instance, graph, tags)
        }
        backfills[reader.table] = requested.get(reader.asset) or launch_backfill(
            graph,
            instance,
            reader.asset,
            partitions,
            reason=f"Computed from rows that were undone by {undo.commit}",
            base_hash=undo.commit,
            requested_at=requested_at,
            tags=tags,
        )
    return backfills


def _list_existing_partitions(
    instance: DagsterInstance, graph: AssetGraph, key: AssetKey, partitions: Sequence[str]
) -> tuple[str, ...] | None:
    """Return those of the partitions that the asset still has; None for an asset without partitions."""
    definition: PartitionsDefinition[str] | None = graph.get(key).partitions_def
    if definition is None:
        return None
    with partition_loading_context(dynamic_partitions_store=instance):
        return tuple(sorted(definition.filter_valid_partition_keys({*partitions})))


def report_stale_readers(instance: DagsterInstance, undo: Undo, stale: StaleReaders) -> None:
    """Report an observation on each stale partition of each asset.

    An asset without partitions, or with unknown stale partitions, gets one observation. Does nothing if the
    undo has no commit.
    """
    if undo.commit is None:
        return
    observations = _iter_observations(undo.commit, stale.readers)
    while batch := list(islice(observations, _BATCH_SIZE)):
        report_observations(instance, batch)


def _iter_observations(commit: str, readers: Sequence[StaleReader]) -> Iterator[AssetObservation]:
    for reader in readers:
        if reader.asset is None:
            continue
        names: Sequence[str | None] = reader.partitions or [None]
        for partition in names:
            yield _build_observation(commit, reader, reader.asset, partition)


def _build_observation(
    commit: str, reader: StaleReader, key: AssetKey, partition: str | None
) -> AssetObservation:
    inputs = ", ".join(reader.inputs)
    return AssetObservation(
        key,
        partition=partition,
        description=f"Computed from rows of {inputs} that were undone by {commit}.",
        metadata={
            EventMetadata.ON_MAIN: MetadataValue.bool(True),
            EventMetadata.STALE_SINCE: MetadataValue.text(commit),
            EventMetadata.STALE_INPUTS: MetadataValue.text(inputs),
        },
    )
