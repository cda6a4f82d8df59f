"""The report of `branchlake consumers`: the changes that incremental tables have not consumed yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dagster import AssetKey
from rich.console import Console
from rich.table import Table

from branchlake_dagster.automation.backlog import ConsumerBacklog, iter_consumers
from branchlake_dagster.automation.incremental_sensor import DeclaredSensor
from branchlake_dagster.automation.launch_decision import LaunchPolicy, LaunchState, apply_sensor_state
from branchlake_dagster.automation.partition_backlog import (
    InFlightRuns,
    PartitionBacklog,
    format_consumed_position,
    launch_decisions,
    partition_backlogs,
)
from branchlake_dagster.automation.progress import InputBacklog, UnreadableTable, iter_input_backlogs
from branchlake_dagster.cli.backfill import LocationContext
from branchlake_dagster.cli.consoles import open_console
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.change import ChangeSet
from branchlake_dagster.internals.dagster import SensorTicks, load_sensor_ticks
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.approval import Approvals
from branchlake_dagster.settings import Settings
from branchlake_dagster.wording import format_count

_WIDE = 200
"""Width of a table, in characters, if the output is not a terminal: one line per consumer, for grep."""
_LEGEND = """
left: published changes of the input that the table has not consumed. Rows are counted from file metadata: a
file that was rewritten for one row counts all its rows, before and after ("at most").
since: the age of the oldest unconsumed change. ahead: partitions that have consumed more than the others.
valid through: the table has all records up to this time. by run: the run that consumed last.
To see why no run is launched: branchlake consumers --partitions -m MODULE""".lstrip()


def gather_consumers(settings: Settings) -> dict[str, Any]:
    """Collect the position and the unconsumed changes of each consumer and input. Starts no server.

    Returns the JSON object of `branchlake consumers --json`.
    """
    lake = Lakehouse(settings, start=False)
    lake.endpoints(spark=False)
    now = datetime.now(UTC)
    tables = list(iter_input_backlogs(lake))
    return {
        "consumers": [_backlog_to_dict(table, now) for table in tables if isinstance(table, InputBacklog)],
        "unreadable": [
            {"table": table.table, "trouble": table.trouble}
            for table in tables
            if isinstance(table, UnreadableTable)
        ],
    }


def _backlog_to_dict(table: InputBacklog, now: datetime) -> dict[str, Any]:
    change, age = table.change, table.oldest_age_s(now)
    return {
        "table": table.table,
        "input": table.input,
        "run_id": table.run_id,
        "snapshot": table.position.snapshot_id,
        "partitions_ahead": table.partitions_ahead,
        "unconsumed_files": change.files_changed if change else None,
        "unconsumed_rows": change.rows_changed if change else None,
        "unconsumed_rows_are": _classify_row_count(change) if change else None,
        "unconsumed_age_s": None if age is None else round(age, 1),
        "valid_through": None if table.valid_through is None else table.valid_through.isoformat(),
        "trouble": table.trouble,
    }


def show_consumers(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the report of `gather_consumers` as a table with a legend.

    `console` prints brackets as they are (see `open_console`); None for standard output.
    """
    console = console or open_console(_WIDE)
    if not report["consumers"] and not report["unreadable"]:
        console.print("No table on main was computed from changes.")
    else:
        columns = ("table", "input", "left", "since", "ahead", "valid through", "by run")
        table = Table(*columns, show_edge=False, pad_edge=False)
        for row in report["consumers"]:
            age = row["unconsumed_age_s"]
            table.add_row(
                row["table"],
                row["input"],
                row["trouble"] or _format_unconsumed(row),
                "" if age is None else f"{age:,.0f} s",
                str(row["partitions_ahead"] or ""),
                row["valid_through"] or "",
                row["run_id"],
            )
        for row in report["unreadable"]:
            table.add_row(row["table"], "?", row["trouble"], "", "", "", "")
        console.print(table)
        console.print(_LEGEND, soft_wrap=True, highlight=False)


def _classify_row_count(change: ChangeSet) -> str:
    """Return how exact the number of changed rows is, because it comes from file metadata and not from rows.

    - `exact`: files were only added.
    - `at most`: files were rewritten, and their rows count twice, as removed and as added.
    - `with deleted values`: equality deletes may have removed any number of rows.
    """
    if change.only_appends:
        return "exact"
    return "with deleted values" if change.has_equality_deletes else "at most"


def _format_unconsumed(consumer: dict[str, Any]) -> str:
    rows, files = (
        format_count(consumer["unconsumed_rows"], "row"),
        format_count(consumer["unconsumed_files"], "file"),
    )
    if not consumer["unconsumed_files"]:
        return "nothing"
    if consumer["unconsumed_rows_are"] == "with deleted values":
        return f"{rows} and deleted values in {files}"
    return f"{'' if consumer['unconsumed_rows_are'] == 'exact' else 'at most '}{rows} in {files}"


_WIDE_TABLE = 240
"""Width of a table, in characters, if the output is not a terminal: one line per partition, for grep."""


@dataclass(frozen=True)
class ConsumerPartitions:
    """The partitions of one consumer that have unconsumed changes.

    `asset` is the consumer's key. `sensor` is None if no incremental sensor launches the consumer.
    """

    asset: AssetKey
    sensor: DeclaredSensor | None
    partitions: Sequence[PartitionBacklog]

    @property
    def policy(self) -> LaunchPolicy:
        """The launch policy of the sensor; the default policy if `sensor` is None."""
        return self.sensor.policy if self.sensor is not None else LaunchPolicy()


