"""What each partition of a consumer has left, and why no run is launched for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from dagster import AssetKey, DagsterInstance

from branchlake_dagster.automation.attempts import histories
from branchlake_dagster.automation.backlog import Standing, Unconsumed
from branchlake_dagster.automation.in_flight import InFlight
from branchlake_dagster.automation.launch_decision import History, LaunchDecision, LaunchPolicy, decide
from branchlake_dagster.incremental.pending import Batch
from branchlake_dagster.incremental.positions import Consumed
from branchlake_dagster.runs.approval import Approvals


@dataclass(frozen=True)
class PartitionBacklog:
    """A partition with something left, or an asset without partitions, for which `partition` is None.

    `consumed` is its position, None if nothing was consumed for it. `unconsumed` is what it has left; a file
    that has rows of several partitions counts in each of them.
    """

    partition: str | None
    consumed: Consumed | None
    unconsumed: Unconsumed
    decision: LaunchDecision


def launch_decisions(
    asset: AssetKey,
    standing: Standing,
    instance: DagsterInstance,
    in_flight: InFlight,
    policy: LaunchPolicy,
    now: datetime,
    *,
    approvals: Approvals,
    most: int | None = None,
) -> list[tuple[str | None, LaunchDecision]]:
    """The first `most` partitions that have something left, by key, with the decision about each.

    None for `most`: all of them. An asset without partitions gives one entry, also when nothing is left, and
    so does one of which it is not known what is left. Reads Dagster's runs, and of the lake only what
    `standing` has read.
    """
    found = standing.unconsumed
    unknown = bool(found.trouble or found.waiting)
    partitions: Sequence[str | None] = [None]
    if standing.by_partition and not unknown:
        partitions = standing.partitions[:most]
    if not found.any or unknown:
        return [(one, decide(found, History(""), None, policy, now)) for one in partitions]
    whole, single = in_flight.run_of_whole(asset), in_flight.runs_by_partition(asset)
    together = {one: standing.batch_of(one) for one in partitions if one is not None}
    keys = [standing.launch_key(one) for one in partitions]
    held = standing.held(
        [*dict.fromkeys((*partitions, *(key for one in together.values() for key in one.partitions)))],
        approvals,
    )
    decided: list[tuple[str | None, LaunchDecision]] = []
    for one, history in zip(partitions, histories(instance, keys, policy.retries), strict=True):
        batch = together[one] if one is not None else Batch(())
        earlier = batch.partitions[-1] if one in batch.waiting else ""
        computed_with: tuple[str | None, ...] = (one,) if earlier or one is None else batch.partitions
        under_way = whole or next((single[key] for key in computed_with if key in single), None)
        names = tuple(dict.fromkeys(name for key in computed_with for name in held.get(key, ())))
        decision = decide(found, history, under_way, policy, now, earlier=earlier, held=names)
        decided.append((one, decision))
    return decided


def partition_backlogs(
    standing: Standing, decisions: Sequence[tuple[str | None, LaunchDecision]]
) -> list[PartitionBacklog]:
    """What each of these partitions has left, with the decision about it.

    The cost grows with the files of the change, as that of finding the partitions does: bounds in manifests
    are compared, and no data file is opened. Raises ChangeLost.
    """
    found = standing.unconsumed
    keys = [one for one, _ in decisions if one is not None]
    changes: dict[str | None, tuple[Consumed | None, Unconsumed]] = {}
    changes.update(standing.changes_by_partition(keys))
    if None in {one for one, _ in decisions}:
        unknown = found.trouble or found.waiting
        changes[None] = (None if unknown else standing.consumed, found)
    return [PartitionBacklog(one, *changes[one], decision) for one, decision in decisions]
