"""Finds which partitions of a consumer still have changes to consume, and how many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from dagster import (
    AssetKey,
    DagsterInstance,
    MultiPartitionsDefinition,
    PartitionsDefinition,
    TimeWindowPartitionsDefinition,
)
from pyiceberg.table import Table

from branchlake_dagster.history.capture import runs_since
from branchlake_dagster.history.change import ChangedFile, ChangeLost, ChangeSet, Position, from_epoch_ms
from branchlake_dagster.history.ranges import ColumnRanges, Ranges, union_ranges
from branchlake_dagster.incremental.affected_partitions import (
    PartitionFinder,
    Reach,
    affected_partition_keys,
    dimension_definitions,
    is_covered_partition,
    time_dimension,
)
from branchlake_dagster.incremental.declaration import Consumer, UpstreamTable
from branchlake_dagster.incremental.positions import ConsumptionRecord, Positions, Unconsumed, shares_rows
from branchlake_dagster.incremental.valid_through import (
    InputTime,
    UnconsumedPart,
    ValidThrough,
    earliest_time,
    table_time_ms,
    to_epoch_ms,
)
from branchlake_dagster.tables.selection import select_partitions, to_iceberg_filter


@dataclass(frozen=True)
class ConsumerState:
    """The values from which pending partitions are found: a consumer, its positions and its present inputs.

    `change_since(input, position)` returns the change of an input; a position of None means all rows.
    `instance` lists dynamic partitions. `own_table` is the asset's table on `main`, or None if it does not
    exist yet.
    """

    consumer: Consumer
    positions: Positions
    inputs: Collection[UpstreamTable]
    change_since: Callable[[UpstreamTable, Position | None], ChangeSet]
    instance: DagsterInstance | None = None
    own_table: Table | None = None
    lost_is_all: bool = False
    """Whether a lost change counts for all partitions instead of raising ChangeLost."""


def pending_partitions(state: ConsumerState) -> set[str]:
    """Return the partitions for which an input has changes that were not consumed.

    Partitions with their own position are checked one by one, the others by the common position. A partition
    that was created after the common position is pending if its inputs may have rows for it, or if the
    asset's own table may have such rows: the partition may have been computed, removed from the definition
    and added again while its inputs lost rows. If partitions are computed in order, all partitions after a
    pending one are included, see `with_successors`. Raises ChangeLost, unless `lost_is_all`.
    """
    definition = _require_definition(state)
    positions = state.positions
    pending_keys = (
        set() if positions.common_position is None else _affected_partitions(state, positions.common_position)
    )
    for partition, record in positions.partitions.items():
        pending_keys.discard(partition)
        if partition in _affected_partitions(state, record):
            pending_keys.add(partition)
    all_keys = definition.get_partition_keys(dynamic_partitions_store=state.instance)
    new_keys = [
        key
        for key in all_keys
        if key not in positions.partitions and not is_at_common_position(positions, definition, key)
    ]
    stale_keys = {key for key in new_keys if _may_hold_old_rows(positions, definition, key)}
    pending_keys = (
        pending_keys
        | stale_keys
        | _partitions_with_rows(state, [key for key in new_keys if key not in stale_keys])
    ) & set(all_keys)
    if not state.consumer.computes_in_order:
        return pending_keys
    return with_successors(
        definition,
        pending_keys | _outdated_partitions(positions, definition, all_keys, {*new_keys}),
        all_keys,
    )


def partition_chains(definition: PartitionsDefinition[str], keys: Iterable[str]) -> list[list[str]]:
    """Return the partitions as chains, each in order of time: one chain per combination of other keys.

    A definition without further dimensions has one chain. `keys` must be in the order of the definition,
    which is that of time.
    """
    if not isinstance(definition, MultiPartitionsDefinition):
        return [[*keys]]
    other_dimensions = [
        name
        for name, part in dimension_definitions(definition).items()
        if not isinstance(part, TimeWindowPartitionsDefinition)
    ]
    chains_by_values: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for key in keys:
        values = definition.get_partition_key_from_str(key).keys_by_dimension
        chains_by_values[tuple(values[name] for name in other_dimensions)].append(key)
    return [*chains_by_values.values()]


def with_successors(
    definition: PartitionsDefinition[str], partitions: Collection[str], all_keys: Iterable[str]
) -> set[str]:
    """Return the given partitions, and all partitions that come after one of them in its chain.

    Only partitions in `all_keys` are returned.
    """
    successors: set[str] = set()
    for chain in partition_chains(definition, all_keys):
        first = next((number for number, key in enumerate(chain) if key in partitions), len(chain))
        successors.update(chain[first:])
    return successors


@dataclass(frozen=True)
class PartitionBatch:
    """The partitions that one run can compute now, and those that wait until that run is published."""

    partitions: tuple[str, ...]
    waiting: tuple[str, ...] = ()


def plan_batches(
    definition: PartitionsDefinition[str],
    remaining: Collection[str],
    all_keys: Iterable[str],
    max_partitions: int | None,
) -> list[PartitionBatch]:
    """Return, for each chain, a batch of its first `max_partitions` remaining partitions.

    The chain's other remaining partitions wait. If `max_partitions` is None, no partition waits. `all_keys`
    are all partitions in the order of the definition; other partitions in `remaining` are ignored.
    """
    remaining_chains = (
        [key for key in chain if key in remaining] for chain in partition_chains(definition, all_keys)
    )
    ends = (
        (part, len(part) if max_partitions is None else max_partitions) for part in remaining_chains if part
    )
    return [PartitionBatch(tuple(part[:end]), tuple(part[end:])) for part, end in ends]


def partition_predecessors(definition: PartitionsDefinition[str], all_keys: Iterable[str]) -> dict[str, str]:
    """Map each partition to the previous partition in its chain. The first of a chain has no entry.

    `all_keys` must be in the order of the definition, as for `partition_chains`.
    """
    return {
        key: predecessor
        for chain in partition_chains(definition, all_keys)
        for predecessor, key in pairwise(chain)
    }


def _run_of_partition(positions: Positions, partition: str | None, new_keys: Collection[str]) -> str:
    return positions.run_of(partition, lambda: partition not in new_keys) if partition is not None else ""


def _outdated_partitions(
    positions: Positions,
    definition: PartitionsDefinition[str],
    all_keys: Sequence[str],
    new_keys: Collection[str],
) -> set[str]:
    """Return the partitions that were not computed from the present result of their predecessor.

    A recomputed predecessor is recognized by its run id, which differs from the recorded `predecessor_run`. A
    partition without an entry was as current as its predecessor when the common position was recorded. A new
    partition is outdated if an earlier one has a result, even if its inputs have no rows for it. Only the
    first outdated partition of a chain is returned, and partitions whose entries do not count.

    `all_keys` are all partitions in the order of the definition. `new_keys` are those without any record.
    """
    outdated_keys = {*positions.void_partitions}
    for chain in partition_chains(definition, all_keys):
        has_result = False
        predecessor: str | None = None
        for key in chain:
            record = positions.partitions.get(key)
            if record is not None:
                is_outdated = record.predecessor_run != _run_of_partition(positions, predecessor, new_keys)
            elif key in new_keys:
                is_outdated = has_result
            else:
                is_outdated = predecessor is not None and predecessor in positions.partitions
            if is_outdated:
                outdated_keys.add(key)
                break  # all partitions after it are outdated too
            has_result, predecessor = has_result or key not in new_keys, key
    return outdated_keys


def changes_by_partition(
    state: ConsumerState, partitions: Iterable[str]
) -> dict[str, tuple[ConsumptionRecord | None, Unconsumed]]:
    """Return, for each of these partitions, its consumption record and its unconsumed change.

    The record is None if nothing was consumed for the partition; then everything is unconsumed and nothing is
    counted. A lost change is whole, too, with its record. A file with rows of several partitions counts with
    all its rows in each of them. Raises ChangeLost, unless `lost_is_all`. Cost: reads the same manifests as
    `pending_partitions`.
    """
    changes: dict[str, tuple[ConsumptionRecord | None, Unconsumed]] = {}
    for record, keys in group_by_position(state, partitions):
        if record is None:
            changes |= {key: (None, Unconsumed(whole=True)) for key in keys}
        else:
            changes |= _count_changes(state, record, keys)
    return changes


def may_have_lost_rows(
    state: ConsumerState, upstream: UpstreamTable, change: ChangeSet, partitions: Collection[str]
) -> bool:
    """Whether rows of an input, on which these partitions depend, may have been updated or deleted.

    Without partitions, all rows of the input count. Reads only bounds of columns: if a removed file, or a
    delete file, may have rows of a partition, these rows count as removed, even if they were written again.
    """
    files = (*change.removed, *change.deletes)
    if not files or not state.consumer.tracks_partitions:
        return bool(files)
    bounds = _input_bounds(state, upstream)
    finder = PartitionFinder(
        _require_definition(state), partitions, reach=state.consumer.reach_of(upstream.key)
    )
    return any(
        finder.affected_keys({name: column.ranges_of(file) for name, column in bounds.items()})
        for file in files
    )


def runs_by_partition(
    state: ConsumerState,
    partitions: Collection[str],
    start_positions: Mapping[str, Position | None],
    select_runs: Callable[[Collection[str]], Collection[str]],
) -> dict[str, set[str]]:
    """Return, for each of these partitions, the ids of the runs that made its unconsumed changes.

    `start_positions` are the positions after which changes count, by dotted name of the input; None means all
    rows. Partitions without such runs have no entry. `select_runs` gets the ids of the runs that changed an
    input and returns those to count. A run counts for each partition that may have rows in a file which the
    run added or removed, even if a later change reversed its change. Manifests are read only if `select_runs`
    returns a run. Raises ChangeLost.
    """
    run_ids_by_key: dict[str, set[str]] = defaultdict(set)
    for upstream in state.inputs:
        position = start_positions[upstream.name]
        runs = runs_since(upstream.table.metadata, position, table=upstream.name)
        selected_runs = {*select_runs({*runs.values()})}
        if not selected_runs:
            continue
        bounds = _input_bounds(state, upstream)
        finder = PartitionFinder(
            _require_definition(state), partitions, reach=state.consumer.reach_of(upstream.key)
        )
        for step in state.change_since(upstream, position).steps:
            for file in (*step.added, *step.removed, *step.deletes):
                if (run_id := runs.get(file.snapshot_id)) in selected_runs and run_id is not None:
                    for key in finder.affected_keys(
                        {name: column_bounds.ranges_of(file) for name, column_bounds in bounds.items()}
                    ):
                        run_ids_by_key[key].add(run_id)
    return dict(run_ids_by_key)


def group_by_position(
    state: ConsumerState, partitions: Iterable[str]
) -> Iterator[tuple[ConsumptionRecord | None, list[str]]]:
    """Yield pairs of a consumption record and those of `partitions` to which it applies.

    A partition's own record has only this partition; the common position has all others that it covers. The
    partitions without a record are in a last pair with None.
    """
    definition, positions = _require_definition(state), state.positions
    common_keys: list[str] = []
    new_keys: list[str] = []
    for key in partitions:
        if (record := positions.partitions.get(key)) is not None:
            yield record, [key]
        else:
            (common_keys if is_at_common_position(positions, definition, key) else new_keys).append(key)
    if common_keys:
        yield positions.common_position, common_keys
    if new_keys:
        yield None, new_keys


def unconsumed_partitions(state: ConsumerState) -> set[str] | set[None]:
    """Return the partitions that have something left to consume.

    For an asset without partitions, the result is `{None}` or the empty set. Raises ChangeLost, unless
    `lost_is_all`.
    """
    if state.consumer.tracks_partitions:
        return pending_partitions(state)
    common_position = state.positions.common_position
    for upstream in state.inputs:
        if not state.change_since(
            upstream, common_position.inputs.get(upstream.name) if common_position is not None else None
        ).empty:
            return {None}
    return set()


def windows_end_ms(consumer: Consumer) -> int | None:
    """Return the end of the last existing time window, in ms since 1970. None without time windows.

    Call it before listing the partitions that still have something to consume. If a window is added in
    between, the list then includes it.
    """
    if not consumer.tracks_partitions or consumer.definition is None:
        return None
    ends = []
    for part in dimension_definitions(consumer.definition).values():
        if isinstance(part, TimeWindowPartitionsDefinition):
            last = part.get_last_partition_window()
            ends.append(to_epoch_ms(part.start if last is None else last.end))
    return min(ends, default=None)


def compute_valid_through(
    state: ConsumerState,
    input_times: Mapping[AssetKey, InputTime | None],
    unconsumed: Iterable[str | None],
    end_ms: int | None,
) -> ValidThrough | None:
    """Return the times up to which the inputs and the consumer's table are complete.

    `input_times` has the time of each input. The result is None if one of the inputs has no time.
    `unconsumed` are the partitions that still have something to consume; `{None}` stands for a table without
    partitions. `end_ms` is the earlier result of `windows_end_ms`. No table is read: only recorded times are
    compared.
    """
    inputs = earliest_time(_iter_complete_times(state, input_times))
    if inputs is None:
        return None
    parts = [_unconsumed_part(state, key, inputs.sources) for key in unconsumed]
    return ValidThrough(inputs.ms, table_time_ms(inputs.ms, parts, end_ms), inputs.sources)


def _iter_complete_times(
    state: ConsumerState, input_times: Mapping[AssetKey, InputTime | None]
) -> Iterable[InputTime | None]:
    """Yield the time before which all results that depend on an input are complete, for each input.

    It is earlier than the time of the input if results depend on rows after their own window. None is yielded
    for an input without a time.
    """
    windows = time_dimension(state.consumer.definition)
    definition = windows[1] if windows is not None else None
    for upstream in state.inputs:
        time = input_times[upstream.key]
        if time is None:
            yield None
            continue
        complete_before = state.consumer.reach_of(upstream.key).complete_before(
            definition, from_epoch_ms(time.ms)
        )
        yield InputTime(to_epoch_ms(complete_before), time.sources)


def _unconsumed_part(state: ConsumerState, key: str | None, sources: frozenset[str]) -> UnconsumedPart:
    consumer, positions = state.consumer, state.positions
    record = positions.find_record(
        key, lambda: key is not None and is_at_common_position(positions, _require_definition(state), key)
    )
    names = [upstream.name for upstream in state.inputs]
    consumed_ms = record.inputs_time_ms(names, sources) if record is not None else None
    windows = time_dimension(consumer.definition)
    start_ms: int | None = None
    if key is not None and windows is not None and windows[0] in consumer.spec.columns_by_dimension:
        definition: Any = consumer.definition
        start_ms = to_epoch_ms(definition.time_window_for_partition_key(key).start)
    return UnconsumedPart(start_ms, consumed_ms)


def _count_changes(
    state: ConsumerState, record: ConsumptionRecord, keys: list[str]
) -> dict[str, tuple[ConsumptionRecord | None, Unconsumed]]:
    """Count the unconsumed files and rows of the partitions `keys`, which share the consumption record.

    Returns the record and the unconsumed change of each partition, as `changes_by_partition`. If the record
    lacks an input, all partitions have None and an unconsumed change that is `whole`.
    """
    files: dict[str, int] = defaultdict(int)
    rows: dict[str, int] = defaultdict(int)
    oldest: dict[str, datetime] = {}
    for upstream in state.inputs:
        position = record.inputs.get(upstream.name)
        if position is None:  # the input was added to the declaration later, so all of it is new
            return {key: (None, Unconsumed(whole=True)) for key in keys}
        try:
            change = state.change_since(upstream, position)
        except ChangeLost:
            if not state.lost_is_all:
                raise
            return {key: (record, Unconsumed(whole=True)) for key in keys}
        times = {step.ordinal: step.at for step in change.steps}
        bounds = _input_bounds(state, upstream)
        finder = PartitionFinder(
            _require_definition(state), keys, reach=state.consumer.reach_of(upstream.key)
        )
        for file in change.files():
            for key in finder.affected_keys(
                {name: column_bounds.ranges_of(file) for name, column_bounds in bounds.items()}
            ):
                files[key] += 1
                rows[key] += file.rows
                at = times[file.ordinal]
                oldest[key] = min(oldest.get(key, at), at)
    return {
        key: (record, Unconsumed(files[key], rows[key], oldest.get(key), new=not files[key])) for key in keys
    }


def _input_bounds(state: ConsumerState, upstream: UpstreamTable) -> dict[str, ColumnRanges]:
    columns = state.consumer.columns_of_input(upstream.key, upstream.table)
    return {
        name: ColumnRanges(upstream.table.metadata, column, table=upstream.name)
        for name, column in columns.items()
    }


def _may_hold_old_rows(positions: Positions, definition: PartitionsDefinition[str], key: str) -> bool:
    """Whether the table may still have outdated rows of a new partition.

    Such a partition is computed anew even if its inputs have no rows for it, so that its old rows are
    removed.
    """
    if positions.may_hold_old_rows or key in positions.void_partitions:
        return True
    return any(shares_rows(extent, definition, key) for extent in positions.redefined_extents)


def is_at_common_position(positions: Positions, definition: PartitionsDefinition[str], key: str) -> bool:
    """Whether the common position applies to a partition that has no entry of its own.

    It applies if the partition existed when the position was recorded, and shares no rows with a partition
    that was ahead under another definition.
    """
    common_position = positions.common_position
    if (
        common_position is None
        or not common_position.coverage
        or not is_covered_partition(common_position.coverage, definition, key)
    ):
        return False
    return not any(shares_rows(extent, definition, key) for extent in positions.redefined_extents)


def _require_definition(state: ConsumerState) -> PartitionsDefinition[str]:
    definition = state.consumer.definition
    assert definition is not None  # noqa: S101 - called only for partitioned assets
    return definition


def _affected_partitions(state: ConsumerState, record: ConsumptionRecord) -> set[str]:
    """Return the partitions for which the changes since a consumption record may have rows.

    If a change is lost, all partitions are returned with `state.lost_is_all`; otherwise ChangeLost is raised.
    """
    partitions: set[str] = set()
    for upstream in state.inputs:
        try:
            change = state.change_since(upstream, record.inputs.get(upstream.name))
        except ChangeLost:
            if not state.lost_is_all:
                raise
            return set(_require_definition(state).get_partition_keys(dynamic_partitions_store=state.instance))
        if not change.empty:
            reach = state.consumer.reach_of(upstream.key)
            partitions |= _partitions_of_files(
                state, _input_bounds(state, upstream), tuple(change.files()), reach
            )
    return partitions


def _partitions_with_rows(state: ConsumerState, keys: list[str]) -> set[str]:
    """Return those of the partitions `keys` for which an input, or the asset's own table, may have any rows.

    The asset's own table counts only if it has a common position.
    """
    if not keys:
        return set()
    partitions: set[str] = set()
    for upstream in state.inputs:
        columns = state.consumer.columns_of_input(upstream.key, upstream.table)
        reach = state.consumer.reach_of(upstream.key)
        partitions |= _partitions_with_files(state, keys, upstream.table, upstream.name, columns, reach)
    if state.own_table is not None and state.positions.common_position is not None:
        spec = state.consumer.spec
        partitions |= _partitions_with_files(
            state, keys, state.own_table, spec.name, spec.columns_by_dimension, Reach()
        )
    return partitions


def _partitions_with_files(
    state: ConsumerState, keys: list[str], table: Table, name: str, columns: Mapping[str, str], reach: Reach
) -> set[str]:
    """Return the partitions for which a table may have rows, by its manifests.

    `columns` has the columns that decide on the partitions, by dimension. A table that lacks a column has the
    same rows for all keys of that dimension.
    """
    schema = table.schema()
    column_names = {field.name for field in schema.fields}
    present_columns = {dimension: column for dimension, column in columns.items() if column in column_names}
    scan = table.scan()
    if present_columns:
        selection = select_partitions(
            keys,
            _require_definition(state),
            present_columns,
            schema=schema,
            table_name=name,
            map_window=reach.required_window,
            all_dimensions=False,
        )
        scan = table.scan(row_filter=to_iceberg_filter(selection, schema))
    files = tuple(ChangedFile(task.file, 0, 0) for task in scan.plan_files())
    bounds = {
        dimension: ColumnRanges(table.metadata, column, table=name)
        for dimension, column in present_columns.items()
    }
    return _partitions_of_files(state, bounds, files, reach) & set(keys)


def _partitions_of_files(
    state: ConsumerState, bounds: Mapping[str, ColumnRanges], files: tuple[ChangedFile, ...], reach: Reach
) -> set[str]:
    """Return the partitions whose results may depend on rows of these files.

    `bounds` has the column of each dimension, from which the values in a file are known. `reach` defines how
    far results depend on rows outside of their own window.
    """
    if not files:
        return set()
    ranges: dict[str, Ranges] = {
        dimension: union_ranges(column_bounds.ranges_of(file) for file in files)
        for dimension, column_bounds in bounds.items()
    }
    return affected_partition_keys(_require_definition(state), ranges, reach=reach, instance=state.instance)
