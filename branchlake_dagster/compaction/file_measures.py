"""Measure a table's files per partition, from its manifests. No data file is opened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from urllib.parse import unquote_plus

from pyiceberg.manifest import DataFile, DataFileContent, ManifestEntryStatus
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation

from branchlake_dagster.compaction.partition_predicate import partition_predicate
from branchlake_dagster.history.manifests import read_entries
from branchlake_dagster.publication.snapshot_files import convert_delete_files
from branchlake_dagster.publication.table_change import DeleteFile

TARGET_FILE_BYTES = "write.target-file-size-bytes"
_DEFAULT_TARGET_BYTES = 512 * 1024 * 1024
"""Iceberg's default of `write.target-file-size-bytes`."""


@dataclass(frozen=True)
class PartitionFiles:
    """Numbers and sizes of the files of one partition. Sizes are in bytes.

    Attributes:
        table: The table's dotted name.
        partition: The partition as text, such as `day=2026-11-05`; empty for a table without partitions.
        files: The number of data files.
        bytes: The size of all data files.
        rows: The number of rows in all data files, including rows that delete files delete.
        small_files: The number of data files that are smaller than `small_file_bytes`.
        small_bytes: The size of the small files.
        delete_files: The number of delete files and deletion vectors that may delete rows of a data file
            that the table still has.
        dangling_deletes: The number of delete files of the whole table that can delete no row of any data
            file that the table still has. It is the same for all partitions of a table.
        deletes_bytes: The size of the data files that are not small and to which such deletes may apply.
        deletes_data_files: The number of the data files of `deletes_bytes`.
        last_write: When rows were last written to the partition; None if the snapshots of its files have
            expired. A compaction does not count as a write.
        predicate: The condition in Spark's SQL that selects the partition; None if it cannot be expressed.
        is_current_spec: Whether the files have the table's current partition spec.
        target_bytes: The table's property `write.target-file-size-bytes`, or Iceberg's default.
    """

    table: str
    partition: str
    files: int
    bytes: int
    rows: int
    small_files: int
    small_bytes: int
    delete_files: int = 0
    deletes_bytes: int = 0
    deletes_data_files: int = 0
    last_write: datetime | None = None
    predicate: str | None = None
    is_current_spec: bool = True
    target_bytes: int = _DEFAULT_TARGET_BYTES
    dangling_deletes: int = 0

    @property
    def candidate_files(self) -> int:
        """The number of data files that a bin-packing compaction rewrites."""
        return self.small_files + self.deletes_data_files

    @property
    def candidate_bytes(self) -> int:
        """The size of the data files that a bin-packing compaction rewrites."""
        return self.small_bytes + self.deletes_bytes


@dataclass
class _OpenPartition:
    """The data files of a partition, collected so far. `files` has pairs of file and sequence number."""

    spec_id: int
    predicate: str | None
    files: list[tuple[DataFile, int]] = field(default_factory=list)
    snapshot_ids: set[int] = field(default_factory=set)


def measure_table(table: Table, name: str, *, small_file_bytes: int) -> list[PartitionFiles]:
    """Measure the current snapshot of a table: one result per partition with data files, sorted by partition.

    `name` is the table's dotted name. Data files below `small_file_bytes` are small. Reads each manifest of
    the snapshot once.
    """
    metadata = table.metadata
    partitions: dict[str, _OpenPartition] = {}
    deletes: list[tuple[DataFile, int]] = []
    for entry in read_entries(table.io, table.current_snapshot()):
        if entry.status == ManifestEntryStatus.DELETED:
            continue
        file, sequence_number = entry.data_file, entry.sequence_number or 0
        if file.content != DataFileContent.DATA:
            deletes.append((file, sequence_number))
            continue
        partition_name = format_partition(file, metadata)
        open_partition = partitions.get(partition_name)
        if open_partition is None:
            spec = metadata.specs()[file.spec_id]
            predicate = partition_predicate(file.partition, spec, metadata.schema())
            open_partition = partitions[partition_name] = _OpenPartition(file.spec_id, predicate)
        open_partition.files.append((file, sequence_number))
        if entry.snapshot_id is not None:
            open_partition.snapshot_ids.add(entry.snapshot_id)
    effective_deletes = EffectiveDeletes(metadata, deletes)
    write_times = _write_times(metadata)
    measures = [
        _measure_partition(name, partition, one, metadata, effective_deletes, write_times, small_file_bytes)
        for partition, one in sorted(partitions.items())
    ]
    dangling_count = effective_deletes.dangling_count
    return [replace(measured, dangling_deletes=dangling_count) for measured in measures]


