"""What the machinery adds to a write: branch, gate and publication beside the same write to `main`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import dagster as dg
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the library's own abbreviation

from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.definitions import branchlake_definitions
from branchlake_dagster.publication.outcome import PublicationAction
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.tables.specification import table_metadata

_SECONDS = 10.0
_ROUNDS = 3


def overhead(lake: Lakehouse, *, say: Callable[[str], None]) -> dict[str, Any]:
    """`overhead_ratio`: total on a branch over the plain write of about ten seconds, medians of both.

    The plain write is Spark's own on `main`, without Dagster. On the branch it is the same Spark job; added
    to it is what the machinery took: opening the branch, gate, publication, announcement and clean-up.
    """
    rows = _calibrated(lake, say)
    plain, branched, machinery = [], [], []
    for number in range(_ROUNDS):
        plain.append(_plain(lake, rows, f"plain_{number}"))
        write, added = _on_a_branch(lake, rows, f"branched_{number}")
        branched.append(write + added)
        machinery.append(added)
        say(f"round {number + 1}/{_ROUNDS}: {plain[-1]:.1f} s plain, {write:.1f} + {added:.2f} s on a branch")
    base, total = statistics.median(plain), statistics.median(branched)
    return {
        "overhead_ratio": round(total / base, 3),
        "plain_write_s": round(base, 2),
        "machinery_s": round(statistics.median(machinery), 3),
    }


def _frame(session: Any, rows: int) -> DataFrame:
    frame: DataFrame = session.range(rows).select("id", F.sha2(F.col("id").cast("string"), 256).alias("text"))
    return frame


def _calibrated(lake: Lakehouse, say: Callable[[str], None]) -> int:
    """How many rows take about ten seconds here."""
    rows = 2_000_000
    _plain(lake, 100_000, "warm")
    took = _plain(lake, rows, "calibration")
    wanted = int(rows * _SECONDS / took)
    say(f"{wanted:,} rows take about {_SECONDS:.0f} s")
    return wanted


def _plain(lake: Lakehouse, rows: int, name: str) -> float:
    session = lake.spark_session(MAIN)
    try:
        began = time.perf_counter()
        _frame(session, rows).writeTo(f"nessie.bench.{name}").create()
        return time.perf_counter() - began
    finally:
        session.stop()


def _on_a_branch(lake: Lakehouse, rows: int, name: str) -> tuple[float, float]:
    """Seconds of the write itself and of all else the machinery did for it."""
    took: dict[str, float] = {}
    resource = LakehouseResource.of(lake.settings)

    @dg.asset(key=["bench", name], metadata=table_metadata(require_checks=False))
    def written(lakehouse: LakehouseResource, spark: BranchSparkResource) -> None:
        began = time.perf_counter()
        lakehouse.open_branch()
        took["open"] = time.perf_counter() - began
        session = spark.spark_session
        began = time.perf_counter()
        _frame(session, rows).writeTo(f"nessie.bench.{name}").create()
        took["write"] = time.perf_counter() - began

    definitions = dg.Definitions.merge(
        branchlake_definitions(lake.settings, lakehouse=resource),
        dg.Definitions(assets=[written], executor=dg.in_process_executor),
    )
    with dg.DagsterInstance.local_temp() as instance:
        job = definitions.resolve_implicit_global_asset_job_def()
        run = job.execute_in_process(instance=instance)
        began = time.perf_counter()
        graph = definitions.get_repository_def().asset_graph
        outcome = Reconciler.of(lake, instance, graph).run_one(run.run_id)
        took["settle"] = time.perf_counter() - began
        if outcome is None or outcome.action is not PublicationAction.PUBLISHED:
            raise RuntimeError(f"A benchmark's publication failed: {outcome}")
    return took["write"], took["open"] + took["settle"]
