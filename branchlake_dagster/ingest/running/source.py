"""Where an ingestion's topics are, by its declaration and the settings."""

from __future__ import annotations

from dataclasses import dataclass

from branchlake_dagster.ingest.batch.records import KafkaRecords, LandingRecords, Records
from branchlake_dagster.ingest.declaring.declaration import Ingest
from branchlake_dagster.ingest.kafka.broker import cluster_of
from branchlake_dagster.ingest.kafka.topics import KafkaTopics, Topics
from branchlake_dagster.ingest.landing.topics import LandingTopics
from branchlake_dagster.settings import Settings


@dataclass(frozen=True)
class Source:
    """The topics, and how their records are read."""

    topics: Topics
    records: Records


def source_of(ingest: Ingest, settings: Settings) -> Source:
    """Kafka or the landing folder. Raises ConfigurationError, SecretWithoutTls or MissingExtra."""
    if ingest.source == "landing":
        folder = settings.landing_folder
        return Source(LandingTopics(folder), LandingRecords(folder))
    cluster = cluster_of(settings)
    if cluster.password is not None:
        settings.require_tls_to_spark(f"Kafka's password for {cluster.bootstrap}")
    topics = KafkaTopics(cluster)
    return Source(topics, KafkaRecords(cluster, topics))
