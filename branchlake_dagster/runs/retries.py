"""Retry runs and steps: continue a parent's branch, and remove the rows of earlier attempts of a step.

A retry of a run takes over its parent's branch. A step that is attempted again must not repeat the rows that
its code wrote, by SQL in the run's Spark session or through the catalog. Such commits name the step, and a
later attempt restores the tables to their state before the first of these commits. Spark's deletes of whole
files and its changes of tables name no step; the events of the runs show which step made them
(`session_uses`). The IO manager handles the rows that a step returns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from dagster import AssetKey, DagsterEventType, DagsterInstance, DagsterRun
from pyiceberg.table.snapshots import Snapshot

from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import (
    Content,
    ContentKey,
    Delete,
    IcebergTable,
    LogEntry,
    Namespace,
    Operation,
    Put,
    Reference,
)
from branchlake_dagster.runs.branch_commits import (
    ReadMetadata,
    find_added_snapshots,
    find_committing_application,
    find_deleting_application,
    iter_put_tables,
    newest_metadata_locations,
)
from branchlake_dagster.runs.branch_owner import is_retry, iter_continuing_runs, load_runs_on_branch
from branchlake_dagster.runs.discarding import (
    is_claimed,
    iter_materializations,
    report_branch_end,
    take_over_branch,
)
from branchlake_dagster.runs.run_branch import run_branch_name, run_id_of_branch
from branchlake_dagster.runs.run_tags import (
    CONTINUED,
    RunLocation,
    find_publication,
    find_recorded_base,
    find_run_location,
    is_judged,
)
from branchlake_dagster.runs.session_uses import BranchTimeline, StepFinder
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.errors import RetryNeedsFullRun

_HINT = "Re-execute all steps; the new run will start from today's main."


def inherit_parent_branch(
    client: NessieClient, instance: DagsterInstance, run: DagsterRun
) -> RunLocation | None:
    """Take over the work of the run that `run` retries, under `run`'s own branch name.

    Returns None if there is nothing to take over. This is so if `run` is not a retry, or if the retried run
    used no table or wrote to `main` directly. Raises RetryNeedsFullRun if the work is gone, was published
    already, or is in use by another run.
    """
    if not is_retry(instance, run):
        return None
    location = _find_parent_location(client, instance, run)
    if location is None or location.unbranched:
        return None
    _refuse_active_run(instance, run, location.branch)
    # This check is second: it sees a run that was active in the first check and has taken over since.
    _refuse_second_retry(instance, run, location.branch)
    own_branch = run_branch_name(run.run_id)
    if take_over_branch(client, location.branch, own_branch) is None:
        raise RetryNeedsFullRun(
            "The branch of the run's parent is gone, and with it the outputs that a retry needs.",
            branch=location.branch,
            run_id=run.run_id,
            hint=_HINT,
        )
    report_branch_end(
        instance,
        run_id_of_branch(location.branch),
        location.branch,
        verdict=CONTINUED,
        reason=f"run {run.run_id} continues its work",
    )
    return RunLocation(own_branch, location.base_hash, continues=location.branch)


def _find_parent_location(
    client: NessieClient, instance: DagsterInstance, run: DagsterRun
) -> RunLocation | None:
    """Find the branch and base hash of the nearest earlier run in the chain of retries.

    The search goes from parent to parent and ends at a run that is not a retry. Returns None if none of these
    runs opened a branch. Raises RetryNeedsFullRun if a parent is unknown, was published, or waits for its
    verdict.
    """
    parent = instance.get_run_by_id(run.parent_run_id) if run.parent_run_id else None
    if parent is None:
        raise RetryNeedsFullRun("Dagster does not know the run's parent.", run_id=run.run_id, hint=_HINT)
    parent_branch = run_branch_name(parent.run_id)
    location = find_run_location(parent.tags, parent.run_id)
    if location is None and (base_hash := find_recorded_base(parent.tags, parent_branch)):
        location = RunLocation(parent_branch, base_hash)
    if location is None:
        return _find_parent_location(client, instance, parent) if is_retry(instance, parent) else None
    if publication := find_publication(parent.tags, location.branch):
        raise RetryNeedsFullRun(
            f"The run's parent was published as {publication[:12]}, so there is nothing to continue.",
            branch=location.branch,
            run_id=run.run_id,
            hint=_HINT,
        )
    has_verdict = location.unbranched or is_judged(parent.tags, location.branch)
    if not has_verdict and (parent.is_success or is_claimed(client, location.branch)):
        # Its rows may be on `main` already, or be published while the retry works on them.
        raise RetryNeedsFullRun(
            "The run's parent waits for its verdict, so its work cannot be continued yet.",
            branch=location.branch,
            run_id=run.run_id,
            hint="Retry when the parent has a verdict.",
        )
    return location


def _refuse_second_retry(instance: DagsterInstance, run: DagsterRun, branch: str) -> None:
    """Raise RetryNeedsFullRun if another retry has continued the work of `branch` already.

    The existence of the parent's tag proves nothing: a cleanup that overlaps with the first retry leaves the
    tag. The parent's rows were once published by two retries.
    """
    for _, other in iter_continuing_runs(instance, [branch]):
        if other.run_id != run.run_id:
            raise RetryNeedsFullRun(
                "Another retry has already continued the work of the run's parent.",
                branch=branch,
                run_id=run.run_id,
                hint=f"Retry run {other.run_id}, which continued it.",
            )


def _refuse_active_run(instance: DagsterInstance, run: DagsterRun, branch: str) -> None:
    """Raise RetryNeedsFullRun if a run that is older than `run` is active on the branch."""
    for other in load_runs_on_branch(instance, branch):
        if other.run_id == run.run_id:
            return
        if not other.is_finished:
            raise RetryNeedsFullRun(
                f"Run {other.run_id} is active on the branch of the run's parent.",
                branch=branch,
                run_id=run.run_id,
                hint="Retry when that run has ended.",
            )


@dataclass(frozen=True)
class EarlierSteps:
    """The steps of the runs on a branch that a running step repeats.

    `keys` are the keys of these steps, with that of the running step. `finished_assets` are the outputs of
    the step's function that they have materialized and that the running step does not write.
    """

    keys: frozenset[str]
    finished_assets: frozenset[AssetKey] = frozenset()


def load_earlier_steps(
    instance: DagsterInstance,
    branch: str,
    step: str,
    assets: Collection[AssetKey],
    other_assets: Collection[AssetKey],
) -> EarlierSteps:
    """Load which steps of the runs on a branch the step of a retry repeats.

    `assets` are the assets that the step writes, and `other_assets` the other outputs of its function. A
    retry of single assets repeats a step with `can_subset=True` for the assets that failed. The step's other
    assets keep the rows that the parent wrote. The parent's step may have another key: Dagster splits a step
    if an asset of another step lies between its assets, and the retry may not need the split. Tables that are
    not outputs of the function are not finished, also if its code has logged their materialization.

    Cost: a query to Dagster's event log per run, and another one if there are other outputs.
    """
    runs = load_runs_on_branch(instance, branch)
    keys = {step}.union(*(_load_planning_steps(instance, run.run_id, assets) for run in runs))
    finished_assets = {
        asset
        for run in (runs if other_assets else ())
        for asset, _, step_key in iter_materializations(instance, run.run_id)
        if step_key in keys and asset in other_assets
    }
    return EarlierSteps(frozenset(keys), frozenset(finished_assets))


def _load_planning_steps(instance: DagsterInstance, run_id: str, assets: Collection[AssetKey]) -> set[str]:
    """Load the keys of the steps in which a run intended to materialize one of `assets`."""
    if not assets:
        return set()
    logged = instance.all_logs(run_id, of_type=DagsterEventType.ASSET_MATERIALIZATION_PLANNED)
    return {
        entry.step_key
        for entry in logged
        if entry.step_key and entry.dagster_event is not None and entry.dagster_event.asset_key in assets
    }


class _CommitWriter(Enum):
    """The writer of a commit, from the point of view of one step."""

    OWN_CODE = auto()
    """The step's own code, in an earlier attempt."""
    IO_MANAGER = auto()
    """The IO manager, which wrote the value that an earlier attempt of the step returned."""
    OWN_CHANGE = auto()
    """The step's own code, which created, altered or dropped the table by Spark, or rolled it back."""
    NOBODY = auto()
    """The commit does not name a writer and adds no rows, and it is not certain which step made it."""
    OTHER = auto()
    UNCERTAIN = auto()
    """This step or another one: it deleted whole files in a Spark session that both could use."""


