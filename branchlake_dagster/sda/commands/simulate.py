"""Run simulated sensors for `branchlake sda simulate`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.extras import require_modules
from branchlake_dagster.receivers.kafka_sink import KafkaSink
from branchlake_dagster.receivers.landing_sink import LandingSink
from branchlake_dagster.receivers.records import ReceiverOrigin, Record, Sink
from branchlake_dagster.receivers.service import stop_on_signals
from branchlake_dagster.sda.commands.receive import kafka_options
from branchlake_dagster.sda.feeds.direct import Message, run_into
from branchlake_dagster.sda.feeds.feed import Feed
from branchlake_dagster.sda.feeds.network import Datagrams, Frames, Outlet, Pages, run_over
from branchlake_dagster.sda.feeds.plan import RATES, Burst, Plan
from branchlake_dagster.sda.gp.read import read_catalogue
from branchlake_dagster.sda.gp.simulated import simulated_elements
from branchlake_dagster.sda.orbits.propagation import Elements


@asynccontextmanager
async def serve_pages(pages: Pages, host: str, port: int) -> AsyncIterator[str]:
    """Serve pages at ``GET /observations`` while the block runs. Yields the URL. Port 0 uses a free port."""
    require_modules("receive", "aiohttp", needed_by="A server of pages")
    from aiohttp import web

    async def answer(request: web.Request) -> web.Response:
        found = await pages.answer(request.query)
        headers = {} if found.retry_after_s is None else {"Retry-After": str(found.retry_after_s)}
        kind = "application/json" if found.status == 200 else "text/plain"
        return web.Response(status=found.status, body=found.body, headers=headers, content_type=kind)

    app = web.Application()
    app.add_routes([web.get("/observations", answer)])
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        bound = runner.addresses[0]
        yield f"http://{bound[0]}:{bound[1]}/observations"
    finally:
        await runner.cleanup()


_PROTOCOLS = {"radar": "udp", "optical": "http", "isl": "tcp"}
_AHEAD_S = 2.0
"""Seconds from the start of the command to the first measurement, in which the first window is simulated."""

Address = tuple[str, int]


@dataclass(frozen=True)
class Simulated:
    """The options of the command `branchlake sda simulate`."""

    rates: dict[str, float]
    start: datetime | None
    radar: Address | None
    optical: Address | None
    isl: Address | None
    landing: Path | None
    kafka: str | None
    kafka_options: Path | None
    topics: str
    paced: bool
    seconds: float | None
    seed: int
    objects: int
    catalogue: Path | None
    duplicates: float
    stragglers: float
    corrupted: float
    burst_every_s: float
    burst_first_s: float
    burst_s: float
    burst_factor: float
    connections: int
    fault_every: int

    @property
    def addresses(self) -> dict[str, Address]:
        """The addresses by kind of sensor: where to send to, or, for optical sensors, where to serve."""
        found = {"radar": self.radar, "optical": self.optical, "isl": self.isl}
        return {kind: address for kind, address in found.items() if address is not None}


def run_simulation(wanted: Simulated, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Send simulated measurements. Return the counts by kind of sensor, and the seconds that it took.

    If the process is interrupted, the counts show how much was sent before.
    """
    start = wanted.start or datetime.fromtimestamp(time.time() + _AHEAD_S, UTC)
    kinds = wanted.addresses or RATES
    feed = Feed(
        _load_elements(wanted, start),
        Plan(
            rates={kind: rate for kind in kinds if (rate := wanted.rates.get(kind, RATES[kind])) > 0},
            seconds=wanted.seconds,
            seed=wanted.seed,
            duplicates=wanted.duplicates,
            stragglers=wanted.stragglers,
            corrupted=wanted.corrupted,
            burst=Burst(wanted.burst_every_s, wanted.burst_first_s, wanted.burst_s, wanted.burst_factor),
        ),
        int(start.timestamp() * 1e6) * 1_000,
    )
    began = time.perf_counter()
    delivered = (
        asyncio.run(_send_over_network(wanted, feed, say))
        if wanted.addresses
        else _write_to_topics(wanted, feed)
    )
    account = {kind: {**tally.as_dict(), **delivered.get(kind, {})} for kind, tally in feed.tallies.items()}
    return {"seconds": round(time.perf_counter() - began, 3), "kinds": account}


def print_counts(found: dict[str, Any]) -> None:
    """Print the counts, one line per kind."""
    for kind, one in found["kinds"].items():
        damaged = sum(one["corrupted"].values())
        click.echo(
            f"{kind}: {one.get('delivered', one['sent']):,} sent, of {one['measured']:,} measurements"
            f" {one['duplicates']:,} twice, {one['stragglers']:,} late, {damaged:,} damaged."
        )
    click.echo(f"{found['seconds']} s.")


def _load_elements(wanted: Simulated, start: datetime) -> Elements:
    if wanted.catalogue is None:
        found = simulated_elements(seed=wanted.seed, objects=wanted.objects, epoch=start)
    else:
        content = wanted.catalogue.read_bytes()
        found = read_catalogue(content, wanted.catalogue.name).elements
    if not found.height:
        raise ConfigurationError(f"{wanted.catalogue} has no element set.", hint="Take another file.")
    return Elements.from_arrow(found.to_arrow().sort_by("sat_no"))


async def _send_over_network(
    wanted: Simulated, feed: Feed, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    stop = asyncio.Event()
    stop_on_signals(stop)
    outlets: dict[str, Outlet] = {}
    async with AsyncExitStack() as stack:
        for kind, (host, port) in wanted.addresses.items():
            if kind not in feed.plan.rates:
                continue
            if kind == "optical":
                outlets[kind] = pages = Pages(wanted.fault_every)
                say(f"Pages at {await stack.enter_async_context(serve_pages(pages, host, port))}")
            else:
                outlets[kind] = (
                    Datagrams(host, port) if kind == "radar" else Frames(host, port, wanted.connections)
                )
            stack.push_async_callback(outlets[kind].close)
        sent = await run_over(feed, outlets, stop)
        if "optical" in outlets and not stop.is_set():
            # The server continues, so that late requests can still get all items.
            say("All is sent. The pages are served until Ctrl-C or SIGTERM.")
            await stop.wait()
        return {kind: _count_delivered(outlet, sent[kind]) for kind, outlet in outlets.items()}


def _count_delivered(outlet: Outlet, sent: int) -> dict[str, Any]:
    counts: dict[str, Any] = {"delivered": sent - outlet.refused, "refused": outlet.refused}
    return counts | ({"faults": dict(outlet.faults)} if isinstance(outlet, Pages) else {})


def _write_to_topics(wanted: Simulated, feed: Feed) -> dict[str, dict[str, Any]]:
    sinks: dict[str, Sink] = {}
    with ExitStack() as stack:
        for kind in feed.plan.rates:
            topic, origin = f"{wanted.topics}{kind}", ReceiverOrigin(f"simulator/{kind}", _PROTOCOLS[kind])
            if wanted.landing is not None:
                sinks[kind] = LandingSink(wanted.landing, topic, 0, origin)
            else:
                options = kafka_options(wanted.kafka or "", wanted.kafka_options)
                sinks[kind] = KafkaSink(topic, None, origin, options)
            stack.callback(sinks[kind].close)
            sinks[kind].open(resume=False)
        run_into(feed, {kind: partial(_write, sink) for kind, sink in sinks.items()}, paced=wanted.paced)
    return {}


def _write(sink: Sink, messages: list[Message]) -> None:
    for start in range(0, len(messages), sink.roll.records):
        sink.write([Record(*message) for message in messages[start : start + sink.roll.records]])
