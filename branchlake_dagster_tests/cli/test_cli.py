"""The command line: what each command says, what it starts, and what a wrong setting looks like."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import dagster as dg
import duckdb
import pytest
import sqlalchemy.exc
from click.testing import CliRunner, Result
from dagster import DagsterInvariantViolationError

from branchlake_dagster.cli import backfill, main, reprocess
from branchlake_dagster.cli.main import _Commands
from branchlake_dagster.cli.output import write_arrow, write_csv, write_table
from branchlake_dagster.embedded import jars
from branchlake_dagster.embedded.process import ProcessRecord
from branchlake_dagster.errors import LakeNotRunning
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.embedded_kafka import EmbeddedKafka
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.query.connection import QueryResult
from branchlake_dagster.query.reference import LakeState
from branchlake_dagster.sda.commands.demo_run import BAD_SNAPSHOT, INGEST_JOBS, Plan, plan_for
from branchlake_dagster.sda.partitions import FIRST_WINDOW, windows
from branchlake_dagster.sda.sources import DEFAULT_SNAPSHOT
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import LakeProperty


@pytest.fixture(autouse=True)
def environment(tmp_path: Path) -> Iterator[None]:
    """A state folder and a Dagster home of the test's own; commands export both."""
    before = dict(os.environ)
    os.environ["BRANCHLAKE_STATE_DIR"] = str(tmp_path / "state")
    os.environ["DAGSTER_HOME"] = str(tmp_path / "dagster")
    (tmp_path / "dagster").mkdir()
    yield
    os.environ.clear()
    os.environ.update(before)


def call(*arguments: str, **settings: str) -> Result:
    environment = {f"BRANCHLAKE_{name.upper()}": value for name, value in settings.items()}
    return CliRunner().invoke(main, arguments, env=environment)


def test_every_command_is_described() -> None:
    told = call("--help").output
    for command in ("up", "down", "status", "fetch", "doctor", "reap", "demo", "bench"):
        assert f"\n  {command} " in told
        assert call(command, "--help").exit_code == 0


@pytest.mark.parametrize("name", ["conjunctions", "screen-ephemeris", "receive", "simulate"])
def test_the_commands_for_space_keep_their_earlier_names(name: str) -> None:
    assert f"\n  {name} " in call("sda", "--help").output
    assert f"\n  {name} " not in call("--help").output
    options = [call(*path, name, "--help").output.partition("\n")[2] for path in ((), ("sda",))]
    assert options[0] == options[1]


def test_a_size_that_the_benchmark_does_not_have_is_named() -> None:
    done = call("bench", "incremental", "--sizes", "small,huge")
    assert done.exit_code == 2
    assert [name for name in ("'huge'", "small", "medium", "large") if name not in done.output] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["receive", "--first-partition", "-1"],
        ["receive", "--buffer", "0"],
        ["receive", "--roll-s", "nan"],
        ["receive", "--radar", "127.0.0.1:9", "--landing", ""],
        ["receive", "--radar", "127.0.0.1:9", "--kafka", " "],
        ["receive", "--first-partition", "99999999999999"],
        ["simulate", "--start", "1900-01-01"],
        ["simulate", "--start", "9999-12-31T23:59:59"],
        ["simulate", "--landing", "", "--seconds", "1"],
        ["simulate", "--objects", "-1"],
        ["conjunctions", "--within", "nan"],
        ["conjunctions", "--within", "inf"],
        ["conjunctions", "--rows", "-1"],
        ["sql", "SELECT 1", "--rows", "-1"],
        ["maintain", "run", "--minutes", "nan"],
        ["reprocess", "orders", "--since", "yesterday"],
    ],
)
def test_numbers_and_times_that_mean_nothing_are_refused(arguments: list[str]) -> None:
    assert call(*arguments).exit_code == 2


@pytest.mark.parametrize(
    "time", ["2026-11-01", "2026-11-01T12:00", "2026-11-01T12:00:00Z", "2026-11-01T12:00+02:00"]
)
def test_reprocess_takes_the_times_of_other_commands(time: str) -> None:
    done = call("reprocess", "orders", "--from-raw", "--since", time)
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)  # an interval without an end


@pytest.mark.parametrize("name", ["", "sda..tracks", "sda.`tracks"])
def test_undrop_names_a_table_that_is_no_table_name(name: str) -> None:
    done = call("undrop", name)
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert repr(name) in done.output


def test_demo_help_lists_the_options() -> None:
    told = call("demo", "--help").output
    assert "--catalogue FILE" in told
    assert "--json" in told


def test_a_catalogue_file_that_does_not_exist_is_named() -> None:
    done = call("demo", "--catalogue", "absent.tle")
    assert done.exit_code == 2
    assert "'absent.tle'" in done.output


