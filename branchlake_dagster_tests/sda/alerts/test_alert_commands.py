"""`branchlake sda alerts`: the listing, the history, and acknowledgements."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner, Result

from branchlake_dagster.cli.dagster_home import prepare_home
from branchlake_dagster.cli.main import main
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.query.connection import LakeReader
from branchlake_dagster.sda.commands.alert_acknowledgement import (
    RETRACTED,
    UNKNOWN,
    AlertNotHeld,
    acknowledge_alert,
    report_acknowledgement,
)
from branchlake_dagster.sda.commands.alert_list import AlertFilter
from branchlake_dagster.sda.commands.alert_subscribers import FOLDER, SubscriberStore
from branchlake_dagster_tests.sda.alerts.alert_log import KEY, NOON, AlertLog, alert_id, entry
from branchlake_dagster_tests.suite.raised import raising

Run = Callable[..., Result]


@pytest.fixture
def run(lakehouse: Lakehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `branchlake sda alerts` outside of the project, with a Dagster home of its own."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "dagster"
    home.mkdir()
    prepare_home(home)
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(lakehouse.settings.state_dir))
    acknowledgements = lakehouse.settings.state_dir / FOLDER / "acknowledgements.jsonl"
    acknowledgements.unlink(missing_ok=True)

    def invoke(*options: str, code: int = 0) -> Result:
        result = CliRunner().invoke(main, ["sda", "alerts", *options])
        assert result.exit_code == code, result.output
        return result

    return invoke


def numbers(result: Result) -> list[int]:
    return [int(one["alert_id"][-12:]) for one in json.loads(result.stdout)]


def test_without_a_table_there_are_no_alerts(log: AlertLog, run: Run) -> None:
    for options in ((), ("--history", alert_id(1))):
        assert run(*options).stdout == ""
    header = run("--csv").stdout
    assert json.loads(run("--json").stdout) == []
    log.publish()  # and with an empty one
    assert run("--csv").stdout == header
    assert json.loads(run("--json").stdout) == []
    assert alert_id(1) not in run().stdout


def test_the_last_entry_of_an_alert_decides(log: AlertLog, run: Run) -> None:
    log.publish(entry(1), entry(2), entry(3, priority="high"), entry(4))
    log.publish(
        entry(2, 0, "retract"),
        entry(3, 0, "retract", priority="high"),
        entry(3, 1, priority="low", collision_probability=None, tca=NOON + timedelta(minutes=9)),
        entry(4, 0, "retract"),
    )
    log.publish(entry(4, 1, reason="expected again"))
    assert numbers(run("--json")) == [3, 4, 1]  # by time of closest approach, latest first
    # A filter on what an earlier version stated selects no alert by that version.
    assert numbers(run("--json", "--priority", "high")) == []
    assert numbers(run("--json", "--priority", "low")) == [3]
    assert numbers(run("--json", "--object", "2", "--object", "104")) == [4]
    assert numbers(run("--json", "--since", "2026-08-11T12:04")) == [3, 4]
    assert numbers(run("--json", "--until", "2026-08-11T12:04")) == [1]
    assert numbers(run("--json", "--limit", "2")) == [3, 4]
    history = json.loads(run("--json", "--history", alert_id(4)).stdout)
    assert [(one["sequence"], one["kind"]) for one in history] == [
        (0, "insert"),
        (0, "retract"),
        (1, "insert"),
    ]
    rows = list(csv.DictReader(io.StringIO(run("--csv", "--limit", "0").stdout)))
    assert [row["alert_id"] for row in rows] == [alert_id(3), alert_id(4), alert_id(1)]
    assert rows[0]["tca"] == "2026-08-11T12:09:00.000000Z"
    assert rows[2]["sat1_observation_ids"] == "o1"
    assert [number for number in range(1, 5) if alert_id(number) in run().stdout] == [1, 3, 4]
    assert alert_id(4) in run("--history", alert_id(4)).stdout


def test_only_files_of_the_days_are_read(log: AlertLog) -> None:
    log.publish(entry(1), entry(2, tca=NOON + timedelta(days=1)), entry(3, tca=NOON + timedelta(days=2)))
    log.publish(entry(1, 0, "retract"))

    def files(alert_filter: AlertFilter) -> int:
        return len(list(log.table().scan(row_filter=alert_filter.row_filter()).plan_files()))

    assert files(AlertFilter()) == 4
    assert files(AlertFilter(since=NOON + timedelta(hours=13))) == 2
    assert files(AlertFilter(since=NOON, until=NOON + timedelta(hours=1))) == 2
    assert files(AlertFilter(objects=(3,))) == 1  # by the files' bounds


def test_a_corrected_alert_needs_a_new_acknowledgement(log: AlertLog, run: Run) -> None:
    log.publish(entry(1), entry(2))
    run("--ack", alert_id(1), "--subscriber", "anna", "--note", "maneuver planned")
    first, other = reversed(json.loads(run("--json").stdout))
    assert first["acknowledged"] is True
    (given,) = first["acknowledgements"]
    assert {name: given[name] for name in ("subscriber", "sequence", "note")} == {
        "subscriber": "anna",
        "sequence": 0,
        "note": "maneuver planned",
    }
    assert (other["acknowledged"], other["acknowledgements"]) == (False, [])
    assert "anna" in run().stdout
    log.publish(entry(1, 0, "retract"), entry(1, 1))
    (corrected,) = [one for one in json.loads(run("--json").stdout) if one["sequence"] == 1]
    assert corrected["acknowledged"] is False
    assert corrected["acknowledgements"][0]["sequence"] == 0
    run("--ack", alert_id(1), "--subscriber", "ben")
    (corrected,) = [one for one in json.loads(run("--json").stdout) if one["sequence"] == 1]
    assert corrected["acknowledged"] is True
    assert [(one["subscriber"], one["sequence"]) for one in corrected["acknowledgements"]] == [
        ("anna", 0),
        ("ben", 1),
    ]
    with dg.DagsterInstance.get() as instance:
        records = instance.fetch_observations(dg.AssetKey(KEY), limit=10, ascending=True).records
    observed = [one.asset_observation for one in records if one.asset_observation]
    assert [
        tuple(one.metadata[name].value for name in ("alert_id", "sequence", "subscriber")) for one in observed
    ] == [(alert_id(1), 0, "anna"), (alert_id(1), 1, "ben")]
    assert observed[0].metadata["note"].value == "maneuver planned"
    assert "note" not in observed[1].metadata


def test_an_alert_that_does_not_hold_is_not_acknowledged(
    log: AlertLog, run: Run, lakehouse: Lakehouse, tmp_path: Path
) -> None:
    reader, store = LakeReader(lakehouse), SubscriberStore(tmp_path)

    def acknowledge(number: int) -> Any:
        now = datetime.now(UTC)
        return acknowledge_alert(reader, store, alert_id(number), "anna", note=None, now=now)

    with raising(AlertNotHeld, reason=UNKNOWN, subject=alert_id(1)):
        acknowledge(1)  # there is no table
    log.publish(entry(1), entry(1, 0, "retract"), entry(2))
    with raising(AlertNotHeld, "--history", reason=RETRACTED, subject=alert_id(1)):
        acknowledge(1)
    with raising(AlertNotHeld, reason=UNKNOWN, subject=alert_id(3)):
        acknowledge(3)
    assert store.load_acknowledgements() == []
    assert acknowledge(2).sequence == 0
    run("--ack", alert_id(1), code=1)


def test_without_a_dagster_instance_none_is_made(
    log: AlertLog, lakehouse: Lakehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.publish(entry(1))
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    given = acknowledge_alert(
        LakeReader(lakehouse), SubscriberStore(tmp_path), alert_id(1), "anna", note=None, now=NOON
    )
    settings = lakehouse.settings.model_copy(update={"state_dir": tmp_path / "state"})
    assert report_acknowledgement(settings, given) is False
    assert not (tmp_path / "state").exists()


def test_an_empty_name_of_a_subscriber_is_not_the_login_name(log: AlertLog, run: Run) -> None:
    """As of a shell's variable that is not set."""
    log.publish(entry(1))
    run("--follow", "--once", "--subscriber", "", code=1)
    run("--ack", alert_id(1), "--subscriber", "", code=1)


