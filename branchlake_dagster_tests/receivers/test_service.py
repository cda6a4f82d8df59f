from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Sequence

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.receivers.kafka_sink import BrokerUnreachable
from branchlake_dagster.receivers.metrics import serve_metrics
from branchlake_dagster.receivers.records import NotConfirmed, NotHandedOver, Record, ResumeState
from branchlake_dagster.receivers.service import Health, Intake, Receivers, stop_on_signals
from branchlake_dagster.receivers.sockets import UdpConfig, UdpSource
from branchlake_dagster_tests.receivers.harness import MemorySink, adds_up, an_intake, running, until
from branchlake_dagster_tests.receivers.test_udp import sender
from branchlake_dagster_tests.suite.raised import raising


def listening(sink: MemorySink, **bounds: int) -> Intake:
    return an_intake(lambda b, c: UdpSource(UdpConfig("127.0.0.1", 0), b, c), sink, **bounds)


def send(intake: Intake, *values: bytes) -> None:
    with sender(intake.source.address) as out:
        for value in values:
            out.send(value)


@pytest.mark.long
def test_a_sink_that_fails_is_asked_again_and_nothing_is_lost_or_doubled() -> None:
    async def play() -> None:
        failures = iter(range(3))

        def behave(records: Sequence[Record]) -> None:
            if next(failures, None) is not None:
                sink.records += records[:1]
                raise NotHandedOver("The disk is full.", records[1:])

        sink = MemorySink(behave=behave)
        intake = listening(sink)
        async with running(intake) as receivers:
            send(intake, *[b"%d" % number for number in range(10)])
            await until(lambda: receivers.health().state == "degraded")
            assert receivers.health().reasons == ("t: The disk is full.",)
            await until(lambda: intake.counts.handed_over == 10)
            await until(lambda: receivers.health().state == "ready")
        assert [one.value for one in sink.records] == [b"%d" % number for number in range(10)]
        assert intake.counts.events["sink_failures"] == 3
        assert adds_up(intake)
        assert sink.closed

    asyncio.run(play())


def test_an_end_with_a_broken_sink_says_what_is_not_handed_over() -> None:
    async def play() -> None:
        def behave(records: Sequence[Record]) -> None:
            raise NotHandedOver("The disk is full.", records)

        sink = MemorySink(behave=behave)
        intake = listening(sink)
        async with running(intake, drain_s=0.6) as receivers:
            send(intake, *[b"%d" % number for number in range(10)])
            await until(lambda: intake.counts.received == 10)
        assert sink.stopped
        assert sink.closed
        assert intake.counts.not_handed_over == 10
        assert adds_up(intake)
        assert receivers.summary()[0]["not_handed_over"] == 10
        assert receivers.finished

    asyncio.run(play())


@pytest.mark.long
def test_an_end_with_a_sink_that_hangs_says_that_nobody_knows() -> None:
    async def play() -> None:
        gate = threading.Event()
        sink = MemorySink(behave=lambda _: gate.wait(60) and None)
        intake = listening(sink)
        async with running(intake, drain_s=0.6) as receivers:
            send(intake, b"a")
            await until(
                lambda: intake.counts.received == 1 and intake.waiting == 1 and not len(intake.buffer)
            )
            send(intake, b"b", b"c")
            await until(lambda: intake.counts.received == 3)
        assert (intake.counts.not_confirmed, intake.counts.not_handed_over) == (1, 2)
        assert adds_up(intake)
        assert not receivers.finished
        assert not sink.closed, "its thread still uses it"
        gate.set()

    asyncio.run(play())


def test_what_the_sink_does_not_know_of_is_counted_so() -> None:
    async def play() -> None:
        def behave(records: Sequence[Record]) -> None:
            sink.records += records[:1]
            raise NotConfirmed("No report.", records[1:])

        sink = MemorySink(behave=behave)
        intake = listening(sink)
        async with running(intake):
            send(intake, b"a", b"b", b"c")
            await until(lambda: intake.counts.received == 3 and not intake.waiting)
        assert intake.counts.handed_over + intake.counts.not_confirmed == 3
        assert intake.counts.handed_over == len(sink.records)
        assert adds_up(intake)

    asyncio.run(play())


class LateSink(MemorySink):
    """Cannot be opened the first times."""

    failures = 2

    def open(self, *, resume: bool) -> ResumeState:
        if self.failures:
            self.failures -= 1
            raise BrokerUnreachable("No broker answers.")
        return ResumeState()


