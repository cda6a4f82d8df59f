"""The causes for which librdkafka cannot use brokers.

The request itself only times out. librdkafka reports the cause separately, through the callback `error_cb`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

_ERROR_TEXT = re.compile(r"(?:\w+://)?([^\s/]+)/\w+: (.*?)(?: \(after .*)?", re.DOTALL)
"""The form of an error: `sasl_ssl://host:9092/bootstrap: what is wrong (after 5ms in state …)`."""
_TLS_ALERT = "SSL alert"
"""The text with which a broker refuses a client over TLS.

Since TLS 1.3 it may come after the connection was established, so librdkafka reports a broken connection.
"""
_ADVICE = ", verify that ssl.ca.location"
"""librdkafka's advice, which is removed: our hints name the right option."""


class Cause(Enum):
    """The reasons why a broker could not be used.

    The value is the predicate of an error message, such as "Kafka at host:9092 did not answer for …".
    """

    CREDENTIALS = "refused the credentials"
    TRUST = "could not be trusted"
    CERTIFICATE = "refused the connection over TLS"
    ADDRESS = "did not answer"
    PROTOCOL = "did not answer, and closed the connection,"

    @property
    def code(self) -> str:
        """The `reason` of the error with this cause."""
        return self.name.lower()

    @property
    def is_transient(self) -> bool:
        """Whether the cause may go away by itself."""
        return self in (Cause.ADDRESS, Cause.PROTOCOL)


@dataclass(frozen=True)
class BrokerFailure:
    """A failure of brokers: the kind of cause, and a message for people that names the broker."""

    cause: Cause
    message: str


class BrokerErrors:
    """Collects the latest errors of one client of the brokers `bootstrap` since the last answered request.

    librdkafka repeats an error at most every ten seconds, so the error of a request may have been reported
    before the request began.
    """

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._current_errors: dict[int, str] = {}
        self._earlier_errors: dict[int, str] = {}
        self._answered = False

    def __call__(self, error: KafkaError) -> None:
        """Record an error. Pass the object as the client's `error_cb`."""
        self._current_errors[error.code()] = error.str()

    def begin_request(self) -> None:
        """Begin a request. Earlier errors count if none are reported during this request.

        They do not count if the last request was answered: then they are over, or concern another broker.
        """
        self._earlier_errors = {} if self._answered else self._earlier_errors | self._current_errors
        self._current_errors, self._answered = {}, False

    def end_request(self) -> None:
        """End a request that was answered, even if the answer is an error."""
        self._answered = True

    @property
    def _are_all_down(self) -> bool:
        from confluent_kafka import KafkaError

        return KafkaError._ALL_BROKERS_DOWN in self._earlier_errors | self._current_errors

    @property
    def is_final(self) -> bool:
        """Whether it is useless to wait longer for the answer of this request.

        This is so if all brokers are down and one of them has refused the client for good.
        """
        from confluent_kafka import KafkaError

        refusals = self._current_errors.keys() & {KafkaError._AUTHENTICATION, KafkaError._SSL}
        has_tls_alert = _TLS_ALERT in self._current_errors.get(KafkaError._TRANSPORT, "")
        return (bool(refusals) or has_tls_alert) and self._are_all_down

    def worst_failure(self, request: str, default_detail: str) -> BrokerFailure:
        """Return the failure that explains why `request` was not answered.

        `default_detail` is the detail of the message if librdkafka reported no error.
        """
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