def test_follow_prints_text_or_json_lines(log: AlertLog, run: Run) -> None:
    log.publish(entry(1))
    name = ("--subscriber", "command", "--follow", "--once")
    assert run(*name, "--restart").stdout == ""
    log.publish(entry(2), entry(3, collision_probability=None))
    lines = run(*name, "--json").stdout.splitlines()
    assert [json.loads(line)["alert_id"] for line in lines] == [alert_id(2), alert_id(3)]
    text = run(*name, "--restart", "--since", "2020-01-01").stdout.splitlines()
    assert [line.split()[-1] for line in text] == [alert_id(1), alert_id(2), alert_id(3)]
    assert "2026-08-11 12:01:00.0" in text[0]
    assert run(*name).stdout == ""
    (lake_file,) = (Path(log.lake.settings.state_dir) / FOLDER).glob("subscriber-command.json")
    assert json.loads(lake_file.read_text())["position"]["snapshot"] == (
        log.table().metadata.current_snapshot_id
    )


@pytest.mark.parametrize(
    "options",
    [
        ("--follow", "--ack", "x"),
        ("--follow", "--history", "x"),
        ("--follow", "--priority", "high"),
        ("--follow", "--limit", "0"),
        ("--follow", "--since", "2262-01-01"),
        ("--once",),
        ("--restart",),
        ("--ack", "x", "--json"),
        ("--ack", "x", "--since", "2026-08-11"),
        ("--note", "x"),
        ("--subscriber", "x"),
        ("--json", "--csv"),
        ("--since", "noon"),
        ("--limit", "-1"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(options: tuple[str, ...]) -> None:
    assert CliRunner().invoke(main, ["sda", "alerts", *options]).exit_code == 2