def gather_partitions(context: LocationContext, asset: str | None, now: datetime) -> list[ConsumerPartitions]:
    """Return the partitions with unconsumed changes of each consumer of a code location.

    `asset` is the key of one consumer, such as `shop/prices`; None means all consumers. `now` is the present
    time. Reads manifests and no data file.

    Raises ConfigurationError if the asset consumes no changes.
    """
    key = AssetKey.from_user_string(asset) if asset is not None else None
    namespace = context.lake.lakehouse.settings.default_namespace
    selected_consumers = [*iter_consumers(context.graph, namespace, None if key is None else [key])]
    if key is not None and not selected_consumers:
        raise ConfigurationError(
            f"Asset {asset} does not consume changes in this code location.",
            hint="List the assets that do: branchlake consumers --partitions.",
        )
    in_flight, approvals = InFlightRuns(context.instance, now), Approvals(context.instance)
    consumer_partitions = []
    for consumer in selected_consumers:
        sensor = context.sensors.get(consumer.key)
        policy = sensor.policy if sensor is not None else LaunchPolicy()
        backlog = ConsumerBacklog(
            context.lake,
            consumer.consumer,
            instance=context.instance,
            per_run=consumer.per_run,
            whole_inputs=consumer.whole_inputs,
        )
        missing_state = explain_missing_ticks(
            sensor, load_sensor_ticks(context.instance, sensor.name) if sensor else None
        )
        decisions = launch_decisions(
            consumer.key, backlog, context.instance, in_flight, policy, now, approvals=approvals
        )
        open_partitions = partition_backlogs(
            backlog,
            [
                (partition, apply_sensor_state(decision, missing_state))
                for partition, decision in decisions
                if decision.state is not LaunchState.NOTHING_LEFT
            ],
        )
        consumer_partitions.append(ConsumerPartitions(consumer.key, sensor, open_partitions))
    return consumer_partitions


def explain_missing_ticks(sensor: DeclaredSensor | None, ticks: SensorTicks | None) -> LaunchState | None:
    """Return the reason why no sensor launches an asset; None if its sensor is on and has ticked.

    `ticks` is None if `sensor` is None, or if Dagster does not know the sensor yet.
    """
    if sensor is None:
        return LaunchState.NO_SENSOR
    is_started = ticks.started if ticks is not None else None
    if is_started is False or (is_started is None and not sensor.running_by_default):
        return LaunchState.SENSOR_STOPPED
    return None if ticks is not None and ticks.ticked else LaunchState.SENSOR_NEVER_RAN


def partitions_to_dicts(
    consumer_partitions: Sequence[ConsumerPartitions], now: datetime
) -> list[dict[str, Any]]:
    """Convert consumers to JSON objects.

    `partition` is null for an asset without partitions. Ages are in seconds.
    """
    return [
        {
            "asset": consumer.asset.to_user_string(),
            "sensor": consumer.sensor.name if consumer.sensor is not None else None,
            "partitions": [
                _partition_to_dict(backlog, consumer.policy, now) for backlog in consumer.partitions
            ],
        }
        for consumer in consumer_partitions
    ]


def _partition_to_dict(backlog: PartitionBacklog, policy: LaunchPolicy, now: datetime) -> dict[str, Any]:
    decision, consumed, unconsumed = backlog.decision, backlog.position, backlog.unconsumed
    is_counted = not (unconsumed.whole or unconsumed.new or unconsumed.trouble or unconsumed.missing_input)
    return {
        "partition": backlog.partition,
        "position": {name: position.snapshot_id for name, position in consumed.inputs.items()}
        if consumed
        else None,
        "consumed_by_run": consumed.run_id if consumed else None,
        "unconsumed_rows": unconsumed.rows if is_counted else None,
        "unconsumed_files": unconsumed.files if is_counted else None,
        "unconsumed_age_s": round(unconsumed.age_s(now), 1) if unconsumed.oldest else None,
        "left": unconsumed.format_summary(),
        "state": decision.state.name.lower(),
        "why": decision.format_state(policy),
        "run_id": decision.run_id,
        "retries_left": decision.retries_left,
        "retry_due": decision.due_at.isoformat() if decision.due_at else None,
    }


def show_consumer_partitions(
    consumer_partitions: Sequence[ConsumerPartitions], now: datetime, console: Console | None = None
) -> None:
    """Print the partitions with unconsumed changes as a table, or one sentence if there are none.

    The ages of the changes end at `now`. `console` prints brackets as they are (see `open_console`); None
    for standard output.
    """
    console = console or open_console(_WIDE_TABLE)
    if not any(consumer.partitions for consumer in consumer_partitions):
        names = ", ".join(consumer.asset.to_user_string() for consumer in consumer_partitions)
        console.print(
            f"All changes are consumed by {names}."
            if names
            else "No asset of this code location consumes changes."
        )
        return
    table = Table("asset", "partition", "left", "since", "position", "why", show_edge=False, pad_edge=False)
    for consumer in consumer_partitions:
        for backlog in consumer.partitions:
            age = f"{backlog.unconsumed.age_s(now):,.0f} s" if backlog.unconsumed.oldest else ""
            table.add_row(
                consumer.asset.to_user_string(),
                "all of it" if backlog.partition is None else backlog.partition,
                backlog.unconsumed.format_summary(),
                age,
                format_consumed_position(backlog.position),
                backlog.decision.format_state(consumer.policy),
            )
    console.print(table)
