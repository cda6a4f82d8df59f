"""Run by test_killed_consumer.py: reads places from its input, and has a process die at each of them.

A line is `consume PLACE` or `publish PLACE`; the place `-` is nowhere. It answers with the exit code.
"""

# ruff: noqa: T201 - it is a command

import multiprocessing
import os
import signal
import sys
from typing import Any

import dagster as dg
import polars as pl

from branchlake_dagster import consumes, table_metadata
from branchlake_dagster.incremental import consumption, outputs
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.publication.reconciler import Reconciler

NAMESPACE = os.environ.get("TEST_NAMESPACE", "killed")
FREE: dict[str, Any] = {"write_mode": "append", "require_checks": False}
dies_in_compute = False


@dg.asset(key=[NAMESPACE, "orders"], metadata=table_metadata(**FREE))
def orders() -> pl.DataFrame:
    return pl.DataFrame({"token": []}, schema={"token": pl.Int64})


@dg.asset(
    key=[NAMESPACE, "copy"],
    ins={"orders": dg.AssetIn(orders.key)},
    metadata=table_metadata(**FREE) | consumes({orders.key: "rows"}),
)
def copy(orders: pl.DataFrame) -> pl.DataFrame:
    if dies_in_compute:
        die()
    return orders


defs = dg.Definitions.merge(
    branchlake_definitions(), dg.Definitions(assets=[orders, copy], executor=dg.in_process_executor)
)


def die(*_: object, **__: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def place(name: str) -> None:
    """Have this process die there."""
    global dies_in_compute
    merge = NessieClient.merge

    def merged(*args: Any, **more: Any) -> None:
        merge(*args, **more)
        die()

    places: dict[str, Any] = {
        "capture": (consumption, "capture_change", die),
        "before the record": (outputs, "record_consumption", die),
        "after the record": (Consumption, "clean_up", die),
        "before the commit": (NessieClient, "merge", die),
        "after the commit": (NessieClient, "merge", merged),
    }
    if name == "compute":
        dies_in_compute = True
    elif name != "-":
        setattr(*places[name])


def work(what: str, where: str) -> None:
    place(where)
    with dg.DagsterInstance.get() as instance:
        if what == "publish":
            graph = defs.get_repository_def().asset_graph
            for outcome in Reconciler.from_lake(Lakehouse(), instance, graph).reconcile_branches():
                print(outcome, file=sys.stderr)
            return
        job = defs.resolve_implicit_global_asset_job_def()
        done = job.execute_in_process(instance=instance, asset_selection=[copy.key], raise_on_error=False)
        if not done.success:
            sys.exit(1)


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    for line in sys.stdin:
        worker = context.Process(target=work, args=line.strip().split(" ", 1))
        worker.start()
        worker.join()
        print(worker.exitcode, flush=True)
