"""Send a simulated feed over the network: as UDP datagrams, as pages over HTTP, and as frames over TCP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from branchlake_dagster.sda.feeds.feed import Feed
from branchlake_dagster.sda.feeds.plan import Batch, split_bytes

_TICK_S = 0.005
_DAY_NS = 86_400_000_000_000
_LENGTH = struct.Struct("<I")


class Datagrams:
    """Sends each value as a UDP datagram to one receiver."""

    def __init__(self, host: str, port: int) -> None:
        self.refused = 0
        """The number of datagrams that the local system did not accept. They are lost."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.connect((host, port))
        self._socket.setblocking(False)

    async def send(self, batch: Batch) -> None:
        """Send all values of a batch at once."""
        for piece in split_bytes(batch.values):
            try:
                self._socket.send(piece)
            except BlockingIOError:
                await asyncio.sleep(0)
                self._retry(piece)
            except ConnectionRefusedError:
                # The error belongs to an earlier datagram without a receiver. This one was not sent.
                self._retry(piece)

    def _retry(self, piece: memoryview) -> None:
        try:
            self._socket.send(piece)
        except OSError:
            self.refused += 1

    async def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class Frames:
    """Sends each value as a frame with its length in front.

    All frames of a sensor use the same connection, so that they stay in order.
    """

    def __init__(self, host: str, port: int, connections: int) -> None:
        self.reconnected = 0
        self.refused = 0
        """The number of frames that found their connection closed. Earlier frames may be lost, too."""
        self._where = (host, port)
        self._streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter] | None] = [None] * connections

    @property
    def closed_count(self) -> int:
        """The number of connections that the receiver has closed."""
        return sum(known is not None and _is_closed(known) for known in self._streams)

    async def send(self, batch: Batch) -> None:
        """Send all values of a batch, as fast as the receiver reads.

        A closed connection is opened again. Frames that a failed connection did not send are counted in
        `refused`.
        """
        number = len(self._streams)
        values = split_bytes(batch.values)
        streams: list[list[bytes | memoryview]] = [[] for _ in range(number)]
        for value, sensor in zip(values, batch.sensor.tolist(), strict=True):
            streams[sensor % number] += (_LENGTH.pack(len(value)), value)
        await asyncio.gather(*(self._write(one, stream) for one, stream in enumerate(streams) if stream))

    async def _write(self, one: int, stream: list[bytes | memoryview]) -> None:
        known = self._streams[one]
        try:
            if known is not None and _is_closed(known):
                known[1].close()
                self.reconnected += 1
                known = self._streams[one] = None
            if known is None:
                known = self._streams[one] = await asyncio.open_connection(*self._where)
            _, writer = known
            writer.write(b"".join(stream))
            await writer.drain()
        except OSError:
            self.refused += len(stream) // 2

    async def close(self) -> None:
        """Close the connections after everything is written."""
        for known in self._streams:
            if known is not None:
                known[1].close()
                with contextlib.suppress(OSError):
                    await known[1].wait_closed()


def _is_closed(known: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bool:
    """Return whether the receiver has closed the connection. The next write would not fail, but be lost."""
    return known[0].at_eof() or known[1].is_closing()


class Answer(NamedTuple):
    """The response of a server of pages."""

    status: int
    body: bytes = b""
    retry_after_s: int | None = None


@dataclass
class Pages:
    """The items of the last 24 hours, ordered by time of measurement, which are served in pages.

    A request has the parameters ``since``, ``limit`` and ``wait_ms``. The response has items later than
    ``since``. If there are none, it waits up to ``wait_ms``. If `fault_every` is not 0, every such request
    gets a fault: in turns status 500, status 429 with Retry-After, and half a page.
    """

    fault_every: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    _items: list[tuple[int, int, bytes]] = field(default_factory=list)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _taken: int = 0
    _asked: int = 0

    async def send(self, batch: Batch) -> None:
        """Add the values of a batch to the pages. Items older than a day are removed."""
        for at, value in zip(batch.measured_ns.tolist(), split_bytes(batch.values), strict=True):
            self._taken += 1
            entry = (at, self._taken, bytes(value))
            if not self._items or self._items[-1] < entry:
                self._items.append(entry)
            else:
                insort(self._items, entry)
        if len(batch):
            old = bisect_right(self._items, (self._items[-1][0] - _DAY_NS,))
            del self._items[:old]
            self._arrived.set()
            self._arrived = asyncio.Event()

    async def close(self) -> None:
        """Do nothing. There is no connection to close."""

    async def answer(self, query: Mapping[str, str]) -> Answer:
        """Return the response to a request with these query parameters."""
        try:
            since, limit, wait_ms = (
                int(query.get(name, default))
                for name, default in (("since", "0"), ("limit", "5000"), ("wait_ms", "0"))
            )
        except ValueError:
            return Answer(400, b"since, limit and wait_ms are integers")
        self._asked += 1
        if self.fault_every and self._asked % self.fault_every == 0:
            return self._fault()
        start = bisect_right(self._items, (since, _ALL))
        if start == len(self._items) and wait_ms > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_ms, 60_000) / 1_000):
                    await self._arrived.wait()
            start = bisect_right(self._items, (since, _ALL))
        end = min(start + max(limit, 1), len(self._items))
        # Items with equal times stay on one page, because the next page begins after that time.
        while 0 < end < len(self._items) and self._items[end][0] == self._items[end - 1][0]:
            end += 1
        return Answer(200, b"[" + b",".join(value for _, _, value in self._items[start:end]) + b"]")

    def _fault(self) -> Answer:
        kind = ("server_error", "throttled", "malformed")[self._asked // self.fault_every % 3]
        self.faults[kind] += 1
        if kind == "server_error":
            return Answer(500)
        if kind == "throttled":
            return Answer(429, retry_after_s=1)
        return Answer(200, b'[{"obs_id": "half')


_ALL = 2**62


Outlet = Datagrams | Frames | Pages


async def run_over(
    feed: Feed,
    outlets: dict[str, Outlet],
    stop: asyncio.Event,
    *,
    now_ns: Callable[[], int] = time.time_ns,
) -> dict[str, int]:
    """Send all messages at their times, until the end of the feed or until `stop` is set.

    Returns the number of sent messages by kind. The next window is simulated while the present one is sent.
    """
    sent = dict.fromkeys(outlets, 0)
    windows = feed.windows()
    coming = asyncio.create_task(asyncio.to_thread(next, windows, None))
    while (window := await coming) is not None:
        coming = asyncio.create_task(asyncio.to_thread(next, windows, None))
        _, batches = window
        done = await asyncio.gather(
            *(
                _send_paced(outlets[kind], batch, stop, now_ns)
                for kind, batch in batches.items()
                if kind in outlets
            )
        )
        for kind, number in zip((k for k in batches if k in outlets), done, strict=True):
            sent[kind] += number
        if stop.is_set():
            await coming
            break
    return sent


async def _send_paced(outlet: Outlet, batch: Batch, stop: asyncio.Event, now_ns: Callable[[], int]) -> int:
    """Send the messages of a window at their times. Return the number sent before `stop`."""
    done = 0
    while done < len(batch) and not stop.is_set():
        due = int(np.searchsorted(batch.send_ns, now_ns(), side="right"))
        if due > done:
            await outlet.send(batch.take(np.arange(done, due)))
            done = due
        if done < len(batch):
            wait_s = max(_TICK_S, min(0.5, (int(batch.send_ns[done]) - now_ns()) / 1e9))
            await asyncio.sleep(wait_s)
    return done
