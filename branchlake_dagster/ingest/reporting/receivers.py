"""The external assets that stand for processes of receivers, and what is told on them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any
from urllib.parse import urlsplit

import dagster as dg

from branchlake_dagster.receivers.metrics_client import Monitored, TopicCounts


def receiver_key(monitor: str) -> dg.AssetKey:
    """The asset of the process whose monitor is at `http://host:9464`."""
    return dg.AssetKey(["receivers", urlsplit(monitor).netloc or monitor])


def receiver_spec(monitor: str) -> dg.AssetSpec:
    """That asset."""
    return dg.AssetSpec(
        receiver_key(monitor),
        description=f"A process of receivers, with its monitor at {monitor}.",
        kinds={"receiver"},
        group_name="receivers",
    )


def receiver_observations(
    monitors: Iterable[Monitored], topics: Collection[str]
) -> list[dg.AssetObservation]:
    """How the receivers of one of the topics are, and those that do not answer: nobody knows theirs."""
    return [
        dg.AssetObservation(receiver_key(one.address), metadata=_metadata(one))
        for one in monitors
        if one.silent or not one.counts.keys().isdisjoint(topics)
    ]


def counted(counts: TopicCounts) -> dict[str, Any]:
    """What was counted since the start, and how full the buffers are."""
    found: dict[str, Any] = {
        "branchlake/received": dg.MetadataValue.int(counts.received),
        "branchlake/handed_over": dg.MetadataValue.int(counts.handed_over),
        "branchlake/dropped": dg.MetadataValue.int(counts.dropped.total()),
    }
    for reason, number in sorted(counts.dropped.items()):
        found[f"branchlake/dropped_{reason}"] = dg.MetadataValue.int(number)
    found["branchlake/receiver_buffered"] = dg.MetadataValue.int(counts.waiting)
    if counts.buffer:
        # What waits includes what the sink has in hand.
        used = min(counts.waiting / counts.buffer, 1.0)
        found["branchlake/receiver_buffer_used"] = dg.MetadataValue.float(round(used, 4))
    return found


def _metadata(monitor: Monitored) -> dict[str, Any]:
    found: dict[str, Any] = {"branchlake/state": dg.MetadataValue.text(monitor.state)}
    if monitor.silent:
        return found
    every = TopicCounts()
    for counts in monitor.counts.values():
        every.add(counts)
    found["branchlake/topics"] = dg.MetadataValue.text(", ".join(sorted(monitor.counts)))
    if monitor.reasons:
        found["branchlake/reasons"] = dg.MetadataValue.text("; ".join(monitor.reasons))
    return {**found, **counted(every)}
