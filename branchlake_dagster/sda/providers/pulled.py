"""A pull: what a provider gave for one query, and the GP file that it becomes."""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg

from branchlake_dagster.sda.providers.download import ProviderClock


@dataclass(frozen=True)
class Pull:
    """Content and its name: ``{provider}-{group}-{time}`` with the UTC minute of its download."""

    provider: str
    group: str
    format: str
    content: bytes
    fetched_at: datetime

    @property
    def snapshot_id(self) -> str:
        """The snapshot id, a partition of the graph."""
        return f"{self.provider}-{self.group}-{self.fetched_at:%Y%m%dT%H%M}Z"

    def write(self, folder: Path) -> Path:
        """The gzipped file in `folder`; written whole or not at all, and the same when written again."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.snapshot_id}.{self.format}.gz"
        temporary_path = folder / f".{path.name}.{os.getpid()}"
        temporary_path.write_bytes(gzip.compress(self.content, mtime=0))
        temporary_path.replace(path)
        return path


class GpProvider(dg.ConfigurableResource[Any]):
    """Who is asked for catalogues; this one is nobody, for files that come by other ways."""

    group: str = ""

    def pull(self, clock: ProviderClock | None = None) -> Pull | None:  # noqa: ARG002 - of those that ask
        """The newest catalogue; None where there is nobody to ask."""
        return None


def utc_datetime(seconds: float) -> datetime:
    """An instant from seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC)
