"""One pass over branches x runs: publish, discard or leave alone, and say which and why.

It starts from state, not from events: whatever a lost tick, a crash or a backlog left behind is found
again, because the branch is still there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dagster import DagsterInstance, DagsterRun
from dagster._core.definitions.assets.graph.base_asset_graph import BaseAssetGraph

from branchlake_dagster.branching.claims import claims
from branchlake_dagster.branching.names import branches
from branchlake_dagster.branching.run_branch import branch_name, run_id_of
from branchlake_dagster.branching.run_tags import BRANCH_TAG, base_hash_of
from branchlake_dagster.lakehouse.errors import BranchlakeError, ReferenceNotFound
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.lakehouse.nessie.client import NessieClient
from branchlake_dagster.lakehouse.nessie.model import ContentKey, IcebergTable, Reference
from branchlake_dagster.publication import announce as ui
from branchlake_dagster.publication.candidate import NeedsChecks, Published, Refused
from branchlake_dagster.publication.ending import drop, end
from branchlake_dagster.publication.judging import Judge, Judged
from branchlake_dagster.publication.outcome import Action, CheckRun, Outcome
from branchlake_dagster.publication.prepared import PUBLICATION_BRANCH_PREFIX
from branchlake_dagster.publication.publisher import Publisher, publisher_of
from branchlake_dagster.publication.recheck import Recheck
from branchlake_dagster.settings import RUN_BRANCH_PREFIX, Settings

RUN_BRANCHES = branches(RUN_BRANCH_PREFIX)
"""Nessie's filter for branches that are ours."""

PUBLICATION_BRANCHES = branches(PUBLICATION_BRANCH_PREFIX)
"""Nessie's filter for rebased states that wait for their checks."""


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
        self._settings = settings
        self._clock = clock
        self._judge = Judge(
            client, publisher.known, instance, graph, settings, location=location, clock=clock
        )
        self._recheck = Recheck(publisher.states, instance, graph, settings.default_namespace)

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
        name = run.tags.get(BRANCH_TAG) or branch_name(run.run_id)
        outcome = self._of_branch(name, ended=run)
        unsettled = outcome is None or outcome.action in (Action.TRY_AGAIN, Action.WAITING)
        return self._fenced(run, name) or outcome if unsettled else outcome

    def _fenced(self, run: DagsterRun, name: str) -> Outcome | None:
        """What is left to say of a run whose branch went while it published itself; None when it did not.

        Its writer was taken for dead and woke up. No later pass will find a branch, so it must fail now.
        """
        base_hash = base_hash_of(run.tags, name)
        if base_hash is None or self._exists(name):
            return None
        if done := self._publisher.known(name, base_hash):
            return Outcome(name, run.run_id, Action.PUBLISHED, "by another publisher", None, done.hash)
        return Outcome(name, run.run_id, Action.REFUSED, "the run was fenced: its branch is gone")

    def _exists(self, name: str) -> bool:
        try:
            self._client.reference(name)
        except ReferenceNotFound:
            return False
        return True

    def _of_branch(self, name: str, ended: DagsterRun | None = None) -> Outcome | None:
        try:
            branch = self._client.reference(name)
        except ReferenceNotFound:
            return None
        return next(self._pass([branch], ended=ended))

    def _pass(self, branches: Sequence[Reference], ended: DagsterRun | None = None) -> Iterator[Outcome]:
        holders = claims(self._instance, [branch.name for branch in branches])
        ready: list[Judged] = []
        for branch in branches:
            record = holders[branch.name]
            run = ended or (record.dagster_run if record else None)
            try:
                found = self._judge.look(branch, run, ended=ended is not None)
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

    def _unreserved(self, ready: Sequence[Judged]) -> tuple[list[Judged], list[Outcome]]:
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

    # -- ending ----------------------------------------------------------------------------------------

    def _guarded(
        self, one: Judged, result: Published | Refused | NeedsChecks | BranchlakeError | None
    ) -> Outcome:
        try:
            if isinstance(result, BranchlakeError):
                raise result
            return self._finish(one, result)
        except BranchlakeError as error:
            return Outcome(one.branch.name, one.run.run_id, Action.TRY_AGAIN, str(error))

    def _finish(self, one: Judged, result: Published | Refused | NeedsChecks | None) -> Outcome:
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
                drop(self._client, one.branch, keep_data=False)
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
            end(self._client, one.branch, keep_data=True)
        elif not self._settings.keep_failed_hours:
            end(self._client, one.branch, keep_data=False)
        return Outcome(
            one.branch.name, one.run.run_id, action, detail, one.verdict, publication, tables, check_run
        )
