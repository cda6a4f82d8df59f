"""The code location of the stored lake: an asset of each write mode, consumers of changes, an ingestion.

Tests continue with it what `write` began. No postponed annotations: Dagster looks at those of `context` itself.
"""

from collections.abc import Callable, Iterator
from datetime import date
from typing import Any

import dagster as dg
import pandera.pyspark as pa
import polars as pl
import pyspark.sql.types as pst

from branchlake_dagster import (
    Ingest,
    IngestTable,
    LakehouseResource,
    UnpublishedRun,
    branchlake_definitions,
    consumes,
    incremental_sensor,
    ingest_definitions,
    on_blocked,
    on_publication,
    pandera_checks,
    publication_automation_sensor,
    published_sensor,
    table_metadata,
)
from branchlake_dagster.settings import Settings

DAYS = dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-08-05")
REGIONS = dg.StaticPartitionsDefinition(["north", "south"])
BOTH = dg.MultiPartitionsDefinition({"day": DAYS, "region": REGIONS})
FREE: dict[str, Any] = {"require_checks": False}
INGESTION = "events"
TOPIC = "measured"


class Customer(pa.DataFrameModel):
    """What rows of `shop/customers` promise."""

    id: pst.LongType = pa.Field(ge=0)


class Shop:
    """Assets whose next rows their user gives.

    Attributes:
        price: What the assets without an input of their own write next.
        failing: Assets whose next runs fail in their step.
        interrupt: Called once after `shop/repeated` has written; then its step fails, and is repeated.
    """

    def __init__(self) -> None:
        self.price = 1
        self.number = 0
        self.failing: set[str] = set()
        self.interrupt: Callable[[], object] | None = None

    def rows(self, day: date | None = None, region: str | None = None) -> pl.DataFrame:
        """Two rows with new ids."""
        self.number += 2
        columns: dict[str, Any] = {"id": [self.number, self.number + 1], "price": [self.price] * 2}
        columns |= {} if day is None else {"day": [day] * 2}
        columns |= {} if region is None else {"region": [region] * 2}
        return pl.DataFrame(columns)

    def assets(self) -> list[Any]:
        shop = self

        @dg.asset(key=["shop", "prices"], code_version="1", metadata=table_metadata())
        def prices() -> pl.DataFrame:
            return shop.rows()

        @dg.asset_check(asset=prices)
        def positive(prices: pl.DataFrame) -> dg.AssetCheckResult:
            return dg.AssetCheckResult(passed=bool((prices["price"] > 0).all()))

        @dg.asset(
            key=["shop", "visits"],
            metadata=table_metadata(
                write_mode="append",
                isolation="serializable",
                columns="freeze",
                layout=["bucket(2, id)"],
                properties={"write.metadata.previous-versions-max": "50"},
                preview_rows=2,
                **FREE,
            ),
        )
        def visits() -> pl.DataFrame:
            return shop.rows()

        @dg.asset(key=["shop", "customers"], metadata=table_metadata(write_mode="upsert", keys=["id"]))
        def customers() -> pl.DataFrame:
            return pl.DataFrame({"id": [1, 2, shop.price], "price": [shop.price] * 3}).unique(
                "id", keep="last"
            )

        @dg.asset(
            key=["shop", "sales"],
            partitions_def=DAYS,
            code_version="1",
            metadata=table_metadata(partition_by="day", **FREE),
        )
        def sales(context: dg.AssetExecutionContext) -> pl.DataFrame:
            return shop.rows(day=date.fromisoformat(context.partition_key))

        @dg.asset(
            key=["shop", "stock"],
            partitions_def=REGIONS,
            metadata=table_metadata(partition_by="region", **FREE),
        )
        def stock(context: dg.AssetExecutionContext) -> pl.DataFrame:
            return shop.rows(region=context.partition_key)

        @dg.asset(
            key=["shop", "readings"],
            partitions_def=BOTH,
            metadata=table_metadata(partition_by={"day": "day", "region": "region"}, **FREE),
        )
        def readings(context: dg.AssetExecutionContext) -> pl.DataFrame:
            keys = context.partition_key.keys_by_dimension
            return shop.rows(day=date.fromisoformat(keys["day"]), region=keys["region"])

        @dg.asset(
            key=["shop", "ledger"],
            metadata=table_metadata(write_mode="append", exclusive="ledger", **FREE),
        )
        def ledger() -> pl.DataFrame:
            return shop.rows()

        @dg.asset(
            key=["shop", "copies"],
            ins={"visits": dg.AssetIn(visits.key)},
            metadata=table_metadata(write_mode="append", **FREE)
            | consumes({visits.key: "rows"}, commits=True),
        )
        def copies(visits: pl.DataFrame) -> pl.DataFrame:
            if "copies" in shop.failing:
                raise ValueError("not today")
            return visits.select("id", "price")

        @dg.asset(
            key=["shop", "sums"],
            partitions_def=DAYS,
            ins={"sales": dg.AssetIn(sales.key)},
            metadata=table_metadata(partition_by="day", **FREE) | consumes({sales.key: "range"}),
        )
        def sums(sales: pl.DataFrame) -> pl.DataFrame:
            return sales.group_by("day").agg(pl.col("price").sum())

        @dg.asset(
            key=["shop", "latest"],
            ins={"sales": dg.AssetIn(sales.key)},
            metadata=table_metadata(**FREE) | consumes({sales.key: "range"}, on="day"),
        )
        def latest(sales: pl.DataFrame) -> pl.DataFrame:
            return sales.select("id", "day")

        @dg.asset(
            key=["shop", "repeated"],
            metadata=table_metadata(write_mode="append", **FREE),
            retry_policy=dg.RetryPolicy(max_retries=1),
        )
        def repeated() -> Iterator[dg.Output[pl.DataFrame]]:
            yield dg.Output(shop.rows())
            if shop.interrupt is not None:
                interrupt, shop.interrupt = shop.interrupt, None
                interrupt()
                raise RuntimeError("after the write")

        @dg.asset(key=["shop", "own"], metadata=table_metadata(isolation="serializable", **FREE))
        def own(lakehouse: LakehouseResource) -> None:
            catalog, rows = lakehouse.catalog(), shop.rows().to_arrow()
            catalog.load_table(("shop", "customers"))
            table = catalog.create_table_if_not_exists(("shop", "own"), rows.schema)
            table.append(rows)

        @dg.asset(key=["shop", "first"], metadata=table_metadata(write_mode="append", **FREE))
        def first() -> pl.DataFrame:
            return shop.rows()

        @dg.asset(key=["shop", "second"], deps=[first], metadata=table_metadata(write_mode="append", **FREE))
        def second() -> pl.DataFrame:
            if "second" in shop.failing:
                raise ValueError("not today")
            return shop.rows()

        @dg.asset(
            key=["shop", "follower"],
            deps=[visits],
            metadata=table_metadata(**FREE),
            automation_condition=on_publication(),
        )
        def follower() -> pl.DataFrame:
            return shop.rows()

        @dg.asset(key=["shop", "orders"], metadata=table_metadata(write_mode="append"))
        def orders() -> pl.DataFrame:
            return shop.rows()

        @dg.asset_check(asset=orders, metadata={"branchlake/scope": "table"})
        def ids_once(orders: pl.DataFrame) -> dg.AssetCheckResult:
            return dg.AssetCheckResult(passed=orders["id"].is_unique().all())

        contract = pandera_checks(customers, Customer)
        return [
            *(
                prices,
                visits,
                customers,
                sales,
                stock,
                readings,
                ledger,
                copies,
                sums,
                latest,
                repeated,
                own,
                first,
                second,
                follower,
            ),
            *(orders, ids_once, positive, contract),
        ]


