"""Histories and references of the in-memory Nessie as the real server lists them, its oddities included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from branchlake_dagster_tests.simulation import cel
from branchlake_dagster_tests.simulation.answers import Refusal
from branchlake_dagster_tests.simulation.history import EMPTY, Commit, History, Pointer

Params = Mapping[str, str]


def _matches(expression: str | None, variables: Mapping[str, Any]) -> bool:
    if expression is None:
        return True
    try:
        return bool(cel.compiled(expression)(variables))
    except cel.CelSyntaxError as error:
        raise Refusal.bad(str(error)) from error
    except cel.CelFailure as error:
        raise Refusal(500, "UNKNOWN", str(error)) from error


def commit_meta(commit: Commit, *, properties: bool = True) -> dict[str, Any]:
    """A `CommitMeta`; in the metadata of a reference the server sends no empty properties."""
    data: dict[str, Any] = {
        "hash": commit.hash,
        "message": commit.message,
        "authors": [commit.author],
        "commitTime": commit.time.isoformat(),
        "parentCommitHashes": list(commit.parents),
    }
    if properties:
        data["allProperties"] = {name: [value] for name, value in commit.properties.items()}
    return data


def _commit_variables(commit: Commit) -> dict[str, Any]:
    return {
        "commit": {
            "hash": commit.hash,
            "message": commit.message,
            "author": commit.author,
            "properties": commit.properties,
            "commitTime": commit.time.isoformat(),
        }
    }


def history_page(commits: Iterable[Commit], params: Params) -> dict[str, Any]:
    """One page of a log.

    As on the real server the filter comes before `limit-hash`, and a limit that would be the first commit
    of the next page ends the listing without being told.
    """
    limit, size = params.get("limit-hash"), int(params.get("max-records", "250"))
    expression = params.get("filter")
    found = (one for one in commits if _matches(expression, _commit_variables(one)))
    page: list[Commit] = []
    token = None
    for commit in found:
        if len(page) == size:
            token = commit.hash if commit.hash != limit else None
            break
        page.append(commit)
        if commit.hash == limit:
            break
    operations = params.get("fetch") == "ALL"
    return {
        "token": token,
        "hasMore": token is not None,
        "logEntries": [
            {
                "commitMeta": commit_meta(commit),
                "operations": list(commit.operations) if operations else None,
            }
            for commit in page
        ],
    }


def reference(history: History, name: str, pointer: Pointer, *, metadata: bool = False) -> dict[str, Any]:
    """A `Branch` or `Tag`, on demand with its metadata."""
    data: dict[str, Any] = {"type": pointer.type, "name": name, "hash": pointer.hash}
    head = history.commit_at(pointer.hash)
    if not metadata or head is None:
        return data
    told: dict[str, Any] = {
        "commitMetaOfHEAD": commit_meta(head, properties=bool(head.properties)),
        "numTotalCommits": head.depth,
    }
    if name != "main" and pointer.type == "BRANCH":
        ancestor, main_head = _fork(history, head), history.commit_at(history.references["main"].hash)
        depth = ancestor.depth if ancestor else 0
        told["commonAncestorHash"] = ancestor.hash if ancestor else EMPTY
        told["numCommitsAhead"] = head.depth - depth
        told["numCommitsBehind"] = (main_head.depth if main_head else 0) - depth
    return {**data, "metadata": told}


def _fork(history: History, head: Commit) -> Commit | None:
    """The newest commit that the branch and `main` share, by first parents only."""
    ours = {one.hash for one in history.first_parents(history.references["main"].hash)}
    return next((one for one in history.first_parents(head.hash) if one.hash in ours), None)


def references_page(history: History, params: Params) -> dict[str, Any]:
    """One page of all references, by name."""
    size, start = int(params.get("max-records", "250")), params.get("page-token", "")
    everything = params.get("fetch") == "ALL"
    found = [
        (name, pointer)
        for name, pointer in sorted(history.references.items())
        if name >= start and _matches(params.get("filter"), _reference_variables(name, pointer))
    ]
    token = found[size][0] if len(found) > size else None
    return {
        "token": token,
        "hasMore": token is not None,
        "references": [reference(history, *one, metadata=everything) for one in found[:size]],
    }


def _reference_variables(name: str, pointer: Pointer) -> dict[str, Any]:
    return {"ref": {"name": name, "hash": pointer.hash}, "refType": pointer.type}


def entries_page(contents: Mapping[tuple[str, ...], Any], params: Params) -> dict[str, Any]:
    """All entries of a state, on one page."""
    with_content = params.get("content") == "true"
    return {
        "token": None,
        "hasMore": False,
        "entries": [
            {
                "type": value["type"],
                "name": {"elements": list(key)},
                "contentId": value["id"],
                "content": value if with_content else None,
            }
            for key, value in sorted(contents.items())
            if _matches(params.get("filter"), _entry_variables(key, value))
        ],
    }


def _entry_variables(key: tuple[str, ...], value: Mapping[str, Any]) -> dict[str, Any]:
    namespace = ".".join(key[:-1])
    return {
        "entry": {"contentType": value["type"], "namespace": namespace, "name": key[-1], "key": ".".join(key)}
    }


def diff(
    left: Mapping[tuple[str, ...], Any], right: Mapping[tuple[str, ...], Any]
) -> Iterator[dict[str, Any]]:
    """The keys in which two states differ."""
    for key in sorted(left.keys() | right.keys()):
        before, after = left.get(key), right.get(key)
        if before != after:
            yield {"key": {"elements": list(key)}, "from": before, "to": after}
