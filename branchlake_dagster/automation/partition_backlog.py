"""Report the backlog of each partition of a consumer, and why no run is launched for it.

Describe the backlog of a consumer as metadata that Dagster shows and plots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dagster import AssetKey, DagsterInstance, MetadataValue, TableColumn, TableRecord, TableSchema

from branchlake_dagster.automation.backlog import ConsumerBacklog, Unconsumed
from branchlake_dagster.automation.consumer_runs import InFlightRuns, iter_histories
from branchlake_dagster.automation.launch_decision import (
    AttemptHistory,
    LaunchDecision,
    LaunchPolicy,
    decide_launch,
)
from branchlake_dagster.incremental.pending import PartitionBatch
from branchlake_dagster.incremental.positions import ConsumptionRecord
from branchlake_dagster.runs.approval import Approvals
from branchlake_dagster.stored_names import EventMetadata


@dataclass(frozen=True)
class PartitionBacklog:
    """The backlog of a partition. `partition` is None for an asset without partitions.

    `position` is None if the partition has consumed nothing yet. `unconsumed` is its remaining change; a file
    with rows of several partitions counts in each of them.
    """

    partition: str | None
    position: ConsumptionRecord | None
    unconsumed: Unconsumed
    decision: LaunchDecision


def launch_decisions(
    asset: AssetKey,
    backlog: ConsumerBacklog,
    instance: DagsterInstance,
    in_flight: InFlightRuns,
    policy: LaunchPolicy,
    now: datetime,
    *,
    approvals: Approvals,
    max_partitions: int | None = None,
) -> list[tuple[str | None, LaunchDecision]]:
    """Return the launch decision for each of the first `max_partitions` pending partitions, in key order.

    None for `max_partitions` means all of them. The result has one entry, with the partition None, for an
    asset without partitions and for an asset whose backlog is unknown. Reads Dagster's runs. Reads nothing
    from the lake that `backlog` has read already.
    """
    unconsumed = backlog.unconsumed
    is_unknown = bool(unconsumed.trouble or unconsumed.missing_input)
    partitions: Sequence[str | None] = [None]
    if backlog.by_partition and not is_unknown:
        partitions = backlog.pending_partitions[:max_partitions]
    if not unconsumed.any or is_unknown:
        decision = decide_launch(unconsumed, AttemptHistory(""), None, policy, now)
        return [(partition, decision) for partition in partitions]
    whole_run, single_runs = in_flight.find_whole_run(asset), in_flight.runs_by_partition(asset)
    batch_by_partition = {key: backlog.batch_of(key) for key in partitions if key is not None}
    launch_keys = [backlog.launch_key(key) for key in partitions]
    batch_partitions = (key for batch in batch_by_partition.values() for key in batch.partitions)
    ids_by_partition = backlog.held_partitions([*dict.fromkeys((*partitions, *batch_partitions))], approvals)
    decisions: list[tuple[str | None, LaunchDecision]] = []
    histories = iter_histories(instance, launch_keys, policy.retries)
    for partition, history in zip(partitions, histories, strict=True):
        batch = batch_by_partition[partition] if partition is not None else PartitionBatch(())
        earlier = batch.partitions[-1] if partition in batch.waiting else ""
        computed_with: tuple[str | None, ...] = (
            (partition,) if earlier or partition is None else batch.partitions
        )
        under_way = whole_run or next((single_runs[key] for key in computed_with if key in single_runs), None)
        approval_ids = tuple(
            dict.fromkeys(name for key in computed_with for name in ids_by_partition.get(key, ()))
        )
        decision = decide_launch(
            unconsumed, history, under_way, policy, now, earlier_partition=earlier, approval_ids=approval_ids
        )
        decisions.append((partition, decision))
    return decisions


def partition_backlogs(
    backlog: ConsumerBacklog, decisions: Sequence[tuple[str | None, LaunchDecision]]
) -> list[PartitionBacklog]:
    """Return the backlog of each partition in `decisions`. Raises ChangeLost.

    The cost grows with the number of files in the change: bounds in manifests are compared, and no data file
    is opened.
    """
    unconsumed = backlog.unconsumed
    partition_keys = [partition for partition, _ in decisions if partition is not None]
    changes: dict[str | None, tuple[ConsumptionRecord | None, Unconsumed]] = {}
    changes.update(backlog.changes_by_partition(partition_keys))
    if None in {partition for partition, _ in decisions}:
        is_unknown = unconsumed.trouble or unconsumed.missing_input
        changes[None] = (None if is_unknown else backlog.common_position, unconsumed)
    return [PartitionBacklog(partition, *changes[partition], decision) for partition, decision in decisions]


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
