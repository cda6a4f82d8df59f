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
from branchlake_dagster.errors import ConfigurationError, all_of
from branchlake_dagster.history.capture import capture, holds, position_on_branch, rolled_back, runs_since
from branchlake_dagster.history.change import ChangeLost, ChangeSet, Position
from branchlake_dagster.history.ranges import Ranges, changed, comparable, union
from branchlake_dagster.incremental import positions as records
from branchlake_dagster.incremental.affected_partitions import coverage
from branchlake_dagster.incremental.commits import MainCommit, commits_of, position_at
from branchlake_dagster.incremental.consumer import Consumer, Identifier, Input, require_columns
from branchlake_dagster.incremental.declaration import Pattern
from branchlake_dagster.incremental.pending import (
    Backlog,
    Batch,
    PartitionChange,
    batches,
    changes_by_partition,
    following,
    is_covered,
    pending,
    predecessors,
    runs_by_partition,
    valid_through,
    windows_end_ms,
)
from branchlake_dagster.incremental.positions import Consumed, Positions, Update
from branchlake_dagster.incremental.redefinition import extent, fitting, identity
from branchlake_dagster.incremental.valid_through import ValidThrough
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.tables.errors import PositionUnreadable, TableMissing
from branchlake_dagster.tables.specification import table_name

Known = TypeVar("Known")


