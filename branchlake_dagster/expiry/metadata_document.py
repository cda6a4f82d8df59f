"""Remove snapshots from the text of table metadata, without creating objects for all snapshots.

A busy table has 70,000 snapshots, in a metadata file of 110 MB. PyIceberg creates objects for all of them,
which takes ten times the memory. This module decodes one snapshot after another, and keeps only a few numbers
of each. The text of a kept snapshot is copied, so fields that this version does not know are preserved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from json.decoder import scanstring  # type: ignore[attr-defined]  # the parser of Python's json, in C
from typing import Any

from pyiceberg.io import FileIO
from pyiceberg.serializers import Compressor
from pyiceberg.table import TableProperties
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil

from branchlake_dagster.catalog.catalog import NO_SNAPSHOT
from branchlake_dagster.catalog.stored_files import read_content, wrap_parse_errors
from branchlake_dagster.expiry.retention import (
    MAX_AGE_PROPERTY,
    MIN_SNAPSHOTS_PROPERTY,
    SnapshotFacts,
    TableHistory,
    TableReference,
    keep_suffix,
    parse_retention,
)
from branchlake_dagster.stored_names import LakeProperty

_decoder = json.JSONDecoder()
_SPACES = " \t\r\n"


@dataclass(frozen=True)
class MetadataDocument:
    """The content of a metadata file. `fields` are its top-level fields without the snapshots.

    `spans` has the start and end of each snapshot in `text`, as character positions. `schema_ids` has its
    schema id, or None if it is not recorded. Both are in the order of `history.snapshots`.
    """

    location: str
    text: str
    fields: Mapping[str, Any]
    history: TableHistory
    spans: tuple[tuple[int, int], ...]
    schema_ids: tuple[int | None, ...]

    @property
    def properties(self) -> Mapping[str, str]:
        """The table's properties."""
        return self.fields.get("properties") or {}

    @property
    def table_uuid(self) -> str:
        """The UUID of the table; empty in old files of format version 1."""
        return str(self.fields.get("table-uuid") or "")


def read_document(io: FileIO, location: str) -> MetadataDocument:
    """Read a metadata file. Raises FileNotFoundError or another OSError, and StoredFileDamaged.

    Reading takes memory of about three times the size of the uncompressed file, and a second for 100 MB.
    """
    content = read_content(io, location)
    with wrap_parse_errors(location):
        decompressed = Compressor.get_compressor(location).stream_decompressor(BytesIO(content)).read()
        del content
        text = decompressed.decode()
        del decompressed
        return _scan_document(location, text)


def _scan_document(location: str, text: str) -> MetadataDocument:
    fields: dict[str, Any] = {}
    snapshots: list[SnapshotFacts] = []
    spans: list[tuple[int, int]] = []
    schema_ids: list[int | None] = []
    position = _open_bracket(text, _skip_spaces(text, 0), "{")
    while text[position] != "}":
        if text[position] != '"':
            raise ValueError(f"A field name is expected at position {position}.")
        name, position = scanstring(text, position + 1)
        start = _open_bracket(text, _skip_spaces(text, position), ":")
        if name != "snapshots" or text[start] != "[":
            fields[name], position = _decoder.raw_decode(text, start)
            position = _skip_comma(text, position, "}")
            continue
        position = _open_bracket(text, start, "[")
        while text[position] != "]":
            snapshot, end = _decoder.raw_decode(text, position)
            snapshots.append(_to_facts(snapshot))
            schema_ids.append(snapshot.get("schema-id"))
            spans.append((position, end))
            position = _skip_comma(text, end, "]")
        position = _skip_comma(text, position + 1, "}")
    if fields["format-version"] < 1:
        raise ValueError("This is not table metadata.")
    properties = fields.get("properties") or {}
    history = TableHistory(
        snapshots=snapshots,
        current_id=_to_snapshot_id(fields.get("current-snapshot-id")),
        references={name: _to_reference(values) for name, values in (fields.get("refs") or {}).items()},
        min_snapshots=parse_retention(properties, MIN_SNAPSHOTS_PROPERTY),
        max_age_ms=parse_retention(properties, MAX_AGE_PROPERTY),
    )
    return MetadataDocument(location, text, fields, history, tuple(spans), tuple(schema_ids))


def _skip_spaces(text: str, position: int) -> int:
    while text[position] in _SPACES:
        position += 1
    return position


def _open_bracket(text: str, position: int, expected: str) -> int:
    """Require the character `expected` at a position. Return the position after it and after spaces.

    Raises ValueError for another character.
    """
    if text[position] != expected:
        raise ValueError(f"{expected!r} is expected at position {position}.")
    return _skip_spaces(text, position + 1)


def _skip_comma(text: str, position: int, closing: str) -> int:
    position = _skip_spaces(text, position)
    if text[position] == ",":
        return _skip_spaces(text, position + 1)
    if text[position] != closing:
        raise ValueError(f"A comma is expected at position {position}.")
    return position


