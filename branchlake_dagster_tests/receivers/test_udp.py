from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.receivers.records import Buffer, Counts
from branchlake_dagster.receivers.sockets import AllowedPeers, UdpConfig, UdpSource, count_kernel_drops
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


def sender(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    host, port = address.split(":")
    made.connect((host, int(port)))
    return made


def test_datagrams_become_records_as_they_are(tmp_path: Path) -> None:
    async def play() -> None:
        config = UdpConfig(HERE, 0, key_bytes=(0, 2))
        intake = an_intake(lambda b, c: UdpSource(config, b, c), landing_sink(tmp_path))
        async with running(intake):
            with sender(intake.source.address) as out:
                for value in (b"abcd", b"", b"x", bytes(range(256))):
                    out.send(value)
                source = "{}:{}".format(*out.getsockname()).encode()
            await until(lambda: intake.counts.handed_over == 4)
        table = landed(tmp_path)
        assert table["value"].to_pylist() == [b"abcd", b"", b"x", bytes(range(256))]
        assert table["key"].to_pylist() == [b"ab", source, source, b"\x00\x01"]

    asyncio.run(play())


def test_datagrams_from_other_networks_are_ignored_and_counted() -> None:
    async def play() -> None:
        sink = MemorySink()
        config = UdpConfig(HERE, 0, allowed=AllowedPeers.from_cidr(["10.0.0.0/8"]))
        intake = an_intake(lambda b, c: UdpSource(config, b, c), sink)
        async with running(intake):
            with sender(intake.source.address) as out:
                out.send(b"x")
            await until(lambda: intake.counts.events["peers_not_allowed"] == 1)
        assert sink.records == []
        assert adds_up(intake)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("networks", "host", "permitted"),
    [
        ([], "203.0.113.9", True),
        (["10.0.0.0/8"], "10.255.0.1", True),
        (["10.0.0.0/8"], "11.0.0.1", False),
        (["10.0.0.0/8"], "::ffff:10.0.0.1", True),
        (["fe80::/10", "10.1.2.3"], "fe80::1%eth0", True),
        (["fe80::/10", "10.1.2.3"], "10.1.2.4", False),
    ],
)
def test_networks_of_allowed_peers(networks: list[str], host: str, permitted: bool) -> None:
    assert AllowedPeers.from_cidr(networks).permits(host) is permitted


@pytest.mark.parametrize("text", ["10.0.0.0/40", "sensors", "10.0.0.1/8", ""])
def test_what_is_not_a_network_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        AllowedPeers.from_cidr([text])


@pytest.mark.long
def test_a_datagram_that_is_too_large_is_dropped_and_counted() -> None:
    async def play() -> None:
        sink = MemorySink()
        intake = an_intake(lambda b, c: UdpSource(UdpConfig(HERE, 0, most_bytes=10), b, c), sink)
        async with running(intake) as receivers:
            with sender(intake.source.address) as out:
                for value in (bytes(11), bytes(10), bytes(9_000)):
                    out.send(value)
            await until(lambda: sink.records)
            await until(lambda: intake.counts.dropped["too_large"] == 2)
            await until(lambda: receivers.health().state == "degraded")
            assert receivers.health().reasons == ("2 records were dropped in the last minute",)
        assert [one.value for one in sink.records] == [bytes(10)]
        assert adds_up(intake)

    asyncio.run(play())


def test_what_was_sent_before_the_end_is_handed_over() -> None:
    async def play() -> None:
        sink = MemorySink()
        intake = an_intake(lambda b, c: UdpSource(UdpConfig(HERE, 0), b, c), sink)
        async with running(intake):
            with sender(intake.source.address) as out:
                for number in range(1_000):
                    out.send(b"%d" % number)
            # Ended at once: what the kernel holds is taken.
        assert [one.value for one in sink.records] == [b"%d" % number for number in range(1_000)]

    asyncio.run(play())


def test_drops_of_a_slow_sink_are_counted_by_reason() -> None:
    async def play() -> None:
        gate = threading.Event()
        sink = MemorySink(behave=lambda _: gate.wait(60) and None)
        intake = an_intake(lambda b, c: UdpSource(UdpConfig(HERE, 0), b, c), sink, most=10)
        async with running(intake):
            with sender(intake.source.address) as out:
                for number in range(200):
                    out.send(b"%d" % number)
            await until(lambda: intake.counts.received == 200)
            gate.set()
        assert intake.counts.dropped["buffer_full"] >= 200 - 20
        assert len(sink.records) + intake.counts.dropped["buffer_full"] == 200
        assert sink.records[-1].value == b"199", "the oldest go"
        assert adds_up(intake)

    asyncio.run(play())


def test_drops_of_the_kernel_are_counted() -> None:
    async def play() -> None:
        sink = MemorySink()
        config = UdpConfig(HERE, 0, socket_buffer_bytes=4_096)
        intake = an_intake(lambda b, c: UdpSource(config, b, c), sink)
        async with running(intake):
            # Sent while the event loop has no turn: the kernel alone can take it.
            with sender(intake.source.address) as out:
                for _ in range(2_000):
                    out.send(bytes(1_000))
        dropped = intake.counts.dropped["kernel"]
        assert dropped > 0
        assert len(sink.records) + dropped == 2_000
        assert adds_up(intake), "what the kernel dropped was never received"

    asyncio.run(play())


@pytest.mark.long
def test_an_end_comes_although_the_flood_does_not_cease(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        counts = Counts()
        source = UdpSource(UdpConfig(HERE, 0), Buffer(10, 1_000, counts), counts)
        await source.start()
        monkeypatch.setattr(source, "_read", lambda: 1)
        async with asyncio.timeout(30):
            await source.stop()
        assert counts.events["left_unread"] == 1

    asyncio.run(play())


def test_the_kernels_table(tmp_path: Path) -> None:
    table = tmp_path / "udp"
    table.write_text(
        "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n"
        "  12: 0100007F:1F90 00000000:0000 07 00000000:00000000 00:00000000 00000000  0   0 4711 2 000000 42\n"
    )
    assert count_kernel_drops(4711, (str(table),)) == 42
    assert count_kernel_drops(1, (str(table), "/nowhere")) == 0


@pytest.mark.long
def test_an_address_that_is_taken_is_reported() -> None:
    async def play() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
            taken.bind((HERE, 0))
            port = taken.getsockname()[1]
            intake = an_intake(lambda b, c: UdpSource(UdpConfig(HERE, port), b, c), MemorySink())
            with raising(ConfigurationError, reason="address_in_use"):
                async with running(intake):
                    pass

    asyncio.run(play())
