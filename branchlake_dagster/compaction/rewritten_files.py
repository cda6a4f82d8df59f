"""The files that a compaction rewrote on its branch, and the check that they contain the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from branchlake_dagster.compaction.errors import CompactionNotClean, CompactionRowsDiffer
from branchlake_dagster.compaction.row_checksums import RowChecksum, sum_checksums
from branchlake_dagster.publication.conflicts import group_by_partition
from branchlake_dagster.publication.table_change import ChangeMode, File, TableChange


@dataclass(frozen=True)
class RewrittenPartition:
    """The old and the new files of one partition."""

    partition: str
    removed: tuple[File, ...]
    added: tuple[File, ...]

    @property
    def stored_rows(self) -> tuple[int, int]:
        """The numbers of rows in the old and in the new files by their manifests, including deleted rows."""
        return _count_rows(self.removed), _count_rows(self.added)

    @property
    def has_folded_deletes(self) -> bool:
        """Whether the numbers of `stored_rows` differ: the new files do not contain deleted rows any more."""
        removed_rows, added_rows = self.stored_rows
        return removed_rows != added_rows


def _count_rows(files: Sequence[File]) -> int:
    return sum(file.rows or 0 for file in files)


def list_rewritten_partitions(table: str, change: TableChange) -> list[RewrittenPartition]:
    """Return the rewritten partitions of a table's change, sorted by partition.

    Files that one step added and a later step removed are omitted. Raises CompactionNotClean if the change
    contains a step that is not a compaction.
    """
    modes = {step.mode for step in change.steps} - {ChangeMode.COMPACT}
    if not change.is_complete or modes or not change.changes_no_rows:
        raise CompactionNotClean(
            f"The compaction's branch has other changes: {', '.join(sorted(modes)) or 'metadata'}.",
            table=table,
            hint="Nothing was published. Look for what else writes to branches of compactions.",
        )
    removed: dict[str, File] = {}
    added: dict[str, File] = {}
    for step in change.steps:
        for file in step.removed:
            if added.pop(file.path, None) is None:
                removed[file.path] = file
        added |= {file.path: file for file in step.added}
    removed_groups, added_groups = group_by_partition(removed.values()), group_by_partition(added.values())
    return [
        RewrittenPartition(partition, removed_groups.get(partition, ()), added_groups.get(partition, ()))
        for partition in sorted({*removed_groups, *added_groups})
    ]


def prove_same_rows(
    table: str,
    partitions: Sequence[RewrittenPartition],
    before: Mapping[str, RowChecksum],
    after: Mapping[str, RowChecksum],
) -> dict[str, RowChecksum]:
    """Return the checksum of each partition; raise CompactionRowsDiffer if old and new files differ.

    `before` and `after` are checksums by file path. The number of live rows in the new files must also be the
    number that their manifests contain.
    """
    checksums: dict[str, RowChecksum] = {}
    differing = []
    for one in partitions:
        old_rows = sum_checksums(before, (file.path for file in one.removed))
        new_rows = sum_checksums(after, (file.path for file in one.added))
        if old_rows != new_rows or new_rows.rows != one.stored_rows[1]:
            differing.append(one.partition)
        checksums[one.partition] = new_rows
    if differing:
        raise CompactionRowsDiffer(
            "The compacted files do not hold the same rows as the old ones.",
            table=table,
            partitions=differing,
            hint="Nothing was published. Report this as a bug.",
        )
    return checksums
