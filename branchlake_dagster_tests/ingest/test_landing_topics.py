"""Landing folders that are not as a receiver left them: nothing is read twice or passed over unseen."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.ingest.definitions import ingest_definitions
from branchlake_dagster.ingest.errors import LandingUnavailable, TopicChanged
from branchlake_dagster.ingest.offsets import OffsetRange, TableProgress
from branchlake_dagster.ingest.record_frames import LandingRecords, RawRecord
from branchlake_dagster.ingest.topic_source import LandingTopics, remove_read_files
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.receivers.landing import Landing, LandingDamaged
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster_tests import harness
from branchlake_dagster_tests.ingest.test_landing_source import (
    LandingDriver,
    an_ingest,
    damage_values,
    land,
    resource_of,
    values,
)
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.raised import raising

lakehouse = memory.lakehouse
NO_SESSION = cast("SparkSession", None)
"""For batches that read no record and create no table with columns."""


def an_ingest_at_the_end(topic: str = "a") -> Ingest:
    """Its table has the columns of the first records."""
    ingest = an_ingest(start="latest")
    return replace(ingest, topics=[topic], tables=[replace(ingest.tables[0], columns={})])


def load(folder: Path, count: int) -> None:
    """Plan the read of the first records of partition 0 of topic `a`."""
    (one,) = LandingTopics(folder).describe(["a"])["a"].partitions()
    LandingRecords(folder).load_frame(NO_SESSION, {one: OffsetRange(0, count)}, tasks=1)


def test_a_copy_of_a_file_under_the_name_of_another_one_is_damage(tmp_path: Path) -> None:
    """As many records as expected were read: those of the one file twice, those of the other not at all."""
    land(tmp_path, "a", values(1, 2), values(3, 4))
    first, second = Landing(tmp_path).files("a", 0)
    shutil.copy(first.path, second.path)
    with raising(LandingDamaged, reason="offsets_differ", subject=str(second.path)):
        load(tmp_path, 4)


@pytest.mark.parametrize("offsets", [[0, 0, 2], [0, None, 2], [2, 1, 0], [1, 2, 3]])
def test_a_file_without_each_offset_of_its_name_is_damage(tmp_path: Path, offsets: list[int | None]) -> None:
    land(tmp_path, "a", values(1, 2, 3))
    (file,) = Landing(tmp_path).files("a", 0)
    rows = pq.read_table(file.path, partitioning=None)
    place = rows.schema.get_field_index("offset")
    pq.write_table(rows.set_column(place, "offset", pa.array(offsets, pa.int64())), file.path)
    with raising(LandingDamaged, reason="offsets_differ", subject=str(file.path)):
        load(tmp_path, 3)


def test_a_file_without_values_is_damage(tmp_path: Path) -> None:
    """Its records were taken for records without a value."""
    land(tmp_path, "a", values(1, 2))
    (file,) = Landing(tmp_path).files("a", 0)
    pq.write_table(pq.read_table(file.path, partitioning=None).drop_columns(["value"]), file.path)
    with raising(LandingDamaged, reason="file_unreadable", subject=str(file.path)):
        load(tmp_path, 2)


def test_a_record_of_a_file_with_values_only_is_fetched(tmp_path: Path) -> None:
    land(tmp_path, "a", values(1, 2))
    (file,) = Landing(tmp_path).files("a", 0)
    rows = pq.read_table(file.path, partitioning=None)
    pq.write_table(rows.drop_columns(["key", "timestamp", "headers"]), file.path)
    (part,) = LandingTopics(tmp_path).describe(["a"])["a"].partitions()
    (fetched,) = LandingRecords(tmp_path).fetch([(part, 1)])
    assert fetched == RawRecord("a", 0, 1, None, None, rows["value"][1].as_py(), [])


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("gone"))


def _link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        pytest.param(_make_folder, LandingDamaged, "file_unreadable", id="folder"),
        pytest.param(_link_to_nothing, LandingUnavailable, "unreadable", id="dangling"),
        pytest.param(_link_to_itself, LandingUnavailable, "unreadable", id="loop"),
    ],
)
def test_what_cannot_be_opened_as_a_file_is_an_error_of_its_type(
    tmp_path: Path, change: Callable[[Path], None], error: type[Exception], reason: str
) -> None:
    land(tmp_path, "a", values(1, 2))
    (file,) = Landing(tmp_path).files("a", 0)
    change(file.path)
    topics = LandingTopics(tmp_path)
    topic = topics.describe(["a"])["a"]
    (one,) = topic.partitions()
    reads: list[Callable[[], object]] = [
        lambda: load(tmp_path, 2),
        lambda: LandingRecords(tmp_path).fetch([(one, 1)]),
        lambda: topics.earliest_time({one: 1}),
        lambda: topics.offsets_at_time(topic, datetime.fromtimestamp(1_001, UTC)),
    ]
    for read in reads:
        with raising(error, reason=reason, subject=str(file.path)):
            read()


def test_a_file_that_a_link_leads_to_is_read(tmp_path: Path) -> None:
    land(tmp_path, "a", values(1, 2))
    (file,) = Landing(tmp_path).files("a", 0)
    file.path.rename(tmp_path / "elsewhere")
    file.path.symlink_to(tmp_path / "elsewhere")
    topics = LandingTopics(tmp_path)
    (one,) = topics.describe(["a"])["a"].partitions()
    assert topics.earliest_time({one: 1}) == datetime.fromtimestamp(1_001, UTC)


def test_digits_of_other_scripts_are_no_offsets(tmp_path: Path) -> None:
    land(tmp_path, "a", values(1))
    arabic = "".join(chr(0x660 + int(digit)) for digit in f"{1:020}")
    (tmp_path / "a" / "0" / f"{arabic}-{arabic}.parquet").write_bytes(b"")
    assert Landing(tmp_path).offsets("a", 0) == (0, 1)


def test_a_batch_ends_before_a_damaged_file(tmp_path: Path) -> None:
    """Records before the file could not be read, and nobody could remove it without losing them."""
    land(tmp_path, "a", values(1, 2), [os.urandom(3_000), b"4"], values(5))
    land(tmp_path, "a", values(6), partition=1)
    zero, one = LandingTopics(tmp_path).describe(["a"])["a"].partitions()
    records, ranges = LandingRecords(tmp_path), {zero: OffsetRange(1, 5), one: OffsetRange(0, 1)}
    assert records.ranges_before_damage(ranges) == {}
    records.require_undamaged(ranges)
    second = Landing(tmp_path).files("a", 0)[1].path
    whole = second.read_bytes()
    damages: list[Callable[[], object]] = [
        lambda: second.write_bytes(whole[:-1]),
        lambda: damage_values(second),
    ]
    for damage in damages:
        second.write_bytes(whole)
        damage()
        assert records.ranges_before_damage(ranges) == {**ranges, zero: OffsetRange(1, 2)}
        for begins_at_damage in ({zero: OffsetRange(2, 5)}, {**ranges, zero: OffsetRange(2, 5)}):
            with raising(LandingDamaged, reason="file_unreadable", subject=str(second)):
                records.ranges_before_damage(begins_at_damage)
        with raising(LandingDamaged, reason="file_unreadable", subject=str(second)):
            records.require_undamaged(ranges)


def test_what_comes_after_the_look_moves_no_start(tmp_path: Path) -> None:
    """A start after the topic's end was taken for a topic that had lost its end."""
    land(tmp_path, "a", values(1))
    topics = LandingTopics(tmp_path)
    topic = topics.describe(["a"])["a"]
    (one,) = topic.partitions()
    land(tmp_path, "a", values(2, 3))
    assert topics.offsets_at_time(topic, datetime.fromtimestamp(1_002, UTC)) == {one: 1}