def format_partition(file: DataFile, metadata: TableMetadata) -> str:
    """Return the partition of a file as text, such as `day=2026-11-27`; empty without partition columns."""
    spec = metadata.specs()[file.spec_id]
    if not spec.fields:
        return ""
    try:
        return unquote_plus(spec.partition_to_path(file.partition, metadata.schema()))
    except (ValueError, KeyError, OverflowError):  # a dropped column, or a day after year 9999
        return str(file.partition)


def _write_times(metadata: TableMetadata) -> Mapping[int, datetime]:
    """Return the time of each snapshot that wrote rows, by snapshot id.

    Compactions (`replace`) are omitted.
    """
    return {
        snapshot.snapshot_id: datetime.fromtimestamp(snapshot.timestamp_ms / 1000, UTC)
        for snapshot in metadata.snapshots
        if snapshot.summary is None or snapshot.summary.operation != Operation.REPLACE
    }


class EffectiveDeletes:
    """Finds the delete files that may delete rows of given data files.

    Delete files stay in a table's metadata after their data files were rewritten. A delete file is omitted if
    the data file that it names is gone, or if all data files of its partition are newer.
    """

    def __init__(self, metadata: TableMetadata, deletes: Sequence[tuple[DataFile, int]]) -> None:
        self._by_partition: dict[str, list[tuple[DeleteFile, DataFile, int]]] = defaultdict(list)
        self._everywhere: list[tuple[DeleteFile, DataFile, int]] = []
        self._count = len(deletes)
        self._found_ids: set[int] = set()
        """The ids of the objects of `deletes` that `find` has counted."""
        plain_files = convert_delete_files(metadata, (file for file, _ in deletes))
        for plain, (file, sequence_number) in zip(plain_files, deletes, strict=True):
            listed = self._everywhere if plain.everywhere else self._by_partition[plain.partition]
            listed.append((plain, file, sequence_number))

    @property
    def dangling_count(self) -> int:
        """The number of delete files that `find` has not counted for any partition so far."""
        return self._count - len(self._found_ids)

    def find(self, partition: str, files: Sequence[tuple[DataFile, int]]) -> tuple[int, set[str]]:
        """Return the number of delete files that may delete rows of `files`, and the paths of these files.

        `files` are the data files of one partition, with their data sequence numbers.
        """
        listed = [*self._by_partition.get(partition, ()), *self._everywhere]
        if not listed:
            return 0, set()
        paths_by_prefix: dict[int, dict[bytes, str]] = {}
        delete_count, concerned_paths = 0, set[str]()
        for plain, delete_file, delete_number in listed:
            if (
                plain.paths is not None
                and plain.paths.low is not None
                and plain.paths.low == plain.paths.high
            ):
                low = plain.paths.low
                if len(low) not in paths_by_prefix:
                    # Bounds may be truncated, so a bound may be only the beginning of the path.
                    paths_by_prefix[len(low)] = {
                        file.file_path.encode()[: len(low)]: file.file_path for file, _ in files
                    }
                path = paths_by_prefix[len(low)].get(low)
                hit_paths = {path} if path is not None else set()
            else:
                is_equality = delete_file.content == DataFileContent.EQUALITY_DELETES
                hit_paths = {
                    file.file_path
                    for file, number in files
                    if (number < delete_number or (number == delete_number and not is_equality))
                    and (plain.paths is None or plain.paths.may_name(file.file_path))
                }
            if hit_paths:
                delete_count += 1
                self._found_ids.add(id(delete_file))
            concerned_paths |= hit_paths
        return delete_count, concerned_paths


def _measure_partition(
    table: str,
    partition: str,
    one: _OpenPartition,
    metadata: TableMetadata,
    effective_deletes: EffectiveDeletes,
    write_times: Mapping[int, datetime],
    small_file_bytes: int,
) -> PartitionFiles:
    files = [file for file, _ in one.files]
    small_files = [file for file in files if file.file_size_in_bytes < small_file_bytes]
    delete_count, concerned_paths = effective_deletes.find(partition, one.files)
    large_concerned = [
        file
        for file in files
        if file.file_path in concerned_paths and file.file_size_in_bytes >= small_file_bytes
    ]
    times = [write_times[number] for number in one.snapshot_ids if number in write_times]
    return PartitionFiles(
        table,
        partition,
        files=len(files),
        bytes=_sum_sizes(files),
        rows=sum(file.record_count for file in files),
        small_files=len(small_files),
        small_bytes=_sum_sizes(small_files),
        delete_files=delete_count,
        deletes_bytes=_sum_sizes(large_concerned),
        deletes_data_files=len(large_concerned),
        last_write=max(times, default=None),
        predicate=one.predicate,
        is_current_spec=one.spec_id == metadata.default_spec_id,
        target_bytes=int(metadata.properties.get(TARGET_FILE_BYTES, _DEFAULT_TARGET_BYTES)),
    )


def _sum_sizes(files: Iterable[DataFile]) -> int:
    return sum(file.file_size_in_bytes for file in files)
