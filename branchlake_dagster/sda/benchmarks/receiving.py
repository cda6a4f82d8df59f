"""`branchlake bench receive`: measure the receivers of each protocol, each in a separate process."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from branchlake_dagster.receivers.landing import LOG_FILE, Landing
from branchlake_dagster.sda.commands.simulate import serve_pages
from branchlake_dagster.sda.feeds.network import Pages
from branchlake_dagster.sda.feeds.plan import Batch
from branchlake_dagster.sda.wire.columns import one_array, split_fixed
from branchlake_dagster.sda.wire.links import LINK, VERSION
from branchlake_dagster.sda.wire.optical import decode_optical
from branchlake_dagster.sda.wire.radar import RADAR

COMMAND = "from branchlake_dagster.cli import main; main()"
_ANYWHERE = "127.0.0.1:0"


class Receiver:
    """A running `branchlake sda receive` with one source."""

    def __init__(
        self, process: subprocess.Popen[str], ready: dict[str, Any], landing: Path, quiet_s: float
    ) -> None:
        self._process, self._landing, self._quiet_s = process, Landing(landing), quiet_s
        ((where, self.address),) = ready["sources"].items()
        self._topic = where.rpartition("/")[0]
        self._usage = psutil.Process(process.pid)

    def cpu_s(self) -> float:
        """Return the processor time that the process has used, in seconds."""
        used = self._usage.cpu_times()
        return float(used.user + used.system)

    def settle(self, expected: int) -> None:
        """Wait until `expected` records are in finished files, or until no more records arrive."""
        before, since = -1, time.monotonic()
        while before < expected and time.monotonic() - since < self._quiet_s:
            if (now := self._landing.offsets(self._topic, 0)[1]) != before:
                before, since = now, time.monotonic()
            time.sleep(0.1)

    def end(self) -> dict[str, Any]:
        """Terminate the receiver, and return its counts of its only source."""
        self._process.terminate()
        out, _ = self._process.communicate(timeout=60)
        account: dict[str, Any] = json.loads(out.strip().splitlines()[-1])["intakes"][0]
        return account

    def files(self) -> Iterator[tuple[float, float, pa.Table]]:
        """Yield (closed, opened, rows) of each finished file. The times are seconds since 1970.

        A record is durable once its file was closed.
        """
        closed = {}
        for line in (self._landing.topic_folder(self._topic) / LOG_FILE).read_text().splitlines():
            record = json.loads(line)
            if "first" in record:
                closed[record["first"]] = tuple(
                    datetime.fromisoformat(record[name]).timestamp() for name in ("closed", "opened")
                )
        for file in self._landing.files(self._topic, 0):
            yield *closed[file.first], pq.read_table(file.path, columns=["value"])

    def delays(self, sent_at: Any) -> npt.NDArray[np.float64]:
        """Return the seconds of each record from sending until it was durable.

        `sent_at` returns the times of sending (nanoseconds since 1970) from a column of values.
        """
        parts = [closed - sent_at(table["value"]) / 1e9 for closed, _, table in self.files()]
        return np.concatenate(parts) if parts else np.zeros(0)


@contextmanager
def start_receiver(
    folder: Path, option: str, where: str = _ANYWHERE, *, roll_s: float, quiet_s: float
) -> Iterator[Receiver]:
    """Start a receiver that writes to `folder`. It is killed at the end of the block.

    Args:
        folder: The landing folder.
        option: The option of `branchlake sda receive` that names the protocol.
        where: The address of the source.
        roll_s: The age at which a file is finished, s.
        quiet_s: How long `Receiver.settle` waits without new records, s.
    """
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", COMMAND, "receive", option, where),
            *("--landing", str(folder), "--roll-s", str(roll_s)),
            *("--monitor", _ANYWHERE, "--json"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if process.stdout is None or not (line := process.stdout.readline()):
            raise RuntimeError(process.communicate()[1])
        yield Receiver(process, json.loads(line), folder, quiet_s)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


PACED = {"udp": 10_000, "tcp": 10_000, "http": 1_000}
"""Records per second at which delays are measured, by protocol."""

_TICKS = 200
"""The number of times per second that a paced sender sends."""
_DATAGRAMS, _FRAMES, _ITEMS = 50, 1_000, 5_000
"""Records per call of `send` at full speed, by protocol: UDP, TCP, HTTP."""
_CONNECTIONS = 4
Send = Callable[[int], None]
Receive = Callable[..., AbstractContextManager[Receiver]]


def measure_receiving(
    *, seconds: float, roll_s: float, quiet_s: float = 5.0, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure each protocol for some seconds at full speed, and then at a steady rate. This process sends.

    Figures at full speed: ``offered_per_s`` is what the sender wrote. ``records_per_s`` counts durable
    records, from the first receipt to the last file. ``dropped`` is by reason: UDP has no back-pressure, so a
    fast sender shows how many datagrams are lost. ``unaccounted`` records were sent, but are neither durable
    nor counted as dropped. ``cpu_us`` is the receiver's processor time per durable record.

    Figures at the steady rate ``paced_per_s``: ``p50_s`` and ``p99_s`` are quantiles of the time from sending
    to durable. They contain `roll_s`, the age at which files are finished.

    A receiver is ended if nothing arrives for `quiet_s`.
    """
    found = {}
    for protocol, one in (("udp", _udp), ("tcp", _tcp), ("http", _http)):
        with tempfile.TemporaryDirectory(prefix="branchlake-bench-") as folder:
            found[protocol] = one(
                partial(start_receiver, roll_s=roll_s, quiet_s=quiet_s), Path(folder), seconds
            )
        say(f"{protocol}: {found[protocol]['records_per_s']:,} records/s")
    return found


