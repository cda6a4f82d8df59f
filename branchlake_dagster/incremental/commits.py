"""Which commits on `main` published a change, and what a table was at a time, from Nessie's log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from pyiceberg.table import Table

from branchlake_dagster.history import capture as history
from branchlake_dagster.history.capture import position_of
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


def commits_of(
    client: NessieClient,
    identifier: Identifier,
    table: Table,
    change: ChangeSet,
    *,
    at: str = "",
    after: str = "",
) -> list[MainCommit]:
    """The commits that published the snapshots of a change, oldest first; none for a whole table.

    Reads `main`'s log from the commit `at` (none: its head) back to the one before the change, of which only
    the entries of this table are sent. `after` is a commit before the change, where one is known. Snapshots
    that are not on `main` yet, such as those of the run itself, are in none.
    """
    if change.since is None or not change.steps:
        return []
    line, _ = history.line(table.metadata, change.since.snapshot_id)
    place = {snapshot.snapshot_id: number for number, snapshot in enumerate(line)}
    heads: list[tuple[int, LogEntry]] = []
    for entry, snapshot_id in _puts(client, ContentKey(identifier), f"{MAIN}@{at}" if at else MAIN, after):
        if snapshot_id not in place:
            break
        heads.append((place[snapshot_id], entry))
    found, begin = [], 0
    wanted = {step.snapshot_id for step in change.steps}
    for end, entry in reversed(heads):
        new = tuple(one.snapshot_id for one in line[begin : end + 1] if one.snapshot_id in wanted)
        begin = max(begin, end + 1)  # one that changes only properties brings no snapshot
        if new:
            commit = entry.commit
            found.append(
                MainCommit(commit.hash, commit.commit_time, commit.properties.get(LakeProperty.RUN_ID), new)
            )
    return found


def by_snapshot(commits: list[MainCommit]) -> Mapping[int, MainCommit]:
    """The same by the snapshots that they brought."""
    return {number: commit for commit in commits for number in commit.snapshots}


def _puts(client: NessieClient, key: ContentKey, ref: str, after: str) -> Iterator[tuple[LogEntry, int]]:
    """The commits that put a table there, newest first, with the snapshot that it then had."""
    told = 0
    try:
        for entry in client.log(ref, filter=_FILTER % _text(key), since=after or None, fetch_operations=True):
            told += 1
            yield from _put(entry, key)
    except ReferenceNotFound:
        if not after:
            raise
        # `main` has lost that commit: it was set back. What was told so far was told all the same.
        yield from _rest(client, key, ref, told)


def _rest(client: NessieClient, key: ContentKey, ref: str, told: int) -> Iterator[tuple[LogEntry, int]]:
    for number, entry in enumerate(client.log(ref, filter=_FILTER % _text(key), fetch_operations=True)):
        if number >= told:
            yield from _put(entry, key)


def _put(entry: LogEntry, key: ContentKey) -> Iterator[tuple[LogEntry, int]]:
    for done in entry.operations:
        if isinstance(done, Put) and done.key == key and isinstance(done.content, IcebergTable):
            yield entry, done.content.snapshot_id


_FILTER = "operations.exists(op, op.name == %s)"
"""By the last name alone: how Nessie writes the rest of a key there, it does not say."""


def _text(key: ContentKey) -> str:
    """The last name as a literal of CEL."""
    return "'" + key[-1].replace("\\", "\\\\").replace("'", "\\'") + "'"


def position_at(lake: Lakehouse, identifier: tuple[str, ...], at: datetime) -> Position | None:
    """Where a table of `main` stood at a time; None: there was no such table.

    Reads the log back to then.
    """
    key = ContentKey(identifier)
    for entry in lake.nessie.log(MAIN):
        made = entry.commit.commit_time
        if made is not None and made <= at:
            ref = f"{MAIN}@{entry.commit.hash}"
            found = lake.nessie.contents(ref, [key]).get(key)
            if not isinstance(found, IcebergTable):
                return None
            return position_of(lake.catalog(ref).table_of(identifier, found))
    return None
