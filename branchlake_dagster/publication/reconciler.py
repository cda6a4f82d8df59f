"""One pass over run branches: publish, discard or leave each branch, and report the outcome with its reason.

A pass starts from stored state, not from events. It finds the work that a lost tick, a crash or a backlog
left unfinished, because the branch still exists. A pass is bounded: the oldest runs come first, in batches
from verdict to publication. Runs that do not fit into the time budget wait for the next pass.

A lock allows one pass over a lake at a time on one machine, but never waits for a stuck pass. Dagster gives a
tick 60 s, then starts the next one while the old one goes on. Passes may overlap: each change of the lake
happens exactly once. But overlapping passes do the work twice, and once reported four publications twice.

A pass holds the lock during calls to Nessie, the storage and Dagster's database. A process that is stopped,
or waits for a disk, would hold it as long as it lives. Therefore the lock file records its holder and the
start time. A later pass ignores a holder that is older than any pass should be.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import IO, Any, Self

from dagster import DagsterInstance

from branchlake_dagster.file_lock import try_file_lock
from branchlake_dagster.internals.dagster import AssetGraph
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieError, ReferenceNotFound
from branchlake_dagster.nessie.model import ContentKey, Reference
from branchlake_dagster.publication.assessment import AssessedRun, Assessor
from branchlake_dagster.publication.finishing import Finisher, report_lost_branches
from branchlake_dagster.publication.ledger import (
    Candidate,
    NeedsChecks,
    Published,
    Refused,
    Result,
    is_namespace_change,
)
from branchlake_dagster.publication.outcome import EndedRun, MainView, Outcome, find_ended_runs
from branchlake_dagster.publication.parked_runs import FailedAttempts
from branchlake_dagster.publication.publisher import (
    MAX_BATCH_SIZE,
    Publisher,
    build_publisher,
    group_by_shared_keys,
)
from branchlake_dagster.publication.recheck import (
    PendingChecks,
    PreparedState,
    PreparedStates,
    Recheck,
    RecheckResult,
)
from branchlake_dagster.publication.verdict import RunEvidence
from branchlake_dagster.runs.branch_commits import ReadMetadata
from branchlake_dagster.runs.branch_owner import branch_filter
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState, find_recorded_base
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import ReferencePrefix
from branchlake_dagster.tables.table_files import TableFiles

RUN_BRANCH_FILTER = branch_filter(ReferencePrefix.RUN)
"""Nessie's filter for the run branches of branchlake."""


class Reservations:
    """The tables on which an older rebase is being checked, each with the run branch that is rebased.

    Newer runs that changed one of these tables wait. Otherwise a busy table would change under every check.
    """

    def __init__(self) -> None:
        self._branches: dict[ContentKey, str] = {}

    def __bool__(self) -> bool:
        return bool(self._branches)

    def add(self, keys: Iterable[ContentKey], branch: str) -> None:
        """Reserve the tables for the rebase of `branch`."""
        self._branches |= dict.fromkeys(keys, branch)

    def find_branch(self, keys: Iterable[ContentKey]) -> str | None:
        """Return the branch for which one of the tables is reserved; None if none of them is reserved."""
        return next((self._branches[key] for key in keys if key in self._branches), None)


