"""Manages the change tables of one step on the run's branch.

A change table is created for a step and dropped before the step's result can be published.
"""

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
from branchlake_dagster.errors import call_all
from branchlake_dagster.history.change import ChangedFile, ChangeSet
from branchlake_dagster.history.change_table import ChangeTable, build_change_table, write_copied_rows
from branchlake_dagster.history.rows import ChangedRows, RowReader
from branchlake_dagster.incremental.consumer import Identifier, UpstreamTable
from branchlake_dagster.internals.column_metrics import ReliableInclusiveEvaluator, ReliableStrictEvaluator
from branchlake_dagster.internals.pyiceberg import write_metadata
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import CHANGE_TABLE_INFIX
from branchlake_dagster.tables.selection import Selection, selection_mask, to_iceberg_filter
from branchlake_dagster.tables.specification import format_table_name

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChangeTablePair:
    """The identifiers of the tables of added rows and of removed rows; None if there are no such rows."""

    added: Identifier | None
    removed: Identifier | None


class ChangeTables:
    """The change tables of one step. `drop` removes them from the branch and deletes their own files."""

    def __init__(self, lake: LakehouseResource) -> None:
        self._lake = lake
        self._tables_by_name: dict[Identifier, ChangeTable] = {}

    def create_pair(
        self,
        upstream: UpstreamTable,
        identifier: Identifier,
        consumer_identifier: Identifier,
        change: ChangeSet,
        *,
        where: Selection | None = None,
    ) -> ChangeTablePair:
        """Create the change tables of an input for a consumer, limited to the rows of `where`.

        The tables refer to the changed files if all rows of these files belong to them. Otherwise rows are
        copied.
        """
        number = len(self._tables_by_name)
        base_name = f"{identifier[-1]}{CHANGE_TABLE_INFIX}{'_'.join(consumer_identifier)}_{number}"
        if where is not None:
            change = _prune_by_bounds(change, where, upstream.table)
        reader = RowReader(upstream.table, change)
        if reader.has_whole_files() and (where is None or _is_all_selected(change, where, upstream.table)):
            added = self._refer_to_files(upstream, (*identifier[:-1], base_name), change.added)
            removed = self._refer_to_files(
                upstream, (*identifier[:-1], f"{base_name}_removed"), change.removed
            )
            return ChangeTablePair(added, removed)
        rows = reader.read()
        if where is not None:
            sides = (side.filter(selection_mask(where, side)) for side in (rows.added, rows.removed))
            rows = ChangedRows(*sides)
        return ChangeTablePair(
            self._copy_rows(upstream, (*identifier[:-1], base_name), rows.added),
            self._copy_rows(upstream, (*identifier[:-1], f"{base_name}_removed"), rows.removed),
        )

    def create_empty(self, upstream: UpstreamTable, identifier: Identifier) -> Identifier:
        """Create a table with the input's columns and without rows."""
        name = (*identifier[:-1], f"{identifier[-1]}{CHANGE_TABLE_INFIX}empty_{len(self._tables_by_name)}")
        change_table = build_change_table(
            upstream.table,
            (),
            name=name,
            location=self._location(name),
            change_of=upstream.name,
            properties={},
        )
        return self._register_table(name, change_table)

    def _refer_to_files(
        self, upstream: UpstreamTable, name: Identifier, files: Sequence[ChangedFile]
    ) -> Identifier | None:
        if not files:
            return None
        change_table = build_change_table(
            upstream.table,
            [changed.file for changed in files],
            name=name,
            location=self._location(name),
            change_of=upstream.name,
            properties={},
        )
        return self._register_table(name, change_table)

    def _copy_rows(self, upstream: UpstreamTable, name: Identifier, rows: pa.Table) -> Identifier | None:
        if not rows.num_rows:
            return None
        location = self._location(name)
        empty_table = build_change_table(
            upstream.table, (), name=name, location=location, change_of=upstream.name, properties={}
        )
        files = write_copied_rows(empty_table, rows)
        change_table = build_change_table(
            empty_table.table, files, name=name, location=location, change_of=upstream.name, properties={}
        )
        change_table.written_paths += empty_table.written_paths
        return self._register_table(name, change_table)

    def _location(self, name: Identifier) -> str:
        warehouse = self._lake.lakehouse.settings.warehouse_uri.rstrip("/")
        return f"{warehouse}/_branchlake/changes/{format_table_name(name)}_{uuid.uuid4()}"

    def _register_table(self, name: Identifier, change_table: ChangeTable) -> Identifier:
        self._tables_by_name[name] = change_table
        catalog, metadata = self._lake.own_catalog(), change_table.table.metadata
        provider = load_location_provider(metadata.location, metadata.properties)
        location = provider.new_table_metadata_file_location(0)
        change_table.written_paths.append(location)
        write_metadata(catalog, metadata, change_table.table.io, location)
        # An earlier attempt of the step may have left a table with this name.
        catalog.register_table(name, location, overwrite=True)
        return name

    def drop(self) -> None:
        """Drop all change tables from the branch.

        Files that cannot be deleted are logged and left to the sweeper. Every table is tried. The first error
        is raised, with the other errors as its notes; tables that remain can be dropped by another call.
        """
        catalog = self._lake.own_catalog()
        call_all(partial(self._drop_table, catalog, name) for name in tuple(self._tables_by_name))

    def _drop_table(self, catalog: NessieCatalog, name: Identifier) -> None:
        try:
            catalog.drop_table(name)
        except NoSuchTableError:
            _log.warning("Change table %s had been dropped already.", format_table_name(name))
        change_table = self._tables_by_name.pop(name)
        for path in change_table.written_paths:
            try:
                change_table.table.io.delete(path)
            except OSError as error:
                _log.warning("Cannot delete file %s of a change table: %s", path, error)


def _prune_by_bounds(change: ChangeSet, where: Selection, table: Table) -> ChangeSet:
    """Return the change without the data files that, by their bounds, have no row of the selection."""
    schema = table.schema()
    may_match = ReliableInclusiveEvaluator(schema, to_iceberg_filter(where, schema)).eval
    return replace(
        change,
        added=tuple(file for file in change.added if may_match(file.file)),
        removed=tuple(file for file in change.removed if may_match(file.file)),
    )


def _is_all_selected(change: ChangeSet, where: Selection, table: Table) -> bool:
    """Whether, by their bounds, the changed data files have only rows of the selection."""
    schema = table.schema()
    all_match = ReliableStrictEvaluator(schema, to_iceberg_filter(where, schema)).eval
    return all(all_match(file.file) for file in (*change.added, *change.removed))
