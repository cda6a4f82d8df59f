from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.receivers.http_polling import HttpConfig, HttpSource
from branchlake_dagster.receivers.records import ReceiverOrigin, ResumeState, Sink
from branchlake_dagster.receivers.service import Intake
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

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
OURS = ReceiverOrigin("r1", "http")
QUICKLY = {"pause_s": 0.01, "wait_ms": 0, "look_back": 0}


def item(number: int, at: int | None = None, **more: Any) -> dict[str, Any]:
    return {"obs_id": f"o{number}", "timestamp_ns": number if at is None else at, **more}


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.get("/pages", answer)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}/pages".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


class Archive:
    """Items in the order of their time; `inclusive` is what `since` means here."""

    def __init__(self, *items: dict[str, Any], inclusive: bool = False) -> None:
        self.items, self.inclusive = list(items), inclusive
        self.asked: list[int] = []
        self.faults: list[web.StreamResponse] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        since, limit = int(request.query["since"]), int(request.query["limit"])
        self.asked.append(since)
        if self.faults:
            return self.faults.pop(0)
        later = [
            i
            for i in self.items
            if i["timestamp_ns"] > since or (self.inclusive and i["timestamp_ns"] == since)
        ]
        page = sorted(later, key=lambda i: i["timestamp_ns"])[:limit]
        return web.json_response(page)


def asking(url: str, sink: Sink, **config: Any) -> Intake:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(min(seconds, 0.01))

    settings = HttpConfig(url, **{**QUICKLY, **config})
    made = an_intake(lambda b, c: HttpSource(settings, b, c, sleep=sleep, rng=random.Random(1)), sink)
    made.source.slept = slept
    return made


def values(sink: MemorySink) -> list[Any]:
    return [json.loads(one.value) for one in sink.records]


@pytest.mark.parametrize("inclusive", [False, True])
@pytest.mark.parametrize("limit", [3, 1_000])
def test_all_pages_are_had_once(inclusive: bool, limit: int) -> None:
    async def play() -> None:
        archive, sink = Archive(*(item(n) for n in range(1, 20)), inclusive=inclusive), MemorySink()
        async with serving(archive.answer) as url:
            intake = asking(url, sink, limit=limit)
            async with running(intake):
                await until(lambda: len(sink.records) == 19)
                archive.items += [item(n) for n in range(20, 30)]
                await until(lambda: len(sink.records) == 29)
                await until(lambda: archive.asked[-3:] == [29, 29, 29])
        assert values(sink) == archive.items
        assert [one.key for one in sink.records] == [b"o%d" % n for n in range(1, 30)]

    asyncio.run(play())


def test_a_look_back_that_failures_interrupt_goes_on() -> None:
    """Begun anew at each failure, it never came to the late item."""

    async def play() -> None:
        archive, sink = Archive(*(item(n, 10 * n) for n in range(1, 41))), MemorySink()

        async def every_second_one_fails(request: web.Request) -> web.StreamResponse:
            if len(archive.asked) % 2:
                archive.faults.append(web.Response(status=500))
            return await archive.answer(request)

        async with serving(every_second_one_fails) as url:
            intake = asking(url, sink, limit=5, look_back=10_000, look_back_every_s=0.0)
            async with running(intake):
                await until(lambda: len(sink.records) == 40)
                archive.items.append(item(99, at=355))
                await until(lambda: len(sink.records) == 41, 20.0)

    asyncio.run(play())


def test_items_are_kept_byte_by_byte() -> None:
    body = b' [ {"obs_id":"a", "timestamp_ns" : 1,\n "x": 1.10e0} ,{"timestamp_ns":2,"obs_id":"\xc3\xa4"},7, "t", {"obs_id":""} ]\r\n'

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body)

    async def play() -> None:
        sink = MemorySink()
        async with serving(answer) as url, running(asking(url, sink)):
            await until(lambda: len(sink.records) == 5)
        assert [one.value for one in sink.records] == [
            b'{"obs_id":"a", "timestamp_ns" : 1,\n "x": 1.10e0}',
            b'{"timestamp_ns":2,"obs_id":"\xc3\xa4"}',
            b"7",
            b'"t"',
            b'{"obs_id":""}',
        ]
        keys = [one.key for one in sink.records]
        assert keys[:2] == [b"a", b"\xc3\xa4"]
        assert all(key is not None and key.startswith(b"sha256:") for key in keys[2:])

    asyncio.run(play())


