"""What writers do to a table: each function gives the table's next state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import count
from random import Random
from typing import Any

from pyiceberg.table.snapshots import Operation

from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster_tests.incremental.iceberg import (
    Entry,
    File,
    Metadata,
    Row,
    Snapshot,
    Summary,
    Table,
    left,
)

Wanted = Callable[[Row], bool]


@dataclass
class Writer:
    """Names files and snapshots, and decides what writers leave open."""

    random: Random
    numbers: count[int] = field(default_factory=lambda: count(1))

    def create(self, *, by_part: bool, moments: bool = False) -> Table:
        return Table(Metadata(f"uuid-{next(self.numbers)}", by_part, moments=moments))

    # -- what comes and goes ---------------------------------------------------------------------------

    def append(self, table: Table, rows: Sequence[Row]) -> Table:
        return self.commit(table, self._files(table, rows), (), Operation.APPEND)

    def replace_part(self, table: Table, part: str | None, rows: Sequence[Row]) -> Table:
        """All rows of a partition make place for others."""
        return self.rewrite(table, lambda row: row.part == part, lambda _: None, rows)

    def rewrite(
        self,
        table: Table,
        wanted: Wanted,
        change: Callable[[Row], Row | None],
        more: Sequence[Row] = (),
    ) -> Table:
        """Copy-on-write: files with wanted rows are written again, with those changed or left out."""
        deletes = table.deletes
        gone = [file for file in table.data if any(map(wanted, left(file, deletes)))]
        if not gone and not more:
            return table
        rows = [
            found
            for file in gone
            for row in left(file, deletes)
            if (found := change(row) if wanted(row) else row) is not None
        ]
        added = self._files(table, [*rows, *more])
        operation = Operation.OVERWRITE if added else Operation.DELETE
        return self.commit(table, added, [*gone, *self._dangling(table, gone)], operation)

    def delete_rows(self, table: Table, wanted: Wanted, more: Sequence[Row] = ()) -> Table:
        """Merge-on-read: delete files name the rows; `more` rows come with them, as in an UPDATE.

        Some writers put what was deleted of a file before into the new delete file.
        """
        before = table.deletes
        names: dict[str, list[int]] = {}
        parts: dict[str, str | None] = {}
        for file in table.data:
            gone = {place for one in before for place in one.names.get(file.file_path, ())}
            hit = [n for n, row in enumerate(file.rows) if n not in gone and wanted(row)]
            if hit:
                names[file.file_path] = hit
                parts[file.file_path] = file.partition[0] if file.partition else None
        if not names:
            return table
        removed: list[File] = []
        if self.random.random() < 0.5:  # deletion vectors, and file-scoped deletes
            for one in before:
                if len(one.names) == 1 and (path := next(iter(one.names))) in names:
                    names[path] = sorted({*names[path], *one.names[path]})
                    removed.append(one)
            deletes = [self._deletes(table, {path: hit}, parts[path]) for path, hit in names.items()]
        else:
            grouped: dict[str | None, dict[str, Sequence[int]]] = defaultdict(dict)
            for path, hit in names.items():
                grouped[parts[path]][path] = hit
            deletes = [self._deletes(table, some, part) for part, some in grouped.items()]
        operation = Operation.OVERWRITE if more else Operation.DELETE
        return self.commit(table, [*self._files(table, more), *deletes], removed, operation)

    def compact(self, table: Table, chosen: Sequence[File]) -> Table:
        """The rows of some files in new ones; of a partitioned table, each partition's by itself."""
        rows = [row for file in chosen for row in left(file, table.deletes)]
        gone = [*chosen, *self._dangling(table, chosen)]
        return self.commit(table, self._files(table, rows), gone, Operation.REPLACE)

    # -- history ---------------------------------------------------------------------------------------

    def roll_back(self, table: Table, to: Snapshot) -> Table:
        return table.changed(current_snapshot_id=to.snapshot_id)

    def expire(self, table: Table, keep: int) -> Table:
        """Only the youngest snapshots are left. PyIceberg forgets parents that are gone, Java does not."""
        kept = table.metadata.snapshots[-keep:]
        if table.head not in kept:
            return table
        if self.random.random() < 0.5:
            known = {one.snapshot_id for one in kept}
            kept = tuple(one if one.parent_snapshot_id in known else _orphan(one) for one in kept)
        return table.changed(snapshots=kept)

    # -- commits ---------------------------------------------------------------------------------------

    def commit(
        self,
        table: Table,
        added: Iterable[File],
        removed: Iterable[File],
        operation: Operation,
        **told: str,
    ) -> Table:
        head, gone = table.head, tuple(removed)
        paths = {one.file_path for one in gone}
        live: tuple[Entry, ...] = ()
        if head is not None:
            live = tuple(one for one in head.after if one.data_file.file_path not in paths)
        made = Snapshot(
            next(self.numbers),
            head.snapshot_id if head else None,
            head.sequence_number + 1 if head else 1,
            Summary(operation, told),
            tuple(added),
            gone,
            live,
        )
        return table.changed(
            snapshots=(*table.metadata.snapshots, made), current_snapshot_id=made.snapshot_id
        )

    def replay(self, table: Table, step: Snapshot) -> Table:
        """A snapshot of a run's branch on what `main` holds now."""
        told = {**step.summary.additional_properties, LakeProperty.REPLAYED_FROM: str(step.snapshot_id)}
        return self.commit(table, step.added, step.removed, step.summary.operation, **told)

    def store(self, table: Table, kept: Mapping[Any, Any], *, replayed: int | None = None) -> Table:
        """A consumer's result, which takes the place of all that its table holds; a file for each place.

        `replayed` is the snapshot of a run's branch that this one repeats on `main`.
        """
        files = [File(f"file-{next(self.numbers):05}", [_row_of(place)]) for place in kept]
        told = {} if replayed is None else {LakeProperty.REPLAYED_FROM: str(replayed)}
        made = self.commit(table, files, table.data, Operation.OVERWRITE, **told)
        *earlier, last = made.metadata.snapshots
        return made.changed(snapshots=(*earlier, replace(last, kept=kept)))

    def _files(self, table: Table, rows: Iterable[Row]) -> list[File]:
        by_part = table.metadata.by_part
        groups: dict[str | None, list[Row]] = defaultdict(list)
        for row in rows:
            groups[row.part if by_part else None].append(row)
        bounds = self.random.random() < 0.95
        how: dict[str, Any] = {"by_part": by_part, "bounds": bounds, "moments": table.metadata.moments}
        return [
            File(f"file-{next(self.numbers):05}", some, part=part, **how) for part, some in groups.items()
        ]

    def _deletes(self, table: Table, names: dict[str, Sequence[int]], part: str | None) -> File:
        path = f"deletes-{next(self.numbers):05}"
        return File(path, names=names, part=part, by_part=table.metadata.by_part)

    def _dangling(self, table: Table, gone: Sequence[File]) -> list[File]:
        """Delete files that name rows of these files only; some writers leave them there."""
        paths = {one.file_path for one in gone}
        found = [one for one in table.deletes if paths >= one.names.keys()]
        return found if self.random.random() < 0.7 else []


def _orphan(one: Snapshot) -> Snapshot:
    return replace(one, parent_snapshot_id=None)


def _row_of(place: Any) -> Row:
    """A row of what a consumer's table holds for a day, a part, or anything else."""
    return Row(None, place, "", 0) if isinstance(place, date) else Row(place, None, "", 0)
