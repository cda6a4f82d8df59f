"""The outcome of a compaction: partitions that it committed, and planned partitions that it did not."""

from __future__ import annotations

from dataclasses import dataclass

from branchlake_dagster.compaction.rewritten_files import RewrittenPartition
from branchlake_dagster.wording import CodedReason


@dataclass(frozen=True)
class CompactedPartition:
    """A partition whose files a commit replaced.

    `rows` is the number of rows in the new files. `folded_rows` is the number of rows that the old files
    contained in addition; delete files had deleted them.
    """

    partition: str
    removed_files: int
    removed_bytes: int
    added_files: int
    added_bytes: int
    rows: int
    folded_rows: int


@dataclass(frozen=True)
class LeftPartition:
    """A planned partition that was not compacted, and why."""

    partition: str
    reason: CodedReason


@dataclass(frozen=True)
class CompactedTable:
    """The outcome for one table.

    Attributes:
        table: The table's dotted name.
        commit: The hash of the commit on `main`; None if nothing was committed.
        partitions: The partitions that the commit rewrote.
        left: The planned partitions that the commit does not contain.
        is_rebased: Whether the files were replayed on `main`, because other writers had changed the table in
            the meantime or because partitions were skipped.
        read_bytes: The size of the old data files, including those of partitions that were not published.
        seconds: How long the whole table took.
        rewrite_seconds: How long Spark rewrote files.
        proof_seconds: How long the checksums of the rows took.
        error: The table's error, or that of its first failed partition; None if no error occurred. Other
            partitions and tables are compacted nevertheless.
    """

    table: str
    commit: str | None = None
    partitions: tuple[CompactedPartition, ...] = ()
    left: tuple[LeftPartition, ...] = ()
    is_rebased: bool = False
    read_bytes: int = 0
    seconds: float = 0.0
    rewrite_seconds: float = 0.0
    proof_seconds: float = 0.0
    error: Exception | None = None


@dataclass(frozen=True)
class CompactionResult:
    """The outcome of one compaction pass over a plan.

    Attributes:
        tables: One outcome for each table: first the tables that could not be read, then the processed ones
            in the order of the plan. After an early stop, the remaining tables are missing.
        stopped: The reason for an early stop; None if the plan was finished.
        removed_branches: The names of abandoned branches of earlier passes that were deleted.
        seconds: How long the pass took.
    """

    tables: tuple[CompactedTable, ...] = ()
    stopped: CodedReason | None = None
    removed_branches: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def errors(self) -> tuple[Exception, ...]:
        """The errors of tables that failed, in the order of `tables`."""
        return tuple(table.error for table in self.tables if table.error is not None)

    def raise_first_error(self) -> None:
        """Raise the error of the first table that failed; do nothing if no table failed."""
        for error in self.errors:
            raise error


@dataclass(frozen=True)
class CompactionProgress:
    """The progress of a table, reported when a step begins.

    `step` is one of `rewrite`, `prove`, `publish` and `done`. `partitions` is the number of planned
    partitions of the table. `partitions_done` is the number that Spark has rewritten; with `done`, the number
    that was committed. `bytes_done` is the size of the old files that were rewritten, only with `rewrite`.
    """

    table: str
    step: str
    partitions_done: int
    partitions: int
    bytes_done: int = 0


def describe_partition(one: RewrittenPartition) -> CompactedPartition:
    """Count the files, bytes and rows of a rewritten partition."""
    removed_rows, added_rows = one.stored_rows
    return CompactedPartition(
        one.partition,
        removed_files=len(one.removed),
        removed_bytes=sum(file.handle.file_size_in_bytes for file in one.removed),
        added_files=len(one.added),
        added_bytes=sum(file.handle.file_size_in_bytes for file in one.added),
        rows=added_rows,
        folded_rows=removed_rows - added_rows,
    )
