"""A table format for the simulation: files with rows in memory, snapshots, and the publisher's port on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from branchlake_dagster.lakehouse.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.publication.changes import Bounds, Column, File, Layout, Mode, Step, TableChange
from branchlake_dagster.publication.replay import ReplayImpossible, Staged

Row = tuple[str, str, str]
"""(partition, key, token)."""

FOLDER = "lake/"
"""Where all tables keep their files."""

LAYOUT = Layout(
    columns=(
        Column(1, "part", "string", True),
        Column(2, "key", "string", True),
        Column(3, "token", "string", True),
    ),
    spec=(("part", "identity", "part"),),
    highest_column_id=3,
)


class FilesMissing(FileNotFoundError):  # noqa: N818 - reads as a verdict
    """A state names files that were deleted."""


@dataclass(frozen=True)
class State:
    """One version of a table. A data file named twice counts twice, as in Iceberg."""

    files: tuple[File, ...] = ()
    steps: tuple[Step, ...] = ()
    manifests: tuple[str, ...] = ()
    location: str = ""
    """Its metadata file; that of the state it was made from, until it is stored itself."""
    log: tuple[str, ...] = ()
    """The metadata files before that one."""

    @property
    def snapshot_id(self) -> int | None:
        return self.steps[-1].snapshot_id if self.steps else None


class Warehouse:
    """All files. `locations` are metadata files with the states they describe."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self.locations: dict[str, State] = {}
        self.rows: dict[str, tuple[Row, ...]] = {}
        self.deleted: set[str] = set()

    def number(self) -> int:
        return next(self._numbers)

    def data_file(self, rows: Iterable[Row]) -> File:
        """A new data file; its rows are of one partition."""
        held = tuple(rows)
        path = f"{FOLDER}data-{self.number()}"
        self.rows[path] = held
        return File(path, f"part={held[0][0]}", _bounds(held), path)

    def store(self, state: State) -> str:
        """A new metadata file."""
        location = f"{FOLDER}metadata-{self.number()}"
        log = (*state.log, state.location) if state.location else ()
        self.locations[location] = replace(state, location=location, log=log)
        return location

    def state(self, content: IcebergTable) -> State:
        """The state of a metadata file; raises FilesMissing when anything it needs is gone."""
        state = self.locations[content.metadata_location]
        lists = [f"{state.manifests[-1]}.list"] if state.manifests else []
        files = [file.path for file in state.files]
        needed = [content.metadata_location, *lists, *state.manifests, *files]
        if gone := self.deleted.intersection(needed):
            raise FilesMissing(f"{content.metadata_location} needs {sorted(gone)}, which was deleted")
        return state

    def rows_of(self, state: State) -> list[Row]:
        """The rows that a reader sees."""
        return [row for file in state.files for row in self.rows[file.path]]

    def stepped(self, state: State, step: Step) -> State:
        """The state after one more snapshot, with the manifest it wrote."""
        gone = {file.path for file in step.removed}
        kept = tuple(file for file in state.files if file.path not in gone)
        manifest = f"{FOLDER}manifest-{self.number()}"
        return replace(
            state,
            files=(*kept, *step.added),
            steps=(*state.steps, step),
            manifests=(*state.manifests, manifest),
        )


def _bounds(rows: tuple[Row, ...]) -> Callable[[str], Bounds | None]:
    def of(column: str) -> Bounds | None:
        values = [row[("part", "key", "token").index(column)] for row in rows]
        return min(values), max(values)

    return of


def table_content(content_id: str | None, location: str, state: State) -> IcebergTable:
    """What Nessie holds of a state."""
    return IcebergTable(content_id, location, state.snapshot_id or -1, 0, 0, 0)


@dataclass
class SimulatedTables:
    """The publisher's `Tables`. `pause` stands for the time that files take."""

    warehouse: Warehouse
    pause: Callable[[], None] = field(default=lambda: None)

    def open(self, key: ContentKey, content: IcebergTable) -> Staged:
        self.pause()
        state: Any = self.warehouse.state(content)
        return Staged(state, state)

    def change(
        self,
        key: ContentKey,
        before: IcebergTable | None,
        after: IcebergTable | Staged,
        *,
        files: bool = True,
    ) -> TableChange:
        self.pause()
        old = self.warehouse.state(before) if before else None
        new: Any = after.table if isinstance(after, Staged) else self.warehouse.state(after)
        start = len(old.steps) if old else 0
        steps = new.steps[start:]
        if old and new.steps[:start] != old.steps:
            steps = (*new.steps, Step(0, Mode.UNKNOWN))
        if not files:
            steps = tuple(
                Step(one.snapshot_id, Mode.UNKNOWN, run_id=one.run_id, origin=one.origin) for one in steps
            )
        return TableChange(
            LAYOUT if old else None, LAYOUT, steps, base_snapshot_id=old.snapshot_id if old else None
        )

    def replay(self, key: ContentKey, mine: TableChange, after: IcebergTable, onto: Staged) -> Staged:
        self.pause()
        state: Any = onto.table
        written = list(onto.written)
        for step in mine.steps:
            present = {file.path for file in state.files}
            if lost := {file.path for file in step.removed} - present:
                raise ReplayImpossible(f"files are not there any more: {sorted(lost)}", table=key.name)
            state = self.warehouse.stepped(
                state, replace(step, snapshot_id=self.warehouse.number(), origin=step.snapshot_id)
            )
            written.append(state.manifests[-1])
        return Staged(onto.base, state, written)

    def write(self, staged: Staged, content_id: str | None) -> IcebergTable:
        self.pause()
        state: Any = staged.table
        location = self.warehouse.store(state)
        staged.written.append(location)
        return table_content(content_id, location, state)

    def discard(self, staged: Staged) -> None:
        self.pause()
        self.warehouse.deleted.update(staged.written)
