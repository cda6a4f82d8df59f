"""How receivers are: their `/metrics` and `/health`, read."""

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
_AT_ONCE = 32


@dataclass
class TopicCounts:
    """What receivers have counted of a topic since they started; `waiting` and `buffer` are of now."""

    received: int = 0
    handed_over: int = 0
    waiting: int = 0
    buffer: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, other: TopicCounts) -> None:
        """Count what another one has counted too."""
        self.received += other.received
        self.handed_over += other.handed_over
        self.waiting += other.waiting
        self.buffer += other.buffer
        self.dropped += other.dropped


@dataclass(frozen=True)
class Monitored:
    """What the monitor of one process of receivers told; `counts` are by topic.

    `state` and `reasons` are those of its `/health`, `unknown` where that says none; `silent` when it did
    not answer at all.
    """

    address: str
    counts: Mapping[str, TopicCounts] = field(default_factory=dict)
    state: str = "silent"
    reasons: tuple[str, ...] = ()

    @property
    def silent(self) -> bool:
        """Whether it did not answer."""
        return self.state == "silent"


def topic_counts(text: str) -> dict[str, TopicCounts]:
    """By topic, of the text of a `/metrics`. What is no sample of ours is passed over."""
    found: dict[str, TopicCounts] = {}
    for line in text.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            continue
        name, labels, number = sample[1], dict(_LABEL.findall(sample[2])), int(float(sample[3]))
        if "topic" not in labels:
            continue
        counts = found.setdefault(labels["topic"], TopicCounts())
        match name:
            case "records_received_total":
                counts.received += number
            case "records_handed_over_total":
                counts.handed_over += number
            case "records_waiting":
                counts.waiting += number
            case "buffer_records":
                counts.buffer += number
            case "records_dropped_total":
                counts.dropped[labels.get("reason", "")] += number
    return found


def scrape(monitors: Iterable[str]) -> list[Monitored]:
    """What each monitor (`http://host:9464`) tells, in their sequence. Never raises.

    All are asked at once: each that is away takes two seconds, and whoever asks starts runs.
    """
    wanted = list(monitors)
    if not wanted:
        return []
    with ThreadPoolExecutor(min(len(wanted), _AT_ONCE)) as pool:
        return list(pool.map(_asked, wanted))


def together(found: Iterable[Monitored]) -> dict[str, TopicCounts]:
    """By topic the sums over monitors."""
    sums: dict[str, TopicCounts] = {}
    for one in found:
        for topic, counts in one.counts.items():
            sums.setdefault(topic, TopicCounts()).add(counts)
    return sums


def _asked(monitor: str) -> Monitored:
    address = monitor.rstrip("/")
    try:
        metrics = requests.get(f"{address}/metrics", timeout=_TIMEOUT_S)
        metrics.raise_for_status()
    except requests.RequestException:
        return Monitored(monitor)
    try:
        told = requests.get(f"{address}/health", timeout=_TIMEOUT_S).json()  # 503 is an answer too
        state, reasons = str(told["state"]), tuple(map(str, told.get("reasons", ())))
    except (requests.RequestException, KeyError, TypeError, AttributeError):
        state, reasons = "unknown", ()
    return Monitored(monitor, topic_counts(metrics.text), state, reasons)
