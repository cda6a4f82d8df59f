"""How the in-memory Nessie judges the operations of a commit or a merge.

Both come down to the same question: each key is expected to hold what it held at some older hash, so does
it still? A commit expects the hash it names, a merge the merge base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from branchlake_dagster_tests.simulation.answers import Key, Refusal, conflict
from branchlake_dagster_tests.simulation.history import Changes, Json

_WORDS = {
    "KEY_EXISTS": "key '{}' already exists",
    "KEY_DOES_NOT_EXIST": "key '{}' does not exist",
    "PAYLOAD_DIFFERS": "payload of existing and expected content for key '{}' are different",
    "CONTENT_ID_DIFFERS": "content IDs of existing and expected content for key '{}' are different",
    "VALUE_DIFFERS": "values of existing and expected content for key '{}' are different",
    "NAMESPACE_ABSENT": "namespace '{}' must exist",
    "NAMESPACE_NOT_EMPTY": "namespace '{}' is not empty",
    "NOT_A_NAMESPACE": "expecting the key '{}' to be a namespace, but is not a namespace",
}


def _conflict(kind: str, key: Key) -> dict[str, Any]:
    return conflict(kind, key, _WORDS[kind].format(".".join(key)))


def key_exists(key: Key) -> dict[str, Any]:
    """The conflict of a new key that is there already."""
    return _conflict("KEY_EXISTS", key)


def moved(
    key: Key, expected: Json | None, now: Json | None, *, absent_is_fine: bool
) -> dict[str, Any] | None:
    """The conflict of a key that does not hold what was expected.

    Expecting nothing is fine for a new key (`absent_is_fine`). Elsewhere, in a deletion or an assertion,
    the server wants a value to compare with, so that an absent key conflicts in any case.
    """
    if expected is None and absent_is_fine:
        return _conflict("KEY_EXISTS", key) if now is not None else None
    if now is None:
        return _conflict("KEY_DOES_NOT_EXIST", key)
    if expected is None or expected["type"] != now["type"]:
        return _conflict("PAYLOAD_DIFFERS", key)
    if expected["id"] != now["id"]:
        return _conflict("CONTENT_ID_DIFFERS", key)
    return _conflict("VALUE_DIFFERS", key) if expected != now else None


def check_namespaces(created: Iterable[Key], changes: Changes, head: Mapping[Key, Json]) -> None:
    """Refuse keys whose namespace is missing, and the deletion of namespaces that have children."""
    conflicts = []
    for parent in dict.fromkeys(key[:-1] for key in created if len(key) > 1):
        value = changes.puts.get(parent)
        if value is not None and value["type"] == "NAMESPACE":
            continue
        value = head.get(parent)
        if value is None:
            conflicts.append(_conflict("NAMESPACE_ABSENT", parent))
        elif value["type"] != "NAMESPACE":
            conflicts.append(_conflict("NOT_A_NAMESPACE", parent))
    for gone in changes.deletes:
        if gone in head and head[gone]["type"] == "NAMESPACE":
            children = [key for key in head if len(key) > len(gone) and key[: len(gone)] == gone]
            if not changes.deletes.issuperset(children):
                conflicts.append(_conflict("NAMESPACE_NOT_EMPTY", gone))
    if conflicts:
        raise Refusal.conflicting(conflicts)


def _unique(operations: Sequence[Json]) -> None:
    seen: dict[Key, Json] = {}
    for operation in operations:
        key = tuple(operation["key"]["elements"])
        before = seen.get(key)
        seen[key] = operation
        recreated = (
            before is not None
            and (before["type"], operation["type"]) == ("DELETE", "PUT")
            and not operation["content"].get("id")
        )
        if before is not None and not recreated:
            raise Refusal.bad(f"Duplicate key in commit operations: {'.'.join(key)}")


class CommitCheck:
    """One commit's operations against what its keys held at the expected hash and hold at the head."""

    def __init__(self, expected: Mapping[Key, Json], head: Mapping[Key, Json], *, at_head: bool) -> None:
        self._expected = expected
        self._head = head
        self._at_head = at_head
        self._conflicts: list[dict[str, Any]] = []
        self._created: dict[Key, str | None] = {}
        self.changes = Changes()
        self._dropped: dict[str, Key] = {}

    def run(self, operations: Sequence[Json], new_id: Callable[[], str]) -> Changes:
        """The changes to make; raises the refusal."""
        if not operations:
            raise Refusal.bad("operations: size must be between 1 and 2147483647")
        _unique(operations)
        # In this order the conflicts are told.
        for wanted in ("DELETE", "UNCHANGED", "PUT"):
            for operation in operations:
                key = tuple(operation["key"]["elements"])
                if operation["type"] != wanted:
                    continue
                if wanted == "DELETE":
                    self._delete(key)
                elif wanted == "PUT":
                    self._put(key, operation["content"], new_id)
                elif not self._at_head:
                    before, now = self._expected.get(key), self._head.get(key)
                    self._note(moved(key, before, now, absent_is_fine=False))
        check_namespaces(self._created, self.changes, self._head)
        if self._conflicts:
            raise Refusal.conflicting(self._conflicts)
        return self.changes

    @property
    def added(self) -> dict[Key, str]:
        """Keys that got a new content id."""
        return {key: made for key, made in self._created.items() if made}

    def _note(self, found: dict[str, Any] | None) -> None:
        if found is not None:
            self._conflicts.append(found)

    def _delete(self, key: Key) -> None:
        before = self._expected.get(key)
        self._note(moved(key, before, self._head.get(key), absent_is_fine=False))
        self.changes.deletes.add(key)
        if before is not None:
            self._dropped[before["id"]] = key

    def _put(self, key: Key, content: Json, new_id: Callable[[], str]) -> None:
        before = self._expected.get(key)
        given = content.get("id")
        name = ".".join(key)
        now = self._head.get(key)
        if before is not None and given is None and key in self.changes.deletes:
            before = now = None  # dropped and made again by this very commit
        elif before is None and given is not None and given in self._dropped:
            origin = self._dropped.pop(given)
            before = self._expected[origin]
            self._created[key] = None
            if now is not None:
                self._note(_conflict("KEY_EXISTS", key))
            now = before
        if before is None:
            if given is not None:
                raise Refusal.bad(f"New value for key '{name}' must not have a content ID")
            made = self._created[key] = new_id()
            value = {**content, "id": made}
        elif given is None:
            raise Refusal.bad(f"New value to update existing key '{name}' has no content ID")
        elif given != before["id"]:
            raise Refusal.bad(f"Key '{name}' already exists with content ID {before['id']}, not {given}")
        elif content["type"] != before["type"]:
            raise Refusal.bad("no reason given")
        else:
            value = dict(content)
        self._note(moved(key, before, now, absent_is_fine=True))
        self.changes.puts[key] = value