def test_the_cursor_is_never_ahead_of_its_records() -> None:
    """Wherever the records end, asking from the last cursor gives all that follows."""

    async def play() -> None:
        # Pages that are not in order.
        times = [5, 1, 4, 9, 2, 12, 11, 30, 29, 28]
        archive, sink = Archive(*(item(n, at) for n, at in enumerate(times))), MemorySink()

        async def shuffled(request: web.Request) -> web.StreamResponse:
            since = int(request.query["since"])
            archive.asked.append(since)
            low = [i for i in archive.items if since < i["timestamp_ns"] <= (12 if since < 12 else 99)]
            return web.json_response(low)

        async with serving(shuffled) as url:
            intake = asking(url, sink)
            async with running(intake):
                await until(lambda: len(sink.records) == len(times))
        ids = {one.key for one in sink.records}
        for end in range(len(sink.records) + 1):
            had = {one.key for one in sink.records[:end]}
            cursor = int(sink.records[end - 1].cursor or 0) if end else 0
            again = {f"o{n}".encode() for n, at in enumerate(times) if at > cursor}
            assert had | again == ids
        assert intake.counts.events["out_of_order"] > 0

    asyncio.run(play())


def test_a_restart_goes_on_from_the_sink(tmp_path: Path) -> None:
    async def play() -> None:
        archive = Archive(*(item(n) for n in range(1, 8)))
        async with serving(archive.answer) as url:
            for there in (7, 12):
                archive.asked.clear()
                sink = landing_sink(tmp_path, origin=OURS)
                intake = asking(url, sink)
                async with running(intake):
                    await until(partial(lambda sink, there: sink.next_offset == there, sink, there))
                    await until(partial(lambda there: archive.asked[-1] == there, there))
                assert archive.asked[0] == (0 if there == 7 else 7)
                archive.items += [item(n) for n in range(8, 13)]
        assert [json.loads(v)["timestamp_ns"] for v in landed(tmp_path)["value"].to_pylist()] == list(
            range(1, 13)
        )

    asyncio.run(play())


def test_what_the_sink_has_is_not_handed_over_again_after_a_restart(tmp_path: Path) -> None:
    async def play() -> None:
        archive = Archive(*(item(n) for n in range(1, 8)), inclusive=True)
        async with serving(archive.answer) as url:
            for _ in range(3):
                sink = landing_sink(tmp_path, origin=OURS)
                intake = asking(url, sink, look_back=100, look_back_every_s=0.0)
                archive.asked.clear()
                async with running(intake):
                    await until(partial(lambda sink: sink.next_offset == 7 and len(archive.asked) > 4, sink))
        assert landed(tmp_path).num_rows == 7

    asyncio.run(play())


def test_what_is_late_is_found_by_looking_back() -> None:
    async def play() -> None:
        archive, sink = Archive(*(item(n, 1_000 + n) for n in range(1, 30))), MemorySink()
        async with serving(archive.answer) as url:
            intake = asking(url, sink, look_back=500, look_back_every_s=0.0, limit=4)
            async with running(intake):
                await until(lambda: len(sink.records) == 29)
                archive.items += [item(100, 1_005), item(101, 1_029)]
                await until(lambda: len(sink.records) == 31)
        late = sink.records[-2:]
        assert {one.key for one in late} == {b"o100", b"o101"}
        assert {one.cursor for one in late} == {b"1029"}, "the cursor does not go back"

    asyncio.run(play())