def test_a_sink_that_is_away_at_the_start_is_waited_for() -> None:
    async def play() -> None:
        sink = LateSink()
        intake = listening(sink)
        receivers = Receivers([intake])
        assert receivers.health() == Health("starting")
        stop = asyncio.Event()
        task = asyncio.create_task(receivers.run(stop))
        await until(lambda: receivers.health().reasons == ("t: No broker answers.",))
        assert receivers.health().state == "starting"
        await until(lambda: receivers.health().state == "ready")
        stop.set()
        await task
        assert receivers.health().state == "draining"

    asyncio.run(play())


def test_an_end_while_a_sink_is_away() -> None:
    async def play() -> None:
        sink = LateSink()
        sink.failures = 1_000_000
        intake = listening(sink)
        receivers, stop = Receivers([intake], drain_s=0.5), asyncio.Event()
        task = asyncio.create_task(receivers.run(stop))
        await until(lambda: receivers.health().reasons)
        stop.set()
        await task

    asyncio.run(play())


@pytest.mark.long
def test_one_that_cannot_start_ends_the_others_with_nothing_lost() -> None:
    async def play() -> None:
        sink = MemorySink()
        good = listening(sink)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
            taken.bind(("127.0.0.1", 0))
            config = UdpConfig(*taken.getsockname())
            bad = an_intake(lambda b, c: UdpSource(config, b, c), MemorySink())
            receivers = Receivers([good, bad])
            with raising(ConfigurationError, reason="address_in_use"):
                await receivers.run(asyncio.Event())
        assert sink.closed
        assert receivers.finished

    asyncio.run(play())


@pytest.mark.long
def test_health_and_metrics() -> None:
    async def play() -> None:
        sink = MemorySink()
        intake = listening(sink)
        async with (
            running(intake) as receivers,
            serve_metrics(receivers, "127.0.0.1", 0) as url,
            aiohttp.ClientSession() as session,
        ):
            send(intake, b"abc", b"defgh", bytes(1_501))
            await until(lambda: intake.counts.handed_over == 2 and intake.counts.total_dropped() == 1)
            async with session.get(f"{url}/metrics") as answer:
                assert answer.headers["Content-Type"].startswith("text/plain")
                text = await answer.text()
            await until(lambda: receivers.health().state == "degraded")
            async with session.get(f"{url}/health") as answer:
                assert answer.status == 200
                assert await answer.json() == {
                    "state": "degraded",
                    "reasons": ["1 records were dropped in the last minute"],
                }
            receivers._draining = True
            async with session.get(f"{url}/health") as answer:
                assert answer.status == 503
        samples = {
            (
                sample.name,
                *(v for k, v in sorted(sample.labels.items()) if k in ("reason", "le")),
            ): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        prefix = "branchlake_receiver"
        assert samples[f"{prefix}_records_received_total",] == 2
        assert samples[f"{prefix}_bytes_received_total",] == 8
        assert samples[f"{prefix}_records_handed_over_total",] == 2
        assert samples[f"{prefix}_records_dropped_total", "too_large"] == 1
        assert samples[f"{prefix}_records_waiting",] == 0
        assert samples[f"{prefix}_delay_seconds_bucket", "+Inf"] == 2
        assert samples[f"{prefix}_delay_seconds_count",] == 2

    asyncio.run(play())


def test_a_monitoring_address_that_is_taken_is_reported() -> None:
    async def play() -> None:
        receivers = Receivers([])
        async with serve_metrics(receivers, "127.0.0.1", 0) as url:
            port = int(url.rpartition(":")[2])
            with raising(ConfigurationError, "/health", "/metrics", subject=f"127.0.0.1:{port}"):
                async with serve_metrics(receivers, "127.0.0.1", port):
                    pass

    asyncio.run(play())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_of_an_orderly_end_let_receivers_hand_over_what_they_have(number: signal.Signals) -> None:
    # Not `getsignal`: the tests may run under `nohup`, which ignores SIGHUP.
    before = {
        one: signal.signal(one, signal.SIG_DFL) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }

    async def play() -> None:
        stop = asyncio.Event()
        stop_on_signals(stop)
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 60)

    try:
        asyncio.run(play())
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_receivers_under_nohup_outlive_their_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def play() -> None:
        stop = asyncio.Event()
        stop_on_signals(stop)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert not stop.is_set()

    try:
        asyncio.run(play())
    finally:
        signal.signal(signal.SIGHUP, before)
