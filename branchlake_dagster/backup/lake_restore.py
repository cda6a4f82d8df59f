"""Restore an embedded lake from a backup."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from branchlake_dagster.backup.backup_record import backup_name
from branchlake_dagster.backup.errors import RestoreRefused
from branchlake_dagster.backup.file_copy import copy_folder
from branchlake_dagster.backup.lake_backup import Backup
from branchlake_dagster.backup.lake_folders import LakeFolder, list_lake_folders
from branchlake_dagster.embedded.servers import EmbeddedServers
from branchlake_dagster.embedded.state_folder import make_state_folder, record_location
from branchlake_dagster.settings import Settings

_SAVED_SUFFIX = ".before-restore-"
_STAGING_SUFFIX = ".restoring"


@dataclass(frozen=True)
class RestoredLake:
    """What a restore did. `moved` are the former folders, which the user may delete."""

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

    Iceberg's metadata has absolute paths, so a lake is restored to the folders that it had. `replace` moves
    folders that exist aside, to names with `.before-restore-`. All files are copied before the first folder
    is moved. If the restore is interrupted, run it again. Raises RestoreRefused and OSError.
    """
    lake_folders = {folder.name: folder for folder in list_lake_folders(settings, dagster_home)}
    targets = [
        (part, lake_folders.get(part.name) or LakeFolder(part.name, Path(part.source)))
        for part in backup.record.parts
    ]
    for part, target in targets:
        if Path(part.source) != target.path:
            raise RestoreRefused(
                f"The backup {backup.folder} has the folder {part.source}, but this lake would use"
                f" {target.path}. The metadata of the tables has absolute paths.",
                hint=f"Use the same folders: BRANCHLAKE_STATE_DIR={backup.record.state_dir}, and the"
                " same BRANCHLAKE_WAREHOUSE and DAGSTER_HOME. Links at these paths are enough.",
                reason="other_place",
                subject=str(target.path),
            )
    servers = EmbeddedServers(settings, notify=say)
    make_state_folder(settings.state_dir)
    with servers.lock():
        _require_stopped(servers, settings)
        existing_paths = [target.path for _, target in targets if _has_files(target.path)]
        if existing_paths and not replace:
            raise RestoreRefused(
                f"{existing_paths[0]} exists already.",
                hint="With --replace, the existing folders are renamed first, and kept.",
                reason="lake_exists",
                subject=str(existing_paths[0]),
            )
        for part, target in targets:
            staging = _staging_path(target.path)
            shutil.rmtree(staging, ignore_errors=True)
            copy_folder(backup.folder / part.name, staging)
            say(f"{part.name}: {part.files:,} files copied")
        suffix = _SAVED_SUFFIX + backup_name(now())
        moved_paths = []
        for _, target in targets:
            if target.path.exists():
                moved_paths.append(target.path.rename(target.path.with_name(target.path.name + suffix)))
            _staging_path(target.path).rename(target.path)
        record_location(settings.state_dir)
    return RestoredLake(settings.state_dir, backup.record.main_hash, tuple(moved_paths))


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
