"""The runs of a schedule: what each one does, and how it comes to its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING

from dagster import DagsterRun, DagsterRunStatus

from branchlake_dagster.branching.run_branch import RunBranch
from branchlake_dagster.lakehouse.errors import BranchlakeError, NessieConflict, ReferenceNotFound
from branchlake_dagster.lakehouse.nessie.model import ContentKey, IcebergTable, Namespace, Put
from branchlake_dagster_tests.simulation.changes import Change, Kind
from branchlake_dagster_tests.simulation.scheduler import Died
from branchlake_dagster_tests.simulation.tables import Row, State, table_content

if TYPE_CHECKING:
    from branchlake_dagster_tests.simulation.world import World

NAMESPACE = ContentKey(["lake"])
CHANGE = "simulation.change"
"""On a branch's commit: the id of the change it makes."""

_KINDS = (
    *[Kind.APPEND] * 8,
    *[Kind.REPLACE] * 4,
    *[Kind.UPSERT] * 4,
    Kind.DELETE,
    Kind.COMPACT,
    Kind.REPLACE_TABLE,
)


class End(StrEnum):
    """How the process of a run ends."""

    SUCCESS = "succeeds"
    FAILURE = "fails"
    DEATH = "dies"


@dataclass
class Plan:
    """What a run is going to do, and what it has seen and said of itself."""

    run_id: str
    changes: list[Change]
    reads: tuple[str, ...] | None = None
    """The tables a serializable run reads; None: isolation snapshot."""
    passes: bool = True
    """Whether its checks pass."""
    end: End = End.SUCCESS
    late: Change | None = None
    """Written by a process that was taken for dead, after the run's end."""
    publishes_itself: bool = False
    seen: dict[str, list[Row]] = field(default_factory=dict)
    """The rows of each table it read, at its base."""
    fenced: bool = False
    """Its branch was gone when it wanted to write."""
    problems: list[str] = field(default_factory=list)


def table_key(name: str) -> ContentKey:
    """Where a table of the simulation lives."""
    return ContentKey([*NAMESPACE, name])


def draw(random: Random, number: int, tables: tuple[str, ...]) -> Plan:
    """A run by chance."""
    run_id = f"r{number}"
    chosen = random.sample(tables, k=1 if random.random() < 0.6 else random.randint(1, len(tables)))
    changes = [_change(random, run_id, i, table) for i, table in enumerate(chosen)]
    if random.random() < 0.15:
        changes.append(_change(random, run_id, len(changes), chosen[0]))
    luck = random.random()
    end = End.SUCCESS if luck < 0.85 else End.FAILURE if luck < 0.92 else End.DEATH
    return Plan(
        run_id,
        changes,
        reads=tuple(random.sample(tables, k=1)) if random.random() < 0.2 else None,
        passes=random.random() < 0.9,
        end=end,
        late=_change(random, run_id, 9, chosen[-1]) if random.random() < 0.15 else None,
        publishes_itself=random.random() < 0.1,
    )


def _change(random: Random, run_id: str, number: int, table: str) -> Change:
    part = random.choice(("p1", "p2", "p3"))
    key = random.choice(("u1", "u2", "u3"))
    name = f"{run_id}.{number}"
    return Change(name, table, random.choice(_KINDS), part, key, name)


class Writer:
    """The process of one run."""

    def __init__(self, world: World, plan: Plan) -> None:
        self._world = world
        self._plan = plan
        self._client = world.client()
        self._branch = RunBranch(
            lambda: self._client,
            plan.run_id,
            tags=lambda: world.instance.look(plan.run_id).tags,
            remember=lambda tags: world.instance.add_run_tags(plan.run_id, tags),
        )

    def run(self) -> None:
        """From launch to end, and what a zombie does afterwards."""
        plan, world = self._plan, self._world
        world.instance.add(DagsterRun("job", run_id=plan.run_id, status=DagsterRunStatus.STARTED))
        try:
            self._work()
        except Died:
            world.network.note("died")
        else:
            self._late()

    def _work(self) -> None:
        plan, instance = self._plan, self._world.instance
        try:
            for _ in self._steps():
                self._world.network.sleep(0.1)
            if plan.end is End.DEATH:
                raise Died
            if plan.publishes_itself and plan.end is End.SUCCESS:
                self._world.publish_now(plan.run_id)
        except (BranchlakeError, NessieConflict) as error:
            plan.problems.append(str(error))
            self._world.network.note("failed", str(error))
            instance.end(plan.run_id, DagsterRunStatus.FAILURE)
        else:
            ended = DagsterRunStatus.SUCCESS if plan.end is End.SUCCESS else DagsterRunStatus.FAILURE
            instance.end(plan.run_id, ended)
            self._world.network.note("ended", ended.value)

    def _steps(self) -> Iterator[None]:
        for name in self._plan.reads or ():
            base = self._client.contents(f"@{self._branch.base_hash}", [table_key(name)])
            self._plan.seen[name] = self._rows(base.get(table_key(name)))
            yield
        for change in self._plan.changes:
            self.write(change)
            yield

    def _rows(self, content: object) -> list[Row]:
        warehouse = self._world.warehouse
        return warehouse.rows_of(warehouse.state(content)) if isinstance(content, IcebergTable) else []

    def _late(self) -> None:
        if self._plan.late is None:
            return
        self._world.network.sleep(0.1)
        try:
            self.write(self._plan.late)
        except (BranchlakeError, Died) as error:
            self._world.network.note("late write failed", str(error))

    def write(self, change: Change) -> None:
        """One commit on the branch, as the catalogue makes it."""
        key, warehouse = table_key(change.table), self._world.warehouse
        try:
            seen = self._client.contents_at(self._branch.open(), [key, NAMESPACE])
        except ReferenceNotFound:
            self._plan.fenced = not self._world.instance.look(self._plan.run_id).is_finished
            raise
        content = seen.contents.get(key)
        before = warehouse.state(content) if isinstance(content, IcebergTable) else State()
        after = change.on_files(before, warehouse, self._plan.run_id)
        if after is None:
            return
        content_id = content.content_id if content else None
        operations = [Put(key, table_content(content_id, warehouse.store(after), after))]
        if NAMESPACE not in seen.contents:
            operations.insert(0, Put(NAMESPACE, Namespace(None, NAMESPACE.elements)))
        self._client.commit(
            self._branch.name,
            expected_hash=seen.reference.hash,
            operations=operations,
            message=str(change),
            properties={CHANGE: change.id},
        )
