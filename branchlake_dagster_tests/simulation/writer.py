"""The process of one run: it works on its branch, as steps do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from dagster import DagsterRun, DagsterRunStatus

from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.internals.dagster import ASSET_RESUME_RETRY_TAG, PARENT_RUN_ID_TAG, ROOT_RUN_ID_TAG
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.nessie.model import ContentKey, IcebergTable, Namespace, Put
from branchlake_dagster.runs.retries import inherit_parent_branch
from branchlake_dagster.runs.run_branch import RunBranch, run_branch_name
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster_tests.simulation.changes import Change, Kind
from branchlake_dagster_tests.simulation.instance import SimulatedInstance
from branchlake_dagster_tests.simulation.runs import NAMESPACE, End, Plan, table_key
from branchlake_dagster_tests.simulation.scheduler import Died
from branchlake_dagster_tests.simulation.tables import Row, State, table_content

if TYPE_CHECKING:
    from branchlake_dagster_tests.simulation.world import World

CHANGE = "simulation.change"
"""On a branch's commit: the id of the change it makes."""

ELSEWHERE = "elsewhere"
"""A Dagster instance that is not simulated, but for its runs."""

_PATIENCE = 40
_TURNS_ASLEEP = 8
SUSPECT_S = 30.0
"""Nobody who wrote so recently may be taken for dead."""


