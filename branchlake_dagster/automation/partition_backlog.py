"""What each partition of a consumer has left, and why no run is launched for it."""

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
    """A partition with something left, or an asset without partitions, for which `partition` is None.

    `position` is its position, None if nothing was consumed for it. `unconsumed` is what it has left; a file
    that has rows of several partitions counts in each of them.
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
    """The first `max_partitions` partitions that have something left, by key, with the decision about each.

    None for `max_partitions`: all of them. An asset without partitions gives one entry, also when nothing is
    left, and
    so does one of which it is not known what is left. Reads Dagster's runs, and of the lake only what
    `backlog` has read.
    """
    unconsumed = backlog.unconsumed
    is_unknown = bool(unconsumed.trouble or unconsumed.missing_input)
    partitions: Sequence[str | None] = [None]
    if backlog.by_partition and not is_unknown:
        partitions = backlog.pending_partitions[:max_partitions]
    if not unconsumed.any or is_unknown:
        return [(one, decide_launch(unconsumed, AttemptHistory(""), None, policy, now)) for one in partitions]
    whole_run, single_runs = in_flight.find_whole_run(asset), in_flight.runs_by_partition(asset)
    batch_by_partition = {one: backlog.batch_of(one) for one in partitions if one is not None}
    keys = [backlog.launch_key(one) for one in partitions]
    ids_by_partition = backlog.held_partitions(
        [
            *dict.fromkeys(
                (*partitions, *(key for one in batch_by_partition.values() for key in one.partitions))
            )
        ],
        approvals,
    )
    decisions: list[tuple[str | None, LaunchDecision]] = []
    for partition, history in zip(partitions, iter_histories(instance, keys, policy.retries), strict=True):
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
    """What each of these partitions has left, with the decision about it.

    The cost grows with the files of the change, as that of finding the partitions does: bounds in manifests
    are compared, and no data file is opened. Raises ChangeLost.
    """
    unconsumed = backlog.unconsumed
    partition_keys = [one for one, _ in decisions if one is not None]
    changes: dict[str | None, tuple[ConsumptionRecord | None, Unconsumed]] = {}
    changes.update(backlog.changes_by_partition(partition_keys))
    if None in {one for one, _ in decisions}:
        is_unknown = unconsumed.trouble or unconsumed.missing_input
        changes[None] = (None if is_unknown else backlog.common_position, unconsumed)
    return [PartitionBacklog(one, *changes[one], decision) for one, decision in decisions]
