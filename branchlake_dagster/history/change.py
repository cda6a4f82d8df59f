"""A table's change as plain values: steps, files, and what remains of them when all are taken together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from pyiceberg.manifest import DataFile, DataFileContent

from branchlake_dagster.errors import BranchlakeError, Terminal


@dataclass(frozen=True)
class Position:
    """How far somebody has consumed a table: its identity, a snapshot, and snapshots of a branch beyond it.

    `snapshot_id` is the one that `main` had (None: it had none), `unpublished_snapshots` are those that the
    consumer's own
    run had added to it before it was read. On `main` they come later, some under other ids, and between
    them there may be others that this consumer has not seen.
    """

    table_uuid: str
    snapshot_id: int | None
    unpublished_snapshots: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        values: dict[str, Any] = {"table": self.table_uuid, "snapshot": self.snapshot_id}
        return values | ({"beyond": list(self.unpublished_snapshots)} if self.unpublished_snapshots else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Position:
        """Back again; KeyError or TypeError for something else."""
        return cls(str(values["table"]), values["snapshot"], tuple(values.get("beyond", ())))


class ChangeKind(StrEnum):
    """How a snapshot changed its table."""

    APPEND = "append"
    REPLACE_PARTITIONS = "replace_partitions"
    REPLACE_TABLE = "replace_table"
    UPSERT = "upsert"
    UPDATE = "update"
    """Files were rewritten: UPDATE, MERGE or DELETE of a user's own, copy-on-write."""
    DELETE = "delete"
    """Files were removed and none added."""
    ROW_DELETES = "row deletes"
    """Delete files or deletion vectors were added: UPDATE, MERGE or DELETE, merge-on-read."""
    COMPACT = "compact"
    """The same rows in other files."""


@dataclass(frozen=True)
class ChangedFile:
    """A data or delete file that a snapshot added or removed."""

    file: DataFile
    snapshot_id: int
    ordinal: int
    """Of its snapshot in the change, from 0."""

    @property
    def path(self) -> str:
        """Its location."""
        return self.file.file_path

    @property
    def rows(self) -> int:
        """Its rows; for a delete file, how many it names."""
        return self.file.record_count


@dataclass(frozen=True)
class Step:
    """What one snapshot did. `at` is when it was made, `run_id` the run that says it made it."""

    snapshot_id: int
    ordinal: int
    kind: ChangeKind
    at: datetime
    added: tuple[ChangedFile, ...] = ()
    removed: tuple[ChangedFile, ...] = ()
    deletes: tuple[ChangedFile, ...] = ()
    """Delete files that it added."""
    run_id: str | None = None
    replayed_from: int | None = None

    @property
    def changes_rows(self) -> bool:
        """Whether it is a change of rows at all."""
        return self.kind is not ChangeKind.COMPACT and bool(self.added or self.removed or self.deletes)


@dataclass(frozen=True)
class ChangeSet:
    """The change of one table since a position, oldest step first, and where it leads to.

    As a multiset of rows it is: those of `added`, without what `deletes` hit of them, less those of
    `removed` as they were at the position, less what `deletes` hit of all other files. A file that was
    added and removed again is in neither; compactions count for nothing.
    """

    table: str
    since: Position | None
    """None: everything that the table holds is new."""
    up_to: Position
    steps: tuple[Step, ...]
    added: tuple[ChangedFile, ...]
    removed: tuple[ChangedFile, ...]
    deletes: tuple[ChangedFile, ...]

    @property
    def whole(self) -> bool:
        """Whether it is the whole table rather than a difference."""
        return self.since is None

    @property
    def empty(self) -> bool:
        """Whether no row has changed."""
        return not (self.added or self.removed or self.deletes)

    @property
    def rows_added(self) -> int:
        """The rows of the added files."""
        return sum(file.rows for file in self.added)

    @property
    def rows_removed(self) -> int:
        """The rows of the removed files, and what delete files name: rows, or values of them."""
        return sum(file.rows for file in (*self.removed, *self.deletes))

    @property
    def rows_changed(self) -> int:
        """Both together."""
        return self.rows_added + self.rows_removed

    @property
    def files_changed(self) -> int:
        """How many files are in it."""
        return len(self.added) + len(self.removed) + len(self.deletes)

    @property
    def bytes(self) -> int:
        """The size of all its files."""
        return sum(file.file.file_size_in_bytes for file in self.files())

    @property
    def oldest(self) -> datetime | None:
        """When the first change of rows was made."""
        return min((step.at for step in self.steps if step.changes_rows), default=None)

    @property
    def kinds(self) -> tuple[ChangeKind, ...]:
        """Of the steps that changed rows, each once, in order."""
        return tuple(dict.fromkeys(step.kind for step in self.steps if step.changes_rows))

    @property
    def only_appends(self) -> bool:
        """Whether no row was taken away."""
        return not (self.removed or self.deletes)

    @property
    def has_equality_deletes(self) -> bool:
        """Whether rows were deleted by value, so that only a scan could tell which."""
        return any(file.file.content is DataFileContent.EQUALITY_DELETES for file in self.deletes)

    def files(self) -> Iterator[ChangedFile]:
        """All files in it."""
        yield from self.added
        yield from self.removed
        yield from self.deletes

    def label(self) -> str:
        """The change in a few words."""
        if self.empty:
            return "no change"
        parts = [f"{len(self.added)} files (+{self.rows_added} rows)"] if self.added else []
        if self.removed or self.deletes:
            parts.append(f"{len(self.removed) + len(self.deletes)} removed (-{self.rows_removed} rows)")
        return ", ".join(parts)


def from_epoch_ms(milliseconds: int) -> datetime:
    """A snapshot's time stamp as an aware datetime."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def position_to_json(position: Position) -> str:
    """As JSON, the same for the same position."""
    return json.dumps(position.as_dict(), separators=(",", ":"), sort_keys=True)


class LossReason(StrEnum):
    """What became of the state that a position stands for."""

    ROLLED_BACK = "rolled back"
    """The table's history does not hold it any more."""
    RECREATED = "dropped and created again"
    EXPIRED = "its snapshots have expired"
    FILES_GONE = "files of the change have been deleted"
    RESULT_ROLLED_BACK = "the consumer's own table was rolled back"


class ChangeLost(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """What changed since a position cannot be told any more; `loss` says why."""

    def __init__(
        self,
        message: str,
        *,
        loss: LossReason,
        table: str | None = None,
        partitions: Iterable[str] = (),
        branch: str | None = None,
        run_id: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, table=table, partitions=partitions, branch=branch, run_id=run_id, hint=hint)
        self.loss = loss


class RowsUnreadable(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The changed rows cannot be read one by one, as those that an equality delete file hits."""
