"""Restore an embedded lake from a backup."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote

from branchlake_dagster.backup.backup_record import Backup, BackupPart, backup_name
from branchlake_dagster.backup.errors import BackupDamaged, RestoreRefused
from branchlake_dagster.backup.file_copy import CopyCount, copy_folder, remove_folder
from branchlake_dagster.backup.lake_folders import SavedFolder, find_nested_folders, list_lake_folders
from branchlake_dagster.embedded.servers import EmbeddedServers
from branchlake_dagster.embedded.state_folder import make_state_folder, record_location
from branchlake_dagster.settings import Settings

_SAVED_SUFFIX = ".before-restore-"
_STAGING_SUFFIX = ".restoring"


@dataclass(frozen=True)
class RestoredLake:
    """The result of a restore.

    `main_hash` is the hash of `main` in the backup; None if the backup was not verified. `moved` are the
    former folders under their new names; the user may delete them.
    """

    state_dir: Path
    main_hash: str | None
    moved: tuple[Path, ...]


def restore_lake(
    backup: Backup,
    settings: Settings,
    dagster_home: Path,
    *,
    replace: bool = False,
    say: Callable[[str], None] = lambda _: None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> RestoredLake:
    """Copy a backup to the folders of the lake. The servers and Dagster must be stopped.

    Iceberg's metadata contains absolute paths, so a lake is restored to the folders from which it was copied.
    If such a folder is a link, its target is restored. With `replace`, existing folders are renamed to names
    with `.before-restore-`. All files are copied before the first folder is renamed, and if a folder cannot
    be renamed, the other renames are reversed. `say` is called with progress messages. Raises
    NotBackedUpHere, RestoreRefused, BackupDamaged if files of the backup are missing or too short, and
    OSError.
    """
    targets = _find_targets(backup, settings, dagster_home)
    for target in targets:
        _require_movable(target)
    servers = EmbeddedServers(settings, notify=say)
    make_state_folder(settings.state_dir)
    with servers.lock():
        _require_stopped(servers, settings)
        paths = [target.path.resolve() for target in targets]
        existing_paths = [path for path in paths if _has_files(path)]
        if existing_paths and not replace:
            raise RestoreRefused(
                f"{existing_paths[0]} exists already.",
                hint="With --replace, the existing folders are renamed first, and kept.",
                reason="lake_exists",
                subject=str(existing_paths[0]),
            )
        _remove_stagings(paths)
        try:
            for part, path in zip(backup.record.parts, paths, strict=True):
                count = copy_folder(backup.folder / part.name, _staging_path(path))
                _require_complete(backup, part, count)
                say(f"{part.name}: {count.files:,} files copied")
            moved_paths = _replace_folders(paths, _SAVED_SUFFIX + backup_name(now()))
        except BaseException:
            with suppress(OSError):
                _remove_stagings(paths)
            raise
        record_location(settings.state_dir)
    return RestoredLake(settings.state_dir, backup.record.main_hash, moved_paths)


def _require_complete(backup: Backup, part: BackupPart, count: CopyCount) -> None:
    """Raise BackupDamaged if fewer files or bytes were copied than were saved.

    An interrupted copy of a backup to another disk lacks files, although its record is complete. More files
    are allowed: whoever opens a saved SQLite database creates files beside it.
    """
    if count.files < part.files or count.bytes < part.bytes:
        raise BackupDamaged(
            f"The backup {backup.folder} has {count.files:,} files with {count.bytes:,} bytes in {part.name}."
            f" When it was made, there were {part.files:,} files with {part.bytes:,} bytes. Nothing was"
            " changed.",
            hint="Copy the backup again if this is a copy, or restore another backup by the name of its"
            " folder.",
            reason="files_missing",
            subject=part.name,
        )


def _find_targets(backup: Backup, settings: Settings, dagster_home: Path) -> list[SavedFolder]:
    """Return the folders to which the parts of a backup are restored, in the order of the parts.

    Raises RestoreRefused if this lake would use other folders, or if one folder contains another.
    """
    lake_folders = {
        folder.name: folder for folder in list_lake_folders(settings, dagster_home, with_missing=True)
    }
    if unknown := [part for part in backup.record.parts if part.name not in lake_folders]:
        raise RestoreRefused(
            f"The backup {backup.folder} has the folder {unknown[0].name}, which a lake of this version does"
            " not have.",
            hint="Use the version of branchlake that made the backup.",
            reason="unknown_part",
            subject=unknown[0].name,
        )
    targets = [lake_folders[part.name] for part in backup.record.parts]
    for part, target in zip(backup.record.parts, targets, strict=True):
        if Path(part.source) != target.path:
            raise RestoreRefused(
                f"The backup {backup.folder} has the folder {part.source}, but this lake would use"
                f" {target.path}. The metadata of the tables has absolute paths.",
                hint=f"Use the same folders: BRANCHLAKE_STATE_DIR={quote(backup.record.state_dir)}, and the"
                " same BRANCHLAKE_WAREHOUSE, BRANCHLAKE_LANDING and DAGSTER_HOME. Links at these paths are"
                " enough.",
                reason="other_place",
                subject=str(target.path),
            )
    if nested := find_nested_folders(targets):
        inner, outer = nested
        raise RestoreRefused(
            f"The folder {outer.path} ({outer.name}) contains {inner.path} ({inner.name}).",
            hint="Remove links that lead from one of them to the other.",
            reason="nested",
            subject=str(inner.path),
        )
    return targets


def _require_movable(target: SavedFolder) -> None:
    """Raise RestoreRefused if a folder is a mount point, or if its parent folder is not writable."""
    path = target.path.resolve()
    if os.path.ismount(path):
        raise RestoreRefused(
            f"{path} ({target.name}) is a mount point, so it cannot be renamed.",
            hint="Unmount it and restore. Then copy the restored folder to that file system and mount it.",
            reason="mount_point",
            subject=str(path),
        )
    parent = next(folder for folder in path.parents if folder.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RestoreRefused(
            f"The folder {parent} is not writable, so {path} ({target.name}) cannot be replaced.",
            hint="Run the command as the owner of that folder.",
            reason="not_writable",
            subject=str(parent),
        )


def _replace_folders(paths: Sequence[Path], suffix: str) -> tuple[Path, ...]:
    """Rename each folder to a name with `suffix`, and its staging folder to its own name.

    Atomic unless the process is killed: after an error, all renames are reversed. Returns the new paths of
    the former folders.
    """
    moved_paths = [(path, path.with_name(path.name + suffix)) for path in paths if path.exists()]
    renames = [*moved_paths, *((_staging_path(path), path) for path in paths)]
    try:
        for old_path, new_path in renames:
            old_path.rename(new_path)
    except BaseException:
        # A signal may come between a rename and the next statement. So the disk shows what was done.
        for old_path, new_path in reversed(renames):
            if new_path.exists() and not old_path.exists():
                new_path.rename(old_path)
        raise
    return tuple(new_path for _, new_path in moved_paths)


def _remove_stagings(paths: Sequence[Path]) -> None:
    for path in paths:
        with suppress(FileNotFoundError):
            remove_folder(_staging_path(path))


def _staging_path(path: Path) -> Path:
    return path.with_name(path.name + _STAGING_SUFFIX)


def _has_files(path: Path) -> bool:
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def _require_stopped(servers: EmbeddedServers, settings: Settings) -> None:
    for name in servers.server_names():
        if servers.find_process(name) is not None:
            raise RestoreRefused(
                f"The server {name} of the lake in {settings.state_dir} runs.",
                hint="Stop Dagster, then the servers: branchlake down.",
                reason="server_runs",
                subject=name,
            )
