"""Parse pulled files by Spark: parts of files on workers, then one element set per object of each file."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from branchlake_dagster.sda.gp.limits import ReadLimits, decode_gp_file
from branchlake_dagster.sda.gp.parts import PART_CHARS, divide_text
from branchlake_dagster.sda.gp.read import detect_format, empty_file_error
from branchlake_dagster.sda.gp.records import (
    CatalogueError,
    EmptyCatalogueError,
    TooLargeCatalogueError,
    UnreadableCatalogueError,
)
from branchlake_dagster.sda.pulls.arrow import (
    ELEMENT_SET_NAMES,
    ENTRY_NAMES,
    PART_SCHEMA,
    REJECTED_NAMES,
    SATCAT_FORMAT,
    RecordKind,
    keep_latest_batches,
    parse_batches,
    record_schema,
)
from branchlake_dagster.sda.registry.satcat import is_satcat
from branchlake_dagster.sda.registry.sources import source_name
from branchlake_dagster.sda.shipping import map_in_arrow
from branchlake_dagster.sda.sources import GpFile

_COMPRESSION_LEVEL = 1
_ERROR_TYPES: dict[str, type[CatalogueError]] = {
    error.__name__: error for error in (EmptyCatalogueError, TooLargeCatalogueError, UnreadableCatalogueError)
}


@dataclass(frozen=True)
class PulledRows:
    """The rows of pulled files as Spark frames, and their numbers. ``reasons`` counts rejected records."""

    element_sets: DataFrame
    rejected_records: DataFrame
    satellite_entries: DataFrame
    element_set_count: int
    entry_count: int
    reasons: dict[str, int]


@contextmanager
def parse_pulls(
    session: SparkSession,
    files: Sequence[tuple[str, GpFile]],
    limits: ReadLimits,
    part_chars: int = PART_CHARS,
) -> Iterator[PulledRows]:
    """Parse files on Spark's workers. The frames are valid until the context ends.

    Args:
        session: The session of the run.
        files: The snapshot id and the file of each pull.
        limits: Limits on the size of files and records.
        part_chars: The usual length of the parts into which files are divided.

    Raises:
        EmptyCatalogueError: A file has no records.
        TooLargeCatalogueError: A file, or its unpacked content, exceeds the limit.
        UnreadableCatalogueError: A file as a whole is damaged.
    """
    parts = build_parts(files, limits, part_chars)
    frame = session.createDataFrame(parts).repartition(parts.num_rows)
    schema = record_schema()
    parsed = map_in_arrow(frame, parse_batches(limits), schema)
    by_object = parsed.repartition("snapshot_id", "sat_no")
    records = map_in_arrow(by_object, keep_latest_batches, schema).persist()
    try:
        found = records.groupBy("snapshot_id", "kind", "reason").count().collect()
        counts = {(row[0], row[1], row[2]): int(row[3]) for row in found}
        if any(kind == RecordKind.FAILURE for _, kind, _ in counts):
            _raise_failure(records)
        snapshots = {snapshot for snapshot, _, _ in counts}
        for snapshot, file in files:
            if snapshot not in snapshots:
                raise empty_file_error(file.source)
        reasons: dict[str, int] = {}
        for (_, kind, reason), count in sorted(counts.items(), key=lambda one: str(one[0][2])):
            if kind == RecordKind.REJECTED:
                reasons[str(reason)] = reasons.get(str(reason), 0) + count

        def count_kind(wanted: RecordKind) -> int:
            return sum(count for (_, kind, _), count in counts.items() if kind == wanted)

        def select_kind(kind: RecordKind, names: Sequence[str]) -> DataFrame:
            return records.where(records["kind"] == str(kind)).select(*names)

        yield PulledRows(
            select_kind(RecordKind.ELEMENT_SET, ELEMENT_SET_NAMES),
            select_kind(RecordKind.REJECTED, REJECTED_NAMES),
            select_kind(RecordKind.ENTRY, ENTRY_NAMES),
            count_kind(RecordKind.ELEMENT_SET),
            count_kind(RecordKind.ENTRY),
            reasons,
        )
    finally:
        records.unpersist()


def build_parts(
    files: Sequence[tuple[str, GpFile]], limits: ReadLimits, part_chars: int = PART_CHARS
) -> pa.Table:
    """Divide files into parts (`PART_SCHEMA`). Satellite catalogs, JSON and XML are one part each.

    Raises:
        TooLargeCatalogueError: A file unpacks to more than the limit.
        UnreadableCatalogueError: The gzip stream of a file is damaged.
    """
    rows = []
    for snapshot, file in files:
        pull = (
            snapshot,
            file.collected_at.astimezone(UTC),
            source_name(snapshot),
            file.data_mode,
            file.source,
        )
        if is_satcat(snapshot):
            rows.append((*pull, SATCAT_FORMAT, 1, _compress(file.content)))
            continue
        text = decode_gp_file(file.content, file.source, limits)
        file_format = detect_format(text)
        rows += [
            (*pull, str(file_format), part.first_line, _compress(part.text.encode()))
            for part in divide_text(text, file_format, part_chars)
        ]
    columns = zip(*rows, strict=True)
    return pa.Table.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, PART_SCHEMA, strict=True)],
        schema=PART_SCHEMA,
    )


def _compress(content: bytes) -> bytes:
    return zlib.compress(content, _COMPRESSION_LEVEL)


def _raise_failure(records: DataFrame) -> None:
    failures = records.where(records["kind"] == str(RecordKind.FAILURE)).sort("raw_text")
    error_type, *fields = failures.select("reason", "raw_text", "message", "remedy").collect()[0]
    raise _ERROR_TYPES[error_type](*fields)
