"""Read a GP file in any supported format to one element set per object.

`read_catalogue` reads a whole file in this process. Spark's workers read parts of files by the same functions
(`pulls/arrow.py`).
"""

from __future__ import annotations

import re
from datetime import datetime
from enum import StrEnum

import polars as pl

from branchlake_dagster.sda.gp.encodings import from_csv, from_json, from_kvn, from_xml
from branchlake_dagster.sda.gp.limits import ReadLimits, decode_gp_file
from branchlake_dagster.sda.gp.omm import elements_from_keywords
from branchlake_dagster.sda.gp.records import EmptyCatalogueError, ParsedCatalogue, latest_per_object
from branchlake_dagster.sda.gp.rules import future_epoch_rule, split_by_rules
from branchlake_dagster.sda.gp.tle import parse_tle

_KVN_START = re.compile(r"\A(?:\s*COMMENT\b[^\n]*(?:\n|\Z))*\s*[A-Z_0-9]+\s*=")
_HEAD_CHARS = 65_536
"""The format is detected in this many characters; comments before the first keyword of a KVN may be long."""


class GpFormat(StrEnum):
    """The format of a GP file."""

    TLE = "tle"
    CSV = "csv"
    KVN = "kvn"
    JSON = "json"
    XML = "xml"


def detect_format(file_text: str) -> GpFormat:
    """Detect the format of a file's text from its beginning. Text of no other format counts as TLE."""
    head = file_text[:_HEAD_CHARS].lstrip()
    first_line = head.partition("\n")[0]
    if head.startswith(("[", "{")):
        return GpFormat.JSON
    if head.startswith("<"):
        return GpFormat.XML
    if _KVN_START.match(head):
        return GpFormat.KVN
    if "," in first_line and "NORAD_CAT_ID" in first_line.upper():
        return GpFormat.CSV
    return GpFormat.TLE


def parse_records(
    file_text: str, file_format: GpFormat, source: str, limits: ReadLimits, *, first_line: int = 1
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Parse the text of a file, or of a part of it, to candidates and rejected rows.

    Args:
        file_text: The text.
        file_format: The format of the file.
        source: Name of the file or snapshot, for messages.
        limits: Limits on the size of a record.
        first_line: The number of the text's first line in the file.

    Returns:
        Candidates with ``CANDIDATE_COLUMNS``, duplicates included, and rejected rows with
        ``REJECTED_COLUMNS``.

    Raises:
        UnreadableCatalogueError: The text as a whole is damaged.
    """
    match file_format:
        case GpFormat.JSON:
            return elements_from_keywords(from_json(file_text, source, limits))
        case GpFormat.XML:
            return elements_from_keywords(from_xml(file_text, source, limits))
        case GpFormat.KVN:
            return elements_from_keywords(from_kvn(file_text, source, limits, first_line))
        case GpFormat.CSV:
            return elements_from_keywords(from_csv(file_text, source, limits, first_line))
        case GpFormat.TLE:
            return parse_tle(file_text, first_line)


def reject_future_epochs(
    candidates: pl.DataFrame, rejected: pl.DataFrame, collected_at: datetime
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Move candidates whose epoch is more than `MAX_EPOCH_LEAD` after the collection to the rejected rows."""
    candidates, future_rejections = split_by_rules(candidates, [future_epoch_rule(collected_at)])
    return candidates, rejected.vstack(future_rejections)


def empty_file_error(source: str) -> EmptyCatalogueError:
    """Return the error of a file without records."""
    return EmptyCatalogueError(
        source, "it has no records", "Nothing was ingested. Check that the download was complete."
    )


def read_catalogue(
    content: bytes, source: str, *, collected_at: datetime | None = None, limits: ReadLimits | None = None
) -> ParsedCatalogue:
    """Read one GP file: TLE (two or three lines), OMM as JSON, CSV, XML or KVN, each plain or gzipped.

    Args:
        content: the file's bytes.
        source: name of the file or snapshot, for messages.
        collected_at: UTC time of the file's collection. Element sets with an epoch more than
            `MAX_EPOCH_LEAD` later are rejected. None accepts any epoch.
        limits: limits on the file's size, by default `ReadLimits()`.

    Raises:
        EmptyCatalogueError: the file has no records.
        TooLargeCatalogueError: the file, or its unpacked content, exceeds the limit.
        UnreadableCatalogueError: the file as a whole is damaged. A damaged record does not raise an error;
            it becomes a row of ``rejected``.

    """
    limits = limits or ReadLimits()
    file_text = decode_gp_file(content, source, limits)
    candidates, rejected = parse_records(file_text, detect_format(file_text), source, limits)
    if candidates.height == 0 and rejected.height == 0:
        raise empty_file_error(source)
    if collected_at is not None:
        candidates, rejected = reject_future_epochs(candidates, rejected, collected_at)
    elements, duplicates = latest_per_object(candidates)
    return ParsedCatalogue(elements, rejected.vstack(duplicates).sort("line_number"))