class Writer:
    """One run from its launch to its end, and what a zombie of it does afterwards."""

    def __init__(self, world: World, plan: Plan) -> None:
        self._world = world
        self._plan = plan
        self._client = world.client()
        self._runs = SimulatedInstance(now=world.clock.now) if plan.foreign else world.instances[plan.home]
        self._maker = ELSEWHERE if plan.foreign and not plan.forgotten else plan.home
        self._heart = ""
        self._wrote = 0.0
        instance = cast(Any, self._runs)
        self._branch = RunBranch(
            lambda: self._client,
            plan.run_id,
            load_tags=lambda: self._runs.look(plan.run_id).tags,
            add_tags=lambda tags: self._runs.add_run_tags(plan.run_id, tags),
            inherit_location=lambda: inherit_parent_branch(
                self._client, instance, self._runs.look(plan.run_id)
            ),
            report_head=lambda _, head: plan.recorded_heads.add(head),
        )

    def run(self) -> None:
        """Everything, in one process."""
        if not self._launched():
            return
        plan, hearts = self._plan, self._world.hearts
        self._heart = (
            "" if plan.foreign else hearts.begin(run_branch_name(plan.run_id), plan.run_id, plan.home)
        )
        try:
            self._work()
        except Died:
            self._world.network.note("died")
            hearts.stop(self._heart)
            self._world.dead.add(plan.run_id)
        else:
            hearts.end(self._heart)
            self._late()

    def _launched(self) -> bool:
        plan, world = self._plan, self._world
        run = DagsterRun("job", run_id=plan.run_id, status=DagsterRunStatus.STARTED)
        if plan.parent:
            for _ in range(_PATIENCE):
                if self._runs.knows(plan.parent) and self._runs.look(plan.parent).is_finished:
                    break
                world.network.sleep(1.0)
            else:
                return False
            run = _again(run, self._runs.look(plan.parent), retry=plan.retries)
        self._runs.add(run)
        return True

    def _work(self) -> None:
        plan = self._plan
        try:
            for _ in self._steps():
                self._world.network.sleep(0.1)
            if plan.end is End.DEATH:
                raise Died
            self._branch.record_head()
            if plan.publishes_itself and plan.end is End.SUCCESS:
                self._world.publish_now(plan.run_id)
        except (BranchlakeError, FileNotFoundError) as error:
            self._world.network.note("failed", str(error))
            self._runs.end(plan.run_id, DagsterRunStatus.FAILURE)
        else:
            ended = DagsterRunStatus.SUCCESS if plan.end is End.SUCCESS else DagsterRunStatus.FAILURE
            self._runs.end(plan.run_id, ended)
            self._world.network.note("ended", ended.value)

    def _steps(self) -> Iterator[None]:
        for name in self._plan.reads or ():
            base = self._client.contents(f"@{self._branch.open().base_hash}", [table_key(name)])
            self._plan.seen[name] = self._rows(base.get(table_key(name)))
            yield
        if self._plan.restores:
            self._restore(self._plan.restores)
            yield
        for number, change in enumerate(self._plan.changes):
            if self._plan.paused and self._plan.paused[0] == number:
                self._stand_still(self._plan.paused[1])
            self._write(change)
            yield

    def _stand_still(self, seconds: float) -> None:
        hearts, sleep = self._world.hearts, self._world.network.sleep
        hearts.stop(self._heart)
        self._world.network.note("stands still", f"for {seconds:g} s")
        for _ in range(_TURNS_ASLEEP):
            sleep(seconds / _TURNS_ASLEEP)
        hearts.resume(self._heart)

    def _rows(self, content: object) -> list[Row]:
        warehouse = self._world.warehouse
        return warehouse.rows_of(warehouse.state(content)) if isinstance(content, IcebergTable) else []

    def _late(self) -> None:
        if self._plan.late is None:
            return
        self._world.network.sleep(0.1)
        try:
            self._write(self._plan.late)
        except (BranchlakeError, FileNotFoundError, Died) as error:
            self._world.network.note("late write failed", str(error))

    def _write(self, change: Change) -> None:
        """One commit on the branch, as the catalogue makes it."""
        key, warehouse = table_key(change.table), self._world.warehouse
        branch = self._branch.open().branch
        try:
            seen = self._client.contents_at(branch, [key, NAMESPACE])
        except ReferenceNotFound:
            self._note_fence()
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
        asked = self._world.clock.monotonic()
        done = self._client.commit(
            branch,
            expected_hash=seen.reference.hash,
            operations=operations,
            message=str(change),
            properties={
                CHANGE: change.id,
                LakeProperty.INSTANCE: self._maker,
                LakeProperty.RUN_ID: self._plan.run_id,
            },
        )
        if change is not self._plan.late:  # nobody records what a process does after its run
            self._plan.recorded_heads.add(done.hash)
        self._plan.written.append(change.id)
        self._wrote = asked  # the commit is no older than that, and its reply may have taken long

    def _restore(self, name: str) -> None:
        """Give the earliest state of a table that can be read another key (`register_table`), and append."""
        warehouse, branch = self._world.warehouse, self._branch.open().branch
        target = table_key(f"{name}_restored")
        seen = self._client.contents_at(branch, [table_key(name)])
        content = seen.contents.get(table_key(name))
        if not isinstance(content, IcebergTable):
            return
        now = warehouse.state(content)
        then = warehouse.locations[(*now.log, now.location)[0]]
        self._hold(target, None, then.location, then, at=seen.reference.hash)
        found = self._client.contents_at(branch, [target])
        held = cast(IcebergTable, found.contents[target])
        change = Change(f"{self._plan.run_id}.restored", name, Kind.APPEND, "p1", "u1", "restored")
        after = change.on_files(warehouse.state(held), warehouse, self._plan.run_id)
        assert after is not None
        self._hold(target, held.content_id, warehouse.store(after), after, at=found.reference.hash)

    def _hold(self, key: ContentKey, content_id: str | None, location: str, state: State, *, at: str) -> None:
        self._client.commit(
            self._branch.open().branch,
            expected_hash=at,
            operations=[Put(key, table_content(content_id, location, state))],
            message=f"restore {key}",
            properties={LakeProperty.INSTANCE: self._maker, LakeProperty.RUN_ID: self._plan.run_id},
        )

    def _note_fence(self) -> None:
        """A run at work may lose its branch only after it was silent for long, or reported as ended."""
        silent = self._world.clock.monotonic() - self._wrote
        if not self._runs.look(self._plan.run_id).is_finished and silent < SUSPECT_S:
            self._plan.fenced = f"{silent:.1f} s after its last write"


def _again(run: DagsterRun, parent: DagsterRun, *, retry: bool) -> DagsterRun:
    """`run` as a re-execution of `parent`; Dagster copies the tags."""
    root = parent.root_run_id or parent.run_id
    tags = {**parent.tags, PARENT_RUN_ID_TAG: parent.run_id, ROOT_RUN_ID_TAG: root}
    tags.pop(ASSET_RESUME_RETRY_TAG, None)
    if retry:
        tags[ASSET_RESUME_RETRY_TAG] = "true"
    return run._replace(tags=tags, parent_run_id=parent.run_id, root_run_id=root)
