"""What each kind of answer, or its absence, becomes. No Nessie runs here."""

from __future__ import annotations

import json
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal
from branchlake_dagster.nessie import NessieClient, RetryPolicy
from branchlake_dagster.nessie.errors import (
    ContentNotFound,
    NessieAlreadyExists,
    NessieConflict,
    NessieNotFound,
    NessieOutcomeUnknown,
    NessieRefused,
    NessieUnauthorized,
    NessieUnavailable,
    NotNessie,
    ReferenceNotFound,
)
from branchlake_dagster.nessie.model import ContentKey, Delete, KeyConflict, Reference, ReferenceType
from branchlake_dagster_tests.suite.nessie_fixtures import FakeServer
from branchlake_dagster_tests.suite.raised import raising

H = "ab" * 32
OTHER = "cd" * 32
KEY = ContentKey(["a", "t"])
TOKEN = "s3cr3t-token"
ONCE = RetryPolicy(())

READS: list[Callable[[NessieClient], Any]] = [
    lambda c: c.config(),
    lambda c: c.reference("main"),
    lambda c: list(c.references()),
    lambda c: c.content("main", KEY),
    lambda c: c.contents("main", [KEY]),
    lambda c: list(c.entries("main")),
    lambda c: list(c.log("main")),
    lambda c: list(c.diff("main", "other")),
]
CHANGES: list[Callable[[NessieClient], Any]] = [
    lambda c: c.create_branch("bb", from_ref="main", from_hash=H),
    lambda c: c.create_tag("tag", from_ref="main", from_hash=H),
    lambda c: c.delete_branch("bb", expected_hash=H),
    lambda c: c.delete_tag("tag", expected_hash=H),
    lambda c: c.commit("bb", expected_hash=H, operations=[Delete(KEY)], message="m"),
    lambda c: c.merge(from_name="bb", from_hash=H, into="main", expected_hash=H, message="m"),
]


def open_client(fake: FakeServer, *, retry: RetryPolicy = ONCE, token: str | None = TOKEN) -> NessieClient:
    return NessieClient(fake.uri, token=token, retry=retry, sleep=lambda _: None)


def refusal(code: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "message": "because",
        "errorCode": code,
        "serverStackTrace": "at org.projectnessie.Secret",
        **more,
    }


@pytest.mark.parametrize(
    ("status", "payload", "expected"),
    [
        (400, refusal("BAD_REQUEST"), NessieRefused),
        (400, b"", NotNessie),  # Nessie's HTTP server could not read the request line
        (413, b"<html>too large</html>", NotNessie),
        (408, b"", NessieUnavailable),
        (401, b"", NessieUnauthorized),
        (403, refusal("FORBIDDEN"), NessieUnauthorized),
        (404, refusal("REFERENCE_NOT_FOUND"), ReferenceNotFound),
        (404, refusal("CONTENT_NOT_FOUND"), ContentNotFound),
        (404, b"<html>not here</html>", NessieNotFound),
        (409, refusal("REFERENCE_ALREADY_EXISTS"), NessieAlreadyExists),
        (409, refusal("REFERENCE_CONFLICT"), NessieConflict),
        (429, b"slow down", NessieUnavailable),
        (302, b"", NessieRefused),
        (500, refusal("UNKNOWN"), NessieUnavailable),
        (503, b"<html>", NessieUnavailable),
        (200, b"<html>hello</html>", NotNessie),
        (200, b"\n<!DOCTYPE html><p>sign in", NotNessie),
        (200, {"unexpected": 1}, NotNessie),
        # Cut off on its way, or spoilt: asking again may help.
        (200, b'{"reference": {"type": "BRA', NessieUnavailable),
        (200, b"", NessieUnavailable),
        (200, b"\xff\xfe{", NessieUnavailable),
        (200, b"[" * 100_000, NessieUnavailable),
    ],
)
def test_answers_to_a_read(
    fake_server: FakeServer, status: int, payload: Any, expected: type[BranchlakeError]
) -> None:
    fake_server.script = [(status, payload)]
    with open_client(fake_server) as client, pytest.raises(expected) as caught:
        client.reference("main")
    assert type(caught.value) is expected
    assert "main" in str(caught.value)
    assert "projectnessie.Secret" not in str(caught.value) + repr(vars(caught.value))


