"""What publisher, reaper and retry rely on, asked of the real Nessie and of the simulation's.

The simulation is worth as much as this suite: whatever it uses of Nessie has its test here.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from branchlake_dagster.nessie import MergeMode, NessieClient, RetryPolicy
from branchlake_dagster.nessie.errors import (
    NessieAlreadyExists,
    NessieConflict,
    NessieRefused,
    NessieUnavailable,
    ReferenceNotFound,
)
from branchlake_dagster.nessie.model import (
    CommitResult,
    ContentKey,
    Delete,
    IcebergTable,
    MergeResult,
    Namespace,
    Operation,
    Put,
    ReferenceType,
    Unchanged,
)
from branchlake_dagster_tests.simulation.nessie import InMemoryNessie
from branchlake_dagster_tests.simulation.transport import DirectTransport
from branchlake_dagster_tests.suite.raised import raising

NS, T, U, W = (ContentKey(path.split(".")) for path in ("n", "n.t", "n.u", "n.w"))
OTHER = ContentKey(["o"])
UNKNOWN = "ab" * 32


def table(location: str = "m0", content_id: str | None = None) -> IcebergTable:
    return IcebergTable(content_id, location, -1, 0, 0, 0)


def space(key: ContentKey, content_id: str | None = None, **properties: str) -> Put:
    return Put(key, Namespace(content_id, key.elements, properties))


class Scene:
    """A branch of its own in place of `main`, with namespace n and table n.t on it, and what is done to it."""

    def __init__(self, client: NessieClient) -> None:
        self.client = client
        self.empty = client.config().no_ancestor_hash
        self.main = self.branch(at=self.empty)
        self.base = self.commit(self.main, space(NS), Put(T, table())).hash

    def branch(self, *, at: str | None = None, name: str | None = None) -> str:
        name = name or f"test/{uuid.uuid4().hex[:12]}"
        at = at or self.head(self.main)
        return self.client.create_branch(name, from_ref="main", from_hash=at).name

    def head(self, ref: str) -> str:
        return self.client.reference(ref).hash

    def commit(
        self, branch: str, *operations: Operation, at: str | None = None, **properties: str
    ) -> CommitResult:
        return self.client.commit(
            branch,
            expected_hash=at or self.head(branch),
            operations=operations,
            message="m",
            properties=properties,
        )

    def content_id(self, ref: str, key: ContentKey = T) -> str:
        found = self.client.content(ref, key).content_id
        assert found
        return found

    def change(self, branch: str, location: str, key: ContentKey = T, at: str | None = None) -> str:
        put = Put(key, table(location, self.content_id(f"{branch}@{at}" if at else branch, key)))
        return self.commit(branch, put, at=at).hash

    def location(self, ref: str, key: ContentKey = T) -> str | None:
        found = self.client.contents(ref, [key]).get(key)
        return found.metadata_location if isinstance(found, IcebergTable) else None

    def merge(
        self,
        source: str,
        into: str | None = None,
        *,
        at: str | None = None,
        tip: str | None = None,
        modes: dict[ContentKey, MergeMode] | None = None,
    ) -> MergeResult:
        into = into or self.main
        return self.client.merge(
            from_name=source,
            from_hash=tip or self.head(source),
            into=into,
            expected_hash=at or self.head(into),
            message="merged",
            properties={"publication": "p1"},
            key_merge_modes=modes,
        )

    def conflicts(self, *operations: Operation, at: str | None = None) -> list[tuple[str, str]]:
        """The conflicts of a commit to main that is refused by them."""
        with pytest.raises(NessieConflict) as caught:
            self.commit(self.main, *operations, at=at)
        return [(one.key.name if one.key else "", one.kind) for one in caught.value.conflicts]


@pytest.fixture(params=["in-memory", pytest.param("real", marks=pytest.mark.nessie)])
def nessie(request: pytest.FixtureRequest) -> Iterator[NessieClient]:
    once = RetryPolicy(())
    if request.param == "in-memory":
        client = NessieClient("", transport=DirectTransport(InMemoryNessie()), retry=once)
        head = client.reference("main").hash
        client.commit("main", expected_hash=head, operations=[space(ContentKey(["first"]))], message="first")
        yield client
    else:
        with NessieClient(request.getfixturevalue("nessie_uri"), retry=once) as client:
            yield client
            delete_test_references(client)


def delete_test_references(client: NessieClient) -> None:
    """Delete the references that tests of the client have created.

    Nessie cannot list the contents of some of them, so later clean-ups that read all references would fail.
    """
    for ref in list(client.references(filter="ref.name.startsWith('test/')")):
        delete = client.delete_tag if ref.type == ReferenceType.TAG else client.delete_branch
        delete(ref.name, expected_hash=ref.hash)


@pytest.fixture
def scene(nessie: NessieClient) -> Scene:
    return Scene(nessie)


Outcome = tuple[bool, bool, list[tuple[str, str]]]


def outcome(result: MergeResult) -> Outcome:
    """Applied, successful, conflicts."""
    told = [(one.key.name if one.key else "", one.kind) for one in result.conflicts]
    return result.applied, result.successful, told


APPLIED: Outcome = (True, True, [])
NOTHING_TO_DO: Outcome = (False, True, [])


# -- references ----------------------------------------------------------------------------------------


def test_config_and_an_empty_branch(nessie: NessieClient) -> None:
    config = nessie.config()
    assert config.default_branch == "main"
    created_at = str(config.repository_created_at)
    assert datetime.fromisoformat(created_at) < datetime.now(UTC)
    assert re.search(r"\.\d{3,9}Z\Z", created_at)
    assert nessie.config().repository_created_at == created_at
    empty = nessie.create_branch(
        f"test/{uuid.uuid4().hex}", from_ref="main", from_hash=config.no_ancestor_hash
    )
    assert nessie.reference(empty.name, fetch_metadata=True).metadata is None
    assert list(nessie.log(empty.name)) == []
    assert list(nessie.entries(empty.name)) == []


def test_a_name_can_be_taken_once(scene: Scene) -> None:
    name = scene.branch()
    for at in (scene.head(scene.main), scene.empty):
        with pytest.raises(NessieAlreadyExists):
            scene.client.create_branch(name, from_ref="main", from_hash=at)
        with pytest.raises(NessieAlreadyExists):
            scene.client.create_tag(name, from_ref="main", from_hash=at)


def test_creation_needs_a_known_hash_and_any_reference(scene: Scene) -> None:
    with pytest.raises(ReferenceNotFound):
        scene.branch(at=UNKNOWN)
    with pytest.raises(ReferenceNotFound):
        scene.client.create_branch("test/x", from_ref="test/none", from_hash=scene.base)
    # The hash of a branch that is not `main`'s and that is gone.
    source = scene.branch()
    tip = scene.change(source, "m1")
    scene.client.delete_branch(source, expected_hash=tip)
    again = scene.branch(at=tip, name=source)
    assert (scene.head(again), scene.location(again)) == (tip, "m1")


def test_deletion_wants_the_present_hash_and_type(scene: Scene) -> None:
    name = scene.branch()
    tip = scene.change(name, "m1")
    for at in (scene.base, UNKNOWN):
        with raising(NessieConflict, "UNEXPECTED_HASH"):
            scene.client.delete_branch(name, expected_hash=at)
    with pytest.raises(NessieRefused):
        scene.client.delete_tag(name, expected_hash=tip)
    scene.client.delete_branch(name, expected_hash=tip)
    with pytest.raises(ReferenceNotFound):
        scene.client.delete_branch(name, expected_hash=tip)
    with pytest.raises(NessieRefused):
        scene.client.delete_branch("main", expected_hash=scene.head("main"))


def test_a_tag_keeps_what_a_deleted_branch_held(scene: Scene) -> None:
    name = scene.branch()
    tip = scene.change(name, "m1")
    tag = scene.client.create_tag(f"{name}-tag", from_ref=name, from_hash=tip)
    assert (tag.type, tag.hash) == (ReferenceType.TAG, tip)
    scene.client.delete_branch(name, expected_hash=tip)
    assert scene.location(tag.name) == scene.location(f"@{tip}") == "m1"
    with pytest.raises(NessieRefused):
        scene.commit(tag.name, Delete(T))
    with pytest.raises(NessieRefused):
        scene.merge(scene.main, into=tag.name)
    scene.client.delete_tag(tag.name, expected_hash=tip)


def test_metadata_counts_along_first_parents(nessie: NessieClient) -> None:
    base = nessie.reference("main").hash
    name, key = f"test/{uuid.uuid4().hex[:12]}", ContentKey([f"t{uuid.uuid4().hex[:12]}"])
    nessie.create_branch(name, from_ref="main", from_hash=base)

    def seen(ref: str = name) -> tuple[int | None, int | None, str | None]:
        metadata = nessie.reference(ref, fetch_metadata=True).metadata
        assert metadata is not None
        assert metadata.head_commit is not None
        assert metadata.head_commit.hash == nessie.reference(ref).hash
        return metadata.commits_ahead, metadata.commits_behind, metadata.common_ancestor_hash

    assert seen() == (0, 0, base)
    tip = nessie.commit(name, expected_hash=base, operations=[space(key)], message="m").hash
    assert seen() == (1, 0, base)
    nessie.merge(from_name=name, from_hash=tip, into="main", expected_hash=base, message="merged")
    # Merging makes it neither behind nor level: only the first parents are looked at.
    assert seen() == (1, 1, base)
    assert seen("main") == (None, None, None)
    nessie.create_tag(f"{name}-tag", from_ref=name, from_hash=tip)
    assert seen(f"{name}-tag") == (None, None, None)


def test_references_by_filter(scene: Scene) -> None:
    prefix = f"test/{uuid.uuid4().hex[:8]}"
    names = [scene.branch(name=f"{prefix}-{i}") for i in range(3)]
    scene.client.create_tag(f"{prefix}-tag", from_ref="main", from_hash=scene.base)

    def found(expression: str) -> list[str]:
        return [ref.name for ref in scene.client.references(filter=expression, page_size=2)]

    assert found(f"refType == 'BRANCH' && ref.name.startsWith('{prefix}')") == names
    assert found(f"ref.name.startsWith('{prefix}')") == [*names, f"{prefix}-tag"]
    assert found(f"refType == 'TAG' && ref.name.startsWith('{prefix}')") == [f"{prefix}-tag"]
    assert found(f"ref.name == '{names[0]}' || ref.name == '{names[1]}'") == names[:2]


# -- commit --------------------------------------------------------------------------------------------


def test_a_commit_conflicts_only_on_its_keys(scene: Scene) -> None:
    scene.change(scene.main, "m1")
    scene.commit(scene.main, Put(U, table()), at=scene.base)
    assert scene.conflicts(Put(T, table("m2", scene.content_id(scene.main))), at=scene.base) == [
        ("n.t", "VALUE_DIFFERS")
    ]
    assert scene.conflicts(Put(U, table()), at=scene.base) == [("n.u", "KEY_EXISTS")]


def test_a_commit_says_every_conflict(scene: Scene) -> None:
    content_id = scene.content_id(scene.main)
    scene.change(scene.main, "m1")
    scene.commit(scene.main, Put(U, table()))
    found = scene.conflicts(Put(T, table("m2", content_id)), Put(U, table()), Put(W, table()), at=scene.base)
    assert sorted(found) == [("n.t", "VALUE_DIFFERS"), ("n.u", "KEY_EXISTS")]
    assert scene.location(scene.main, W) is None


def test_expected_hashes_are_of_the_branch(scene: Scene) -> None:
    other = scene.branch()
    elsewhere = scene.change(other, "m1")
    for at in (elsewhere, UNKNOWN):
        with pytest.raises(ReferenceNotFound):
            scene.commit(scene.main, Put(U, table()), at=at)
        with pytest.raises(ReferenceNotFound):
            scene.merge(other, at=at)
    with pytest.raises(ReferenceNotFound):
        scene.commit("test/none", Put(U, table()), at=scene.base)


def test_unchanged_guards_a_key_that_exists(scene: Scene) -> None:
    assert scene.commit(scene.main, Put(U, table()), Unchanged(T), at=scene.base).hash
    scene.commit(scene.main, Put(W, table()), Unchanged(T), at=scene.base)
    scene.change(scene.main, "m1")
    assert scene.conflicts(space(OTHER), Unchanged(T), at=scene.base) == [("n.t", "VALUE_DIFFERS")]
    # It compares values, not versions.
    scene.change(scene.main, "m0")
    scene.commit(scene.main, space(OTHER), Unchanged(T), at=scene.base)
    scene.commit(scene.main, Delete(T))
    # n.w is there by now: what a commit asserts is told before what it puts.
    also = ("n.w", "KEY_EXISTS")
    assert scene.conflicts(Put(W, table()), Unchanged(T), at=scene.base) == [
        ("n.t", "KEY_DOES_NOT_EXIST"),
        also,
    ]
    scene.commit(scene.main, Put(T, table()))
    assert scene.conflicts(Put(W, table()), Unchanged(T), at=scene.base) == [
        ("n.t", "CONTENT_ID_DIFFERS"),
        also,
    ]


def test_unchanged_on_an_absent_key_holds_only_at_the_head(scene: Scene) -> None:
    scene.commit(scene.main, Put(W, table()), Unchanged(U), at=scene.base)
    # Nobody made n.u, and yet:
    assert scene.conflicts(space(OTHER), Unchanged(U), at=scene.base) == [("n.u", "KEY_DOES_NOT_EXIST")]
    scene.commit(scene.main, Put(U, table()))
    assert scene.conflicts(space(OTHER), Unchanged(U), at=scene.base) == [("n.u", "PAYLOAD_DIFFERS")]


def test_unchanged_alone_makes_a_commit(scene: Scene) -> None:
    made = scene.commit(scene.main, Unchanged(T), publication="p1")
    (entry,) = scene.client.log(scene.main, limit=1, fetch_operations=True)
    assert (entry.commit.hash, entry.operations) == (made.hash, ())
    with pytest.raises(NessieRefused):
        scene.commit(scene.main)


def test_a_new_key_takes_no_content_id(scene: Scene) -> None:
    run = scene.branch()
    made = scene.commit(run, Put(U, table("r1")))
    assert made.content_ids == {U: scene.content_id(run, U)}
    with pytest.raises(NessieRefused, match="must not have a content ID"):
        scene.commit(scene.main, Put(U, table("r1", scene.content_id(run, U))))
    scene.commit(scene.main, Put(U, table("r1")))
    # It got another id than on the branch, and merging the branch conflicts although the table is the same.
    assert scene.content_id(scene.main, U) != scene.content_id(run, U)
    assert outcome(scene.merge(run)) == (False, False, [("n.u", "KEY_EXISTS")])
    with pytest.raises(NessieRefused, match="must not have a content ID"):
        scene.commit(scene.main, Put(U, table("r2", scene.content_id(scene.main, U))), at=scene.base)


def test_a_known_key_takes_its_content_id(scene: Scene) -> None:
    content_id = scene.content_id(scene.main)
    for wrong in (None, str(uuid.uuid4())):
        with pytest.raises(NessieRefused, match="content ID"):
            scene.commit(scene.main, Put(T, table("m1", wrong)))
    assert scene.commit(scene.main, Put(T, table("m1", content_id))).content_ids == {}
    # The same value once more is a commit as well.
    at = scene.head(scene.main)
    assert scene.commit(scene.main, Put(T, table("m1", content_id))).hash != at
    with pytest.raises(NessieRefused):
        scene.commit(scene.main, Put(T, Namespace(content_id, T.elements)))


def test_puts_of_dropped_and_recreated_tables(scene: Scene) -> None:
    content_id = scene.content_id(scene.main)
    put = Put(T, table("m1", content_id))
    scene.commit(scene.main, Delete(T))
    assert scene.conflicts(put, at=scene.base) == [("n.t", "KEY_DOES_NOT_EXIST")]
    with pytest.raises(NessieRefused, match="must not have a content ID"):
        scene.commit(scene.main, put)
    scene.commit(scene.main, Put(T, table()))
    assert scene.conflicts(put, at=scene.base) == [("n.t", "CONTENT_ID_DIFFERS")]


def test_deletes(scene: Scene) -> None:
    assert scene.conflicts(Delete(U)) == [("n.u", "KEY_DOES_NOT_EXIST")]
    scene.commit(scene.main, Put(U, table()))
    assert scene.conflicts(Delete(U), at=scene.base) == [("n.u", "PAYLOAD_DIFFERS")]
    scene.change(scene.main, "m1")
    assert scene.conflicts(Delete(T), at=scene.base) == [("n.t", "VALUE_DIFFERS")]
    at = scene.head(scene.main)
    scene.commit(scene.main, Delete(T))
    assert scene.conflicts(Delete(T), at=at) == [("n.t", "KEY_DOES_NOT_EXIST")]


def test_renames_and_recreations(scene: Scene) -> None:
    content_id = scene.content_id(scene.main)
    with pytest.raises(NessieRefused, match="Duplicate"):
        scene.commit(scene.main, Delete(T), Put(T, table("m1", content_id)))
    with pytest.raises(NessieRefused, match="Duplicate"):
        scene.commit(scene.main, Put(U, table()), Unchanged(U))
    assert set(scene.commit(scene.main, Delete(T), Put(T, table("m1"))).content_ids) == {T}
    again = scene.content_id(scene.main)
    assert again != content_id
    scene.commit(scene.main, Delete(T), Put(U, table("m1", again)))
    assert (scene.location(scene.main, T), scene.content_id(scene.main, U)) == (None, again)


def test_namespaces(scene: Scene) -> None:
    with pytest.raises(NessieRefused, match="content ID"):
        scene.commit(scene.main, space(NS))
    scene.commit(scene.main, space(NS, scene.content_id(scene.main, NS), k="v"))
    deep = ContentKey(["o", "t"])
    assert scene.conflicts(Put(deep, table())) == [("o", "NAMESPACE_ABSENT")]
    assert scene.conflicts(Put(ContentKey(["n", "t", "x"]), table())) == [("n.t", "NOT_A_NAMESPACE")]
    assert scene.conflicts(Delete(NS)) == [("n", "NAMESPACE_NOT_EMPTY")]
    made = scene.commit(scene.main, Put(deep, table()), space(OTHER))
    assert set(made.content_ids) == {deep, OTHER}
    assert scene.conflicts(space(OTHER), at=scene.base) == [("o", "KEY_EXISTS")]
    scene.commit(scene.main, Delete(OTHER), Delete(deep))


# -- merge ---------------------------------------------------------------------------------------------


def test_a_merge_may_expect_any_hash_of_its_target(scene: Scene) -> None:
    run = scene.branch()
    tip = scene.commit(run, Put(U, table("r1"))).hash
    moved = scene.commit(scene.main, Put(W, table())).hash
    result = scene.merge(run, at=scene.base)
    assert outcome(result) == APPLIED
    assert (result.target_hash, result.common_ancestor_hash) == (scene.head(scene.main), scene.base)
    (entry,) = scene.client.log(scene.main, limit=1, fetch_operations=True)
    assert entry.commit.parent_hashes == (moved, tip)
    assert entry.commit.properties == {"publication": "p1"}
    (put,) = entry.operations
    assert isinstance(put, Put)
    assert (put.key, put.content) == (U, scene.client.content(run, U))


def test_a_repeated_merge_is_successful_and_not_applied(scene: Scene) -> None:
    run = scene.branch()
    scene.commit(run, Put(U, table("r1")))
    assert scene.merge(run, at=scene.base).applied
    for _ in range(2):
        again = scene.merge(run, at=scene.base)
        assert outcome(again) == NOTHING_TO_DO
        assert again.target_hash == scene.head(scene.main)
        scene.change(scene.main, "later", U)
    assert scene.location(scene.main, U) == "later"


def test_later_commits_of_a_merged_branch_start_from_the_merge(scene: Scene) -> None:
    run = scene.branch()
    first = scene.commit(run, Put(U, table("r1"))).hash
    scene.merge(run)
    scene.change(run, "r2", U)
    result = scene.merge(run)
    assert (outcome(result), result.common_ancestor_hash) == (APPLIED, first)
    scene.change(scene.main, "m3", U)
    scene.change(run, "r3", U)
    assert outcome(scene.merge(run)) == (False, False, [("n.u", "VALUE_DIFFERS")])


def test_a_part_of_a_branch_can_be_merged(scene: Scene) -> None:
    run = scene.branch()
    first = scene.commit(run, Put(U, table())).hash
    scene.commit(run, Put(W, table()))
    assert outcome(scene.merge(run, tip=first)) == APPLIED
    assert scene.location(scene.main, W) is None
    assert outcome(scene.merge(run)) == APPLIED
    assert outcome(scene.merge(run, tip=first)) == NOTHING_TO_DO


def test_a_branch_without_commits_has_nothing_to_merge(scene: Scene) -> None:
    run = scene.branch()
    assert outcome(scene.merge(run)) == NOTHING_TO_DO
    scene.change(scene.main, "m1")
    assert outcome(scene.merge(run)) == NOTHING_TO_DO
    # Nor has one whose commits cancel out, and no merge of it is recorded.
    at = scene.head(scene.main)
    run = scene.branch()
    scene.change(run, "r1")
    scene.change(run, "m1")
    assert outcome(scene.merge(run)) == NOTHING_TO_DO
    assert scene.head(scene.main) == at


def test_a_merge_needs_its_reference_but_takes_any(scene: Scene) -> None:
    run = scene.branch()
    tip = scene.commit(run, Put(U, table())).hash
    scene.client.delete_branch(run, expected_hash=tip)
    with pytest.raises(ReferenceNotFound):
        scene.merge(run, tip=tip)
    with pytest.raises(ReferenceNotFound):
        scene.merge(scene.main, tip=UNKNOWN)
    assert outcome(scene.merge(scene.main, tip=tip)) == APPLIED


def test_the_same_change_outside_branchlake_conflicts(scene: Scene) -> None:
    run = scene.branch()
    scene.change(run, "same")
    scene.change(scene.main, "same")
    assert outcome(scene.merge(run)) == (False, False, [("n.t", "VALUE_DIFFERS")])
    run = scene.branch()
    at = scene.head(scene.main)
    scene.commit(run, Put(U, table("same")))
    scene.commit(scene.main, Put(U, table("same")))
    assert outcome(scene.merge(run, at=at)) == (False, False, [("n.u", "KEY_EXISTS")])
    run = scene.branch()
    scene.commit(run, Delete(T))
    scene.commit(scene.main, Delete(T))
    assert outcome(scene.merge(run)) == (False, False, [("n.t", "KEY_DOES_NOT_EXIST")])


def test_kinds_of_merge_conflicts(scene: Scene) -> None:
    dropped, changed = scene.branch(), scene.branch()
    scene.commit(dropped, Delete(T))
    scene.change(changed, "r1")
    scene.change(scene.main, "m1")
    assert outcome(scene.merge(dropped)) == (False, False, [("n.t", "VALUE_DIFFERS")])
    scene.commit(scene.main, Delete(T))
    result = scene.merge(changed)
    assert outcome(result) == (False, False, [("n.t", "KEY_DOES_NOT_EXIST")])
    assert result.target_hash == scene.head(scene.main)
    scene.commit(scene.main, Put(T, table()))
    assert outcome(scene.merge(changed)) == (False, False, [("n.t", "CONTENT_ID_DIFFERS")])


def test_a_table_recreated_on_the_branch_is_merged_with_its_id(scene: Scene) -> None:
    run = scene.branch()
    scene.commit(run, Delete(T))
    scene.commit(run, Put(T, table("r1")))
    assert outcome(scene.merge(run)) == APPLIED
    assert scene.content_id(scene.main) == scene.content_id(run)


def test_a_merge_loses_a_renamed_table(scene: Scene) -> None:
    """Publishing a rename takes a commit."""
    content_id = scene.content_id(scene.main)
    run, changing = scene.branch(), scene.branch()
    scene.commit(run, Delete(T), Put(U, table("m0", content_id)))
    scene.commit(changing, Delete(T), Put(U, table("r1", content_id)))
    assert outcome(scene.merge(changing)) == (False, False, [("n.u", "KEY_EXISTS")])
    assert outcome(scene.merge(run)) == APPLIED
    assert {entry.key for entry in scene.client.entries(scene.main)} == {NS}


def test_forced_keys_win(scene: Scene) -> None:
    run = scene.branch()
    scene.change(run, "r1")
    scene.change(scene.main, "m1")
    assert outcome(scene.merge(run, modes={T: "FORCE"})) == APPLIED
    assert scene.location(scene.main) == "r1"


def test_dropped_keys_never_come_back(scene: Scene) -> None:
    run = scene.branch()
    scene.change(run, "r1")
    scene.commit(run, Put(U, table()))
    assert outcome(scene.merge(run, modes={T: "DROP"})) == APPLIED
    assert (scene.location(scene.main), scene.location(scene.main, U)) == ("m0", "m0")
    # The whole branch counts as merged.
    assert outcome(scene.merge(run)) == NOTHING_TO_DO
    scene.commit(run, Put(W, table()))
    assert outcome(scene.merge(run)) == APPLIED
    assert scene.location(scene.main) == "m0"


def test_a_merge_of_dropped_keys_only_leaves_no_mark(scene: Scene) -> None:
    run = scene.branch()
    scene.change(run, "r1")
    assert outcome(scene.merge(run, modes={T: "DROP"})) == NOTHING_TO_DO
    assert scene.head(scene.main) == scene.base
    assert outcome(scene.merge(run)) == APPLIED


def test_a_fork_of_main_carries_the_branch_that_was_merged_into_it(scene: Scene) -> None:
    """How a rebase publishes: what conflicts is dropped, replayed on the fork, and the fork is merged."""
    run = scene.branch()
    scene.change(run, "r1")
    scene.commit(run, Put(U, table()))
    scene.change(scene.main, "m1")
    fork = scene.branch()
    assert outcome(scene.merge(run, into=fork, modes={T: "DROP"})) == APPLIED
    scene.change(fork, "m1+r1")
    assert outcome(scene.merge(fork)) == APPLIED
    assert (scene.location(scene.main), scene.location(scene.main, U)) == ("m1+r1", "m0")
    assert outcome(scene.merge(run)) == NOTHING_TO_DO


def test_main_merged_into_a_branch_is_not_merged_back(scene: Scene) -> None:
    run = scene.branch()
    scene.change(run, "r1")
    moved = scene.commit(scene.main, Put(U, table())).hash
    assert outcome(scene.merge(scene.main, into=run)) == APPLIED
    result = scene.merge(run)
    assert (outcome(result), result.common_ancestor_hash) == (APPLIED, moved)
    assert (scene.location(scene.main), scene.location(scene.main, U)) == ("r1", "m0")


def test_both_sides_may_make_a_namespace(scene: Scene) -> None:
    run = scene.branch()
    inside = ContentKey(["o", "t"])
    scene.commit(run, space(OTHER, by="run"), Put(inside, table()))
    scene.commit(scene.main, space(OTHER, by="main"))
    assert outcome(scene.merge(run)) == APPLIED
    assert scene.client.content(scene.main, OTHER) == scene.client.content(run, OTHER)
    assert outcome(scene.merge(run)) == NOTHING_TO_DO


def test_a_missing_namespace_is_an_error_and_hides_the_conflicts(scene: Scene) -> None:
    scene.commit(scene.main, space(OTHER))
    run, dropping = scene.branch(), scene.branch()
    scene.commit(run, Put(ContentKey(["o", "t"]), table()))
    scene.change(run, "r1")
    scene.commit(dropping, Delete(OTHER))
    child = ContentKey(["o", "x"])
    scene.commit(scene.main, Put(child, table()))
    with raising(NessieConflict, "NAMESPACE_NOT_EMPTY"):
        scene.merge(dropping)
    scene.change(scene.main, "m1")
    scene.commit(scene.main, Delete(OTHER), Delete(child))
    with pytest.raises(NessieConflict) as caught:
        scene.merge(run)
    assert [one.kind for one in caught.value.conflicts] == ["NAMESPACE_ABSENT"]


def test_branches_without_a_common_commit(scene: Scene) -> None:
    other = Scene(scene.client)
    with pytest.raises(ReferenceNotFound, match="No common ancestor"):
        scene.merge(other.main)
    with pytest.raises(ReferenceNotFound, match="No common ancestor"):
        scene.merge(scene.main, into=scene.branch(at=scene.empty))


def test_merging_an_empty_branch_deletes_everything(scene: Scene) -> None:
    """Nobody may ever do this; the publisher's write set is empty then and it does not."""
    assert outcome(scene.merge(scene.branch(at=scene.empty))) == APPLIED
    assert list(scene.client.entries(scene.main)) == []


