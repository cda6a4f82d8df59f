"""Define a pull, the answer of a provider to one query, and write it as a GP file."""

from __future__ import annotations

import gzip
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg

from branchlake_dagster.sda.providers.download import ProviderClock

_CATALOG_PATTERNS = {
    # A header without braces or brackets, and a row.
    "csv": re.compile(rb"\A(?:\xef\xbb\xbf)?\s*(?=[^\n]*,)[^\n<{]*\bNORAD_CAT_ID\b[^\n<{]*\n\s*\S"),
    "json": re.compile(rb'\A(?:\xef\xbb\xbf)?\s*\[\s*\{[^]]*?"NORAD_CAT_ID"\s*:'),
    "xml": re.compile(rb"<(?:[\w.-]+:)?omm[\s>]"),
    "kvn": re.compile(rb"^\s*CCSDS_OMM_VERS\s*=", re.MULTILINE),
    "tle": re.compile(rb"^1 .{23,}\n2 .{23,}", re.MULTILINE),
}
_CATALOG_PATTERNS |= dict.fromkeys(("3le", "2le"), _CATALOG_PATTERNS["tle"])
_PAGE_PATTERN = re.compile(rb"\A(?:\xef\xbb\xbf)?\s*(?:<!doctype html|<html|\{)", re.IGNORECASE)


def is_catalog(body: bytes, file_format: str) -> bool:
    """Return whether an answer looks like a catalog of a format that has at least one record.

    Providers send pages and error messages with status 200 too. Of an unknown format, only HTML pages and
    JSON objects are detected.
    """
    pattern = _CATALOG_PATTERNS.get(file_format.lower())
    return bool(pattern.search(body) if pattern else body.strip() and not _PAGE_PATTERN.match(body))


@dataclass(frozen=True)
class Pull:
    """A downloaded catalog, named ``{provider}-{group}-{time}`` by the UTC minute of its download."""

    provider: str
    group: str
    format: str
    content: bytes
    fetched_at: datetime

    @property
    def snapshot_id(self) -> str:
        """The snapshot id, which is a partition key of the graph."""
        return f"{self.provider}-{self.group}-{self.fetched_at:%Y%m%dT%H%M}Z"

    def write(self, folder: Path) -> Path:
        """Write the gzipped file to `folder` atomically; return its path. Equal pulls give equal files."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.snapshot_id}.{self.format}.gz"
        temporary_path = folder / f".{path.name}.{os.getpid()}"
        temporary_path.write_bytes(gzip.compress(self.content, mtime=0))
        temporary_path.replace(path)
        return path


class GpProvider(dg.ConfigurableResource[Any]):
    """The provider of catalogs. This base class has none, for files that arrive in other ways."""

    group: str = ""

    def pull(self, clock: ProviderClock | None = None) -> Pull | None:  # noqa: ARG002 - subclasses use it
        """Return the newest catalog, or None if there is no provider."""
        return None


def utc_datetime(seconds: float) -> datetime:
    """Convert seconds since 1970 to a UTC datetime."""
    return datetime.fromtimestamp(seconds, UTC)
