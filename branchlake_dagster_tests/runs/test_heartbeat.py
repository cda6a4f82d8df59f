"""Heartbeats: the files, the writer's thread, and the reader that trusts no foreign clock."""

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer
from pyarrow.fs import FileSelector, LocalFileSystem

from branchlake_dagster.runs.failure_detector import Liveness, judge_by_timestamp, watch_suspects
from branchlake_dagster.runs.heartbeats import (
    Heartbeat,
    HeartbeatStore,
    HeartbeatsUnreadable,
    HeartbeatThread,
    SharedHeartbeats,
    build_heartbeat,
    process_start,
    send_heartbeats,
)

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
BEAT = Heartbeat(
    "run-1",
    "host-1-abc",
    "1",
    counter=1,
    written_at=NOW,
    interval_s=10,
    pid=1,
    host="host",
    started_at=NOW - timedelta(hours=1),
)


@pytest.fixture
def store(tmp_path: Path) -> HeartbeatStore:
    return HeartbeatStore(f"file://{tmp_path}")


def files(tmp_path: Path) -> list[str]:
    root = tmp_path / "_branchlake" / "heartbeats"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    waiting = threading.Event()
    for _ in range(int(timeout_s * 100)):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("it did not happen")


# -- the files -----------------------------------------------------------------------------------------


def test_a_beat_is_one_small_json_file_per_writer(store: HeartbeatStore, tmp_path: Path) -> None:
    store.write(BEAT)
    store.write(replace(BEAT, counter=2))
    store.write(replace(BEAT, writer="host-2-def", kind="publisher"))
    assert files(tmp_path) == ["run-1/host-1-abc.json", "run-1/host-2-def.json"]
    told = json.loads((tmp_path / "_branchlake/heartbeats/run-1/host-1-abc.json").read_text())
    assert told == {
        "branch": "run-1",
        "writer": "host-1-abc",
        "run_id": "1",
        "kind": "run",
        "counter": 2,
        "written_at": "2026-11-21T12:00:00+00:00",
        "interval_s": 10,
        "pid": 1,
        "host": "host",
        "instance": "",
        "started_at": "2026-11-21T11:00:00+00:00",
    }
    found = sorted(store.all(), key=lambda beat: beat.writer)
    assert [replace(beat, text="") for beat in found] == [
        replace(BEAT, counter=2),
        replace(BEAT, writer="host-2-def", kind="publisher"),
    ]
    store.remove("run-1", "host-1-abc")
    store.remove("run-1", "host-1-abc")
    assert files(tmp_path) == ["run-1/host-2-def.json"]
    folder = tmp_path / "_branchlake/heartbeats/run-1"
    (folder / "host-2-def.json.3.tmp").touch()
    store.remove("run-1", "host-2-def")
    assert store.all() == ()
    assert not (tmp_path / "_branchlake/heartbeats/run-1").exists()


def test_a_beat_of_version_0_1_0_has_no_start(store: HeartbeatStore, tmp_path: Path) -> None:
    store.write(BEAT)
    path = tmp_path / "_branchlake/heartbeats/run-1/host-1-abc.json"
    fields = json.loads(path.read_text())
    del fields["started_at"]
    path.write_text(json.dumps(fields))
    (beat,) = store.all()
    assert replace(beat, text="") == replace(BEAT, started_at=None)


@pytest.mark.parametrize("value", ["2026-11-21T11:00:00", "soon", 7])
def test_a_beat_with_an_impossible_start_proves_nothing(
    store: HeartbeatStore, tmp_path: Path, value: object
) -> None:
    store.write(BEAT)
    path = tmp_path / "_branchlake/heartbeats/run-1/host-1-abc.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "started_at": value}))
    (beat,) = store.all()
    assert (beat.kind, beat.written_at, beat.started_at) == ("unknown", None, None)


def test_a_forked_process_starts_anew() -> None:
    """The template of the warm launcher may be days old."""
    before = process_start()
    assert build_heartbeat("run-1", run_id="1", interval_s=10).started_at == before
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, process_start().isoformat().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert datetime.fromisoformat(os.read(reader, 100).decode()) > before


