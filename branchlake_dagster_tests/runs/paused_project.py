"""Run by test_pause.py in a process of its own, which is stopped while it merges."""

import os
import sys
import time
from pathlib import Path

import dagster as dg
import polars as pl

from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.tables.specification import table_metadata

NAMESPACE = os.environ["TEST_NAMESPACE"]
FOLDER = Path(os.environ["TEST_FOLDER"])


@dg.asset(
    key=[NAMESPACE, "merged"],
    metadata=table_metadata(write_mode="append", require_checks=False, exclusive=NAMESPACE),
)
def merged(context: dg.AssetExecutionContext, lakehouse: LakehouseResource) -> pl.DataFrame:
    lakehouse.catalog()  # now it holds the lease
    writer = os.environ["TEST_WRITER"]
    if writer == "first":
        (FOLDER / "holds").write_text(context.run.run_id)
        while not (FOLDER / "go").exists():
            time.sleep(0.02)
    return pl.DataFrame({"writer": [writer]})


defs = dg.Definitions.merge(
    branchlake_definitions(), dg.Definitions(assets=[merged], executor=dg.in_process_executor)
)


if __name__ == "__main__":
    while os.environ["TEST_WRITER"] == "second" and not (FOLDER / "stopped").exists():
        time.sleep(0.02)
    with dg.DagsterInstance.get() as instance:
        done = defs.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=instance, raise_on_error=False
        )
    (FOLDER / f"{os.environ['TEST_WRITER']}.log").write_text(
        "\n".join(
            str(event.step_failure_data.error.to_string())
            for event in done.all_events
            if event.is_step_failure and event.step_failure_data.error
        )
    )
    (FOLDER / f"{os.environ['TEST_WRITER']}.run").write_text(done.run_id)
    sys.exit(0 if done.success else 1)
