"""Find the partitions on `main` that another code version of the asset has computed."""

from __future__ import annotations

from collections.abc import Iterator

from dagster import AssetKey, DagsterInstance
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.capture import ancestors_after, summary_value
from branchlake_dagster.internals.dagster import AssetGraph
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.specification import table_identifier

_ELLIPSIS = "…"
"""Stands for the omitted part of a long list of partitions."""


def find_stale_partitions(
    graph: AssetGraph, lake: Lakehouse, key: AssetKey, *, instance: DagsterInstance | None = None
) -> tuple[str, ...] | None:
    """Return the partitions whose newest snapshot on `main` has another code version than the asset.

    Returns None for a stale asset without partitions, and an empty tuple if nothing is stale. Partitions
    without a recorded code version are not stale: their snapshots expired, or another writer wrote them.
    Raises ConfigurationError for an asset without a code version.
    """
    node = graph.get(key)
    code_version = node.code_version
    if code_version is None:
        raise ConfigurationError(
            f"Asset {key.to_user_string()} has no code version, so stale partitions cannot be found.",
            hint="Give the asset a code_version, or select partitions with --partition or --all.",
            reason="no_code_version",
            subject=key.to_user_string(),
        )
    try:
        table = lake.catalog(MAIN).load_table(table_identifier(key, lake.settings.default_namespace))
    except NoSuchTableError:
        return ()
    writes = list(_iter_writes(table, key))
    if node.partitions_def is None:
        return None if writes and writes[0][1] != code_version else ()
    all_keys = node.partitions_def.get_partition_keys(dynamic_partitions_store=instance)
    return tuple(key for key in all_keys if _find_code_version(key, writes) not in (None, code_version))


def _iter_writes(table: Table, key: AssetKey) -> Iterator[tuple[list[str], str]]:
    """Yield the partitions and the code version of each write of the asset, newest first."""
    snapshots, _ = ancestors_after(table.metadata)
    for snapshot in reversed(snapshots):
        code_version = summary_value(snapshot, LakeProperty.CODE_VERSION)
        if code_version is not None and summary_value(snapshot, LakeProperty.ASSET) == key.to_user_string():
            partition_list = summary_value(snapshot, LakeProperty.PARTITION) or ""
            yield [name for name in partition_list.split(",") if name], code_version


def _find_code_version(partition: str, writes: list[tuple[list[str], str]]) -> str | None:
    """Return the code version of the newest write whose list names the partition or is truncated."""
    for names, version in writes:
        if partition in names or any(name.startswith(_ELLIPSIS) for name in names):
            return version
    return None
