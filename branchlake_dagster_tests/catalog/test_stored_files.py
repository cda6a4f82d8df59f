"""Which files of a table exist, and are long enough."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from branchlake_dagster.catalog import stored_files
from branchlake_dagster.catalog.stored_files import (
    StoredFile,
    StoredFileDamaged,
    file_errors,
    read_metadata,
)
from branchlake_dagster.tables.table_files import FileUnreadable, TableFiles
from branchlake_dagster_tests.suite.raised import raising

ROWS = Schema(NestedField(1, "n", LongType()))
S3 = {"s3.access-key-id": "test", "s3.secret-access-key": "test", "s3.region": "us-east-1"}


@pytest.fixture(scope="module")
def store() -> Iterator[tuple[Any, PyArrowFileIO]]:
    """An S3-compatible store with a bucket `lake`, and PyIceberg's access to it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
    client.create_bucket(Bucket="lake")
    yield client, PyArrowFileIO({"s3.endpoint": endpoint, "s3.force-virtual-addressing": "false", **S3})
    client.close()
    server.stop()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The locations of files for which a request of their own was made."""
    locations: list[str] = []
    length = PyArrowFile.__len__

    def noting(self: PyArrowFile) -> int:
        locations.append(self.location)
        return length(self)

    monkeypatch.setattr(PyArrowFile, "__len__", noting)
    return locations


def test_local_files(tmp_path: Path) -> None:
    io = PyArrowFileIO()
    (tmp_path / "whole").write_bytes(b"1234")
    (tmp_path / "short").write_bytes(b"12")
    files = [StoredFile(io, f"file://{tmp_path}/{name}", 4) for name in ("whole", "short", "lost", "whole")]
    whole, short, lost, again = file_errors(files)
    assert (whole, again) == (None, None)
    assert isinstance(short, StoredFileDamaged)
    assert short.file == files[1].location
    assert isinstance(lost, FileNotFoundError)
    assert lost.filename == files[2].location


def test_a_location_that_no_file_system_knows_concerns_its_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyIceberg raises ValueError for it."""
    monkeypatch.setattr(stored_files, "MIN_LISTED_FILES", 1)
    monkeypatch.setattr(stored_files, "_MIN_FOLDER_FILES", 1)
    io = PyArrowFileIO()
    (tmp_path / "whole").write_bytes(b"1234")
    files = [StoredFile(io, "cosn://lake/a", 4), StoredFile(io, f"file://{tmp_path}/whole", 4)]
    unknown, whole = file_errors(files)
    assert isinstance(unknown, ValueError)
    assert whole is None


@pytest.mark.filterwarnings("ignore:No preferred file implementation")
def test_table_files_in_an_unknown_place_are_unreadable_and_not_missing() -> None:
    files, location = TableFiles({}), "cosn://lake/t/metadata/1.metadata.json"
    for read in (files.metadata, files.size, files.modified_at):
        with raising(FileUnreadable):
            read(location)


@pytest.mark.parametrize("count", [29, 30])
def test_many_remote_files_are_listed(
    store: tuple[Any, PyArrowFileIO], requests: list[str], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    client, io = store
    monkeypatch.setattr(stored_files, "MIN_LISTED_FILES", 30)
    for number in range(count):
        if number != 7:
            client.put_object(Bucket="lake", Key=f"{count}/{number}", Body=b"12" if number == 9 else b"1234")
    files = [StoredFile(io, f"s3://lake/{count}/{number}", 4) for number in range(count)]
    errors = file_errors(files)
    wrong = {number: type(error) for number, error in enumerate(errors) if error is not None}
    assert wrong == {7: FileNotFoundError, 9: StoredFileDamaged}
    assert len(requests) == (29 if count == 29 else 1)


def test_a_store_that_does_not_list_is_asked_for_each_file(
    store: tuple[Any, PyArrowFileIO], requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, io = store
    for number in range(5):
        client.put_object(Bucket="lake", Key=f"few/{number}", Body=b"1234")
    monkeypatch.setattr(stored_files, "MIN_LISTED_FILES", 2)
    monkeypatch.setattr(stored_files, "_MIN_FOLDER_FILES", 2)

    class NoListing:
        def get_file_info(self, _: object) -> None:
            raise PermissionError(errno.EACCES, "no listing")

    real = io.fs_by_scheme
    listing = iter([NoListing()])
    monkeypatch.setattr(io, "fs_by_scheme", lambda *args: next(listing, None) or real(*args))
    assert file_errors([StoredFile(io, f"s3://lake/few/{number}", 4) for number in range(5)]) == [None] * 5
    assert len(requests) == 5


def test_remote_files_are_asked_for_at_the_same_time(
    store: tuple[Any, PyArrowFileIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, io = store
    together = threading.Barrier(4, timeout=60)

    def meeting(_: PyArrowFile) -> int:
        together.wait()
        return 4

    monkeypatch.setattr(PyArrowFile, "__len__", meeting)
    assert file_errors([StoredFile(io, f"s3://lake/{number}", 4) for number in range(4)]) == [None] * 4


def test_a_store_that_does_not_answer_is_no_missing_file(tmp_path: Path) -> None:
    file = StoredFile(
        PyArrowFileIO({"s3.endpoint": "http://127.0.0.1:9", "s3.connect-timeout": "1", **S3}),
        "s3://lake/a",
        1,
    )
    (error,) = file_errors([file])
    assert isinstance(error, OSError)
    assert not isinstance(error, FileNotFoundError)
    assert error.filename == "s3://lake/a"


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\x00" * 100, b"[1]"])
def test_metadata_that_cannot_be_parsed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "v1.metadata.json"
    path.write_bytes(content)
    with pytest.raises(StoredFileDamaged) as raised:
        read_metadata(PyArrowFileIO(), f"file://{path}")
    assert raised.value.file == f"file://{path}"
