"""Where a GP snapshot's bytes come from: a folder of files, or the simulated catalogue."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl

from branchlake_dagster.sda.gp.limits import ReadLimits
from branchlake_dagster.sda.gp.records import CatalogueError, TooLargeCatalogueError
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH, simulated_gp_file
from branchlake_dagster.sda.registry.radius_table import read_radius_table

SIMULATED_PREFIX = "sim-"
BAD_PREFIX = "sim-bad-"
RADIUS_TABLE = "hard-body-radius"
"""First characters of the names of files that are radius tables and no snapshots."""
DEFAULT_SNAPSHOT = "sim-20260808T0000Z"
_SUFFIXES = (".tle", ".3le", ".2le", ".txt", ".json", ".omm", ".xml", ".csv", ".kvn")
_TIME = re.compile(r"(\d{8}T\d{4})Z")


class UnknownSnapshotError(CatalogueError):
    """No file belongs to the snapshot id."""


@dataclass(frozen=True)
class GpFile:
    """Bytes of a GP file, where they come from, and the Unified Data Library's data mode for them.

    ``collected_at`` is the UTC time in the snapshot id, else the file's own; no later epoch is believed.
    """

    content: bytes
    source: str
    data_mode: str
    collected_at: datetime


def snapshot_id(path: Path) -> str:
    """The snapshot id of a GP file: its name without the endings for format and compression."""
    name = path.name.removesuffix(".gz")
    stem, dot, ending = name.rpartition(".")
    return stem if f"{dot}{ending.lower()}" in _SUFFIXES else name


def snapshot_time(snapshot: str) -> datetime | None:
    """The UTC time written in a snapshot id (``…20260808T0220Z…``); None when there is none."""
    found = _TIME.search(snapshot)
    if found is None:
        return None
    try:
        return datetime.strptime(found.group(1), "%Y%m%dT%H%M").replace(tzinfo=UTC)
    except ValueError:  # digits that are no date
        return None


class GpSource(dg.ConfigurableResource[Any]):
    """GP files by snapshot id.

    An id that begins with ``sim-`` is simulated from the seed at the time its id states (else the
    reference epoch), so a run can be launched with nothing configured; ``sim-bad-…`` is a damaged file
    that the gate must block. Any other id is a file of ``catalogue_dir``. ``max_unpacked_mb`` and
    ``max_record_chars`` are what a file and a record of it may cost (MiB, characters).
    """

    catalogue_dir: str | None = None
    simulated_objects: int = 2_000
    seed: int = 2026
    max_unpacked_mb: int = 256
    max_record_chars: int = 65_536

    def limits(self) -> ReadLimits:
        """What reading a file may cost."""
        return ReadLimits(self.max_unpacked_mb * 1024 * 1024, self.max_record_chars)

    def files(self) -> dict[str, Path]:
        """Files of ``catalogue_dir`` by snapshot id.

        Raises:
            UnknownSnapshotError: the folder does not exist, or two of its files have one id.

        """
        if self.catalogue_dir is None:
            return {}
        folder = Path(self.catalogue_dir).expanduser()
        if not folder.is_dir():
            raise UnknownSnapshotError(
                str(folder), "no such folder", "Set the GP source's catalogue_dir to a folder of GP files."
            )
        found: dict[str, Path] = {}
        for path in sorted(p for p in folder.iterdir() if p.is_file() and _is_gp(p)):
            name = snapshot_id(path)
            if name in found:
                raise UnknownSnapshotError(
                    str(path), f"{found[name].name} has the same snapshot id {name}", "Rename one of them."
                )
            found[name] = path
        return found

    def radius_table(self) -> pl.DataFrame | None:
        """The radii of the newest ``hard-body-radius…`` file of ``catalogue_dir``, by name; None without one.

        Raises as `read_radius_table`.
        """
        if self.catalogue_dir is None:
            return None
        files = sorted(filter(_is_radius_table, Path(self.catalogue_dir).expanduser().iterdir()))
        return read_radius_table(files[-1].read_bytes(), str(files[-1]), self.limits()) if files else None

    def read(self, snapshot: str) -> GpFile:
        """The file of a snapshot.

        Raises:
            TooLargeCatalogueError: the file is larger than what it may unpack to.
            UnknownSnapshotError: neither simulated nor in the folder.

        """
        time = snapshot_time(snapshot)
        if snapshot.startswith(SIMULATED_PREFIX):
            text = simulated_gp_file(
                seed=self.seed,
                objects=self.simulated_objects,
                epoch=time or REFERENCE_EPOCH,
                bad=snapshot.startswith(BAD_PREFIX),
            )
            return GpFile(text.encode(), f"simulated {snapshot}", "SIMULATED", time or REFERENCE_EPOCH)
        path = self.files().get(snapshot)
        if path is None:
            where = self.catalogue_dir or "a folder (catalogue_dir is not set)"
            raise UnknownSnapshotError(
                snapshot,
                f"no such file in {where}",
                "Put the file there under that name, or use a snapshot id that begins with sim-.",
            )
        told = path.stat()
        if told.st_size > self.limits().max_bytes:
            raise TooLargeCatalogueError(
                str(path), f"it has {told.st_size:,} bytes", "Raise max_unpacked_mb or divide the file."
            )
        made = datetime.fromtimestamp(told.st_mtime, UTC)
        return GpFile(path.read_bytes(), str(path), "REAL", time or made)


def _is_radius_table(path: Path) -> bool:
    return path.is_file() and path.name.lower().startswith(RADIUS_TABLE)


def _is_gp(path: Path) -> bool:
    return not _is_radius_table(path) and Path(path.name.lower().removesuffix(".gz")).suffix in _SUFFIXES
