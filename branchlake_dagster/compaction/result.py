"""What a compaction committed, read from the manifests of its commits, and what it left alone."""

from __future__ import annotations

from dataclasses import dataclass

from branchlake_dagster.compaction.rewritten_files import RewrittenPartition
from branchlake_dagster.wording import CodedReason


@dataclass(frozen=True)
class CompactedPartition:
    """A partition whose files a commit replaced.

    `rows` are its live rows in the new files, `folded_rows` the deleted rows that the old files still held.
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
        commit: The commit on `main`; None if nothing was committed.
        partitions: What the commit contains.
        left: The planned partitions that it does not contain.
        is_rebased: Whether other writers had changed the table in the meantime, or partitions were left out
            because of their changes.
        read_bytes: The size of the rewritten data files, including rewrites that were not published.
        seconds: How long the table took: `rewrite_seconds` on Spark, `proof_seconds` for the checksums.
        error: Why the table failed; None if it did not. Other tables are compacted nevertheless.
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
    """The outcome of a pass.

    Attributes:
        tables: One outcome for each table: first the tables that could not be read, then the processed ones
            in the order of the plan. After an early stop, the remaining tables are missing.
        stopped: The reason for an early stop; None if the plan was finished.
        removed_branches: Abandoned branches of earlier passes that were deleted.
    """

    tables: tuple[CompactedTable, ...] = ()
    stopped: CodedReason | None = None
    removed_branches: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def errors(self) -> tuple[Exception, ...]:
        """The errors of tables that failed."""
        return tuple(table.error for table in self.tables if table.error is not None)

    def raise_first_error(self) -> None:
        """Raise the error of the first table that failed."""
        for error in self.errors:
            raise error


@dataclass(frozen=True)
class TableProgress:
    """What is reported while a table is compacted.

    `step` is one of `rewrite`, `prove`, `publish` and `done`. The numbers count planned partitions.
    """

    table: str
    step: str
    partitions_done: int
    partitions: int
    bytes_done: int = 0


def describe_partition(one: RewrittenPartition) -> CompactedPartition:
    """Return the numbers of a rewritten partition."""
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
