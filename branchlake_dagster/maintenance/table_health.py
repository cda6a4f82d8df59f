"""Measure the health of tables from their metadata: files, small files, ages, snapshots and manifests.

No data is read. Per table, one metadata file, one manifest list and the manifests of the current snapshot
are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from pyiceberg.manifest import DataFile, DataFileContent, ManifestContent, ManifestEntryStatus
from pyiceberg.table.metadata import TableMetadata

from branchlake_dagster.catalog.stored_files import StoredFileDamaged, read_metadata
from branchlake_dagster.compaction.file_measures import EffectiveDeletes, format_partition
from branchlake_dagster.errors import format_first_line
from branchlake_dagster.history.manifests import read_manifest_entries, read_manifests
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse, sql_name
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.tables.table_files import FileUnreadable, TableFiles

SMALL_FILE_BYTES = 32 * 2**20
"""A data file below this size is small. Opening it costs more than reading it."""

AGES = ("one day", "seven days", "30 days", "older")
"""The age groups of data files, by the time of the snapshot that added them."""
_LIMITS = (timedelta(days=1), timedelta(days=7), timedelta(days=30))


@dataclass(frozen=True)
class TableHealth:
    """The health of one table at one state of `main`, or sums over several tables. Sizes are in bytes.

    `table` is the table's name as a query writes it. Files and `manifests` are those of the current snapshot;
    `dangling_deletes` counts the delete files that can delete no row of the data files, so readers do not
    apply them. `snapshots` counts all snapshots. `most_small_files` is the highest number of small files in
    one partition; `crowded_partition` is that partition as text, empty for a table without partitions or
    small files. `bytes_by_age` has the bytes of data files by the age groups in `AGES`; files of expired
    snapshots count as `older`. `unreachable_bytes` is the size of files in the table's folders that the
    collection has planned to delete.
    """

    table: str
    data_files: int = 0
    small_files: int = 0
    delete_files: int = 0
    dangling_deletes: int = 0
    data_bytes: int = 0
    snapshots: int = 0
    manifests: int = 0
    metadata_bytes: int = 0
    most_small_files: int = 0
    crowded_partition: str = ""
    bytes_by_age: Mapping[str, int] = field(default_factory=dict)
    unreachable_bytes: int = 0


@dataclass(frozen=True)
class UnreadableHealth:
    """A table whose metadata or manifests cannot be read, with the text of the error."""

    table: str
    error: str


def measure_tables(
    lake: Lakehouse,
    namespace: Sequence[str] | None,
    *,
    now: datetime,
    unreachable_bytes: Mapping[str, int] | None = None,
) -> Iterator[TableHealth | UnreadableHealth]:
    """Measure the tables of `main` in a namespace, without its nested namespaces; None means all tables.

    Yields one result per table. Reads `main` at one hash. A table that cannot be read yields an
    `UnreadableHealth`, and the others are measured. `now` must have a time zone. `unreachable_bytes` maps
    dotted names of tables to bytes that are planned for deletion. Raises NessieError.
    """
    unreachable_bytes = unreachable_bytes or {}
    main_hash = lake.nessie.reference(MAIN).hash
    files = TableFiles(lake.settings.file_io_properties())
    for entry in lake.nessie.entries(f"@{main_hash}", fetch_content=True):
        if not isinstance(entry.content, IcebergTable):
            continue
        if namespace is not None and tuple(entry.key[:-1]) != tuple(namespace):
            continue
        location = entry.content.metadata_location
        try:
            measured = _measure_table(files, entry.key, location, now)
            yield replace(measured, unreachable_bytes=unreachable_bytes.get(entry.key.name, 0))
        except (OSError, StoredFileDamaged, FileUnreadable) as error:
            yield UnreadableHealth(sql_name(entry.key), str(error))
        except Exception as error:  # noqa: BLE001 - PyIceberg raises many classes for hostile metadata
            yield UnreadableHealth(sql_name(entry.key), format_first_line(error))


def _measure_table(files: TableFiles, key: ContentKey, location: str, now: datetime) -> TableHealth:
    io = files.io(location)
    metadata = read_metadata(io, location)
    snapshot = metadata.current_snapshot()
    # Delete files come first: with them, the data files are needed to find those that still delete rows.
    manifests = sorted(
        read_manifests(io, snapshot), key=lambda manifest: manifest.content != ManifestContent.DELETES
    )
    groups = _AgeGroups(metadata, now)
    small_files: dict[str, int] = {}
    deletes: list[tuple[DataFile, int]] = []
    files_beside_deletes: dict[str, list[tuple[DataFile, int]]] = {}
    data_files = data_bytes = 0
    bytes_by_age = dict.fromkeys(AGES, 0)
    for manifest in manifests:
        for entry in read_manifest_entries(io, manifest):
            if entry.status == ManifestEntryStatus.DELETED:
                continue
            file = entry.data_file
            if file.content != DataFileContent.DATA:
                deletes.append((file, entry.sequence_number or 0))
                continue
            if deletes:
                partition = format_partition(file, metadata)
                files_beside_deletes.setdefault(partition, []).append((file, entry.sequence_number or 0))
            data_files += 1
            data_bytes += file.file_size_in_bytes
            bytes_by_age[groups.find_group(entry.snapshot_id)] += file.file_size_in_bytes
            if file.file_size_in_bytes < SMALL_FILE_BYTES:
                partition = format_partition(file, metadata)
                small_files[partition] = small_files.get(partition, 0) + 1
    effective_deletes = EffectiveDeletes(metadata, deletes)
    for partition, beside_deletes in files_beside_deletes.items():
        effective_deletes.find(partition, beside_deletes)
    crowded_partition = max(small_files, key=lambda partition: small_files[partition], default="")
    return TableHealth(
        sql_name(key),
        data_files=data_files,
        small_files=sum(small_files.values()),
        delete_files=len(deletes),
        dangling_deletes=effective_deletes.dangling_count,
        data_bytes=data_bytes,
        snapshots=len(metadata.snapshots),
        manifests=len(manifests),
        metadata_bytes=files.size(location),
        most_small_files=small_files.get(crowded_partition, 0),
        crowded_partition=crowded_partition,
        bytes_by_age=bytes_by_age,
    )


class _AgeGroups:
    """Finds the age group of a file by the snapshot that added it."""

    def __init__(self, metadata: TableMetadata, now: datetime) -> None:
        now_ms = int(now.timestamp() * 1000)
        self._groups = {
            snapshot.snapshot_id: _find_age_group(now_ms - snapshot.timestamp_ms)
            for snapshot in metadata.snapshots
        }

    def find_group(self, snapshot_id: int | None) -> str:
        return self._groups.get(snapshot_id, AGES[-1]) if snapshot_id is not None else AGES[-1]


def _find_age_group(age_ms: int) -> str:
    age = timedelta(milliseconds=age_ms)
    return next((name for name, limit in zip(AGES, _LIMITS, strict=False) if age <= limit), AGES[-1])


def sum_health(tables: Iterable[TableHealth]) -> TableHealth:
    """Return the sums over several tables, with an empty name. `most_small_files` is the highest of all."""
    tables = list(tables)
    most_crowded = max(tables, key=lambda table: table.most_small_files, default=TableHealth(""))
    return TableHealth(
        "",
        data_files=sum(table.data_files for table in tables),
        small_files=sum(table.small_files for table in tables),
        delete_files=sum(table.delete_files for table in tables),
        dangling_deletes=sum(table.dangling_deletes for table in tables),
        data_bytes=sum(table.data_bytes for table in tables),
        snapshots=sum(table.snapshots for table in tables),
        manifests=sum(table.manifests for table in tables),
        metadata_bytes=sum(table.metadata_bytes for table in tables),
        most_small_files=most_crowded.most_small_files,
        crowded_partition=most_crowded.crowded_partition,
        unreachable_bytes=sum(table.unreachable_bytes for table in tables),
        bytes_by_age={age: sum(table.bytes_by_age.get(age, 0) for table in tables) for age in AGES},
    )
