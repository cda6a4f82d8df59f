"""Each way to be reached, by the settings alone: topics, batches, the consumer group, receivers, Dagster."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner
from confluent_kafka import ConsumerGroupTopicPartitions
from confluent_kafka.admin import AclOperation, AdminClient, ResourceType

from branchlake_dagster.cli import main
from branchlake_dagster.errors import BranchlakeError, ConfigurationError
from branchlake_dagster.ingest import kafka_topics as topics
from branchlake_dagster.ingest.batch_report import to_utc_datetime
from branchlake_dagster.ingest.embedded_kafka import configured_cluster
from branchlake_dagster.ingest.errors import KafkaRefused, KafkaUnavailable
from branchlake_dagster.ingest.kafka_topics import KafkaTopics
from branchlake_dagster.ingest.record_frames import KafkaRecords
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.receivers import kafka_sink as sinks
from branchlake_dagster.receivers.kafka_sink import BrokerRefused, BrokerUnreachable, KafkaSink
from branchlake_dagster.receivers.metrics import TopicCounts, scrape_monitors, sum_by_topic
from branchlake_dagster.receivers.records import ReceiverOrigin, Record
from branchlake_dagster.settings import Settings
from branchlake_dagster.waiting import holds_within
from branchlake_dagster_tests.cli.test_receive import ANYWHERE, framed, receiving
from branchlake_dagster_tests.ingest.driving import Driver
from branchlake_dagster_tests.ingest.secured.authority import Authority
from branchlake_dagster_tests.ingest.secured.broker import PASSWORD, READER, SECRET, SecuredBroker
from branchlake_dagster_tests.ingest.secured.conftest import Configure
from branchlake_dagster_tests.ingest.secured.project import Project, one_table, value
from branchlake_dagster_tests.suite.instances import new_instance
from branchlake_dagster_tests.suite.kafka import Broker
from branchlake_dagster_tests.suite.raised import raising

pytestmark = pytest.mark.spark

SCRAM = "SCRAM-SHA-512"
NOWHERE = "nowhere.invalid:9093"


@pytest.mark.parametrize(
    ("security", "mechanism"),
    [
        ("SASL_SSL", SCRAM),
        pytest.param("SASL_SSL", "PLAIN", marks=pytest.mark.soak),
        pytest.param("SASL_PLAINTEXT", "SCRAM-SHA-256", marks=pytest.mark.soak),
        # `test_a_client_is_known_by_its_certificate` reads by TLS alone too.
        pytest.param("SSL", None, marks=pytest.mark.soak),
    ],
)
def test_records_go_from_a_receiver_into_a_table(
    security: str,
    mechanism: str | None,
    configure: Configure,
    lakehouse: Lakehouse,
    spark_session: Any,
) -> None:
    kafka = Broker(configured_cluster(configure(security, mechanism)))
    topic = kafka.topic(partitions=2)
    sink = KafkaSink(topic, 1, ReceiverOrigin("r1", "http"), kafka.cluster.client_options())
    sink.open(resume=True)
    # Retention would take older ones.
    at = time.time_ns()
    sink.write([Record(value(number), None, at, b"h:1", b"%d" % number) for number in range(3)])
    # It reads the end of the partition as a consumer.
    assert sink.open(resume=True).cursor == b"2"
    sink.close()
    drive = Driver(lakehouse, kafka, spark_session, one_table(topic))
    result = drive.batch()
    assert [row["id"] for row in drive.rows(0, "id")] == [0, 1, 2]
    offsets = result.progress.offsets
    (first,) = [one for one in offsets if one.partition == 1]
    assert drive.topics.earliest_time({first: 0}) == to_utc_datetime(at // 1_000_000)
    drive.topics.report_offsets(drive.ingest.group, offsets)
    admin = AdminClient(kafka.cluster.client_options())  # its answers end with it
    asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(drive.ingest.group)])
    told = asked[drive.ingest.group].result(60).topic_partitions
    assert {(one.topic, one.partition): one.offset for one in told} == {
        (one.topic, one.partition): offset for one, offset in offsets.items()
    }


def test_no_run_and_no_server_shows_the_password(
    configure: Configure,
    secured: SecuredBroker,
    lakehouse: Lakehouse,
    spark_session: Any,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kafka = Broker(configured_cluster(configure("SASL_SSL", SCRAM)))
    topic = kafka.topic()
    kafka.send(topic, [value(1)])
    with new_instance() as instance:
        project = Project(lakehouse, topic, instance)
        (observed,) = project.tick("live_sensor").asset_events
        assert observed.metadata["branchlake/lag"].value == 1
        good = project.run("live")
        assert good.success
        told = project.told(good)
        configure("SASL_SSL", SCRAM, password=f"{PASSWORD}, but wrong")
        for kind in ("job", "live"):
            bad = project.run(kind)
            assert not bad.success
            of_bad = project.told(bad)
            assert "KafkaRefused" in of_bad
            assert secured.address("SASL_SSL") in of_bad
            assert "BRANCHLAKE_KAFKA_USERNAME" in of_bad
            told += of_bad
        with raising(KafkaRefused, reason="credentials") as caught:
            project.tick("sensor")
        told += "".join(traceback.format_exception(caught.value))
        monkeypatch.setattr(topics, "_TIMEOUT_S", 2.0)
        configure("SASL_SSL", SCRAM, bootstrap=NOWHERE)
        skipped = project.tick("sensor").skip_message
        assert NOWHERE in skipped
        assert "BRANCHLAKE_KAFKA_BOOTSTRAP" in skipped
        assert SECRET not in told + skipped
    assert SECRET not in "".join(capfd.readouterr())
    logs = [secured.log, *Path(lakehouse.settings.state_dir, "logs").glob("*.log")]
    assert len(logs) > 1
    assert [log for log in logs if SECRET in log.read_text(errors="replace")] == []


def test_a_receiver_whose_broker_is_stopped_is_seen_on_the_topic(
    configure: Configure,
    secured: SecuredBroker,
    lakehouse: Lakehouse,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = configure("SASL_SSL", SCRAM)
    cluster = configured_cluster(settings)
    prefix = f"t{uuid.uuid4().hex[:8]}."
    topic = f"{prefix}isl"
    Broker(cluster).create(topic)
    options = tmp_path / "kafka.properties"
    options.write_text("".join(f"{name}={told}\n" for name, told in cluster.client_options().items()))
    with (
        receiving(
            *("--isl", ANYWHERE, "--kafka", cluster.bootstrap, "--kafka-options", str(options)),
            *("--topics", prefix, "--buffer", "50"),
        ) as running,
        socket.create_connection(running.address(topic)) as stream,
        new_instance() as instance,
    ):
        monitor = running.ready["monitor"]
        monkeypatch.setenv("BRANCHLAKE_RECEIVERS", monitor)
        project = Project(lakehouse, topic, instance)

        def counted(enough: Callable[[TopicCounts], bool]) -> None:
            until = time.monotonic() + 120
            while not enough(sum_by_topic(scrape_monitors([monitor])).get(topic, TopicCounts())):
                assert time.monotonic() < until, scrape_monitors([monitor])
                time.sleep(0.05)

        stream.sendall(b"".join(framed(value(number)) for number in range(10)))
        counted(lambda one: one.handed_over == 10)
        before, receiver = project.tick("live_sensor").asset_events
        assert receiver.asset_key == dg.AssetKey(["receivers", monitor.removeprefix("http://")])
        assert receiver.metadata["branchlake/state"].value == "ready"
        assert before.metadata["branchlake/receiver_buffer_used"].value == 0.0
        monkeypatch.setattr(topics, "_TIMEOUT_S", 1.0)
        with standing_still(secured.pid):
            stream.sendall(b"".join(framed(value(number)) for number in range(500)))
            counted(lambda one: one.waiting >= 50)
            stalled, receiver = project.tick("live_sensor").asset_events
        assert stalled.asset_key == dg.AssetKey(["kafka", topic])
        assert stalled.metadata["branchlake/receiver_buffer_used"].value == 1.0
        assert stalled.metadata["branchlake/receiver_buffered"].value >= 50
        assert stalled.metadata["branchlake/handed_over"].value == 10
        assert receiver.metadata["branchlake/state"].value == "degraded"
        assert "buffer is nearly full" in receiver.metadata["branchlake/reasons"].value
        counted(lambda one: one.handed_over == 510)
        assert running.end()[topic]["handed_over"] == 510


def _state(thread: Path) -> str:
    """As the kernel tells it: T is stopped."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """A process in which nothing runs: a thread that does when the signal comes goes on for a moment.

    Under load that moment sufficed a broker to take what came after it.
    """
    os.kill(pid, signal.SIGSTOP)
    try:
        threads = Path(f"/proc/{pid}/task")
        assert holds_within(30, lambda: all(_state(one) in "TZX" for one in threads.iterdir()), every_s=0.01)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The doctor sees no other lake."""
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))


