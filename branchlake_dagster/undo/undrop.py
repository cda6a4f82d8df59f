"""Bring back a dropped table, from the log of `main`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from datetime import timedelta

from branchlake_dagster.catalog.stored_files import StoredFileDamaged
from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieConflict
from branchlake_dagster.nessie.model import ContentKey, Delete, IcebergTable, Namespace, Operation, Put
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.runs.temporary_tags import keep_commit
from branchlake_dagster.stored_names import ReferencePrefix
from branchlake_dagster.undo.table_state import find_missing_file

_RESTORATION_TIME = timedelta(days=1)
"""The lifetime of the tag that keeps the files meanwhile; it is longer than any restoration takes."""


class TableNotDropped(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The table exists, or the log of `main` has no commit that dropped it."""


class DroppedTableUnreadable(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """A file of the dropped table does not exist any more, or cannot be read."""


@dataclass(frozen=True)
class RestoredTable:
    """A table that was restored by `commit`, as it was at `from_commit`, the last commit that had it.

    Both are hashes of commits on `main`.
    """

    commit: str
    from_commit: str


def undrop_table(lake: Lakehouse, name: str) -> RestoredTable:
    """Bring back a dropped table by one commit on `main`.

    The table gets the state before the newest commit that dropped it. All files of its current snapshot are
    checked before the commit and again after it. A tag keeps them meanwhile. A collection of files that was
    deleting them already may not have seen the tag: then the table is dropped again.

    Raises ValueError for a malformed name, TableNotDropped, DroppedTableUnreadable, and NessieConflict if
    somebody created the table meanwhile.
    """
    client, key = lake.nessie, ContentKey.from_path(name)
    namespace_keys = key.ancestors
    main = client.contents_at(MAIN, [key, *namespace_keys])
    if key in main.contents:
        if isinstance(main.contents[key], Namespace):
            raise TableNotDropped(
                f"{name} is a namespace on main, not a table.", table=name, hint="Write namespace.name."
            )
        raise TableNotDropped(f"Main has the table {name}.", table=name, hint="There is nothing to restore.")
    from_commit = _find_last_commit(client, main.reference.hash, key)
    earlier = client.contents(f"@{from_commit}", [key, *namespace_keys]) if from_commit else {}
    content = earlier.get(key)
    if from_commit is None or not isinstance(content, IcebergTable):
        raise TableNotDropped(
            f"The log of main has no commit that dropped a table {name}.",
            table=name,
            hint="Check the name: namespace.name.",
        )
    if present_name := _find_present_name(client, main.reference.hash, content):
        raise TableNotDropped(
            f"The table {name} was not dropped: main has it as {present_name}.",
            table=name,
            hint=f"Use {present_name}, or rename the table. A second name would share its files.",
        )
    operations: list[Operation] = []
    for namespace_key in namespace_keys:
        if namespace_key not in main.contents:
            earlier_namespace = earlier.get(namespace_key)
            properties = earlier_namespace.properties if isinstance(earlier_namespace, Namespace) else {}
            operations.append(Put(namespace_key, Namespace(None, namespace_key.elements, properties)))
    operations.append(Put(key, replace(content, content_id=None)))
    with keep_commit(client, ReferencePrefix.UNDROP, from_commit, from_ref=MAIN, lifetime=_RESTORATION_TIME):
        _require_readable(lake, key, content)
        commit = client.commit(
            MAIN,
            expected_hash=main.reference.hash,
            operations=operations,
            message=f"Restore the table {name}",
        )
        try:
            _require_readable(lake, key, content)
        except DroppedTableUnreadable:
            # Somebody who changed the table meanwhile gets a conflict here, and must see the error anyway.
            with contextlib.suppress(NessieConflict):
                client.commit(
                    MAIN,
                    expected_hash=commit.hash,
                    operations=[Delete(key)],
                    message=f"Drop the table {name} again, because its files were deleted",
                )
            raise
    return RestoredTable(commit.hash, from_commit)


def _require_readable(lake: Lakehouse, key: ContentKey, content: IcebergTable) -> None:
    """Raise DroppedTableUnreadable if a file of the table's current snapshot does not exist."""
    try:
        error = find_missing_file(IcebergTableFormat(lake.catalog()).open(key, content).table)
    except (FileNotFoundError, StoredFileDamaged) as unreadable:
        error = unreadable
    if error is not None:
        raise DroppedTableUnreadable(
            f"A file of the dropped table cannot be read: {error}",
            table=key.name,
            hint="The table stays dropped. Restore the file, or write the table anew.",
        ) from error


def _find_last_commit(client: NessieClient, main_hash: str, key: ContentKey) -> str | None:
    """Return the hash of the commit before the newest commit that dropped the table.

    Returns None if no commit in the history of `main_hash` dropped the table.
    """
    for entry in client.log(f"@{main_hash}", fetch_operations=True):
        if any(isinstance(operation, Delete) and operation.key == key for operation in entry.operations):
            return entry.commit.parent_hashes[0]
    return None


def _find_present_name(client: NessieClient, main_hash: str, content: IcebergTable) -> str | None:
    """Return the name that the table has now, after a rename or registration; None if it is gone."""
    for entry in client.entries(f"@{main_hash}", fetch_content=True):
        present = entry.content
        if isinstance(present, IcebergTable) and (
            present.content_id == content.content_id or present.metadata_location == content.metadata_location
        ):
            return entry.key.name
    return None
