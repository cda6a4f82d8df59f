"""The partitions of a consumer that must be computed, and the runs whose changes they consume.

Sensors and commands ask this outside a run; a step asks it for its own record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.capture import runs_since
from branchlake_dagster.history.change import ChangeLost
from branchlake_dagster.incremental import pending
from branchlake_dagster.incremental.consumption import Consumption, PartitionGroup
from branchlake_dagster.incremental.pending import PartitionBatch
from branchlake_dagster.incremental.positions import ConsumptionRecord, Unconsumed

SelectRuns = Callable[[Collection[str]], Collection[str]]
"""A function that gets the ids of runs and returns those to include."""


def list_all_partitions(consumption: Consumption) -> Sequence[str]:
    """List all partitions that the asset has now; empty for an asset without partitions."""
    definition = consumption.consumer.definition
    if definition is None:
        return ()
    return definition.get_partition_keys(dynamic_partitions_store=consumption.instance)


def find_pending_partitions(consumption: Consumption) -> set[str]:
    """Return all partitions that must be computed.

    These have something to consume, or follow such a partition if partitions are computed in order. If a
    change is lost, all partitions at the lost position count. Then ChangeLost is raised instead if the
    declaration has `when_lost="fail"`.
    """
    return pending.pending_partitions(
        consumption.consumer_state(lost_is_all=_accepts_lost_changes(consumption))
    )


def find_pending_or_none(consumption: Consumption) -> set[str] | None:
    """Return all partitions that must be computed, or None if they cannot be determined.

    A lost change counts as everything.
    """
    try:
        return pending.pending_partitions(consumption.consumer_state(lost_is_all=True))
    except ConfigurationError:
        return None


def find_partitions_to_rebuild(consumption: Consumption) -> set[str]:
    """Return the partitions that a rebuild must compute so that no recorded position is lost any more.

    A partition with a valid position is included only if it has something left to consume. If only the common
    position, or positions of partitions that have left the definition, are lost, the result is the first
    partition: a run that computes any partition anew moves the common position.
    """
    partitions = pending.pending_partitions(consumption.consumer_state(lost_is_all=True))
    is_other_lost = consumption.positions.void_partitions or _is_common_position_lost(consumption)
    if not partitions and is_other_lost:
        return {*list_all_partitions(consumption)[:1]}
    return partitions


def _is_common_position_lost(consumption: Consumption) -> bool:
    """Return whether the change of an input since the common position is lost."""
    common_position = consumption.positions.common_position
    if common_position is None:
        return False
    try:
        for upstream in consumption.inputs.values():
            consumption.change_since(upstream, common_position.inputs.get(upstream.name))
    except ChangeLost:
        return True
    return False


def _accepts_lost_changes(consumption: Consumption) -> bool:
    """Return whether a run may start although a change is lost: it computes anew or continues from now."""
    return consumption.consumer.declaration.when_lost != "fail"


def load_changes_by_partition(
    consumption: Consumption, partitions: Iterable[str]
) -> dict[str, tuple[ConsumptionRecord | None, Unconsumed]]:
    """Load the consumption record and the unconsumed change of each of these partitions.

    The record is the partition's own, else the common position. It is None if nothing was consumed for the
    partition. A lost change has no counts; it raises ChangeLost if the declaration has `when_lost="fail"`.
    Cost: reads manifests only.
    """
    state = consumption.consumer_state(lost_is_all=_accepts_lost_changes(consumption))
    return pending.changes_by_partition(state, partitions)


def load_runs_by_partition(
    consumption: Consumption, partitions: Iterable[str], select_runs: SelectRuns
) -> dict[str, set[str]]:
    """Load, for each partition, the runs that made its unconsumed changes.

    Partitions without selected runs have no entry. Raises ChangeLost if a change is lost and the declaration
    has `when_lost="fail"`.
    """
    by_record = pending.group_by_position(consumption.consumer_state(), partitions)
    groups = [PartitionGroup(tuple(keys), consumption.start_positions(record)) for record, keys in by_record]
    return _load_runs_of_groups(consumption, groups, select_runs)


def load_consumed_runs(consumption: Consumption, select_runs: SelectRuns) -> set[str]:
    """Load the ids of the runs whose changes the step consumes.

    Without partitions, only table metadata is read. If the step consumes everything, these are all runs that
    the metadata of the inputs still names. Raises ChangeLost.
    """
    if consumption.partitions:
        run_ids_by_partition = _load_runs_of_groups(consumption, consumption.groups, select_runs)
        return {run_id for runs in run_ids_by_partition.values() for run_id in runs}
    run_ids = {
        run_id
        for upstream in consumption.inputs.values()
        for group in consumption.groups
        for run_id in runs_since(
            upstream.table.metadata, group.start_positions[upstream.name], table=upstream.name
        ).values()
    }
    return {*select_runs(run_ids)}


def _load_runs_of_groups(
    consumption: Consumption, groups: Iterable[PartitionGroup], select_runs: SelectRuns
) -> dict[str, set[str]]:
    state, run_ids_by_key = consumption.consumer_state(), dict[str, set[str]]()
    for group in groups:
        runs = pending.runs_by_partition(state, group.partitions, group.start_positions, select_runs)
        for key, run_ids in runs.items():
            run_ids_by_key.setdefault(key, set()).update(run_ids)
    return run_ids_by_key


def find_predecessor_run(consumption: Consumption, partition: str) -> str:
    """Return the id of the run that computed the previous partition on `main`.

    The result is the empty string if there is no previous partition or no run has computed it.
    """
    predecessor = find_predecessors(consumption).get(partition)
    if predecessor is None:
        return ""
    return consumption.positions.run_of(predecessor, lambda: consumption.is_covered(predecessor))


def find_predecessors(consumption: Consumption) -> Mapping[str, str]:
    """Return the previous partition of each partition that has one. They are determined once."""
    definition = consumption.consumer.definition
    if definition is None:
        return {}
    return consumption.get_or_compute(
        "predecessors", lambda: pending.partition_predecessors(definition, list_all_partitions(consumption))
    )


def find_blocking_partition(consumption: Consumption) -> str | None:
    """Return an earlier partition that still has changes to consume, or None.

    The partitions of this run are computed from its result, so they must be computed again afterwards. Always
    None if the partitions are not computed in order.
    """
    definition = consumption.consumer.definition
    if not consumption.consumer.computes_in_order or definition is None:
        return None
    own_partitions = {*consumption.partitions}
    remaining = (find_pending_or_none(consumption) or set()) - own_partitions
    all_partitions = list_all_partitions(consumption)
    return next(
        (
            partition
            for (partition,) in (batch.partitions for batch in plan_batches(consumption, remaining, 1))
            if not own_partitions.isdisjoint(pending.with_successors(definition, {partition}, all_partitions))
        ),
        None,
    )


def plan_batches(
    consumption: Consumption, remaining: Iterable[str], max_partitions: int | None
) -> list[PartitionBatch]:
    """Divide the remaining partitions into batches that different runs can compute in parallel.

    Usually each partition is its own batch. If partitions are computed in order, there is one batch for each
    chain of partitions: its first `max_partitions` remaining partitions (None: all). The others of the chain
    are `waiting`.
    """
    definition, partitions = consumption.consumer.definition, {*remaining}
    if definition is None or not consumption.consumer.computes_in_order:
        return [PartitionBatch((partition,)) for partition in sorted(partitions)]
    return pending.plan_batches(definition, partitions, list_all_partitions(consumption), max_partitions)
