"""Assesses the branch of an ended run: collects evidence from Dagster, and applies the gate.

`collect_evidence` reads the facts about runs. `Assessor` decides whether a branch may be published.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from dagster import (
    AssetCheckSeverity,
    AssetKey,
    AssetMaterialization,
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    EventLogRecord,
    MetadataValue,
)

from branchlake_dagster.internals.dagster import AssetGraph
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.nessie.model import ContentKey, DiffEntry, IcebergTable, LogEntry, Reference
from branchlake_dagster.publication.checked_tables import CheckedTables
from branchlake_dagster.publication.late_attempts import find_late_attempts
from branchlake_dagster.publication.ledger import Candidate, Published, changed_tables, load_write_set
from branchlake_dagster.publication.outcome import Outcome
from branchlake_dagster.publication.verdict import (
    AssetRules,
    CheckedRows,
    CheckEvaluation,
    RunEvidence,
    Verdict,
    WrittenPartition,
    judge_evidence,
    waive_unwritten_checks,
)
from branchlake_dagster.runs.branch_commits import (
    BranchCommits,
    ReadMetadata,
    iter_unchanged_contents,
)
from branchlake_dagster.runs.branch_owner import load_runs_on_branch
from branchlake_dagster.runs.discarding import (
    FAILING_STATUSES,
    claim_branch,
    end_branch_and_claim,
    fail_unpublished_run,
    is_claimed,
)
from branchlake_dagster.runs.run_events import (
    STEP_ENDS,
    EventPosition,
    RecordedHead,
    StepOfRun,
    event_metadata,
    find_recorded_head,
    iter_positioned_events,
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
from branchlake_dagster.stored_names import AssetMetadata, EventMetadata, RunTag
from branchlake_dagster.tables.specification import (
    find_table_name,
    parse_exclusive_name,
    unwrap_metadata,
)

_STEP_STARTS = {DagsterEventType.STEP_START, DagsterEventType.STEP_RESTARTED}
_EVENT_TYPES = {
    DagsterEventType.ASSET_CHECK_EVALUATION_PLANNED,
    DagsterEventType.ASSET_CHECK_EVALUATION,
    DagsterEventType.ASSET_MATERIALIZATION,
    DagsterEventType.ASSET_MATERIALIZATION_PLANNED,
    DagsterEventType.LOADED_INPUT,
    DagsterEventType.ENGINE_EVENT,
    DagsterEventType.STEP_SKIPPED,
    *_STEP_STARTS,
    *STEP_ENDS,
}


def collect_evidence(
    instance: DagsterInstance,
    runs: Sequence[DagsterRun],
    graph: AssetGraph,
    *,
    write_set: frozenset[str] | None,
    default_namespace: str,
    require_checks: bool,
) -> RunEvidence:
    """Read the check, materialization and input events of the runs that worked on one branch.

    `runs` are in order, oldest first, and not empty. A later event of the same check or partition replaces an
    earlier one. The evidence counts as succeeded if the last run has succeeded. `write_set` has the dotted
    names of the tables that the branch changed. If it is None, they are unknown: every materialized asset
    may have changed its table. `require_checks` is the default for assets that do not
    declare it. Costs one query to Dagster's event log per run and 1,000 events.
    """
    planned_checks: dict[CheckedRows, StepOfRun] = {}
    planned_assets: set[tuple[str, StepOfRun]] = set()
    skipped_steps: set[StepOfRun] = set()
    succeeded_steps: set[StepOfRun] = set()
    evaluations: dict[CheckedRows, CheckEvaluation] = {}
    written_partitions: dict[tuple[str, str | None], WrittenPartition] = {}
    loaded_tables: set[tuple[str | None, str]] = set()
    read_tables: set[str] = set()
    unnamed_reads: set[str] = set()
    heads: list[RecordedHead] = []
    applications: set[str] = set()
    attempts: Counter[tuple[str, str | None]] = Counter()
    step_starts: dict[tuple[str, str | None], EventPosition] = {}
    step_ends: dict[StepOfRun, EventPosition] = {}
    for position, record in iter_positioned_events(instance, runs, _EVENT_TYPES):
        event = record.event_log_entry.dagster_event
        if event is None:
            continue
        step_key = record.event_log_entry.step_key
        step = StepOfRun(record.run_id, step_key or "")
        attempt = attempts[record.run_id, step_key]
        if (head := find_recorded_head(position, record)) is not None:
            heads.append(head)
        if event.event_type in _STEP_STARTS:
            step_starts[record.run_id, step_key] = position
        elif event.event_type in STEP_ENDS:
            step_ends[step] = position
            if event.event_type == DagsterEventType.STEP_SUCCESS:
                succeeded_steps.add(step)
            if event.event_type == DagsterEventType.STEP_UP_FOR_RETRY:
                attempts[record.run_id, step_key] += 1
        elif event.event_type == DagsterEventType.ASSET_CHECK_EVALUATION_PLANNED:
            planned_check = event.asset_check_planned_data
            check_name = (planned_check.asset_key.to_user_string(), planned_check.check_name)
            subset = planned_check.partitions_subset
            partitions = subset.get_partition_keys() if subset else [None]
            planned_checks |= {(check_name, partition): step for partition in partitions}
        elif event.event_type == DagsterEventType.ASSET_MATERIALIZATION_PLANNED:
            if event.asset_key is not None:
                planned_assets.add((event.asset_key.to_user_string(), step))
        elif event.event_type == DagsterEventType.STEP_SKIPPED:
            skipped_steps.add(step)
        elif event.event_type == DagsterEventType.ASSET_CHECK_EVALUATION:
            result = event.asset_check_evaluation_data
            check_name = (result.asset_key.to_user_string(), result.check_name)
            evaluations[check_name, result.partition] = CheckEvaluation(
                passed=result.passed,
                is_blocking=result.severity == AssetCheckSeverity.ERROR,
                position=position,
                step_key=step_key,
                description=result.description or "",
                failing_rows=_get_int(result.metadata, "failing_rows"),
                attempt=attempt,
                table=find_table_name(result.asset_key, default_namespace),
                step_start=step_starts.get((record.run_id, step_key)),
                run_id=record.run_id,
            )
        elif event.event_type == DagsterEventType.LOADED_INPUT:
            table = event_metadata(event).get(EventMetadata.TABLE)
            if table is not None:
                loaded_tables.add((step_key, str(table.value)))
        elif event.event_type == DagsterEventType.ENGINE_EVENT:
            read_tables |= _get_json_set(event, EventMetadata.READ_TABLES)
            unnamed_reads |= _get_json_set(event, EventMetadata.UNNAMED_READS)
            if application := event_metadata(event).get(EventMetadata.SPARK_APPLICATION):
                applications.add(str(application.value))
        else:
            materialization = event.step_materialization_data.materialization
            written_partitions[materialization.asset_key.to_user_string(), materialization.partition] = (
                _to_written_partition(position, record, materialization, attempt)
            )
    rules = {
        asset: _build_asset_rules(
            AssetKey.from_user_string(asset), graph, write_set, default_namespace, require_checks
        )
        for asset in {asset for asset, _ in written_partitions}
    }
    if write_set is not None:
        rules = waive_unwritten_checks(rules, write_set)
    last_run = runs[-1]
    skipped_checks = {
        rows
        for rows, step in planned_checks.items()
        if (step in skipped_steps or (step in succeeded_steps and (rows[0][0], step) in planned_assets))
        and write_set is not None
        and find_table_name(AssetKey.from_user_string(rows[0][0]), default_namespace) not in write_set
    }
    return RunEvidence(
        run_id=last_run.run_id,
        succeeded=last_run.is_success,
        planned_checks=frozenset(planned_checks),
        skipped_checks=frozenset(skipped_checks),
        evaluations=evaluations,
        written_partitions=written_partitions,
        rules=rules,
        write_set=write_set or frozenset(),
        loaded_tables=frozenset(loaded_tables),
        read_tables=frozenset(read_tables),
        unnamed_reads=frozenset(unnamed_reads),
        recorded_heads=tuple(heads),
        spark_applications=frozenset(applications),
        step_ends=step_ends,
        run_ids=tuple(run.run_id for run in runs),
        repeated_steps={
            StepOfRun(run_id, step_key): count for (run_id, step_key), count in attempts.items() if step_key
        },
    )


def _to_written_partition(
    position: EventPosition, record: EventLogRecord, materialization: AssetMaterialization, attempt: int
) -> WrittenPartition:
    mode, preview = (
        materialization.metadata.get(AssetMetadata.WRITE_MODE),
        materialization.metadata.get(EventMetadata.PREVIEW),
    )
    return WrittenPartition(
        position,
        record.event_log_entry.step_key,
        record.run_id,
        _get_int(materialization.metadata, EventMetadata.ROWS_ON_BRANCH),
        _get_int(materialization.metadata, EventMetadata.PARTITION_ROWS_ON_BRANCH),
        record.timestamp,
        mode is not None and mode.value == "replace_partitions",
        str(preview.value) if preview is not None else None,
        attempt,
    )


def _get_int(metadata: Mapping[str, MetadataValue[Any]], name: str) -> int | None:
    value = metadata.get(name)
    return value.value if value is not None and isinstance(value.value, int) else None


def _get_json_set(event: DagsterEvent, name: str) -> set[str]:
    """Return the strings of the JSON list `name` in an event's metadata; empty if the metadata lacks it."""
    value = event_metadata(event).get(name)
    return set() if value is None else set(json.loads(str(value.value)))


