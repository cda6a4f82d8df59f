"""The change table: an Iceberg table that refers to just the files of a change, without copying them."""

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

from branchlake_dagster.internals.pyiceberg import applied, data_files, snapshot_of
from branchlake_dagster.stored_names import LakeProperty


@dataclass
class ChangeTable:
    """The metadata of a change table, and the files that were written for it: manifests, and copied rows."""

    table: Table
    written: list[str] = field(default_factory=list)


def referring(
    source: Table,
    files: Iterable[DataFile],
    *,
    name: Identifier,
    location: str,
    change_of: str,
    properties: Mapping[str, str],
) -> ChangeTable:
    """A table with the columns and partition specs of `source` that holds `files` of it and nothing else.

    Nothing is committed; `written` are the manifests it needed. `properties` go into the summaries.
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
            "properties": _kept(source.metadata.properties),
        }
    )
    made = ChangeTable(_with(source, metadata, name))
    told = {**properties, LakeProperty.CHANGE_OF: change_of}
    ordered = sorted(files, key=_spec_id)
    for spec_id, some in itertools.groupby(ordered, key=_spec_id):
        # PyIceberg writes added files under the table's default spec, whatever they were written with.
        _append(made, list(some), told, spec_id)
    return made


def _kept(properties: Mapping[str, str]) -> dict[str, str]:
    """What says how the files are to be read; where files go is the source's own affair."""
    mapping = TableProperties.DEFAULT_NAME_MAPPING
    kept = {mapping: properties[mapping]} if mapping in properties else {}
    return {**kept, "gc.enabled": "false"}


def copied(made: ChangeTable, rows: pa.Table) -> list[DataFile]:
    """Rows written as files of a change table, for those that no whole file stands for."""
    table = made.table
    found = list(data_files(table.metadata, rows, table.io, commit=uuid.uuid4(), numbers=itertools.count()))
    made.written += [one.file_path for one in found]
    for one in found:
        one.spec_id = table.metadata.default_spec_id  # PyIceberg sets it where it reads a manifest
    return found


def _append(
    made: ChangeTable, files: Sequence[DataFile], properties: Mapping[str, str], spec_id: int
) -> None:
    default = made.table.metadata.default_spec_id
    table = _with(made.table, made.table.metadata.model_copy(update={"default_spec_id": spec_id}))
    updates = snapshot_of(
        table,
        added=files,
        removed=(),
        operation=Operation.APPEND,
        properties=dict(properties),
        written=made.written,
    )
    metadata = applied(table.metadata, updates)
    made.table = _with(table, metadata.model_copy(update={"default_spec_id": default}))


def _spec_id(file: DataFile) -> int:
    return file.spec_id


def _with(table: Table, metadata: TableMetadata, name: Identifier | None = None) -> Table:
    return Table(name or table.name(), metadata, table.metadata_location, table.io, table.catalog)
