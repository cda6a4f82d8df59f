"""Where an ingestion starts a topic that it has never read: pure functions and declarations."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.declaration import Ingest, IngestTable, expand_families
from branchlake_dagster.ingest.errors import StartOffsetsMissing, StartOffsetsOutOfRange
from branchlake_dagster.ingest.offsets import Topic, TopicPartition
from branchlake_dagster.ingest.planning import (
    CommittedOffsets,
    Otherwise,
    StartingOffsets,
    format_offsets,
    starting_offsets,
)
from branchlake_dagster.ingest.topic_source import LandingTopics

TABLE = IngestTable(key="raw/orders", columns={"id": "bigint"})
TOPIC = Topic("orders", "i", {0: 10, 1: 0, 2: 7}, {0: 20, 1: 0, 2: 9})


def by_partition(offsets: Mapping[TopicPartition, int]) -> dict[int, int]:
    return {one.partition: offset for one, offset in offsets.items()}


def test_a_partition_starts_at_the_offset_that_is_given() -> None:
    given = {0: 15, 1: 0, 2: 9}
    assert by_partition(starting_offsets(TOPIC, given, "stop", origin="the given offsets")) == given


@pytest.mark.parametrize(
    ("otherwise", "expected"), [("earliest", {0: 12, 1: 0, 2: 7}), ("latest", {0: 12, 1: 0, 2: 9})]
)
def test_partitions_without_an_offset_start_at_the_given_position(
    otherwise: Otherwise, expected: dict[int, int]
) -> None:
    assert by_partition(starting_offsets(TOPIC, {0: 12}, otherwise, origin="…")) == expected


def test_partitions_without_an_offset_stop_the_ingestion_by_default() -> None:
    with pytest.raises(StartOffsetsMissing) as missing:
        starting_offsets(TOPIC, {0: 12}, StartingOffsets({}).otherwise, origin="…")
    assert missing.value.partitions == ("orders[1]", "orders[2]")
    assert missing.value.hint is not None


@pytest.mark.parametrize("otherwise", ["stop", "earliest", "latest"])
@pytest.mark.parametrize(
    ("given", "outside"),
    [
        ({0: 9, 1: 0, 2: 7}, ("orders[0]",)),
        ({0: 21, 1: 1, 2: 7}, ("orders[0]", "orders[1]")),
        ({0: 10, 1: 0, 2: 7, 3: 0}, ("orders[3]",)),
    ],
)
def test_offsets_outside_the_retained_range_are_named_with_that_range(
    given: dict[int, int], outside: tuple[str, ...], otherwise: Otherwise
) -> None:
    with pytest.raises(StartOffsetsOutOfRange) as refused:
        starting_offsets(TOPIC, given, otherwise, origin="the given offsets")
    assert refused.value.partitions == outside
    assert refused.value.hint is not None
    for number in (int(name[-2]) for name in outside):
        assert str(given[number]) in refused.value.message
        if number in TOPIC.ends:
            assert str(TOPIC.ends[number] - 1 if TOPIC.ends[number] else 0) in refused.value.message


def test_offsets_are_formatted_by_partition() -> None:
    offsets = {TopicPartition("t", "i", number): number * 10 for number in range(3)}
    assert format_offsets(offsets) == "t[0] 0, t[1] 10, t[2] 20"
    assert format_offsets(offsets, max_partitions=1) == "t[0] 0 and 2 more"


@pytest.mark.parametrize(
    "declare",
    [
        lambda: CommittedOffsets(""),
        lambda: CommittedOffsets("old", otherwise="end"),
        lambda: StartingOffsets({"orders": {0: -1}}),
        lambda: StartingOffsets({"orders": {"0": 1}}),
        lambda: StartingOffsets({"orders": {0: True}}),
        lambda: StartingOffsets({"orders": {0: 1}}, otherwise="begin"),
        lambda: Ingest(name="o", topics=["orders"], tables=[TABLE], start=StartingOffsets({"order": {0: 1}})),
        lambda: Ingest(name="o", topics=["orders"], tables=[TABLE], start="first"),
        lambda: Ingest(
            name="o", topics=["orders"], tables=[TABLE], source="landing", start=CommittedOffsets("old")
        ),
    ],
)
def test_a_start_without_meaning_is_refused_when_it_is_declared(declare: Any) -> None:
    with pytest.raises(ConfigurationError) as refused:
        declare()
    assert refused.value.hint is not None


@pytest.mark.parametrize(
    ("source", "start"),
    [
        ("kafka", "latest"),
        ("kafka", datetime.fromisoformat("2026-11-24T06:00+00:00")),
        ("kafka", CommittedOffsets("old")),
        ("kafka", StartingOffsets({"orders": {0: 1}})),
        ("landing", StartingOffsets({"orders": {0: 1}})),
    ],
)
def test_a_start_goes_with_its_source_and_stays_when_tables_are_named(source: Any, start: Any) -> None:
    ingest = Ingest(name="o", topics=["orders"], tables=[TABLE], source=source, start=start)
    assert expand_families(ingest, {}).start == start


def test_a_landing_folder_has_no_consumer_groups(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        LandingTopics(tmp_path).committed_offsets("old", ["orders"])
