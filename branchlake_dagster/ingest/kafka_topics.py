"""The present state of Kafka topics, and Spark's failures to read them as typed errors."""

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

from pyspark.errors import PySparkException, PythonException

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
"""Timeout for one record, which a separate consumer fetches. On a fully loaded machine a fetch took more than
10 s."""
_POLL_S = 0.1
"""Interval between checks whether the brokers have refused the connection meanwhile."""
_HINTS = {
    Cause.CREDENTIALS: "Check BRANCHLAKE_KAFKA_USERNAME, _PASSWORD and _SASL_MECHANISM, and whether the"
    " listener expects the protocol of BRANCHLAKE_KAFKA_SECURITY.",
    Cause.TRUST: "Set BRANCHLAKE_KAFKA_CA to the PEM file of the authority that signed the broker's"
    " certificate. The certificate must be valid for the host names in BRANCHLAKE_KAFKA_BOOTSTRAP and in the"
    " broker's listeners.",
    Cause.CERTIFICATE: "The broker requires a client certificate. Set BRANCHLAKE_KAFKA_CERTIFICATE to one"
    " from an authority that the broker trusts.",
    Cause.ADDRESS: "Check that a broker runs there, and that BRANCHLAKE_KAFKA_BOOTSTRAP is the address of a"
    " listener for BRANCHLAKE_KAFKA_SECURITY.",
    Cause.PROTOCOL: "Set BRANCHLAKE_KAFKA_SECURITY to what the listener expects: PLAINTEXT, SSL,"
    " SASL_PLAINTEXT or SASL_SSL.",
}
_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""The id of all zeros, as Kafka prints it. Brokers without topic ids return it for every topic."""
_NO_TIME_MS = -1
"""Kafka's value for a record without a time."""
_YEAR_1_MS, _YEAR_10000_MS = -62_135_596_800_000, 253_402_300_800_000
_log = logging.getLogger(__name__)
_retired_clients: list[AdminClient] = []
"""Clients of deleted `KafkaTopics` objects. The next thread that makes a request closes them.

librdkafka aborts the process if a client is closed by the client's own thread. Python's garbage collector may
run in that thread.
"""


class Topics(Protocol):
    """A source of records: a Kafka cluster, or a landing folder."""

    def describe(self, names: Iterable[str]) -> dict[str, Topic]:
        """Return the present state of these topics, by name.

        Raises KafkaRefused for a topic that does not exist in Kafka, KafkaUnavailable, LandingUnavailable for
        a topic that a landing folder does not have, or LandingDamaged.
        """

    def offsets_at_time(self, topic: Topic, moment: datetime) -> Offsets:
        """Return the offset of the first record at `moment` or later, by partition.

        For a partition without such a record it is the end of the partition.
        """

    def committed_offsets(self, group: str, topics: Iterable[str]) -> Mapping[str, Mapping[int, int]]:
        """Return the committed offsets of a consumer group, by topic and partition number.

        The result is empty if the group does not exist or has committed nothing. Raises ConsumerGroupActive
        if the group has members or a transaction is about to commit its offsets. Raises ConfigurationError if
        the source has no consumer groups, KafkaUnavailable or KafkaRefused.
        """

    def earliest_time(self, offsets: Offsets) -> datetime | None:
        """Return the earliest time of the next records at these offsets, or None if it is not known.

        Only the first available record of each partition counts. Times outside of the years 1 to 9999 are
        ignored: some producers send microseconds as milliseconds.
        """

    def report_offsets(self, group: str, offsets: Offsets) -> None:
        """Commit the tables' offsets to a consumer group, for tools that show lag. Never raises.

        Kafka knows topics by name only, so `offsets` must be those of the present topics.
        """