def malformed() -> list[web.StreamResponse]:
    bodies = (
        b"",
        b"{}",
        b"[",
        b'[{"obs_id": "x"}',
        b"[1,]",
        b"[1 2]",
        b"[1]x",
        b"\xff\xfe",
        b"<html>",
        b"[" * 100_000,
    )
    return [web.Response(body=body) for body in bodies]


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        ([web.Response(status=500), web.Response(status=503)], "server_error"),
        ([web.Response(status=429)], "throttled"),
        ([web.Response(status=404)], "refused"),
        (malformed(), "malformed"),
    ],
    ids=["5xx", "429", "404", "malformed"],
)
def test_an_answer_that_is_no_page_is_asked_for_again(faults: list[web.StreamResponse], kind: str) -> None:
    async def play() -> None:
        archive, sink = Archive(item(1), item(2)), MemorySink()
        archive.faults = list(faults)
        async with serving(archive.answer) as url:
            intake = asking(url, sink)
            async with running(intake) as receivers:
                await until(lambda: len(sink.records) == 2)
                await until(lambda: receivers.health().state == "ready")
        assert intake.counts.events[f"requests_{kind}"] == len(faults)
        assert values(sink) == archive.items
        assert adds_up(intake)

    asyncio.run(play())


@pytest.mark.parametrize("headers", [(("X-Token", "secret"),), ()], ids=["with token", "without token"])
def test_a_token_is_not_sent_where_an_answer_refers_to(headers: tuple[tuple[str, str], ...]) -> None:
    async def play() -> None:
        archive, tokens = Archive(item(1)), list[str | None]()

        async def elsewhere(request: web.Request) -> web.StreamResponse:
            tokens.append(request.headers.get("X-Token"))
            return await archive.answer(request)

        async with serving(elsewhere) as target:

            async def refer(request: web.Request) -> web.StreamResponse:
                raise web.HTTPTemporaryRedirect(f"{target}?{request.query_string}")

            async with serving(refer) as url:
                sink = MemorySink()
                intake = asking(url, sink, headers=headers)
                async with running(intake) as receivers:
                    if headers:
                        await until(lambda: receivers.health().reasons)
                        assert intake.counts.events["requests_refused"]
                        assert target in receivers.health().reasons[0]
                    else:
                        await until(lambda: sink.records)
        assert "secret" not in tokens

    asyncio.run(play())


def test_retry_after_is_kept_to_and_bounded() -> None:
    async def play() -> None:
        archive, sink = Archive(item(1)), MemorySink()
        told = ["7", "Thu, 01 Jan 1970 00:00:42 GMT", "99999", "nonsense", "-5", "nan", "Thu, 99 Jan"]
        told += ["Thu, 01 Jan 99999999999 00:00:00 GMT", "Thu, 01 Jan 1970 00:00:42 +99999999999999"]
        archive.faults = [web.Response(status=429, headers={"Retry-After": text}) for text in told]
        async with serving(archive.answer) as url:
            intake = asking(url, sink)
            intake.source._now_ns = lambda: 2_000_000_000
            async with running(intake):
                await until(lambda: sink.records)
        waits = intake.source.slept[: len(told)]
        assert waits[:3] == [7.0, 40.0, 300.0]
        assert all(0.5 <= wait <= 30 for wait in waits[3:])

    asyncio.run(play())


def test_pauses_between_attempts_are_bounded_and_the_cause_is_reported() -> None:
    async def play() -> None:
        archive = Archive()
        archive.faults = [web.Response(status=500) for _ in range(40)]
        async with serving(archive.answer) as url:
            intake = asking(url, MemorySink(), most_pause_s=4.0)
            async with running(intake) as receivers:
                await until(lambda: intake.counts.events["requests_server_error"] > 20)
                assert receivers.health().state == "degraded"
                assert "answered 500" in receivers.health().reasons[0]
        slept = intake.source.slept
        assert max(slept) <= 4.0
        assert len(set(slept[:10])) > 5, "spread"

    asyncio.run(play())


def test_a_server_that_hangs_or_is_away_is_asked_again() -> None:
    async def play() -> None:
        sink, first = MemorySink(), True

        async def answer(_: web.Request) -> web.StreamResponse:
            nonlocal first
            if first:
                first = False
                await asyncio.sleep(60)
            return web.json_response([item(1)])

        async with serving(answer) as url:
            intake = asking(url, sink, timeout_s=2.0)
            async with running(intake):
                await until(lambda: sink.records)
        assert intake.counts.events["requests_timeout"] == 1
        away = asking(url, MemorySink())
        async with running(away):
            await until(lambda: away.counts.events["requests_connection"] > 3)

    asyncio.run(play())


