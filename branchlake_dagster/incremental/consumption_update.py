"""The table properties that record what a step has consumed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from branchlake_dagster.incremental import positions as position_store
from branchlake_dagster.incremental.affected_partitions import partition_coverage
from branchlake_dagster.incremental.consumer_partitions import (
    find_pending_or_none,
    find_predecessor_run,
    find_predecessors,
    list_all_partitions,
)
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.pending import compute_valid_through, windows_end_ms, with_successors
from branchlake_dagster.incremental.positions import (
    ConsumptionRecord,
    PropertyUpdate,
    partition_extent,
    partition_identity,
    recorded_time,
)
from branchlake_dagster.incremental.valid_through import ValidThrough


def build_update(consumption: Consumption, snapshot_id: int | None = None) -> PropertyUpdate:
    """Return the changes of table properties that record what the step has consumed.

    `snapshot_id` is the snapshot of the asset's table that has the result; None if there is none. The update
    is empty if the same positions are already recorded for all partitions of the run, unless partitions are
    computed in order or everything was computed anew.
    """
    consumer, partitions, positions = consumption.consumer, consumption.partitions, consumption.positions
    record = replace(_build_record(consumption), snapshot_id=snapshot_id)
    # Partitions in order: every result is recorded, because the next ones are computed from it.
    if (
        not consumer.computes_in_order
        and not consumption.whole
        and all(
            (earlier_record := consumption.find_record(partition)) is not None
            and earlier_record.inputs == record.inputs
            for partition in partitions or (None,)
        )
    ):
        return PropertyUpdate({})  # no update: then two runs that consume nothing can both be published
    definition = consumer.definition
    if not consumer.tracks_partitions or definition is None:
        record = replace(record, valid_through=_compute_valid_through(consumption, (), None))
        return position_store.advance_positions(positions, record, (), None)
    # Appended rows of two runs do not conflict. Their entries must, even if one run sets its entry and the
    # other moves the common position.
    keep_entries = consumer.spec.write_mode == "append"
    extents = {partition: partition_extent(definition, partition) for partition in partitions}
    # Before the partitions are listed: a window that is added in between must be among them.
    end_ms = windows_end_ms(consumer)
    remaining = find_pending_or_none(consumption)
    if remaining is not None and consumer.computes_in_order:
        remaining |= with_successors(definition, partitions, list_all_partitions(consumption))
    if remaining is not None:
        valid_through = _compute_valid_through(consumption, remaining - {*partitions}, end_ms)
        record = replace(record, valid_through=valid_through)
    if not consumer.computes_in_order:
        return position_store.advance_positions(
            positions, record, partitions, remaining, keep_entries=keep_entries, extents=extents
        )
    return position_store.advance_positions(
        positions,
        record,
        partitions,
        remaining,
        keep_entries=keep_entries,
        extents=extents,
        predecessor_runs={
            partition: _find_predecessor_run(consumption, partition, record.run_id)
            for partition in partitions
        },
    )


def _find_predecessor_run(consumption: Consumption, partition: str, own_run_id: str) -> str:
    """Return the run that computes the previous partition. It may be the step's own run."""
    predecessor = find_predecessors(consumption).get(partition)
    return (
        own_run_id if predecessor in consumption.partitions else find_predecessor_run(consumption, partition)
    )


def _build_record(consumption: Consumption) -> ConsumptionRecord:
    consumer, definition = consumption.consumer, consumption.consumer.definition
    coverage = (
        partition_coverage(definition, instance=consumption.instance)
        if consumer.tracks_partitions and definition is not None
        else {}
    )
    return ConsumptionRecord(
        {upstream.name: upstream.up_to for upstream in consumption.inputs.values()},
        consumption.run_id or "",
        consumption.base_hash,
        coverage,
        partition_identity=partition_identity(consumer),
    )


def _compute_valid_through(
    consumption: Consumption, remaining: Collection[str], end_ms: int | None
) -> ValidThrough | None:
    """Return the time up to which the inputs and the table are complete after this run, or None.

    It is computed from times that the inputs' tables have recorded; None if an input has no time. `remaining`
    are the partitions that still have something to consume after the run. `end_ms` is the result of
    `windows_end_ms`.
    """
    input_times = {
        key: recorded_time(upstream.table.metadata, upstream.name)
        for key, upstream in consumption.inputs.items()
    }
    valid_time = compute_valid_through(consumption.consumer_state(), input_times, remaining, end_ms)
    if valid_time is not None and remaining and consumption.positions.restart_reason:
        return replace(valid_time, table_ms=None)  # other partitions may have rows that do not count
    return valid_time
