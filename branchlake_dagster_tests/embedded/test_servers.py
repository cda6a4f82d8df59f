"""The embedded servers: what can go wrong before one starts, and what a stop, clean or not, leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from branchlake_dagster.embedded import java, process
from branchlake_dagster.embedded.jars import (
    ICEBERG_AWS,
    ICEBERG_SPARK,
    NESSIE_SERVER,
    DownloadFailed,
    Jar,
    copy_jars,
    ivy_module,
    resolve_jars,
)
from branchlake_dagster.embedded.process import (
    LOOPBACK,
    ProcessRecord,
    ServerDidNotStart,
    choose_port,
    find_start_s,
    keep_port,
)
from branchlake_dagster.embedded.servers import NESSIE, SPARK, EmbeddedServers, Endpoints
from branchlake_dagster.errors import ConfigurationError, Transient
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.suite.lakes import copy_jar_lists
from branchlake_dagster_tests.suite.raised import raising

# -- other accounts of the machine ---------------------------------------------------------------------


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_state_folder_is_its_owners_alone(tmp_path: Path) -> None:
    root = tmp_path / "new" / "state"
    umask = os.umask(0)
    try:
        servers = EmbeddedServers(Settings(state_dir=root))
        servers.stop_all()
        token = servers._load_spark_token()
        sleep = shutil.which("sleep")
        assert sleep
        log = servers.log_path("x")
        process.stop_process(process.launch_server("x", [sleep, "9"], log=log, environment={}, port=1))
    finally:
        os.umask(umask)
    assert token == (root / "run" / "spark.token").read_text()
    assert {mode(folder) for folder in (root, root / "run", root / "logs")} == {0o700}
    assert mode(root / "run" / "spark.token") == 0o600


def test_what_an_older_version_left_open_is_closed_but_for_the_folder_itself(tmp_path: Path) -> None:
    """Somebody may have given the folder to a group on purpose."""
    run = tmp_path / "run"
    run.mkdir(mode=0o755)
    tmp_path.chmod(0o750)
    EmbeddedServers(Settings(state_dir=tmp_path)).stop_all()
    assert (mode(tmp_path), mode(run)) == (0o750, 0o700)


# -- Java ----------------------------------------------------------------------------------------------

OPENJDK_17 = 'openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment (build 17.0.15+6-Debian-1)\n'
NOISY_21 = 'Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "21" 2023-09-19 LTS\n'
ORACLE_8 = 'java version "1.8.0_202"\nJava(TM) SE Runtime Environment (build 1.8.0_202-b08)\n'
TOO_NEW_25 = 'openjdk version "25" 2025-09-16\n'
JAVA_11 = 'openjdk version "11.0.22" 2024-01-16\n'


@pytest.mark.parametrize(("text", "major"), [(OPENJDK_17, 17), (NOISY_21, 21)])
def test_a_java_that_will_do(text: str, major: int) -> None:
    assert java.require_java_version(Path("/usr/bin/java"), text, java.SPARK_RUNS_ON) == major


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (ORACLE_8, "/usr/bin/java is Java 8, but Java 17 to 24 is required."),
        (TOO_NEW_25, "/usr/bin/java is Java 25, but Java 17 to 24 is required."),
        (JAVA_11, "/usr/bin/java is Java 11, but Java 17 to 24 is required."),
        ("command not understood", "/usr/bin/java is Java of an unknown version,"),
        ("", "/usr/bin/java is Java of an unknown version,"),
    ],
)
def test_a_java_too_old_or_too_new_is_one_sentence_that_says_what_to_do(text: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        java.require_java_version(Path("/usr/bin/java"), text, java.SPARK_RUNS_ON)
    assert str(caught.value).startswith(told)
    assert "JAVA_HOME" in str(caught.value)


def test_no_java_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with raising(ConfigurationError, "17", "24", "JAVA_HOME", reason="java_missing", subject=None):
        java.user_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    with raising(ConfigurationError, reason="java_missing", subject=str(tmp_path / "gone")):
        java.user_java()


def fake_java(folder: Path, version: str) -> Path:
    binary = folder / "bin" / "java"
    binary.parent.mkdir(parents=True)
    binary.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    binary.chmod(0o755)
    return binary


def test_the_users_java_is_java_home_before_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(fake_java(tmp_path / "path", "17.0.1").parent))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    wanted = fake_java(tmp_path / "home", "21.0.2")
    assert java.user_java() == wanted
    shutil.rmtree(tmp_path / "home")
    fake_java(tmp_path / "home", "11.0.2")
    with raising(ConfigurationError, 11, reason="java_version"):
        java.user_java()


def test_nessies_java_needs_nothing_of_the_users() -> None:
    text = java.read_java_version(java.bundled_java())
    assert java.require_java_version(java.bundled_java(), text, java.NESSIE_RUNS_ON) >= 21


# -- jars ----------------------------------------------------------------------------------------------


def test_the_ivy_module_asks_for_exactly_the_jars() -> None:
    root = ET.fromstring(ivy_module([ICEBERG_SPARK, NESSIE_SERVER]))
    found = {
        (d.get("org"), d.get("name"), d.get("rev"), d.get("conf")) for d in root.findall("dependencies/*")
    }
    assert found == {
        (jar.org, jar.name, jar.rev, "default->master") for jar in (ICEBERG_SPARK, NESSIE_SERVER)
    }
    classifiers = [a.get("{http://ant.apache.org/ivy/maven}classifier") for a in root.iter("artifact")]
    assert classifiers == [None, "runner"]


def test_a_download_that_is_blocked_says_where_to_name_a_mirror(tmp_path: Path) -> None:
    settings = tmp_path / "ivysettings.xml"
    settings.write_text(
        f"""<ivysettings>
          <caches defaultCacheDir="{tmp_path}/cache"/>
          <settings defaultResolver="dead"/>
          <resolvers><ibiblio name="dead" m2compatible="true" root="file://{tmp_path}/nowhere/"/></resolvers>
        </ivysettings>"""
    )
    told: list[str] = []
    with pytest.raises(DownloadFailed) as caught:
        resolve_jars([ICEBERG_SPARK], tmp_path / "jars", ivy_settings=settings, notify=told.append)
    text = str(caught.value)
    assert "iceberg-spark-runtime-4.1_2.13" in text
    assert "not found" in text
    assert "BRANCHLAKE_IVY_SETTINGS" in text
    assert isinstance(caught.value, Transient)
    assert "iceberg-spark-runtime-4.1_2.13 1.12.0" in told[0]


def test_a_settings_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with raising(DownloadFailed, "absent.xml"):
        resolve_jars([ICEBERG_SPARK], tmp_path, ivy_settings=tmp_path / "absent.xml", notify=lambda _: None)


def test_a_full_disk_is_reported_before_a_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20))
    with raising(ConfigurationError, "5 MiB", "1 GiB", reason="disk_full"):
        resolve_jars([ICEBERG_SPARK], tmp_path, ivy_settings=None, notify=lambda _: None)


def test_known_jars_cost_no_java_and_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    jar = Jar("org.example", "thing", "1.0")
    path = tmp_path / "org.example" / "thing" / "jars" / "thing-1.0.jar"
    path.parent.mkdir(parents=True)
    path.touch()
    (tmp_path / "jars.classpath").write_text(f"{path}{os.pathsep}/elsewhere/thing-2.0.jar\n")
    verified: list[Path] = []
    known = resolve_jars([jar], tmp_path, ivy_settings=None, notify=pytest.fail, verify=verified.extend)
    assert known == {jar: path}
    assert verified == [path]
    path.unlink()  # a cache that was emptied: brought again, not trusted
    with raising(ConfigurationError, reason="disk_full"):
        resolve_jars([jar], tmp_path, ivy_settings=None, notify=lambda _: None)


# -- processes -----------------------------------------------------------------------------------------


def test_a_port_in_use_is_reported_with_its_setting() -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        setting = "BRANCHLAKE_NESSIE_PORT"
        with raising(ConfigurationError, port, setting, reason="port_in_use", subject=setting):
            choose_port(port, setting=setting)
    assert choose_port(0, setting="x") > 0


def test_a_server_keeps_the_port_that_it_first_took(tmp_path: Path) -> None:
    stored = tmp_path / "nessie.port"
    port = keep_port(0, stored, setting="x")
    assert keep_port(0, stored, setting="x") == port
    with socket.socket() as taken:
        taken.bind((LOOPBACK, port))
        taken.listen()
        other = keep_port(0, stored, setting="x")
    assert other != port
    assert keep_port(0, stored, setting="x") == other
    assert keep_port(port, stored, setting="x") == port
    stored.write_text("no port")
    assert keep_port(0, stored, setting="x") > 0


def test_copied_jars_have_names_without_versions(tmp_path: Path) -> None:
    source = tmp_path / "iceberg-spark-runtime-4.1_2.13-1.12.0.jar"
    source.write_bytes(b"jar")
    jars = {ICEBERG_SPARK: source, NESSIE_SERVER: source, ICEBERG_AWS: source}
    names = [path.name for path in copy_jars(jars, tmp_path / "to" / "here")]
    assert names == ["iceberg-spark-runtime.jar", "nessie-quarkus.jar", "iceberg-aws-bundle.jar"]
    assert (tmp_path / "to" / "here" / names[0]).read_bytes() == b"jar"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        yield running
        running.kill()


def record_of(running: subprocess.Popen[bytes], *, off_s: float = 0.0) -> ProcessRecord:
    started = find_start_s(running.pid)
    assert started is not None
    return ProcessRecord("nessie", running.pid, started + off_s, 1)


def test_a_record_survives_the_file(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    record = record_of(sleeper)
    record.save(tmp_path / "nessie.json")
    assert ProcessRecord.load(tmp_path / "nessie.json") == record
    assert [path.name for path in tmp_path.iterdir()] == ["nessie.json"]
    assert record.is_alive()


def test_a_stale_pid_is_not_alive_and_a_zombie_neither(sleeper: subprocess.Popen[bytes]) -> None:
    record = record_of(sleeper)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # dead, not collected yet
    assert not record.is_alive()
    sleeper.wait()
    assert not record.is_alive()
    assert process.stop_process(record) is False


def test_a_reused_pid_is_neither_alive_nor_stopped(sleeper: subprocess.Popen[bytes]) -> None:
    record = record_of(sleeper, off_s=-1.0)
    assert not record.is_alive()
    assert process.stop_process(record) is False
    assert sleeper.poll() is None


def test_setting_the_clock_makes_no_server_a_stranger(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_of(sleeper)
    boot, created = psutil.boot_time(), psutil.Process(sleeper.pid).create_time()
    monkeypatch.setattr(psutil, "boot_time", lambda: boot + 3600)
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: created + 3600)
    assert record.is_alive()
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: created + 3601)
    assert not record.is_alive()


def test_stop_insists_when_asking_does_not_help(tmp_path: Path) -> None:
    deaf = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", deaf], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        running.stdout.readline()
        record = record_of(running)
        assert process.stop_process(record, grace_s=0.5)
        assert not record.is_alive()


def test_a_server_ends_by_sigterm_although_its_starter_ignores_it(tmp_path: Path) -> None:
    """As Dagster does in a process in the background, where a shell ignores Ctrl-C."""
    ends = (
        "trap 'exit 0' TERM; while :; do sleep 0.05; done"  # a shell cannot trap what it inherits as ignored
    )
    old_handlers = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        record = process.launch_server(
            "nessie", ["/bin/sh", "-c", ends], log=tmp_path / "logs" / "log", environment={}, port=1
        )
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
    status = Path(f"/proc/{record.pid}/status").read_text()
    (ignored,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    assert process.stop_process(record)
    assert int(ignored, 16) & (1 << signal.SIGTERM - 1 | 1 << signal.SIGINT - 1) == 0


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", '{"name": "nessie"}', json.dumps({"pid": 1, "what": "else"}), "\x00\x00", "null"),
        *(
            json.dumps({"name": "nessie", "pid": 1, "started_s": 1.0, "port": 1} | damage)
            for damage in (
                {"pid": "1"},
                {"pid": -1},
                {"pid": 0},
                {"pid": 10**23},
                {"pid": 1.5},
                {"pid": None},
                {"started_s": None},
                {"started_s": "1"},
                {"started_s": float("nan")},
                {"port": "abc"},
                {"port": -1},
                {"port": 70_000},
            )
        ),
    ],
)
def test_a_damaged_record_counts_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "nessie.json"
    path.write_text(content)
    assert ProcessRecord.load(path) is None


def test_no_record_is_none(tmp_path: Path) -> None:
    assert ProcessRecord.load(tmp_path / "nessie.json") is None


def test_a_server_that_ends_at_once_quotes_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "nessie.log"
    command = ["/bin/sh", "-c", "echo starting; sleep 2; echo 'ERROR the store is locked' >&2; exit 1"]
    record = process.launch_server("nessie", command, log=log, environment={}, port=1)
    with raising(ServerDidNotStart, "ERROR the store is locked", log, reason="ended", subject="nessie"):
        process.wait_until(lambda: False, record, log=log, timeout_s=60)


def test_a_server_that_never_answers_is_stopped(tmp_path: Path) -> None:
    log = tmp_path / "nessie.log"
    record = process.launch_server("nessie", ["/bin/sleep", "600"], log=log, environment={}, port=1)
    with raising(
        ServerDidNotStart, log, "BRANCHLAKE_STARTUP_TIMEOUT_S", reason="no_answer", subject="nessie"
    ):
        process.wait_until(lambda: False, record, log=log, timeout_s=0.1)
    assert not record.is_alive()


def test_endpoints_do_not_print_the_token() -> None:
    shown = Endpoints("http://127.0.0.1:1/api/v2", "sc://localhost:2", "s3cret")
    assert "s3cret" not in f"{shown} {shown!r} {[shown]}"


def test_remote_servers_leave_nothing_to_start(tmp_path: Path) -> None:
    settings = Settings(
        state_dir=tmp_path / "state",
        nessie_uri="http://nessie.example/api/v2",
        spark_remote="sc://spark:15002",
    )
    servers = EmbeddedServers(settings, notify=pytest.fail)
    assert servers.server_names() == ()
    assert servers.endpoints() == Endpoints("http://nessie.example/api/v2", "sc://spark:15002", None)
    assert not (tmp_path / "state").exists()
    assert EmbeddedServers(Settings(state_dir=tmp_path, session_kind="classic")).server_names() == (NESSIE,)
    assert EmbeddedServers(Settings(state_dir=tmp_path)).server_names() == (NESSIE, SPARK)


# -- a Nessie of their own -----------------------------------------------------------------------------

ENDPOINTS = """
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.settings import Settings
print(Lakehouse(Settings()).endpoints().nessie_uri)
"""


@pytest.fixture(scope="module")
def own_folder(state_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state folder for Nessie only, with its servers stopped afterwards."""
    folder = tmp_path_factory.mktemp("own")
    copy_jar_lists(state_dir, folder)
    yield folder
    EmbeddedServers(Settings(state_dir=folder)).stop_all()


