"""A table format for the simulation: files with rows in memory, snapshots, and the publisher's port on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from zlib import crc32

from branchlake_dagster.internals.column_metrics import DataPaths
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.publication.replay import ReplayImpossible, StagedState, TableStates
from branchlake_dagster.publication.table_change import (
    ChangeMode,
    DeleteFile,
    File,
    FileBounds,
    Layout,
    LayoutColumn,
    SnapshotChange,
    TableChange,
)
from branchlake_dagster.tables.replaced_rows import ReplacedRows, StringSet

Row = tuple[str, str, str]
"""(partition, key, token). The partition is Dagster's; files are finer, see `slot`."""

NOTE = "~note"
"""The partition of the row that stands for the table's metadata which a rebase does not carry."""

FOLDER = "lake/"
"""Where all tables keep their files."""

LAYOUT = Layout(
    columns=(
        LayoutColumn(1, "part", "string", True),
        LayoutColumn(2, "key", "string", True),
        LayoutColumn(3, "token", "string", True),
    ),
    spec=(("part", "identity", "part"), ("key", "bucket[2]", "slot")),
    highest_column_id=3,
)


class FilesMissing(FileNotFoundError):  # noqa: N818 - reads as a verdict
    """A state names files that were deleted."""


@dataclass(frozen=True)
class State:
    """One version of a table. A data file named twice counts twice, as in Iceberg."""

    files: tuple[File, ...] = ()
    steps: tuple[SnapshotChange, ...] = ()
    manifests: tuple[str, ...] = ()
    location: str = ""
    """Its metadata file; that of the state it was made from, until it is stored itself."""
    log: tuple[str, ...] = ()
    """The metadata files before that one."""
    note: Row | None = None
    """The metadata that no snapshot changes."""
    dead: frozenset[tuple[str, Row]] = frozenset()
    """Rows of data files that delete files took out."""

    @property
    def snapshot_id(self) -> int | None:
        return self.steps[-1].snapshot_id if self.steps else None


class Warehouse:
    """All files. `locations` are metadata files with the states they describe."""

    def __init__(self, actor: Callable[[], str] = lambda: "") -> None:
        self._numbers = count(1)
        self.locations: dict[str, State] = {}
        self.rows: dict[str, tuple[Row, ...]] = {}
        self.dead: dict[str, frozenset[tuple[str, Row]]] = {}
        self.deleted: set[str] = set()
        self.writers: dict[str, str] = {}
        """Who wrote each data file: an actor's name, which is a run's id for what runs write."""
        self._actor = actor

    def number(self) -> int:
        return next(self._numbers)

    def data_file(self, rows: Iterable[Row]) -> File:
        """A new data file; its rows are of one partition and one slot of it."""
        held = tuple(rows)
        path = f"{FOLDER}data-{self.number()}"
        self.rows[path] = held
        self.writers[path] = self._actor()
        part = held[0][0]
        kept = replacing(part)
        return File(path, f"part={part}/slot={slot(held[0])}", _bounds(held), path, kept.overlaps, len(held))

    def data_files(self, rows: Iterable[Row]) -> list[File]:
        """New data files for rows of one partition, one for each slot."""
        slots: dict[int, list[Row]] = {}
        for row in rows:
            slots.setdefault(slot(row), []).append(row)
        return [self.data_file(held) for held in slots.values()]

    def delete_file(self, file: File, rows: Iterable[Row]) -> DeleteFile:
        """A new file that deletes rows of one data file."""
        path = f"deletes-{self.number()}"
        gone = tuple(rows)
        self.dead[path] = frozenset((file.path, row) for row in gone)
        named = DataPaths(file.path.encode(), file.path.encode())
        return DeleteFile(path, file.partition, named, may_hold=replacing(gone[0][0]).overlaps)

    def rows_in(self, state: State, file: File) -> list[Row]:
        """The rows of a data file that are left."""
        return [row for row in self.rows[file.path] if (file.path, row) not in state.dead]

    def store(self, state: State) -> str:
        """A new metadata file."""
        location = f"{FOLDER}metadata-{self.number()}"
        log = (*state.log, state.location) if state.location else ()
        self.locations[location] = replace(state, location=location, log=log)
        return location

    def state(self, content: IcebergTable) -> State:
        """The state of a metadata file; raises FilesMissing when anything it needs is gone."""
        if gone := self.deleted.intersection(self.needed(content.metadata_location)):
            raise FilesMissing(f"{content.metadata_location} needs {sorted(gone)}, which was deleted")
        return self.locations[content.metadata_location]

    def needed(self, location: str) -> set[str]:
        """The files without which the state of a metadata file cannot be read."""
        state = self.locations[location]
        lists = [f"{state.manifests[-1]}.list"] if state.manifests else []
        return {location, *lists, *state.manifests, *(file.path for file in state.files)}

    def rows_of(self, state: State) -> list[Row]:
        """The rows that a reader sees."""
        found = [row for file in state.files for row in self.rows_in(state, file)]
        return [*found, state.note] if state.note else found

    def stepped(self, state: State, step: SnapshotChange) -> State:
        """The state after one more snapshot, with the manifest it wrote."""
        gone = {file.path for file in step.removed}
        kept = tuple(file for file in state.files if file.path not in gone)
        manifest = f"{FOLDER}manifest-{self.number()}"
        return replace(
            state,
            files=(*kept, *step.added),
            steps=(*state.steps, step),
            manifests=(*state.manifests, manifest),
            dead=state.dead.union(*(self.dead[one.path] for one in step.deletes)),
        )