def _alert(run: UnpublishedRun) -> None:
    """Nobody is alerted; that one was is remembered."""


def ingestion() -> Ingest:
    """Records of a landing folder, in tables that the records name and in dead letters."""
    by_name = IngestTable(
        key=["events", "{route}"],
        columns={"id": "bigint", "kind": "string"},
        attributes={"partition": "partition", "offset": "offset", "at": "timestamp"},
    )
    every = IngestTable(key=["events", "every"], columns={"id": "bigint", "kind": "string"})
    return Ingest(
        name=INGESTION,
        topics=[TOPIC],
        tables=[every, by_name],
        route_by="kind",
        source="landing",
        evolve=["add"],
    )


def definitions(settings: Settings, shop: Shop) -> dg.Definitions:
    """The whole code location."""
    parts = shop.assets()
    checks = [one for one in parts if isinstance(one, dg.AssetChecksDefinition)]
    assets = [one for one in parts if not isinstance(one, dg.AssetChecksDefinition)]
    job = dg.define_asset_job("follow", selection=["shop/prices"])
    own = dg.Definitions(
        assets=assets,
        asset_checks=checks,
        jobs=[job],
        sensors=[
            publication_automation_sensor(),
            incremental_sensor(retries=2, retry_delay_seconds=0.0),
            published_sensor("after_visits", assets=[["shop", "visits"]], job=job),
            on_blocked(_alert, name="alerts"),
        ],
        executor=dg.in_process_executor,
    )
    parts_of_ingestion = ingest_definitions(ingestion(), live_interval_s=0.2)
    return branchlake_definitions(
        lakehouse=LakehouseResource.from_settings(settings),
        definitions=dg.Definitions.merge(parts_of_ingestion, own),
    )
