"""The Kafka sink. A record is handed over once the broker has confirmed it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal, Transient
from branchlake_dagster.extras import require_modules
from branchlake_dagster.receivers.kafka_errors import BrokerErrors, Cause
from branchlake_dagster.receivers.records import (
    CURSOR_HEADER,
    PROTOCOL_HEADER,
    RECEIVED_NS_HEADER,
    RECEIVER_HEADER,
    SOURCE_HEADER,
    NotConfirmed,
    NotHandedOver,
    ReceiverOrigin,
    Record,
    ResumeState,
    Roll,
    digest_value,
)

DEFAULT_ROLL = Roll(records=10_000, size_bytes=4 * 1024 * 1024, age_s=0.02)
_IN_FLIGHT = ("max.in.flight.requests.per.connection", "max.in.flight")
PRODUCER_OPTIONS = {
    "enable.idempotence": True,
    "acks": "all",
    "message.timeout.ms": 0,
    "linger.ms": 5,
    _IN_FLIGHT[0]: 1,
}
"""Options of every producer. Users may only change ``linger.ms``.

There is no message timeout: after one, librdkafka reports records as failed that the broker may have stored.
There is one request in flight: a broker that has just become the leader of an empty partition may refuse a
producer's first request and accept its second one. Then librdkafka reports the records of the first request
as stored, although they are lost (KAFKA-15591).
"""
_REQUIRED_VALUES = {
    "enable.idempotence": ("true",),
    "acks": ("all", "-1"),
    "request.required.acks": ("all", "-1"),
    **dict.fromkeys(("message.timeout.ms", "delivery.timeout.ms"), ("0",)),
    # With few retries a record can be reported as failed although its last attempt reached the broker.
    **dict.fromkeys(("message.send.max.retries", "retries"), (str(2**31 - 1),)),
    **dict.fromkeys(_IN_FLIGHT, ("1",)),
}
"""Required values of options. With other values records would be lost or duplicated."""

_FIRST_TAIL, _REMEMBERED_VALUES = 10_000, 50_000
_ANSWER_TIMEOUT_S, _METADATA_TIMEOUT_S, _POLL_S = 10.0, 2.5, 0.05
_PATIENCE_S = 60.0
_HINTS = {
    Cause.CREDENTIALS: "Check sasl.username, sasl.password and sasl.mechanism in the options for Kafka.",
    Cause.TRUST: "Set the option ssl.ca.location to the PEM file of the authority that signed the broker's"
    " certificate. The certificate must be for the host name in the address.",
    Cause.CERTIFICATE: "If the broker requires client certificates, set the options"
    " ssl.certificate.location and ssl.key.location. The broker must trust the certificate's authority.",
    Cause.ADDRESS: "Check that the broker runs and that its address is right. The receiver tries again.",
    Cause.PROTOCOL: "Set the option security.protocol to that of the listener. The receiver tries again.",
}
_PRODUCER_ONLY_OPTIONS = frozenset({*PRODUCER_OPTIONS, *_REQUIRED_VALUES, "compression.type"})


@dataclass(eq=False)
class _SentRecord:
    """A record that was passed to librdkafka, with its delivery report."""

    record: Record
    is_reported: bool = False
    error: Any = None


class BrokerUnreachable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """No broker answers. Nothing was changed."""


class BrokerRefused(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The brokers refused the credentials, or their certificate is not trusted. Nothing was changed."""


