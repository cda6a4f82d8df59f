"""A code location whose job publishes itself; loaded by name, as the daemon's run workers do."""

import itertools
import os
import uuid

import dagster as dg
import polars as pl

from branchlake_dagster import LakehouseResource, branchlake_definitions
from branchlake_dagster.publication.run_publication import publish_at_end
from branchlake_dagster.tables.specification import table_metadata

NAMESPACE = f"inrun{uuid.uuid4().hex[:8]}"
TOKEN_VARIABLE = "BRANCHLAKE_TEST_N"
"""Names the row that a run appends. Every test takes another one, as all share the table."""
tokens = itertools.count(1)


@dg.asset(key=[NAMESPACE, "t"], metadata=table_metadata(write_mode="append"))
def t() -> pl.DataFrame:
    return pl.DataFrame({"n": [int(os.environ[TOKEN_VARIABLE])]})


@dg.asset_check(asset=t, metadata={"branchlake/scope": "rows"})
def positive(t: pl.DataFrame) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=bool((t["n"] > 0).all()), description="n > 0")


defs = dg.Definitions.merge(
    branchlake_definitions(lakehouse=LakehouseResource()),
    dg.Definitions(
        assets=[t],
        asset_checks=[positive],
        jobs=[
            dg.define_asset_job(
                "publishing_job",
                selection=dg.AssetSelection.assets(t),
                executor_def=publish_at_end(dg.in_process_executor),
            )
        ],
    ),
)
