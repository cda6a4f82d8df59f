"""Parses table metadata, and shares the objects of snapshots among all metadata files of a table.

A rebase reads three metadata files of a table, which have almost all snapshots in common. With 5,000
snapshots, PyIceberg's objects for them took nine tenths of a rebase. A snapshot never changes, so the files
may share its object.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from cachetools import LRUCache
from pydantic_core import from_json
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil
from pyiceberg.table.snapshots import Snapshot

_TABLES_CACHED = 32
_MIN_SNAPSHOTS = 100
"""Tables with fewer snapshots are parsed without the cache: parsing their snapshots takes less than 1 ms."""

_Facts = tuple[object, ...]


class SnapshotCache:
    """A cache of the snapshot objects of the 32 tables that were read last, by table UUID.

    Safe to share between threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: LRUCache[str, dict[int, tuple[_Facts, Snapshot]]] = LRUCache(_TABLES_CACHED)

    def parse_metadata(self, content: bytes) -> TableMetadata:
        """Parse the decompressed content of a metadata file.

        Raises ValueError, KeyError, TypeError or PyIceberg's ValidationError.
        """
        fields = from_json(content)
        snapshots = fields.get("snapshots") or []
        if len(snapshots) < _MIN_SNAPSHOTS:
            return TableMetadataUtil.parse_obj(fields)
        uuid = str(fields.get("table-uuid"))
        with self._lock:
            known = self._tables.get(uuid, {})
        shared: dict[int, tuple[_Facts, Snapshot]] = {}
        for snapshot in snapshots:
            snapshot_id, facts = snapshot["snapshot-id"], _collect_facts(snapshot)
            entry = known.get(snapshot_id)
            if entry is None or entry[0] != facts:
                entry = facts, Snapshot.model_validate(snapshot)
            shared[snapshot_id] = entry
        metadata = TableMetadataUtil.parse_obj(
            {**fields, "snapshots": [shared[snapshot["snapshot-id"]][1] for snapshot in snapshots]}
        )
        with self._lock:
            self._tables[uuid] = shared
        return metadata


def _collect_facts(snapshot: Mapping[str, Any]) -> _Facts:
    """Return the values that distinguish two versions of a snapshot.

    Every snapshot has its own manifest list. An expiry may clear the parent id, and a rewrite of the metadata
    by another engine may change the summary.
    """
    summary = snapshot.get("summary") or {}
    return (
        snapshot.get("parent-snapshot-id"),
        snapshot.get("sequence-number"),
        snapshot.get("timestamp-ms"),
        snapshot.get("manifest-list"),
        snapshot.get("schema-id"),
        snapshot.get("first-row-id"),
        *summary.items(),
    )
