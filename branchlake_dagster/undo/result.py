"""The result of an undo for each table, and the error for an undo that is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.publication.ledger import Publication
from branchlake_dagster.undo.undo_plan import Dependency, TableUndo
from branchlake_dagster.wording import format_names


class UndoRefused(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The publications cannot be undone, or not without later publications; nothing was changed.

    Attributes:
        dependencies: The reasons, each with its table and the later runs.
    """

    def __init__(self, message: str, dependencies: Sequence[Dependency], **where: object) -> None:
        super().__init__(message, **where)  # type: ignore[arg-type]
        self.dependencies = tuple(dependencies)


@dataclass(frozen=True)
class UndoneTable:
    """The effect of a planned or committed undo on one table.

    `action` is one of `changed`, `dropped` (the publication had created it), `restored` (the publication had
    dropped it) and `unchanged` (later publications have replaced or dropped all of it). The numbers of rows
    are None if they are not recorded in the manifests.
    """

    table: str
    action: str
    removed_files: int = 0
    removed_rows: int | None = 0
    restored_files: int = 0
    restored_rows: int | None = 0
    properties: tuple[str, ...] = ()
    """The names of the properties that get their earlier values, also positions and offsets."""
    superseded_by: tuple[str, ...] = ()
    """The ids of later runs that have replaced a part of the undone rows already."""
    removed_delete_files: int = 0
    """The number of removed delete files. The rows that they deleted come back in their data files; they do
    not count as `restored_rows`."""
    restores_spec: bool = False
    """Whether the table gets its earlier partition spec."""


@dataclass(frozen=True)
class Undo:
    """A planned or committed undo.

    `publications` are all that are undone, newest first: the one that was asked for and, with followers,
    those that build on it. `commit` is the commit on `main`; None for a dry run, or if nothing is left to
    undo. `is_new` is False if an earlier call had undone it.
    """

    publications: tuple[Publication, ...]
    tables: tuple[UndoneTable, ...] = ()
    commit: str | None = None
    is_new: bool = True
    dependencies: tuple[Dependency, ...] = ()
    """In a plan: the reasons why the publications cannot be undone, or not alone; empty if they can."""


def describe_table(table: str, undo: TableUndo) -> UndoneTable:
    """Return the effect of a planned undo on a table, with the numbers of files and rows."""
    removed_rows = [file.rows for file in undo.removed.values()]
    restored_rows = [file.rows for file in undo.restored.values()]
    return UndoneTable(
        table,
        "changed" if undo.changes_anything else "unchanged",
        removed_files=len(removed_rows),
        removed_rows=_sum_known(removed_rows),
        restored_files=len(restored_rows),
        restored_rows=_sum_known(restored_rows),
        properties=tuple(sorted({*undo.properties_set, *undo.properties_removed})),
        superseded_by=undo.superseded_by,
        removed_delete_files=len(undo.removed_deletes),
        restores_spec=undo.restores_spec,
    )


def _sum_known(counts: Sequence[int | None]) -> int | None:
    known_counts = [count for count in counts if count is not None]
    return sum(known_counts) if len(known_counts) == len(counts) else None


def build_refusal(publication: Publication, dependencies: Sequence[Dependency]) -> UndoRefused:
    """Return the error for an undo that its dependencies prevent."""
    run_ids = tuple(dict.fromkeys(run_id for one in dependencies for run_id in one.run_ids))
    sentences = "; ".join(format_dependency(dependency) for dependency in dependencies)
    is_possible = all(dependency.run_ids for dependency in dependencies)
    advice = (
        f"To undo {format_names('run', run_ids)} as well, add --with-followers."
        if is_possible
        else "The undo of this publication is not possible. Correct the rows by a new run."
    )
    return UndoRefused(
        f"The publication cannot be undone alone. {sentences}.",
        dependencies,
        run_id=publication.run_id,
        branch=MAIN,
        table=", ".join(dict.fromkeys(dependency.table for dependency in dependencies)),
        hint=f"Nothing was changed. {advice}",
    )


def format_dependency(dependency: Dependency) -> str:
    """Return part of a sentence: the table, the reason, the partitions and the runs."""
    partition_note = f" ({format_names('partition', dependency.partitions)})" if dependency.partitions else ""
    run_note = f", by {format_names('run', dependency.run_ids)}" if dependency.run_ids else ""
    return f"{dependency.table}: {dependency.reason}{partition_note}{run_note}"
