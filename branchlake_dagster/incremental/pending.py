"""Which partitions of a consumer have something left to consume."""

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
from branchlake_dagster.history.change import ChangedFile, ChangeLost, ChangeSet, Position, moment
from branchlake_dagster.history.ranges import Bounds, Ranges, union
from branchlake_dagster.incremental.affected_partitions import (
    PartitionFinder,
    Reach,
    affected,
    covers,
    dimensions,
    time_dimension,
)
from branchlake_dagster.incremental.consumer import Consumer, Input
from branchlake_dagster.incremental.positions import Consumed, Positions
from branchlake_dagster.incremental.redefinition import shares_rows
from branchlake_dagster.incremental.valid_through import (
    InputTime,
    UnconsumedPart,
    ValidThrough,
    table_time_ms,
    to_ms,
    together,
)
from branchlake_dagster.tables.selection import select, to_iceberg


@dataclass(frozen=True)
class Backlog:
    """What `pending` is found from: an asset, what it has consumed, and its inputs as they are now.

    `change_since` is the change of an input, None: everything; `instance` knows the dynamic partitions.
    `own_table` is the asset's table on `main`; None: there is none yet.
    """

    consumer: Consumer
    positions: Positions
    inputs: Collection[Input]
    change_since: Callable[[Input, Position | None], ChangeSet]
    instance: DagsterInstance | None = None
    own_table: Table | None = None
    lost_is_all: bool = False
    """Whether a change that cannot be told any more counts for all partitions, rather than as an error."""


def pending(backlog: Backlog) -> set[str]:
    """The partitions for which an input has changes that were not consumed.

    Those ahead of the rest are asked for one by one, those that came later than the rest by whether their
    inputs have files for them, or the asset's own table has: such a partition was computed, left the
    definition and came back, and what its inputs have lost meanwhile is still in the table. Where each
    partition is computed from the one before it, all partitions from the first of them on, see `following`.
    Raises ChangeLost, unless `lost_is_all`.
    """
    definition = _definition(backlog)
    positions = backlog.positions
    found = set() if positions.floor is None else _affected(backlog, positions.floor)
    for partition, consumed in positions.partitions.items():
        found.discard(partition)
        if partition in _affected(backlog, consumed):
            found.add(partition)
    every = definition.get_partition_keys(dynamic_partitions_store=backlog.instance)
    new = [
        key for key in every if key not in positions.partitions and not is_covered(positions, definition, key)
    ]
    left = {key for key in new if _may_be_left(positions, definition, key)}
    found = (found | left | _with_rows(backlog, [key for key in new if key not in left])) & set(every)
    if not backlog.consumer.in_order:
        return found
    return following(definition, found | _computed_from_others(positions, definition, every, {*new}), every)


def chains(definition: PartitionsDefinition[str], keys: Iterable[str]) -> list[list[str]]:
    """Partitions in the order of time, for each combination of keys of the other dimensions by itself.

    `keys` come in the order of the definition, which is that of time.
    """
    if not isinstance(definition, MultiPartitionsDefinition):
        return [[*keys]]
    others = [
        name
        for name, part in dimensions(definition).items()
        if not isinstance(part, TimeWindowPartitionsDefinition)
    ]
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for key in keys:
        values = definition.get_partition_key_from_str(key).keys_by_dimension
        found[tuple(values[name] for name in others)].append(key)
    return [*found.values()]


def following(
    definition: PartitionsDefinition[str], partitions: Collection[str], every: Iterable[str]
) -> set[str]:
    """These partitions, and all that come after one of them in its chain."""
    found: set[str] = set()
    for chain in chains(definition, every):
        first = next((number for number, key in enumerate(chain) if key in partitions), len(chain))
        found.update(chain[first:])
    return found


@dataclass(frozen=True)
class Batch:
    """The partitions that one run can compute now, and those that wait until it is published."""

    partitions: tuple[str, ...]
    waiting: tuple[str, ...] = ()