def doctors() -> dict[str, Any]:
    done = CliRunner().invoke(main, ["doctor", "--json"])
    assert SECRET not in done.output
    (found,) = [one for one in json.loads(done.stdout)["findings"] if one["place"] == "Kafka"]
    return dict(found)


def refused(kind: type[BranchlakeError], reason: str, *names: str) -> None:
    """The error that comes instead of a topic."""
    with raising(kind, *names, reason=reason) as caught:
        KafkaTopics(configured_cluster(Settings())).describe(["orders"])
    assert SECRET not in repr(caught.value)


def doctor_refuses(*names: str) -> None:
    """It is no batch that the doctor looks at."""
    found = doctors()
    assert found["state"] == "wrong"
    for name in names:
        assert name in f"{found['told']} {found['remedy']}"
    assert "batch" not in found["remedy"]


def test_what_spark_alone_cannot_reach(
    configure: Configure, lakehouse: Lakehouse, spark_session: Any, wrong_ca: Path
) -> None:
    kafka = Broker(configured_cluster(configure("SASL_SSL", SCRAM)))
    topic = kafka.topic()
    kafka.send(topic, [value(1)])
    drive = Driver(lakehouse, kafka, spark_session, one_table(topic))
    cases: list[tuple[type[BranchlakeError], dict[str, object], str]] = [
        (KafkaRefused, {"password": f"not {PASSWORD}"}, "SaslAuthenticationException"),
        (KafkaRefused, {"ca": wrong_ca}, "SslAuthenticationException"),
        (KafkaUnavailable, {"bootstrap": NOWHERE}, "KafkaException"),
    ]
    for kind, wrong, reason in cases:
        others = configured_cluster(configure("SASL_SSL", SCRAM, **wrong))
        drive.records = KafkaRecords(others, drive.topics)
        with raising(kind, reason=reason, subject=others.bootstrap) as caught:
            drive.batch()
        assert SECRET not in "".join(traceback.format_exception(caught.value))
    drive.records = KafkaRecords(kafka.cluster, drive.topics)
    drive.batch()
    assert [row["id"] for row in drive.rows(0)] == [1]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mechanism", [SCRAM, "PLAIN"])
