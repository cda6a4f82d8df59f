"""The assets of a code location that consume changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dagster import AssetKey, BackfillPolicy

from branchlake_dagster.incremental.consumer import Consumer
from branchlake_dagster.incremental.declaration import declared
from branchlake_dagster.incremental.step_consumption import consumer_of
from branchlake_dagster.internals.dagster import AssetGraph


@dataclass(frozen=True)
class ConsumingAsset:
    """An asset and what it declares."""

    key: AssetKey
    consumer: Consumer
    per_run: int | None = 1
    """How many partitions one run of it can compute, as its backfill policy says; None: any number."""


def consumers(
    graph: AssetGraph, default_namespace: str, among: Iterable[AssetKey] | None = None
) -> Iterator[ConsumingAsset]:
    """Those that consume changes, by key. Raises ConfigurationError for one that contradicts itself."""
    wanted = graph.materializable_asset_keys if among is None else set(among)
    for key in sorted(wanted & graph.materializable_asset_keys):
        node = graph.get(key)
        declaration = declared(node.metadata, asset=key.to_user_string())
        if declaration is not None:
            spec = node.to_asset_spec()
            mapping_of = node.assets_def.get_partition_mapping
            consumer = consumer_of(spec, declaration, node.partitions_def, default_namespace, mapping_of)
            yield ConsumingAsset(key, consumer, partitions_per_run(node.backfill_policy))


def partitions_per_run(policy: BackfillPolicy | None) -> int | None:
    """How many partitions of an asset with this backfill policy one run can compute; None: any number."""
    return policy.max_partitions_per_run if policy is not None else 1
