"""The server of `/health` and `/metrics` of a receiver process, and the client that reads them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import requests

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.extras import require_modules
from branchlake_dagster.receivers.records import DELAYS_S
from branchlake_dagster.receivers.service import Receivers

if TYPE_CHECKING:
    from aiohttp import web


_SAMPLE = re.compile(r"branchlake_receiver_(\w+)\{(.*)\} ([0-9.e+]+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_TIMEOUT_S = 2.0
_MAX_THREADS = 32


@dataclass
class TopicCounts:
    """Counts of a topic since its receivers started; `waiting` and `buffer_capacity` are current values."""

    received: int = 0
    handed_over: int = 0
    waiting: int = 0
    buffer_capacity: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, other: TopicCounts) -> None:
        """Add the counts of another receiver."""
        self.received += other.received
        self.handed_over += other.handed_over
        self.waiting += other.waiting
        self.buffer_capacity += other.buffer_capacity
        self.dropped += other.dropped


@dataclass(frozen=True)
class MonitorReport:
    """The report of the monitor of one receiver process. `counts` has the counts by topic.

    `state` and `reasons` are those of its `/health`. The state is `unknown` if only `/health` cannot be read,
    and `silent` if `/metrics` cannot be read.
    """

    address: str
    counts: Mapping[str, TopicCounts] = field(default_factory=dict)
    state: str = "silent"
    reasons: tuple[str, ...] = ()

    @property
    def silent(self) -> bool:
        """Whether the monitor did not answer with metrics."""
        return self.state == "silent"


def parse_topic_counts(metrics_text: str) -> dict[str, TopicCounts]:
    """Parse the text of `/metrics` to counts by topic. Other samples are ignored.

    Raises ValueError or OverflowError for a count that is not a finite number.
    """
    counts_by_topic: dict[str, TopicCounts] = {}
    for line in metrics_text.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            continue
        name, labels, number = sample[1], dict(_LABEL.findall(sample[2])), int(float(sample[3]))
        if "topic" not in labels:
            continue
        counts = counts_by_topic.setdefault(labels["topic"], TopicCounts())
        match name:
            case "records_received_total":
                counts.received += number
            case "records_handed_over_total":
                counts.handed_over += number
            case "records_waiting":
                counts.waiting += number
            case "buffer_records":
                counts.buffer_capacity += number
            case "records_dropped_total":
                counts.dropped[labels.get("reason", "")] += number
    return counts_by_topic


def scrape_monitors(monitors: Iterable[str]) -> list[MonitorReport]:
    """Return the report of each monitor (`http://host:9464`), in the same order. Never raises.

    The requests are concurrent: each unreachable monitor takes two seconds, and the caller is a sensor that
    starts runs.
    """
    monitor_list = list(monitors)
    if not monitor_list:
        return []
    with ThreadPoolExecutor(min(len(monitor_list), _MAX_THREADS)) as pool:
        return list(pool.map(_scrape_monitor, monitor_list))


def sum_by_topic(reports: Iterable[MonitorReport]) -> dict[str, TopicCounts]:
    """Return the counts of each topic, summed over the reports of all monitors.

    Monitors without an answer add nothing. Topics that no report names are omitted.
    """
    sums: dict[str, TopicCounts] = {}
    for report in reports:
        for topic, counts in report.counts.items():
            sums.setdefault(topic, TopicCounts()).add(counts)
    return sums


def _scrape_monitor(monitor: str) -> MonitorReport:
    address = monitor.rstrip("/")
    try:
        metrics = requests.get(f"{address}/metrics", timeout=_TIMEOUT_S)
        metrics.raise_for_status()
    except requests.RequestException:
        return MonitorReport(monitor)
    try:
        health = requests.get(f"{address}/health", timeout=_TIMEOUT_S).json()  # a 503 has a body too
        state, reasons = str(health["state"]), tuple(map(str, health.get("reasons", ())))
    except (requests.RequestException, KeyError, TypeError, AttributeError):
        state, reasons = "unknown", ()
    try:
        counts = parse_topic_counts(metrics.text)
    except (ValueError, OverflowError):
        return MonitorReport(monitor, {}, "unknown", ("its metrics cannot be read",))
    return MonitorReport(monitor, counts, state, reasons)


_METRIC_PREFIX = "branchlake_receiver"


class _MetricsCollector:
    """Collects the current counts for Prometheus. It keeps no state between two calls."""

    def __init__(self, receivers: Receivers) -> None:
        self._receivers = receivers

    def collect(self) -> Iterator[Any]:
        """Yield the metric families."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        labels = ("topic", "partition", "protocol")

        def counter(name: str, help_text: str, *more: str) -> Any:
            return CounterMetricFamily(f"{_METRIC_PREFIX}_{name}", help_text, labels=(*labels, *more))

        def gauge(name: str, help_text: str) -> Any:
            return GaugeMetricFamily(f"{_METRIC_PREFIX}_{name}", help_text, labels=labels)

        counters = {
            "received": counter("records_received", "Records received."),
            "received_bytes": counter("bytes_received", "Bytes of the received values."),
            "handed_over": counter("records_handed_over", "Records durable in the sink."),
            "not_confirmed": counter("records_not_confirmed", "Sent to the sink, outcome unknown."),
        }
        dropped = counter("records_dropped", "Records dropped, by reason.", "reason")
        events = counter("events", "What happened in the protocol, by kind.", "kind")
        waiting = gauge("records_waiting", "Records received and not yet handed over.")
        buffer_capacity = gauge("buffer_records", "Capacity of the buffer.")
        connections = gauge("connections", "Open connections (TCP).")
        delays = HistogramMetricFamily(
            f"{_METRIC_PREFIX}_delay_seconds", "From receipt to durable in the sink.", labels=labels
        )
        for intake in self._receivers.intakes:
            partition = "" if intake.partition is None else str(intake.partition)
            label_values = (intake.topic, partition, intake.source.protocol)
            for name, family in counters.items():
                family.add_metric(label_values, getattr(intake.counts, name))
            for reason, number in sorted(intake.counts.dropped.items()):
                dropped.add_metric((*label_values, reason), number)
            for kind, number in sorted(intake.counts.events.items()):
                events.add_metric((*label_values, kind), number)
            waiting.add_metric(label_values, intake.waiting)
            buffer_capacity.add_metric(label_values, intake.buffer.most_records)
            connections.add_metric(label_values, len(getattr(intake.source, "connections", ())))
            bounds = [*map(str, DELAYS_S), "+Inf"]
            buckets = list(zip(bounds, accumulate(intake.counts.delays.classes), strict=True))
            delays.add_metric(label_values, buckets, intake.counts.delays.total_s)
        yield from (*counters.values(), dropped, events, waiting, buffer_capacity, connections, delays)
        degraded = GaugeMetricFamily(f"{_METRIC_PREFIX}_degraded", "1 while something is wrong; see /health.")
        degraded.add_metric((), int(bool(self._receivers.health().reasons)))
        yield degraded


@asynccontextmanager
async def serve_metrics(receivers: Receivers, host: str, port: int) -> AsyncIterator[str]:
    """Serve at `host`:`port` while the block runs; port 0 uses a free one. Yields the URL.

    ``/health`` is 200 when ready or degraded (a restart would not help, and would lose the buffered records),
    503 while starting or draining; its JSON has ``state`` and ``reasons``. ``/metrics`` is Prometheus' text
    format. Raises ConfigurationError if the port is not free, or MissingExtra.
    """
    require_modules("receive", "aiohttp", "prometheus_client", needed_by="Monitoring of receivers")
    from aiohttp import web
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_LATEST

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_MetricsCollector(receivers))

    async def health(_: web.Request) -> web.Response:
        report = receivers.health()
        status = 200 if report.state in ("ready", "degraded") else 503
        return web.json_response(asdict(report), status=status)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.2)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigurationError(
                f"Cannot listen at {host}:{port} for /health and /metrics: {error}.",
                hint="Use another port.",
                reason="address_in_use",
                subject=f"{host}:{port}",
            ) from error
        bound = runner.addresses[0]
        yield f"http://{bound[0]}:{bound[1]}"
    finally:
        await runner.cleanup()
