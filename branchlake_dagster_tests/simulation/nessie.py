"""A Nessie server in memory: requests of REST API v2 in, status and JSON out, all of it deterministic.

It does what the real server (0.99.0) was seen to do; `nessie/test_simulated_server.py` holds both to
that. What our client never asks for is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import unquote

from branchlake_dagster_tests.simulation import listing, merging
from branchlake_dagster_tests.simulation.answers import Refusal
from branchlake_dagster_tests.simulation.committing import CommitCheck
from branchlake_dagster_tests.simulation.history import EMPTY, History, Json, Key, Pointer

Answer = tuple[int, Any]


def ticking_clock(start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> Callable[[], datetime]:
    """A clock that goes on by a millisecond whenever it is asked."""
    now = start

    def clock() -> datetime:
        nonlocal now
        now += timedelta(milliseconds=1)
        return now

    return clock


class InMemoryNessie:
    """The server. `answer` takes one request; `history` may be looked into by tests."""

    def __init__(self, *, clock: Callable[[], datetime] | None = None, seed: int = 0) -> None:
        self.history = History(clock=clock or ticking_clock(), seed=seed)
        seconds, nanoseconds = divmod(seed, 10**9)
        created_at = datetime(2020, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds % 10**8)
        self.created_at: str | None = f"{created_at:%Y-%m-%dT%H:%M:%S}.{nanoseconds:09}Z"
        """When the repository was created. Unlike the real server's, it follows from the seed."""

    def answer(self, method: str, path: str, params: Mapping[str, str], body: Json | None) -> Answer:
        """The status and the JSON of the answer; `path` is relative to the API's address."""
        parts = [unquote(part) for part in path.split("/")]
        try:
            return 200, self._route(method, parts, params, body or {})
        except Refusal as refusal:
            return refusal.status, refusal.payload

    def _route(self, method: str, parts: list[str], params: Mapping[str, str], body: Json) -> Any:
        match (method, *parts):
            case ("GET", "config"):
                return {
                    "defaultBranch": "main",
                    "specVersion": "2.2.0",
                    "maxSupportedApiVersion": 2,
                    "noAncestorHash": EMPTY,
                    "repositoryCreationTimestamp": self.created_at,
                }
            case ("GET", "trees"):
                return listing.references_page(self.history, params)
            case ("POST", "trees"):
                return self._create(params, body)
            case ("GET", "trees", name):
                return self._reference(name, params)
            case ("DELETE", "trees", ref):
                return self._delete(ref, params)
            case ("POST", "trees", ref, "contents"):
                return self._contents(ref, body)
            case ("GET", "trees", ref, "entries"):
                effective = self._resolve(ref)
                page = listing.entries_page(self.history.contents_at(effective["hash"]), params)
                return {**page, "effectiveReference": effective}
            case ("GET", "trees", ref, "history"):
                at = params.get("page-token") or self._resolve(ref)["hash"]
                return listing.history_page(self.history.first_parents(at), params)
            case ("GET", "trees", left, "diff", right):
                return self._diff(left, right)
            case ("POST", "trees", ref, "history", "commit"):
                return self._commit(ref, body)
            case ("POST", "trees", ref, "history", "merge"):
                return self._merge(ref, body)
        raise NotImplementedError(f"{method} {'/'.join(parts)}")

    # -- references ------------------------------------------------------------------------------------

    def _resolve(self, ref: str) -> dict[str, Any]:
        """The reference JSON of `name`, `name@hash` or `@hash`. That the hash is on the branch is not checked."""
        name, _, at = ref.partition("@")
        if not name:
            self.history.commit_at(at)
            return {"type": "DETACHED", "hash": at}
        pointer = self.history.pointer(name)
        if at:
            self.history.commit_at(at)
        return listing.reference(self.history, name, Pointer(pointer.type, at or pointer.hash))

    def _reference(self, name: str, params: Mapping[str, str]) -> Any:
        if "@" in name:
            raise Refusal.bad("Hashes are not allowed when fetching a reference by name")
        pointer = self.history.pointer(name)
        everything = params.get("fetch") == "ALL"
        return {"reference": listing.reference(self.history, name, pointer, metadata=everything)}

    def _create(self, params: Mapping[str, str], body: Json) -> Any:
        name, at = params["name"], body.get("hash")
        if not at:
            raise Refusal.bad("Target hash must be provided.")
        if body["type"] != "DETACHED":
            self.history.pointer(body["name"])
        self.history.commit_at(at)
        if name in self.history.references:
            raise Refusal(409, "REFERENCE_ALREADY_EXISTS", f"Named reference '{name}' already exists.")
        pointer = self.history.references[name] = Pointer(params["type"], at)
        return {"reference": listing.reference(self.history, name, pointer)}

    def _delete(self, ref: str, params: Mapping[str, str]) -> Any:
        name, _, at = ref.partition("@")
        if not at:
            raise Refusal.bad("Expected hash must be provided.")
        pointer = self.history.pointer(name)
        if name == "main":
            raise Refusal.bad("Default branch 'main' cannot be deleted.")
        if pointer.type != params["type"]:
            raise Refusal.bad(f"Expected reference type {params['type']} does not match {name}")
        if pointer.hash != at:
            message = f"named-reference '{name}' is not at expected hash '{at}', but at '{pointer.hash}'"
            raise Refusal.conflicting([{"conflictType": "UNEXPECTED_HASH", "key": None, "message": message}])
        del self.history.references[name]
        return {"reference": listing.reference(self.history, name, pointer)}

    # -- contents --------------------------------------------------------------------------------------

    def _contents(self, ref: str, body: Json) -> Any:
        effective = self._resolve(ref)
        contents = self.history.contents_at(effective["hash"])
        keys = [tuple(key["elements"]) for key in body["requestedKeys"]]
        if not keys:
            raise Refusal.bad(
                "getMultipleContents.request.requestedKeys: size must be between 1 and 2147483647"
            )
        return {
            "contents": [
                {"key": {"elements": list(key)}, "content": contents[key]} for key in keys if key in contents
            ],
            "effectiveReference": effective,
        }

    def _diff(self, left: str, right: str) -> Any:
        one, other = self._resolve(left), self._resolve(right)
        before, after = (self.history.contents_at(side["hash"]) for side in (one, other))
        return {
            "token": None,
            "hasMore": False,
            "diffs": list(listing.diff(before, after)),
            "effectiveFromReference": one,
            "effectiveToReference": other,
        }

    # -- changes ---------------------------------------------------------------------------------------

    def _target(self, ref: str, what: str) -> tuple[str, str, str]:
        """The branch to change, the expected hash and the head."""
        name, _, expected = ref.partition("@")
        if not expected:
            raise Refusal.bad("Expected hash must be provided.")
        pointer = self.history.pointer(name)
        if pointer.type != "BRANCH":
            raise Refusal.bad(f"Reference to {what} into must be a branch.")
        self.history.require_on(expected, name)
        return name, expected, pointer.hash

    def _commit(self, ref: str, body: Json) -> Any:
        name, expected, head = self._target(ref, "commit")
        check = CommitCheck(
            self.history.contents_at(expected), self.history.contents_at(head), at_head=expected == head
        )
        changes = check.run(body["operations"], self.history.new_content_id)
        commit = self.history.append(name, body["commitMeta"], changes)
        return {
            "targetBranch": {"type": "BRANCH", "name": name, "hash": commit.hash},
            "addedContents": [
                {"key": {"elements": list(key)}, "contentId": made} for key, made in check.added.items()
            ],
        }

    def _merge(self, ref: str, body: Json) -> Any:
        name, expected, head = self._target(ref, "merge")
        source = body["fromHash"]
        self.history.pointer(body["fromRefName"])
        self.history.commit_at(source)
        base = self.history.merge_base(head, source)
        answer = {
            "wasApplied": False,
            "wasSuccessful": True,
            "resultantTargetHash": head,
            "commonAncestor": base,
            "targetBranch": name,
            "effectiveTargetHash": head,
            "expectedHash": expected,
            "details": [],
        }
        if source == base:
            return answer
        plan = self._plan(base, source, head, body)
        answer["details"] = [
            {"key": {"elements": list(key)}, "mergeBehavior": mode}
            | ({"conflict": plan.conflicts[key]} if key in plan.conflicts else {})
            for key, mode in plan.modes.items()
        ]
        if plan.conflicts:
            if not body.get("isReturnConflictAsResult"):
                raise Refusal.conflicting(list(plan.conflicts.values()))
            return {**answer, "wasSuccessful": False, "resultantTargetHash": None}
        if plan.changes.puts or plan.changes.deletes:
            commit = self.history.append(name, body["commitMeta"], plan.changes, merged=source)
            return {**answer, "wasApplied": True, "resultantTargetHash": commit.hash}
        return answer

    def _plan(self, base: str, source: str, head: str, body: Json) -> merging.MergePlan:
        modes: dict[Key, str] = {
            tuple(one["key"]["elements"]): one["mergeBehavior"] for one in body.get("keyMergeModes") or ()
        }
        contents = self.history.contents_at
        return merging.plan(contents(base), contents(source), contents(head), modes)