def slot(row: Row) -> int:
    """Which of a partition's two file partitions a row is in: a bucket of its key."""
    return crc32(row[1].encode()) % 2


def replacing(part: str) -> ReplacedRows:
    """The record of a replaced partition."""
    return ReplacedRows(((StringSet(1, frozenset({part})),),))


def layout(state: State) -> Layout:
    """The columns are always the same; the note is what a rebase does not carry."""
    return replace(LAYOUT, others=(("sort order", str(state.note)),))


def _bounds(rows: tuple[Row, ...]) -> Callable[[str], FileBounds | None]:
    def of(column: str) -> FileBounds | None:
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

    def open(self, key: ContentKey, content: IcebergTable) -> StagedState:
        self.pause()
        state: Any = self.warehouse.state(content)
        return StagedState(state, state)

    def load_change(
        self,
        key: ContentKey,
        before: IcebergTable | None,
        after: IcebergTable | StagedState,
        *,
        files: bool = True,
    ) -> TableChange:
        self.pause()
        old = self.warehouse.state(before) if before else None
        new: Any = after.table if isinstance(after, StagedState) else self.warehouse.state(after)
        start = len(old.steps) if old else 0
        steps = new.steps[start:]
        if old and new.steps[:start] != old.steps:
            steps = (*new.steps, SnapshotChange(0, ChangeMode.UNKNOWN))
        if not files:
            steps = tuple(
                SnapshotChange(
                    one.snapshot_id, ChangeMode.UNKNOWN, run_id=one.run_id, original_id=one.original_id
                )
                for one in steps
            )
        return TableChange(
            layout(old) if old else None,
            layout(new),
            steps,
            base_snapshot_id=old.snapshot_id if old else None,
        )

    def find_read_errors(self, states: Sequence[TableStates]) -> list[Exception | None]:
        self.pause()
        return [self._read_error(after) for _, _, after in states]

    def _read_error(self, content: IcebergTable) -> FilesMissing | None:
        try:
            self.warehouse.state(content)
        except FilesMissing as error:
            return error
        return None

    def replay(
        self, key: ContentKey, run_change: TableChange, after: IcebergTable, target: StagedState
    ) -> StagedState:
        self.pause()
        state: Any = target.table
        written = list(target.written_paths)
        for step in run_change.steps:
            present = {file.path for file in state.files}
            if lost := {file.path for file in step.removed} - present:
                raise ReplayImpossible(f"files are not there any more: {sorted(lost)}", table=key.name)
            state = self.warehouse.stepped(
                state,
                replace(
                    step,
                    snapshot_id=self.warehouse.number(),
                    original_id=None if step.is_reversal else step.snapshot_id,
                ),
            )
            written.append(state.manifests[-1])
        return StagedState(target.base, state, written)

    def graft(
        self, key: ContentKey, before: IcebergTable, after: IcebergTable, target: StagedState
    ) -> StagedState | None:
        self.pause()
        main: Any = target.table
        run, start = self.warehouse.state(after), len(self.warehouse.state(before).steps)
        reversals = tuple(
            replace(step, added=step.removed, removed=step.added, is_reversal=True)
            for step in reversed(main.steps[start:])
        )
        own = run.steps[start:]
        state: Any = replace(
            run,
            steps=(*main.steps, *reversals, *own),
            # A reversal has no snapshot of its own; here it shares the compaction's manifest.
            manifests=(*main.manifests, *reversed(main.manifests[start:]), *run.manifests[start:]),
            location=main.location,
            log=main.log,
        )
        return StagedState(target.base, state)

    def write(self, staged: StagedState, content_id: str | None) -> IcebergTable:
        self.pause()
        state: Any = staged.table
        location = self.warehouse.store(state)
        staged.written_paths.append(location)
        return table_content(content_id, location, state)

    def discard(self, staged: StagedState) -> None:
        self.pause()
        self.warehouse.deleted.update(staged.written_paths)
