"""Discarding a branch, interrupted at each of its steps."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieConflict, NessieUnavailable, ReferenceNotFound
from branchlake_dagster.nessie.model import Reference, ReferenceType
from branchlake_dagster.runs.discarding import (
    discard_branch,
    discarded_tag_name,
    sweeping_tag_name,
    take_over_branch,
)
from branchlake_dagster.tables.errors import RetryNeedsFullRun
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.raised import raising

lakehouse = memory.lakehouse


class Branch:
    """A run branch of this test's own."""

    def __init__(self, lake: Lakehouse, name: str) -> None:
        self.lake, self.nessie, self.name = lake, lake.nessie, name
        self.tag, self.sweeping = discarded_tag_name(name), sweeping_tag_name(name)
        self.own = name.replace("run-", "run-retry-of-")
        self.writes = 0
        lake.nessie.create_branch(name, from_ref="main", from_hash=lake.nessie.reference("main").hash)

    def write(self) -> Reference:
        self.writes += 1
        self.lake.catalog(self.name).create_namespace(f"{self.name.replace('-', '_')}_{self.writes}")
        return self.now()

    def now(self) -> Reference:
        return self.nessie.reference(self.name, fetch_metadata=True)

    def state(self) -> dict[str, str]:
        """Which of branch, tag and the retry's branch exist, and where they stand."""
        names = {self.name: "branch", self.tag: "tag", self.own: "own"}
        found = self.nessie.references(filter=f"ref.name.endsWith('{self.name.removeprefix('run-')}')")
        return {names[ref.name]: ref.hash for ref in found if ref.name in names}


@pytest.fixture
def branch(lakehouse: Lakehouse, namespace: str) -> Iterator[Branch]:
    made = Branch(lakehouse, f"run-{namespace}")
    yield made
    nessie = lakehouse.nessie
    for ref in list(nessie.references()):
        if ref.name.endswith(namespace):
            delete = nessie.delete_tag if ref.type is ReferenceType.TAG else nessie.delete_branch
            delete(ref.name, expected_hash=ref.hash)


def failing(name: str, *, before: bool, error: Exception | None = None) -> Any:
    """NessieClient's method `name` fails once: before it did anything, or after it did it all."""
    real: Callable[..., Any] = getattr(NessieClient, name)
    calls = []

    def method(self: NessieClient, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) > 1:
            return real(self, *args, **kwargs)
        if not before:
            real(self, *args, **kwargs)
        raise error or NessieUnavailable("planted")

    return patch.object(NessieClient, name, method)


@memory.ON_BOTH
def test_a_discarded_branch_is_a_tag_and_its_writer_is_fenced(branch: Branch) -> None:
    seen = branch.write()
    tag = discard_branch(branch.nessie, seen)
    assert tag is not None
    assert (tag.name, tag.hash, tag.type) == (branch.tag, seen.hash, ReferenceType.TAG)
    assert branch.state() == {"tag": seen.hash}
    with pytest.raises(ReferenceNotFound):
        branch.write()


def test_a_branch_without_a_commit_leaves_no_tag(branch: Branch) -> None:
    assert discard_branch(branch.nessie, branch.now()) is None
    assert branch.state() == {}


def test_metadata_is_fetched_when_the_caller_has_none(branch: Branch) -> None:
    assert discard_branch(branch.nessie, branch.nessie.reference(branch.name)) is None
    assert branch.state() == {}


def test_a_late_write_keeps_the_branch_and_removes_the_tag(branch: Branch) -> None:
    seen = branch.write()
    later = branch.write()
    with pytest.raises(NessieConflict):
        discard_branch(branch.nessie, seen)
    assert branch.state() == {"branch": later.hash}
    plain = Reference(seen.type, seen.name, seen.hash)
    with pytest.raises(NessieConflict):
        discard_branch(branch.nessie, plain)
    assert branch.state() == {"branch": later.hash}


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("step", ["create_tag", "delete_branch", "reference"])
def test_discarding_again_after_a_crash_finishes_it(branch: Branch, step: str, before: bool) -> None:
    seen = branch.write()
    with failing(step, before=before), pytest.raises(NessieUnavailable):
        discard_branch(branch.nessie, seen)
    discard_branch(branch.nessie, seen)
    assert branch.state() == {"tag": seen.hash}


