"""What a run, or `main` meanwhile, did to one table: plain values, judged by `overlap`.

A change is a list of steps, one per snapshot since the common base, with the data files each added and
removed (from manifests, no data is read) and the layout before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from branchlake_dagster.internals.column_metrics import DataPaths
from branchlake_dagster.tables.replaced_rows import ALL_ROWS, ReplacedRows

FileBounds = tuple[Any, Any]
"""(lowest, highest) value of a column in a file, both inclusive; possibly wider than the truth."""


class ChangeMode(StrEnum):
    """How one snapshot changed its table."""

    APPEND = "append"
    REPLACE_PARTITIONS = "replace_partitions"
    UPSERT = "upsert"
    REWRITE = "rewrite"
    """An UPDATE, DELETE or MERGE of the user's own, copy-on-write: which rows it looked at is not known."""
    REPLACE_TABLE = "replace_table"
    """Replaced or truncated: all rows there were are gone."""
    COMPACT = "compact"
    """The same rows in other files."""
    ROW_DELETES = "row deletes"
    """Merge-on-read: delete files instead of rewritten data files."""
    DELETION_VECTORS = "deletion vectors"
    """The same in format version 3."""
    OLD_LAYOUT = "old layout"
    """It touched files of an older partition spec, whose partitions cannot be compared with today's."""
    UNKNOWN = "unknown"
    """The history does not lead back to the base: rolled back, or replaced by another engine."""


def _no_bounds(_: str) -> FileBounds | None:
    return None


def _may_hold_any(_: ReplacedRows) -> bool:
    return True


@dataclass(frozen=True)
class File:
    """One data file. `partition` is printable (`day=2026-11-05/kind=radar`; empty: unpartitioned)."""

    path: str
    partition: str = ""
    bounds: Callable[[str], FileBounds | None] = field(default=_no_bounds, compare=False, repr=False)
    """Of a column by name; None when the manifest does not tell."""
    handle: Any = field(default=None, compare=False, repr=False)
    """What the table format knows the file as."""
    may_hold: Callable[[ReplacedRows], bool] = field(default=_may_hold_any, compare=False, repr=False)
    """Whether rows of a predicate may be in it, by its partition and its bounds."""
    rows: int | None = None
    """How many it has; None when that is not known."""


@dataclass(frozen=True)
class DeleteFile:
    """One file of row-level deletes (merge-on-read), in words of what it may hit."""

    path: str
    partition: str = ""
    paths: DataPaths | None = None
    """The data files whose rows it may name; None if its manifest entry does not say."""
    everywhere: bool = False
    """Whether it speaks of all partitions, as an equality delete without partition does."""
    may_hold: Callable[[ReplacedRows], bool] = field(default=_may_hold_any, compare=False, repr=False)
    """Whether it may delete rows of a predicate."""

    def may_delete_from(self, file: File) -> bool:
        """Whether rows of a data file that was there before it may be deleted by it."""
        if self.paths is not None:
            return self.paths.may_name(file.path)
        return self.everywhere or self.partition == file.partition


@dataclass(frozen=True)
class SnapshotChange:
    """One snapshot. `run_id` is the run that made it, None for a writer that does not say."""

    snapshot_id: int
    """0: what does not lead back to the base."""
    mode: ChangeMode
    added: tuple[File, ...] = ()
    removed: tuple[File, ...] = ()
    key_columns: tuple[str, ...] = ()
    """The columns an upsert matched on."""
    run_id: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict, compare=False)
    """What the writer put into the snapshot's summary, without the totals."""
    deletes: tuple[DeleteFile, ...] = ()
    """The files of row-level deletes it added."""
    recorded_predicate: ReplacedRows | None = None
    """What it replaced, as it recorded itself; None when it did not."""
    partition_names: tuple[str, ...] = ()
    """The Dagster partitions it was about, for people."""
    original_id: int | None = None
    """The snapshot on a run's branch that it repeats."""

    @property
    def touched_files(self) -> tuple[File, ...]:
        """Added and removed files."""
        return (*self.added, *self.removed)

    @property
    def partitions(self) -> frozenset[str]:
        """The partitions whose rows it touched."""
        deleted = {delete_file.partition for delete_file in self.deletes}
        return frozenset({file.partition for file in self.touched_files} | deleted)

    @property
    def replaced_predicate(self) -> ReplacedRows | None:
        """All rows that it replaced, whether there were any or not; None when that is not known."""
        return ALL_ROWS if self.mode is ChangeMode.REPLACE_TABLE else self.recorded_predicate


@dataclass(frozen=True)
class LayoutColumn:
    """A column as files see it: by id."""

    id: int
    name: str
    type: str
    required: bool


@dataclass(frozen=True)
class Layout:
    """Columns, and the partition fields as (source column, transform, name)."""

    columns: tuple[LayoutColumn, ...] = ()
    spec: tuple[tuple[str, str, str], ...] = ()
    highest_column_id: int = 0
    schema: str = ""
    """All there is to the columns, as text: what `columns` says, and documentation, identifier fields,
    defaults, fields of nested types."""
    others: tuple[tuple[str, str], ...] = ()
    """What else the table's metadata holds and a rebase does not carry, by name, as text."""
    format_version: int = 2

    @property
    def shape(self) -> tuple[tuple[LayoutColumn, ...], str]:
        """The columns with all there is to them."""
        return self.columns, self.schema

    @property
    def partition_columns(self) -> frozenset[str]:
        """The columns the table is partitioned by."""
        return frozenset(source for source, _, _ in self.spec)


@dataclass(frozen=True)
class TableChange:
    """Everything between `before` (None: the table was created) and `after`. Oldest step first."""

    before: Layout | None
    after: Layout
    steps: tuple[SnapshotChange, ...] = ()
    properties_set: Mapping[str, str] = field(default_factory=dict)
    properties_removed: tuple[str, ...] = ()
    base_snapshot_id: int | None = None
    expired_count: int = 0
    """How many snapshots of before are not in the history any more."""

    def shared_steps(self, other: TableChange) -> Literal["all", "some"] | None:
        """How many of these steps another change of the table has too, repeated or as they are."""
        other_ids = {
            snapshot_id for step in other.steps for snapshot_id in (step.snapshot_id, step.original_id)
        }
        common_steps = [step for step in self.steps if step.snapshot_id in other_ids]
        return None if not common_steps else "all" if len(common_steps) == len(self.steps) else "some"

    @property
    def is_complete(self) -> bool:
        """Whether the steps lead back to the base; otherwise the table was rolled back, or replaced.

        Asked of the numbers: of steps that were read without their files the mode is not known.
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
