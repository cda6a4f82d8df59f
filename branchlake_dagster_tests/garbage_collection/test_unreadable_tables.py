"""Passes over tables and storages that cannot be read, in an in-memory lake with real files."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.io import FileIO

from branchlake_dagster.errors import (
    NessieUnavailable,
    RootsUnreadable,
    WarehouseUnreadable,
)
from branchlake_dagster.garbage_collection import collector as collector_module
from branchlake_dagster.garbage_collection import reachable_files
from branchlake_dagster.garbage_collection.explanation import FileExplanation
from branchlake_dagster.garbage_collection.summary import (
    format_plan,
    format_result,
    result_to_json,
)
from branchlake_dagster.garbage_collection.warehouse_files import Deletion
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.model import ContentKey, IcebergTable, Put
from branchlake_dagster_tests.garbage_collection.collected_lake import (
    DAY,
    CollectedLake,
)

pytestmark = pytest.mark.lake


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
@pytest.mark.parametrize("which", ["list", "manifest"])
def test_a_table_whose_manifests_are_damaged_is_kept_whole(
    lake: CollectedLake, which: str, damage: str
) -> None:
    lake.create("u")
    lake.append(1, name="u")
    kept, gone = lake.stray("u"), lake.stray()
    location = metadata_locations(lake, "u")[which]
    path = Path(location.removeprefix("file://"))
    content = path.read_bytes()
    lake.age()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"")
        lake.age()
    before = lake.files()
    plan = lake.collector(ago=2 * DAY).run().plan
    assert (plan.metrics.unreadable, plan.metrics.unreadable_states) == ((location,), ())
    assert format_plan(plan)
    lake.collector().run()
    assert before - lake.files() == {gone}
    assert Path(kept).exists()


def metadata_locations(lake: CollectedLake, name: str) -> dict[str, str]:
    table = lake.table(name)
    snapshot = table.current_snapshot()
    assert snapshot is not None
    return {
        "metadata": table.metadata_location,
        "list": snapshot.manifest_list,
        "manifest": snapshot.manifests(table.io)[0].manifest_path,
    }


@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_nothing_is_planned_or_deleted_if_a_metadata_file_is_damaged(
    lake: CollectedLake, damage: str
) -> None:
    """It may name files in any table's folder. Plans wait until it can be read again."""
    lake.create("u")
    lake.append(1, name="u")
    gone, borrowed = lake.stray("u"), lake.stray()
    pq.write_table(pa.table({"n": [9]}), borrowed)
    lake.age()
    assert lake.collector(ago=4 * DAY).run().plan.file_count == 2
    lake.table("u").add_files([f"file://{borrowed}"])
    later = lake.stray()
    lake.age(only=[later])
    location = metadata_locations(lake, "u")["metadata"]
    path = Path(location.removeprefix("file://"))
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"")
    before = lake.files()
    result = lake.collector(ago=2 * DAY).run()
    assert (result.executed, result.plan.file_count, lake.files()) == ((), 0, before)
    assert result.plan.metrics.unreadable_states == (location,)
    assert location in format_result(result)
    json.dumps(result_to_json(result))
    path.write_bytes(content)
    lake.age(only=[str(path)])
    (executed,) = lake.collector(ago=2 * DAY).run().executed
    assert (executed.deleted, executed.kept) == (1, 1)
    lake.collector().run()
    assert before - lake.files() == {gone, later}
    assert lake.rows("u") == [1, 9]


def test_a_metadata_file_that_is_damaged_between_two_batches_stops_the_plan(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    strays = [lake.stray(file=f"{number}.parquet") for number in range(3)]
    lake.age()
    lake.collector(ago=2 * DAY).run()
    monkeypatch.setattr(collector_module, "BATCH_FILES", 1)
    collector = lake.collector()
    delete = collector._files.delete

    def delete_and_damage(batch: Any) -> list[Deletion]:
        done = delete(batch)
        lake.append(5)
        Path(lake.table().metadata_location.removeprefix("file://")).write_bytes(b"")
        return done

    monkeypatch.setattr(collector._files, "delete", delete_and_damage)
    result = collector.run()
    (executed,) = result.executed
    assert (executed.state, executed.deleted) == ("open", 1)
    assert result.plan.metrics.unreadable_states == (table_content(lake).metadata_location,)
    assert sum(Path(path).exists() for path in strays) == 2


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [
        ("sweeping-", "metadata"),
        ("discarded-", "metadata"),
        ("sweeping-", "manifest list"),
        ("discarded-", "manifest"),
    ],
)
def test_a_sweep_beside_a_collection_does_not_stop_it(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch, prefix: str, kind: str
) -> None:
    """It deletes the metadata of a discarded run before its tag, manifests and manifest lists first."""
    client, main_hash = lake.lake.nessie, lake.lake.nessie.reference("main").hash
    client.create_branch("work", from_ref="main", from_hash=main_hash)
    lake.lake.catalog("work").load_table(("shop", "t")).append(pa.table({"n": [7]}))
    head, name = client.reference("work"), f"{prefix}{uuid.uuid4()}"
    table = lake.lake.catalog("work").load_table(("shop", "t"))
    snapshot = table.current_snapshot()
    assert snapshot is not None
    locations = {
        "metadata": table.metadata_location,
        "manifest list": snapshot.manifest_list,
        "manifest": next(
            one.manifest_path
            for one in snapshot.manifests(table.io)
            if one.added_snapshot_id == snapshot.snapshot_id
        ),
    }
    location = locations[kind]
    client.create_tag(name, from_ref="work", from_hash=head.hash)
    client.delete_branch("work", expected_hash=head.hash)
    stray = lake.stray()
    lake.age()
    collector = lake.collector()
    begin = collector._begin

    def begin_and_sweep(*arguments: Any) -> Any:
        one = begin(*arguments)
        update = one.history.update

        def update_and_sweep() -> Any:
            states = update()
            Path(location.removeprefix("file://")).unlink(missing_ok=True)
            if prefix == "discarded-" and name in {ref.name for ref in client.references()}:
                client.delete_tag(name, expected_hash=head.hash)
            return states

        one.history.update = update_and_sweep
        return one

    monkeypatch.setattr(collector, "_begin", begin_and_sweep)
    plan = collector.plan()
    assert (plan.metrics.unreadable_states, plan.metrics.unreadable) == ((), ())
    assert stray in {file.path for file in plan.sample}


