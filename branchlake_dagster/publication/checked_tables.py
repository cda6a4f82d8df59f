"""Finds the checks whose table changed on the run's branch after they had started to read it.

Commits are compared by what they did to the table, not only by the step that they name: Spark names no step
in DROP, ALTER and rollbacks. Each step records the branch's head when it ends, before Dagster starts the
steps that depend on it (`record_branch_heads`). So a check could read all commits up to the heads that were
recorded before its step started.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot

from branchlake_dagster.nessie.model import Content, ContentKey, Delete, IcebergTable, LogEntry, Put
from branchlake_dagster.publication.verdict import (
    CheckedRows,
    CheckEvaluation,
    RunEvidence,
)
from branchlake_dagster.runs.branch_commits import BranchCommits, ReadMetadata, find_added_snapshots
from branchlake_dagster.runs.run_events import EventPosition, RecordedHead, StepOfRun
from branchlake_dagster.stored_names import LakeProperty

_COMMIT_ID = "nessie.commit.id"
"""Iceberg's Java client writes into each metadata file, as a property, which commit the client had read."""
_WRITER_PREFIX = "write."
"""The prefix of properties that only writers read. `WRITE ORDERED BY` sets one of them."""


@dataclass(frozen=True)
class TableCommit:
    """A commit that put or deleted the content of one key.

    `number` counts the commits of the branch, from 1. `before` and `after` are the contents of the key; None
    means that it has no content.
    """

    number: int
    entry: LogEntry
    before: Content | None
    after: Content | None


@dataclass(frozen=True)
class _RecordedCommits:
    """The commits that were recorded as heads. `newest` has the newest one up to each position, ascending."""

    positions: Sequence[EventPosition]
    newest: Sequence[int]

    @classmethod
    def from_heads(
        cls, heads: Iterable[RecordedHead], numbers_by_hash: Mapping[str, int]
    ) -> _RecordedCommits:
        """Return the commits of `heads`. A hash that the branch does not contain counts as the base."""
        ordered = sorted(heads, key=lambda head: head.position)
        numbers = (numbers_by_hash.get(head.hash, 0) for head in ordered)
        return cls([head.position for head in ordered], list(accumulate(numbers, max)))

    def find_newest(self, time: EventPosition) -> int | None:
        """Return the newest commit that was recorded up to a position; None if none was."""
        count = bisect_right(self.positions, time)
        return self.newest[count - 1] if count else None


def _summary_entries(snapshot: Snapshot) -> Mapping[str, str]:
    return snapshot.summary.additional_properties if snapshot.summary is not None else {}


