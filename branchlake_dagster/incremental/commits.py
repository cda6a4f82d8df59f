"""Finds in Nessie's log which commits on `main` published a change, and a table's position at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from pyiceberg.table import Table

from branchlake_dagster.history.capture import ancestors_after, current_position
from branchlake_dagster.history.change import ChangeSet, Position
from branchlake_dagster.incremental.declaration import Identifier
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.nessie.model import ContentKey, IcebergTable, LogEntry, Put
from branchlake_dagster.stored_names import LakeProperty


@dataclass(frozen=True)
class MainCommit:
    """A commit on `main` that changed an input.

    Attributes:
        hash (str): The hash of the commit in Nessie.
        at (Optional[datetime]): When the commit was made.
        run_id (Optional[str]): The run that the commit published; None if another writer committed.
        snapshots (Tuple[int, ...]): The snapshots that the commit added to the table, oldest first.

    Examples:
        .. code-block:: python

            with read_changes(context, lakehouse) as changes:
                for commit in changes.commits("orders"):
                    context.log.info("%s: %s by %s", commit.at, commit.hash[:8], commit.run_id)
    """

    hash: str
    at: datetime | None
    run_id: str | None
    snapshots: tuple[int, ...]


def commits_of_change(
    client: NessieClient,
    identifier: Identifier,
    table: Table,
    change: ChangeSet,
    *,
    main_hash: str = "",
    after_hash: str = "",
) -> list[MainCommit]:
    """Return the commits that published the snapshots of a change, oldest first.

    The list is empty if the change is the whole table. Snapshots that are not on `main` yet, such as those of
    the run itself, have no commit. The log of `main` is read from the commit `main_hash` (empty: the head)
    back to `after_hash`, a commit before the change. If `after_hash` is empty, or no longer on `main`,
    reading ends at the first snapshot before the change. The server sends only entries that may concern this
    table.
    """
    if change.since is None or not change.steps:
        return []
    ancestors, _ = ancestors_after(table.metadata, change.since.snapshot_id)
    ancestor_index = {snapshot.snapshot_id: number for number, snapshot in enumerate(ancestors)}
    heads: list[tuple[int, LogEntry]] = []
    for entry, snapshot_id in _iter_put_entries(
        client, ContentKey(identifier), f"{MAIN}@{main_hash}" if main_hash else MAIN, after_hash
    ):
        if snapshot_id not in ancestor_index:
            break
        heads.append((ancestor_index[snapshot_id], entry))
    commits, begin = [], 0
    step_ids = {step.snapshot_id for step in change.steps}
    for end, entry in reversed(heads):
        new_snapshots = tuple(
            snapshot.snapshot_id
            for snapshot in ancestors[begin : end + 1]
            if snapshot.snapshot_id in step_ids
        )
        begin = max(begin, end + 1)  # a commit that changes only properties adds no snapshot
        if new_snapshots:
            commit = entry.commit
            commits.append(
                MainCommit(
                    commit.hash, commit.commit_time, commit.properties.get(LakeProperty.RUN_ID), new_snapshots
                )
            )
    return commits


def _iter_put_entries(
    client: NessieClient, key: ContentKey, ref: str, after_hash: str
) -> Iterator[tuple[LogEntry, int]]:
    """Yield the commits that put the table `key`, newest first, each with the id of the table's snapshot.

    The log of `ref` is read back to the commit `after_hash`, which is not included. It is read to its end if
    `after_hash` is empty or no longer on `main`. Raises ReferenceNotFound if `ref` does not exist.
    """
    entry_count = 0
    try:
        for entry in client.log(
            ref, filter=_FILTER % _cel_literal(key), since=after_hash or None, fetch_operations=True
        ):
            entry_count += 1
            yield from _iter_puts_of_entry(entry, key)
    except ReferenceNotFound:
        if not after_hash:
            raise
        # `main` was reset and no longer has that commit. Skip the entries that were already yielded.
        yield from _iter_remaining_puts(client, key, ref, entry_count)


def _iter_remaining_puts(
    client: NessieClient, key: ContentKey, ref: str, skip_count: int
) -> Iterator[tuple[LogEntry, int]]:
    for number, entry in enumerate(
        client.log(ref, filter=_FILTER % _cel_literal(key), fetch_operations=True)
    ):
        if number >= skip_count:
            yield from _iter_puts_of_entry(entry, key)


def _iter_puts_of_entry(entry: LogEntry, key: ContentKey) -> Iterator[tuple[LogEntry, int]]:
    for operation in entry.operations:
        if (
            isinstance(operation, Put)
            and operation.key == key
            and isinstance(operation.content, IcebergTable)
        ):
            yield entry, operation.content.snapshot_id


_FILTER = "operations.exists(op, op.name == %s)"
"""Filters by the last part of the key alone: Nessie does not document how it writes the rest of a key here.
"""


def _cel_literal(key: ContentKey) -> str:
    """Quote the last part of the key as a literal of CEL, the language of Nessie's filters."""
    return "'" + key[-1].replace("\\", "\\\\").replace("'", "\\'") + "'"


def position_at(lake: Lakehouse, identifier: tuple[str, ...], at: datetime) -> Position | None:
    """Return the position of a table on `main` at a time; None if the table or `main` did not exist.

    Cost: reads Nessie's log back to that time.
    """
    key = ContentKey(identifier)
    for entry in lake.nessie.log(MAIN):
        commit_time = entry.commit.commit_time
        if commit_time is not None and commit_time <= at:
            ref = f"{MAIN}@{entry.commit.hash}"
            content = lake.nessie.contents(ref, [key]).get(key)
            if not isinstance(content, IcebergTable):
                return None
            return current_position(lake.catalog(ref).table_of(identifier, content))
    return None
