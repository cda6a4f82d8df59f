"""Each fault does to a request what its name says, as our own client sees it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from branchlake_dagster.nessie.errors import NessieOutcomeUnknown, NessieUnavailable
from branchlake_dagster.nessie.transport import HttpTransport
from branchlake_dagster_tests.lossy.faults import Dice, Draw, Fault
from branchlake_dagster_tests.lossy.proxy import LossyProxy, lossy_proxy
from branchlake_dagster_tests.suite.raised import raising


class Loaded(Dice):
    """Dice that fall as they are told; afterwards nothing happens."""

    def __init__(self) -> None:
        super().__init__(0, 0.0)
        self.next: list[Draw] = []

    def draw(self, *, changes: bool) -> Draw:
        super().draw(changes=changes)
        return self.next.pop(0) if self.next else Draw(None)


class Upstream(ThreadingHTTPServer):
    """Answers everything with the same JSON and remembers what it was asked."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        super().__init__(("127.0.0.1", 0), Answers)


class Answers(BaseHTTPRequestHandler):
    server: Upstream

    def do_GET(self) -> None:
        self.server.seen.append(f"{self.command} {self.path} {self.headers['Authorization']}")
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b'{"answer": "0123456789"}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_DELETE = do_GET  # noqa: N815 - the base class asks for these names

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with Upstream() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def proxy(upstream: Upstream) -> Iterator[LossyProxy]:
    with lossy_proxy(f"http://127.0.0.1:{upstream.server_port}/api/v2", Loaded()) as found:
        yield found


@pytest.fixture
def transport(proxy: LossyProxy) -> Iterator[HttpTransport]:
    found = HttpTransport(proxy.uri, token="t", verify=True, connect_timeout_s=3.0, read_timeout_s=10.0)
    yield found
    found.close()


def read(transport: HttpTransport) -> str:
    return transport.send("GET", "trees", lambda data: str(data["answer"]), action="read", changes=False)


def change(transport: HttpTransport) -> str:
    return transport.send(
        "POST", "trees", lambda data: str(data["answer"]), action="do", changes=True, body={}
    )


def load(proxy: LossyProxy, *draws: Draw) -> None:
    assert isinstance(proxy.dice, Loaded)
    proxy.dice.next += draws


def test_an_undamaged_reply_passes_with_its_token(
    proxy: LossyProxy, upstream: Upstream, transport: HttpTransport
) -> None:
    load(proxy, Draw(None), Draw(Fault.SLOW, 0.1))
    assert read(transport) == change(transport) == "0123456789"
    assert upstream.seen == ["GET /api/v2/trees Bearer t", "POST /api/v2/trees Bearer t"]
    assert proxy.dice.requests == 2


@pytest.mark.parametrize(
    ("fault", "applied"), [(Fault.RESET, 0), (Fault.AWAY, 0), (Fault.LOST, 1), (Fault.FELL_OVER, 1)]
)
def test_a_change_whose_outcome_nobody_knows(
    proxy: LossyProxy, upstream: Upstream, transport: HttpTransport, fault: Fault, applied: int
) -> None:
    load(proxy, Draw(fault))
    with pytest.raises(NessieOutcomeUnknown):
        change(transport)
    assert len(upstream.seen) == applied
    assert change(transport) == "0123456789"


def test_a_late_request_is_applied_after_the_clients_next_one(
    proxy: LossyProxy, upstream: Upstream, transport: HttpTransport
) -> None:
    load(proxy, Draw(Fault.LATE, 2.0))
    with pytest.raises(NessieOutcomeUnknown):
        change(transport)
    read(transport)
    assert [line.split()[0] for line in upstream.seen] == ["GET"]
    proxy.heal()  # it waits for what is held back
    assert [line.split()[0] for line in upstream.seen] == ["GET", "POST"]


@pytest.mark.parametrize("draw", [Draw(Fault.CUT, part=0.5), Draw(Fault.GARBLED, part=0.5), Draw(Fault.BUSY)])
def test_a_read_that_may_simply_be_made_again(
    proxy: LossyProxy, transport: HttpTransport, draw: Draw
) -> None:
    load(proxy, draw)
    with pytest.raises(NessieUnavailable):
        read(transport)
    assert read(transport) == "0123456789"


@pytest.mark.long
def test_connections_are_refused_for_a_while_again_and_again(
    proxy: LossyProxy, upstream: Upstream, transport: HttpTransport
) -> None:
    for _ in range(2):
        load(proxy, Draw(Fault.REFUSED, 1.5))
        with pytest.raises(NessieOutcomeUnknown):
            change(transport)
        with raising(NessieUnavailable, "NewConnectionError", reason="no_connection"):
            change(transport)
        proxy.heal()  # it waits for that
        assert change(transport) == "0123456789"
    assert len(upstream.seen) == 2


def test_the_dice_fall_by_their_seed() -> None:
    def falls(seed: int) -> list[Draw]:
        dice = Dice(seed, 0.5)
        return [dice.draw(changes=number % 2 == 0) for number in range(200)]

    assert falls(1) == falls(1) != falls(2)
    assert {draw.fault for draw in falls(1)} == {None, *Fault}