def _build_asset_rules(
    key: AssetKey,
    graph: AssetGraph,
    write_set: frozenset[str] | None,
    default_namespace: str,
    require_checks: bool,
) -> AssetRules:
    table = find_table_name(key, default_namespace)
    if not graph.has(key):
        # If its table changed, the asset was removed from the code after the run's launch, so its required
        # checks are not known. Otherwise the event is about something outside the lake, such as a dashboard.
        may_be_written = table is not None and (write_set is None or table in write_set)
        return AssetRules(table, frozenset(), demands_checks=may_be_written)
    node = graph.get(key)
    demands_checks = unwrap_metadata(node.metadata.get(AssetMetadata.REQUIRE_CHECKS, require_checks))
    return AssetRules(
        table,
        frozenset(check.name for check in node.check_keys),
        bool(demands_checks),
        {
            check.name: _table_names(graph.get(check).parent_entity_keys, default_namespace)
            for check in node.check_keys
            if covers_whole_table(graph.get(check))
        },
        unwrap_metadata(node.metadata.get(AssetMetadata.ISOLATION)) == "serializable",
        _table_names(node.parent_keys, default_namespace),
        parse_exclusive_name(node.metadata, key.to_user_string()),
        unwrap_metadata(node.metadata.get(AssetMetadata.COLUMNS)) == "freeze",
    )