MAIN = {"reference": {"type": "BRANCH", "name": "main", "hash": "11223344"}}


@pytest.mark.parametrize(
    ("status", "spoilt"),
    [(200, json.dumps(MAIN).encode()[:-20]), (200, b""), (200, b"<html>busy</html>"), (400, b"")],
)
def test_a_read_with_a_damaged_reply_is_repeated(fake_server: FakeServer, status: int, spoilt: bytes) -> None:
    fake_server.script = [(status, spoilt), (status, spoilt), (200, MAIN)]
    with open_client(fake_server, retry=RetryPolicy()) as client:
        assert client.reference("main").hash == "11223344"
    assert len(fake_server.requests) == 3


def test_what_stays_a_foreign_page_is_refused_in_the_end(fake_server: FakeServer) -> None:
    fake_server.script = [(200, b"<html>sign in</html>")]
    with open_client(fake_server, retry=RetryPolicy()) as client, pytest.raises(NotNessie):
        client.reference("main")
    assert len(fake_server.requests) == 4
    assert issubclass(NotNessie, Terminal)


@pytest.mark.parametrize("call", CHANGES)
@pytest.mark.parametrize("step", [(408, b""), (500, {}), (502, b""), (503, {}), (504, b""), None])
def test_a_change_without_a_clear_answer_is_unknown(
    fake_server: FakeServer, call: Callable[[NessieClient], Any], step: tuple[int, Any] | None
) -> None:
    fake_server.script = [step]
    with open_client(fake_server) as client, pytest.raises(NessieOutcomeUnknown):
        call(client)


@pytest.mark.parametrize("call", [*CHANGES[:2], *CHANGES[4:]])
def test_a_change_with_an_unreadable_answer_is_unknown(
    fake_server: FakeServer, call: Callable[[NessieClient], Any]
) -> None:
    fake_server.script = [(200, b"<html>")]
    with open_client(fake_server) as client, raising(NessieOutcomeUnknown, reason="unreadable_answer"):
        call(client)


@pytest.mark.parametrize("call", READS)
def test_a_read_without_an_answer_is_unavailable(
    fake_server: FakeServer, call: Callable[[NessieClient], Any]
) -> None:
    fake_server.script = [None]
    with open_client(fake_server) as client, pytest.raises(NessieUnavailable):
        call(client)


@pytest.mark.parametrize("call", READS + CHANGES)
def test_a_refused_connection_changed_nothing(call: Callable[[NessieClient], Any]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{unused.getsockname()[1]}/api/v2"
    with NessieClient(uri, retry=ONCE) as client, raising(NessieUnavailable, reason="no_connection"):
        call(client)


def test_an_unknown_host_changed_nothing() -> None:
    with NessieClient("http://nessie.invalid/api/v2", retry=ONCE) as client, pytest.raises(NessieUnavailable):
        client.create_branch("bb", from_ref="main", from_hash=H)


def test_a_silent_server_times_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}/api/v2"
        with NessieClient(uri, read_timeout_s=0.05, retry=ONCE) as client:
            with pytest.raises(NessieUnavailable):
                client.config()
            with pytest.raises(NessieOutcomeUnknown):
                client.delete_branch("bb", expected_hash=H)


