"""A client for Nessie's REST API v2: references, contents, listings, commits and merges."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Self, TypeVar

from branchlake_dagster.nessie import json_codec as codec
from branchlake_dagster.nessie import json_codec as paging
from branchlake_dagster.nessie.errors import (
    ContentNotFound,
    NessieAlreadyExists,
    ReferenceNotFound,
    RetryPolicy,
)
from branchlake_dagster.nessie.model import (
    CommitResult,
    Content,
    ContentEntry,
    ContentKey,
    ContentsAt,
    DiffAt,
    DiffEntry,
    LogEntry,
    MergeResult,
    Operation,
    Reference,
    ReferenceType,
    ServerConfig,
    parse_name,
    parse_ref,
)
from branchlake_dagster.nessie.transport import HttpTransport, Transport

T = TypeVar("T")
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 3.0, 30.0
MergeMode = Literal["NORMAL", "DROP", "FORCE"]
_NO_ANCESTOR_HINT = (
    "If both references exist, they have no common commit. A branch that was created from an empty main "
    "cannot be merged. Commit to main before you create branches."
)


class NessieClient:
    """Typed access to one Nessie server. Threads may share a client.

    A *ref* argument is a branch or tag name, `name@hash`, `@hash` or a full hash. Timeouts are in seconds.
    `transport` replaces HTTP to `uri` together with its token, certificate verification and timeouts.

    Every method retries by the policy `retry` and raises the NessieError that describes the failure. After an
    unknown outcome, a merge, creation or deletion is repeated, because repeating it has the same effect as
    doing it once. A commit is not repeated.
    """

    def __init__(
        self,
        uri: str,
        *,
        token: str | None = None,
        verify: bool | str = True,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        read_timeout_s: float = READ_TIMEOUT_S,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - it is immutable
        sleep: Callable[[float], None] = time.sleep,
        transport: Transport | None = None,
    ) -> None:
        self._transport = transport or HttpTransport(
            uri,
            token=token,
            verify=verify,
            connect_timeout_s=connect_timeout_s,
            read_timeout_s=read_timeout_s,
        )
        self._retry = retry
        self._sleep = sleep

    @property
    def uri(self) -> str:
        """Return the base address, without a trailing slash."""
        return self._transport.uri

    def __repr__(self) -> str:
        return f"NessieClient({self.uri})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the pooled connections."""
        self._transport.close()

    # -- references ------------------------------------------------------------------------------------

    def config(self) -> ServerConfig:
        """Return the server's default branch and versions, and what identifies the repository."""
        return self._read("config", codec.parse_server_config, action="read its configuration")

    @cached_property
    def no_ancestor_hash(self) -> str:
        """The hash that precedes every commit. It is constant, so it is requested only once."""
        return self.config().no_ancestor_hash

    def reference(self, name: str, *, fetch_metadata: bool = False) -> Reference:
        """Return a branch or tag by name. Raises ReferenceNotFound.

        `fetch_metadata` adds a comparison with the default branch.
        """
        return self._read(
            f"trees/{parse_ref(parse_name(name)).path}",
            lambda data: codec.parse_reference(data["reference"]),
            action=f"read reference {name}",
            params={"fetch": "ALL"} if fetch_metadata else {},
        )

    def has_reference(self, name: str) -> bool:
        """Return whether a branch or tag of this name exists. Costs one request."""
        try:
            self.reference(name)
        except ReferenceNotFound:
            return False
        return True

    def references(
        self,
        *,
        filter: str | None = None,  # noqa: A002 - Nessie's word
        fetch_metadata: bool = False,
        page_size: int = 500,
    ) -> Iterator[Reference]:
        """Yield all branches and tags. `filter` is a CEL expression on `ref` and `refMeta`.

        `fetch_metadata` adds a comparison of each with the default branch. `page_size` is the most references
        in one answer of the server; all pages are read.
        """
        params = _drop_none(filter=filter, fetch="ALL" if fetch_metadata else None)
        return paging.iter_items(
            self._pages("trees", "references", codec.parse_reference, params, page_size, "list references")
        )

    def create_branch(self, name: str, *, from_ref: str, from_hash: str) -> Reference:
        """Create a branch at `from_hash`, and return it. `from_ref` is any existing branch or tag.

        The server does not check that `from_ref` contains the hash, so a deleted branch can be created again.
        Raises NessieAlreadyExists if the name is in use, even if that reference is already at the hash.
        """
        return self._create(ReferenceType.BRANCH, name, from_ref, from_hash)

    def create_tag(self, name: str, *, from_ref: str, from_hash: str) -> Reference:
        """Create a tag at `from_hash`, by the same rules as `create_branch`, and return it."""
        return self._create(ReferenceType.TAG, name, from_ref, from_hash)

    def delete_branch(self, name: str, *, expected_hash: str) -> None:
        """Delete a branch that is still at `expected_hash`. Raises NessieConflict if the branch has moved."""
        self._delete(ReferenceType.BRANCH, name, expected_hash)

    def delete_tag(self, name: str, *, expected_hash: str) -> None:
        """Delete a tag that is still at `expected_hash`. Raises NessieConflict if the tag has moved."""
        self._delete(ReferenceType.TAG, name, expected_hash)

    def _create(self, kind: ReferenceType, name: str, from_ref: str, from_hash: str) -> Reference:
        target, source = parse_name(name), parse_name(from_ref)
        source_hash = parse_ref(f"@{from_hash}").hash

        def attempt(doubt: bool) -> Reference:
            try:
                return self._transport.send(
                    "POST",
                    "trees",
                    lambda data: codec.parse_reference(data["reference"]),
                    action=f"create {kind.lower()} {name} at {source}@{from_hash}",
                    changes=True,
                    params={"name": target, "type": kind},
                    # The server does not check the type of the source, so `BRANCH` also works for a tag.
                    body={"type": "BRANCH", "name": source, "hash": source_hash},
                )
            except NessieAlreadyExists:
                if not doubt:
                    raise
                # An earlier attempt of this call may have created the reference, at the wanted hash.
                existing = self.reference(target)
                if existing.type is kind and existing.hash == source_hash:
                    return existing
                raise

        return self._retry.run_attempts(attempt, sleep=self._sleep, repeatable=True)

    def _delete(self, kind: ReferenceType, name: str, expected_hash: str) -> None:
        path = parse_ref(f"{parse_name(name)}@{expected_hash}").path

        def attempt(doubt: bool) -> None:
            try:
                self._transport.send(
                    "DELETE",
                    f"trees/{path}",
                    lambda _: None,
                    action=f"delete {kind.lower()} {name} at {expected_hash}",
                    changes=True,
                    params={"type": kind},
                )
            except ReferenceNotFound:
                if not doubt:
                    raise

        self._retry.run_attempts(attempt, sleep=self._sleep, repeatable=True)

    # -- contents --------------------------------------------------------------------------------------

    def content(self, ref: str, key: ContentKey) -> Content:
        """Return the content of `key` at `ref`. Raises ContentNotFound or ReferenceNotFound."""
        contents = self.contents(ref, [key])
        if key not in contents:
            raise ContentNotFound(
                f"Nessie has no content {key} at {ref}.", table=key.name, branch=ref, status=404
            )
        return contents[key]

    def contents(self, ref: str, keys: Iterable[ContentKey]) -> Mapping[ContentKey, Content]:
        """Return the contents of `keys` at `ref`, by key, all read at one hash.

        Keys that do not exist are left out.
        """
        return self.contents_at(ref, keys).contents

    def contents_at(self, ref: str, keys: Iterable[ContentKey]) -> ContentsAt:
        """Return the contents of `keys` at `ref`, and the hash at which they were read.

        With this hash as the expected hash, a later commit fails if a key has changed.
        """
        requested_keys = [{"elements": list(key)} for key in keys]
        if not requested_keys:  # Nessie refuses such a request, for example of a lake that has no table yet
            reference = self._read(
                f"trees/{parse_ref(ref).path}/entries",
                lambda data: codec.parse_reference(data["effectiveReference"]),
                action=f"read the hash of {ref}",
                params={"max-records": "1"},
            )
            return ContentsAt(reference, {})
        # The keys are in the body, not in the path, so that their elements may contain dots and slashes.
        return self._read(
            f"trees/{parse_ref(ref).path}/contents",
            codec.parse_contents_at,
            action=f"read contents at {ref}",
            method="POST",
            body={"requestedKeys": requested_keys},
        )

    def entries(
        self,
        ref: str,
        *,
        filter: str | None = None,  # noqa: A002 - Nessie's word
        fetch_content: bool = False,
        page_size: int = 500,
    ) -> Iterator[ContentEntry]:
        """Yield the entries of all keys at `ref`, read at one hash. `filter` is a CEL expression on `entry`.

        `fetch_content` adds the contents. `page_size` is the most entries in one answer of the server; all
        pages are read.
        """
        params = _drop_none(filter=filter, content="true" if fetch_content else None)

        def path(page: Mapping[str, Any] | None) -> str:
            page_ref = codec.parse_reference(page["effectiveReference"]).pinned_ref if page else ref
            return f"trees/{parse_ref(page_ref).path}/entries"

        return paging.iter_items(
            self._pages(path, "entries", codec.parse_entry, params, page_size, f"list {ref}")
        )

    def log(
        self,
        ref: str,
        *,
        filter: str | None = None,  # noqa: A002 - Nessie's word
        since: str | None = None,
        limit: int | None = None,
        fetch_operations: bool = False,
        page_size: int = 200,
    ) -> Iterator[LogEntry]:
        """Yield the commits of `ref`, newest first. `filter` is a CEL expression on `commit`.

        `limit` is the largest number of commits. `since` is the hash of a commit in the history of `ref`:
        only later commits are read. If that history does not contain `since`, the iterator raises
        ReferenceNotFound when it reaches the end of the history. With `fetch_operations`, each commit has its
        operations. `page_size` is the most commits in one answer of the server.

        Without `since`, the server applies a filter to the whole history, unless `limit` commits match
        earlier. The whole call fails if the filter fails on one commit, for example because that commit lacks
        a property.
        """
        fetch = "ALL" if fetch_operations else None
        size = page_size if limit is None else max(1, min(page_size, limit))
        if since is None:
            entries = self._history(ref, _drop_none(filter=filter, fetch=fetch), size)
        else:
            entries = self._history_after(ref, since, filter, _drop_none(fetch=fetch), size)
        return paging.limit_items(entries, limit)

    def _history(self, ref: str, params: Mapping[str, str], page_size: int) -> Iterator[LogEntry]:
        path = f"trees/{parse_ref(ref).path}/history"
        action = f"read the log of {ref}"
        return paging.iter_items(
            self._pages(path, "logEntries", codec.parse_log_entry, params, page_size, action)
        )

    def _history_after(
        self,
        ref: str,
        since: str,
        filter: str | None,  # noqa: A002 - Nessie's word
        params: Mapping[str, str],
        page_size: int,
    ) -> Iterator[LogEntry]:
        """Iterate over the commits of `ref` after `since`, newest first.

        Raises ReferenceNotFound at the end if the history does not contain the commit `since`.
        """
        since_filter = f"commit.hash == '{since}'"
        # The server applies the filter first and searches for `limit-hash` in the remaining commits. So the
        # filter must also accept the commit `since`.
        limit_params = {"limit-hash": since} | _drop_none(
            filter=f"({filter}) || {since_filter}" if filter else None
        )
        for entry in self._history(ref, {**params, **limit_params}, page_size):
            if entry.commit.hash == since:
                return
            yield entry
        # The server also omits the limit commit if a page ends just before it. So read that commit
        # separately.
        since_entries = self._history(ref, {"limit-hash": since, "filter": since_filter}, 1)
        if next(since_entries, None) is None and since != self.config().no_ancestor_hash:
            raise ReferenceNotFound(f"The history of {ref} has no commit {since}.", branch=ref, status=404)

    def diff(self, from_ref: str, to_ref: str, *, page_size: int = 500) -> Iterator[DiffEntry]:
        """Yield the keys whose content differs between two references, with both contents.

        Each reference is read at one hash. `page_size` is the most keys in one answer of the server; all
        pages are read.
        """
        return paging.iter_items(self._diff(from_ref, to_ref, page_size))

    def diff_at(self, from_ref: str, to_ref: str, *, page_size: int = 500) -> DiffAt:
        """Return all differences of `diff`, together with the hash at which `to_ref` was read.

        `page_size` is the most differences in one answer of the server; all pages are read.
        """
        pages = list(self._diff(from_ref, to_ref, page_size))
        head = codec.parse_reference(pages[0].data["effectiveToReference"])
        return DiffAt(head, tuple(paging.iter_items(pages)))

    def _diff(self, from_ref: str, to_ref: str, page_size: int) -> Iterator[paging.Page[DiffEntry]]:

        def path(page: Mapping[str, Any] | None) -> str:
            left, right = from_ref, to_ref
            if page:
                left = codec.parse_reference(page["effectiveFromReference"]).pinned_ref
                right = codec.parse_reference(page["effectiveToReference"]).pinned_ref
            return f"trees/{parse_ref(left).path}/diff/{parse_ref(right).path}"

        action = f"compare {from_ref} with {to_ref}"
        return self._pages(path, "diffs", codec.parse_diff_entry, {}, page_size, action)

    # -- changes ---------------------------------------------------------------------------------------

    def commit(
        self,
        branch: str,
        *,
        expected_hash: str,
        operations: Sequence[Operation],
        message: str,
        properties: Mapping[str, str] | None = None,
        author: str | None = None,
    ) -> CommitResult:
        """Commit `operations` to a branch, if none of their keys changed since `expected_hash`.

        Returns the new head and the ids of created contents. Raises NessieConflict, with the keys, if some
        keys changed. Raises NessieRefused if the content id of a put differs from the content id at
        `expected_hash`. The call is not repeated after an unknown outcome, because the second attempt would
        conflict with the first. To find out what happened, put a unique id into `properties` and search the
        log for it.
        """
        path = parse_ref(f"{parse_name(branch)}@{expected_hash}").path
        return self._retry.run_attempts(
            lambda _: self._transport.send(
                "POST",
                f"trees/{path}/history/commit",
                codec.parse_commit_result,
                action=f"commit to {branch}",
                changes=True,
                body={
                    "commitMeta": codec.commit_meta_to_json(message, properties or {}, author),
                    "operations": [codec.operation_to_json(operation) for operation in operations],
                },
            ),
            sleep=self._sleep,
        )

    def merge(
        self,
        *,
        from_name: str,
        from_hash: str,
        into: str,
        expected_hash: str,
        message: str,
        properties: Mapping[str, str] | None = None,
        author: str | None = None,
        key_merge_modes: Mapping[ContentKey, MergeMode] | None = None,
    ) -> MergeResult:
        """Merge the commits of branch `from_name` up to `from_hash` into branch `into`, as one commit.

        Key conflicts are returned in the result, not raised. After an unknown outcome, the merge is repeated:
        if the first merge was applied, the repeated merge returns `applied=False` and `successful=True`. A
        merge that drops every changed key by `key_merge_modes` has the same result. A merge does not check
        keys that the source only read. There is deliberately no dry run: the server treats a misspelled flag
        as a real merge.
        """
        path = parse_ref(f"{parse_name(into)}@{expected_hash}").path
        modes = [
            {"key": {"elements": list(key)}, "mergeBehavior": mode}
            for key, mode in (key_merge_modes or {}).items()
        ]

        def attempt(_: bool) -> MergeResult:
            try:
                return self._transport.send(
                    "POST",
                    f"trees/{path}/history/merge",
                    codec.parse_merge_result,
                    action=f"merge {from_name}@{from_hash} into {into}",
                    changes=True,
                    body={
                        "fromRefName": parse_name(from_name),
                        "fromHash": from_hash,
                        "isReturnConflictAsResult": True,
                        "commitMeta": codec.commit_meta_to_json(message, properties or {}, author),
                        "keyMergeModes": modes,
                    },
                )
            except ReferenceNotFound as missing:
                missing.hint = _NO_ANCESTOR_HINT
                raise

        return self._retry.run_attempts(attempt, sleep=self._sleep, repeatable=True)

    # -- requests --------------------------------------------------------------------------------------

    def _read(
        self,
        path: str,
        decode: Callable[[Any], T],
        *,
        action: str,
        method: str = "GET",
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> T:
        return self._retry.run_attempts(
            lambda _: self._transport.send(
                method, path, decode, action=action, changes=False, params=params, body=body
            ),
            sleep=self._sleep,
        )

    def _pages(
        self,
        path: str | Callable[[Mapping[str, Any] | None], str],
        field: str,
        decode: Callable[[Any], T],
        params: Mapping[str, str],
        page_size: int,
        action: str,
    ) -> Iterator[paging.Page[T]]:
        def fetch(path: str, page_params: Mapping[str, str]) -> paging.Page[T]:
            return self._read(
                path,
                lambda data: paging.Page(data, [decode(item) for item in data[field]]),
                action=action,
                params={**params, "max-records": str(page_size), **page_params},
            )

        return paging.iter_pages(fetch, path if callable(path) else lambda _: path)


def _drop_none(**params: str | None) -> dict[str, str]:
    return {name: value for name, value in params.items() if value is not None}
