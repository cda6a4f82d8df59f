"""Nessie's JSON as values and back, and its paged listings.

Malformed JSON raises KeyError, TypeError or ValueError. Field names: Nessie REST API v2, spec 2.2.0. Unknown
fields are ignored, because servers add some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Generic, TypeVar

from branchlake_dagster.nessie.model import (
    CommitMeta,
    CommitResult,
    Content,
    ContentKey,
    ContentsAt,
    Delete,
    DiffEntry,
    Entry,
    IcebergTable,
    KeyConflict,
    LogEntry,
    MergeResult,
    Namespace,
    Operation,
    OtherContent,
    Put,
    Reference,
    ReferenceMetadata,
    ReferenceType,
    ServerConfig,
    Unchanged,
)

Json = Mapping[str, Any]


def key(data: Json) -> ContentKey:
    """A `ContentKey` object."""
    return ContentKey(data["elements"])


def _time(text: str | None) -> datetime | None:
    # The server sends nanoseconds; fromisoformat keeps the microseconds.
    return datetime.fromisoformat(text).astimezone(UTC) if text else None


def commit_meta(data: Json) -> CommitMeta:
    """A `CommitMeta` object; the first author and the first value of each property count."""
    properties = {name: values[0] for name, values in (data.get("allProperties") or {}).items() if values}
    authors = data.get("authors") or []
    return CommitMeta(
        hash=data["hash"],
        message=data.get("message") or "",
        commit_time=_time(data.get("commitTime")),
        properties=properties,
        parent_hashes=tuple(data.get("parentCommitHashes") or ()),
        author=(authors[0] or None) if authors else None,
    )


def _metadata(data: Json) -> ReferenceMetadata:
    head = data.get("commitMetaOfHEAD")
    return ReferenceMetadata(
        commits_ahead=data.get("numCommitsAhead"),
        commits_behind=data.get("numCommitsBehind"),
        common_ancestor_hash=data.get("commonAncestorHash"),
        head_commit=commit_meta(head) if head else None,
        total_commits=data.get("numTotalCommits"),
    )


def reference(data: Json) -> Reference:
    """A `Branch`, `Tag` or `Detached` object."""
    metadata = data.get("metadata")
    return Reference(
        type=ReferenceType(data["type"]),
        name=data.get("name") or "",
        hash=data["hash"],
        metadata=_metadata(metadata) if metadata else None,
    )


def content(data: Json) -> Content:
    """A `Content` object of any type."""
    if data["type"] == "ICEBERG_TABLE":
        return IcebergTable(
            content_id=data.get("id"),
            metadata_location=data["metadataLocation"],
            snapshot_id=data["snapshotId"],
            schema_id=data["schemaId"],
            spec_id=data["specId"],
            sort_order_id=data["sortOrderId"],
        )
    if data["type"] == "NAMESPACE":
        return Namespace(data.get("id"), tuple(data["elements"]), dict(data.get("properties") or {}))
    payload = {name: value for name, value in data.items() if name not in ("id", "type")}
    return OtherContent(data.get("id"), data["type"], payload)


def content_json(value: Content) -> dict[str, Any]:
    """The JSON of a content to be put; without an id it is a creation."""
    body: dict[str, Any]
    if isinstance(value, IcebergTable):
        body = {
            "type": "ICEBERG_TABLE",
            "metadataLocation": value.metadata_location,
            "snapshotId": value.snapshot_id,
            "schemaId": value.schema_id,
            "specId": value.spec_id,
            "sortOrderId": value.sort_order_id,
        }
    elif isinstance(value, Namespace):
        body = {
            "type": "NAMESPACE",
            "elements": list(value.elements),
            "properties": dict(value.properties),
        }
    else:
        body = {"type": value.type, **value.payload}
    return body | ({"id": value.content_id} if value.content_id else {})


def operation_json(operation: Operation) -> dict[str, Any]:
    """The JSON of one commit operation."""
    where = {"key": {"elements": list(operation.key)}}
    match operation:
        case Put(content=value):
            return {"type": "PUT", **where, "content": content_json(value)}
        case Delete():
            return {"type": "DELETE", **where}
        case Unchanged():
            return {"type": "UNCHANGED", **where}


def commit_meta_json(message: str, properties: Mapping[str, str], author: str | None) -> dict[str, Any]:
    """The `CommitMeta` a client sends."""
    return {"message": message, "properties": dict(properties)} | ({"authors": [author]} if author else {})


def _operations(items: Iterable[Json]) -> Iterable[Operation]:
    for item in items:
        if item["type"] == "DELETE":
            yield Delete(key(item["key"]))
        elif item["type"] == "PUT":
            yield Put(key(item["key"]), content(item["content"]))


def log_entry(data: Json) -> LogEntry:
    """One entry of `history`."""
    return LogEntry(commit_meta(data["commitMeta"]), tuple(_operations(data.get("operations") or ())))


def entry(data: Json) -> Entry:
    """One entry of `entries`."""
    value = data.get("content")
    return Entry(key(data["name"]), data["type"], data["contentId"], content(value) if value else None)


def diff_entry(data: Json) -> DiffEntry:
    """One entry of `diff`."""
    before, after = data.get("from"), data.get("to")
    return DiffEntry(key(data["key"]), content(before) if before else None, content(after) if after else None)


def contents_at(data: Json) -> ContentsAt:
    """The answer of `contents`; keys that do not exist are absent."""
    found = {key(item["key"]): content(item["content"]) for item in data["contents"]}
    return ContentsAt(reference(data["effectiveReference"]), found)


def conflict(data: Json) -> KeyConflict:
    """One conflict of an error's details or of a merge result."""
    where = data.get("key")
    return KeyConflict(key(where) if where else None, data["conflictType"], data.get("message") or "")


