"""Describe the backlog of a consumer as metadata that Dagster shows and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from dagster import MetadataValue, TableColumn, TableRecord, TableSchema

from branchlake_dagster.automation.backlog import Unconsumed
from branchlake_dagster.automation.launch_decision import LaunchPolicy
from branchlake_dagster.automation.partition_backlog import PartitionBacklog
from branchlake_dagster.incremental.positions import ConsumptionRecord
from branchlake_dagster.stored_names import EventMetadata

SHOWN_PARTITIONS = 20
"""The largest number of partitions in the table on an asset's page."""

_SCHEMA = TableSchema(
    [
        TableColumn("partition"),
        TableColumn("left"),
        TableColumn("rows", "int"),
        TableColumn("files", "int"),
        TableColumn("age_s", "float"),
        TableColumn("position"),
        TableColumn("launch"),
    ]
)


def backlog_metadata(
    unconsumed: Unconsumed,
    now: datetime,
    partitions: Sequence[PartitionBacklog] = (),
    partition_count: int | None = None,
    policy: LaunchPolicy | None = None,
) -> Mapping[str, Any]:
    """Return the metadata of an observation: counts of rows and files, the age in seconds, a description.

    `partitions` are the first partitions with a backlog. Each becomes a row of a table, with the reason why
    it is not launched. `partition_count` is the number of all partitions with a backlog; None for an asset
    without partitions. `policy` is the launch policy of the sensor.
    """
    table = [
        _to_table_record(backlog, now, policy or LaunchPolicy()) for backlog in partitions[:SHOWN_PARTITIONS]
    ]
    return {
        EventMetadata.UNCONSUMED_ROWS: MetadataValue.int(unconsumed.rows),
        EventMetadata.UNCONSUMED_FILES: MetadataValue.int(unconsumed.files),
        EventMetadata.UNCONSUMED_AGE_S: MetadataValue.float(round(unconsumed.age_s(now), 1)),
        EventMetadata.UNCONSUMED: MetadataValue.text(unconsumed.text()),
        EventMetadata.UNCONSUMED_PARTITIONS: MetadataValue.table(table, _SCHEMA),
        **(
            {}
            if partition_count is None
            else {EventMetadata.UNCONSUMED_PARTITION_COUNT: MetadataValue.int(partition_count)}
        ),
    }


def format_consumed_position(position: ConsumptionRecord | None) -> str:
    """Return a position for people: the snapshot of each input, and the run that consumed it."""
    if position is None:
        return "none"
    inputs = ", ".join(
        f"{name}@{input_position.snapshot_id or 'empty'}"
        for name, input_position in sorted(position.inputs.items())
    )
    return f"{inputs} by run {position.run_id[:8]}" if position.run_id else inputs


def _to_table_record(backlog: PartitionBacklog, now: datetime, policy: LaunchPolicy) -> TableRecord:
    return TableRecord(
        {
            "partition": backlog.partition or "",
            "left": backlog.unconsumed.text(),
            "rows": backlog.unconsumed.rows,
            "files": backlog.unconsumed.files,
            "age_s": round(backlog.unconsumed.age_s(now), 1),
            "position": format_consumed_position(backlog.position),
            "launch": backlog.decision.format_state(policy),
        }
    )
