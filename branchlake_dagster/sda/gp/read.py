"""Read a GP file in any supported format to one element set per object."""

from __future__ import annotations

import re
from datetime import datetime

from branchlake_dagster.sda.gp.encodings import from_csv, from_json, from_kvn, from_xml
from branchlake_dagster.sda.gp.limits import ReadLimits, decode_gp_file
from branchlake_dagster.sda.gp.omm import elements_from_keywords
from branchlake_dagster.sda.gp.records import EmptyCatalogueError, ParsedCatalogue, latest_per_object
from branchlake_dagster.sda.gp.rules import future_epoch_rule, split_by_rules
from branchlake_dagster.sda.gp.tle import parse_tle

_KVN_START = re.compile(r"\A(?:\s*COMMENT\b[^\n]*(?:\n|\Z))*\s*[A-Z_0-9]+\s*=")
_HEAD_CHARS = 65_536
"""The format is detected in this many characters; comments before the first keyword of a KVN may be long."""


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
    head = file_text[:_HEAD_CHARS].lstrip()
    first_line = head.partition("\n")[0]
    if head.startswith(("[", "{")):
        candidates, rejected = elements_from_keywords(from_json(file_text, source, limits))
    elif head.startswith("<"):
        candidates, rejected = elements_from_keywords(from_xml(file_text, source, limits))
    elif _KVN_START.match(head):
        candidates, rejected = elements_from_keywords(from_kvn(file_text, source, limits))
    elif "," in first_line and "NORAD_CAT_ID" in first_line.upper():
        candidates, rejected = elements_from_keywords(from_csv(file_text, source, limits))
    else:
        candidates, rejected = parse_tle(file_text)
    if candidates.height == 0 and rejected.height == 0:
        raise EmptyCatalogueError(
            source, "it has no records", "Nothing was ingested. Check that the download was complete."
        )
    if collected_at is not None:
        candidates, future_rejections = split_by_rules(candidates, [future_epoch_rule(collected_at)])
        rejected = rejected.vstack(future_rejections)
    elements, duplicates = latest_per_object(candidates)
    return ParsedCatalogue(elements, rejected.vstack(duplicates).sort("line_number"))
