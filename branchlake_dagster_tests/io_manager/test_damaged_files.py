"""An input with a damaged data file: the error names the file."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import dagster as dg
import duckdb
import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.expressions import EqualTo
from pyiceberg.io import InputFile, OutputFile
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import DataScan, FileScanTask, IncrementalAppendScan, Table

from branchlake_dagster import consumes, rows, table_metadata
from branchlake_dagster.catalog.damaged_files import name_damaged_file
from branchlake_dagster.errors import StoredFileDamaged
from branchlake_dagster.history.capture import capture_change
from branchlake_dagster.history.change import Position
from branchlake_dagster.history.rows import RowReader
from branchlake_dagster.internals.pyiceberg import open_transaction
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.query import LakeReader, QueryFailed, QueryResult
from branchlake_dagster.query.dataset import IcebergDataset
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.publication.rebase.deleting import delete_at
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


@pytest.fixture
def damaged(request: pytest.FixtureRequest, lakehouse: Lakehouse, namespace: str) -> Path:
    """A damaged file of the table `t`, which has two files."""
    catalog = lakehouse.catalog()
    catalog.create_namespace(namespace)
    rows = pa.table({"n": pa.array(range(1000)), "s": [f"text {one}" for one in range(1000)]})
    table = catalog.create_table((namespace, "t"), rows.schema)
    for _ in range(2):
        table.append(rows)
    first, _ = table.scan().plan_files()
    file = Path(urlsplit(first.file.file_path).path)
    file.write_bytes(request.param(file.read_bytes()))
    return file


@pytest.mark.parametrize("damaged", [without_end, with_other_pages], indirect=True)
@pytest.mark.parametrize(
    "read",
    [
        lambda scan: scan.to_arrow(),
        lambda scan: scan.to_polars(),
        lambda scan: scan.filter("n > 3").select("s").to_arrow(),
        lambda scan: scan.to_arrow_batch_reader().read_all(),
        lambda scan: scan.filter("n > 3").count(),
    ],
    ids=["arrow", "polars", "filtered", "batches", "count"],
)
def test_scans_of_tables_of_the_catalog_name_the_damaged_file(
    lakehouse: Lakehouse, namespace: str, damaged: Path, read: Callable[[DataScan], object]
) -> None:
    table = lakehouse.catalog().load_table((namespace, "t"))
    with pytest.raises(StoredFileDamaged) as caught:
        read(table.scan())
    assert urlsplit(caught.value.file).path == str(damaged)


@pytest.mark.parametrize("damaged", [without_end, with_other_pages], indirect=True)
@pytest.mark.parametrize(
    "read",
    [
        lambda scan: scan.to_arrow(),
        lambda scan: scan.filter("n > 3").select("s").to_polars(),
        lambda scan: scan.to_arrow_batch_reader().read_all(),
    ],
    ids=["arrow", "filtered", "batches"],
)
def test_scans_of_appended_rows_name_the_damaged_file(
    lakehouse: Lakehouse, namespace: str, damaged: Path, read: Callable[[IncrementalAppendScan], object]
) -> None:
    table = lakehouse.catalog().load_table((namespace, "t"))
    with pytest.raises(StoredFileDamaged) as caught:
        read(table.incremental_append_scan())
    assert urlsplit(caught.value.file).path == str(damaged)


@pytest.mark.parametrize("damaged", [without_end, with_other_pages], indirect=True)
@pytest.mark.parametrize(
    "read",
    [
        lambda result: result.arrow(),
        lambda result: result.polars(),
        lambda result: result.batches().read_all(),
        lambda result: result.string_batches().read_all(),
    ],
    ids=["arrow", "polars", "batches", "strings"],
)
def test_queries_name_the_damaged_file(
    lakehouse: Lakehouse, namespace: str, damaged: Path, read: Callable[[QueryResult], object]
) -> None:
    with LakeReader(lakehouse).sql(f"SELECT * FROM {namespace}.t WHERE n > 3") as result:
        for _ in range(2):
            with pytest.raises(StoredFileDamaged) as caught:
                read(result)
            assert urlsplit(caught.value.file).path == str(damaged)


@pytest.mark.parametrize("damaged", [without_end, with_other_pages], indirect=True)
@pytest.mark.parametrize(
    "write",
    [
        lambda table, _: table.delete("n = 3"),
        lambda table, rows: table.overwrite(rows, "n = 3"),
        lambda table, rows: table.upsert(rows, ["n"]),
        lambda table, _: table.transaction().delete(EqualTo("n", 3)),
        lambda table, rows: open_transaction(table).overwrite(rows, overwrite_filter=EqualTo("n", 3)),
    ],
    ids=["delete", "overwrite", "upsert", "transaction", "cached_transaction"],
)
def test_writes_that_read_rows_name_the_damaged_file(
    lakehouse: Lakehouse, namespace: str, damaged: Path, write: Callable[[Table, pa.Table], object]
) -> None:
    table = lakehouse.catalog().load_table((namespace, "t"))
    rows = pa.table({"n": [3], "s": ["other"]})
    with pytest.raises(StoredFileDamaged) as caught:
        write(table, rows)
    assert urlsplit(caught.value.file).path == str(damaged)
    assert lakehouse.catalog().load_table((namespace, "t")).metadata == table.metadata


def fail_commits(table: Table, error: OSError, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let writes of manifests fail. Return the list of the data files that are read from now on."""
    locations: list[str] = []
    new_input, new_output = table.io.new_input, table.io.new_output

    def list_data(location: str) -> InputFile:
        if location.endswith(".parquet"):
            locations.append(location)
        return new_input(location)

    def refuse_manifest(location: str) -> OutputFile:
        if location.endswith(".avro"):
            raise error
        return new_output(location)

    monkeypatch.setattr(table.io, "new_input", list_data)
    monkeypatch.setattr(table.io, "new_output", refuse_manifest)
    return locations


