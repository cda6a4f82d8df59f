"""The simulation's files as the sweeper reads and deletes them: in the shape of Iceberg's metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from branchlake_dagster.tables.table_files import ManifestFiles
from branchlake_dagster_tests.simulation.tables import FOLDER, State, Warehouse


class InTurn:
    """In place of the sweeper's pool of threads, which the scheduler could not order."""

    def __init__(self, _: int) -> None:
        self.map = map

    def __enter__(self) -> InTurn:
        return self

    def __exit__(self, *_: object) -> None:
        return


@dataclass
class SimulatedTableFiles:
    """What `TableFiles` is to the sweeper."""

    warehouse: Warehouse
    deletes: Callable[[str], None]
    """Is called with the location of each file that is deleted."""

    def metadata(self, location: str) -> Any:
        """The table metadata in a file; None when it is missing."""
        if location in self.warehouse.deleted:
            return None
        state = self.warehouse.locations[location]
        snapshots = [
            SimpleNamespace(
                snapshot_id=step.snapshot_id,
                manifest_list=f"{state.manifests[i]}.list",
                place=(state, i),
                summary=SimpleNamespace(
                    additional_properties={"branchlake.step": "written by the IO manager"}
                ),
            )
            for i, step in enumerate(state.steps)
        ]
        return SimpleNamespace(
            location=FOLDER.rstrip("/"),
            properties={},
            snapshots=snapshots,
            snapshot_by_id={one.snapshot_id: one for one in snapshots}.get,
            metadata_log=[SimpleNamespace(metadata_file=path) for path in state.log],
            statistics=[],
            partition_statistics=[],
        )

    def manifests(self, snapshot: Any) -> tuple[Any, ...] | None:
        """The manifests of a snapshot: its own and those of all before it."""
        if snapshot.manifest_list in self.warehouse.deleted:
            return None
        state, last = snapshot.place
        return tuple(_manifest(state, i) for i in range(last + 1))

    def manifest_files(self, manifest: Any) -> ManifestFiles | None:
        """The data files that a manifest names."""
        if manifest.manifest_path in self.warehouse.deleted:
            return None
        paths = [file.path for file in manifest.step.added]
        return ManifestFiles(dict.fromkeys(paths, 1), frozenset(paths))

    def size(self, location: str) -> int:
        """1 for what is there."""
        return int(location not in self.warehouse.deleted)

    def delete(self, location: str) -> None:
        """Delete a file."""
        if location not in self.warehouse.deleted:  # two sweepers may be at the same tag
            self.warehouse.deleted.add(location)
            self.deletes(location)


def _manifest(state: State, number: int) -> Any:
    step = state.steps[number]
    return SimpleNamespace(
        manifest_path=state.manifests[number],
        manifest_length=1,
        added_snapshot_id=step.snapshot_id,
        step=step,
    )