_POSSIBLY_OWN = (_CommitWriter.OWN_CODE, _CommitWriter.OWN_CHANGE, _CommitWriter.UNCERTAIN)


@dataclass
class _TableHistory:
    """The history of one table since the first commit of the step's own code.

    `content_before` is the table's content before that commit. `writers` are those of all commits to the
    table since then. A content is None if the table does not exist.
    """

    content_before: Content | None
    content_now: Content | None = None
    writers: set[_CommitWriter] = field(default_factory=set)

    @property
    def must_stay(self) -> bool:
        """Whether the table stays as it is: the step has only changed it, and others wrote to it since."""
        return _CommitWriter.OTHER in self.writers and self.writers.isdisjoint(
            (_CommitWriter.OWN_CODE, _CommitWriter.UNCERTAIN)
        )


def undo_earlier_attempts(
    client: NessieClient,
    branch: str,
    base_hash: str,
    step: str,
    read_metadata: ReadMetadata,
    properties: Mapping[str, str],
    finished_tables: Collection[str] = (),
    earlier_keys: Collection[str] = (),
    load_timeline: Callable[[], BranchTimeline] | None = None,
) -> tuple[str, ...]:
    """Restore the tables that the code of earlier attempts of `step` wrote, and return their names.

    Atomic: all tables change in one commit on the run's branch, with these `properties`. Call it at the first
    access to the lake by a step that was attempted before. `finished_tables` are the dotted names of tables
    that an earlier attempt has finished and that this attempt does not write; they stay as they are.
    `earlier_keys` are the keys that the step had in the runs on the branch. They may include `step`.
    `load_timeline` loads which steps could use Spark sessions; None if that is not known.

    Cost: three requests, and a fourth to restore tables. In addition, one metadata file is read for each
    table of each commit since the base without the property `CODE_OF_STEP`. The timeline is loaded only if
    Spark has deleted whole files, or created, altered or dropped something.

    Raises:
        RetryNeedsFullRun: Another step has written to one of the tables since, or it is not certain which
            step deleted files. Nothing was changed.
        NessieConflict: Another writer committed to one of the tables at the same time. Nothing was changed.
    """
    head = client.reference(branch)
    entries = list(client.log(head.pinned_ref, since=base_hash, fetch_operations=True))
    keys = {operation.key for entry in entries for operation in entry.operations}
    base_contents = client.contents(f"@{base_hash}", sorted(keys)) if keys else {}
    step_keys = frozenset({step, *earlier_keys})
    unnamed = _UnnamedCommits(step_keys, base_hash, entries, load_timeline)
    all_histories = _find_own_tables(entries[::-1], dict(base_contents), step_keys, read_metadata, unnamed)
    histories = {
        key: history
        for key, history in all_histories.items()
        if key.name not in finished_tables and not history.must_stay
    }
    for key, history in histories.items():
        if _CommitWriter.UNCERTAIN in history.writers:
            raise RetryNeedsFullRun(
                f"Spark has deleted files of the table. It is not certain whether an earlier attempt of step"
                f" {step} or another step did that.",
                table=key.name,
                branch=branch,
                hint="Re-execute all steps; the new run starts from today's main.",
            )
        if _CommitWriter.OTHER in history.writers:
            raise RetryNeedsFullRun(
                f"An earlier attempt of step {step} wrote to the table, and another step has written to"
                " it since.",
                table=key.name,
                branch=branch,
                hint="Re-execute all steps; the new run starts from today's main.",
            )
    deleted_ids = {
        history.content_now.content_id
        for history in histories.values()
        if history.content_before is None and history.content_now is not None
    }
    dropped = [key for key in sorted(histories) if histories[key].content_now is None]
    operations: list[Operation] = [*_list_missing_namespaces(client, head, base_hash, dropped)]
    operations += [_restore_operation(key, histories[key], deleted_ids) for key in sorted(histories)]
    if operations:
        client.commit(
            branch,
            expected_hash=head.hash,
            operations=operations,
            message=f"Take out what an earlier attempt of step {step} wrote",
            properties=properties,
        )
    return tuple(key.name for key in sorted(histories))


