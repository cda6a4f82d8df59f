"""Parse parts of pulled files from Arrow batches, by functions for Spark's ``mapInArrow``.

A pull is one downloaded file. Its rows are in one layout (`record_schema`): element sets, catalog entries,
rejected records, and failures, which state why a file cannot be used.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

import polars as pl
import pyarrow as pa

from branchlake_dagster.sda.gp.limits import ReadLimits
from branchlake_dagster.sda.gp.read import GpFormat, parse_records, reject_future_epochs
from branchlake_dagster.sda.gp.records import (
    CANDIDATE_COLUMNS,
    ELEMENT_COLUMNS,
    CatalogueError,
    latest_per_object,
)
from branchlake_dagster.sda.gp.rules import REJECTED_COLUMNS
from branchlake_dagster.sda.registry.satcat import ENTRY_COLUMNS, read_satcat

SATCAT_FORMAT = "satcat"
"""The format of parts that are whole satellite catalogs, as they were downloaded."""

PART_SCHEMA = pa.schema(
    [
        pa.field("snapshot_id", pa.string()),
        pa.field("collected_at", pa.timestamp("us", "UTC")),
        pa.field("source", pa.string()),
        pa.field("data_mode", pa.string()),
        pa.field("file", pa.string()),
        pa.field("format", pa.string()),
        pa.field("first_line", pa.int64()),
        pa.field("content", pa.binary()),
    ]
)
"""One row per part of a file. ``content`` is compressed by zlib: UTF-8 text, or the bytes of a catalog."""

_PULL_COLUMNS: dict[str, pl.DataType] = {
    "snapshot_id": pl.String(),
    "collected_at": pl.Datetime("us", "UTC"),
    "source": pl.String(),
    "data_mode": pl.String(),
}
_RECORD_COLUMNS: dict[str, pl.DataType] = {
    **_PULL_COLUMNS,
    "kind": pl.String(),
    "remedy": pl.String(),
    **CANDIDATE_COLUMNS,
    **REJECTED_COLUMNS,
    **ENTRY_COLUMNS,
}
ELEMENT_SET_NAMES = ("snapshot_id", *ELEMENT_COLUMNS, "data_mode", "source", "collected_at")
REJECTED_NAMES = ("snapshot_id", *REJECTED_COLUMNS)
ENTRY_NAMES = ("snapshot_id", *ENTRY_COLUMNS, "collected_at")


class RecordKind(StrEnum):
    """The kind of a row of `record_schema`."""

    ELEMENT_SET = "element set"
    ENTRY = "entry"
    REJECTED = "rejected"
    FAILURE = "failure"


def record_schema() -> pa.Schema:
    """Return the Arrow schema of parsed records. Each kind uses its own columns; the others are null.

    A failure has the name of the error's class as ``reason``, the problem as ``message``, and the file as
    ``raw_text``.

    Not a constant: Polars would start its threads while the code location is imported, and runs could not be
    forked from that process.
    """
    schema = pl.DataFrame(schema=_RECORD_COLUMNS).to_arrow(compat_level=pl.CompatLevel.oldest()).schema
    return pa.schema(
        [
            pa.field(field.name, pa.string() if pa.types.is_large_string(field.type) else field.type)
            for field in schema
        ]
    )


def parse_batches(
    limits: ReadLimits,
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function from parts of files (`PART_SCHEMA`) to records (`record_schema`).

    Each part gives its records independently of all other parts. An object that is in a file more than once
    has several element sets; `keep_latest_batches` rejects all but one.
    """

    def parse(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part in batch.to_pylist():
                yield from _to_batches(_parse_part(part, limits))

    return parse


def keep_latest_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Keep one element set per object of each file, and reject the others as duplicates.

    All records of an object in a file must be in one partition. Other records are returned unchanged.
    """
    filled_batches = [batch for batch in batches if batch.num_rows]
    if not filled_batches:
        return
    records = pl.DataFrame(pl.from_arrow(pa.Table.from_batches(filled_batches)))
    is_set = pl.col("kind") == RecordKind.ELEMENT_SET
    yield from _to_batches(records.filter(~is_set))
    for candidates in records.filter(is_set).partition_by("snapshot_id"):
        pull = candidates.row(0, named=True)
        typed = candidates.select(pl.col(name).cast(kind) for name, kind in CANDIDATE_COLUMNS.items())
        elements, duplicates = latest_per_object(typed)
        yield from _to_batches(_as_records(elements, RecordKind.ELEMENT_SET, pull))
        yield from _to_batches(_as_records(duplicates, RecordKind.REJECTED, pull))


def _parse_part(part: Mapping[str, Any], limits: ReadLimits) -> pl.DataFrame:
    content, file = zlib.decompress(part["content"]), part["file"]
    try:
        if part["format"] == SATCAT_FORMAT:
            accepted, rejected = read_satcat(content, file, limits)
            kind = RecordKind.ENTRY
        else:
            accepted, rejected = parse_records(
                content.decode(), GpFormat(part["format"]), file, limits, first_line=part["first_line"]
            )
            collected_at: datetime = part["collected_at"]
            accepted, rejected = reject_future_epochs(accepted, rejected, collected_at)
            kind = RecordKind.ELEMENT_SET
    except CatalogueError as error:
        # Spark would report an exception of a worker as text, without its type and fields.
        failure = {
            "raw_text": [file],
            "reason": [type(error).__name__],
            "message": [error.problem],
            "remedy": [error.remedy],
        }
        return _as_records(pl.DataFrame(failure), RecordKind.FAILURE, part)
    return pl.concat([_as_records(accepted, kind, part), _as_records(rejected, RecordKind.REJECTED, part)])


def _as_records(frame: pl.DataFrame, kind: RecordKind, pull: Mapping[str, Any]) -> pl.DataFrame:
    """Return a frame with the columns of `record_schema`, with the columns of its pull."""
    known = {
        **{name: pl.lit(pull[name], dtype=dtype) for name, dtype in _PULL_COLUMNS.items()},
        "kind": pl.lit(str(kind)),
    }
    return frame.with_columns(**known).select(
        (pl.col(name) if name in known or name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in _RECORD_COLUMNS.items()
    )


def _to_batches(frame: pl.DataFrame) -> Iterator[pa.RecordBatch]:
    table = frame.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(record_schema())
    yield from table.to_batches(max_chunksize=50_000)
