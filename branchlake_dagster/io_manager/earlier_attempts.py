"""Removes rows of earlier attempts of a step, so that a repeated step does not add its rows twice.

An earlier attempt may have written although it failed: the step failed after the write, the answer to the
commit was lost, or the process died. Its snapshot is found by the properties in the snapshot's summary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from branchlake_dagster.history.capture import ancestors_after
from branchlake_dagster.history.manifests import read_added_files, read_live_files
from branchlake_dagster.internals.pyiceberg import open_transaction
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.errors import RetryNeedsFullRun
from branchlake_dagster.tables.specification import TableSpec

ADDING = ("append", "upsert")
"""Write modes that keep a step's earlier rows if the step writes again. Other modes replace these rows."""


_SAME_OUTPUT = (
    LakeProperty.ROOT_RUN_ID,
    LakeProperty.BASE_HASH,
    LakeProperty.ASSET,
    LakeProperty.PARTITION,
)
"""The entries of a snapshot's summary that all attempts to write an output share. `_has_same_step` compares
the key of the step."""
_SAME_ATTEMPT = (LakeProperty.RUN_ID, LakeProperty.ATTEMPT)
_MAIN = "main"


def undo_earlier_attempts(table: Table, spec: TableSpec, properties: Mapping[str, str]) -> Table:
    """Remove the rows that earlier attempts of a step added to the table, and return the table.

    `properties` are the snapshot properties of the step's write. A snapshot of an earlier attempt has the
    same root run, base hash, asset, partitions and step. The base hash is the commit of `main` from which the
    run's branch was created. It distinguishes these snapshots from those of an earlier run, which may be
    published. Usually these snapshots are the newest ones, and the table is rolled back to the snapshot
    before them. If other writers wrote to the table in between, a new snapshot removes the files of the
    earlier attempts. For write modes that replace rows, and without earlier attempts, the table is returned
    unchanged. Raises RetryNeedsFullRun if the rows of the attempts can no longer be separated from other
    rows.
    """
    if spec.write_mode not in ADDING or LakeProperty.STEP not in properties:
        return table
    ancestors = _newest_first(table)
    return _undo(table, spec, ancestors, _active_attempts(ancestors, properties), properties)


def undo_abandoned_attempts(table: Table, spec: TableSpec, properties: Mapping[str, str]) -> Table:
    """Remove what earlier attempts of a step wrote, if this attempt returns no rows; return the table.

    Like `undo_earlier_attempts`, but for all write modes, and snapshots of this attempt stay.
    """
    if LakeProperty.STEP not in properties:
        return table
    return _undo(table, spec, _newest_first(table), _late_commits(table, properties), properties)


def _undo(
    table: Table,
    spec: TableSpec,
    ancestors: Sequence[Snapshot],
    earlier: list[Snapshot],
    properties: Mapping[str, str],
) -> Table:
    if not earlier:
        return table
    if ancestors[: len(earlier)] == earlier:
        return _roll_back(table, earlier[-1].parent_snapshot_id)
    return _remove_added_files(table, spec, earlier, properties)


def remove_late_commits(table: Table, spec: TableSpec, properties: Mapping[str, str]) -> Table:
    """Remove, after an append, the rows that other attempts of the step have added; return the table.

    A commit of an earlier attempt may arrive after `undo_earlier_attempts` has read the table. Tables of
    other write modes are returned unchanged.
    """
    if spec.write_mode != "append" or LakeProperty.STEP not in properties:
        return table
    late = _late_commits(table, properties)
    return _remove_added_files(table, spec, late, properties) if late else table


def has_late_commits(table: Table, spec: TableSpec, properties: Mapping[str, str]) -> bool:
    """Return whether a late commit of an earlier attempt has decided which rows an upsert added.

    This is possible only for an upsert with `when_matched="keep"`: rows whose keys the late commit had added
    were dropped. Then neither attempt has all rows: both must be undone, and the rows written again.
    """
    decides_by_rows = spec.write_mode == "upsert" and spec.keeps_matched
    return decides_by_rows and LakeProperty.STEP in properties and bool(_late_commits(table, properties))


