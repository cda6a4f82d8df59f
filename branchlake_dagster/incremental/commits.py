"""Which commits on `main` published a change, and what a table was at a time, from Nessie's log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from pyiceberg.table import Table

from branchlake_dagster.history import capture as history
from branchlake_dagster.history.capture import current_position
from branchlake_dagster.history.change import ChangeSet, Position
from branchlake_dagster.incremental.consumer import Identifier
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.nessie.model import ContentKey, IcebergTable, LogEntry, Put
from branchlake_dagster.stored_names import LakeProperty


@dataclass(frozen=True)
class MainCommit:
    """A commit on `main` that changed an input.

    Attributes:
        hash (str): Its hash in Nessie.
        at (Optional[datetime]): When it was made.
        run_id (Optional[str]): The run that it published; None where somebody else wrote.
        snapshots (Tuple[int, ...]): The snapshots of the table that it brought, oldest first.

    Examples:
        .. code-block:: python

            with consume(context, lakehouse) as changes:
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
    """The commits that published the snapshots of a change, oldest first; none for a whole table.

    Reads `main`'s log from the commit `main_hash` (none: its head) back to the one before the change, of
    which only
    the entries of this table are sent. `after_hash` is a commit before the change, where one is known.
    Snapshots that are not on `main` yet, such as those of the run itself, are in none.
    """
    if change.since is None or not change.steps:
        return []
    ancestors, _ = history.ancestors_after(table.metadata, change.since.snapshot_id)
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
        begin = max(begin, end + 1)  # one that changes only properties brings no snapshot
        if new_snapshots:
            commit = entry.commit
            commits.append(
                MainCommit(
                    commit.hash, commit.commit_time, commit.properties.get(LakeProperty.RUN_ID), new_snapshots
                )
            )
    return commits


def commits_by_snapshot(commits: list[MainCommit]) -> Mapping[int, MainCommit]:
    """The same by the snapshots that they brought."""
    return {snapshot_id: commit for commit in commits for snapshot_id in commit.snapshots}


def _iter_put_entries(
    client: NessieClient, key: ContentKey, ref: str, after_hash: str
) -> Iterator[tuple[LogEntry, int]]:
    """The commits that put a table there, newest first, with the snapshot that it then had."""
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
        # `main` has lost that commit: it was set back. What was told so far was told all the same.
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
"""By the last name alone: how Nessie writes the rest of a key there, it does not say."""


def _cel_literal(key: ContentKey) -> str:
    """The last name as a literal of CEL."""
    return "'" + key[-1].replace("\\", "\\\\").replace("'", "\\'") + "'"


def position_at(lake: Lakehouse, identifier: tuple[str, ...], at: datetime) -> Position | None:
    """Where a table of `main` stood at a time; None: there was no such table.

    Reads the log back to then.
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
