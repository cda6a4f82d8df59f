"""Conversion between Nessie's JSON and the classes of `model`, and its paged listings.

Malformed JSON raises KeyError, TypeError or ValueError. The field names are those of Nessie's REST API v2,
spec 2.2.0. Unknown fields are ignored, because some servers add fields.
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
    ContentEntry,
    ContentKey,
    ContentsAt,
    Delete,
    DiffEntry,
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

JsonObject = Mapping[str, Any]


def parse_key(data: JsonObject) -> ContentKey:
    """Parse Nessie's JSON of a content key."""
    return ContentKey(data["elements"])


def _parse_time(timestamp: str | None) -> datetime | None:
    # The server sends nanoseconds; fromisoformat keeps the microseconds.
    return datetime.fromisoformat(timestamp).astimezone(UTC) if timestamp else None


def parse_commit_meta(data: JsonObject) -> CommitMeta:
    """Parse Nessie's JSON of a commit's metadata (`CommitMeta`).

    Keeps the first author and the first value of each property; the author is None if there is none.
    """
    properties = {name: values[0] for name, values in (data.get("allProperties") or {}).items() if values}
    authors = data.get("authors") or []
    return CommitMeta(
        hash=data["hash"],
        message=data.get("message") or "",
        commit_time=_parse_time(data.get("commitTime")),
        properties=properties,
        parent_hashes=tuple(data.get("parentCommitHashes") or ()),
        author=(authors[0] or None) if authors else None,
    )


def _parse_ref_metadata(data: JsonObject) -> ReferenceMetadata:
    head = data.get("commitMetaOfHEAD")
    return ReferenceMetadata(
        commits_ahead=data.get("numCommitsAhead"),
        commits_behind=data.get("numCommitsBehind"),
        common_ancestor_hash=data.get("commonAncestorHash"),
        head_commit=parse_commit_meta(head) if head else None,
        total_commits=data.get("numTotalCommits"),
    )


def parse_reference(data: JsonObject) -> Reference:
    """Parse Nessie's JSON of a `Branch`, `Tag` or `Detached` reference. A detached one has the name "".

    `metadata` is None unless the request asked for it.
    """
    metadata = data.get("metadata")
    return Reference(
        type=ReferenceType(data["type"]),
        name=data.get("name") or "",
        hash=data["hash"],
        metadata=_parse_ref_metadata(metadata) if metadata else None,
    )


def parse_content(data: JsonObject) -> Content:
    """Parse Nessie's JSON of a content: a table, a namespace, or `OtherContent` for any other type."""
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


def content_to_json(value: Content) -> dict[str, Any]:
    """Return the JSON of a content for a put operation. Without a content id, the put creates the content."""
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


def operation_to_json(operation: Operation) -> dict[str, Any]:
    """Build the JSON of one commit operation."""
    key_json = {"key": {"elements": list(operation.key)}}
    match operation:
        case Put(content=value):
            return {"type": "PUT", **key_json, "content": content_to_json(value)}
        case Delete():
            return {"type": "DELETE", **key_json}
        case Unchanged():
            return {"type": "UNCHANGED", **key_json}


def commit_meta_to_json(message: str, properties: Mapping[str, str], author: str | None) -> dict[str, Any]:
    """Return the JSON of a commit's metadata, as a client sends it.

    If `author` is None, the JSON has no author, and the server decides.
    """
    return {"message": message, "properties": dict(properties)} | ({"authors": [author]} if author else {})


def _parse_operations(items: Iterable[JsonObject]) -> Iterable[Operation]:
    for item in items:
        if item["type"] == "DELETE":
            yield Delete(parse_key(item["key"]))
        elif item["type"] == "PUT":
            yield Put(parse_key(item["key"]), parse_content(item["content"]))


def parse_log_entry(data: JsonObject) -> LogEntry:
    """Parse one commit of a `history` answer. Without operations in the answer, it has ()."""
    return LogEntry(
        parse_commit_meta(data["commitMeta"]), tuple(_parse_operations(data.get("operations") or ()))
    )


