"""The change of a table as dataclasses: positions, steps, changed files, and the net change of all steps."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from pyiceberg.manifest import DataFile, DataFileContent

from branchlake_dagster.errors import BranchlakeError, Terminal


@dataclass(frozen=True)
class Position:
    """The point in a table's history up to which a consumer has read it.

    `snapshot_id` is the table's snapshot on `main`, or None if it had none. `unpublished_snapshots` are the
    snapshots that the consumer's own run added to the table on its branch before reading it. They reach
    `main` later, some under other ids, and `main` may have other snapshots between them that this consumer
    has not read.

    `column_ids` has the names and Iceberg field ids of the columns by which the consumer found changes. A
    column that is dropped and added again has another id. The snapshot does not show the ids: a schema may
    change without a snapshot. Empty if they were not recorded.
    """

    table_uuid: str
    snapshot_id: int | None
    unpublished_snapshots: tuple[int, ...] = ()
    column_ids: tuple[tuple[str, int], ...] = ()

    def with_columns(self, names: Collection[str]) -> Position:
        """Return the position with the ids of these columns only."""
        return replace(self, column_ids=tuple(pair for pair in self.column_ids if pair[0] in names))

    def has_other_columns(self, other: Position) -> bool:
        """Whether a column that both positions name has different ids in them."""
        other_ids = dict(other.column_ids)
        return any(other_ids.get(name, field_id) != field_id for name, field_id in self.column_ids)

    def as_dict(self) -> dict[str, Any]:
        """Return the position as a value for JSON."""
        values: dict[str, Any] = {"table": self.table_uuid, "snapshot": self.snapshot_id}
        return (
            values
            | ({"beyond": list(self.unpublished_snapshots)} if self.unpublished_snapshots else {})
            | ({"columns": dict(self.column_ids)} if self.column_ids else {})
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Position:
        """Parse the result of `as_dict`. Raises KeyError or TypeError for any other value."""
        snapshot_id, unpublished_snapshots = values["snapshot"], tuple(values.get("beyond", ()))
        columns = values.get("columns", {})
        if not isinstance(columns, Mapping):
            raise TypeError(f"{values!r} has columns that are not an object")
        column_ids = tuple(sorted(columns.items()))
        numbers = (snapshot_id or 0, *unpublished_snapshots, *(field_id for _, field_id in column_ids))
        if not all(isinstance(number, int) for number in numbers):
            raise TypeError(f"{values!r} has a snapshot id or a field id that is not a number")
        return cls(str(values["table"]), snapshot_id, unpublished_snapshots, column_ids)


class ChangeKind(StrEnum):
    """How a snapshot changed its table."""

    APPEND = "append"
    REPLACE_PARTITIONS = "replace_partitions"
    REPLACE_TABLE = "replace_table"
    UPSERT = "upsert"
    UPDATE = "update"
    """Files were rewritten by a user's own UPDATE, MERGE or DELETE (copy-on-write)."""
    DELETE = "delete"
    """Files were removed and no file was added."""
    ROW_DELETES = "row deletes"
    """Delete files or deletion vectors were added by UPDATE, MERGE or DELETE (merge-on-read), or an undo
    removed them."""
    COMPACT = "compact"
    """The same rows were written to other files."""


@dataclass(frozen=True)
class ChangedFile:
    """A data or delete file that a snapshot added or removed."""

    file: DataFile
    snapshot_id: int
    ordinal: int
    """The number of its snapshot in the change, from 0."""

    @property
    def path(self) -> str:
        """The location of the file."""
        return self.file.file_path

    @property
    def rows(self) -> int:
        """The number of rows in a data file, or of entries in a delete file."""
        return self.file.record_count


@dataclass(frozen=True)
class Step:
    """The change that one snapshot made.

    `ordinal` is its number in the change, from 0. `at` is the snapshot's time. `run_id` is the run that the
    snapshot's summary names, or None. `replayed_from` is the run-branch snapshot that this snapshot repeats
    on `main`, or None.
    """

    snapshot_id: int
    ordinal: int
    kind: ChangeKind
    at: datetime
    added: tuple[ChangedFile, ...] = ()
    removed: tuple[ChangedFile, ...] = ()
    deletes: tuple[ChangedFile, ...] = ()
    """The delete files that the snapshot added."""
    run_id: str | None = None
    replayed_from: int | None = None
    undone_deletes: tuple[ChangedFile, ...] = ()
    """The delete files that the undo of a publication removed: their rows are in the table again."""
    replaces_deletes: bool = False
    """Whether the snapshot removed delete files, whose positions its own delete files may repeat.

    False for compactions and undos.
    """

    @property
    def changes_rows(self) -> bool:
        """Whether the snapshot changed rows. A compaction does not."""
        return self.kind is not ChangeKind.COMPACT and bool(
            self.added or self.removed or self.deletes or self.undone_deletes
        )


