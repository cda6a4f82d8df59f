"""The sink that produces to Kafka. A record is handed over when the broker's report says so."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal, Transient
from branchlake_dagster.extras import require
from branchlake_dagster.receivers.kafka_errors import Cause, Complaints
from branchlake_dagster.receivers.records import (
    CURSOR,
    PROTOCOL,
    RECEIVED_NS,
    RECEIVER,
    SOURCE,
    NotConfirmed,
    NotHandedOver,
    Origin,
    Record,
    Resumed,
    Roll,
    digest,
)

DEFAULT_ROLL = Roll(records=10_000, size_bytes=4 * 1024 * 1024, age_s=0.02)
OURS = {"enable.idempotence": True, "acks": "all", "message.timeout.ms": 0, "linger.ms": 5}
"""What a producer of ours always has; ``linger.ms`` may be set otherwise.

There is no message timeout: after it librdkafka reports a record as failed that the broker may have got.
"""
_RIGHT = {
    "enable.idempotence": ("true",),
    "acks": ("all", "-1"),
    "request.required.acks": ("all", "-1"),
    **dict.fromkeys(("message.timeout.ms", "delivery.timeout.ms"), ("0",)),
    # With few attempts, too, a record is given up whose last one has arrived.
    **dict.fromkeys(("message.send.max.retries", "retries"), (str(2**31 - 1),)),
}
"""Options that may not have other values: records would be lost or doubled."""

_TAIL, _KNOWN = 10_000, 50_000
_ANSWER_S, _LOOK_S, _POLL_S = 10.0, 2.5, 0.05
_PATIENCE_S = 60.0
_HINTS = {
    Cause.CREDENTIALS: "Look at sasl.username, sasl.password and sasl.mechanism in the options for Kafka.",
    Cause.TRUST: "The option ssl.ca.location is the PEM file of the authority that signed the broker's"
    " certificate, which must be for the host that is named.",
    Cause.CERTIFICATE: "A broker that knows its clients by certificates wants the options"
    " ssl.certificate.location and ssl.key.location, from an authority that it trusts.",
    Cause.ADDRESS: "See whether the broker runs and its address is right; it is tried again.",
    Cause.PROTOCOL: "Set the option security.protocol to what the listener expects; it is tried again.",
}
_OF_PRODUCERS = frozenset({*OURS, *_RIGHT, "compression.type"})


@dataclass(eq=False)
class _Sent:
    """A record that librdkafka has, and what its report says."""

    record: Record
    reported: bool = False
    error: Any = None


class BrokerUnreachable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """No broker answers; nothing was changed."""


class BrokerRefused(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The brokers refused the credentials, or their certificate is not trusted; nothing was changed."""


