"""A pipeline whose `report` follows the publication of `prices`, and `never` that of a blocked asset."""

import dagster as dg
import polars as pl

from branchlake_dagster.publication.conditions import on_publication, publication_automation_sensor
from branchlake_dagster.tables.specification import table_metadata

NAMESPACE = "TEST_AUTOMATION_NAMESPACE"
"""In the environment of a code location: the pipeline's namespace."""


def automation_definitions(namespace: str) -> dg.Definitions:
    """The pipeline's assets and checks, and the sensor that requests what follows a publication."""

    @dg.asset(key=[namespace, "prices"])
    def prices() -> pl.DataFrame:
        return pl.DataFrame({"n": [1, 2]})

    @dg.asset(key=[namespace, "blocked"])
    def blocked() -> pl.DataFrame:
        return pl.DataFrame({"n": [-1]})

    @dg.asset_check(asset=prices)
    def prices_good() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    @dg.asset_check(asset=blocked)
    def blocked_good() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=False)

    @dg.asset(
        key=[namespace, "report"],
        metadata=table_metadata(require_checks=False),
        automation_condition=on_publication(),
        ins={"prices": dg.AssetIn(prices.key)},
    )
    def report(prices: pl.DataFrame) -> pl.DataFrame:
        return prices.select(pl.col("n").sum())

    @dg.asset(key=[namespace, "never"], deps=[blocked], automation_condition=on_publication())
    def never() -> pl.DataFrame:
        return pl.DataFrame({"n": [0]})

    return dg.Definitions(
        assets=[prices, blocked, report, never],
        asset_checks=[prices_good, blocked_good],
        sensors=[publication_automation_sensor(minimum_interval_seconds=1)],
    )
