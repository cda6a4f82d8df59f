"""The UDP and the TCP source, and the networks that may send to them.

The check of networks is not authentication: UDP addresses can be forged. UDP has no back-pressure: datagrams
that do not fit are dropped and counted.

Each TCP frame follows its length, an unsigned 32-bit little-endian number. The protocol has back-pressure:
while the buffer is full nothing is read, and the sender's window closes. It has no acknowledgment above TCP's
own, so frames that a sender has written can be lost with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.receivers.records import Buffer, Counts, DropPolicy, Record, ResumeState


@dataclass(frozen=True)
class AllowedPeers:
    """The networks from which messages are accepted. Without networks all addresses are accepted."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def from_cidr(cls, cidrs: Iterable[str]) -> AllowedPeers:
        """Parse networks in CIDR notation, such as 10.1.0.0/16 or 2001:db8::/32, or single addresses.

        Without networks, all addresses are accepted. Raises ConfigurationError for other text.
        """
        parsed_networks = []
        for cidr in cidrs:
            try:
                parsed_networks.append(ip_network(cidr))
            except ValueError as error:
                raise ConfigurationError(
                    f"{cidr} is not a network in CIDR notation: {error}.",
                    hint="Write --allow 10.1.0.0/16, or --allow 10.1.2.3 for one address.",
                ) from error
        return cls(tuple(parsed_networks))

    def permits(self, host: str) -> bool:
        """Return whether messages from the numeric IP address `host` are accepted.

        A scope such as `%eth0` is ignored, and an IPv4 address mapped to IPv6 counts as IPv4. Raises
        ValueError for other text, unless all addresses are accepted.
        """
        if not self.networks:
            return True
        address = ip_address(host.partition("%")[0])
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped  # sockets for both IP versions use this form
        return any(address in network for network in self.networks)


ALL_PEERS = AllowedPeers()
"""Accepts all addresses."""


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
        """Do nothing with the state, because UDP senders do not repeat messages."""

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
        """Update the number of datagrams that the kernel has dropped from this socket."""
        if self._socket is not None:
            self._counts.dropped["kernel"] = count_kernel_drops(os.fstat(self._socket.fileno()).st_ino)

    def _read(self) -> int:
        """Move available datagrams, at most `_MAX_READS`, to the buffer. Return the number of datagrams."""
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
    """Request a receive buffer of `size` bytes from the kernel.

    Only a privileged process gets more than the kernel's limit (``net.core.rmem_max``); others get at most
    the limit, without an error.
    """
    try:
        udp_socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, size)
    except OSError:
        udp_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)


def count_kernel_drops(inode: int, tables: tuple[str, ...] = ("/proc/net/udp", "/proc/net/udp6")) -> int:
    """Return how many datagrams the kernel has dropped since the socket with this inode was opened.

    `tables` are the files in which Linux lists UDP sockets. Returns 0 if none of them has the socket.
    """
    for table in tables:
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if len(fields) > 12 and fields[9] == str(inode):
                return int(fields[12])
    return 0


_LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 64 * 1024
_LAST_STREAM_READ_S, _ENDING_S = 0.1, 1.5
_STALLED_S = 0.5
"""A timer that fires later than this shows that the process did not get CPU time or memory."""


@dataclass(frozen=True)
class TcpConfig:
    """The options of a TCP source.

    Args:
        host: The address to listen at.
        port: The port to listen at; 0 uses a free one.
        key_bytes: Position of the key in a frame: its first byte, and the byte after its last. None uses the
            sender's address and port.
        most_frame_bytes: The maximum size of a frame. A longer frame is garbage and ends its connection.
        most_connections: The maximum number of connections. Further ones are closed at once.
        most_connections_per_peer: The same for one network address, so that one sender cannot use all of
            them.
        allowed: The networks that may connect. Other connections are closed at once.
        idle_s: A connection without any byte for this time counts as half open and is closed.
        frame_s: A frame that is incomplete after this time ends its connection.

    """

    host: str
    port: int
    key_bytes: tuple[int, int] | None = None
    most_frame_bytes: int = 65_536
    most_connections: int = 1_000
    most_connections_per_peer: int = 100
    allowed: AllowedPeers = ALL_PEERS
    idle_s: float = 60.0
    frame_s: float = 10.0


