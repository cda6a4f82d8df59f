"""The folders of an embedded lake that a backup contains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from branchlake_dagster.backup.errors import BackupFailed, NotBackedUpHere
from branchlake_dagster.catalog.stored_files import local_path
from branchlake_dagster.receivers.landing import NEXT_OFFSET_FILE
from branchlake_dagster.settings import Settings

NESSIE_PART = "nessie"
WAREHOUSE_PART = "warehouse"
DAGSTER_PART = "dagster"


@dataclass(frozen=True)
class SavedFolder:
    """One folder of the lake. `name` is the folder's name in a backup.

    `has_databases` is true if the folder may contain SQLite databases.
    """

    name: str
    path: Path
    has_databases: bool = False
    early_files: frozenset[str] = frozenset()
    """Names of files that are read before their folder is listed."""


def list_lake_folders(
    settings: Settings, dagster_home: Path, *, with_missing: bool = False
) -> tuple[SavedFolder, ...]:
    """List the folders of the lake in the order in which they are copied.

    Landing files and positions of subscribers are optional: their folders are listed if they exist. A restore
    lists them `with_missing` folders, and checks itself whether one folder contains another.

    Dagster's home is the first and the warehouse the last. If a run is published during the backup, its
    events may be missing in Dagster's copy, as after a crash of the publisher; the publication sensor adds
    them after a restore. The warehouse's copy has all files to which Nessie's copy refers, because a file is
    written before Nessie refers to it. For the same reason the landing folder comes after Nessie: the copy
    has all records that were ingested.

    Raises NotBackedUpHere if Nessie is not embedded, if the warehouse is not a local folder, or if one folder
    contains another: the inner folder would be saved twice, and could not be restored. The folders need not
    exist.
    """
    if not settings.embedded_nessie:
        raise NotBackedUpHere(
            f"The lake's Nessie is the server {settings.nessie_uri}. A copy of the state folder"
            f" {settings.state_dir} would not contain its store.",
            hint="Back up the database of that server first, and then the warehouse, by their own means.",
            reason="other_nessie",
            subject=settings.nessie_uri,
        )
    if not settings.warehouse_uri.startswith("file:"):
        raise NotBackedUpHere(
            f"The warehouse {settings.warehouse_uri} is not a local folder.",
            hint="Use the versions or the replication of the object store, and stop the servers to copy the"
            f" folder {settings.state_dir}/nessie first.",
            reason="other_warehouse",
            subject=settings.warehouse_uri,
        )
    subscribers = SavedFolder(
        "alert_subscribers", settings.state_dir / "alert_subscribers", has_databases=True
    )
    # A receiver may be writing. The mark of the next offset must not be ahead of the copied files.
    landing = SavedFolder("landing", settings.landing_folder, early_files=frozenset({NEXT_OFFSET_FILE}))
    lake_folders = (
        SavedFolder(DAGSTER_PART, dagster_home, has_databases=True),
        *(folder for folder in (subscribers,) if with_missing or folder.path.is_dir()),
        SavedFolder(NESSIE_PART, settings.state_dir / "nessie"),
        *(folder for folder in (landing,) if with_missing or folder.path.is_dir()),
        SavedFolder(WAREHOUSE_PART, local_path(settings.warehouse_uri)),
    )
    if not with_missing and (nested := find_nested_folders(lake_folders)):
        inner, outer = nested
        raise NotBackedUpHere(
            f"The folder {outer.path} ({outer.name}) contains {inner.path} ({inner.name}).",
            hint="Move one of them, and set DAGSTER_HOME, BRANCHLAKE_LANDING or BRANCHLAKE_WAREHOUSE to its"
            " new place. The tables of a warehouse cannot be moved.",
            reason="nested",
            subject=str(inner.path),
        )
    return lake_folders


def require_named_folders(settings: Settings, dagster_home: Path) -> None:
    """Raise BackupFailed if `DAGSTER_HOME` or `BRANCHLAKE_LANDING` names a folder that does not exist.

    The default folders may be missing: Dagster or receivers were never started.
    """
    named_folders = {
        "DAGSTER_HOME": dagster_home if dagster_home != settings.state_dir / DAGSTER_PART else None,
        "BRANCHLAKE_LANDING": settings.landing,
    }
    for variable, path in named_folders.items():
        if path is not None and not path.is_dir():
            raise BackupFailed(
                f"The folder {path} does not exist, so the backup would not have it.",
                hint=f"Correct or unset {variable}, mount the folder's disk, or create the folder.",
                reason="folder_missing",
                subject=str(path),
            )


def find_nested_folders(lake_folders: Sequence[SavedFolder]) -> tuple[SavedFolder, SavedFolder] | None:
    """Find a folder that is inside another folder or identical with it. Links are followed.

    Returns the inner and the outer folder; None if no folder contains another.
    """
    for inner, outer in permutations(lake_folders, 2):
        if inner.path.resolve().is_relative_to(outer.path.resolve()):
            return inner, outer
    return None