def test_a_wrong_password(mechanism: str, configure: Configure, secured: SecuredBroker) -> None:
    configure("SASL_SSL", mechanism, password=f"not {PASSWORD}")
    refused(KafkaRefused, "credentials", secured.address("SASL_SSL"), "BRANCHLAKE_KAFKA_USERNAME")
    doctor_refuses(secured.address("SASL_SSL"), "BRANCHLAKE_KAFKA_USERNAME")


@pytest.mark.usefixtures("alone")
def test_a_wrong_authority(configure: Configure, secured: SecuredBroker, wrong_ca: Path) -> None:
    configure("SASL_SSL", SCRAM, ca=wrong_ca)
    refused(KafkaRefused, "trust", secured.address("SASL_SSL"), "BRANCHLAKE_KAFKA_CA")
    doctor_refuses(secured.address("SASL_SSL"), "BRANCHLAKE_KAFKA_CA")


@pytest.mark.usefixtures("alone")
def test_a_certificate_for_another_host(configure: Configure, secured: SecuredBroker) -> None:
    elsewhere = secured.address("SSL").replace("127.0.0.1", "localhost")
    configure("SSL", bootstrap=elsewhere)
    refused(KafkaRefused, "trust", elsewhere)


def test_a_listener_that_expects_more(
    configure: Configure, secured: SecuredBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "_TIMEOUT_S", 2.0)
    configure("SSL", security="PLAINTEXT", ca=None)
    refused(KafkaUnavailable, "protocol", secured.address("SSL"), "BRANCHLAKE_KAFKA_SECURITY")


