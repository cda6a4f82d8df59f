"""Finds which snapshots, properties and columns of a commit belong to one of its publications."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pyiceberg.table import Table

from branchlake_dagster.publication.ledger import Publication
from branchlake_dagster.publication.table_change import SnapshotChange, TableChange
from branchlake_dagster.stored_names import find_exclusive_property
from branchlake_dagster.undo.table_undo import recorded_run_ids
from branchlake_dagster.undo.undo_plan import Dependency, DependencyFound, OwnChange
from branchlake_dagster.wording import CodedReason

_CATALOG_PROPERTIES = "nessie."
"""Prefix of properties that Iceberg's Java catalog for Nessie writes with each commit."""


def build_own_change(
    table: str,
    publication: Publication,
    others: Sequence[Publication],
    change: TableChange,
    old: Table | None,
    new: Table,
) -> OwnChange:
    """Return the part of a commit's change to the table `table` (a dotted name) that one publication made.

    `change` is the change by its commit, from `old` (None if the commit created the table) to `new`. `others`
    are the other publications of this commit that changed the same table. If there are any, only steps with
    the publication's run belong to it. Then DependencyFound is raised if a step names none of these runs, or
    if the columns or the layout changed.
    """
    steps = change.steps
    if others:
        steps = _select_steps(table, publication, others, change)
        if change.before is not None and change.before != change.after:
            raise _shared_commit(table, "its columns or layout changed", others)
    old_values = old.metadata.properties if old is not None else {}
    new_values = new.metadata.properties
    names = [
        name
        for name in sorted(old_values.keys() | new_values.keys())
        if old_values.get(name) != new_values.get(name)
        and not name.startswith(_CATALOG_PROPERTIES)
        # The settings of a new table stay, if later publications keep the table alive.
        and (old is not None or find_exclusive_property(name) is not None)
        and (not others or _is_set_by(publication, steps, name, new_values.get(name)))
    ]
    return OwnChange(
        frozenset(step.snapshot_id for step in steps),
        {name: old_values.get(name) for name in names},
        {name: new_values.get(name) for name in names},
        change.before,
        change.after,
    )


def _select_steps(
    table: str, publication: Publication, others: Sequence[Publication], change: TableChange
) -> tuple[SnapshotChange, ...]:
    run_ids = {run_id for member in (publication, *others) for run_id in (member.run_id, member.root_run_id)}
    if any(step.run_id not in run_ids for step in change.steps):
        raise _shared_commit(table, "a snapshot names none of their runs", others)
    # A retry publishes the snapshots of the failed run, too.
    own_ids = (publication.run_id, publication.root_run_id)
    return tuple(step for step in change.steps if step.run_id in own_ids)


def _shared_commit(table: str, why: str, others: Sequence[Publication]) -> DependencyFound:
    reason = CodedReason(f"its commit has several publications, and {why}", "shared_commit")
    return DependencyFound(Dependency(table, reason, run_ids=tuple(other.run_id for other in others)))


def _is_set_by(
    publication: Publication, steps: Sequence[SnapshotChange], name: str, value: str | None
) -> bool:
    """Return whether the publication set a property, in a commit that has other publications too.

    The position of a consumer names its run, and the snapshots of an ingestion repeat their offsets. Other
    properties stay, because another publication may have set them.
    """
    own_ids = {publication.run_id, publication.root_run_id}
    return not own_ids.isdisjoint(recorded_run_ids(name, value)) or any(
        name in step.properties for step in steps
    )


def join_own_changes(table: str, changes: Sequence[OwnChange]) -> OwnChange:
    """Join the changes of several publications of one table into one change. `changes` has the oldest first.

    A property that another publication set in between is left out, so that the undo keeps its value. Raises
    DependencyFound if another publication changed the columns or the partition spec in between.
    """
    old_properties: dict[str, str | None] = {}
    new_properties: dict[str, str | None] = {}
    others_properties: set[str] = set()
    for change in changes:
        others_properties |= {
            name
            for name, value in change.old_properties.items()
            if name in new_properties and new_properties[name] != value
        }
        new_properties |= change.new_properties
        for name, value in change.old_properties.items():
            old_properties.setdefault(name, value)
    for name in others_properties:
        del old_properties[name], new_properties[name]
    layouts = [(one.new_layout, other.old_layout) for one, other in pairwise(changes)]
    if any(layout is not None and layout.shape != new.shape for new, layout in layouts):
        reason = CodedReason("another publication changed its columns in between", "columns_used")
        raise DependencyFound(Dependency(table, reason))
    if any(layout is not None and layout.spec != new.spec for new, layout in layouts):
        reason = CodedReason("another publication changed its partition spec in between", "partition_spec")
        raise DependencyFound(Dependency(table, reason))
    return OwnChange(
        frozenset().union(*(change.snapshot_ids for change in changes)),
        old_properties,
        new_properties,
        changes[0].old_layout,
        changes[-1].new_layout,
    )