def batches(
    definition: PartitionsDefinition[str],
    left: Collection[str],
    every: Iterable[str],
    most: int | None,
) -> list[Batch]:
    """By chain the first `most` of the partitions that are left, all with None, and those after them."""
    found = ([key for key in chain if key in left] for chain in chains(definition, every))
    ends = ((part, len(part) if most is None else most) for part in found if part)
    return [Batch(tuple(part[:end]), tuple(part[end:])) for part, end in ends]


def predecessors(definition: PartitionsDefinition[str], every: Iterable[str]) -> dict[str, str]:
    """By partition the one before it in its chain; the first ones are not in it."""
    return {key: before for chain in chains(definition, every) for before, key in pairwise(chain)}


def _run_of(positions: Positions, partition: str | None, new: Collection[str]) -> str:
    return positions.run_of(partition, lambda: partition not in new) if partition is not None else ""


def _computed_from_others(
    positions: Positions, definition: PartitionsDefinition[str], every: Sequence[str], new: Collection[str]
) -> set[str]:
    """The partitions that are not computed from the present result of the one before them.

    A result that was computed again, for whatever reason, has another run. A partition without an entry was
    as current as the one before it when the whole table was; and a new one comes after those that were
    computed even if its inputs have no row for it.
    """
    found = {*positions.void}
    for chain in chains(definition, every):
        computed = False
        before: str | None = None
        for key in chain:
            own = positions.partitions.get(key)
            if own is not None:
                stale = own.follows != _run_of(positions, before, new)
            elif key in new:
                stale = computed
            else:
                stale = before is not None and before in positions.partitions
            if stale:
                found.add(key)
                break  # all that follow are stale with it
            computed, before = computed or key not in new, key
    return found


@dataclass(frozen=True)
class PartitionChange:
    """What one partition has not consumed: `rows` that came or went in `files`, since `oldest`.

    `consumed` is the partition's position; None if nothing was consumed for it, so that nothing is counted.
    A file with rows of several partitions counts in each of them with all of its rows.
    """

    consumed: Consumed | None
    files: int = 0
    rows: int = 0
    oldest: datetime | None = None


def changes_by_partition(backlog: Backlog, partitions: Iterable[str]) -> dict[str, PartitionChange]:
    """What each of these partitions has left, from the manifests that `pending` reads. Raises ChangeLost."""
    found: dict[str, PartitionChange] = {}
    for consumed, keys in _by_position(backlog, partitions):
        if consumed is None:
            found |= {key: PartitionChange(None) for key in keys}
        else:
            found |= _counted(backlog, consumed, keys)
    return found


