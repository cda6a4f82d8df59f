"""Looks at silent writers that are minutes apart."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from branchlake_dagster.runs.failure_detector import continue_watch, local_clock_id
from branchlake_dagster.runs.heartbeats import Heartbeat

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
BEAT = Heartbeat("run-1", "host-1-abc", "1", counter=1, written_at=NOW, interval_s=10, text="1")
OTHER = replace(BEAT, branch="run-2", text="9")


def looks(*steps: tuple[float, str], beat: Heartbeat = BEAT, clock: str = "c") -> list[bool]:
    """Whether the writer is dead at each look, at times in seconds, with what its file says then."""
    told, found = None, []
    for now, text in steps:
        dead, told = continue_watch(told, [replace(beat, text=text)] if text else [], clock=clock, now=now)
        found.append(bool(dead))
    return found


def test_three_looks_at_one_file_are_death() -> None:
    assert looks((0, "1"), (30, "1"), (60, "1")) == [False, False, True]


def test_whoever_beats_lives() -> None:
    assert looks((0, "1"), (30, "2"), (60, "3"), (90, "3"), (120, "3")) == [False] * 4 + [True]
    assert looks((0, "1"), (30, "1"), (45, ""), (60, "1"), (90, "1")) == [False] * 5


def test_quick_ticks_do_not_hurry_it() -> None:
    assert looks(*[(float(second), "1") for second in range(29)]) == [False] * 29


def test_a_paused_reader_ends_no_writer() -> None:
    """An hour passed for it between two looks, and not for the writer on the same machine."""
    assert looks((0, "1"), (3600, "1"), (3601, "1"), (3602, "2")) == [False] * 4


def test_the_interval_of_the_writer_counts() -> None:
    slow = replace(BEAT, interval_s=100)
    assert looks((0, "1"), (90, "1"), (180, "1"), (270, "1"), (360, "1"), beat=slow) == [False] * 4 + [True]


def test_writers_are_distinguished() -> None:
    _, told = continue_watch(None, [BEAT], clock="c", now=0)
    _, told = continue_watch(told, [BEAT, OTHER], clock="c", now=30)
    dead, told = continue_watch(told, [BEAT, OTHER], clock="c", now=60)
    assert dead == [BEAT]
    assert set(json.loads(told)["seen"]) == {"run-1/host-1-abc", "run-2/host-1-abc"}


def test_another_clock_begins_anew() -> None:
    _, told = continue_watch(None, [BEAT], clock="before the reboot", now=1000)
    _, told = continue_watch(told, [BEAT], clock="before the reboot", now=1030)
    for now, dead in ((0, []), (30, []), (60, [BEAT])):
        found, told = continue_watch(told, [BEAT], clock="after it", now=now)
        assert found == dead
    assert local_clock_id() == local_clock_id() != ""


@pytest.mark.parametrize("told", ["", "{", "[]", "7", '{"clock": "c"}', '{"clock": "c", "seen": {"a": 1}}'])
def test_what_cannot_be_understood_begins_anew(told: str) -> None:
    assert continue_watch(told, [BEAT], clock="c", now=60)[0] == []
