"""Backups of a whole lake beside all others, and their restore.

The order of the parts and the copy of the warehouse are the product's own, and everybody may act between two
files. The store of Nessie cannot be simulated: its copy is the in-memory Nessie at one moment, as the product
suspends the server for that. Left out are Dagster's home, the landing folder and the verification by a
second Nessie (`backup/test_*.py` have these with real servers).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from branchlake_dagster.backup import lake_backup
from branchlake_dagster.backup.file_copy import CopyCount, copy_folder
from branchlake_dagster.backup.lake_folders import WAREHOUSE_PART
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster_tests.maintenance_simulation.stored_states import NessieBackup, table_locations
from branchlake_dagster_tests.maintenance_simulation.world import HORIZON, World


@dataclass(frozen=True)
class SavedLake:
    """A complete backup: the copy of Nessie, and the folder with the copy of the warehouse."""

    nessie: NessieBackup
    warehouse: Path


class BackupPlayer:
    """Makes backups of one world, and restores the newest."""

    def __init__(self, world: World, folder: Path) -> None:
        self._world = world
        self._folder = folder
        self._count = 0
        self.saved: SavedLake | None = None
        """The newest complete backup."""

    def save(self) -> None:
        """Back up Nessie and the warehouse, and require that the copy has all that `main` needs."""
        world = self._world
        settings = world.lake.settings.model_copy(update={"nessie_uri": None})
        backup = lake_backup.LakeBackup(settings, self._folder / "dagster")
        copies: list[NessieBackup] = []

        def copy_nessie(*_: object) -> tuple[float, CopyCount]:
            copies.append(NessieBackup(world.server.history))
            return 0.0, CopyCount()

        backup._copy_store = copy_nessie
        self._count += 1
        target = self._folder / f"backup-{self._count}"
        target.mkdir(parents=True)
        (self._folder / "dagster").mkdir(exist_ok=True)
        folders = lake_backup.list_lake_folders(settings, self._folder / "dagster")
        previous = self.saved.warehouse.parent if self.saved is not None else None
        backup._copy_folders(folders, target, previous)
        saved = SavedLake(copies[0], target / WAREHOUSE_PART)
        for location in sorted(saved.nessie.find_states_of_main(world.now() - HORIZON / 2)):
            copies_of_files = [
                saved.warehouse / Path(path).relative_to(world.root) for path in world.states.files(location)
            ]
            missing = sorted(str(path) for path in copies_of_files if not path.exists())
            world.require(not missing, f"the backup has {location}, which lacks {missing}")
        self.saved = saved
        world.note("lake saved")

    def restore(self) -> bool:
        """Put the newest backup in place of the lake. No actor is at work. Return whether there was one."""
        world, saved = self._world, self.saved
        if saved is None:
            return False
        shutil.rmtree(world.root)
        copy_folder(saved.warehouse, world.root)
        saved.nessie.restore(world.server.history)
        history = world.server.history
        for name, pointer in list(history.references.items()):
            locations = table_locations(history.contents_at(pointer.hash)).values()
            missing = [path for location in locations for path in world.states.missing_files(location)]
            if missing:  # a run was discarded and swept while its files were copied
                world.require(name != MAIN and not name.startswith("release-"), f"{name} lacks {missing}")
                del history.references[name]
                world.note("reference without files removed", name)
        world.note("lake restored")
        return True
