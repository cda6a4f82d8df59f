"""Back up an embedded lake while runs continue."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from shlex import quote

from branchlake_dagster.backup.backup_record import (
    Backup,
    BackupPart,
    BackupRecord,
    backup_name,
    is_backup,
    list_backups,
    list_lake_backups,
    list_leftovers,
    load_record,
    partial_name,
)
from branchlake_dagster.backup.database_copy import copy_database
from branchlake_dagster.backup.errors import BackupDamaged, BackupFailed, RestoreRefused
from branchlake_dagster.backup.file_copy import CopyCount, copy_folder, remove_folder
from branchlake_dagster.backup.lake_folders import (
    NESSIE_PART,
    SavedFolder,
    list_lake_folders,
    require_named_folders,
)
from branchlake_dagster.backup.verification import verify_backup
from branchlake_dagster.embedded.process import ProcessRecord
from branchlake_dagster.embedded.servers import NESSIE, EmbeddedServers
from branchlake_dagster.embedded.state_folder import build_not_running, has_lake, make_private_folder
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.file_lock import file_lock
from branchlake_dagster.settings import Settings
from branchlake_dagster.wording import format_count, format_names


class LakeBackup:
    """Makes backups of one lake. Unchanged files are hard links to the previous backup's copies.

    Each backup can be restored without the others. `dagster_home` is Dagster's home folder. `say` is called
    with progress messages. `now` returns the present time with a time zone.
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
        """Make one backup in `folder`, verify it, and delete all but the newest `keep` backups of this lake.

        Nessie is suspended for some milliseconds. Runs, publications and ingestions continue. A failed backup
        is deleted. A killed backup leaves folders `….partial` and `….verification`, which the next backup
        deletes. Older backups are deleted only if the new backup was verified; without `verify`, `keep` has
        no effect. An older backup is kept if a table in it has files outside the saved folders now. Raises
        NotBackedUpHere, LakeNotRunning if there is no lake, BackupFailed, BackupDamaged, and OSError for a
        full disk.
        """
        lake_folders = list_lake_folders(self._settings, self._dagster_home)
        if not has_lake(self._settings.state_dir):
            raise build_not_running(self._settings.state_dir)
        require_named_folders(self._settings, self._dagster_home)
        self._require_outside(folder, lake_folders)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with file_lock(folder / ".lock"):
            for leftover in list_leftovers(folder):
                self._delete_leftover(leftover)
            return self._make_locked(folder, lake_folders, verify=verify, keep=keep)

    def _delete_leftover(self, leftover: Path) -> None:
        settings = self._settings.model_copy(update={"state_dir": leftover, "warehouse": None})
        with suppress(ConfigurationError):  # it was made on another machine
            # A killed verification leaves its Nessie running. A backup without Nessie stops nothing.
            if (leftover / "run").is_dir():
                EmbeddedServers(settings, notify=self._say).stop_all()
        remove_folder(leftover)

    def _make_locked(
        self, folder: Path, lake_folders: tuple[SavedFolder, ...], *, verify: bool, keep: int | None
    ) -> Backup:
        taken_at = self._now()
        earlier_backups = list_lake_backups(folder, self._settings.state_dir)
        name = backup_name(taken_at)
        used_names = [backup.folder.name for backup in earlier_backups if backup.folder.name >= name]
        if used_names or (folder / name).exists():
            raise BackupFailed(
                f"{folder / max([name, *used_names])} is not older than now ({name}).",
                hint="Wait a second, set the clock of this machine, or delete that backup if its time is"
                " wrong.",
                reason="clock",
                subject=str(folder),
            )
        new_folder = folder / partial_name(name)
        if earlier_backups:
            _require_present(earlier_backups[-1])
            self._report_other_sources(earlier_backups[-1], lake_folders)
        try:
            previous = earlier_backups[-1].folder if earlier_backups else None
            record = self._fill(new_folder, lake_folders, previous, taken_at, verify=verify)
            backup = Backup(new_folder.rename(folder / name), record)
        except BaseException:
            # Perhaps the disk is full. Nothing but a complete backup may take space.
            with suppress(OSError):
                remove_folder(new_folder)
            raise
        if keep is not None and verify:
            self._delete_older([*earlier_backups, backup][:-keep], record)
        return backup

    def _report_other_sources(self, previous: Backup, lake_folders: tuple[SavedFolder, ...]) -> None:
        """Report folders that the previous backup has, and this one has not.

        Probably this process lacks an environment variable of Dagster.
        """
        sources = {str(lake_folder.path) for lake_folder in lake_folders}
        for part in previous.record.parts:
            if part.source not in sources:
                self._say(
                    f"Not in the backup: the folder {part.source} ({part.name}), which the previous backup"
                    " has. Are DAGSTER_HOME and the variables BRANCHLAKE_… those of Dagster?"
                )

    def _fill(
        self,
        new_folder: Path,
        lake_folders: tuple[SavedFolder, ...],
        previous: Path | None,
        taken_at: datetime,
        *,
        verify: bool,
    ) -> BackupRecord:
        """Copy the lake to a new folder, and save and return its record.

        With `verify`, the copy is verified first. `previous` is the last backup, whose unchanged files are
        linked; None copies all. If a table cannot be read, a copy in `previous` may be damaged, which has the
        size and time of the file in the lake: then all files are copied. Returns when all files are on the
        disk.
        """
        new_folder.mkdir(mode=0o700)
        parts, suspended_s = self._copy_folders(lake_folders, new_folder, previous)
        record = BackupRecord(taken_at.isoformat(), str(self._settings.state_dir), tuple(parts), suspended_s)
        if verify:
            try:
                verified = verify_backup(new_folder, record, self._settings, say=self._say)
            except BackupDamaged as error:
                if previous is None or error.reason != "table_unreadable":
                    raise
                self._say(f"{error.message} The backup is made again without links to {previous.name}.")
                remove_folder(new_folder)
                return self._fill(new_folder, lake_folders, None, taken_at, verify=True)
            record = record.with_verification(
                main_hash=verified.main_hash,
                rows=verified.rows,
                inside=verified.inside,
                outside=verified.outside,
                now=self._now(),
            )
        record.save(new_folder)
        _synchronize(new_folder)
        return record

    def _delete_older(self, old_backups: Sequence[Backup], record: BackupRecord) -> None:
        """Delete old backups, except those with a table that is outside the saved folders now.

        Such a backup may contain the only saved copy of the table. `record` is that of the new backup.
        """
        for old_backup in old_backups:
            lost_tables = sorted(set(record.outside) & set(old_backup.record.inside))
            if lost_tables:
                self._say(
                    f"The backup {old_backup.folder.name} is kept, because the new backup does not have"
                    f" {format_names('table', lost_tables)}."
                )
                continue
            self._say(f"Deleting the backup {old_backup.folder.name}.")
            # Renamed first: if the deletion is interrupted, the rest does not look like a complete backup.
            name = partial_name(old_backup.folder.name)
            remove_folder(old_backup.folder.rename(old_backup.folder.with_name(name)))

    def _copy_folders(
        self, lake_folders: tuple[SavedFolder, ...], new_folder: Path, previous: Path | None
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
                    early_files=lake_folder.early_files,
                    report=partial(self._report_progress, lake_folder.name),
                )
            else:  # a lake without tables has no warehouse yet
                target.mkdir()
                count = CopyCount()
            parts.append(
                BackupPart(
                    lake_folder.name,
                    str(lake_folder.path),
                    count.files,
                    count.bytes,
                    count.linked_files,
                    count.vanished_files,
                    tuple(count.skipped_links),
                )
            )
            self._say(
                f"{lake_folder.name}: {count.files:,} files, {count.bytes / 1e6:,.1f} MB,"
                f" {count.linked_files:,} of them unchanged since the previous backup"
            )
            if count.skipped_links:
                self._say(
                    f"{lake_folder.name}: not in the backup:"
                    f" {format_count(len(count.skipped_links), 'link')} to folders or to nothing:"
                    f" {', '.join(count.skipped_links)}"
                )
        return parts, suspended_s

    def _report_progress(self, name: str, count: CopyCount) -> None:
        self._say(f"{name}: {count.files:,} files …")

    def _copy_store(self, store: Path, target: Path) -> tuple[float, CopyCount]:
        """Copy Nessie's store. Return the seconds of the suspension, and the counts.

        The files are first linked in the state folder, which is in the same file system.
        """
        staging_root = make_private_folder(self._settings.state_dir / "tmp")
        with tempfile.TemporaryDirectory(prefix="backup-", dir=staging_root) as scratch:
            staging = Path(scratch) / "nessie"
            with self._servers.lock():  # no process starts or stops Nessie meanwhile
                suspended_s = copy_database(store, staging, server=self._find_nessie())
            return suspended_s, copy_folder(staging, target)

    def _find_nessie(self) -> ProcessRecord | None:
        """Return the process of the running Nessie, even if it does not answer; None if Nessie is stopped.

        A Nessie that does not answer still has the store open.
        """
        return self._servers.find_process(NESSIE)

    def _require_outside(self, folder: Path, lake_folders: tuple[SavedFolder, ...]) -> None:
        resolved = folder.resolve()
        if outer := next(filter(is_backup, (resolved, *resolved.parents)), None):
            raise BackupFailed(
                f"The folder for backups {folder} is inside the backup {outer}.",
                hint="Name the folder that contains the backups.",
                reason="inside_backup",
                subject=str(folder),
            )
        for saved in lake_folders:
            if resolved.is_relative_to(saved.path.resolve()):
                raise BackupFailed(
                    f"The folder for backups {folder} is inside {saved.path}, which is saved.",
                    hint="Name a folder outside the lake, best on another disk.",
                    reason="inside_lake",
                    subject=str(folder),
                )