def test_files_of_a_damaged_table_in_its_other_folders_are_kept(lake: CollectedLake) -> None:
    """In folders that earlier states, the journal or writers have named, and where it borrows files."""
    lake.create("u")
    lake.create("v")
    borrowed = lake.stray()
    pq.write_table(pa.table({"n": [9]}), borrowed)
    lake.append(1, name="u")
    lake.table("u").add_files([f"file://{borrowed}"])
    recorded = lake.write(
        lake.root / "shop" / "u_00000000-0000-4000-8000-000000000000" / "data" / "x.parquet"
    )
    journaled = lake.write(lake.root / "moved" / "u" / "data" / "x.parquet")
    beside_borrowed, gone = lake.stray(), lake.stray("v")
    lake.age()
    collector = lake.collector(ago=3 * DAY)
    collector.journal.open()
    collector.journal.record_folders({f"file://{lake.root}/moved/u/": "shop.u"}, datetime.now(UTC))
    snapshot = lake.table("u").metadata.snapshots[0]
    Path(snapshot.manifest_list.removeprefix("file://")).unlink()
    assert lake.collect() == {gone}
    assert all(Path(path).exists() for path in (recorded, journaled, beside_borrowed))


@pytest.mark.parametrize(
    "error", [FileNotFoundError("x"), OSError("AWS Error NO_SUCH_BUCKET"), ValueError("x")]
)
def test_a_table_outside_the_warehouse_that_is_unreadable_for_good_does_not_stop_the_pass(
    lake: CollectedLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    lake.create("far", location=f"file://{tmp_path}/far")
    lake.append(1, name="far")
    kept = lake.write(lake.root / "shop" / "near" / "data" / "x.parquet")
    collector = lake.collector(ago=5 * DAY)
    collector.journal.open()
    folders = {f"file://{lake.root}/shop/near/": "shop.far"}
    collector.journal.record_folders(folders, datetime.now(UTC))
    gone = lake.stray()
    lake.age()
    read = reachable_files.read_metadata_fields
    answers: list[Exception] = [error]

    def refuse(io: FileIO, location: str) -> dict[str, Any]:
        if str(tmp_path / "far") in location:
            raise answers[-1]
        return read(io, location)

    monkeypatch.setattr(reachable_files, "read_metadata_fields", refuse)
    metrics = lake.collector().plan().metrics
    assert lake.table("far").metadata_location in metrics.unreadable
    assert metrics.unreadable_states == ()
    assert lake.collect() == {gone}
    assert Path(kept).exists()
    # Another error may go away by itself.
    answers.append(TimeoutError("no answer"))
    with pytest.raises(RootsUnreadable):
        lake.collector().run()


@pytest.mark.filterwarnings("ignore:No preferred file implementation")
def test_metadata_in_a_storage_of_an_unknown_scheme_does_not_stop_the_pass(lake: CollectedLake) -> None:
    head = lake.nessie.reference(MAIN).hash
    location = "odd://somewhere/t/metadata/v1.metadata.json"
    content = replace(table_content(lake), content_id=None, metadata_location=location)
    lake.nessie.commit(
        MAIN, expected_hash=head, operations=[Put(ContentKey(["shop", "odd"]), content)], message="odd"
    )
    gone = lake.stray()
    lake.age()
    assert lake.collector().plan().metrics.unreadable == (location,)
    explained = lake.collector().explain(gone)
    assert isinstance(explained, FileExplanation)
    assert explained.unreadable == (location,)
    assert lake.collect() == {gone}


def table_content(lake: CollectedLake) -> IcebergTable:
    key = ContentKey([lake.namespace, "t"])
    content = lake.nessie.contents(MAIN, [key])[key]
    assert isinstance(content, IcebergTable)
    return content


def test_a_storage_that_does_not_answer_stops_the_pass(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    before = lake.files()

    def refuse(*_: object) -> None:
        raise TimeoutError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr("branchlake_dagster.garbage_collection.reachable_files.read_manifest_paths", refuse)
        with pytest.raises(RootsUnreadable):
            lake.collector().run()
    with monkeypatch.context() as patch:
        patch.setattr(
            "branchlake_dagster.garbage_collection.warehouse_files._iter_local_paths",
            lambda _: (_ for _ in ()).throw(PermissionError("no")),
        )
        with pytest.raises(WarehouseUnreadable):
            lake.collector().run()
    with monkeypatch.context() as patch:
        collector = lake.collector()
        patch.setattr(
            collector._client,
            "references",
            lambda **_: (_ for _ in ()).throw(NessieUnavailable("no")),
        )
        with pytest.raises(NessieUnavailable):
            collector.run()
    assert lake.files() == before