def test_a_folder_made_while_it_is_listed_is_listed_again(
    store: HeartbeatStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyArrow found no folder, asked whether there is one, and there was: the first writer had made it."""
    store.write(BEAT)

    class Racing:
        def __init__(self, files: LocalFileSystem) -> None:
            self.files, self.asked = files, 0

        def get_file_info(self, selector: FileSelector) -> object:
            self.asked += 1
            if self.asked == 1:
                raise FileNotFoundError(f"Cannot list directory '{selector.base_dir}'")
            return self.files.get_file_info(selector)

        def open_input_stream(self, path: str) -> object:
            return self.files.open_input_stream(path)

    monkeypatch.setattr(store, "_files", Racing(LocalFileSystem()))
    assert [beat.counter for beat in store.all()] == [1]


def test_a_branch_name_may_hold_slashes(store: HeartbeatStore, tmp_path: Path) -> None:
    store.write(replace(BEAT, branch="team/run-1"))
    assert files(tmp_path) == ["team%2Frun-1/host-1-abc.json"]
    assert [beat.branch for beat in store.all()] == ["team/run-1"]


def test_a_store_without_a_beat_is_empty(store: HeartbeatStore) -> None:
    assert store.all() == ()


def test_a_damaged_file_is_a_writer_that_proves_nothing(store: HeartbeatStore, tmp_path: Path) -> None:
    store.write(BEAT)
    (tmp_path / "_branchlake/heartbeats/run-1/host-1-abc.json").write_text("{")
    (beat,) = store.all()
    assert (beat.branch, beat.writer, beat.text) == ("run-1", "host-1-abc", "{")
    assert judge_by_timestamp([beat], NOW) == {beat: Liveness.SUSPECT}


GOOD = {
    "run_id": "1",
    "kind": "run",
    "counter": 1,
    "written_at": "2026-11-21T12:00:00+00:00",
    "interval_s": 10,
    "pid": 1,
    "host": "host",
}


def without(name: str) -> bytes:
    return json.dumps({key: value for key, value in GOOD.items() if key != name}).encode()


def holding(name: str, value: str) -> bytes:
    return json.dumps(GOOD | {name: "@"}).replace('"@"', value).encode()


BAD = {
    "empty": b"",
    "cut off": json.dumps(GOOD).encode()[:-9],
    "not UTF-8": b"\xff\xfe\x00{",
    "no object": b"[1, 2]",
    "a number": b"7",
    "deep": b"[" * 50_000,
    "another version": json.dumps({"version": 2, "writer": {"run": "1"}}).encode(),
    "no time": without("written_at"),
    "no interval": without("interval_s"),
    "infinite interval": holding("interval_s", "1e999"),
    "no number": holding("interval_s", "NaN"),
    "interval 0": holding("interval_s", "0"),
    "interval of years": holding("interval_s", "1e9"),
    "negative interval": holding("interval_s", "-10"),
    "infinite counter": holding("counter", "1e999"),
    "long counter": holding("counter", "9" * 5000),
    "infinite pid": holding("pid", "1e999"),
    "naive time": holding("written_at", '"2026-11-21T12:00:00"'),
    "first of all times": holding("written_at", '"0001-01-01T00:00:00+14:00"'),
    "time of another type": holding("written_at", "12"),
    "null": holding("written_at", "null"),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_bad_file_concerns_its_own_branch(store: HeartbeatStore, tmp_path: Path, text: bytes) -> None:
    store.write(BEAT)
    store.write(replace(BEAT, branch="run-2", writer="bad"))
    bad_file = tmp_path / "_branchlake/heartbeats/run-2/bad.json"
    bad_file.write_bytes(text)
    found = {beat.branch: beat for beat in store.all()}
    assert replace(found["run-1"], text="") == BEAT
    bad = found["run-2"]
    assert (bad.writer, bad.kind, bad.max_silence_s) == ("bad", "unknown", 30)
    assert judge_by_timestamp(found.values(), NOW)[bad] is Liveness.SUSPECT
    time = Time()
    told = watch_suspects(store, [bad], monotonic=time.monotonic, sleep=time.sleep)
    assert (told, time.now) == ({bad: Liveness.DEAD}, 1030)
    store.remove("run-2", "bad")
    assert not bad_file.exists()


def test_a_kind_that_is_not_known_counts_as_a_publisher_too(store: HeartbeatStore, tmp_path: Path) -> None:
    store.write(BEAT)
    file = tmp_path / "_branchlake/heartbeats/run-1/host-1-abc.json"
    file.write_bytes(holding("kind", '"streamer"'))
    (beat,) = store.all()
    assert (beat.kind, beat.counter) == ("unknown", 1)


def test_a_folder_in_the_place_of_a_file_is_no_writer(store: HeartbeatStore, tmp_path: Path) -> None:
    store.write(BEAT)
    (tmp_path / "_branchlake/heartbeats/run-2/odd.json").mkdir(parents=True)
    assert [beat.branch for beat in store.all()] == ["run-1"]


def test_who_cannot_be_read_is_not_called_silent(
    store: HeartbeatStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(BEAT)
    store.write(replace(BEAT, branch="run-2"))
    real = store._files

    class Forbidding:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def open_input_stream(self, path: str) -> object:
            if "run-2" in path:
                raise PermissionError(path)
            return real.open_input_stream(path)

    monkeypatch.setattr(store, "_files", Forbidding())
    found = {beat.branch: beat for beat in store.all()}
    assert replace(found["run-1"], text="") == BEAT
    time = Time()
    told = watch_suspects(store, [found["run-2"]], monotonic=time.monotonic, sleep=time.sleep)
    assert told == {found["run-2"]: Liveness.ALIVE}


def test_an_unreadable_folder_is_no_empty_one(tmp_path: Path) -> None:
    (tmp_path / "_branchlake").mkdir()
    (tmp_path / "_branchlake" / "heartbeats").write_text("no folder")
    with pytest.raises(HeartbeatsUnreadable):
        HeartbeatStore(f"file://{tmp_path}").all()


@pytest.mark.long
def test_an_object_store_holds_them_too() -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", **keys)
        # Servers of this process share their buckets.
        client.create_bucket(Bucket="heartbeats")
        store = HeartbeatStore(
            "s3://heartbeats/warehouse",
            {
                "s3.endpoint": f"http://{host}:{port}",
                "s3.force-virtual-addressing": "false",
                "s3.access-key-id": "test",
                "s3.secret-access-key": "test",
                "s3.region": "us-east-1",
            },
        )
        assert store.all() == ()
        store.write(BEAT)
        store.write(replace(BEAT, counter=2))
        listed = [item["Key"] for item in client.list_objects_v2(Bucket="heartbeats")["Contents"]]
        assert [key for key in listed if not key.endswith("/")] == [
            "warehouse/_branchlake/heartbeats/run-1/host-1-abc.json"
        ]
        assert [beat.counter for beat in store.all()] == [2]
        store.remove("run-1", "host-1-abc")
        assert store.all() == ()
        client.close()
    finally:
        server.stop()


# -- the writer ----------------------------------------------------------------------------------------


def test_it_beats_while_the_body_runs_and_leaves_no_file(store: HeartbeatStore, tmp_path: Path) -> None:
    with send_heartbeats(store, "publish-1", run_id="1", interval_s=0.02, kind="publisher"):
        until(lambda: any(beat.counter >= 3 for beat in store.all()))
        (beat,) = store.all()
        assert (beat.branch, beat.run_id, beat.kind, beat.interval_s) == ("publish-1", "1", "publisher", 0.02)
        assert beat.writer.startswith(f"{beat.host}-{beat.pid}-")
    assert files(tmp_path) == []


def test_resources_of_one_process_share_a_heartbeat(store: HeartbeatStore) -> None:
    shared = SharedHeartbeats()
    keys = [shared.acquire(store, build_heartbeat("run-1", run_id="1", interval_s=0.02)) for _ in range(2)]
    until(lambda: len(store.all()) == 1)
    shared.release(keys[0])
    until(lambda: any(beat.counter >= 3 for beat in store.all()))
    shared.release(keys[1])
    assert store.all() == ()


class Slow(HeartbeatStore):
    """The first write hangs until told otherwise; a failing one raises."""

    def __init__(self, warehouse: str) -> None:
        super().__init__(warehouse)
        self.release = threading.Event()
        self.failing = False
        self.attempts = 0

    def write(self, beat: Heartbeat) -> None:
        self.attempts += 1
        if self.failing:
            raise OSError("the store is away")
        if beat.counter == 1:
            self.release.wait(30)
        super().write(beat)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    found = Slow(f"file://{tmp_path}")
    yield found
    found.release.set()


def test_a_write_that_hangs_does_not_stop_the_timer(slow: Slow) -> None:
    """apache/hudi#18903: a slow storage write stopped the heartbeat, and a live writer was aborted."""
    heart = HeartbeatThread(slow, replace(BEAT, interval_s=0.02))
    heart.start()
    until(lambda: any(beat.counter >= 5 for beat in slow.all()))
    slow.release.set()
    heart.stop()
    assert slow.all() == ()


def test_a_failing_heartbeat_is_reported_once_and_repeated(
    slow: Slow, caplog: pytest.LogCaptureFixture
) -> None:
    slow.failing = True
    slow.release.set()
    heart = HeartbeatThread(slow, replace(BEAT, interval_s=0.02))
    with caplog.at_level(logging.WARNING):
        heart.start()
        until(lambda: slow.attempts >= 4)
        told = [record.getMessage() for record in caplog.records]
        assert told == ["Heartbeat of run-1 failed, trying again every 0.02 s: the store is away"]
        slow.failing = False
        until(lambda: len(slow.all()) == 1)
        heart.stop()


def test_heartbeats_go_on_while_no_more_threads_can_be_started(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow.release.set()
    heart = HeartbeatThread(slow, replace(BEAT, interval_s=0.02))
    heart.start()
    until(lambda: slow.attempts >= 2)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", refuse)
        before = slow.attempts
        until(lambda: slow.attempts >= before + 3)
    heart.stop()
    assert slow.all() == ()


# -- the reader ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age_s", "pulse"),
    [
        (0, Liveness.ALIVE),
        (29, Liveness.ALIVE),
        (31, Liveness.SUSPECT),
        (-29, Liveness.ALIVE),
        (-3600, Liveness.SUSPECT),  # the writer's clock is an hour ahead: its file would look fresh for long
    ],
)
def test_a_timestamp_makes_a_suspect_and_no_more(age_s: float, pulse: Liveness) -> None:
    assert judge_by_timestamp([BEAT], NOW + timedelta(seconds=age_s)) == {BEAT: pulse}


class Time:
    """A monotonic clock that moves when somebody sleeps, and what happens meanwhile."""

    def __init__(self, **at: Callable[[], None]) -> None:
        self.now = 1000.0
        self.plan = {1000.0 + float(when.removeprefix("s")): what for when, what in at.items()}

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in [when for when in self.plan if when <= self.now]:
            self.plan.pop(when)()


def read(store: HeartbeatStore) -> dict[str, Heartbeat]:
    return {beat.writer: beat for beat in store.all()}


def test_suspects_are_watched_together_and_only_silence_is_death(store: HeartbeatStore) -> None:
    writers = ("dead", "alive", "ended", "paused")
    for writer in writers:
        store.write(replace(BEAT, writer=writer))
    found = read(store)
    time = Time(
        s12=lambda: store.write(replace(BEAT, writer="alive", counter=2)),
        s14=lambda: store.remove("run-1", "ended"),
        s29=lambda: store.write(replace(BEAT, writer="paused", counter=2)),
    )
    told = watch_suspects(store, found.values(), monotonic=time.monotonic, sleep=time.sleep)
    assert {beat.writer: pulse for beat, pulse in told.items()} == {
        "dead": Liveness.DEAD,
        "alive": Liveness.ALIVE,
        "paused": Liveness.ALIVE,
    }
    assert time.now - 1000 == 30


def test_nobody_is_watched_longer_than_needed(store: HeartbeatStore) -> None:
    store.write(BEAT)
    time = Time(s5=lambda: store.write(replace(BEAT, counter=2)))
    told = watch_suspects(store, store.all(), monotonic=time.monotonic, sleep=time.sleep)
    assert list(told.values()) == [Liveness.ALIVE]
    assert time.now - 1000 == 5
    assert watch_suspects(store, [], monotonic=time.monotonic, sleep=time.sleep) == {}


def test_the_interval_of_the_writer_counts(store: HeartbeatStore) -> None:
    store.write(replace(BEAT, writer="quick", interval_s=1))
    store.write(replace(BEAT, writer="slow", interval_s=60))
    time = Time(s170=lambda: store.write(replace(BEAT, writer="slow", interval_s=60, counter=2)))
    told = watch_suspects(store, store.all(), monotonic=time.monotonic, sleep=time.sleep)
    assert {beat.writer: pulse for beat, pulse in told.items()} == {
        "quick": Liveness.DEAD,
        "slow": Liveness.ALIVE,
    }


def test_a_pause_of_the_reader_itself_ends_no_writer(store: HeartbeatStore) -> None:
    """Both on one machine that was suspended: the clock jumped, and nobody had a chance to beat."""
    store.write(BEAT)
    time = Time(s10=lambda: store.write(replace(BEAT, counter=2)))
    real = time.sleep

    def sleep(seconds: float) -> None:
        real(seconds)
        if time.now == 1005:
            time.plan = {when + 3600: what for when, what in time.plan.items()}
            time.now += 3600

    told = watch_suspects(store, store.all(), monotonic=time.monotonic, sleep=sleep)
    assert list(told.values()) == [Liveness.ALIVE]


def test_a_store_that_fails_under_watch_says_nothing_about_anybody(
    store: HeartbeatStore, tmp_path: Path
) -> None:
    store.write(BEAT)
    found = store.all()

    def fail() -> None:
        (tmp_path / "_branchlake/heartbeats").rename(tmp_path / "away")
        (tmp_path / "_branchlake/heartbeats").write_text("no folder")

    time = Time(s10=fail)
    with pytest.raises(HeartbeatsUnreadable):
        watch_suspects(store, found, monotonic=time.monotonic, sleep=time.sleep)
