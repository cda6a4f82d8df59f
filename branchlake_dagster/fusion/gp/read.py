"""From the bytes of a GP file to one element set per object, whatever the format."""

from __future__ import annotations

import gzip
import zlib

from branchlake_dagster.fusion.gp.omm import parse_omm_csv, parse_omm_json, parse_omm_kvn, parse_omm_xml
from branchlake_dagster.fusion.gp.records import (
    EmptyCatalogueError,
    ParsedCatalogue,
    UnreadableCatalogueError,
    latest_per_object,
)
from branchlake_dagster.fusion.gp.tle import parse_tle

_GZIP_MAGIC = b"\x1f\x8b"


def decode(content: bytes, source: str) -> str:
    """Text of a GP file, unpacked when gzipped. Bytes outside UTF-8 become ``?`` and fail as records.

    Raises:
        UnreadableCatalogueError: the gzip stream is cut short or damaged.

    """
    if content.startswith(_GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise UnreadableCatalogueError(
                source, f"damaged gzip ({error})", "Fetch the file again."
            ) from error
    return content.decode("utf-8-sig", errors="replace").replace("\ufffd", "?")


def read_catalogue(content: bytes, source: str) -> ParsedCatalogue:
    """Read one GP file: TLE (two or three lines), OMM as JSON, CSV, XML or KVN, each plain or gzipped.

    Args:
        content: the file's bytes.
        source: name of the file or snapshot, for messages.

    Raises:
        EmptyCatalogueError: the file holds no record.
        UnreadableCatalogueError: the file is damaged as a whole. A damaged record never raises; it becomes
            a row of ``rejected``.

    """
    text = decode(content, source)
    start = text.lstrip()[:200]
    if start.startswith(("[", "{")):
        candidates, rejected = parse_omm_json(text, source)
    elif start.startswith("<"):
        candidates, rejected = parse_omm_xml(text, source)
    elif start.startswith("CCSDS_OMM_VERS"):
        candidates, rejected = parse_omm_kvn(text)
    elif "NORAD_CAT_ID" in start and "," in start:
        candidates, rejected = parse_omm_csv(text, source)
    else:
        candidates, rejected = parse_tle(text)
    if candidates.height == 0 and rejected.height == 0:
        raise EmptyCatalogueError(
            source, "no records in it", "Check that the download was complete; nothing was ingested."
        )
    elements, duplicates = latest_per_object(candidates)
    return ParsedCatalogue(elements, rejected.vstack(duplicates).sort("line_number"))