@dataclass(frozen=True)
class ChangeSet:
    """The change of one table from position `since` to position `up_to`; its steps are oldest first.

    As a multiset of rows, the change is: the rows of `added` that `deletes` do not delete, minus the rows of
    `removed` as they were at `since`, minus the rows that `deletes` delete in all other files. The change
    of a whole table removes no rows. A file that was added and removed again is in neither list. Compactions
    do not count.
    """

    table: str
    since: Position | None
    """The position at which the change begins; None if all rows of the table are new."""
    up_to: Position
    steps: tuple[Step, ...]
    added: tuple[ChangedFile, ...]
    removed: tuple[ChangedFile, ...]
    deletes: tuple[ChangedFile, ...]

    @property
    def whole(self) -> bool:
        """Whether the change is the whole table rather than a difference."""
        return self.since is None

    @property
    def empty(self) -> bool:
        """Whether the change has no files. Compactions do not count."""
        return not (self.added or self.removed or self.deletes)

    @property
    def rows_added(self) -> int:
        """The number of rows in the added files, including rows that delete files of the change delete."""
        return sum(file.rows for file in self.added)

    @property
    def rows_removed(self) -> int:
        """The number of rows in the removed files, plus the number of entries in the delete files."""
        return sum(file.rows for file in (*self.removed, *self.deletes))

    @property
    def rows_changed(self) -> int:
        """The sum of `rows_added` and `rows_removed`. Unchanged rows of rewritten files count in both."""
        return self.rows_added + self.rows_removed

    @property
    def files_changed(self) -> int:
        """The number of files in the change."""
        return len(self.added) + len(self.removed) + len(self.deletes)

    @property
    def bytes(self) -> int:
        """The total size in bytes of the files in the change."""
        return sum(file.file.file_size_in_bytes for file in self.files())

    @property
    def oldest(self) -> datetime | None:
        """The time of the earliest snapshot that changed rows; None if no snapshot did."""
        return min((step.at for step in self.steps if step.changes_rows), default=None)

    @property
    def kinds(self) -> tuple[ChangeKind, ...]:
        """The kinds of the steps that changed rows, each once, in order."""
        return tuple(dict.fromkeys(step.kind for step in self.steps if step.changes_rows))

    @property
    def only_appends(self) -> bool:
        """Whether the change has neither removed files nor delete files."""
        return not (self.removed or self.deletes)

    @property
    def has_equality_deletes(self) -> bool:
        """Whether rows were deleted by value. Only a scan can find these rows."""
        return any(file.file.content == DataFileContent.EQUALITY_DELETES for file in self.deletes)

    def files(self) -> Iterator[ChangedFile]:
        """Iterate over all files of the change."""
        yield from self.added
        yield from self.removed
        yield from self.deletes

    def label(self) -> str:
        """Return the change as a short text, such as `3 files (+120 rows), 1 removed (-40 rows)`."""
        if self.empty:
            return "no change"
        parts = [f"{len(self.added)} files (+{self.rows_added} rows)"] if self.added else []
        if self.removed or self.deletes:
            parts.append(f"{len(self.removed) + len(self.deletes)} removed (-{self.rows_removed} rows)")
        return ", ".join(parts)


def from_epoch_ms(milliseconds: int) -> datetime:
    """Convert the time stamp of a snapshot, in milliseconds since 1970 in UTC, to a datetime in UTC."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def position_to_json(position: Position) -> str:
    """Return the position as JSON. Equal positions give equal text."""
    return json.dumps(position.as_dict(), separators=(",", ":"), sort_keys=True)


class LossReason(StrEnum):
    """Why the change since a position is no longer known."""

    ROLLED_BACK = "rolled back"
    """The position's snapshot is no longer in the table's history."""
    RECREATED = "dropped and created again"
    EXPIRED = "its snapshots have expired"
    FILES_GONE = "files of the change have been deleted"
    DELETES_UNDONE = "an undo has removed delete files"
    """Rows that the consumer had read as deleted are in the table again. No added file has them."""
    COLUMN_REPLACED = "a column was dropped and added again"
    """The name of a column by which changes are found belongs to another field id: the former column was
    dropped or renamed."""
    RESULT_ROLLED_BACK = "the consumer's own table was rolled back"


class ChangeLost(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The change of a table since a position is no longer known; `loss` is the reason.

    `columns` has the former field ids of replaced columns, by name.
    """

    def __init__(
        self,
        message: str,
        *,
        loss: LossReason,
        columns: Mapping[str, int] | None = None,
        table: str | None = None,
        partitions: Iterable[str] = (),
        branch: str | None = None,
        run_id: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, table=table, partitions=partitions, branch=branch, run_id=run_id, hint=hint)
        self.loss = loss
        self.columns = dict(columns or {})


class RowsUnreadable(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The changed rows cannot be read one by one, because equality deletes removed some of them."""
