"""A code location whose `report` follows the publication of `prices`, and `never` that of a blocked asset."""

import os

import dagster as dg
import polars as pl

from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.publication.conditions import on_publication, publication_automation_sensor
from branchlake_dagster.tables.specification import table_metadata

NAMESPACE = os.environ["BRANCHLAKE_TEST_NAMESPACE"]


@dg.asset(key=[NAMESPACE, "prices"])
def prices() -> pl.DataFrame:
    return pl.DataFrame({"n": [1, 2]})


@dg.asset(key=[NAMESPACE, "blocked"])
def blocked() -> pl.DataFrame:
    return pl.DataFrame({"n": [-1]})


@dg.asset_check(asset=prices)
def prices_good() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=True)


@dg.asset_check(asset=blocked)
def blocked_good() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=False)


@dg.asset(
    key=[NAMESPACE, "report"],
    metadata=table_metadata(require_checks=False),
    automation_condition=on_publication(),
)
def report(prices: pl.DataFrame) -> pl.DataFrame:
    return prices.select(pl.col("n").sum())


@dg.asset(key=[NAMESPACE, "never"], deps=[blocked], automation_condition=on_publication())
def never() -> pl.DataFrame:
    return pl.DataFrame({"n": [0]})


defs = dg.Definitions.merge(
    branchlake_definitions(),
    dg.Definitions(
        assets=[prices, blocked, report, never],
        asset_checks=[prices_good, blocked_good],
        sensors=[publication_automation_sensor(minimum_interval_seconds=1)],
        executor=dg.in_process_executor,
    ),
)
