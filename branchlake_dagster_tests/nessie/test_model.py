import pickle
from datetime import UTC, datetime

import pytest

from branchlake_dagster.nessie import json_codec as codec
from branchlake_dagster.nessie.errors import NessieRefused
from branchlake_dagster.nessie.model import (
    ContentKey,
    Delete,
    IcebergTable,
    KeyConflict,
    Namespace,
    OtherContent,
    Put,
    Reference,
    ReferenceType,
    Unchanged,
    parse_name,
    parse_ref,
)
from branchlake_dagster_tests.suite.raised import raising

HASH = "2e1cfa82b035c26cbbbdae632cea070514eb8b773f616aaeaf668e2f0be8f10d"
TABLE = IcebergTable("id-1", "file:///m.json", 7, 1, 2, 3)


@pytest.mark.parametrize(
    ("elements", "path"),
    [(["a"], "a"), (["a", "b c", "t"], "a.b c.t"), (["a", "b.c"], "a.`b.c`"), (["a`b", "c"], "`a``b`.c")],
)
def test_keys_and_paths(elements: list[str], path: str) -> None:
    key = ContentKey(elements)
    assert key.name == str(key) == path
    assert ContentKey.from_path(path) == key == tuple(elements)
    assert key.elements == tuple(elements)
    assert key.parent == tuple(elements[:-1])
    assert pickle.loads(pickle.dumps(key)) == key
    assert {tuple(elements): 1}[key] == 1


@pytest.mark.parametrize("path", ["", ".", "a.", ".a", "a..b", "a.`b", "`"])
def test_bad_paths(path: str) -> None:
    with raising(ValueError, repr(path)):
        ContentKey.from_path(path)


def test_a_key_is_made_of_elements() -> None:
    with raising(TypeError, "from_path"):
        ContentKey("a.b")
    with raising(ValueError):
        ContentKey(["a", ""])
    with raising(ValueError):
        ContentKey([])


@pytest.mark.parametrize(
    ("ref", "name", "at", "path"),
    [
        ("main", "main", None, "main"),
        ("a/b", "a/b", None, "a%2Fb"),
        (f"main@{HASH}", "main", HASH, f"main@{HASH}"),
        (f"@{HASH}", "", HASH, f"@{HASH}"),
        (HASH.upper(), "", HASH, f"@{HASH}"),
        # pynessie alone would take this name for a hash.
        ("feedface", "feedface", None, "feedface"),
    ],
)
def test_reference_arguments(ref: str, name: str, at: str | None, path: str) -> None:
    parsed = parse_ref(ref)
    assert (parsed.name, parsed.hash, parsed.path) == (name, at, path)


@pytest.mark.parametrize("ref", ["", "@", "1x", "a b", "a..b", "main@", "main@xyz", "@12", "a/../b?x"])
def test_bad_reference_arguments(ref: str) -> None:
    with raising(NessieRefused, reason="reference_name", subject=ref):
        parse_ref(ref)


@pytest.mark.parametrize("ref", [HASH, f"main@{HASH}", f"@{HASH}"])
def test_names_carry_no_hash(ref: str) -> None:
    with raising(NessieRefused, reason="hash_in_name", subject=ref):
        parse_name(ref)


def test_reference_with_metadata() -> None:
    commit = {
        "hash": "aa",
        "authors": ["x", "y"],
        "message": "m",
        "commitTime": "2026-11-21T02:33:05.343440291+02:00",
        "allProperties": {"a": ["b", "c"], "none": []},
        "parentCommitHashes": ["bb", "cc"],
    }
    reference = codec.parse_reference(
        {
            "type": "TAG",
            "name": "t",
            "hash": "aa",
            "metadata": {"numCommitsAhead": 1, "numCommitsBehind": 0, "commitMetaOfHEAD": commit},
            "new": "field",
        }
    )
    assert reference.type is ReferenceType.TAG
    assert reference.pinned_ref == "t@aa"
    assert reference.metadata is not None
    head = reference.metadata.head_commit
    assert head is not None
    assert head.commit_time == datetime(2026, 11, 21, 0, 33, 5, 343440, tzinfo=UTC)
    assert (head.author, head.properties, head.parent_hashes) == ("x", {"a": "b"}, ("bb", "cc"))
    assert reference.metadata.total_commits is None


def test_detached_reference() -> None:
    reference = codec.parse_reference({"type": "DETACHED", "hash": "aa"})
    assert reference == Reference(ReferenceType.DETACHED, "", "aa")
    assert reference.pinned_ref == "@aa"


@pytest.mark.parametrize("content", [TABLE, Namespace("id-2", ("a", "b"), {"k": "v"})])
def test_contents_come_back(content: IcebergTable | Namespace) -> None:
    assert codec.parse_content(codec.content_to_json(content)) == content


def test_contents_without_an_id_are_creations() -> None:
    assert "id" not in codec.content_to_json(Namespace(None, ("a",)))


def test_other_contents_are_carried() -> None:
    udf = {"type": "UDF", "id": "u", "x": 1}
    assert codec.parse_content(udf) == OtherContent("u", "UDF", {"x": 1})
    assert codec.content_to_json(codec.parse_content(udf)) == udf


def test_operations() -> None:
    key = ContentKey(["a", "t"])
    where = {"key": {"elements": ["a", "t"]}}
    assert codec.operation_to_json(Delete(key)) == {"type": "DELETE", **where}
    assert codec.operation_to_json(Unchanged(key)) == {"type": "UNCHANGED", **where}
    put = codec.operation_to_json(Put(key, TABLE))
    assert put == {"type": "PUT", **where, "content": codec.content_to_json(TABLE)}
    view = {"type": "PUT", **where, "content": {"type": "ICEBERG_VIEW", "id": "v"}}
    data = {"commitMeta": {"hash": "h"}, "operations": [put, view, {"type": "DELETE", **where}]}
    assert codec.parse_log_entry(data).operations == (
        Put(key, TABLE),
        Put(key, OtherContent("v", "ICEBERG_VIEW")),
        Delete(key),
    )


def test_merge_conflicts() -> None:
    where = {"elements": ["a", "t"]}
    conflict = {"conflictType": "VALUE_DIFFERS", "key": where, "message": "differs"}
    result = codec.parse_merge_result(
        {
            "wasApplied": False,
            "wasSuccessful": False,
            "resultantTargetHash": None,
            "effectiveTargetHash": "tt",
            "commonAncestor": "cc",
            "details": [{"key": where, "conflict": conflict}, {"key": {"elements": ["b"]}}],
        }
    )
    assert (result.applied, result.successful, result.target_hash) == (False, False, "tt")
    assert result.conflicts == (KeyConflict(ContentKey(["a", "t"]), "VALUE_DIFFERS", "differs"),)
