"""An input with a damaged data file: the error names the file."""

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import FileScanTask

from branchlake_dagster import consumes, rows, table_metadata
from branchlake_dagster.catalog.damaged_files import name_damaged_file
from branchlake_dagster.errors import StoredFileDamaged
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

FREE = table_metadata(require_checks=False, write_mode="append")


def without_end(content: bytes) -> bytes:
    return content[:-20]


def without_magic(content: bytes) -> bytes:
    return b"gone" + content[4:-4] + b"gone"


def with_other_pages(content: bytes) -> bytes:
    return content[:4] + b"\xff" * 200 + content[204:]


@pytest.mark.parametrize("damage", [without_end, without_magic, with_other_pages])
@pytest.mark.parametrize("by_changes", [False, True])
def test_the_error_names_the_damaged_file(
    lakehouse: Lakehouse, namespace: str, damage: Callable[[bytes], bytes], by_changes: bool
) -> None:
    numbers = iter(range(3))

    @dg.asset(key=[namespace, "t"], metadata=FREE)
    def t() -> pl.DataFrame:
        return pl.DataFrame({"n": [next(numbers)] * 1000, "s": [f"text {one}" for one in range(1000)]})

    metadata = FREE | consumes({t.key: rows()}) if by_changes else FREE

    @dg.asset(key=[namespace, "reader"], ins={"t": dg.AssetIn(t.key)}, metadata=metadata)
    def reader(t: pl.DataFrame) -> pl.DataFrame:
        return t

    with project(lakehouse, t, reader) as p:
        for _ in range(2):
            p.settle(p.run(t.key))
        first, _ = lakehouse.catalog().load_table((namespace, "t")).scan().plan_files()
        file = Path(urlsplit(first.file.file_path).path)
        file.write_bytes(damage(file.read_bytes()))
        p.run(reader.key, ok=False)
        p.failed_with(StoredFileDamaged, file.name)


@pytest.mark.parametrize("error", [pa.ArrowInvalid("a cast"), OSError("a page"), OSError(5, "the storage")])
@pytest.mark.parametrize("is_listed", [False, True])
def test_the_error_stays_if_no_file_is_damaged(error: Exception, is_listed: bool) -> None:
    def list_tasks() -> list[FileScanTask]:
        if is_listed:
            return []
        raise OSError("no manifest")

    with pytest.raises(type(error)) as caught, name_damaged_file(PyArrowFileIO(), list_tasks):
        raise error
    assert caught.value is error
