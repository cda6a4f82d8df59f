"""The code location of test_backfill_daemon.py."""

import os
from pathlib import Path

import dagster as dg
import polars as pl

from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster.waiting import holds_within

NAMESPACE = os.environ.get("BRANCHLAKE_TEST_NAMESPACE", "backfill")
PARTITIONS = [f"p{number:02}" for number in range(int(os.environ.get("BRANCHLAKE_TEST_PARTITIONS", "50")))]


@dg.asset(
    key=[NAMESPACE, "parts"],
    partitions_def=dg.StaticPartitionsDefinition(PARTITIONS),
    metadata=table_metadata(partition_by="part", require_checks=False),
)
def parts(context: dg.AssetExecutionContext) -> pl.DataFrame:
    return pl.DataFrame({"part": [context.partition_key] * 2, "n": [1, 2]})


def _meet(run_id: str) -> None:
    """Wait until two runs have their branches, so that both start from one `main`."""
    folder = Path(os.environ["DAGSTER_HOME"], "met")
    folder.mkdir(exist_ok=True)
    (folder / run_id).touch()
    assert holds_within(300, lambda: len([*folder.iterdir()]) >= 2, every_s=0.1)


@dg.asset(key=[NAMESPACE, "sums"], metadata=table_metadata(write_mode="append"))
def sums(context: dg.AssetExecutionContext, lakehouse: LakehouseResource) -> pl.DataFrame:
    lakehouse.open_branch()
    _meet(context.run_id)
    return pl.DataFrame({"n": [1]})


@dg.asset_check(asset=sums)
def few(sums: pl.DataFrame) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=len(sums) <= 5, metadata={"rows": len(sums)})


defs = dg.Definitions.merge(
    branchlake_definitions(),
    dg.Definitions(assets=[parts, sums], asset_checks=[few], executor=dg.in_process_executor),
)
