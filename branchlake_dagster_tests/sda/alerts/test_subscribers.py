"""Delivery of alerts to subscribers: each entry at least once, in order, whatever happens to the table."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from branchlake_dagster.embedded.state_folder import LakeNotRunning
from branchlake_dagster.errors import BranchlakeError, ConfigurationError
from branchlake_dagster.history.change import LossReason, Position
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.errors import NessieUnavailable
from branchlake_dagster.sda.alerts.entry_names import ALERT_TABLE
from branchlake_dagster.sda.alerts.log_entries import IDENTITY, find_added_entries
from branchlake_dagster.sda.assets.alerts import ALERT_COLUMNS, CONJUNCTION_ALERTS
from branchlake_dagster.sda.commands.alert_delivery import follow_alerts
from branchlake_dagster.sda.commands.alert_reader import ENTRIES_REMOVED, AlertLogChanged, AlertReader
from branchlake_dagster.sda.commands.alert_subscribers import (
    FOLDER,
    Acknowledgement,
    SubscriberBusy,
    SubscriberDamaged,
    SubscriberStore,
    latest_acknowledgements,
)
from branchlake_dagster_tests.history.snapshot_tables import compact
from branchlake_dagster_tests.sda.alerts.alert_log import SCHEMA, TIME, AlertLog, alert_id, entry
from branchlake_dagster_tests.suite.json_contract import check_output
from branchlake_dagster_tests.suite.raised import raising

Delivered = list[tuple[int, int, str]]
"""The number of the alert, the sequence and the kind of each entry."""
NUMBERS = {alert_id(number): number for number in range(20)}
FIRST_TIME = datetime(2020, 1, 1, tzinfo=UTC)


class Follower:
    """A subscriber of a store; `new()` returns what `--follow --once` prints."""

    def __init__(self, lake: Lakehouse, folder: Path, name: str = "operations") -> None:
        self.reader, self.store, self.name = AlertReader(lake), SubscriberStore(folder), name
        self.reports: list[str] = []

    def new(self, *, since: datetime | None = None, restart: bool = False, **options: Any) -> Delivered:
        output = io.StringIO()
        follow_alerts(
            self.reader,
            self.store,
            self.name,
            **{
                "since": since,
                "restart": restart,
                "as_json": True,
                "interval_s": 0.0,
                "once": True,
                "report": self.reports.append,
                "output": output,
                **options,
            },
        )
        return parse(output.getvalue())


def parse(text: str) -> Delivered:
    check_output(["sda", "alerts", "--follow", "--json"], text)
    lines = [json.loads(line) for line in text.splitlines()]
    return [(NUMBERS[one["alert_id"]], one["sequence"], one["kind"]) for one in lines]


@pytest.fixture
def follower(lakehouse: Lakehouse, tmp_path: Path) -> Follower:
    return Follower(lakehouse, tmp_path)


def test_entries_are_delivered_once_in_the_order_of_commits(log: AlertLog, follower: Follower) -> None:
    assert follower.new() == []  # there is no table yet, and the position is saved
    log.publish(entry(3), entry(1), entry(2, tca=datetime(2026, 8, 12, tzinfo=UTC)))
    log.publish(entry(2, 1), entry(2, 0, "retract"), entry(1, 0, "retract"))
    assert follower.new() == [
        (1, 0, "insert"),
        (2, 0, "insert"),
        (3, 0, "insert"),
        (1, 0, "retract"),
        (2, 0, "retract"),
        (2, 1, "insert"),
    ]
    assert follower.new() == []
    log.publish()  # a run without entries
    assert follower.new() == []
    log.publish(entry(4))
    assert follower.new() == [(4, 0, "insert")]
    assert follower.reports == []


def test_each_subscriber_has_its_own_position(log: AlertLog, lakehouse: Lakehouse, tmp_path: Path) -> None:
    first, second = (Follower(lakehouse, tmp_path, name) for name in ("first", "second"))
    log.publish(entry(1))
    assert first.new() == []  # a new subscriber begins at the present
    log.publish(entry(2))
    assert second.new(since=FIRST_TIME) == [(1, 0, "insert"), (2, 0, "insert")]
    assert first.new() == [(2, 0, "insert")]
    assert (first.new(), second.new()) == ([], [])


def test_a_new_subscriber_may_begin_with_an_earlier_publication(log: AlertLog, follower: Follower) -> None:
    log.publish(entry(1))
    time.sleep(0.01)
    between = datetime.now(UTC)
    time.sleep(0.01)
    log.publish(entry(2))
    assert follower.new(since=between) == [(2, 0, "insert")]
    assert follower.new(since=FIRST_TIME) == []  # a known subscriber continues, which is reported
    assert len(follower.reports) == 1
    assert follower.new(since=FIRST_TIME, restart=True) == [(1, 0, "insert"), (2, 0, "insert")]


def test_an_error_before_the_position_is_saved_repeats_one_publication(
    log: AlertLog, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower.new()
    log.publish(entry(1))
    log.publish(entry(2))
    save, positions = follower.store.save_position, []

    def fail_at_the_second(subscriber: str, position: Position | None) -> None:
        positions.append(position)
        if len(positions) == 2:
            raise DiskFull
        save(subscriber, position)

    with monkeypatch.context() as patch:
        patch.setattr(follower.store, "save_position", fail_at_the_second)
        with pytest.raises(DiskFull):
            follower.new()
    assert follower.new() == [(2, 0, "insert")]


class DiskFull(Exception):  # noqa: N818
    """The position cannot be saved."""


class BrokenPipe(io.StringIO):
    def flush(self) -> None:
        raise BrokenPipeError


def test_what_was_not_flushed_is_delivered_again(log: AlertLog, follower: Follower) -> None:
    follower.new()
    log.publish(entry(1))
    with pytest.raises(BrokenPipeError):
        follower.new(output=BrokenPipe())
    assert follower.new() == [(1, 0, "insert")]


@pytest.mark.parametrize("error", [NessieUnavailable, LakeNotRunning])
def test_the_servers_may_be_away_for_a_while(
    log: AlertLog, follower: Follower, error: type[BranchlakeError]
) -> None:
    follower.new()
    log.publish(entry(1))
    head, looks = follower.reader.head_of_main, 0

    def look() -> str:
        nonlocal looks
        looks += 1
        if looks <= 2:
            raise error("away")
        return head()

    follower.reader.head_of_main = look
    output = io.StringIO()

    def sleep(_: float) -> None:
        if looks == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follower.new(once=False, output=output, sleep=sleep)
    assert parse(output.getvalue()) == [(1, 0, "insert")]
    assert len(follower.reports) == 1
    looks = 0
    with raising(error):
        follower.new()  # with --once, the error is the result


def test_a_compaction_delivers_nothing_twice(log: AlertLog, follower: Follower) -> None:
    follower.new()
    log.publish(entry(1))
    assert follower.new() == [(1, 0, "insert")]
    log.publish(entry(2))
    compact(log.table())
    assert follower.new() == [(2, 0, "insert")]
    compact(log.table())
    assert follower.new() == []
    stored = follower.store.load_position(follower.name)
    assert stored is not None
    assert stored.position == Position(
        str(log.table().metadata.table_uuid), log.table().metadata.current_snapshot_id
    )
    log.publish(entry(3))
    assert follower.new() == [(3, 0, "insert")]


def test_a_rebuild_that_keeps_the_log_delivers_the_new_entries(log: AlertLog, follower: Follower) -> None:
    follower.new()
    log.publish(entry(1))
    log.publish(entry(2))
    assert len(follower.new()) == 2
    rows = log.table().scan().to_arrow().to_pylist()
    log.publish(*rows, entry(2, 0, "retract"), replace=True)
    assert follower.new() == [(2, 0, "retract")]
    assert follower.new() == []


def test_new_entries_before_a_rebuild_are_delivered_in_order(log: AlertLog, follower: Follower) -> None:
    follower.new()
    log.publish(entry(2))
    assert follower.new() == [(2, 0, "insert")]
    log.publish(entry(3))
    rows = log.table().scan().to_arrow().to_pylist()
    log.publish(*rows, entry(1), replace=True)
    assert follower.new() == [(3, 0, "insert"), (1, 0, "insert")]


def test_a_log_that_was_rebuilt_with_other_entries_is_reported(log: AlertLog, follower: Follower) -> None:
    follower.new()
    log.publish(entry(1), entry(2))
    assert len(follower.new()) == 2
    log.publish(entry(1, miss_distance_km=0.9), replace=True)
    for _ in range(2):  # and it stays reported
        with raising(AlertLogChanged, "--restart", reason=ENTRIES_REMOVED, table="sda.conjunction_alerts"):
            follower.new()
    assert follower.new(since=FIRST_TIME, restart=True)[-1] == (1, 0, "insert")
    assert follower.new() == []


def test_a_log_that_was_rolled_back_or_dropped_is_reported(log: AlertLog, follower: Follower) -> None:
    follower.new()
    log.publish(entry(1))
    log.publish(entry(2))
    assert len(follower.new()) == 2
    first = log.table().metadata.snapshots[0].snapshot_id
    log.table().manage_snapshots().rollback_to_snapshot(first).commit()
    with raising(AlertLogChanged, reason=LossReason.ROLLED_BACK):
        follower.new()
    assert follower.new(restart=True) == []
    log.drop()
    with raising(AlertLogChanged, reason=LossReason.RECREATED):
        follower.new()
    log.publish(entry(3))
    with raising(AlertLogChanged, reason=LossReason.RECREATED):
        follower.new()
    assert follower.new(since=FIRST_TIME, restart=True) == [(3, 0, "insert")]


def test_a_subscriber_is_served_by_one_process(log: AlertLog, follower: Follower) -> None:
    with follower.store.hold(follower.name), raising(SubscriberBusy, subject=follower.name):
        follower.new()
    assert follower.new() == []


# -- processes -------------------------------------------------------------------------------------------

COMMAND = [sys.executable, "-c", "from branchlake_dagster.cli import main; main()"]
SAVES_NEVER = """
import sys, time
from branchlake_dagster.sda.commands.alert_subscribers import SubscriberStore
def save_position(*_):
    print("saving", file=sys.stderr, flush=True)
    time.sleep(600)