@dataclass(frozen=True)
class Group:
    """Partitions that stand at the same positions; empty for an asset without partitions."""

    partitions: tuple[str, ...]
    since: Mapping[str, Position | None]
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
        self.partitions = tuple(partitions) if consumer.by_partition else ()
        self._rebuild = rebuild
        self.instance = instance
        self._changes: dict[tuple[str, Position | None], ChangeSet] = {}
        self._bases: dict[tuple[str, Position], str] = {}
        self._commits: dict[AssetKey, list[MainCommit]] = {}
        self._known: dict[str, Any] = {}
        self.when_written: list[Callable[[], None]] = []
        """What is to be cleaned up once the result is stored."""

    # -- where things stand ------------------------------------------------------------------------

    @cached_property
    def _base_hash(self) -> str:
        branch = self._lake.run_branch
        return branch.open().base_hash if branch is not None else ""

    @cached_property
    def _on_main(self) -> NessieCatalog:
        return self._lake.lakehouse.catalog(f"{MAIN}@{self._base_hash}" if self._base_hash else MAIN)

    @cached_property
    def inputs(self) -> dict[AssetKey, Input]:
        """The consumed inputs. Raises TableMissing."""
        return {key: self._input(key, how) for key, how in self.consumer.declaration.inputs.items()}

    def _input(self, key: AssetKey, pattern: Pattern) -> Input:
        identifier = self.consumer.inputs[key]
        name = table_name(identifier)
        table = _load(self._lake.own_catalog(), identifier)
        if table is None:
            raise TableMissing(
                f"Asset {key.to_user_string()} has no table there.",
                table=name,
                branch=self._lake.open_branch(),
                hint="Materialise it and let it be published first, or select it in the same run.",
            )
        require_columns(self.consumer, key, table)
        base = _load(self._on_main, identifier)
        return Input(key, name, pattern, table, position_on_branch(table, base))

    @cached_property
    def _target(self) -> Table | None:
        return _load(self._on_main, self.consumer.spec.identifier)

    def target_type(self, column: str) -> IcebergType | None:
        """The type of a column of the asset's table; None: it has none yet."""
        fields = self._target.schema().fields if self._target is not None else ()
        return next((field.field_type for field in fields if field.name == column), None)

    @cached_property
    def positions(self) -> Positions:
        """What the asset's table had consumed where the run began. Raises PositionUnreadable, ChangeLost.

        Not what the branch says: an earlier attempt of this step may have written there.
        """
        if self._target is None:
            return Positions()
        metadata = self._target.metadata
        try:
            found = records.read(metadata.properties, table=self.consumer.spec.name)
        except PositionUnreadable:
            if not self._rebuild:
                raise
            return Positions()  # what is computed anew takes its place
        found = fitting(found, self.consumer)
        kept = found.without_lost(lambda at: holds(metadata, at))
        when_lost = self.consumer.declaration.when_lost
        if kept == found or (when_lost == "skip" and not self._rebuild):
            return found
        if when_lost == "fail" and not self._rebuild:
            raise self._with_choice(rolled_back(self.consumer.spec.name))
        return kept

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The run's partitions by where they stand. Raises ChangeLost as the declaration wants it."""
        if self._rebuild:
            return (self._everything,)
        found: dict[tuple[tuple[str, Position | None], ...], list[str]] = {}
        for partition in self.partitions or (None,):
            since = self._since(self._consumed(partition))
            if any(one is None for one in since.values()):
                # What takes the place of everything cannot leave a part of it out.
                return (self._everything,)
            found.setdefault(tuple(sorted(since.items())), []).extend([partition] if partition else [])
        groups = tuple(Group(tuple(names), dict(since)) for since, names in found.items())
        return (self._everything,) if self._no_range(groups) else groups

    def _no_range(self, groups: Iterable[Group]) -> bool:
        """Whether the rows to replace cannot be told by a range: some may be null, or anything."""
        if self.consumer.by_partition or "range" not in self.consumer.declaration.patterns:
            return False
        found = self._ranges(self.consumer.declaration.range_column_of, groups)
        return found.nulls or found.anything

    @property
    def _everything(self) -> Group:
        return Group(self.partitions, dict.fromkeys((one.name for one in self.inputs.values()), None))

    @property
    def whole(self) -> bool:
        """Whether the asset gets everything, and its result replaces all there was."""
        return any(since is None for group in self.groups for since in group.since.values())

    def _consumed(self, partition: str | None) -> Consumed | None:
        return self.positions.of(partition, lambda: self._covered(partition))

    def _covered(self, partition: str | None) -> bool:
        definition = self.consumer.definition
        if definition is None or partition is None:
            return False
        return is_covered(self.positions, definition, partition)

    def _since(self, consumed: Consumed | None) -> dict[str, Position | None]:
        found, restarts = {}, self.positions.restarts_because
        for one in self.inputs.values():
            # A partition that came after the table's position is new, whenever its consumer began.
            begun = consumed is not None or self.positions.floor is not None or restarts != ""
            position = (consumed.inputs.get(one.name) if consumed else None) if begun else self._start(one)
            kept = found[one.name] = self._kept(one, position)
            if kept is not None and kept == position and consumed is not None:
                self._bases[one.name, kept] = consumed.base
        return found

    def _start(self, one: Input) -> Position | None:
        """Where a new consumer begins."""
        declaration = self.consumer.declaration
        if declaration.start == "beginning":
            return None
        if declaration.start_time is None:
            return one.upto
        identifier = self.consumer.inputs[one.key]
        return position_at(self._lake.lakehouse, identifier, declaration.start_time) or Position(
            one.upto.table_uuid, None
        )

    def _kept(self, one: Input, since: Position | None) -> Position | None:
        """The position, or what the declaration wants in its place when its change cannot be told."""
        if since is None:
            return None
        try:
            self.change_since(one, since)
        except ChangeLost as lost:
            if self.consumer.declaration.when_lost == "fail":
                raise self._with_choice(lost) from None
            return None if self.consumer.declaration.when_lost == "rebuild" else one.upto
        return since

    @staticmethod
    def _with_choice(lost: ChangeLost) -> ChangeLost:
        lost.hint = (
            "Launch the asset with the run tag branchlake/rebuild=true to compute everything anew,"
            " or choose in consumes(when_lost=…) between rebuild and skip."
        )
        return lost

    # -- changes -----------------------------------------------------------------------------------

    def changes(self, key: AssetKey) -> Iterator[tuple[Group, ChangeSet]]:
        """The change of an input for each group of partitions."""
        one = self.inputs[key]
        for group in self.groups:
            yield group, self.change_since(one, group.since[one.name])

    def change_since(self, one: Input, since: Position | None) -> ChangeSet:
        """The change of an input since a position. Raises ChangeLost."""
        asked = one.name, since
        if asked not in self._changes:
            self._changes[asked] = capture(one.table, since, name=one.name, upto=one.upto)
        return self._changes[asked]

    def commits(self, key: AssetKey) -> list[MainCommit]:
        """The commits on `main` that published what is consumed of an input, oldest first. Read once.

        With partitions that stand at different positions: those of each of them, each commit once.
        """
        if key not in self._commits:
            self._commits[key] = self._read_commits(key)
        return self._commits[key]

    def _read_commits(self, key: AssetKey) -> list[MainCommit]:
        one, lake = self.inputs[key], self._lake.lakehouse
        found: dict[str, MainCommit] = {}
        for _, change in self.changes(key):
            after = self._bases.get((one.name, change.since), "") if change.since else ""
            told = commits_of(
                lake.nessie, self.consumer.inputs[key], one.table, change, at=self._base_hash, after=after
            )
            for commit in told:
                known = found.get(commit.hash)
                if known is None or len(known.snapshots) < len(commit.snapshots):
                    found[commit.hash] = commit
        order = {one.snapshot_id: number for number, one in enumerate(one.table.metadata.snapshots)}
        return sorted(found.values(), key=lambda commit: order[commit.snapshots[-1]])

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
            set(self.consumer.spec.keys) <= {field.name for field in one.table.schema().fields}
            for one in self.inputs.values()
        ) and any(not change.only_appends for key in self.inputs for _, change in self.changes(key))

    @property
    def empty(self) -> bool:
        """Whether there is nothing to consume."""
        return all(change.empty for key in self.inputs for _, change in self.changes(key))

    def ranges(self, column: str) -> Ranges:
        """The values of a column in the changed rows of all inputs."""
        return self._ranges(lambda _: column, self.groups)

    @property
    def changed_ranges(self) -> Ranges:
        """The values of the range column of each input in its changed rows."""
        return self._ranges(self.consumer.declaration.range_column_of, self.groups)

    @property
    def affected_ranges(self) -> Ranges:
        """The values whose results depend on changed rows: with `widen`, more than `changed_ranges`."""
        return self._ranges(self.consumer.declaration.range_column_of, self.groups, affected=True)

    def _ranges(
        self,
        column_of: Callable[[AssetKey], str | None],
        groups: Iterable[Group],
        *,
        affected: bool = False,
    ) -> Ranges:
        by_group = tuple(groups)
        found: dict[str, Ranges] = {}
        columns = {one.name: column_of(one.key) or "" for one in self.inputs.values()}
        for one in self.inputs.values():
            values = union(
                changed(self.change_since(one, group.since[one.name]), columns[one.name], one.table.metadata)
                for group in by_group
            )
            reach = self.consumer.reach_of(one.key)
            found[one.name] = reach.around(values, rows=False) if affected else values
        return union(comparable(found, columns))

    # -- the result --------------------------------------------------------------------------------

    def update(self, at: int | None = None) -> Update:
        """The properties that say what has been consumed once the step's result is there.

        `at` is the snapshot of the asset's table that holds the result.
        """
        told = replace(self._told(), at=at)
        # A result that others are computed from is recorded whatever it was computed for: they follow it.
        if (
            not self.consumer.in_order
            and not self.whole
            and all(
                (held := self._consumed(partition)) is not None and held.inputs == told.inputs
                for partition in self.partitions or (None,)
            )
        ):
            return Update({})  # two runs that find nothing to consume may both be published
        definition = self.consumer.definition
        if not self.consumer.by_partition or definition is None:
            told = replace(told, valid_through=self._valid_through((), None))
            return records.advance(self.positions, told, (), None)
        # Appended rows stand in nobody's way, and one run may move the floor where the other sets an entry.
        each = self.consumer.spec.write_mode == "append"
        extents = {one: extent(definition, one) for one in self.partitions}
        end_ms = windows_end_ms(self.consumer)
        left = self._pending()
        if left is not None and self.consumer.in_order:
            left |= following(definition, self.partitions, self._every)
        if left is not None:
            told = replace(told, valid_through=self._valid_through(left - {*self.partitions}, end_ms))
        if not self.consumer.in_order:
            return records.advance(self.positions, told, self.partitions, left, each=each, extents=extents)
        runs = {one: self._run_before(one, told.run_id) for one in self.partitions}
        return records.advance(
            self.positions, told, self.partitions, left, each=each, extents=extents, follows=runs
        )

    @property
    def _every(self) -> Sequence[str]:
        """All partitions of the asset, each time as they are now."""
        definition = self.consumer.definition
        return definition.get_partition_keys(dynamic_partitions_store=self.instance) if definition else ()

    @cached_property
    def _predecessors(self) -> Mapping[str, str]:
        definition = self.consumer.definition
        return predecessors(definition, self._every) if definition is not None else {}

    def _run_before(self, partition: str, own: str) -> str:
        """The run whose result of the partition before it a partition is computed from; `own` is this run."""
        before = self._predecessors.get(partition)
        return own if before in self.partitions else self.run_before(partition)

    def run_before(self, partition: str) -> str:
        """The run that computed the partition before this one, as `main` has it; empty: none did."""
        before = self._predecessors.get(partition)
        return self.positions.run_of(before, lambda: self._covered(before)) if before is not None else ""

    @property
    def waits_for(self) -> str | None:
        """A partition before the run's that has something left, so that the run's are computed too early.

        They are computed again after it. None if there is none, or partitions are not computed in order.
        """
        definition = self.consumer.definition
        if not self.consumer.in_order or definition is None:
            return None
        left = (self._pending() or set()) - {*self.partitions}
        return next(
            (
                one
                for (one,) in (batch.partitions for batch in self.batches(left, 1))
                if not {*self.partitions}.isdisjoint(following(definition, {one}, self._every))
            ),
            None,
        )

    def batches(self, left: Iterable[str], most: int | None) -> list[Batch]:
        """The partitions that are left, as runs can compute them beside each other.

        Each by itself; or, where each is computed from the one before it, the first `most` (None: all) of
        those that follow each other.
        """
        definition, partitions = self.consumer.definition, {*left}
        if definition is None or not self.consumer.in_order:
            return [Batch((one,)) for one in sorted(partitions)]
        return batches(definition, partitions, self._every, most)

    def once(self, name: str, make: Callable[[], Known]) -> Known:
        """What `make` gives, which is asked for once: inputs and output of a step need the same."""
        if name not in self._known:
            self._known[name] = make()
        found: Known = self._known[name]
        return found

    def written(self) -> None:
        """The result is stored: what was made to compute it is cleaned up."""
        self._known.clear()
        calls, self.when_written = self.when_written[::-1], []
        all_of(calls)

    def _told(self) -> Consumed:
        upto = {one.name: one.upto for one in self.inputs.values()}
        run, definition = self._lake.run_branch, self.consumer.definition
        by_partition = self.consumer.by_partition and definition is not None
        known = coverage(definition, instance=self.instance) if by_partition and definition else {}
        parts = identity(self.consumer)
        return Consumed(upto, run.run_id if run else "", self._base_hash, known, definition=parts)

    def _valid_through(self, left: Collection[str], end_ms: int | None) -> ValidThrough | None:
        """Up to which time the inputs and the table have all records after this run, by their properties.

        `left` are the partitions that still have something to consume after it.
        """
        times = {key: records.recorded_time(one.table.metadata, one.name) for key, one in self.inputs.items()}
        found = valid_through(self._backlog(), times, left, end_ms)
        if found is not None and left and self.positions.restarts_because:
            return replace(found, table_ms=None)  # rows of other partitions count for nothing
        return found

    def pending(self) -> set[str]:
        """All partitions of the asset that have something to consume. Raises ChangeLost."""
        return pending(self._backlog())

    def partitions_to_rebuild(self) -> set[str]:
        """The partitions to compute anew until nothing is lost any more; asked of a rebuild.

        A partition whose position is still there is among them only if it has something left. Where all have
        such positions, and only that of the table as a whole, or of partitions that have left the definition,
        is lost, it is the first partition: a run that computes any of them anew moves the table as a whole.
        """
        found = pending(self._backlog(lost_is_all=True))
        if not found and (self.positions.void or self._is_floor_lost()):
            return {*self._every[:1]}
        return found

    def _is_floor_lost(self) -> bool:
        """Whether the change of an input since the position of the table as a whole is no longer known."""
        floor = self.positions.floor
        if floor is None:
            return False
        try:
            for one in self.inputs.values():
                self.change_since(one, floor.inputs.get(one.name))
        except ChangeLost:
            return True
        return False

    def changes_by_partition(self, partitions: Iterable[str]) -> dict[str, PartitionChange]:
        """What each of these partitions has left, by manifests alone. Raises ChangeLost."""
        return changes_by_partition(self._backlog(), partitions)

    def runs_by_partition(
        self, partitions: Iterable[str], chosen: Callable[[Collection[str]], Collection[str]]
    ) -> dict[str, set[str]]:
        """Those of the runs behind what each of these partitions has left that `chosen` returns.

        Raises ChangeLost.
        """
        return runs_by_partition(self._backlog(), partitions, chosen)

    def runs(self, chosen: Callable[[Collection[str]], Collection[str]]) -> set[str]:
        """Those of the runs behind what is consumed that `chosen` returns. Raises ChangeLost.

        Without partitions they are read from metadata alone; where everything is consumed, they are all that
        the metadata of the inputs still names.
        """
        if self.partitions:
            found = self.runs_by_partition(self.partitions, chosen)
            return {run_id for runs in found.values() for run_id in runs}
        behind = {
            run_id
            for one in self.inputs.values()
            for group in self.groups
            for run_id in runs_since(one.table.metadata, group.since[one.name], table=one.name).values()
        }
        return {*chosen(behind)}

    @property
    def run_id(self) -> str | None:
        """The run that consumes; None outside a run."""
        branch = self._lake.run_branch
        return branch.run_id if branch is not None else None

    def _pending(self) -> set[str] | None:
        try:
            return pending(self._backlog(lost_is_all=True))
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
            own_table=self._target,
            lost_is_all=lost_is_all,
        )


def _load(catalog: NessieCatalog, identifier: Identifier) -> Table | None:
    try:
        return catalog.load_table(identifier)
    except NoSuchTableError:
        return None
