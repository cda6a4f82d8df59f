"""The code location of test_backfill_daemon.py."""

import os
import time

import dagster as dg
import polars as pl

from branchlake_dagster.branching.resources.lakehouse_resource import LakehouseResource
from branchlake_dagster.branching.table.spec import table_metadata
from branchlake_dagster.publication.runtime.definitions import branchlake_definitions

NAMESPACE = os.environ.get("BRANCHLAKE_TEST_NAMESPACE", "backfill")
PARTITIONS = [f"p{number:02}" for number in range(int(os.environ.get("BRANCHLAKE_TEST_PARTITIONS", "50")))]


@dg.asset(
    key=[NAMESPACE, "parts"],
    partitions_def=dg.StaticPartitionsDefinition(PARTITIONS),
    metadata=table_metadata(partition_by="part", require_checks=False),
)
def parts(context: dg.AssetExecutionContext) -> pl.DataFrame:
    return pl.DataFrame({"part": [context.partition_key] * 2, "n": [1, 2]})


@dg.asset(key=[NAMESPACE, "sums"], metadata=table_metadata(write_mode="append"))
def sums(lakehouse: LakehouseResource) -> pl.DataFrame:
    lakehouse.open_branch()
    time.sleep(8)  # so that two runs launched together start from one `main`
    return pl.DataFrame({"n": [1]})


@dg.asset_check(asset=sums)
def few(sums: pl.DataFrame) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=len(sums) <= 5, metadata={"rows": len(sums)})


defs = dg.Definitions.merge(
    branchlake_definitions(),
    dg.Definitions(assets=[parts, sums], asset_checks=[few], executor=dg.in_process_executor),
)
