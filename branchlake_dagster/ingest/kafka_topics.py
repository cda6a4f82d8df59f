"""Topics as the cluster has them now, and Spark's failures to read them as typed errors."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol
from weakref import finalize

from pyspark.errors import PySparkException

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.extras import require_modules
from branchlake_dagster.ingest.errors import (
    ConsumerGroupActive,
    KafkaRefused,
    KafkaUnavailable,
    RecordsDeleted,
)
from branchlake_dagster.ingest.kafka_cluster import KafkaCluster
from branchlake_dagster.ingest.offsets import Offsets, Topic, TopicPartition
from branchlake_dagster.receivers.kafka_errors import BrokerErrors, Cause
from branchlake_dagster.wording import format_count

if TYPE_CHECKING:
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

_TIMEOUT_S = 10.0
_RECORD_TIMEOUT_S = 60.0
"""For a record, which a consumer of its own fetches: on a machine at its limit that took more than 10 s."""
_POLL_S = 0.1
"""How often it is looked whether the brokers have refused us meanwhile."""
_HINTS = {
    Cause.CREDENTIALS: "Look at BRANCHLAKE_KAFKA_USERNAME, _PASSWORD and _SASL_MECHANISM, and whether the"
    " listener expects BRANCHLAKE_KAFKA_SECURITY.",
    Cause.TRUST: "BRANCHLAKE_KAFKA_CA is the PEM file of the authority that signed the broker's certificate."
    " That must be for the host that BRANCHLAKE_KAFKA_BOOTSTRAP and the broker's listeners name.",
    Cause.CERTIFICATE: "A broker that knows its clients by certificates wants BRANCHLAKE_KAFKA_CERTIFICATE,"
    " from an authority that it trusts.",
    Cause.ADDRESS: "Does a broker run there, and is BRANCHLAKE_KAFKA_BOOTSTRAP the address of a listener for"
    " BRANCHLAKE_KAFKA_SECURITY?",
    Cause.PROTOCOL: "Set BRANCHLAKE_KAFKA_SECURITY to what the listener expects: PLAINTEXT, SSL,"
    " SASL_PLAINTEXT or SASL_SSL.",
}
_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""The id of all zeros, as it is printed: brokers that know of none give it to every topic."""
_YEAR_1_MS, _YEAR_10000_MS = -62_135_596_800_000, 253_402_300_800_000
_log = logging.getLogger(__name__)
_retired_clients: list[AdminClient] = []
"""Clients of `KafkaTopics` objects that are gone, to be closed by the next thread that makes a request.

librdkafka aborts the process if a client is closed by the client's own thread, where Python's garbage
collector may run as well.
"""


class Topics(Protocol):
    """Where records come from: Kafka, or a folder that stands for it."""

    def describe(self, names: Iterable[str]) -> dict[str, Topic]:
        """The topics by name. Raises KafkaRefused for one that is not there, KafkaUnavailable."""

    def offsets_at_time(self, topic: Topic, moment: datetime) -> Offsets:
        """By partition the first record of that time or later; its end where there is none."""

    def committed_offsets(self, group: str, topics: Iterable[str]) -> Mapping[str, Mapping[int, int]]:
        """By topic and partition number the offsets that a consumer group has committed in these topics.

        Empty if the group does not exist or has committed nothing. Raises ConsumerGroupActive if the group
        has members or a transaction is about to commit its offsets; ConfigurationError where there are no
        groups; KafkaUnavailable or KafkaRefused.
        """

    def earliest_time(self, offsets: Offsets) -> datetime | None:
        """The earliest time of the records at these offsets, or next after them; None: it is not known.

        Times that no calendar has do not count: who sends microseconds as milliseconds says some.
        """

    def report_offsets(self, group: str, offsets: Offsets) -> None:
        """Tell a consumer group how far the tables are, for tools that show lag. Never raises.

        Of each topic only as it is now: a group knows topics by their names.
        """


