"""The writers of Spark's workers: they write the records of a batch to data files of all tables.

The records come as Arrow batches that are already converted. The workers divide them by table, and PyIceberg
writes them with the tables' own layout. Nothing is committed here: a task that dies, is repeated or continues
as a zombie leaves files that no table names. The file names show the scan that wrote them. A task sends back
its data files and its counts.
"""

from __future__ import annotations

import base64
import itertools
import json
import pickle
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil

from branchlake_dagster.ingest.required_fields import fill_null_structs
from branchlake_dagster.internals.pyiceberg import write_data_files

SENT_BACK = pa.schema([("kind", pa.string()), ("target", pa.int32()), ("payload", pa.binary())])
"""The schema of a task's result: a row for each data file (pickled), and one row with its counts (JSON)."""
SCHEMA_VERSION = 1
"""The schema version of dead letters and kept records."""
_RECORD_ATTRIBUTES, _BAD_ATTRIBUTES = (
    ("topic", "incarnation", "partition", "timestamp"),
    ("offset", "key", "value"),
)
MOVED_SUFFIX = "_moved"
"""Suffix of a rows column: `__row0_moved` has the keys that the rows in `__row0` had before an update."""
TABLES_PER_SET = 62
"""Number of tables whose bits fit into one integer column."""
_EXTRA_NAMES = 100
"""A task reports this many new fields more than a table may have columns: some cannot become columns."""
_FLUSH_BYTES = 128 << 20
"""Bytes of Arrow memory before a file is written. The Parquet file has about a tenth of that."""


@dataclass(frozen=True)
class WorkerTarget:
    """A table as a worker needs it.

    `metadata_json` is the metadata of the table to which the rows are written, which may be a staging table.
    `attributes` maps columns to the attributes of the record that fill them, for a staging table also to its
    operation and offset. `name` is the dotted name of the table.
    """

    metadata_json: str
    row: str | None
    """The column with the structs of its rows; None for the dead letters and the kept records."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    mapped_fields: frozenset[str] = frozenset()
    """The fields of a record for which the table has columns."""


@dataclass(frozen=True)
class Work:
    """The description of a scan that all its tasks get.

    `topics` and `incarnations` have the same order. `targets` are the tables, then the dead letters, then the
    kept records if `keeps_records`. `io` has the FileIO properties of the warehouse, including secrets.
    `received_at_us` is the start of the batch in µs since 1970.
    """

    batch_id: str
    topics: Sequence[str]
    incarnations: Sequence[str]
    targets: Sequence[WorkerTarget]
    io: Mapping[str, str] = field(repr=False, default_factory=dict)
    received_at_us: int = 0
    families: int = 0
    most_tables: int = 0
    """`families` is the number of families of tables, and `most_tables` the largest number of tables of each.
    """
    most_columns: int = 0
    """Bounds the number of new fields that a task reports, however many the records have."""
    is_reprocessing: bool = False
    """Whether the records are dead letters that are reprocessed. Each must then give a row or a dead letter.
    """
    keeps_records: bool = False
    """Whether the last target gets every record as it was received."""
    scan_id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    """The first part of the UUID in the names of all data files of this scan."""

    @property
    def dead_letter_number(self) -> int:
        """The index of the dead letters in `targets`."""
        return next(number for number, target in enumerate(self.targets) if target.row is None)

    @property
    def file_name_part(self) -> str:
        """The part of file names by which the data files of this scan are recognized."""
        return f"-{self.scan_id[:8]}-{self.scan_id[8:12]}-{self.scan_id[12:]}-"


def build_writer(work: Work) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Build the function for `DataFrame.mapInArrow` that writes the records of one task.

    It yields a single batch in the schema `SENT_BACK`.
    """

    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = _Task(work)
        for batch in batches:
            task.add_batch(batch)
        yield task.finish()

    return write


def write_dead_letters(work: Work, dead_letters: Mapping[str, pa.Array], count: int) -> list[DataFile]:
    """Write the dead letters of unwritable records to data files of their table. Return the files.

    `dead_letters` has the columns, and `count` is the number of rows.
    """
    return _write_columns(work, work.dead_letter_number, dead_letters, count)


def write_kept_records(work: Work, records: Mapping[str, pa.Array], count: int) -> list[DataFile]:
    """Write unwritable records to data files of the table of kept records. Return the files.

    `records` has the columns, and `count` is the number of rows.
    """
    return _write_columns(work, len(work.targets) - 1, records, count)