def _list_missing_namespaces(
    client: NessieClient, head: Reference, base_hash: str, keys: Sequence[ContentKey]
) -> list[Put]:
    """List the operations that create the namespaces of `keys` which the branch no longer has.

    Costs a request if there are keys, and another one if namespaces are missing.
    """
    parents = sorted(
        {ContentKey(key.elements[:length]) for key in keys for length in range(1, len(key.elements))}
    )
    present = client.contents(head.pinned_ref, parents) if parents else {}
    missing = [parent for parent in parents if parent not in present]
    earlier = client.contents(f"@{base_hash}", missing) if missing else {}
    namespaces = (
        content if isinstance(content := earlier.get(parent), Namespace) else Namespace(None, parent.elements)
        for parent in missing
    )
    return [
        Put(parent, replace(namespace, content_id=None))
        for parent, namespace in zip(missing, namespaces, strict=True)
    ]


class _UnnamedCommits:
    """Finds the writers of Spark's commits that name no step: deletes of whole files, and changes of tables.

    `step_keys` are the keys of the repeated step. `entries` are the commits of the branch since `base_hash`,
    newest first. `load_timeline` is called once, at the first such commit.
    """

    def __init__(
        self,
        step_keys: frozenset[str],
        base_hash: str,
        entries: Sequence[LogEntry],
        load_timeline: Callable[[], BranchTimeline] | None,
    ) -> None:
        self._step_keys = step_keys
        self._numbers = {base_hash: 0} | {
            entry.commit.hash: number for number, entry in enumerate(reversed(entries), 1)
        }
        self._load_timeline = load_timeline
        self._step_finder: StepFinder | None = None

    def find_writer(self, application: str, commit_hash: str) -> _CommitWriter:
        """Return the writer of a commit by a Spark application."""
        if self._step_finder is None:
            timeline = self._load_timeline() if self._load_timeline is not None else BranchTimeline()
            self._step_finder = StepFinder(timeline, self._numbers)
        steps = self._step_finder.find_possible_steps(application, self._numbers[commit_hash])
        if steps and steps <= self._step_keys:
            return _CommitWriter.OWN_CODE
        # No step: the code may have kept a session that an earlier step had opened.
        is_uncertain = not steps or None in steps or not steps.isdisjoint(self._step_keys)
        return _CommitWriter.UNCERTAIN if is_uncertain else _CommitWriter.OTHER

    def find_writer_of_change(self, entry: LogEntry) -> _CommitWriter:
        """Return the writer of a commit that adds no snapshot: CREATE, DROP, ALTER or a rollback.

        If it is not certain, the result is `NOBODY`: such a commit has always stayed.
        """
        application = find_committing_application(entry)
        if application is None:
            return _CommitWriter.NOBODY
        writer = self.find_writer(application, entry.commit.hash)
        return {
            _CommitWriter.OWN_CODE: _CommitWriter.OWN_CHANGE,
            _CommitWriter.UNCERTAIN: _CommitWriter.NOBODY,
        }.get(writer, writer)


