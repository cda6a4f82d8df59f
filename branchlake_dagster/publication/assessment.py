"""Assesses the branch of an ended run: collects evidence, applies the gate, and checks the branch's commits.

`Assessor` decides whether the branch may be published. `BranchCommits` compares the commits on the branch
with what the branch's runs wrote, and finds a commit that is foreign, missing or late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dagster import DagsterInstance, DagsterRun
from pyiceberg.table.snapshots import Operation, Snapshot

from branchlake_dagster.internals.dagster import AssetGraph
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.nessie.model import ContentKey, DiffEntry, IcebergTable, LogEntry, Reference
from branchlake_dagster.publication.evidence import RunEvidence, collect_evidence
from branchlake_dagster.publication.ledger import Candidate, Published, changed_tables, load_write_set
from branchlake_dagster.publication.outcome import Outcome
from branchlake_dagster.publication.verdict import Verdict, judge_evidence
from branchlake_dagster.runs.added_snapshots import (
    ReadMetadata,
    find_added_snapshots,
    iter_put_tables,
    newest_metadata_locations,
)
from branchlake_dagster.runs.branch_owner import load_runs_on_branch
from branchlake_dagster.runs.discarding import (
    FAILING_STATUSES,
    claim_branch,
    end_branch_and_claim,
    fail_unpublished_run,
    is_claimed,
)
from branchlake_dagster.runs.run_tags import (
    RunState,
    find_keep_failed_hours,
    find_publication,
    find_recorded_base,
    is_judged,
    is_opened_by,
)
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import LakeProperty, RunTag

_CLIENT_PROPERTY = "application-type"
"""The commit property of Iceberg's Java client, which cannot attach properties of its caller."""


@dataclass(frozen=True)
class BranchCommits:
    """The commits of a run's branch since its base, and the runs that may have made them.

    Args:
        branch (str): The branch's name.
        base_hash (str): The commit of `main` that the branch started from.
        base_snapshots (Mapping[str, int]): Snapshot ids of the changed tables at the base, by content id.
        entries (Sequence[LogEntry]): The commits after the base, newest first, with their operations.
        recorded_heads (Collection[str]): The hashes that the runs recorded after their writes.
        run_ids (Collection[str]): The runs that worked on the branch.
    """

    branch: str
    base_hash: str
    base_snapshots: Mapping[str, int]
    entries: Sequence[LogEntry]
    recorded_heads: Collection[str]
    run_ids: Collection[str]

    def find_objection(self, read_metadata: ReadMetadata) -> str | None:
        """Return why the branch is not exactly what its runs wrote, as a clause; None if it is.

        Three conditions must hold:

        1. The branch contains every recorded head. Otherwise it was set back, or Nessie was restored from an
           older copy.
        2. One of the runs made every commit: the commit's properties name the run or, for Spark, the
           summaries of the added snapshots do.
        3. The newest commit was recorded. No check has seen a later commit.

        `read_metadata` is called only for Spark commits that add a snapshot. A Spark commit without a
        snapshot, such as ALTER TABLE, does not name a run and is accepted.
        """
        hashes = {entry.commit.hash for entry in self.entries}
        if lost_heads := sorted(set(self.recorded_heads) - hashes - {self.base_hash}):
            return (
                f"branch {self.branch} no longer contains commit {lost_heads[0][:16]} that the run wrote:"
                " the branch was set back, or Nessie was restored from an older copy"
            )
        if (foreign_commit := self._find_foreign_commit(read_metadata)) is not None:
            return (
                f"{self._format_commit(foreign_commit)}, which the run did not make:"
                " another writer changed the branch"
            )
        if self.entries and self.entries[0].commit.hash not in self.recorded_heads:
            return f"{self._format_commit(self.entries[0])}, made after the last commit that the run recorded"
        return None

    def _find_foreign_commit(self, read_metadata: ReadMetadata) -> LogEntry | None:
        """Return the oldest commit that none of the runs made; None if there is none."""
        snapshots, newest = dict(self.base_snapshots), newest_metadata_locations(self.entries)
        for entry in reversed(self.entries):
            properties = entry.commit.properties
            if LakeProperty.RUN_ID in properties:
                is_own = properties[LakeProperty.RUN_ID] in self.run_ids
            else:
                snapshots_by_table = (
                    find_added_snapshots(table, snapshots, read_metadata, newest)
                    for _, table in iter_put_tables(entry)
                )
                is_own = properties.get(_CLIENT_PROPERTY) == "iceberg" and all(
                    new_snapshots is not None and all(map(self._is_own_snapshot, new_snapshots))
                    for new_snapshots in snapshots_by_table
                )
            if not is_own:
                return entry
            snapshots |= {table.content_id or "": table.snapshot_id for _, table in iter_put_tables(entry)}
        return None

    def _is_own_snapshot(self, snapshot: Snapshot) -> bool:
        """Return whether one of the runs made the snapshot, or the snapshot does not change rows.

        Spark's procedures, such as rewrite_data_files, ignore the session's snapshot properties.
        """
        summary = snapshot.summary
        if summary is None:
            return False
        return (
            summary.operation is Operation.REPLACE
            or summary.additional_properties.get(LakeProperty.RUN_ID) in self.run_ids
        )

    def _format_commit(self, entry: LogEntry) -> str:
        commit = entry.commit
        author = f" by {commit.author}" if commit.author else ""
        return f"branch {self.branch} contains commit {commit.hash[:16]}{author} ({commit.message})"


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
    state: RunState
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
                    branch_name, run.run_id, RunState.TRY_AGAIN, "the branch's base hash is unknown"
                )
            # Read the head only now, because the run has ended. A listing of branches can be older than the
            # run's last write; half a run was published once for that reason.
            diff = self._client.diff_at(f"@{base_hash}", branch_name)
        except ReferenceNotFound:
            if self._client.has_reference(branch_name):
                raise  # the base commit does not exist any more
            return Outcome(branch_name, run.run_id, RunState.WAITING, "another publisher was faster")
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
            return Outcome(branch.name, run.run_id, RunState.PUBLISHED, "reported before", None, publication)
        if run.tags.get(RunTag.STATUS) in FAILING_STATUSES:
            # The refusal was reported from inside the run, too late to fail it: the run ended as a success.
            fail_unpublished_run(self._instance, run.run_id, run.tags.get(RunTag.REASON, ""))
        if hours := find_keep_failed_hours(run.tags, run.run_id, self._settings):
            detail = f"not published, kept for debugging for {hours:g} h after its end"
            return Outcome(branch.name, run.run_id, RunState.KEPT, detail)
        end_branch_and_claim(self._client, branch, keep_data=False)
        return Outcome(branch.name, run.run_id, RunState.DISCARDED, "its verdict was reported before")

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
        reason, state, candidate = None, RunState.PUBLISHED, None
        objection = None
        if evidence.succeeded and not already_published:
            objection = self._find_objection(branch, base_hash, changes, evidence, runs or (run,))
        if not evidence.succeeded:
            reason, state = f"the run ended as {run.status.value.lower()}", RunState.DISCARDED
        elif objection:
            reason, state = objection, RunState.REFUSED
        elif verdict.blocked:
            state = RunState.BLOCKED
        elif not tables:
            reason, state = NO_TABLE_CHANGED, RunState.DISCARDED
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
            reason, state = None, RunState.PUBLISHED
        return AssessedRun(
            run,
            branch,
            evidence,
            verdict,
            candidate,
            reason,
            state,
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
