"""Check specs: which asset, which partitions, what scope."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence

import dagster as dg

from branchlake_dagster.branching.table.spec import CHECK_SCOPE
from branchlake_dagster.checks.constraints.model import ContractError

CheckedAsset = dg.AssetKey | str | Sequence[str] | dg.AssetsDefinition
"""What a check may be attached to: an asset's key in any form, or its definition."""


def asset_key(asset: CheckedAsset) -> dg.AssetKey:
    """The key of `asset`; a definition must have exactly one. In text a slash parts the key, as in the UI."""
    if isinstance(asset, dg.AssetsDefinition):
        return asset.key
    if isinstance(asset, str):
        return dg.AssetKey.from_user_string(asset)
    return asset if isinstance(asset, dg.AssetKey) else dg.AssetKey(asset)


def checked_partitions(
    asset: CheckedAsset, partitions_def: dg.PartitionsDefinition[str] | None, *, whole_table: bool
) -> dg.PartitionsDefinition[str] | None:
    """The partitioning of a check on `asset`, None when it is to see the whole table.

    A definition brings its own partitioning; with a bare key `partitions_def` has to say it. Without
    either, Dagster hands every partition of the asset to the check, whatever the run wrote.
    """
    if whole_table and partitions_def is not None:
        raise ContractError(
            "A check on the whole table has no partitions.",
            hint="Pass whole_table or partitions_def.",
            reason="whole_table_with_partitions",
        )
    if whole_table:
        return None
    if partitions_def is None and isinstance(asset, dg.AssetsDefinition):
        return asset.partitions_def
    return partitions_def


_CONSEQUENCES = {
    False: "Blocks the publication when it fails; non-blocking means that the run's other steps go on.",
    True: "A failure is published with a warning.",
}
"""The begin of a description: Dagster's page says "This is a non-blocking asset check" just above it."""


def check_specs(
    asset: CheckedAsset,
    promises: Mapping[str, str],
    partitions_def: dg.PartitionsDefinition[str] | None,
    *,
    warned: Collection[str],
) -> list[dg.AssetCheckSpec]:
    """One non-blocking spec per name in `promises`, which says the promise and what its failure does.

    Never `blocking`: the gate is at publication, and a failed check must not keep the other steps of a
    run from giving their evidence. Dagster's page calls such a check non-blocking, and means the steps.
    """
    with warnings.catch_warnings():
        # Partitioned checks are a preview in Dagster 1.13; our tests hold what we need of them.
        warnings.simplefilter("ignore", dg.PreviewWarning)
        return [
            dg.AssetCheckSpec(
                name,
                asset=asset_key(asset),
                description=f"{_CONSEQUENCES[name in warned]} Promise: {promise.rstrip('.')}.",
                partitions_def=partitions_def,
                metadata={CHECK_SCOPE: "table" if partitions_def is None else "rows"},
            )
            for name, promise in promises.items()
        ]
