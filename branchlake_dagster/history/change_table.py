"""Builds change tables: Iceberg tables that refer to the files of a change without copying them."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation
from pyiceberg.typedef import Identifier

from branchlake_dagster.internals.pyiceberg import apply_updates, build_snapshot, write_data_files
from branchlake_dagster.stored_names import LakeProperty


@dataclass
class ChangeTable:
    """A change table's metadata, and the paths of files written for it: manifests and copied rows."""

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
    """Build a table with the columns and partition specs of `source` that holds only `files`.

    Nothing is committed. `ChangeTable.written_paths` lists the manifests that were written. `properties` are
    added to the snapshot summaries.
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
