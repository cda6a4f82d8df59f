"""Write a simulated feed to topics without a network, as receivers would."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from branchlake_dagster.sda.feeds.feed import Feed
from branchlake_dagster.sda.feeds.plan import Batch, split_bytes
from branchlake_dagster.sda.wire import links, optical, radar

_SOURCES = {"radar": b"simulated radar", "optical": b"simulated telescopes", "isl": b"simulated links"}


class Message(NamedTuple):
    """The record that a receiver would make of a value. Its time of receipt is the time of sending."""

    value: bytes
    key: bytes
    received_ns: int
    source: bytes


def messages_of(kind: str, batch: Batch) -> Iterator[Message]:
    """Yield one message for each value of a batch. ``kind`` is the kind of sensor."""
    keys = {"radar": radar.KEY_BYTES, "isl": links.KEY_BYTES}
    ids = _encode_ids(batch.values) if kind == "optical" else None
    source = _SOURCES[kind]
    for number, (value, sent) in enumerate(
        zip(split_bytes(batch.values), batch.send_ns.tolist(), strict=True)
    ):
        if ids is not None:
            key = ids[number] or source
        else:
            first, last = keys[kind]
            key = bytes(value[first:last]) if len(value) >= last else source
        yield Message(bytes(value), key, sent, source)


def _encode_ids(values: pa.BinaryArray) -> list[bytes | None]:
    decoded, _ = optical.decode_optical(values)
    return [None if one is None else one.encode() for one in decoded["obs_id"].to_pylist()]


def run_into(
    feed: Feed,
    hand_over: Mapping[str, Callable[[list[Message]], None]],
    *,
    most: int = 50_000,
    paced: bool,
    now_ns: Callable[[], int] = time.time_ns,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Hand over all messages of a feed, and return their number.

    Args:
        feed: The simulated feed.
        hand_over: By kind of sensor, a function that takes messages.
        most: The largest number of messages per call.
        paced: Whether to wait until the time of sending. Otherwise the feed runs as fast as possible.
        now_ns: Returns the present time, nanoseconds since 1970.
        sleep: Waits for a number of seconds.
    """
    handed = 0
    for _, batches in feed.windows():
        for begin, end in _iter_rounds(batches, paced):
            if paced:
                sleep(max(0.0, (end - now_ns()) / 1e9))
            for kind, batch in batches.items():
                start, stop = np.searchsorted(batch.send_ns, (begin, end))
                part = batch.take(np.arange(start, stop))
                for first in range(0, len(part), most):
                    some = part.take(np.arange(first, min(first + most, len(part))))
                    hand_over[kind](list(messages_of(kind, some)))
                handed += len(part)
    return handed


def _iter_rounds(batches: Mapping[str, Batch], paced: bool) -> Iterator[tuple[int, int]]:
    """Yield spans of sending times: of one second if paced, otherwise one span with all."""
    ends = [(int(b.send_ns[0]), int(b.send_ns[-1])) for b in batches.values() if len(b)]
    if not ends:
        return
    first, last = min(one for one, _ in ends), max(one for _, one in ends) + 1
    step = 1_000_000_000 if paced else last - first
    for begin in range(first, last, step):
        yield begin, min(begin + step, last)