class KafkaTopics:
    """`Topics` of a cluster. Keeps its connections while it is there.

    Each request may take ten seconds; one that is refused ends at once. Raises ConfigurationError where a
    setting cannot be.
    """

    def __init__(self, cluster: KafkaCluster) -> None:
        require_modules("kafka", "confluent_kafka", needed_by="ingestion from Kafka")
        self._cluster = cluster
        self._broker_errors = BrokerErrors(cluster.bootstrap)

    @cached_property
    def _admin(self) -> AdminClient:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        # librdkafka's own log goes to standard error, each reconnect a line.
        options: dict[str, Any] = {"log_level": 2, "error_cb": self._broker_errors}
        options |= self._cluster.client_options()
        try:
            client = AdminClient(options)
        except KafkaException as exception:
            raise ConfigurationError(
                f"A connection to Kafka at {self._cluster.bootstrap} cannot be set up:"
                f" {exception.args[0].str()}.",
                hint="Look at BRANCHLAKE_KAFKA_CA and the settings beside it.",
                reason="client_options",
                subject=self._cluster.bootstrap,
            ) from exception
        finalize(self, _retired_clients.append, client)
        return client

    def describe(self, names: Iterable[str]) -> dict[str, Topic]:
        """See `Topics`. Three requests, whatever the number of topics."""
        from confluent_kafka import IsolationLevel
        from confluent_kafka import TopicPartition as KafkaPartition
        from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

        descriptions = self._describe_topics(names)
        partitions = [
            KafkaPartition(name, part.id) for name, topic in descriptions.items() for part in topic.partitions
        ]
        spec: Any = OffsetSpec  # its functions have no types
        ends = self._list_offsets(dict.fromkeys(partitions, spec.latest()), IsolationLevel.READ_COMMITTED)
        begins = self._list_offsets(
            dict.fromkeys(partitions, spec.earliest()), IsolationLevel.READ_UNCOMMITTED
        )
        return {
            name: Topic(
                name,
                str(topic.topic_id),
                {part.id: begins[name, part.id] for part in topic.partitions},
                {part.id: ends[name, part.id] for part in topic.partitions},
            )
            for name, topic in descriptions.items()
        }

    def topic_ids(self, names: Iterable[str]) -> dict[str, str]:
        """Kafka's ids of the topics by name. One request. Raises as `describe` does."""
        return {name: str(topic.topic_id) for name, topic in self._describe_topics(names).items()}

    def _describe_topics(self, names: Iterable[str]) -> dict[str, Any]:
        from confluent_kafka import TopicCollection

        topic_names = sorted(set(names))
        self._begin_request()
        futures = self._admin.describe_topics(TopicCollection(topic_names), request_timeout=_TIMEOUT_S)
        descriptions = {name: self._wait_for_answer(futures[name], f"topic {name}") for name in topic_names}
        self._broker_errors.end_request()
        for name, topic in descriptions.items():
            if str(topic.topic_id) == _NO_ID:
                raise KafkaRefused(
                    f"The brokers give no id for topic {name}: one that is deleted and made again could not"
                    " be told from it, and its records would be lost.",
                    hint="Use brokers that give topics ids: Kafka 2.8 or newer, or a Redpanda that does.",
                    reason="topic_id_missing",
                    subject=name,
                )
        return descriptions

    def cluster_size(self) -> tuple[int, int]:
        """How many brokers and topics there are, as far as these credentials may see them.

        Raises KafkaUnavailable or KafkaRefused.
        """
        from confluent_kafka import KafkaException

        what = "the list of topics"
        self._begin_request()
        brokers = self._wait_for_answer(self._admin.describe_cluster(request_timeout=_TIMEOUT_S), what).nodes
        try:
            cluster_metadata = self._admin.list_topics(timeout=_TIMEOUT_S)
        except KafkaException as exception:
            raise self._to_kafka_error(exception, what) from exception
        self._broker_errors.end_request()
        return len(brokers), len(cluster_metadata.topics)

    def offsets_at_time(self, topic: Topic, moment: datetime) -> Offsets:
        """See `Topics`."""
        from confluent_kafka import IsolationLevel
        from confluent_kafka import TopicPartition as KafkaPartition
        from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

        offset_spec = OffsetSpec.for_timestamp(int(moment.timestamp() * 1000))
        offsets = self._list_offsets(
            {KafkaPartition(topic.name, number): offset_spec for number in topic.ends},
            IsolationLevel.READ_UNCOMMITTED,
        )
        return {
            partition: max(offsets[topic.name, partition.partition], 0)
            if offsets[topic.name, partition.partition] >= 0
            else topic.ends[partition.partition]
            for partition in topic.partitions()
        }

    def committed_offsets(self, group: str, topics: Iterable[str]) -> Mapping[str, Mapping[int, int]]:
        """See `Topics`. Two requests."""
        from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException

        topic_names = {*topics}
        what = f"consumer group {group}"
        self._begin_request()
        group_futures = self._admin.describe_consumer_groups([group], request_timeout=_TIMEOUT_S)
        try:
            members = self._wait_for_answer(group_futures[group], what).members
        except KafkaRefused as refused:
            if not _is_unknown_group(refused):
                raise
            return {}
        if members:
            raise ConsumerGroupActive(
                f"Consumer group {group} has {format_count(len(members), 'member')}: its committed offsets"
                " are"
                " about to change.",
                hint="Stop the sink that reads with this group, then run the ingestion again. To read beside"
                " it, give the offsets with StartingOffsets.",
            )
        offset_futures = self._admin.list_consumer_group_offsets(
            [ConsumerGroupTopicPartitions(group)], require_stable=True, request_timeout=_TIMEOUT_S
        )
        offsets: dict[str, dict[int, int]] = {}
        for group_offset in self._wait_for_answer(offset_futures[group], what).topic_partitions:
            if group_offset.topic not in topic_names:
                continue
            if (
                group_offset.error is not None
                and group_offset.error.code() == KafkaError.UNSTABLE_OFFSET_COMMIT
            ):
                raise ConsumerGroupActive(
                    f"A transaction that commits offsets of consumer group {group} is still open.",
                    hint="Kafka ends it when its sink commits it, or after transaction.timeout.ms.",
                )
            if group_offset.error is not None:
                raise self._to_kafka_error(
                    KafkaException(group_offset.error), f"{what} in topic {group_offset.topic}"
                )
            if group_offset.offset >= 0:
                offsets.setdefault(group_offset.topic, {})[group_offset.partition] = group_offset.offset
        self._broker_errors.end_request()
        return offsets

    def earliest_time(self, offsets: Offsets) -> datetime | None:
        """See `Topics`. Reads one record of each partition, in no group."""
        from confluent_kafka import Consumer
        from confluent_kafka import TopicPartition as KafkaPartition

        options = {"group.id": "branchlake-looks", "enable.auto.commit": False, "log_level": 2}
        consumer = Consumer({**self._cluster.client_options(), **options})
        partitions = {
            (one.topic, one.partition): KafkaPartition(one.topic, one.partition, at)
            for one, at in offsets.items()
        }
        times_ms: dict[tuple[str, int], int] = {}
        try:
            consumer.assign(list(partitions.values()))
            deadline = time.monotonic() + _TIMEOUT_S
            while len(times_ms) < len(partitions) and time.monotonic() < deadline:
                for message in consumer.consume(100, timeout=0.2):
                    partition_key = (message.topic() or "", message.partition() or 0)
                    if message.error() is None and partition_key not in times_ms:
                        times_ms[partition_key] = message.timestamp()[1]
                        # The others would wait behind the rest of this one.
                        consumer.pause([partitions[partition_key]])
        finally:
            consumer.close()
        times = [at for at in times_ms.values() if _YEAR_1_MS <= at < _YEAR_10000_MS]
        return datetime.fromtimestamp(min(times) / 1000, UTC) if times else None

    def fetch_record(
        self, partition: TopicPartition, offset: int
    ) -> tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]:
        """One record: its time in ms since 1970, key, value and headers. In no group.

        Raises KafkaUnavailable where it does not come within a minute.
        """
        from confluent_kafka import Consumer
        from confluent_kafka import TopicPartition as KafkaPartition

        options = {"group.id": "branchlake-looks", "enable.auto.commit": False, "log_level": 2}
        consumer = Consumer({**self._cluster.client_options(), **options})
        try:
            consumer.assign([KafkaPartition(partition.topic, partition.partition, offset)])
            deadline = time.monotonic() + _RECORD_TIMEOUT_S
            while time.monotonic() < deadline:
                message = consumer.poll(0.2)
                if message is not None and message.error() is None and message.offset() == offset:
                    key: Any = message.key()
                    value: Any = message.value()
                    headers: Any = message.headers() or []
                    return message.timestamp()[1], key, value, headers
        finally:
            consumer.close()
        raise KafkaUnavailable(
            f"Record {offset} of topic {partition.topic} partition {partition.partition} did not come within"
            f" {_RECORD_TIMEOUT_S:.0f} s.",
            hint="Nothing of the batch is kept; the next one begins at the same offsets.",
        )

    def _list_offsets(self, specs: dict[Any, Any], isolation: Any) -> dict[tuple[str, int], int]:
        self._begin_request()
        futures = self._admin.list_offsets(specs, isolation_level=isolation, request_timeout=_TIMEOUT_S)
        offsets = {
            (partition.topic, partition.partition): self._wait_for_answer(
                future, f"topic {partition.topic}"
            ).offset
            for partition, future in futures.items()
        }
        self._broker_errors.end_request()
        return offsets

    def report_offsets(self, group: str, offsets: Offsets) -> None:
        """See `Topics`: the group `group` has committed what the tables have."""
        from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException
        from confluent_kafka import TopicPartition as KafkaPartition

        group_offsets = [KafkaPartition(one.topic, one.partition, offset) for one, offset in offsets.items()]
        if not group_offsets:
            return
        try:
            futures = self._admin.alter_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(group, group_offsets)], request_timeout=_TIMEOUT_S
            )
            for future in futures.values():
                future.result()
        except KafkaException as error:
            # Nothing goes by it: the tables know.
            _log.warning("Consumer group %s was not told: %s", group, error)

    def _begin_request(self) -> None:
        _retired_clients.clear()
        self._admin.poll(0)
        self._broker_errors.begin_request()

    def _wait_for_answer(self, future: Any, what: str) -> Any:
        from confluent_kafka import KafkaException

        deadline = time.monotonic() + _TIMEOUT_S + 5
        while True:
            try:
                return future.result(_POLL_S)
            except KafkaException as exception:
                raise self._to_kafka_error(exception, what) from exception
            except TimeoutError as error:
                self._admin.poll(0)
                if self._broker_errors.is_final or time.monotonic() > deadline:
                    raise self._no_answer_error(what, f"nothing came in {_TIMEOUT_S:.0f} s") from error

    def _to_kafka_error(self, exception: KafkaException, what: str) -> KafkaRefused | KafkaUnavailable:
        from confluent_kafka import KafkaError

        error: KafkaError = exception.args[0]
        if error.code() not in _no_answer_codes():
            self._broker_errors.end_request()
        if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return KafkaRefused(
                f"The cluster has no {what}.",
                hint="Create it, or correct the ingestion's topics.",
                reason="not_there",
                subject=what,
            )
        self._admin.poll(0)
        if error.code() in _no_answer_codes():
            return self._no_answer_error(what, error.str())
        if error.retriable() or error.code() in _transient_codes():
            return KafkaUnavailable(
                f"Kafka did not answer for {what}: {error.str()}.",
                hint="The brokers are about to choose a leader, or are busy. That passes by itself.",
                reason="busy",
                subject=what,
            )
        return KafkaRefused(
            f"Kafka refused to tell of {what}: {error.str()}.",
            hint="Look at the permissions of BRANCHLAKE_KAFKA_USERNAME.",
            reason="permission",
            subject=what,
        )

    def _no_answer_error(self, what: str, otherwise: str) -> KafkaRefused | KafkaUnavailable:
        failure = self._broker_errors.worst_failure(what, otherwise)
        error_class = KafkaUnavailable if failure.cause.is_transient else KafkaRefused
        return error_class(
            failure.message, hint=_HINTS[failure.cause], reason=failure.cause.code, subject=what
        )


