"""The planned undo of one table: its changes, and the dependency that prevents it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from branchlake_dagster.publication.table_change import DeleteFile, File, Layout, SnapshotChange
from branchlake_dagster.wording import CodedReason


@dataclass(frozen=True)
class Dependency:
    """A reason why the change of one table by a publication cannot be undone, or not alone.

    Attributes:
        table: The table's dotted name.
        reason: The reason, as part of a sentence.
        partitions: The partitions that the reason is about.
        run_ids: The later runs whose publications must be undone as well. Empty if no run can be named: then
            the undo is not possible.
    """

    table: str
    reason: CodedReason
    partitions: tuple[str, ...] = ()
    run_ids: tuple[str, ...] = ()


class DependencyFound(Exception):  # noqa: N818 - it never leaves the package
    """A part of the publication cannot be undone alone. `dependency` has the table and the reason."""

    def __init__(self, dependency: Dependency) -> None:
        super().__init__(dependency.reason)
        self.dependency = dependency


@dataclass(frozen=True)
class OwnChange:
    """The snapshots, properties and layouts by which the undone publications changed one table.

    Attributes:
        snapshot_ids: The snapshots on `main` that they added.
        old_properties: Each property that they set or removed, with its value before the first of them; None
            if the table did not have it.
        new_properties: The same names with their values after the last of them.
        old_layout: The layout before the first of them; None if it created the table.
        new_layout: The layout after the last of them.
    """

    snapshot_ids: frozenset[int]
    old_properties: Mapping[str, str | None]
    new_properties: Mapping[str, str | None]
    old_layout: Layout | None
    new_layout: Layout


@dataclass
class TableUndo:
    """The changes that the undo makes in one table.

    `removed` are the data files to remove and `restored` the data files to add again, by path.
    `properties_set` get their earlier values. `superseded_by` are the ids of later runs that have replaced a
    part of the rows already.
    """

    removed: dict[str, File] = field(default_factory=dict)
    restored: dict[str, File] = field(default_factory=dict)
    removed_deletes: dict[str, DeleteFile] = field(default_factory=dict)
    """The delete files to remove, by path. The rows that they deleted come back."""
    restored_deletes: dict[str, DeleteFile] = field(default_factory=dict)
    """The files of position deletes to add again, by path."""
    newer_paths: set[str] = field(default_factory=set)
    """The paths of data files in which `removed_deletes` delete no row of another step.

    These files were added after the newest of these delete files, or by the same step.
    """
    properties_set: dict[str, str] = field(default_factory=dict)
    properties_removed: tuple[str, ...] = ()
    old_layout: Layout | None = None
    """The layout whose columns become current again; None if they stay."""
    restores_spec: bool = False
    """Whether the partition spec from before the undone publications becomes the default again."""
    snapshot_ids: tuple[int, ...] = ()
    """The snapshots whose changes are undone."""
    superseded_by: tuple[str, ...] = ()
    superseding_ids: tuple[int, ...] = ()
    """The snapshots that have replaced a part of the rows."""
    reversals: list[SnapshotChange] = field(default_factory=list)
    """The steps that first reverse compactions which joined undone rows with other rows, newest first."""
    is_superseded: bool = False
    """Whether later publications have replaced all rows of the undone ones."""

    @property
    def split_files(self) -> list[File]:
        """The compacted files that `reversals` remove."""
        return [file for reversal in self.reversals for file in reversal.removed]

    @property
    def changes_files(self) -> bool:
        """Whether the undo adds or removes data files or delete files."""
        return bool(self.removed or self.restored or self.removed_deletes or self.restored_deletes)

    @property
    def changes_anything(self) -> bool:
        """Whether the undo changes files, properties or columns of the table."""
        return bool(
            self.changes_files
            or self.properties_set
            or self.properties_removed
            or self.old_layout is not None
            or self.restores_spec
        )


def list_partitions(files: Collection[File]) -> tuple[str, ...]:
    """Return the sorted partitions of the files, each once. Files without partition are left out."""
    return tuple(sorted({file.partition for file in files if file.partition}))


def list_run_ids(step: SnapshotChange) -> tuple[str, ...]:
    """Return the id of the run that made the step; () if no run did."""
    return (step.run_id,) if step.run_id else ()
