"""The record in a backup's folder: the folders in the backup, their sources, and the verification."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from branchlake_dagster.backup.errors import BackupDamaged

RECORD_FILE = "backup.json"
_FORMAT_VERSION = 1
_PARTIAL_SUFFIX = ".partial"
_VERIFICATION_SUFFIX = ".verification"
_TIME_FORMAT = "%Y-%m-%dT%H-%M-%SZ"


@dataclass(frozen=True)
class BackupPart:
    """One folder of the lake in a backup.

    `name` is the folder's name in the backup. `source` is the folder that was copied, and to which the copy
    is restored. `files` and `bytes` count all its files; `linked_files` are those that are hard links to the
    previous backup. `vanished_files` is the number of files that were deleted between the listing and the
    copy. `skipped_links` are symbolic links to folders or to missing targets, as paths relative to the
    folder. Neither these files nor these links are in the backup.
    """

    name: str
    source: str
    files: int
    bytes: int
    linked_files: int
    vanished_files: int
    skipped_links: tuple[str, ...] = ()


@dataclass(frozen=True)
class BackupRecord:
    """The contents of a backup. Times are ISO 8601 texts.

    `suspended_s` is how many seconds Nessie was suspended. The fields `main_hash` to `outside` are the result
    of the verification; they are None, 0 or empty if the backup was not verified. `main_hash` is the hash of
    `main` in the backup. `tables` and `rows` are the numbers of tables and rows that were read. `inside` are
    the names of the tables that were read, and `outside` of tables with files outside the saved folders.
    """

    taken_at: str
    state_dir: str
    parts: tuple[BackupPart, ...]
    suspended_s: float
    main_hash: str | None = None
    verified_at: str | None = None
    tables: int = 0
    rows: int = 0
    inside: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    format_version: int = _FORMAT_VERSION

    def with_verification(
        self, *, main_hash: str, rows: int, inside: tuple[str, ...], outside: tuple[str, ...], now: datetime
    ) -> BackupRecord:
        """Return a copy of this record with the result of a verification that ended at `now`."""
        return replace(
            self,
            main_hash=main_hash,
            verified_at=now.isoformat(),
            tables=len(inside),
            rows=rows,
            inside=inside,
            outside=outside,
        )

    def save(self, folder: Path) -> None:
        """Atomic: write the record as `backup.json` into the backup's folder. Raises OSError."""
        scratch = folder / f"{RECORD_FILE}.{os.getpid()}.tmp"
        scratch.write_text(json.dumps(asdict(self), indent=2))
        scratch.replace(folder / RECORD_FILE)


@dataclass(frozen=True)
class Backup:
    """A complete backup: its folder and its record."""

    folder: Path
    record: BackupRecord


def load_record(folder: Path) -> BackupRecord:
    """Load the record of the backup in `folder`. Raises BackupDamaged if it is missing or not readable."""
    try:
        fields = json.loads((folder / RECORD_FILE).read_text())
        if fields["format_version"] != _FORMAT_VERSION:
            raise ValueError(f"format version {fields['format_version']}")
        parts = tuple(BackupPart(**_with_tuples(part)) for part in fields.pop("parts"))
        return BackupRecord(parts=parts, **_with_tuples(fields))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BackupDamaged(
            f"{folder} is not a backup that this version can read: {error}.",
            hint="Name the folder of one backup; it contains the file backup.json.",
            reason="no_record",
            subject=str(folder),
        ) from error


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with tuples in place of lists, because JSON has no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def backup_name(moment: datetime) -> str:
    """Return the name of the folder of a backup, such as `2026-11-20T12-00-00Z`. Names sort by time."""
    return moment.astimezone(UTC).strftime(_TIME_FORMAT)


def partial_name(name: str) -> str:
    """Return the folder name of a backup that is not complete yet."""
    return f"{name}{_PARTIAL_SUFFIX}"


def verification_name(name: str) -> str:
    """Return the name of the folder in which Nessie runs while the backup is verified."""
    return f"{name}{_VERIFICATION_SUFFIX}"


def is_backup(folder: Path) -> bool:
    """Return whether a folder is named like a backup and has a record, which may be damaged."""
    return _is_backup_name(folder.name) and (folder / RECORD_FILE).exists()


def list_backups(folder: Path) -> list[Path]:
    """List the folders of the complete backups of all lakes in `folder`, oldest first.

    Empty if `folder` does not exist. Entries that are not named like a backup are ignored.
    """
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _is_backup_name(path.name) and path.is_dir())


def list_lake_backups(folder: Path, state_dir: Path) -> list[Backup]:
    """List the complete backups of the lake in `state_dir`, oldest first.

    Several lakes may have backups in `folder`. Backups without a readable record are omitted.
    """
    backups = []
    for path in list_backups(folder):
        with suppress(BackupDamaged):
            backups.append(Backup(path, load_record(path)))
    return [backup for backup in backups if backup.record.state_dir == str(state_dir)]


def list_leftovers(folder: Path) -> list[Path]:
    """List the folders in `folder` that interrupted backups and verifications have left behind."""
    return [path for path in folder.iterdir() if _is_leftover_name(path.name)]


def _is_leftover_name(name: str) -> bool:
    return any(
        name.endswith(suffix) and _is_backup_name(name.removesuffix(suffix))
        for suffix in (_PARTIAL_SUFFIX, _VERIFICATION_SUFFIX)
    )


def _is_backup_name(name: str) -> bool:
    try:
        datetime.strptime(name, _TIME_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        return False
    return True