# -- reading -------------------------------------------------------------------------------------------


def test_contents_are_of_one_hash(scene: Scene) -> None:
    at = scene.base
    scene.change(scene.main, "m1")
    for ref in (f"{scene.main}@{at}", f"@{at}"):
        seen = scene.client.contents_at(ref, [T, U])
        assert (seen.reference.hash, set(seen.contents)) == (at, {T})
        assert scene.location(ref) == "m0"
    for ref in ("test/none", f"@{UNKNOWN}", f"{scene.main}@{UNKNOWN}", f"test/none@{at}"):
        with pytest.raises(ReferenceNotFound):
            scene.client.contents(ref, [T])
    # The name is not held against the hash.
    elsewhere = scene.change(scene.branch(), "elsewhere")
    assert scene.location(f"{scene.main}@{elsewhere}") == "elsewhere"


def test_no_contents_are_read_at_a_hash_too(scene: Scene) -> None:
    at = scene.base
    head = scene.change(scene.main, "m1")
    for ref, expected in ((f"{scene.main}@{at}", at), (f"@{at}", at), (scene.main, head)):
        seen = scene.client.contents_at(ref, [])
        assert (seen.reference.hash, seen.contents) == (expected, {})
    with pytest.raises(ReferenceNotFound):
        scene.client.contents("test/none", [])


