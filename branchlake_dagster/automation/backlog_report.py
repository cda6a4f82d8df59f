"""What a consumer has left, as metadata that Dagster shows and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from dagster import MetadataValue, TableColumn, TableRecord, TableSchema

from branchlake_dagster.automation.backlog import Unconsumed
from branchlake_dagster.automation.launch_decision import LaunchPolicy
from branchlake_dagster.automation.partition_backlog import PartitionBacklog
from branchlake_dagster.incremental.positions import Consumed
from branchlake_dagster.stored_names import EventMetadata

SHOWN_PARTITIONS = 20
"""Partitions in the table on an asset's page."""

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


def standing_metadata(
    found: Unconsumed,
    now: datetime,
    partitions: Sequence[PartitionBacklog] = (),
    count: int | None = None,
    policy: LaunchPolicy | None = None,
) -> Mapping[str, Any]:
    """Of an observation: rows and files as numbers, the age of the oldest in seconds, all of it in words.

    `partitions` are the first ones with something left, each a row of a table that also says why it is not
    launched; `count` is how many there are, None for an asset without partitions. `policy` is the sensor's.
    """
    table = [_record(one, now, policy or LaunchPolicy()) for one in partitions[:SHOWN_PARTITIONS]]
    return {
        EventMetadata.UNCONSUMED_ROWS: MetadataValue.int(found.rows),
        EventMetadata.UNCONSUMED_FILES: MetadataValue.int(found.files),
        EventMetadata.UNCONSUMED_AGE_S: MetadataValue.float(round(found.age_s(now), 1)),
        EventMetadata.UNCONSUMED: MetadataValue.text(found.text()),
        EventMetadata.UNCONSUMED_PARTITIONS: MetadataValue.table(table, _SCHEMA),
        **({} if count is None else {EventMetadata.UNCONSUMED_PARTITION_COUNT: MetadataValue.int(count)}),
    }


def position_text(consumed: Consumed | None) -> str:
    """A position for people: the snapshot of each input, and the run that consumed it."""
    if consumed is None:
        return "none"
    inputs = ", ".join(
        f"{name}@{one.snapshot_id or 'empty'}" for name, one in sorted(consumed.inputs.items())
    )
    return f"{inputs} by run {consumed.run_id[:8]}" if consumed.run_id else inputs


def _record(one: PartitionBacklog, now: datetime, policy: LaunchPolicy) -> TableRecord:
    return TableRecord(
        {
            "partition": one.partition or "",
            "left": one.unconsumed.text(),
            "rows": one.unconsumed.rows,
            "files": one.unconsumed.files,
            "age_s": round(one.unconsumed.age_s(now), 1),
            "position": position_text(one.consumed),
            "launch": one.decision.text(policy),
        }
    )