# -- partitions ----------------------------------------------------------------------------------------


def test_a_start_at_the_end_of_an_empty_topic_is_recorded_at_once(
    lakehouse: Lakehouse, tmp_path: Path
) -> None:
    """Everything that came until the first batch was passed over, although it came after the start."""
    folder = tmp_path / "landing"
    land(folder, "a")
    driver = LandingDriver(lakehouse, folder, an_ingest_at_the_end(), NO_SESSION)
    assert driver.batch().record_count == 0
    assert driver.look().plan.is_empty
    # The table waits for records that show its columns: created now, it would have none for ever.
    assert driver.look().loaded_tables[f"{driver.ingest.name}.rows"] is None
    land(folder, "a", values(1, 2))
    (one,) = driver.look().topics["a"].partitions()
    assert driver.look().plan.ranges == {one: OffsetRange(0, 2)}


def test_a_run_without_records_has_results_of_all_checks(lakehouse: Lakehouse) -> None:
    """Also of a table whose columns are not known yet."""
    folder = lakehouse.settings.landing_folder
    land(folder, "a")
    ingest = an_ingest_at_the_end()
    (assets,) = (
        one for one in ingest_definitions(ingest).assets or () if isinstance(one, dg.AssetsDefinition)
    )
    with harness.project(lakehouse, assets) as project:
        project.settle(project.run())
        checks = {(one.asset_key, one.check_name) for one in project.last.get_asset_check_evaluations()}
    assert checks == {(one.asset_key, one.name) for one in assets.check_keys}
    assert LandingDriver(lakehouse, folder, ingest, NO_SESSION).look().progress.position


