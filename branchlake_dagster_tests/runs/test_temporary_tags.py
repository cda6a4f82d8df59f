"""Tags that keep a commit for a limited time."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieConflict, NessieUnavailable, ReferenceNotFound
from branchlake_dagster.runs.temporary_tags import find_tag_end, keep_commit, remove_ended_tags
from branchlake_dagster.stored_names import ReferencePrefix
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse
NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.fixture
def client(lakehouse: Lakehouse) -> NessieClient:
    return lakehouse.nessie


@pytest.fixture
def commit(client: NessieClient) -> Iterator[str]:
    yield client.reference(MAIN).hash
    for tag in list(client.references(filter="refType == 'TAG'")):
        client.delete_tag(tag.name, expected_hash=tag.hash)


def tags(client: NessieClient) -> list[str]:
    return sorted(tag.name for tag in client.references(filter="refType == 'TAG'"))


def keep(client: NessieClient, commit: str, *, now: datetime = NOW) -> str:
    """A tag of a process that was killed before it deleted it."""
    with keep_commit(
        client, ReferencePrefix.READING, commit, from_ref=MAIN, lifetime=HOUR, now=lambda: now
    ) as name:
        client_tag = client.reference(name)
        assert client_tag.hash == commit
    client.create_tag(name, from_ref=MAIN, from_hash=commit)
    return name


def test_the_tag_exists_while_the_body_runs_and_its_name_holds_its_end(
    client: NessieClient, commit: str
) -> None:
    with keep_commit(
        client, ReferencePrefix.UNDROP, commit, from_ref=MAIN, lifetime=HOUR, now=lambda: NOW
    ) as name:
        assert tags(client) == [name]
        assert find_tag_end(name) == NOW + HOUR
    assert tags(client) == []


def test_an_error_of_the_body_deletes_the_tag(client: NessieClient, commit: str) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        keep_commit(client, ReferencePrefix.READING, commit, from_ref=MAIN, lifetime=HOUR),
    ):
        raise ZeroDivisionError
    assert tags(client) == []


def test_somebody_else_may_delete_the_tag(client: NessieClient, commit: str) -> None:
    with keep_commit(client, ReferencePrefix.READING, commit, from_ref=MAIN, lifetime=HOUR) as name:
        client.delete_tag(name, expected_hash=commit)


def test_an_unknown_commit_leaves_no_tag(client: NessieClient) -> None:
    with (
        pytest.raises(ReferenceNotFound),
        keep_commit(client, ReferencePrefix.READING, "ab" * 32, from_ref=MAIN, lifetime=HOUR),
    ):
        pass
    assert tags(client) == []


def test_tags_are_deleted_after_their_end_with_room_for_a_clock_that_is_ahead(
    client: NessieClient, commit: str
) -> None:
    ended, later = keep(client, commit), keep(client, commit, now=NOW + HOUR)
    assert remove_ended_tags(client, NOW + HOUR + timedelta(minutes=9)) == []
    assert remove_ended_tags(client, NOW + HOUR + timedelta(minutes=11)) == [ended]
    assert tags(client) == [later]


def test_a_reader_deletes_no_tag_of_another(client: NessieClient, commit: str) -> None:
    """Its clock may be days ahead."""
    other = keep(client, commit)
    with keep_commit(
        client, ReferencePrefix.READING, commit, from_ref=MAIN, lifetime=HOUR, now=lambda: NOW + 99 * HOUR
    ) as name:
        assert tags(client) == sorted([name, other])


@pytest.mark.parametrize("error", [NessieUnavailable("down"), NessieConflict("moved")])
def test_a_tag_that_cannot_be_deleted_is_no_error(
    client: NessieClient,
    commit: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    """It ends by itself, and the body's own result or error must not be lost."""

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        with keep_commit(client, ReferencePrefix.READING, commit, from_ref=MAIN, lifetime=HOUR) as name:
            patch.setattr(client, "delete_tag", fail)
        with (
            pytest.raises(ZeroDivisionError),
            keep_commit(client, ReferencePrefix.READING, commit, from_ref=MAIN, lifetime=HOUR),
        ):
            raise ZeroDivisionError
    assert name in caplog.text
    assert name in tags(client)


@pytest.mark.parametrize(
    "name",
    [
        "reading-mine",
        "reading-20261127T120000Z",
        "reading-99999999T999999Z-00000000-0000-4000-8000-000000000000",
        "discarded-20001127T120000Z-00000000-0000-4000-8000-000000000000",
        "my-reading-20001127T120000Z-00000000-0000-4000-8000-000000000000",
    ],
)
def test_tags_of_users_are_never_deleted(client: NessieClient, commit: str, name: str) -> None:
    client.create_tag(name, from_ref=MAIN, from_hash=commit)
    assert find_tag_end(name) is None
    assert remove_ended_tags(client, datetime(2100, 1, 1, tzinfo=UTC)) == []
    assert tags(client) == [name]