@pytest.mark.parametrize(
    ("write", "reads"),
    [
        (lambda table, _: table.delete("n >= 0"), 0),
        (lambda table, _: table.delete("n >= 0 and n < 1500"), 0),
        (lambda table, rows: table.overwrite(rows, "n >= 0"), 0),
        (lambda table, _: table.delete("n = 3"), 1),
        (lambda table, rows: table.overwrite(rows, "n = 3"), 1),
        (lambda table, rows: table.upsert(rows, ["n"]), 2),
    ],
    ids=["whole", "whole_and_rows", "overwrite_whole", "rows", "overwrite", "upsert"],
)
def test_an_error_of_a_commit_reads_no_data_files_again(
    lakehouse: Lakehouse,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Table, pa.Table], object],
    reads: int,
) -> None:
    catalog = lakehouse.catalog()
    catalog.create_namespace(namespace)
    table = catalog.create_table((namespace, "t"), pa.schema([("n", pa.int64()), ("s", pa.string())]))
    for first in (0, 1000):
        numbers = pa.array(range(first, first + 1000))
        table.append(pa.table({"n": numbers, "s": numbers.cast(pa.string())}))
    error = OSError("AWS Error NETWORK_CONNECTION")  # S3's errors may have no number
    locations = fail_commits(table, error, monkeypatch)
    with pytest.raises(type(error)) as caught:
        write(table, pa.table({"n": [3], "s": ["other"]}))
    assert caught.value is error
    assert len(locations) == reads


def test_a_table_that_a_transaction_creates_names_its_damaged_file(
    lakehouse: Lakehouse, namespace: str
) -> None:
    catalog = lakehouse.catalog()
    catalog.create_namespace(namespace)
    rows = pa.table({"n": [3, 4]})
    creation = catalog.create_table_transaction((namespace, "t"), rows.schema)
    creation.append(rows)
    table = creation.commit_transaction()
    (task,) = table.scan().plan_files()
    file = Path(urlsplit(task.file.file_path).path)
    file.write_bytes(without_end(file.read_bytes()))
    for read in (table.scan().to_arrow, lambda: table.delete("n = 3")):
        with pytest.raises(StoredFileDamaged):
            read()


def test_changed_rows_name_a_damaged_delete_file(lakehouse: Lakehouse, namespace: str) -> None:
    catalog = lakehouse.catalog()
    catalog.create_namespace(namespace)
    rows = pa.table({"n": [3, 4]})
    table = catalog.create_table((namespace, "t"), rows.schema)
    table.append(rows)
    position = Position(str(table.metadata.table_uuid), table.metadata.current_snapshot_id)
    (task,) = table.scan().plan_files()
    delete_at(table, task.file.file_path, 1, properties={})
    table = catalog.load_table((namespace, "t"))
    ((delete_file,),) = (task.delete_files for task in table.scan().plan_files())
    file = Path(urlsplit(delete_file.file_path).path)
    file.write_bytes(without_end(file.read_bytes()))
    with pytest.raises(StoredFileDamaged) as caught:
        RowReader(table, capture_change(table, position, name="t")).read()
    assert urlsplit(caught.value.file).path == str(file)


