"""What one step consumes: for each of its inputs the change since what its table says it has consumed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from dagster import AssetKey, DagsterInstance
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table
from pyiceberg.types import IcebergType

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.errors import ConfigurationError, call_all
from branchlake_dagster.history.capture import (
    capture_change,
    contains_snapshot,
    position_on_branch,
    result_rolled_back_error,
    runs_since,
)
from branchlake_dagster.history.change import ChangeLost, ChangeSet, Position
from branchlake_dagster.history.ranges import Ranges, changed_ranges, unify_types, union_ranges
from branchlake_dagster.incremental import positions as position_store
from branchlake_dagster.incremental.affected_partitions import partition_coverage
from branchlake_dagster.incremental.commits import MainCommit, commits_of_change, position_at
from branchlake_dagster.incremental.consumer import Consumer, Identifier, UpstreamTable, require_columns
from branchlake_dagster.incremental.declaration import Pattern
from branchlake_dagster.incremental.pending import (
    Backlog,
    PartitionBatch,
    PartitionChange,
    changes_by_partition,
    compute_valid_through,
    is_at_common_position,
    partition_predecessors,
    pending_partitions,
    plan_batches,
    runs_by_partition,
    windows_end_ms,
    with_successors,
)
from branchlake_dagster.incremental.positions import ConsumptionRecord, Positions, PropertyUpdate
from branchlake_dagster.incremental.redefinition import fit_positions, partition_extent, partition_identity
from branchlake_dagster.incremental.valid_through import ValidThrough
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.tables.errors import PositionUnreadable, TableMissing
from branchlake_dagster.tables.specification import format_table_name

Known = TypeVar("Known")


@dataclass(frozen=True)
class PartitionGroup:
    """Partitions that stand at the same positions; empty for an asset without partitions."""

    partitions: tuple[str, ...]
    start_positions: Mapping[str, Position | None]
    """By input; None: all of it is new."""


class Consumption:
    """What a step of a run consumes. Everything is read once, at the first question.

    `partitions` are the run's; `rebuild` ignores what was consumed and gives everything.
    """

    def __init__(
        self,
        lake: LakehouseResource,
        consumer: Consumer,
        *,
        partitions: Sequence[str] = (),
        rebuild: bool = False,
        instance: DagsterInstance | None = None,
    ) -> None:
        self._lake = lake
        self.consumer = consumer
        self.partitions = tuple(partitions) if consumer.tracks_partitions else ()
        self._rebuild = rebuild
        self.instance = instance
        self._changes: dict[tuple[str, Position | None], ChangeSet] = {}
        self._base_hashes: dict[tuple[str, Position], str] = {}
        self._commits: dict[AssetKey, list[MainCommit]] = {}
        self._cache: dict[str, Any] = {}
        self.cleanup_callbacks: list[Callable[[], None]] = []
        """What is to be cleaned up once the result is stored."""

    # -- where things stand ------------------------------------------------------------------------

    @cached_property
    def _base_hash(self) -> str:
        branch = self._lake.run_branch
        return branch.open().base_hash if branch is not None else ""

    @cached_property
    def _main_catalog(self) -> NessieCatalog:
        return self._lake.lakehouse.catalog(f"{MAIN}@{self._base_hash}" if self._base_hash else MAIN)

    @cached_property
    def inputs(self) -> dict[AssetKey, UpstreamTable]:
        """The consumed inputs. Raises TableMissing."""
        return {
            key: self._load_upstream(key, pattern)
            for key, pattern in self.consumer.declaration.inputs.items()
        }

    def _load_upstream(self, key: AssetKey, pattern: Pattern) -> UpstreamTable:
        identifier = self.consumer.inputs[key]
        name = format_table_name(identifier)
        table = _load_table_or_none(self._lake.own_catalog(), identifier)
        if table is None:
            raise TableMissing(
                f"Asset {key.to_user_string()} has no table there.",
                table=name,
                branch=self._lake.open_branch(),
                hint="Materialise it and let it be published first, or select it in the same run.",
            )
        require_columns(self.consumer, key, table)
        main_table = _load_table_or_none(self._main_catalog, identifier)
        return UpstreamTable(key, name, pattern, table, position_on_branch(table, main_table))

    @cached_property
    def _target_table(self) -> Table | None:
        return _load_table_or_none(self._main_catalog, self.consumer.spec.identifier)

    def target_column_type(self, column: str) -> IcebergType | None:
        """The type of a column of the asset's table; None: it has none yet."""
        fields = self._target_table.schema().fields if self._target_table is not None else ()
        return next((field.field_type for field in fields if field.name == column), None)

    @cached_property
    def positions(self) -> Positions:
        """What the asset's table had consumed where the run began. Raises PositionUnreadable, ChangeLost.

        Not what the branch says: an earlier attempt of this step may have written there.
        """
        if self._target_table is None:
            return Positions()
        metadata = self._target_table.metadata
        try:
            stored_positions = position_store.read_positions(
                metadata.properties, table=self.consumer.spec.name
            )
        except PositionUnreadable:
            if not self._rebuild:
                raise
            return Positions()  # what is computed anew takes its place
        stored_positions = fit_positions(stored_positions, self.consumer)
        valid_positions = stored_positions.without_lost(lambda at: contains_snapshot(metadata, at))
        when_lost = self.consumer.declaration.when_lost
        if valid_positions == stored_positions or (when_lost == "skip" and not self._rebuild):
            return stored_positions
        if when_lost == "fail" and not self._rebuild:
            raise self._with_rebuild_hint(result_rolled_back_error(self.consumer.spec.name))
        return valid_positions

    @cached_property
    def groups(self) -> tuple[PartitionGroup, ...]:
        """The run's partitions by where they stand. Raises ChangeLost as the declaration wants it."""
        if self._rebuild:
            return (self._whole_group,)
        partitions_by_position: dict[tuple[tuple[str, Position | None], ...], list[str]] = {}
        for partition in self.partitions or (None,):
            since = self._start_positions(self._find_record(partition))
            if any(position is None for position in since.values()):
                # What takes the place of everything cannot leave a part of it out.
                return (self._whole_group,)
            partitions_by_position.setdefault(tuple(sorted(since.items())), []).extend(
                [partition] if partition else []
            )
        groups = tuple(
            PartitionGroup(tuple(names), dict(since)) for since, names in partitions_by_position.items()
        )
        return (self._whole_group,) if self._lacks_ranges(groups) else groups

    def _lacks_ranges(self, groups: Iterable[PartitionGroup]) -> bool:
        """Whether the rows to replace cannot be told by a range: some may be null, or anything."""
        if self.consumer.tracks_partitions or "range" not in self.consumer.declaration.patterns:
            return False
        ranges = self._collect_ranges(self.consumer.declaration.range_column_of, groups)
        return ranges.nulls or ranges.anything

    @property
    def _whole_group(self) -> PartitionGroup:
        return PartitionGroup(
            self.partitions, dict.fromkeys((upstream.name for upstream in self.inputs.values()), None)
        )

    @property
    def whole(self) -> bool:
        """Whether the asset gets everything, and its result replaces all there was."""
        return any(since is None for group in self.groups for since in group.start_positions.values())

    def _find_record(self, partition: str | None) -> ConsumptionRecord | None:
        return self.positions.find_record(partition, lambda: self._is_covered(partition))

    def _is_covered(self, partition: str | None) -> bool:
        definition = self.consumer.definition
        if definition is None or partition is None:
            return False
        return is_at_common_position(self.positions, definition, partition)

    def _start_positions(self, record: ConsumptionRecord | None) -> dict[str, Position | None]:
        start_positions, restart_reason = {}, self.positions.restart_reason
        for upstream in self.inputs.values():
            # A partition that came after the table's position is new, whenever its consumer began.
            has_begun = (
                record is not None or self.positions.common_position is not None or restart_reason != ""
            )
            position = (
                (record.inputs.get(upstream.name) if record else None)
                if has_begun
                else self._first_position(upstream)
            )
            start_position = start_positions[upstream.name] = self._position_or_fallback(upstream, position)
            if start_position is not None and start_position == position and record is not None:
                self._base_hashes[upstream.name, start_position] = record.base_hash
        return start_positions

    def _first_position(self, upstream: UpstreamTable) -> Position | None:
        """Where a new consumer begins."""
        declaration = self.consumer.declaration
        if declaration.start == "beginning":
            return None
        if declaration.start_time is None:
            return upstream.up_to
        identifier = self.consumer.inputs[upstream.key]
        return position_at(self._lake.lakehouse, identifier, declaration.start_time) or Position(
            upstream.up_to.table_uuid, None
        )

    def _position_or_fallback(self, upstream: UpstreamTable, since: Position | None) -> Position | None:
        """The position, or what the declaration wants in its place when its change cannot be told."""
        if since is None:
            return None
        try:
            self.change_since(upstream, since)
        except ChangeLost as error:
            if self.consumer.declaration.when_lost == "fail":
                raise self._with_rebuild_hint(error) from None
            return None if self.consumer.declaration.when_lost == "rebuild" else upstream.up_to
        return since

    @staticmethod
    def _with_rebuild_hint(error: ChangeLost) -> ChangeLost:
        error.hint = (
            "Launch the asset with the run tag branchlake/rebuild=true to compute everything anew,"
            " or choose in consumes(when_lost=…) between rebuild and skip."
        )
        return error

    # -- changes -----------------------------------------------------------------------------------

    def changes(self, key: AssetKey) -> Iterator[tuple[PartitionGroup, ChangeSet]]:
        """The change of an input for each group of partitions."""
        upstream = self.inputs[key]
        for group in self.groups:
            yield group, self.change_since(upstream, group.start_positions[upstream.name])

    def change_since(self, upstream: UpstreamTable, since: Position | None) -> ChangeSet:
        """The change of an input since a position. Raises ChangeLost."""
        cache_key = upstream.name, since
        if cache_key not in self._changes:
            self._changes[cache_key] = capture_change(
                upstream.table, since, name=upstream.name, up_to=upstream.up_to
            )
        return self._changes[cache_key]

    def commits(self, key: AssetKey) -> list[MainCommit]:
        """The commits on `main` that published what is consumed of an input, oldest first. Read once.

        With partitions that stand at different positions: those of each of them, each commit once.
        """
        if key not in self._commits:
            self._commits[key] = self._read_commits(key)
        return self._commits[key]

    def _read_commits(self, key: AssetKey) -> list[MainCommit]:
        upstream, lake = self.inputs[key], self._lake.lakehouse
        commits_by_hash: dict[str, MainCommit] = {}
        for _, change in self.changes(key):
            base_hash = self._base_hashes.get((upstream.name, change.since), "") if change.since else ""
            change_commits = commits_of_change(
                lake.nessie,
                self.consumer.inputs[key],
                upstream.table,
                change,
                main_hash=self._base_hash,
                after_hash=base_hash,
            )
            for commit in change_commits:
                earlier_commit = commits_by_hash.get(commit.hash)
                if earlier_commit is None or len(earlier_commit.snapshots) < len(commit.snapshots):
                    commits_by_hash[commit.hash] = commit
        order = {one.snapshot_id: number for number, one in enumerate(upstream.table.metadata.snapshots)}
        return sorted(commits_by_hash.values(), key=lambda commit: order[commit.snapshots[-1]])

    @cached_property
    def replaced_keys(self) -> tuple[str, ...]:
        """The asset's columns of which the result replaces all rows of the changed values; empty: none.

        With the pattern `rows` these are the keys of an upsert, where rows have gone from an input.
        """
        if self.whole:
            return ()
        if "keys" in self.consumer.declaration.patterns:
            return self.consumer.declaration.keys
        return self.consumer.spec.keys if self._applies_removals() else ()

    def _applies_removals(self) -> bool:
        if "rows" not in self.consumer.declaration.patterns or self.consumer.when_removed != "apply":
            return False
        # Inputs that lack a key cannot say which rows of the table theirs have become.
        return all(
            set(self.consumer.spec.keys) <= {field.name for field in upstream.table.schema().fields}
            for upstream in self.inputs.values()
        ) and any(not change.only_appends for key in self.inputs for _, change in self.changes(key))

    @property
    def empty(self) -> bool:
        """Whether there is nothing to consume."""
        return all(change.empty for key in self.inputs for _, change in self.changes(key))

    def ranges(self, column: str) -> Ranges:
        """The values of a column in the changed rows of all inputs."""
        return self._collect_ranges(lambda _: column, self.groups)

    @property
    def changed_ranges(self) -> Ranges:
        """The values of the range column of each input in its changed rows."""
        return self._collect_ranges(self.consumer.declaration.range_column_of, self.groups)

    @property
    def affected_ranges(self) -> Ranges:
        """The values whose results depend on changed rows: with `widen`, more than `changed_ranges`."""
        return self._collect_ranges(self.consumer.declaration.range_column_of, self.groups, affected=True)

    def _collect_ranges(
        self,
        column_of: Callable[[AssetKey], str | None],
        groups: Iterable[PartitionGroup],
        *,
        affected: bool = False,
    ) -> Ranges:
        by_group = tuple(groups)
        ranges_by_input: dict[str, Ranges] = {}
        columns = {one.name: column_of(one.key) or "" for one in self.inputs.values()}
        for upstream in self.inputs.values():
            values = union_ranges(
                changed_ranges(
                    self.change_since(upstream, group.start_positions[upstream.name]),
                    columns[upstream.name],
                    upstream.table.metadata,
                )
                for group in by_group
            )
            reach = self.consumer.reach_of(upstream.key)
            ranges_by_input[upstream.name] = (
                reach.widen_ranges(values, to_required_rows=False) if affected else values
            )
        return union_ranges(unify_types(ranges_by_input, columns))

    # -- the result --------------------------------------------------------------------------------

    def build_update(self, snapshot_id: int | None = None) -> PropertyUpdate:
        """The properties that say what has been consumed once the step's result is there.

        `snapshot_id` is the snapshot of the asset's table that holds the result.
        """
        record = replace(self._new_record(), snapshot_id=snapshot_id)
        # A result that others are computed from is recorded whatever it was computed for: they follow it.
        if (
            not self.consumer.computes_in_order
            and not self.whole
            and all(
                (earlier_record := self._find_record(partition)) is not None
                and earlier_record.inputs == record.inputs
                for partition in self.partitions or (None,)
            )
        ):
            return PropertyUpdate({})  # two runs that find nothing to consume may both be published
        definition = self.consumer.definition
        if not self.consumer.tracks_partitions or definition is None:
            record = replace(record, valid_through=self._valid_through((), None))
            return position_store.advance_positions(self.positions, record, (), None)
        # Appended rows stand in nobody's way, and one run may move the floor where the other sets an entry.
        keep_entries = self.consumer.spec.write_mode == "append"
        extents = {partition: partition_extent(definition, partition) for partition in self.partitions}
        end_ms = windows_end_ms(self.consumer)
        remaining = self._pending_or_none()
        if remaining is not None and self.consumer.computes_in_order:
            remaining |= with_successors(definition, self.partitions, self._all_partitions)
        if remaining is not None:
            record = replace(
                record, valid_through=self._valid_through(remaining - {*self.partitions}, end_ms)
            )
        if not self.consumer.computes_in_order:
            return position_store.advance_positions(
                self.positions, record, self.partitions, remaining, keep_entries=keep_entries, extents=extents
            )
        predecessor_runs = {
            partition: self._predecessor_run(partition, record.run_id) for partition in self.partitions
        }
        return position_store.advance_positions(
            self.positions,
            record,
            self.partitions,
            remaining,
            keep_entries=keep_entries,
            extents=extents,
            predecessor_runs=predecessor_runs,
        )

    @property
    def _all_partitions(self) -> Sequence[str]:
        """All partitions of the asset, each time as they are now."""
        definition = self.consumer.definition
        return definition.get_partition_keys(dynamic_partitions_store=self.instance) if definition else ()

    @cached_property
    def _predecessors(self) -> Mapping[str, str]:
        definition = self.consumer.definition
        return partition_predecessors(definition, self._all_partitions) if definition is not None else {}

    def _predecessor_run(self, partition: str, own_run_id: str) -> str:
        """The run whose result of the partition before it a partition is computed from; `own_run_id` is this run."""
        predecessor = self._predecessors.get(partition)
        return own_run_id if predecessor in self.partitions else self.predecessor_run(partition)

    def predecessor_run(self, partition: str) -> str:
        """The run that computed the partition before this one, as `main` has it; empty: none did."""
        predecessor = self._predecessors.get(partition)
        return (
            self.positions.run_of(predecessor, lambda: self._is_covered(predecessor))
            if predecessor is not None
            else ""
        )

    @property
    def blocking_partition(self) -> str | None:
        """A partition before the run's that has something left, so that the run's are computed too early.

        They are computed again after it. None if there is none, or partitions are not computed in order.
        """
        definition = self.consumer.definition
        if not self.consumer.computes_in_order or definition is None:
            return None
        remaining = (self._pending_or_none() or set()) - {*self.partitions}
        return next(
            (
                partition
                for (partition,) in (batch.partitions for batch in self.plan_batches(remaining, 1))
                if not {*self.partitions}.isdisjoint(
                    with_successors(definition, {partition}, self._all_partitions)
                )
            ),
            None,
        )

    def plan_batches(self, remaining: Iterable[str], max_partitions: int | None) -> list[PartitionBatch]:
        """The partitions that are left, as runs can compute them beside each other.

        Each by itself; or, where each is computed from the one before it, the first `max_partitions` (None:
        all) of those that follow each other.
        """
        definition, partitions = self.consumer.definition, {*remaining}
        if definition is None or not self.consumer.computes_in_order:
            return [PartitionBatch((partition,)) for partition in sorted(partitions)]
        return plan_batches(definition, partitions, self._all_partitions, max_partitions)

    def get_or_compute(self, name: str, compute: Callable[[], Known]) -> Known:
        """What `compute` gives, which is asked for once: inputs and output of a step need the same."""
        if name not in self._cache:
            self._cache[name] = compute()
        result: Known = self._cache[name]
        return result

    def clean_up(self) -> None:
        """The result is stored: what was made to compute it is cleaned up."""
        self._cache.clear()
        calls, self.cleanup_callbacks = self.cleanup_callbacks[::-1], []
        call_all(calls)

    def _new_record(self) -> ConsumptionRecord:
        end_positions = {upstream.name: upstream.up_to for upstream in self.inputs.values()}
        run, definition = self._lake.run_branch, self.consumer.definition
        by_partition = self.consumer.tracks_partitions and definition is not None
        own_coverage = (
            partition_coverage(definition, instance=self.instance) if by_partition and definition else {}
        )
        own_identity = partition_identity(self.consumer)
        return ConsumptionRecord(
            end_positions,
            run.run_id if run else "",
            self._base_hash,
            own_coverage,
            partition_identity=own_identity,
        )

    def _valid_through(self, remaining: Collection[str], end_ms: int | None) -> ValidThrough | None:
        """Up to which time the inputs and the table have all records after this run, by their properties.

        `remaining` are the partitions that still have something to consume after it.
        """
        input_times = {
            key: position_store.recorded_time(upstream.table.metadata, upstream.name)
            for key, upstream in self.inputs.items()
        }
        valid_time = compute_valid_through(self._backlog(), input_times, remaining, end_ms)
        if valid_time is not None and remaining and self.positions.restart_reason:
            return replace(valid_time, table_ms=None)  # rows of other partitions count for nothing
        return valid_time

    def pending_partitions(self) -> set[str]:
        """All partitions of the asset that have something to consume. Raises ChangeLost."""
        return pending_partitions(self._backlog())

    def partitions_to_rebuild(self) -> set[str]:
        """The partitions to compute anew until nothing is lost any more; asked of a rebuild.

        A partition whose position is still there is among them only if it has something left. Where all have
        such positions, and only that of the table as a whole, or of partitions that have left the definition,
        is lost, it is the first partition: a run that computes any of them anew moves the table as a whole.
        """
        partitions = pending_partitions(self._backlog(lost_is_all=True))
        if not partitions and (self.positions.void_partitions or self._is_common_position_lost()):
            return {*self._all_partitions[:1]}
        return partitions

    def _is_common_position_lost(self) -> bool:
        """Whether the change of an input since the position of the table as a whole is no longer known."""
        common_position = self.positions.common_position
        if common_position is None:
            return False
        try:
            for upstream in self.inputs.values():
                self.change_since(upstream, common_position.inputs.get(upstream.name))
        except ChangeLost:
            return True
        return False

    def changes_by_partition(self, partitions: Iterable[str]) -> dict[str, PartitionChange]:
        """What each of these partitions has left, by manifests alone. Raises ChangeLost."""
        return changes_by_partition(self._backlog(), partitions)

    def runs_by_partition(
        self, partitions: Iterable[str], select_runs: Callable[[Collection[str]], Collection[str]]
    ) -> dict[str, set[str]]:
        """Those of the runs behind what each of these partitions has left that `select_runs` returns.

        Raises ChangeLost.
        """
        return runs_by_partition(self._backlog(), partitions, select_runs)

    def consumed_run_ids(self, select_runs: Callable[[Collection[str]], Collection[str]]) -> set[str]:
        """Those of the runs behind what is consumed that `select_runs` returns. Raises ChangeLost.

        Without partitions they are read from metadata alone; where everything is consumed, they are all that
        the metadata of the inputs still names.
        """
        if self.partitions:
            run_ids_by_partition = self.runs_by_partition(self.partitions, select_runs)
            return {run_id for runs in run_ids_by_partition.values() for run_id in runs}
        run_ids = {
            run_id
            for upstream in self.inputs.values()
            for group in self.groups
            for run_id in runs_since(
                upstream.table.metadata, group.start_positions[upstream.name], table=upstream.name
            ).values()
        }
        return {*select_runs(run_ids)}

    @property
    def run_id(self) -> str | None:
        """The run that consumes; None outside a run."""
        branch = self._lake.run_branch
        return branch.run_id if branch is not None else None

    def _pending_or_none(self) -> set[str] | None:
        try:
            return pending_partitions(self._backlog(lost_is_all=True))
        except ConfigurationError:
            return None

    def _backlog(self, *, lost_is_all: bool = False) -> Backlog:
        inputs = tuple(self.inputs.values())
        return Backlog(
            self.consumer,
            self.positions,
            inputs,
            self.change_since,
            instance=self.instance,
            own_table=self._target_table,
            lost_is_all=lost_is_all,
        )


def _load_table_or_none(catalog: NessieCatalog, identifier: Identifier) -> Table | None:
    try:
        return catalog.load_table(identifier)
    except NoSuchTableError:
        return None
