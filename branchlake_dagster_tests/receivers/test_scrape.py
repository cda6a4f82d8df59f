"""What receivers tell at `/metrics` is read back."""

from __future__ import annotations

import asyncio

import pytest
import requests

from branchlake_dagster.receivers.metrics import (
    MonitorReport,
    parse_topic_counts,
    scrape_monitors,
    serve_metrics,
    sum_by_topic,
)
from branchlake_dagster.receivers.service import Receivers
from branchlake_dagster.receivers.sockets import UdpConfig, UdpSource
from branchlake_dagster_tests.receivers.harness import MemorySink, an_intake, record


def test_counts_are_the_monitors_summed_over_receivers() -> None:
    async def play() -> list[MonitorReport]:
        intakes = [
            an_intake(lambda b, c: UdpSource(UdpConfig("127.0.0.1", 0), b, c), MemorySink(), most=10)
            for _ in range(2)
        ]
        intakes[0].buffer.offer([record(b"x")] * 3, "newest")
        for number, intake in enumerate(intakes):
            intake.partition = number
            intake.counts.received, intake.counts.handed_over = 2_000_000 + number, 7
            intake.counts.dropped.update({"kernel": 3, "buffer_full": number})
        async with serve_metrics(Receivers(intakes), "127.0.0.1", 0) as url:
            return await asyncio.to_thread(scrape_monitors, [url, "http://127.0.0.1:1", f"{url}/"])

    one, silent, again = asyncio.run(play())
    assert (silent.address, silent.silent, silent.counts) == ("http://127.0.0.1:1", True, {})
    assert (one.state, one.reasons, one.silent) == ("starting", (), False)
    counts = sum_by_topic([one, silent])["t"]
    assert sum_by_topic([one, silent, again])["t"].received == 2 * counts.received
    assert (counts.received, counts.handed_over, counts.buffer_capacity) == (4_000_001, 14, 20)
    assert counts.waiting == 3
    assert counts.dropped == {"kernel": 6, "buffer_full": 1}


def test_what_is_no_sample_of_ours_is_passed_over() -> None:
    text = "\n".join(
        [
            "# HELP branchlake_receiver_records_received_total x",
            'branchlake_receiver_records_received_total{partition="0",topic="a b\\"c"} 1.5e+06',
            "branchlake_receiver_degraded 1.0",
            'python_info{topic="a"} 1.0',
            "not a line {",
        ]
    )
    assert {name: counts.received for name, counts in parse_topic_counts(text).items()} == {
        'a b\\"c': 1_500_000
    }


def test_counts_are_reported_even_if_the_health_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'branchlake_receiver_records_received_total{topic="t"} 3.0'

    def get(url: str, **_: object) -> requests.Response:
        answer = requests.Response()
        answer.status_code = 200 if url.endswith("/metrics") else 404
        answer._content = text.encode() if url.endswith("/metrics") else b"no JSON"
        return answer

    monkeypatch.setattr(requests, "get", get)
    (one,) = scrape_monitors(["http://here"])
    assert (one.state, one.silent, one.counts["t"].received) == ("unknown", False, 3)


@pytest.mark.parametrize("number", ["1.2.3", "1e999"])
def test_a_monitor_whose_numbers_cannot_be_read_is_reported(
    number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answer:
        text = f'branchlake_receiver_records_received_total{{topic="t"}} {number}'

        def raise_for_status(self) -> None:
            pass

        def json(self) -> dict[str, str]:
            return {"state": "ready"}

    monkeypatch.setattr(requests, "get", lambda *_, **__: Answer())
    (report,) = scrape_monitors(["http://127.0.0.1:9464"])
    assert (report.state, report.counts, len(report.reasons)) == ("unknown", {}, 1)
