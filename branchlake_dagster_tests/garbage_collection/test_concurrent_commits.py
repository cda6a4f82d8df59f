"""Commits during a pass, in an in-memory lake with real files."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from branchlake_dagster.garbage_collection import collector as collector_module
from branchlake_dagster.garbage_collection.collector import FileCollector
from branchlake_dagster.garbage_collection.warehouse_files import Deletion, WarehouseFiles
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster_tests.garbage_collection.collected_lake import (
    DAY,
    CollectedLake,
)

pytestmark = pytest.mark.lake


class Interrupting(WarehouseFiles):
    """Calls something at the end of the listing of the first folder, and before deletions."""

    at_listing: Any = None
    at_deletion: Any = None

    def iter_batches(self, folder: str) -> Iterator[Any]:
        yield from super().iter_batches(folder)
        if self.at_listing is not None:
            call, self.at_listing = self.at_listing, None
            call()


def interrupted(lake: CollectedLake, *, ago: timedelta = timedelta(0)) -> tuple[FileCollector, Interrupting]:
    collector = lake.collector(ago=ago)
    files = Interrupting.from_settings(lake.lake.settings)
    assert isinstance(files, Interrupting)
    collector._files = files
    return collector, files


def test_a_file_that_is_committed_after_the_listing_is_not_planned(lake: CollectedLake) -> None:
    """It is old, because its writer was slow or added a file of before."""
    late = lake.stray()
    pq.write_table(pa.table({"n": [9]}), late)
    lake.age()
    collector, files = interrupted(lake, ago=2 * DAY)
    files.at_listing = lambda: lake.table().add_files([f"file://{late}"])
    assert collector.run().plan.file_count == 0


def test_a_file_that_is_committed_after_the_plan_is_not_deleted(lake: CollectedLake) -> None:
    late = lake.stray()
    pq.write_table(pa.table({"n": [9]}), late)
    gone = lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    collector, files = interrupted(lake)
    files.at_listing = lambda: lake.table().add_files([f"file://{late}"])
    before = lake.files()
    (executed,) = collector.run().executed
    assert (executed.deleted, executed.kept) == (1, 1)
    assert before - lake.files() == {gone}
    assert lake.rows() == [1, 9]


def test_a_file_that_is_committed_between_two_batches_is_not_deleted(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [lake.stray(file=f"{number}.parquet") for number in range(4)]
    for path in paths:
        pq.write_table(pa.table({"n": [9]}), path)
    lake.age()
    lake.collector(ago=2 * DAY).run()
    monkeypatch.setattr(collector_module, "BATCH_FILES", 2)
    collector = lake.collector()
    delete = collector._files.delete
    left: list[str] = []

    def delete_and_commit(batch: Any) -> list[Deletion]:
        done = delete(batch)
        if not left:
            left.extend(path for path in paths if Path(path).exists())
            lake.table().add_files([f"file://{left[0]}"])
        return done

    monkeypatch.setattr(collector._files, "delete", delete_and_commit)
    (executed,) = collector.run().executed
    assert (executed.deleted, executed.kept) == (3, 1)
    assert Path(left[0]).exists()
    assert not Path(left[1]).exists()


@pytest.mark.parametrize("change", ["rename", "rename and create", "drop"])
@pytest.mark.parametrize("part", ["plan", "execution"])
def test_a_table_that_is_renamed_or_dropped_meanwhile_keeps_its_files(
    lake: CollectedLake, change: str, part: str
) -> None:
    """A commit of before still has a dropped table. Files that nothing needs go all the same."""
    old = lake.stray()
    kept = lake.data_files()
    lake.age()

    def change_table() -> None:
        catalog = lake.lake.catalog()
        if change == "drop":
            catalog.drop_table((lake.namespace, "t"))
            return
        catalog.rename_table((lake.namespace, "t"), (lake.namespace, "renamed"))
        if change == "rename and create":
            lake.create("t")

    head = lake.nessie.reference(MAIN).hash
    for executing, ago in ((False, 2 * DAY), (True, timedelta(0))):
        collector, files = interrupted(lake, ago=ago)
        if executing == (part == "execution"):
            files.at_listing = change_table
        collector.run()
    assert not Path(old).exists()
    assert all(Path(path).exists() for path in kept)
    assert lake.rows("t", f"{MAIN}@{head}") == [1]
    if change != "drop":
        assert lake.rows("renamed") == [1]
    assert lake.collect() == set()


def test_a_file_that_was_written_again_is_not_deleted(lake: CollectedLake) -> None:
    grown, touched, gone = lake.stray(), lake.stray(), lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    Path(grown).write_bytes(b"more")
    lake.age(20, only=[grown])
    lake.age(19, only=[touched])
    before = lake.files()
    (executed,) = lake.collector().run().executed
    assert (executed.deleted, executed.kept) == (1, 2)
    assert before - lake.files() == {gone}
