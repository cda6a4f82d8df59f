"""What the in-memory Nessie holds: commits with their contents, and references that point at them."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from branchlake_dagster_tests.simulation.answers import Refusal

Key = tuple[str, ...]
Json = Mapping[str, Any]

EMPTY = "2e1cfa82b035c26cbbbdae632cea070514eb8b773f616aaeaf668e2f0be8f10d"
"""The hash before any commit; the real server's, which is the same everywhere."""


@dataclass(frozen=True)
class Commit:
    """A commit with all contents as they are after it.

    `number` counts all commits of the store; bit i of `ancestors` stands for the commit numbered i, merge
    parents followed and itself included. `depth` counts first parents.
    """

    hash: str
    number: int
    parents: tuple[str, ...]
    depth: int
    ancestors: int
    message: str
    properties: Mapping[str, str]
    author: str
    time: datetime
    operations: tuple[Json, ...]
    contents: Mapping[Key, Json]


@dataclass
class Pointer:
    """A branch or a tag."""

    type: str
    hash: str


@dataclass
class Changes:
    """What a commit does: new values by key, and keys that go away."""

    puts: dict[Key, Json] = field(default_factory=dict)
    deletes: set[Key] = field(default_factory=set)


class History:
    """Commits and references. `clock` gives the time of a commit; hashes and ids follow from `seed`."""

    def __init__(self, *, clock: Callable[[], datetime], seed: int = 0) -> None:
        self._clock = clock
        self._seed = seed
        self._ids = 0
        self._numbered: list[Commit] = []
        self.commits: dict[str, Commit] = {}
        self.references: dict[str, Pointer] = {"main": Pointer("BRANCH", EMPTY)}

    def _next(self) -> bytes:
        self._ids += 1
        return hashlib.sha256(f"{self._seed}:{self._ids}".encode()).digest()

    def new_content_id(self) -> str:
        return str(uuid.UUID(bytes=self._next()[:16]))

    def pointer(self, name: str) -> Pointer:
        found = self.references.get(name)
        if found is None:
            raise Refusal.not_found(f"Named reference '{name}' not found")
        return found

    def commit_at(self, at: str) -> Commit | None:
        """The commit of a hash; None for the hash before any commit."""
        if at == EMPTY:
            return None
        found = self.commits.get(at)
        if found is None:
            raise Refusal.not_found(f"Commit '{at}' not found")
        return found

    def contents_at(self, at: str) -> Mapping[Key, Json]:
        commit = self.commit_at(at)
        return commit.contents if commit else {}

    def first_parents(self, at: str) -> Iterator[Commit]:
        """The commit at a hash, its first parent, that one's first parent, and so on."""
        commit = self.commit_at(at)
        while commit:
            yield commit
            commit = self.commits.get(commit.parents[0])

    def require_on(self, at: str, name: str) -> None:
        """Refuse a hash that is not in the history of a branch."""
        head = self.pointer(name).hash
        if at not in (head, EMPTY) and all(commit.hash != at for commit in self.first_parents(head)):
            raise Refusal.not_found(f"Could not find commit '{at}' in reference '{name}'.")

    def merge_base(self, target: str, source: str) -> str:
        """The best common ancestor, merges counted as history."""
        one, other = self.commit_at(target), self.commit_at(source)
        if one is not None and other is None:
            return one.hash
        if one is not None and other is not None:
            common = one.ancestors & other.ancestors
            best: list[Commit] = []
            while common:
                commit = self._numbered[common.bit_length() - 1]
                best.append(commit)
                common &= ~commit.ancestors
            if best:
                return min(best, key=lambda commit: commit.depth).hash
        raise Refusal.not_found(f"No common ancestor in parents of {target} and {source}")

    def append(self, branch: str, meta: Json, changes: Changes, *, merged: str | None = None) -> Commit:
        """Put a commit on top of a branch."""
        head = self.pointer(branch).hash
        parent = self.commit_at(head)
        number = len(self._numbered)
        ancestors = 1 << number
        contents = dict(parent.contents) if parent else {}
        for above in (head, merged):
            commit = self.commits.get(above) if above else None
            ancestors |= commit.ancestors if commit else 0
        for key in changes.deletes:
            contents.pop(key, None)
        contents.update(changes.puts)
        commit = Commit(
            hash=self._next().hex(),
            number=number,
            parents=(head, merged) if merged else (head,),
            depth=parent.depth + 1 if parent else 1,
            ancestors=ancestors,
            message=meta.get("message") or "",
            properties=dict(meta.get("properties") or {}),
            author=(meta.get("authors") or [""])[0],
            time=self._clock(),
            operations=(
                *(
                    {"type": "DELETE", "key": {"elements": list(key)}}
                    for key in changes.deletes - set(changes.puts)
                ),
                *(
                    {"type": "PUT", "key": {"elements": list(key)}, "content": value}
                    for key, value in changes.puts.items()
                ),
            ),
            contents=contents,
        )
        self._numbered.append(commit)
        self.commits[commit.hash] = commit
        self.references[branch].hash = commit.hash
        return commit
