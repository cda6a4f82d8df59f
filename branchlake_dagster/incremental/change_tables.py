"""Change tables on the run's branch: made for a step, gone before its result can be published."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table
from pyiceberg.table.locations import load_location_provider

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.errors import all_of
from branchlake_dagster.history.change import ChangedFile, ChangeSet
from branchlake_dagster.history.change_table import ChangeTable, copied, referring
from branchlake_dagster.history.rows import ChangedRows, RowReader
from branchlake_dagster.incremental.consumer import Identifier, Input
from branchlake_dagster.internals.column_metrics import ReliableInclusiveEvaluator, ReliableStrictEvaluator
from branchlake_dagster.internals.pyiceberg import write_metadata
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import CHANGE_TABLE_INFIX
from branchlake_dagster.tables.selection import Selection, inside, to_iceberg
from branchlake_dagster.tables.specification import table_name

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pair:
    """The identifiers of the tables of rows that came and rows that went; None: no row did."""

    added: Identifier | None
    removed: Identifier | None


class ChangeTables:
    """Those of one step. `drop` takes them off the branch and deletes what was written for them."""

    def __init__(self, lake: LakehouseResource) -> None:
        self._lake = lake
        self._made: dict[Identifier, ChangeTable] = {}

    def make(
        self,
        one: Input,
        identifier: Identifier,
        consumer: Identifier,
        change: ChangeSet,
        *,
        where: Selection | None = None,
    ) -> Pair:
        """The change tables of an input for a consumer; with `where`, of these rows alone.

        They refer to the changed files where all rows of these belong to them; otherwise rows are copied.
        """
        number = len(self._made)
        base = f"{identifier[-1]}{CHANGE_TABLE_INFIX}{'_'.join(consumer)}_{number}"
        if where is not None:
            change = _possible(change, where, one.table)
        reader = RowReader(one.table, change)
        if reader.whole_files() and (where is None or _all_inside(change, where, one.table)):
            added = self._refer(one, (*identifier[:-1], base), change.added)
            removed = self._refer(one, (*identifier[:-1], f"{base}_removed"), change.removed)
            return Pair(added, removed)
        rows = reader.read()
        if where is not None:
            sides = (side.filter(inside(where, side)) for side in (rows.added, rows.removed))
            rows = ChangedRows(*sides)
        return Pair(
            self._copy(one, (*identifier[:-1], base), rows.added),
            self._copy(one, (*identifier[:-1], f"{base}_removed"), rows.removed),
        )

    def empty(self, one: Input, identifier: Identifier) -> Identifier:
        """A table of the input's columns without a row."""
        name = (*identifier[:-1], f"{identifier[-1]}{CHANGE_TABLE_INFIX}empty_{len(self._made)}")
        made = referring(
            one.table, (), name=name, location=self._location(name), change_of=one.name, properties={}
        )
        return self._commit(name, made)

    def _refer(self, one: Input, name: Identifier, files: Sequence[ChangedFile]) -> Identifier | None:
        if not files:
            return None
        made = referring(
            one.table,
            [changed.file for changed in files],
            name=name,
            location=self._location(name),
            change_of=one.name,
            properties={},
        )
        return self._commit(name, made)

    def _copy(self, one: Input, name: Identifier, rows: pa.Table) -> Identifier | None:
        if not rows.num_rows:
            return None
        location = self._location(name)
        empty = referring(one.table, (), name=name, location=location, change_of=one.name, properties={})
        files = copied(empty, rows)
        made = referring(empty.table, files, name=name, location=location, change_of=one.name, properties={})
        made.written += empty.written
        return self._commit(name, made)

    def _location(self, name: Identifier) -> str:
        warehouse = self._lake.lakehouse.settings.warehouse_uri.rstrip("/")
        return f"{warehouse}/_branchlake/changes/{table_name(name)}_{uuid.uuid4()}"

    def _commit(self, name: Identifier, made: ChangeTable) -> Identifier:
        self._made[name] = made
        catalog, metadata = self._lake.own_catalog(), made.table.metadata
        provider = load_location_provider(metadata.location, metadata.properties)
        location = provider.new_table_metadata_file_location(0)
        made.written.append(location)
        write_metadata(catalog, metadata, made.table.io, location)
        # An earlier attempt of the step may have left one of this name.
        catalog.register_table(name, location, overwrite=True)
        return name

    def drop(self) -> None:
        """Take all of them off the branch. Files that cannot be deleted are left to the sweeper, and told.

        Each is tried; what went wrong with the first is raised, with the others' errors as its notes. Those
        that are still there may be tried again.
        """
        catalog = self._lake.own_catalog()
        all_of(partial(self._drop, catalog, name) for name in tuple(self._made))

    def _drop(self, catalog: NessieCatalog, name: Identifier) -> None:
        try:
            catalog.drop_table(name)
        except NoSuchTableError:
            _log.warning("The change table %s was gone already.", table_name(name))
        made = self._made.pop(name)
        for path in made.written:
            try:
                made.table.io.delete(path)
            except OSError as error:
                _log.warning("%s of a change table is still there: %s", path, error)


def _possible(change: ChangeSet, where: Selection, table: Table) -> ChangeSet:
    """The change without data files that cannot hold a row of the selection, by their bounds."""
    schema = table.schema()
    may_match = ReliableInclusiveEvaluator(schema, to_iceberg(where, schema)).eval
    return replace(
        change,
        added=tuple(one for one in change.added if may_match(one.file)),
        removed=tuple(one for one in change.removed if may_match(one.file)),
    )


def _all_inside(change: ChangeSet, where: Selection, table: Table) -> bool:
    """Whether all rows of the changed data files belong to the selection, by their bounds."""
    schema = table.schema()
    all_match = ReliableStrictEvaluator(schema, to_iceberg(where, schema)).eval
    return all(all_match(one.file) for one in (*change.added, *change.removed))