def _write_columns(work: Work, number: int, columns: Mapping[str, pa.Array], count: int) -> list[DataFile]:
    table = _TableWriter(work, work.targets[number])
    table.append(table.fit_columns(columns, count))
    return list(table.flush())


_FIRST_US, _LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The years 1 to 9999, which are all that Python and PyIceberg's partitions support."""
NO_TIME_US = -1_000
"""The time of a Kafka record that has none, in µs since 1970: Kafka stores -1 ms."""


def _without_invalid_times(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Replace times outside of the years 1 to 9999 by null, and -1 ms, which means no time in Kafka.

    Some producers send microseconds as milliseconds. In a table that is partitioned by days, one such time
    would fail every batch that reads it.
    """
    index = batch.schema.get_field_index("__timestamp")
    times = batch.column(index)
    numbers = times.cast(pa.int64())
    is_in_range = pc.and_(pc.greater_equal(numbers, _FIRST_US), pc.less_equal(numbers, _LAST_US))
    is_valid = pc.and_(is_in_range, pc.not_equal(numbers, NO_TIME_US))
    if pc.all(is_valid, min_count=0).as_py():
        return batch
    valid_times = pc.if_else(is_valid, times, pa.scalar(None, times.type))
    return batch.set_column(index, batch.schema.field(index), valid_times)


def _is_in_set(batch: pa.RecordBatch, what: str, number: int) -> pa.BooleanArray:
    """Return for each record whether the bit of table `number` is set in the columns `__<what>_0`, …."""
    bits = batch.column(f"__{what}_{number // TABLES_PER_SET}")
    bit = pa.scalar(1 << number % TABLES_PER_SET, pa.int64())
    return pc.not_equal(pc.bit_wise_and(bits, bit), pa.scalar(0, pa.int64()))


class _Task:
    """Writes the records of one Spark task, and counts them."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._tables = [_TableWriter(work, target) for target in work.targets]
        self._dead_letter_number = work.dead_letter_number
        self._names = {
            "topic": pa.array(work.topics, pa.string()),
            "incarnation": pa.array(work.incarnations, pa.string()),
        }
        self._counts: Counter[str] = Counter()
        self._seen: dict[int, set[str]] = {}
        self._fields: dict[int, set[str]] = {}
        self._latest: dict[str, int] = {}
        self._sent: list[tuple[str, int, bytes]] = []

    def add_batch(self, batch: pa.RecordBatch) -> None:
        """Divide a batch of records among the tables."""
        if not batch.num_rows:
            return
        batch = _without_invalid_times(batch)
        self._count_records(batch)
        self._count_route_names(batch)
        if self._work.keeps_records:
            self._keep_records(batch)
        has_result = pa.repeat(pa.scalar(value=False), batch.num_rows)
        for number, table in enumerate(self._tables[: self._dead_letter_number]):
            is_for_table, reasons = _is_in_set(batch, "mine", number), batch.column(f"{table.row}_why")
            is_good = (
                pc.and_(is_for_table, pc.is_null(reasons))
                if reasons.null_count < len(reasons)
                else is_for_table
            )
            if f"{table.row}_evolve" in batch.schema.names:
                # Rows that do not fit yet are not written. They are read again after the table has been
                # evolved.
                is_good = pc.and_(is_good, pc.is_null(batch.column(f"{table.row}_evolve")))
            if self._work.is_reprocessing:
                has_result = pc.or_(has_result, is_for_table)
            if count := is_good.true_count:
                # Usually all records are good rows of one table. They need no copy.
                rows = None if count == batch.num_rows else pc.indices_nonzero(is_good)
                self._keep(number, table, table.build_rows(batch, rows, self._record(batch)))
                self._counts[f"rows/{number}"] += count
                if f"{table.row}{MOVED_SUFFIX}" in batch.schema.names:
                    self._delete_old_rows(batch, number, table, is_good)
            self._count_changes(batch, number, table, is_for_table)
            if reasons.null_count < len(reasons):
                # During a refill, the dead letters of the first read still exist.
                is_due = _is_in_set(batch, "bad" if "__bad_0" in batch.schema.names else "mine", number)
                bad = pc.indices_nonzero(pc.and_(is_due, pc.is_valid(reasons)))
                if len(bad):
                    bad_reasons = reasons.take(bad)
                    self._keep_dead_letters(
                        batch, bad, table.name, bad_reasons.field("kind"), bad_reasons.field("detail")
                    )
        if batch.column("__rest").null_count < batch.num_rows:
            lost = pc.struct_field(batch.column("__rest"), "lost")
            has_result = pc.or_(has_result, pc.is_valid(lost))
            rows = pc.indices_nonzero(pc.is_valid(lost))
            if len(rows):
                bad_reasons = lost.take(rows)
                self._keep_dead_letters(
                    batch, rows, None, bad_reasons.field("kind"), bad_reasons.field("detail")
                )
        if self._work.is_reprocessing:
            self._counts["left_out"] += batch.num_rows - has_result.true_count

    def _keep_records(self, batch: pa.RecordBatch) -> None:
        """Keep the records as they were received, except those that an earlier batch has kept."""
        if "__kept" in batch.schema.names:
            batch = batch.filter(batch.column("__kept"))
        table, record, count = self._tables[-1], self._record(batch), batch.num_rows
        if not count:
            return
        names = (*_RECORD_ATTRIBUTES, *_BAD_ATTRIBUTES, "headers")
        columns = {name: record(name) for name in names} | self._batch_columns(count)
        self._keep(len(self._tables) - 1, table, table.fit_columns(columns, count))
        self._counts["kept"] += count

    def _batch_columns(self, count: int) -> dict[str, pa.Array]:
        """Return the columns of dead letters and kept records that have one value for the whole batch.

        Each column, by name, repeats its value for `count` rows.
        """
        received = pa.scalar(self._work.received_at_us, pa.timestamp("us", "UTC"))
        return {
            "batch": pa.repeat(self._work.batch_id, count),
            "received_at": pa.repeat(received, count),
            "schema_version": pa.repeat(pa.scalar(SCHEMA_VERSION, pa.int32()), count),
        }

    def _delete_old_rows(
        self, batch: pa.RecordBatch, number: int, table: _TableWriter, good: pa.Array
    ) -> None:
        """Add a deletion of the row with the old keys, for each good record that has changed its keys.

        `number` is the index of `table` in `Work.targets`. `good` is true for each record of the batch that
        gives the table a valid row.
        """
        moved = pc.indices_nonzero(pc.and_(good, pc.is_valid(batch.column(f"{table.row}{MOVED_SUFFIX}"))))
        if len(moved):
            deletion = pa.repeat(pa.scalar("delete"), batch.num_rows)
            record = self._record(batch)
            self._keep(
                number,
                table,
                table.build_rows(
                    batch,
                    moved,
                    lambda name: deletion if name == "op" else record(name),
                    table.row + MOVED_SUFFIX,
                ),
            )

    def _record(self, batch: pa.RecordBatch) -> Callable[[str], pa.Array]:
        """Return a function that returns an attribute of the batch's records by name, as an array."""

        def attribute(name: str) -> pa.Array:
            names = self._names.get(name)
            return batch.column(f"__{name}") if names is None else names.take(batch.column("__topic"))

        return attribute

    def _count_records(self, batch: pa.RecordBatch) -> None:
        """Count records and bytes, and keep the latest time of each partition, in ms since 1970."""
        self._counts["records"] += batch.num_rows
        self._counts["bytes"] += batch.nbytes
        times = pa.table(
            [
                batch.column("__topic"),
                batch.column("__partition"),
                batch.column("__timestamp").cast(pa.int64()),
            ],
            names=["topic", "partition", "timestamp"],
        )
        for group in times.group_by(["topic", "partition"]).aggregate([("timestamp", "max")]).to_pylist():
            time_us = group["timestamp_max"]
            if time_us is not None:
                name = f"{self._work.topics[group['topic']]}/{group['partition']}"
                self._latest[name] = max(time_us // 1000, self._latest.get(name, time_us // 1000))

    def _count_route_names(self, batch: pa.RecordBatch) -> None:
        """Count `new/<family>/<name>` for route names whose tables do not exist yet, up to a limit."""
        for number in range(self._work.families):
            names = batch.column(f"__new{number}")
            if names.null_count == len(names):
                continue
            seen = self._seen.setdefault(number, set())
            for name in pc.unique(names.drop_null()).to_pylist():
                # The limit bounds the result, whatever routes the records have.
                if name in seen or len(seen) < self._work.most_tables:
                    seen.add(name)
                    self._counts[f"new/{number}/{name}"] += 1

    def _count_changes(
        self, batch: pa.RecordBatch, number: int, table: _TableWriter, is_for_table: pa.Array
    ) -> None:
        """Count the needed schema changes as `evolve/<target>/add/<field>`, or with widen or relax.

        The target is `number`, the index of `table` in `Work.targets`. `is_for_table` is true for each record
        of the batch that belongs to the table.
        """
        if "__unknown" in batch.schema.names:
            for change_text in pc.unique(
                batch.column("__unknown").filter(is_for_table).drop_null()
            ).to_pylist():
                for name in json.loads(change_text):
                    if name not in table.mapped_fields:
                        self._count_new_field(number, name)
        column_name = f"{table.row}_evolve"
        if column_name in batch.schema.names:
            for change_text in pc.unique(
                batch.column(column_name).filter(is_for_table).drop_null()
            ).to_pylist():
                for change in change_text.splitlines():
                    self._counts[f"evolve/{number}/{change}"] += 1

    def _count_new_field(self, number: int, name: str) -> None:
        """Count the new field `name` of the target with index `number`.

        After a limit, further names are ignored, because some producers put ids into field names.
        """
        seen = self._fields.setdefault(number, set())
        if name in seen or len(seen) < self._work.most_columns + _EXTRA_NAMES:
            seen.add(name)
            self._counts[f"evolve/{number}/add/{name}"] += 1

    def _keep_dead_letters(
        self, batch: pa.RecordBatch, rows: pa.Array, name: str | None, kinds: pa.Array, details: pa.Array
    ) -> None:
        target = self._dead_letter_number
        table, record, count = self._tables[target], self._record(batch), len(rows)
        rest = batch.column("__rest").take(rows)
        dead_letters = {
            **{attribute: record(attribute).take(rows) for attribute in _RECORD_ATTRIBUTES},
            **{attribute: rest.field(attribute) for attribute in _BAD_ATTRIBUTES},
            "headers": _parse_headers(rest.field("headers")),
            "table": self._table_of(rest, name),
            "error_kind": kinds,
            "error": details,
            **self._batch_columns(count),
        }
        self._keep(target, table, table.fit_columns(dead_letters, count))
        self._counts["dead"] += count
        self._counts[f"dead_of/{name or ''}"] += count
        tallied = pc.value_counts(kinds)
        for kind, number in zip(
            tallied.field("values").to_pylist(), tallied.field("counts").to_pylist(), strict=True
        ):
            self._counts[f"dead/{kind}"] += number

    def _table_of(self, rest: pa.StructArray, name: str | None) -> pa.Array:
        """Return the table of each dead letter: `name`, or null if no table takes the record.

        A reprocessed dead letter that no table takes keeps its earlier table.
        """
        if name is None and self._work.is_reprocessing:
            # Without its table, the dead letter would be for any table. Reprocessed again, it could be added
            # twice to a table that has the record.
            return rest.field("table")
        return pa.repeat(pa.scalar(name, pa.string()), len(rest))

    def _keep(self, number: int, table: _TableWriter, rows: pa.RecordBatch) -> None:
        table.append(rows)
        if table.bytes > _FLUSH_BYTES:
            self._flush(number, table)

    def _flush(self, number: int, table: _TableWriter) -> None:
        self._sent += [("file", number, pickle.dumps(data_file)) for data_file in table.flush()]

    def finish(self) -> pa.RecordBatch:
        """Write the remaining rows, and return the data files and counts of the task, in `SENT_BACK`."""
        for number, table in enumerate(self._tables):
            self._flush(number, table)
        summary = {"counts": dict(self._counts), "latest": self._latest}
        self._sent.append(("told", 0, json.dumps(summary).encode()))
        kinds, targets, payloads = zip(*self._sent, strict=True)
        return pa.RecordBatch.from_arrays(
            [pa.array(kinds), pa.array(targets, pa.int32()), pa.array(payloads, pa.binary())],
            schema=SENT_BACK,
        )


_HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def _parse_headers(headers_json: pa.Array) -> pa.Array:
    """Parse headers from Spark's JSON, with values in base64.

    Headers are kept for dead letters only, and few dead letters have any, so this need not be fast.
    """
    headers = []
    for record_json in headers_json.to_pylist():
        entries = json.loads(record_json) if record_json else []
        headers.append(
            [
                (entry.get("key"), base64.b64decode(entry["value"]) if "value" in entry else None)
                for entry in entries
            ]
        )
    return pa.array(headers, _HEADERS_TYPE)


class _TableWriter:
    """Writes the data files of one table in one task."""

    def __init__(self, work: Work, target: WorkerTarget) -> None:
        self._work = work
        self._target = target
        self._metadata: TableMetadata = TableMetadataUtil.parse_raw(target.metadata_json)
        self._schema = schema_to_pyarrow(self._metadata.schema(), include_field_ids=False)
        self._io: FileIO | None = None
        self._batches: list[pa.RecordBatch] = []
        self._numbers = itertools.count(0)
        self._commit = uuid.UUID(work.scan_id + uuid.uuid4().hex[16:])
        self.bytes = 0

    @property
    def name(self) -> str:
        """The table's dotted name."""
        return self._target.name

    @property
    def mapped_fields(self) -> frozenset[str]:
        """The fields of a record for which the table has columns."""
        return self._target.mapped_fields

    @property
    def row(self) -> str:
        """The name of the column with the table's rows."""
        assert self._target.row is not None  # noqa: S101 - the rows of dead letters have no such column
        return self._target.row

    def build_rows(
        self,
        batch: pa.RecordBatch,
        indices: pa.Array | None,
        record: Callable[[str], pa.Array],
        column_of_rows: str | None = None,
    ) -> pa.RecordBatch:
        """Return the records at `indices` as rows of the table, or all records if `indices` is None.

        `record` returns an attribute of the batch's records by name, as an array. `column_of_rows` is the
        column with the rows; by default it is `row`.
        """
        structs: pa.StructArray = batch.column(column_of_rows or self.row)
        if indices is not None:
            structs = structs.take(indices)
        values: dict[str, pa.Array] = {
            structs.type.field(number).name: structs.field(number)
            for number in range(structs.type.num_fields)
        }
        for column, attribute in self._target.attributes.items():
            attribute_values = record(attribute)
            values[column] = attribute_values if indices is None else attribute_values.take(indices)
        return self.fit_columns(values, len(structs))

    def fit_columns(self, values: Mapping[str, pa.Array], count: int) -> pa.RecordBatch:
        """Return a batch of `count` rows with the columns in the table's types and order.

        `values` has the columns by name. A column of the table that it lacks is null; other columns are left
        out.
        """
        columns = []
        for target_field in self._schema:
            column, kind = values.get(target_field.name), target_field.type
            fitting = fill_null_structs(pa.nulls(count, kind) if column is None else column, kind)
            columns.append(_cast_column(fitting, kind))
        # The schema has no required fields: nullability is checked elsewhere.
        fields = [pa.field(schema_field.name, schema_field.type) for schema_field in self._schema]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows to the next file."""
        self._batches.append(rows)
        self.bytes += rows.nbytes

    def flush(self) -> Iterator[DataFile]:
        """Write the added rows to data files, and yield these. Yields nothing without rows."""
        if not self._batches:
            return
        rows, self._batches, self.bytes = pa.Table.from_batches(self._batches), [], 0
        if self._io is None:
            self._io = load_file_io(dict(self._work.io), self._metadata.location)
        yield from write_data_files(
            self._metadata, rows, self._io, commit=self._commit, numbers=self._numbers
        )


def _cast_column(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type == kind:
        return column
    if isinstance(kind, pa.UuidType) and pa.types.is_string(column.type):
        return pa.ExtensionArray.from_storage(kind, _uuid_bytes(column))
    return column.cast(kind)


def _uuid_bytes(uuids: pa.StringArray) -> pa.FixedSizeBinaryArray:
    """Convert UUIDs in hexadecimal, with or without dashes, to 16 bytes each. Null stays null."""
    digits = pc.fill_null(pc.replace_substring(uuids, "-", ""), "0" * 32)
    digit_list = pa.ListArray.from_arrays(pa.array([0, len(digits)], pa.int32()), digits)
    joined = bytes.fromhex(pc.binary_join(digit_list, "")[0].as_py())
    kind = pa.binary(16)
    storage = pa.FixedSizeBinaryArray.from_buffers(kind, len(digits), [None, pa.py_buffer(joined)])
    return pc.if_else(pc.is_valid(uuids), storage, pa.scalar(None, kind))
