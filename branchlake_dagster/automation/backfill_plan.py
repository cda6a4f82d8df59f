"""Plans a backfill: the requested partitions, and all partitions that are computed from them by changes.

`find_stale_partitions` finds the partitions on `main` that another code version of the asset has computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta

from dagster import AssetKey, DagsterInstance, PartitionsDefinition
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.table import Table

from branchlake_dagster.automation.backlog import ConsumingAsset, iter_consumers
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.capture import ancestors_after, summary_value
from branchlake_dagster.history.change import ChangedFile
from branchlake_dagster.history.ranges import ColumnRanges, Range, Ranges, merge_ranges, union_ranges
from branchlake_dagster.incremental.affected_partitions import affected_partition_keys
from branchlake_dagster.incremental.pending import with_successors
from branchlake_dagster.internals.dagster import AssetGraph
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.recorded_partitions import RecordedPartitions
from branchlake_dagster.tables.replaced_rows import (
    ALL_ROWS,
    ReplacedRows,
    build_replaced_rows,
    from_json,
)
from branchlake_dagster.tables.selection import (
    Condition,
    Selection,
    TimeRange,
    Values,
    select_partitions,
    to_iceberg_filter,
)
from branchlake_dagster.tables.specification import TableSpec, parse_table_spec
from branchlake_dagster.wording import format_count


@dataclass(frozen=True)
class StalePartitions:
    """The partitions that another code version of an asset has computed.

    `keys` is None if an asset without partitions is stale. `unknown` has the partitions that may be stale:
    the snapshots do not show whether they were computed by the present version.
    """

    keys: tuple[str, ...] | None
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecordedWrite:
    """A snapshot that an asset wrote: its code version and partitions.

    `replaced` has the replaced rows if the write mode is `replace_partitions`. It may select more rows than
    the partitions have.
    """

    code_version: str
    partitions: RecordedPartitions
    replaced: ReplacedRows | None = None


def find_stale_partitions(
    graph: AssetGraph, lake: Lakehouse, key: AssetKey, *, instance: DagsterInstance | None = None
) -> StalePartitions:
    """Return the partitions whose newest snapshot on `main` has another code version than the asset.

    Partitions without a recorded code version are not stale: their snapshots expired, or another writer wrote
    them. Raises ConfigurationError for an asset without a code version, and the errors of
    `select_partitions`.
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
    spec = asset_table_spec(graph, key, lake.settings.default_namespace)
    try:
        table = lake.catalog(MAIN).load_table(spec.identifier)
    except NoSuchTableError:
        return StalePartitions(())
    writes = list(_iter_writes(table, key))
    if node.partitions_def is None:
        return StalePartitions(None if writes and writes[0].code_version != code_version else ())

    def rows_of(partition: str) -> ReplacedRows:
        selection = partition_selection(graph, spec, key, [partition], table)
        return ALL_ROWS if selection is None else build_replaced_rows(selection, table.schema())

    all_keys = node.partitions_def.get_partition_keys(dynamic_partitions_store=instance)
    return classify_partitions(all_keys, writes, code_version, rows_of if spec.columns_by_dimension else None)


def classify_partitions(
    all_keys: Sequence[str],
    writes: Sequence[RecordedWrite],
    code_version: str,
    rows_of: Callable[[str], ReplacedRows] | None,
) -> StalePartitions:
    """Return which of the partitions are stale, by their writes, newest first.

    `code_version` is the asset's present version. `rows_of` returns the rows of a partition; None if the
    table has no partition columns.
    """
    rows_by_key: dict[str, ReplacedRows] = {}
    versions: dict[str, list[str]] = {key: [] for key in all_keys}
    open_keys = set(all_keys)
    for write in writes:
        if not open_keys:
            break
        if rows_of is not None and write.replaced is not None and not write.partitions.is_complete:
            rows_by_key = rows_by_key or {key: rows_of(key) for key in all_keys}
        written_keys, possible_keys = _written_keys(write, all_keys, rows_by_key)
        for key in open_keys & (written_keys | possible_keys):
            versions[key].append(write.code_version)
        open_keys -= written_keys
    outdated = {key for key, found in versions.items() if any(version != code_version for version in found)}
    stale = {key for key in outdated - open_keys if code_version not in versions[key]}
    return StalePartitions(
        tuple(key for key in all_keys if key in stale),
        tuple(key for key in all_keys if key in outdated - stale),
    )


