"""One pass over branches x runs: publish, discard or leave alone, and say which and why.

It starts from state, not from events: whatever a lost tick, a crash or a backlog left behind is found
again, because the branch is still there. It is bounded: the oldest runs come first, a few at a time from
verdict to publication, and what does not fit into the time waits for the next pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from dagster import DagsterInstance, DagsterRun

from branchlake_dagster.internals.dagster import AssetGraph
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieError, ReferenceNotFound
from branchlake_dagster.nessie.model import ContentKey, Reference
from branchlake_dagster.publication.assessment import Assessed, Assessor
from branchlake_dagster.publication.evidence import RunEvidence
from branchlake_dagster.publication.finishing import Finisher, LostBranches
from branchlake_dagster.publication.ledger import Candidate, NeedsChecks, Published, Refused, only_namespaces
from branchlake_dagster.publication.outcome import Ended, Outcome, PublicationAction, backlog
from branchlake_dagster.publication.parked_runs import Troubles
from branchlake_dagster.publication.publisher import GROUP, Prepared, Publisher, groups, publisher_of
from branchlake_dagster.publication.recheck import Answer, Recheck, Waits
from branchlake_dagster.publication.report import MainView
from branchlake_dagster.runs.added_snapshots import ReadMetadata
from branchlake_dagster.runs.branch_names import branches
from branchlake_dagster.runs.discarding import report_end
from branchlake_dagster.runs.run_branch import branch_name
from branchlake_dagster.runs.run_tags import FENCED, Status, base_hash_of, judged
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import ReferencePrefix, RunTag
from branchlake_dagster.tables.table_files import TableFiles

RUN_BRANCHES = branches(ReferencePrefix.RUN)
"""Nessie's filter for branches that are ours."""

_TOLD: Mapping[str, PublicationAction] = {
    Status.BLOCKED: PublicationAction.BLOCKED,
    Status.REFUSED: PublicationAction.REFUSED,
}
_LEFT = "it has passed, and the sensor publishes it"


