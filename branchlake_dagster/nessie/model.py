"""Nessie's references and contents as immutable dataclasses, and the parser of reference arguments.

The shapes follow Nessie's REST API v2 (spec 2.2.0, https://projectnessie.org/develop/rest/), reduced to what
the lake needs. Hashes are lower-case hex strings of 64 characters. Times have a time zone and are in UTC.

A reference argument is `name`, `name@hash`, `@hash` or a bare 64-character hash. The rules for names and
hashes are pynessie's, which took them from Nessie's own `Validation` class. Only the rule for a bare hash is
stricter here: pynessie reads every name of eight or more hex digits as a hash, so a branch called `feedface`
could not be used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from urllib.parse import quote

from branchlake_dagster.nessie.errors import NessieRefused

_PATH = re.compile(r"`((?:[^`]|``)+)`(?:\.|$)|([^.`]+)(?:\.|$)")


class ReferenceType(StrEnum):
    """The kind of a reference."""

    BRANCH = "BRANCH"
    TAG = "TAG"
    DETACHED = "DETACHED"


class ContentKey(tuple[str, ...]):
    """The key of a content: the elements of its namespace, then its own name.

    A key is a tuple of its elements and equals a plain tuple, so a PyIceberg identifier finds the same entry.
    """

    __slots__ = ()

    def __new__(cls, elements: Iterable[str]) -> ContentKey:
        """Create a key of `elements`.

        Raises ValueError if there are no elements or if one is empty, and TypeError for a text.
        """
        if isinstance(elements, str):
            raise TypeError(f"ContentKey takes elements; use ContentKey.from_path({elements!r}) for a path")
        key = super().__new__(cls, elements)
        if not key or not all(key):
            raise ValueError(f"A content key needs one or more non-empty elements, not {tuple(key)!r}")
        return key

    @classmethod
    def from_path(cls, path: str) -> ContentKey:
        """Parse a dotted path. An element that contains dots is in backticks, as in Spark SQL.

        Raises ValueError if the path is not valid.
        """
        elements: list[str] = []
        position = 0
        while match := _PATH.match(path, position):
            quoted, plain = match.groups()
            elements.append(quoted.replace("``", "`") if quoted else plain)
            position = match.end()
        if position != len(path) or path.endswith(".") or not elements:
            raise ValueError(f"{path!r} is not a valid dotted content key")
        return cls(elements)

    @property
    def elements(self) -> tuple[str, ...]:
        """Return the elements as a plain tuple."""
        return tuple(self)

    @property
    def name(self) -> str:
        """Return the dotted path that `from_path` parses."""
        return ".".join(f"`{e.replace('`', '``')}`" if "." in e or "`" in e else e for e in self)

    @property
    def ancestors(self) -> list[ContentKey]:
        """Return the keys of the namespaces above the content, outermost first."""
        return [ContentKey(self[:depth]) for depth in range(1, len(self))]

    @property
    def parent(self) -> tuple[str, ...]:
        """Return the elements of the key's namespace; the empty tuple at the top level."""
        return tuple(self[:-1])

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"ContentKey({self.name})"


@dataclass(frozen=True)
class CommitMeta:
    """The author, time, message and properties of a commit. Only the first value of each property is kept."""

    hash: str
    message: str
    commit_time: datetime | None
    properties: Mapping[str, str] = field(hash=False)
    parent_hashes: tuple[str, ...]
    author: str | None


@dataclass(frozen=True)
class ReferenceMetadata:
    """Nessie's metadata of a reference: its head, and its commits compared with the default branch.

    `commits_ahead` and `commits_behind` are the numbers of commits that only the reference, or only the
    default branch, has. `common_ancestor_hash` is the newest commit that both have. `total_commits` is the
    number of commits in the reference's history.
    """

    commits_ahead: int | None
    commits_behind: int | None
    common_ancestor_hash: str | None
    head_commit: CommitMeta | None
    total_commits: int | None


@dataclass(frozen=True)
class Reference:
    """A branch, a tag or a bare hash. For a bare hash, `name` is empty and `type` is `DETACHED`."""

    type: ReferenceType
    name: str
    hash: str
    metadata: ReferenceMetadata | None = None

    @property
    def pinned_ref(self) -> str:
        """Return the reference argument that always means this commit: `name@hash`, or `@hash`."""
        return f"{self.name}@{self.hash}"


@dataclass(frozen=True)
class IcebergTable:
    """The content of a table: its current Iceberg metadata file and its current ids.

    `content_id` is None until the first commit.
    """

    content_id: str | None
    metadata_location: str
    snapshot_id: int
    schema_id: int
    spec_id: int
    sort_order_id: int


@dataclass(frozen=True)
class Namespace:
    """A namespace with its properties. `content_id` is None until the first commit."""

    content_id: str | None
    elements: tuple[str, ...]
    properties: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class OtherContent:
    """A content of another type, such as `ICEBERG_VIEW` or `UDF`, which branchlake does not interpret.

    `payload` is its JSON without the id and the type.
    """

    content_id: str | None
    type: str
    payload: Mapping[str, object] = field(default_factory=dict, hash=False)


