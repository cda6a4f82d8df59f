"""Retries: a run that continues its parent's branch, and a step that removes rows of an earlier attempt.

A step that is attempted again does not repeat the rows that its own code wrote: they are taken out first.

Rows that a step returns are the IO manager's matter. This module is about what the step's code writes itself,
by SQL in the run's Spark session or through the catalog. Such commits name the step, and a later attempt puts
the tables back as they were before the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from dagster import DagsterInstance, DagsterRun

from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import (
    Content,
    ContentKey,
    Delete,
    IcebergTable,
    LogEntry,
    Operation,
    Put,
)
from branchlake_dagster.runs.added_snapshots import (
    ReadMetadata,
    find_added_snapshots,
    iter_put_tables,
    newest_metadata_locations,
)
from branchlake_dagster.runs.branch_owner import is_retry, iter_continuing_runs, load_runs_on_branch
from branchlake_dagster.runs.claims import is_claimed
from branchlake_dagster.runs.discarding import report_branch_end, take_over_branch
from branchlake_dagster.runs.run_branch import run_branch_name, run_id_of_branch
from branchlake_dagster.runs.run_tags import (
    CONTINUED,
    RunLocation,
    find_publication,
    find_recorded_base,
    find_run_location,
    is_judged,
)
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.errors import RetryNeedsFullRun

_HINT = "Re-execute all steps; the new run will start from today's main."


def inherit_parent_branch(
    client: NessieClient, instance: DagsterInstance, run: DagsterRun
) -> RunLocation | None:
    """Take over the work of the run that `run` retries, under `run`'s own branch name.

    None when there is nothing to take over: `run` is no retry, or what it retries touched no table or wrote
    to `main` directly. Raises RetryNeedsFullRun when the work is gone, was published already, or another
    run is at it.
    """
    if not is_retry(run):
        return None
    location = _find_parent_location(client, instance, run)
    if location is None or location.unbranched:
        return None
    _refuse_active_run(instance, run, location.branch)
    # Asked after the company: a run that was at work then and has taken over since is seen here.
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
    """Where the nearest ancestor worked that opened a branch, going up through retries only."""
    parent = instance.get_run_by_id(run.parent_run_id) if run.parent_run_id else None
    if parent is None:
        raise RetryNeedsFullRun("Dagster does not know the run's parent.", run_id=run.run_id, hint=_HINT)
    parent_branch = run_branch_name(parent.run_id)
    location = find_run_location(parent.tags, parent.run_id)
    if location is None and (base_hash := find_recorded_base(parent.tags, parent_branch)):
        location = RunLocation(parent_branch, base_hash)
    if location is None:
        return _find_parent_location(client, instance, parent) if is_retry(parent) else None
    if publication := find_publication(parent.tags, location.branch):
        raise RetryNeedsFullRun(
            f"The run's parent was published as {publication[:12]}, so there is nothing to continue.",
            branch=location.branch,
            run_id=run.run_id,
            hint=_HINT,
        )
    has_verdict = location.unbranched or is_judged(parent.tags, location.branch)
    if not has_verdict and (parent.is_success or is_claimed(client, location.branch)):
        # Its rows may be on `main` already, or come there while the retry works on them too.
        raise RetryNeedsFullRun(
            "The run's parent waits for its verdict, so its work is not free to be continued.",
            branch=location.branch,
            run_id=run.run_id,
            hint="Retry when its verdict is told.",
        )
    return location


def _refuse_second_retry(instance: DagsterInstance, run: DagsterRun, branch: str) -> None:
    """The work is continued once, whatever the references say.

    A clean-up that overlapped with the first retry leaves the parent's tag, and the parent's rows were once
    published by two retries.
    """
    for _, other in iter_continuing_runs(instance, [branch]):
        if other.run_id != run.run_id:
            raise RetryNeedsFullRun(
                "The work of the run's parent was continued by another retry.",
                branch=branch,
                run_id=run.run_id,
                hint=f"Run {other.run_id} continued it: retry that one.",
            )


def _refuse_active_run(instance: DagsterInstance, run: DagsterRun, branch: str) -> None:
    """Two runs must not take over one branch; the older one may."""
    for other in load_runs_on_branch(instance, branch):
        if other.run_id == run.run_id:
            return
        if not other.is_finished:
            raise RetryNeedsFullRun(
                f"Run {other.run_id} is at work on the branch of the run's parent.",
                branch=branch,
                run_id=run.run_id,
                hint="Wait for that run.",
            )


class _CommitWriter(Enum):
    """Who made a commit, as seen from one step."""

    OWN_CODE = auto()
    """The step's own code, in an earlier attempt."""
    IO_MANAGER = auto()
    """The IO manager, with the value of an earlier attempt of the step."""
    NOBODY = auto()
    """The commit does not name a writer and adds no rows, as Spark's CREATE TABLE."""
    OTHER = auto()


