"""Upstream assets that publish what a test gives them, and consumers of them."""

from typing import Any

import dagster as dg
import polars as pl

from branchlake_dagster import table_metadata
from branchlake_dagster_tests.harness import Project

FREE = {"require_checks": False}
ORDERS = {"account": pl.String, "price": pl.Int64}


class Source:
    """An upstream asset whose next frame the test gives it."""

    def __init__(self, namespace: str, name: str = "orders", **how: Any) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.columns: dict[str, Any] = dict(ORDERS)

        @dg.asset(key=[namespace, name], metadata=table_metadata(**{"write_mode": "append", **FREE, **how}))
        def source() -> pl.DataFrame:
            return pl.DataFrame(self.rows, schema=self.columns, orient="row")

        self.asset = source
        self.key = source.key

    def publish(self, p: Project, *rows: tuple[Any, ...]) -> None:
        self.rows = list(rows)
        p.settle(p.run(self.key))


def published(p: Project, asset: dg.AssetsDefinition, **options: Any) -> None:
    p.settle(p.run(asset.key, **options))


def values(p: Project, asset: dg.AssetsDefinition) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in p.rows(*asset.key.path))
