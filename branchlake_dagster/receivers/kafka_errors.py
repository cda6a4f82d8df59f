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

_ERROR_TEXT = re.compile(r"(?:\w+://)?([^\s/]+)/\w+: (.*?)(?: \(after .*)?", re.DOTALL)
"""`sasl_ssl://host:9092/bootstrap: what is wrong (after 5ms in state …)`."""
_TLS_ALERT = "SSL alert"
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
    def is_transient(self) -> bool:
        """Whether it may pass by itself."""
        return self in (Cause.ADDRESS, Cause.PROTOCOL)


@dataclass(frozen=True)
class BrokerFailure:
    """One of them: the cause, and a sentence that names the broker."""

    cause: Cause
    message: str


class BrokerErrors:
    """The latest ones of one client of the brokers `bootstrap`, since a request was answered.

    librdkafka repeats itself once in ten seconds, or more seldom: what it told before a request may be all
    that is told of it.
    """

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._current_errors: dict[int, str] = {}
        self._earlier_errors: dict[int, str] = {}
        self._answered = False

    def __call__(self, error: KafkaError) -> None:
        """The client's `error_cb`."""
        self._current_errors[error.code()] = error.str()

    def begin_request(self) -> None:
        """A request begins. What was told before counts where nothing is told of this one.

        Not if the last one was answered: then it is over, or of a broker that was not needed.
        """
        self._earlier_errors = {} if self._answered else self._earlier_errors | self._current_errors
        self._current_errors, self._answered = {}, False

    def end_request(self) -> None:
        """All of a request was answered, with an error maybe."""
        self._answered = True

    @property
    def _are_all_down(self) -> bool:
        from confluent_kafka import KafkaError

        return KafkaError._ALL_BROKERS_DOWN in self._earlier_errors | self._current_errors

    @property
    def is_final(self) -> bool:
        """Whether all brokers are lost, and since the request one of them for a reason that does not pass."""
        from confluent_kafka import KafkaError

        refusals = self._current_errors.keys() & {KafkaError._AUTHENTICATION, KafkaError._SSL}
        has_tls_alert = _TLS_ALERT in self._current_errors.get(KafkaError._TRANSPORT, "")
        return (bool(refusals) or has_tls_alert) and self._are_all_down

    def worst_failure(self, request: str, default_detail: str) -> BrokerFailure:
        """Why nobody has answered for `request`; `default_detail` is said where nothing was complained of."""
        from confluent_kafka import KafkaError

        causes = {
            KafkaError._AUTHENTICATION: Cause.CREDENTIALS,
            KafkaError._SSL: Cause.TRUST,
            KafkaError._RESOLVE: Cause.ADDRESS,
            KafkaError._TRANSPORT: Cause.ADDRESS,
        }
        broker, detail, cause = self._bootstrap, default_detail, Cause.ADDRESS
        candidates = (
            (code, errors[code])
            for errors in (self._current_errors, self._earlier_errors)
            for code in causes
            if code in errors
        )
        code, error_text = next(candidates, (None, ""))
        if code is not None:
            match = _ERROR_TEXT.fullmatch(error_text)
            broker, detail = match.groups() if match else (broker, error_text)
            cause = Cause.CERTIFICATE if _TLS_ALERT in detail else causes[code]
        elif self._are_all_down:
            cause = Cause.PROTOCOL
        detail = detail.partition(_ADVICE)[0].rstrip(". ")
        return BrokerFailure(cause, f"Kafka at {broker} {cause.value} for {request}: {detail}.")