def _find_own_tables(
    oldest_first: Sequence[LogEntry],
    contents: dict[ContentKey, Content],
    step_keys: frozenset[str],
    read_metadata: ReadMetadata,
    unnamed: _UnnamedCommits,
) -> dict[ContentKey, _TableHistory]:
    """Find the tables that the step's own code changed and whose present content differs from before.

    `contents` are the contents of all changed keys at the base; they are changed in place. A table that the
    step may have changed counts too.
    """
    snapshots = {
        table.content_id or "": table.snapshot_id
        for table in contents.values()
        if isinstance(table, IcebergTable)
    }
    metadata_locations = newest_metadata_locations(reversed(oldest_first))
    histories: dict[ContentKey, _TableHistory] = {}
    for entry in oldest_first:
        for operation in entry.operations:
            key = operation.key
            if not isinstance(operation, Put | Delete):
                continue
            writer = _writer_of_operation(
                entry, operation, step_keys, snapshots, read_metadata, metadata_locations, unnamed
            )
            is_possibly_own = writer in _POSSIBLY_OWN
            if is_possibly_own and _is_table_operation(operation, contents.get(key)):
                histories.setdefault(key, _TableHistory(contents.get(key)))
            if key in histories:
                histories[key].writers.add(writer)
                histories[key].content_now = operation.content if isinstance(operation, Put) else None
                if _is_same_state(histories[key].content_now, histories[key].content_before):
                    del histories[key]  # an earlier attempt has removed its rows already
            if isinstance(operation, Put):
                contents[key] = operation.content
            else:
                contents.pop(key, None)
        snapshots |= {table.content_id or "": table.snapshot_id for _, table in iter_put_tables(entry)}
    return histories