def test_diff_compares_values(scene: Scene) -> None:
    run = scene.branch()
    scene.change(run, "r1")
    scene.commit(run, Put(U, table()))
    scene.commit(run, Delete(U), Put(W, table()))
    scene.change(scene.main, "m1")
    found = {entry.key: entry for entry in scene.client.diff(f"@{scene.base}", run)}
    assert set(found) == {T, W}
    assert found[T].from_content == scene.client.content(f"@{scene.base}", T)
    assert found[T].to_content == scene.client.content(run, T)
    assert found[W].from_content is None
    scene.change(run, "m1")
    assert {entry.key for entry in scene.client.diff(scene.main, run)} == {W}


def test_entries(scene: Scene) -> None:
    scene.commit(scene.main, Put(U, table()))
    found = {e.key: (e.type, e.content) for e in scene.client.entries(scene.main, fetch_content=True)}
    assert found == {
        key: (kind, scene.client.content(scene.main, key))
        for key, kind in ((NS, "NAMESPACE"), (T, "ICEBERG_TABLE"), (U, "ICEBERG_TABLE"))
    }
    only = scene.client.entries(scene.main, filter="entry.contentType == 'NAMESPACE'")
    assert [entry.key for entry in only] == [NS]
    inside = scene.client.entries(scene.main, filter="entry.namespace == 'n'")
    assert {entry.key for entry in inside} == {T, U}