def runs_by_partition(
    backlog: Backlog,
    partitions: Iterable[str],
    chosen: Callable[[Collection[str]], Collection[str]],
) -> dict[str, set[str]]:
    """The runs that made what each of these partitions has left, without partitions that have none of them.

    Only runs that `chosen` returns of those that changed an input are counted. A run counts for each
    partition that any file which it added or removed may have rows of, also when a later change has undone
    its own. Manifests are read only if there are such runs. Raises ChangeLost.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for consumed, keys in _by_position(backlog, partitions):
        for one in backlog.inputs:
            position = consumed.inputs.get(one.name) if consumed is not None else None
            runs = runs_since(one.table.metadata, position, table=one.name)
            wanted = {*chosen({*runs.values()})}
            if not wanted:
                continue
            bounds = _bounds(backlog, one)
            finder = PartitionFinder(_definition(backlog), keys, reach=backlog.consumer.reach_of(one.key))
            for step in backlog.change_since(one, position).steps:
                for file in (*step.added, *step.removed, *step.deletes):
                    if (run_id := runs.get(file.snapshot_id)) in wanted and run_id is not None:
                        for key in finder.of({name: its.of(file) for name, its in bounds.items()}):
                            found[key].add(run_id)
    return dict(found)


def _by_position(backlog: Backlog, partitions: Iterable[str]) -> Iterator[tuple[Consumed | None, list[str]]]:
    """The partitions that stand at the same position, with it; None: nothing was consumed for them."""
    definition, positions = _definition(backlog), backlog.positions
    covered: list[str] = []
    new: list[str] = []
    for key in partitions:
        if (own := positions.partitions.get(key)) is not None:
            yield own, [key]
        else:
            (covered if is_covered(positions, definition, key) else new).append(key)
    if covered:
        yield positions.floor, covered
    if new:
        yield None, new


def unconsumed_parts(backlog: Backlog) -> set[str] | set[None]:
    """The partitions that have something left; `{None}` for an asset without partitions that has.

    Raises ChangeLost, unless `lost_is_all`.
    """
    if backlog.consumer.by_partition:
        return pending(backlog)
    floor = backlog.positions.floor
    for one in backlog.inputs:
        if not backlog.change_since(one, floor.inputs.get(one.name) if floor is not None else None).empty:
            return {None}
    return set()


def windows_end_ms(consumer: Consumer) -> int | None:
    """The end of the last time window that there is now, ms since 1970; None without time windows.

    Ask for it before the partitions that have something left: these then include a window that begins
    meanwhile.
    """
    if not consumer.by_partition or consumer.definition is None:
        return None
    ends = []
    for part in dimensions(consumer.definition).values():
        if isinstance(part, TimeWindowPartitionsDefinition):
            last = part.get_last_partition_window()
            ends.append(to_ms(part.start if last is None else last.end))
    return min(ends, default=None)


def valid_through(
    backlog: Backlog,
    input_times: Mapping[AssetKey, InputTime | None],
    unconsumed: Iterable[str | None],
    end_ms: int | None,
) -> ValidThrough | None:
    """Up to which time the inputs have all records, and the consumer's table; None if an input has no time.

    `unconsumed` are the partitions that have something left, `{None}` for a table without partitions that
    has. `end_ms` is `windows_end_ms` of before. Nothing is read: only recorded times are compared.
    """
    inputs = together(_complete_inputs(backlog, input_times))
    if inputs is None:
        return None
    parts = [_part(backlog, key, inputs.sources) for key in unconsumed]
    return ValidThrough(inputs.ms, table_time_ms(inputs.ms, parts, end_ms), inputs.sources)


def _complete_inputs(
    backlog: Backlog, input_times: Mapping[AssetKey, InputTime | None]
) -> Iterable[InputTime | None]:
    """The time of each input, less what results need of the rows after their own."""
    windows = time_dimension(backlog.consumer.definition)
    definition = windows[1] if windows is not None else None
    for one in backlog.inputs:
        time = input_times[one.key]
        if time is None:
            yield None
            continue
        before = backlog.consumer.reach_of(one.key).complete_before(definition, moment(time.ms))
        yield InputTime(to_ms(before), time.sources)


def _part(backlog: Backlog, key: str | None, sources: frozenset[str]) -> UnconsumedPart:
    consumer, positions = backlog.consumer, backlog.positions
    consumed = positions.of(key, lambda: key is not None and is_covered(positions, _definition(backlog), key))
    names = [one.name for one in backlog.inputs]
    consumed_ms = consumed.inputs_time_ms(names, sources) if consumed is not None else None
    windows = time_dimension(consumer.definition)
    start_ms: int | None = None
    if key is not None and windows is not None and windows[0] in consumer.spec.columns_by_dimension:
        definition: Any = consumer.definition
        start_ms = to_ms(definition.time_window_for_partition_key(key).start)
    return UnconsumedPart(start_ms, consumed_ms)


def _counted(backlog: Backlog, consumed: Consumed, keys: list[str]) -> dict[str, PartitionChange]:
    """What partitions that stand at one position have left."""
    files: dict[str, int] = defaultdict(int)
    rows: dict[str, int] = defaultdict(int)
    oldest: dict[str, datetime] = {}
    for one in backlog.inputs:
        position = consumed.inputs.get(one.name)
        if position is None:  # the input was declared later, and all of it is new
            return {key: PartitionChange(None) for key in keys}
        change = backlog.change_since(one, position)
        times = {step.ordinal: step.at for step in change.steps}
        bounds = _bounds(backlog, one)
        finder = PartitionFinder(_definition(backlog), keys, reach=backlog.consumer.reach_of(one.key))
        for file in change.files():
            for key in finder.of({name: its.of(file) for name, its in bounds.items()}):
                files[key] += 1
                rows[key] += file.rows
                at = times[file.ordinal]
                oldest[key] = min(oldest.get(key, at), at)
    return {key: PartitionChange(consumed, files[key], rows[key], oldest.get(key)) for key in keys}


def _bounds(backlog: Backlog, one: Input) -> dict[str, Bounds]:
    columns = backlog.consumer.columns_of_input(one.key, one.table)
    return {name: Bounds(one.table.metadata, column, table=one.name) for name, column in columns.items()}


def _may_be_left(positions: Positions, definition: PartitionsDefinition[str], key: str) -> bool:
    """Whether the table may hold rows of a new partition that count for nothing any more.

    It is computed anew even where its inputs have no rows for it any more: they have to go.
    """
    if positions.all_left or key in positions.void:
        return True
    return any(shares_rows(one, definition, key) for one in positions.redefined)


def is_covered(positions: Positions, definition: PartitionsDefinition[str], key: str) -> bool:
    """Whether a partition without an entry of its own stands where the table as a whole does."""
    floor = positions.floor
    if floor is None or not floor.covers or not covers(floor.covers, definition, key):
        return False
    return not any(shares_rows(one, definition, key) for one in positions.redefined)


def _definition(backlog: Backlog) -> PartitionsDefinition[str]:
    definition = backlog.consumer.definition
    assert definition is not None  # noqa: S101 - only asked where there are partitions
    return definition


def _affected(backlog: Backlog, consumed: Consumed) -> set[str]:
    """The partitions that the changes since then may have rows for."""
    found: set[str] = set()
    for one in backlog.inputs:
        try:
            change = backlog.change_since(one, consumed.inputs.get(one.name))
        except ChangeLost:
            if not backlog.lost_is_all:
                raise
            return set(_definition(backlog).get_partition_keys(dynamic_partitions_store=backlog.instance))
        if not change.empty:
            reach = backlog.consumer.reach_of(one.key)
            found |= _partitions(backlog, _bounds(backlog, one), tuple(change.files()), reach)
    return found


def _with_rows(backlog: Backlog, keys: list[str]) -> set[str]:
    """Those of the partitions for which an input, or the asset's own table, may have rows at all."""
    if not keys:
        return set()
    found: set[str] = set()
    for one in backlog.inputs:
        columns = backlog.consumer.columns_of_input(one.key, one.table)
        reach = backlog.consumer.reach_of(one.key)
        found |= _with_files(backlog, keys, one.table, one.name, columns, reach)
    if backlog.own_table is not None and backlog.positions.floor is not None:
        spec = backlog.consumer.spec
        found |= _with_files(backlog, keys, backlog.own_table, spec.name, spec.columns_by_dimension, Reach())
    return found


