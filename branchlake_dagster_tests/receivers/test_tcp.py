from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.receivers.service import Intake
from branchlake_dagster.receivers.sockets import AllowedPeers, TcpConfig, TcpSource
from branchlake_dagster_tests.receivers.harness import (
    MemorySink,
    adds_up,
    an_intake,
    landed,
    landing_sink,
    running,
    until,
)
from branchlake_dagster_tests.suite.raised import raising

HERE = "127.0.0.1"


def framed(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


async def connect(intake: Intake) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = intake.source.address.split(":")
    return await asyncio.open_connection(host, int(port))


def listening(sink: MemorySink, *, most: int = 100_000, **config: object) -> Intake:
    settings = TcpConfig(HERE, 0, **config)
    return an_intake(lambda b, c: TcpSource(settings, b, c), sink, most=most)


def values(sink: MemorySink) -> list[bytes]:
    return [one.value for one in sink.records]


@pytest.mark.long
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=12), st.lists(st.integers(1, 60), max_size=10))
def test_frames_are_found_however_the_stream_is_cut(frames: list[bytes], cuts: list[int]) -> None:
    async def play() -> None:
        sink = MemorySink()
        intake = listening(sink)
        async with running(intake):
            _, out = await connect(intake)
            stream = framed(*frames)
            for cut in cuts:
                out.write(stream[:cut])
                stream = stream[cut:]
                await out.drain()
                await asyncio.sleep(0)
            out.write(stream)
            await out.drain()
            out.close()
            await out.wait_closed()
            await until(lambda: intake.counts.events["closed_by_sender"] == 1)
        assert values(sink) == frames

    asyncio.run(play())


def test_records_of_a_connection(tmp_path: Path) -> None:
    async def play() -> None:
        config = TcpConfig(HERE, 0, key_bytes=(1, 3))
        intake = an_intake(lambda b, c: TcpSource(config, b, c), landing_sink(tmp_path))
        async with running(intake):
            _, out = await connect(intake)
            out.write(framed(b"abcd", b"x"))
            source = "{}:{}".format(*out.get_extra_info("sockname")).encode()
            await until(lambda: intake.counts.handed_over == 2)
            out.close()
        table = landed(tmp_path)
        assert table["value"].to_pylist() == [b"abcd", b"x"]
        assert table["key"].to_pylist() == [b"bc", source]

    asyncio.run(play())


@pytest.mark.parametrize(
    "prefix", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", struct.pack("<I", 65_537), b"GET / HTTP/1.1\r\n"]
)
def test_garbage_closes_its_connection_alone(prefix: bytes) -> None:
    async def play() -> None:
        sink = MemorySink()
        intake = listening(sink)
        async with running(intake):
            _, good = await connect(intake)
            reader, bad = await connect(intake)
            good.write(framed(b"before"))
            bad.write(framed(b"well") + prefix)
            with contextlib.suppress(ConnectionResetError):  # as it left bytes unread
                assert await reader.read() == b"", "closed by the receiver"
            bad.close()
            good.write(framed(b"after", bytes(65_536)))
            await until(lambda: len(sink.records) == 4)
            good.close()
        assert sorted(values(sink)) == sorted([b"well", b"before", b"after", bytes(65_536)])
        assert intake.counts.events["closed_garbage"] == 1
        assert intake.counts.events["incomplete_frames"] == 1

    asyncio.run(play())


@pytest.mark.parametrize(("sent", "reason"), [(b"", "idle"), (struct.pack("<I", 9) + b"half", "slow")])
def test_half_open_and_slow_connections_are_closed(sent: bytes, reason: str) -> None:
    async def play() -> None:
        # Far from each other, so that a machine that stands still in between does not change the reason.
        times = {"idle_s": 0.2} if reason == "idle" else {"idle_s": 60.0, "frame_s": 0.1}
        intake = listening(MemorySink(), **times)
        async with running(intake):
            reader, out = await connect(intake)
            out.write(sent)
            assert await reader.read() == b""
            out.close()
            await until(lambda: intake.counts.events[f"closed_{reason}"] == 1)

    asyncio.run(play())


def test_a_dripping_frame_is_slow_although_bytes_come() -> None:
    async def play() -> None:
        intake = listening(MemorySink(), idle_s=60, frame_s=0.3)
        async with running(intake):
            reader, out = await connect(intake)
            out.write(struct.pack("<I", 60_000))
            ended = asyncio.create_task(reader.read())
            while not ended.done():
                out.write(b".")
                await asyncio.sleep(0.05)
            out.close()
            await asyncio.gather(ended, return_exceptions=True)
        assert intake.counts.events["closed_slow"] == 1

    asyncio.run(play())


def test_one_sender_cannot_take_all_connections_and_other_networks_none() -> None:
    async def play() -> None:
        sink = MemorySink()
        intake = listening(sink, most_connections_per_peer=1)
        async with running(intake):
            _, first = await connect(intake)
            await until(lambda: intake.counts.events["connections"] == 1)
            reader, second = await connect(intake)
            assert await reader.read() == b""
            first.close()
            await until(lambda: intake.counts.events["closed_by_sender"] == 1)
            _, third = await connect(intake)
            third.write(framed(b"x"))
            await until(lambda: values(sink) == [b"x"])
            second.close()
            third.close()
        assert intake.counts.events["refused_connections"] == 1
        elsewhere = listening(MemorySink(), allowed=AllowedPeers.from_cidr(["10.0.0.0/8"]))
        async with running(elsewhere):
            reader, out = await connect(elsewhere)
            assert await reader.read() == b""
            out.close()
        assert elsewhere.counts.events["peers_not_allowed"] == 1

    asyncio.run(play())