def parse_entry(data: JsonObject) -> ContentEntry:
    """Parse one key of an `entries` answer. Its content is None unless the request asked for contents."""
    value = data.get("content")
    return ContentEntry(
        parse_key(data["name"]), data["type"], data["contentId"], parse_content(value) if value else None
    )


def parse_diff_entry(data: JsonObject) -> DiffEntry:
    """Parse one key of a `diff` answer. A side without content is None."""
    before, after = data.get("from"), data.get("to")
    return DiffEntry(
        parse_key(data["key"]),
        parse_content(before) if before else None,
        parse_content(after) if after else None,
    )


def parse_contents_at(data: JsonObject) -> ContentsAt:
    """Parse a `contents` answer to the contents by key, and the reference at the hash that was read.

    The result omits keys that do not exist.
    """
    contents = {parse_key(item["key"]): parse_content(item["content"]) for item in data["contents"]}
    return ContentsAt(parse_reference(data["effectiveReference"]), contents)


def parse_conflict(data: JsonObject) -> KeyConflict:
    """Parse one conflict, from the details of an error or of a merge result.

    Its key is None if the conflict concerns the reference itself.
    """
    key_json = data.get("key")
    return KeyConflict(
        parse_key(key_json) if key_json else None, data["conflictType"], data.get("message") or ""
    )


def parse_merge_result(data: JsonObject) -> MergeResult:
    """Parse a `merge` answer. Without a new hash in the answer, `target_hash` is the unchanged one."""
    details = data.get("details") or ()
    return MergeResult(
        applied=data["wasApplied"],
        successful=data["wasSuccessful"],
        target_hash=data.get("resultantTargetHash") or data["effectiveTargetHash"],
        common_ancestor_hash=data.get("commonAncestor"),
        conflicts=tuple(parse_conflict(item["conflict"]) for item in details if item.get("conflict")),
    )


def parse_commit_result(data: JsonObject) -> CommitResult:
    """Parse a `commit` answer: the new hash of the branch, and the ids of contents that were created."""
    added = data.get("addedContents") or ()
    return CommitResult(data["targetBranch"]["hash"], {parse_key(i["key"]): i["contentId"] for i in added})


def parse_server_config(data: JsonObject) -> ServerConfig:
    """Parse a `config` answer. The spec version is "unknown" if the server does not send it."""
    return ServerConfig(
        default_branch=data["defaultBranch"],
        spec_version=data.get("specVersion") or "unknown",
        max_supported_api_version=data["maxSupportedApiVersion"],
        no_ancestor_hash=data["noAncestorHash"],
        repository_created_at=data.get("repositoryCreationTimestamp"),
    )


T = TypeVar("T")


@dataclass(frozen=True)
class Page(Generic[T]):
    """A page of a listing: its items, and its JSON, which has the page token and the listing's hash."""

    data: Mapping[str, Any]
    items: Sequence[T]


def iter_pages(
    fetch: Callable[[str, Mapping[str, str]], Page[T]], path: Callable[[Mapping[str, Any] | None], str]
) -> Iterator[Page[T]]:
    """Yield all pages of a listing. Each page is fetched when it is needed.

    `path(None)` returns the path of the first page, and `path(page)` that of the page after the JSON `page`.
    A listing of a branch continues at the hash of its first page. Otherwise commits between two pages would
    mix two states.
    """
    page = fetch(path(None), {})
    while True:
        yield page
        token = page.data.get("token")
        if not page.data.get("hasMore") or not token:
            return
        page = fetch(path(page.data), {"page-token": token})


def iter_items(pages: Iterable[Page[T]]) -> Iterator[T]:
    """Iterate over the items of all pages."""
    return (item for page in pages for item in page.items)


def limit_items(values: Iterable[T], limit: int | None) -> Iterator[T]:
    """Iterate over at most `limit` values, or over all of them if `limit` is None."""
    return iter(values) if limit is None else islice(values, limit)