def _with_files(
    backlog: Backlog, keys: list[str], table: Table, name: str, columns: Mapping[str, str], reach: Reach
) -> set[str]:
    """Those of the partitions that a table may have rows for, by its manifests.

    `columns` decide on the partitions by dimension. A table that lacks one has the same rows for all keys of
    that dimension.
    """
    schema = table.schema()
    names = {field.name for field in schema.fields}
    known = {dimension: column for dimension, column in columns.items() if column in names}
    scan = table.scan()
    if known:
        selection = select(
            keys,
            _definition(backlog),
            known,
            schema=schema,
            table=name,
            window=reach.of_window,
            all_dimensions=False,
        )
        scan = table.scan(row_filter=to_iceberg(selection, schema))
    files = tuple(ChangedFile(task.file, 0, 0) for task in scan.plan_files())
    bounds = {dimension: Bounds(table.metadata, column, table=name) for dimension, column in known.items()}
    return _partitions(backlog, bounds, files, reach) & set(keys)


def _partitions(
    backlog: Backlog, bounds: Mapping[str, Bounds], files: tuple[ChangedFile, ...], reach: Reach
) -> set[str]:
    """The partitions whose results may depend on rows of these files."""
    if not files:
        return set()
    ranges: dict[str, Ranges] = {
        dimension: union(its.of(file) for file in files) for dimension, its in bounds.items()
    }
    return affected(_definition(backlog), ranges, reach=reach, instance=backlog.instance)