def print_receiving(found: dict[str, Any]) -> None:
    """Print the figures as a table."""
    table = Table("", *found, title="receivers")
    for key in next(iter(found.values())):
        values = [found[protocol][key] for protocol in found]
        table.add_row(key, *(json.dumps(v) if isinstance(v, dict) else f"{v:,}" for v in values))
    Console().print(table)


def _udp(receive: Receive, folder: Path, seconds: float) -> dict[str, Any]:
    rows = np.zeros(1_000, RADAR)
    rows["array_id"], rows["range_m"] = 1, 1e6
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:

        def send(number: int) -> None:
            rows["timestamp_ns"][:number] = time.time_ns()
            data = memoryview(rows[:number].tobytes())
            for start in range(0, len(data), RADAR.itemsize):
                out.send(data[start : start + RADAR.itemsize])

        with receive(folder / "flat", "--radar") as one:
            out.connect(_address(one))
            flat = _flat_out(one, send, _DATAGRAMS, seconds)
        with receive(folder / "paced", "--radar") as one:
            out.connect(_address(one))
            return flat | _measure_paced(one, send, PACED["udp"], seconds, _time_of(RADAR))


def _tcp(receive: Receive, folder: Path, seconds: float) -> dict[str, Any]:
    framed = np.dtype([("length", "<u4"), ("frame", LINK)])
    rows = np.zeros(_FRAMES, framed)
    rows["length"], rows["frame"]["version"] = LINK.itemsize, VERSION
    outs: list[socket.socket] = []
    turn = 0

    def send(number: int) -> None:
        nonlocal turn
        rows["frame"]["timestamp_ns"][:number] = time.time_ns()
        outs[turn % len(outs)].sendall(rows[:number].tobytes())
        turn += 1

    @contextmanager
    def connected(one: Receiver) -> Iterator[None]:
        outs[:] = [socket.create_connection(_address(one)) for _ in range(_CONNECTIONS)]
        try:
            yield
        finally:
            for out in outs:
                out.close()

    with receive(folder / "flat", "--isl") as one, connected(one):
        flat = _flat_out(one, send, _FRAMES, seconds)
    with receive(folder / "paced", "--isl") as one, connected(one):
        return flat | _measure_paced(one, send, PACED["tcp"], seconds, _time_of(LINK))


def _http(receive: Receive, folder: Path, seconds: float) -> dict[str, Any]:
    with _serving() as (url, send):
        # All items exist before the first request, so that pages have their maximum size.
        for _ in range(int(20 * seconds)):
            send(_ITEMS)
        with receive(folder / "flat", "--optical", url) as one:
            flat = _figures(one, round(20 * seconds) * _ITEMS, 0.0, 0.0)
    with _serving() as (url, send), receive(folder / "paced", "--optical", url) as one:
        return flat | _measure_paced(one, send, PACED["http"], seconds, _time_of_items)