def _written_keys(
    write: RecordedWrite, all_keys: Sequence[str], rows_by_key: Mapping[str, ReplacedRows]
) -> tuple[Set[str], Set[str]]:
    """Return the partitions that a write has computed, and those that it may have computed."""
    recorded = write.partitions
    if recorded.may_hold_commas:
        record = f",{','.join(recorded.names)},"
        listed = {key for key in all_keys if f",{key}," in record}
        if any("," in key for key in listed):  # "a,b" may be one partition or two
            return set(), listed if recorded.is_complete else set(all_keys)
    if recorded.is_complete:
        return set(recorded.names), set()
    if write.replaced is None or not rows_by_key:
        return set(recorded.names), set(all_keys)
    replaced_keys = {key for key, rows in rows_by_key.items() if write.replaced.overlaps(rows)}
    # A long predicate is stored wider than it is. Then more partitions match than were written.
    is_exact = len(replaced_keys) <= recorded.count
    return replaced_keys if is_exact else set(recorded.names), replaced_keys


def _iter_writes(table: Table, key: AssetKey) -> Iterator[RecordedWrite]:
    """Yield each snapshot that the asset wrote, newest first, if it has a code version."""
    snapshots, _ = ancestors_after(table.metadata)
    for snapshot in reversed(snapshots):
        code_version = summary_value(snapshot, LakeProperty.CODE_VERSION)
        if code_version is None or summary_value(snapshot, LakeProperty.ASSET) != key.to_user_string():
            continue
        record, mode = (
            summary_value(snapshot, LakeProperty.REPLACED),
            summary_value(snapshot, LakeProperty.WRITE_MODE),
        )
        yield RecordedWrite(
            code_version,
            RecordedPartitions.parse(summary_value(snapshot, LakeProperty.PARTITION) or ""),
            from_json(record) if record is not None and mode == "replace_partitions" else None,
        )


@dataclass(frozen=True)
class Stage:
    """An asset of a backfill, with its position in the order of stages and the reason why it is computed.

    `partitions` is None for an asset without partitions, and for an asset that reads whole inputs. `rows`,
    `files` and `bytes` are the sizes of these partitions on `main` now. If `launches_itself` is True, the
    incremental sensor launches the stage after the stage before it is published. Otherwise a person has to
    launch it.
    """

    number: int
    asset: AssetKey
    partitions: tuple[str, ...] | None
    reason: str
    launches_itself: bool
    files: int = 0
    rows: int = 0
    bytes: int = 0


def plan_stages(
    graph: AssetGraph,
    lake: Lakehouse,
    root: AssetKey,
    partitions: Sequence[str] | None,
    *,
    reason: str,
    instance: DagsterInstance | None = None,
) -> list[Stage]:
    """Return the stages of a backfill of `root`: the root itself, then the assets that depend on it.

    `partitions` are partitions of the root; None means all of them, or that the root has no partitions.
    `reason` is recorded in the first stage. A consumer is computed in each partition that rows of the
    recomputed input partitions may belong to. An asset that reads whole inputs becomes a stage that does not
    launch itself. Raises ConfigurationError if the root is unknown or does not have these partitions.
    """
    return list(_StagePlanner(graph, lake, instance).iter_stages(root, partitions, reason))


