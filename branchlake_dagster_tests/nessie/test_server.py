"""The client on a real Nessie server."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from branchlake_dagster.nessie import NessieClient
from branchlake_dagster.nessie.errors import (
    ContentNotFound,
    NessieAlreadyExists,
    NessieConflict,
    NessieRefused,
    ReferenceNotFound,
)
from branchlake_dagster.nessie.model import (
    ContentKey,
    Delete,
    IcebergTable,
    Namespace,
    Operation,
    Put,
    ReferenceType,
    Unchanged,
)
from branchlake_dagster_tests.suite.raised import raising

NS = ContentKey(["n"])
T = ContentKey(["n", "t"])
U = ContentKey(["n", "u"])
NewBranch = Callable[..., str]


def table(content_id: str | None = None, location: str = "file:///m.json") -> IcebergTable:
    return IcebergTable(content_id, location, -1, 0, 0, 0)


def head(client: NessieClient, branch: str) -> str:
    return client.reference(branch).hash


def commit(client: NessieClient, branch: str, *operations: Operation, at: str | None = None) -> str:
    result = client.commit(
        branch,
        expected_hash=at or head(client, branch),
        operations=operations,
        message="a change",
        properties={"run": "r1"},
        author="tester",
    )
    return result.hash


@pytest.fixture
def base(client: NessieClient, fresh_branch: str) -> str:
    """A branch that holds namespace n and table n.t."""
    commit(client, fresh_branch, Put(NS, Namespace(None, NS.elements, {"k": "v"})), Put(T, table()))
    return fresh_branch


def changed(client: NessieClient, branch: str, location: str) -> str:
    current = client.content(branch, T)
    assert isinstance(current, IcebergTable)
    return commit(client, branch, Put(T, table(current.content_id, location)))


def test_config(client: NessieClient) -> None:
    config = client.config()
    assert config.default_branch == "main"
    assert config.max_supported_api_version >= 2
    assert len(config.no_ancestor_hash) == 64


def test_life_of_references(client: NessieClient, base: str) -> None:
    at = head(client, base)
    tag, branch = f"{base}-tag", f"{base}-b"
    assert client.create_tag(tag, from_ref=base, from_hash=at).type is ReferenceType.TAG
    assert client.create_branch(branch, from_ref=tag, from_hash=at).hash == at
    with pytest.raises(NessieAlreadyExists):
        client.create_branch(branch, from_ref=base, from_hash=at)
    with pytest.raises(ReferenceNotFound):
        client.create_branch(f"{base}-c", from_ref="no-such-branch", from_hash=at)
    moved = changed(client, branch, "file:///other.json")
    with raising(NessieConflict, "UNEXPECTED_HASH"):
        client.delete_branch(branch, expected_hash=at)
    client.delete_branch(branch, expected_hash=moved)
    with pytest.raises(ReferenceNotFound):
        client.delete_branch(branch, expected_hash=moved)
    with pytest.raises(NessieRefused):
        client.delete_branch(tag, expected_hash=at)
    client.delete_tag(tag, expected_hash=at)
    with pytest.raises(ReferenceNotFound):
        client.reference(tag)


def test_metadata_of_a_branch(client: NessieClient, base: str) -> None:
    metadata = client.reference(base, fetch_metadata=True).metadata
    assert metadata is not None
    assert metadata.commits_ahead == 1
    commit_meta = metadata.head_commit
    assert commit_meta is not None
    assert (commit_meta.message, commit_meta.author) == ("a change", "tester")
    assert commit_meta.properties == {"run": "r1"}
    assert commit_meta.commit_time is not None
    assert abs(datetime.now(UTC) - commit_meta.commit_time) < timedelta(minutes=5)
    assert client.reference(base).metadata is None


def test_references_come_page_by_page_and_filtered(
    client: NessieClient, new_branch: NewBranch, fresh_branch: str
) -> None:
    names = {new_branch() for _ in range(5)} | {fresh_branch}
    found = [ref.name for ref in client.references(filter="ref.name.startsWith('test/')", page_size=2)]
    assert names <= set(found)
    assert len(found) == len(set(found))
    some = client.references(filter=f"ref.name == '{fresh_branch}'", fetch_metadata=True)
    assert [ref.name for ref in some] == [fresh_branch]
    with pytest.raises(NessieRefused):
        list(client.references(filter="no CEL at all"))


def test_contents(client: NessieClient, base: str) -> None:
    at = head(client, base)
    for ref in (base, f"{base}@{at}", f"@{at}", at):
        content = client.content(ref, T)
        assert isinstance(content, IcebergTable)
        assert content.metadata_location == "file:///m.json"
    seen = client.contents_at(base, [NS, T, U])
    assert set(seen.contents) == {NS, T}
    assert (seen.reference.name, seen.reference.hash) == (base, at)
    namespace = seen.contents[NS]
    assert isinstance(namespace, Namespace)
    assert namespace.properties == {"k": "v"}
    with raising(ContentNotFound, "n.u"):
        client.content(base, U)
    with pytest.raises(ReferenceNotFound):
        client.content("no-such-branch", T)


def test_names_with_dots_slashes_and_foreign_alphabets(client: NessieClient, base: str) -> None:
    keys = [ContentKey(["n", name]) for name in ("a.b", "a/b", "Ä 😀", "a'\"b", "%2F", "a`b")]
    commit(client, base, *(Put(key, table(None, key.name)) for key in keys))
    found = client.contents(base, keys)
    assert set(found) == set(keys)
    assert {entry.key for entry in client.entries(base)} == {NS, T, *keys}


def test_entries_are_of_one_state_although_the_branch_moves(client: NessieClient, base: str) -> None:
    keys = [ContentKey(["n", f"t{i}"]) for i in range(5)]
    commit(client, base, *(Put(key, table()) for key in keys))
    listing = client.entries(base, page_size=2)
    first = next(listing)
    commit(client, base, *(Delete(key) for key in keys))
    assert {first.key, *(entry.key for entry in listing)} == {NS, T, *keys}


def test_entries_with_filter_and_content(client: NessieClient, base: str) -> None:
    (entry,) = client.entries(base, filter="entry.contentType == 'ICEBERG_TABLE'", fetch_content=True)
    assert (entry.key, entry.type) == (T, "ICEBERG_TABLE")
    assert isinstance(entry.content, IcebergTable)
    assert entry.content.content_id == entry.content_id
    assert {entry.content for entry in client.entries(base)} == {None}


def test_log(client: NessieClient, base: str) -> None:
    for i in range(4):
        changed(client, base, f"file:///{i}.json")
    entries = list(client.log(base, page_size=2, fetch_operations=True))
    assert len(entries) == 5
    assert entries[0].commit.hash == head(client, base)
    assert entries[0].commit.parent_hashes == (entries[1].commit.hash,)
    (operation,) = entries[0].operations
    assert isinstance(operation, Put)
    assert isinstance(operation.content, IcebergTable)
    assert operation.content.metadata_location == "file:///3.json"
    assert [e.commit.hash for e in client.log(base, limit=2)] == [e.commit.hash for e in entries[:2]]
    assert list(client.log(base, limit=0)) == []
    assert not entries[-1].commit.properties.keys() - {"run"}
    found = list(client.log(base, filter="commit.properties['run'] == 'r1'"))
    assert len(found) == 5


@pytest.mark.parametrize("page_size", [1, 2, 3, 200])
@pytest.mark.parametrize("last", range(5))
def test_log_since_a_commit(client: NessieClient, base: str, page_size: int, last: int) -> None:
    for i in range(4):
        at = head(client, base)
        content = client.content(base, T)
        assert isinstance(content, IcebergTable)
        put = Put(T, table(content.content_id, f"file:///{i}.json"))
        client.commit(base, expected_hash=at, operations=[put], message=str(i), properties={"i": str(i % 2)})
    hashes = [entry.commit.hash for entry in client.log(base)][::-1]
    read = [e.commit.hash for e in client.log(base, since=hashes[last], page_size=page_size)]
    assert read == hashes[:last:-1]
    # The limit commit does not match here in every case, and must stop the walk all the same.
    odd = "'i' in commit.properties && commit.properties['i'] == '1'"
    found = [e.commit.message for e in client.log(base, since=hashes[last], filter=odd, page_size=page_size)]
    assert found == [m for m in ("3", "1") if int(m) >= last]


def test_log_since_what_is_not_in_it(client: NessieClient, base: str, new_branch: NewBranch) -> None:
    none = client.config().no_ancestor_hash
    assert len(list(client.log(base, since=none))) == len(list(client.log(base)))
    other = new_branch(base, head(client, base))
    foreign = changed(client, other, "file:///2.json")
    with raising(ReferenceNotFound, foreign):
        list(client.log(base, since=foreign))
    with raising(ReferenceNotFound, foreign):
        list(client.log(base, since=foreign, filter="'x' in commit.properties"))


def test_diff(client: NessieClient, base: str, new_branch: NewBranch) -> None:
    other = new_branch(base, head(client, base))
    commit(client, other, Put(U, table()), Put(ContentKey(["n", "x"]), table()))
    changed(client, other, "file:///2.json")
    commit(client, base, Put(ContentKey(["n", "z"]), table()))
    entries = {entry.key.name: entry for entry in client.diff(base, other, page_size=1)}
    assert set(entries) == {"n.t", "n.u", "n.x", "n.z"}
    assert entries["n.u"].from_content is None
    assert entries["n.z"].to_content is None
    after = entries["n.t"].to_content
    assert isinstance(after, IcebergTable)
    assert after.metadata_location == "file:///2.json"
    assert list(client.diff(base, base)) == []


def test_commit_gives_ids_and_refuses_what_moved(client: NessieClient, base: str) -> None:
    at = head(client, base)
    result = client.commit(base, expected_hash=at, operations=[Put(U, table())], message="m")
    assert set(result.content_ids) == {U}
    assert result.hash == head(client, base)
    with pytest.raises(NessieConflict) as caught:
        commit(client, base, Put(U, table()), at=at)
    assert [(conflict.key, conflict.kind) for conflict in caught.value.conflicts] == [(U, "KEY_EXISTS")]
    with pytest.raises(NessieRefused, match="content ID"):
        commit(client, base, Put(T, table(str(uuid.uuid4()))))
    current = client.content(base, T)
    assert isinstance(current, IcebergTable)
    changed(client, base, "file:///2.json")
    with raising(NessieConflict, "n.t", "VALUE_DIFFERS"):
        commit(client, base, Put(T, table(current.content_id, "file:///3.json")), at=at)
    # Keys that did not move may be committed from an old hash.
    commit(client, base, Put(ContentKey(["n", "w"]), table()), at=at)


def test_a_commit_can_depend_on_what_it_only_read(client: NessieClient, base: str) -> None:
    at = head(client, base)
    commit(client, base, Put(U, table()), Unchanged(T), at=at)
    changed(client, base, "file:///2.json")
    with pytest.raises(NessieConflict) as caught:
        commit(client, base, Put(ContentKey(["n", "w"]), table()), Unchanged(T), at=at)
    assert [conflict.key for conflict in caught.value.conflicts] == [T]


def test_only_one_of_two_racing_commits_wins(client: NessieClient, base: str) -> None:
    at = head(client, base)
    current = client.content(base, T)
    assert isinstance(current, IcebergTable)
    start = threading.Barrier(4)

    def write(i: int) -> bool:
        start.wait()
        try:
            commit(client, base, Put(T, table(current.content_id, f"file:///{i}.json")), at=at)
        except NessieConflict:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(write, range(4))) == 1


def test_commit_without_its_namespace(client: NessieClient, fresh_branch: str) -> None:
    with raising(NessieConflict, "NAMESPACE_ABSENT"):
        commit(client, fresh_branch, Put(T, table()))


def test_merge_and_repeat(client: NessieClient, base: str, new_branch: NewBranch) -> None:
    at = head(client, base)
    source = new_branch(base, at)
    changed(client, source, "file:///2.json")
    tip = commit(client, source, Put(U, table()))

    def merge() -> tuple[bool, bool, str]:
        result = client.merge(
            from_name=source,
            from_hash=tip,
            into=base,
            expected_hash=at,
            message="publish",
            properties={"publication": "p1"},
            author="tester",
        )
        assert result.conflicts == ()
        return result.applied, result.successful, result.target_hash

    first = merge()
    assert first == (True, True, head(client, base))
    assert merge() == (False, True, first[2])
    (entry,) = client.log(base, limit=1)
    assert entry.commit.message == "publish"
    assert entry.commit.properties == {"publication": "p1"}
    assert entry.commit.parent_hashes == (at, tip)


def test_merge_conflicts_are_a_result(client: NessieClient, base: str, new_branch: NewBranch) -> None:
    at = head(client, base)
    source = new_branch(base, at)
    commit(client, source, Put(U, table()))
    tip = changed(client, source, "file:///theirs.json")
    now = changed(client, base, "file:///ours.json")
    result = client.merge(from_name=source, from_hash=tip, into=base, expected_hash=at, message="m")
    assert (result.applied, result.successful) == (False, False)
    assert result.target_hash == head(client, base) == now
    assert [(conflict.key, conflict.kind) for conflict in result.conflicts] == [(T, "VALUE_DIFFERS")]
    dropped = client.merge(
        from_name=source,
        from_hash=tip,
        into=base,
        expected_hash=at,
        message="m",
        key_merge_modes={T: "DROP"},
    )
    assert dropped.applied
    ours = client.content(base, T)
    assert isinstance(ours, IcebergTable)
    assert ours.metadata_location == "file:///ours.json"
    assert client.content(base, U)


def test_a_merge_that_drops_everything_looks_like_a_repeated_one(
    client: NessieClient, base: str, new_branch: NewBranch
) -> None:
    at = head(client, base)
    source = new_branch(base, at)
    tip = changed(client, source, "file:///theirs.json")
    result = client.merge(
        from_name=source,
        from_hash=tip,
        into=base,
        expected_hash=at,
        message="m",
        key_merge_modes={T: "DROP"},
    )
    assert (result.applied, result.successful) == (False, True)
    assert head(client, base) == at


def test_branches_of_an_empty_lake_cannot_be_merged(
    client: NessieClient, fresh_branch: str, new_branch: NewBranch
) -> None:
    source = new_branch()
    tip = commit(client, source, Put(NS, Namespace(None, NS.elements)))
    with pytest.raises(ReferenceNotFound) as refused:
        client.merge(
            from_name=source,
            from_hash=tip,
            into=fresh_branch,
            expected_hash=head(client, fresh_branch),
            message="m",
        )
    assert refused.value.hint


def test_threads_share_a_client(client: NessieClient, base: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        hashes = list(pool.map(lambda _: head(client, base), range(20)))
    assert len(set(hashes)) == 1
