"""The client for `/metrics` and `/health` of receivers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import requests

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
    """The report of the monitor of one receiver process; `counts` are by topic.

    `state` and `reasons` come from its `/health`: `unknown` if that has none, and `silent` if the monitor did
    not answer at all.
    """

    address: str
    counts: Mapping[str, TopicCounts] = field(default_factory=dict)
    state: str = "silent"
    reasons: tuple[str, ...] = ()

    @property
    def silent(self) -> bool:
        """Whether the monitor did not answer."""
        return self.state == "silent"


def parse_topic_counts(metrics_text: str) -> dict[str, TopicCounts]:
    """Parse the text of `/metrics` to counts by topic. Other samples are ignored."""
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
    """Sum the counts of all monitors by topic."""
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
    return MonitorReport(monitor, parse_topic_counts(metrics.text), state, reasons)
