"""Run receivers for `branchlake sda receive`. A receiver accepts the messages of sensors over the network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.extras import require_modules
from branchlake_dagster.ingest.embedded_kafka import cluster_at_address
from branchlake_dagster.receivers.http_polling import HttpConfig, HttpSource
from branchlake_dagster.receivers.kafka_sink import KafkaSink
from branchlake_dagster.receivers.landing_sink import DEFAULT_ROLL, LandingSink
from branchlake_dagster.receivers.metrics import serve_metrics
from branchlake_dagster.receivers.records import Buffer, Counts, DropPolicy, ReceiverOrigin, Sink
from branchlake_dagster.receivers.service import Intake, Receivers, ReceiverSource, stop_on_signals
from branchlake_dagster.receivers.sockets import AllowedPeers, TcpConfig, TcpSource, UdpConfig, UdpSource
from branchlake_dagster.sda.wire import links, optical, radar
from branchlake_dagster.settings import Settings


def kafka_options(bootstrap: str, file: Path | None) -> dict[str, str]:
    """Return the options for librdkafka (Kafka's client library), including the brokers.

    With `file`, the options are its ``key=value`` lines. Without it, the credentials come from the settings
    (``BRANCHLAKE_KAFKA_SECURITY`` and so on), or from the embedded broker if `bootstrap` is its address.
    Raises ConfigurationError for a line that is not an option.
    """
    if file is None:
        return cluster_at_address(Settings(), bootstrap).client_options()
    found: dict[str, str] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals:
            # The message does not contain the line, which may hold a password.
            raise ConfigurationError(
                f"Line {number} of {file} is no option.",
                hint="Write it as key=value.",
                reason="kafka_option",
                subject=str(file),
            )
        found[name.strip()] = value.strip()
    return {**found, "bootstrap.servers": bootstrap}


_BUFFER_BYTES = 512 * 1024 * 1024
Address = tuple[str, int]


@dataclass(frozen=True)
class Wanted:
    """The options of the command `branchlake sda receive`."""

    radar: tuple[Address, ...]
    optical: tuple[str, ...]
    isl: tuple[Address, ...]
    landing: Path | None
    kafka: str | None
    kafka_options: Path | None
    topics: str
    name: str
    first_partition: int
    monitor: Address
    roll_s: float
    buffer: int
    drop: DropPolicy
    connections: int
    connections_per_peer: int
    allow: tuple[str, ...]


@dataclass(frozen=True)
class Done:
    """The final counts of each receiver. `finished` is false if a receiver did not stop in time."""

    intakes: list[dict[str, Any]]
    finished: bool

    @property
    def complete(self) -> bool:
        """Whether all received records were handed over and confirmed."""
        return not any(one["not_handed_over"] or one["not_confirmed"] for one in self.intakes)


def run_receivers(wanted: Wanted, *, as_json: bool, say: Callable[[str], None]) -> Done:
    """Receive until SIGTERM, SIGINT or SIGHUP. Hand over the buffered records, and return the counts."""
    require_modules("receive", "aiohttp", "prometheus_client", needed_by="branchlake sda receive")
    return asyncio.run(_run(wanted, as_json, say))


async def _run(wanted: Wanted, as_json: bool, say: Callable[[str], None]) -> Done:
    stop = asyncio.Event()
    stop_on_signals(stop)
    receivers = Receivers(list(build_intakes(wanted)))
    async with serve_metrics(receivers, *wanted.monitor) as url:
        running = asyncio.create_task(receivers.run(stop))
        announcing = asyncio.create_task(_announce(receivers, url, as_json, say))
        try:
            await running
        finally:
            announcing.cancel()
    done = Done(receivers.summary(), receivers.finished)
    for one in done.intakes:
        lost = one["dropped"] | {
            "not handed over": one["not_handed_over"],
            "of unknown outcome": one["not_confirmed"],
        }
        losses = ", ".join(f"{number:,} {reason}" for reason, number in lost.items() if number)
        say(
            f"{one['topic']}: {one['received']:,} received, {one['handed_over']:,} handed over;"
            f" {losses or 'nothing lost'}."
        )
    return done


async def _announce(receivers: Receivers, url: str, as_json: bool, say: Callable[[str], None]) -> None:
    while not all(intake.is_open for intake in receivers.intakes):
        await asyncio.sleep(0.02)
    at = {
        one.topic if one.partition is None else f"{one.topic}/{one.partition}": one.source.address
        for one in receivers.intakes
    }
    for where, address in at.items():
        say(f"{address} -> {where}")
    say(f"{url}/health and /metrics")
    if as_json:
        print(json.dumps({"event": "ready", "sources": at, "monitor": url}), flush=True)


def build_intakes(wanted: Wanted) -> Iterator[Intake]:
    """Build one intake (source, buffer and sink) per address or URL. Must be called inside the event loop."""
    allowed = AllowedPeers.from_cidr(wanted.allow)
    for number, (host, port) in enumerate(wanted.radar):
        datagrams = UdpConfig(host, port, key_bytes=radar.KEY_BYTES, drop=wanted.drop, allowed=allowed)
        yield _build_intake(wanted, "radar", "udp", number, partial(UdpSource, datagrams))
    for number, url in enumerate(wanted.optical):
        pages = HttpConfig(url, key_field=optical.KEY_FIELD, cursor_field=optical.CURSOR_FIELD)
        yield _build_intake(wanted, "optical", "http", number, partial(HttpSource, pages))
    for number, (host, port) in enumerate(wanted.isl):
        frames = TcpConfig(
            host,
            port,
            key_bytes=links.KEY_BYTES,
            most_connections=wanted.connections,
            most_connections_per_peer=wanted.connections_per_peer,
            allowed=allowed,
        )
        yield _build_intake(wanted, "isl", "tcp", number, partial(TcpSource, frames))


def _build_intake(
    wanted: Wanted, kind: str, protocol: str, number: int, make: Callable[[Buffer, Counts], ReceiverSource]
) -> Intake:
    topic, partition = f"{wanted.topics}{kind}", wanted.first_partition + number
    origin = ReceiverOrigin(f"{wanted.name}/{kind}/{partition}", protocol)
    sink: Sink
    where: int | None = partition
    if wanted.landing is not None:
        roll = DEFAULT_ROLL._replace(age_s=wanted.roll_s)
        sink = LandingSink(wanted.landing, topic, partition, origin, roll=roll)
    else:
        # A source with a cursor needs one partition. Records of other sources are distributed by key.
        where = partition if protocol == "http" else None
        options = kafka_options(wanted.kafka or "", wanted.kafka_options)
        sink = KafkaSink(topic, where, origin, options)
    counts = Counts()
    buffer = Buffer(wanted.buffer, _BUFFER_BYTES, counts)
    return Intake(topic, where, make(buffer, counts), buffer, sink, counts)
