"""Sweeps that fail, die or meet a retry of the run."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest

from branchlake_dagster.cleanup.sweeper import Sweeper
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieUnavailable
from branchlake_dagster.nessie.model import ContentKey, Put, Reference
from branchlake_dagster.runs.discarding import take_over_branch
from branchlake_dagster_tests.cleanup import sweeper_lake
from branchlake_dagster_tests.cleanup.sweeper_lake import ROWS, Lake, work
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse
lake = sweeper_lake.lake


class Died(BaseException):
    """The sweeper's process is killed."""


@pytest.mark.parametrize("survives", [0, 3, 8, 13, 18])
def test_a_sweep_that_died_is_finished_by_the_next(lake: Lake, survives: int) -> None:
    before = lake.files()
    branch = lake.branch("blocked")
    work(lake, branch)
    lake.discard(branch)
    real = Sweeper._delete_file
    calls = itertools.count()

    def dying(self: Sweeper, location: str) -> None:
        if next(calls) >= survives:
            raise Died
        real(self, location)

    with patch.object(Sweeper, "_delete_file", dying), pytest.raises(Died):
        lake.sweep()
    (done,) = lake.sweep()
    assert done.done
    assert lake.files() == before
    assert lake.names() == set()


@pytest.mark.parametrize("method", ["create_tag", "delete_tag", "references", "entries", "log"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_call_that_fails_is_repeated_later(lake: Lake, method: str, after: int) -> None:
    before = lake.files()
    branch = lake.branch("blocked")
    lake.table(branch).append(ROWS)
    written = lake.files()
    lake.discard(branch)
    real: Callable[..., Any] = getattr(NessieClient, method)
    calls = itertools.count()

    def failing(self: NessieClient, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == after:
            raise NessieUnavailable("planted")
        return real(self, *args, **kwargs)

    with patch.object(NessieClient, method, failing):
        try:
            lake.sweep()
        except NessieUnavailable:
            # The only call after the files are gone is the one that deletes the tag.
            assert lake.files() == (before if (method, after) == ("delete_tag", 1) else written)
    lake.sweep()
    assert lake.files() == before
    assert lake.names() == set()


def test_nothing_is_deleted_when_a_page_of_references_is_missing(lake: Lake) -> None:
    branch = lake.branch("blocked")
    lake.table(branch).append(ROWS)
    lake.discard(branch)
    files = lake.files()
    real = NessieClient.references

    def failing(self: NessieClient, **options: Any) -> Iterator[Reference]:
        if "filter" in options:
            yield from real(self, **options)
            return
        yield from itertools.islice(real(self, **options), 1)
        raise NessieUnavailable("the second page is missing")

    with patch.object(NessieClient, "references", failing), pytest.raises(NessieUnavailable):
        lake.sweep()
    assert lake.files() == files


def test_nothing_is_deleted_when_a_reference_cannot_be_understood(lake: Lake) -> None:
    """Its table's metadata is missing, so nobody knows which files it needs."""
    branch = lake.branch("blocked")
    lake.table(branch).append(ROWS)
    head = lake.nessie.reference(branch).hash
    mine = f"mine-{lake.namespace}"
    lake.nessie.create_branch(mine, from_ref=branch, from_hash=head)
    content = lake.nessie.content(mine, ContentKey([lake.namespace, "t"]))
    broken = replace(content, metadata_location=f"{lake.root.as_uri()}/nowhere.metadata.json")
    lake.nessie.commit(
        mine,
        expected_hash=head,
        operations=[Put(ContentKey([lake.namespace, "t"]), broken)],
        message="broken",
    )
    lake.discard(branch)
    files = lake.files()
    (kept,) = lake.sweep()
    assert not kept.done
    assert (kept.reason.code, "nowhere.metadata.json" in kept.reason) == ("not_possible", True)
    assert lake.files() == files


def test_a_retry_that_comes_first_keeps_everything(lake: Lake) -> None:
    branch = lake.branch("failed")
    lake.table(branch).append(pa.table({"n": [10]}))
    lake.discard(branch)
    real = NessieClient.delete_tag
    own = lake.named("child")

    def retry_first(self: NessieClient, name: str, *, expected_hash: str) -> None:
        if name.startswith("discarded-") and own not in lake.names():
            take_over_branch(self, branch, own)
        real(self, name, expected_hash=expected_hash)

    with patch.object(NessieClient, "delete_tag", retry_first):
        (kept,) = lake.sweep()
    assert kept.reason.code == "claimed_meanwhile"
    assert lake.names() == {own}
    assert lake.rows(own) == [1, 2, 3, 10]


def test_a_retry_that_comes_later_gets_nothing(lake: Lake) -> None:
    branch = lake.branch("failed")
    lake.table(branch).append(pa.table({"n": [10]}))
    lake.discard(branch)
    with patch.object(Sweeper, "_delete_file", side_effect=Died), pytest.raises(Died):
        lake.sweep()
    assert take_over_branch(lake.nessie, branch, lake.named("child")) is None
    lake.sweep()
    assert lake.names() == set()
