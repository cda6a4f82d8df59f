"""Decides which rows the result of a consumption replaces, and records what the step has consumed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
from dagster import MetadataValue
from pyiceberg.schema import Schema
from pyiceberg.table import Table

from branchlake_dagster.history.change import from_epoch_ms
from branchlake_dagster.incremental.commits import MainCommit
from branchlake_dagster.incremental.consumer_partitions import find_blocking_partition, load_consumed_runs
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.consumption_update import build_update
from branchlake_dagster.incremental.inputs import select_ranges, target_ranges
from branchlake_dagster.incremental.positions import recorded_time
from branchlake_dagster.internals.pyiceberg import open_transaction
from branchlake_dagster.runs.approval import Approvals
from branchlake_dagster.runs.run_tags import APPROVAL_GIVEN, APPROVAL_REQUIRED
from branchlake_dagster.stored_names import EventMetadata
from branchlake_dagster.tables.selection import Selection, selection_mask, to_sql_predicate
from branchlake_dagster.tables.specification import TableSpec


def effective_spec(consumption: Consumption, spec: TableSpec) -> TableSpec:
    """Return the table spec with the write mode that this write needs.

    If everything was consumed, the result replaces the whole table, or the run's partitions of a partitioned
    asset. If `spec` is an upsert, its keys must still be unique in the result. A result of changed ranges
    replaces the rows in these ranges (`replace_partitions`). Otherwise `spec` is returned unchanged.
    """
    if consumption.whole:
        by_partition = consumption.consumer.tracks_partitions
        return replace(
            spec,
            write_mode="replace_partitions" if by_partition else "replace_table",
            replaces_upsert=spec.write_mode == "upsert",
        )
    if replaces_ranges(consumption):
        return replace(spec, write_mode="replace_partitions")
    return spec


def replaces_ranges(consumption: Consumption) -> bool:
    """Whether the step's result replaces the rows in changed ranges of a table without Dagster partitions.

    False if everything was consumed: the result then replaces the whole table.
    """
    declaration = consumption.consumer.declaration
    return (
        "range" in declaration.patterns
        and not consumption.whole
        and not consumption.consumer.tracks_partitions
    )


def select_replaced_rows(consumption: Consumption, schema: Schema) -> Selection:
    """Select the rows of the asset's table that the result of changed ranges replaces.

    `schema` is the schema of that table. Raises the errors of `select_ranges`.
    """
    consumer = consumption.consumer
    column = consumer.declaration.range_column or ""
    return select_ranges(target_ranges(consumption), column, schema, table=consumer.spec.name)


def keep_own_rows(
    frame: Any, consumption: Consumption, own_selection: Selection | None, schema: Schema
) -> Any:
    """Return only the rows of the frame that may be written, if results depend on rows of other windows.

    Rows outside the run's partitions or ranges were computed from incomplete input. Otherwise the frame, an
    Arrow table or a Spark frame, is returned unchanged; also if it lacks a column of the selection, because
    the write refuses it.
    """
    if own_selection is None or all(reach.is_own_window for reach in consumption.consumer.reaches.values()):
        return frame
    columns = frame.column_names if isinstance(frame, pa.Table) else frame.columns
    if not {*own_selection.column_names()} <= {*columns}:
        return frame
    return frame.filter(
        selection_mask(own_selection, frame)
        if isinstance(frame, pa.Table)
        else to_sql_predicate(own_selection, schema)
    )


def record_consumption(consumption: Consumption, table: Table) -> Table:
    """Record in the properties of the asset's table what the step has consumed, and return the table.

    If the run consumed a result that waits or waited for approval, the run waits for approval as well.
    """
    _inherit_approval(consumption)
    update = build_update(consumption, table.metadata.current_snapshot_id)
    properties = table.metadata.properties
    new_properties = {name: value for name, value in update.set.items() if properties.get(name) != value}
    removed_names = [name for name in update.remove if name in properties]
    if new_properties or removed_names:
        with open_transaction(table) as transaction:
            if new_properties:
                transaction.set_properties(new_properties)
            if removed_names:
                transaction.remove_properties(*removed_names)
    return table


def _inherit_approval(consumption: Consumption) -> None:
    run_id = consumption.run_id
    if consumption.instance is None or run_id is None:
        return
    # A result computed from everything includes results approved long ago: only open approvals count.
    states = (APPROVAL_REQUIRED,) if consumption.whole else (APPROVAL_REQUIRED, APPROVAL_GIVEN)
    approvals = Approvals(consumption.instance, states)
    consumed_runs = load_consumed_runs(consumption, approvals.filter_runs)
    approvals.inherit_approval(run_id, consumed_runs, asset=consumption.consumer.asset)


_MAX_COMMITS = 100
"""The number of commits in the table on an asset's page."""


