"""Decide whether PyIceberg or Spark's MERGE writes an upsert. This module reads and writes no table.

PyIceberg writes an upsert if the table will contain the same rows as after a MERGE, and if PyIceberg is not
more expensive. Spark writes in all cases that are not known to be equal (docs/adr/0042).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pyiceberg import transforms
from pyiceberg import types as ice
from pyiceberg.table import TableProperties

from branchlake_dagster.stored_names import EventMetadata

MAX_FRAME_ROWS = 1_000_000
"""The largest number of rows of a frame that PyIceberg upserts.

The frame is in the step's memory already; the upsert stores its keys a second time.
"""
MAX_CANDIDATE_BYTES = 256 * 2**20
"""The largest total size, in bytes, of the data files that may have one of the keys.

Files of random numbers took 2.3 times their size in memory.
"""
MAX_CANDIDATE_VALUES = 20_000_000
"""The largest number of values (rows times columns) in the files that may have one of the keys.

Repeated text is small in a file but not in memory: 20 million strings of 44 bytes took 1 GB.
"""
MAX_CANDIDATE_PARTITIONS = 1_000
"""The largest number of partitions of the files that may have one of the keys.

PyIceberg scans all written rows once for each partition.
"""
MAX_TABLE_FILES = 10_000
"""The largest number of data files of a table into which PyIceberg upserts.

PyIceberg needs about 40 µs per manifest entry, and reads each entry twice.
"""


class SparkReason(StrEnum):
    """The reason why Spark writes an upsert. A materialization reports the values."""

    SPARK_FRAME = "the asset returned a Spark frame"
    CHANGED_KEYS = "too many keys of its inputs have changed"
    FORMAT_VERSION = "the table does not have format version 2"
    PARTITION_SPECS = "the table has several partition specs"
    PARTITION_COLUMNS = "the table is partitioned by a column or transform that only Spark writes"
    SORT_ORDER = "the table has a sort order"
    MERGE_ON_READ = "the table merges on read"
    DELETE_FILES = "the table has delete files"
    REQUIRED_COLUMNS = "the table has columns that must not be null"
    PROPERTIES = "the table has properties for its files that only Spark follows"
    KEY_TYPE = "a key is a float or nested"
    TABLE_FILES = "the table has too many data files"
    FRAME_ROWS = "the frame has too many rows"
    CANDIDATE_FORMAT = "files that may hold its keys are not Parquet"
    CANDIDATE_BYTES = "files that may hold its keys are too large"
    CANDIDATE_VALUES = "files that may hold its keys hold too many values"
    CANDIDATE_PARTITIONS = "files that may hold its keys are in too many partitions"
    UNREADABLE = "PyIceberg cannot read files that may hold its keys"
    SHARED_KEYS = "several rows of the table have one of its keys"


def engine_metadata(plan: object) -> dict[str, str]:
    """Return materialization metadata: the engine of the upsert, and the reason if it is Spark.

    `plan` is a SparkReason or any other plan, which means PyIceberg.
    """
    if isinstance(plan, SparkReason):
        return {EventMetadata.UPSERT_ENGINE: "Spark", EventMetadata.UPSERT_BY_SPARK_BECAUSE: plan.value}
    return {EventMetadata.UPSERT_ENGINE: "PyIceberg"}


@dataclass(frozen=True)
class TableFacts:
    """Facts about a table and the frame to write, which are known without reading a data file of the table.

    `keys` are the types of the key columns. `partitioned_by` has the transform and the type of each partition
    column. `properties` are the table's properties. `required` means that a column, or a part of one, must
    not be null.
    """

    frame_rows: int
    keys: tuple[ice.IcebergType, ...]
    format_version: int = 2
    partition_specs: int = 1
    partitioned_by: tuple[tuple[transforms.Transform, ice.IcebergType], ...] = ()  # type: ignore[type-arg]
    sorted: bool = False
    required: bool = False
    delete_files: bool = False
    data_files: int = 0
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CandidateFacts:
    """Totals of the data files that may have one of the keys. `value_count` is rows times columns."""

    formats: frozenset[str] = frozenset()
    size_bytes: int = 0
    value_count: int = 0
    partition_count: int = 0


_KEY_TYPES = (
    ice.BooleanType,
    ice.IntegerType,
    ice.LongType,
    ice.DecimalType,
    ice.DateType,
    ice.TimeType,
    ice.TimestampType,
    ice.TimestamptzType,
    ice.StringType,
    ice.UUIDType,
    ice.FixedType,
    ice.BinaryType,
)
"""Types for which both engines agree whether two values are equal.