class KafkaTopics:
    """The `Topics` of a Kafka cluster. The object keeps its connections open.

    A request ends after about ten seconds without an answer, and at once if it is refused. The first
    request raises ConfigurationError for a setting that cannot be used.
    """

    def __init__(self, cluster: KafkaCluster) -> None:
        require_modules("kafka", "confluent_kafka", needed_by="ingestion from Kafka")
        self._cluster = cluster
        self._broker_errors = BrokerErrors(cluster.bootstrap)

    @cached_property
    def _admin(self) -> AdminClient:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        # librdkafka writes its log to standard error, one line for each reconnect.
        options: dict[str, Any] = {"log_level": 2, "error_cb": self._broker_errors}
        options |= self._cluster.client_options()
        try:
            client = AdminClient(options)
        except KafkaException as exception:
            raise ConfigurationError(
                f"A connection to Kafka at {self._cluster.bootstrap} cannot be set up:"
                f" {exception.args[0].str()}.",
                hint="Check BRANCHLAKE_KAFKA_CA and the other BRANCHLAKE_KAFKA_… settings.",
                reason="client_options",
                subject=self._cluster.bootstrap,
            ) from exception
        finalize(self, _retired_clients.append, client)
        return client

    def describe(self, names: Iterable[str]) -> dict[str, Topic]:
        """Return the present state of these topics, by name. Sends four requests for any number of topics.

        The end of a partition is the end of committed records. Raises KafkaRefused or KafkaUnavailable.
        """
        from confluent_kafka import IsolationLevel
        from confluent_kafka import TopicPartition as KafkaPartition
        from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

        descriptions = self._describe_topics(names)
        partitions = [
            KafkaPartition(name, part.id) for name, topic in descriptions.items() for part in topic.partitions
        ]
        spec: Any = OffsetSpec  # its functions have no types
        # First the begins: records may be deleted between the requests, and a begin after the end would look
        # like a topic that was set back.
        begins = self._list_offsets(
            dict.fromkeys(partitions, spec.earliest()), IsolationLevel.READ_UNCOMMITTED
        )
        latest = dict.fromkeys(partitions, spec.latest())
        ends = self._list_offsets(latest, IsolationLevel.READ_COMMITTED)
        log_ends = self._list_offsets(latest, IsolationLevel.READ_UNCOMMITTED)
        return {
            name: Topic(
                name,
                str(topic.topic_id),
                {part.id: begins[name, part.id] for part in topic.partitions},
                {part.id: ends[name, part.id] for part in topic.partitions},
                {
                    part.id: log_ends[name, part.id]
                    for part in topic.partitions
                    if log_ends[name, part.id] > ends[name, part.id]
                },
            )
            for name, topic in descriptions.items()
        }

    def topic_ids(self, names: Iterable[str]) -> dict[str, str]:
        """Return Kafka's ids of the topics, by name.

        Sends one request. Raises the same errors as `describe`.
        """
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
                    f"The brokers have no id for topic {name}. If the topic were deleted and created again,"
                    " the ingestion could not notice that, and would lose records.",
                    hint="Use brokers with topic ids: Kafka 2.8 or newer, or a Redpanda that has them.",
                    reason="topic_id_missing",
                    subject=name,
                )
        return descriptions

    def cluster_size(self) -> tuple[int, int]:
        """Return the number of brokers and the number of topics that these credentials may see.

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
        """Return the offset of the first record at `moment` or later, by partition.

        For a partition without such a record it is the end of the partition. Raises KafkaUnavailable (reason
        `not_committed`) if that offset is after the end: records were added meanwhile, or a transaction is
        open.
        """
        from confluent_kafka import IsolationLevel
        from confluent_kafka import TopicPartition as KafkaPartition
        from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

        offset_spec = OffsetSpec.for_timestamp(int(moment.timestamp() * 1000))
        offsets = self._list_offsets(
            {KafkaPartition(topic.name, number): offset_spec for number in topic.ends},
            IsolationLevel.READ_UNCOMMITTED,
        )
        starts = {
            partition: topic.ends[partition.partition] if at < 0 else at
            for partition in topic.partitions()
            for at in [offsets[topic.name, partition.partition]]
        }
        after_end = [one for one, at in starts.items() if at > topic.ends[one.partition]]
        if after_end:
            first = min(after_end)
            raise KafkaUnavailable(
                f"Topic {topic.name} partition {first.partition} starts at offset {starts[first]}, which is"
                f" after its committed records: they end at {topic.ends[first.partition]}.",
                hint="Try again, if records were just added. Otherwise wait until the producer ends its"
                " transaction, or until Kafka aborts it after transaction.timeout.ms.",
                reason="not_committed",
                subject=f"{topic.name}[{first.partition}]",
            )
        return starts

    def committed_offsets(self, group: str, topics: Iterable[str]) -> Mapping[str, Mapping[int, int]]:
        """Return the committed offsets of a consumer group, by topic and partition; {} for an unknown group.

        Sends two requests. Raises ConsumerGroupActive, KafkaUnavailable or KafkaRefused.
        """
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
                f"Consumer group {group} has {format_count(len(members), 'member')}, so its committed offsets"
                " may change.",
                hint="Stop the sink that reads with this group, then run the ingestion again. To keep the"
                " sink running, give the offsets with StartingOffsets.",
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
                    hint="Wait until the sink commits it, or until Kafka aborts it after"
                    " transaction.timeout.ms.",
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
        """Return the earliest time of the next records at these offsets, or None if it is not known.

        Reads one record of each partition without a consumer group, for at most ten seconds.
        """
        from confluent_kafka import Consumer
        from confluent_kafka import TopicPartition as KafkaPartition

        options = {"group.id": "branchlake-looks", "enable.auto.commit": False, "log_level": 2}
        consumer = Consumer({**self._cluster.client_options(), **options})
        partitions = {
            (partition.topic, partition.partition): KafkaPartition(partition.topic, partition.partition, at)
            for partition, at in offsets.items()
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
                        # The records of other partitions would otherwise wait behind the rest of this
                        # partition.
                        consumer.pause([partitions[partition_key]])
        finally:
            consumer.close()
        times = [at for at in times_ms.values() if at != _NO_TIME_MS and _YEAR_1_MS <= at < _YEAR_10000_MS]
        return datetime.fromtimestamp(min(times) / 1000, UTC) if times else None

    def fetch_record(
        self, partition: TopicPartition, offset: int
    ) -> tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]:
        """Return the time (ms since 1970), key, value and headers of one record, without a consumer group.

        Raises KafkaUnavailable if the record does not come within a minute.
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
            f"Record {offset} of topic {partition.topic} partition {partition.partition} was not received"
            f" within {_RECORD_TIMEOUT_S:.0f} s.",
            hint="The batch was discarded. The next batch starts at the same offsets.",
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
        """Commit these offsets to the consumer group. A failure is only logged: tables record the offsets."""
        from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException
        from confluent_kafka import TopicPartition as KafkaPartition

        group_offsets = [
            KafkaPartition(partition.topic, partition.partition, offset)
            for partition, offset in offsets.items()
        ]
        if not group_offsets:
            return
        try:
            futures = self._admin.alter_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(group, group_offsets)], request_timeout=_TIMEOUT_S
            )
            for future in futures.values():
                future.result()
        except KafkaException as error:
            # Ingestion does not depend on the group: the tables record the offsets.
            _log.warning("The offsets of consumer group %s were not updated: %s", group, error)

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
                    raise self._no_answer_error(what, f"no answer within {_TIMEOUT_S:.0f} s") from error

    def _to_kafka_error(self, exception: KafkaException, what: str) -> KafkaRefused | KafkaUnavailable:
        from confluent_kafka import KafkaError

        error: KafkaError = exception.args[0]
        if error.code() not in _no_answer_codes():
            self._broker_errors.end_request()
        if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return KafkaRefused(
                f"The Kafka cluster has no {what}.",
                hint="Create it, or correct the topics of the ingestion.",
                reason="not_there",
                subject=what,
            )
        self._admin.poll(0)
        if error.code() in _no_answer_codes():
            return self._no_answer_error(what, error.str())
        if error.retriable() or error.code() in _transient_codes():
            return KafkaUnavailable(
                f"Kafka did not answer the request for {what}: {error.str()}.",
                hint="Wait: the brokers are electing a leader, or are busy.",
                reason="busy",
                subject=what,
            )
        return KafkaRefused(
            f"Kafka refused the request for {what}: {error.str()}.",
            hint="Check the permissions of the user BRANCHLAKE_KAFKA_USERNAME.",
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
    """Return the error codes of requests that no broker answered. `_broker_errors` then has the cause."""
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
    """Return whether Kafka refused the request because the group does not exist.

    Since Kafka 4 that is an error; earlier versions returned a group without members.
    """
    from confluent_kafka import KafkaError, KafkaException

    cause = refused.__cause__
    return isinstance(cause, KafkaException) and cause.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND


def _transient_codes() -> tuple[int, ...]:
    """Return the error codes of failures that pass, such as a leader election, even if not `retriable`."""
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
"""Messages of a `KafkaException` for an unknown host or an unreadable certificate."""
_DATA_LOSS = "KafkaIllegalStateException"
"""Spark's source raises it, with `failOnDataLoss`, for records or partitions that Kafka has deleted."""
_DELETED_RANGE = re.compile(r"in offset (\[\d+, \d+\)) for topic partition (\S+)-(\d+)")


@contextmanager
def translate_spark_errors(cluster: KafkaCluster) -> Iterator[None]:
    """Raise KafkaUnavailable, KafkaRefused or RecordsDeleted if Spark fails to read Kafka in the block.

    Other failures of Spark pass through. So do those of Python code on Spark's workers, which does not read
    Kafka: the text of such an error may contain a record, and so whatever its producer has written.
    """
    try:
        yield
    except PythonException:
        raise
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
                hint="Dagster's process could connect with the same settings. Check that the credentials are"
                " still valid, and that Spark reaches the same brokers under these names.",
                reason=name,
                subject=cluster.bootstrap,
            ) from error
        if name in _UNAVAILABLE_NAMES or detail.startswith(_CLIENT_FAILURES):
            raise KafkaUnavailable(
                message,
                hint="Check that the brokers run, and that Spark's driver and workers reach them under the"
                " names in BRANCHLAKE_KAFKA_BOOTSTRAP and in the brokers' advertised listeners.",
                reason=name,
                subject=cluster.bootstrap,
            ) from error
        raise


def _records_deleted_error(cluster: KafkaCluster, error_text: str) -> RecordsDeleted:
    what, subject = f"Some records of Kafka at {cluster.bootstrap}", cluster.bootstrap
    if match := _DELETED_RANGE.search(error_text):
        offsets, subject, partition = match.groups()
        what = f"Records of topic {subject} partition {partition} with offsets {offsets}"
    return RecordsDeleted(
        f"{what} were deleted while a batch read them.",
        hint="The batch was discarded. If the topic's retention is too short for this ingestion, set a longer"
        " one.",
        subject=subject,
    )
