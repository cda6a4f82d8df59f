"""Columns that a person drops or renames: a publication of its own, without a Dagster run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata

from branchlake_dagster.catalog.options import COMMIT_PROPERTY
from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown, Terminal, some
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieError
from branchlake_dagster.publication.ledger import Candidate, Published, Refused, Result, write_set
from branchlake_dagster.publication.publisher import publisher_of
from branchlake_dagster.runs.discarding import finish_branch
from branchlake_dagster.runs.run_branch import branch_name, main_with_history
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.errors import TableMissing
from branchlake_dagster.tables.specification import table_name
from branchlake_dagster.wording import named

BY_COMMAND = "by command"
"""The verdict in the ledger: a person has changed the columns, and no check was made."""


class ColumnChangeRefused(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """Columns cannot be dropped or renamed; `main` is as it was. `columns` are those that cannot."""

    def __init__(self, message: str, *, columns: tuple[str, ...] = (), **where: Any) -> None:
        super().__init__(message, **where)
        self.columns = columns


@dataclass(frozen=True)
class ColumnChange:
    """Columns of the first level to be dropped, or one to be renamed to `new_name`."""

    identifier: tuple[str, ...]
    columns: tuple[str, ...]
    new_name: str | None = None

    @property
    def table(self) -> str:
        """The dotted name of the table."""
        return table_name(self.identifier)


def require_possible(change: ColumnChange, metadata: TableMetadata, used: Iterable[str] = ()) -> None:
    """Raise ColumnChangeRefused if the table needs one of the columns, or the new name cannot be used.

    `used` are columns that the table's asset needs, by its definition: its keys and partition columns. Pure.
    """
    names = [field.name for field in metadata.schema().fields]
    if missing := tuple(column for column in change.columns if column not in names):
        raise ColumnChangeRefused(
            f"The table has no {named('column', missing)}.",
            columns=missing,
            table=change.table,
            hint=f"It has {', '.join(names)}.",
        )
    reasons = [*_uses(metadata), *((column, "its asset's keys or partitions") for column in used)]
    for column, reason in reasons:
        if column in change.columns:
            raise ColumnChangeRefused(
                f"Column {column} belongs to {reason}.",
                columns=(column,),
                table=change.table,
                hint="Write a new table with the columns that you want.",
            )
    if change.new_name is None and len({*change.columns}) == len(names):
        raise ColumnChangeRefused(
            "A table needs at least one column.",
            columns=change.columns,
            table=change.table,
            hint="Leave one of the columns out of the command.",
        )
    if change.new_name is not None:
        # Spark compares names without their case.
        others = {name.lower() for name in names if name not in change.columns}
        if not change.new_name or change.new_name.lower() in others:
            raise ColumnChangeRefused(
                f"The name {change.new_name!r} is empty or is already that of another column.",
                columns=change.columns,
                table=change.table,
                hint="Choose another name.",
            )


def _uses(metadata: TableMetadata) -> Iterator[tuple[str, str]]:
    """The columns that the table itself needs, and for what."""
    schema = metadata.schema()
    roots = {inner: field.name for field in schema.fields for inner in _ids(field)}
    fields = [field for spec in metadata.partition_specs for field in spec.fields]
    specs = [(field.source_id, "its partition spec") for field in fields]
    order = metadata.sort_order_by_id(metadata.default_sort_order_id)
    sorted_by = [(field.source_id, "its sort order") for field in order.fields] if order else []
    identifiers = [(one, "its identifier fields") for one in schema.identifier_field_ids]
    for source, reason in (*specs, *sorted_by, *identifiers):
        if source in roots:
            yield roots[source], reason
    for snapshot in metadata.snapshots:
        if snapshot.summary and (keys := snapshot.summary.additional_properties.get(LakeProperty.KEYS)):
            for key in keys.split(","):
                yield key, "the keys of its upserts"
    for name in metadata.properties:
        _, separator, column = name.partition(".column.")
        if separator:
            yield column.split(".")[0], f"its property {name}"


def _ids(field: Any) -> Iterator[int]:
    """The ids of a column and of the fields inside it."""
    yield field.field_id
    for inner in getattr(field.field_type, "fields", ()):
        yield from _ids(inner)


def load_table(lake: Lakehouse, change: ColumnChange) -> Table:
    """The table on `main`. Raises TableMissing."""
    try:
        return lake.catalog(MAIN).load_table(change.identifier)
    except NoSuchTableError as error:
        raise TableMissing(
            "There is no such table on main.",
            table=change.table,
            branch=MAIN,
            hint="`branchlake sql` lists the tables.",
        ) from error


def change_columns(
    lake: Lakehouse, change: ColumnChange, *, instance: str | None = None, used: Iterable[str] = ()
) -> str:
    """Drop or rename columns on a branch and publish the branch; the hash of the commit on `main`.

    Atomic: `main` gets the change in one commit with an entry in the ledger, or stays as it was. No data file
    is written. Rows that others publish meanwhile are kept. `instance` is the id of the Dagster instance
    whose reaper may discard the branch if this process dies; `used` as in `require_possible`.

    Raises TableMissing, ColumnChangeRefused, and the errors of Nessie and of the publisher. After an
    OutcomeUnknown the branch stays, and `main`'s log says whether the change is there.
    """
    used = tuple(used)
    require_possible(change, load_table(lake, change).metadata, used)
    client, run_id = lake.nessie, str(uuid4())
    branch = branch_name(run_id)
    base = main_with_history(client)
    client.create_branch(branch, from_ref=MAIN, from_hash=base)
    maker = {LakeProperty.RUN_ID: run_id, **({LakeProperty.INSTANCE: instance} if instance else {})}
    options = {f"{COMMIT_PROPERTY}{key}": value for key, value in maker.items()}
    try:
        _apply(lake.catalog(branch, properties=options).load_table(change.identifier), change, used)
        head = client.reference(branch)
        changes = write_set(client, base, head)
        candidate = Candidate(branch, head.hash, base, run_id, run_id, BY_COMMAND, changes)
        published = _published(publisher_of(lake).publish([candidate])[branch], change)
    except Exception as error:
        if not isinstance(error, OutcomeUnknown):
            _end(client, branch, keep_data=False)
        raise
    _end(client, branch, keep_data=True)
    return published.hash


def _published(result: Result | Exception, change: ColumnChange) -> Published:
    if isinstance(result, Published):
        return result
    if isinstance(result, Exception):
        raise result
    why = result.reason() if isinstance(result, Refused) else f"checks are needed of {some(result.tables)}"
    raise ColumnChangeRefused(
        f"The change was not published: {why}.",
        columns=change.columns,
        table=change.table,
        hint="Run the command again.",
    )


def _end(client: NessieClient, branch: str, *, keep_data: bool) -> None:
    with contextlib.suppress(NessieError):  # the reaper discards a branch that stays
        finish_branch(client, client.reference(branch), keep_data=keep_data)


def _apply(table: Table, change: ColumnChange, used: Iterable[str]) -> None:
    require_possible(change, table.metadata, used)  # as the branch has it
    with table.update_schema(allow_incompatible_changes=True) as update:
        for column in change.columns:
            if change.new_name is None:
                update.delete_column((column,))
            else:
                update.rename_column((column,), change.new_name)