def test_a_tag_left_at_an_older_hash_is_replaced(branch: Branch) -> None:
    older = branch.write()
    with failing("delete_branch", before=True), pytest.raises(NessieUnavailable):
        discard_branch(branch.nessie, older)
    newer = branch.write()
    discard_branch(branch.nessie, newer)
    assert branch.state() == {"tag": newer.hash}


def test_two_clean_ups_at_once_leave_the_tag(branch: Branch) -> None:
    seen = branch.write()
    real = NessieClient.delete_branch

    def interleaved(self: NessieClient, *args: Any, **kwargs: Any) -> None:
        with patch.object(NessieClient, "delete_branch", real):
            discard_branch(self, seen)
        real(self, *args, **kwargs)

    with patch.object(NessieClient, "delete_branch", interleaved):
        discard_branch(branch.nessie, seen)
    assert branch.state() == {"tag": seen.hash}


def test_the_slower_of_two_clean_ups_does_not_name_a_state_that_is_being_swept(branch: Branch) -> None:
    seen = branch.write()
    real = NessieClient.delete_branch

    def discard_and_sweep(self: NessieClient, *args: Any, **kwargs: Any) -> None:
        with patch.object(NessieClient, "delete_branch", real):
            discard_branch(self, seen)
        self.create_tag(branch.sweeping, from_ref=branch.tag, from_hash=seen.hash)
        self.delete_tag(branch.tag, expected_hash=seen.hash)
        real(self, *args, **kwargs)

    with patch.object(NessieClient, "delete_branch", discard_and_sweep):
        assert discard_branch(branch.nessie, seen) is None
    assert branch.state() == {}


@memory.ON_BOTH
def test_a_clean_up_that_was_late_does_not_name_a_state_that_was_swept(branch: Branch) -> None:
    seen = branch.write()
    real = NessieClient.create_tag

    def discard_and_sweep(self: NessieClient, *args: Any, **kwargs: Any) -> Reference:
        with patch.object(NessieClient, "create_tag", real):
            discard_branch(self, seen)
        self.delete_tag(branch.tag, expected_hash=seen.hash)
        return real(self, *args, **kwargs)

    with patch.object(NessieClient, "create_tag", discard_and_sweep):
        assert discard_branch(branch.nessie, seen) is None
    assert branch.state() == {}