def _require_present(previous: Backup) -> None:
    """Raise BackupFailed if a folder that had files at the previous backup is missing or empty now.

    Probably its disk is not mounted. Later backups would replace the last one that has these files.
    """
    for part in previous.record.parts:
        source = Path(part.source)
        if part.files and not (source.is_dir() and any(source.iterdir())):
            raise BackupFailed(
                f"The folder {source} ({part.name}) is missing or empty. The backup {previous.folder} has"
                f" {format_count(part.files, 'file')} of it.",
                hint="Mount its disk, or restore the folder. If its files are gone for good, put any file"
                " into it.",
                reason="folder_gone",
                subject=str(source),
            )


def _synchronize(folder: Path) -> None:
    """Wait until all files below `folder` are written to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
    os.sync()


def load_backup(folder: Path, state_dir: Path) -> Backup:
    """Load the backup in `folder`. If `folder` contains backups, load the newest of the lake in `state_dir`.

    A folder that is itself a backup is loaded, whatever else somebody has put into it. Raises BackupDamaged
    if the backup is incomplete, and RestoreRefused if all backups in the folder are of other lakes.
    """
    candidates = [] if is_backup(folder) else list_backups(folder)
    backup = _find_newest(candidates, state_dir) if candidates else Backup(folder, load_record(folder))
    missing = [part.name for part in backup.record.parts if not (backup.folder / part.name).is_dir()]
    if missing:
        raise BackupDamaged(
            f"The backup {backup.folder} lacks the folder {missing[0]}.",
            hint="Use another backup.",
            reason="part_missing",
            subject=str(backup.folder),
        )
    return backup


def _find_newest(candidates: Sequence[Path], state_dir: Path) -> Backup:
    """Return the newest backup of the lake in `state_dir`.

    `candidates` are the folders of backups, oldest first, at least one. Raises BackupDamaged if a newer
    backup cannot be read, because it may be of this lake, and RestoreRefused if all backups are of other
    lakes.
    """
    other_lakes = []
    for path in reversed(candidates):
        record = load_record(path)
        if record.state_dir == str(state_dir):
            return Backup(path, record)
        other_lakes.append(record.state_dir)
    raise RestoreRefused(
        f"{candidates[0].parent} has no backup of the lake in {state_dir}. Its newest backup is of the lake"
        f" in {other_lakes[0]}.",
        hint=f"Use the folders of that lake: BRANCHLAKE_STATE_DIR={quote(other_lakes[0])}",
        reason="other_lake",
        subject=str(state_dir),
    )
