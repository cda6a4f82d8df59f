"""A Nessie that wants to know who asks: a reverse proxy that lets bearers of the right token through.

Nessie itself takes tokens of an identity provider, or of one key (`embedded/test_token.py`), and each may do all;
what its clients see of that is what this does.
It is careless on purpose: every error body echoes the header it got, plain and as other programs would
escape it, so that a client that passes on what a server says gives the token away.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

# Ends and divides like base64, whose characters JSON writers and URLs escape.
TOKEN = "full.Zm9v+YmFy/cXV4eHl6enk=="
READ_ONLY = "read.b25seSt0b2/a2VuaGVyZQ=="
EXPIRED = "gone.ZXhwaXJlZCt0b2/tlbmJhcg=="

_READING_POSTS = ("/contents",)
"""Requests that read although they are POSTs."""

_PASSED_ON = ("accept", "content-type", "content-encoding", "nessie-client-spec")


class Asked(NamedTuple):
    """One request and what became of it."""

    method: str
    path: str
    header: str | None
    status: int


class Guard(ThreadingHTTPServer):
    """Stands before the Nessie at `target`. `asked` has each request."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(target).netloc
        self.full, self.read_only = {TOKEN}, {READ_ONLY}
        self.asked: list[Asked] = []

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/api/v2"

    def refusal(self, method: str, path: str, header: str | None) -> int | None:
        """The status of a request that is not let through."""
        token = header.removeprefix("Bearer ") if header and header.startswith("Bearer ") else None
        if token in self.full:
            return None
        if token not in self.read_only:
            return 401
        reads = method == "GET" or (method == "POST" and path.partition("?")[0].endswith(_READING_POSTS))
        return None if reads else 403

    def refused(self, status: int, header: str | None) -> bytes:
        """The body that goes with a refusal."""
        reason = {401: "Unauthorized", 403: "Forbidden"}[status]
        told = {"status": status, "reason": reason, "message": echoes(header), "errorCode": reason.upper()}
        return _escaped(told)

    def handle_error(self, *_: object) -> None:
        """A client that hung up is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: Guard
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _answer(self) -> None:
        body = self._body()
        header = self.headers.get("Authorization")
        status = self.server.refusal(self.command, self.path, header)
        if status is not None:
            self._send(status, "application/json", self.server.refused(status, header))
            return
        status, kind, answer = self._forward(body)
        if status >= 400:
            answer = _with_echo(answer, header)
        self._send(status, kind, answer)

    do_GET = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815 - http.server's names

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _forward(self, body: bytes) -> tuple[int, str, bytes]:
        headers = {name: value for name, value in self.headers.items() if name.lower() in _PASSED_ON}
        connection = http.client.HTTPConnection(self.server.target, timeout=30)
        try:
            connection.request(self.command, self.path, body or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheader("Content-Type") or "application/json", answer.read()
        finally:
            connection.close()

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.server.asked.append(Asked(self.command, self.path, self.headers.get("Authorization"), status))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def echoes(header: str | None) -> str:
    """The header as it came, and as a URL has it."""
    return f"you sent '{header}' ({quote(header or '', safe='')})"


def forms(token: str) -> tuple[str, ...]:
    """What to look for: the token as it is, as a URL has it, and as cautious JSON writers do."""
    return token, quote(token, safe=""), token.replace("=", "\\u003d")


def shows(text: str, token: str) -> bool:
    """Whether somebody who reads the text can learn the token."""
    return any(form in text for form in forms(token))


def _with_echo(body: bytes, header: str | None) -> bytes:
    try:
        told = json.loads(body)
        told["message"] = f"{told.get('message')}; {echoes(header)}"
    except (ValueError, TypeError):
        return body
    return _escaped(told)


def _escaped(told: dict[str, Any]) -> bytes:
    """JSON as writers for HTML pages escape it (Gson does): the text is not in the bytes, only in the value."""
    return json.dumps(told).replace("=", "\\u003d").replace("+", "\\u002b").encode()


@contextmanager
def guarding(target: str) -> Iterator[Guard]:
    """A guard before the Nessie at `target`."""
    guard = Guard(target)
    thread = threading.Thread(target=guard.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield guard
    finally:
        guard.shutdown()
        guard.server_close()
        thread.join()