def test_status_with_the_servers_down_starts_nothing(tmp_path: Path) -> None:
    done = call("status", "--json")
    assert done.exit_code == 0, done.output
    down = {"running": False, "pid": None, "port": None}
    told = json.loads(done.stdout)
    assert told["servers"] == {"nessie": down, "spark": down}
    assert (told["main"], told["branches"], told["publications"]) == (None, [], [])
    assert not (tmp_path / "state").exists()
    assert "branchlake up" in call("status").output


def test_down_with_nothing_running() -> None:
    done = call("down")
    assert (done.exit_code, len(done.output.splitlines())) == (0, 1)


def test_status_names_a_broker_that_has_ended(tmp_path: Path) -> None:
    """It ended with `KeyError: 'kafka'` once the embedded broker had been started."""
    kafka = EmbeddedKafka(Settings(state_dir=tmp_path / "state"))
    kafka.record_path.parent.mkdir(parents=True)
    ProcessRecord("kafka", pid=2**22 + 1, started_s=0.0, port=9092).save(kafka.record_path)
    done = call("status", "--json")
    assert json.loads(done.stdout)["servers"]["kafka"] == {"running": False, "pid": None, "port": None}
    for_people = call("status")
    assert for_people.exit_code == 0, for_people.exception
    assert "Kafka" in for_people.output


def test_status_lists_branches_with_run_state_and_age(lakehouse: Lakehouse, namespace: str) -> None:
    nessie = lakehouse.nessie
    run_id = str(uuid.uuid4())
    branch = nessie.create_branch(f"run-{run_id}", from_ref="main", from_hash=nessie.reference("main").hash)
    try:
        maker = {f"commit.property.{LakeProperty.INSTANCE}": "another"}
        lakehouse.catalog(branch.name, properties=maker).create_namespace(namespace)
        done = call("status", "--json", state_dir=str(lakehouse.settings.state_dir))
        for_people = call("status", state_dir=str(lakehouse.settings.state_dir))
    finally:
        nessie.delete_branch(branch.name, expected_hash=nessie.reference(branch.name).hash)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["servers"]["nessie"]["running"]
    assert told["main"]
    (row,) = [row for row in told["branches"] if row["branch"] == branch.name]
    assert row["age_s"] >= 0
    assert (row["run_id"], row["state"], row["commits"]) == (run_id, "unknown", 1)
    assert row["instances"] == ["another"]
    assert for_people.exit_code == 0, for_people.output
    assert "Warehouse" in for_people.output


@pytest.mark.parametrize(
    ("setting", "value", "told"),
    [
        ("nessie_port", "seven", "BRANCHLAKE_NESSIE_PORT"),
        ("nessie_port", "70000", "BRANCHLAKE_NESSIE_PORT"),
        ("session_kind", "remote", "BRANCHLAKE_SESSION_KIND"),
        ("reap_interval_min", "7", "BRANCHLAKE_REAP_INTERVAL_MIN"),
        ("default_namespace", "a-b", "BRANCHLAKE_DEFAULT_NAMESPACE"),
    ],
)
def test_a_wrong_setting_is_one_sentence(setting: str, value: str, told: str) -> None:
    done = call("status", **{setting: value})
    assert done.exit_code == 1
    assert done.output.startswith(f"Error: A setting is invalid: {told}: ")
    assert "Traceback" not in done.output
    assert len(done.output.splitlines()) == 1


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jars.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    done = call("fetch")
    assert done.exit_code == 1
    assert "0 MiB" in done.output

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jars, "_require_free_space", full)
    done = call("fetch")
    assert done.exit_code == 1
    assert "[Errno 28]" in done.output


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file or directory", "missing/prices.csv"),
        PermissionError(13, "Permission denied", "/read-only"),
        ConnectionResetError("reset by peer"),
        DagsterInvariantViolationError("The first line.\nThe second line."),
        sqlalchemy.exc.OperationalError("SELECT 1", {}, RuntimeError("no answer")),
        sqlalchemy.exc.ArgumentError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_the_system_or_of_dagster_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(jars, "_require_free_space", fail)
    done = call("fetch")
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    (line,) = done.output.splitlines()
    assert line.startswith("Error: ")
    if isinstance(error, OSError) and error.filename:
        assert error.filename in line


def write_rows(kind: str) -> None:
    connection = duckdb.connect()
    relation = connection.sql("SELECT 'bolt' AS item FROM range(20000)")
    with QueryResult(relation, connection, LakeState("main", "main")) as result:
        if kind == "table":
            write_table(result, 0, None)
        else:
            (write_csv if kind == "csv" else write_arrow)(result, None)


