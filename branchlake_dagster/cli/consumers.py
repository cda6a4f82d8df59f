"""`branchlake consumers`: what incremental tables and their partitions have left to consume."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
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
from branchlake_dagster.automation.progress import TableStanding, Unreadable, standings
from branchlake_dagster.cli.backfill import Place
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.change import ChangeSet
from branchlake_dagster.internals.dagster import SensorTicks, sensor_ticks
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.approval import Approvals
from branchlake_dagster.settings import Settings
from branchlake_dagster.wording import counted

_WIDE = 200
"""Columns when nobody watches: a line each, for grep."""
_LEGEND = """
left: published change of the input that the table has not consumed. Files are counted, no row is read: a file
that was rewritten for one row counts all its rows, before and after ("at most").
since: the age of the oldest change that is left. ahead: partitions that have consumed more than the others.
valid through: the table has all records up to this time. by run: the run that consumed last.
Why no run is launched: branchlake consumers --partitions -m MODULE""".lstrip()


def gather(settings: Settings) -> dict[str, Any]:
    """Each consumer and input with its position and what is left; starts nothing."""
    lake = Lakehouse(settings, start=False)
    lake.endpoints(spark=False)
    now = datetime.now(UTC)
    found = list(standings(lake))
    return {
        "consumers": [_told(one, now) for one in found if isinstance(one, TableStanding)],
        "unreadable": [
            {"table": one.table, "trouble": one.trouble} for one in found if isinstance(one, Unreadable)
        ],
    }


def _told(one: TableStanding, now: datetime) -> dict[str, Any]:
    change, age = one.change, one.oldest_s(now)
    return {
        "table": one.table,
        "input": one.input,
        "run_id": one.run_id,
        "snapshot": one.position.snapshot_id,
        "partitions_ahead": one.ahead,
        "unconsumed_files": change.files_changed if change else None,
        "unconsumed_rows": change.rows_changed if change else None,
        "unconsumed_rows_are": _meaning_of_rows(change) if change else None,
        "unconsumed_age_s": None if age is None else round(age, 1),
        "valid_through": None if one.valid_through is None else one.valid_through.isoformat(),
        "trouble": one.trouble,
    }


def show(found: dict[str, Any], console: Console | None = None) -> None:
    """The same for people."""
    console = console or (Console() if sys.stdout.isatty() else Console(width=_WIDE))
    if not found["consumers"] and not found["unreadable"]:
        console.print("No table on main was computed from changes.")
    else:
        columns = ("table", "input", "left", "since", "ahead", "valid through", "by run")
        table = Table(*columns, show_edge=False, pad_edge=False)
        for one in found["consumers"]:
            age = one["unconsumed_age_s"]
            table.add_row(
                one["table"],
                one["input"],
                escape(one["trouble"] or _left(one)),
                "" if age is None else f"{age:,.0f} s",
                str(one["partitions_ahead"] or ""),
                one["valid_through"] or "",
                one["run_id"],
            )
        for one in found["unreadable"]:
            table.add_row(one["table"], "?", escape(one["trouble"]), "", "", "", "")
        console.print(table)
        console.print(_LEGEND, soft_wrap=True, highlight=False)


def _meaning_of_rows(change: ChangeSet) -> str:
    """What the number of rows counts: no row is read, so it comes from the files that were added and removed.

    `exact` of files that were only added. `at most`: a rewritten file counts its rows twice, as removed and
    as added. `with deleted values`: a value may have deleted any number of rows.
    """
    if change.only_appends:
        return "exact"
    return "with deleted values" if change.equality_deletes else "at most"


def _left(one: dict[str, Any]) -> str:
    rows, files = counted(one["unconsumed_rows"], "row"), counted(one["unconsumed_files"], "file")
    if not one["unconsumed_files"]:
        return "nothing"
    if one["unconsumed_rows_are"] == "with deleted values":
        return f"{rows} and deleted values in {files}"
    return f"{'' if one['unconsumed_rows_are'] == 'exact' else 'at most '}{rows} in {files}"


_WIDE_TABLE = 240
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
    console = console or (Console() if sys.stdout.isatty() else Console(width=_WIDE_TABLE))
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