def _no_answer_codes() -> tuple[int, ...]:
    """No broker was reached. Why is in the complaints."""
    from confluent_kafka import KafkaError

    return (
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TIMED_OUT,
        KafkaError._RESOLVE,
        KafkaError._AUTHENTICATION,
        KafkaError._SSL,
    )


def _is_unknown_group(refused: KafkaRefused) -> bool:
    """Since Kafka 4 a group that does not exist is an error; before, it was a group without members."""
    from confluent_kafka import KafkaError, KafkaException

    cause = refused.__cause__
    return isinstance(cause, KafkaException) and cause.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND


def _transient_codes() -> tuple[int, ...]:
    """What passes by itself, whatever librdkafka calls it: a leader is about to be found."""
    from confluent_kafka import KafkaError

    return (
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    )


_KAFKA_ERROR = re.compile(r"org\.apache\.kafka\.common\.(?:errors\.)?(\w+Exception)\b[):]* ?([^\n|]{0,200})")
_REFUSED_NAMES = ("Authentication", "Authorization")
_UNAVAILABLE_NAMES = (
    "TimeoutException",
    "DisconnectException",
    "NetworkException",
    "BrokerNotAvailableException",
)
_CLIENT_FAILURES = ("Failed to create new", "Failed to construct")
"""Of a `KafkaException`: a host is not known, or a certificate cannot be read."""
_DATA_LOSS = "KafkaIllegalStateException"
"""Spark's source raises it, with `failOnDataLoss`, for records or partitions that Kafka has deleted."""
_DELETED_RANGE = re.compile(r"in offset (\[\d+, \d+\)) for topic partition (\S+)-(\d+)")