class _StagePlanner:
    def __init__(self, graph: AssetGraph, lake: Lakehouse, instance: DagsterInstance | None) -> None:
        self._graph = graph
        self._instance = instance
        self._namespace = lake.settings.default_namespace
        self._catalog = lake.catalog(MAIN)
        self._consumers = {consumer.key: consumer for consumer in iter_consumers(graph, self._namespace)}

    def iter_stages(self, root: AssetKey, partitions: Sequence[str] | None, reason: str) -> Iterator[Stage]:
        root_partitions = self._resolve_partitions(root, partitions)
        yield self._build_stage(0, root, root_partitions, reason, launches_itself=False)
        later_partitions = self._later_partitions(root, root_partitions)
        if later_partitions:
            yield self._build_stage(
                1, root, later_partitions, "are computed from those before them", launches_itself=True
            )
        recomputed_keys = {
            root: root_partitions if root_partitions is None else (*root_partitions, *later_partitions)
        }
        for number, level in enumerate(self._iter_levels_below(root), start=2 if later_partitions else 1):
            for key in level:
                recomputed_parents = sorted(self._graph.get(key).parent_keys & recomputed_keys.keys())
                consumer = self._consumers.get(key)
                consumed_inputs = [
                    parent for parent in recomputed_parents if consumer and parent in consumer.consumer.inputs
                ]
                if consumer is None or not consumed_inputs:
                    stage_reason = (
                        f"takes all of {_format_keys(recomputed_parents)}:"
                        " launch it, or let it follow publications"
                    )
                    yield self._build_stage(number, key, None, stage_reason, launches_itself=False)
                    continue
                affected_keys = self._affected_partitions(
                    consumer, {parent: recomputed_keys[parent] for parent in consumed_inputs}
                )
                recomputed_keys[key] = affected_keys
                if affected_keys is None or affected_keys:
                    stage_reason = f"consumes changes of {_format_keys(consumed_inputs)}"
                    yield self._build_stage(number, key, affected_keys, stage_reason, launches_itself=True)

    def _resolve_partitions(self, root: AssetKey, partitions: Sequence[str] | None) -> tuple[str, ...] | None:
        if not self._graph.has(root) or root not in self._graph.materializable_asset_keys:
            raise ConfigurationError(
                f"This code location has no asset {root.to_user_string()} that can be materialized.",
                reason="unknown_asset",
                subject=root.to_user_string(),
            )
        definition = self._graph.get(root).partitions_def
        if definition is None:
            if partitions is not None:
                raise ConfigurationError(f"Asset {root.to_user_string()} has no partitions.")
            return None
        all_keys = definition.get_partition_keys(dynamic_partitions_store=self._instance)
        if partitions is None:
            return tuple(all_keys)
        unknown_keys = sorted(set(partitions) - set(all_keys))
        if unknown_keys:
            raise ConfigurationError(
                f"Asset {root.to_user_string()} does not have these partitions.",
                partitions=unknown_keys,
                hint=f"It has {len(all_keys)} partitions: {all_keys[0]} to {all_keys[-1]}."
                if all_keys
                else "It has no partitions yet.",
                reason="unknown_partitions",
                subject=root.to_user_string(),
            )
        requested_keys = set(partitions)
        return tuple(key for key in all_keys if key in requested_keys)

    def _later_partitions(self, root: AssetKey, root_partitions: tuple[str, ...] | None) -> tuple[str, ...]:
        """Return the root's later partitions, if they are computed from `root_partitions`; otherwise ().

        `root_partitions` are the requested partitions; None means the whole root, which has no later ones.
        """
        consumer = self._consumers.get(root)
        if root_partitions is None or consumer is None or not consumer.consumer.computes_in_order:
            return ()
        return tuple(
            key for key in self._add_following(consumer, {*root_partitions}) if key not in root_partitions
        )

    def _add_following(self, asset: ConsumingAsset, partition_keys: set[str]) -> tuple[str, ...]:
        """Return the partitions and those that are computed from them, in the order of the definition."""
        definition = asset.consumer.definition
        if definition is None:
            return ()
        all_keys = definition.get_partition_keys(dynamic_partitions_store=self._instance)
        affected_keys = (
            with_successors(definition, partition_keys, all_keys)
            if asset.consumer.computes_in_order
            else partition_keys
        )
        return tuple(key for key in all_keys if key in affected_keys)

    def _iter_levels_below(self, root: AssetKey) -> Iterator[list[AssetKey]]:
        """Yield the descendants of `root` level by level: each asset comes after all its parents."""
        descendants: set[AssetKey] = set()
        frontier = {root}
        while frontier:
            frontier = {child for key in frontier for child in self._graph.get(key).child_keys} - descendants
            descendants |= frontier
        descendants.discard(root)  # an asset may depend on its own earlier partitions
        for level in self._graph.toposorted_asset_keys_by_level:
            if level_keys := sorted(descendants & level):
                yield level_keys

    # -- affected partitions -----------------------------------------------------------------------

    def _affected_partitions(
        self, asset: ConsumingAsset, changed_inputs: Mapping[AssetKey, tuple[str, ...] | None]
    ) -> tuple[str, ...] | None:
        consumer = asset.consumer
        if not consumer.tracks_partitions or consumer.definition is None:
            return None
        partition_keys: set[str] = set()
        for key, partitions in changed_inputs.items():
            table = self._find_table(consumer.inputs[key])
            if table is None:
                continue
            files = self._plan_files(table, self._selection(key, partitions, table))
            ranges = {
                dimension: self._column_ranges(column, table, files, self._selection(key, partitions, table))
                for dimension, column in consumer.columns_of_input(key, table).items()
            }
            if files:
                partition_keys |= affected_partition_keys(
                    consumer.definition, ranges, reach=consumer.reach_of(key), instance=self._instance
                )
        return self._add_following(asset, partition_keys)

    def _column_ranges(
        self, column: str, table: Table, files: Sequence[ChangedFile], selection: Selection | None
    ) -> Ranges:
        """Return ranges that contain the column's values in the recomputed rows.

        They come from the selected partitions or, if these do not restrict the column, from the bounds of
        files.
        """
        selected_ranges = _find_selected_ranges(selection, column)
        bounds = ColumnRanges(table.metadata, column, table=".".join(table.name()))
        return selected_ranges or union_ranges(bounds.ranges_of(file) for file in files)

    # -- sizes -------------------------------------------------------------------------------------

    def _build_stage(
        self,
        number: int,
        key: AssetKey,
        partitions: tuple[str, ...] | None,
        reason: str,
        *,
        launches_itself: bool,
    ) -> Stage:
        spec = self._spec(key)
        table = self._find_table(spec.identifier)
        files = self._plan_files(table, self._selection(key, partitions, table)) if table is not None else []
        return Stage(
            number,
            key,
            partitions,
            reason,
            launches_itself,
            len(files),
            sum(file.rows for file in files),
            sum(file.file.file_size_in_bytes for file in files),
        )

    def _selection(
        self, key: AssetKey, partitions: tuple[str, ...] | None, table: Table | None
    ) -> Selection | None:
        return partition_selection(self._graph, self._spec(key), key, partitions, table)

    @staticmethod
    def _plan_files(table: Table, selection: Selection | None) -> list[ChangedFile]:
        row_filter = AlwaysTrue() if selection is None else to_iceberg_filter(selection, table.schema())
        return [ChangedFile(task.file, 0, 0) for task in table.scan(row_filter=row_filter).plan_files()]

    def _spec(self, key: AssetKey) -> TableSpec:
        return asset_table_spec(self._graph, key, self._namespace)

    def _find_table(self, identifier: tuple[str, ...]) -> Table | None:
        try:
            return self._catalog.load_table(identifier)
        except NoSuchTableError:
            return None