def _is_table_operation(operation: Put | Delete, content_before: Content | None) -> bool:
    """Return whether the operation puts or deletes a table.

    Changes of namespaces are not undone, because other steps may use them.
    """
    return isinstance(operation.content if isinstance(operation, Put) else content_before, IcebergTable)


def _writer_of_operation(
    entry: LogEntry,
    operation: Put | Delete,
    step_keys: frozenset[str],
    snapshots: dict[str, int],
    read_metadata: ReadMetadata,
    metadata_locations: Mapping[str, str],
    unnamed: _UnnamedCommits,
) -> _CommitWriter:
    properties = entry.commit.properties
    if LakeProperty.CODE_OF_STEP in properties:
        is_own = properties[LakeProperty.CODE_OF_STEP] in step_keys
        return _CommitWriter.OWN_CODE if is_own else _CommitWriter.OTHER
    content = operation.content if isinstance(operation, Put) else None
    new_snapshots: Sequence[Snapshot] | None = ()
    if isinstance(content, IcebergTable):
        new_snapshots = find_added_snapshots(content, snapshots, read_metadata, metadata_locations)
    if new_snapshots is None:
        return _CommitWriter.OTHER  # the writer can no longer be found
    if not new_snapshots:
        return unnamed.find_writer_of_change(entry)
    writers = {
        unnamed.find_writer(application, entry.commit.hash)
        if (application := find_deleting_application(snapshot)) is not None
        else _writer_of_snapshot(
            snapshot.summary.additional_properties if snapshot.summary else {}, step_keys
        )
        for snapshot in new_snapshots
    }
    return next(
        writer
        for writer in (
            _CommitWriter.UNCERTAIN,
            _CommitWriter.OTHER,
            _CommitWriter.OWN_CODE,
            _CommitWriter.IO_MANAGER,
        )
        if writer in writers
    )


def _writer_of_snapshot(summary: Mapping[str, str], step_keys: frozenset[str]) -> _CommitWriter:
    if LakeProperty.STEP in summary:
        is_own = summary[LakeProperty.STEP] in step_keys
        return _CommitWriter.IO_MANAGER if is_own else _CommitWriter.OTHER
    is_own = summary.get(LakeProperty.CODE_OF_STEP) in step_keys
    return _CommitWriter.OWN_CODE if is_own else _CommitWriter.OTHER


def _is_same_state(content: Content | None, other: Content | None) -> bool:
    """Return whether two contents of a key show the same table. A table that was restored has a new id."""
    if content is None or other is None:
        return content is other
    return replace(content, content_id=other.content_id) == other


def _restore_operation(
    key: ContentKey, history: _TableHistory, deleted_ids: Collection[str | None]
) -> Operation:
    """Return the operation that restores a table. `deleted_ids` are content ids that the same commit deletes.

    Nessie accepts the id that the key has now. A key without content gets a new id, except for a table that
    is renamed back.
    """
    before, now = history.content_before, history.content_now
    if before is None:
        return Delete(key)
    if now is not None:
        return Put(key, replace(before, content_id=now.content_id))
    return Put(key, before if before.content_id in deleted_ids else replace(before, content_id=None))
