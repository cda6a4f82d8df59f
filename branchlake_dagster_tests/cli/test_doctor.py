"""What `branchlake doctor` finds: right, wrong with a remedy, not running; and that it leaves nothing."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner
from dagster import DagsterInstance, DagsterRun, DagsterRunStatus
from rich.console import Console

from branchlake_dagster.catalog.options import COMMIT_PROPERTY
from branchlake_dagster.cleanup.reaper_rules import OwnerState, Reaping, ReapingAction
from branchlake_dagster.cli import main
from branchlake_dagster.cli.doctor import show_examination
from branchlake_dagster.cli.doctor_examinations import Examination, find_ownerless_branches
from branchlake_dagster.embedded.process import ProcessRecord
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest import kafka_topics as topics
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.failure_detector import Liveness
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunLocation, RunState, build_opening_tags
from branchlake_dagster.stored_names import LakeProperty, RunTag
from branchlake_dagster_tests.conftest import LAKES
from branchlake_dagster_tests.suite.kafka import Broker, as_settings

State = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(autouse=True)
def environment(tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRANCHLAKE_STATE_DIR", str(tmp_path / "state"))
        patch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
        yield patch


def doctor(**settings: str) -> tuple[int, State]:
    environment = {f"BRANCHLAKE_{name.upper()}": value for name, value in settings.items()}
    done = CliRunner().invoke(main, ["doctor", "--json"], env=environment)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    told = json.loads(done.stdout)
    assert told["healthy"] == (done.exit_code == 0)
    return done.exit_code, {(one["place"], one["looked_at"]): one for one in told["findings"]}


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_embedded_servers_that_do_not_run_are_not_started(tmp_path: Path) -> None:
    code, found = doctor()
    assert code == 0
    assert found["Nessie", "embedded server"]["state"] == "off"
    assert "branchlake up" in found["Nessie", "embedded server"]["remedy"]
    assert found["Dagster", "home"]["state"] == "off"
    assert not (tmp_path / "state" / "run").exists()
    assert not (tmp_path / "dagster").exists()


@pytest.mark.long
def test_a_kafka_that_nobody_answers_for(closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "_TIMEOUT_S", 1.0)
    code, found = doctor(kafka_bootstrap=f"127.0.0.1:{closed_port}")
    assert code == 1
    assert found["Kafka", "brokers"]["state"] == "wrong"
    assert "did not answer for the list of topics" in found["Kafka", "brokers"]["told"]
    assert "BRANCHLAKE_KAFKA_BOOTSTRAP" in found["Kafka", "brokers"]["remedy"]


def test_a_kafka_that_answers(kafka: Broker) -> None:
    _, found = doctor(**as_settings(kafka.cluster))
    assert found["Kafka", "brokers"]["state"] == "right"
    assert "1 broker" in found["Kafka", "brokers"]["told"]


def test_an_embedded_broker_that_has_ended(tmp_path: Path) -> None:
    record = tmp_path / "state" / "run" / "kafka.json"
    record.parent.mkdir(parents=True)
    ProcessRecord("kafka", pid=2**22 + 1, started_s=0.0, port=9092).save(record)
    code, found = doctor()
    assert code == 0
    assert found["Kafka", "embedded broker"]["state"] == "off"


def test_an_embedded_broker_that_answers(kafka: Broker, pytestconfig: pytest.Config) -> None:
    shared = pytestconfig.stash[LAKES].shared
    _, found = doctor(state_dir=str(shared))
    assert found["Kafka", "embedded broker"]["state"] == "right"
    assert kafka.cluster.bootstrap in found["Kafka", "embedded broker"]["told"]


def test_a_nessie_that_nobody_answers_for(closed_port: int) -> None:
    code, found = doctor(nessie_uri=f"http://127.0.0.1:{closed_port}/api/v2")
    assert code == 1
    assert found["Nessie", "address"]["state"] == "wrong"
    assert "BRANCHLAKE_NESSIE_URI" in found["Nessie", "address"]["remedy"]
    assert ("Nessie", "create a branch") not in found


def test_an_address_that_is_no_nessie_api(closed_port: int) -> None:
    _, found = doctor(nessie_uri=f"http://user:secret@127.0.0.1:{closed_port}/api/v2")
    assert found["Nessie", "address"]["state"] == "wrong"
    assert "secret" not in json.dumps(list(found.values()))


def test_a_warehouse_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    code, found = doctor(warehouse=f"file://{tmp_path}/file/warehouse")
    assert code == 1
    wrong = [one for (place, _), one in found.items() if place == "Warehouse" and one["state"] == "wrong"]
    assert "BRANCHLAKE_WAREHOUSE" in wrong[0]["remedy"]


@pytest.mark.long
def test_a_store_that_nobody_answers_for(closed_port: int) -> None:
    _, found = doctor(
        warehouse="s3://lake/warehouse",
        s3_endpoint=f"http://127.0.0.1:{closed_port}",
        s3_access_key_id="x",
        s3_secret_access_key="hidden-key",
    )
    assert found["Warehouse", "list"]["state"] == "wrong"
    assert "hidden-key" not in json.dumps(list(found.values()))


@pytest.mark.long
def test_a_dagster_home_whose_database_does_not_answer(
    tmp_path: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Dagster asks six times and sleeps for 11 s in between.
    monkeypatch.setattr("dagster_postgres.utils.time", SimpleNamespace(sleep=lambda _: None))
    home = tmp_path / "dagster"
    home.mkdir()
    url = f"postgresql://dagster:hidden@127.0.0.1:{closed_port}/dagster"
    (home / "dagster.yaml").write_text(f"storage: {{postgres: {{postgres_url: '{url}'}}}}\n")
    code, found = doctor()
    assert code == 1
    assert found["Dagster", "storage"]["state"] == "wrong"
    assert "dagster.yaml" in found["Dagster", "storage"]["remedy"]
    assert "hidden" not in json.dumps(list(found.values()))


def test_a_publication_that_main_does_not_hold(lakehouse: Lakehouse, tmp_path: Path) -> None:
    home = tmp_path / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    state = {"state_dir": str(lakehouse.settings.state_dir)}
    assert doctor(**state)[1]["Dagster", "newest publication"]["state"] == "right"
    run_id = str(uuid4())
    tags = build_opening_tags(
        run_id, RunLocation(run_branch_name(run_id), lakehouse.nessie.reference("main").hash), {}
    )
    lost = {
        RunTag.STATUS: str(RunState.PUBLISHED),
        RunTag.PUBLICATION: "0" * 64,
        RunTag.LAKE: lakehouse.settings.lake_id,
    }
    with DagsterInstance.from_config(str(home)) as instance:
        instance.add_run(
            DagsterRun("j", run_id=run_id, status=DagsterRunStatus.SUCCESS, tags={**tags, **lost})
        )
    code, found = doctor(**state)
    assert (code, found["Dagster", "newest publication"]["state"]) == (1, "wrong")
    assert run_id in found["Dagster", "newest publication"]["told"]


def test_branches_of_an_instance_that_no_longer_exists(
    lakehouse: Lakehouse, namespace: str, tmp_path: Path
) -> None:
    home = tmp_path / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    state = {"state_dir": str(lakehouse.settings.state_dir)}
    nessie, looked = lakehouse.nessie, ("Dagster", "branches of other instances")
    branch = run_branch_name(str(uuid4()))
    nessie.create_branch(branch, from_ref="main", from_hash=nessie.reference("main").hash)
    # Of many instances the first by name are listed, and other tests leave branches of theirs behind.
    made_by = {f"{COMMIT_PROPERTY}{LakeProperty.INSTANCE}": f"0-{namespace}"}
    lakehouse.catalog(branch, properties=made_by).create_namespace(f"{namespace}_left")
    try:
        code, found = doctor(**state, orphan_grace_min="0.0001")
        assert (code, found[looked]["state"]) == (0, "off")
        assert f"0-{namespace}" in found[looked]["told"]
        assert "branchlake reap --branch" in found[looked]["remedy"]
        young = doctor(**state)[1][looked]
        assert f"0-{namespace}" not in young["told"]
    finally:
        nessie.delete_branch(branch, expected_hash=nessie.reference(branch).hash)


@pytest.mark.parametrize(
    ("state", "heartbeat", "age", "is_listed"),
    [
        (OwnerState.MISSING, "none", timedelta(hours=2), True),
        (OwnerState.MISSING, "dead", None, True),
        (OwnerState.MISSING, "none", timedelta(minutes=5), False),
        (OwnerState.MISSING, Liveness.SUSPECT, timedelta(hours=2), True),
        (OwnerState.MISSING, f"{Liveness.ALIVE}, {Liveness.DEAD}", timedelta(hours=2), False),
        (OwnerState.ACTIVE, "none", timedelta(hours=2), False),
    ],
)
def test_only_branches_that_nobody_works_on_are_listed(
    state: OwnerState, heartbeat: str, age: timedelta | None, is_listed: bool
) -> None:
    one = Reaping("run-1", "1", ReapingAction.KEEP, "", state, age, heartbeat)
    assert find_ownerless_branches([one], timedelta(hours=1)) == ([one] if is_listed else [])


DAMAGED_FILES = {
    "syntax": b"{{{ not yaml: [",
    "bytes": b"\xff\xfe\x00bin",
    "list": b"- a list",
    "class": b"run_storage: {module: nowhere, class: Storage, config: {}}",
    "folder": None,
}


def damage_home(home: Path, kind: str) -> None:
    """Create Dagster's home with a damaged `dagster.yaml`."""
    home.mkdir()
    config, content = home / "dagster.yaml", DAMAGED_FILES[kind]
    config.mkdir() if content is None else config.write_bytes(content)