def test_a_start_at_the_end_of_a_topic_without_partitions_is_recorded_at_once(
    lakehouse: Lakehouse, tmp_path: Path
) -> None:
    """Everything that came until the first batch was passed over, although it came after the start."""
    folder = tmp_path / "landing"
    Landing(folder).make_topic("a")
    driver = LandingDriver(lakehouse, folder, an_ingest_at_the_end(), NO_SESSION)
    assert driver.batch().record_count == 0
    assert driver.look().plan.is_empty
    land(folder, "a", values(1, 2), partition=3)
    (three,) = driver.look().topics["a"].partitions()
    assert driver.look().plan.ranges == {three: OffsetRange(0, 2)}
    # Nothing was read of the topic, so nothing is missing when it is made again.
    shutil.rmtree(folder / "a")
    Landing(folder).make_topic("a")
    assert driver.look().plan.must_record
    # Its records came after the recorded start.
    land(folder, "a", values(1, 2), partition=3)
    (three,) = driver.look().topics["a"].partitions()
    assert driver.look().plan.ranges == {three: OffsetRange(0, 2)}


def test_another_start_waits_for_the_first_partition(lakehouse: Lakehouse, tmp_path: Path) -> None:
    folder = tmp_path / "landing"
    Landing(folder).make_topic("a")
    ingest = replace(an_ingest_at_the_end(), start=datetime.fromtimestamp(1_001, UTC))
    driver = LandingDriver(lakehouse, folder, ingest, NO_SESSION)
    assert driver.look().plan.is_empty
    land(folder, "a", values(1, 2))
    (zero,) = driver.look().topics["a"].partitions()
    assert driver.look().plan.ranges == {zero: OffsetRange(1, 2)}


def test_a_partition_whose_folder_is_gone_is_not_passed_over(lakehouse: Lakehouse, tmp_path: Path) -> None:
    """Its records were not missed, and the valid-through time no longer waited for them."""
    folder = tmp_path / "landing"
    for partition in (0, 1):
        land(folder, "a", partition=partition)
    driver = LandingDriver(lakehouse, folder, an_ingest_at_the_end(), NO_SESSION)
    driver.batch()
    (folder / "a" / "1").rename(folder / "moved")
    land(folder, "a", values(1))
    with raising(TopicChanged, reason="partition_missing", subject="a[1]"):
        driver.look()
    (folder / "moved").rename(folder / "a" / "1")
    assert [one.partition for one in driver.look().plan.ranges] == [0]


# -- removal -------------------------------------------------------------------------------------------


def test_a_topic_that_nobody_writes_keeps_no_files_of_others(lakehouse: Lakehouse, tmp_path: Path) -> None:
    """Without a receiver of links, the files of radar filled the disk."""
    folder = tmp_path / "landing"
    land(folder, "b")
    ingests = [an_ingest(), an_ingest_at_the_end("b")]
    LandingDriver(lakehouse, folder, ingests[1], NO_SESSION).batch()
    definitions = ingest_definitions(*ingests)
    resource = resource_of(lakehouse, folder, landing_keep_h=0.0)
    (job,) = (one for one in definitions.jobs if one.name.startswith("landing_files_"))
    assert isinstance(job, dg.JobDefinition)
    land(folder, "b", values(1), values(2))
    _record_position(lakehouse, ingests[1], 2)
    with dg.DagsterInstance.ephemeral() as instance:
        run = job.execute_in_process(instance=instance, resources={"lakehouse": resource})
        assert run.success
        assert [file.first for file in Landing(folder).files("b", 0)] == [1]
        # Another trouble of a topic fails the run after it has removed what it could.
        land(folder, "a", values(1))
        (folder / "a" / "topic-id").write_text("nothing")
        land(folder, "b", values(3))
        _record_position(lakehouse, ingests[1], 3)
        with pytest.raises(LandingDamaged):
            job.execute_in_process(instance=instance, resources={"lakehouse": resource})
        assert [file.first for file in Landing(folder).files("b", 0)] == [2]


