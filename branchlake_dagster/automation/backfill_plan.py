"""What would be computed again: the partitions asked for, and all that is computed from them by changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from dagster import AssetKey, DagsterInstance, PartitionsDefinition
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.table import Table

from branchlake_dagster.automation.consumers import ConsumingAsset, consumers
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.change import ChangedFile
from branchlake_dagster.history.ranges import Bounds, Range, Ranges, joined, union
from branchlake_dagster.incremental.affected_partitions import affected
from branchlake_dagster.incremental.pending import following
from branchlake_dagster.internals.dagster import AssetGraph
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.tables.selection import Condition, Selection, TimeRange, Values, select, to_iceberg
from branchlake_dagster.tables.specification import TableSpec, table_spec
from branchlake_dagster.wording import counted


@dataclass(frozen=True)
class Stage:
    """An asset that would be computed again: which partitions (None: it has none), after what, and why.

    `rows`, `files` and `bytes` are what `main` holds of these partitions now. `by_itself`: the incremental
    sensor launches it when the stage before it is published; otherwise somebody has to.
    """

    number: int
    asset: AssetKey
    partitions: tuple[str, ...] | None
    why: str
    by_itself: bool
    files: int = 0
    rows: int = 0
    bytes: int = 0


def plan(
    graph: AssetGraph,
    lake: Lakehouse,
    root: AssetKey,
    partitions: Sequence[str] | None,
    *,
    why: str,
    instance: DagsterInstance | None = None,
) -> list[Stage]:
    """The stages of a backfill of `root`: itself, then what follows from it.

    `partitions` of the root; None where it has none. A consumer is affected in the partitions that rows of
    the recomputed ones may belong to; an asset that takes whole inputs is named, and left to its own
    launches. Raises ConfigurationError for partitions that the root does not have.
    """
    return list(_Planner(graph, lake, instance).stages(root, partitions, why))


class _Planner:
    def __init__(self, graph: AssetGraph, lake: Lakehouse, instance: DagsterInstance | None) -> None:
        self._graph = graph
        self._instance = instance
        self._namespace = lake.settings.default_namespace
        self._catalog = lake.catalog(MAIN)
        self._consumers = {one.key: one for one in consumers(graph, self._namespace)}

    def stages(self, root: AssetKey, partitions: Sequence[str] | None, why: str) -> Iterator[Stage]:
        asked = self._asked(root, partitions)
        yield self._stage(0, root, asked, why, by_itself=False)
        after = self._after(root, asked)
        if after:
            yield self._stage(1, root, after, "are computed from those before them", by_itself=True)
        done = {root: asked if asked is None else (*asked, *after)}
        for number, level in enumerate(self._below(root), start=2 if after else 1):
            for key in level:
                above = sorted(self._graph.get(key).parent_keys & done.keys())
                consumer = self._consumers.get(key)
                consumed = [one for one in above if consumer and one in consumer.consumer.inputs]
                if consumer is None or not consumed:
                    told = f"takes all of {_names(above)}: launch it, or let it follow publications"
                    yield self._stage(number, key, None, told, by_itself=False)
                    continue
                found = self._affected(consumer, {one: done[one] for one in consumed})
                done[key] = found
                if found is None or found:
                    told = f"consumes changes of {_names(consumed)}"
                    yield self._stage(number, key, found, told, by_itself=True)

    def _asked(self, root: AssetKey, partitions: Sequence[str] | None) -> tuple[str, ...] | None:
        if not self._graph.has(root) or root not in self._graph.materializable_asset_keys:
            raise ConfigurationError(
                f"There is no asset {root.to_user_string()} to compute.",
                reason="unknown_asset",
                subject=root.to_user_string(),
            )
        definition = self._graph.get(root).partitions_def
        if definition is None:
            if partitions is not None:
                raise ConfigurationError(f"Asset {root.to_user_string()} has no partitions.")
            return None
        every = definition.get_partition_keys(dynamic_partitions_store=self._instance)
        if partitions is None:
            return tuple(every)
        unknown = sorted(set(partitions) - set(every))
        if unknown:
            raise ConfigurationError(
                f"Asset {root.to_user_string()} has no such partitions.",
                partitions=unknown,
                hint=f"It has {len(every)}: {every[0]} to {every[-1]}." if every else "It has none yet.",
                reason="unknown_partitions",
                subject=root.to_user_string(),
            )
        wanted = set(partitions)
        return tuple(key for key in every if key in wanted)

    def _after(self, root: AssetKey, asked: tuple[str, ...] | None) -> tuple[str, ...]:
        """The partitions of the root that are computed again because each is computed from the one before."""
        consumer = self._consumers.get(root)
        if asked is None or consumer is None or not consumer.consumer.in_order:
            return ()
        return tuple(key for key in self._following(consumer, {*asked}) if key not in asked)

    def _following(self, asset: ConsumingAsset, found: set[str]) -> tuple[str, ...]:
        """The partitions with those that are computed from them, in the order of the definition."""
        definition = asset.consumer.definition
        if definition is None:
            return ()
        every = definition.get_partition_keys(dynamic_partitions_store=self._instance)
        wanted = following(definition, found, every) if asset.consumer.in_order else found
        return tuple(key for key in every if key in wanted)

    def _below(self, root: AssetKey) -> Iterator[list[AssetKey]]:
        """The assets below, level by level, each after all that it depends on."""
        found: set[AssetKey] = set()
        rest = {root}
        while rest:
            rest = {child for key in rest for child in self._graph.get(key).child_keys} - found
            found |= rest
        found.discard(root)  # an asset may depend on its own earlier partitions
        for level in self._graph.toposorted_asset_keys_by_level:
            if here := sorted(found & level):
                yield here

    # -- what is affected --------------------------------------------------------------------------

    def _affected(
        self, asset: ConsumingAsset, changed: Mapping[AssetKey, tuple[str, ...] | None]
    ) -> tuple[str, ...] | None:
        consumer = asset.consumer
        if not consumer.by_partition or consumer.definition is None:
            return None
        found: set[str] = set()
        for key, partitions in changed.items():
            table = self._table(consumer.inputs[key])
            if table is None:
                continue
            files = self._files(table, self._selection(key, partitions, table))
            ranges = {
                dimension: self._ranges(column, table, files, self._selection(key, partitions, table))
                for dimension, column in consumer.columns_of_input(key, table).items()
            }
            if files:
                found |= affected(
                    consumer.definition, ranges, reach=consumer.reach_of(key), instance=self._instance
                )
        return self._following(asset, found)

    def _ranges(
        self, column: str, table: Table, files: Sequence[ChangedFile], selection: Selection | None
    ) -> Ranges:
        """The values of a column in the recomputed rows: as the partitions say, else as the files do."""
        told = _of_selection(selection, column)
        bounds = Bounds(table.metadata, column, table=".".join(table.name()))
        return told or union(bounds.of(one) for one in files)

    # -- how large it is ---------------------------------------------------------------------------

    def _stage(
        self, number: int, key: AssetKey, partitions: tuple[str, ...] | None, why: str, *, by_itself: bool
    ) -> Stage:
        spec = self._spec(key)
        table = self._table(spec.identifier)
        files = self._files(table, self._selection(key, partitions, table)) if table is not None else []
        return Stage(
            number,
            key,
            partitions,
            why,
            by_itself,
            len(files),
            sum(one.rows for one in files),
            sum(one.file.file_size_in_bytes for one in files),
        )

    def _selection(
        self, key: AssetKey, partitions: tuple[str, ...] | None, table: Table | None
    ) -> Selection | None:
        return selection_of(self._graph, self._spec(key), key, partitions, table)

    @staticmethod
    def _files(table: Table, selection: Selection | None) -> list[ChangedFile]:
        row_filter = AlwaysTrue() if selection is None else to_iceberg(selection, table.schema())
        return [ChangedFile(task.file, 0, 0) for task in table.scan(row_filter=row_filter).plan_files()]

    def _spec(self, key: AssetKey) -> TableSpec:
        return spec_of(self._graph, key, self._namespace)

    def _table(self, identifier: tuple[str, ...]) -> Table | None:
        try:
            return self._catalog.load_table(identifier)
        except NoSuchTableError:
            return None


def spec_of(graph: AssetGraph, key: AssetKey, default_namespace: str) -> TableSpec:
    """The table that an asset declares."""
    node = graph.get(key)
    return table_spec(
        key,
        node.metadata,
        default_namespace=default_namespace,
        partitioned=node.partitions_def is not None,
    )


def selection_of(
    graph: AssetGraph,
    spec: TableSpec,
    key: AssetKey,
    partitions: Sequence[str] | None,
    table: Table | None,
) -> Selection | None:
    """The rows of partitions of an asset in a state of its table; None selects the whole table."""
    definition: PartitionsDefinition[str] | None = graph.get(key).partitions_def
    if partitions is None or definition is None or not spec.columns_by_dimension or table is None:
        return None
    return select(partitions, definition, spec.columns_by_dimension, schema=table.schema(), table=spec.name)


def _of_selection(selection: Selection | None, column: str) -> Ranges | None:
    """The values that a selection allows of a column; None: it does not look at it."""
    if selection is None:
        return None
    found: list[Range] = []
    for part in selection.slices:
        here = [condition for condition in part if condition.column == column]
        if not here:
            return None
        found += [one for condition in here for one in _of_condition(condition)]
    return Ranges(joined(found))


def _of_condition(condition: Condition) -> list[Range]:
    if isinstance(condition, Values):
        return [Range(value, value) for value in condition.values]
    if isinstance(condition, TimeRange):
        return [Range(condition.start, condition.end - timedelta(microseconds=1))]
    return [Range(condition.start, condition.end - timedelta(days=1))]


def _names(keys: Sequence[AssetKey]) -> str:
    return ", ".join(key.to_user_string() for key in keys)


def size_text(stage: Stage) -> str:
    """For people."""
    return f"{counted(stage.rows, 'row')} in {counted(stage.files, 'file')}" if stage.files else "nothing yet"
