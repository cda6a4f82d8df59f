from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchlake_dagster.receivers.records import Buffer, Counts, Roll
from branchlake_dagster_tests.receivers.harness import QUICK, record, until


def values(found: list) -> list[bytes]:
    return [one.value for one in found]


@given(st.lists(st.integers(0, 30), max_size=20), st.sampled_from(["oldest", "newest"]), st.integers(1, 40))
def test_what_does_not_fit_is_dropped_and_counted(sizes: list[int], drop: str, most: int) -> None:
    async def play() -> None:
        counts = Counts()
        buffer = Buffer(most, 1 << 30, counts)
        sent = []
        for size in sizes:
            batch = [record(b"%d" % (len(sent) + i)) for i in range(size)]
            sent += values(batch)
            buffer.offer(batch, drop)
            assert len(buffer) <= most
        buffer.close()
        left = values(await buffer.take(Roll(10_000, 1 << 30, 1)))
        assert left == (sent[-most:] if drop == "oldest" else sent[:most])
        assert counts.received == len(sent) == len(left) + counts.dropped["buffer_full"]
        assert await buffer.take(QUICK) == []

    asyncio.run(play())


def test_bytes_bound_it_too() -> None:
    async def play() -> None:
        counts = Counts()
        buffer = Buffer(1_000, 3_000, counts)
        buffer.offer([record(bytes(1_000)) for _ in range(10)], "oldest")
        assert len(buffer) == 2
        assert counts.dropped["buffer_full"] == 8

    asyncio.run(play())


def test_putting_waits_for_room_and_keeps_the_order() -> None:
    async def play() -> None:
        counts = Counts()
        buffer = Buffer(3, 1 << 30, counts)
        putting = asyncio.create_task(buffer.put([record(b"%d" % i) for i in range(10)]))
        await until(lambda: buffer.is_full)
        await asyncio.sleep(0)
        assert not putting.done()
        taken = []
        while len(taken) < 10:
            taken += values(await buffer.take(QUICK))
        await putting
        assert taken == [b"%d" % i for i in range(10)]
        assert not counts.dropped

    asyncio.run(play())


def test_what_waited_for_room_at_the_end_is_counted() -> None:
    async def play() -> None:
        counts = Counts()
        buffer = Buffer(3, 1 << 30, counts)
        putting = asyncio.create_task(buffer.put([record(b"x")] * 10))
        await until(lambda: buffer.is_full)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert counts.received == 10 == len(buffer) + counts.dropped["ended"]

    asyncio.run(play())


def test_a_full_roll_is_taken_before_its_age() -> None:
    async def play() -> None:
        buffer = Buffer(100, 1 << 30, Counts())
        roll = Roll(records=4, size_bytes=1 << 30, age_s=3_600)
        taking = asyncio.create_task(buffer.take(roll))
        for number in range(6):
            await asyncio.sleep(0)
            buffer.offer([record(b"%d" % number)], "oldest")
        assert values(await taking) == [b"0", b"1", b"2", b"3"]
        later = asyncio.create_task(buffer.take(roll))
        await asyncio.sleep(0)
        buffer.close()
        assert values(await later) == [b"4", b"5"]

    asyncio.run(play())


def test_a_roll_of_full_size_is_taken_before_its_age() -> None:
    async def play() -> None:
        buffer = Buffer(100, 1 << 30, Counts())
        taking = asyncio.create_task(buffer.take(Roll(100, 2_000, 3_600)))
        for _ in range(3):
            await asyncio.sleep(0)
            buffer.offer([record(bytes(900))], "oldest")
        assert len(await asyncio.wait_for(taking, 30)) == 2  # 900 bytes, and 200 for the objects

    asyncio.run(play())


def test_what_is_old_enough_is_taken_alone() -> None:
    async def play() -> None:
        buffer = Buffer(100, 1 << 30, Counts())
        taking = asyncio.create_task(buffer.take(Roll(100, 1 << 30, 0.01)))
        await asyncio.sleep(0)
        buffer.offer([record(b"0")], "oldest")
        assert values(await taking) == [b"0"]

    asyncio.run(play())