def test_a_page_that_is_too_large_is_no_page() -> None:
    async def play() -> None:
        async def answer(_: web.Request) -> web.StreamResponse:
            made = web.json_response([item(1, text="x" * 100_000)])
            made.enable_compression()
            return made

        async with serving(answer) as url:
            intake = asking(url, MemorySink(), most_page_bytes=10_000)
            async with running(intake):
                await until(lambda: intake.counts.events["requests_too_large"] > 1)

    asyncio.run(play())


def test_one_bad_time_does_not_hide_what_follows() -> None:
    async def play() -> None:
        far = 2**63 - 1
        archive, sink = Archive(item(1), item(2, far), item(3, 10**30)), MemorySink()
        huge = '[{"obs_id": "h", "timestamp_ns": ' + "9" * 5_000 + "}]"
        archive.faults = [web.Response(text=huge)]
        async with serving(archive.answer) as url:
            intake = asking(url, sink)
            async with running(intake):
                await until(lambda: len(sink.records) == 4)
                archive.items.append(item(4))
                await until(lambda: len(sink.records) == 5)
        assert intake.counts.events["cursors_ahead"] >= 2
        assert sink.records[-1].cursor == b"4"

    asyncio.run(play())


def test_an_item_that_was_corrected_is_handed_over_again() -> None:
    async def play() -> None:
        archive, sink = Archive(item(1, v="wrong"), inclusive=True), MemorySink()
        async with serving(archive.answer) as url, running(asking(url, sink)):
            await until(lambda: sink.records)
            archive.items[0] = item(1, v="right")
            await until(lambda: len(sink.records) == 2)
        assert [one["v"] for one in values(sink)] == ["wrong", "right"]

    asyncio.run(play())


def test_more_items_of_one_time_than_a_page_holds_are_reported() -> None:
    async def play() -> None:
        archive, sink = Archive(*(item(n, 5) for n in range(10)), inclusive=True), MemorySink()
        async with serving(archive.answer) as url:
            intake = asking(url, sink, limit=4)
            async with running(intake) as receivers:
                await until(lambda: intake.counts.events["stuck_pages"])
                await until(lambda: receivers.health().state == "degraded")
                assert "Raise the limit" in receivers.health().reasons[0]

    asyncio.run(play())


def test_a_full_buffer_stops_the_asking() -> None:
    import threading

    async def play() -> None:
        gate, archive = threading.Event(), Archive(*(item(n) for n in range(1, 200)))
        sink = MemorySink(behave=lambda _: gate.wait(60) and None)
        async with serving(archive.answer) as url:
            intake = asking(url, sink, limit=10)
            intake.buffer.most_records = 15
            async with running(intake):
                await until(lambda: intake.buffer.is_full)
                await asyncio.sleep(0.2)
                # Fifteen records in the sink's hand, fifteen in the buffer, and a page that waits for room.
                assert len(archive.asked) <= 4
                gate.set()
                await until(lambda: len(sink.records) == 199)
        assert values(sink) == archive.items

    asyncio.run(play())


def test_an_invalid_url_or_cursor_is_reported() -> None:
    for url in ("nowhere", "http:///y", "http://:80/y", "http://[::1/y", "http://host:99999/y"):
        with raising(ConfigurationError, reason="url", subject=url):
            asking(url, MemorySink())

    async def play() -> None:
        source = asking("http://127.0.0.1:1/", MemorySink()).source
        with raising(ConfigurationError, reason="cursor", subject=repr(b"abc")):
            source.resume(ResumeState(b"abc"))

    asyncio.run(play())


def test_a_password_in_the_url_goes_nowhere() -> None:
    config = replace(HttpConfig("http://user:secret@127.0.0.1/x"))

    async def play() -> None:
        intake = an_intake(lambda b, c: HttpSource(config, b, c), MemorySink())
        assert intake.source.address == "http://***@127.0.0.1/x"

    asyncio.run(play())
