"""Whatever is wrong with a copied file, its backup is damaged: no other error escapes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from branchlake_dagster.backup.errors import BackupDamaged
from branchlake_dagster.backup.verification import _MovedFileIO, _read_tables
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster_tests.garbage_collection.collected_lake import CollectedLake, open_lake
from branchlake_dagster_tests.suite.raised import raising


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> CollectedLake:
    lake = open_lake(tmp_path_factory.mktemp("damaged"))
    lake.create()
    lake.append(1, 2, 3)
    return lake


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content + content,
        lambda content: content[:-100],
        lambda content: content[:5],
        lambda content: b"",
        lambda content: bytes(len(content)),
        lambda content: content[:-40] + bytes(40),
    ],
    ids=["doubled", "truncated", "beginning", "empty", "zeros", "end of zeros"],
)
@pytest.mark.parametrize("pattern", ["*-m0.avro", "snap-*.avro", "*.metadata.json", "*.parquet"])
def test_a_damaged_file_is_reported_as_a_damaged_backup(
    lake: CollectedLake, tmp_path: Path, pattern: str, damage: Callable[[bytes], bytes]
) -> None:
    copy = tmp_path / "warehouse"
    shutil.copytree(lake.root, copy)
    for file in copy.rglob(f"{'data' if pattern == '*.parquet' else 'metadata'}/{pattern}"):
        file.write_bytes(damage(file.read_bytes()))
    entries = list(lake.nessie.entries(MAIN, fetch_content=True))
    with raising(BackupDamaged, "shop.t", reason="table_unreadable", table="shop.t"):
        _read_tables("c0ffee", entries, _MovedFileIO({lake.root: copy}), lambda _: None)
