"""One schedule: runs, publishers and reapers on one in-memory Nessie, interleaved and failing by a seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from unittest.mock import patch

from dagster import DagsterRunStatus

from branchlake_dagster.cleanup import sweeper
from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.nessie import NessieClient, RetryPolicy
from branchlake_dagster.nessie.model import Namespace, Operation, Put
from branchlake_dagster.publication import assessment as assess
from branchlake_dagster.publication import recheck
from branchlake_dagster.publication.ledger import MainLog
from branchlake_dagster.publication.outcome import Outcome
from branchlake_dagster.publication.parked_runs import discard_parked_run
from branchlake_dagster.publication.reconciler import BranchPublisher, Reconciler
from branchlake_dagster.publication.run_publication import NotPublished, RunPublication
from branchlake_dagster.publication.table_change import ChangeMode, SnapshotChange
from branchlake_dagster.runs.discarding import discarded_tag_name
from branchlake_dagster.runs.run_branch import ensure_main_has_commit, run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.simulation import evidence
from branchlake_dagster_tests.simulation.faults import ALL, Faults
from branchlake_dagster_tests.simulation.files import InTurn
from branchlake_dagster_tests.simulation.heartbeats import Hearts
from branchlake_dagster_tests.simulation.instance import SimulatedInstance
from branchlake_dagster_tests.simulation.nessie import InMemoryNessie
from branchlake_dagster_tests.simulation.network import Network
from branchlake_dagster_tests.simulation.other_engines import Stranger
from branchlake_dagster_tests.simulation.outside_writers import Hands
from branchlake_dagster_tests.simulation.publisher import NotedPublisher
from branchlake_dagster_tests.simulation.reaper import reap, sweep
from branchlake_dagster_tests.simulation.runs import (
    HERE,
    NAMESPACE,
    TABLES,
    THERE,
    Mood,
    Plan,
    draw,
    table_key,
)
from branchlake_dagster_tests.simulation.scheduler import Clock, Died, Scheduler
from branchlake_dagster_tests.simulation.stall import AnotherPassAtWork, Stall
from branchlake_dagster_tests.simulation.storage import Storage, StorageAwayError
from branchlake_dagster_tests.simulation.tables import Row, SimulatedTables, State, Warehouse, table_content
from branchlake_dagster_tests.simulation.transport import DirectTransport
from branchlake_dagster_tests.simulation.writer import Writer

_RETRIES = (RetryPolicy(()), RetryPolicy((1.0,)), RetryPolicy())
_QUIET_AFTER = 60
"""Passes without faults in which everything must have come to its end."""

_SETTINGS = cast(
    Settings,
    SimpleNamespace(
        lake_id="lake",
        default_namespace="lake",
        require_checks=True,
        keep_failed_hours=0.0,
        recheck_timeout_min=60.0,
    ),
)


_Steps = TypeVar("_Steps", bound=BranchPublisher)


class World:
    """Everything there is in one schedule."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random = Random(seed)
        self.clock = Clock()
        self.scheduler = Scheduler(random)
        self.server = InMemoryNessie(clock=self.clock.now, seed=seed)
        kinds = tuple(fault for fault in ALL if random.random() < 0.6)
        self.faults = Faults(random, rate=random.choice((0.0, 0.05, 0.15, 0.3)), kinds=kinds)
        self.network = Network(self.server, self.faults, self.scheduler, self.clock)
        self.storage = Storage(Random(f"storage {seed}"), self.scheduler)
        self.instances = {
            home: SimulatedInstance(now=self.clock.now, pause=self.storage.pause) for home in (HERE, THERE)
        }
        self.hands = Hands(Random(f"hands {seed}"))
        self.stranger = Stranger(Random(f"stranger {seed}"))
        self.hearts = Hearts(self.clock, self.scheduler.pause)
        self.stall = Stall(Random(f"stall {seed}"))
        self.warehouse = Warehouse(lambda: self.scheduler.current)
        self.checks = evidence.Checks(self)
        self.wrongly_swept: list[str] = []
        """Data files that a sweeper deleted although their run was not discarded."""
        self.passes_at_work = 0
        """Publishers and reapers that are in the middle of a pass."""
        self.dead: set[str] = set()
        """Runs whose process is gone and of which Dagster does not know it yet."""
        self.plans: dict[str, Plan] = {}
        self._retry = random.choice(_RETRIES)
        mood = Mood.draw(random)
        for _ in range(random.randint(2, 7)):
            plan = draw(random, mood, self.plans)
            self.plans[plan.run_id] = plan
        self._settle_down(Random(f"homes {seed}"))
        self.homes = {plan.run_id: plan.home for plan in self.plans.values()}
        """The Dagster instance of each run, of those that repeat checks too."""
        self.initial: dict[str, list[Row]] = {}
        """The rows of the tables that were there before all of it."""
        if random.random() < 0.8:
            ensure_main_has_commit(self.direct())
            self._furnish()

    def _settle_down(self, random: Random) -> None:
        """Let some runs belong to another Dagster instance."""
        if random.random() < 0.75:
            return
        for plan in self.plans.values():
            if plan.parent:
                plan.home = self.plans[plan.parent].home
            elif not plan.foreign and random.random() < 0.4:
                plan.home = THERE

    def at(self, run_id: str) -> SimulatedInstance:
        """The Dagster instance that has a run."""
        return self.instances[self.homes[run_id]]

    @property
    def inhabited(self) -> list[str]:
        """The Dagster instances that have runs."""
        return [HERE, THERE] if THERE in self.homes.values() else [HERE]

    def _furnish(self) -> None:
        """Give `main` some of the tables."""
        operations: list[Operation] = [Put(NAMESPACE, Namespace(None, NAMESPACE.elements))]
        for name in TABLES:
            if self.random.random() < 0.5:
                rows = [
                    (part, key, f"old-{name}-{part}-{key}") for part in ("p1", "p2") for key in ("u1", "u2")
                ]
                size = self.random.choice((1, 2))
                files = tuple(self.warehouse.data_file(rows[i : i + size]) for i in range(0, 4, size))
                step = SnapshotChange(self.warehouse.number(), ChangeMode.APPEND, files)
                state = self.warehouse.stepped(State(), step)
                operations.append(
                    Put(table_key(name), table_content(None, self.warehouse.store(state), state))
                )
                self.initial[name] = rows
        if self.initial:
            client = self.direct()
            at = client.reference("main").hash
            client.commit("main", expected_hash=at, operations=operations, message="the tables there were")

    # -- what actors use -------------------------------------------------------------------------------

    def client(self) -> NessieClient:
        """A client of a process's own."""
        return self.network.client(self._retry)

    def direct(self) -> NessieClient:
        """A client of nobody's, without faults."""
        return NessieClient("", transport=DirectTransport(self.server))

    def reconciler(self, home: str, log: MainLog | None = None) -> Reconciler:
        """The real one of a Dagster instance, on simulated neighbours.

        `log` is what its process has read of `main` before.
        """
        return self._steps(Reconciler, home, log)

    def _steps(self, kind: type[_Steps], home: str, log: MainLog | None) -> _Steps:
        client = self.client()
        tables = SimulatedTables(self.warehouse, self.scheduler.pause)
        instance, graph = cast(Any, self.instances[home]), cast(Any, None)
        clock = self.clock.monotonic
        publisher = NotedPublisher(client, tables, self.plans, log or MainLog())
        return kind(
            client,
            publisher,
            instance,
            graph,
            _SETTINGS,
            read_metadata=lambda _: None,
            clock=clock,
            now=self.clock.now,
            at_once=1,
        )

    def publish_now(self, run_id: str) -> None:
        """A run publishes itself as its last act."""
        self.passes_at_work += 1
        try:
            publication = self._steps(RunPublication, self.homes[run_id], None)
            outcome = publication.publish(self.at(run_id).look(run_id))
        finally:
            self.passes_at_work -= 1
        self.network.note("published itself", str(outcome))
        if outcome and outcome.state in (RunState.BLOCKED, RunState.REFUSED):
            raise NotPublished(outcome.detail, run_id=run_id)

    # -- actors ----------------------------------------------------------------------------------------

    def _publisher(self, home: str, ticks: int, budget_s: float) -> None:
        log = MainLog()
        for _ in range(ticks):
            self.network.sleep(1.0)
            self._guarded(partial(self._publish, home, log, budget_s))

    def _publish(self, home: str, log: MainLog | None = None, budget_s: float = math.inf) -> list[Outcome]:
        outcomes = []
        with self.stall.one_pass(self) as is_ours:
            if not is_ours:
                raise AnotherPassAtWork
            for outcome in self.reconciler(home, log).reconcile_branches(budget_s=budget_s):
                self.network.note("outcome", str(outcome))
                if outcome.check_run:
                    self.checks.launch(outcome.check_run, home)
                outcomes.append(outcome)
        return outcomes

    def _reaper(self, home: str, passes: int) -> None:
        for _ in range(passes):
            self.network.sleep(1.0)
            self._guarded(partial(self._reap, home))
            self._guarded(partial(self._sweep, home))

    def _reap(self, home: str) -> None:
        for told in reap(self, home):
            self.network.note("outcome", told)

    def _sweep(self, home: str) -> None:
        for told in sweep(self, home):
            self.network.note("swept", told)

    def swept(self, location: str) -> None:
        """A sweeper has deleted a file. It may be a data file of discarded runs only."""
        run_id = self.warehouse.writers.get(location, "")
        if run_id in self.plans:
            tags = tuple(
                f"create tag {discarded_tag_name(run_branch_name(one))} " for one in self._family(run_id)
            )
            if not any(what.startswith(tags) for _, what, _ in self.network.trace):
                self.wrongly_swept.append(f"{location} of run {run_id}")

    def _family(self, run_id: str) -> set[str]:
        """The runs that may have the run's work on their branch: those it continues, and its retries."""
        found = {run_id}
        for _ in self.plans:
            found |= {one.parent for one in self.plans.values() if one.parent and one.run_id in found}
            found |= {one.run_id for one in self.plans.values() if one.parent in found}
        return found

    def _monitor(self) -> None:
        """Dagster's run monitoring: it finds runs whose process is gone."""
        for _ in range(20):
            self.network.sleep(2.0)
            self._bury()

    def _bury(self) -> None:
        for run_id in sorted(self.dead):
            self.at(run_id).end(run_id, DagsterRunStatus.FAILURE)
        self.dead.clear()

    def _guarded(self, work: Callable[[], object]) -> None:
        """A pass in a process of its own; what it leaves undone is found by the next one."""
        self.passes_at_work += 1
        try:
            work()
        except AnotherPassAtWork:
            self.network.note("another pass is at work")
        except (BranchlakeError, FileNotFoundError, StorageAwayError) as error:
            # A file may be gone: the sweeper does not wait for a slow publisher of what others discarded.
            self.network.note("pass failed", str(error))
        except Died:
            self.network.note("died")
        finally:
            self.passes_at_work -= 1

    # -- the course of it ------------------------------------------------------------------------------

    def play(self) -> None:
        """Everybody acts, things fail; then all is healed and must come to its end."""
        with self._in_place():
            random, spawn = self.random, self.scheduler.spawn
            for plan in self.plans.values():
                spawn(plan.run_id, Writer(self, plan).run)
            publishers = random.randint(1, 3)
            if random.random() < 0.4:
                self.scheduler.run()  # then all of them are waiting, and the publishers meet each other
                self._bury()
                publishers += 1
            for home in self.inhabited:
                for i in range(publishers):
                    budget_s = random.choice((math.inf, 10.0))
                    spawn(
                        f"publisher{i} {home}",
                        partial(self._publisher, home, random.randint(1, 4), budget_s),
                    )
                for i in range(random.randint(0, 2)):
                    spawn(f"reaper{i} {home}", partial(self._reaper, home, 2))
            spawn("monitor", self._monitor)
            if random.random() < 0.2:
                spawn("somebody", partial(self.hands.meddle, self))
            elif self.stranger.random.random() < 0.25:
                spawn("stranger", partial(self.stranger.act, self))
            if self.stall.happens:
                spawn("stalled publisher", partial(self.stall.begin, self))
            self.scheduler.run()
            self.faults.heal()
            self.storage.heal()
            self.network.note("healed")
            self._settle()
            self.network.flush()
            self._settle()

    def _settle(self) -> None:
        self._bury()
        waits = False
        for _ in range(_QUIET_AFTER):
            self.clock.advance(60.0 if waits else 5.0)
            try:
                outcomes = [outcome for home in self.inhabited for outcome in self._publish(home)]
            except AnotherPassAtWork:
                outcomes = []
                continue
            waits = any(outcome.state is RunState.WAITING for outcome in outcomes)
            self._give_up(outcomes)
            self.scheduler.run()  # the checks that were asked for
            if all(outcome.state is RunState.UNKNOWN_RUN for outcome in outcomes):
                for home in self.inhabited:
                    self._reap(home)
                self.clock.advance(24 * 3600.0)
                for home in self.inhabited:
                    self._sweep(home)
                if not self._waiting():
                    return
        raise AssertionError(f"never quiet: {self._waiting()}, {[str(outcome) for outcome in outcomes]}")

    def _give_up(self, outcomes: list[Outcome]) -> None:
        """As a person does with runs whose files are lost."""
        for outcome in outcomes:
            if outcome.state is RunState.PARKED:
                instance = self.at(outcome.run_id)
                told = discard_parked_run(self.client(), cast(Any, instance), instance.look(outcome.run_id))
                self.network.note("given up", told)

    def _waiting(self) -> set[str]:
        """The branches of our runs, discarded ones too: the reaper gives those of passed runs back."""
        ours = {run_branch_name(plan.run_id) for plan in self.plans.values() if not plan.foreign}
        names = ours | {discarded_tag_name(branch) for branch in ours}
        return names & self.server.history.references.keys()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        collect = evidence.recorded(self)
        with (
            patch.object(assess, "collect_evidence", collect),
            patch.object(recheck, "collect_evidence", collect),
            patch.object(sweeper, "ThreadPoolExecutor", InTurn),
            self.stall,
        ):
            yield

    def story(self) -> str:
        """What happened, for a failure's report."""
        lines = [
            f"{actor or '-':>11}  {what}{f' -> {how}' if how else ''}"
            for actor, what, how in self.network.trace
        ]
        return "\n".join([f"seed {self.seed}", *(f"  {plan}" for plan in self.plans.values()), *lines])
