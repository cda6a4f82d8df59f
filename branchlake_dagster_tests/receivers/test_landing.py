from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchlake_dagster.embedded import process as rotation
from branchlake_dagster.embedded.process import EARLIER_FILES, rotate_by_rename
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.receivers.landing import (
    LANDING_SCHEMA,
    NEXT_OFFSET_FILE,
    Landing,
    LandingDamaged,
    OffsetsGone,
    file_name,
)
from branchlake_dagster.receivers.records import (
    NotHandedOver,
    PartitionTaken,
    ReceiverOrigin,
    Record,
    ResumeState,
    digest_value,
)
from branchlake_dagster_tests.receivers.harness import ORIGIN, landed, landing_sink, record
from branchlake_dagster_tests.suite.raised import raising


def write(folder: Path, *batches: list[Record], partition: int = 0, origin: ReceiverOrigin = ORIGIN) -> None:
    sink = landing_sink(folder, partition=partition, origin=origin)
    sink.open(resume=False)
    for batch in batches:
        sink.write(batch)
    sink.close()


def log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "t" / "ingest.log").read_text().splitlines()]


@given(
    st.lists(
        st.tuples(
            st.binary(max_size=20),
            st.none() | st.binary(max_size=5),
            st.integers(0, 4_000_000_000_000_000_000),
            st.binary(min_size=1, max_size=9),
            st.none() | st.binary(min_size=1, max_size=9),
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(0, 10**15),
)
def test_rows_are_what_a_kafka_record_is_in_spark(rows: list[tuple], first: int) -> None:
    sink = landing_sink(Path("/nowhere"), partition=3)
    table = sink.as_table([Record(*row) for row in rows], first)
    table.validate(full=True)
    assert table.schema == LANDING_SCHEMA
    for number, (row, (value, key, ns, source, cursor)) in enumerate(
        zip(table.to_pylist(), rows, strict=True)
    ):
        headers = {
            "branchlake.receiver": b"r1",
            "branchlake.protocol": b"udp",
            "branchlake.received_ns": b"%d" % ns,
            "branchlake.source": source,
        }
        if cursor is not None:
            headers["branchlake.cursor"] = cursor
        assert (row["value"], row["key"]) == (value, key)
        assert (row["topic"], row["partition"], row["offset"]) == ("t", 3, first + number)
        assert [(one["key"], one["value"]) for one in row["headers"]] == list(headers.items())
    micros = table["timestamp"].cast(pa.int64()).to_pylist()
    assert micros == [row[2] // 1_000 for row in rows]


def test_offsets_go_on_after_a_restart(tmp_path: Path) -> None:
    write(tmp_path, [record(b"a"), record(b"b")], [record(b"c")])
    incarnation = Landing(tmp_path).topic_id("t")
    write(tmp_path, [record(b"d")])
    assert landed(tmp_path)["value"].to_pylist() == [b"a", b"b", b"c", b"d"]
    landing = Landing(tmp_path)
    assert [(f.first, f.last, f.rows) for f in landing.files("t", 0)] == [(0, 1, 2), (2, 2, 1), (3, 3, 1)]
    assert (landing.topics(), landing.partitions("t"), landing.offsets("t", 0)) == (["t"], [0], (0, 4))
    assert landing.topic_id("t") == incarnation


def test_files_of_a_range(tmp_path: Path) -> None:
    write(tmp_path, [record(b"a")] * 3, [record(b"b")] * 3, [record(b"c")] * 3)
    landing = Landing(tmp_path)
    assert [f.first for f in landing.files_with_offsets("t", 0, 2, 4)] == [0, 3]
    assert [f.first for f in landing.files_with_offsets("t", 0, 3, 6)] == [3]
    assert landing.files_with_offsets("t", 0, 9, 9) == []
    with raising(OffsetsGone, 0, 8, 9, 10, subject="t[0]"):
        landing.files_with_offsets("t", 0, 8, 10)
    assert [f.first for f in landing.remove_before("t", 0, 5)] == [0]
    assert landing.offsets("t", 0) == (3, 9)
    with pytest.raises(OffsetsGone):
        landing.files_with_offsets("t", 0, 2, 4)


def test_the_newest_file_stays_so_that_offsets_go_on(tmp_path: Path) -> None:
    write(tmp_path, [record(b"a")], [record(b"b")])
    Landing(tmp_path).remove_before("t", 0, 1_000)
    write(tmp_path, [record(b"c")])
    assert Landing(tmp_path).offsets("t", 0) == (1, 3)


def test_a_second_receiver_of_a_partition_is_refused(tmp_path: Path) -> None:
    first = landing_sink(tmp_path)
    first.open(resume=False)
    with raising(PartitionTaken, tmp_path, subject="t[0]"):
        landing_sink(tmp_path).open(resume=False)
    other = landing_sink(tmp_path, partition=1)
    other.open(resume=False)
    first.close()
    other.close()
    write(tmp_path, [record(b"a")])
    assert Landing(tmp_path).partitions("t") == [0, 1]


def test_what_a_crash_left_is_removed(tmp_path: Path) -> None:
    write(tmp_path, [record(b"a")])
    left = tmp_path / "t" / "0" / f".{file_name(1, 5)}.tmp"
    left.write_bytes(b"PAR1 half")
    write(tmp_path, [record(b"b")])
    assert not left.exists()
    assert landed(tmp_path)["value"].to_pylist() == [b"a", b"b"]


def test_offsets_are_never_given_twice(tmp_path: Path) -> None:
    write(tmp_path, [record(b"a")], [record(b"b")])
    (newest,) = (tmp_path / "t" / "0").glob(f"{file_name(1, 1)}")
    newest.unlink()
    with raising(LandingDamaged, reason="newest_files_missing", subject="t[0]"):
        landing_sink(tmp_path).open(resume=False)
    shutil.rmtree(tmp_path / "t")
    write(tmp_path, [record(b"c")])
    assert Landing(tmp_path).offsets("t", 0) == (0, 1)


def test_offsets_are_never_given_twice_beside_a_busy_partition(tmp_path: Path) -> None:
    """The log that all partitions share is read at its end only, and may be gone."""
    write(tmp_path, [record(b"a")], [record(b"b")])
    (tmp_path / "t" / "0" / file_name(1, 1)).unlink()
    log = tmp_path / "t" / "ingest.log"
    with log.open("a") as file:
        for number in range(4_000):
            file.write(json.dumps({"partition": 1, "last": number, "told": "x" * 60}) + "\n")
    for _ in range(2):
        with pytest.raises(LandingDamaged):
            landing_sink(tmp_path).open(resume=False)
        log.unlink(missing_ok=True)


def test_a_folder_of_an_older_release_gets_its_mark(tmp_path: Path) -> None:
    write(tmp_path, [record(b"a")])
    mark = tmp_path / "t" / "0" / NEXT_OFFSET_FILE
    assert mark.read_bytes() == b"%020d\n" % 1
    mark.unlink()
    write(tmp_path, [record(b"b")])
    assert mark.read_bytes() == b"%020d\n" % 2
    mark.write_bytes(b"")
    with pytest.raises(LandingDamaged):
        landing_sink(tmp_path).open(resume=False)


def test_a_gap_is_reported(tmp_path: Path) -> None:
    write(tmp_path, [record(b"a")], [record(b"b")], [record(b"c")])
    (tmp_path / "t" / "0" / file_name(1, 1)).unlink()
    with raising(LandingDamaged, reason="offsets_missing", subject="t[0]"):
        Landing(tmp_path).files("t", 0)
    with pytest.raises(LandingDamaged):
        landing_sink(tmp_path).open(resume=False)


def test_a_file_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = landing_sink(tmp_path)
    sink.open(resume=False)
    whole = pq.write_table

    def full(table: pa.Table, file: object, **options: object) -> None:
        whole(table, file, **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with raising(NotHandedOver) as caught:
        sink.write([record(b"a")])
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.records == [record(b"a")]
    assert {path.name for path in (tmp_path / "t" / "0").iterdir()} == {".lock", NEXT_OFFSET_FILE}
    monkeypatch.setattr(pq, "write_table", whole)
    sink.write(caught.value.records)
    sink.close()
    assert landed(tmp_path)["value"].to_pylist() == [b"a"]


def test_a_receiver_whose_folder_was_replaced_writes_nothing_there(tmp_path: Path) -> None:
    """Its files went between those of the receiver that has the new folder, or replaced them."""
    first = landing_sink(tmp_path)
    first.open(resume=False)
    first.write([record(b"a")])
    (tmp_path / "t").rename(tmp_path / "away")
    with raising(NotHandedOver) as gone:
        first.write([record(b"b")])
    write(tmp_path, [record(b"x")], [record(b"y")])
    with raising(NotHandedOver) as replaced:
        first.write([record(b"b")])
    assert gone.value.records == replaced.value.records == [record(b"b")]
    assert landed(tmp_path)["value"].to_pylist() == [b"x", b"y"]
    # Once its folder is back, it continues.
    shutil.rmtree(tmp_path / "t")
    (tmp_path / "away").rename(tmp_path / "t")
    first.write(replaced.value.records)
    first.close()
    assert landed(tmp_path)["value"].to_pylist() == [b"a", b"b"]


def test_a_link_that_was_made_although_it_failed_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system repeats a request whose answer was lost, and finds the name that it has made."""
    real = Path.hardlink_to

    def link_twice(self: Path, target: Path) -> None:
        real(self, target)
        real(self, target)

    sink = landing_sink(tmp_path)
    sink.open(resume=False)
    monkeypatch.setattr(Path, "hardlink_to", link_twice)
    sink.write([record(b"a")])
    sink.write([record(b"b")])
    sink.close()
    assert landed(tmp_path)["value"].to_pylist() == [b"a", b"b"]


def test_a_receiver_goes_on_without_its_lock_file(tmp_path: Path) -> None:
    """A job that removes old files may remove it. A lock file of another receiver stops this one."""
    first, second = landing_sink(tmp_path), landing_sink(tmp_path)
    first.open(resume=False)
    (tmp_path / "t" / "0" / ".lock").unlink()
    first.write([record(b"a")])
    second.open(resume=False)
    with raising(NotHandedOver):
        first.write([record(b"b")])
    second.write([record(b"c")])
    for sink in (first, second):
        sink.close()
    assert landed(tmp_path)["value"].to_pylist() == [b"a", b"c"]


def test_a_file_that_is_there_is_never_replaced(tmp_path: Path) -> None:
    sink = landing_sink(tmp_path)
    sink.open(resume=False)
    other = tmp_path / "t" / "0" / file_name(0, 0)
    other.write_bytes(b"restored")
    with raising(NotHandedOver) as caught:
        sink.write([record(b"a")])
    assert isinstance(caught.value.__cause__, FileExistsError)
    assert "space" not in (caught.value.hint or "")
    assert other.read_bytes() == b"restored"
    other.unlink()
    sink.write([record(b"a")])
    sink.close()
    assert {path.name for path in other.parent.iterdir()} == {".lock", NEXT_OFFSET_FILE, other.name}


def test_a_damaged_file_that_is_needed_to_resume_is_named(tmp_path: Path) -> None:
    write(tmp_path, [record(b"a", cursor=b"1")])
    path = tmp_path / "t" / "0" / file_name(0, 0)
    path.write_bytes(path.read_bytes()[:-9])
    with raising(LandingDamaged, reason="file_unreadable", subject=str(path)):
        landing_sink(tmp_path).open(resume=True)


def test_a_folder_that_looks_like_a_partition_of_a_data_set_is_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "value=5"
    write(folder, [record(b"a", cursor=b"1")])
    sink = landing_sink(folder)
    assert sink.open(resume=True) == ResumeState(b"1", (digest_value(b"a"),))
    sink.close()


def test_the_log_names_each_file(tmp_path: Path) -> None:
    sink = landing_sink(tmp_path)
    sink.open(resume=False)
    sink.write([record(b"a"), record(b"b")], 7)
    sink.close()
    opened, line = log(tmp_path)
    assert (opened["event"], opened["next_offset"]) == ("opened", 0)
    assert (line["first"], line["last"], line["rows"], line["dropped_so_far"]) == (0, 1, 2, 7)
    assert line["size_bytes"] == (tmp_path / "t" / "0" / file_name(0, 1)).stat().st_size
    assert line["opened"] == "1970-01-01T00:00:01.000000+00:00"


def test_the_log_is_rotated_and_no_line_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "LIMIT_BYTES", 2_000)
    write(tmp_path, *([record(b"a")] for _ in range(20)))
    files = sorted((tmp_path / "t").glob("ingest.log*"), reverse=True)
    assert 1 < len(files) <= EARLIER_FILES + 1
    assert all(path.stat().st_size < 2_500 for path in files)
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert [line["first"] for line in lines if "first" in line] == [*range(20)]


def test_offsets_are_never_given_twice_after_a_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [record(b"a")], [record(b"b")])
    for name in (
        file_name(1, 1),
        NEXT_OFFSET_FILE,
    ):  # a folder of an older release, whose newest file is lost
        (tmp_path / "t" / "0" / name).unlink()
    monkeypatch.setattr(rotation, "LIMIT_BYTES", 1)
    assert rotate_by_rename(tmp_path / "t" / "ingest.log")
    with pytest.raises(LandingDamaged):
        landing_sink(tmp_path).open(resume=False)


def test_a_line_cut_by_a_crash_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, [record(b"a")])
    with (tmp_path / "t" / "ingest.log").open("a") as file:
        file.write('{"partition": 0, "first": ')
    write(tmp_path, [record(b"b")])
    assert Landing(tmp_path).offsets("t", 0) == (0, 2)


def test_the_cursor_is_found_again_in_the_files(tmp_path: Path) -> None:
    ours, other = ReceiverOrigin("r1", "http"), ReceiverOrigin("r2", "http")
    write(tmp_path, [record(b"a", cursor=b"1"), record(b"b", cursor=b"5")], origin=ours)
    write(tmp_path, [record(b"c", cursor=b"99")], origin=other)
    sink = landing_sink(tmp_path, origin=ours)
    assert sink.open(resume=True) == ResumeState(b"5", (digest_value(b"a"), digest_value(b"b")))
    sink.close()


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 250, "ä"])
def test_names_that_kafka_would_not_take(name: str, tmp_path: Path) -> None:
    with raising(ConfigurationError, reason="topic_name", subject=name):
        Landing(tmp_path).make_topic(name)


def test_an_unknown_topic_and_a_broken_id(tmp_path: Path) -> None:
    landing = Landing(tmp_path)
    with raising(ConfigurationError, reason="unknown_topic", subject="t"):
        landing.topic_id("t")
    landing.make_topic("t")
    (tmp_path / "t" / "topic-id").write_text("nothing")
    with pytest.raises(LandingDamaged):
        landing.topic_id("t")


def test_the_first_file_imports_nothing_any_more(tmp_path: Path) -> None:
    """It may be the one of the end, which has five seconds."""
    code = f"""
import sys
from pathlib import Path
from branchlake_dagster_tests.receivers.harness import landing_sink, record
sink = landing_sink(Path({str(tmp_path)!r}))
sink.open(resume=True)
before = set(sys.modules)
sink.write([record(b"a")])
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
