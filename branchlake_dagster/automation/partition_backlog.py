"""Report the backlog of each partition of a consumer, and why no run is launched for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from dagster import AssetKey, DagsterInstance

from branchlake_dagster.automation.attempts import iter_histories
from branchlake_dagster.automation.backlog import ConsumerBacklog, Unconsumed
from branchlake_dagster.automation.in_flight import InFlightRuns
from branchlake_dagster.automation.launch_decision import (
    AttemptHistory,
    LaunchDecision,
    LaunchPolicy,
    decide_launch,
)
from branchlake_dagster.incremental.pending import PartitionBatch
from branchlake_dagster.incremental.positions import ConsumptionRecord
from branchlake_dagster.runs.approval import Approvals


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