They disagree for floats (-0.0 and NaN).
"""

_PARTITION_TYPES = (
    ice.BooleanType,
    ice.IntegerType,
    ice.LongType,
    ice.DateType,
    ice.TimestampType,
    ice.TimestamptzType,
    ice.StringType,
)
_TRANSFORMS = (
    transforms.IdentityTransform,
    transforms.BucketTransform,
    transforms.TruncateTransform,
    transforms.YearTransform,
    transforms.MonthTransform,
    transforms.DayTransform,
    transforms.HourTransform,
)

_MERGE_MODE = "write.merge.mode"
_SPARK_ONLY_PREFIXES = (
    TableProperties.PARQUET_ROW_GROUP_SIZE_BYTES,
    "write.parquet.bloom-filter",
    "write.location-provider.impl",
    "encryption.",
)
"""Prefixes of the properties that PyIceberg ignores when it writes a file."""


def find_table_reason(facts: TableFacts) -> SparkReason | None:
    """Return the first reason in the facts on the table and the frame why Spark must write this upsert.

    None if there is none. No data file is read for it.
    """
    unsupported_types = [
        kind
        for transform, kind in facts.partitioned_by
        if not isinstance(transform, _TRANSFORMS) or not isinstance(kind, _PARTITION_TYPES)
    ]
    return _first_applicable(
        (SparkReason.FORMAT_VERSION, facts.format_version != 2),
        (SparkReason.PARTITION_SPECS, facts.partition_specs > 1),
        (SparkReason.PARTITION_COLUMNS, bool(unsupported_types)),
        (SparkReason.SORT_ORDER, facts.sorted),
        (SparkReason.MERGE_ON_READ, facts.properties.get(_MERGE_MODE, "copy-on-write") != "copy-on-write"),
        (SparkReason.DELETE_FILES, facts.delete_files),
        (SparkReason.REQUIRED_COLUMNS, facts.required),
        (SparkReason.PROPERTIES, any(name.startswith(_SPARK_ONLY_PREFIXES) for name in facts.properties)),
        (SparkReason.KEY_TYPE, not all(isinstance(kind, _KEY_TYPES) for kind in facts.keys)),
        (SparkReason.TABLE_FILES, facts.data_files > MAX_TABLE_FILES),
        (SparkReason.FRAME_ROWS, facts.frame_rows > MAX_FRAME_ROWS),
    )


def find_candidate_reason(facts: CandidateFacts) -> SparkReason | None:
    """Return the first reason why Spark must write this upsert, in the totals of the candidate files.

    The candidates are the data files that may have one of the keys. None if there is none.
    """
    return _first_applicable(
        (SparkReason.CANDIDATE_FORMAT, not facts.formats <= {"PARQUET"}),
        (SparkReason.CANDIDATE_BYTES, facts.size_bytes > MAX_CANDIDATE_BYTES),
        (SparkReason.CANDIDATE_VALUES, facts.value_count > MAX_CANDIDATE_VALUES),
        (SparkReason.CANDIDATE_PARTITIONS, facts.partition_count > MAX_CANDIDATE_PARTITIONS),
    )


def _first_applicable(*tests: tuple[SparkReason, bool]) -> SparkReason | None:
    return next((reason for reason, applies in tests if applies), None)


def has_required_fields(fields: Iterable[ice.NestedField]) -> bool:
    """Return whether a column, or a part of one, must not be null.

    Map keys are never null, so they do not count.
    """
    return any(column.required or _has_required_parts(column.field_type) for column in fields)


def _has_required_parts(kind: ice.IcebergType) -> bool:
    if isinstance(kind, ice.StructType):
        return has_required_fields(kind.fields)
    if isinstance(kind, ice.ListType):
        return has_required_fields([kind.element_field])
    if isinstance(kind, ice.MapType):
        return _has_required_parts(kind.key_type) or has_required_fields([kind.value_field])
    return False
