"""A lake in memory with real Iceberg files, whose clocks a test sets, and collectors of it."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table import Table

from branchlake_dagster.garbage_collection import warehouse_files
from branchlake_dagster.garbage_collection.collector import FileCollector
from branchlake_dagster.lakehouse import lakehouse as lakehouses
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import RetryBudget, RetryPolicy
from branchlake_dagster.runs.heartbeats import Heartbeat
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import LakeFolder
from branchlake_dagster.tables.location_keys import canonical_location
from branchlake_dagster_tests.maintenance_simulation.stored_states import NessieBackup
from branchlake_dagster_tests.suite.memory import NamedTransport, SharedNessie

DAY = timedelta(days=1)
NOW = datetime.now(UTC)
ROWS = pa.table({"n": [1, 2, 3]})


class MemoryHeartbeats:
    """Heartbeats that a test sets: of living writers, whose files differ at each reading, and of dead ones."""

    def __init__(self) -> None:
        self.beats: list[Heartbeat] = []
        self.dead: list[Heartbeat] = []
        self.error: Exception | None = None
        self._readings = 0

    def all(self) -> Sequence[Heartbeat]:
        if self.error is not None:
            raise self.error
        self._readings += 1
        return (*self.dead, *(replace(beat, text=f"{self._readings}") for beat in self.beats))

    def remove(self, branch: str, writer: str) -> None:
        self.beats = [beat for beat in self.beats if (beat.branch, beat.writer) != (branch, writer)]

    def beat(self, branch: str, *, at: datetime | None = None, started_at: datetime | None = None) -> None:
        written_at = at or datetime.now(UTC)
        beat = Heartbeat(branch, f"w-{branch}", "r", written_at=written_at, started_at=started_at)
        self.beats.append(beat)


@dataclass
class CollectedLake:
    """A lake, its namespace `shop` on `main`, and what a test does to it."""

    folder: Path
    server: SharedNessie
    lake: Lakehouse
    client: NessieClient
    heartbeats: MemoryHeartbeats = field(default_factory=MemoryHeartbeats)
    namespace: str = "shop"

    @property
    def nessie(self) -> NessieClient:
        return self.lake.nessie

    @property
    def root(self) -> Path:
        return self.folder / "state" / "warehouse"

    def at(self, moment: datetime) -> None:
        """Let Nessie's clock show this moment from now on."""
        self.server.history._clock = lambda: moment

    # -- tables ----------------------------------------------------------------------------------------

    def create(self, name: str = "t", ref: str = MAIN, **options: Any) -> Table:
        catalog = self.lake.catalog(ref, properties={"namespace.create": "true"})
        return catalog.create_table((self.namespace, name), ROWS.schema, **options)

    def table(self, name: str = "t", ref: str = MAIN) -> Table:
        return self.lake.catalog(ref).load_table((self.namespace, name))

    def append(self, *numbers: int, name: str = "t", ref: str = MAIN) -> str:
        """Append rows, and return the path of the data file."""
        before = self.data_files(name, ref)
        self.table(name, ref).append(pa.table({"n": list(numbers)}))
        (path,) = self.data_files(name, ref) - before
        return path

    def data_files(self, name: str = "t", ref: str = MAIN) -> set[str]:
        table = self.table(name, ref)
        if table.current_snapshot() is None:
            return set()
        return {path.removeprefix("file://") for path in table.inspect.files()["file_path"].to_pylist()}

    def rows(self, name: str = "t", ref: str = MAIN) -> list[int]:
        return sorted(self.table(name, ref).scan().to_arrow()["n"].to_pylist())

    def branch(self, name: str, source: str = MAIN) -> str:
        self.nessie.create_branch(name, from_ref=source, from_hash=self.nessie.reference(source).hash)
        return name

    def tag(self, name: str, source: str = MAIN) -> str:
        self.nessie.create_tag(name, from_ref=source, from_hash=self.nessie.reference(source).hash)
        return name

    def delete(self, name: str) -> None:
        ref = self.nessie.reference(name)
        remove = self.nessie.delete_tag if ref.type == "TAG" else self.nessie.delete_branch
        remove(name, expected_hash=ref.hash)

    def table_folder(self, name: str = "t", ref: str = MAIN) -> Path:
        return Path(self.table(name, ref).location().removeprefix("file://"))

    # -- files -----------------------------------------------------------------------------------------

    def write(self, path: Path, content: bytes = b"x") -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return str(path)

    def stray(self, name: str = "t", file: str = "") -> str:
        """Write a data file that nothing names into a table's folder."""
        return self.write(self.table_folder(name) / "data" / (file or f"stray-{uuid.uuid4()}.parquet"))

    def age(self, days: float = 20, *, only: Sequence[str] | None = None) -> None:
        """Let files look as old as this, by default all that exist."""
        stamp = (datetime.now(UTC) - days * DAY).timestamp()
        for path in [Path(each) for each in only] if only is not None else self.root.rglob("*"):
            if path.is_file():
                os.utime(path, (stamp, stamp))

    def files(self) -> set[str]:
        """The files of the warehouse, without branchlake's own and the journal's."""
        return {
            str(path)
            for path in self.root.rglob("*")
            if path.is_file() and path.relative_to(self.root).parts[0] not in ("_branchlake", "branchlake")
        }

    # -- collections -----------------------------------------------------------------------------------

    def collector(self, *, ago: timedelta = timedelta(0), **options: Any) -> FileCollector:
        """A collector at a moment before now. Nessie's clock is right from now on."""
        self.server.history._clock = lambda: datetime.now(UTC)
        slept = [0.0]
        collector = FileCollector.of_lake(
            self.lake, now=lambda: datetime.now(UTC) - ago, sleep=slept.append, **options
        )
        collector._heartbeats = self.heartbeats
        collector._monotonic = lambda: time.monotonic() + sum(slept)
        return collector

    def collect(self, **options: Any) -> set[str]:
        """Plan two days ago and execute now; return what was deleted."""
        before = self.files()
        self.collector(ago=2 * DAY, **options).run()
        self.collector(**options).run()
        return before - self.files()


