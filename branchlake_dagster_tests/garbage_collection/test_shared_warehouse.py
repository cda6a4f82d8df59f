"""Collections of a warehouse in which several Nessie repositories have tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from branchlake_dagster.catalog import recorded_repositories
from branchlake_dagster.embedded.servers import Endpoints
from branchlake_dagster.errors import NessieUnavailable, WarehouseShared, WarehouseUnreadable
from branchlake_dagster.garbage_collection import collector as collector_module
from branchlake_dagster.garbage_collection.collector import FileCollector
from branchlake_dagster.garbage_collection.warehouse_files import Deletion, WarehouseFiles
from branchlake_dagster.lakehouse import lakehouse as lakehouses
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.maintenance.maintenance_result import MaintenancePart
from branchlake_dagster.maintenance.maintenance_run import plan_maintenance, run_maintenance
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.stored_names import JOURNAL_BRANCH
from branchlake_dagster_tests.garbage_collection.collected_lake import (
    DAY,
    CollectedLake,
    forget_repositories,
    open_lake,
    repository_records,
)
from branchlake_dagster_tests.suite.raised import raising

pytestmark = pytest.mark.lake

REFUSED: list[Callable[[FileCollector], object]] = [
    lambda collector: collector.run(),
    lambda collector: collector.run(adopt_journal=True),
    lambda collector: collector.plan(),
    lambda collector: collector.explain("shop.t@2026-11-20T12:00"),
]


@pytest.fixture
def lake(tmp_path: Path) -> CollectedLake:
    lake = open_lake(tmp_path / "lake")
    lake.create()
    lake.append(1)
    return lake


def open_other_lake(lake: CollectedLake, folder: Path) -> CollectedLake:
    """A lake with a Nessie of its own and the same warehouse."""
    return open_lake(folder / "other", {"warehouse": f"file://{lake.root}"})


def record_of(lake: CollectedLake, other: CollectedLake) -> Path:
    """The file in the warehouse of `lake` that records the repository of `other`."""
    records = {json.loads(path.read_bytes())["created_at"]: path for path in repository_records(lake)}
    return records[other.server.created_at]


def forget_process() -> None:
    """Let the next writer be the first of a new process."""
    recorded_repositories._recorded.clear()


def deny(*_: object) -> None:
    raise PermissionError


@pytest.mark.parametrize("name", ["t", "u"], ids=["same-name", "other-name"])
def test_files_of_another_lake_are_kept(
    lake: CollectedLake, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = open_other_lake(lake, tmp_path)
    other.create(name)
    path = other.append(2, name=name)
    lake.age()
    before = lake.files()
    for one, its_other in ((lake, other), (other, lake)):
        created_at, uri = str(its_other.server.created_at), its_other.client.uri
        location = f"file://{record_of(lake, its_other)}"
        for call in REFUSED:
            with raising(WarehouseShared, created_at, uri, reason="other_repository", subject=location):
                call(one.collector())
    assert lake.files() == before
    # No journal was begun: it would block the lake that keeps the warehouse.
    assert not lake.nessie.has_reference(JOURNAL_BRANCH)
    assert not other.nessie.has_reference(JOURNAL_BRANCH)
    assert not (lake.root / "_branchlake" / "garbage_collection").exists()
    # What an unnoticed second repository would have lost:
    monkeypatch.setattr(collector_module, "require_sole_repository", lambda *_: None)
    assert path in lake.collect()


def test_a_maintenance_reports_the_other_repository(lake: CollectedLake, tmp_path: Path) -> None:
    open_other_lake(lake, tmp_path).create()
    parts = [MaintenancePart.COLLECTION]
    for done in (plan_maintenance(lake.lake, parts), run_maintenance(lake.lake, parts)):
        assert type(done.errors[MaintenancePart.COLLECTION]) is WarehouseShared
        assert done.collection is None


def test_a_single_lake_is_collected(lake: CollectedLake) -> None:
    (record,) = repository_records(lake)
    fields = json.loads(record.read_bytes())
    assert (fields["created_at"], fields["nessie_uri"]) == (lake.server.created_at, lake.client.uri)
    stray = lake.stray()
    lake.age()
    assert lake.collect() == {stray}
    assert repository_records(lake) == [record]


def test_a_lake_of_an_earlier_version_is_collected_and_recorded(lake: CollectedLake) -> None:
    records = repository_records(lake)
    forget_repositories(lake)
    stray = lake.stray()
    lake.age()
    assert lake.collector().plan().file_count == 1
    assert repository_records(lake) == []
    forget_process()
    assert lake.collect() == {stray}
    assert repository_records(lake) == records


def test_a_repository_that_appears_during_a_pass_ends_it(
    lake: CollectedLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "BATCH_FILES", 1)
    strays = [lake.stray(), lake.stray()]
    lake.age()
    lake.collector(ago=2 * DAY).run()
    other = open_other_lake(lake, tmp_path)
    delete = WarehouseFiles.delete

    def delete_and_create_table(self: WarehouseFiles, paths: Sequence[str]) -> list[Deletion]:
        other.create("u")
        return delete(self, paths)

    with monkeypatch.context() as patch:
        patch.setattr(WarehouseFiles, "delete", delete_and_create_table)
        with raising(WarehouseShared, reason="other_repository"):
            lake.collector().run()
    assert sum(Path(stray).exists() for stray in strays) == 1
    # The plan stays open, and continues when a person has removed the record.
    assert len(lake.collector().status().open_plans) == 1
    record_of(lake, other).unlink()
    assert lake.collector().run().deleted == 1


def test_a_replaced_nessie_deletes_nothing_until_the_former_one_is_forgotten(
    lake: CollectedLake, tmp_path: Path
) -> None:
    """Also before the first pass, when no journal could show it."""
    path = lake.append(2)
    replaced = open_other_lake(lake, tmp_path)
    lake.age()
    before = lake.files()
    with raising(WarehouseShared, str(lake.server.created_at), reason="other_repository"):
        replaced.collector(ago=2 * DAY).run()
    assert lake.files() == before
    record_of(lake, lake).unlink()
    replaced.collect()
    assert not Path(path).exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"created_at": null}', b"\xff"])
def test_a_damaged_record_is_named_and_nothing_is_deleted(lake: CollectedLake, content: bytes) -> None:
    lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    damaged = Path(lake.write(lake.root / "_branchlake" / "repositories" / "2026-01-01.json", content))
    before = lake.files()
    for call in REFUSED:
        with raising(WarehouseShared, reason="damaged_record", subject=f"file://{damaged}"):
            call(lake.collector())
    assert lake.files() == before
    damaged.unlink()
    assert lake.collector().run().deleted == 1


def test_the_next_process_repairs_the_record_of_its_own_repository(lake: CollectedLake) -> None:
    (record,) = repository_records(lake)
    record.write_bytes(record.read_bytes()[:20])  # as after a power cut
    with raising(WarehouseShared, reason="damaged_record"):
        lake.collector().plan()
    forget_process()
    lake.append(2)
    assert record_of(lake, lake) == record
    lake.collector().plan()


def test_unfinished_records_of_killed_writers_are_ignored(lake: CollectedLake) -> None:
    (record,) = repository_records(lake)
    lake.write(record.with_name(f"{record.name}.0a1b.tmp"), b"{")
    lake.collector().plan()


def test_unreadable_records_end_a_collection(lake: CollectedLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_repositories, "read_content", deny)
    with raising(WarehouseUnreadable):
        lake.collector().run()


def test_a_server_that_reports_no_creation_time_is_collected_only_if_nobody_is_recorded(
    lake: CollectedLake,
) -> None:
    forget_repositories(lake)
    forget_process()
    created_at, lake.server.created_at = lake.server.created_at, None
    lake.append(2)
    stray = lake.stray()
    lake.age()
    assert lake.collect() == {stray}
    assert repository_records(lake) == []
    lake.server.created_at = created_at
    forget_process()
    lake.append(3)
    lake.server.created_at = None
    with raising(WarehouseShared, reason="other_repository"):
        lake.collector().plan()


def test_a_process_asks_for_the_repository_once(lake: CollectedLake, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: NessieClient) -> None:
        raise NessieUnavailable("Nessie does not answer.")

    monkeypatch.setattr(NessieClient, "config", fail)
    lake.append(2)
    assert lake.rows() == [1, 2]


def test_a_registered_table_records_its_repository(lake: CollectedLake, tmp_path: Path) -> None:
    other = open_other_lake(lake, tmp_path)
    catalog = other.lake.catalog()
    catalog.create_namespace("shop")
    catalog.register_table("shop.t", lake.table().metadata_location)
    assert record_of(lake, other).exists()


def test_the_recorded_address_has_no_credentials(lake: CollectedLake) -> None:
    forget_repositories(lake)
    lake.client._transport.uri = "https://ada:secret@nessie.example.org:19120/api/v2?token=secret"
    io = lake.lake.catalog()._warehouse_io
    recorded_repositories.record_repository(io, f"file://{lake.root}", lake.client)
    assert json.loads(record_of(lake, lake).read_bytes())["nessie_uri"] == (
        "https://nessie.example.org:19120/api/v2"
    )


def test_a_spark_session_records_the_repository_unless_it_may_not_write(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_repositories(lake)
    forget_process()
    monkeypatch.setattr(lakehouses, "open_session", lambda *_, **__: "session")
    endpoints = Endpoints(lake.client.uri, None, None)
    monkeypatch.setattr(Lakehouse, "endpoints", lambda *_, **__: endpoints)
    with monkeypatch.context() as patch:
        patch.setattr(recorded_repositories, "_write_record", deny)
        assert str(lake.lake.spark_session()) == "session"
    assert repository_records(lake) == []
    assert str(lake.lake.spark_session()) == "session"
    assert record_of(lake, lake).exists()