@contextmanager
def translate_spark_errors(cluster: KafkaCluster) -> Iterator[None]:
    """Raise KafkaUnavailable, KafkaRefused or RecordsDeleted if Spark fails with that inside."""
    try:
        yield
    except PySparkException as error:
        if _DATA_LOSS in str(error):
            raise _records_deleted_error(cluster, str(error)) from error
        match = _KAFKA_ERROR.search(str(error))
        if match is None:
            raise
        name, detail = match[1], match[2].strip().rstrip(".")
        message = f"Spark could not read from Kafka at {cluster.bootstrap}: {name}: {detail}."
        if any(part in name for part in _REFUSED_NAMES):
            raise KafkaRefused(
                message,
                hint="The same settings did for Dagster's side. Are they still right, and does Spark reach"
                " the same brokers under these names?",
                reason=name,
                subject=cluster.bootstrap,
            ) from error
        if name in _UNAVAILABLE_NAMES or detail.startswith(_CLIENT_FAILURES):
            raise KafkaUnavailable(
                message,
                hint="Do the brokers run, and do Spark's driver and workers reach them under the names that"
                " BRANCHLAKE_KAFKA_BOOTSTRAP and the brokers' advertised listeners have?",
                reason=name,
                subject=cluster.bootstrap,
            ) from error
        raise


def _records_deleted_error(cluster: KafkaCluster, error_text: str) -> RecordsDeleted:
    what, subject = f"Records of Kafka at {cluster.bootstrap}", cluster.bootstrap
    if match := _DELETED_RANGE.search(error_text):
        offsets, subject, partition = match.groups()
        what = f"Records of topic {subject} partition {partition} in the offsets {offsets}"
    return RecordsDeleted(
        f"{what} were deleted while a batch read them.",
        hint="Nothing of the batch is kept. If the topic's retention is too short for this ingestion, set a"
        " longer one.",
        subject=subject,
    )
