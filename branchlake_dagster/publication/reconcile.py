"""One pass over branches x runs: publish, discard or leave alone, and say which and why.

It starts from state, not from events: whatever a lost tick, a crash or a backlog left behind is found
again, because the branch is still there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from dagster import DagsterInstance, DagsterRun
from dagster._core.definitions.assets.graph.base_asset_graph import BaseAssetGraph

from branchlake_dagster.branching.claims import claims, workers
from branchlake_dagster.branching.discard import discard
from branchlake_dagster.branching.pin import pin, pinned, unpin
from branchlake_dagster.branching.run_branch import branch_name, run_id_of
from branchlake_dagster.branching.run_tags import (
    BRANCH_TAG,
    base_hash_of,
    judged,
    opened_by,
    published_as,
)
from branchlake_dagster.lakehouse.errors import BranchlakeError, NessieConflict, ReferenceNotFound
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.lakehouse.nessie.client import NessieClient
from branchlake_dagster.lakehouse.nessie.model import ContentKey, IcebergTable, Reference
from branchlake_dagster.publication import announce as ui
from branchlake_dagster.publication.candidate import (
    Candidate,
    NeedsChecks,
    Published,
    Refused,
    tables_in,
    write_set,
)
from branchlake_dagster.publication.evidence import RunEvidence, collect
from branchlake_dagster.publication.gate import Verdict, judge
from branchlake_dagster.publication.publisher import PUBLICATION_BRANCH_PREFIX, Publisher, publisher_of
from branchlake_dagster.publication.recheck import CheckRun, Recheck
from branchlake_dagster.settings import RUN_BRANCH_PREFIX, Settings

RUN_BRANCHES = f"refType == 'BRANCH' && ref.name.startsWith('{RUN_BRANCH_PREFIX}')"
"""Nessie's filter for branches that are ours."""

PUBLICATION_BRANCHES = f"refType == 'BRANCH' && ref.name.startsWith('{PUBLICATION_BRANCH_PREFIX}')"
"""Nessie's filter for rebased states that wait for their checks."""


class Action(StrEnum):
    """What was done about a branch."""

    PUBLISHED = "published"
    BLOCKED = "blocked"
    REFUSED = "refused"
    DISCARDED = "discarded"
    CHECKING = "checking"
    WAITING = "waiting"
    UNBRANCHED = "unbranched"
    UNKNOWN_RUN = "unknown run"
    TRY_AGAIN = "try again"


@dataclass(frozen=True)
class Outcome:
    """One branch in one pass. `publication` is the commit on `main`; `detail` says why or what.

    `check_run` is the run that a rebased publication needs before it can go on.
    """

    branch: str
    run_id: str
    action: Action
    detail: str
    verdict: Verdict | None = None
    publication: str | None = None
    tables: tuple[str, ...] = ()
    check_run: CheckRun | None = None

    def __str__(self) -> str:
        return f"{self.branch}: {self.action}, {self.detail}"


@dataclass(frozen=True)
class _Judged:
    """A finished run and the gate's word on it. `branch` is at the hash that was judged."""

    run: DagsterRun
    branch: Reference
    evidence: RunEvidence
    verdict: Verdict
    candidate: Candidate | None
    why: str | None
    action: Action
    began: float
    known: Published | None = None
    """What the ledger has of it already: an earlier publisher died before it could tell."""
    base_hash: str = ""
    begun: bool = False
    """Whether some publisher was here before."""


