"""Local files are on disk, with the folders that name them, when their streams are closed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.io import load_file_io

from branchlake_dagster.catalog.stored_files import DurableFileIO, synchronize_files
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.settings import Settings


@pytest.fixture
def synchronized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of what was synchronized, in order."""
    paths: list[str] = []
    fsync = os.fsync

    def noting(handle: int) -> None:
        fsync(handle)
        paths.append(str(Path(f"/proc/self/fd/{handle}").readlink()))

    monkeypatch.setattr(os, "fsync", noting)
    return paths


def test_a_file_and_its_new_folders_are_synchronized(tmp_path: Path, synchronized: list[str]) -> None:
    path = tmp_path / "a" / "b" / "rows.parquet"
    rows = pa.table({"n": list(range(1000))})
    with (
        DurableFileIO().new_output(f"file://{path}").create() as stream,
        pq.ParquetWriter(stream, rows.schema) as w,
    ):
        w.write_table(rows)
    assert pq.read_table(path).equals(rows)
    assert synchronized == [str(path), str(tmp_path / "a" / "b"), str(tmp_path / "a"), str(tmp_path)]


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    location = f"file://{tmp_path / 'rows'}"
    io = DurableFileIO()
    with io.new_output(location).create() as stream:
        stream.write(b"first")
    with pytest.raises(FileExistsError):
        io.new_output(location).create()
    assert io.new_input(location).open().read() == b"first"


def test_a_disk_that_fails_is_an_error_of_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = DurableFileIO().new_output(f"file://{tmp_path / 'rows'}").create()
    stream.write(b"x")
    monkeypatch.setattr(os, "fsync", refusing(errno.EIO, lambda _: True))
    with pytest.raises(OSError, check=lambda error: error.errno == errno.EIO):
        stream.close()


def refusing(code: int, wanted: Callable[[Path], bool]) -> Callable[[int], None]:
    def fsync(handle: int) -> None:
        if wanted(Path(f"/proc/self/fd/{handle}").readlink()):
            raise OSError(code, os.strerror(code))

    return fsync


def test_a_file_system_that_cannot_synchronize_folders_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows"
    path.touch()
    monkeypatch.setattr(os, "fsync", refusing(errno.EINVAL, Path.is_dir))
    synchronize_files([f"file:{path}"])
    monkeypatch.setattr(os, "fsync", refusing(errno.EIO, Path.is_dir))
    with pytest.raises(OSError, check=lambda error: error.errno == errno.EIO):
        synchronize_files([f"file:{path}"])


def test_what_spark_writes_is_synchronized_with_its_checksum(tmp_path: Path, synchronized: list[str]) -> None:
    for name in ("a", ".a.crc", "b"):
        (tmp_path / name).touch()
    synchronize_files([f"file:{tmp_path}/a", f"file://{tmp_path}/b", "s3://lake/c"])
    assert synchronized == [str(tmp_path / name) for name in ("a", ".a.crc", "b")] + [str(tmp_path)]


def test_the_settings_of_a_local_warehouse_name_the_file_io(tmp_path: Path) -> None:
    local, remote = Settings(state_dir=tmp_path), Settings(state_dir=tmp_path, warehouse="s3://lake")
    assert isinstance(load_file_io(local.file_io_properties(), local.warehouse_uri), DurableFileIO)
    assert not isinstance(load_file_io(remote.file_io_properties(), "s3://lake"), DurableFileIO)


def test_a_commit_names_only_files_that_are_on_disk(
    lakehouse: Lakehouse, namespace: str, synchronized: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = lakehouse.catalog(MAIN, properties={"namespace.create": "true"})
    at_commit: list[set[str]] = []
    commit = NessieClient.commit

    def noting(self: NessieClient, *args: object, **options: object) -> object:
        at_commit.append(set(synchronized))
        return commit(self, *args, **options)

    monkeypatch.setattr(NessieClient, "commit", noting)
    table = catalog.create_table((namespace, "t"), pa.schema([("n", pa.int64())]))
    table.append(pa.table({"n": [1]}))
    root = Path(table.location().removeprefix("file://"))
    files = {str(path) for path in root.rglob("*") if path.is_file()}
    assert len(files) == 5  # two of metadata, a manifest list, a manifest, and the rows
    assert files | {str(root), str(root / "data"), str(root / "metadata")} <= at_commit[-1]
