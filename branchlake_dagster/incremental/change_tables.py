"""Builds and manages the change tables of one step on the run's branch.

A change table is an Iceberg table that refers to the files of a change without copying them. It is created
for a step and dropped before the step's result can be published.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.errors import call_all
from branchlake_dagster.history.change import ChangedFile, ChangeSet
from branchlake_dagster.history.rows import ChangedRows, RowReader
from branchlake_dagster.incremental.declaration import Identifier, UpstreamTable
from branchlake_dagster.internals.column_metrics import ReliableInclusiveEvaluator, ReliableStrictEvaluator
from branchlake_dagster.internals.pyiceberg import (
    apply_updates,
    build_snapshot,
    write_data_files,
    write_metadata,
)
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import CHANGE_TABLE_INFIX, LakeProperty
from branchlake_dagster.tables.selection import Selection, selection_mask, to_iceberg_filter
from branchlake_dagster.tables.specification import format_table_name


@dataclass
class ChangeTable:
    """A table that contains only changed rows of its source, for Spark to read.

    `written_paths` has the files that were written for it: metadata, manifests and copied rows.
    """

    table: Table
    written_paths: list[str] = field(default_factory=list)


def build_change_table(
    source: Table,
    files: Iterable[DataFile],
    *,
    name: Identifier,
    location: str,
    change_of: str,
    properties: Mapping[str, str],
) -> ChangeTable:
    """Build a table with the columns and partition specs of `source` that contains only `files`.

    Nothing is committed to the catalog. `location` is the URI of the folder for the table's own files.
    `ChangeTable.written_paths` lists the manifests that were written. `change_of` is the dotted name of the
    source, recorded in the snapshot summaries together with `properties`.
    """
    metadata = source.metadata.model_copy(
        update={
            "table_uuid": uuid.uuid4(),
            "location": location,
            "snapshots": [],
            "snapshot_log": [],
            "metadata_log": [],
            "refs": {},
            "statistics": [],
            "partition_statistics": [],
            "current_snapshot_id": None,
            "last_sequence_number": 0,
            "properties": _reading_properties(source.metadata.properties),
        }
    )
    change_table = ChangeTable(_with_metadata(source, metadata, name))
    summary = {**properties, LakeProperty.CHANGE_OF: change_of}
    ordered_files = sorted(files, key=_spec_id)
    for spec_id, group in itertools.groupby(ordered_files, key=_spec_id):
        # PyIceberg records added files under the table's default spec, even if another spec wrote them.
        _append_files(change_table, list(group), summary, spec_id)
    return change_table


def _reading_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Select the table properties that readers need.

    Properties about where to write files are left out.
    """
    mapping = TableProperties.DEFAULT_NAME_MAPPING
    name_mapping = {mapping: properties[mapping]} if mapping in properties else {}
    return {**name_mapping, "gc.enabled": "false"}


def write_copied_rows(change_table: ChangeTable, rows: pa.Table) -> list[DataFile]:
    """Write rows as files of a change table, and return the files.

    Used when the changed rows do not fill whole files.
    """
    table = change_table.table
    written_files = list(
        write_data_files(table.metadata, rows, table.io, commit=uuid.uuid4(), numbers=itertools.count())
    )
    change_table.written_paths += [one.file_path for one in written_files]
    for file in written_files:
        file.spec_id = table.metadata.default_spec_id  # PyIceberg sets it only when it reads a manifest
    return written_files


def _append_files(
    change_table: ChangeTable, files: Sequence[DataFile], properties: Mapping[str, str], spec_id: int
) -> None:
    default_spec_id = change_table.table.metadata.default_spec_id
    table = _with_metadata(
        change_table.table, change_table.table.metadata.model_copy(update={"default_spec_id": spec_id})
    )
    updates = build_snapshot(
        table,
        added=files,
        removed=(),
        operation=Operation.APPEND,
        properties=dict(properties),
        written_paths=change_table.written_paths,
    )
    metadata = apply_updates(table.metadata, updates)
    change_table.table = _with_metadata(
        table, metadata.model_copy(update={"default_spec_id": default_spec_id})
    )


def _spec_id(file: DataFile) -> int:
    return file.spec_id


def _with_metadata(table: Table, metadata: TableMetadata, name: Identifier | None = None) -> Table:
    return Table(name or table.name(), metadata, table.metadata_location, table.io, table.catalog)


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
        """Create the tables of added and of removed rows of an input, limited to the rows of `where`.

        `identifier` is the input's table, `consumer_identifier` the asset's; both are part of the new names.
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
        """Create a table with the input's columns and without rows, and return its identifier.

        `identifier` is the input's table; the new table has the same namespace, and a name that begins with
        that of the input.
        """
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
    """Return the change without the data files whose bounds show that no row is in the selection `where`.

    `table` is the input, to whose columns the selection refers.
    """
    schema = table.schema()
    may_match = ReliableInclusiveEvaluator(schema, to_iceberg_filter(where, schema)).eval
    return replace(
        change,
        added=tuple(file for file in change.added if may_match(file.file)),
        removed=tuple(file for file in change.removed if may_match(file.file)),
    )


def _is_all_selected(change: ChangeSet, where: Selection, table: Table) -> bool:
    """Whether the bounds of the changed data files show that all their rows are in the selection `where`."""
    schema = table.schema()
    all_match = ReliableStrictEvaluator(schema, to_iceberg_filter(where, schema)).eval
    return all(all_match(file.file) for file in (*change.added, *change.removed))
