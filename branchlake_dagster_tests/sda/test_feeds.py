"""The simulated feed: what it says it sent is what it sent, and the same seed sends the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from branchlake_dagster.receivers.http_polling import HttpConfig, HttpSource
from branchlake_dagster.receivers.landing import Landing
from branchlake_dagster.receivers.landing_sink import LandingSink
from branchlake_dagster.receivers.records import ReceiverOrigin, Record
from branchlake_dagster.receivers.sockets import TcpConfig, TcpSource, UdpConfig, UdpSource
from branchlake_dagster.sda.commands.simulate import serve_pages
from branchlake_dagster.sda.feeds.direct import Message, run_into
from branchlake_dagster.sda.feeds.feed import Feed
from branchlake_dagster.sda.feeds.network import Datagrams, Frames, Pages, run_over
from branchlake_dagster.sda.feeds.plan import Batch, Burst, Plan
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH, simulated_elements
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.sensors.network import ALLOWED_LATENESS_S, RADARS, TELESCOPES
from branchlake_dagster.sda.wire.links import decode_links
from branchlake_dagster.sda.wire.optical import decode_optical
from branchlake_dagster.sda.wire.radar import KEY_BYTES, decode_radar
from branchlake_dagster_tests.receivers.harness import MemorySink, an_intake, running, until

DAY_NS = 86_400 * 1_000_000_000
START_NS = int(REFERENCE_EPOCH.timestamp()) * 1_000_000_000
RATES = {"radar": 400.0, "optical": 60.0, "isl": 50.0}
DECODE = {"radar": decode_radar, "optical": decode_optical, "isl": decode_links}


@cache
def elements() -> Elements:
    made = simulated_elements(seed=1, objects=1_000, epoch=REFERENCE_EPOCH)
    return Elements.from_arrow(made.to_arrow().sort_by("sat_no"))


def a_feed(**plan: Any) -> Feed:
    return Feed(elements(), Plan(**{"rates": RATES, "seconds": 70.0, **plan}), START_NS)


def whole(feed: Feed) -> dict[str, Batch]:
    found = [batches for _, batches in feed.windows()]
    return {kind: Batch.concatenate([one[kind] for one in found]) for kind in feed.plan.rates}


def rows(batch: Batch, kind: str) -> tuple[list[dict[str, Any]], Counter[str]]:
    decoded, reasons = DECODE[kind](batch.values)
    told = reasons.to_pylist()
    good = [row for row, reason in zip(decoded.to_pylist(), told, strict=True) if reason is None]
    return good, Counter(reason for reason in told if reason is not None)


@pytest.mark.parametrize("kind", RATES)
def test_the_account_is_exact(kind: str) -> None:
    feed = a_feed(rates={kind: RATES[kind]}, duplicates=0.05, stragglers=0.03, corrupted=0.1)
    sent, tally = whole(feed)[kind], feed.tallies[kind]
    good, damaged = rows(sent, kind)
    assert tally.measured == RATES[kind] * 70
    assert tally.sent_count == len(sent)
    assert damaged == tally.corrupted
    assert len(damaged) >= 4
    assert len(good) == tally.sent_count - sum(tally.corrupted.values())
    distinct = {tuple(row.values()) for row in good}
    assert len(good) - len(distinct) == tally.duplicates > 0
    late = sent.send_ns - sent.measured_ns > ALLOWED_LATENESS_S[kind] * 1e9
    assert tally.stragglers <= np.count_nonzero(late) <= 2 * tally.stragglers + tally.duplicates
    assert np.all(np.diff(sent.send_ns) >= 0)
    assert np.all(sent.send_ns >= sent.measured_ns)


def test_the_same_seed_sends_the_same_and_another_one_does_not() -> None:
    once, again = whole(a_feed()), whole(a_feed())
    other = whole(a_feed(seed=7))
    for kind in RATES:
        assert once[kind].values.equals(again[kind].values)
        assert np.array_equal(once[kind].send_ns, again[kind].send_ns)
        assert not once[kind].values.equals(other[kind].values)


def test_sensors_are_those_of_the_network_and_see_what_they_measure() -> None:
    sent = whole(a_feed(corrupted=0.0))
    radars, _ = rows(sent["radar"], "radar")
    optical, _ = rows(sent["optical"], "optical")
    assert {row["orig_sensor_id"] for row in radars} <= {site.sensor_id for site in RADARS}
    assert {row["orig_sensor_id"] for row in optical} <= {site.sensor_id for site in TELESCOPES}
    assert len({row["orig_sensor_id"] for row in radars}) == len(RADARS)
    masks = {site.sensor_id: site for site in RADARS}
    for row in radars:
        site = masks[row["orig_sensor_id"]]
        # A step of half a minute lies between the look-up and the measurement.
        assert row["el_rad"] > np.radians(site.mask_deg - 8)
        assert row["range_m"] < (site.max_range_km + 300) * 1e3
    assert {row["sat_no"] for row in (*radars, *optical)} == {None}, "a sensor does not know the object"


def test_a_burst_is_ten_times_as_much() -> None:
    feed = a_feed(rates={"radar": 20.0}, seconds=60.0, burst=Burst(every_s=1_000, first_s=10, length_s=20))
    (sent,) = whole(feed).values()
    at = (sent.measured_ns - START_NS) / 1e9
    counts = np.bincount(at.astype(int), minlength=60)
    assert counts[12:28].min() >= 200
    assert counts[35:58].max() <= 22
    assert feed.tallies["radar"].measured == 40 * 20 + 20 * 200


def test_low_rates_come_true() -> None:
    feed = a_feed(rates={"radar": 0.3}, seconds=100.0)
    whole(feed)
    assert feed.tallies["radar"].measured == pytest.approx(30, abs=1)


def writing(sink: LandingSink) -> Callable[[list[Message]], None]:
    return lambda messages: sink.write([Record(*one) for one in messages])


@pytest.mark.long
def test_a_feed_into_files(tmp_path: Path) -> None:
    feed = a_feed(corrupted=0.05)
    sinks = {kind: LandingSink(tmp_path, kind, 0, ReceiverOrigin(kind, "direct")) for kind in RATES}
    for sink in sinks.values():
        sink.open(resume=False)
    handed = run_into(feed, {kind: writing(sink) for kind, sink in sinks.items()}, paced=False)
    assert handed == sum(tally.sent_count for tally in feed.tallies.values())
    for kind, sink in sinks.items():
        sink.close()
        files = Landing(tmp_path).files(kind, 0)
        table = pa.concat_tables([pq.read_table(file.path) for file in files])
        _, reasons = DECODE[kind](table["value"])
        assert Counter(one for one in reasons.to_pylist() if one) == feed.tallies[kind].corrupted
        assert table.num_rows == feed.tallies[kind].sent_count
    assert pq.read_table(Landing(tmp_path).files("radar", 0)[0].path)["key"][0].as_py() is not None


def test_a_paced_feed_waits_for_the_time_of_sending(tmp_path: Path) -> None:
    now = START_NS
    slept = []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += round(seconds * 1e9)

    sink = LandingSink(tmp_path, "radar", 0, ReceiverOrigin("radar", "direct"))
    sink.open(resume=False)
    run_into(
        a_feed(rates={"radar": 10.0}, seconds=20.0),
        {"radar": writing(sink)},
        paced=True,
        now_ns=lambda: now,
        sleep=sleep,
    )
    sink.close()
    assert sum(slept) == pytest.approx(20, abs=1.5)


def soon(**plan: Any) -> Feed:
    import time

    return Feed(elements(), Plan(**{"seconds": 1.0, "stragglers": 0.0, **plan}), time.time_ns())


@pytest.mark.long
def test_over_udp_everything_arrives_as_it_was_sent() -> None:
    async def play() -> None:
        sink, feed = MemorySink(), soon(rates={"radar": 2_000.0}, corrupted=0.05, duplicates=0.05)
        intake = an_intake(lambda b, c: UdpSource(UdpConfig("127.0.0.1", 0, key_bytes=KEY_BYTES), b, c), sink)
        async with running(intake):
            host, port = intake.source.address.split(":")
            outlet = Datagrams(host, int(port))
            sent = await run_over(feed, {"radar": outlet}, asyncio.Event())
            await until(lambda: len(sink.records) == feed.tallies["radar"].sent_count - outlet.refused)
            await outlet.close()
        assert sent["radar"] == feed.tallies["radar"].sent_count
        _, reasons = decode_radar(pa.array([one.value for one in sink.records]))
        assert Counter(one for one in reasons.to_pylist() if one) == feed.tallies["radar"].corrupted

    asyncio.run(play())


@pytest.mark.long
def test_over_tcp_each_satellites_frames_stay_in_order() -> None:
    async def play() -> None:
        sink, feed = MemorySink(), soon(rates={"isl": 2_000.0}, corrupted=0.0, duplicates=0.0)
        intake = an_intake(lambda b, c: TcpSource(TcpConfig("127.0.0.1", 0), b, c), sink)
        async with running(intake):
            host, port = intake.source.address.split(":")
            outlet = Frames(host, int(port), 3)
            await run_over(feed, {"isl": outlet}, asyncio.Event())
            await until(lambda: len(sink.records) == 2_000)
            await outlet.close()
        assert intake.counts.events["connections"] == 3
        decoded, _ = decode_links(pa.array([one.value for one in sink.records]))
        by_sensor: dict[str, list[int]] = {}
        for row in decoded.to_pylist():
            by_sensor.setdefault(row["orig_sensor_id"], []).append(row["timestamp_ns"])
        assert len(by_sensor) > 3
        assert all(times == sorted(times) for times in by_sensor.values())

    asyncio.run(play())


def test_a_sender_sees_that_its_connection_was_closed_and_loses_nothing() -> None:
    async def play() -> None:
        sink, feed = MemorySink(), a_feed(rates={"isl": 20.0}, corrupted=0.0)
        sent = whole(feed)["isl"]
        settings = TcpConfig("127.0.0.1", 0, idle_s=1.0)
        intake = an_intake(lambda b, c: TcpSource(settings, b, c), sink)
        async with running(intake):
            host, port = intake.source.address.split(":")
            outlet = Frames(host, int(port), 2)
            await outlet.send(sent)
            # Not before the receiver's word is here: what is written until then is lost, as TCP loses it.
            await until(lambda: intake.counts.events["closed_idle"] == 2 and outlet.closed_count == 2)
            await outlet.send(sent)
            await until(lambda: intake.counts.events["closed_idle"] == 4)
            await until(lambda: len(sink.records) == 2 * len(sent))
            await outlet.close()
        assert len(sink.records) == 2 * len(sent)
        assert (outlet.reconnected, outlet.refused) == (2, 0)

    asyncio.run(play())


def test_the_latest_of_a_telescopes_items_is_still_looked_for() -> None:
    """It may come just after one look back, and be that much further behind at the next."""
    config = HttpConfig("http://127.0.0.1:1")
    latest_s = 2 * ALLOWED_LATENESS_S["optical"]
    assert config.look_back / 1e9 >= latest_s + config.look_back_every_s


def test_over_http_everything_is_had_once_in_spite_of_faults() -> None:
    """The feed's minutes pass in a moment, so nothing that is late may be too late for a look back."""

    async def play() -> None:
        sink, feed = MemorySink(), a_feed(rates={"optical": 60.0}, corrupted=0.05, duplicates=0.05)
        pages = Pages(fault_every=3)
        async with serve_pages(pages, "127.0.0.1", 0) as url:
            config = HttpConfig(
                url, limit=300, wait_ms=20, pause_s=0.01, look_back=DAY_NS, look_back_every_s=0.2
            )

            async def sleep(seconds: float) -> None:
                await asyncio.sleep(min(seconds, 0.01))

            intake = an_intake(lambda b, c: HttpSource(config, b, c, sleep=sleep), sink)
            async with running(intake):
                for batch in [batches["optical"] for _, batches in feed.windows()]:
                    await pages.send(batch)
                    await asyncio.sleep(0.05)
                tally = feed.tallies["optical"]
                await until(lambda: len(sink.records) == tally.measured)
        assert pages.faults.total() > 0
        values = [one.value for one in sink.records]
        assert len(set(values)) == tally.measured, "what a page has twice is handed over once"
        _, reasons = decode_optical(pa.array(values))
        assert Counter(one for one in reasons.to_pylist() if one) == tally.corrupted

    asyncio.run(play())


def test_a_page_waits_for_what_is_new_and_keeps_one_instant_together() -> None:
    async def play() -> None:
        pages = Pages()
        at = np.array([10, 20, 20, 20, 30])
        batch = Batch(at, at, pa.array([b'{"n":%d}' % n for n in range(5)]), at)
        async with serve_pages(pages, "127.0.0.1", 0) as url, aiohttp.ClientSession() as session:

            async def ask(**query: int) -> list[int]:
                async with session.get(url, params={k: str(v) for k, v in query.items()}) as answer:
                    return [one["n"] for one in await answer.json()]

            waiting = asyncio.create_task(ask(since=0, wait_ms=30_000))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await pages.send(batch)
            assert await waiting == [0, 1, 2, 3, 4]
            assert await ask(since=0, limit=2) == [0, 1, 2, 3]
            assert await ask(since=20) == [4]
            assert await ask(since=30) == []
            async with session.get(url, params={"since": "soon"}) as answer:
                assert answer.status == 400

    asyncio.run(play())
