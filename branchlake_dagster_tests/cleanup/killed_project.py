"""Run by test_killed_runs.py in a process of its own, which is killed while the second asset works."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl

from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.tables.specification import table_metadata

NAMESPACE = os.environ["TEST_NAMESPACE"]
FREE = table_metadata(require_checks=False)


DIES = os.environ.get("TEST_DIES", "")


@dg.asset(key=[NAMESPACE, "first"], metadata=FREE)
def first(context: dg.AssetExecutionContext) -> pl.DataFrame:
    if DIES == "before its branch":
        die(context.run.run_id)
    return pl.DataFrame({"n": [1]})


def die(run_id: str) -> None:
    """As though killed, after at least one heartbeat."""
    Path(os.environ["TEST_READY"]).write_text(run_id)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


@dg.asset(key=[NAMESPACE, "second"], deps=[first], metadata=FREE)
def second(context: dg.AssetExecutionContext) -> pl.DataFrame:
    if DIES:
        Path(os.environ["TEST_READY"]).write_text(context.run.run_id)
    elif ready := os.environ.get("TEST_READY"):
        Path(ready).write_text(context.run.run_id)
        time.sleep(600)
    return pl.DataFrame({"n": [2]})


defs = dg.Definitions.merge(
    branchlake_definitions(), dg.Definitions(assets=[first, second], executor=dg.in_process_executor)
)


def work() -> int:
    job = defs.resolve_implicit_global_asset_job_def()
    with dg.DagsterInstance.get() as instance:
        if DIES == "after its last step":
            # The worker is killed after it gave its resources back, before it can say that the run has ended.
            real = instance.handle_new_event

            def handle(entry: dg.EventLogEntry, **options: Any) -> Any:
                if entry.dagster_event and entry.dagster_event.is_job_success:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(entry, **options)

            instance.handle_new_event = handle
        done = job.execute_in_process(instance=instance, raise_on_error=False)
    return 0 if done.success else 1


if __name__ == "__main__":
    # As Dagster's launcher does: the run has a process of its own, which was made for it.
    worker = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(work()))
    if DIES:
        worker.start()
        worker.join()
    else:
        sys.exit(work())
