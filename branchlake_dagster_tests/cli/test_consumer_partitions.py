"""`branchlake consumers --partitions`: positions, what is left, and why nothing is launched."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path

import dagster as dg
import pytest
from click.testing import CliRunner
from rich.console import Console

from branchlake_dagster import incremental_sensor
from branchlake_dagster.automation.incremental_sensor import DeclaredSensor, declared_sensors
from branchlake_dagster.automation.launch_decision import LaunchPolicy, LaunchState
from branchlake_dagster.cli.backfill import LocationContext
from branchlake_dagster.cli.consumers import (
    explain_missing_ticks,
    gather_partitions,
    partitions_to_dicts,
    show_consumer_partitions,
)
from branchlake_dagster.cli.main import main
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.dagster import SensorTicks
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.sources import published
from branchlake_dagster_tests.incremental.test_incremental_sensor import Ticks
from branchlake_dagster_tests.incremental.test_sensor_retries import Daily, launch

SENSOR = DeclaredSensor("s", LaunchPolicy(), running_by_default=True)


@pytest.mark.parametrize(
    ("sensor", "ticks", "state"),
    [
        (None, None, LaunchState.NO_SENSOR),
        (SENSOR, None, LaunchState.SENSOR_NEVER_RAN),
        (SENSOR, SensorTicks(started=True, ticked=False), LaunchState.SENSOR_NEVER_RAN),
        (SENSOR, SensorTicks(started=False, ticked=True), LaunchState.SENSOR_STOPPED),
        (SENSOR, SensorTicks(started=None, ticked=True), None),
        (DeclaredSensor("s", LaunchPolicy(), running_by_default=False), None, LaunchState.SENSOR_STOPPED),
    ],
)
def test_why_no_sensor_ticks(
    sensor: DeclaredSensor | None, ticks: SensorTicks | None, state: LaunchState | None
) -> None:
    assert explain_missing_ticks(sensor, ticks) is state


def test_a_sensor_of_a_code_location_is_found_with_its_policy() -> None:
    @dg.asset
    def spent() -> None: ...

    defs = dg.Definitions(assets=[spent], sensors=[incremental_sensor(min_rows=7, retries=2)])
    found = declared_sensors(defs.get_repository_def())
    assert found[spent.key].policy == LaunchPolicy(min_rows=7, retries=2)
    assert found[spent.key].running_by_default


@pytest.fixture
def daily(namespace: str) -> Daily:
    return Daily(namespace)


def place(p: Project, policy: LaunchPolicy, daily: Daily) -> LocationContext:
    sensor = DeclaredSensor("incremental_sensor", policy, running_by_default=True)
    lake = LakehouseResource.from_settings(p.lake.settings)
    return LocationContext(p.graph, lake, p.instance, {daily.asset.key: sensor})


def ticked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "branchlake_dagster.cli.consumers.load_sensor_ticks",
        lambda *_: SensorTicks(started=None, ticked=True),
    )


def test_each_partition_has_its_position_and_the_reason_why_it_waits(
    lakehouse: Lakehouse, daily: Daily, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticked(monkeypatch)
    daily.broken = {"2026-08-02"}
    asset = daily.asset.key.to_user_string()
    policy = LaunchPolicy(retries=1, retry_delay_s=3600.0)
    with project(lakehouse, daily.events.asset, daily.asset) as p:
        for number in (1, 2, 3):
            daily.events.publish(p, (date(2026, 8, number), number))
        published(p, daily.asset, partition="2026-08-01")
        for number in (1, 2, 3, 4):
            daily.events.publish(p, (date(2026, 8, number), number))
        where = place(p, policy, daily)

        def states(policy: LaunchPolicy) -> dict[str | None, LaunchState]:
            (found,) = gather_partitions(place(p, policy, daily), asset, datetime.now(UTC))
            return {one.partition: one.decision.state for one in found.partitions}

        assert {*states(policy).values()} == {LaunchState.DUE}
        keys = {
            request.partition_key: request for request in sensor_requests(p, daily, retries=1, delay=3600.0)
        }
        failed = launch(p, keys["2026-08-02"], ok=False)
        waits = p.run(daily.asset.key, partition="2026-08-03")
        now = datetime.now(UTC)
        (found,) = gather_partitions(where, asset, now)
        (listed,) = partitions_to_dicts([found], now)
        rows = {one["partition"]: one for one in listed["partitions"]}
        assert {name: row["state"] for name, row in rows.items()} == {
            "2026-08-01": "due",
            "2026-08-02": "waits_for_retry",
            "2026-08-03": "awaits_verdict",
            "2026-08-04": "due",
        }
        assert (rows["2026-08-02"]["run_id"], rows["2026-08-02"]["retries_left"]) == (failed, 1)
        assert rows["2026-08-03"]["run_id"] == waits
        first = rows["2026-08-01"]
        assert (first["unconsumed_rows"], first["unconsumed_files"]) == (1, 1)
        assert first["unconsumed_age_s"] >= 0
        assert list(first["position"]) == [".".join(daily.events.key.path)]
        assert rows["2026-08-02"]["position"] is None  # nothing was consumed for it yet
        p.settle(waits)
        console = Console(width=300, record=True, file=io.StringIO(), markup=False)
        show_consumer_partitions([found], now, console)
        assert failed[:8] in console.export_text()
        assert states(LaunchPolicy())["2026-08-02"] is LaunchState.NOT_RETRIED


def sensor_requests(p: Project, daily: Daily, *, retries: int, delay: float) -> list[dg.RunRequest]:
    return Ticks(p, target=[daily.asset], retries=retries, retry_delay_seconds=delay).tick()


def test_no_data_file_is_opened(lakehouse: Lakehouse, daily: Daily, monkeypatch: pytest.MonkeyPatch) -> None:
    ticked(monkeypatch)
    with project(lakehouse, daily.events.asset, daily.asset) as p:
        daily.events.publish(p, (date(2026, 8, 1), 1))
        published(p, daily.asset, partition="2026-08-01")
        for number in (1, 2, 3):
            daily.events.publish(p, (date(2026, 8, number), number))
        where, asset = place(p, LaunchPolicy(), daily), daily.asset.key.to_user_string()
        table = lakehouse.catalog().load_table((*daily.events.key.path,))
        (data,) = {str(Path(str(one.file.file_path).removeprefix("file://")).parent)
                   for one in table.scan().plan_files()}  # fmt: skip
        away = Path(data).with_name("away")
        Path(data).rename(away)  # whoever opens a data file fails
        try:
            (found,) = gather_partitions(where, asset, datetime.now(UTC))
        finally:
            away.rename(data)
        assert [(one.partition, one.unconsumed.rows) for one in found.partitions] == [
            ("2026-08-01", 1),
            ("2026-08-02", 1),
            ("2026-08-03", 1),
        ]


def test_an_asset_that_consumes_nothing_is_refused(lakehouse: Lakehouse, daily: Daily) -> None:
    with project(lakehouse, daily.events.asset, daily.asset) as p:
        where, asset = place(p, LaunchPolicy(), daily), daily.events.key.to_user_string()
        with pytest.raises(ConfigurationError):
            gather_partitions(where, asset, datetime.now(UTC))


MODULE = """
import dagster as dg
from branchlake_dagster import incremental_sensor
from branchlake_dagster_tests.incremental.test_sensor_retries import Daily

