"""The publisher opens what it publishes: a run whose files cannot be read is not published, the others are."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from pyiceberg.io.pyarrow import PyArrowFile
from pyiceberg.table import Table

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.errors import Terminal, Transient
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.publication.ledger import NeedsChecks, Published
from branchlake_dagster.publication.publisher import Publisher
from branchlake_dagster.publication.recheck import PreparedStates
from branchlake_dagster.publication.replay import (
    IcebergTableFormat,
    TableFilesDamaged,
    TableFilesMissing,
    TableFilesUnreadable,
)
from branchlake_dagster_tests.publication.rebase.deleting import delete_equal
from branchlake_dagster_tests.publication.workbench import Run, Workbench, frame
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    found = Workbench(lakehouse, namespace)
    yield found
    found.clean()


def path_of(location: str) -> Path:
    return Path(location.removeprefix("file:"))


def metadata_file(table: Table) -> str:
    return table.metadata_location


def manifest_list(table: Table) -> str:
    snapshot = table.current_snapshot()
    assert snapshot is not None
    return snapshot.manifest_list


def manifest(table: Table) -> str:
    """The manifest that the newest snapshot has added."""
    snapshot = table.current_snapshot()
    assert snapshot is not None
    (added,) = (one for one in snapshot.manifests(table.io) if one.added_snapshot_id == snapshot.snapshot_id)
    return added.manifest_path


def data_file(table: Table) -> str:
    """The data file that the newest snapshot has added."""
    snapshot = table.current_snapshot()
    assert snapshot is not None
    (added,) = (
        entry.data_file.file_path
        for one in snapshot.manifests(table.io)
        if one.added_snapshot_id == snapshot.snapshot_id
        for entry in one.fetch_manifest_entry(table.io)
    )
    return str(added)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("rebased", [False, True], ids=["merged", "rebased"])
@pytest.mark.parametrize("file", [metadata_file, manifest_list, manifest, data_file])
@pytest.mark.parametrize(
    ("spoil", "error"),
    [(Path.unlink, TableFilesMissing), (emptied, TableFilesDamaged), (cut_in_half, TableFilesDamaged)],
)
def test_a_run_with_a_spoiled_file_is_not_published(
    bench: Workbench,
    rebased: bool,
    file: Callable[[Table], str],
    spoil: Callable[[Path], None],
    error: type[TableFilesMissing | TableFilesDamaged],
) -> None:
    bench.seeded([("a", 0)])
    run, other = bench.run(), bench.run()
    run.append([("a", 1)])
    if rebased:
        other.append([("a", 2)])
        bench.published(other)
    location = file(run.table())
    spoil(path_of(location))
    head = bench.lake.nessie.reference(MAIN).hash
    (result,) = bench.publish(run)
    assert isinstance(result, error)
    assert isinstance(result, Terminal)
    assert (result.table, result.branch, result.run_id) == (f"{bench.namespace}.t", run.name, run.run_id)
    assert result.file == location
    assert bench.lake.nessie.reference(MAIN).hash == head
    assert ("a", 0) in bench.rows()


def test_other_runs_of_the_same_pass_are_published(bench: Workbench) -> None:
    for name in ("t", "u", "v"):
        bench.seeded([("a", 0)], name=name)
    runs = [bench.run() for _ in range(3)]
    for run, name in zip(runs, ("t", "u", "v"), strict=True):
        run.append([("a", 1)], name)
    path_of(data_file(runs[1].table("u"))).unlink()
    first, broken, third = bench.publish(*runs)
    assert (type(first), type(broken), type(third)) == (Published, TableFilesMissing, Published)
    assert [len(bench.rows(name)) for name in ("t", "u", "v")] == [2, 1, 2]


def test_one_spoiled_table_keeps_all_tables_of_its_run_back(bench: Workbench) -> None:
    for name in ("t", "u"):
        bench.seeded([("a", 0)], name=name)
    run = bench.run()
    for name in ("t", "u"):
        run.append([("a", 1)], name)
    emptied(path_of(metadata_file(run.table("u"))))
    (result,) = bench.publish(run)
    assert isinstance(result, TableFilesDamaged)
    assert result.table == f"{bench.namespace}.u"
    assert [len(bench.rows(name)) for name in ("t", "u")] == [1, 1]


def test_a_new_table_is_opened_too(bench: Workbench) -> None:
    run = bench.run()
    run.create()
    run.append([("a", 1)])
    path_of(data_file(run.table())).unlink()
    (result,) = bench.publish(run)
    assert isinstance(result, TableFilesMissing)


def test_every_snapshot_of_the_run_is_opened(bench: Workbench) -> None:
    bench.seeded([("a", 0)])
    run = bench.run()
    run.append([("a", 1)])
    first = data_file(run.table())
    run.append([("a", 2)])
    path_of(first).unlink()
    (result,) = bench.publish(run)
    assert isinstance(result, TableFilesMissing)
    assert result.file == first


def test_a_missing_file_of_row_deletes(bench: Workbench) -> None:
    bench.seeded([("a", 0), ("a", 1)])
    run = bench.run()
    delete_equal(run.table(), "id", 1, "a")
    deletes = data_file(run.table())
    path_of(deletes).unlink()
    (result,) = bench.publish(run)
    assert isinstance(result, TableFilesMissing)
    assert result.file == deletes


def test_files_that_the_run_added_and_removed_again_may_be_gone(bench: Workbench) -> None:
    bench.seeded([("a", 0)])
    run = bench.run()
    run.append([("b", 1)])
    replaced = data_file(run.table())
    run.replace("b", [("b", 2)])
    path_of(replaced).unlink()
    bench.published(run)
    assert bench.rows() == [("a", 0), ("b", 2)]


def test_older_files_of_main_are_nothing_of_the_run(bench: Workbench) -> None:
    bench.seeded([("a", 0)])
    old = data_file(bench.main())
    run = bench.run()
    run.append([("b", 1)])
    path_of(old).unlink()
    bench.published(run)


def test_a_table_that_the_run_rolled_back_needs_only_the_files_of_the_run(bench: Workbench) -> None:
    """The chain of snapshots does not lead to the one that the run started from."""
    bench.seeded([("a", 0)])
    first = bench.main()
    other = bench.run()
    other.append([("a", 1)])
    bench.published(other)
    path_of(data_file(first)).unlink()
    run = bench.run()
    snapshot = first.current_snapshot()
    assert snapshot is not None
    run.table().manage_snapshots().rollback_to_snapshot(snapshot.snapshot_id).commit()
    bench.published(run)


def test_a_renamed_table_is_compared_with_what_it_was(bench: Workbench) -> None:
    bench.seeded([("a", 0)])
    path_of(data_file(bench.main())).unlink()
    run = bench.run()
    run.catalog.rename_table((bench.namespace, "t"), (bench.namespace, "u"))
    bench.published(run)


def test_a_storage_that_cannot_be_asked_is_asked_again(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.seeded([("a", 0)])
    run = bench.run()
    run.append([("a", 1)])
    location = data_file(run.table())

    def refuse(self: PyArrowFile) -> int:
        raise OSError(errno.EIO, "input/output error", self.location)

    with monkeypatch.context() as patch:
        patch.setattr(PyArrowFile, "__len__", refuse)
        (result,) = bench.publish(run)
    assert isinstance(result, TableFilesUnreadable)
    assert isinstance(result, Transient)
    assert (result.table, result.run_id, result.file) == (f"{bench.namespace}.t", run.run_id, location)
    bench.published(run)


@pytest.mark.spark
def test_what_spark_wrote_is_on_disk_before_the_merge(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark leaves its files to the kernel."""
    bench.seeded([("a", 0)])
    run = bench.run()
    run.sql("INSERT INTO {t} VALUES ('a', 1)")
    files = [path_of(file(run.table())) for file in (metadata_file, manifest_list, manifest, data_file)]
    synchronized: set[str] = set()
    fsync, merge = os.fsync, NessieClient.merge

    def noting(handle: int) -> None:
        fsync(handle)
        synchronized.add(str(Path(f"/proc/self/fd/{handle}").readlink()))

    def merging(self: NessieClient, **options: Any) -> Any:
        wanted = {one for path in files for one in (path, path.parent, path.with_name(f".{path.name}.crc"))}
        assert {str(one.resolve()) for one in wanted} <= synchronized
        return merge(self, **options)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(NessieClient, "merge", merging)
    bench.published(run)


