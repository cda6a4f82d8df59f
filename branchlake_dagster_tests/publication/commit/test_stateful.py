"""Gate, publisher and reaper against a model: what a reader of `main` must see, in a page of Python.

Hypothesis chooses what happens and shrinks what goes wrong; `--hypothesis-seed` repeats a run. The wire
is without faults here: lost replies, deaths and races are the simulation's (`simulation/`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from branchlake_dagster.cleanup.reaper import Reaper
from branchlake_dagster.cleanup.reaper_rules import BranchOwner, Limits, OwnerState
from branchlake_dagster.nessie import NessieClient
from branchlake_dagster.nessie.model import ContentKey, IcebergTable, Namespace, Put
from branchlake_dagster.publication.ledger import Candidate, Published, Refused, load_write_set
from branchlake_dagster.publication.publisher import Publisher
from branchlake_dagster.publication.table_change import ChangeMode, SnapshotChange
from branchlake_dagster.publication.verdict import (
    AssetRules,
    CheckEvaluation,
    RunEvidence,
    WrittenPartition,
    judge_evidence,
)
from branchlake_dagster.runs.discarding import discard_branch
from branchlake_dagster.runs.run_branch import ensure_main_has_commit, run_branch_name, run_id_of_branch
from branchlake_dagster.runs.run_events import EventPosition
from branchlake_dagster.stored_names import ReferencePrefix
from branchlake_dagster_tests.simulation.nessie import InMemoryNessie
from branchlake_dagster_tests.simulation.tables import (
    SimulatedTables,
    State,
    Warehouse,
    replacing,
    table_content,
)
from branchlake_dagster_tests.simulation.transport import DirectTransport

NAMESPACE = ContentKey(["lake"])
TABLES = st.sampled_from(["t", "u"])
PARTS = st.sampled_from(["p", "q"])
CHECKS = st.sampled_from(["passed", "warned", "failed", "missing"])


@dataclass
class Run:
    """A run in the model. `since` is how many publications `main` had when it started."""

    run_id: str
    since: int
    appended: list[tuple[str, str, str]] = field(default_factory=list)
    replaced: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    reads: frozenset[str] | None = None
    checks: str = ""
    succeeded: bool = True

    @property
    def touched(self) -> set[tuple[str, str]]:
        return {(table, part) for table, part, _ in self.appended} | self.replaced.keys()

    @property
    def passes(self) -> bool:
        return self.succeeded and self.checks in ("passed", "warned")


class Model:
    """What `main` is: the published runs, one after the other."""

    def __init__(self) -> None:
        self.published: list[Run] = []

    def accepts(self, run: Run) -> bool:
        """Its replaced partitions, and what it read if it is serializable, are as it has seen them."""
        others = [place for other in self.published[run.since :] for place in other.touched]
        if run.reads is not None and run.reads & {table for table, _ in others}:
            return False
        return not (run.replaced.keys() & set(others))

    def rows(self) -> Counter[tuple[str, str, str]]:
        held: dict[tuple[str, str], list[str]] = {}
        for run in self.published:
            for place, tokens in run.replaced.items():
                held[place] = list(tokens)
            for table, part, token in run.appended:
                held.setdefault((table, part), []).append(token)
        return Counter((table, part, token) for (table, part), tokens in held.items() for token in tokens)


class Lake(RuleBasedStateMachine):
    """Runs write, end, are published or not, and are cleaned up, in any order."""

    at_work = Bundle("at_work")

    def __init__(self) -> None:
        super().__init__()
        self.client = NessieClient("", transport=DirectTransport(InMemoryNessie()))
        ensure_main_has_commit(self.client)
        self.warehouse = Warehouse()
        self.publisher = Publisher(self.client, SimulatedTables(self.warehouse))
        self.model = Model()
        self.bases: dict[str, str] = {}
        self.runs: dict[str, Run] = {}
        self.ended: list[Run] = []
        self.told: dict[str, OwnerState] = {}

    # -- runs ------------------------------------------------------------------------------------------

    @rule(target=at_work, reads=st.none() | st.frozensets(TABLES))
    def start(self, reads: frozenset[str] | None) -> Run:
        run = Run(str(UUID(int=len(self.runs), version=4)), len(self.model.published), reads=reads)
        base = self.client.reference("main").hash
        self.client.create_branch(run_branch_name(run.run_id), from_ref="main", from_hash=base)
        self.runs[run.run_id], self.bases[run.run_id] = run, base
        return run

    @rule(run=at_work, table=TABLES, part=PARTS)
    def append(self, run: Run, table: str, part: str) -> None:
        token = str(self.warehouse.number())
        if (table, part) in run.replaced:
            run.replaced[table, part].append(token)
        else:
            run.appended.append((table, part, token))
        self._write(run, table, ChangeMode.APPEND, part, token)

    @rule(run=at_work, table=TABLES, part=PARTS)
    def replace(self, run: Run, table: str, part: str) -> None:
        token = str(self.warehouse.number())
        run.appended = [one for one in run.appended if one[:2] != (table, part)]
        run.replaced[table, part] = [token]
        self._write(run, table, ChangeMode.REPLACE_PARTITIONS, part, token)

    def _write(self, run: Run, table: str, mode: ChangeMode, part: str, token: str) -> None:
        branch, key = run_branch_name(run.run_id), ContentKey(["lake", table])
        seen = self.client.contents_at(branch, [key, NAMESPACE])
        content = seen.contents.get(key)
        state = self.warehouse.state(content) if isinstance(content, IcebergTable) else State()
        gone = (
            tuple(f for f in state.files if self.warehouse.rows[f.path][0][0] == part)
            if mode is not ChangeMode.APPEND
            else ()
        )
        file = self.warehouse.data_file([(part, token, token)])
        recorded = replacing(part) if mode is ChangeMode.REPLACE_PARTITIONS else None
        step = SnapshotChange(
            self.warehouse.number(), mode, (file,), gone, run_id=run.run_id, recorded_predicate=recorded
        )
        after = self.warehouse.stepped(state, step)
        put = Put(key, table_content(content and content.content_id, self.warehouse.store(after), after))
        first = [] if NAMESPACE in seen.contents else [Put(NAMESPACE, Namespace(None, NAMESPACE))]
        self.client.commit(branch, expected_hash=seen.reference.hash, operations=[*first, put], message="w")

    @rule(run=consumes(at_work), checks=CHECKS, succeeded=st.booleans() | st.just(True))
    def end(self, run: Run, checks: str, succeeded: bool) -> None:
        run.checks, run.succeeded = checks, succeeded
        self.ended.append(run)

    # -- the machinery ---------------------------------------------------------------------------------

    @precondition(lambda self: self.ended)
    @rule()
    def tick(self) -> None:
        """The gate judges every ended run; those that pass are published together."""
        waiting, self.ended = self.ended, []
        candidates = {run.run_id: one for run in waiting if (one := self._candidate(run))}
        results = self.publisher.publish(list(candidates.values()))
        for group in (waiting,):
            for run in group:
                if run.run_id not in candidates:
                    assert not run.passes or not run.touched
                    self._discard(run)
                    continue
                result = results[run_branch_name(run.run_id)]
                if isinstance(result, Published):
                    assert self.model.accepts(run), "published what overlaps"
                    self.model.published.append(run)
                    self.told[run.run_id] = OwnerState.PUBLISHED
                else:
                    assert isinstance(result, Refused), result
                    assert not self.model.accepts(run), result.format_reason()
                    self._discard(run)

    def _candidate(self, run: Run) -> Candidate | None:
        branch, base = self.client.reference(run_branch_name(run.run_id)), self.bases[run.run_id]
        changes = load_write_set(self.client, base, branch)
        verdict = judge_evidence(_evidence(run), strict_tables=False)
        assert verdict.blocked is not run.passes
        if verdict.blocked or not run.touched:
            return None
        reads = None if run.reads is None else frozenset(ContentKey(["lake", name]) for name in run.reads)
        return Candidate(
            branch.name, branch.hash, base, run.run_id, run.run_id, verdict.decision, changes, reads
        )

    def _discard(self, run: Run) -> None:
        discard_branch(self.client, self.client.reference(run_branch_name(run.run_id)))
        self.told[run.run_id] = OwnerState.UNPUBLISHED

    @rule()
    def reap(self) -> None:
        """Branches of runs that are told go; no other does."""
        before = self._branches()
        now = datetime.now(UTC)
        reaper = Reaper(
            self.client,
            self,
            Limits(timedelta(hours=6), timedelta(hours=1)),
            heartbeats=None,
            now=lambda: now,
            monotonic=lambda: 0.0,
            sleep=lambda _: None,
            is_on_main=lambda *_: True,
        )
        gone = {one.branch for one in reaper.run() if one.deletes_branch}
        assert gone == {name for name in before if run_id_of_branch(name) in self.told}
        assert self._branches() == before - gone

    def owners(self, branches: object) -> dict[str, BranchOwner]:
        """The reaper's question to Dagster."""
        waiting = {run.run_id for run in self.ended}
        return {
            run_branch_name(name): BranchOwner(
                name,
                self.told.get(name)
                or (OwnerState.AWAITING_PUBLICATION if name in waiting else OwnerState.ACTIVE),
                started_at=datetime.now(UTC),
            )
            for name in self.runs
        }

    def reports_after(self, *_: object) -> bool:
        """Nobody is dead here."""
        raise AssertionError("asked without a heartbeat")

    report_dead = reports_after

    def _branches(self) -> set[str]:
        return {ref.name for ref in self.client.references() if ref.name.startswith("run-")}

    # -- what must hold, always ------------------------------------------------------------------------

    @invariant()
    def main_is_what_was_published(self) -> None:
        found: Counter[tuple[str, str, str]] = Counter()
        keys = [ContentKey(["lake", table]) for table in ("t", "u")]
        for key, content in self.client.contents("main", keys).items():
            assert isinstance(content, IcebergTable)
            for part, _, token in self.warehouse.rows_of(self.warehouse.state(content)):
                found[key[-1], part, token] += 1
        assert found == self.model.rows()

    @invariant()
    def nobody_at_work_lost_a_branch(self) -> None:
        alive = {run_branch_name(name) for name in self.runs if name not in self.told}
        assert alive <= self._branches()

    @invariant()
    def nothing_published_is_a_discarded_tag(self) -> None:
        tags = {
            ref.name for ref in self.client.references() if ref.name.startswith(ReferencePrefix.DISCARDED)
        }
        assert tags.isdisjoint(f"{ReferencePrefix.DISCARDED}{run.run_id}" for run in self.model.published)


def _evidence(run: Run) -> RunEvidence:
    """What Dagster would tell of the run: one asset, one check."""
    check = ("lake/a", "good")
    result = CheckEvaluation(
        passed=run.checks == "passed",
        is_blocking=run.checks != "warned",
        position=EventPosition(0, 20),
        step_key="check",
        description="",
    )
    return RunEvidence(
        run_id=run.run_id,
        succeeded=run.succeeded,
        planned_checks=frozenset({(check, None)}),
        evaluations={} if run.checks == "missing" else {(check, None): result},
        written_partitions={("lake/a", None): WrittenPartition(EventPosition(0, 10), "a", "1")},
        rules={"lake/a": AssetRules("lake.a", frozenset({"good"}), demands_checks=True)},
    )


TestLake = pytest.mark.long(Lake.TestCase)
TestLake.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
