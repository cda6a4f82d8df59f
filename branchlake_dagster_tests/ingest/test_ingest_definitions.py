"""What an ingestion's definitions refuse when they load."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import dagster as dg
import pytest

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.definitions import ingest_definitions
from branchlake_dagster.ingest.ingest_sensor import parse_times
from branchlake_dagster.lake_definitions import branchlake_definitions

ORDERS = Ingest(
    name="orders", topics=["orders"], tables=[IngestTable(key="raw/orders", columns={"id": "bigint"})]
)


@dg.asset_check(asset=dg.AssetKey(["raw", "orders"]))
def mine() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=False)


@dg.asset_check(asset=dg.AssetKey(["raw", "orders_dead_letters"]))
def of_dead_letters() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=False)


@pytest.mark.parametrize("check", [mine, of_dead_letters])
def test_a_check_that_a_live_run_would_not_make_is_refused(check: dg.AssetChecksDefinition) -> None:
    definitions = dg.Definitions.merge(ingest_definitions(ORDERS), dg.Definitions(asset_checks=[check]))
    with pytest.raises(ConfigurationError) as refused:
        branchlake_definitions(definitions=definitions)
    (key,) = check.check_keys
    for name in (key.name, key.asset_key.to_user_string(), "ingestion orders", "live=False"):
        assert name in refused.value.message


def test_a_batch_a_run_takes_any_check() -> None:
    definitions = dg.Definitions.merge(
        ingest_definitions(ORDERS, live=False), dg.Definitions(asset_checks=[mine])
    )
    merged = branchlake_definitions(definitions=definitions)
    assert {job.name for job in merged.resolve_all_job_defs()}.isdisjoint({"ingest_orders_live"})
    assert [one.name for one in merged.sensors or () if "orders" in one.name] == ["ingest_orders_sensor"]


def test_the_checks_of_an_ingestion_are_made_both_ways() -> None:
    merged = branchlake_definitions(definitions=ingest_definitions(ORDERS))
    assert "ingest_orders_live" in {job.name for job in merged.resolve_all_job_defs()}


@pytest.mark.parametrize(
    "options",
    [
        {"on_lost": "Stop"},
        {"on_reset": "fail"},
        {"on_recreated": "STOP"},
        {"on_rollback": ""},
        {"on_contract": "blok"},
        {"on_unrouted": None},
        {"envelope": "Debezium"},
        {"source": "file"},
    ],
)
def test_a_misspelled_option_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        replace(ORDERS, **options)
    assert (refused.value.reason, refused.value.subject) == ("unknown_value", next(iter(options)))


def test_a_start_without_a_zone_is_in_utc() -> None:
    assert replace(ORDERS, start=datetime(2026, 11, 1)).start == datetime(2026, 11, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("cursor", "times"),
    [
        (None, {}),
        ("", {}),
        ("garbage", {}),
        ("[1]", {}),
        ('{"told": "x", "since": 2.5}', {"since": 2.5}),
        ('{"told": NaN}', {}),
        ("17.5", {"told": 17.5}),
    ],
)
def test_a_cursor_that_somebody_set_to_something_else_starts_anew(
    cursor: str | None, times: dict[str, float]
) -> None:
    assert parse_times(cursor) == times
