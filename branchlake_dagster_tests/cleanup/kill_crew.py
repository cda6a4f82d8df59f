"""Processes that work until they are killed: writers, whose runs go through Dagster, and a publisher.

They are forked from one process that has imported everything, so a killed one is replaced in milliseconds.
"""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from branchlake_dagster.internals.dagster_sqlite import STORAGES
from branchlake_dagster.runs.run_tags import RunState

PROJECT = "branchlake_dagster_tests.cleanup.kill_project"
_PRELOADED = (
    PROJECT,
    "branchlake_dagster_tests.suite.instances",
    "alembic.command",
    *STORAGES,
    "sqlalchemy.dialects.sqlite",
)
_context = multiprocessing.get_context("forkserver")
_SPOILT_EVERY = 3
"""Of the runs of one process; the first ones pass."""
_PATIENCE_S = 240.0
_TELL = signal.SIGUSR1
"""On it a worker writes into its log where it is."""


@dataclass
class Board:
    """What a worker tells while it lives: since when it is at a piece of work, and how long one took it.

    `began` is 0.0 between two pieces.
    """

    began: Any = field(default_factory=lambda: _context.RawValue("d", 0.0))
    took: Any = field(default_factory=lambda: _context.RawValue("d", 0.0))
    done: Any = field(default_factory=lambda: _context.RawValue("i", 0))

    def time(self, work: Callable[[], bool]) -> None:
        """Do one piece of work; it counts if it says so."""
        self.began.value = began = time.monotonic()
        try:
            if work():
                self.took.value = time.monotonic() - began
                self.done.value += 1
        finally:
            self.began.value = 0.0


def work(role: str, board: Board, stop: Synchronized[int], environment: Mapping[str, str], log: str) -> None:
    """The life of a worker: pieces of work until `stop`. Errors that the daemon would survive do not end it."""
    # The fork server keeps the environment of the test that was the first to need it.
    for name in [one for one in os.environ if one.startswith("BRANCHLAKE_")]:
        del os.environ[name]
    os.environ.update(environment)
    with Path(log).open("ab", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    faulthandler.register(_TELL)
    import dagster as dg

    from branchlake_dagster.errors import BranchlakeError
    from branchlake_dagster.internals.dagster_sqlite import (
        install_revision_cache,
        keep_sqlite_connections,
    )
    from branchlake_dagster_tests.suite.instances import without_waiting_for_the_disk

    # As in the tests' own process: a third of what a run computes.
    install_revision_cache()
    keep_sqlite_connections(without_waiting_for_the_disk)
    tests = multiprocessing.parent_process()

    with dg.DagsterInstance.get() as instance:
        step = _publisher(instance) if role == "publisher" else _writer(role, instance)
        while not stop.value and tests is not None and tests.is_alive():
            try:
                board.time(step)
            except BranchlakeError as error:
                os.write(2, f"{role}: {type(error).__name__}: {error}\n".encode())
                time.sleep(0.2)


def _writer(role: str, instance: Any) -> Callable[[], bool]:
    import dagster as dg

    from branchlake_dagster_tests.cleanup import kill_project as project
    from branchlake_dagster_tests.dagster_internals import ReconstructableRepository

    job = ReconstructableRepository.for_module(PROJECT, role).get_reconstructable_job("write")

    chance = random.SystemRandom()  # forked processes would share another one's state
    number = itertools.count(1)

    def run() -> bool:
        part = chance.choice(project.REPLACED) if role == "replacer" else project.APPENDED
        tags = {"dagster/partition": part, "kill/role": role}
        if next(number) % _SPOILT_EVERY == 0:
            tags[project.SPOILT] = "true"
        with dg.execute_job(job, instance=instance, raise_on_error=False, tags=tags):
            return True

    return run


def _publisher(instance: Any) -> Callable[[], bool]:
    from branchlake_dagster.lakehouse.lakehouse import Lakehouse
    from branchlake_dagster.publication.reconciler import Reconciler
    from branchlake_dagster_tests.cleanup import kill_project as project

    lake, graph = Lakehouse(), project.appender.get_repository_def().asset_graph

    def tick() -> bool:
        outcomes = list(Reconciler.from_lake(lake, instance, graph).reconcile_branches())
        for outcome in outcomes:
            if outcome.state is not RunState.WAITING:
                os.write(1, f"{outcome}\n".encode())
        return any(outcome.state is RunState.PUBLISHED for outcome in outcomes)

    return tick


class Worker:
    """One worker and those that took its place after it was killed."""

    def __init__(self, role: str, stop: Synchronized[int], environment: Mapping[str, str], log: Path) -> None:
        self.role = role
        self.log = log
        self.board = Board()
        self.died = 0
        self._arguments = (role, self.board, stop, dict(environment), str(log))
        self.start()

    def start(self) -> None:
        self.board.began.value = 0.0
        self.process: ForkServerProcess = _context.Process(target=work, args=self._arguments, name=self.role)
        self.process.start()

    def strike(self, chance: random.Random, *, from_the_start: bool = False) -> bool:
        """Kill it at a random moment of its work, and replace it; whether it was at work.

        `from_the_start`: of a piece that it has not begun yet.
        """
        since = time.monotonic() if from_the_start else 0.0
        self.wait(lambda: self.board.began.value > since)
        time.sleep(chance.uniform(0, self.board.took.value or 1.0))
        assert self.process.is_alive(), f"{self.role} ended by itself, see {self.log}"
        os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join(_PATIENCE_S)
        assert self.process.exitcode == -signal.SIGKILL
        at_work = self.board.began.value > 0
        self.died += 1
        self.start()
        return at_work

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            assert self.process.is_alive(), f"{self.role} ended by itself, see {self.log}"
            assert time.monotonic() < deadline, f"{self.role} does nothing: {self._stands()}"
            time.sleep(0.001)

    def _stands(self) -> str:
        """The end of its log, with the place where it stands."""
        os.kill(self.process.pid or 0, _TELL)
        time.sleep(1)
        return self.log.read_text()[-10_000:]

    def finish(self) -> None:
        """Wait for the end of its last piece of work, after `stop`."""
        self.process.join(_PATIENCE_S)
        assert self.process.exitcode == 0, f"{self.role} ended with {self.process.exitcode}, see {self.log}"


class Crew:
    """Workers by name. Ends with them, whatever happens."""

    def __init__(self, environment: Mapping[str, str], folder: Path, roles: Mapping[str, str]) -> None:
        _context.set_forkserver_preload(list(_PRELOADED))
        self._stop: Any = _context.RawValue("i", 0)
        self.workers = {
            name: Worker(role, self._stop, environment, folder / f"{name}.log")
            for name, role in roles.items()
        }

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.value = 1
        for worker in self.workers.values():
            worker.process.join(0.1)
            worker.process.kill()
            worker.process.join()

    def work_done(self, *names: str) -> None:
        """Wait until one of these workers has done something."""
        boards = [self.workers[name].board for name in names]
        before = sum(board.done.value for board in boards)
        self.workers[names[0]].wait(lambda: sum(board.done.value for board in boards) > before)

    def finish(self) -> None:
        """Let all of them come to an end by themselves."""
        self._stop.value = 1
        for worker in self.workers.values():
            worker.finish()
