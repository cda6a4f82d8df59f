"""The counts of receivers, read from their `/metrics`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import requests

_SAMPLE = re.compile(r"branchlake_receiver_(\w+)\{(.*)\} ([0-9.e+]+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_TIMEOUT_S = 2.0


@dataclass
class TopicCounts:
    """What receivers have counted of a topic since they started; `waiting` and `buffer` are of now."""

    received: int = 0
    handed_over: int = 0
    waiting: int = 0
    buffer: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


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


def scrape(monitors: Iterable[str]) -> tuple[dict[str, TopicCounts], Sequence[str]]:
    """By topic the sums over monitors (`http://host:9464`), and those that did not answer. Never raises."""
    found: dict[str, TopicCounts] = {}
    silent = []
    for monitor in monitors:
        try:
            answer = requests.get(f"{monitor.rstrip('/')}/metrics", timeout=_TIMEOUT_S)
            answer.raise_for_status()
        except requests.RequestException:
            silent.append(monitor)
            continue
        for topic, counts in topic_counts(answer.text).items():
            known = found.setdefault(topic, TopicCounts())
            known.received += counts.received
            known.handed_over += counts.handed_over
            known.waiting += counts.waiting
            known.buffer += counts.buffer
            known.dropped += counts.dropped
    return found, silent
