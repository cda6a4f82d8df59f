"""The assets of a code location that consume changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from dagster import AssetKey, BackfillPolicy

from branchlake_dagster.incremental.consumer import Consumer
from branchlake_dagster.incremental.declaration import parse_declaration
from branchlake_dagster.incremental.step_consumption import build_consumer
from branchlake_dagster.internals.dagster import AssetGraph


@dataclass(frozen=True)
class ConsumingAsset:
    """An asset that consumes changes, with its declaration."""

    key: AssetKey
    consumer: Consumer
    per_run: int | None = 1
    """The number of partitions that one run can compute, by its backfill policy; None means any number."""


def iter_consumers(
    graph: AssetGraph, default_namespace: str, selected_keys: Iterable[AssetKey] | None = None
) -> Iterator[ConsumingAsset]:
    """Yield the assets that consume changes, in the order of their keys.

    `selected_keys` restricts them; None means all assets. Raises ConfigurationError for an asset whose
    declaration is contradictory.
    """
    asset_keys = graph.materializable_asset_keys if selected_keys is None else set(selected_keys)
    for key in sorted(asset_keys & graph.materializable_asset_keys):
        node = graph.get(key)
        declaration = parse_declaration(node.metadata, asset=key.to_user_string())
        if declaration is not None:
            spec = node.to_asset_spec()
            get_mapping = node.assets_def.get_partition_mapping
            consumer = build_consumer(spec, declaration, node.partitions_def, default_namespace, get_mapping)
            yield ConsumingAsset(key, consumer, partitions_per_run(node.backfill_policy))


def partitions_per_run(policy: BackfillPolicy | None) -> int | None:
    """Return the number of partitions that a backfill policy allows in one run; None means any number."""
    return policy.max_partitions_per_run if policy is not None else 1


def order_by_inputs(assets: Sequence[ConsumingAsset]) -> list[ConsumingAsset]:
    """Return the assets in an order in which each comes after the assets whose changes it consumes."""
    by_key = {asset.key: asset for asset in assets}
    consumed = {asset.key: by_key.keys() & asset.consumer.declaration.inputs.keys() for asset in assets}
    return [by_key[key] for key in TopologicalSorter(consumed).static_order()]


def find_downstream(assets: Sequence[ConsumingAsset]) -> dict[AssetKey, tuple[AssetKey, ...]]:
    """Return the assets that one run can compute together with each asset, in the order of their inputs.

    These are the assets that consume its changes, directly or through each other, and have its partitions. An
    asset whose partitions follow from each other is not among them: it waits for its earlier partitions.
    """
    ordered = order_by_inputs(assets)
    downstream: dict[AssetKey, tuple[AssetKey, ...]] = {}
    for asset in ordered:
        changed, followers = {asset.key}, []
        for other in ordered:
            is_same = other.consumer.definition == asset.consumer.definition
            is_alone = other.per_run != asset.per_run or other.consumer.computes_in_order
            if is_same and not is_alone and changed & other.consumer.declaration.inputs.keys():
                changed.add(other.key)
                followers.append(other.key)
        downstream[asset.key] = tuple(followers)
    return downstream


def join_chains(downstream: Mapping[AssetKey, Sequence[AssetKey]]) -> dict[AssetKey, set[AssetKey]]:
    """Return the assets of the chain of each asset: those that `find_downstream` links, in any direction."""
    chains: dict[AssetKey, set[AssetKey]] = {}
    for key, followers in downstream.items():
        joined = {key, *followers}
        for other in [*joined]:
            joined |= chains.get(other, set())
        for other in joined:
            chains[other] = joined
    return chains
