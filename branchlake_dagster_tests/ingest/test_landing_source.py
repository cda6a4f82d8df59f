"""Landing folders as what an ingestion reads: exactly the planned offsets, and what may be removed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from branchlake_dagster.errors import ConfigurationError, Transient
from branchlake_dagster.ingest.batch_report import build_observations
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.definitions import ingest_definitions
from branchlake_dagster.ingest.errors import LandingUnavailable, TopicChanged, TopicReplaced
from branchlake_dagster.ingest.ingest_sensor import plan_batch_on_main, remove_landing_files
from branchlake_dagster.ingest.offsets import OffsetRange, TopicPartition
from branchlake_dagster.ingest.record_frames import LandingRecords
from branchlake_dagster.ingest.topic_source import (
    LandingTopics,
    common_offsets,
    open_topic_source,
    remove_read_files,
)
from branchlake_dagster.ingest.unwritable_records import is_caused_by_records
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.receivers.landing import Landing, LandingDamaged
from branchlake_dagster.receivers.landing_sink import LandingSink
from branchlake_dagster.receivers.records import ReceiverOrigin, Record
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.ingest.driving import Driver
from branchlake_dagster_tests.suite.raised import raising

WEEK_S = 7 * 86_400


def land(folder: Path, topic: str, *files: Sequence[bytes], partition: int = 0, at: int = 1_000) -> None:
    """Files with these values; the time of each record is its number, in seconds, from `at` on."""
    sink = LandingSink(folder, topic, partition, ReceiverOrigin("r1", "udp"), now_ns=lambda: 0)
    sink.open(resume=False)
    for values in files:
        first = at + sink.next_offset
        records = [
            Record(value, b"k", (first + number) * 1_000_000_000, b"h:1")
            for number, value in enumerate(values)
        ]
        sink.write(records)
    sink.close()


def values(*numbers: int) -> list[bytes]:
    return [json.dumps({"id": number}).encode() for number in numbers]


def moment(second: int) -> datetime:
    return datetime.fromtimestamp(second, UTC)


# -- topics --------------------------------------------------------------------------------------------


def test_a_folder_reports_incarnation_offsets_and_times(tmp_path: Path) -> None:
    land(tmp_path, "a", [b"x", b"y"], [b"z"])
    land(tmp_path, "a", [b"x"], partition=3, at=500)
    topics = LandingTopics(tmp_path)
    topic = topics.describe(["a"])["a"]
    assert topic.incarnation == Landing(tmp_path).topic_id("a")
    assert (topic.begins, topic.ends) == ({0: 0, 3: 0}, {0: 3, 3: 1})
    zero, three = topic.partitions()
    assert topics.offsets_at_time(topic, moment(1_001)) == {zero: 1, three: 1}
    assert topics.offsets_at_time(topic, moment(1_002)) == {zero: 2, three: 1}
    assert topics.offsets_at_time(topic, moment(3_000)) == {zero: 3, three: 1}
    assert topics.earliest_time({zero: 1}) == moment(1_001)
    assert topics.earliest_time({zero: 2, three: 0}) == moment(500)
    assert topics.earliest_time({zero: 3}) is None


def test_a_topic_that_nobody_has_received_yet_is_waited_for(tmp_path: Path) -> None:
    with raising(LandingUnavailable, reason="unknown_topic", subject="b") as caught:
        LandingTopics(tmp_path / "not mounted").describe(["b"])
    assert isinstance(caught.value, Transient)


def test_a_topic_that_cannot_be_read_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    land(tmp_path, "a", [b"x"])
    offline = OSError(errno.EIO, "Input/output error")

    def fail(*_: object) -> list[int]:
        raise offline

    monkeypatch.setattr(Landing, "partitions", fail)
    with raising(LandingUnavailable, reason="unreadable", subject="a") as caught:
        LandingTopics(tmp_path).describe(["a"])
    assert caught.value.__cause__ is offline


def test_a_name_that_no_topic_can_have_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    with raising(ConfigurationError, reason="topic_name", subject="a/b"):
        LandingTopics(tmp_path).describe(["a/b"])


def test_a_listing_that_missed_a_file_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    land(tmp_path, "a", [b"x"], [b"y"], [b"z"])
    listed, left = os.listdir, [2]

    def missing(folder: Path) -> list[str]:
        found = listed(folder)
        if left[0]:
            left[0] -= 1
            found = [name for name in found if "1-" not in name]
        return found

    monkeypatch.setattr(os, "listdir", missing)
    assert Landing(tmp_path).offsets("a", 0) == (0, 3)
    left[0] = 100
    with raising(LandingDamaged, reason="offsets_missing", subject="a[0]"):
        Landing(tmp_path).offsets("a", 0)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda _: b"", id="empty"),
        pytest.param(lambda content: content[: len(content) // 2], id="half"),
        pytest.param(lambda _: b"PAR1" + bytes(20), id="other"),
        pytest.param(lambda _: _parquet(pa.table({"other": [1, 2]})), id="columns"),
    ],
)
def test_a_file_that_is_not_whole_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """PyArrow's error does not name the file, and it was taken for an error of the records."""
    land(tmp_path, "a", [b"x", b"y"])
    (file,) = Landing(tmp_path).files("a", 0)
    file.path.write_bytes(damage(file.path.read_bytes()))
    topics, records = LandingTopics(tmp_path), LandingRecords(tmp_path)
    topic = topics.describe(["a"])["a"]
    (partition,) = topic.partitions()
    reads: list[Callable[[], object]] = [
        lambda: records.fetch([(partition, 1)]),
        lambda: topics.earliest_time({partition: 1}),
        lambda: topics.offsets_at_time(topic, moment(1_001)),
    ]
    for read in reads:
        with raising(LandingDamaged, reason="file_unreadable", subject=str(file.path)) as caught:
            read()
        assert not is_caused_by_records(caught.value)