def _late_commits(table: Table, properties: Mapping[str, str]) -> list[Snapshot]:
    """Return the snapshots of other attempts of the step, newest first."""
    attempts = _active_attempts(_newest_first(table), properties)
    return [one for one in attempts if not _has_same_properties(one, properties, _SAME_ATTEMPT)]


def _newest_first(table: Table) -> list[Snapshot]:
    """Return the current snapshot and its ancestors, newest first; [] for an empty table."""
    ancestors, _ = ancestors_after(table.metadata)
    return ancestors[::-1]


def _summary_properties(snapshot: Snapshot) -> Mapping[str, str]:
    return snapshot.summary.additional_properties if snapshot.summary else {}


def _has_same_properties(snapshot: Snapshot, properties: Mapping[str, str], names: tuple[str, ...]) -> bool:
    summary = _summary_properties(snapshot)
    return all(summary.get(name) == properties.get(name) for name in names)


def _has_same_step(summary: Mapping[str, str], properties: Mapping[str, str]) -> bool:
    """Return whether two attempts to write the same output are attempts of the same step.

    Within a run, a step keeps its key, and several dynamic steps can write one asset. The steps of two runs
    may have different keys: Dagster splits a step if an asset of another step lies between its assets, and a
    retry of single assets may not need the split. Dynamic steps are not split.
    """
    key, own_key = summary.get(LakeProperty.STEP), properties[LakeProperty.STEP]
    if key is None or key == own_key:
        return key is not None
    is_same_run = summary.get(LakeProperty.RUN_ID) == properties.get(LakeProperty.RUN_ID)
    return not is_same_run and not _is_dynamic(key) and not _is_dynamic(own_key)


def _is_dynamic(step_key: str) -> bool:
    """Return whether a step is one of several that Dagster created for a dynamic output (`frame[p2]`)."""
    return "[" in step_key


def _active_attempts(ancestors: Sequence[Snapshot], properties: Mapping[str, str]) -> list[Snapshot]:
    """Return the snapshots of all attempts of the step whose rows were not removed, in the given order.

    `ancestors` are snapshots of the table. `properties` are the snapshot properties of this attempt;
    snapshots with the same root run, base, asset, partitions and step belong to the step. Snapshots of this
    attempt are included.
    """
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
        and _has_same_properties(snapshot, properties, _SAME_OUTPUT)
        and _has_same_step(_summary_properties(snapshot), properties)
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
    """Remove the files that the snapshots `earlier` added, in a new snapshot, and return the table.

    Raises RetryNeedsFullRun if one of the files is no longer in the table, or if the write mode changes
    existing rows.
    """
    if not spec.only_adds_rows:
        raise mixed_rows_error(spec)
    added = {file.file_path: file for snapshot in earlier for file in read_added_files(table.io, snapshot)}
    live = {file.file_path for file in read_live_files(table.io, table.current_snapshot())}
    if not added.keys() <= live:
        raise mixed_rows_error(spec)  # a file was rewritten, perhaps together with other rows
    snapshot_properties = {
        **properties,
        LakeProperty.UNDOES: ",".join(str(snapshot.snapshot_id) for snapshot in earlier),
    }
    with open_transaction(table) as transaction:
        overwrite = transaction.update_snapshot(snapshot_properties=snapshot_properties).overwrite()
        for path in sorted(added):
            overwrite.delete_data_file(added[path])
        overwrite.commit()
    return table.refresh()


def mixed_rows_error(spec: TableSpec) -> RetryNeedsFullRun:
    """Return the error for a table where rows of several attempts of one step can no longer be separated."""
    return RetryNeedsFullRun(
        "An earlier attempt of this step wrote to the table, and other writes have changed its rows since.",
        table=spec.name,
        hint="Re-execute all steps. The new run starts from the present main.",
    )
