"""The changes that one step consumes: for each input, the change since the position in the asset's table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from dagster import AssetKey, DagsterInstance
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table
from pyiceberg.types import IcebergType

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.errors import call_all
from branchlake_dagster.history.capture import (
    ancestors_after,
    capture_change,
    contains_snapshot,
    position_on_branch,
    result_rolled_back_error,
)
from branchlake_dagster.history.change import ChangeLost, ChangeSet, Position
from branchlake_dagster.history.ranges import Ranges, changed_ranges, unify_types, union_ranges
from branchlake_dagster.incremental import positions as position_store
from branchlake_dagster.incremental.commits import MainCommit, commits_of_change, position_at
from branchlake_dagster.incremental.declaration import (
    Consumer,
    Identifier,
    Pattern,
    UpstreamTable,
    require_columns,
)
from branchlake_dagster.incremental.pending import (
    ConsumerState,
    is_at_common_position,
    may_have_lost_rows,
)
from branchlake_dagster.incremental.positions import (
    ConsumptionRecord,
    Positions,
    fit_positions,
)
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.tables.errors import PositionUnreadable, TableMissing
from branchlake_dagster.tables.specification import format_table_name

CachedValue = TypeVar("CachedValue")


@dataclass(frozen=True)
class PartitionGroup:
    """Partitions that start from the same positions.

    `partitions` is empty for an asset without partitions.
    """

    partitions: tuple[str, ...]
    start_positions: Mapping[str, Position | None]
    """The start position by dotted name of the input. None means that all rows of the input are consumed."""


class Consumption:
    """The changes that one step of a run consumes. All data is read once, when it is first needed.

    `partitions` are the partitions of the run. `rebuild` ignores the recorded positions and consumes
    everything. `instance` is used to list dynamic partitions.
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
        """Functions that `clean_up` calls after the result is stored."""

    # -- inputs and positions ----------------------------------------------------------------------

    @cached_property
    def base_hash(self) -> str:
        """The commit of `main` from which the run's branch started; empty outside a run."""
        branch = self._lake.run_branch
        return branch.open().base_hash if branch is not None else ""

    @cached_property
    def _main_catalog(self) -> NessieCatalog:
        return self._lake.lakehouse.catalog(f"{MAIN}@{self.base_hash}" if self.base_hash else MAIN)

    @cached_property
    def inputs(self) -> dict[AssetKey, UpstreamTable]:
        """The tables of the consumed inputs on the run's branch, by asset.

        Optional inputs without a table are left out. Raises TableMissing if a required input has no table, if
        an optional input has lost the table that was consumed before (except in a rebuild), or if no input
        has a table. Raises the errors of `positions`.
        """
        declaration = self.consumer.declaration
        upstreams: dict[AssetKey, UpstreamTable] = {}
        for key, pattern in declaration.inputs.items():
            is_last = not upstreams and key == [*declaration.inputs][-1]
            may_be_missing = key in declaration.optional and (self._rebuild or not self._was_consumed(key))
            upstream = self._load_upstream(key, pattern, required=is_last or not may_be_missing)
            if upstream is not None:
                upstreams[key] = upstream
        return upstreams

    def _was_consumed(self, key: AssetKey) -> bool:
        """Whether the asset's table has recorded a position of this input."""
        positions, name = self.positions, format_table_name(self.consumer.inputs[key])
        records = [*positions.partitions.values(), positions.common_position]
        return any(record is not None and name in record.inputs for record in records)

    def _load_upstream(self, key: AssetKey, pattern: Pattern, *, required: bool) -> UpstreamTable | None:
        identifier = self.consumer.inputs[key]
        name = format_table_name(identifier)
        table = _load_table_or_none(self._lake.own_catalog(), identifier)
        if table is None and not required:
            return None
        if table is None:
            raise TableMissing.of_asset(key.to_user_string(), name, self._lake.open_branch())
        require_columns(self.consumer, key, table)
        main_table = _load_table_or_none(self._main_catalog, identifier)
        position = position_on_branch(table, main_table)
        column_ids = dict(self.consumer.deciding_column_ids(key, table))
        if not column_ids.keys() >= self.consumer.deciding_columns(key):
            # A column that is missing now may be added again, with another id.
            column_ids = self.positions.recorded_column_ids(name, position.table_uuid) | column_ids
        up_to = replace(position, column_ids=tuple(sorted(column_ids.items())))
        return UpstreamTable(key, name, pattern, table, up_to)

    @cached_property
    def _target_table(self) -> Table | None:
        return _load_table_or_none(self._main_catalog, self.consumer.spec.identifier)

    def target_column_type(self, column: str) -> IcebergType | None:
        """Return the type of a column of the asset's table on `main`.

        None if the table or the column does not exist yet.
        """
        fields = self._target_table.schema().fields if self._target_table is not None else ()
        return next((field.field_type for field in fields if field.name == column), None)

    @cached_property
    def positions(self) -> Positions:
        """The positions up to which the asset's table on `main` had consumed its inputs at the run's start.

        They are empty if the table does not exist. The run's branch is not read, because an earlier attempt
        of this step may have written to it.

        Raises PositionUnreadable. Raises ChangeLost if the asset's own table was rolled back and the
        declaration has `when_lost="fail"`. A rebuild raises neither.
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
            return Positions()  # the rebuild records new positions
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
        """The partitions of the run, grouped by their start positions without column ids.

        If everything is consumed, the only group has all partitions, and its start positions are None. Raises
        ChangeLost if a change is lost and the declaration has `when_lost="fail"`.
        """
        if self._rebuild:
            return (self._whole_group,)
        starts: dict[tuple[tuple[str, Position], ...], Mapping[str, Position | None]] = {}
        partitions_by_start: dict[tuple[tuple[str, Position], ...], list[str]] = {}
        for partition in self.partitions or (None,):
            since = self.start_positions(self.find_record(partition))
            # Former versions recorded no columns. Whether columns were replaced has been examined here.
            start = tuple(
                (name, position.with_columns(()))
                for name, position in sorted(since.items())
                if position is not None
            )
            if len(start) < len(since):
                # A result that replaces everything must be computed from everything.
                return (self._whole_group,)
            starts.setdefault(start, since)
            partitions_by_start.setdefault(start, []).extend([partition] if partition else [])
        groups = tuple(
            PartitionGroup(tuple(names), starts[start]) for start, names in partitions_by_start.items()
        )
        is_whole = self._lacks_ranges(groups) or self._has_rows_to_rebuild(groups)
        return (self._whole_group,) if is_whole else groups

    def _has_rows_to_rebuild(self, groups: Iterable[PartitionGroup]) -> bool:
        """Whether `when_removed="rebuild"` applies: rows of an input may have been updated or deleted.

        Only the changes since the start positions of `groups` count, and only rows on which the partitions of
        the groups depend. Always False without the pattern `rows`. Raises ChangeLost.
        """
        if "rows" not in self.consumer.declaration.patterns or self.consumer.when_removed != "rebuild":
            return False
        state = self.consumer_state()
        return any(
            may_have_lost_rows(
                state,
                upstream,
                self.change_since(upstream, group.start_positions[upstream.name]),
                group.partitions,
            )
            for group in groups
            for upstream in self.inputs.values()
        )

    def _lacks_ranges(self, groups: Iterable[PartitionGroup]) -> bool:
        """Whether ranges cannot describe the rows to replace: changed values may be null or unknown.

        Only the changes since the start positions of `groups` count. Always False without the pattern
        `range`, and for a partitioned table.
        """
        if self.consumer.tracks_partitions or "range" not in self.consumer.declaration.patterns:
            return False
        ranges = self._collect_ranges(self.consumer.declaration.range_column_of, groups)
        return ranges.nulls or ranges.anything

    @property
    def skips_lost_changes(self) -> bool:
        """Whether the step continues from now because the change since a recorded position is lost.

        Such a step consumes nothing, but it must record its position: what is published later counts. Raises
        ChangeLost as `groups`.
        """
        if self.consumer.declaration.when_lost != "skip" or self.whole:
            return False
        records = [self.find_record(partition) for partition in self.partitions or (None,)]
        return any(
            record is not None and name in record.inputs and position != record.inputs[name]
            for record in records
            for name, position in self.start_positions(record).items()
        )

    @property
    def _whole_group(self) -> PartitionGroup:
        return PartitionGroup(
            self.partitions, dict.fromkeys((upstream.name for upstream in self.inputs.values()), None)
        )

    @property
    def whole(self) -> bool:
        """Whether the asset gets all rows of its inputs, so that its result replaces all earlier rows.

        For a partitioned asset, these are the rows of the run's partitions.
        """
        return any(since is None for group in self.groups for since in group.start_positions.values())

    def find_record(self, partition: str | None) -> ConsumptionRecord | None:
        """Return what was consumed for a partition, or for the table if it is None; None if nothing was.

        This is the partition's own record, else the common position.
        """
        return self.positions.find_record(partition, lambda: self.is_covered(partition))

    def is_covered(self, partition: str | None) -> bool:
        """Whether the common position holds for a partition that has no record of its own."""
        definition = self.consumer.definition
        if definition is None or partition is None:
            return False
        return is_at_common_position(self.positions, definition, partition)

    def start_positions(self, record: ConsumptionRecord | None) -> dict[str, Position | None]:
        """Return the positions after which partitions with this record consume, by dotted name of the input.

        None means that all rows of the input are consumed. Raises ChangeLost if a change is lost and the
        declaration has `when_lost="fail"`.
        """
        start_positions, restart_reason = {}, self.positions.restart_reason
        for upstream in self.inputs.values():
            # A partition created after the common position has consumed nothing, whatever `start` is.
            has_begun = (
                record is not None or self.positions.common_position is not None or restart_reason != ""
            )
            is_new_input = (
                upstream.key in self.consumer.declaration.optional
                and record is not None
                and upstream.name not in record.inputs
            )
            position = (
                (record.inputs.get(upstream.name) if record else None)
                if has_begun and not is_new_input
                else self._first_position(upstream)
            )
            start_position = start_positions[upstream.name] = self._position_or_fallback(upstream, position)
            if start_position is not None and start_position == position and record is not None:
                self._base_hashes[upstream.name, start_position] = record.base_hash
        return start_positions

    def _first_position(self, upstream: UpstreamTable) -> Position | None:
        """Return the position at which a new consumer begins in an input, by its declaration's `start`.

        None means all rows, which replace the asset's table. For a start time at which the input did not
        exist, the position has no snapshot: all rows are consumed too, but as changes.
        """
        declaration = self.consumer.declaration
        if declaration.start == "beginning":
            return None
        if declaration.start_time is None:
            return self._earliest_start(upstream) or upstream.up_to
        identifier = self.consumer.inputs[upstream.key]
        return position_at(self._lake.lakehouse, identifier, declaration.start_time) or Position(
            upstream.up_to.table_uuid, None
        )

    def _earliest_start(self, upstream: UpstreamTable) -> Position | None:
        """Return the earliest position of an input that any partition has recorded; None if there is none.

        With `start="now"`, all partitions must begin at the same time, although their first runs may be hours
        apart. So each later run begins at the position that the first run recorded.
        """
        recorded = [record.inputs.get(upstream.name) for record in self.positions.partitions.values()]
        starts = [one for one in recorded if one and one.table_uuid == upstream.up_to.table_uuid]
        ancestors, _ = ancestors_after(upstream.table.metadata)
        order = {snapshot.snapshot_id: number for number, snapshot in enumerate(ancestors)}
        return min(starts, key=lambda one: order.get(one.snapshot_id or 0, -1), default=None)

    def _position_or_fallback(self, upstream: UpstreamTable, since: Position | None) -> Position | None:
        """Return the position, or another position by `when_lost` if the change since then is lost.

        With `rebuild` the result is None (all rows are consumed), with `skip` the present end of the input.
        Raises ChangeLost if `when_lost` is `fail`.
        """
        if since is None:
            return None
        try:
            self.change_since(upstream, since)
        except ChangeLost:
            if self.consumer.declaration.when_lost == "fail":
                raise
            return None if self.consumer.declaration.when_lost == "rebuild" else upstream.up_to
        return since

    @staticmethod
    def _with_rebuild_hint(error: ChangeLost) -> ChangeLost:
        error.hint = (
            "Launch the asset with the run tag branchlake/rebuild=true to compute everything anew."
            " Or set consumes(when_lost=…) to rebuild or skip."
        )
        return error

    # -- changes -----------------------------------------------------------------------------------

    def changes(self, key: AssetKey) -> Iterator[tuple[PartitionGroup, ChangeSet]]:
        """Yield pairs of a partition group and the change of an input since that group's start position."""
        upstream = self.inputs[key]
        for group in self.groups:
            yield group, self.change_since(upstream, group.start_positions[upstream.name])

    def change_since(self, upstream: UpstreamTable, since: Position | None) -> ChangeSet:
        """Return the change of an input from the position `since` to `upstream.up_to`.

        A position of None means all rows. Each change is computed once. Raises ChangeLost.
        """
        cache_key = upstream.name, since
        if cache_key not in self._changes:
            try:
                self._changes[cache_key] = capture_change(
                    upstream.table, since, name=upstream.name, up_to=upstream.up_to
                )
            except ChangeLost as error:
                raise self._with_rebuild_hint(error) from None
        return self._changes[cache_key]

    def commits(self, key: AssetKey) -> list[MainCommit]:
        """Return the commits on `main` that published the consumed change of an input, oldest first.

        If partitions start from different positions, these are the commits of all partitions, each commit
        once. Nessie's log is read only at the first call. The list is empty if the whole input is consumed.
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
                main_hash=self.base_hash,
                after_hash=base_hash,
            )
            for commit in change_commits:
                earlier_commit = commits_by_hash.get(commit.hash)
                if earlier_commit is None or len(earlier_commit.snapshots) < len(commit.snapshots):
                    commits_by_hash[commit.hash] = commit
        snapshots = upstream.table.metadata.snapshots
        order = {snapshot.snapshot_id: number for number, snapshot in enumerate(snapshots)}
        return sorted(commits_by_hash.values(), key=lambda commit: order[commit.snapshots[-1]])

    @cached_property
    def replaced_keys(self) -> tuple[str, ...]:
        """The key columns of the asset if its result replaces all rows of the changed keys; otherwise empty.

        With the pattern `rows`, these are the keys of an upsert, if rows were removed from an input.
        """
        if self.whole:
            return ()
        if "keys" in self.consumer.declaration.patterns:
            return self.consumer.declaration.keys
        return self.consumer.spec.keys if self._applies_removals() else ()

    def _applies_removals(self) -> bool:
        if "rows" not in self.consumer.declaration.patterns or self.consumer.when_removed != "apply":
            return False
        # If an input lacks a key column, its removed rows cannot be found in the asset's table.
        return all(
            set(self.consumer.spec.keys) <= {field.name for field in upstream.table.schema().fields}
            for upstream in self.inputs.values()
        ) and any(not change.only_appends for key in self.inputs for _, change in self.changes(key))

    @property
    def empty(self) -> bool:
        """Whether no input has a change to consume."""
        return all(change.empty for key in self.inputs for _, change in self.changes(key))

    def ranges(self, column: str) -> Ranges:
        """Return the values of a column in the changed rows of all inputs."""
        return self._collect_ranges(lambda _: column, self.groups)

    @property
    def changed_ranges(self) -> Ranges:
        """The values of each input's range column in its changed rows."""
        return self._collect_ranges(self.consumer.declaration.range_column_of, self.groups)

    @property
    def affected_ranges(self) -> Ranges:
        """The values of the range column whose results depend on changed rows.

        With `widen`, they cover more than `changed_ranges`.
        """
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
        columns = {source.name: column_of(source.key) or "" for source in self.inputs.values()}
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

    def get_or_compute(self, name: str, compute: Callable[[], CachedValue]) -> CachedValue:
        """Return the value of `compute()`, which is called only once per name.

        The step's inputs and its output share the value.
        """
        if name not in self._cache:
            self._cache[name] = compute()
        result: CachedValue = self._cache[name]
        return result

    def clean_up(self) -> bool:
        """Call the cleanup functions and forget cached values. Called after the result is stored.

        Returns whether there were any: they drop change tables, so the branch has a new head.
        """
        self._cache.clear()
        calls, self.cleanup_callbacks = self.cleanup_callbacks[::-1], []
        call_all(calls)
        return bool(calls)

    @property
    def run_id(self) -> str | None:
        """The run that consumes; None outside a run."""
        branch = self._lake.run_branch
        return branch.run_id if branch is not None else None

    def consumer_state(self, *, lost_is_all: bool = False) -> ConsumerState:
        """Return the state from which the partitions to compute are derived.

        With `lost_is_all`, a lost change counts as everything. Otherwise it raises ChangeLost.
        """
        inputs = tuple(self.inputs.values())
        return ConsumerState(
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
