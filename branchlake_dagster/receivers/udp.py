"""The UDP source. UDP has no back-pressure: datagrams that do not fit are dropped and counted."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.receivers.allowed_peers import ALL_PEERS, AllowedPeers
from branchlake_dagster.receivers.records import Buffer, Counts, DropPolicy, Record, ResumeState

_MAX_READS = 256
"""The number of datagrams that are read before other tasks run."""
_MAX_ADDRESSES = 10_000
_LAST_READ_S = 1.0
_SO_RCVBUFFORCE = 33


@dataclass(frozen=True)
class UdpConfig:
    """The options of a UDP source.

    Args:
        host: The address to listen at.
        port: The port to listen at; 0 uses a free one.
        key_bytes: Position of the key in a datagram: its first byte, and the byte after its last. None uses
            the sender's address.
        most_bytes: The maximum size of a datagram. A larger one is dropped as ``too_large``.
        socket_buffer_bytes: The receive buffer to request. The kernel may give less (``net.core.rmem_max``).
        drop: The records to drop when the buffer is full.
        allowed: The networks that may send. Other datagrams are ignored and counted as ``peers_not_allowed``.

    """

    host: str
    port: int
    key_bytes: tuple[int, int] | None = None
    most_bytes: int = 1_500
    socket_buffer_bytes: int = 8 * 1024 * 1024
    drop: DropPolicy = "oldest"
    allowed: AllowedPeers = ALL_PEERS


class UdpSource:
    """The source that reads datagrams from one socket."""

    protocol = "udp"
    resumes = False
    task: asyncio.Task[None] | None = None

    def __init__(
        self, config: UdpConfig, buffer: Buffer, counts: Counts, *, now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self.config, self.trouble = config, ""
        self._buffer, self._counts, self._now_ns = buffer, counts, now_ns
        self._socket: socket.socket | None = None
        self._addresses: dict[tuple[str, int], bytes] = {}

    @property
    def address(self) -> str:
        """The address where the source listens; empty before the start."""
        return "" if self._socket is None else "{}:{}".format(*self._socket.getsockname()[:2])

    def resume(self, resume_state: ResumeState) -> None:
        """Does nothing: UDP senders do not repeat messages."""

    async def start(self) -> None:
        """Start to listen. Raises ConfigurationError if the address is not available."""
        host_port = (self.config.host, self.config.port)
        try:
            ((family, kind, _, _, address), *_) = await asyncio.get_running_loop().getaddrinfo(
                *host_port, type=socket.SOCK_DGRAM
            )
            udp_socket = socket.socket(family, kind)
        except OSError as error:
            raise ConfigurationError(f"Cannot open UDP {host_port[0]}:{host_port[1]}: {error}.") from error
        try:
            udp_socket.setblocking(False)
            _request_buffer(udp_socket, self.config.socket_buffer_bytes)
            udp_socket.bind(address)
        except OSError as error:
            udp_socket.close()
            raise ConfigurationError(
                f"Cannot listen at UDP address {host_port[0]}:{host_port[1]}: {error}.",
                hint="Use another port.",
                reason="address_in_use",
                subject=f"{host_port[0]}:{host_port[1]}",
            ) from error
        self._socket = udp_socket
        self._counts.events["socket_buffer_bytes"] = udp_socket.getsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF
        )
        asyncio.get_running_loop().add_reader(udp_socket, self._read)

    async def stop(self) -> None:
        """Read what the kernel has buffered, for at most a second, and close the socket."""
        if self._socket is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        until = loop.time() + _LAST_READ_S
        while self._read():
            if loop.time() >= until:
                # The kernel does not report how many datagrams are left.
                self._counts.events["left_unread"] = 1
                break
            await asyncio.sleep(0)
        self.update_counts()
        self._socket.close()
        self._socket = None

    def update_counts(self) -> None:
        """Read the number of datagrams that the kernel has dropped from this socket."""
        if self._socket is not None:
            self._counts.dropped["kernel"] = count_kernel_drops(os.fstat(self._socket.fileno()).st_ino)

    def _read(self) -> int:
        """Read available datagrams, up to a limit. Return their number."""
        if self._socket is None:
            return 0
        records: list[Record] = []
        key, most_bytes = self.config.key_bytes, self.config.most_bytes
        read = 0
        while read < _MAX_READS:
            try:
                data, peer = self._socket.recvfrom(most_bytes + 1)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:  # an ICMP answer to a packet of another sender; the socket stays usable
                self._counts.events["socket_errors"] += 1
                break
            read += 1
            if peer not in self._addresses and not self.config.allowed.permits(peer[0]):
                self._counts.events["peers_not_allowed"] += 1
                continue
            if len(data) > most_bytes:
                self._counts.dropped["too_large"] += 1
                continue
            sender = self._addresses.get(peer) or self._remember(peer)
            whole = key is not None and len(data) >= key[1]
            records.append(
                Record(data, data[key[0] : key[1]] if key and whole else sender, self._now_ns(), sender)
            )
        if records:
            self._buffer.offer(records, self.config.drop)
        return read

    def _remember(self, peer: tuple[str, int]) -> bytes:
        # Addresses can be forged, so limit how many are remembered.
        if len(self._addresses) >= _MAX_ADDRESSES:
            self._addresses.clear()
        self._addresses[peer] = f"{peer[0]}:{peer[1]}".encode()
        return self._addresses[peer]


def _request_buffer(udp_socket: socket.socket, size: int) -> None:
    """Request a receive buffer. Only a privileged process gets more than the kernel's limit."""
    try:
        udp_socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, size)
    except OSError:
        udp_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)


def count_kernel_drops(inode: int, tables: tuple[str, ...] = ("/proc/net/udp", "/proc/net/udp6")) -> int:
    """Return how many datagrams of the socket with this inode the kernel dropped; 0 if it is unknown."""
    for table in tables:
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if len(fields) > 12 and fields[9] == str(inode):
                return int(fields[12])
    return 0