def test_more_connections_than_allowed_are_refused() -> None:
    async def play() -> None:
        sink = MemorySink()
        intake = listening(sink, most_connections=2)
        async with running(intake):
            first, second = await connect(intake), await connect(intake)
            await until(lambda: intake.counts.events["connections"] == 2)
            reader, third = await connect(intake)
            assert await reader.read() == b""
            third.close()
            for _, out in (first, second):
                out.write(framed(b"x"))
            await until(lambda: len(sink.records) == 2)
            first[1].close()
            await until(lambda: intake.counts.events["closed_by_sender"] == 1)
            _, fourth = await connect(intake)
            fourth.write(framed(b"y"))
            await until(lambda: len(sink.records) == 3)
            for _, out in (second, (None, fourth)):
                out.close()
        assert intake.counts.events["refused_connections"] == 1

    asyncio.run(play())


def test_a_full_buffer_stops_the_reading_and_loses_nothing() -> None:
    async def play() -> None:
        gate = threading.Event()
        sink = MemorySink(behave=lambda _: gate.wait(60) and None)
        intake = listening(sink, most=10)
        async with running(intake):
            _, out = await connect(intake)
            frames = [b"%06d" % number + bytes(10_000) for number in range(3_000)]
            for frame in frames:
                out.write(framed(frame))
            sending = asyncio.create_task(out.drain())
            await until(lambda: intake.buffer.is_full)
            await asyncio.sleep(0.2)
            assert not sending.done(), "30 MB do not fit between them: the sender waits"
            gate.set()
            await sending
            await until(lambda: intake.counts.handed_over == 3_000)
            out.close()
        assert values(sink) == frames
        assert intake.counts.total_dropped() == 0

    asyncio.run(play())


def test_what_was_written_before_the_end_is_handed_over() -> None:
    async def play() -> None:
        sink = MemorySink()
        intake = listening(sink)
        async with running(intake):
            _, out = await connect(intake)
            await until(lambda: intake.counts.events["connections"] == 1)
            out.write(framed(*[b"%d" % number for number in range(5_000)]) + struct.pack("<I", 7) + b"abc")
            await out.drain()
        out.close()
        assert values(sink) == [b"%d" % number for number in range(5_000)]
        assert intake.counts.events["incomplete_frames"] == 1
        assert intake.counts.events["incomplete_bytes"] == 7
        assert adds_up(intake)

    asyncio.run(play())


def test_records_that_arrive_while_the_broker_is_stopped_are_handed_over() -> None:
    async def play() -> None:
        sink = MemorySink()
        intake = listening(sink)

        def stand_still() -> None:
            # The frame and the end of the receiver's patience are found in one turn of its loop.
            time.sleep(0.3)
            sender.sendall(framed(b"two"))

        async with running(intake):
            host, port = intake.source.address.split(":")
            with socket.create_connection((host, int(port))) as sender:
                sender.sendall(framed(b"one"))
                await until(lambda: sink.records)
                stopping = asyncio.ensure_future(intake.source.stop())
                asyncio.get_running_loop().call_soon(stand_still)
                await stopping
        assert values(sink) == [b"one", b"two"]
        assert adds_up(intake)

    asyncio.run(play())


@pytest.mark.long
def test_an_address_that_is_taken_is_reported() -> None:
    async def play() -> None:
        first = listening(MemorySink())
        async with running(first):
            port = int(first.source.address.split(":")[1])
            second = an_intake(lambda b, c: TcpSource(TcpConfig(HERE, port), b, c), MemorySink())
            with raising(ConfigurationError, reason="address_in_use"):
                async with running(second):
                    pass

    asyncio.run(play())


@pytest.mark.long
def test_what_came_while_the_process_stood_still_is_read() -> None:
    """Live for ten minutes on a machine without memory: the timer was looked at before what had come."""

    async def begin(
        opened: contextlib.AsyncExitStack, begun: bytes
    ) -> tuple[MemorySink, Intake, asyncio.StreamWriter]:
        sink = MemorySink()
        # Longer than a machine that is taken lets a process wait for its turn.
        intake = listening(sink, idle_s=1.5, frame_s=1.5)
        await opened.enter_async_context(running(intake))
        _, out = await connect(intake)
        await until(lambda: intake.counts.events["connections"] == 1)
        out.write(stream[: len(begun)])
        await out.drain()
        return sink, intake, out

    async def end(sink: MemorySink, intake: Intake, out: asyncio.StreamWriter) -> None:
        await until(lambda: len(sink.records) == 2 or intake.counts.events.total() > 1)
        assert values(sink) == [b"late", b"r"]
        await until(lambda: intake.counts.events["closed_idle"] == 1)
        out.close()

    async def play(*beginnings: bytes) -> None:
        async with contextlib.AsyncExitStack() as opened:
            played = [await begin(opened, begun) for begun in beginnings]
            await asyncio.sleep(0.05)

            def send() -> None:
                time.sleep(0.1)
                # Past the event loop, which stands still.
                for begun, (_, _, out) in zip(beginnings, played, strict=True):
                    os.write(out.get_extra_info("socket").fileno(), stream[len(begun) :])

            sender = threading.Thread(target=send)
            sender.start()
            time.sleep(2.0)
            sender.join()
            for one in played:
                await end(*one)

    stream = framed(b"late", b"r")
    asyncio.run(play(b"", b"begun"))
