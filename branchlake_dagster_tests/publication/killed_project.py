"""Run by test_killed_runs.py in a process of its own, which is killed while the second asset works."""

import os
import sys
import time
from pathlib import Path

import dagster as dg
import polars as pl

from branchlake_dagster.branching.tables import table_metadata
from branchlake_dagster.publication.machinery import branchlake_definitions

NAMESPACE = os.environ["TEST_NAMESPACE"]
FREE = table_metadata(require_checks=False)


@dg.asset(key=[NAMESPACE, "first"], metadata=FREE)
def first() -> pl.DataFrame:
    return pl.DataFrame({"n": [1]})


@dg.asset(key=[NAMESPACE, "second"], deps=[first], metadata=FREE)
def second(context: dg.AssetExecutionContext) -> pl.DataFrame:
    if ready := os.environ.get("TEST_READY"):
        Path(ready).write_text(context.run.run_id)
        time.sleep(600)
    return pl.DataFrame({"n": [2]})


defs = dg.Definitions.merge(
    branchlake_definitions(), dg.Definitions(assets=[first, second], executor=dg.in_process_executor)
)


if __name__ == "__main__":
    job = defs.resolve_implicit_global_asset_job_def()
    with dg.DagsterInstance.get() as instance:
        done = job.execute_in_process(instance=instance, raise_on_error=False)
    sys.exit(0 if done.success else 1)