@dataclass
class _TableHistory:
    """The commits of one table since the first one of the step's own code, and its content before that."""

    content_before: Content | None
    content_now: Content | None = None
    writers: set[_CommitWriter] = field(default_factory=set)


def undo_earlier_attempts(
    client: NessieClient,
    branch: str,
    base_hash: str,
    step: str,
    read_metadata: ReadMetadata,
    properties: Mapping[str, str],
) -> tuple[str, ...]:
    """Put the tables that earlier attempts of `step` wrote by their own code back as they were; their names.

    All tables in one commit on the run's branch, with these `properties`. Costs three requests, and one file
    for each commit since the base that names no step. Called at the first access to the lake by a step that
    was attempted before.

    Raises:
        RetryNeedsFullRun: Another step wrote to one of the tables since. Nothing was changed then.
        NessieConflict: Somebody committed to one of the tables at the same time. Nothing was changed.
    """
    head = client.reference(branch)
    entries = list(client.log(head.pinned_ref, since=base_hash, fetch_operations=True))
    keys = {operation.key for entry in entries for operation in entry.operations}
    base_contents = client.contents(f"@{base_hash}", sorted(keys)) if keys else {}
    histories = _find_own_tables(entries[::-1], dict(base_contents), step, read_metadata)
    for key, history in histories.items():
        if _CommitWriter.OTHER in history.writers:
            raise RetryNeedsFullRun(
                f"An earlier attempt of step {step} wrote to the table, and another step wrote to it since.",
                table=key.name,
                branch=branch,
                hint="Re-execute all steps; the new run starts from today's main.",
            )
    operations = [_restore_operation(key, history) for key, history in sorted(histories.items())]
    if operations:
        client.commit(
            branch,
            expected_hash=head.hash,
            operations=operations,
            message=f"Take out what an earlier attempt of step {step} wrote",
            properties=properties,
        )
    return tuple(key.name for key in sorted(histories))


def _find_own_tables(
    oldest_first: Sequence[LogEntry],
    contents: dict[ContentKey, Content],
    step: str,
    read_metadata: ReadMetadata,
) -> dict[ContentKey, _TableHistory]:
    """The tables that the step's own code changed and that still differ; `contents` are those at the base."""
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
                entry, operation, step, snapshots, read_metadata, metadata_locations
            )
            if writer is _CommitWriter.OWN_CODE and _is_table_operation(operation, contents.get(key)):
                histories.setdefault(key, _TableHistory(contents.get(key)))
            if key in histories:
                histories[key].writers.add(writer)
                histories[key].content_now = operation.content if isinstance(operation, Put) else None
                if histories[key].content_now == histories[key].content_before:
                    del histories[key]  # an earlier attempt took its rows out
            if isinstance(operation, Put):
                contents[key] = operation.content
            else:
                contents.pop(key, None)
        snapshots |= {table.content_id or "": table.snapshot_id for _, table in iter_put_tables(entry)}
    return histories


def _is_table_operation(operation: Put | Delete, content_before: Content | None) -> bool:
    """Whether the operation is about a table: namespaces stay, another step may have put tables there."""
    return isinstance(operation.content if isinstance(operation, Put) else content_before, IcebergTable)


def _writer_of_operation(
    entry: LogEntry,
    operation: Put | Delete,
    step: str,
    snapshots: dict[str, int],
    read_metadata: ReadMetadata,
    metadata_locations: Mapping[str, str],
) -> _CommitWriter:
    properties = entry.commit.properties
    if LakeProperty.CODE_OF_STEP in properties:
        return (
            _CommitWriter.OWN_CODE if properties[LakeProperty.CODE_OF_STEP] == step else _CommitWriter.OTHER
        )
    content = operation.content if isinstance(operation, Put) else None
    if not isinstance(content, IcebergTable):
        return _CommitWriter.NOBODY
    new_snapshots = find_added_snapshots(content, snapshots, read_metadata, metadata_locations)
    if new_snapshots is None:
        return _CommitWriter.OTHER  # nobody can say any more
    writers = {
        _writer_of_snapshot(snapshot.summary.additional_properties if snapshot.summary else {}, step)
        for snapshot in new_snapshots
    }
    for writer in (_CommitWriter.OTHER, _CommitWriter.OWN_CODE, _CommitWriter.IO_MANAGER):
        if writer in writers:
            return writer
    return _CommitWriter.NOBODY


def _writer_of_snapshot(summary: Mapping[str, str], step: str) -> _CommitWriter:
    if LakeProperty.STEP in summary:
        return _CommitWriter.IO_MANAGER if summary[LakeProperty.STEP] == step else _CommitWriter.OTHER
    return _CommitWriter.OWN_CODE if summary.get(LakeProperty.CODE_OF_STEP) == step else _CommitWriter.OTHER


def _restore_operation(key: ContentKey, history: _TableHistory) -> Operation:
    return Delete(key) if history.content_before is None else Put(key, history.content_before)