def test_operations_in_the_log(scene: Scene) -> None:
    scene.commit(scene.main, Delete(T), Put(U, table()), a="b")
    (entry,) = scene.client.log(scene.main, limit=1, fetch_operations=True)
    assert {type(one): one.key for one in entry.operations} == {Delete: T, Put: U}
    assert entry.commit.properties == {"a": "b"}
    assert entry.commit.commit_time
    assert abs(entry.commit.commit_time - datetime.now(UTC)) < timedelta(days=3650)
    (bare,) = scene.client.log(scene.main, limit=1)
    assert bare.operations == ()


@pytest.mark.parametrize("page_size", [1, 2, 3, 200])
def test_log_since(scene: Scene, page_size: int) -> None:
    hashes = [scene.base]
    for i in range(4):
        put = Put(T, table(f"m{i}", scene.content_id(scene.main)))
        hashes.append(scene.commit(scene.main, put, ids=f"a{i},b{i % 2}").hash)
    listed = "'ids' in commit.properties && commit.properties['ids'].contains('b1')"
    for last in range(5):
        entries = scene.client.log(scene.main, since=hashes[last], page_size=page_size)
        assert [e.commit.hash for e in entries] == hashes[:last:-1]
        entries = scene.client.log(scene.main, since=hashes[last], filter=listed, page_size=page_size)
        assert [e.commit.hash for e in entries] == [
            h for h in (hashes[4], hashes[2]) if h in hashes[last + 1 :]
        ]
    with pytest.raises(ReferenceNotFound):
        list(scene.client.log(scene.main, since=UNKNOWN, page_size=page_size))
    assert len(list(scene.client.log(scene.main, since=scene.empty, page_size=page_size))) == 5


def test_filters_fail_on_unknown_properties(scene: Scene) -> None:
    scene.commit(scene.main, Put(U, table()), id="p1")

    def count(expression: str) -> int:
        return len(list(scene.client.log(scene.main, filter=expression)))

    assert count("'id' in commit.properties && commit.properties['id'] == 'p1'") == 1
    assert count("'id' in commit.properties && commit.properties['id'] == 'p2'") == 0
    assert count("!('id' in commit.properties)") == 1
    assert count("commit.properties['id'] == 'p1' || true") == 2
    assert count("commit.properties['id'] == 'p1' && commit.message == 'none'") == 0
    for broken in (
        "commit.properties['id'] == 'p1'",
        "commit.properties['id'] == 'p1' || commit.message == 'none'",
    ):
        with pytest.raises(NessieUnavailable):
            count(broken)
    for refused in ("no CEL at all", "commit.properties['id'].split(',')"):
        with pytest.raises(NessieRefused):
            count(refused)
