"""The webhook sensor of docs/space-conjunctions.md, as it is printed there."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import requests

from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.sda.commands.alert_reader import AlertReader, cursor_of
from branchlake_dagster_tests.sda.alerts.alert_log import AlertLog, alert_id, entry

PAGE = Path(__file__).parents[3] / "docs" / "space-conjunctions.md"


class Receiver:
    """A web server that keeps what is posted, and refuses as many requests as a test wants."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, int, str]] = []
        self.refuse_from: int | None = None
        self.refuse_with = 503
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.posted.append((body["alert_id"], body["sequence"], body["kind"]))
                limit = receiver.refuse_from
                refused = limit is not None and len(receiver.posted) > limit
                self.send_response(receiver.refuse_with if refused else 204)
                self.send_header("Location", "/login")
                self.end_headers()

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    one = Receiver()
    thread = threading.Thread(target=one.server.serve_forever, args=(0.05,))
    thread.start()
    yield one
    one.server.shutdown()
    thread.join()
    one.server.server_close()


def test_the_sensor_posts_each_publication_at_least_once(
    log: AlertLog, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALERT_WEBHOOK_URL", f"http://127.0.0.1:{receiver.server.server_port}/alerts")
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (text,) = [block for block in blocks if "def alert_webhook" in block]
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(text, "example", "exec", dont_inherit=True), names)
    lakehouse = LakehouseResource.from_settings(log.lake.settings)

    def tick(cursor: str | None) -> str | None:
        with dg.build_sensor_context(cursor=cursor, resources={"lakehouse": lakehouse}) as context:
            names["alert_webhook"](context)
            return context.cursor

    assert tick(None) is None  # there is no table
    log.publish(entry(1), entry(2))
    log.publish(entry(1, 0, "retract"))
    first = tick(None)
    assert receiver.posted == [(alert_id(1), 0, "insert"), (alert_id(2), 0, "insert")]
    second = tick(first)
    assert receiver.posted[2:] == [(alert_id(1), 0, "retract")]
    assert tick(second) == second
    assert len(receiver.posted) == 3
    assert second == cursor_of(AlertReader(log.lake).position_at())
    log.publish(entry(3), entry(4))
    receiver.refuse_from = 4
    with pytest.raises(requests.HTTPError):
        tick(second)
    receiver.refuse_from, receiver.refuse_with = 0, 302  # to a page that answers 200
    with pytest.raises(requests.HTTPError):
        tick(second)
    receiver.refuse_from = None
    receiver.posted.clear()
    tick(second)
    assert receiver.posted == [(alert_id(3), 0, "insert"), (alert_id(4), 0, "insert")]
