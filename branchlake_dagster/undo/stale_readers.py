"""Finds the tables and assets that were computed from rows of undone publications.

An undo changes only the tables of the undone publications. Tables that were computed from these keep the
results until their assets are computed again. Many assets do that by themselves: an incremental sensor or a
condition on publications notices the undo. The others need a new run, which can be requested here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dagster import AssetKey, DagsterInstance, RepositoryDefinition

from branchlake_dagster.automation.incremental_sensor import declared_sensors
from branchlake_dagster.automation.progress import UnreadableTable, iter_recorded_positions
from branchlake_dagster.incremental.declaration import parse_declaration
from branchlake_dagster.incremental.step_consumption import build_consumer
from branchlake_dagster.internals.dagster import AssetGraph, PartitionMapper
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.conditions import follows_publications
from branchlake_dagster.publication.ledger import Publication
from branchlake_dagster.publication.new_publications import load_branch_partitions
from branchlake_dagster.stored_names import AssetMetadata
from branchlake_dagster.tables.specification import find_table_name, parse_table_spec
from branchlake_dagster.undo.result import Undo
from branchlake_dagster.undo.stale_tables import (
    Partitions,
    StaleTable,
    find_stale_tables,
    read_log_since_undone,
)


class Recomputation(StrEnum):
    """How a stale table gets correct rows again."""

    BY_ITSELF = "by_itself"
    """A sensor or an automation condition of the code location launches its runs after the undo."""
    REBUILD = "rebuild"
    """Its next run fails with RowsRemoved. It has to be computed from all rows of its inputs."""
    MATERIALIZE = "materialize"
    """Nothing launches its runs. It has to be materialized again."""
    UNDO_ITS_RUNS = "undo_its_runs"
    """Its runs append rows, so another run would not replace them."""
    IGNORED = "ignored"
    """It ignores removed rows, as its declaration says."""
    UNKNOWN = "unknown"
    """No loaded code location has its asset."""


@dataclass(frozen=True)
class StaleReader:
    """A table that was computed from rows of undone publications.

    `asset` is None if no loaded code location has it. `partitions` are the stale partitions of the asset;
    empty for an asset without partitions, None if they are unknown. `inputs` are the undone and stale tables
    that it was computed from, by the runs `run_ids`. `after` are those of its inputs that have to be computed
    again before.
    """

    table: str
    asset: AssetKey | None
    partitions: tuple[str, ...] | None
    inputs: tuple[str, ...]
    run_ids: tuple[str, ...]
    recomputation: Recomputation
    after: tuple[str, ...] = ()

    @property
    def can_be_requested(self) -> bool:
        """Whether a backfill can be requested now.

        False if the asset is computed by itself, or unknown, or has unknown partitions, or has to wait for
        another stale table.
        """
        is_needed = self.recomputation in (Recomputation.REBUILD, Recomputation.MATERIALIZE)
        return is_needed and self.asset is not None and self.partitions is not None and not self.after


@dataclass(frozen=True)
class StaleReaders:
    """All stale readers of an undo, each after its inputs, and the tables that could not be inspected.

    `knows_code` is False if no code location was loaded: then only tables are found that record what they
    have consumed.
    """

    readers: tuple[StaleReader, ...] = ()
    unreadable_tables: tuple[UnreadableTable, ...] = ()
    knows_code: bool = True


@dataclass(frozen=True)
class _LocatedAsset:
    key: AssetKey
    repository: RepositoryDefinition

    @property
    def graph(self) -> AssetGraph:
        return self.repository.asset_graph


def find_stale_readers(
    lake: Lakehouse,
    undo: Undo,
    repositories: Sequence[RepositoryDefinition],
    instance: DagsterInstance | None,
) -> StaleReaders:
    """Find the tables that were computed from rows of the publications of a planned or committed undo.

    Assets of `repositories`, the loaded code locations, count as readers of their upstream assets. Tables of
    other code locations are found if they record what they have consumed. Partitions that runs have computed
    again since the undo are not stale. Without `instance`, stale partitions are unknown. Reads the log of
    `main` since the oldest of the publications, and the metadata of tables that were published since.
    """
    log = read_log_since_undone(lake.nessie, undo)
    published_tables = {name for later in log.later for name in later.publication.tables}
    namespace = lake.settings.default_namespace
    assets = _assets_by_table(repositories, namespace)
    reads: dict[str, set[str]] = {}
    for table in published_tables & assets.keys():
        located = assets[table]
        names = (find_table_name(key, namespace) for key in located.graph.get(located.key).parent_keys)
        reads[table] = {name for name in names if name is not None}
    unreadable_tables: list[UnreadableTable] = []
    for recorded in iter_recorded_positions(lake, published_tables - assets.keys()):
        if isinstance(recorded, UnreadableTable):
            unreadable_tables.append(recorded)
            continue
        records = [*recorded.positions.partitions.values(), recorded.positions.common_position]
        reads[recorded.name] = {name for record in records if record for name in record.inputs}
    located_assets = _LocatedAssets(assets, namespace, instance)
    stale_tables = find_stale_tables(log, reads, located_assets)
    stale_names = {stale_table.table for stale_table in stale_tables}
    readers = [
        _build_reader(stale_table, located_assets, stale_names - {stale_table.table})
        for stale_table in stale_tables
    ]
    return StaleReaders(tuple(readers), tuple(unreadable_tables), knows_code=bool(repositories))


def _assets_by_table(
    repositories: Iterable[RepositoryDefinition], namespace: str
) -> dict[str, _LocatedAsset]:
    assets: dict[str, _LocatedAsset] = {}
    for repository in repositories:
        for key in sorted(repository.asset_graph.materializable_asset_keys):
            table = find_table_name(key, namespace)
            if table is not None:
                assets.setdefault(table, _LocatedAsset(key, repository))
    return assets


def _build_reader(
    stale_table: StaleTable, assets: _LocatedAssets, other_stale_tables: Set[str]
) -> StaleReader:
    located = assets.by_table.get(stale_table.table)
    partitions = stale_table.partitions
    return StaleReader(
        stale_table.table,
        located.key if located is not None else None,
        None if partitions is None else tuple(sorted(name for name in partitions if name is not None)),
        tuple(sorted(stale_table.inputs)),
        tuple(dict.fromkeys(publication.run_id for publication in stale_table.publications)),
        Recomputation.UNKNOWN if located is None else assets.find_recomputation(located, stale_table.inputs),
        tuple(sorted(stale_table.inputs & other_stale_tables)),
    )


class _LocatedAssets:
    """The assets of the loaded code locations by table; implements `PartitionLookup`.

    Without `instance`, the written partitions of partitioned assets are unknown.
    """

    def __init__(
        self, by_table: Mapping[str, _LocatedAsset], namespace: str, instance: DagsterInstance | None
    ) -> None:
        self.by_table = by_table
        self._namespace = namespace
        self._instance = instance
        self._mappers: dict[int, PartitionMapper] = {}
        self._recomputes: dict[str, bool] = {}

    def load_written(self, publication: Publication, table: str) -> Partitions:
        """Return the partitions that the run materialized, or {None} for an asset without partitions.

        None if they are not known: the code location was not loaded, this Dagster instance does not have the
        run, or the run wrote the table without a materialization.
        """
        located = self.by_table.get(table)
        if located is None:
            return None
        if located.graph.get(located.key).partitions_def is None:
            return {None}
        if self._instance is None:
            return None
        return load_branch_partitions(self._instance, publication.branch).get(located.key) or None

    def map_downstream(self, input_table: str, partitions: Partitions, table: str) -> Partitions:
        """Map the partitions by the partition mapping of the asset of `table`; None if it is unknown."""
        located, input_asset = self.by_table.get(table), self.by_table.get(input_table)
        if located is None or input_asset is None or partitions is None or self._instance is None:
            return None
        mapper = self._mappers.get(id(located.repository))
        if mapper is None:
            mapper = self._mappers[id(located.repository)] = PartitionMapper(located.graph, self._instance)
        return mapper.map_downstream(input_asset.key, partitions, located.key)

    def overwrites_partitions(self, table: str) -> bool:
        """Return whether the asset replaces its table or partitions. False for tables without an asset."""
        located = self.by_table.get(table)
        return located is not None and self._write_mode(located) in ("replace_table", "replace_partitions")

    def recomputes_partitions(self, table: str) -> bool:
        """Return whether a new run of the asset removes stale rows of the partitions that it writes.

        Incremental assets do: they follow the undo, or are rebuilt. Not so assets that append or ignore
        removed rows, and tables without a loaded asset.
        """
        if table not in self._recomputes:
            located = self.by_table.get(table)
            kept = (Recomputation.UNDO_ITS_RUNS, Recomputation.IGNORED)
            self._recomputes[table] = (
                located is not None and self.find_recomputation(located, frozenset()) not in kept
            )
        return self._recomputes[table]

    def _write_mode(self, located: _LocatedAsset) -> str:
        node = located.graph.get(located.key)
        spec = parse_table_spec(
            located.key,
            node.metadata,
            default_namespace=self._namespace,
            partitioned=node.partitions_def is not None,
        )
        return spec.write_mode

    def find_recomputation(self, located: _LocatedAsset, inputs: Set[str]) -> Recomputation:
        """Return how an asset that has read the undone or stale tables `inputs` gets correct rows.

        An asset that consumes changes of one of them, and reads others whole, is launched by these changes.
        """
        graph, key = located.graph, located.key
        node = graph.get(key)
        declaration = parse_declaration(node.metadata, asset=key.to_user_string())
        consumed_tables = {
            find_table_name(input_key, self._namespace)
            for input_key in (declaration.inputs if declaration is not None else ())
        }
        is_launched = follows_publications(node.automation_condition) or _is_launched_by_sensor(
            located.repository, key, {self.by_table[name].key for name in inputs if name in self.by_table}
        )
        if declaration is None and self._write_mode(located) == "append":
            return Recomputation.UNDO_ITS_RUNS
        if declaration is None or (inputs and inputs.isdisjoint(consumed_tables)):
            return Recomputation.BY_ITSELF if is_launched else Recomputation.MATERIALIZE
        consumer = build_consumer(
            node.to_asset_spec(),
            declaration,
            node.partitions_def,
            self._namespace,
            node.assets_def.get_partition_mapping,
        )
        if "rows" in declaration.patterns and consumer.when_removed == "fail":
            return Recomputation.REBUILD
        if "rows" in declaration.patterns and consumer.when_removed == "ignore":
            return Recomputation.IGNORED
        is_launched |= key in declared_sensors(located.repository)
        return Recomputation.BY_ITSELF if is_launched else Recomputation.MATERIALIZE


def _is_launched_by_sensor(
    repository: RepositoryDefinition, key: AssetKey, input_keys: Set[AssetKey]
) -> bool:
    """Return whether a `published_sensor` of one of the inputs may launch a job with the asset."""
    for sensor in repository.sensor_defs:
        stored_keys: Any = sensor.metadata.get(AssetMetadata.WATCHED_ASSETS)
        if stored_keys is None:
            continue
        watched_keys = {AssetKey.from_user_string(name) for name in stored_keys.value}
        jobs = [repository.get_job(target.job_name) for target in sensor.targets]
        if watched_keys & input_keys and any(key in job.asset_layer.executable_asset_keys for job in jobs):
            return True
    return False
