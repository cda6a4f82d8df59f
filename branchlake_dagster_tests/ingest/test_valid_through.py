"""The valid-through time of batches: what is known of it after any of them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.offsets import Topic, TopicPartition
from branchlake_dagster.ingest.planning import compute_valid_through_ms, merge_latest_times

NOW = 1_000_000
ONE, OTHER = TopicPartition("t", "i", 0), TopicPartition("t", "i", 1)


def topic(*ends: int) -> Topic:
    return Topic("t", "i", dict.fromkeys(range(len(ends)), 0), dict(enumerate(ends)))


def test_the_latest_time_of_each_partition_outlives_the_batches_it_has_nothing_in() -> None:
    latest = merge_latest_times({ONE: 10, OTHER: 30}, {"t/0": 20}, [topic(2, 2)], now_ms=NOW)
    assert latest == {ONE: 20, OTHER: 30}
    assert compute_valid_through_ms([topic(2, 2)], latest, {}, None, now_ms=NOW) == 20


def test_an_earlier_record_takes_no_time_back() -> None:
    assert merge_latest_times({ONE: 10}, {"t/0": 5}, [topic(2)], now_ms=NOW) == {ONE: 10}


def test_a_record_from_the_future_counts_as_of_now() -> None:
    """Somebody who sends microseconds as milliseconds must not make all later times pass."""
    assert merge_latest_times({}, {"t/0": NOW * 1000}, [topic(2)], now_ms=NOW) == {ONE: NOW}


def test_partitions_of_topics_that_are_gone_are_forgotten() -> None:
    before = {TopicPartition("t", "old", 0): 10, TopicPartition("u", "i", 0): 10}
    assert merge_latest_times(before, {"t/0": 20}, [topic(2)], now_ms=NOW) == {ONE: 20}


def test_a_partition_without_any_record_holds_the_time_where_it_was() -> None:
    assert compute_valid_through_ms([topic(2, 0)], {ONE: 20}, {}, None, now_ms=NOW) is None
    assert compute_valid_through_ms([topic(2, 0)], {ONE: 20}, {}, 15, now_ms=NOW) == 15


def test_the_time_never_goes_back() -> None:
    assert compute_valid_through_ms([topic(2)], {ONE: 20}, {}, 30, now_ms=NOW) == 30


def test_idle_partitions_hold_nothing_back_once_they_are_read_to_their_end() -> None:
    one, read, unread = topic(2, 0), {ONE: 2, OTHER: 0}, {ONE: 2}
    latest = {ONE: NOW - 5}
    assert compute_valid_through_ms([one], latest, read, None, now_ms=NOW, idle_after_ms=100) == NOW - 5
    old = {**latest, OTHER: NOW - 101}
    assert compute_valid_through_ms([one], old, read, None, now_ms=NOW, idle_after_ms=100) == NOW - 5
    recent = {**latest, OTHER: NOW - 99}
    assert compute_valid_through_ms([one], recent, read, None, now_ms=NOW, idle_after_ms=100) == NOW - 99
    behind = topic(2, 7)
    assert compute_valid_through_ms([behind], latest, unread, 3, now_ms=NOW, idle_after_ms=100) == 3


def test_a_partition_with_an_open_transaction_is_not_idle() -> None:
    """Its records have earlier times, and were not in the tables when others were taken as complete."""
    one = replace(topic(2, 7), log_ends={1: 9})
    latest, read = {ONE: NOW - 5, OTHER: NOW - 500}, {ONE: 2, OTHER: 7}
    assert compute_valid_through_ms([one], latest, read, None, now_ms=NOW, idle_after_ms=100) == NOW - 500
    ended = replace(one, ends={0: 2, 1: 9}, log_ends={})
    assert compute_valid_through_ms(
        [ended], latest, {ONE: 2, OTHER: 9}, None, now_ms=NOW, idle_after_ms=100
    ) == (NOW - 5)
    unread = replace(one, ends={0: 2, 1: 0})
    assert compute_valid_through_ms([unread], {ONE: NOW - 5}, {ONE: 2}, 3, now_ms=NOW, idle_after_ms=100) == 3


def test_where_all_partitions_are_idle_the_time_stays() -> None:
    assert compute_valid_through_ms([topic(2)], {ONE: 20}, {ONE: 2}, 15, now_ms=NOW, idle_after_ms=100) == 15
    assert compute_valid_through_ms([], {}, {}, None, now_ms=NOW) is None


@pytest.mark.parametrize("idle_after", [timedelta(0), timedelta(seconds=-1)])
def test_a_partition_cannot_be_idle_at_once(idle_after: timedelta) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Ingest(name="o", topics=["o"], tables=[IngestTable(key="raw/o")], idle_after=idle_after)
    assert refused.value.hint is not None