@pytest.mark.parametrize("kind", DAMAGED_FILES)
def test_a_damaged_dagster_yaml_is_a_finding(tmp_path: Path, kind: str) -> None:
    damage_home(tmp_path / "dagster", kind)
    code, found = doctor()
    assert code == 1
    assert found["Dagster", "storage"]["state"] == "wrong"
    assert "dagster.yaml" in found["Dagster", "storage"]["remedy"]


def test_a_file_in_place_of_dagsters_home_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "dagster").touch()
    code, found = doctor()
    assert (code, found["Dagster", "home"]["state"]) == (1, "wrong")


@pytest.mark.parametrize("kind", DAMAGED_FILES)
def test_servers_can_be_stopped_whatever_dagsters_home_is(tmp_path: Path, kind: str) -> None:
    damage_home(tmp_path / "dagster", kind)
    result = CliRunner().invoke(main, ["down"])
    assert result.exit_code == 0, result.output
    assert result.stderr


def test_postgres_without_its_extra(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    import sys

    home = tmp_path / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text("storage: {postgres: {postgres_url: 'postgresql://x@y/z'}}\n")
    environment.setitem(sys.modules, "dagster_postgres", None)
    _, found = doctor()
    assert "[postgres]" in found["Dagster", "storage"]["remedy"]


def test_a_bug_of_ours_is_not_called_a_finding() -> None:
    def broken() -> str:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        Examination().run_check("here", "this", broken, remedy="none")


def test_secrets_are_taken_out_of_what_the_places_say() -> None:
    found = Examination(("s3cret",))

    def echo() -> str:
        raise ConfigurationError("They said: s3cret\nand more")

    assert not found.run_check("here", "this", echo, remedy="Do that.")
    (finding,) = found.findings
    assert (finding.result, finding.remedy) == ("They said: ***", "Do that.")


@pytest.mark.spark
def test_a_whole_lake_is_right_and_left_as_it_was(
    lakehouse: Lakehouse, environment: pytest.MonkeyPatch
) -> None:
    lakehouse.endpoints()
    environment.setenv("BRANCHLAKE_STATE_DIR", str(lakehouse.settings.state_dir))
    before = lakehouse.nessie.reference("main").hash
    code, found = doctor()
    assert code == 0, found
    wanted = {
        ("Nessie", "create a branch"),
        ("Nessie", "commit"),
        ("Nessie", "delete a branch"),
        ("Warehouse", "list"),
        ("Warehouse", "write and read"),
        ("Warehouse", "delete"),
        ("Spark", "version"),
        ("Spark", "extensions"),
        ("Spark", "Avro's limits"),
        ("Spark", "write a table"),
    }
    assert {key for key, one in found.items() if one["state"] == "right"} >= wanted
    assert lakehouse.nessie.reference("main").hash == before
    assert not [ref.name for ref in lakehouse.nessie.references() if ref.name.startswith("doctor-")]
    warehouse = Path(lakehouse.settings.warehouse_uri.removeprefix("file://"))
    assert not [*(warehouse / "_branchlake" / "doctor").glob("*")]


def test_a_port_that_is_no_spark(nessie_uri: str) -> None:
    # Nessie answers there: HTTP, and no Spark Connect.
    port = nessie_uri.split(":")[2].split("/")[0]
    code, found = doctor(nessie_uri=nessie_uri, spark_remote=f"sc://localhost:{port}/;session_id=x")
    assert code == 1
    assert found["Spark", "address"]["state"] == "wrong" or found["Spark", "version"]["state"] == "wrong"


@pytest.mark.parametrize("width", [20, 69, 70, 200])
def test_findings_are_whole_at_every_width(width: int) -> None:
    examination = Examination()
    examination.add_finding("Dagster", "branches of other instances", "right", "a" * 150)
    output = io.StringIO()
    show_examination(examination, Console(file=output, width=width))
    shown = output.getvalue()
    assert shown.count("a") >= 150
    assert "right" in shown
    assert "branches of other instances" in shown


def test_people_see_a_table_with_what_to_do(nessie_uri: str, closed_port: int) -> None:
    done = CliRunner().invoke(
        main,
        ["doctor"],
        env={
            "BRANCHLAKE_NESSIE_URI": nessie_uri,
            "BRANCHLAKE_SPARK_REMOTE": f"sc://localhost:{closed_port}",
            "COLUMNS": "120",
        },
    )
    assert done.exit_code == 1
    assert f"sc://localhost:{closed_port}" in done.stdout
    assert "BRANCHLAKE_SPARK_REMOTE" in done.stdout
