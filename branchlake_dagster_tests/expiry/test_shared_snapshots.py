"""Metadata is parsed as PyIceberg parses it, with snapshots that files share."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil

from branchlake_dagster.catalog.shared_snapshots import SnapshotCache
from branchlake_dagster_tests.expiry.test_metadata_document import metadata


def parsed(cache: SnapshotCache, content: Any) -> TableMetadata:
    data = json.dumps(content).encode()
    found, expected = cache.parse_metadata(data), TableMetadataUtil.parse_raw(data.decode())
    assert found == expected
    assert found.model_dump_json() == expected.model_dump_json()
    return found


@pytest.mark.parametrize("count", [0, 1, 99, 100, 300])
def test_it_is_what_pyiceberg_parses(count: int) -> None:
    content = metadata(count) if count else metadata(0, **{"current-snapshot-id": -1, "refs": {}})
    cache = SnapshotCache()
    for _ in range(2):
        parsed(cache, content)


def test_files_of_one_table_share_snapshots() -> None:
    cache = SnapshotCache()
    first, second = parsed(cache, metadata(200)), parsed(cache, metadata(201))
    assert all(one is other for one, other in zip(first.snapshots, second.snapshots, strict=False))


@pytest.mark.parametrize(
    "change",
    [{"parent-snapshot-id": None}, {"summary": {"operation": "delete"}}, {"manifest-list": "/other"}],
)
def test_a_changed_snapshot_is_not_shared(change: dict[str, Any]) -> None:
    cache = SnapshotCache()
    first = parsed(cache, metadata(200))
    content = metadata(200)
    content["snapshots"][50] |= change
    second = parsed(cache, content)
    assert first.snapshots[50] != second.snapshots[50]
    assert first.snapshots[51] is second.snapshots[51]
    assert parsed(cache, metadata(200)) == first
