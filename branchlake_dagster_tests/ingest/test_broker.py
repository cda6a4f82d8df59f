"""What the embedded broker is started with, and who may use it."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from branchlake_dagster.cli.main import main
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest import embedded_kafka as broker
from branchlake_dagster.ingest.embedded_kafka import (
    BROKER_USER,
    BrokerLogin,
    EmbeddedKafka,
    cluster_at_address,
    configured_cluster,
    login_properties,
    new_cluster_id,
)
from branchlake_dagster.ingest.errors import KafkaRefused
from branchlake_dagster.ingest.kafka_cluster import KafkaCluster
from branchlake_dagster.ingest.kafka_topics import KafkaTopics
from branchlake_dagster.sda.commands.receive import kafka_options
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.suite.kafka import Broker
from branchlake_dagster_tests.suite.lakes import BROKER_JARS


def test_the_id_of_a_cluster_is_never_taken_for_an_option() -> None:
    """Kafka's command line refused it: "argument --cluster-id/-t: expected one argument"."""
    drawn = [uuid.UUID(bytes=bytes([first]) + bytes(15)) for first in (0xF8, 0xFB, 0xFC)]
    assert new_cluster_id(iter(drawn).__next__) == "_AAAAAAAAAAAAAAAAAAAAA"


# -- the login -----------------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_password_is_its_owners_alone_and_stays(tmp_path: Path) -> None:
    login = BrokerLogin(tmp_path)
    assert not login.exists
    password = login.create_password()
    assert BrokerLogin(tmp_path).create_password() == password
    assert {mode(path) for path in (tmp_path / "run").iterdir()} == {0o600}
    assert len({BrokerLogin(tmp_path / name).create_password() for name in "abc"}) == 3


def test_the_file_for_console_tools_says_what_java_clients_are_given(tmp_path: Path) -> None:
    login = BrokerLogin(tmp_path)
    login.create_password()
    lines = login.client_properties.read_text().splitlines()
    options = login.cluster("127.0.0.1:1").spark_options()
    del options["kafka.bootstrap.servers"]
    assert dict(line.split("=", 1) for line in lines) == {
        name.removeprefix("kafka."): value for name, value in options.items()
    }


def test_both_listeners_ask_for_the_password() -> None:
    properties = login_properties("secret")
    assert "PLAINTEXT" not in properties["listener.security.protocol.map"].replace("SASL_PLAINTEXT", "")
    for listener in ("local", "controller"):
        assert 'user_branchlake="secret"' in properties[f"listener.name.{listener}.plain.sasl.jaas.config"]


def test_a_broker_that_an_earlier_release_started_has_no_login(tmp_path: Path) -> None:
    assert BrokerLogin(tmp_path).cluster("127.0.0.1:1") == KafkaCluster("127.0.0.1:1")


def test_who_has_the_address_of_the_embedded_broker_need_not_know_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(state_dir=tmp_path)
    with pytest.raises(ConfigurationError):
        configured_cluster(settings)
    monkeypatch.setattr(EmbeddedKafka, "running", lambda _: "127.0.0.1:9")
    password = BrokerLogin(tmp_path).create_password()
    embedded = KafkaCluster("127.0.0.1:9", "SASL_PLAINTEXT", "PLAIN", BROKER_USER, password)
    assert configured_cluster(settings) == embedded
    for address in ("127.0.0.1:9", "localhost:9"):
        assert configured_cluster(Settings(state_dir=tmp_path, kafka_bootstrap=address)) == embedded
        assert cluster_at_address(settings, address) == embedded
    assert cluster_at_address(settings, "kafka.example.org:9") == KafkaCluster("kafka.example.org:9")
    assert password not in repr(embedded)
    own = Settings(
        state_dir=tmp_path,
        kafka_security="SASL_PLAINTEXT",
        kafka_sasl_mechanism="PLAIN",
        kafka_username="me",
        kafka_password="mine",
    )
    assert cluster_at_address(own, "127.0.0.1:9").username == "me"
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(tmp_path))
    assert kafka_options("127.0.0.1:9", None)["sasl.password"] == password
    monkeypatch.setenv("BRANCHLAKE_KAFKA_SECURITY", "SSL")
    assert kafka_options("kafka.example.org:9", None) == {
        "bootstrap.servers": "kafka.example.org:9",
        "security.protocol": "SSL",
    }