def merge_result(data: Json) -> MergeResult:
    """The answer of `merge`."""
    details = data.get("details") or ()
    return MergeResult(
        applied=data["wasApplied"],
        successful=data["wasSuccessful"],
        target_hash=data.get("resultantTargetHash") or data["effectiveTargetHash"],
        common_ancestor_hash=data.get("commonAncestor"),
        conflicts=tuple(conflict(item["conflict"]) for item in details if item.get("conflict")),
    )


def commit_result(data: Json) -> CommitResult:
    """The answer of `commit`."""
    added = data.get("addedContents") or ()
    return CommitResult(data["targetBranch"]["hash"], {key(i["key"]): i["contentId"] for i in added})


def server_config(data: Json) -> ServerConfig:
    """The answer of `config`."""
    return ServerConfig(
        default_branch=data["defaultBranch"],
        spec_version=data.get("specVersion") or "unknown",
        max_supported_api_version=data["maxSupportedApiVersion"],
        no_ancestor_hash=data["noAncestorHash"],
    )


T = TypeVar("T")


@dataclass(frozen=True)
class Page(Generic[T]):
    """One answer of a listing: its JSON, for the token and the hash it was read at, and its items."""

    data: Mapping[str, Any]
    items: Sequence[T]


def pages(
    fetch: Callable[[str, Mapping[str, str]], Page[T]], path: Callable[[Mapping[str, Any] | None], str]
) -> Iterator[Page[T]]:
    """All pages, fetched as they are consumed.

    `path(None)` addresses the first page, `path(page)` the one after `page`: a listing of a branch goes on
    at the hash of its first page, else commits made between two pages would mix two states.
    """
    page = fetch(path(None), {})
    while True:
        yield page
        token = page.data.get("token")
        if not page.data.get("hasMore") or not token:
            return
        page = fetch(path(page.data), {"page-token": token})


def items(pages: Iterable[Page[T]]) -> Iterator[T]:
    """The items of the pages, one after the other."""
    return (item for page in pages for item in page.items)


def first(values: Iterable[T], limit: int | None) -> Iterator[T]:
    """At most `limit` values; all of them for None."""
    return iter(values) if limit is None else islice(values, limit)
