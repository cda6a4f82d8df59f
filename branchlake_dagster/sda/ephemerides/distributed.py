"""Read ephemeris files and screen them against the catalog on Spark's workers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import polars as pl
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from branchlake_dagster.sda.ephemerides.listing import screened_file
from branchlake_dagster.sda.messages.errors import UnreadableMessage
from branchlake_dagster.sda.messages.oem_read import read_oem
from branchlake_dagster.sda.shipping import pickle_by_value

_UTC = pa.timestamp("us", "UTC")
_COMPRESSION_LEVEL = 1
_MAX_BATCH_ROWS = 50_000
_MAX_FILE_BATCH_BYTES = 64 * 1024 * 1024
"""The compressed bytes of files that are sent together.

Spark Connect's requests and the tasks that Spark sends to its workers have at most 128 MiB.
"""
_MAX_WARNINGS = 5
"""The number of unusable records of a file that are reported one by one."""

EPHEMERIS_FILE_SCHEMA = pa.schema([pa.field("name", pa.string()), pa.field("content", pa.binary())])
"""One row per file. ``content`` has the bytes of the file, compressed by zlib."""

EPHEMERIS_CONJUNCTION_SCHEMA = pa.schema(
    [
        pa.field("ephemeris", pa.string()),
        *(pa.field(f"sat1_{name}", pa.string()) for name in ("source", "name", "object_id")),
        pa.field("kind", pa.string()),
        pa.field("tca", _UTC),
        pa.field("miss_distance_km", pa.float64()),
        pa.field("relative_speed_km_s", pa.float64()),
        pa.field("sat2_object_designator", pa.int64()),
        pa.field("together_min", pa.int64()),
        *(pa.field(f"relative_position_{axis}_km", pa.float64()) for axis in "rtn"),
        *(pa.field(f"relative_velocity_{axis}_km_s", pa.float64()) for axis in "rtn"),
        pa.field("sat2_element_epoch", _UTC),
        pa.field("sat2_element_age_days", pa.float64()),
        pa.field("sat2_name", pa.string()),
        pa.field("screened_from", _UTC),
        pa.field("screened_until", _UTC),
        pa.field("threshold_km", pa.float64()),
    ]
)
"""The columns of `EphemerisConjunction`."""

REPORT_SCHEMA = pa.schema(
    [
        pa.field("file", pa.string()),
        pa.field("approaches", pa.int64()),
        pa.field("unusable_records", pa.int64()),
        pa.field("warnings", pa.list_(pa.string())),
        *(pa.field(f"error_{name}", pa.string()) for name in ("message", "hint", "reason", "subject")),
    ]
)
"""One row per file: the number of its rows, and of its records that cannot be used.

``warnings`` describe the first of these records. If the file cannot be screened, ``error_message`` and the
other fields of the `UnreadableMessage` are set.
"""

_SCREENED_SCHEMA = pa.schema([*EPHEMERIS_CONJUNCTION_SCHEMA, *REPORT_SCHEMA])
"""Close approaches, and a report for each file. A row has the columns of one of them; the others are null."""


@dataclass(frozen=True)
class FileScreening:
    """Screens ephemeris files against a catalog. Spark ships it to the workers.

    Args:
        catalogue: The columns `Elements.COLUMNS`, and, if they exist, ``object_name`` and ``object_id``.
        threshold_km: The largest distance that counts.
        max_element_age_days: Objects whose element sets differ from a file's start by more days are left out.
        exclude: Catalog numbers to leave out, in addition to the object with the file's own id.
    """

    catalogue: pl.DataFrame
    threshold_km: float
    max_element_age_days: float
    exclude: Sequence[int]

    def screen_batches(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Convert batches of `EPHEMERIS_FILE_SCHEMA` to close approaches and one report per file.

        An unreadable file is reported and does not raise, because Spark would report the exception of a
        worker as text, without its fields.
        """
        for batch in batches:
            for file in batch.to_pylist():
                yield from self._screen_file(file["name"], zlib.decompress(file["content"]))

    def _screen_file(self, name: str, content: bytes) -> Iterator[pa.RecordBatch]:
        report: dict[str, object] = {"file": name, "approaches": 0, "unusable_records": 0, "warnings": []}
        try:
            read = read_oem(content, name)
            report["unusable_records"] = read.rejected.height
            report["warnings"] = [
                f"{name}:{row['line_number']}: {row['reason']}: {row['message']}"
                for row in read.rejected.head(_MAX_WARNINGS).iter_rows(named=True)
            ]
            if not read.segments:
                raise UnreadableMessage(
                    f"Ephemeris file {name} has no segment that can be screened.",
                    hint="The run's log has the errors. Remove the file from the folder or correct it.",
                    reason="no_segment",
                    subject=name,
                )
            rows = screened_file(
                name,
                read,
                self.catalogue,
                threshold_km=self.threshold_km,
                max_element_age_days=self.max_element_age_days,
                exclude=self.exclude,
            )
        except UnreadableMessage as error:
            report |= {
                "error_message": error.message,
                "error_hint": error.hint,
                "error_reason": error.reason,
                "error_subject": error.subject,
            }
        else:
            report["approaches"] = rows.height
            table = rows.to_arrow(compat_level=pl.CompatLevel.oldest())
            yield from _to_batches(table.cast(EPHEMERIS_CONJUNCTION_SCHEMA))
        yield from _to_batches(pa.Table.from_pylist([report], REPORT_SCHEMA))