class Reconciler:
    """Brings run branches to their end. Several may run at once: every step can be repeated.

    `graph` are the definitions that say which checks an asset has; `location` is the code location they
    come from (None: judge the runs of all).
    """

    def __init__(
        self,
        client: NessieClient,
        publisher: Publisher,
        instance: DagsterInstance,
        graph: BaseAssetGraph[Any],
        settings: Settings,
        *,
        location: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._publisher = publisher
        self._instance = instance
        self._graph = graph
        self._settings = settings
        self._location = location
        self._clock = clock
        self._recheck = Recheck(publisher, instance, graph, settings.default_namespace)

    @classmethod
    def of(
        cls,
        lake: Lakehouse,
        instance: DagsterInstance,
        graph: BaseAssetGraph[Any],
        *,
        location: str | None = None,
    ) -> Reconciler:
        """The reconciler of a lake and its Iceberg tables."""
        return cls(lake.nessie, publisher_of(lake), instance, graph, lake.settings, location=location)

    def run(self) -> Iterator[Outcome]:
        """Every run branch; runs that wait for the same tables are published together."""
        yield from self._pass(list(self._client.references(filter=RUN_BRANCHES)))

    def run_one(self, run_id: str) -> Outcome | None:
        """The branch of one run; None when it has none (any more)."""
        return self._of_branch(branch_name(run_id))

    def publish_now(self, run: DagsterRun) -> Outcome | None:
        """Publish a run from inside it, as its last act: all its steps have succeeded.

        The outcome is that of an ended run. None when it touched no table.
        """
        return self._of_branch(run.tags.get(BRANCH_TAG) or branch_name(run.run_id), ended=run)

    def _of_branch(self, name: str, ended: DagsterRun | None = None) -> Outcome | None:
        try:
            branch = self._client.reference(name)
        except ReferenceNotFound:
            return None
        return next(self._pass([branch], ended=ended))

    def _pass(self, branches: Sequence[Reference], ended: DagsterRun | None = None) -> Iterator[Outcome]:
        holders = claims(self._instance, [branch.name for branch in branches])
        ready: list[_Judged] = []
        for branch in branches:
            record = holders[branch.name]
            run = ended or (record.dagster_run if record else None)
            try:
                found = self._look(branch, run, ended is not None)
            except BranchlakeError as error:
                found = Outcome(branch.name, run_id_of(branch.name), Action.TRY_AGAIN, str(error))
            if isinstance(found, Outcome):
                yield found
            elif found.known or found.candidate is None:
                yield self._guarded(found, found.known)
            else:
                ready.append(found)
        # The oldest first: it has waited longest, and a later run has seen less of what others did.
        ready.sort(key=lambda one: one.evidence.last_order)
        free, held = self._unreserved(ready)
        yield from held
        results = self._publisher.publish([one.candidate for one in free if one.candidate])
        for one in free:
            yield self._guarded(one, results[one.branch.name])

    def _unreserved(self, ready: Sequence[_Judged]) -> tuple[list[_Judged], list[Outcome]]:
        """Hold back candidates for tables on which an older rebase is being checked.

        Otherwise a table with frequent publications would move away under every check.
        """
        if not ready:
            return [], []
        checking = {
            ref.name.removeprefix(PUBLICATION_BRANCH_PREFIX)
            for ref in self._client.references(filter=PUBLICATION_BRANCHES)
        }
        reserved: dict[ContentKey, str] = {}
        free, held = [], []
        for one in sorted(ready, key=lambda one: one.run.run_id not in checking):
            assert one.candidate is not None  # noqa: S101 - only candidates are ready
            mine = one.run.run_id in checking
            taken = None if mine else next((reserved[k] for k in one.candidate.keys if k in reserved), None)
            if taken:
                detail = f"waits for the checks of run {taken} on the same table"
                held.append(Outcome(one.branch.name, one.run.run_id, Action.WAITING, detail, one.verdict))
                continue
            free.append(one)
            if mine:
                tables = (
                    entry.key for entry in one.candidate.changes if isinstance(entry.to_content, IcebergTable)
                )
                reserved |= dict.fromkeys(tables, one.run.run_id)
        return free, held

    # -- judging ---------------------------------------------------------------------------------------

    def _look(self, branch: Reference, run: DagsterRun | None, ended: bool) -> Outcome | _Judged:
        run_id = run.run_id if run else run_id_of(branch.name)
        if run is None:
            return Outcome(
                branch.name, run_id, Action.UNKNOWN_RUN, "Dagster knows no such run; left to the reaper"
            )
        if (other := other_location(run, self._location)) is not None:
            detail = f"the run belongs to code location {other}, whose own sensor judges it"
            return Outcome(branch.name, run_id, Action.WAITING, detail)
        if not run.is_finished and not ended:
            return Outcome(branch.name, run_id, Action.WAITING, f"the run is {run.status.value.lower()}")
        try:
            # Only now, when the run is known to have ended: the listing may be older than its last write,
            # and half a run was published once.
            branch = self._client.reference(branch.name)
        except ReferenceNotFound:
            return Outcome(branch.name, run_id, Action.WAITING, "another publisher was faster")
        # Dagster copies tags: a retry that opened no branch has its parent's verdict among its own.
        if opened_by(run.tags, run.run_id) and judged(run.tags, branch.name):
            return self._again(run, branch)
        base_hash = base_hash_of(run.tags, branch.name) or self._ancestor(branch)
        if base_hash is None:
            return Outcome(branch.name, run_id, Action.TRY_AGAIN, "its base hash is unknown")
        if run.is_success or ended:
            head, begun = pin(self._client, branch)
            branch = replace(branch, hash=head)
        else:
            begun = pinned(self._client, branch.name)
        # A publisher that has begun may have published it and died, inside the run too.
        known = self._publisher.known(branch.name, base_hash) if begun else None
        return replace(self._judge(run, branch, base_hash, ended, known), begun=begun)

    def _again(self, run: DagsterRun, branch: Reference) -> Outcome:
        """A branch whose verdict was told already: only its deletion was missed, or it is kept."""
        if publication := published_as(run.tags, branch.name):
            self._end(branch, keep_data=True)
            return Outcome(branch.name, run.run_id, Action.PUBLISHED, "told before", None, publication)
        if self._settings.keep_failed_hours:
            hours = self._settings.keep_failed_hours
            detail = f"not published, kept for debugging for {hours:g} h after its end"
            return Outcome(branch.name, run.run_id, Action.WAITING, detail)
        self._end(branch, keep_data=False)
        return Outcome(branch.name, run.run_id, Action.DISCARDED, "its verdict was told before")

    def _ancestor(self, branch: Reference) -> str | None:
        found = self._client.reference(branch.name, fetch_metadata=True).metadata
        return found.common_ancestor_hash if found else None

    def _judge(
        self, run: DagsterRun, branch: Reference, base_hash: str, ended: bool, known: Published | None
    ) -> _Judged:
        began = self._clock()
        changes = write_set(self._client, base_hash, branch)
        tables = tables_in(changes)
        runs = workers(self._instance, branch.name) if run.parent_run_id else (run,)
        evidence = collect(
            self._instance,
            runs or (run,),
            self._graph,
            write_set=frozenset(tables),
            default_namespace=self._settings.default_namespace,
            require_checks=self._settings.require_checks,
        )
        if ended or known:
            evidence = replace(evidence, succeeded=True)
        verdict = judge(evidence, strict_tables=self._settings.require_checks)
        why, action, candidate = None, Action.PUBLISHED, None
        if not evidence.succeeded:
            why, action = f"the run ended as {run.status.value.lower()}", Action.DISCARDED
        elif verdict.blocked:
            action = Action.BLOCKED
        elif not tables:
            why, action = "the run changed no table", Action.DISCARDED
        else:
            reads = evidence.read_set
            candidate = Candidate(
                branch=branch.name,
                head_hash=branch.hash,
                base_hash=base_hash,
                run_id=run.run_id,
                root_run_id=run.root_run_id or run.run_id,
                verdict=str(verdict.decision),
                changes=changes,
                read_set=None if reads is None else frozenset(map(ContentKey.from_path, reads)),
                table_checks=frozenset(map(ContentKey.from_path, evidence.whole_tables)),
            )
        if known:
            why, action = None, Action.PUBLISHED
        return _Judged(run, branch, evidence, verdict, candidate, why, action, began, known, base_hash)

    # -- ending ----------------------------------------------------------------------------------------

    def _guarded(
        self, one: _Judged, result: Published | Refused | NeedsChecks | BranchlakeError | None
    ) -> Outcome:
        try:
            if isinstance(result, BranchlakeError):
                raise result
            return self._finish(one, result)
        except BranchlakeError as error:
            return Outcome(one.branch.name, one.run.run_id, Action.TRY_AGAIN, str(error))

    def _finish(self, one: _Judged, result: Published | Refused | NeedsChecks | None) -> Outcome:
        check_run = None
        if isinstance(result, NeedsChecks) and one.candidate:
            step = self._recheck.advance(one.candidate, one.evidence)
            if isinstance(step, CheckRun | str):
                check_run = step if isinstance(step, CheckRun) else None
                detail = str(step)
                return Outcome(
                    one.branch.name, one.run.run_id, Action.CHECKING, detail, one.verdict, check_run=check_run
                )
            result = step
        if isinstance(result, Refused) or (result is None and one.begun):
            # Another publisher, perhaps inside the run, may still be at it: only of a branch that is gone it
            # is certain that it was not published.
            if not self._settings.keep_failed_hours:
                self._drop(one.branch, keep_data=False)
            result = self._publisher.known(one.branch.name, one.base_hash) or result
        action, why, publication = one.action, one.why, None
        detail = why or one.verdict.summary()
        tables = one.candidate.tables if one.candidate else ()
        rebased: tuple[str, ...] = ()
        if isinstance(result, Refused):
            action, detail = Action.REFUSED, result.reason()
            why = detail
        elif isinstance(result, Published):
            action, why = Action.PUBLISHED, None
            publication, rebased = result.hash, result.rebased
            again = f", rebased {', '.join(rebased)}" if rebased else ""
            detail = f"{', '.join(tables)} as {publication[:12]}, {one.verdict.summary()}{again}"
        ui.announce(
            self._instance,
            one.run,
            one.evidence,
            one.verdict,
            branch=one.branch.name,
            publication=publication,
            rebased=rebased,
            why=why,
            kept_hours=self._settings.keep_failed_hours if publication is None else 0.0,
            took_s=self._clock() - one.began,
        )
        if publication is not None:
            self._end(one.branch, keep_data=True)
        elif not self._settings.keep_failed_hours:
            self._end(one.branch, keep_data=False)
        return Outcome(
            one.branch.name, one.run.run_id, action, detail, one.verdict, publication, tables, check_run
        )

    def _end(self, branch: Reference, *, keep_data: bool) -> None:
        """Delete the branch, then its pin. A branch that stays keeps it: somebody has begun with it."""
        if self._drop(branch, keep_data=keep_data):
            unpin(self._client, branch.name)

    def _drop(self, branch: Reference, *, keep_data: bool) -> bool:
        """Delete the branch at the hash that was judged; whether it is gone.

        `keep_data`: its files are `main`'s now. Otherwise it becomes a tag, until its files are deleted.
        """
        try:
            if keep_data:
                self._client.delete_branch(branch.name, expected_hash=branch.hash)
            else:
                discard(self._client, branch)
        except ReferenceNotFound:
            return True  # another publisher was faster
        except NessieConflict:
            # A late writer. The run is over: the next pass finds the verdict told and deletes what is there.
            return False
        return True


def other_location(run: DagsterRun, location: str | None) -> str | None:
    """The code location of the run, if it is not `location`: only its own definitions know its checks."""
    origin = run.remote_job_origin
    if location is None or origin is None:
        return None
    name = origin.repository_origin.code_location_origin.location_name
    return None if name == location else name