def test_a_branch_that_was_deleted_while_its_tag_was_being_swept_gets_no_other_tag(branch: Branch) -> None:
    seen = branch.write()
    real = NessieClient.delete_branch

    def delete_and_sweep(self: NessieClient, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.create_tag(branch.sweeping, from_ref=branch.tag, from_hash=seen.hash)
        self.delete_tag(branch.tag, expected_hash=seen.hash)

    with patch.object(NessieClient, "delete_branch", delete_and_sweep):
        assert discard_branch(branch.nessie, seen) is None
    assert branch.state() == {}


# -- a retry takes the branch over ---------------------------------------------------------------------


@pytest.mark.parametrize("discarded", [False, True])
def test_a_retry_takes_the_work_over_under_its_own_name(branch: Branch, discarded: bool) -> None:
    """The old name goes: a writer of the parent's that is still alive stays fenced."""
    seen = branch.write()
    if discarded:
        discard_branch(branch.nessie, seen)
    for _ in range(2):  # each step of the retry may do it
        found = take_over_branch(branch.nessie, branch.name, branch.own)
        assert found is not None
        assert (found.name, found.hash) == (branch.own, seen.hash)
        assert branch.state() == {"own": seen.hash}
    with pytest.raises(ReferenceNotFound):
        branch.write()


@memory.ON_BOTH
def test_there_is_nothing_to_take_over(branch: Branch) -> None:
    discard_branch(branch.nessie, branch.now())
    assert take_over_branch(branch.nessie, branch.name, branch.own) is None
    assert branch.state() == {}


@pytest.mark.parametrize("discarded", [False, True])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("step", ["create_branch", "delete_branch", "delete_tag"])
def test_taking_over_again_after_a_crash_finishes_it(
    branch: Branch, step: str, before: bool, discarded: bool
) -> None:
    seen = branch.write()
    if discarded:
        discard_branch(branch.nessie, seen)
    with failing(step, before=before), contextlib.suppress(NessieUnavailable):
        take_over_branch(branch.nessie, branch.name, branch.own)
    take_over_branch(branch.nessie, branch.name, branch.own)
    assert branch.state() == {"own": seen.hash}


def test_a_late_write_of_the_parent_is_taken_over_too(branch: Branch) -> None:
    branch.write()
    real = NessieClient.delete_branch
    written: list[Reference] = []

    def late(self: NessieClient, *args: Any, **kwargs: Any) -> None:
        if not written:
            written.append(branch.write())
        real(self, *args, **kwargs)

    with patch.object(NessieClient, "delete_branch", late):
        take_over_branch(branch.nessie, branch.name, branch.own)
    assert branch.state() == {"own": written[0].hash}


@pytest.mark.parametrize("discarded", [False, True])
@pytest.mark.parametrize("writes", [False, True])
def test_two_steps_of_a_retry_take_the_work_over_at_once(
    branch: Branch, writes: bool, discarded: bool
) -> None:
    """The other step is done with it, between the first one's request for the new branch and the next one."""
    seen = branch.write()
    if discarded:
        discard_branch(branch.nessie, seen)
    real = NessieClient.create_branch
    others: list[Reference | None] = []

    def slow(self: NessieClient, *args: Any, **kwargs: Any) -> Reference:
        created = real(self, *args, **kwargs)
        if not others:
            others.append(None)
            others[0] = take_over_branch(branch.nessie, branch.name, branch.own)
            if writes:
                branch.lake.catalog(branch.own).create_namespace(f"{branch.own.replace('-', '_')}_late")
        return created

    with patch.object(NessieClient, "create_branch", slow):
        first = take_over_branch(branch.nessie, branch.name, branch.own)
    assert (first and first.name) == branch.own
    assert (others[0] and others[0].name) == branch.own
    assert branch.state().keys() == {"own"}
    assert (branch.state()["own"] == seen.hash) is not writes


def test_a_branch_that_is_discarded_meanwhile_is_taken_over_as_a_tag(branch: Branch) -> None:
    seen = branch.write()
    real = NessieClient.create_branch

    def discarded_first(self: NessieClient, *args: Any, **kwargs: Any) -> Reference:
        discard_branch(self, seen)
        return real(self, *args, **kwargs)

    with patch.object(NessieClient, "create_branch", discarded_first):
        take_over_branch(branch.nessie, branch.name, branch.own)
    assert branch.state() == {"own": seen.hash}


def test_the_sweeper_is_not_robbed(branch: Branch) -> None:
    """The tag is deleted by whoever claims it; the loser leaves nothing behind."""
    seen = branch.write()
    discard_branch(branch.nessie, seen)
    real = NessieClient.create_branch

    def sweeper_first(self: NessieClient, *args: Any, **kwargs: Any) -> Reference:
        found = real(self, *args, **kwargs)
        if "tag" in branch.state():
            self.create_tag(branch.sweeping, from_ref=branch.tag, from_hash=seen.hash)
            self.delete_tag(branch.tag, expected_hash=seen.hash)
        return found

    with patch.object(NessieClient, "create_branch", sweeper_first):
        assert take_over_branch(branch.nessie, branch.name, branch.own) is None
    assert branch.state() == {}


def test_a_parent_that_does_not_stop_writing_is_not_taken_over(branch: Branch) -> None:
    branch.write()
    real = NessieClient.delete_branch

    def busy(self: NessieClient, name: str, *, expected_hash: str) -> None:
        if name == branch.name:
            branch.write()
        real(self, name, expected_hash=expected_hash)

    with (
        patch.object(NessieClient, "delete_branch", busy),
        raising(RetryNeedsFullRun, branch=branch.name, reason="branch_busy"),
    ):
        take_over_branch(branch.nessie, branch.name, branch.own)
    assert branch.state() == {"branch": branch.now().hash}


def test_a_discard_that_was_late_does_not_lose_what_a_retry_claimed(branch: Branch) -> None:
    seen = branch.write()
    discard_branch(branch.nessie, seen)
    # Somebody made the branch again by hand, and claimed the tag while we deleted the branch.
    branch.nessie.create_branch(branch.name, from_ref=branch.tag, from_hash=seen.hash)
    real = NessieClient.delete_branch

    def claimed_meanwhile(self: NessieClient, *args: Any, **kwargs: Any) -> None:
        self.delete_tag(branch.tag, expected_hash=seen.hash)
        real(self, *args, **kwargs)

    with patch.object(NessieClient, "delete_branch", claimed_meanwhile):
        discard_branch(branch.nessie, seen)
    assert branch.state() == {"tag": seen.hash}