class KafkaSink:
    """Records of one receiver in one topic.

    Args:
        topic: the topic's name; made by the broker if that is allowed to.
        partition: where all of it goes; None spreads it by key. What has a cursor needs one.
        origin: what the headers say of the receiver.
        options: librdkafka's (``bootstrap.servers``, ``security.protocol``, ``sasl.*``, ``ssl.*`` …).
        roll: how much is sent before its reports are awaited.
        patience_s: after so many seconds without a report a call of `write` fails. The records stay with the
            producer; the next call with them waits on, and sends none of them again.
        make_producer: makes a producer of such options; librdkafka's by default.
        clock: monotonic seconds.

    """

    def __init__(
        self,
        topic: str,
        partition: int | None,
        origin: Origin,
        options: Mapping[str, Any],
        *,
        roll: Roll = DEFAULT_ROLL,
        patience_s: float = _PATIENCE_S,
        make_producer: Callable[[dict[str, Any]], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require("kafka", "confluent_kafka", wanted_by="A sink in Kafka")
        for name, right in _RIGHT.items():
            if name in options and str(options[name]).lower() not in right:
                raise ConfigurationError(
                    f"{name}={options[name]} would lose or double records.", hint="Leave the option out."
                )
        self.topic, self.partition, self.origin, self.roll = topic, partition, origin, roll
        self._options = {**OURS, **{name: value for name, value in options.items() if name not in _RIGHT}}
        self._patience_s = patience_s
        self._waiting: list[_Sent] = []
        self._unreported: set[_Sent] = set()
        self._make = make_producer or _producer
        self._producer: Any = None
        self._complaints = Complaints(str(options.get("bootstrap.servers")))
        self._clock = clock
        self._ended = threading.Event()

    def open(self, *, resume: bool) -> Resumed:
        """Reach the broker; with ``resume`` read the end of the partition.

        Raises:
            BrokerUnreachable: nobody answers, or the topic has no leader yet.
            BrokerRefused: the brokers do not take the credentials, or their certificate is not trusted.
            ConfigurationError: an option is wrong.

        """
        import confluent_kafka as ck

        if resume and self.partition is None:
            raise ConfigurationError(
                f"Topic {self.topic} takes a cursor, so its records need one partition.",
                hint="Name the partition.",
                reason="partition_not_named",
                subject=self.topic,
            )
        try:
            self._producer = self._producer or self._new_producer()
        except ck.KafkaException as error:
            raise ConfigurationError(
                f"An option for Kafka is wrong: {error.args[0].str()}.", reason="kafka_option"
            ) from error
        self._complaints.asked()
        try:
            self._reach()
            self._complaints.answered()
            return self._resumed() if resume else Resumed()
        except ck.KafkaException as error:
            found = self._complaints.worst(f"topic {self.topic}", error.args[0].str())
            kind = BrokerUnreachable if found.cause.passes else BrokerRefused
            text = f"Topic {self.topic} cannot be reached: {found.text}"
            raise kind(text, hint=_HINTS[found.cause], reason=found.cause.code, subject=self.topic) from error

    def write(self, records: Sequence[Record], dropped: int = 0) -> None:  # noqa: ARG002 - the log's
        """Produce, and wait for every report."""
        for number, part in enumerate(parts := list(_in_order(records))):
            try:
                self._write(part)
            except NotHandedOver as error:
                left = [*error.records, *(one for later in parts[number + 1 :] for one in later)]
                raise NotHandedOver(error.message, left, hint=error.hint) from error
            except NotConfirmed as error:
                left = [*error.records, *(one for later in parts[number + 1 :] for one in later)]
                raise NotConfirmed(error.message, left) from error

    def stop_waiting(self) -> None:
        """Let `write` return without the reports that are missing."""
        self._ended.set()

    def close(self) -> None:
        """Drop what is not sent, and the connections."""
        if self._producer is not None:
            self._producer.purge()
            self._producer.poll(0)
            self._producer = None

    def _reach(self) -> None:
        """Ask for the topic, until the time is over or the brokers have refused us."""
        import confluent_kafka as ck

        until = self._clock() + _ANSWER_S
        while True:
            try:
                self._producer.list_topics(self.topic, timeout=min(_LOOK_S, _ANSWER_S))
            except ck.KafkaException:
                self._producer.poll(0)
                if self._complaints.final or self._clock() >= until:
                    raise
            else:
                return

    def _new_producer(self) -> Any:
        return self._make({**self._options, "error_cb": self._complaints})

    def _write(self, records: Sequence[Record]) -> None:
        import confluent_kafka as ck

        until = self._clock() + self._patience_s
        earlier: dict[int, deque[_Sent]] = {}
        for one in self._waiting:
            earlier.setdefault(id(one.record), deque()).append(one)
        sent: list[_Sent] = []
        refused: list[Any] = []
        try:
            while len(sent) < len(records) and not self._ended.is_set() and self._clock() < until:
                record = records[len(sent)]
                # What an earlier call has sent may be there already: its report is awaited.
                found = earlier[id(record)].popleft() if earlier.get(id(record)) else self._queue(record)
                if found is not None:
                    sent.append(found)
                # Reports come in polls; a full queue waits for them.
                self._producer.poll(0 if self._unreported else _POLL_S)
        except ck.KafkaException as error:
            refused.append(error.args[0])
        while self._unreported and not self._ended.is_set() and self._clock() < until:
            self._producer.poll(_POLL_S)
        self._waiting = [*chain.from_iterable(earlier.values()), *(one for one in sent if not one.reported)]
        left = [
            record
            for record, one in zip_longest(records, sent)
            if one is None or not one.reported or one.error is not None
        ]
        errors = [*(one.error for one in sent if one.error is not None), *refused]
        if self._unreported and self._ended.is_set():
            raise NotConfirmed(
                f"{len(self._unreported)} records were sent to topic {self.topic}, "
                "and no broker has confirmed them.",
                left,
            )
        if any(error.fatal() or error.code() == ck.KafkaError._FATAL for error in errors):
            # A producer that cannot keep its promise of order takes nothing more; a new one does.
            self._producer.purge()
            self._producer = self._new_producer()
            self._waiting, self._unreported = [], set()
        if left:
            why = "the receiver ends" if self._ended.is_set() else "no broker has confirmed them yet"
            why = errors[0].str() if errors else why
            raise NotHandedOver(
                f"{len(left)} records were not taken by topic {self.topic}: {why}.",
                left,
                hint="See the broker's log; it is tried again.",
            )
        self._complaints.answered()

    def _queue(self, record: Record) -> _Sent | None:
        """Give it to librdkafka; None when its queue is full."""
        one = _Sent(record)

        def report(error: Any, _: Any) -> None:
            one.reported, one.error = True, error
            self._unreported.discard(one)

        where = {} if self.partition is None else {"partition": self.partition}
        try:
            self._producer.produce(
                self.topic,
                value=record.value,
                key=record.key,
                headers=self._headers(record),
                timestamp=record.received_ns // 1_000_000,
                on_delivery=report,
                **where,
            )
        except BufferError:
            self._producer.poll(_POLL_S)
            return None
        if not one.reported:
            self._unreported.add(one)
        return one

    def _headers(self, record: Record) -> list[tuple[str, bytes]]:
        found = [
            (RECEIVER, self.origin.receiver.encode()),
            (PROTOCOL, self.origin.protocol.encode()),
            (RECEIVED_NS, b"%d" % record.received_ns),
            (SOURCE, record.source),
        ]
        return found if record.cursor is None else [*found, (CURSOR, record.cursor)]

    def _resumed(self) -> Resumed:
        """The last cursor and the last values of this receiver, read backwards in growing steps."""
        import confluent_kafka as ck

        wanted = {k: v for k, v in self._options.items() if k not in _OF_PRODUCERS}
        if "test.mock.num.brokers" in wanted:
            # Such a cluster lives in the producer; others reach it by its address.
            del wanted["test.mock.num.brokers"]
            (broker,) = self._producer.list_topics(timeout=_ANSWER_S).brokers.values()
            wanted["bootstrap.servers"] = f"{broker.host}:{broker.port}"
        partition = self.partition or 0
        consumer = ck.Consumer(
            {**wanted, "group.id": "branchlake-receive", "enable.auto.commit": False}
            | {"enable.partition.eof": True, "isolation.level": "read_committed"}
        )
        try:
            low, high = consumer.get_watermark_offsets(
                ck.TopicPartition(self.topic, partition), timeout=_ANSWER_S
            )
            back = _TAIL
            while True:
                start = max(low, high - back)
                found = self._between(consumer, start, high)
                if found.cursor is not None or start == low:
                    return found
                back *= 10
        finally:
            consumer.close()

    def _between(self, consumer: Any, start: int, end: int) -> Resumed:
        import confluent_kafka as ck

        cursor: bytes | None = None
        known: list[bytes] = []
        if start >= end:
            return Resumed()
        consumer.assign([ck.TopicPartition(self.topic, self.partition or 0, start)])
        ended = False
        silent_from = self._clock()
        while not ended:
            messages = consumer.consume(1_000, timeout=1.0)
            if messages:
                silent_from = self._clock()
            elif self._clock() - silent_from > _ANSWER_S:
                raise BrokerUnreachable(f"The end of topic {self.topic} could not be read.")
            for message in messages:
                if message.error() is not None:
                    if message.error().code() == ck.KafkaError._PARTITION_EOF:
                        ended = True
                        continue
                    raise ck.KafkaException(message.error())
                headers = dict(message.headers() or ())
                if headers.get(RECEIVER) == self.origin.receiver.encode():
                    cursor = headers.get(CURSOR, cursor)
                    known.append(digest(message.value() or b""))
                ended = ended or message.offset() >= end - 1
        return Resumed(cursor, tuple(known[-_KNOWN:]))


def _producer(options: dict[str, Any]) -> Any:
    import confluent_kafka as ck

    return ck.Producer(options)


def _in_order(records: Sequence[Record]) -> Iterator[list[Record]]:
    """Parts that must be there before the next one is sent.

    Where a cursor moves, everything before it must be there first: a crash between two reports would
    otherwise leave a cursor that is ahead of its records.
    """
    part: list[Record] = []
    for record in records:
        if part and record.cursor is not None and record.cursor != part[-1].cursor:
            yield part
            part = []
        part.append(record)
    if part:
        yield part
