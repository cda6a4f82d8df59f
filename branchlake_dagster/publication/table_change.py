"""What a run, or `main` meanwhile, did to one table, as plain values. `find_overlap` compares them.

A change is a list of steps, one per snapshot since the common base, and the layout before and after. Each
step has the data files that it added and removed. They come from manifests; no data is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from branchlake_dagster.internals.column_metrics import DataPaths
from branchlake_dagster.tables.replaced_rows import ALL_ROWS, ReplacedRows

FileBounds = tuple[Any, Any]
"""The (lowest, highest) value of a column in a file, both inclusive; possibly wider than the real values."""


class ChangeMode(StrEnum):
    """How one snapshot changed its table."""

    APPEND = "append"
    REPLACE_PARTITIONS = "replace_partitions"
    UPSERT = "upsert"
    REWRITE = "rewrite"
    """A copy-on-write UPDATE, DELETE or MERGE of the user. The rows that it read are not known."""
    REPLACE_TABLE = "replace_table"
    """All rows were removed: the table was replaced or truncated."""
    COMPACT = "compact"
    """The same rows were written to other files."""
    ROW_DELETES = "row deletes"
    """Merge-on-read: delete files instead of rewritten data files."""
    DELETION_VECTORS = "deletion vectors"
    """Merge-on-read in format version 3."""
    OLD_LAYOUT = "old layout"
    """Files of an older partition spec were changed. Their partitions cannot be compared with current
    ones."""
    UNKNOWN = "unknown"
    """The history does not lead back to the base: the table was rolled back, or replaced by another
    engine."""


def _no_bounds(_: str) -> FileBounds | None:
    return None


def _may_hold_any(_: ReplacedRows) -> bool:
    return True


@dataclass(frozen=True)
class File:
    """One data file.

    `partition` is its partition as text, such as `day=2026-11-05/kind=radar`; empty if the table has no
    partitions.
    """

    path: str
    partition: str = ""
    bounds: Callable[[str], FileBounds | None] = field(default=_no_bounds, compare=False, repr=False)
    """Returns the bounds of a column by its name; None if the manifest does not have them."""
    handle: Any = field(default=None, compare=False, repr=False)
    """The object of the table format that stands for the file."""
    may_hold: Callable[[ReplacedRows], bool] = field(default=_may_hold_any, compare=False, repr=False)
    """Checks by partition and bounds whether the file may hold rows of a predicate."""
    rows: int | None = None
    """The number of rows; None if unknown."""


@dataclass(frozen=True)
class DeleteFile:
    """One file of row-level deletes (merge-on-read), and the rows that it may delete."""

    path: str
    partition: str = ""
    paths: DataPaths | None = None
    """The data files whose rows it may delete; None if its manifest entry does not show them."""
    everywhere: bool = False
    """Whether it concerns all partitions, as an equality delete without a partition does."""
    may_hold: Callable[[ReplacedRows], bool] = field(default=_may_hold_any, compare=False, repr=False)
    """Checks whether it may delete rows of a predicate."""

    def may_delete_from(self, file: File) -> bool:
        """Return whether this delete file may delete rows of `file`, an older data file."""
        if self.paths is not None:
            return self.paths.may_name(file.path)
        return self.everywhere or self.partition == file.partition


@dataclass(frozen=True)
class SnapshotChange:
    """The change by one snapshot.

    `run_id` is the run that wrote it; None if the writer did not record one.
    """

    snapshot_id: int
    """The id of the snapshot; 0 for a history that does not lead back to the base."""
    mode: ChangeMode
    added: tuple[File, ...] = ()
    removed: tuple[File, ...] = ()
    key_columns: tuple[str, ...] = ()
    """The columns on which an upsert matched rows."""
    run_id: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The entries that the writer put into the snapshot's summary, without the totals."""
    deletes: tuple[DeleteFile, ...] = ()
    """The files of row-level deletes that the snapshot added."""
    recorded_predicate: ReplacedRows | None = None
    """The predicate of the replaced rows as the writer recorded it; None if it did not."""
    partition_names: tuple[str, ...] = ()
    """The Dagster partitions that were written, for messages."""
    original_id: int | None = None
    """The id of the snapshot on a run's branch that this snapshot replays."""

    @property
    def touched_files(self) -> tuple[File, ...]:
        """The added and removed files."""
        return (*self.added, *self.removed)

    @property
    def partitions(self) -> frozenset[str]:
        """The partitions whose rows the snapshot changed."""
        deleted = {delete_file.partition for delete_file in self.deletes}
        return frozenset({file.partition for file in self.touched_files} | deleted)

    @property
    def replaced_predicate(self) -> ReplacedRows | None:
        """The predicate of all replaced rows, whether such rows existed or not.

        None if it is unknown.
        """
        return ALL_ROWS if self.mode is ChangeMode.REPLACE_TABLE else self.recorded_predicate


@dataclass(frozen=True)
class LayoutColumn:
    """A column as data files identify it: by id."""

    id: int
    name: str
    type: str
    required: bool


@dataclass(frozen=True)
class Layout:
    """The columns, and the partition fields as (source column, transform, name)."""

    columns: tuple[LayoutColumn, ...] = ()
    spec: tuple[tuple[str, str, str], ...] = ()
    highest_column_id: int = 0
    schema: str = ""
    """The full definition of the columns as text: also documentation, identifier fields, defaults and nested
    fields."""
    others: tuple[tuple[str, str], ...] = ()
    """Other metadata of the table that a rebase does not replay, by name, as text."""
    format_version: int = 2

    @property
    def shape(self) -> tuple[tuple[LayoutColumn, ...], str]:
        """The columns with their full definition."""
        return self.columns, self.schema

    @property
    def partition_columns(self) -> frozenset[str]:
        """The columns by which the table is partitioned."""
        return frozenset(source for source, _, _ in self.spec)


@dataclass(frozen=True)
class TableChange:
    """All changes between `before` (None if the table was created) and `after`.

    The oldest step comes first.
    """

    before: Layout | None
    after: Layout
    steps: tuple[SnapshotChange, ...] = ()
    properties_set: Mapping[str, str] = field(default_factory=dict)
    properties_removed: tuple[str, ...] = ()
    base_snapshot_id: int | None = None
    expired_count: int = 0
    """How many snapshots of `before` are not in the history any more."""

    def shared_steps(self, other: TableChange) -> Literal["all", "some"] | None:
        """Return whether another change has all, some or none (None) of these steps.

        A replayed step counts like the step itself.
        """
        other_ids = {
            snapshot_id for step in other.steps for snapshot_id in (step.snapshot_id, step.original_id)
        }
        common_steps = [step for step in self.steps if step.snapshot_id in other_ids]
        return None if not common_steps else "all" if len(common_steps) == len(self.steps) else "some"

    @property
    def is_complete(self) -> bool:
        """Whether the steps lead back to the base; otherwise the table was rolled back or replaced.

        This uses the snapshot ids. The mode is unknown for steps that were loaded without their files.
        """
        return all(step.snapshot_id for step in self.steps)

    @property
    def is_created(self) -> bool:
        """Whether the table is new."""
        return self.before is None

    @property
    def removing_steps(self) -> dict[str, SnapshotChange]:
        """The step that removed each file, by path."""
        return {file.path: step for step in self.steps for file in step.removed}
