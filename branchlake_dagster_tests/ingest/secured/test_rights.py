"""A broker that knows its clients by certificates, and one that does not let everybody read everything."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AclOperation, ResourceType

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.embedded_kafka import configured_cluster
from branchlake_dagster.ingest.errors import KafkaRefused
from branchlake_dagster.ingest.kafka_topics import KafkaTopics
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.ingest.driving import Driver
from branchlake_dagster_tests.ingest.secured.authority import Authority
from branchlake_dagster_tests.ingest.secured.broker import READER, SecuredBroker
from branchlake_dagster_tests.ingest.secured.conftest import Configure
from branchlake_dagster_tests.ingest.secured.project import one_table, value
from branchlake_dagster_tests.suite.kafka import Broker
from branchlake_dagster_tests.suite.raised import raising

pytestmark = pytest.mark.spark
SCRAM = "SCRAM-SHA-512"


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