Content = IcebergTable | Namespace | OtherContent


@dataclass(frozen=True)
class Put:
    """The operation that creates or updates the content of `key`.

    If the content has no content id, the operation creates it.
    """

    key: ContentKey
    content: Content


@dataclass(frozen=True)
class Delete:
    """The operation that removes the content of `key`."""

    key: ContentKey


@dataclass(frozen=True)
class Unchanged:
    """The condition that `key` has not changed since the expected hash; otherwise the commit is refused."""

    key: ContentKey


Operation = Put | Delete | Unchanged


@dataclass(frozen=True)
class KeyConflict:
    """A conflict that blocks a commit or merge: the key and the reason.

    If `key` is None, the conflict concerns the reference itself. `kind` is the server's conflict type, for
    example `VALUE_DIFFERS`, `KEY_EXISTS`, `KEY_DOES_NOT_EXIST`, `NAMESPACE_ABSENT` or `UNEXPECTED_HASH`.
    """

    key: ContentKey | None
    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.key.name} ({self.kind})" if self.key else self.kind


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge.

    `applied` is False and `successful` True if the target already contained the source, as after a repeated
    merge. `target_hash` is the hash of the target after the merge. `conflicts` are the keys that block the
    merge; if there are any, nothing was applied.
    """

    applied: bool
    successful: bool
    target_hash: str
    common_ancestor_hash: str | None
    conflicts: tuple[KeyConflict, ...]


@dataclass(frozen=True)
class CommitResult:
    """The new head of the branch, and the content ids that the server gave to created keys."""

    hash: str
    content_ids: Mapping[ContentKey, str] = field(hash=False)


@dataclass(frozen=True)
class DiffEntry:
    """A key whose content differs between two references.

    The content is None in a reference that lacks the key.
    """

    key: ContentKey
    from_content: Content | None
    to_content: Content | None


@dataclass(frozen=True)
class DiffAt:
    """All differences between two references. `to_reference` has the hash at which the right one was read."""

    to_reference: Reference
    entries: tuple[DiffEntry, ...]


@dataclass(frozen=True)
class LogEntry:
    """A commit in the log. `operations` is empty unless the caller requested the operations."""

    commit: CommitMeta
    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class ContentEntry:
    """A key in a listing, with its content type and id.

    `content` is None unless the caller requested the contents.
    """

    key: ContentKey
    type: str
    content_id: str
    content: Content | None


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of the server. `no_ancestor_hash` is the hash that precedes every commit.

    `repository_created_at` is the time at which the repository was created, as the server writes it, with
    nanoseconds. It identifies the repository: restarts and copies of its database keep it. None if the server
    does not send it.
    """

    default_branch: str
    spec_version: str
    max_supported_api_version: int
    no_ancestor_hash: str
    repository_created_at: str | None = None


@dataclass(frozen=True)
class ContentsAt:
    """Contents by key that were read together. `reference` has the hash at which they were read.

    Keys without content are left out.
    """

    reference: Reference
    contents: Mapping[ContentKey, Content] = field(hash=False)


_FULL_HASH = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True)
class RefArgument:
    """A parsed reference argument.

    `name` is empty for a bare hash; `hash` is None for the head of a reference.
    """

    name: str
    hash: str | None

    @property
    def path(self) -> str:
        """Return the reference as a segment of a URL path of Nessie's API v2."""
        return quote(self.name, safe="") + (f"@{self.hash}" if self.hash else "")


def parse_ref(ref: str) -> RefArgument:
    """Parse a reference argument. Raises NessieRefused if it is not valid."""
    # Late import: pynessie takes 0.4 s to import, which a process without calls to Nessie need not spend.
    from branchlake_dagster.nessie.pynessie_parts import (
        is_valid_hash,
        is_valid_reference_name,
        split_into_reference_and_hash,
    )

    if _FULL_HASH.fullmatch(ref):
        return RefArgument("", ref.lower())
    if ref.startswith("@") and is_valid_hash(ref[1:]):
        return RefArgument("", ref[1:].lower())
    if "@" in ref:
        name, hash_part = split_into_reference_and_hash(ref)
        if hash_part:
            return RefArgument(name, hash_part.lower())
    elif is_valid_reference_name(ref):
        return RefArgument(ref, None)
    raise NessieRefused(
        f"{ref!r} is not a valid Nessie reference.",
        hint="Use a branch or tag name (letters, digits and . / _ -), name@hash or a hash.",
        reason="reference_name",
        subject=ref,
    )


def parse_name(ref: str) -> str:
    """Return `ref` if it is a plain branch or tag name. Raises NessieRefused if it contains a hash."""
    parsed = parse_ref(ref)
    if parsed.hash or not parsed.name:
        raise NessieRefused(
            f"{ref!r} contains a hash where a plain branch or tag name is needed.",
            reason="hash_in_name",
            subject=ref,
        )
    return parsed.name