def _to_snapshot_id(value: int | None) -> int | None:
    return None if value == NO_SNAPSHOT else value


def _to_facts(snapshot: Mapping[str, Any]) -> SnapshotFacts:
    replayed_from = (snapshot.get("summary") or {}).get(LakeProperty.REPLAYED_FROM) or ""
    return SnapshotFacts(
        snapshot_id=snapshot["snapshot-id"],
        parent_id=snapshot.get("parent-snapshot-id"),
        timestamp_ms=snapshot["timestamp-ms"],
        replayed_from=int(replayed_from) if replayed_from.isdigit() else None,
    )


def _to_reference(values: Mapping[str, Any]) -> TableReference:
    return TableReference(
        snapshot_id=values["snapshot-id"],
        is_branch=values.get("type") == "branch",
        min_snapshots=values.get("min-snapshots-to-keep"),
        max_age_ms=values.get("max-snapshot-age-ms"),
    )


def remove_snapshots(document: MetadataDocument, kept_ids: frozenset[int], now_ms: int) -> bytes:
    """Return the content of the next metadata file, with only the snapshots of `kept_ids`.

    Also removed are: statistics of the other snapshots, the snapshot log up to the last entry of such a
    snapshot, entries of the metadata log that are older than all kept snapshots, and schemas that no kept
    snapshot uses. `now_ms` becomes the time of the last update, in ms since 1970.

    The highest schema id stays, because the next schema gets the id after it: with a lower id it could get
    the id of another schema in older metadata. Partition specs and sort orders stay, because only the
    manifests show which of them are used. The parent id of the oldest snapshot stays too, because consumers
    and rebases follow it.
    """
    fields = dict(document.fields)
    snapshots = document.history.snapshots
    log = fields.get("snapshot-log") or []
    fields["snapshot-log"] = log[keep_suffix((entry["snapshot-id"] for entry in log), kept_ids) :]
    for name in ("statistics", "partition-statistics"):
        if name in fields:
            fields[name] = [one for one in fields[name] if one["snapshot-id"] in kept_ids]
    if "schemas" in fields:
        fields["schemas"] = _keep_used_schemas(document, kept_ids)
    fields["metadata-log"] = _next_metadata_log(document, kept_ids)
    fields["last-updated-ms"] = max(now_ms, fields["last-updated-ms"])
    kept_texts = [
        document.text[begin:end]
        for (begin, end), snapshot in zip(document.spans, snapshots, strict=True)
        if snapshot.snapshot_id in kept_ids
    ]
    head = json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
    text = f'{head[:-1]},"snapshots":[{",".join(kept_texts)}]}}'
    return text.encode()


def _keep_used_schemas(document: MetadataDocument, kept_ids: frozenset[int]) -> list[dict[str, Any]]:
    schemas: list[dict[str, Any]] = document.fields["schemas"]
    used_ids = {
        schema_id
        for snapshot, schema_id in zip(document.history.snapshots, document.schema_ids, strict=True)
        if snapshot.snapshot_id in kept_ids
    }
    if None in used_ids:
        return schemas  # the writer did not record the schema of a snapshot
    used_ids |= {
        document.fields.get("current-schema-id"),
        max((schema["schema-id"] for schema in schemas), default=None),
    }
    return [schema for schema in schemas if schema["schema-id"] in used_ids]


def _next_metadata_log(document: MetadataDocument, kept_ids: frozenset[int]) -> list[dict[str, Any]]:
    """Return the metadata log of the next file. Its last entry is the file of `document`.

    Entries older than all kept snapshots are dropped, and the oldest entries beyond the table's maximum.
    """
    kept_times = [
        snapshot.timestamp_ms for snapshot in document.history.snapshots if snapshot.snapshot_id in kept_ids
    ]
    since_ms = min(kept_times, default=0)
    maximum = max(1, int(document.properties.get(TableProperties.METADATA_PREVIOUS_VERSIONS_MAX) or 100))
    entries = [
        entry for entry in document.fields.get("metadata-log") or [] if entry["timestamp-ms"] >= since_ms
    ]
    entries.append({"metadata-file": document.location, "timestamp-ms": document.fields["last-updated-ms"]})
    return entries[-maximum:]


def parse_metadata(location: str, content: bytes) -> TableMetadata:
    """Parse the uncompressed content of the metadata file at `location`, as PyIceberg does.

    Raises StoredFileDamaged, which names `location`, if the content cannot be parsed.
    """
    with wrap_parse_errors(location):
        return TableMetadataUtil.parse_raw(content.decode())


def write_document(io: FileIO, location: str, content: bytes) -> None:
    """Write `content`, a metadata document as JSON, to a new file at `location`. Raises OSError.

    If the file's name ends in `.gz.metadata.json`, the content is compressed. An existing file is not
    replaced.
    """
    with io.new_output(location).create() as stream:
        stream.write(Compressor.get_compressor(location).bytes_compressor()(content))
