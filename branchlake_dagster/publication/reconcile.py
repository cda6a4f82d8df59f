"""One pass over branches x runs: publish, discard or leave alone, and say which and why.

It starts from state, not from events: whatever a lost tick, a crash or a backlog left behind is found
again, because the branch is still there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dagster import DagsterInstance, DagsterRun
from dagster._core.definitions.assets.graph.base_asset_graph import BaseAssetGraph

from branchlake_dagster.branching.run_branch import run_id_of
from branchlake_dagster.branching.run_tags import base_hash_of
from branchlake_dagster.lakehouse.errors import BranchlakeError, NessieConflict, ReferenceNotFound
from branchlake_dagster.lakehouse.nessie.client import NessieClient
from branchlake_dagster.lakehouse.nessie.model import Reference
from branchlake_dagster.publication import announce as ui
from branchlake_dagster.publication.evidence import collect
from branchlake_dagster.publication.gate import Verdict, judge
from branchlake_dagster.publication.publisher import Candidate, Conflicting, publish, write_set
from branchlake_dagster.settings import RUN_BRANCH_PREFIX, Settings

RUN_BRANCHES = f"refType == 'BRANCH' && ref.name.startsWith('{RUN_BRANCH_PREFIX}')"
"""Nessie's filter for branches that are ours."""


class Action(StrEnum):
    """What was done about a branch."""

    PUBLISHED = "published"
    BLOCKED = "blocked"
    REFUSED = "refused"
    DISCARDED = "discarded"
    WAITING = "waiting"
    UNKNOWN_RUN = "unknown run"
    TRY_AGAIN = "try again"


@dataclass(frozen=True)
class Outcome:
    """One branch in one pass. `publication` is the commit on `main`; `detail` says why or what."""

    branch: str
    run_id: str
    action: Action
    detail: str
    verdict: Verdict | None = None
    publication: str | None = None
    tables: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.branch}: {self.action}, {self.detail}"


class Reconciler:
    """Brings run branches to their end. Several may run at once: every step can be repeated.

    `graph` are the definitions that say which checks an asset has; `location` is the code location they
    come from (None: judge the runs of all).
    """

    def __init__(
        self,
        client: NessieClient,
        instance: DagsterInstance,
        graph: BaseAssetGraph[Any],
        settings: Settings,
        *,
        location: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._instance = instance
        self._graph = graph
        self._settings = settings
        self._location = location
        self._clock = clock

    def run(self) -> Iterator[Outcome]:
        """Every run branch, one after the other; the failure of one does not hold up the next."""
        for branch in list(self._client.references(filter=RUN_BRANCHES, fetch_metadata=True)):
            try:
                yield self._one(branch)
            except BranchlakeError as error:
                yield Outcome(branch.name, run_id_of(branch.name), Action.TRY_AGAIN, str(error))

    def run_one(self, run_id: str) -> Outcome | None:
        """The branch of one run; None when it has none (any more)."""
        try:
            branch = self._client.reference(f"{RUN_BRANCH_PREFIX}{run_id}", fetch_metadata=True)
        except ReferenceNotFound:
            return None
        return self._one(branch)

    def _one(self, branch: Reference) -> Outcome:
        run_id = run_id_of(branch.name)
        run = self._instance.get_run_by_id(run_id)
        if run is None:
            return Outcome(
                branch.name, run_id, Action.UNKNOWN_RUN, "Dagster knows no such run; left to the reaper"
            )
        if (other := self._other_location(run)) is not None:
            detail = f"the run belongs to code location {other}, whose own sensor judges it"
            return Outcome(branch.name, run_id, Action.WAITING, detail)
        if not run.is_finished:
            return Outcome(branch.name, run_id, Action.WAITING, f"the run is {run.status.value.lower()}")
        base_hash = base_hash_of(run.tags, branch.name) or (
            branch.metadata.common_ancestor_hash if branch.metadata else None
        )
        if base_hash is None:
            return Outcome(branch.name, run_id, Action.TRY_AGAIN, "its base hash is unknown")
        return self._finish(run, branch, base_hash)

    def _other_location(self, run: DagsterRun) -> str | None:
        """The code location of the run, if it is not ours: only its own definitions know its checks."""
        origin = run.remote_job_origin
        if self._location is None or origin is None:
            return None
        name = origin.repository_origin.code_location_origin.location_name
        return None if name == self._location else name

    def _finish(self, run: DagsterRun, branch: Reference, base_hash: str) -> Outcome:
        began = self._clock()
        tables = write_set(self._client, base_hash, branch)
        evidence = collect(
            self._instance,
            run,
            self._graph,
            write_set=frozenset(tables),
            default_namespace=self._settings.default_namespace,
            require_checks=self._settings.require_checks,
        )
        verdict = judge(evidence, strict_tables=self._settings.require_checks)
        publication: str | None = None
        why: str | None = None
        if not run.is_success:
            why = f"the run ended as {run.status.value.lower()}"
            action, detail = Action.DISCARDED, why
        elif verdict.blocked:
            action, detail = Action.BLOCKED, verdict.summary()
        elif not tables:
            why = "the run changed no table"
            action, detail = Action.DISCARDED, why
        else:
            candidate = Candidate(
                branch=branch.name,
                head_hash=branch.hash,
                base_hash=base_hash,
                run_id=run.run_id,
                root_run_id=run.root_run_id or run.run_id,
                verdict=str(verdict.decision),
                tables=tables,
            )
            result = publish(self._client, candidate)
            if isinstance(result, Conflicting):
                why = result.reason()
                action, detail = Action.REFUSED, why
            else:
                publication = result.hash
                listed = ", ".join(tables)
                action, detail = Action.PUBLISHED, f"{listed} as {publication[:12]}, {verdict.summary()}"
        ui.announce(
            self._instance,
            run,
            evidence,
            verdict,
            branch=branch.name,
            publication=publication,
            why=why,
            took_s=self._clock() - began,
        )
        self._drop(branch)
        return Outcome(branch.name, run.run_id, action, detail, verdict, publication, tables)

    def _drop(self, branch: Reference) -> None:
        """Delete the branch at the hash that was judged; a later write on it keeps it for the next pass."""
        try:
            self._client.delete_branch(branch.name, expected_hash=branch.hash)
        except (ReferenceNotFound, NessieConflict):
            # Gone: another publisher was faster. Moved: somebody still writes; the next pass looks again.
            return