@pytest.mark.parametrize("damaged", [without_end, with_other_pages], indirect=True)
@pytest.mark.parametrize(
    "read",
    [
        lambda relation: relation.fetchall(),
        lambda relation: relation.filter("n > 4").count("s").to_arrow_table(),
        lambda relation: relation.to_arrow_reader().read_all(),
    ],
    ids=["rows", "further", "batches"],
)
def test_the_block_of_a_result_names_the_damaged_file_of_its_relation(
    lakehouse: Lakehouse, namespace: str, damaged: Path, read: Callable[[duckdb.DuckDBPyRelation], object]
) -> None:
    reader = LakeReader(lakehouse)
    with (
        pytest.raises(StoredFileDamaged) as caught,
        reader.sql(f"SELECT * FROM {namespace}.t WHERE n > 3") as result,
    ):
        read(result.relation())
    assert urlsplit(caught.value.file).path == str(damaged)


@pytest.mark.parametrize("damaged", [without_end], indirect=True)
@pytest.mark.parametrize("names_file", [False, True])
def test_the_block_of_a_result_raises_other_errors_as_they_are(
    lakehouse: Lakehouse, namespace: str, damaged: Path, *, names_file: bool
) -> None:
    def read_and_fail() -> None:
        with LakeReader(lakehouse).sql(f"SELECT * FROM {namespace}.t") as result:
            with pytest.raises(duckdb.Error) as caught:
                result.relation().fetchall()
            raise KeyError(str(caught.value) if names_file else damaged.parent.name)

    with pytest.raises(KeyError):
        read_and_fail()


@pytest.mark.parametrize("damaged", [without_end], indirect=True)
def test_the_block_of_a_result_names_the_damaged_file_of_a_stream(
    lakehouse: Lakehouse, namespace: str, damaged: Path
) -> None:
    dataset = IcebergDataset(lakehouse.catalog().load_table((namespace, "t")))
    with pytest.raises(StoredFileDamaged) as first:
        dataset.scanner().to_reader().read_all()
    unused: Any = None
    with (
        pytest.raises(StoredFileDamaged) as caught,
        duckdb.connect() as connection,
        QueryResult(unused, connection, unused, [dataset]),
    ):
        raise OSError(f"Invalid Input Error: {first.value}")  # as DuckDB's streams do
    assert caught.value is first.value


@pytest.mark.parametrize("damaged", [without_end], indirect=True)
def test_a_stream_names_a_file_that_duckdb_has_read_ahead(
    lakehouse: Lakehouse, namespace: str, damaged: Path
) -> None:
    """DuckDB may read the files in a thread of its own before the first batch is taken from the stream."""
    dataset = IcebergDataset(lakehouse.catalog().load_table((namespace, "t")))

    def read_ahead(_: int) -> pa.RecordBatchReader:
        with pytest.raises(StoredFileDamaged):
            dataset.scanner().to_reader().read_all()
        return pa.RecordBatchReader.from_batches(dataset.schema, refuse())

    def refuse() -> Iterator[pa.RecordBatch]:
        yield from dataset.schema.empty_table().to_batches()
        raise OSError("Error executing a query")

    relation: Any = SimpleNamespace(to_arrow_reader=read_ahead)
    state: Any = None
    with duckdb.connect() as connection, QueryResult(relation, connection, state, [dataset]) as result:
        stream = result.batches()
        with pytest.raises(StoredFileDamaged) as caught:
            stream.read_all()
        assert urlsplit(caught.value.file).path == str(damaged)


def test_a_stream_names_a_damaged_file_after_many_rows(lakehouse: Lakehouse, namespace: str) -> None:
    catalog = lakehouse.catalog()
    catalog.create_namespace(namespace)
    content = pa.table({"n": pa.array(range(20_000)), "s": [f"text {one}" for one in range(20_000)]})
    table = catalog.create_table((namespace, "t"), content.schema)
    for _ in range(2):
        table.append(content)
    _, second = table.scan().plan_files()
    file = Path(urlsplit(second.file.file_path).path)
    file.write_bytes(without_end(file.read_bytes()))
    with LakeReader(lakehouse).sql(f"SELECT * FROM {namespace}.t WHERE n > 3") as result:
        for _ in range(5):
            with pytest.raises(StoredFileDamaged) as caught:
                result.batches(100).read_all()
            assert urlsplit(caught.value.file).path == str(file)


@pytest.mark.parametrize("damaged", [without_end], indirect=True)
def test_another_error_of_a_query_after_a_damaged_file_is_raised_as_it_is(
    lakehouse: Lakehouse, namespace: str, damaged: Path
) -> None:
    content = damaged.read_bytes()
    with LakeReader(lakehouse).sql(f"SELECT CAST(s AS INTEGER) AS i FROM {namespace}.t") as result:
        with pytest.raises(StoredFileDamaged):
            result.arrow()
        damaged.unlink()
        with pytest.raises(QueryFailed):
            result.arrow()
        damaged.write_bytes(content)


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