def test_a_listener_that_expects_more_and_says_so_before_it_is_asked(
    configure: Configure, secured: SecuredBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client tells once in ten seconds that no broker is left."""
    monkeypatch.setattr(topics, "_TIMEOUT_S", 2.0)
    asked = KafkaTopics(configured_cluster(configure("SSL", security="PLAINTEXT", ca=None)))
    assert asked._admin is not None  # it connects
    time.sleep(1)
    for _ in range(2):
        with raising(KafkaUnavailable, secured.address("SSL"), reason="protocol"):
            asked.describe(["orders"])


@pytest.mark.usefixtures("alone")
def test_a_host_that_does_not_exist(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "_TIMEOUT_S", 2.0)
    configure("SASL_SSL", SCRAM, bootstrap=NOWHERE)
    refused(KafkaUnavailable, "address", NOWHERE, "BRANCHLAKE_KAFKA_BOOTSTRAP")
    doctor_refuses(NOWHERE, "BRANCHLAKE_KAFKA_BOOTSTRAP")


@pytest.mark.usefixtures("alone")
def test_a_file_that_holds_no_certificates(configure: Configure, tmp_path: Path) -> None:
    configure("SSL", ca=tmp_path / "none.pem")
    refused(ConfigurationError, "unreadable", "none.pem", "BRANCHLAKE_KAFKA_CA")
    doctor_refuses("none.pem", "BRANCHLAKE_KAFKA_CA")
    (tmp_path / "empty.pem").write_text("nothing\n")
    configure("SSL", ca=tmp_path / "empty.pem")
    refused(ConfigurationError, "no_certificate", "empty.pem", "BRANCHLAKE_KAFKA_CA")
    (tmp_path / "half.pem").write_text("-----BEGIN CERTIFICATE-----\nnothing\n")
    configure("SSL", ca=tmp_path / "half.pem")
    refused(ConfigurationError, "client_options", "ssl.ca.location", "BRANCHLAKE_KAFKA_CA")


@pytest.mark.parametrize(
    ("kind", "wrong", "reason", "option"),
    [
        (BrokerRefused, {"password": f"not {PASSWORD}"}, "credentials", "sasl.password"),
        (BrokerUnreachable, {"bootstrap": NOWHERE}, "address", ""),
    ],
)
def test_a_receiver_reports_its_own_options(
    kind: type[BranchlakeError],
    wrong: dict[str, str],
    reason: str,
    option: str,
    configure: Configure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind is BrokerUnreachable:
        monkeypatch.setattr(sinks, "_ANSWER_TIMEOUT_S", 2.0)
    settings = configure("SASL_SSL", SCRAM, **wrong)
    sink = KafkaSink("orders", 0, ReceiverOrigin("r1", "udp"), configured_cluster(settings).client_options())
    with raising(kind, reason=reason, subject="orders") as caught:
        sink.open(resume=False)
    sink.close()
    assert settings.kafka_bootstrap is not None
    assert settings.kafka_bootstrap in caught.value.message
    assert caught.value.hint is not None
    assert option in caught.value.hint
    assert SECRET not in str(caught.value)


# -- who may do what -------------------------------------------------------------------------------------


@pytest.fixture
def all_of_it(configure: Configure) -> Broker:
    """The broker as somebody who may do everything."""
    return Broker(configured_cluster(configure("SASL_SSL", SCRAM)))


def test_a_client_is_known_by_its_certificate(
    all_of_it: Broker,
    configure: Configure,
    secured: SecuredBroker,
    authorities: tuple[Authority, Authority],
    lakehouse: Lakehouse,
    spark_session: Any,
) -> None:
    topic = all_of_it.topic()
    all_of_it.send(topic, [value(1)])
    mine = authorities[0].signed("mine.pem", "ingest")
    at = secured.address("MUTUAL")
    cluster = configured_cluster(configure("SSL", bootstrap=at, certificate=mine))
    drive = Driver(lakehouse, Broker(cluster), spark_session, one_table(topic))
    # It is known, and may do nothing yet.
    with raising(KafkaRefused, topic, reason="permission", subject=f"topic {topic}"):
        drive.batch()
    secured.allow("User:CN=ingest", (ResourceType.TOPIC, topic, AclOperation.READ))
    drive.batch()
    assert [row["id"] for row in drive.rows(0)] == [1]
    key = next(line for line in mine.read_text().splitlines() if not line.startswith("-"))
    logs = [secured.log, *Path(lakehouse.settings.state_dir, "logs").glob("*.log")]
    assert [log for log in logs if key in log.read_text(errors="replace")] == []
    assert key not in repr(cluster)

    nobody = KafkaTopics(configured_cluster(configure("SSL", bootstrap=at, certificate=None)))
    strange = authorities[1].signed("strange.pem", "ingest")
    stranger = KafkaTopics(configured_cluster(configure("SSL", bootstrap=at, certificate=strange)))
    for one in (nobody, stranger):
        with raising(KafkaRefused, at, "BRANCHLAKE_KAFKA_CERTIFICATE", reason="certificate"):
            one.describe([topic])


def test_who_may_only_describe_a_topic_does_not_read_it(
    all_of_it: Broker,
    configure: Configure,
    secured: SecuredBroker,
    lakehouse: Lakehouse,
    spark_session: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = all_of_it.topic()
    all_of_it.send(topic, [value(1)])
    cluster = configured_cluster(configure("SASL_SSL", SCRAM, username=READER))
    drive = Driver(lakehouse, Broker(cluster), spark_session, one_table(topic))
    with raising(KafkaRefused, topic, "BRANCHLAKE_KAFKA_USERNAME", reason="permission"):
        drive.look()
    secured.allow(f"User:{READER}", (ResourceType.TOPIC, topic, AclOperation.DESCRIBE))
    with raising(KafkaRefused, topic, reason="TopicAuthorizationException"):
        drive.batch()
    assert drive.known.dead_letter_table is None

    # To read a topic is all that it needs: no group says how far the tables are.
    secured.allow(f"User:{READER}", (ResourceType.TOPIC, topic, AclOperation.READ))
    result = drive.batch()
    assert [row["id"] for row in drive.rows(0)] == [1]
    with caplog.at_level(logging.WARNING):
        drive.topics.report_offsets(drive.ingest.group, result.progress.offsets)
    (logged,) = [record for record in caplog.records if record.args and drive.ingest.group in record.args]
    assert logged.levelno == logging.WARNING


def test_a_certificate_that_java_cannot_read_is_refused_at_once(
    configure: Configure, authorities: tuple[Authority, Authority], tmp_path: Path
) -> None:
    whole = authorities[0].signed("own.pem", "ingest").read_text()
    key, _, chain = whole.partition("-----BEGIN CERTIFICATE-----")
    wrong = {
        "no_private_key": f"-----BEGIN CERTIFICATE-----{chain}",
        "no_certificate": key,
        "private_key_form": whole.replace("PRIVATE KEY", "EC PRIVATE KEY"),
    }
    for reason, text in wrong.items():
        file = tmp_path / "wrong.pem"
        file.write_text(text)
        cluster = configured_cluster(configure("SSL", certificate=file))
        for side in (cluster.client_options, cluster.spark_options):
            with raising(ConfigurationError, reason=reason, subject=str(file)) as caught:
                side()
            assert key.splitlines()[1] not in str(caught.value)
    with raising(ConfigurationError, reason="certificate_without_tls"):
        configured_cluster(configure("SASL_PLAINTEXT", "PLAIN", certificate=tmp_path / "wrong.pem", ca=None))
