"""Metadata as text: scanned, shortened, and read again by PyIceberg."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO

from branchlake_dagster.catalog.stored_files import StoredFileDamaged
from branchlake_dagster.expiry.metadata_document import (
    MetadataDocument,
    parse_metadata,
    read_document,
    remove_snapshots,
    write_document,
)

SCHEMA = {
    "type": "struct",
    "schema-id": 0,
    "fields": [{"id": 1, "name": "n", "type": "long", "required": False}],
}


def metadata(count: int, **changes: Any) -> dict[str, Any]:
    snapshots = [
        {
            "snapshot-id": number,
            **({"parent-snapshot-id": number - 1} if number > 1 else {}),
            "sequence-number": number,
            "timestamp-ms": 1_000 + number,
            "manifest-list": f"/x/snap-{number}.avro",
            "summary": {"operation": "append", "note": 'a "}] in text, ü and \\ and \n'},
            "schema-id": 0,
        }
        for number in range(1, count + 1)
    ]
    return {
        "format-version": 2,
        "table-uuid": "5f0c1f5c-4f0a-4c8c-9a3c-0d6b0f4d8c11",
        "location": "/x",
        "last-sequence-number": count,
        "last-updated-ms": 1_000 + count,
        "last-column-id": 1,
        "current-schema-id": 0,
        "schemas": [SCHEMA],
        "default-spec-id": 0,
        "partition-specs": [{"spec-id": 0, "fields": []}],
        "last-partition-id": 999,
        "default-sort-order-id": 0,
        "sort-orders": [{"order-id": 0, "fields": []}],
        "properties": {"gc.enabled": "false", "text": 'a "quoted" one'},
        "current-snapshot-id": count,
        "snapshots": snapshots,
        "snapshot-log": [
            {"snapshot-id": one["snapshot-id"], "timestamp-ms": one["timestamp-ms"]} for one in snapshots
        ],
        "metadata-log": [
            {"metadata-file": f"/x/{n}.metadata.json", "timestamp-ms": 1_000 + n} for n in range(count)
        ],
        "refs": {"main": {"snapshot-id": count, "type": "branch"}},
        "a-later-field": {"kept": [1, {"as": "it is"}]},
        **changes,
    }


def stored(
    folder: Path, content: Any, name: str = "00007-a.metadata.json", indent: int | None = None
) -> MetadataDocument:
    path = folder / name
    data = json.dumps(content, indent=indent, ensure_ascii=indent is None).encode()
    path.write_bytes(gzip.compress(data) if ".gz." in name else data)
    return read_document(PyArrowFileIO(), str(path))


@pytest.mark.parametrize("name", ["00007-a.metadata.json", "00007-a.gz.metadata.json"])
@pytest.mark.parametrize("indent", [None, 2])
def test_what_stays_is_copied(tmp_path: Path, name: str, indent: int | None) -> None:
    content = metadata(5)
    document = stored(tmp_path, content, name, indent)
    assert [one.snapshot_id for one in document.history.snapshots] == [1, 2, 3, 4, 5]
    assert document.history.current_id == 5
    shorter = json.loads(remove_snapshots(document, frozenset({4, 5}), 9_000))
    assert shorter["snapshots"] == content["snapshots"][3:]
    assert [one["snapshot-id"] for one in shorter["snapshot-log"]] == [4, 5]
    assert shorter["metadata-log"] == [
        {"metadata-file": "/x/4.metadata.json", "timestamp-ms": 1_004},
        {"metadata-file": document.location, "timestamp-ms": 1_005},
    ]
    assert shorter["last-updated-ms"] == 9_000
    changed = {"snapshots", "snapshot-log", "metadata-log", "last-updated-ms"}
    assert {key: shorter[key] for key in content if key not in changed} == {
        key: value for key, value in content.items() if key not in changed
    }
    parsed = parse_metadata("x", json.dumps(shorter).encode())
    assert parsed.current_snapshot_id == 5
    assert parsed.snapshots[0].parent_snapshot_id == 3


def test_statistics_go_with_their_snapshots(tmp_path: Path) -> None:
    def statistics(number: int) -> dict[str, Any]:
        path = f"/x/{number}.puffin"
        sizes = {"file-size-in-bytes": 1, "file-footer-size-in-bytes": 1}
        return {"snapshot-id": number, "statistics-path": path, **sizes, "blob-metadata": []}

    document = stored(tmp_path, metadata(3, statistics=[statistics(1), statistics(3)]))
    shorter = json.loads(remove_snapshots(document, frozenset({3}), 9_000))
    assert [one["snapshot-id"] for one in shorter["statistics"]] == [3]


def test_schemas_stay_if_a_snapshot_does_not_name_its_own(tmp_path: Path) -> None:
    content = metadata(3, schemas=[SCHEMA, {**SCHEMA, "schema-id": 1}, {**SCHEMA, "schema-id": 2}])
    document = stored(tmp_path, content)
    shorter = json.loads(remove_snapshots(document, frozenset({3}), 9_000))
    assert [one["schema-id"] for one in shorter["schemas"]] == [0, 2]
    del content["snapshots"][2]["schema-id"]
    document = stored(tmp_path, content)
    shorter = json.loads(remove_snapshots(document, frozenset({3}), 9_000))
    assert [one["schema-id"] for one in shorter["schemas"]] == [0, 1, 2]


@pytest.mark.parametrize("cut", [0, 1, 40, -1, -300])
def test_a_truncated_file_is_reported(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "00007-a.metadata.json"
    path.write_bytes(json.dumps(metadata(3)).encode()[:cut])
    with pytest.raises(StoredFileDamaged) as caught:
        read_document(PyArrowFileIO(), str(path))
    assert caught.value.file == str(path)


def test_other_json_is_reported(tmp_path: Path) -> None:
    for content in ([], {}, {"format-version": 0}):
        with pytest.raises(StoredFileDamaged):
            stored(tmp_path, content)


def test_a_large_file_takes_little_memory(tmp_path: Path) -> None:
    """10,000 snapshots of 1.6 kB: the peak grows by less than six times the file."""
    content = metadata(10_000, **{"metadata-log": []})
    for snapshot in content["snapshots"]:
        snapshot["summary"]["padding"] = "x" * 1_300
    path = tmp_path / "00007-a.metadata.json"
    path.write_bytes(json.dumps(content).encode())
    size = path.stat().st_size
    program = textwrap.dedent(
        f"""
        import resource
        from pyiceberg.io.pyarrow import PyArrowFileIO
        from branchlake_dagster.expiry.metadata_document import read_document, remove_snapshots
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        document = read_document(PyArrowFileIO(), {str(path)!r})
        remove_snapshots(document, frozenset(range(9_901, 10_001)), 9_000)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
        """
    )
    peak = int(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    )
    assert peak < 6 * size, (peak, size)


def test_a_file_is_written_in_the_format_of_its_name(tmp_path: Path) -> None:
    for name in ("a.metadata.json", "a.gz.metadata.json"):
        write_document(PyArrowFileIO(), str(tmp_path / name), json.dumps(metadata(2)).encode())
        assert read_document(PyArrowFileIO(), str(tmp_path / name)).history.current_id == 2