def asset_table_spec(graph: AssetGraph, key: AssetKey, default_namespace: str) -> TableSpec:
    """Return the specification of the table that an asset declares.

    `default_namespace` is the namespace of the table if the asset's key has only one part. Raises
    ConfigurationError if the asset's metadata is invalid.
    """
    node = graph.get(key)
    return parse_table_spec(
        key,
        node.metadata,
        default_namespace=default_namespace,
        partitioned=node.partitions_def is not None,
    )


def partition_selection(
    graph: AssetGraph,
    spec: TableSpec,
    key: AssetKey,
    partitions: Sequence[str] | None,
    table: Table | None,
) -> Selection | None:
    """Return the selection of the rows of `partitions` in the table of asset `key`; None selects all rows.

    `spec` is the specification of this table. `partitions` is None for all partitions. `table` is None if
    the table does not exist. The result is also None if the asset has no partitions, or if its table has no
    partition columns. Raises the errors of `select_partitions`.
    """
    definition: PartitionsDefinition[str] | None = graph.get(key).partitions_def
    if partitions is None or definition is None or not spec.columns_by_dimension or table is None:
        return None
    return select_partitions(
        partitions, definition, spec.columns_by_dimension, schema=table.schema(), table_name=spec.name
    )


def _find_selected_ranges(selection: Selection | None, column: str) -> Ranges | None:
    """Return the values of a column that a selection allows; None if it does not restrict the column.

    Bounds of time windows are included, so that the ranges have the last value before each end.
    """
    if selection is None:
        return None
    ranges: list[Range] = []
    for conditions in selection.slices:
        column_conditions = [condition for condition in conditions if condition.column == column]
        if not column_conditions:
            return None
        ranges += [
            value_range for condition in column_conditions for value_range in _condition_ranges(condition)
        ]
    return Ranges(merge_ranges(ranges))


def _condition_ranges(condition: Condition) -> list[Range]:
    if isinstance(condition, Values):
        return [Range(value, value) for value in condition.values]
    if isinstance(condition, TimeRange):
        return [Range(condition.start, condition.end - timedelta(microseconds=1))]
    return [Range(condition.start, condition.end - timedelta(days=1))]


def _format_keys(keys: Sequence[AssetKey]) -> str:
    return ", ".join(key.to_user_string() for key in keys)


def format_stage_size(stage: Stage) -> str:
    """Return the size of a stage for people, such as `1,200 rows in 3 files`, or `nothing yet`."""
    return (
        f"{format_count(stage.rows, 'row')} in {format_count(stage.files, 'file')}"
        if stage.files
        else "nothing yet"
    )
