"""One schedule: writers, publishers and reapers on one in-memory Nessie, interleaved and failing by a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from dagster import DagsterRun, DagsterRunStatus

from branchlake_dagster.branching.reaper import RunState, reap
from branchlake_dagster.branching.run_branch import branch_name, main_with_history
from branchlake_dagster.branching.run_tags import judged
from branchlake_dagster.lakehouse.errors import BranchlakeError
from branchlake_dagster.lakehouse.nessie import NessieClient, RetryPolicy
from branchlake_dagster.publication import reconcile
from branchlake_dagster.publication.evidence import AssetRules, Evaluation, RunEvidence, Written
from branchlake_dagster.publication.publisher import Publisher
from branchlake_dagster.publication.reconcile import RUN_BRANCHES, Outcome, Reconciler
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.simulation.faults import Fault, Faults
from branchlake_dagster_tests.simulation.instance import SimulatedInstance
from branchlake_dagster_tests.simulation.nessie import InMemoryNessie
from branchlake_dagster_tests.simulation.network import Network
from branchlake_dagster_tests.simulation.runs import Writer, draw, table_key
from branchlake_dagster_tests.simulation.scheduler import Clock, Died, Scheduler
from branchlake_dagster_tests.simulation.tables import SimulatedTables, Warehouse
from branchlake_dagster_tests.simulation.transport import DirectTransport

TABLES = ("a", "b", "c")
_RETRIES = (RetryPolicy(()), RetryPolicy((1.0,)), RetryPolicy())
_QUIET_AFTER = 12
"""Passes without faults in which everything must have come to its end."""

_SETTINGS = cast(
    Settings, SimpleNamespace(default_namespace="lake", require_checks=True, keep_failed_hours=0.0)
)


class World:
    """Everything there is in one schedule."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random = Random(seed)
        self.clock = Clock()
        self.scheduler = Scheduler(random)
        self.server = InMemoryNessie(clock=self.clock.now, seed=seed)
        kinds = tuple(fault for fault in Fault if fault is not Fault.NONE and random.random() < 0.6)
        self.faults = Faults(random, rate=random.choice((0.0, 0.05, 0.15, 0.3)), kinds=kinds)
        self.network = Network(self.server, self.faults, self.scheduler, self.clock)
        self.instance = SimulatedInstance(now=self.clock.now, pause=self.scheduler.pause)
        self.warehouse = Warehouse()
        self._retry = random.choice(_RETRIES)
        if random.random() < 0.8:
            main_with_history(NessieClient("", transport=DirectTransport(self.server)))
        self.plans = {
            plan.run_id: plan for plan in (draw(random, i, TABLES) for i in range(random.randint(2, 6)))
        }

    # -- what actors use -------------------------------------------------------------------------------

    def client(self) -> NessieClient:
        """A client of a process's own."""
        return self.network.client(self._retry)

    def reconciler(self) -> Reconciler:
        """The real one, on simulated neighbours."""
        client = self.client()
        tables = SimulatedTables(self.warehouse, self.scheduler.pause)
        instance, graph = cast(Any, self.instance), cast(Any, None)
        clock = self.clock.monotonic
        return Reconciler(client, Publisher(client, tables), instance, graph, _SETTINGS, clock=clock)

    def publish_now(self, run_id: str) -> None:
        """A run publishes itself as its last act."""
        outcome = self.reconciler().publish_now(self.instance.look(run_id))
        self.network.note("published itself", str(outcome))

    def evidence(
        self, _: Any, runs: Sequence[DagsterRun], *__: Any, write_set: frozenset[str], **___: Any
    ) -> RunEvidence:
        """What Dagster recorded of a run: in place of `evidence.collect`."""
        plan = self.plans[runs[-1].run_id]
        tables = sorted(write_set)
        order = int(plan.run_id[1:])
        reads = frozenset(table_key(name).name for name in plan.reads or ())
        return RunEvidence(
            run_id=plan.run_id,
            succeeded=runs[-1].is_success,
            planned=frozenset(((name, "check"), None) for name in tables),
            evaluations={
                ((name, "check"), None): Evaluation(plan.passes, True, 2 * order + 1, None, "")
                for name in tables
            },
            written={(name, None): Written(2 * order, None, None) for name in tables},
            rules={
                name: AssetRules(
                    name,
                    frozenset(["check"]),
                    True,
                    serializable=plan.reads is not None,
                    upstream=reads | {name} if plan.reads is not None else frozenset(),
                )
                for name in tables
            },
            write_set=write_set,
        )

    # -- actors ----------------------------------------------------------------------------------------

    def _publisher(self, ticks: int) -> None:
        for _ in range(ticks):
            self.network.sleep(1.0)
            self._guarded(lambda: self._reported(self.reconciler().run()))

    def _reaper(self, passes: int) -> None:
        for _ in range(passes):
            self.network.sleep(1.0)
            self._guarded(lambda: self._reported(self._reap()))

    def _monitor(self) -> None:
        """Dagster's run monitoring: finds runs whose process is gone."""
        for plan in self.plans.values():
            self.network.sleep(1.0)
            if plan.run_id in self._started():
                self.instance.end(plan.run_id, DagsterRunStatus.FAILURE)

    def _started(self) -> set[str]:
        return {record.dagster_run.run_id for record in self.instance.get_run_records()}

    def _guarded(self, work: Callable[[], None]) -> None:
        """A pass in a process of its own; what it leaves undone is found by the next one."""
        try:
            work()
        except BranchlakeError as error:
            self.network.note("pass failed", str(error))
        except Died:
            self.network.note("died")

    def _reported(self, outcomes: Iterator[Any]) -> None:
        for outcome in outcomes:
            self.network.note("outcome", str(outcome))

    def _reap(self) -> Iterator[Any]:
        def state_of(run_id: str) -> tuple[RunState, Any]:
            record = self.instance.get_run_record_by_id(run_id)
            if record is None:
                return RunState.MISSING, None
            run = record.dagster_run
            if not run.is_finished:
                return RunState.ACTIVE, record.create_timestamp
            waits = run.is_success and not judged(run.tags, branch_name(run_id))
            return (RunState.AWAITING_PUBLICATION if waits else RunState.SETTLED), record.create_timestamp

        return reap(
            self.client(),
            listing=RUN_BRANCHES,
            state_of=state_of,
            now=self.clock.now(),
            max_age=timedelta(hours=6),
            orphan_grace=timedelta(hours=1),
        )

    # -- the course of it ------------------------------------------------------------------------------

    def play(self) -> None:
        """Everybody acts, things fail; then all is healed and must come to its end."""
        with self._in_place():
            random = self.random
            for plan in self.plans.values():
                self.scheduler.spawn(plan.run_id, Writer(self, plan).run)
            for i in range(random.randint(1, 3)):
                self.scheduler.spawn(f"publisher{i}", partial(self._publisher, random.randint(1, 4)))
            for i in range(random.randint(0, 2)):
                self.scheduler.spawn(f"reaper{i}", partial(self._reaper, 2))
            self.scheduler.run()
            self.faults.heal()
            self.network.note("healed")
            self._settle()
            self.network.flush()
            self._settle()

    def _settle(self) -> None:
        for run_id in self.plans:
            self.instance.end(run_id, DagsterRunStatus.FAILURE)
        for _ in range(_QUIET_AFTER):
            outcomes: list[Outcome] = []
            for outcome in self.reconciler().run():
                self.network.note("outcome", str(outcome))
                outcomes.append(outcome)
            if not outcomes:
                return
        raise AssertionError(f"never quiet: {[str(outcome) for outcome in outcomes]}")

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        with patch.object(reconcile, "collect", self.evidence):
            yield

    def story(self) -> str:
        """What happened, for a failure's report."""
        lines = [
            f"{actor or '-':>11}  {what}{f' -> {how}' if how else ''}"
            for actor, what, how in self.network.trace
        ]
        plans = [f"  {plan}" for plan in self.plans.values()]
        return "\n".join([f"seed {self.seed}", *plans, *lines])