def _record_position(lake: Lakehouse, ingest: Ingest, offset: int) -> None:
    """Let `main` say that the records of partition 0 before this offset are in the tables."""
    table = lake.catalog("main").load_table((ingest.name, f"{ingest.name}_dead_letters"))
    key = LakeProperty.OFFSETS_PREFIX + ingest.name
    progress = TableProgress.from_json(table.properties[key])
    progress = replace(progress, offsets=dict.fromkeys(progress.offsets, offset))
    table.transaction().set_properties({key: progress.to_json()}).commit_transaction()


def test_a_file_that_another_removal_took_stops_no_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    land(tmp_path, "a", values(1), values(2), values(3), values(4))
    landing = Landing(tmp_path)
    topic = LandingTopics(tmp_path).describe(["a"])["a"]
    files = landing.files("a", 0)
    for file in files:
        os.utime(file.path, (1_000, 1_000))
    whole = Landing.files
    listings = 0

    def listed_before(self: Landing, name: str, partition: int) -> Any:
        """Each listing is that of before the other removal's next file."""
        nonlocal listings
        found = whole(self, name, partition)
        if listings < 2:
            files[listings].path.unlink()
        listings += 1
        return found

    monkeypatch.setattr(Landing, "files", listed_before)
    (one,) = topic.partitions()
    remove_read_files(landing, [topic], {one: 4}, finished_before=2_000.0)
    monkeypatch.undo()
    assert landing.offsets("a", 0) == (3, 4)


# -- times ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_times_of_other_writers_are_those_of_kafka_records(tmp_path: Path, unit: str) -> None:
    """-1 ms means no time, whatever the unit of the file."""
    land(tmp_path, "a", values(1, 2, 3))
    (file,) = Landing(tmp_path).files("a", 0)
    rows = pq.read_table(file.path, partitioning=None)
    index = rows.schema.get_field_index("timestamp")
    times_ms = pa.array([-1, 5_000, 7_000], pa.timestamp("ms", "UTC"))
    pq.write_table(rows.set_column(index, "timestamp", times_ms.cast(pa.timestamp(unit, "UTC"))), file.path)
    topics = LandingTopics(tmp_path)
    topic = topics.describe(["a"])["a"]
    (one,) = topic.partitions()
    assert topics.earliest_time({one: 0}) is None
    assert topics.earliest_time({one: 1}) == datetime.fromtimestamp(5, UTC)
    assert topics.offsets_at_time(topic, datetime(1960, 1, 1, tzinfo=UTC)) == {one: 1}
    fetched = LandingRecords(tmp_path).fetch([(one, 0), (one, 1)])
    assert [record.timestamp_us for record in fetched] == [None, 5_000_000]


# -- missing and foreign files -------------------------------------------------------------------------


def test_a_missing_file_in_the_middle_is_named_and_nothing_is_read(
    lakehouse: Lakehouse, tmp_path: Path
) -> None:
    land(tmp_path, "a", values(1, 2), values(3, 4, 5), values(6))
    Landing(tmp_path).files("a", 0)[1].path.unlink()
    driver = LandingDriver(lakehouse, tmp_path, an_ingest(), NO_SESSION)
    name = f"{2:020}-{4:020}.parquet"
    with raising(LandingDamaged, 2, 4, name, reason="offsets_missing", subject="a[0]"):
        driver.look()


def test_foreign_files_in_a_partition_are_not_read(tmp_path: Path) -> None:
    land(tmp_path, "a", values(1, 2), values(3))
    folder = tmp_path / "a" / "0"
    (first, _) = Landing(tmp_path).files("a", 0)
    before = LandingTopics(tmp_path).describe(["a"])
    whole = first.path.read_bytes()
    name = first.path.name
    for foreign in (f"{name}~", f".{name}.swp", f"{name}.tmp", f"copy of {name}", "empty.parquet", "notes"):
        (folder / foreign).write_bytes(whole if name in foreign else b"")
    for foreign_folder in ("old", ".git", f"{name}.d"):
        (folder / foreign_folder).mkdir()
    (tmp_path / "a" / "1~").write_bytes(b"")
    (tmp_path / "a" / "2").write_bytes(b"")  # a file where a partition's folder would be
    (tmp_path / "a" / "old").mkdir()
    assert LandingTopics(tmp_path).describe(["a"]) == before
    (one,) = before["a"].partitions()
    assert len(LandingRecords(tmp_path).fetch([(one, 0), (one, 1), (one, 2)])) == 3
