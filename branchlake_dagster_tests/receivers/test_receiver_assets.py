"""Processes of receivers are assets, and tell how they are."""

from __future__ import annotations

from collections import Counter

import dagster as dg
import pytest

from branchlake_dagster import Ingest, IngestTable, branchlake_definitions, ingest_definitions
from branchlake_dagster.ingest.batch_report import receiver_key, receiver_observations
from branchlake_dagster.receivers.metrics import MonitorReport, TopicCounts

ADDRESS = "http://radar-1:9464"


def test_a_receiver_reports_its_state_and_the_counts_of_all_its_topics() -> None:
    counts = {
        "sda.radar": TopicCounts(100, 90, 5, 10, Counter(kernel=3)),
        "sda.isl": TopicCounts(10, 10, 0, 30, Counter(kernel=1, too_large=2)),
    }
    monitor = MonitorReport(ADDRESS, counts, "degraded", ("its buffer is nearly full", "no broker"))
    (told,) = receiver_observations([monitor], ["sda.radar"])
    assert told.asset_key == dg.AssetKey(["receivers", "radar-1:9464"])
    values = {name.removeprefix("branchlake/"): one.value for name, one in told.metadata.items()}
    assert values == {
        "state": "degraded",
        "reasons": "its buffer is nearly full; no broker",
        "topics": "sda.isl, sda.radar",
        "received": 110,
        "handed_over": 100,
        "dropped": 6,
        "dropped_kernel": 4,
        "dropped_too_large": 2,
        "receiver_buffered": 5,
        "receiver_buffer_used": 0.125,
    }


def test_another_topic_is_reported_by_others() -> None:
    monitor = MonitorReport(ADDRESS, {"sda.isl": TopicCounts()}, "ready")
    assert receiver_observations([monitor], ["sda.radar"]) == []


def test_a_receiver_that_does_not_answer_is_reported() -> None:
    (told,) = receiver_observations([MonitorReport(ADDRESS)], ["sda.radar"])
    assert {name: one.value for name, one in told.metadata.items()} == {"branchlake/state": "silent"}


@pytest.mark.parametrize(
    ("monitor", "part"),
    [(ADDRESS, "radar-1:9464"), (f"{ADDRESS}/", "radar-1:9464"), ("radar-1:9464", "radar-1:9464")],
)
def test_the_key_is_where_its_monitor_is(monitor: str, part: str) -> None:
    assert receiver_key(monitor) == dg.AssetKey(["receivers", part])


def test_receivers_are_in_the_code_location_beside_the_topics() -> None:
    table = IngestTable(key="raw/orders", columns={"id": "bigint"})
    orders = Ingest(name="orders", topics=["orders"], tables=[table], source="landing")
    definitions = branchlake_definitions(definitions=ingest_definitions(orders, receivers=[ADDRESS]))
    keys = definitions.resolve_asset_graph().get_all_asset_keys()
    assert {receiver_key(ADDRESS), dg.AssetKey(["landing", "orders"])} <= keys
