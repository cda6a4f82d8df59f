"""What `branchlake doctor` looks at in a Kafka cluster that is configured."""

from __future__ import annotations

from branchlake_dagster.cli.doctor.examination import Examination
from branchlake_dagster.ingest.kafka.broker import cluster_at
from branchlake_dagster.ingest.kafka.topics import KafkaTopics
from branchlake_dagster.settings import Settings
from branchlake_dagster.wording import counted


def kafka(found: Examination, settings: Settings) -> None:
    """Whether the brokers answer to the credentials. Nothing where no cluster is configured."""
    bootstrap = settings.kafka_bootstrap
    if bootstrap is None:
        return

    def answers() -> str:
        brokers, topics = KafkaTopics(cluster_at(settings, bootstrap)).size()
        told = f"{bootstrap}: {counted(brokers, 'broker')}"
        return f"{told}, {counted(topics, 'topic')} that these credentials may see"

    found.look("Kafka", "brokers", answers, remedy="The settings are in docs/settings.md.")
