"""Observations stored together are what Dagster's own call stores one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import dagster as dg
import pytest
from sqlalchemy import Engine, event

from branchlake_dagster.internals.dagster import report_observations
from branchlake_dagster_tests.suite.instances import new_instance

ONE, OTHER = dg.AssetKey(["shop", "one"]), dg.AssetKey(["shop", "other"])
OBSERVED = [
    dg.AssetObservation(
        key,
        partition=partition,
        description=f"{partition} was published",
        metadata={"dagster/row_count": number},
        tags={"source": "test"},
    )
    for key, partitions in ((ONE, "abc"), (OTHER, [None]), (ONE, "ad"))
    for number, partition in enumerate(partitions)
]


def _one_by_one(instance: dg.DagsterInstance) -> None:
    for one in OBSERVED:
        instance.report_runless_asset_event(one)


def _together(instance: dg.DagsterInstance) -> None:
    report_observations(instance, OBSERVED)


@contextmanager
def _commits() -> Iterator[list[str]]:
    found: list[str] = []

    def count(connection: object) -> None:
        found.append("commit")

    event.listen(Engine, "commit", count)
    try:
        yield found
    finally:
        event.remove(Engine, "commit", count)


def _seen(instance: dg.DagsterInstance) -> object:
    events = []
    for key in (ONE, OTHER):
        for record in instance.fetch_observations(key, limit=100, ascending=True).records:
            entry = record.event_log_entry
            events.append(
                (
                    record.storage_id,
                    record.run_id,
                    entry.level,
                    entry.job_name,
                    entry.step_key,
                    entry.dagster_event,
                )
            )
    of_run = [record.dagster_event for record in instance.all_logs("")]
    tags = instance.get_event_tags_for_asset(ONE)
    return events, of_run, tags, sorted(map(str, instance.get_asset_keys()))


@pytest.mark.parametrize("ephemeral", [False, True])
def test_they_are_the_same(ephemeral: bool) -> None:
    def after(report: Callable[[dg.DagsterInstance], None]) -> object:
        if ephemeral:
            with dg.DagsterInstance.ephemeral() as instance:
                report(instance)
                return _seen(instance)
        with new_instance() as instance:
            report(instance)
            return _seen(instance)

    assert after(_together) == after(_one_by_one)


def test_in_two_transactions_for_each_asset_that_follows_another() -> None:
    with new_instance() as instance:
        instance.fetch_observations(ONE, limit=1)
        instance.all_logs("")
        with _commits() as found:
            _together(instance)
        assert len(found) == 2 * 3


def test_a_batch_that_the_storage_refuses_is_stored_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("too large")

    with dg.DagsterInstance.ephemeral() as instance:
        monkeypatch.setattr(type(instance.event_log_storage), "store_event_batch", refuse)
        _together(instance)
        assert len(instance.fetch_observations(ONE, limit=100).records) == 5
    assert "now stored one by one, because storing them together failed: too large" in caplog.text