@dataclass(frozen=True)
class CheckedTables:
    """The tables that a run changed and that its checks read, with the commits that changed them.

    Args:
        evidence (RunEvidence): The checks and steps of the run.
        commits (BranchCommits): The commits of the run's branch.
        base_contents (Mapping[ContentKey, Content | None]): The contents at the branch's base of all keys
            that differ on the branch.
        read_metadata (ReadMetadata): Reads a table's metadata. Called for commits of Spark, and for commits
            that the code of a step made or that are newer than the start of a check.
    """

    evidence: RunEvidence
    commits: BranchCommits
    base_contents: Mapping[ContentKey, Content | None]
    read_metadata: ReadMetadata

    def find_code_writers(self) -> dict[str, frozenset[StepOfRun]]:
        """Return the steps whose own code changed a checked table, by the table's dotted name."""
        writers: dict[str, set[StepOfRun]] = {}
        for table, commits in self._commits_by_table.items():
            for commit in commits:
                if (steps := self._find_code_steps(commit)) and self._changes_table(commit):
                    writers.setdefault(table, set()).update(steps)
        return {table: frozenset(steps) for table, steps in writers.items()}

    def find_later_changes(self) -> dict[CheckedRows, str]:
        """Return the message of a commit that changed a check's table after the check had started, by check.

        Checks without such a commit are left out. Writes of the IO manager do not count: they are compared
        with checks by their materializations, which name the partitions.

        Cost: grows with commits plus checks. Reads the metadata of a table only for commits that one of its
        checks could not read.
        """
        readable: dict[str, dict[CheckedRows, int]] = {}
        for rows, result in self.evidence.evaluations.items():
            if result.table is not None and result.table in self._commits_by_table:
                readable.setdefault(result.table, {})[rows] = self._find_last_readable(rows, result)
        messages: dict[CheckedRows, str] = {}
        for table, last_readable in readable.items():
            oldest = min(last_readable.values())
            changes = [
                commit
                for commit in self._commits_by_table[table]
                if commit.number > oldest
                and not self._is_by_io_manager(commit)
                and self._changes_table(commit)
            ]
            numbers = [commit.number for commit in changes]
            for rows, number in last_readable.items():
                if (index := bisect_right(numbers, number)) < len(changes):
                    messages[rows] = changes[index].entry.commit.message
        return messages

    def _find_last_readable(self, rows: CheckedRows, result: CheckEvaluation) -> int:
        """Return the number of the newest commit that a check could read; 0 is the base.

        A check in the step of its own asset covers what this step writes until its end.
        """
        time = self.evidence.find_check_time(rows, result)
        own_commits = self._recorded_by_step.get(result.step)
        newest = None
        if own_commits is not None and self.evidence.is_own_step(rows, result):
            newest = own_commits.find_newest(time)
        return newest if newest is not None else self._recorded_commits.find_newest(time) or 0

    @cached_property
    def _recorded_commits(self) -> _RecordedCommits:
        return _RecordedCommits.from_heads(self.evidence.recorded_heads, self._numbers_by_hash)

    @cached_property
    def _recorded_by_step(self) -> Mapping[StepOfRun, _RecordedCommits]:
        heads: dict[StepOfRun, list[RecordedHead]] = {}
        for head in self.evidence.recorded_heads:
            if head.step is not None:
                heads.setdefault(head.step, []).append(head)
        return {
            step: _RecordedCommits.from_heads(of_step, self._numbers_by_hash)
            for step, of_step in heads.items()
        }

    @cached_property
    def _numbers_by_hash(self) -> Mapping[str, int]:
        oldest_first = reversed(self.commits.entries)
        return {entry.commit.hash: number for number, entry in enumerate(oldest_first, 1)}

    @cached_property
    def _commits_by_table(self) -> Mapping[str, Sequence[TableCommit]]:
        """The commits of each checked table that differs on the branch, oldest first, by its dotted name."""
        checked = {result.table for result in self.evidence.evaluations.values()}
        contents = {key: content for key, content in self.base_contents.items() if key.name in checked}
        commits: dict[str, list[TableCommit]] = {key.name: [] for key in contents}
        for number, entry in enumerate(reversed(self.commits.entries), 1):
            for operation in entry.operations:
                if isinstance(operation, Put | Delete) and operation.key in contents:
                    before = contents[operation.key]
                    after = operation.content if isinstance(operation, Put) else None
                    commits[operation.key.name].append(TableCommit(number, entry, before, after))
                    contents[operation.key] = after
        return commits

    def _find_code_steps(self, commit: TableCommit) -> set[StepOfRun]:
        """Return the steps whose own code made a commit, as far as it or its snapshots name them.

        Reads metadata only for commits of Spark.
        """
        properties = commit.entry.commit.properties
        if LakeProperty.RUN_ID in properties:
            step = properties.get(LakeProperty.CODE_OF_STEP)
            return {StepOfRun(properties[LakeProperty.RUN_ID], step)} if step else set()
        return {
            StepOfRun(entries[LakeProperty.RUN_ID], step)
            for entries in map(_summary_entries, self._find_added_snapshots(commit) or ())
            if (step := entries.get(LakeProperty.CODE_OF_STEP))
            and LakeProperty.STEP not in entries
            and LakeProperty.RUN_ID in entries
        }

    def _is_by_io_manager(self, commit: TableCommit) -> bool:
        """Return whether the IO manager made a commit. Its snapshots name the step whose output they hold."""
        before, after = commit.before, commit.after
        properties = commit.entry.commit.properties
        if LakeProperty.CODE_OF_STEP in properties or not isinstance(after, IcebergTable):
            return False
        snapshots = self._find_added_snapshots(commit)
        if snapshots:
            return all(LakeProperty.STEP in _summary_entries(snapshot) for snapshot in snapshots)
        is_rollback = isinstance(before, IcebergTable) and before.snapshot_id != after.snapshot_id
        return snapshots is not None and LakeProperty.RUN_ID in properties and not is_rollback

    def _find_added_snapshots(self, commit: TableCommit) -> list[Snapshot] | None:
        """Return the snapshots that a commit added; None if they can no longer be found."""
        before, after = commit.before, commit.after
        if not isinstance(after, IcebergTable):
            return []
        snapshot_ids = (
            {after.content_id or "": before.snapshot_id} if isinstance(before, IcebergTable) else {}
        )
        newest_locations = self.commits.newest_locations
        return find_added_snapshots(after, snapshot_ids, self.read_metadata, newest_locations)

    def _changes_table(self, commit: TableCommit) -> bool:
        """Return whether a commit changed rows, columns or properties of a table, or dropped or created it.

        Compaction, expiry of snapshots, statistics, partitioning, sort orders, comments of columns and
        properties for writers do not count.
        """
        before, after = commit.before, commit.after
        if not (isinstance(before, IcebergTable) and isinstance(after, IcebergTable)):
            return before != after
        old, new = self.read_metadata(before.metadata_location), self.read_metadata(after.metadata_location)
        if old is None or new is None:
            return before != after
        return _describe_table(old, old, new) != _describe_table(new, old, new)


def _describe_table(metadata: TableMetadata, *with_ancestors: TableMetadata) -> tuple[object, ...]:
    """Return what checks read of a table. The ancestors of its snapshot are searched in `with_ancestors`."""
    snapshots = {
        snapshot.snapshot_id: snapshot for version in with_ancestors for snapshot in version.snapshots
    }
    return (
        metadata.table_uuid,
        _skip_rewrites(metadata.current_snapshot_id, snapshots),
        _without_docs(metadata.schema().model_dump()["fields"]),
        {
            name: value
            for name, value in metadata.properties.items()
            if name != _COMMIT_ID and not name.startswith(_WRITER_PREFIX)
        },
    )


def _skip_rewrites(snapshot_id: int | None, snapshots: Mapping[int, Snapshot]) -> int | None:
    """Return the newest of a snapshot and its ancestors that is not a rewrite of the same rows."""
    while snapshot_id is not None and (snapshot := snapshots.get(snapshot_id)) is not None:
        if snapshot.summary is None or snapshot.summary.operation is not Operation.REPLACE:
            break
        snapshot_id = snapshot.parent_snapshot_id
    return snapshot_id


def _without_docs(value: Any) -> Any:
    """Return a dumped schema without the comments of its fields, at any depth."""
    if isinstance(value, dict):
        return {name: _without_docs(part) for name, part in value.items() if name != "doc"}
    return [_without_docs(part) for part in value] if isinstance(value, list | tuple) else value