class TcpSource:
    """The source that accepts TCP connections and reads their frames."""

    protocol = "tcp"
    resumes = False
    task: asyncio.Task[None] | None = None

    def __init__(
        self, config: TcpConfig, buffer: Buffer, counts: Counts, *, now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self.config, self.trouble = config, ""
        self.connections: dict[asyncio.Task[None], _TcpConnection] = {}
        self._by_peer: Counter[str] = Counter()
        self._buffer, self._counts, self._now_ns = buffer, counts, now_ns
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """The address where the source listens; empty before the start."""
        if self._server is None or not self._server.sockets:
            return ""
        return "{}:{}".format(*self._server.sockets[0].getsockname()[:2])

    def resume(self, resume_state: ResumeState) -> None:
        """Do nothing with the state, because TCP senders do not repeat messages."""

    async def start(self) -> None:
        """Start to listen. Raises ConfigurationError if the address is not available."""
        host_port = (self.config.host, self.config.port)
        try:
            self._server = await asyncio.start_server(self._serve, *host_port, limit=2 * _CHUNK_BYTES)
        except OSError as error:
            raise ConfigurationError(
                f"Cannot listen at TCP address {host_port[0]}:{host_port[1]}: {error}.",
                hint="Use another port.",
                reason="address_in_use",
                subject=f"{host_port[0]}:{host_port[1]}",
            ) from error

    async def stop(self) -> None:
        """Accept no more connections, read what has already arrived, and close the connections."""
        if self._server is None:
            return
        self._server.close()
        for connection in self.connections.values():
            connection.finish()
        if self.connections:
            tasks = list(self.connections)
            await asyncio.wait(tasks, timeout=_ENDING_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._server = None

    def update_counts(self) -> None:
        """Do nothing, because the operating system keeps no counts for TCP that are needed."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        peer = str((writer.get_extra_info("peername") or ("",))[0])
        if peer and not self.config.allowed.permits(peer):
            self._counts.events["peers_not_allowed"] += 1
            writer.close()
            return
        too_many = (
            len(self.connections) >= self.config.most_connections
            or self._by_peer[peer] >= self.config.most_connections_per_peer
        )
        if task is None or too_many:
            self._counts.events["refused_connections"] += 1
            writer.close()
            return
        self._by_peer[peer] += 1
        self._counts.events["connections"] += 1
        connection = _TcpConnection(reader, writer, self.config)
        self.connections[task] = connection
        try:
            reason = await connection.read(self._put_frames)
        except asyncio.CancelledError:
            # Only `stop` cancels this task.
            reason = "ended"
        finally:
            del self.connections[task]
            self._by_peer -= Counter([peer])
            writer.close()
        self._counts.events[f"closed_{reason}"] += 1
        if connection.incomplete_bytes:
            self._counts.events["incomplete_frames"] += 1
            self._counts.events["incomplete_bytes"] += connection.incomplete_bytes
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def _put_frames(self, frames: list[bytes], source: bytes) -> None:
        key, now = self.config.key_bytes, self._now_ns()
        await self._buffer.put(
            [
                Record(frame, frame[key[0] : key[1]] if key and len(frame) >= key[1] else source, now, source)
                for frame in frames
            ]
        )


class _TcpConnection:
    """One connection, from which frames are read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, config: TcpConfig) -> None:
        self._reader, self._config = reader, config
        self._waiting: asyncio.Timeout | None = None
        self._finishing = False
        self._data = bytearray()
        peer = writer.get_extra_info("peername")
        self.source = f"{peer[0]}:{peer[1]}".encode() if peer else b"unknown"
        raw_socket = writer.get_extra_info("socket")
        if raw_socket is not None:
            raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @property
    def incomplete_bytes(self) -> int:
        """The number of bytes of the last frame, which is not complete yet; 0 between two frames."""
        return len(self._data)

    def finish(self) -> None:
        """Let `read` end when no more bytes arrive immediately."""
        self._finishing = True
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time() + _LAST_STREAM_READ_S)

    async def read(self, put_frames: Callable[[list[bytes], bytes], Awaitable[None]]) -> str:
        """Pass frames to `put_frames` until the connection ends. Return the reason of its end as a word.

        The words are `by_sender`, `truncated`, `reset`, `garbage`, `idle`, `slow` and `ended`.
        """
        loop = asyncio.get_running_loop()
        frame_started, is_last_read = 0.0, False
        while True:
            timeout_s = self._config.idle_s
            if self._data:
                timeout_s = min(timeout_s, max(0.0, frame_started + self._config.frame_s - loop.time()))
            if self._finishing:
                timeout_s = 0.0 if is_last_read else _LAST_STREAM_READ_S
            due = loop.time() + timeout_s
            try:
                async with asyncio.timeout(timeout_s) as self._waiting:
                    chunk = await self._reader.read(_CHUNK_BYTES)
            except TimeoutError:
                if not self._finishing and loop.time() - due > _STALLED_S:
                    # This process is late: it has not yet read what arrived meanwhile.
                    frame_started = loop.time()
                    continue
                if self._finishing and not is_last_read:
                    # Bytes that arrived together with the timeout are in the reader.
                    is_last_read = True
                    continue
                return "ended" if self._finishing else "slow" if self._data else "idle"
            except OSError:
                return "reset"
            finally:
                self._waiting = None
            is_last_read = False
            if not chunk:
                return "truncated" if self._data else "by_sender"
            if not self._data:
                frame_started = loop.time()
            self._data += chunk
            frames, garbage = self._take_frames()
            if frames:
                await put_frames(frames, self.source)
                frame_started = loop.time()
            if garbage:
                return "garbage"

    def _take_frames(self) -> tuple[list[bytes], bool]:
        """Remove the complete frames from the received bytes. Return them, and whether garbage follows.

        Garbage is a length of 0 or above the maximum: the rest of the connection cannot be read then.
        """
        frames: list[bytes] = []
        position, data_length = 0, len(self._data)
        view = memoryview(self._data)
        garbage = False
        while data_length - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(view, position)
            if not 0 < length <= self._config.most_frame_bytes:
                garbage = True
                break
            end = position + _LENGTH.size + length
            if end > data_length:
                break
            frames.append(bytes(view[position + _LENGTH.size : end]))
            position = end
        view.release()
        del self._data[:position]
        return frames, garbage
