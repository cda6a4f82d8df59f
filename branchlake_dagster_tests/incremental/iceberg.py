"""Tables as change capture reads them: plain objects, whose rows the model knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time
from functools import cached_property, lru_cache
from itertools import count
from typing import Any, NamedTuple

import pyarrow as pa
from pyiceberg.conversions import to_bytes
from pyiceberg.manifest import DataFileContent, ManifestContent, ManifestEntryStatus
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.snapshots import Operation
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DateType, LongType, NestedField, StringType, TimestampType


@lru_cache(4)
def schema_of(*, moments: bool = False, renamed: bool = False) -> Schema:
    """The columns of a table: its days may be time stamps, and their column may have another name."""
    return Schema(
        NestedField(1, "part", StringType()),
        NestedField(2, "date" if renamed else "day", TimestampType() if moments else DateType()),
        NestedField(3, "key", StringType()),
        NestedField(4, "value", LongType()),
        schema_id=int(renamed),
    )


SCHEMA = schema_of()
_NOON = time(12)
_ARROW_TYPES = {
    StringType: pa.string(),
    DateType: pa.date32(),
    TimestampType: pa.timestamp("us"),
    LongType: pa.int64(),
}
SPECS = {
    0: PartitionSpec(spec_id=0),
    1: PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "part"), spec_id=1),
}
PATH = 2147483546
"""The field id of `file_path` in files of position deletes."""
NUMBERS = count(1)
"""Of lists of manifests: no two in one process are the same, whatever world they are in."""


class Row(NamedTuple):
    part: str | None
    day: date | None
    key: str
    value: int


@lru_cache(4096)
def _stored(field_id: int, value: str | int, *, moments: bool) -> bytes:
    return to_bytes(schema_of(moments=moments).find_type(field_id), value)


def _number_of(day: date, *, moments: bool) -> int:
    """Days since 1970, or the microseconds until its noon."""
    days = day.toordinal() - 719163
    return (2 * days + 1) * 43_200_000_000 if moments else days


class File:
    """A data file, or one of position deletes that names rows of data files by path."""

    file_size_in_bytes = 100
    equality_ids = None
    nan_value_counts = None

    def __init__(
        self,
        path: str,
        rows: Sequence[Row] = (),
        *,
        names: Mapping[str, Sequence[int]] | None = None,
        part: str | None = None,
        by_part: bool = False,
        bounds: bool = True,
        moments: bool = False,
    ) -> None:
        self.file_path = path
        self.rows = rows
        self.names = names or {}
        self.content = DataFileContent.DATA if names is None else DataFileContent.POSITION_DELETES
        self.record_count = len(rows) if names is None else sum(map(len, names.values()))
        self.spec_id = int(by_part)
        self.partition = [part] if by_part else []
        self.split_offsets = [4]
        self._bounds = bounds
        self._moments = moments

    @cached_property
    def _columns(self) -> dict[int, list[Any]]:
        days = [None if r.day is None else _number_of(r.day, moments=self._moments) for r in self.rows]
        shown = [(r.part, day, r.key, r.value) for r, day in zip(self.rows, days, strict=True)]
        return {number: [row[number - 1] for row in shown] for number in range(1, 5)}

    @cached_property
    def value_counts(self) -> dict[int, int]:
        return dict.fromkeys(range(1, 5), len(self.rows))

    @cached_property
    def null_value_counts(self) -> dict[int, int]:
        return {n: sum(one is None for one in values) for n, values in self._columns.items()}

    def _ends(self, which: Any) -> dict[int, bytes] | None:
        if self.names:
            return {PATH: which(self.names).encode()}
        if not self._bounds:
            return None
        known = {n: [v for v in values if v is not None] for n, values in self._columns.items()}
        return {n: _stored(n, which(values), moments=self._moments) for n, values in known.items() if values}

    @cached_property
    def lower_bounds(self) -> dict[int, bytes] | None:
        return self._ends(min)

    @cached_property
    def upper_bounds(self) -> dict[int, bytes] | None:
        return self._ends(max)


@dataclass(frozen=True)
class Entry:
    data_file: File
    snapshot_id: int
    status: ManifestEntryStatus = ManifestEntryStatus.EXISTING


@dataclass(frozen=True)
class Manifest:
    content: ManifestContent
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Summary:
    operation: Operation
    additional_properties: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Snapshot:
    snapshot_id: int
    parent_snapshot_id: int | None
    sequence_number: int
    summary: Summary
    added: tuple[File, ...]
    removed: tuple[File, ...]
    live: tuple[Entry, ...]
    """After it, without what it added."""
    manifest_list: str = field(default_factory=lambda: f"list-{next(NUMBERS)}")
    timestamp_ms: int = 1_700_000_000_000
    kept: Mapping[Any, Any] = field(default_factory=dict)
    """What a consumer's table holds after it, by partition, key or day."""

    def manifests(self) -> Iterator[Manifest]:
        every = [
            *self.live,
            *(Entry(one, self.snapshot_id, ManifestEntryStatus.ADDED) for one in self.added),
            *(Entry(one, self.snapshot_id, ManifestEntryStatus.DELETED) for one in self.removed),
        ]
        for content, kind in (
            (ManifestContent.DATA, DataFileContent.DATA),
            (ManifestContent.DELETES, DataFileContent.POSITION_DELETES),
        ):
            if found := tuple(one for one in every if one.data_file.content is kind):
                yield Manifest(content, found)

    @cached_property
    def after(self) -> tuple[Entry, ...]:
        return (*self.live, *(Entry(one, self.snapshot_id) for one in self.added))

    @cached_property
    def rows(self) -> Counter[Row]:
        """What the table holds."""
        deletes = self.deletes
        data = [one.data_file for one in self.after if one.data_file.content is DataFileContent.DATA]
        return Counter(row for file in data for row in left(file, deletes))

    @property
    def deletes(self) -> list[File]:
        return [one.data_file for one in self.after if one.data_file.names]