def test_conflicts_carry_their_keys(fake_server: FakeServer) -> None:
    details = {
        "conflicts": [
            {"conflictType": "VALUE_DIFFERS", "key": {"elements": ["a", "t"]}, "message": "m"},
            {"conflictType": "UNEXPECTED_HASH", "key": None, "message": "n"},
        ]
    }
    fake_server.script = [(409, refusal("REFERENCE_CONFLICT", errorDetails=details))]
    with open_client(fake_server) as client, pytest.raises(NessieConflict) as caught:
        client.commit("bb", expected_hash=H, operations=[Delete(KEY)], message="m")
    assert caught.value.conflicts == (
        KeyConflict(KEY, "VALUE_DIFFERS", "m"),
        KeyConflict(None, "UNEXPECTED_HASH", "n"),
    )
    assert fake_server.requests[0].headers["Nessie-Client-Spec"] == "2"


def test_unreadable_conflict_details_do_not_hide_the_conflict(fake_server: FakeServer) -> None:
    fake_server.script = [(409, refusal("REFERENCE_CONFLICT", errorDetails={"conflicts": [{"x": 1}]}))]
    with open_client(fake_server) as client, pytest.raises(NessieConflict) as caught:
        client.delete_branch("bb", expected_hash=H)
    assert caught.value.conflicts == ()


def branch(at: str) -> dict[str, Any]:
    return {"reference": {"type": "BRANCH", "name": "bb", "hash": at}}


THRICE = RetryPolicy((1.0, 2.0))


def test_a_creation_whose_answer_was_lost_is_found(fake_server: FakeServer) -> None:
    fake_server.script = [None, (409, refusal("REFERENCE_ALREADY_EXISTS")), (200, branch(H))]
    with open_client(fake_server, retry=THRICE) as client:
        made = client.create_branch("bb", from_ref="main", from_hash=H)
    assert made == Reference(ReferenceType.BRANCH, "bb", H)


def test_a_table_that_another_writer_created_is_not_the_runs_own(fake_server: FakeServer) -> None:
    fake_server.script = [None, (409, refusal("REFERENCE_ALREADY_EXISTS")), (200, branch(OTHER))]
    with open_client(fake_server, retry=THRICE) as client, pytest.raises(NessieAlreadyExists):
        client.create_branch("bb", from_ref="main", from_hash=H)
    fake_server.script = [(409, refusal("REFERENCE_ALREADY_EXISTS"))]
    with open_client(fake_server, retry=THRICE) as client, pytest.raises(NessieAlreadyExists):
        client.create_branch("bb", from_ref="main", from_hash=H)


def test_a_deletion_whose_answer_was_lost_is_done(fake_server: FakeServer) -> None:
    fake_server.script = [None, (404, refusal("REFERENCE_NOT_FOUND"))]
    with open_client(fake_server, retry=THRICE) as client:
        client.delete_branch("bb", expected_hash=H)
    with open_client(fake_server, retry=THRICE) as client, pytest.raises(ReferenceNotFound):
        client.delete_branch("bb", expected_hash=H)


def test_a_merge_whose_answer_was_lost_is_repeated(fake_server: FakeServer) -> None:
    done = {"wasApplied": False, "wasSuccessful": True, "resultantTargetHash": OTHER}
    fake_server.script = [None, (200, done)]
    with open_client(fake_server, retry=THRICE) as client:
        result = client.merge(from_name="bb", from_hash=H, into="main", expected_hash=H, message="m")
    assert (result.successful, result.applied, result.target_hash) == (True, False, OTHER)
    assert fake_server.requests[0].body == fake_server.requests[1].body
    body = fake_server.requests[0].body
    assert body["isReturnConflictAsResult"] is True
    assert not any("dry" in name.lower() for name in body)


def test_a_commit_whose_answer_was_lost_is_not_repeated(fake_server: FakeServer) -> None:
    fake_server.script = [None]
    with open_client(fake_server, retry=THRICE) as client, pytest.raises(NessieOutcomeUnknown):
        client.commit("bb", expected_hash=H, operations=[Delete(KEY)], message="m")
    assert len(fake_server.requests) == 1