class Reconciler:
    """Brings run branches to their end. Several may run at once: every step can be repeated.

    `graph` are the definitions that say which checks an asset has; `view` is what is told of `main` (None:
    nothing); `location` is the code location they come from (None: judge the runs of all). `clock` counts
    seconds, `now` is the wall clock, `at_once` the runs that are looked at or told at the same time.
    `read_metadata` reads a table metadata file, None if it is missing.
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
        view: MainView | None = None,
        location: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        at_once: int = 4,
    ) -> None:
        self._client = client
        self._publisher = publisher
        self._instance = instance
        self._location = location
        self._clock = clock
        self._until = math.inf
        self._at_once = at_once
        self._assessor = Assessor(
            client,
            publisher.already_published,
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
            view,
            settings,
            clock=clock,
            now=now,
        )
        self._recheck = Recheck(
            publisher.states,
            instance,
            graph,
            settings.default_namespace,
            patience=timedelta(minutes=settings.recheck_timeout_min),
            now=now,
        )
        self._troubles = Troubles(instance, now=now)
        self._lost_branches = LostBranches(
            client, publisher, instance, lake_id=settings.lake_id, location=location
        )

    @classmethod
    def of(
        cls,
        lake: Lakehouse,
        instance: DagsterInstance,
        graph: AssetGraph,
        *,
        location: str | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> Reconciler:
        """The reconciler of a lake and its Iceberg tables."""
        publisher = publisher_of(lake)
        return cls(
            lake.nessie,
            publisher,
            instance,
            graph,
            lake.settings,
            view=MainView(lake),
            read_metadata=TableFiles(lake.settings.file_io_properties()).metadata,
            location=location,
            now=now,
        )

    def run(self, *, budget_s: float = math.inf) -> Iterator[Outcome]:
        """Every run branch, for `budget_s` seconds; runs that wait for the same tables go together."""
        self._until = self._clock() + budget_s
        listed = list(
            self._client.references(filter=branches(ReferencePrefix.RUN, ReferencePrefix.PUBLICATION))
        )
        ours = [ref for ref in listed if not ref.name.startswith(ReferencePrefix.PUBLICATION)]
        ended, others = backlog(self._instance, ours, location=self._location)
        yield from others
        yield from self._lost_branches.report({ref.name for ref in ours})
        yield from self._pass(
            ended, states=[ref.name for ref in listed if ref.name.startswith(ReferencePrefix.PUBLICATION)]
        )

    def run_one(self, run_id: str) -> Outcome | None:
        """The branch of one run; None when it has none (any more)."""
        branch = self._branch(branch_name(run_id))
        if branch is None:
            return None
        ended, others = backlog(self._instance, [branch], location=self._location)
        return next(iter(others), None) or next(self._pass(ended))

    def publish_now(self, run: DagsterRun, *, judge_only: bool = False) -> Outcome:
        """Publish a run from inside it, as its last act: it has opened a branch, and all its steps succeeded.

        The outcome is that of an ended run. `judge_only`: a run that passes is left to the sensor.
        """
        name = run.tags.get(RunTag.BRANCH) or branch_name(run.run_id)
        outcome = next(self._pass([Ended(name, run)], inside=True, judge_only=judge_only))
        unsettled = outcome.action in (
            PublicationAction.TRY_AGAIN,
            PublicationAction.WAITING,
            PublicationAction.CHECKING,
            PublicationAction.KEPT,
            PublicationAction.SET_ASIDE,
        )
        return (self._fenced(run, name) or self._told(run, name) or outcome) if unsettled else outcome

    def _fenced(self, run: DagsterRun, name: str) -> Outcome | None:
        """What is left to say of a run whose branch went while it published itself; None when it did not.

        Its writer was taken for dead and woke up. No later pass will find a branch, so it must fail now.
        """
        base_hash = base_hash_of(run.tags, name)
        if base_hash is None or self._branch(name):
            return None
        if done := self._publisher.already_published(name, base_hash):
            return Outcome(
                name, run.run_id, PublicationAction.PUBLISHED, "by another publisher", None, done.hash
            )
        why = "the run was fenced: its branch is gone"
        report_end(self._instance, run.run_id, name, verdict=FENCED, reason=why)
        return Outcome(name, run.run_id, PublicationAction.REFUSED, why)

    def _told(self, run: DagsterRun, name: str) -> Outcome | None:
        """What was told of a run although its clean-up broke: it must fail now, nobody may come again."""
        current = self._instance.get_run_by_id(run.run_id)
        action = _TOLD.get(current.tags.get(RunTag.STATUS, "")) if current else None
        if current is None or action is None or not judged(current.tags, name):
            return None
        return Outcome(name, run.run_id, action, current.tags.get(RunTag.REASON, ""))

    def _branch(self, name: str) -> Reference | None:
        try:
            return self._client.reference(name)
        except ReferenceNotFound:
            return None

    # -- the course of a pass --------------------------------------------------------------------------

    def _pass(
        self,
        ended: Sequence[Ended],
        *,
        states: Sequence[str] | None = None,
        inside: bool = False,
        judge_only: bool = False,
    ) -> Iterator[Outcome]:
        """The states that wait for checks, then the other runs in batches.

        `states` are the names of their branches, when these are all runs that have ended. `inside`: of one
        that publishes itself; `judge_only`: not if it passes.
        """
        if not ended:
            return
        reserved: dict[ContentKey, str] = {}
        waiting = {one.branch: one for one in ended}
        for state in self._recheck.under_way(states):
            mine = [waiting[name] for name in state.members if name in waiting]
            try:
                outcomes = self._checked(state, mine, reserved, whole=states is not None, inside=inside)
            except Exception as error:  # noqa: BLE001 - it concerns the runs of this state, not the others
                outcomes = [self._troubles.note(one.branch, one.run, error) for one in mine]
            for outcome in outcomes:
                waiting.pop(outcome.branch)
                yield outcome
        rest = iter(waiting.values())
        with _each(self._at_once if len(waiting) > 1 else 1) as each:
            while batch := list(islice(rest, GROUP)):
                if self._clock() >= self._until:
                    yield from (_waits(one, "its turn comes with the next tick") for one in (*batch, *rest))
                    return
                yield from self._batch(batch, reserved, each, inside=inside, judge_only=judge_only)

    def _checked(
        self,
        state: Prepared,
        mine: Sequence[Ended],
        reserved: dict[ContentKey, str],
        *,
        whole: bool,
        inside: bool,
    ) -> list[Outcome]:
        """What becomes of the runs of a state that waits for its checks; none of those that it loses."""
        if not mine:
            # Another instance's or code location's. To wait for it could be for ever: it may be gone.
            return []
        if whole and len(mine) < len(state.members):
            self._recheck.release(state)
            return []
        pending = self._recheck.at_work(state)
        if len(mine) < len(state.members) or pending:
            # Nobody publishes into its tables meanwhile: a busy table would move away under every check.
            reserved |= dict.fromkeys(state.tables_changed, state.members[0])
            pending = pending or f"waits for the checks on {state.branch}"
            return [Outcome(one.branch, one.run.run_id, PublicationAction.CHECKING, pending) for one in mine]
        judged = [found for one in mine if isinstance(found := self._assess(one, inside=inside), Assessed)]
        members = {one.candidate: one for one in judged if one.candidate and not one.already_published}
        if len(members) < len(mine):
            self._recheck.release(state)
            return []
        return self._answered(members, lambda evidence: self._recheck.advance(state, evidence), reserved)

    def _batch(
        self,
        batch: Sequence[Ended],
        reserved: dict[ContentKey, str],
        each: Callable[..., Iterable[Any]],
        *,
        inside: bool,
        judge_only: bool = False,
    ) -> Iterator[Outcome]:
        """From verdict to publication, or with `judge_only` to the end of what is not to be published."""

        def look(one: Ended) -> Outcome | Assessed:
            held = self._held(one, reserved) if reserved else None
            return held or self._assess(one, inside=inside)

        found: list[Outcome | Assessed] = list(each(look, batch))
        yield from (one for one in found if isinstance(one, Outcome))
        judged = [one for one in found if isinstance(one, Assessed)]
        if judge_only:
            yield from (_waits(one, _LEFT) for one in judged if one.candidate)
            judged = [one for one in judged if not one.candidate]
        ready = [one for one in judged if one.candidate and not one.already_published]
        candidates = [one.candidate for one in ready if one.candidate]
        results = (
            # The run may have been taken for dead while its process stood still.
            self._publisher.publish(candidates, alive=lambda: self._not_fenced(candidates))
            if inside
            else self._publisher.publish(candidates)
        )
        answers = [(one, results.get(one.branch.name, one.already_published)) for one in judged]
        unchecked = [one for one, answer in answers if isinstance(answer, NeedsChecks)]
        settled = [pair for pair in answers if not isinstance(pair[1], NeedsChecks)]
        yield from each(lambda pair: self._finished(*pair), settled)
        by_candidate = {one.candidate: one for one in unchecked if one.candidate}
        for group in groups(list(by_candidate)):
            members = {candidate: by_candidate[candidate] for candidate in group}
            yield from self._answered(members, self._recheck.prepare, reserved)

    def _answered(
        self,
        members: Mapping[Candidate, Assessed],
        ask: Callable[[Mapping[Candidate, RunEvidence]], Mapping[str, Answer]],
        reserved: dict[ContentKey, str],
    ) -> list[Outcome]:
        """The outcomes of runs that share a state for their checks."""
        answers: Mapping[str, Answer]
        try:
            answers = ask({candidate: one.evidence for candidate, one in members.items()})
        except Exception as error:  # noqa: BLE001 - it concerns these runs, not the others
            answers = dict.fromkeys((candidate.branch for candidate in members), error)
        outcomes: list[Outcome] = []
        for candidate, one in members.items():
            answer = answers[candidate.branch]
            if isinstance(answer, Waits):
                reserved |= dict.fromkeys(_tables(candidate), one.branch.name)
                outcomes.append(_checking(one, answer))
            else:
                outcomes.append(self._finished(one, answer))
        return outcomes

    # -- one run ---------------------------------------------------------------------------------------

    def _not_fenced(self, candidates: Sequence[Candidate]) -> None:
        for one in candidates:
            self._client.reference(one.branch)

    def _assess(self, one: Ended, *, inside: bool) -> Outcome | Assessed:
        held = self._troubles.holds(one.branch, one.run)
        if held is not None:
            return held
        try:
            return self._assessor.assess(one.branch, one.run, ended=inside)
        except Exception as error:  # noqa: BLE001 - it becomes this run's outcome
            return self._troubles.note(one.branch, one.run, error)

    def _held(self, one: Ended, reserved: Mapping[ContentKey, str]) -> Outcome | None:
        """Why a run waits: it has changed a table on which an older rebase is being checked."""
        base = base_hash_of(one.run.tags, one.branch)
        if base is None or not one.run.is_success:
            return None
        try:
            changes = self._client.diff_at(f"@{base}", one.branch)
        except NessieError as error:
            return self._troubles.note(one.branch, one.run, error)
        owner = next((reserved[entry.key] for entry in changes.entries if entry.key in reserved), None)
        return _waits(one, f"waits for the checks of {owner} on the same table") if owner else None

    def _finished(self, one: Assessed, result: Answer | None) -> Outcome:
        try:
            if isinstance(result, Exception):
                raise result
            assert result is None or isinstance(result, Published | Refused)  # noqa: S101 - the rest is asked for
            return self._finisher.finish(one, result, until=self._until)
        except Exception as error:  # noqa: BLE001 - it becomes this run's outcome
            return self._troubles.note(one.branch.name, one.run, error)


@contextmanager
def _each(at_once: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """`map`, several at once: most of the time is spent in waiting for Nessie and Dagster's database."""
    if at_once == 1:
        yield map
        return
    with ThreadPoolExecutor(at_once) as pool:
        yield pool.map


def _tables(candidate: Candidate) -> Iterator[ContentKey]:
    return (entry.key for entry in candidate.changes if not only_namespaces(entry))


def _waits(one: Ended | Assessed, why: str) -> Outcome:
    branch = one.branch if isinstance(one, Ended) else one.branch.name
    return Outcome(branch, one.run.run_id, PublicationAction.WAITING, why)


def _checking(one: Assessed, answer: Waits) -> Outcome:
    return Outcome(
        one.branch.name,
        one.run.run_id,
        PublicationAction.CHECKING,
        answer.detail,
        one.verdict,
        check_run=answer.check_run,
    )
