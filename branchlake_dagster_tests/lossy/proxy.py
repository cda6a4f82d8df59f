"""An HTTP proxy on loopback that loses, delays and spoils what passes between a client and Nessie."""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from branchlake_dagster_tests.lossy.faults import Dice, Draw, Fault

_LOOPBACK = "127.0.0.1"
_PATIENCE_S = 60.0
_OWN_HEADERS = {"connection", "keep-alive", "transfer-encoding", "host", "content-length", "accept-encoding"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def changes(self) -> bool:
        """Whether Nessie's state may differ afterwards; contents are read with a POST too."""
        return self.method != "GET" and not self.path.partition("?")[0].endswith("/contents")


@dataclass(frozen=True)
class _Reply:
    status: int
    kind: str
    body: bytes


class LossyProxy:
    """Listens on a free port of loopback until it is closed; `uri` stands for `upstream` (…/api/v2)."""

    def __init__(self, upstream: str, dice: Dice) -> None:
        parts = urlsplit(upstream)
        assert parts.hostname is not None
        self._server = (parts.hostname, parts.port or 80)
        self.dice = dice
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._late = 0
        self._refusing_until = 0.0
        self._closed = False
        self._listener = _bound(0)
        self.port: int = self._listener.getsockname()[1]
        self.uri = f"http://{_LOOPBACK}:{self.port}{parts.path}"
        self._listener.listen(128)
        self._listening = threading.Event()
        self._listening.set()
        self._thread = threading.Thread(target=self._accept, name="lossy proxy", daemon=True)
        self._thread.start()

    def heal(self) -> None:
        """From now on everything passes; returns when whatever was held back has been applied."""
        self.dice.rate = 0.0
        deadline = time.monotonic() + _PATIENCE_S
        while self._late or not self._listening.is_set():
            assert time.monotonic() < deadline, "a late request was never answered"
            time.sleep(0.05)

    def close(self) -> None:
        """Stop listening and break what is open."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(5.0)
        self._listener.close()
        with self._lock:
            left = list(self._open)
        for one in left:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # its thread wakes up and closes it

    # -- connections -----------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, address = self._listener.accept()
            except OSError:
                self._listen_again()
                continue
            with self._lock:
                self._open.add(connection)
            threading.Thread(target=self._converse, args=(connection, address), daemon=True).start()

    def _listen_again(self) -> None:
        """After a refusal. The port is never free: a socket that does not listen yet holds it, and refuses."""
        old, fresh = self._listener, _bound(self.port)
        old.close()
        while not self._closed and (wait := self._refusing_until - time.monotonic()) > 0:
            time.sleep(min(wait, 0.2))
        fresh.listen(128)
        self._listener = fresh
        self._listening.set()

    def _converse(self, connection: socket.socket, address: Any) -> None:
        proxy = self

        class Conversation(_Conversation):
            """Bound to this proxy."""

            def answer(self, request: _Request) -> None:
                proxy._fate(self, request)

        try:
            Conversation(connection, address, None)
        except OSError:
            pass  # the client went away, or we have broken it
        finally:
            with self._lock:
                self._open.discard(connection)
            with contextlib.suppress(OSError):
                connection.close()

    # -- one request -----------------------------------------------------------------------------------

    def _fate(self, conversation: _Conversation, request: _Request) -> None:
        draw = self.dice.draw(changes=request.changes)
        match draw.fault:
            case Fault.REFUSED:
                self._listening.clear()
                self._refusing_until = time.monotonic() + draw.delay_s
                with contextlib.suppress(OSError):
                    self._listener.shutdown(socket.SHUT_RDWR)
                conversation.reset()
            case Fault.RESET:
                conversation.reset()
            case Fault.LATE:
                with self._lock:
                    self._late += 1
                threading.Thread(target=self._apply_late, args=(request, draw.delay_s), daemon=True).start()
                conversation.reset()
            case Fault.BUSY:
                conversation.reply(_refusal(429, "Too Many Requests"))
            case Fault.AWAY:
                conversation.reply(_refusal(503, "Service Unavailable"))
            case _:
                self._passed(conversation, request, draw)

    def _passed(self, conversation: _Conversation, request: _Request, draw: Draw) -> None:
        """A request that Nessie sees while the client waits."""
        if draw.fault is Fault.SLOW:
            time.sleep(draw.delay_s / 2)
        reply = self._send(request)
        match draw.fault:
            case Fault.SLOW:
                time.sleep(draw.delay_s / 2)
            case Fault.LOST:
                conversation.reset()
                return
            case Fault.FELL_OVER:
                conversation.reply(_refusal(500, "Internal Server Error"))
                return
            case Fault.CUT:
                conversation.reply(reply, cut=int(len(reply.body) * draw.part))
                return
            case Fault.GARBLED:
                body = reply.body[: int(len(reply.body) * draw.part)]
                conversation.reply(_Reply(reply.status, reply.kind, body))
                return
        conversation.reply(reply)

    def _apply_late(self, request: _Request, delay_s: float) -> None:
        time.sleep(delay_s)
        try:
            self._send(request)
        finally:
            with self._lock:
                self._late -= 1

    def _send(self, request: _Request) -> _Reply:
        connection = http.client.HTTPConnection(*self._server, timeout=_PATIENCE_S)
        try:
            connection.request(request.method, request.path, request.body or None, request.headers)
            answer = connection.getresponse()
            return _Reply(answer.status, answer.headers.get("Content-Type", ""), answer.read())
        finally:
            connection.close()


def _bound(port: int) -> socket.socket:
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    found.bind((_LOOPBACK, port))
    return found


class _Conversation(BaseHTTPRequestHandler):
    """The requests of one connection, one after the other."""

    protocol_version = "HTTP/1.1"

    def answer(self, request: _Request) -> None:
        """Do something about a request."""
        raise NotImplementedError

    def _any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        kept = {name: value for name, value in self.headers.items() if name.lower() not in _OWN_HEADERS}
        self.answer(_Request(self.command, self.path, kept, self.rfile.read(length)))

    do_GET = do_POST = do_PUT = do_DELETE = _any  # noqa: N815 - the base class asks for these names

    def reply(self, reply: _Reply, *, cut: int | None = None) -> None:
        """Send a whole answer; with `cut` only so many bytes of the body that the headers promise."""
        self.send_response(reply.status)
        if reply.kind:
            self.send_header("Content-Type", reply.kind)
        if reply.status != http.client.NO_CONTENT:
            self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body[:cut])
        if cut is not None and cut < len(reply.body):
            self.wfile.flush()
            self.close_connection = True

    def reset(self) -> None:
        """End the connection with a reset instead of an answer."""
        self.close_connection = True
        _break(self.connection)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        _log.debug(format, *args)


def _break(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # No time to linger: the other side gets a reset.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def _refusal(status: int, reason: str) -> _Reply:
    """As a load balancer in front of Nessie says it: without Nessie's JSON."""
    return _Reply(status, "text/html", f"<html><title>{reason}</title></html>".encode())


@contextmanager
def lossy_proxy(upstream: str, dice: Dice) -> Iterator[LossyProxy]:
    """A proxy that is closed on leaving."""
    proxy = LossyProxy(upstream, dice)
    try:
        yield proxy
    finally:
        proxy.close()
