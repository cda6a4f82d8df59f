"""Data files of a table that an asset's functions write on Spark's workers, as `WorkerTable`."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa
from pyiceberg.io import load_file_io
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadataUtil

from branchlake_dagster.internals.pyiceberg import write_data_files
from branchlake_dagster.settings import Settings


@dataclass(frozen=True)
class WorkerTable:
    """A table for which functions on Spark's workers write data files, without a commit.

    A function for `mapInArrow` may hold it, because it can be pickled. Workers need this package and access
    to the warehouse. The function sends the data files back, pickled, and the asset commits them by
    `commit_worker_files`. If the table's properties place files outside its folder, call
    `NessieCatalog.record_prefixes` before. Files of a task that fails or is repeated stay without a snapshot;
    garbage collection removes them.

    Args:
        metadata_json (str): The table's metadata. `from_table` takes it from a table on the run's branch.
        io (Mapping[str, str]): Properties of the warehouse's storage, which may be secrets.

    Examples:
        .. code-block:: python

            import pickle

            import pyarrow as pa

            from branchlake_dagster import LakehouseResource, WorkerTable

            def build_writer(lakehouse: LakehouseResource):
                table = lakehouse.catalog().load_table("shop.prices")
                target = WorkerTable.from_table(table, lakehouse.lakehouse.settings)

                def write(batches):
                    rows = pa.Table.from_batches(batches)
                    files = [pickle.dumps(file) for file in target.write(rows)]
                    yield pa.RecordBatch.from_pydict({"file": files})

                return write
    """

    metadata_json: str
    io: Mapping[str, str] = field(repr=False)

    @classmethod
    def from_table(cls, table: Table, settings: Settings) -> WorkerTable:
        """Describe a loaded table for worker processes, without its snapshots.

        `settings` are those of the lake; they have the properties of its storage, which may be secrets.
        """
        metadata = table.metadata.model_copy(
            update={
                "current_snapshot_id": None,
                "metadata_log": [],
                "refs": {},
                "snapshot_log": [],
                "snapshots": [],
            }
        )
        return cls(metadata.model_dump_json(), settings.worker_file_io_properties())

    def write(self, rows: pa.Table) -> list[DataFile]:
        """Write rows to new data files in the table's own layout, and return their metadata.

        `rows` has columns of the table, by name. Missing columns are null. Without rows, no file is written.
        """
        if not rows.num_rows:
            return []
        metadata = TableMetadataUtil.parse_raw(self.metadata_json)
        io = load_file_io(dict(self.io), metadata.location)
        return list(write_data_files(metadata, rows, io, commit=uuid.uuid4(), numbers=itertools.count()))
