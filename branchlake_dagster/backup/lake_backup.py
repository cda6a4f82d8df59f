"""Back up an embedded lake while runs go on."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from branchlake_dagster.backup.backup_record import (
    BackupPart,
    BackupRecord,
    backup_name,
    list_backups,
    list_partial_backups,
    load_record,
    partial_name,
)
from branchlake_dagster.backup.database_copy import copy_database
from branchlake_dagster.backup.errors import BackupDamaged, BackupFailed
from branchlake_dagster.backup.file_copy import CopyCount, copy_folder
from branchlake_dagster.backup.lake_folders import NESSIE_PART, LakeFolder, list_lake_folders
from branchlake_dagster.backup.verification import verify_backup
from branchlake_dagster.embedded.process import ProcessRecord
from branchlake_dagster.embedded.servers import NESSIE, EmbeddedServers
from branchlake_dagster.embedded.state_folder import build_not_running, has_lake, make_private_folder
from branchlake_dagster.file_lock import file_lock
from branchlake_dagster.settings import Settings


@dataclass(frozen=True)
class Backup:
    """A complete backup. `outside` names tables of `main` whose files are not in the saved folders."""

    folder: Path
    record: BackupRecord
    outside: tuple[str, ...] = ()


class LakeBackup:
    """Makes backups of one lake in a folder. Files that did not change are linked to the previous backup.

    Each backup can be restored without the others. `dagster_home` is Dagster's home, `now` returns the time.
    """

    def __init__(
        self,
        settings: Settings,
        dagster_home: Path,
        *,
        say: Callable[[str], None] = lambda _: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._settings = settings
        self._dagster_home = dagster_home
        self._say = say
        self._now = now
        self._servers = EmbeddedServers(settings, notify=say)

    def make(self, folder: Path, *, verify: bool = True, keep: int | None = None) -> Backup:
        """Make one backup in `folder`, verify it, and delete all but the newest `keep` backups.

        Nessie is suspended for some milliseconds. Runs go on, and so do publications and ingestions. An
        interrupted backup leaves a folder `….partial`, which the next one deletes. Older backups are deleted
        only after the new one was verified. Raises NotBackedUpHere, LakeNotRunning (there is no lake),
        BackupFailed, BackupDamaged, and OSError for a full disk.
        """
        lake_folders = list_lake_folders(self._settings, self._dagster_home)
        if not has_lake(self._settings.state_dir):
            raise build_not_running(self._settings.state_dir)
        self._require_outside(folder, lake_folders)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with file_lock(folder / ".lock"):
            for leftover in list_partial_backups(folder):
                shutil.rmtree(leftover)
            return self._make_locked(folder, lake_folders, verify=verify, keep=keep)

    def _make_locked(
        self, folder: Path, lake_folders: tuple[LakeFolder, ...], *, verify: bool, keep: int | None
    ) -> Backup:
        taken_at = self._now()
        earlier_backups = list_backups(folder)
        name = backup_name(taken_at)
        if earlier_backups and name <= earlier_backups[-1].name:
            raise BackupFailed(
                f"{earlier_backups[-1]} is not older than now ({name}).",
                hint="Wait a second, or set the clock of this machine.",
                reason="clock",
                subject=str(folder),
            )
        new_folder = folder / partial_name(name)
        new_folder.mkdir(mode=0o700)
        previous = earlier_backups[-1] if earlier_backups else None
        parts, suspended_s = self._copy_folders(lake_folders, new_folder, previous)
        record = BackupRecord(taken_at.isoformat(), str(self._settings.state_dir), tuple(parts), suspended_s)
        outside: tuple[str, ...] = ()
        if verify:
            verified = verify_backup(new_folder, record, self._settings, say=self._say)
            outside = verified.outside
            record = record.with_verification(
                main_hash=verified.main_hash, tables=verified.tables, rows=verified.rows, now=self._now()
            )
        record.save(new_folder)
        _synchronize(new_folder)
        target = new_folder.rename(folder / name)
        if keep is not None and verify:
            for old_backup in list_backups(folder)[:-keep]:
                self._say(f"Deleting the backup {old_backup.name}.")
                shutil.rmtree(old_backup)
        return Backup(target, record, outside)

    def _copy_folders(
        self, lake_folders: tuple[LakeFolder, ...], new_folder: Path, previous: Path | None
    ) -> tuple[list[BackupPart], float]:
        parts, suspended_s = [], 0.0
        for lake_folder in lake_folders:
            target = new_folder / lake_folder.name
            if lake_folder.name == NESSIE_PART:
                suspended_s, count = self._copy_store(lake_folder.path, target)
            elif lake_folder.path.is_dir():
                count = copy_folder(
                    lake_folder.path,
                    target,
                    previous=previous / lake_folder.name if previous else None,
                    has_databases=lake_folder.has_databases,
                    report=partial(self._report_progress, lake_folder.name),
                )
            else:  # a lake without tables has no warehouse yet
                target.mkdir(mode=0o700)
                count = CopyCount()
            parts.append(
                BackupPart(
                    lake_folder.name,
                    str(lake_folder.path),
                    count.files,
                    count.bytes,
                    count.linked_files,
                    count.vanished_files,
                )
            )
            self._say(
                f"{lake_folder.name}: {count.files:,} files, {count.bytes / 1e6:,.1f} MB,"
                f" {count.linked_files:,} of them unchanged since the previous backup"
            )
        return parts, suspended_s

    def _report_progress(self, name: str, count: CopyCount) -> None:
        self._say(f"{name}: {count.files:,} files …")

    def _copy_store(self, store: Path, target: Path) -> tuple[float, CopyCount]:
        """Copy Nessie's store by way of links in the state folder, which is in the same file system."""
        staging_root = make_private_folder(self._settings.state_dir / "tmp")
        with tempfile.TemporaryDirectory(prefix="backup-", dir=staging_root) as scratch:
            staging = Path(scratch) / "nessie"
            with self._servers.lock():  # nobody starts or stops Nessie meanwhile
                suspended_s = copy_database(store, staging, server=self._find_nessie())
            return suspended_s, copy_folder(staging, target)

    def _find_nessie(self) -> ProcessRecord | None:
        """Return the running Nessie, even one that does not answer: its process has the store open."""
        return self._servers.find_process(NESSIE)

    def _require_outside(self, folder: Path, lake_folders: tuple[LakeFolder, ...]) -> None:
        resolved = folder.resolve()
        for saved in lake_folders:
            if resolved.is_relative_to(saved.path.resolve()):
                raise BackupFailed(
                    f"The folder for backups {folder} is inside {saved.path}, which is saved.",
                    hint="Name a folder outside the lake, best on another disk.",
                    reason="inside_lake",
                    subject=str(folder),
                )


def _synchronize(folder: Path) -> None:
    """Wait until the disk holds all files below `folder`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
    os.sync()


def load_backup(folder: Path) -> Backup:
    """Load a backup, or the newest one in a folder of backups. Raises BackupDamaged."""
    backups = list_backups(folder)
    newest = backups[-1] if backups else folder
    record = load_record(newest)
    missing = [part.name for part in record.parts if not (newest / part.name).is_dir()]
    if missing:
        raise BackupDamaged(
            f"The backup {newest} lacks the folder {missing[0]}.",
            hint="Use another backup.",
            reason="part_missing",
            subject=str(newest),
        )
    return Backup(newest, record)