def left(file: File, deletes: Iterable[File]) -> list[Row]:
    """The rows of a file that no delete file names."""
    gone = {place for one in deletes for place in one.names.get(file.file_path, ())}
    return [row for place, row in enumerate(file.rows) if place not in gone]


@dataclass(frozen=True, eq=False)
class Metadata:
    table_uuid: str
    by_part: bool = False
    snapshots: tuple[Snapshot, ...] = ()
    current_snapshot_id: int | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    moments: bool = False
    renamed: bool = False

    def schema(self) -> Schema:
        return schema_of(moments=self.moments, renamed=self.renamed)

    @property
    def schemas(self) -> list[Schema]:
        return [schema_of(moments=self.moments, renamed=renamed) for renamed in (False, True)]

    def specs(self) -> Mapping[int, PartitionSpec]:
        return SPECS

    @cached_property
    def _by_id(self) -> dict[int, Snapshot]:
        return {one.snapshot_id: one for one in self.snapshots}

    def snapshot_by_id(self, number: int) -> Snapshot | None:
        return self._by_id.get(number)

    def current_snapshot(self) -> Snapshot | None:
        return self._by_id.get(self.current_snapshot_id or 0)


@dataclass(frozen=True)
class Task:
    file: File


@dataclass(frozen=True, eq=False)
class Table:
    """A state of a table."""

    metadata: Metadata
    io: None = None

    def schema(self) -> Schema:
        return self.metadata.schema()

    def scan(self, row_filter: object = None) -> Table:
        return self

    def plan_files(self) -> list[Task]:
        return [Task(file) for file in self.data]

    @property
    def head(self) -> Snapshot | None:
        return self.metadata.current_snapshot()

    @property
    def kept(self) -> Mapping[Any, Any]:
        """What a consumer's table holds, by partition, key or day."""
        return self.head.kept if self.head else {}

    @property
    def data(self) -> list[File]:
        head = self.head
        return [one.data_file for one in head.after if not one.data_file.names] if head else []

    @property
    def deletes(self) -> list[File]:
        return self.head.deletes if self.head else []

    @property
    def rows(self) -> Counter[Row]:
        return self.head.rows if self.head else Counter()

    def changed(self, **what: Any) -> Table:
        return replace(self, metadata=replace(self.metadata, **what))


def arrow(rows: Iterable[Row], schema: Schema = SCHEMA) -> pa.Table:
    """The rows as a scan of a table with these columns gives them."""
    found = list(rows)
    columns: dict[int, list[Any]] = {
        number: [row[number - 1] for row in found] for number in range(1, len(Row._fields) + 1)
    }
    kinds = arrow_schema(schema)
    if pa.timestamp("us") in kinds.types:
        columns[2] = [None if day is None else datetime.combine(day, _NOON) for day in columns[2]]
    arrays = [
        pa.array(columns[field.field_id], kind.type) for field, kind in zip(schema.fields, kinds, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=kinds)


def arrow_schema(schema: Schema) -> pa.Schema:
    """As `schema_to_pyarrow` makes it."""
    return pa.schema([(field.name, _ARROW_TYPES[type(field.field_type)]) for field in schema.fields])


def rows_of(table: pa.Table) -> list[Row]:
    columns = [table[name].to_pylist() for name in Row._fields]
    columns[1] = [one.date() if isinstance(one, datetime) else one for one in columns[1]]
    return [Row(*values) for values in zip(*columns, strict=True)]
