"""The assessment of one run branch: whether its run has ended, and whether the branch may be published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dagster import DagsterInstance, DagsterRun

from branchlake_dagster.history.capture import ReadMetadata
from branchlake_dagster.internals.dagster import AssetGraph
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.nessie.model import ContentKey, DiffEntry, IcebergTable, LogEntry, Reference
from branchlake_dagster.publication.branch_commits import BranchCommits
from branchlake_dagster.publication.evidence import RunEvidence, collect_evidence
from branchlake_dagster.publication.ledger import Candidate, Published, changed_tables, load_write_set
from branchlake_dagster.publication.outcome import Outcome, PublicationAction
from branchlake_dagster.publication.verdict import Verdict, judge_evidence
from branchlake_dagster.runs.branch_owner import load_runs_on_branch
from branchlake_dagster.runs.discarding import (
    FAILING_STATUSES,
    claim_branch,
    end_branch_and_claim,
    fail_unpublished_run,
    is_claimed,
)
from branchlake_dagster.runs.run_tags import (
    find_keep_failed_hours,
    find_publication,
    find_recorded_base,
    is_judged,
    is_opened_by,
)
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag

NO_TABLE_CHANGED = "the run did not change any table"
"""The reason for discarding the branch of a successful run without changes."""


@dataclass(frozen=True)
class AssessedRun:
    """A finished run with the gate's decision. `branch` is at the hash that was judged.

    `reason` says why the run is not published; None if the verdict explains it or the run may be published.
    `start_time` is in seconds of the assessor's clock.
    """

    run: DagsterRun
    branch: Reference
    evidence: RunEvidence
    verdict: Verdict
    candidate: Candidate | None
    reason: str | None
    action: PublicationAction
    start_time: float
    already_published: Published | None = None
    """The publication that `main` already holds, if an earlier publisher stopped before it reported it."""
    base_hash: str = ""
    was_claimed: bool = False
    """Whether a publisher had claimed the branch before."""


class Assessor:
    """Reads a run branch and its run, and applies the rules of the gate.

    `find_publication(branch, base_hash, head_hash)` searches `main` for the publication of a branch.
    `read_metadata` reads a table metadata file and returns None if the file does not exist. `is_on_main`
    returns whether `main`'s history contains a commit. The other arguments are those of the `Reconciler`.
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
        """Return the assessed run, or an outcome if the branch needs no verdict in this pass.

        An outcome is returned if the run was judged before, if its base is unknown, or if another publisher
        has finished the branch. Set `all_steps_succeeded` when the run itself calls this at its end: Dagster
        does not show it as finished yet, but all its steps have succeeded. The branch of a successful run is
        claimed first.
        """
        start_time = self._clock()
        try:
            # Dagster copies tags to a retry: one that opened no branch still has the verdict of its parent.
            if is_opened_by(run.tags, run.run_id) and is_judged(run.tags, branch_name):
                branch = self._client.reference(branch_name)
                if not self._is_publication_lost(run, branch):
                    return self._finish_judged(run, branch)
            base_hash = find_recorded_base(run.tags, branch_name) or self._find_common_ancestor(branch_name)
            if base_hash is None:
                return Outcome(
                    branch_name, run.run_id, PublicationAction.TRY_AGAIN, "the branch's base hash is unknown"
                )
            # Read the head only now, because the run has ended. A listing of branches can be older than the
            # run's last write; half a run was published once for that reason.
            diff = self._client.diff_at(f"@{base_hash}", branch_name)
        except ReferenceNotFound:
            if self._client.has_reference(branch_name):
                raise  # the base commit does not exist any more
            return Outcome(branch_name, run.run_id, PublicationAction.WAITING, "another publisher was faster")
        branch, changes = diff.to_reference, diff.entries
        if run.is_success or all_steps_succeeded:
            head, was_claimed = claim_branch(self._client, branch)
            if head != branch.hash:
                branch = replace(branch, hash=head)
                changes = load_write_set(self._client, base_hash, branch)
        else:
            was_claimed = is_claimed(self._client, branch_name)
        # A publisher that claimed the branch, also one inside the run, may have stopped after publishing it.
        already_published = (
            self._find_publication(branch_name, base_hash, branch.hash) if was_claimed else None
        )
        assessed = self._judge(
            run, branch, base_hash, changes, all_steps_succeeded, already_published, start_time
        )
        return replace(assessed, was_claimed=was_claimed)

    def _is_publication_lost(self, run: DagsterRun, branch: Reference) -> bool:
        """Return whether Dagster shows the run as published while `main` does not hold the publication.

        This happens if Nessie was restored from an older copy, lost its last commits in a power cut, or if
        `main` was set back. Then only the branch holds the run's rows.
        """
        publication = find_publication(run.tags, branch.name)
        return publication is not None and not self._is_on_main(publication)

    def _finish_judged(self, run: DagsterRun, branch: Reference) -> Outcome:
        """Finish a branch whose verdict was already reported.

        It still exists because its deletion was interrupted, or because it is kept for debugging.
        """
        if publication := find_publication(run.tags, branch.name):
            end_branch_and_claim(self._client, branch, keep_data=True)
            return Outcome(
                branch.name, run.run_id, PublicationAction.PUBLISHED, "reported before", None, publication
            )
        if run.tags.get(RunTag.STATUS) in FAILING_STATUSES:
            # The refusal was reported from inside the run, too late to fail it: the run ended as a success.
            fail_unpublished_run(self._instance, run.run_id, run.tags.get(RunTag.REASON, ""))
        if hours := find_keep_failed_hours(run.tags, run.run_id, self._settings):
            detail = f"not published, kept for debugging for {hours:g} h after its end"
            return Outcome(branch.name, run.run_id, PublicationAction.KEPT, detail)
        end_branch_and_claim(self._client, branch, keep_data=False)
        return Outcome(
            branch.name, run.run_id, PublicationAction.DISCARDED, "its verdict was reported before"
        )

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
        """Return the columns that a run changed, by table. Reads two metadata files per frozen table."""
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
            if metadata is None:  # the publisher reports the missing file
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
        """Return why the branch is not exactly what its runs wrote; None if it is.

        Costs one request to Nessie, and reads of metadata files only for commits by Spark.
        """
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
