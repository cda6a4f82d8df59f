"""The files and rows of stored table states, read without the code that is tested.

Metadata files and manifests never change, so each is read once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import (
    ManifestContent,
    ManifestEntryStatus,
    ManifestFile,
    read_manifest_list,
)
from pyiceberg.table import StaticTable
from pyiceberg.table.metadata import TableMetadata

from branchlake_dagster_tests.maintenance_simulation.row_changes import Rows
from branchlake_dagster_tests.simulation.history import Commit, History, Json, Pointer

_SCHEME = re.compile(r"^[a-zA-Z]+:/*")


def local_path(location: str) -> str:
    """Return the normalized path of a location, whatever its spelling."""
    return os.path.normpath("/" + _SCHEME.sub("", location).lstrip("/"))


class StoredStates:
    """Reads states of tables by the location of their metadata file."""

    def __init__(self) -> None:
        self._files: dict[str, frozenset[str]] = {}
        self._manifests: dict[str, frozenset[str]] = {}
        self._rows: dict[str, Rows] = {}
        self._arrow_tables: dict[str, pa.Table] = {}

    def files(self, location: str) -> frozenset[str]:
        """Return the paths of all files that a reader of any snapshot of the state may open.

        Raises FileNotFoundError if one on the way to them does not exist.
        """
        files = self._files.get(location)
        if files is None:
            files = self._files[location] = frozenset(self._find_files(location))
        return files

    def _find_files(self, location: str) -> Iterator[str]:
        yield (path := local_path(location))
        metadata = json.loads(Path(path).read_bytes())
        for name in ("statistics", "partition-statistics"):
            for statistics in metadata.get(name) or ():
                yield local_path(statistics["statistics-path"])
        for snapshot in metadata.get("snapshots") or ():
            yield (manifest_list := local_path(snapshot["manifest-list"]))
            for manifest in _read_manifest_paths(manifest_list):
                yield (manifest_path := local_path(manifest))
                yield from self._read_manifest(manifest_path)

    def _read_manifest(self, path: str) -> frozenset[str]:
        files = self._manifests.get(path)
        if files is None:
            files = self._manifests[path] = frozenset(map(local_path, _read_live_paths(path)))
        return files

    def missing_files(self, location: str) -> list[str]:
        """Return the files of a state that do not exist."""
        try:
            files = self.files(location)
        except FileNotFoundError as error:
            return [str(error.filename)]
        return sorted(path for path in files if not Path(path).exists())

    def rows(self, location: str) -> Rows:
        """Return the rows of the current snapshot, sorted."""
        rows = self._rows.get(location)
        if rows is None:
            scan = StaticTable.from_metadata(location).scan()
            rows = tuple(sorted((row["day"], row["id"]) for row in scan.to_arrow().to_pylist()))
            self._rows[location] = rows
        return rows

    def arrow_rows(self, metadata: TableMetadata) -> pa.Table:
        """Return the rows of a table without delete files. A data file is read once, and never by PyIceberg.

        With its scans, the journal of the collector would take half of the time of a schedule.
        """
        tables = [metadata.schema().as_arrow().empty_table()]
        snapshot = metadata.current_snapshot()
        if snapshot is not None:
            for manifest in _read_manifest_paths(local_path(snapshot.manifest_list)):
                for path in sorted(self._read_manifest(local_path(manifest))):
                    if path not in self._arrow_tables:
                        self._arrow_tables[path] = pq.ParquetFile(path).read()
                    tables.append(self._arrow_tables[path].cast(tables[0].schema))
        return pa.concat_tables(tables)

    @staticmethod
    def data_files(location: str) -> set[str]:
        """Return the data files of the current snapshot, as they are spelled."""
        tasks = StaticTable.from_metadata(location).scan().plan_files()
        return {task.file.file_path for task in tasks}


_POLARS_ERRORS = (pl.exceptions.PolarsError, pl.exceptions.PanicException)
"""What Polars raises for the Avro files that it does not read."""


def _read_manifest_paths(path: str) -> list[str]:
    """Return the manifests that a manifest list names."""
    try:
        return [
            str(value) for value in pl.read_avro(path, columns=["manifest_path"])["manifest_path"].to_list()
        ]
    except _POLARS_ERRORS:
        return [one.manifest_path for one in read_manifest_list(PyArrowFileIO().new_input(path))]


def _read_live_paths(path: str) -> list[str]:
    """Return the files that a manifest lists and that are not removed."""
    try:
        entries = pl.read_avro(path, columns=["status", "data_file"])
        live = entries.filter(pl.col("status") != ManifestEntryStatus.DELETED.value)
        return [str(value) for value in live["data_file"].struct.field("file_path").to_list()]
    except _POLARS_ERRORS:
        manifest = ManifestFile.from_args(
            manifest_path=path,
            manifest_length=Path(path).stat().st_size,
            partition_spec_id=0,
            content=ManifestContent.DATA,
            sequence_number=0,
            min_sequence_number=0,
            added_snapshot_id=-1,
        )
        entries = manifest.fetch_manifest_entry(PyArrowFileIO(), discard_deleted=True)
        return [entry.data_file.file_path for entry in entries]


def table_locations(contents: Mapping[tuple[str, ...], Json]) -> dict[tuple[str, ...], str]:
    """Return the metadata files of the tables among Nessie's contents."""
    return {
        key: content["metadataLocation"]
        for key, content in contents.items()
        if content["type"] == "ICEBERG_TABLE"
    }


class LiveStates:
    """Which states must be readable: those of all heads, and of all commits within the history horizon."""

    def __init__(self) -> None:
        self._locations: dict[str, frozenset[str]] = {}

    def find(self, history: History, cutoff: datetime) -> set[str]:
        """Return the metadata files of live states.

        The newest commit before `cutoff` of each reference counts, because it was the state at the horizon.
        A tag that a sweep has claimed needs nothing, nor does one that a restoration of a dropped table made.
        """
        live: set[str] = set()
        seen: set[str] = set()
        for name, pointer in history.references.items():
            if name.startswith(("sweeping-", "undrop-")):
                continue
            for commit in history.first_parents(pointer.hash):
                if commit.hash in seen:
                    break
                live |= self._locations_of(commit)
                if commit.time < cutoff:
                    break
                seen.add(commit.hash)
        return live

    def _locations_of(self, commit: Commit) -> frozenset[str]:
        locations = self._locations.get(commit.hash)
        if locations is None:
            locations = frozenset(table_locations(commit.contents).values())
            self._locations[commit.hash] = locations
        return locations


def list_files(folders: Iterable[Path]) -> set[str]:
    """Return the paths of all files below the folders."""
    return {str(path) for folder in folders for path in folder.rglob("*") if path.is_file()}


class NessieBackup:
    """A copy of all that a Nessie has."""

    def __init__(self, history: History) -> None:
        self._commits = dict(history.commits)
        self._numbered = list(history._numbered)
        self._references = {name: (one.type, one.hash) for name, one in history.references.items()}

    def find_states_of_main(self, cutoff: datetime) -> set[str]:
        """Return the metadata files of the states that `main` had since `cutoff`."""
        locations: set[str] = set()
        commit_hash = self._references["main"][1]
        while commit := self._commits.get(commit_hash):
            locations |= set(table_locations(commit.contents).values())
            if commit.time < cutoff:
                break
            commit_hash = commit.parents[0]
        return locations

    def restore(self, history: History) -> None:
        """Set the Nessie back to the copy. Later commits are lost."""
        history.commits = dict(self._commits)
        history._numbered = list(self._numbered)
        history.references = {name: Pointer(*values) for name, values in self._references.items()}
