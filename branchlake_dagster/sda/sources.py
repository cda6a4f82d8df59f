"""Read a GP snapshot (a file with the element sets of many objects) from a folder, or simulate it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl

from branchlake_dagster.sda.gp.limits import ReadLimits
from branchlake_dagster.sda.gp.radius_table import read_radius_table
from branchlake_dagster.sda.gp.records import CatalogueError, TooLargeCatalogueError, UnreadableCatalogueError
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH, simulated_gp_file

SIMULATED_PREFIX = "sim-"
BAD_PREFIX = "sim-bad-"
RADIUS_TABLE = "hard-body-radius"
"""The first characters of the names of radius tables. These files are not snapshots."""
DEFAULT_SNAPSHOT = "sim-20260808T0000Z"
_SUFFIXES = (".tle", ".3le", ".2le", ".txt", ".json", ".omm", ".xml", ".csv", ".kvn")
_TIME = re.compile(r"(\d{8}T\d{4})Z")


class UnknownSnapshotError(CatalogueError):
    """No file belongs to the snapshot id, or several files do."""


@dataclass(frozen=True)
class GpFile:
    """The bytes of a GP file, its origin, and its data mode in the terms of the Unified Data Library.

    ``collected_at`` is the UTC time in the snapshot id, or else the file's modification time. Element sets
    with an epoch much later are rejected.
    """

    content: bytes
    source: str
    data_mode: str
    collected_at: datetime


def snapshot_id(path: Path) -> str:
    """Return the snapshot id of a GP file: its name without the suffixes of format and compression."""
    name = path.name.removesuffix(".gz")
    stem, dot, ending = name.rpartition(".")
    return stem if f"{dot}{ending.lower()}" in _SUFFIXES else name


def snapshot_time(snapshot: str) -> datetime | None:
    """Return the UTC time in a snapshot id (``…20260808T0220Z…``), or None if it contains none."""
    found = _TIME.search(snapshot)
    if found is None:
        return None
    try:
        return datetime.strptime(found.group(1), "%Y%m%dT%H%M").replace(tzinfo=UTC)
    except ValueError:  # digits that are no date
        return None


class GpSource(dg.ConfigurableResource[Any]):
    """Reads GP files by snapshot id.

    A snapshot whose id begins with ``sim-`` is simulated from the seed, at the time in its id or else the
    reference epoch. So a run can be launched without any configuration. ``sim-bad-…`` is a damaged file that
    checks must block. Any other id is a file in ``catalogue_dir``. ``max_unpacked_mb`` and
    ``max_record_chars`` limit the size of a file (MiB after unpacking) and of a record.
    """

    catalogue_dir: str | None = None
    simulated_objects: int = 2_000
    seed: int = 2026
    max_unpacked_mb: int = 256
    max_record_chars: int = 65_536

    def limits(self) -> ReadLimits:
        """Return the limits on the size of a file and of its records."""
        return ReadLimits(self.max_unpacked_mb * 1024 * 1024, self.max_record_chars)

    def files(self) -> dict[str, list[Path]]:
        """Return the files of ``catalogue_dir`` by snapshot id. Without a folder the result is empty.

        A snapshot id should have one file. An id with several cannot be read (see `read`), all others can.

        Raises UnknownSnapshotError if the folder does not exist.
        """
        if self.catalogue_dir is None:
            return {}
        folder = Path(self.catalogue_dir).expanduser()
        if not folder.is_dir():
            raise UnknownSnapshotError(
                str(folder),
                "no such folder",
                "Create it, or set BRANCHLAKE_GP_DIR (catalogue_dir of the resource) to another folder.",
            )
        found: dict[str, list[Path]] = {}
        for path in sorted(p for p in folder.iterdir() if p.is_file() and _is_gp(p)):
            found.setdefault(snapshot_id(path), []).append(path)
        return found

    def radius_table(self) -> pl.DataFrame | None:
        """Read the radii from the ``hard-body-radius…`` file of ``catalogue_dir``.

        Of several files, the last one in the order of names is read. None if there is no such file or no such
        folder: the catalog is in the lake, so an hour's risks do not need the folder. Raises the errors of
        `read_radius_table`.
        """
        if self.catalogue_dir is None or not (folder := Path(self.catalogue_dir).expanduser()).is_dir():
            return None
        files = sorted(filter(_is_radius_table, folder.iterdir()))
        return read_radius_table(files[-1].read_bytes(), str(files[-1]), self.limits()) if files else None

    def read(self, snapshot: str) -> GpFile:
        """Read or simulate the file of a snapshot.

        Raises:
            TooLargeCatalogueError: The file is larger than the limit.
            UnknownSnapshotError: The folder has no such file or several, and the id does not begin with
                ``sim-``.
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
        paths = self.files().get(snapshot, [])
        if not paths:
            where = self.catalogue_dir or "a folder (catalogue_dir is not set)"
            raise UnknownSnapshotError(
                snapshot,
                f"no such file in {where}",
                "Put the file there under that name, or use a snapshot id that begins with sim-.",
            )
        if len(paths) > 1:
            names = " and ".join(path.name for path in paths)
            raise UnknownSnapshotError(
                snapshot, f"{names} in {self.catalogue_dir} have this snapshot id", "Rename all but one."
            )
        (path,) = paths
        file_status = path.stat()
        if file_status.st_size > self.limits().max_bytes:
            raise TooLargeCatalogueError(
                str(path),
                f"it has {file_status.st_size:,} bytes",
                "Raise max_unpacked_mb or divide the file.",
            )
        return GpFile(path.read_bytes(), str(path), "REAL", time or _modified_at(path, file_status.st_mtime))


def _modified_at(path: Path, seconds: float) -> datetime:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError) as error:  # years before 1 or after 9999
        raise UnreadableCatalogueError(
            str(path),
            f"its modification time, {seconds:.0f} seconds after 1970, is not a time of the years 1 to 9999",
            "Correct it with touch, or write the time of the catalog in the snapshot id.",
        ) from error


def _is_radius_table(path: Path) -> bool:
    return path.is_file() and path.name.lower().startswith(RADIUS_TABLE)


def _is_gp(path: Path) -> bool:
    return not _is_radius_table(path) and Path(path.name.lower().removesuffix(".gz")).suffix in _SUFFIXES
