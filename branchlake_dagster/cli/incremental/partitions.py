"""`branchlake consumers --partitions`: what each partition has left, and why it is not launched."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dagster import AssetKey
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from branchlake_dagster.automation.backlog import Standing
from branchlake_dagster.automation.backlog_report import position_text
from branchlake_dagster.automation.consumers import consumers
from branchlake_dagster.automation.in_flight import InFlight
from branchlake_dagster.automation.incremental_sensor import DeclaredSensor
from branchlake_dagster.automation.launch_decision import LaunchPolicy, LaunchState, with_sensor
from branchlake_dagster.automation.partition_backlog import (
    PartitionBacklog,
    launch_decisions,
    partition_backlogs,
)
from branchlake_dagster.cli.incremental.backfill import Place
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.dagster import SensorTicks, sensor_ticks
from branchlake_dagster.runs.approval import Approvals

_WIDE = 240
"""Columns when nobody watches: a line for each partition, for grep."""


@dataclass(frozen=True)
class ConsumerPartitions:
    """A consumer with the partitions that have something left, and its sensor; None if it has none."""

    asset: AssetKey
    sensor: DeclaredSensor | None
    partitions: Sequence[PartitionBacklog]

    @property
    def policy(self) -> LaunchPolicy:
        """When its sensor launches it."""
        return self.sensor.policy if self.sensor is not None else LaunchPolicy()


def gather_partitions(where: Place, asset: str | None, now: datetime) -> list[ConsumerPartitions]:
    """The consumers of the code location, or one of them, at `now`; reads manifests and no data file.

    Raises ConfigurationError for an asset that consumes no changes.
    """
    key = AssetKey.from_user_string(asset) if asset is not None else None
    namespace = where.lake.lakehouse.settings.default_namespace
    chosen = [*consumers(where.graph, namespace, None if key is None else [key])]
    if key is not None and not chosen:
        raise ConfigurationError(
            f"Asset {asset} does not consume changes in this code location.",
            hint="Without an asset, branchlake consumers --partitions lists all that do.",
        )
    in_flight, approvals = InFlight(where.instance, now), Approvals(where.instance)
    found = []
    for one in chosen:
        sensor = where.sensors.get(one.key)
        policy = sensor.policy if sensor is not None else LaunchPolicy()
        standing = Standing(where.lake, one.consumer, instance=where.instance, per_run=one.per_run)
        missing = missing_ticks(sensor, sensor_ticks(where.instance, sensor.name) if sensor else None)
        decisions = launch_decisions(
            one.key, standing, where.instance, in_flight, policy, now, approvals=approvals
        )
        shown = partition_backlogs(
            standing,
            [
                (partition, with_sensor(decision, missing))
                for partition, decision in decisions
                if decision.state is not LaunchState.NOTHING_LEFT
            ],
        )
        found.append(ConsumerPartitions(one.key, sensor, shown))
    return found


def missing_ticks(sensor: DeclaredSensor | None, ticks: SensorTicks | None) -> LaunchState | None:
    """Why no sensor ticks for an asset; None if one does, as far as Dagster has recorded it."""
    if sensor is None:
        return LaunchState.NO_SENSOR
    started = ticks.started if ticks is not None else None
    if started is False or (started is None and not sensor.running_by_default):
        return LaunchState.SENSOR_STOPPED
    return None if ticks is not None and ticks.ticked else LaunchState.SENSOR_NEVER_RAN


def as_dicts(found: Sequence[ConsumerPartitions], now: datetime) -> list[dict[str, Any]]:
    """For JSON. The partition of an asset without partitions is null, ages are in seconds."""
    return [
        {
            "asset": one.asset.to_user_string(),
            "sensor": one.sensor.name if one.sensor is not None else None,
            "partitions": [_partition(its, one.policy, now) for its in one.partitions],
        }
        for one in found
    ]


def _partition(one: PartitionBacklog, policy: LaunchPolicy, now: datetime) -> dict[str, Any]:
    decision, consumed, left = one.decision, one.consumed, one.unconsumed
    counted = not (left.whole or left.new or left.trouble or left.waiting)
    return {
        "partition": one.partition,
        "position": {name: at.snapshot_id for name, at in consumed.inputs.items()} if consumed else None,
        "consumed_by_run": consumed.run_id if consumed else None,
        "unconsumed_rows": left.rows if counted else None,
        "unconsumed_files": left.files if counted else None,
        "unconsumed_age_s": round(left.age_s(now), 1) if left.oldest else None,
        "left": left.text(),
        "state": decision.state.name.lower(),
        "why": decision.text(policy),
        "run_id": decision.run_id,
        "retries_left": decision.retries_left,
        "retry_due": decision.due.isoformat() if decision.due else None,
    }


def show_partitions(
    found: Sequence[ConsumerPartitions], now: datetime, console: Console | None = None
) -> None:
    """The same for people."""
    console = console or (Console() if sys.stdout.isatty() else Console(width=_WIDE))
    if not any(one.partitions for one in found):
        names = ", ".join(one.asset.to_user_string() for one in found)
        console.print(f"Nothing is left to consume: {names}." if names else "No asset consumes changes.")
        return
    table = Table("asset", "partition", "left", "since", "position", "why", show_edge=False, pad_edge=False)
    for one in found:
        for its in one.partitions:
            age = f"{its.unconsumed.age_s(now):,.0f} s" if its.unconsumed.oldest else ""
            table.add_row(
                one.asset.to_user_string(),
                "all of it" if its.partition is None else escape(its.partition),
                escape(its.unconsumed.text()),
                age,
                position_text(its.consumed),
                escape(its.decision.text(one.policy)),
            )
    console.print(table)