@pytest.fixture
def own_lake(own_folder: Path) -> Callable[[], Lakehouse]:
    """Makes the lake as a new process would: nothing is remembered but the folder."""
    return lambda: Lakehouse(Settings(state_dir=own_folder, session_kind="classic"))


def launches(folder: Path) -> int:
    """How often a Nessie got as far as listening, by its log."""
    return (folder / "logs" / "nessie.log").read_text().count("Listening on:")


@pytest.mark.nessie
def test_two_processes_at_once_start_one_server(own_folder: Path) -> None:
    (own_folder / "run").mkdir()
    (own_folder / "run" / "nessie.json").write_text("{")  # an unclean stop long ago
    environment = {
        **os.environ,
        "BRANCHLAKE_STATE_DIR": str(own_folder),
        "BRANCHLAKE_SESSION_KIND": "classic",
    }

    def call(_: int) -> str:
        return subprocess.run(
            [sys.executable, "-c", ENDPOINTS], env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(call, range(2))
    assert one == other
    assert launches(own_folder) == 1
    assert not (own_folder / "spark").exists()


@pytest.mark.nessie
def test_data_survives_a_kill_and_a_down(own_folder: Path, own_lake: Callable[[], Lakehouse]) -> None:
    lake = own_lake()
    ensure_main_has_commit(lake.nessie)
    lake.catalog().create_namespace("survives")
    head, address = lake.nessie.reference("main").hash, lake.endpoints(spark=False).nessie_uri
    record = lake.servers.status()[NESSIE]
    assert record is not None
    assert lake.servers.status()[SPARK] is None

    os.kill(record.pid, signal.SIGKILL)
    while record.is_alive():
        process._reap_child(record.pid)
    assert own_lake().servers.status()[NESSIE] is None
    # The very object that knew the dead server, and one that never saw it.
    assert lake.nessie.reference("main").hash == head
    assert ("survives",) in own_lake().catalog().list_namespaces()
    revived = own_lake().servers.status()[NESSIE]
    assert revived is not None
    assert revived.pid != record.pid
    unpacked = list((own_folder / "tmp" / NESSIE).glob("librocksdb*.so"))
    assert len(unpacked) == 1, "the killed one's is gone"

    assert lake.servers.stop_all() == (NESSIE,)
    assert lake.servers.stop_all() == ()
    assert not revived.is_alive()
    assert own_lake().nessie.reference("main").hash == head
    assert own_lake().endpoints(spark=False).nessie_uri == address


@pytest.mark.spark
def test_the_internal_ports_of_the_embedded_spark_ask_for_a_secret(lakehouse: Lakehouse) -> None:
    session = lakehouse.spark_session()
    try:
        assert session.conf.get("spark.authenticate") == "true"
        assert session.range(3, numPartitions=2).count() == 3
    finally:
        session.stop()