def test_a_state_that_was_checked_is_opened_before_it_is_published(bench: Workbench) -> None:
    """Between the checks and the publication of a rebased state files may be lost: the run's, or the state's."""
    bench.seeded([("a", 0)])
    run, other = bench.run(), bench.run()
    run.append([("b", 1)])
    other.append([("b", 2)])
    bench.published(other)
    candidate = run.candidate(frozenset({bench.key()}))
    publisher = bench.publisher
    assert isinstance(publisher.publish([candidate])[run.name], NeedsChecks)
    prepared_states = PreparedStates(bench.lake.nessie, publisher.committer)
    prepared, _ = prepared_states.prepare([candidate])
    assert prepared is not None
    state = bench.lake.catalog(prepared.branch).load_table((bench.namespace, "t"))
    kept = path_of(metadata_file(state)).rename(path_of(metadata_file(state)).with_suffix(".kept"))
    assert prepared_states.publish(prepared, [candidate]) is None  # the state is prepared again
    kept.rename(path_of(metadata_file(state)))
    path_of(data_file(run.table())).unlink()
    results = prepared_states.publish(prepared, [candidate])
    assert results is not None
    assert isinstance(results[run.name], TableFilesMissing)
    assert len(bench.rows()) == 2


# -- S3 ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[Any, dict[str, str]]]:
    """A client of an S3-compatible store, and PyIceberg's properties for it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    store = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
    store.create_bucket(Bucket="lake")
    yield (
        store,
        {
            "s3.endpoint": endpoint,
            "s3.force-virtual-addressing": "false",
            "s3.access-key-id": "test",
            "s3.secret-access-key": "test",
            "s3.region": "us-east-1",
        },
    )
    store.close()
    server.stop()


@pytest.mark.parametrize("file", [metadata_file, manifest_list, manifest, data_file])
@pytest.mark.parametrize(("lost", "error"), [(True, TableFilesMissing), (False, TableFilesDamaged)])
def test_a_spoiled_object_in_s3(
    bench: Workbench,
    s3: tuple[Any, dict[str, str]],
    file: Callable[[Table], str],
    lost: bool,
    error: type[TableFilesMissing | TableFilesDamaged],
) -> None:
    store, properties = s3
    first = bench.run()

    def catalog(run: Run) -> NessieCatalog:
        return NessieCatalog.from_client(
            bench.lake.nessie, run.name, "s3://lake/warehouse", **properties, **{"namespace.create": "true"}
        )

    catalog(first).create_table((bench.namespace, "t"), frame([]).schema)
    main = NessieCatalog.from_client(bench.lake.nessie, MAIN, "s3://lake/warehouse", **properties)
    publisher = Publisher(bench.lake.nessie, IcebergTableFormat(main))
    run = bench.run()
    for one in (first, run):
        with_rows = catalog(one)
        if one is run:
            with_rows.create_table((bench.namespace, "u"), frame([]).schema)
        with_rows.load_table((bench.namespace, "t" if one is first else "u")).append(frame([("a", 1)]))
    location = file(catalog(run).load_table((bench.namespace, "u")))
    key = location.removeprefix("s3://lake/")
    if lost:
        store.delete_object(Bucket="lake", Key=key)
    else:
        store.put_object(Bucket="lake", Key=key, Body=b"")
    results = publisher.publish([first.candidate(), run.candidate()])
    assert isinstance(results[first.name], Published)
    broken = results[run.name]
    assert isinstance(broken, error)
    assert (broken.file, broken.table) == (location, f"{bench.namespace}.u")