class SavedLake:
    """A copy of all that a lake has: what Nessie has, the files with their times, and the heartbeats.

    The copies of the files are links: a lake replaces files and deletes them, but writes into none.
    """

    def __init__(self, lake: CollectedLake) -> None:
        self._lake = lake
        self._nessie = NessieBackup(lake.server.history)
        self._state, self._copy = lake.folder / "state", lake.folder / f"copy-{uuid.uuid4()}"
        shutil.copytree(self._state, self._copy, copy_function=os.link)
        self._beats = tuple(lake.heartbeats.beats)

    def restore(self) -> None:
        """Set the lake back to the copy, in place: the locations in its metadata are absolute."""
        self._nessie.restore(self._lake.server.history)
        shutil.rmtree(self._state)
        shutil.copytree(self._copy, self._state, copy_function=os.link)
        self._lake.heartbeats.beats = list(self._beats)


def open_lake(folder: Path, settings: Mapping[str, Any] | None = None) -> CollectedLake:
    """A new lake. Its clients are found by its address, as in `suite.memory`."""
    uri = f"http://{uuid.uuid4().hex}.invalid/api/v2"
    server = SharedNessie()
    client = NessieClient(uri, transport=NamedTransport(server, uri), retry=RetryPolicy(budget=RetryBudget()))
    lakehouses._clients[os.getpid(), uri, None, True] = client
    lake = Lakehouse(Settings(state_dir=folder / "state", nessie_uri=uri, **(settings or {})), start=False)
    made = CollectedLake(folder, server, lake, client)
    ensure_main_has_commit(client)
    return made


def repository_records(lake: CollectedLake) -> list[Path]:
    """The files in the warehouse that record Nessie repositories."""
    return sorted(lake.root.glob(f"{LakeFolder.REPOSITORIES}/*"))


def forget_repositories(lake: CollectedLake) -> None:
    """Delete the files that record repositories, as a person may do."""
    for path in repository_records(lake):
        path.unlink()


def trust_modification_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `os.utime` age files: their other time, of the last change of their status, cannot be set."""
    monkeypatch.setattr(warehouse_files, "last_change_ns", lambda status: status.st_mtime_ns)


def same_file(one: str, other: str) -> bool:
    return canonical_location(one) == canonical_location(other)


class Killed(BaseException):
    """The process ends here."""
