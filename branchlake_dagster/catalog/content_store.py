"""Read the contents of one Nessie reference, and change them by compare-and-swap."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

from branchlake_dagster.errors import ReadOnlyReference
from branchlake_dagster.nessie import NessieClient
from branchlake_dagster.nessie.errors import (
    NessieConflict,
    NessieError,
    NessieOutcomeUnknown,
    ReferenceNotFound,
)
from branchlake_dagster.nessie.model import (
    CommitResult,
    ContentEntry,
    ContentKey,
    ContentsAt,
    IcebergTable,
    Operation,
    Put,
    Reference,
    ReferenceType,
    parse_ref,
)

_ATTEMPTS = 4
_CACHE_S = 300.0
"""Seconds that contents stay in the cache. From an older hash, the server walks through all later commits."""


@dataclass(frozen=True)
class _CachedContents:
    """The contents of `keys` at `read_at` on the monotonic clock. Keys that `state` lacks held nothing."""

    keys: frozenset[ContentKey]
    state: ContentsAt
    read_at: float


class ReferenceStore:
    """Reads `ref` at its head and commits to it, if it is a branch.

    `author` and `properties` are added to every commit. Errors of the client pass unchanged, except in
    commits: there they become PyIceberg's *failed* and *state unknown*. PyIceberg deletes the files of a
    failed commit and keeps those of an unknown one.
    """

    def __init__(
        self,
        client: NessieClient,
        ref: str,
        *,
        author: str,
        properties: Mapping[str, str],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.ref = ref
        self._now = now
        self._cached: _CachedContents | None = None
        self._is_fixed = parse_ref(ref).hash is not None
        self._author = author
        self._properties = dict(properties)

    def read(self, *keys: ContentKey) -> ContentsAt:
        """Read the contents of `keys`, and the hash at which they were read."""
        started_at = self._now()
        state = self.client.contents_at(self.ref, keys)
        self._cached = _CachedContents(frozenset(keys), state, started_at)
        return state

    @property
    def last_hash(self) -> str | None:
        """Hash of the reference at the last read or commit; None before that, or if a commit failed."""
        return self._cached.state.reference.hash if self._cached else None

    def get_cached(self, *keys: ContentKey) -> ContentsAt | None:
        """Return the contents from the last read or commit; None if they are too old or lack one of `keys`.

        Never make a decision from the cache, because other writers may have changed the keys since. But a
        commit may start from the cached contents: the server refuses an outdated commit, and then the cache
        is cleared.
        """
        cached = self._cached
        if cached is None or not cached.keys.issuperset(keys) or self._now() - cached.read_at > _CACHE_S:
            return None
        return cached.state

    def iter_children(self, namespace: tuple[str, ...], content_type: str) -> Iterator[ContentEntry]:
        """Iterate over the entries of one content type directly under `namespace` (empty: at the top)."""
        terms = [f"entry.contentType == '{content_type}'"]
        if not any("." in element for element in namespace):
            # CEL accepts JSON's string escapes. Its namespaces are joined by dots, so it cannot filter a
            # namespace with dots in its elements. The comparison below decides in every case.
            terms.append(f"entry.namespace == {json.dumps('.'.join(namespace), ensure_ascii=False)}")
        for entry in self.client.entries(self.ref, filter=" && ".join(terms)):
            if entry.key.parent == namespace:
                yield entry

    def require_branch(self, reference: Reference | None = None) -> None:
        """Raise ReadOnlyReference unless `ref` accepts commits.

        `reference` is the server's description of `ref`. Without it, only the argument `ref` itself is
        checked.
        """
        if self._is_fixed or (reference and reference.type is not ReferenceType.BRANCH):
            kind = "a fixed hash" if self._is_fixed else "a tag"
            raise ReadOnlyReference(
                f"{self.ref} is {kind} and cannot be changed.",
                branch=self.ref,
                hint="Open the catalog on a branch.",
            )

    def commit(self, base: Reference, operations: Sequence[Operation], message: str) -> None:
        """Commit `operations` if their keys are unchanged since `base`.

        Raises NessieConflict if they have changed, CommitStateUnknownException if the outcome is unknown.
        """
        self.require_branch(base)
        self._cached = None
        started_at = self._now()
        outcome_unknown: NessieOutcomeUnknown
        try:
            result = self.client.commit(
                base.name,
                expected_hash=base.hash,
                operations=operations,
                message=message,
                properties=self._properties,
                author=self._author,
            )
            self._cached = _contents_after_commit(operations, result, base, started_at)
            return
        except NessieOutcomeUnknown as lost:
            outcome_unknown = lost
        if not self._is_committed(operations):
            raise CommitStateUnknownException(str(outcome_unknown)) from outcome_unknown

    def _is_committed(self, operations: Sequence[Operation]) -> bool:
        """Check whether the tables are already as `operations` would leave them.

        Metadata files have unique names, so finding ours proves the commit. Not finding it proves nothing:
        the request may still be under way, or others may have committed after it.
        """
        locations = {
            operation.key: operation.content.metadata_location
            for operation in operations
            if isinstance(operation, Put) and isinstance(operation.content, IcebergTable)
        }
        if not locations:
            return False
        try:
            contents = self.read(*locations).contents
        except NessieError:
            return False
        tables = {key: value for key, value in contents.items() if isinstance(value, IcebergTable)}
        return all(
            key in tables and tables[key].metadata_location == location for key, location in locations.items()
        )

    def commit_plan(
        self,
        keys: Sequence[ContentKey],
        plan: Callable[[ContentsAt], Sequence[Operation]],
        message: str,
        *,
        cached_state: ContentsAt | None = None,
    ) -> None:
        """Read `keys`, call `plan` with their contents for the operations, and commit these.

        If one of the keys changes in between, this is repeated from the new state. So a lost race ends in the
        error that `plan` raises for it, such as "already exists". `cached_state` is a state from
        `get_cached`; it is tried first, and used only for a commit.
        """

        def states() -> Iterator[ContentsAt]:
            if cached_state is not None:
                yield cached_state
            for _ in range(_ATTEMPTS):
                yield self.read(*keys)

        last_error: NessieError | None = None
        for state in states():
            self.require_branch(state.reference)
            operations = plan(state)
            if not operations:
                return None
            try:
                return self.commit(state.reference, operations, message)
            except (NessieConflict, ReferenceNotFound) as error:  # `read` reports a missing reference
                last_error = error
        raise CommitFailedException(
            f"{message}: other writers kept changing the same keys. {last_error}"
        ) from last_error


def _contents_after_commit(
    operations: Sequence[Operation], result: CommitResult, base: Reference, read_at: float
) -> _CachedContents:
    """Return the contents of the keys that a commit changed.

    Other keys are unknown: `base` may not be the parent of the commit.
    """
    contents = {}
    for operation in operations:
        if isinstance(operation, Put):
            content, new_id = operation.content, result.content_ids.get(operation.key)
            contents[operation.key] = replace(content, content_id=new_id or content.content_id)
    reference = Reference(base.type, base.name, result.hash)
    keys = frozenset(operation.key for operation in operations)
    return _CachedContents(keys, ContentsAt(reference, contents), read_at)
