"""Runs behind a lossy network in this process, one after the other, without a daemon: the short form of the command."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg
import pytest

from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.publication.run_publication import publish
from branchlake_dagster_tests.lossy.__main__ import embedded
from branchlake_dagster_tests.lossy.daemon import MODULE, leftovers, settled
from branchlake_dagster_tests.lossy.faults import Dice
from branchlake_dagster_tests.lossy.plan import Planned, plan
from branchlake_dagster_tests.lossy.proxy import lossy_proxy
from branchlake_dagster_tests.lossy.truth import World
from branchlake_dagster_tests.suite.instances import new_instance

_MOST_TICKS = 20


@dataclass
class InProcess:
    """The project's runs and the ticks of its sensor. `errors` are those that a next tick has to get over."""

    definitions: dg.Definitions
    instance: dg.DagsterInstance
    runs: list[str] = field(default_factory=list)
    errors: list[BranchlakeError] = field(default_factory=list)

    def run(self, one: Planned) -> None:
        """Execute a run; a job that publishes at its end does so."""
        done = self.definitions.resolve_job_def(one.job).execute_in_process(
            instance=self.instance,
            tags=dict(one.tags),
            partition_key=one.tags.get("dagster/partition"),
            raise_on_error=False,
        )
        self.runs.append(done.run_id)
        if one.job == "inside":
            self._attempt(lambda: publish(done, self.definitions, instance=self.instance))

    def tick(self) -> None:
        """Evaluate the publication sensor as the daemon does, which goes on after an error."""
        repository = self.definitions.get_repository_def()
        sensor = repository.get_sensor_def("publication_sensor")
        with dg.build_sensor_context(
            instance=self.instance,
            repository_def=repository,
            resources={"lakehouse": self.definitions.resources["lakehouse"]},
        ) as context:
            self._attempt(lambda: sensor.evaluate_tick(context))

    def settle(self, client: NessieClient) -> None:
        """Tick until each run has its verdict, and clean up."""
        for _ in range(_MOST_TICKS):
            self.tick()
            if all(map(settled, self.found())):
                break
        for _ in range(5):
            if not leftovers(client):
                return
            job = self.definitions.resolve_job_def("reap_branches")
            job.execute_in_process(instance=self.instance, raise_on_error=False)

    def found(self) -> list[dg.DagsterRun]:
        """The runs of the plan as they are now."""
        return list(self.instance.get_runs(dg.RunsFilter(run_ids=self.runs)))

    def _attempt(self, do: Callable[[], object]) -> None:
        try:
            do()
        except BranchlakeError as error:
            self.errors.append(error)


def _load_definitions() -> dg.Definitions:
    """Those of a second copy of the project: they read the environment when it is imported."""
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.defs
    assert isinstance(found, dg.Definitions)
    return found


def play(state: Path, seed: int, *, runs: int, rate: float) -> tuple[list[str], Dice]:
    """Do it all in the folder `state`; what is wrong, in sentences, and what was done to the requests."""
    dice = Dice(seed, rate)
    with (
        embedded(state) as lake,
        lossy_proxy(lake.endpoints(spark=False).nessie_uri, dice) as proxy,
        pytest.MonkeyPatch.context() as patch,
        contextlib.ExitStack() as ending,
    ):
        for name in [name for name in os.environ if name.startswith("BRANCHLAKE_")]:
            patch.delenv(name)
        for name, value in {
            "STATE_DIR": str(state),
            "SESSION_KIND": "classic",
            "NESSIE_URI": proxy.uri,
            "NESSIE_TOKEN": lake.endpoints(spark=False).nessie_token or "",
            "DISCARD_GRACE_H": "0.000001",
        }.items():
            patch.setenv(f"BRANCHLAKE_{name}", value)
        instance = ending.enter_context(new_instance())
        dagster = InProcess(_load_definitions(), instance)
        planned: Sequence[Planned] = list(plan(seed, runs))
        for one in planned:
            dagster.run(one)
            dagster.tick()
        proxy.heal()
        dagster.settle(lake.nessie)
        found = dagster.found()
        problems = World.now(lake, instance, found).problems()
        if len(found) != runs:
            problems.append(f"{len(found)} runs are known, {runs} were to be launched")
    return problems, dice
