"""One branch and its run: whether it is over, and whether it may be published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dagster import DagsterInstance, DagsterRun

from branchlake_dagster.internals.dagster import AssetGraph
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.nessie.model import ContentKey, DiffEntry, IcebergTable, LogEntry, Reference
from branchlake_dagster.publication.branch_commits import BranchCommits
from branchlake_dagster.publication.evidence import RunEvidence, collect_evidence
from branchlake_dagster.publication.ledger import Candidate, Published, changed_tables, load_write_set
from branchlake_dagster.publication.outcome import Outcome, PublicationAction
from branchlake_dagster.publication.verdict import Verdict, judge_evidence
from branchlake_dagster.runs.added_snapshots import ReadMetadata
from branchlake_dagster.runs.branch_owner import load_runs_on_branch
from branchlake_dagster.runs.claims import claim_branch, is_claimed
from branchlake_dagster.runs.discarding import FAILING_STATUSES, end_branch_and_claim, fail_unpublished_run
from branchlake_dagster.runs.run_tags import (
    find_keep_failed_hours,
    find_publication,
    find_recorded_base,
    is_judged,
    is_opened_by,
)
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag

NO_TABLE_CHANGED = "the run changed no table"
"""Why a run that succeeded is discarded."""


@dataclass(frozen=True)
class AssessedRun:
    """A finished run and the gate's word on it. `branch` is at the hash that was judged."""

    run: DagsterRun
    branch: Reference
    evidence: RunEvidence
    verdict: Verdict
    candidate: Candidate | None
    reason: str | None
    action: PublicationAction
    start_time: float
    already_published: Published | None = None
    """What the ledger has of it already: an earlier publisher died before it could tell."""
    base_hash: str = ""
    was_claimed: bool = False
    """Whether some publisher was here before."""


