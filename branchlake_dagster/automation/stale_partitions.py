"""Partitions on `main` that an older version of the asset's code has computed."""

from __future__ import annotations

from collections.abc import Iterator

from dagster import AssetKey, DagsterInstance
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history import capture as history
from branchlake_dagster.internals.dagster import AssetGraph
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.specification import identifier_of

_CUT = "…"
"""In place of the rest of a long list of partitions."""


def stale_partitions(
    graph: AssetGraph, lake: Lakehouse, key: AssetKey, *, instance: DagsterInstance | None = None
) -> tuple[str, ...] | None:
    """The partitions whose newest snapshot on `main` tells another code version than the asset's.

    None for an asset without partitions that is stale; empty when nothing is. What snapshots do not tell,
    because they have expired or somebody else wrote them, is not stale. Raises ConfigurationError for an
    asset that has no code version.
    """
    node = graph.get(key)
    version = node.code_version
    if version is None:
        raise ConfigurationError(
            f"Asset {key.to_user_string()} has no code version, so nobody knows what is stale.",
            hint="Give it a code_version, or name the partitions: --partition, or --all.",
            reason="no_code_version",
            subject=key.to_user_string(),
        )
    try:
        table = lake.catalog(MAIN).load_table(identifier_of(key, lake.settings.default_namespace))
    except NoSuchTableError:
        return ()
    written = list(_written(table, key))
    if node.partitions_def is None:
        return None if written and written[0][1] != version else ()
    every = node.partitions_def.get_partition_keys(dynamic_partitions_store=instance)
    return tuple(one for one in every if _version_of(one, written) not in (None, version))


def _written(table: Table, key: AssetKey) -> Iterator[tuple[list[str], str]]:
    """The partitions and the code version of each write of the asset, newest first."""
    snapshots, _ = history.line(table.metadata)
    for snapshot in reversed(snapshots):
        version = history.told(snapshot, LakeProperty.CODE_VERSION)
        if version is not None and history.told(snapshot, LakeProperty.ASSET) == key.to_user_string():
            listed = history.told(snapshot, LakeProperty.PARTITION) or ""
            yield [name for name in listed.split(",") if name], version


def _version_of(partition: str, written: list[tuple[list[str], str]]) -> str | None:
    """Of the newest write that names the partition, or whose list is cut and may."""
    for names, version in written:
        if partition in names or any(name.startswith(_CUT) for name in names):
            return version
    return None