daily = Daily("{namespace}")
defs = dg.Definitions(assets=[daily.events.asset, daily.asset], sensors=[incremental_sensor()])
"""


@pytest.fixture
def call(
    lakehouse: Lakehouse, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    (tmp_path / f"c_{namespace}.py").write_text(MODULE.format(namespace=namespace))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(lakehouse.settings.state_dir))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def called(*arguments: str, exit_code: int = 0) -> str:
        result = CliRunner().invoke(main, ["consumers", *arguments])
        assert result.exit_code == exit_code, result.output
        return str(result.output)

    return called


def test_the_command(lakehouse: Lakehouse, namespace: str, daily: Daily, call: Callable[..., str]) -> None:
    module = f"c_{namespace}"
    with project(lakehouse, daily.events.asset, daily.asset) as p:
        daily.events.publish(p, (date(2026, 8, 1), 1))
        (found,) = json.loads(call("--partitions", "-m", module, "--json"))
        assert [(one["partition"], one["state"]) for one in found["partitions"]] == [
            ("2026-08-01", "sensor_never_ran")
        ]
        assert "2026-08-01" in call(f"{namespace}/daily", "-m", module)
        published(p, daily.asset, partition="2026-08-01")
        assert "2026-08-01" not in call("--partitions", "-m", module)
    assert "-m" in call("--partitions", exit_code=2)