def _table_names(keys: Iterable[AssetKey], default_namespace: str) -> frozenset[str]:
    """Return the dotted names of the assets' tables. Keys that cannot name a table are left out."""
    tables = (find_table_name(key, default_namespace) for key in keys)
    return frozenset(table for table in tables if table is not None)


def covers_whole_table(check: Any) -> bool:
    """Return whether a check covers all rows of its table.

    The check's metadata decides; without that metadata, a check without partitions covers all rows.
    """
    scope = unwrap_metadata((check.metadata or {}).get(AssetMetadata.CHECK_SCOPE))
    return scope == "table" if scope is not None else check.partitions_def is None


NO_TABLE_CHANGED = "the run did not change any table"
"""The reason for discarding the branch of a successful run without changes."""


@dataclass(frozen=True)
class AssessedRun:
    """A finished run with the gate's decision. `branch` is at the hash that was judged.

    `candidate` is what the publisher gets; None if the run may not be published. `reason` says why the run is
    not published; None if the verdict explains it or the run may be published. `state` is the state that the
    run will have if the publisher accepts the candidate. `start_time` is in seconds of the assessor's clock.
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

    def to_outcome(self, state: RunState, detail: str, **fields: Any) -> Outcome:
        """Return the outcome of this run in `state`, with its verdict.

        `detail` explains the state in one clause or sentence. `fields` are further fields of `Outcome`.
        """
        return Outcome(self.branch.name, self.run.run_id, state, detail, self.verdict, **fields)


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
        has finished the branch. A run that was published before is judged again if `main` has lost its
        publication. Set `all_steps_succeeded` when the run itself calls this at its end: Dagster does not
        show it as finished yet. The branch of a successful run is claimed before it is judged. Raises
        ReferenceNotFound if the branch exists but its base commit does not.
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

        It still exists because its deletion was interrupted, or because it is kept for debugging. In the
        second case it stays, and the outcome is KEPT; otherwise it is deleted now.
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
        objection = None
        if evidence.succeeded and not already_published:
            changed_columns = self._find_changed_columns(changes, evidence.frozen_tables)
            evidence = replace(evidence, changed_columns=changed_columns)
            commits = self._load_commits(branch, base_hash, changes, evidence, runs or (run,))
            if isinstance(commits, str):
                objection = commits
            else:
                read_metadata = cache(self._read_metadata)
                objection = commits.find_objection(read_metadata)
                if not objection:
                    evidence = _add_table_changes(evidence, commits, changes, read_metadata)
        verdict = judge_evidence(evidence, strict_tables=self._settings.require_checks)
        reason, state, candidate = None, RunState.PUBLISHED, None
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
        """Return the names of the columns that a run changed, by the dotted name of a frozen table.

        Tables with the same columns before and after are left out, as are new and dropped tables. Reads two
        metadata files per changed frozen table.
        """
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

    def _load_commits(
        self,
        branch: Reference,
        base_hash: str,
        changes: tuple[DiffEntry, ...],
        evidence: RunEvidence,
        runs: Sequence[DagsterRun],
    ) -> BranchCommits | str:
        """Load the commits of the branch. Returns the reason if it does not start from the base.

        Costs one request to Nessie. `changes` are the differences between the base and the branch. `runs` are
        the runs that worked on the branch.
        """
        entries: list[LogEntry] = []
        if branch.hash != base_hash:
            try:
                entries += self._client.log(branch.pinned_ref, since=base_hash, fetch_operations=True)
            except ReferenceNotFound:
                if not self._client.has_reference(branch.name):
                    raise
                return f"branch {branch.name} no longer starts from commit {base_hash[:16]}, the run's base"
        base_tables = [
            *(entry.from_content for entry in changes),
            *iter_unchanged_contents(entries, {entry.key for entry in changes}),
        ]
        return BranchCommits(
            branch.name,
            base_hash,
            {
                table.content_id or "": table.snapshot_id
                for table in base_tables
                if isinstance(table, IcebergTable)
            },
            entries,
            evidence.branch_heads,
            {run.run_id for run in runs},
            evidence.spark_applications,
        )


def _add_table_changes(
    evidence: RunEvidence,
    commits: BranchCommits,
    changes: Sequence[DiffEntry],
    read_metadata: ReadMetadata,
) -> RunEvidence:
    """Add to the evidence which commits changed the tables of checks, and which came late.

    `changes` are those of the branch.
    """
    base_contents = {entry.key: entry.from_content for entry in changes}
    tables = CheckedTables(evidence, commits, base_contents, read_metadata)
    return replace(
        evidence,
        code_writers=tables.find_code_writers(),
        later_changes=tables.find_later_changes(),
        late_attempts=find_late_attempts(
            evidence, {entry.key: entry.to_content for entry in changes}, read_metadata
        ),
    )
