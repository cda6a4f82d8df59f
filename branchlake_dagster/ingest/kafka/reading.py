"""What Spark's Kafka client says when it cannot read, as errors of ours. It only comes to us as text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.errors import PySparkException

from branchlake_dagster.ingest.errors import KafkaRefused, KafkaUnavailable, RecordsDeleted
from branchlake_dagster.ingest.kafka.cluster import Cluster

_KAFKAS = re.compile(r"org\.apache\.kafka\.common\.(?:errors\.)?(\w+Exception)\b[):]* ?([^\n|]{0,200})")
_REFUSED = ("Authentication", "Authorization")
_AWAY = ("TimeoutException", "DisconnectException", "NetworkException", "BrokerNotAvailableException")
_NO_CLIENT = ("Failed to create new", "Failed to construct")
"""Of a `KafkaException`: a host is not known, or a certificate cannot be read."""
_DATA_LOSS = "KafkaIllegalStateException"
"""Spark's source raises it, with `failOnDataLoss`, for records or partitions that Kafka has deleted."""
_DELETED_RANGE = re.compile(r"in offset (\[\d+, \d+\)) for topic partition (\S+)-(\d+)")


@contextmanager
def reading(cluster: Cluster) -> Iterator[None]:
    """Raise KafkaUnavailable, KafkaRefused or RecordsDeleted if Spark fails with that inside."""
    try:
        yield
    except PySparkException as error:
        if _DATA_LOSS in str(error):
            raise _records_deleted(cluster, str(error)) from error
        found = _KAFKAS.search(str(error))
        if found is None:
            raise
        name, told = found[1], found[2].strip().rstrip(".")
        text = f"Spark could not read from Kafka at {cluster.bootstrap}: {name}: {told}."
        if any(part in name for part in _REFUSED):
            raise KafkaRefused(
                text,
                hint="The same settings did for Dagster's side. Are they still right, and does Spark reach"
                " the same brokers under these names?",
                reason=name,
                subject=cluster.bootstrap,
            ) from error
        if name in _AWAY or told.startswith(_NO_CLIENT):
            raise KafkaUnavailable(
                text,
                hint="Do the brokers run, and do Spark's driver and workers reach them under the names that"
                " BRANCHLAKE_KAFKA_BOOTSTRAP and the brokers' advertised listeners have?",
                reason=name,
                subject=cluster.bootstrap,
            ) from error
        raise


def _records_deleted(cluster: Cluster, text: str) -> RecordsDeleted:
    what, subject = f"Records of Kafka at {cluster.bootstrap}", cluster.bootstrap
    if deleted := _DELETED_RANGE.search(text):
        offsets, subject, partition = deleted.groups()
        what = f"Records of topic {subject} partition {partition} in the offsets {offsets}"
    return RecordsDeleted(
        f"{what} were deleted while a batch read them.",
        hint="Nothing of the batch is kept. If the topic's retention is too short for this ingestion, set a"
        " longer one.",
        subject=subject,
    )
