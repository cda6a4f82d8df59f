"""Which partitions of a consumer have something left to consume."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from dagster import DagsterInstance, PartitionsDefinition

from branchlake_dagster.branching.consuming.affected import affected, covers
from branchlake_dagster.branching.consuming.consumer import Consumer, Input
from branchlake_dagster.branching.consuming.positions import Consumed, Positions
from branchlake_dagster.branching.table.selection import select, to_iceberg
from branchlake_dagster.changes.errors import ChangeLost
from branchlake_dagster.changes.model import ChangedFile, ChangeSet, Position
from branchlake_dagster.changes.ranges import Bounds, Ranges, union


@dataclass(frozen=True)
class Backlog:
    """What `pending` is found from: an asset, what it has consumed, and its inputs as they are now.

    `change_since` is the change of an input, None: everything; `instance` knows the dynamic partitions.
    """

    consumer: Consumer
    positions: Positions
    inputs: Collection[Input]
    change_since: Callable[[Input, Position | None], ChangeSet]
    instance: DagsterInstance | None = None
    lost_is_all: bool = False
    """Whether a change that cannot be told any more counts for all partitions, rather than as an error."""


def pending(backlog: Backlog) -> set[str]:
    """The partitions for which an input has changes that were not consumed.

    Those ahead of the rest are asked for one by one, those that came later than the rest by whether their
    inputs have files for them. Raises ChangeLost, unless `lost_is_all`.
    """
    definition = _definition(backlog)
    positions = backlog.positions
    found = set() if positions.floor is None else _affected(backlog, positions.floor)
    for partition, consumed in positions.partitions.items():
        found.discard(partition)
        if partition in _affected(backlog, consumed):
            found.add(partition)
    every = definition.get_partition_keys(dynamic_partitions_store=backlog.instance)
    covered = positions.floor.covers if positions.floor is not None else {}
    new = [
        key
        for key in every
        if key not in positions.partitions and not (covered and covers(covered, definition, key))
    ]
    return (found | _with_rows(backlog, new)) & set(every)


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
            found |= _partitions(backlog, one, tuple(change.files()))
    return found


def _with_rows(backlog: Backlog, keys: list[str]) -> set[str]:
    """Those of the partitions for which an input may have rows at all."""
    found: set[str] = set()
    for one in backlog.inputs if keys else ():
        schema = one.table.schema()
        columns = backlog.consumer.columns_of_inputs(one.table)
        selection = select(keys, _definition(backlog), columns, schema=schema, table=one.name)
        tasks = one.table.scan(row_filter=to_iceberg(selection, schema)).plan_files()
        files = tuple(ChangedFile(task.file, 0, 0) for task in tasks)
        found |= _partitions(backlog, one, files) & set(keys)
    return found


def _partitions(backlog: Backlog, one: Input, files: tuple[ChangedFile, ...]) -> set[str]:
    metadata = one.table.metadata
    ranges: dict[str, Ranges] = {}
    for dimension, column in backlog.consumer.columns_of_inputs(one.table).items():
        bounds = Bounds(metadata, column, table=one.name)
        ranges[dimension] = union(bounds.of(file) for file in files)
    return affected(_definition(backlog), ranges, instance=backlog.instance) if files else set()