@dataclass(frozen=True)
class ScreenedFiles:
    """Close approaches of ephemeris files as a Spark frame (`EPHEMERIS_CONJUNCTION_SCHEMA`), and counts."""

    rows: DataFrame
    files: int
    approaches: int
    unusable_records: int


def screen_files(
    session: SparkSession,
    files: Iterable[tuple[str, bytes]],
    screening: FileScreening,
    warn: Callable[[str], None],
    *,
    max_batch_bytes: int = _MAX_FILE_BATCH_BYTES,
) -> ScreenedFiles:
    """Screen files on Spark's workers, one task per file.

    The files are sent in batches, so this process holds a batch of files at a time, and Spark's messages
    stay below their limit. The executors keep the rows, so the frame contains no files.

    Args:
        session: The session of the run.
        files: The name and the content of each file. They are taken one after the other.
        screening: The catalog and the limits.
        warn: Called with a line for the first unusable records of each file, also if a file is unreadable.
        max_batch_bytes: The compressed bytes of a batch. A larger file is a batch of its own.

    Raises:
        UnreadableMessage: A file cannot be read as an ephemeris, has no usable segment, or has states that
            cannot be interpolated as it declares. If there are several such files, the first one by name is
            reported.
    """
    function, schema = pickle_by_value(screening.screen_batches), from_arrow_schema(_SCREENED_SCHEMA)
    # Without checkpoints, the frame of all rows would send the files of all batches again, in one message.
    batches = [
        session.createDataFrame(batch)
        .repartition(batch.num_rows)
        .mapInArrow(function, schema)
        .localCheckpoint()
        for batch in _divide_files(files, max_batch_bytes)
    ]
    screened = reduce(DataFrame.unionAll, batches, session.createDataFrame([], schema))
    reports = screened.where("file IS NOT NULL").select(*REPORT_SCHEMA.names).toArrow().to_pylist()
    reports.sort(key=lambda report: str(report["file"]))
    for report in reports:
        for warning in report["warnings"]:
            warn(warning)
    for report in reports:
        if report["error_message"] is not None:
            raise UnreadableMessage(
                report["error_message"],
                hint=report["error_hint"],
                reason=report["error_reason"],
                subject=report["error_subject"],
            )
    return ScreenedFiles(
        screened.where("file IS NULL").select(*EPHEMERIS_CONJUNCTION_SCHEMA.names),
        len(reports),
        sum(report["approaches"] for report in reports),
        sum(report["unusable_records"] for report in reports),
    )


def _divide_files(files: Iterable[tuple[str, bytes]], max_bytes: int) -> Iterator[pa.Table]:
    """Compress files, and yield them in tables of `EPHEMERIS_FILE_SCHEMA` of about ``max_bytes`` at most."""
    batch: list[dict[str, object]] = []
    size = 0
    for name, content in files:
        compressed = zlib.compress(content, _COMPRESSION_LEVEL)
        if batch and size + len(compressed) > max_bytes:
            yield pa.Table.from_pylist(batch, EPHEMERIS_FILE_SCHEMA)
            batch, size = [], 0
        batch.append({"name": name, "content": compressed})
        size += len(compressed)
    if batch:
        yield pa.Table.from_pylist(batch, EPHEMERIS_FILE_SCHEMA)


def _to_batches(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield batches of `_SCREENED_SCHEMA`. Columns that the table does not have are null."""
    columns = [
        table.column(field.name) if field.name in table.column_names else pa.nulls(table.num_rows, field.type)
        for field in _SCREENED_SCHEMA
    ]
    yield from pa.Table.from_arrays(columns, schema=_SCREENED_SCHEMA).to_batches(
        max_chunksize=_MAX_BATCH_ROWS
    )
