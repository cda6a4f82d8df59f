"""The record in a backup's folder: what the backup has, where it came from, and whether it was verified."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from branchlake_dagster.backup.errors import BackupDamaged

RECORD_FILE = "backup.json"
_FORMAT_VERSION = 1
_PARTIAL_SUFFIX = ".partial"
_TIME_FORMAT = "%Y-%m-%dT%H-%M-%SZ"


@dataclass(frozen=True)
class BackupPart:
    """One folder of the lake in a backup.

    `name` is its folder in the backup, `source` the folder that was copied and to which it is restored.
    `vanished_files` were deleted between the listing and the copy.
    """

    name: str
    source: str
    files: int
    bytes: int
    linked_files: int
    vanished_files: int


@dataclass(frozen=True)
class BackupRecord:
    """What a backup has. `main_hash` is `main` at `taken_at`; None if the lake has never been started.

    `suspended_s` is how long Nessie was suspended. `tables` and `rows` were read by the verification;
    `verified_at` is None if there was none.
    """

    taken_at: str
    state_dir: str
    parts: tuple[BackupPart, ...]
    suspended_s: float
    main_hash: str | None = None
    verified_at: str | None = None
    tables: int = 0
    rows: int = 0
    format_version: int = _FORMAT_VERSION

    def with_verification(self, *, main_hash: str, tables: int, rows: int, now: datetime) -> BackupRecord:
        """Return the record of the same backup after its verification."""
        return replace(self, main_hash=main_hash, verified_at=now.isoformat(), tables=tables, rows=rows)

    def save(self, folder: Path) -> None:
        """Atomic: write the record into the backup's folder."""
        scratch = folder / f"{RECORD_FILE}.{os.getpid()}.tmp"
        scratch.write_text(json.dumps(asdict(self), indent=2))
        scratch.replace(folder / RECORD_FILE)


def load_record(folder: Path) -> BackupRecord:
    """Load the record of the backup in `folder`. Raises BackupDamaged."""
    try:
        fields = json.loads((folder / RECORD_FILE).read_text())
        if fields["format_version"] != _FORMAT_VERSION:
            raise ValueError(f"format version {fields['format_version']}")
        parts = tuple(BackupPart(**part) for part in fields.pop("parts"))
        return BackupRecord(parts=parts, **fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackupDamaged(
            f"{folder} is not a backup that this version can read: {error}.",
            hint="Name the folder of one backup; it contains the file backup.json.",
            reason="no_record",
            subject=str(folder),
        ) from error


def backup_name(moment: datetime) -> str:
    """Return the name of the folder of a backup. Names sort by time."""
    return moment.astimezone(UTC).strftime(_TIME_FORMAT)


def partial_name(name: str) -> str:
    """Return the name of the folder while the backup is made."""
    return f"{name}{_PARTIAL_SUFFIX}"


def list_backups(folder: Path) -> list[Path]:
    """List the complete backups in `folder`, the oldest first. Other files and folders are ignored."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _is_backup_name(path.name) and path.is_dir())


def list_partial_backups(folder: Path) -> list[Path]:
    """List the folders that interrupted backups left."""
    if not folder.is_dir():
        return []
    partial_paths = (path for path in folder.iterdir() if path.name.endswith(_PARTIAL_SUFFIX))
    return [path for path in partial_paths if _is_backup_name(path.name.removesuffix(_PARTIAL_SUFFIX))]


def _is_backup_name(name: str) -> bool:
    try:
        datetime.strptime(name, _TIME_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        return False
    return True