def consumption_metadata(consumption: Consumption, table: Table) -> dict[str, Any]:
    """Return materialization metadata about the consumed changes: a Markdown table, and numbers to plot.

    `table` is the asset's own table, after `record_consumption`. The metadata includes the valid-through
    time, if the table has recorded one.
    """
    time = recorded_time(table.metadata, consumption.consumer.spec.name)
    valid = (
        {} if time is None else {EventMetadata.VALID_THROUGH: MetadataValue.timestamp(from_epoch_ms(time.ms))}
    )
    return valid | _change_metadata(consumption)


def _change_metadata(consumption: Consumption) -> dict[str, Any]:
    early_metadata = _too_early_metadata(consumption)
    if consumption.whole:
        reason = consumption.positions.restart_reason
        reason_clause = f" because {reason}" if reason else ""
        return {
            EventMetadata.CONSUMED: MetadataValue.text(f"Everything was computed anew{reason_clause}."),
            **early_metadata,
        }
    lines = ["| input | change | how | up to snapshot |", "| --- | --- | --- | --- |"]
    rows = files = 0
    commits: list[str] = []
    for key, upstream in consumption.inputs.items():
        for _, change in consumption.changes(key):
            rows += change.rows_changed
            files += change.files_changed
            kinds = ", ".join(change.kinds) or "nothing"
            lines.append(f"| {upstream.name} | {change.label()} | {kinds} | {upstream.up_to.snapshot_id} |")
        if consumption.consumer.declaration.commits:
            commits += [_format_commit_row(upstream.name, commit) for commit in consumption.commits(key)]
    metadata: dict[str, Any] = {
        EventMetadata.CONSUMED_ROWS: MetadataValue.int(rows),
        EventMetadata.CONSUMED_FILES: MetadataValue.int(files),
        EventMetadata.CONSUMED: MetadataValue.md("\n".join(lines)),
        **early_metadata,
    }
    if commits:
        head = ["| input | commit on main | at | by run |", "| --- | --- | --- | --- |"]
        metadata[EventMetadata.CONSUMED_COMMITS] = MetadataValue.md(
            "\n".join([*head, *commits[-_MAX_COMMITS:]])
        )
    if replaces_ranges(consumption):
        metadata[EventMetadata.CHANGED_RANGE] = MetadataValue.text(consumption.changed_ranges.label())
    return metadata


def _too_early_metadata(consumption: Consumption) -> dict[str, Any]:
    """Return metadata with a note if the run's partitions must be computed again after an earlier partition.

    Otherwise {}.
    """
    blocking_partition = find_blocking_partition(consumption)
    if blocking_partition is None:
        return {}
    return {
        EventMetadata.WAITS_FOR_PARTITION: MetadataValue.text(
            f"Partition {blocking_partition} still has changes to consume. The partitions of this run are"
            " computed from"
            " it, so they are computed again after it."
        )
    }


def _format_commit_row(name: str, commit: MainCommit) -> str:
    at = commit.at.isoformat(timespec="seconds") if commit.at else ""
    return f"| {name} | {commit.hash[:16]} | {at} | {commit.run_id or 'somebody outside branchlake'} |"