def _parquet(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


@pytest.mark.parametrize(
    "name",
    [
        f"{7:020}-{5:020}.parquet",
        f"{2:020}-{10**19:020}.parquet",
    ],
)
def test_a_name_with_impossible_offsets_is_damage(tmp_path: Path, name: str) -> None:
    land(tmp_path, "a", [b"x", b"y"])
    (tmp_path / "a" / "0" / name).write_bytes(b"")
    with raising(LandingDamaged, reason="file_name", subject="a[0]"):
        LandingTopics(tmp_path).describe(["a"])


def test_only_plain_numbers_are_partitions(tmp_path: Path) -> None:
    land(tmp_path, "a", [b"x"])
    for name in ("00", "\u0663", "-1", "0.bak"):
        (tmp_path / "a" / name).mkdir()
    assert Landing(tmp_path).partitions("a") == [0]


def test_a_folder_that_spark_would_take_for_a_pattern_is_refused(tmp_path: Path) -> None:
    with raising(ConfigurationError, reason="pattern_characters", subject=str(tmp_path / "of [today]")):
        LandingRecords(tmp_path / "of [today]")


def test_a_folder_that_goes_or_is_made_again_while_it_is_read_gives_nothing(tmp_path: Path) -> None:
    land(tmp_path, "a", [b"1"])
    (one,) = LandingTopics(tmp_path).describe(["a"])["a"].partitions()
    ranges, records = {one: OffsetRange(0, 1)}, LandingRecords(tmp_path)
    records.require_complete(ranges, 1)
    (tmp_path / "a" / "topic-id").write_text(str(uuid.uuid4()))
    with raising(TopicReplaced, subject="a"):
        records.require_complete(ranges, 1)
    (tmp_path / "a" / "topic-id").unlink()
    with raising(LandingUnavailable, "a[0]", reason="folder_gone"):
        records.require_complete(ranges, 1)


# -- what may be removed -------------------------------------------------------------------------------


def test_files_go_that_are_read_and_old_and_never_the_newest(tmp_path: Path) -> None:
    land(tmp_path, "a", [b"1", b"2"], [b"3"], [b"4", b"5"], [b"6"])
    landing = Landing(tmp_path)
    topic = LandingTopics(tmp_path).describe(["a"])["a"]
    (one,) = topic.partitions()
    files = landing.files("a", 0)
    for file in files:
        os.utime(file.path, (1_000, 1_000))

    def removed(read: dict[TopicPartition, int], before: float = 2_000.0) -> list[int]:
        return [file.first for file in remove_read_files(landing, [topic], read, finished_before=before)]

    assert removed({}) == []
    assert removed({TopicPartition("a", str(uuid.uuid4()), 0): 6}) == []
    assert removed({one: 6}, before=1_000.0) == []
    assert removed({one: 4}) == [0, 2]
    os.utime(files[2].path, (3_000, 3_000))
    assert removed({one: 6}) == []
    os.utime(files[2].path, (1_000, 1_000))
    assert removed({one: 6}) == [3]
    assert landing.offsets("a", 0) == (5, 6)


def test_of_several_ingestions_the_slowest_counts() -> None:
    a, b = TopicPartition("t", "x", 0), TopicPartition("t", "x", 1)
    assert common_offsets([{a: 5, b: 7}, {a: 3}]) == {a: 3}
    assert common_offsets([{a: 5}]) == {a: 5}
    assert common_offsets([]) == {}


# -- batches -------------------------------------------------------------------------------------------


class LandingDriver(Driver):
    """One ingestion on a lake and a landing folder."""

    def __init__(self, lake: Lakehouse, folder: Path, ingest: Ingest, session: SparkSession) -> None:
        self.lake, self.ingest = lake, ingest
        self._session, self._own = session, []
        self.topics: Any = LandingTopics(folder)
        self.records = LandingRecords(folder)


def an_ingest(**more: Any) -> Ingest:
    name = f"i{uuid.uuid4().hex[:8]}"
    place: dict[str, Any] = {"p": "partition", "o": "offset", "at": "timestamp"}
    table = IngestTable(key=[name, "rows"], columns={"id": "bigint"}, attributes=place)
    return Ingest(name=name, topics=["a"], tables=[table], source="landing", **more)


def test_each_record_is_read_once_whatever_the_files_borders(
    lakehouse: Lakehouse, spark_session: Any, tmp_path: Path
) -> None:
    land(tmp_path, "a", values(1, 2, 3), [*values(4), b"no"], values(6, 7))
    land(tmp_path, "a", values(10, 11), partition=1)
    driver = LandingDriver(lakehouse, tmp_path, an_ingest(most_records=4), spark_session)
    batches = [driver.batch(), driver.batch()]
    assert [one.record_count for one in batches] == [4, 4]
    land(tmp_path, "a", values(8))
    assert driver.batch().record_count == 2
    assert driver.look().plan.is_empty
    found = {(row["p"], row["o"]): (row["id"], row["at"]) for row in driver.rows()}
    ids = {(0, number - 1): number for number in (1, 2, 3, 4, 6, 7, 8)} | {(1, 0): 10, (1, 1): 11}
    assert found == {place: (number, moment(1_000 + place[1])) for place, number in ids.items()}
    assert len(driver.rows()) == 9
    (dead,) = driver.dead()
    assert (dead["value"], dead["partition"], dead["offset"], dead["error_kind"]) == (b"no", 0, 4, "syntax")
    assert {one["key"]: one["value"] for one in dead["headers"]}["branchlake.source"] == b"h:1"


def test_a_file_that_lost_records_or_is_gone_fails_the_batch_and_changes_nothing(
    lakehouse: Lakehouse, spark_session: Any, tmp_path: Path
) -> None:
    land(tmp_path, "a", values(1, 2), values(3))
    driver = LandingDriver(lakehouse, tmp_path, an_ingest(), spark_session)
    first, second = Landing(tmp_path).files("a", 0)
    whole = first.path.read_bytes()
    pq.write_table(pq.read_table(first.path, partitioning=None).slice(0, 1), first.path)
    with raising(LandingDamaged, 1, 2, reason="record_count", subject=str(first.path)):
        driver.batch()
    first.path.write_bytes(whole)
    topic = driver.look().topics["a"]
    ranges = dict.fromkeys(topic.partitions(), OffsetRange(0, 3))
    frame = driver.records.load_frame(spark_session, ranges, tasks=1).frame
    assert frame.schema  # it is planned before the file goes
    second.path.unlink()
    with pytest.raises(PySparkException) as gone:
        frame.collect()
    assert second.path.name in str(gone.value)
    shutil.copy(first.path, second.path)
    second.path.write_bytes(b"")
    assert driver.look().progress.position == {}


def damage_values(path: Path) -> None:
    """Damage the values of the records, which are long and random. The end of the file stays whole."""
    chunk = pq.read_metadata(path).row_group(0).column(1)
    # The page begins with its header, which has the lowest and the highest value.
    content, at = path.read_bytes(), chunk.data_page_offset + chunk.total_compressed_size - 1_500
    path.write_bytes(content[:at] + bytes(1_000) + content[at + 1_000 :])


def test_a_damaged_file_does_not_stop_the_records_before_it(
    lakehouse: Lakehouse, spark_session: Any, tmp_path: Path
) -> None:
    """Its end is whole, so only Spark meets the damage. The batch was divided up to 64 times for it."""
    land(tmp_path, "a", values(1), [os.urandom(3_000)], values(3))
    driver = LandingDriver(lakehouse, tmp_path, an_ingest(on_lost="skip"), spark_session)
    first, second, _ = Landing(tmp_path).files("a", 0)
    damage_values(second.path)
    result = driver.batch()
    assert (result.record_count, result.plan.lag, len(result.notes)) == (1, 2, 1)
    with raising(LandingDamaged, reason="file_unreadable", subject=str(second.path)):
        driver.batch()
    # Who cannot restore it removes it, with the files that were read.
    first.path.unlink()
    second.path.unlink()
    driver.batch()
    assert sorted(driver.arrow()["id"].to_pylist()) == [1, 3]


def test_files_outside_their_folder_fail_the_batch(
    lakehouse: Lakehouse, spark_session: Any, tmp_path: Path
) -> None:
    """Somebody renamed a topic's folder: all records were passed over, and the files removed in the end."""
    land(tmp_path, "b", values(1, 2))
    (tmp_path / "b").rename(tmp_path / "a")
    driver = LandingDriver(lakehouse, tmp_path, an_ingest(), spark_session)
    with raising(LandingDamaged, "a[0]", 0, 2, reason="records_missing"):
        driver.batch()
    assert driver.look().progress.position == {}


def test_a_folder_that_was_made_again_is_another_topic(
    lakehouse: Lakehouse, spark_session: Any, tmp_path: Path
) -> None:
    land(tmp_path, "a", values(1, 2))
    driver = LandingDriver(lakehouse, tmp_path, an_ingest(), spark_session)
    driver.batch()
    shutil.rmtree(tmp_path / "a")
    land(tmp_path, "a", values(3))
    with raising(TopicChanged, reason="recreated", subject="a"):
        driver.look()


# -- in Dagster ----------------------------------------------------------------------------------------


def resource_of(lake: Lakehouse, folder: Path, **more: Any) -> LakehouseResource:
    secrets = dict.fromkeys(Settings.secret_names())
    return LakehouseResource.from_settings(
        lake.settings.model_copy(update={"landing": folder, **secrets, **more})
    )


def test_runs_read_the_folder_and_remove_what_main_has(
    lakehouse: Lakehouse, spark_session: Any, tmp_path: Path
) -> None:
    land(tmp_path, "a", values(1, 2), values(3))
    ingest = an_ingest()
    definitions = ingest_definitions(ingest)
    assert [one.key.path for one in definitions.assets if isinstance(one, dg.AssetSpec)] == [["landing", "a"]]
    resource = resource_of(lakehouse, tmp_path, landing_keep_h=0.0)
    job = next(one for one in definitions.jobs if one.name == f"ingest_{ingest.name}_live")
    assert isinstance(job, dg.JobDefinition)
    config = {"ops": {f"ingest_{ingest.name}_batches": {"config": {"run_s": 0.1, "interval_s": 0.0}}}}
    lake = resource.lakehouse
    # Nothing of it is on main yet.
    assert remove_landing_files("a", [ingest], lake) == []
    with dg.DagsterInstance.ephemeral() as instance:
        sensor = next(one for one in definitions.sensors if one.name == f"ingest_{ingest.name}_live_sensor")

        def told(cursor: str | None) -> Any:
            with dg.build_sensor_context(
                instance=instance, cursor=cursor, resources={"lakehouse": resource}
            ) as context:
                return sensor.evaluate_tick(context)

        before = told(None)
        assert len(before.run_requests) == 1
        (observed,) = before.asset_events
        assert observed.asset_key == dg.AssetKey(["landing", "a"])
        assert observed.metadata["branchlake/lag"].value == 3
        assert observed.metadata["branchlake/oldest_waiting"].value == 1_000.0
        assert told(before.cursor).asset_events == [], "once a minute"
        assert job.execute_in_process(
            run_config=config, instance=instance, resources={"lakehouse": resource}
        ).success
        (observed,) = told(None).asset_events
        assert observed.metadata["branchlake/lag"].value == 0
        assert observed.metadata["branchlake/oldest_waiting_s"].value == 0.0
        assert observed.metadata["branchlake/valid_through"].value == 1_002.0
        topics = open_topic_source(ingest, lake.settings).topics
        (later,) = build_observations(
            ingest, plan_batch_on_main(ingest, lake), topics, [], clock=lambda: 1_062.5
        )
        assert later.metadata["branchlake/valid_through_age_s"].value == 60.5
        removing = next(one for one in definitions.jobs if one.name.startswith("landing_files_"))
        assert isinstance(removing, dg.JobDefinition)
        assert removing.execute_in_process(instance=instance, resources={"lakehouse": resource}).success
    assert [file.first for file in Landing(tmp_path).files("a", 0)] == [2]
    land(tmp_path, "a", values(4))
    driver = LandingDriver(lakehouse, tmp_path, ingest, spark_session)
    driver.batch()
    assert sorted(driver.arrow()["id"].to_pylist()) == [1, 2, 3, 4]
