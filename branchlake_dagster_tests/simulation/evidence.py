"""What Dagster would have recorded of the simulation's runs, and the runs that repeat checks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any

from dagster import DagsterRun, DagsterRunStatus

from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.nessie.model import IcebergTable
from branchlake_dagster.publication.outcome import CheckRun
from branchlake_dagster.publication.verdict import (
    AssetRules,
    CheckEvaluation,
    CheckName,
    RunEvidence,
    WrittenPartition,
)
from branchlake_dagster.runs.run_events import EventPosition, RecordedHead
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.simulation.runs import Plan, table_key
from branchlake_dagster_tests.simulation.scheduler import Died
from branchlake_dagster_tests.simulation.tables import Row

if TYPE_CHECKING:
    from branchlake_dagster_tests.simulation.world import World


class Checks:
    """The runs that the publisher asked for, and what they found. One is launched once per key, as by Dagster."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._launched: set[str] = set()
        self._verdicts: dict[str, dict[tuple[str, str], bool]] = {}
        self.approved: set[tuple[str, str, tuple[Row, ...]]] = set()
        """(run, table, its rows) of every check that passed."""
        self.refused: set[str] = set()
        """The runs of which a check failed on the rebased state."""

    def launch(self, wanted: CheckRun, home: str) -> None:
        """Start a run on a Dagster instance, unless there was one of that key."""
        if wanted.key in self._launched:
            return
        self._launched.add(wanted.key)
        run_id = f"c{len(self._launched)}"
        run = DagsterRun("checks", run_id=run_id, status=DagsterRunStatus.STARTED, tags=dict(wanted.tags))
        self._world.homes[run_id] = home
        self._world.instances[home].add(run)
        self._world.scheduler.spawn(run_id, lambda: self._run(run, wanted))

    def _run(self, run: DagsterRun, wanted: CheckRun) -> None:
        try:
            found = self._evaluate(run, wanted)
        except (BranchlakeError, FileNotFoundError) as error:
            self._world.network.note("failed", str(error))
            self._world.at(run.run_id).end(run.run_id, DagsterRunStatus.FAILURE)
        except Died:
            self._world.dead.add(run.run_id)
        else:
            self._verdicts[run.run_id] = found
            self._world.at(run.run_id).end(run.run_id, DagsterRunStatus.SUCCESS)

    def _evaluate(self, run: DagsterRun, wanted: CheckRun) -> dict[tuple[str, str], bool]:
        client, at = self._world.client(), run.tags[RunTag.CHECK_HASH]
        owners = run.tags[RunTag.CHECKS_FOR].split(",")
        found: dict[tuple[str, str], bool] = {}
        for asset, check in wanted.checks:
            content = client.content(f"@{at}", table_key(asset.removeprefix("lake.")))
            assert isinstance(content, IcebergTable)
            rows = tuple(sorted(self._world.warehouse.rows_of(self._world.warehouse.state(content))))
            # The same rows get the same verdict from whoever looks.
            found[asset, check] = passed = Random(f"{self._world.seed}{rows}").random() < 0.85
            if passed:
                self.approved |= {(owner, asset, rows) for owner in owners}
            elif len(owners) == 1:
                self.refused.add(owners[0])
        return found

    def evidence(self, run_id: str) -> RunEvidence:
        """What a run that repeated checks has found."""
        found = self._verdicts.get(run_id, {})
        results: dict[tuple[tuple[str, str], str | None], CheckEvaluation] = {}
        for name, passed in found.items():
            results[name, None] = CheckEvaluation(passed, True, EventPosition(0, 0), None, "")
        return RunEvidence(run_id=run_id, succeeded=True, evaluations=results)


def evidence(plans: Sequence[Plan], run: DagsterRun, write_set: frozenset[str]) -> RunEvidence:
    """What Dagster recorded of a run and of those whose work it continues, the newest last.

    Each run counts its events from a number of its own, as Dagster's default storage does.
    """
    whole = any(plan.whole for plan in plans)
    strict = [plan.reads for plan in plans if plan.reads is not None]
    reads = frozenset(table_key(name).name for names in strict for name in names)
    written: dict[tuple[str, str | None], WrittenPartition] = {}
    evaluations: dict[tuple[CheckName, str | None], CheckEvaluation] = {}
    for index, plan in enumerate(plans):
        passes = all(one.passes for one in plans[: index + 1])
        numbers = count(Random(plan.run_id).randrange(1000))
        tables = sorted({table_key(change.table).name for change in plan.changes})
        for name in tables:
            written[name, None] = WrittenPartition(EventPosition(index, next(numbers)), f"write {name}")
        for name in [] if plan.skips_checks else tables:
            position = EventPosition(index, next(numbers))
            evaluations[(name, "check"), None] = CheckEvaluation(passes, True, position, f"check {name}", "")
    return RunEvidence(
        run_id=run.run_id,
        succeeded=run.is_success,
        planned_checks=frozenset(evaluations),
        evaluations=evaluations,
        written_partitions=written,
        rules={
            name: AssetRules(
                name,
                frozenset(["check"]),
                True,
                whole_table_checks={"check": frozenset([name])} if whole else {},
                serializable=bool(strict),
                upstream_tables=reads | ({name} & write_set) if strict else frozenset(),
            )
            for name, _ in written
        },
        write_set=write_set,
        recorded_heads=tuple(
            RecordedHead(head, EventPosition(index, 0))
            for index, plan in enumerate(plans)
            for head in sorted(plan.recorded_heads)
        ),
    )


def recorded(world: World) -> Any:
    """In place of `evidence.collect`."""

    def collect(
        _: Any, runs: Sequence[DagsterRun], *__: Any, write_set: frozenset[str], **___: Any
    ) -> RunEvidence:
        newest = runs[-1]
        if newest.run_id not in world.plans:
            return world.checks.evidence(newest.run_id)
        plan = world.plans[newest.run_id]
        if plan.sick:
            plan.sick -= 1
            raise ValueError(f"run {newest.run_id} breaks whoever looks at it")
        return evidence([world.plans[run.run_id] for run in runs], newest, write_set)

    return collect
