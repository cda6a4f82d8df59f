"""Drops and renames columns by command. Each command is a publication of its own, without a Dagster run."""

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
from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown, Terminal, format_first_values
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieError
from branchlake_dagster.publication.ledger import Candidate, Published, Refused, Result, load_write_set
from branchlake_dagster.publication.publisher import build_publisher
from branchlake_dagster.runs.discarding import end_branch_and_claim
from branchlake_dagster.runs.run_branch import ensure_main_has_commit, run_branch_name
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.errors import TableMissing
from branchlake_dagster.tables.specification import format_table_name
from branchlake_dagster.wording import format_names

BY_COMMAND = "by command"
"""The verdict that the ledger records for a column change by command: no check ran."""


class ColumnChangeRefused(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """Columns cannot be dropped or renamed; `main` is unchanged. `columns` are the names of these columns."""

    def __init__(self, message: str, *, columns: tuple[str, ...] = (), **where: Any) -> None:
        super().__init__(message, **where)
        self.columns = columns


@dataclass(frozen=True)
class ColumnChange:
    """Top-level columns of table `identifier` to drop, or one column to rename to `new_name`."""

    identifier: tuple[str, ...]
    columns: tuple[str, ...]
    new_name: str | None = None

    @property
    def table(self) -> str:
        """The dotted name of the table."""
        return format_table_name(self.identifier)


def validate_column_change(
    change: ColumnChange, metadata: TableMetadata, required_columns: Iterable[str] = ()
) -> None:
    """Raise ColumnChangeRefused if the columns cannot be dropped or renamed.

    This is so if a column does not exist, if the table or its asset needs a column, if no column would
    remain, or if the new name is empty or in use. `required_columns` are the key and partition columns that
    the table's asset declares. Reads no file.
    """
    column_names = [field.name for field in metadata.schema().fields]
    if missing_columns := tuple(column for column in change.columns if column not in column_names):
        raise ColumnChangeRefused(
            f"The table does not have {format_names('column', missing_columns)}.",
            columns=missing_columns,
            table=change.table,
            hint=f"Its columns are {', '.join(column_names)}.",
        )
    reasons = [
        *_iter_required_columns(metadata),
        *((column, "the keys or partitions of its asset") for column in required_columns),
    ]
    for column, reason in reasons:
        if column in change.columns:
            raise ColumnChangeRefused(
                f"Column {column} cannot be dropped or renamed: it belongs to {reason}.",
                columns=(column,),
                table=change.table,
                hint="Write a new table with the columns that you want.",
            )
    if change.new_name is None and len({*change.columns}) == len(column_names):
        raise ColumnChangeRefused(
            "A table needs at least one column.",
            columns=change.columns,
            table=change.table,
            hint="Leave one of the columns out of the command.",
        )
    if change.new_name is not None:
        # Spark ignores the case of column names.
        other_names = {name.lower(): name for name in column_names if name not in change.columns}
        existing_name = other_names.get(change.new_name.lower())
        if not change.new_name or existing_name is not None:
            raise ColumnChangeRefused(
                f"Another column is called {existing_name}."
                if change.new_name
                else "The new name of the column is empty.",
                columns=change.columns,
                table=change.table,
                hint="Choose another name.",
            )


def _iter_required_columns(metadata: TableMetadata) -> Iterator[tuple[str, str]]:
    """Yield pairs (top-level column, reason) for each column that the table needs; a column may occur twice.

    It is needed for a partition spec, also a former one, for the current sort order, the identifier fields,
    the keys of upserts that the snapshots record, or a property such as `write.metadata.metrics.column.a`.
    `metadata` is the table's metadata.
    """
    schema = metadata.schema()
    top_level_names = {inner: field.name for field in schema.fields for inner in _iter_field_ids(field)}
    fields = [field for spec in metadata.partition_specs for field in spec.fields]
    partition_sources = [(field.source_id, "its partition spec") for field in fields]
    order = metadata.sort_order_by_id(metadata.default_sort_order_id)
    sort_sources = [(field.source_id, "its sort order") for field in order.fields] if order else []
    identifier_sources = [(field_id, "its identifier fields") for field_id in schema.identifier_field_ids]
    for source_id, reason in (*partition_sources, *sort_sources, *identifier_sources):
        if source_id in top_level_names:
            yield top_level_names[source_id], reason
    for snapshot in metadata.snapshots:
        if snapshot.summary and (keys := snapshot.summary.additional_properties.get(LakeProperty.KEYS)):
            for key in keys.split(","):
                yield key, "the keys of its upserts"
    for name in metadata.properties:
        _, separator, column = name.partition(".column.")
        if separator:
            yield column.split(".")[0], f"its property {name}"


def _iter_field_ids(field: Any) -> Iterator[int]:
    """Yield the ids of a column and of all fields inside it."""
    yield field.field_id
    for inner in getattr(field.field_type, "fields", ()):
        yield from _iter_field_ids(inner)


def load_main_table(lake: Lakehouse, change: ColumnChange) -> Table:
    """Load the table that `change` names from `main`. Raises TableMissing if it does not exist."""
    try:
        return lake.catalog(MAIN).load_table(change.identifier)
    except NoSuchTableError as error:
        raise TableMissing(
            "The table does not exist on main.",
            table=change.table,
            branch=MAIN,
            hint="`branchlake sql` lists the tables.",
        ) from error


def change_columns(
    lake: Lakehouse,
    change: ColumnChange,
    *,
    instance: str | None = None,
    required_columns: Iterable[str] = (),
) -> str:
    """Drop or rename columns on a branch, publish the branch, and return the hash of the commit on `main`.

    Atomic: `main` either gets the whole change in one commit with an entry in the ledger, or stays unchanged.
    No data file is written. Rows that other runs publish meanwhile are kept.

    `instance` is the id of the Dagster instance whose reaper may discard the branch if this process dies.
    `required_columns` are those of `validate_column_change`.

    Raises TableMissing, ColumnChangeRefused, and the errors of Nessie and of the publisher. After an
    OutcomeUnknown the branch stays, and `main`'s log shows whether the change arrived.
    """
    required_columns = tuple(required_columns)
    validate_column_change(change, load_main_table(lake, change).metadata, required_columns)
    client, run_id = lake.nessie, str(uuid4())
    branch = run_branch_name(run_id)
    base = ensure_main_has_commit(client)
    client.create_branch(branch, from_ref=MAIN, from_hash=base)
    provenance = {LakeProperty.RUN_ID: run_id, **({LakeProperty.INSTANCE: instance} if instance else {})}
    options = {f"{COMMIT_PROPERTY}{key}": value for key, value in provenance.items()}
    try:
        _apply_change(
            lake.catalog(branch, properties=options).load_table(change.identifier), change, required_columns
        )
        head = client.reference(branch)
        changes = load_write_set(client, base, head)
        candidate = Candidate(branch, head.hash, base, run_id, run_id, BY_COMMAND, changes)
        publication = _require_published(build_publisher(lake).publish([candidate])[branch], change)
    except Exception as error:
        if not isinstance(error, OutcomeUnknown):
            _try_finish_branch(client, branch, keep_data=False)
        raise
    _try_finish_branch(client, branch, keep_data=True)
    return publication.hash


def _require_published(result: Result | Exception, change: ColumnChange) -> Published:
    if isinstance(result, Published):
        return result
    if isinstance(result, Exception):
        raise result
    reason = (
        result.format_reason()
        if isinstance(result, Refused)
        else f"checks must run first on {format_first_values(result.tables)}"
    )
    raise ColumnChangeRefused(
        f"The column change was not published: {reason}.",
        columns=change.columns,
        table=change.table,
        hint="Run the command again.",
    )


def _try_finish_branch(client: NessieClient, branch: str, *, keep_data: bool) -> None:
    with contextlib.suppress(NessieError):  # the reaper discards a branch that remains
        end_branch_and_claim(client, client.reference(branch), keep_data=keep_data)


def _apply_change(table: Table, change: ColumnChange, required_columns: Iterable[str]) -> None:
    validate_column_change(change, table.metadata, required_columns)  # again, with the branch's metadata
    with table.update_schema(allow_incompatible_changes=True) as update:
        for column in change.columns:
            if change.new_name is None:
                update.delete_column((column,))
            else:
                update.rename_column((column,), change.new_name)