SubscriberStore.save_position = save_position
from branchlake_dagster.cli import main
main()
"""


def start_following(lake: Lakehouse, *options: str, code: str | None = None) -> subprocess.Popen[str]:
    command = COMMAND if code is None else [sys.executable, "-c", code]
    return subprocess.Popen(
        [*command, "sda", "alerts", "--follow", "--json", "--interval", "0.05", *options],
        env={**os.environ, "BRANCHLAKE_STATE_DIR": str(lake.settings.state_dir)},
        cwd=lake.settings.state_dir,  # outside of the project
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.chaos
def test_killed_between_output_and_position_the_entry_is_delivered_again(
    log: AlertLog, lakehouse: Lakehouse
) -> None:
    folder = lakehouse.settings.state_dir
    store = SubscriberStore(folder)
    store.save_position("killed", None)
    log.publish(entry(1))
    log.publish(entry(2))
    process = start_following(lakehouse, "--subscriber", "killed", code=SAVES_NEVER)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert parse(line) == [(1, 0, "insert")], process.communicate()
        assert process.stderr.readline().strip() == "saving"
    finally:
        process.kill()
        rest, _ = process.communicate(timeout=60)
    assert rest == ""
    follower = Follower(lakehouse, folder, "killed")
    assert follower.new() == [(1, 0, "insert"), (2, 0, "insert")]
    assert follower.new() == []


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_whoever_ends_the_process_loses_nothing(
    log: AlertLog, lakehouse: Lakehouse, number: signal.Signals, code: int
) -> None:
    name = f"ended-{number}"
    SubscriberStore(lakehouse.settings.state_dir).save_position(name, None)
    process = start_following(lakehouse, "--subscriber", name)
    try:
        log.publish(entry(1))
        assert process.stdout is not None
        assert parse(process.stdout.readline()) == [(1, 0, "insert")]
    finally:
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    log.publish(entry(2))
    delivered = Follower(lakehouse, lakehouse.settings.state_dir, name).new()
    # The signal may have come between the output and the position.
    assert delivered in ([(2, 0, "insert")], [(1, 0, "insert"), (2, 0, "insert")])


# -- the files of subscribers ----------------------------------------------------------------------------


def test_a_damaged_position_is_an_error(tmp_path: Path) -> None:
    store = SubscriberStore(tmp_path)
    assert store.load_position("one") is None
    store.save_position("one", Position("u", 1))
    for damaged in ("", "[]", '{"position": 7}', '{"other": null}'):
        (tmp_path / FOLDER / "subscriber-one.json").write_text(damaged)
        with raising(SubscriberDamaged, "--restart", subject="one"):
            store.load_position("one")


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a" * 65, "line\nbreak"])
def test_a_name_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with raising(ConfigurationError, reason="subscriber_name", subject=name):
        SubscriberStore(tmp_path).save_position(name, None)


def acknowledgement(sequence: int, subscriber: str = "a") -> Acknowledgement:
    return Acknowledgement(alert_id(1), sequence, subscriber, FIRST_TIME, 'said "ü"')


@pytest.mark.parametrize("name", ["DOMAIN\\user", "müller", "first last"])
def test_any_login_name_acknowledges(tmp_path: Path, name: str) -> None:
    store = SubscriberStore(tmp_path)
    store.add_acknowledgement(acknowledgement(0, name))
    assert [one.subscriber for one in store.load_acknowledgements()] == [name]


@pytest.mark.parametrize("name", ["", " ", "line\nbreak", "\ud800"])
def test_a_name_that_cannot_be_printed_does_not_acknowledge(tmp_path: Path, name: str) -> None:
    with raising(ConfigurationError, reason="subscriber_name", subject=name):
        SubscriberStore(tmp_path).add_acknowledgement(acknowledgement(0, name))


def test_a_line_that_a_dying_process_left_is_no_acknowledgement(tmp_path: Path) -> None:
    store = SubscriberStore(tmp_path)
    assert store.load_acknowledgements() == []
    store.add_acknowledgement(acknowledgement(0))
    path = tmp_path / FOLDER / "acknowledgements.jsonl"
    whole = path.read_bytes()
    for length in range(1, len(whole) - 1):
        path.write_bytes(whole + whole[:length])
        store.add_acknowledgement(acknowledgement(1))
        assert store.load_acknowledgements() == [acknowledgement(0), acknowledgement(1)]
    path.write_bytes(whole + b'{"alert_id": 1}\n')
    with raising(SubscriberDamaged):
        store.load_acknowledgements()
    damages: list[tuple[str, Any]] = [
        ("alert_id", ["a"]),
        ("sequence", "1"),
        ("subscriber", None),
        ("note", 3),
    ]
    for name, value in (*damages, ("acknowledged_at", "2026-08-11T12:00:00")):
        path.write_bytes(whole + json.dumps({**json.loads(whole), name: value}).encode())
        with raising(SubscriberDamaged):
            store.load_acknowledgements()


def test_the_highest_version_that_a_subscriber_acknowledged_counts() -> None:
    given = [acknowledgement(1), acknowledgement(0), acknowledgement(0, "b"), acknowledgement(0, "b")]
    assert latest_acknowledgements(given) == {alert_id(1): [acknowledgement(1), acknowledgement(0, "b")]}


def test_the_tests_have_the_columns_of_the_pipeline() -> None:
    assert set(SCHEMA) == set(ALERT_COLUMNS)
    assert ".".join(CONJUNCTION_ALERTS.path) == ALERT_TABLE
    assert set(IDENTITY) < set(ALERT_COLUMNS)


def test_rows_on_both_sides_of_a_change_were_not_added() -> None:
    schema = {**SCHEMA, "reported_at": TIME}
    rows = [{**entry(number), "reported_at": FIRST_TIME} for number in range(3)]
    first, second, third = (pl.DataFrame([row], schema=schema) for row in rows)
    found = find_added_entries(pl.concat([second, third, first]), pl.concat([first, second]))
    assert (found.entries["alert_id"].to_list(), found.lost_count) == ([alert_id(2)], 0)
    assert find_added_entries(second, pl.concat([first, second])).lost_count == 1
    altered = first.with_columns(sat1_observation_ids=pl.lit(["o2"], pl.List(pl.String)))
    assert find_added_entries(altered, first).lost_count == 1
    # A column that the table got meanwhile: the earlier rows have null in it, or lack it.
    wider = first.with_columns(more=pl.lit(None, pl.String))
    assert find_added_entries(wider, first).lost_count == 0
