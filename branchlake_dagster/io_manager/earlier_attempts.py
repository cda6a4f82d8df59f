"""A step that is attempted again must not add its rows twice: what earlier attempts wrote is taken out.

An earlier attempt may have written although it failed: the step broke after the write, the reply of the
commit was lost, or the process died. Its snapshot is found by what it says about itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pyiceberg.manifest import DataFile, ManifestEntryStatus
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.errors import RetryNeedsFullRun
from branchlake_dagster.tables.specification import TableSpec

ADDING = ("append", "upsert")
"""Write modes whose rows stay when the step writes again; the others replace them anyway."""


_SAME_STEP = (
    LakeProperty.ROOT_RUN_ID,
    LakeProperty.BASE_HASH,
    LakeProperty.STEP,
    LakeProperty.ASSET,
    LakeProperty.PARTITION,
)
_SAME_ATTEMPT = (LakeProperty.RUN_ID, LakeProperty.ATTEMPT)
_MAIN = "main"


def undo_earlier_attempts(table: Table, spec: TableSpec, properties: Mapping[str, str]) -> Table:
    """The table without what earlier attempts of the step that writes with `properties` added to it.

    They are the snapshots of the same root run, base hash, step, asset and partitions; the base hash tells
    them from those of an earlier run, which may be published. Usually they are the newest ones, and the
    table is set back to the snapshot before them. When others wrote to the table in between, their files are
    removed by a snapshot of its own. Raises RetryNeedsFullRun when the rows can no longer be told apart.
    """
    if spec.write_mode not in ADDING or LakeProperty.STEP not in properties:
        return table
    ancestors = list(_iter_ancestors(table))
    earlier = _active_attempts(ancestors, properties)
    if not earlier:
        return table
    if ancestors[: len(earlier)] == earlier:
        return _roll_back(table, earlier[-1].parent_snapshot_id)
    return _remove_added_files(table, spec, earlier, properties)


def remove_late_commits(table: Table, spec: TableSpec, properties: Mapping[str, str]) -> Table:
    """The table after the write, with this attempt's rows only.

    A commit of the earlier attempt may have been on its way while we looked, and arrived after it.
    """
    if spec.write_mode != "append" or LakeProperty.STEP not in properties:
        return table
    attempts = _active_attempts(list(_iter_ancestors(table)), properties)
    late = [
        snapshot for snapshot in attempts if not _has_same_properties(snapshot, properties, _SAME_ATTEMPT)
    ]
    return _remove_added_files(table, spec, late, properties) if late else table


def _iter_ancestors(table: Table) -> Iterator[Snapshot]:
    """The snapshots that led to the current one, newest first."""
    by_id = {snapshot.snapshot_id: snapshot for snapshot in table.snapshots()}
    snapshot = table.current_snapshot()
    while snapshot is not None:
        yield snapshot
        snapshot = by_id.get(snapshot.parent_snapshot_id or 0)


def _summary_properties(snapshot: Snapshot) -> Mapping[str, str]:
    return snapshot.summary.additional_properties if snapshot.summary else {}


def _has_same_properties(snapshot: Snapshot, properties: Mapping[str, str], names: tuple[str, ...]) -> bool:
    summary = _summary_properties(snapshot)
    return all(summary.get(name) == properties.get(name) for name in names)


def _active_attempts(ancestors: Sequence[Snapshot], properties: Mapping[str, str]) -> list[Snapshot]:
    """Those of the same step whose rows nobody has taken out yet."""
    undone = {
        snapshot_id
        for snapshot in ancestors
        for snapshot_id in _summary_properties(snapshot).get(LakeProperty.UNDOES, "").split(",")
    }
    return [
        snapshot
        for snapshot in ancestors
        if LakeProperty.UNDOES not in _summary_properties(snapshot)
        and str(snapshot.snapshot_id) not in undone
        and _has_same_properties(snapshot, properties, _SAME_STEP)
    ]


def _roll_back(table: Table, snapshot_id: int | None) -> Table:
    change = table.manage_snapshots()
    if snapshot_id is None:
        change.remove_branch(_MAIN).commit()
    else:
        change.rollback_to_snapshot(snapshot_id).commit()
    return table.refresh()


def _remove_added_files(
    table: Table, spec: TableSpec, earlier: list[Snapshot], properties: Mapping[str, str]
) -> Table:
    """Remove the files that `earlier` added; each of them must still be there as it was written."""
    if spec.write_mode != "append":
        raise _mixed_rows_error(spec)
    added = {file.file_path: file for snapshot in earlier for file in _iter_added_files(table, snapshot)}
    current = table.current_snapshot()
    live = {
        entry.data_file.file_path
        for manifest in (current.manifests(table.io) if current else [])
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)
    }
    if not added.keys() <= live:
        raise _mixed_rows_error(spec)  # rewritten, perhaps together with rows of others
    snapshot_properties = {
        **properties,
        LakeProperty.UNDOES: ",".join(str(snapshot.snapshot_id) for snapshot in earlier),
    }
    with table.transaction() as transaction:
        overwrite = transaction.update_snapshot(snapshot_properties=snapshot_properties).overwrite()
        for path in sorted(added):
            overwrite.delete_data_file(added[path])
        overwrite.commit()
    return table.refresh()


def _iter_added_files(table: Table, snapshot: Snapshot) -> Iterator[DataFile]:
    for manifest in snapshot.manifests(table.io):
        if manifest.added_snapshot_id == snapshot.snapshot_id:
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                if entry.status is ManifestEntryStatus.ADDED:
                    yield entry.data_file


def _mixed_rows_error(spec: TableSpec) -> RetryNeedsFullRun:
    return RetryNeedsFullRun(
        "An earlier attempt of this step wrote to the table, and others changed its rows since.",
        table=spec.name,
        hint="Re-execute all steps; the new run will start from today's main.",
    )