# -- a broker of its own -------------------------------------------------------------------------------


def properties_of_the_release_before(home: Path, port: int, controller: int, *_: object, **__: object) -> str:
    """Both listeners asked nobody who they are."""
    values = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(home / "log"),
        "offsets.topic.replication.factor": "1",
    }
    return "".join(f"{name}={value}\n" for name, value in values.items())


@pytest.fixture
def home(tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder whose broker was last started by a release without passwords, and has a topic."""
    if (state_dir / BROKER_JARS).is_dir():
        shutil.copytree(state_dir / BROKER_JARS, tmp_path / BROKER_JARS)
    kafka = EmbeddedKafka(Settings(state_dir=tmp_path))
    try:
        with monkeypatch.context() as before:
            before.setattr(broker, "_server_properties", properties_of_the_release_before)
            before.setattr(BrokerLogin, "create_password", lambda _: "")
            kafka.up()
        # It still runs after an upgrade.
        running = Broker(kafka.cluster())
        assert running.cluster.password is None
        assert all(answer_without_login(port) for port in ports(tmp_path))
        running.create("t.radar")
        running.send("t.radar", [b"before the upgrade"])
        kafka.down()
        yield tmp_path
    finally:
        kafka.down()


def ports(home: Path) -> list[int]:
    """Those of the clients' listener and of the controller."""
    properties = (home / "kafka" / "server.properties").read_text()
    (listeners,) = [line for line in properties.splitlines() if line.startswith("listeners=")]
    found = [int(place.rpartition(":")[2]) for place in listeners.split(",")]
    assert len(found) == 2
    return found


def answer_without_login(port: int) -> bytes:
    """What a listener answers to somebody who asks for a description of the cluster and has not logged in."""
    # DescribeCluster, version 0, correlation id, no client id, no tags; no operations, no tags.
    request = struct.pack(">hhih", 60, 0, 7, -1) + b"\x00" + b"\x00\x00"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stream:
        stream.sendall(struct.pack(">i", len(request)) + request)
        try:
            return stream.recv(1024)
        except ConnectionResetError:
            return b""


@pytest.mark.spark
def test_nobody_without_the_password_uses_a_broker_after_its_upgrade(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kafka = EmbeddedKafka(Settings(state_dir=home))
    cluster = kafka.cluster()
    password = cluster.password
    assert password
    # What was there before is there for its owner …
    (offsets,) = KafkaTopics(cluster).describe(["t.radar"]).values()
    assert [*offsets.ends.values()] == [1]
    # … and for nobody else.
    stranger = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    with pytest.raises(KafkaException):
        stranger.list_topics(timeout=2)
    wrong = KafkaCluster(cluster.bootstrap, cluster.security, cluster.mechanism, cluster.username, "wrong")
    with pytest.raises(KafkaRefused):
        KafkaTopics(wrong).describe(["t.radar"])
    assert [answer_without_login(port) for port in ports(home)] == [b"", b""]
    # The commands know the password by the state folder.
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(home))
    rates = [word for kind in ("radar=20", "optical=0", "isl=0") for word in ("--rate", kind)]
    options = [*rates, "--seconds", "1", "--objects", "100", "--json"]
    done = CliRunner().invoke(main, ["simulate", "--kafka", cluster.bootstrap, "--topics", "t.", *options])
    assert done.exit_code == 0, done.output
    sent = json.loads(done.stdout)["kinds"]["radar"]["sent"]
    (offsets,) = KafkaTopics(cluster).describe(["t.radar"]).values()
    assert sum(offsets.ends.values()) == 1 + sent
    # And it stands in no log, no command line, and no file that others can read.
    record = kafka.record
    assert record is not None
    assert password not in " ".join(psutil.Process(record.pid).cmdline())
    assert password not in kafka.log_path.read_text()
    assert password not in "".join(capfd.readouterr()) + done.output
    holding = [
        path
        for path in home.rglob("*")
        if path.is_file() and "log" not in path.parts and password.encode() in path.read_bytes()
    ]
    assert {path.name for path in holding} == {"kafka.password", "kafka.properties", "server.properties"}
    assert {mode(path) for path in holding} == {0o600}
