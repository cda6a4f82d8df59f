"""Upstream assets that publish what a test gives them, and consumers of them."""

from typing import Any

import dagster as dg
import polars as pl
from pyiceberg.exceptions import NoSuchTableError

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
        """By a run of the asset, as the publication sensor publishes it."""
        self.rows = list(rows)
        p.settle(p.run(self.key))

    def append(self, p: Project, *rows: tuple[Any, ...]) -> None:
        """By somebody outside branchlake, on `main`: a tenth of what a run takes. Consumers see the same snapshots."""
        frame = pl.DataFrame(rows, schema=self.columns, orient="row").to_arrow()
        catalog, identifier = p.lake.catalog(), tuple(self.key.path)
        try:
            table = catalog.load_table(identifier)
        except NoSuchTableError:
            catalog.create_namespace_if_not_exists(identifier[:-1])
            table = catalog.create_table(identifier, frame.schema)
        table.append(frame)


def published(p: Project, asset: dg.AssetsDefinition, **options: Any) -> None:
    p.settle(p.run(asset.key, **options))


def values(p: Project, asset: dg.AssetsDefinition) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in p.rows(*asset.key.path))
