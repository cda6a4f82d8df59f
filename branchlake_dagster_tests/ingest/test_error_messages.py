"""What librdkafka complains of, as a cause and a sentence."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from branchlake_dagster.ingest import kafka_topics as topics
from branchlake_dagster.receivers import kafka_sink as sinks
from branchlake_dagster.receivers.kafka_errors import BrokerErrors, Cause

DOWN = KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down")
REFUSED = KafkaError(KafkaError._TRANSPORT, "b:9092/bootstrap: Connect to ipv4#10.0.0.1:9092 failed: refused")
UNKNOWN = KafkaError(
    KafkaError._RESOLVE,
    "b:9092/bootstrap: Failed to resolve 'b:9092': not known (after 3ms in state CONNECT)",
)
UNTRUSTED = KafkaError(
    KafkaError._SSL,
    "ssl://b:9092/bootstrap: SSL handshake failed: certificate verify failed: broker certificate could not be"
    " verified, verify that ssl.ca.location is correctly configured (after 5ms in state SSL_HANDSHAKE)",
)
ALERT = KafkaError(
    KafkaError._TRANSPORT,
    "ssl://b:9092/bootstrap: Receive failed: tlsv13 alert certificate required: SSL alert number 116"
    " (after 2ms in state APIVERSION_QUERY)",
)
WRONG = KafkaError(
    KafkaError._AUTHENTICATION, "sasl_ssl://b:9092/2: SASL authentication error: no (after 3ms in state AUTH)"
)


@pytest.mark.parametrize(
    ("told", "cause", "text"),
    [
        ([], Cause.ADDRESS, "Kafka at a:1,b:2 did not answer for topic t: Local: Timed out."),
        ([DOWN], Cause.PROTOCOL, "Kafka at a:1,b:2 did not answer, and closed the connection, for topic t:"),
        (
            [REFUSED, DOWN],
            Cause.ADDRESS,
            "Kafka at b:9092 did not answer for topic t: Connect to ipv4#10.0.0.1:9092 failed: refused.",
        ),
        (
            [UNKNOWN, REFUSED],
            Cause.ADDRESS,
            "Kafka at b:9092 did not answer for topic t: Failed to resolve 'b:9092': not known.",
        ),
        (
            [UNTRUSTED, REFUSED, DOWN],
            Cause.TRUST,
            "Kafka at b:9092 could not be trusted for topic t: SSL handshake failed: certificate verify"
            " failed: broker certificate could not be verified.",
        ),
        (
            [REFUSED, WRONG, UNTRUSTED, DOWN],
            Cause.CREDENTIALS,
            "Kafka at b:9092 refused the credentials for topic t: SASL authentication error: no.",
        ),
        (
            [REFUSED, ALERT, DOWN],
            Cause.CERTIFICATE,
            "Kafka at b:9092 refused the connection over TLS for topic t: Receive failed: tlsv13 alert"
            " certificate required: SSL alert number 116.",
        ),
        (
            [KafkaError(KafkaError._SSL, "no place")],
            Cause.TRUST,
            "Kafka at a:1,b:2 could not be trusted for topic t: no place.",
        ),
    ],
)
def test_the_worst_is_reported(told: list[KafkaError], cause: Cause, text: str) -> None:
    complaints = BrokerErrors("a:1,b:2")
    for one in told:
        complaints(one)
    found = complaints.worst_failure("topic t", "Local: Timed out")
    assert found.cause is cause
    assert found.message.startswith(text)


def test_only_what_does_not_pass_is_final_and_only_when_no_broker_is_left() -> None:
    complaints = BrokerErrors("a:1")
    complaints(REFUSED)
    complaints(DOWN)
    assert not complaints.is_final
    complaints(WRONG)
    assert complaints.is_final
    complaints.begin_request()
    assert not complaints.is_final
    complaints(WRONG)
    assert complaints.is_final
    complaints.end_request()
    complaints.begin_request()
    complaints(WRONG)
    assert not complaints.is_final
    assert [cause for cause in Cause if cause.is_transient] == [Cause.ADDRESS, Cause.PROTOCOL]


def test_the_last_error_before_a_request_counts_until_a_broker_answers() -> None:
    def cause() -> Cause:
        return complaints.worst_failure("topic t", "Local: Timed out").cause

    complaints = BrokerErrors("a:1")
    complaints(WRONG)
    complaints(DOWN)
    complaints.begin_request()
    assert cause() is Cause.CREDENTIALS
    complaints(REFUSED)
    assert cause() is Cause.ADDRESS
    complaints.end_request()
    assert cause() is Cause.ADDRESS, "it may be of another broker than the one that has answered"
    complaints(WRONG)
    complaints.begin_request()
    assert cause() is Cause.ADDRESS, "what is told after an answer is not of the next request"
    complaints(DOWN)
    complaints.begin_request()
    complaints.begin_request()
    assert cause() is Cause.PROTOCOL


def test_each_cause_has_a_hint() -> None:
    assert set(topics._HINTS) == set(sinks._HINTS) == set(Cause)