def test_a_commit_that_was_turned_away_is_repeated(fake_server: FakeServer) -> None:
    fake_server.script = [(429, b""), (200, {"targetBranch": {"hash": OTHER}, "addedContents": None})]
    with open_client(fake_server, retry=THRICE) as client:
        result = client.commit("bb", expected_hash=H, operations=[Delete(KEY)], message="m")
    assert result.hash == OTHER


@pytest.mark.parametrize("call", READS + CHANGES)
def test_every_call_sends_the_token_and_no_error_shows_it(
    fake_server: FakeServer, call: Callable[[NessieClient], Any]
) -> None:
    # A careless proxy echoes the header it did not like.
    fake_server.script = [(401, {"message": f"bad header Bearer {TOKEN}"})]
    with open_client(fake_server) as client, pytest.raises(NessieUnauthorized) as caught:
        call(client)
    assert TOKEN not in repr(client)
    assert fake_server.requests[-1].headers["Authorization"] == f"Bearer {TOKEN}"
    shown = "".join(traceback.format_exception(caught.value)) + repr(vars(caught.value))
    assert TOKEN not in shown
    assert caught.value.__context__ is None


@pytest.mark.parametrize("call", READS + CHANGES)
def test_a_lost_answer_does_not_carry_the_token_along(
    fake_server: FakeServer, call: Callable[[NessieClient], Any]
) -> None:
    fake_server.script = [None]
    with open_client(fake_server) as client, pytest.raises(BranchlakeError) as caught:
        call(client)
    assert caught.value.__context__ is None
    assert TOKEN not in repr(vars(caught.value))


def test_without_a_token_no_header_is_sent(fake_server: FakeServer) -> None:
    fake_server.script = [(401, b"")]
    with open_client(fake_server, token=None) as client, pytest.raises(NessieUnauthorized):
        client.config()
    assert "Authorization" not in fake_server.requests[0].headers


def test_a_token_file_may_end_in_a_newline(fake_server: FakeServer) -> None:
    fake_server.script = [(401, b"")]
    with open_client(fake_server, token=f"{TOKEN}\n") as client, pytest.raises(NessieUnauthorized):
        client.config()
    assert fake_server.requests[0].headers["Authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize("token", ["", "  ", "Bearer x", "a\nb", "tökén"])
def test_impossible_tokens_are_refused_unseen(token: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        NessieClient("http://127.0.0.1:1/api/v2", token=token)
    assert not token.strip() or token not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "host/api/v2",
        "ftp://h/api/v2",
        "http://h",
        "http://h/api/v1",
        "http://h/api/v2?x=1",
        "http:///api/v2",
    ],
)
def test_addresses_that_are_no_api_v2(uri: str) -> None:
    with raising(ConfigurationError, reason="not_api_v2"):
        NessieClient(uri)


def test_credentials_in_the_address_are_refused_unseen() -> None:
    with raising(ConfigurationError, reason="credentials_in_address") as caught:
        NessieClient(f"http://me:{TOKEN}@h/api/v2")
    assert TOKEN not in str(caught.value)


def test_a_missing_ca_bundle_is_found_at_once(tmp_path: Path) -> None:
    with raising(ConfigurationError, reason="ca_bundle_missing", subject=str(tmp_path / "none.pem")):
        NessieClient("https://h/api/v2", verify=str(tmp_path / "none.pem"))


def test_connections_are_kept(fake_server: FakeServer) -> None:
    fake_server.script = [(200, branch(H))]
    with open_client(fake_server) as client:
        for _ in range(5):
            client.reference("bb")
    assert len(fake_server.connections) == 1


def test_a_client_may_be_used_again_after_close(fake_server: FakeServer) -> None:
    fake_server.script = [(200, branch(H))]
    client = open_client(fake_server)
    client.reference("bb")
    client.close()
    assert client.reference("bb").hash == H
    client.close()
