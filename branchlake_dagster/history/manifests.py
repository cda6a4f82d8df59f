"""Reads the manifest lists and manifests of snapshots. All other modules read them through this one.

The functions are generators: they read the storage while the caller iterates, and no further than the caller
iterates. Nothing is cached. All raise FileNotFoundError or another OSError with the location as `filename`,
and StoredFileDamaged if a file is truncated or cannot be parsed.

Facts about one column in all rows of a data file, from the file's manifest entry.

A fact is stated only if it is proved. `reliable_metrics` decides which counts and bounds can be trusted. The
value of an identity partition holds for every row of the file, whatever its metrics are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from io import BytesIO
from typing import Any

import polars as pl
from pyiceberg import types as ice
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, ManifestContent, ManifestEntry, ManifestEntryStatus, ManifestFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import IdentityTransform

from branchlake_dagster.catalog.stored_files import read_content, wrap_parse_errors
from branchlake_dagster.internals.column_metrics import bound_value, reliable_metrics
from branchlake_dagster.internals.pyiceberg import iter_entries, iter_manifests

_FEW_ENTRIES = 500
"""Up to this many entries of other snapshots are read and skipped, rather than located first."""


def read_manifests(io: FileIO, snapshot: Snapshot | None) -> Iterator[ManifestFile]:
    """Read the manifests of a snapshot from its manifest list. None as snapshot has no manifests."""
    location = snapshot.manifest_list if snapshot is not None else None
    if location:
        content = read_content(io, location)
        with wrap_parse_errors(location):
            yield from iter_manifests(content)


def read_manifest_entries(io: FileIO, manifest: ManifestFile) -> Iterator[ManifestEntry]:
    """Read all entries of a manifest, including those of deleted files."""
    content = read_content(io, manifest.manifest_path, manifest.manifest_length)
    with wrap_parse_errors(manifest.manifest_path):
        yield from iter_entries(manifest, content)


def read_own_entries(io: FileIO, manifest: ManifestFile, snapshot_id: int) -> Iterator[ManifestEntry]:
    """Read the entries of files that a snapshot itself added or removed.

    In a manifest with many files of other snapshots, only the blocks with these entries are parsed.
    """
    content = read_content(io, manifest.manifest_path, manifest.manifest_length)
    has_many_others = manifest.existing_files_count is None or manifest.existing_files_count > _FEW_ENTRIES
    positions = _find_own_entries(content, manifest, snapshot_id) if has_many_others else None
    with wrap_parse_errors(manifest.manifest_path):
        for entry in iter_entries(manifest, content, positions):
            if is_own_entry(entry, snapshot_id):
                yield entry


def is_own_entry(entry: ManifestEntry, snapshot_id: int) -> bool:
    """Whether a snapshot itself added or removed the file of an entry."""
    return entry.snapshot_id == snapshot_id and entry.status != ManifestEntryStatus.EXISTING


def _find_own_entries(content: bytes, manifest: ManifestFile, snapshot_id: int) -> list[int] | None:
    """Return the positions of the snapshot's own entries in a manifest; None if they are not known.

    A merged manifest may list all files of a table. Reading only its status and snapshot columns takes a
    tenth of the time.
    """
    try:
        columns = pl.read_avro(BytesIO(content), columns=["status", "snapshot_id"])
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):  # a codec that Polars does not support
        return None
    added_by = pl.col("snapshot_id").fill_null(manifest.added_snapshot_id)
    is_own = (pl.col("status") != ManifestEntryStatus.EXISTING.value) & (added_by == snapshot_id)
    return columns.select(is_own.arg_true()).to_series().to_list()


def read_entries(
    io: FileIO, snapshot: Snapshot | None, content: ManifestContent | None = None
) -> Iterator[ManifestEntry]:
    """Read the entries of all manifests of a snapshot, or only of its data or its delete manifests."""
    for manifest in read_manifests(io, snapshot):
        if content is None or manifest.content == content:
            yield from read_manifest_entries(io, manifest)


def read_live_files(
    io: FileIO, snapshot: Snapshot | None, content: ManifestContent | None = None
) -> Iterator[DataFile]:
    """Read the files that a snapshot consists of: all, or only the data files or the delete files."""
    for entry in read_entries(io, snapshot, content):
        if entry.status != ManifestEntryStatus.DELETED:
            yield entry.data_file


def read_added_files(io: FileIO, snapshot: Snapshot) -> Iterator[DataFile]:
    """Read the data and delete files that a snapshot added."""
    for manifest in read_manifests(io, snapshot):
        if manifest.added_snapshot_id == snapshot.snapshot_id:
            for entry in read_manifest_entries(io, manifest):
                if entry.status == ManifestEntryStatus.ADDED:
                    yield entry.data_file


_VALUES: dict[type[ice.IcebergType], type] = {
    ice.BooleanType: bool,
    ice.IntegerType: int,
    ice.LongType: int,
    ice.FloatType: float,
    ice.DoubleType: float,
    ice.DateType: int,
    ice.TimeType: int,
    ice.TimestampType: int,
    ice.TimestamptzType: int,
    ice.StringType: str,
    ice.BinaryType: bytes,
    ice.UUIDType: bytes,
    ice.DecimalType: Decimal,
}
"""The types whose bounds can be decoded, and their Python types.

Dates are days, times and time stamps are microseconds, a UUID is its 16 bytes.
"""


@dataclass(frozen=True)
class ColumnFacts:
    """What is known about one column in all rows of a file. False and None mean "not known".

    Every value that is neither null nor NaN lies between `low` and `high`, both included.
    """

    no_null: bool = False
    all_null: bool = False
    no_nan: bool = False
    low: Any = None
    high: Any = None


def column_facts(
    file: DataFile,
    field: ice.NestedField,
    spec: PartitionSpec,
    is_complete: Callable[[DataFile, int], bool] = lambda *_: False,
) -> ColumnFacts:
    """Return the facts about a top-level column. `spec` is the partition spec that the file was written with.

    `is_complete(file, field_id)` is called for a text column whose manifest entry does not show that its
    bounds cover all row groups. It returns whether they do.
    """
    kind = field.field_type
    if not isinstance(kind, ice.PrimitiveType):
        return ColumnFacts()
    for index, part in enumerate(spec.fields):
        if part.source_id == field.field_id and isinstance(part.transform, IdentityTransform):
            return _constant_facts(file.partition[index], kind)
    metrics, field_id = reliable_metrics(file, [field], is_complete), field.field_id
    null_count = metrics.null_value_counts.get(field_id)
    floating = isinstance(kind, ice.FloatType | ice.DoubleType)
    return ColumnFacts(
        no_null=null_count == 0,
        all_null=null_count == file.record_count,
        no_nan=not floating or metrics.nan_value_counts.get(field_id) == 0,
        low=_decode_bound(metrics.lower_bounds.get(field_id), kind),
        high=_decode_bound(metrics.upper_bounds.get(field_id), kind),
    )


def _constant_facts(value: Any, kind: ice.PrimitiveType) -> ColumnFacts:
    """Return the facts about a column that has one value in the whole file, its identity partition."""
    if value is None:
        return ColumnFacts(all_null=True, no_nan=True)
    if type(value) is not _VALUES.get(type(kind)) or value != value:
        return ColumnFacts(no_null=True)
    return ColumnFacts(no_null=True, no_nan=True, low=value, high=value)


def _decode_bound(stored: bytes | None, kind: ice.PrimitiveType) -> Any:
    """Decode a bound. Returns None if the bound is missing or its type has no order here."""
    return None if stored is None or type(kind) not in _VALUES else bound_value(stored, kind)