class BranchPublisher:
    """Publishes or discards the branches of runs: assesses each run, sends it to the publisher, finishes it.

    The base class of `Reconciler`, which handles ended runs in passes, and of `RunPublication`, with which a
    run publishes itself. Idempotent: several publishers may work at once, and every step can be repeated.

    `graph` are the definitions with the checks of each asset. `main_view` supplies row counts and commit
    links for reports; if it is None, reports omit them. `location` is the code location of the definitions;
    if it is None, the runs of all code locations are judged. `clock` counts seconds, `now` is the wall clock.
    `at_once` runs are assessed or reported in parallel. `read_metadata` reads a table metadata file, and
    returns None if the file is missing.
    """

    def __init__(
        self,
        client: NessieClient,
        publisher: Publisher,
        instance: DagsterInstance,
        graph: AssetGraph,
        settings: Settings,
        *,
        read_metadata: ReadMetadata,
        main_view: MainView | None = None,
        location: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        at_once: int = 4,
    ) -> None:
        self._client = client
        self._publisher = publisher
        self._instance = instance
        self._location = location
        self._lake_id = settings.lake_id
        self._clock = clock
        self._deadline = math.inf
        self._at_once = at_once
        self._assessor = Assessor(
            client,
            publisher.find_publication,
            instance,
            graph,
            settings,
            clock=clock,
            read_metadata=read_metadata,
            is_on_main=publisher.is_on_main,
        )
        self._finisher = Finisher(
            client,
            publisher,
            instance,
            main_view,
            settings,
            clock=clock,
            now=now,
        )
        self._states = PreparedStates(client, publisher.committer)
        self._recheck = Recheck(
            self._states,
            instance,
            graph,
            settings.default_namespace,
            patience=timedelta(minutes=settings.recheck_timeout_min),
            now=now,
        )
        self._failed_attempts = FailedAttempts(instance, now=now)

    @classmethod
    def from_lake(
        cls,
        lake: Lakehouse,
        instance: DagsterInstance,
        graph: AssetGraph,
        *,
        location: str | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> Self:
        """Build the object for a lake and its Iceberg tables.

        `graph` has the definitions with the checks of each asset. `location` is their code location; if it is
        None, the runs of all code locations are judged. `now` is the wall clock.
        """
        publisher = build_publisher(lake)
        return cls(
            lake.nessie,
            publisher,
            instance,
            graph,
            lake.settings,
            main_view=MainView(lake),
            read_metadata=TableFiles(lake.settings.file_io_properties()).metadata,
            location=location,
            now=now,
        )

    def _find_branch(self, name: str) -> Reference | None:
        try:
            return self._client.reference(name)
        except ReferenceNotFound:
            return None

    # -- steps that RunPublication overrides -------------------------------------------------------------

    def _assess_ended_run(self, ended_run: EndedRun) -> Outcome | AssessedRun:
        """Assess a run. Raises any error of the assessment."""
        return self._assessor.assess(ended_run.branch, ended_run.run)

    def _send_candidates(self, candidates: Sequence[Candidate]) -> Mapping[str, Result | Exception]:
        """Send the candidates of passed runs to the publisher; return results or errors by branch name."""
        return self._publisher.publish(candidates)

    # -- states that wait for checks -------------------------------------------------------------------

    def _advance_states(
        self,
        waiting: dict[str, EndedRun],
        states: Iterable[PreparedState],
        advance: Callable[[PreparedState, Sequence[EndedRun], Reservations], list[Outcome]],
        reservations: Reservations,
    ) -> Iterator[Outcome]:
        """Advance the prepared states, and yield the outcomes of their runs.

        `waiting` has the ended runs by branch name; each run with an outcome is removed from it. States
        without a waiting run are skipped. `advance` returns the outcomes for one state and its waiting runs.
        """
        for state in states:
            state_runs = [waiting[name] for name in state.run_branches if name in waiting]
            if not state_runs:
                # The state belongs to another instance or code location, which may not exist any more. Do
                # not wait.
                continue
            try:
                outcomes = advance(state, state_runs, reservations)
            except Exception as error:  # noqa: BLE001 - the error concerns the runs of this state alone
                outcomes = [
                    self._failed_attempts.record(ended_run.branch, ended_run.run, error)
                    for ended_run in state_runs
                ]
            for outcome in outcomes:
                waiting.pop(outcome.branch)
                yield outcome

    def _advance_state(
        self, state: PreparedState, state_runs: Sequence[EndedRun], reservations: Reservations
    ) -> list[Outcome]:
        """Advance a state that waits for its checks, and return the outcomes of its runs.

        If one of its runs can no longer be published, the state is deleted and the list is empty: its other
        runs are then assessed like all others.
        """
        pending = self._recheck.pending_message(state)
        if len(state_runs) < len(state.run_branches) or pending:
            reservations.add(state.changed_keys, state.run_branches[0])
            pending = pending or f"waits for the checks on {state.branch}"
            return [Outcome(item.branch, item.run.run_id, RunState.CHECKING, pending) for item in state_runs]
        assessed_runs = [
            assessment for item in state_runs if isinstance(assessment := self._assess(item), AssessedRun)
        ]
        members = {
            item.candidate: item for item in assessed_runs if item.candidate and not item.already_published
        }
        if len(members) < len(state_runs):
            self._states.delete(state.branch)
            return []
        return self._answer_members(
            members, lambda evidence: self._recheck.advance(state, evidence), reservations
        )

    def _answer_members(
        self,
        members: Mapping[Candidate, AssessedRun],
        ask: Callable[[Mapping[Candidate, RunEvidence]], Mapping[str, RecheckResult]],
        reservations: Reservations,
    ) -> list[Outcome]:
        """Return the outcomes of runs that share a state for their checks.

        `ask` returns an answer for each member by branch name. The tables of members that wait are reserved;
        the other members are finished.
        """
        answers: Mapping[str, RecheckResult]
        try:
            answers = ask({candidate: one.evidence for candidate, one in members.items()})
        except Exception as error:  # noqa: BLE001 - the error concerns these runs alone
            answers = dict.fromkeys((candidate.branch for candidate in members), error)
        outcomes: list[Outcome] = []
        for candidate, assessed_run in members.items():
            answer = answers[candidate.branch]
            if isinstance(answer, PendingChecks):
                changed_keys = (entry.key for entry in candidate.changes if not is_namespace_change(entry))
                reservations.add(changed_keys, assessed_run.branch.name)
                outcomes.append(
                    assessed_run.to_outcome(RunState.CHECKING, answer.detail, check_run=answer.check_run)
                )
            else:
                outcomes.append(self._finish_run(assessed_run, answer))
        return outcomes

    # -- runs ------------------------------------------------------------------------------------------

    def _process_batch(
        self, batch: Sequence[EndedRun], reservations: Reservations, each: Callable[..., Iterable[Any]]
    ) -> Iterator[Outcome]:
        """Assess and publish a batch of runs, and yield an outcome for each of them.

        `each` is `map` or its parallel version.
        """

        def assess(ended_run: EndedRun) -> Outcome | AssessedRun:
            waiting = self._reserved_outcome(ended_run, reservations) if reservations else None
            return waiting or self._assess(ended_run)

        assessments: list[Outcome | AssessedRun] = list(each(assess, batch))
        yield from (item for item in assessments if isinstance(item, Outcome))
        assessed_runs = [item for item in assessments if isinstance(item, AssessedRun)]
        ready_runs = [item for item in assessed_runs if item.candidate and not item.already_published]
        results = self._send_candidates([item.candidate for item in ready_runs if item.candidate])
        answers = [(item, results.get(item.branch.name, item.already_published)) for item in assessed_runs]
        unchecked_runs = [item for item, answer in answers if isinstance(answer, NeedsChecks)]
        final_answers = [pair for pair in answers if not isinstance(pair[1], NeedsChecks)]
        yield from each(lambda pair: self._finish_run(*pair), final_answers)
        by_candidate = {item.candidate: item for item in unchecked_runs if item.candidate}
        for group in group_by_shared_keys(list(by_candidate)):
            members = {candidate: by_candidate[candidate] for candidate in group}
            yield from self._answer_members(members, self._recheck.prepare, reservations)

    def _assess(self, ended_run: EndedRun) -> Outcome | AssessedRun:
        waiting = self._failed_attempts.waiting_outcome(ended_run.branch, ended_run.run)
        if waiting is not None:
            return waiting
        try:
            return self._assess_ended_run(ended_run)
        except Exception as error:  # noqa: BLE001 - the error becomes the outcome of this run
            return self._failed_attempts.record(ended_run.branch, ended_run.run, error)

    def _reserved_outcome(self, ended_run: EndedRun, reservations: Reservations) -> Outcome | None:
        """Return the outcome WAITING if the run changed a table on which an older rebase is being checked.

        Returns None if the run need not wait, and a failed attempt if Nessie does not answer.
        """
        base = find_recorded_base(ended_run.run.tags, ended_run.branch)
        if base is None or not ended_run.run.is_success:
            return None
        try:
            changes = self._client.diff_at(f"@{base}", ended_run.branch)
        except NessieError as error:
            return self._failed_attempts.record(ended_run.branch, ended_run.run, error)
        owner = reservations.find_branch(entry.key for entry in changes.entries)
        return (
            waiting_outcome(ended_run, f"waits for the checks of {owner} on the same table")
            if owner
            else None
        )

    def _finish_run(self, assessed_run: AssessedRun, result: RecheckResult | None) -> Outcome:
        try:
            if isinstance(result, Exception):
                raise result
            assert result is None or isinstance(result, Published | Refused)  # noqa: S101 - the caller handles the other results
            return self._finisher.finish(assessed_run, result, deadline=self._deadline)
        except Exception as error:  # noqa: BLE001 - the error becomes the outcome of this run
            return self._failed_attempts.record(assessed_run.branch.name, assessed_run.run, error)


class Reconciler(BranchPublisher):
    """Publishes or discards the branches of finished runs, in passes over all branches or for one run."""

    def reconcile_branches(self, *, budget_s: float = math.inf) -> Iterator[Outcome]:
        """Reconcile all run branches, and yield an outcome for each of them.

        After `budget_s` seconds no further batch begins; the remaining runs get the outcome WAITING. Runs
        that change the same tables are published together.
        """
        self._deadline = self._clock() + budget_s
        refs = list(
            self._client.references(filter=branch_filter(ReferencePrefix.RUN, ReferencePrefix.PUBLICATION))
        )
        run_refs = [ref for ref in refs if not ref.name.startswith(ReferencePrefix.PUBLICATION)]
        ended, others = find_ended_runs(self._instance, run_refs, location=self._location)
        yield from others
        yield from report_lost_branches(
            self._client,
            self._publisher,
            self._instance,
            {ref.name for ref in run_refs},
            lake_id=self._lake_id,
            location=self._location,
        )
        if not ended:
            return
        states = self._states.load_all(
            ref.name for ref in refs if ref.name.startswith(ReferencePrefix.PUBLICATION)
        )
        yield from self._reconcile_ended(ended, states, self._advance_complete_state)

    def reconcile_run(self, run_id: str) -> Outcome | None:
        """Reconcile the branch of one run, and return the outcome; None if the branch does not exist."""
        branch = self._find_branch(run_branch_name(run_id))
        if branch is None:
            return None
        ended, others = find_ended_runs(self._instance, [branch], location=self._location)
        return next(iter(others), None) or next(
            self._reconcile_ended(ended, self._states.load_all(), self._advance_state)
        )

    def _reconcile_ended(
        self,
        ended: Sequence[EndedRun],
        states: Sequence[PreparedState],
        advance: Callable[[PreparedState, Sequence[EndedRun], Reservations], list[Outcome]],
    ) -> Iterator[Outcome]:
        """Advance the states that wait for checks, then assess the other runs in batches; yield all outcomes.

        `ended` are the runs to reconcile. `states` are all prepared states; `advance` is called for each that
        contains one of these runs, and returns the outcomes of its runs (see `_advance_states`). After the
        deadline of the pass, the runs of the remaining batches get a waiting outcome.
        """
        reservations = Reservations()
        waiting = {ended_run.branch: ended_run for ended_run in ended}
        yield from self._advance_states(waiting, states, advance, reservations)
        rest = iter(waiting.values())
        with _parallel_map(self._at_once if len(waiting) > 1 else 1) as each:
            while batch := list(islice(rest, MAX_BATCH_SIZE)):
                if self._clock() >= self._deadline:
                    yield from (
                        waiting_outcome(
                            ended_run, "left to the next tick, because the time budget is used up"
                        )
                        for ended_run in (*batch, *rest)
                    )
                    return
                yield from self._process_batch(batch, reservations, each)

    def _advance_complete_state(
        self, state: PreparedState, state_runs: Sequence[EndedRun], reservations: Reservations
    ) -> list[Outcome]:
        """Advance a state, or delete it and return an empty list if some of its runs no longer wait.

        `state_runs` are all ended runs of the state that wait. The runs of a deleted state are assessed like
        all others.
        """
        if len(state_runs) < len(state.run_branches):
            self._states.delete(state.branch)
            return []
        return self._advance_state(state, state_runs, reservations)


@contextmanager
def _parallel_map(at_once: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Yield `map`, or a version of it that makes up to `at_once` calls in parallel threads.

    Most of the time of a call is spent waiting for Nessie and Dagster's database.
    """
    if at_once == 1:
        yield map
        return
    with ThreadPoolExecutor(at_once) as pool:
        yield pool.map


def waiting_outcome(pending_run: EndedRun | AssessedRun, why: str) -> Outcome:
    """Return the outcome WAITING, with the explanation `why`, of a run that this pass leaves as it is."""
    branch = pending_run.branch if isinstance(pending_run, EndedRun) else pending_run.branch.name
    return Outcome(branch, pending_run.run.run_id, RunState.WAITING, why)


# -- one pass at a time ----------------------------------------------------------------------------------

_POLL_S = 0.02
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _PassHolder:
    """The process whose pass holds the lock. `since` is the start of the pass in Unix seconds."""

    pid: int
    since: float


def longest_pass_s(settings: Settings) -> float:
    """Return the seconds after which a pass counts as stuck.

    That is the time budget of a pass plus the minute that Dagster gives a tick.
    """
    return settings.publish_budget_s + 60.0


@contextmanager
def acquire_pass_lock(
    settings: Settings,
    *,
    patience_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[bool]:
    """Acquire the lock for one pass; the context value is False if another pass of this machine holds it.

    The call waits up to `patience_s` seconds for the other pass. It does not wait for a pass that began more
    than `longest_pass_s` ago. The kernel releases the lock when the process ends, however it ends. `clock`
    counts seconds, `now` is the wall clock.
    """
    folder = settings.state_dir / "run"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"publication-{settings.lake_id}.lock"
    deadline = clock() + patience_s
    stuck_since: float | None = None
    while True:
        with path.open("a+b", buffering=0) as handle:
            if try_file_lock(handle.fileno()):
                if _is_current(path, handle):
                    os.truncate(handle.fileno(), 0)
                    handle.write(json.dumps(asdict(_PassHolder(os.getpid(), now()))).encode())
                    yield True
                    return
                continue  # another pass deleted this file before we locked it
            since = _pass_start(handle)
            if since > now() - longest_pass_s(settings):
                stuck_since = None
            elif since == stuck_since:
                _abandon(path, handle, now=now())
            else:
                # A pass that has just acquired the lock has not replaced the record of the last one yet.
                stuck_since = since
                sleep(_POLL_S)
                continue
            if _is_current(path, handle):
                if clock() >= deadline:
                    yield False
                    return
                sleep(_POLL_S)


def _pass_start(handle: IO[bytes]) -> float:
    """Return the start of the pass that the lock file names, in Unix seconds.

    Without a readable record this is the time of the file's last change.
    """
    holder = _read_holder(handle)
    return holder.since if holder else os.fstat(handle.fileno()).st_mtime


def _abandon(path: Path, handle: IO[bytes], *, now: float) -> None:
    """Delete the lock file of a stuck pass, so that later passes create a new file.

    Two passes may delete the file at the same moment and then work at the same time. That is allowed.
    """
    holder = _read_holder(handle)
    if _is_current(path, handle):
        path.unlink(missing_ok=True)
        pid = holder.pid if holder else "an unknown process"
        _log.warning(
            "The publication pass of process %s began %.0f s ago and is stuck. This pass ignores its lock.",
            pid,
            now - _pass_start(handle),
        )


def _is_current(path: Path, handle: IO[bytes]) -> bool:
    """Return whether the opened file `handle` is still the lock file at `path`.

    False if the lock file was deleted or replaced since it was opened.
    """
    try:
        return os.path.samestat(path.stat(), os.fstat(handle.fileno()))
    except FileNotFoundError:
        return False


def _read_holder(handle: IO[bytes]) -> _PassHolder | None:
    """Read the record of the pass that holds the lock from the open lock file `handle`.

    None if the holder has not written it yet, or if it is damaged.
    """
    handle.seek(0)
    try:
        return _PassHolder(**json.loads(handle.read() or b""))
    except (ValueError, TypeError):
        return None