class KafkaSink:
    """Writes the records of one receiver to one Kafka topic.

    Args:
        topic: The name of the topic. The broker creates it if it is configured to do so.
        partition: The partition for all records; None distributes them by key. Records with a cursor need
            one.
        origin: The receiver, as written to the headers.
        options: Options of librdkafka (``bootstrap.servers``, ``security.protocol``, ``sasl.*``, ``ssl.*``
            …).
        roll: The number and size of records that are sent before the sink waits for their reports.
        patience_s: The seconds without a report after which `write` fails. The records stay with the
            producer: the next call with them continues to wait and does not send them again.
        make_producer: Creates a producer from the options. (default: librdkafka's)
        clock: Monotonic seconds.

    """

    def __init__(
        self,
        topic: str,
        partition: int | None,
        origin: ReceiverOrigin,
        options: Mapping[str, Any],
        *,
        roll: Roll = DEFAULT_ROLL,
        patience_s: float = _PATIENCE_S,
        make_producer: Callable[[dict[str, Any]], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_modules("kafka", "confluent_kafka", needed_by="A sink in Kafka")
        for name, allowed_values in _REQUIRED_VALUES.items():
            if name in options and str(options[name]).lower() not in allowed_values:
                raise ConfigurationError(
                    f"{name}={options[name]} would lose or duplicate records.", hint="Remove the option."
                )
        self.topic, self.partition, self.origin, self.roll = topic, partition, origin, roll
        self._options = {
            **PRODUCER_OPTIONS,
            **{name: value for name, value in options.items() if name not in _REQUIRED_VALUES},
        }
        self._patience_s = patience_s
        self._unconfirmed: list[_SentRecord] = []
        self._unreported: set[_SentRecord] = set()
        self._make_producer = make_producer or _create_producer
        self._producer: Any = None
        self._broker_errors = BrokerErrors(str(options.get("bootstrap.servers")))
        self._clock = clock
        self._stop_requested = threading.Event()

    def open(self, *, resume: bool) -> ResumeState:
        """Connect to the broker, and return the state of this receiver's records in the partition.

        Without ``resume`` the state is empty, and nothing is read.

        Raises:
            BrokerUnreachable: No broker answers, or the topic has no leader yet.
            BrokerRefused: The brokers refuse the credentials, or their certificate is not trusted.
            ConfigurationError: An option is wrong, or ``resume`` is given without a partition.
        """
        import confluent_kafka as ck

        if resume and self.partition is None:
            raise ConfigurationError(
                f"The records for topic {self.topic} have a cursor, so they need one partition.",
                hint="Set the partition.",
                reason="partition_not_named",
                subject=self.topic,
            )
        try:
            self._producer = self._producer or self._new_producer()
        except ck.KafkaException as error:
            raise ConfigurationError(
                f"An option for Kafka is wrong: {error.args[0].str()}.", reason="kafka_option"
            ) from error
        self._broker_errors.begin_request()
        try:
            self._await_broker()
            self._broker_errors.end_request()
            return self._read_resume_state() if resume else ResumeState()
        except ck.KafkaException as error:
            failure = self._broker_errors.worst_failure(f"topic {self.topic}", error.args[0].str())
            error_type = BrokerUnreachable if failure.cause.is_transient else BrokerRefused
            message = f"Topic {self.topic} cannot be reached: {failure.message}"
            raise error_type(
                message, hint=_HINTS[failure.cause], reason=failure.cause.code, subject=self.topic
            ) from error

    def write(self, records: Sequence[Record], dropped: int = 0) -> None:  # noqa: ARG002 - for logs
        """Produce the records and wait until the broker has confirmed each.

        Raises NotHandedOver for records that were refused or not confirmed in time. Raises NotConfirmed if
        `stop_waiting` was called before the broker has confirmed all records.
        """
        for number, part in enumerate(parts := list(_split_at_cursors(records))):
            try:
                self._produce_part(part)
            except NotHandedOver as error:
                remaining = [*error.records, *(one for later in parts[number + 1 :] for one in later)]
                raise NotHandedOver(error.message, remaining, hint=error.hint) from error
            except NotConfirmed as error:
                remaining = [*error.records, *(one for later in parts[number + 1 :] for one in later)]
                raise NotConfirmed(error.message, remaining) from error

    def stop_waiting(self) -> None:
        """Let a running `write` return without the missing reports."""
        self._stop_requested.set()

    def close(self) -> None:
        """Drop unsent records and close the connections."""
        if self._producer is not None:
            self._producer.purge()
            self._producer.poll(0)
            self._producer = None

    def _await_broker(self) -> None:
        """Request the topic's metadata until a broker answers.

        Raises KafkaException after the timeout, or as soon as the brokers have refused.
        """
        import confluent_kafka as ck

        until = self._clock() + _ANSWER_TIMEOUT_S
        while True:
            try:
                self._producer.list_topics(self.topic, timeout=min(_METADATA_TIMEOUT_S, _ANSWER_TIMEOUT_S))
            except ck.KafkaException:
                self._producer.poll(0)
                if self._broker_errors.is_final or self._clock() >= until:
                    raise
            else:
                return

    def _new_producer(self) -> Any:
        return self._make_producer({**self._options, "error_cb": self._broker_errors})

    def _produce_part(self, records: Sequence[Record]) -> None:
        import confluent_kafka as ck

        until = self._clock() + self._patience_s
        earlier: dict[int, deque[_SentRecord]] = {}
        for sent_record in self._unconfirmed:
            earlier.setdefault(id(sent_record.record), deque()).append(sent_record)
        sent_records: list[_SentRecord] = []
        queue_errors: list[Any] = []
        try:
            while (
                len(sent_records) < len(records)
                and not self._stop_requested.is_set()
                and self._clock() < until
            ):
                record = records[len(sent_records)]
                # An earlier call may have sent this record. Then wait for its report, and do not resend it.
                next_sent = (
                    earlier[id(record)].popleft() if earlier.get(id(record)) else self._queue_record(record)
                )
                if next_sent is not None:
                    sent_records.append(next_sent)
                # Delivery reports arrive during polls. A full queue waits for them.
                self._producer.poll(0 if self._unreported else _POLL_S)
        except ck.KafkaException as error:
            queue_errors.append(error.args[0])
        while self._unreported and not self._stop_requested.is_set() and self._clock() < until:
            self._producer.poll(_POLL_S)
        self._unconfirmed = [
            *chain.from_iterable(earlier.values()),
            *(one for one in sent_records if not one.is_reported),
        ]
        remaining = [
            record
            for record, one in zip_longest(records, sent_records)
            if one is None or not one.is_reported or one.error is not None
        ]
        errors = [*(one.error for one in sent_records if one.error is not None), *queue_errors]
        if self._unreported and self._stop_requested.is_set():
            raise NotConfirmed(
                f"{len(self._unreported)} records were sent to topic {self.topic}, "
                "but no broker has confirmed them.",
                remaining,
            )
        if any(error.fatal() or error.code() == ck.KafkaError._FATAL for error in errors):
            # After a fatal error a producer accepts no more records, so create a new one.
            self._producer.purge()
            self._producer = self._new_producer()
            self._unconfirmed, self._unreported = [], set()
        if remaining:
            reason = (
                "the receiver ends" if self._stop_requested.is_set() else "no broker has confirmed them yet"
            )
            reason = errors[0].str() if errors else reason
            raise NotHandedOver(
                f"Topic {self.topic} did not accept {len(remaining)} records: {reason}.",
                remaining,
                hint="Look at the broker's log. The receiver tries again.",
            )
        self._broker_errors.end_request()

    def _queue_record(self, record: Record) -> _SentRecord | None:
        """Pass a record to librdkafka and return the sent record. Return None if the queue is full."""
        sent_record = _SentRecord(record)

        def report(error: Any, _: Any) -> None:
            sent_record.is_reported, sent_record.error = True, error
            self._unreported.discard(sent_record)

        partition_argument = {} if self.partition is None else {"partition": self.partition}
        try:
            self._producer.produce(
                self.topic,
                value=record.value,
                key=record.key,
                headers=self._build_headers(record),
                timestamp=record.received_ns // 1_000_000,
                on_delivery=report,
                **partition_argument,
            )
        except BufferError:
            self._producer.poll(_POLL_S)
            return None
        if not sent_record.is_reported:
            self._unreported.add(sent_record)
        return sent_record

    def _build_headers(self, record: Record) -> list[tuple[str, bytes]]:
        headers = [
            (RECEIVER_HEADER, self.origin.receiver.encode()),
            (PROTOCOL_HEADER, self.origin.protocol.encode()),
            (RECEIVED_NS_HEADER, b"%d" % record.received_ns),
            (SOURCE_HEADER, record.source),
        ]
        return headers if record.cursor is None else [*headers, (CURSOR_HEADER, record.cursor)]

    def _read_resume_state(self) -> ResumeState:
        """Read this receiver's last cursor and the digests of its last values from the end of the partition.

        Reads ever longer ends until one has a cursor, at most the whole partition.
        """
        import confluent_kafka as ck

        consumer_options = {k: v for k, v in self._options.items() if k not in _PRODUCER_ONLY_OPTIONS}
        if "test.mock.num.brokers" in consumer_options:
            # A mock cluster lives in the producer; other clients reach it by its address.
            del consumer_options["test.mock.num.brokers"]
            (broker,) = self._producer.list_topics(timeout=_ANSWER_TIMEOUT_S).brokers.values()
            consumer_options["bootstrap.servers"] = f"{broker.host}:{broker.port}"
        partition = self.partition or 0
        consumer = ck.Consumer(
            {**consumer_options, "group.id": "branchlake-receive", "enable.auto.commit": False}
            | {"enable.partition.eof": True, "isolation.level": "read_committed"}
        )
        try:
            low, high = consumer.get_watermark_offsets(
                ck.TopicPartition(self.topic, partition), timeout=_ANSWER_TIMEOUT_S
            )
            tail_length = _FIRST_TAIL
            while True:
                start = max(low, high - tail_length)
                resume_state = self._read_range(consumer, start, high)
                if resume_state.cursor is not None or start == low:
                    return resume_state
                tail_length *= 10
        finally:
            consumer.close()

    def _read_range(self, consumer: Any, start: int, end: int) -> ResumeState:
        import confluent_kafka as ck

        cursor: bytes | None = None
        value_digests: list[bytes] = []
        if start >= end:
            return ResumeState()
        consumer.assign([ck.TopicPartition(self.topic, self.partition or 0, start)])
        is_complete = False
        silent_from = self._clock()
        while not is_complete:
            messages = consumer.consume(1_000, timeout=1.0)
            if messages:
                silent_from = self._clock()
            elif self._clock() - silent_from > _ANSWER_TIMEOUT_S:
                raise BrokerUnreachable(f"The end of topic {self.topic} could not be read.")
            for message in messages:
                if message.error() is not None:
                    if message.error().code() == ck.KafkaError._PARTITION_EOF:
                        is_complete = True
                        continue
                    raise ck.KafkaException(message.error())
                headers = dict(message.headers() or ())
                if headers.get(RECEIVER_HEADER) == self.origin.receiver.encode():
                    cursor = headers.get(CURSOR_HEADER, cursor)
                    value_digests.append(digest_value(message.value() or b""))
                is_complete = is_complete or message.offset() >= end - 1
        return ResumeState(cursor, tuple(value_digests[-_REMEMBERED_VALUES:]))


def _create_producer(options: dict[str, Any]) -> Any:
    import confluent_kafka as ck

    return ck.Producer(options)


def _split_at_cursors(records: Sequence[Record]) -> Iterator[list[Record]]:
    """Split records into parts. Each part must be confirmed before the next one is sent.

    All records before a new cursor must be stored first. Otherwise a crash between two reports could leave a
    cursor that is ahead of its records, and these would be lost.
    """
    part: list[Record] = []
    for record in records:
        if part and record.cursor is not None and record.cursor != part[-1].cursor:
            yield part
            part = []
        part.append(record)
    if part:
        yield part
