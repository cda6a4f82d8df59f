"""What librdkafka says of brokers that it cannot use.

A request to them only times out. Why is told beside it, through the callback `error_cb`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

_SENTENCE = re.compile(r"(?:\w+://)?([^\s/]+)/\w+: (.*?)(?: \(after .*)?", re.DOTALL)
"""`sasl_ssl://host:9092/bootstrap: what is wrong (after 5ms in state …)`."""
_ALERT = "SSL alert"
"""The broker has refused us over TLS. Since TLS 1.3 it may do so when the connection stands, and librdkafka
takes that for one that broke."""
_ADVICE = ", verify that ssl.ca.location"
"""It names an option of librdkafka; our hints say what to set."""


class Cause(Enum):
    """Why brokers cannot be used. The value goes between the broker and what was asked."""

    CREDENTIALS = "refused the credentials"
    TRUST = "could not be trusted"
    CERTIFICATE = "refused the connection over TLS"
    ADDRESS = "did not answer"
    PROTOCOL = "did not answer, and closed the connection,"

    @property
    def code(self) -> str:
        """The `reason` of the error that reports it."""
        return self.name.lower()

    @property
    def passes(self) -> bool:
        """Whether it may pass by itself."""
        return self in (Cause.ADDRESS, Cause.PROTOCOL)


@dataclass(frozen=True)
class Complaint:
    """One of them: the cause, and a sentence that names the broker."""

    cause: Cause
    text: str


class Complaints:
    """The latest ones of one client of the brokers `bootstrap`, since a request was answered.

    librdkafka repeats itself once in ten seconds, or more seldom: what it told before a request may be all
    that is told of it.
    """

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._told: dict[int, str] = {}
        self._before: dict[int, str] = {}
        self._answered = False

    def __call__(self, error: KafkaError) -> None:
        """The client's `error_cb`."""
        self._told[error.code()] = error.str()

    def asked(self) -> None:
        """A request begins. What was told before counts where nothing is told of this one.

        Not if the last one was answered: then it is over, or of a broker that was not needed.
        """
        self._before = {} if self._answered else self._before | self._told
        self._told, self._answered = {}, False

    def answered(self) -> None:
        """All of a request was answered, with an error maybe."""
        self._answered = True

    @property
    def _lost(self) -> bool:
        from confluent_kafka import KafkaError

        return KafkaError._ALL_BROKERS_DOWN in self._before | self._told

    @property
    def final(self) -> bool:
        """Whether all brokers are lost, and since the request one of them for a reason that does not pass."""
        from confluent_kafka import KafkaError

        refused = self._told.keys() & {KafkaError._AUTHENTICATION, KafkaError._SSL}
        alert = _ALERT in self._told.get(KafkaError._TRANSPORT, "")
        return (bool(refused) or alert) and self._lost

    def worst(self, what: str, otherwise: str) -> Complaint:
        """Why nobody has answered for `what`; `otherwise` is said where nothing was complained of."""
        from confluent_kafka import KafkaError

        causes = {
            KafkaError._AUTHENTICATION: Cause.CREDENTIALS,
            KafkaError._SSL: Cause.TRUST,
            KafkaError._RESOLVE: Cause.ADDRESS,
            KafkaError._TRANSPORT: Cause.ADDRESS,
        }
        place, told, cause = self._bootstrap, otherwise, Cause.ADDRESS
        heard = ((code, said[code]) for said in (self._told, self._before) for code in causes if code in said)
        code, sentence = next(heard, (None, ""))
        if code is not None:
            parted = _SENTENCE.fullmatch(sentence)
            place, told = parted.groups() if parted else (place, sentence)
            cause = Cause.CERTIFICATE if _ALERT in told else causes[code]
        elif self._lost:
            cause = Cause.PROTOCOL
        told = told.partition(_ADVICE)[0].rstrip(". ")
        return Complaint(cause, f"Kafka at {place} {cause.value} for {what}: {told}.")
