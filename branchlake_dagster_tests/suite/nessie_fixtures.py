"""Fixtures for tests of Nessie's client: branches on the shared server, and a server with scripted answers."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from branchlake_dagster.nessie import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound


@pytest.fixture
def client(nessie_uri: str) -> Iterator[NessieClient]:
    with NessieClient(nessie_uri) as nessie:
        yield nessie


@pytest.fixture
def new_branch(client: NessieClient) -> Iterator[Callable[..., str]]:
    """Creates branches, empty or at a hash of another branch. They are deleted after the test."""
    made: list[str] = []

    def make(from_ref: str = "main", from_hash: str | None = None) -> str:
        name = f"test/{uuid.uuid4().hex[:12]}"
        client.create_branch(name, from_ref=from_ref, from_hash=from_hash or client.config().no_ancestor_hash)
        made.append(name)
        return name

    yield make
    for name in made:
        try:
            client.delete_branch(name, expected_hash=client.reference(name).hash)
        except ReferenceNotFound:
            continue


@pytest.fixture
def fresh_branch(new_branch: Callable[..., str]) -> str:
    """An empty branch."""
    return new_branch()


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class FakeServer:
    """Gives the answers of `script` in order and repeats the last one. None closes the connection without an answer."""

    uri: str = ""
    script: list[tuple[int, Any] | None] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    connections: set[Any] = field(default_factory=set)


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            fake.requests.append(Request(self.command, self.path, dict(self.headers), body))
            fake.connections.add(self.client_address)
            step = fake.script.pop(0) if len(fake.script) > 1 else fake.script[0]
            if step is None:
                self.close_connection = True
                return
            status, payload = step
            data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = answer  # noqa: N815 - http.server's names

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    fake.uri = f"http://127.0.0.1:{server.server_port}/api/v2"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield fake
    server.shutdown()
    server.server_close()
    thread.join()
