"""What `branchlake doctor` looks at in the configured Kafka cluster, or in the embedded broker."""

from __future__ import annotations

from branchlake_dagster.cli.doctor.examination import Examination
from branchlake_dagster.ingest.kafka.broker import EmbeddedKafka, cluster_at
from branchlake_dagster.ingest.kafka.cluster import Cluster
from branchlake_dagster.ingest.kafka.topics import KafkaTopics
from branchlake_dagster.settings import Settings
from branchlake_dagster.wording import counted


def kafka(found: Examination, settings: Settings) -> None:
    """Whether the brokers answer to the credentials.

    Nothing where no cluster is configured and no embedded broker was started in this state folder.
    """
    bootstrap = settings.kafka_bootstrap
    if bootstrap is not None:
        found.look(
            "Kafka",
            "brokers",
            lambda: _size(cluster_at(settings, bootstrap)),
            remedy="The settings are in docs/settings.md.",
        )
        return
    embedded = EmbeddedKafka(settings)
    if not embedded.record_path.exists():
        return
    cluster = embedded.running_cluster()
    if cluster is None:
        found.note(
            "Kafka", "embedded broker", "off", "it does not run", "Start it: branchlake up --with kafka."
        )
        return
    found.look(
        "Kafka",
        "embedded broker",
        lambda: _size(cluster),
        remedy="Start it anew: branchlake down, then branchlake up --with kafka.",
    )


def _size(cluster: Cluster) -> str:
    """How many brokers and topics the credentials see. Raises the errors of `KafkaTopics.size`."""
    brokers, topics = KafkaTopics(cluster).size()
    shown = f"{cluster.bootstrap}: {counted(brokers, 'broker')}"
    return f"{shown}, {counted(topics, 'topic')} that these credentials may see"
