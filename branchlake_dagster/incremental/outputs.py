"""What the result of a consumption takes the place of, and the record of what was consumed for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
from dagster import MetadataValue
from pyiceberg.schema import Schema
from pyiceberg.table import Table

from branchlake_dagster.history.change import moment
from branchlake_dagster.incremental.commits import MainCommit
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.inputs import selection, target_ranges
from branchlake_dagster.incremental.positions import recorded_time
from branchlake_dagster.internals.pyiceberg import transaction_on
from branchlake_dagster.runs.approval import Approvals
from branchlake_dagster.runs.run_tags import GIVEN, REQUIRED
from branchlake_dagster.stored_names import EventMetadata
from branchlake_dagster.tables.selection import Selection, inside, to_sql
from branchlake_dagster.tables.specification import TableSpec


def effective(consumption: Consumption, spec: TableSpec) -> TableSpec:
    """The spec of this write: a result computed of everything takes the place of everything."""
    if consumption.whole:
        by_partition = consumption.consumer.by_partition
        return replace(spec, write_mode="replace_partitions" if by_partition else "replace_table")
    if by_range(consumption):
        return replace(spec, write_mode="replace_partitions")
    return spec


def by_range(consumption: Consumption) -> bool:
    """Whether the result replaces ranges of a table that has no partitions of Dagster's."""
    declaration = consumption.consumer.declaration
    return "range" in declaration.patterns and not consumption.whole and not consumption.consumer.by_partition


def replaced_range(consumption: Consumption, schema: Schema) -> Selection:
    """The rows of the asset's table that the result of changed ranges takes the place of."""
    consumer = consumption.consumer
    column = consumer.declaration.range_column or ""
    return selection(target_ranges(consumption), column, schema, table=consumer.spec.name)


def own_rows(frame: Any, consumption: Consumption, chosen: Selection | None, schema: Schema) -> Any:
    """What of an Arrow or Spark frame is written, where results depend on rows beside their own.

    Rows beside the run's partitions or ranges were computed from a part of what they depend on. A frame that
    lacks a column of `chosen` is left as it is: the write refuses it.
    """
    if chosen is None or all(one.nothing for one in consumption.consumer.reaches.values()):
        return frame
    columns = frame.column_names if isinstance(frame, pa.Table) else frame.columns
    if not {*chosen.columns()} <= {*columns}:
        return frame
    return frame.filter(inside(chosen, frame) if isinstance(frame, pa.Table) else to_sql(chosen, schema))


def record(consumption: Consumption, table: Table) -> Table:
    """Note in the table what has been consumed for it, as its properties.

    A run that has consumed a result that waits for approval, or did, waits for approval as well.
    """
    _inherit_approval(consumption)
    update = consumption.update(at=table.metadata.current_snapshot_id)
    held = table.metadata.properties
    new = {name: value for name, value in update.set.items() if held.get(name) != value}
    gone = [name for name in update.remove if name in held]
    if new or gone:
        with transaction_on(table) as transaction:
            if new:
                transaction.set_properties(new)
            if gone:
                transaction.remove_properties(*gone)
    return table


def _inherit_approval(consumption: Consumption) -> None:
    run_id = consumption.run_id
    if consumption.instance is None or run_id is None:
        return
    # What is computed from everything was also computed from results that were approved long ago.
    states = (REQUIRED,) if consumption.whole else (REQUIRED, GIVEN)
    approvals = Approvals(consumption.instance, states)
    consumed = consumption.runs(approvals.chosen)
    approvals.inherit(run_id, consumed, asset=consumption.consumer.asset)


_MOST_COMMITS = 100
"""Rows of a table on an asset's page."""


def consumed_metadata(consumption: Consumption, table: Table) -> dict[str, Any]:
    """What a materialisation says of the changes it was computed from: a table, and numbers to plot.

    `table` is the asset's own, after `record`. Its valid-through time is among them, if it has one.
    """
    time = recorded_time(table.metadata, consumption.consumer.spec.name)
    valid = {} if time is None else {EventMetadata.VALID_THROUGH: MetadataValue.timestamp(moment(time.ms))}
    return valid | _consumed(consumption)


def _consumed(consumption: Consumption) -> dict[str, Any]:
    early = _too_early(consumption)
    if consumption.whole:
        because = consumption.positions.restarts_because
        why = f", because {because}" if because else ""
        return {EventMetadata.CONSUMED: MetadataValue.text(f"everything: it was computed anew{why}"), **early}
    lines = ["| input | change | how | up to snapshot |", "| --- | --- | --- | --- |"]
    rows = files = 0
    commits: list[str] = []
    for key, one in consumption.inputs.items():
        for _, change in consumption.changes(key):
            rows += change.rows_changed
            files += change.files_changed
            kinds = ", ".join(change.kinds) or "nothing"
            lines.append(f"| {one.name} | {change.label()} | {kinds} | {one.upto.snapshot_id} |")
        if consumption.consumer.declaration.commits:
            commits += [_commit_row(one.name, commit) for commit in consumption.commits(key)]
    found: dict[str, Any] = {
        EventMetadata.CONSUMED_ROWS: MetadataValue.int(rows),
        EventMetadata.CONSUMED_FILES: MetadataValue.int(files),
        EventMetadata.CONSUMED: MetadataValue.md("\n".join(lines)),
        **early,
    }
    if commits:
        head = ["| input | commit on main | at | by run |", "| --- | --- | --- | --- |"]
        found[EventMetadata.CONSUMED_COMMITS] = MetadataValue.md(
            "\n".join([*head, *commits[-_MOST_COMMITS:]])
        )
    if by_range(consumption):
        found[EventMetadata.CHANGED_RANGE] = MetadataValue.text(consumption.changed_ranges.text())
    return found


def _too_early(consumption: Consumption) -> dict[str, Any]:
    """What a materialisation says of partitions that are computed again after an earlier one."""
    earlier = consumption.waits_for
    if earlier is None:
        return {}
    return {
        EventMetadata.WAITS_FOR_PARTITION: MetadataValue.text(
            f"Partition {earlier} still has changes to consume. The partitions of this run are computed from"
            " it, so they are computed again after it."
        )
    }


def _commit_row(name: str, commit: MainCommit) -> str:
    at = commit.at.isoformat(timespec="seconds") if commit.at else ""
    return f"| {name} | {commit.hash[:16]} | {at} | {commit.run_id or 'somebody outside branchlake'} |"
