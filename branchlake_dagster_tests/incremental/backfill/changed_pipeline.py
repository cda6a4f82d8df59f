"""The pipeline of the backfill tests as it was before a change of its code, published; what it has computed."""

from __future__ import annotations

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.incremental.backfill.stages import Pipeline
from branchlake_dagster_tests.incremental.sources import published

DAYS = ("2026-08-01", "2026-08-02")


def publish_unchanged_pipeline(lakehouse: Lakehouse, namespace: str) -> None:
    """Publish the pipeline as it was before the change."""
    before = Pipeline(namespace)
    with project(lakehouse, *before.assets) as p:
        for day in DAYS:
            published(p, before.events, partition=day)
        for day in DAYS:
            published(p, before.daily, partition=day)
        published(p, before.total)


def sums_of(lakehouse: Lakehouse, namespace: str) -> list[int]:
    rows = lakehouse.catalog().load_table((namespace, "total")).scan().to_arrow().to_pylist()
    return sorted(row["price"] for row in rows)