@pytest.mark.parametrize("kind", ["table", "csv", "arrow", "echo"])
def test_a_command_whose_reader_has_ended_ends_like_a_unix_tool(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    @click.group(cls=_Commands, sources={})
    def commands() -> None:
        pass

    @commands.command()
    def show() -> None:
        if kind == "echo":
            click.echo("bolt")
        else:
            write_rows(kind)

    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as closed_pipe:
        monkeypatch.setattr(sys, "stdout", closed_pipe)
        with pytest.raises(SystemExit) as ended:
            commands.main(["show"])
        monkeypatch.undo()
    assert ended.value.code == 128 + signal.SIGPIPE
    assert "Error" not in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_help_whose_reader_has_ended_ends_like_a_unix_tool(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as closed_pipe:
        monkeypatch.setattr(sys, "stdout", closed_pipe)
        with pytest.raises(SystemExit) as ended:
            main.main([option])
        monkeypatch.undo()
    assert ended.value.code == 128 + signal.SIGPIPE
    assert not capsys.readouterr().err


def test_rows_that_only_the_end_of_the_process_would_write_are_written_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @click.group(cls=_Commands, sources={})
    def commands() -> None:
        pass

    @commands.command()
    def show() -> None:
        sys.stdout.write("bolt\n")
        sys.exit(0)

    with Path("/dev/full").open("w", encoding="utf-8") as full_disk:
        monkeypatch.setattr(sys, "stdout", full_disk)
        with pytest.raises(SystemExit) as ended:
            commands.main(["show"])
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full_disk.fileno())
    assert ended.value.code == 1


def test_a_broken_connection_is_not_taken_for_a_closed_output(capsys: pytest.CaptureFixture[str]) -> None:
    @click.group(cls=_Commands, sources={})
    def commands() -> None:
        pass

    @commands.command()
    def send() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(SystemExit) as ended:
        commands.main(["send"])
    assert ended.value.code == 1
    assert capsys.readouterr().err


# -- the demo's plan -----------------------------------------------------------------------------------


def valid(plan: Plan, snapshots: list[str]) -> bool:
    if plan.job == "catalogue_job":
        return plan.partition in snapshots
    if plan.job in (*INGEST_JOBS, "alerts_job"):
        return plan.partition is None
    return plan.job in ("observations_job", "tracks_job", "window_job") and windows.has_partition_key(
        plan.partition
    )


@pytest.mark.parametrize(
    ("snapshots", "window"),
    [
        ([DEFAULT_SNAPSHOT], None),
        (["active-20260808T0220Z", "active-20260808T0713Z"], "2026-08-08-07:00"),
        (["active-20260808T0713Z", "active-20260808T0220Z"], "2026-08-08-07:00"),
        (["without-a-time"], FIRST_WINDOW),
    ],
)
def test_the_plan_ingests_then_observes_then_fuses(snapshots: list[str], window: str | None) -> None:
    rounds = plan_for(snapshots)
    assert [len(plans) for plans in rounds] == [*[1] * (len(snapshots) + 1), 1 + len(INGEST_JOBS), 2, 1, 1]
    plans = [plan for plans in rounds for plan in plans]
    assert [plan.partition for plan in plans if plan.blocked] == [BAD_SNAPSHOT]
    assert [plan.job for plan in plans] == [
        *["catalogue_job"] * (len(snapshots) + 1),
        "window_job",
        *INGEST_JOBS,
        "alerts_job",
        "observations_job",
        "tracks_job",
        "alerts_job",
    ]
    assert all(valid(plan, [*snapshots, BAD_SNAPSHOT]) for plan in plans)
    hourly = [plan for plan in plans if plan.job in ("window_job", "observations_job", "tracks_job")]
    assert len({plan.partition for plan in hourly}) == 1
    if window is not None:
        assert hourly[0].partition == window


def test_a_closed_standard_stream_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `branchlake sql - <&-`, for example in a job of cron."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as ended:
        main.main(["--version"])
    assert ended.value.code == 0
    with sys.stdin as stdin, sys.stdout as stdout, sys.stderr:
        assert stdin.read() == ""
        assert not stdout.isatty()


def test_backfill_commands_start_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(state_dir=tmp_path / "state")
    location = SimpleNamespace(repository=dg.Definitions().get_repository_def())
    monkeypatch.setattr(
        backfill, "require_location", lambda _: (location, SimpleNamespace(settings=settings))
    )
    with pytest.raises(LakeNotRunning), backfill.open_location(None):
        pass
    assert not settings.state_dir.exists()


@pytest.mark.parametrize("options", [{}, {"from_raw": True}])
def test_reprocess_starts_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, bool]
) -> None:
    settings = Settings(state_dir=tmp_path / "state")
    tables = [IngestTable(key="shop/orders")]
    ingest = Ingest(name="shop", topics=["orders"], tables=tables, keep_value=True)
    monkeypatch.setattr(reprocess, "_find_ingestion", lambda *_: (SimpleNamespace(settings=settings), ingest))
    command = reprocess.reprocess.callback
    assert command is not None
    interval = {"since": datetime(2026, 1, 1, tzinfo=UTC), "until": datetime(2026, 1, 2, tzinfo=UTC)}
    arguments: dict[str, Any] = {"from_raw": False, "kinds": (), "table": None, **interval, **options}
    with pytest.raises(LakeNotRunning):
        command("shop", None, dry_run=False, as_json=False, **arguments)
    assert not settings.state_dir.exists()