class Assessor:
    """Looks at branches with the gate's eyes.

    `already_published` looks for a branch on `main`, by name, base hash and head; `read_metadata` reads a
    table metadata file, `is_on_main` returns whether a commit is in `main`'s history; the rest as for the
    `Reconciler`.
    """

    def __init__(
        self,
        client: NessieClient,
        find_publication: Callable[[str, str, str], Published | None],
        instance: DagsterInstance,
        graph: AssetGraph,
        settings: Settings,
        *,
        clock: Callable[[], float],
        read_metadata: ReadMetadata,
        is_on_main: Callable[[str], bool],
    ) -> None:
        self._is_on_main = is_on_main
        self._read_metadata = read_metadata
        self._client = client
        self._find_publication = find_publication
        self._instance = instance
        self._graph = graph
        self._settings = settings
        self._clock = clock

    def assess(
        self, branch_name: str, run: DagsterRun, *, all_steps_succeeded: bool = False
    ) -> Outcome | AssessedRun:
        """The verdict on an ended run and its branch `branch_name`, or the outcome where there is none to be found.

        `all_steps_succeeded`: the run has not, and says of itself that all its steps have succeeded.
        """
        start_time = self._clock()
        try:
            # Dagster copies tags: a retry that opened no branch has its parent's verdict among its own.
            if is_opened_by(run.tags, run.run_id) and is_judged(run.tags, branch_name):
                branch = self._client.reference(branch_name)
                if not self._is_publication_lost(run, branch):
                    return self._finish_judged(run, branch)
            base_hash = find_recorded_base(run.tags, branch_name) or self._find_common_ancestor(branch_name)
            if base_hash is None:
                return Outcome(
                    branch_name, run.run_id, PublicationAction.TRY_AGAIN, "its base hash is unknown"
                )
            # The head is read only here, when the run is known to have ended: a listing may be older than its
            # last write, and half a run was published once.
            diff = self._client.diff_at(f"@{base_hash}", branch_name)
        except ReferenceNotFound:
            if self._client.has_reference(branch_name):
                raise  # it is the base that is gone
            return Outcome(branch_name, run.run_id, PublicationAction.WAITING, "another publisher was faster")
        branch, changes = diff.to_reference, diff.entries
        if run.is_success or all_steps_succeeded:
            head, was_claimed = claim_branch(self._client, branch)
            if head != branch.hash:
                branch = replace(branch, hash=head)
                changes = load_write_set(self._client, base_hash, branch)
        else:
            was_claimed = is_claimed(self._client, branch_name)
        # A publisher that has claimed it may have published it and died, inside the run too.
        already_published = (
            self._find_publication(branch_name, base_hash, branch.hash) if was_claimed else None
        )
        assessed = self._judge(
            run, branch, base_hash, changes, all_steps_succeeded, already_published, start_time
        )
        return replace(assessed, was_claimed=was_claimed)

    def _is_publication_lost(self, run: DagsterRun, branch: Reference) -> bool:
        """Whether Dagster calls the run published and `main` does not hold the publication.

        Nessie was restored from an older copy, or lost its last commits in a power cut, or `main` was set
        back. The branch is then the only place that holds the run's rows.
        """
        publication = find_publication(run.tags, branch.name)
        return publication is not None and not self._is_on_main(publication)

    def _finish_judged(self, run: DagsterRun, branch: Reference) -> Outcome:
        """A branch whose verdict was told already: only its deletion was missed, or it is kept."""
        if publication := find_publication(run.tags, branch.name):
            end_branch_and_claim(self._client, branch, keep_data=True)
            return Outcome(
                branch.name, run.run_id, PublicationAction.PUBLISHED, "told before", None, publication
            )
        if run.tags.get(RunTag.STATUS) in FAILING_STATUSES:
            # It was told so from inside the run, which could not hear it any more and ended well.
            fail_unpublished_run(self._instance, run.run_id, run.tags.get(RunTag.REASON, ""))
        if hours := find_keep_failed_hours(run.tags, run.run_id, self._settings):
            detail = f"not published, kept for debugging for {hours:g} h after its end"
            return Outcome(branch.name, run.run_id, PublicationAction.KEPT, detail)
        end_branch_and_claim(self._client, branch, keep_data=False)
        return Outcome(branch.name, run.run_id, PublicationAction.DISCARDED, "its verdict was told before")

    def _find_common_ancestor(self, branch_name: str) -> str | None:
        metadata = self._client.reference(branch_name, fetch_metadata=True).metadata
        return metadata.common_ancestor_hash if metadata else None

    def _judge(
        self,
        run: DagsterRun,
        branch: Reference,
        base_hash: str,
        changes: tuple[DiffEntry, ...],
        all_steps_succeeded: bool,
        already_published: Published | None,
        start_time: float,
    ) -> AssessedRun:
        tables = changed_tables(changes)
        runs = load_runs_on_branch(self._instance, branch.name) if run.parent_run_id else (run,)
        evidence = collect_evidence(
            self._instance,
            runs or (run,),
            self._graph,
            write_set=frozenset(tables),
            default_namespace=self._settings.default_namespace,
            require_checks=self._settings.require_checks,
        )
        if all_steps_succeeded or already_published:
            evidence = replace(evidence, succeeded=True)
        if evidence.succeeded and not already_published:
            changed_columns = self._find_changed_columns(changes, evidence.frozen_tables)
            evidence = replace(evidence, changed_columns=changed_columns)
        verdict = judge_evidence(evidence, strict_tables=self._settings.require_checks)
        reason, action, candidate = None, PublicationAction.PUBLISHED, None
        objection = None
        if evidence.succeeded and not already_published:
            objection = self._find_objection(branch, base_hash, changes, evidence, runs or (run,))
        if not evidence.succeeded:
            reason, action = f"the run ended as {run.status.value.lower()}", PublicationAction.DISCARDED
        elif objection:
            reason, action = objection, PublicationAction.REFUSED
        elif verdict.blocked:
            action = PublicationAction.BLOCKED
        elif not tables:
            reason, action = NO_TABLE_CHANGED, PublicationAction.DISCARDED
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
                fully_checked_tables=frozenset(map(ContentKey.from_path, evidence.fully_checked_tables)),
                leases=evidence.leases,
            )
        if already_published:
            reason, action = None, PublicationAction.PUBLISHED
        return AssessedRun(
            run,
            branch,
            evidence,
            verdict,
            candidate,
            reason,
            action,
            start_time,
            already_published,
            base_hash,
        )

    def _find_changed_columns(
        self, changes: Sequence[DiffEntry], frozen_tables: frozenset[str]
    ) -> dict[str, tuple[str, ...]]:
        """The columns that a run changed, by table. Reads two files for each frozen table that it wrote."""
        changed_columns: dict[str, tuple[str, ...]] = {}
        for entry in changes:
            before, after = entry.from_content, entry.to_content
            if entry.key.name not in frozen_tables or not isinstance(before, IcebergTable):
                continue
            if isinstance(after, IcebergTable) and (columns := self._differing_columns(before, after)):
                changed_columns[entry.key.name] = columns
        return changed_columns

    def _differing_columns(self, before: IcebergTable, after: IcebergTable) -> tuple[str, ...]:
        columns: list[dict[str, str]] = []
        for table in (before, after):
            metadata = self._read_metadata(table.metadata_location)
            if metadata is None:  # the publisher names the missing file
                return ()
            columns.append({field.name: str(field.field_type) for field in metadata.schema().fields})
        old, new = columns
        return tuple(name for name in dict.fromkeys([*new, *old]) if old.get(name) != new.get(name))

    def _find_objection(
        self,
        branch: Reference,
        base_hash: str,
        changes: tuple[DiffEntry, ...],
        evidence: RunEvidence,
        runs: Sequence[DagsterRun],
    ) -> str | None:
        """Why the branch is not exactly what its runs wrote; None if it is. Costs one request to Nessie."""
        entries: list[LogEntry] = []
        if branch.hash != base_hash:
            try:
                entries += self._client.log(branch.pinned_ref, since=base_hash, fetch_operations=True)
            except ReferenceNotFound:
                if not self._client.has_reference(branch.name):
                    raise
                return f"branch {branch.name} no longer starts from commit {base_hash[:16]}, the run's base"
        base_tables = (
            entry.from_content for entry in changes if isinstance(entry.from_content, IcebergTable)
        )
        commits = BranchCommits(
            branch.name,
            base_hash,
            {table.content_id or "": table.snapshot_id for table in base_tables},
            entries,
            evidence.branch_heads,
            {run.run_id for run in runs},
        )
        return commits.find_objection(self._read_metadata)