@contextmanager
def _serving() -> Iterator[tuple[str, Send]]:
    """Start an HTTP server of pages in a separate thread. Yields its URL and a function that adds records."""
    pages, ready, over = Pages(), threading.Event(), asyncio.Event()
    endpoints: list[tuple[str, asyncio.AbstractEventLoop]] = []

    async def serve() -> None:
        async with serve_pages(pages, "127.0.0.1", 0) as url:
            endpoints.append((url, asyncio.get_running_loop()))
            ready.set()
            await over.wait()

    serial = 0

    def send(number: int) -> None:
        nonlocal serial
        at = time.time_ns() + np.arange(number)
        texts = [
            b'{"obs_id":"00000000-0000-0000-0000-%012x","timestamp_ns":%d,"ra_rad":1.0,"dec_rad":0.5,"sigma_arcsec":1.0,'
            b'"site_id":"optical-01"}' % (serial + n, one)
            for n, one in enumerate(at.tolist())
        ]
        serial += number
        batch = Batch(at, at, pa.array(texts, pa.binary()), at)
        asyncio.run_coroutine_threadsafe(pages.send(batch), loop).result()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    ready.wait()
    ((url, loop),) = endpoints
    try:
        yield url, send
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


def _flat_out(one: Receiver, send: Send, at_once: int, seconds: float) -> dict[str, Any]:
    before, began, sent = one.cpu_s(), time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        send(at_once)
        sent += at_once
    return _figures(one, sent, time.perf_counter() - began, before)


def _figures(one: Receiver, sent: int, took_s: float, cpu_before_s: float) -> dict[str, Any]:
    one.settle(sent)
    cpu = one.cpu_s() - cpu_before_s
    account = one.end()
    landed = account["handed_over"]
    spans = [(opened, closed) for closed, opened, _ in one.files()]
    length = max(closed for _, closed in spans) - min(opened for opened, _ in spans)
    lost = sum(account["dropped"].values())
    return {
        "records_per_s": round(landed / length),
        "offered_per_s": round(sent / took_s) if took_s else round(sent / length),
        "dropped": account["dropped"],
        "unaccounted": sent - landed - lost,
        "cpu_us": round(cpu / landed * 1e6, 2),
    }


def _measure_paced(
    one: Receiver,
    send: Send,
    rate: int,
    seconds: float,
    sent_at: Callable[[pa.ChunkedArray], npt.NDArray[np.float64]],
) -> dict[str, Any]:
    before, began = one.cpu_s(), time.perf_counter()
    rounds = round(seconds * _TICKS)
    for number in range(rounds):
        wait_s = began + number / _TICKS - time.perf_counter()
        if wait_s > 0:
            time.sleep(wait_s)
        send(rate // _TICKS)
    took_s = time.perf_counter() - began
    one.settle(rounds * (rate // _TICKS))
    cpu = one.cpu_s() - before
    account = one.end()
    landed = account["handed_over"]
    delays = one.delays(sent_at)
    return {
        "paced_per_s": round(rounds * (rate // _TICKS) / took_s),
        "paced_dropped": sum(account["dropped"].values()),
        "paced_unaccounted": rounds * (rate // _TICKS) - landed - sum(account["dropped"].values()),
        "paced_cpu_share": round(cpu / took_s, 3),
        "p50_s": round(float(np.percentile(delays, 50)), 3),
        "p99_s": round(float(np.percentile(delays, 99)), 3),
    }


def _time_of(layout: np.dtype[Any]) -> Callable[[pa.ChunkedArray], npt.NDArray[np.float64]]:
    return lambda values: split_fixed(one_array(values), layout)[0]["timestamp_ns"].astype(np.float64)


def _time_of_items(values: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    decoded, _ = decode_optical(pa.chunked_array(values))
    return np.asarray(decoded["timestamp_ns"].to_numpy(zero_copy_only=False), dtype=np.float64)


def _address(one: Receiver) -> tuple[str, int]:
    host, port = one.address.split(":")
    return host, int(port)
