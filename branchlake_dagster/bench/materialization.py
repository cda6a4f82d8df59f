"""Benchmark of a materialization on a run branch, and by a plain IO manager on `main`."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.expressions import AlwaysTrue

from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.tables.specification import table_metadata

SIZES = {"10": 10, "2m": 2_000_000}
_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


class PlainTableIOManager(dg.IOManager):
    """An IO manager without branchlake: PyIceberg replaces the table on `main` by the frame."""

    def __init__(self, lake: Lakehouse) -> None:
        self._lake = lake

    def handle_output(self, context: dg.OutputContext, obj: pa.Table) -> None:
        """Write the frame and report its number of rows."""
        catalog, identifier = self._lake.catalog(MAIN), tuple(context.asset_key.path)
        try:
            table = catalog.load_table(identifier)
        except NoSuchTableError:
            catalog.create_namespace_if_not_exists(identifier[:-1])
            table = catalog.create_table(identifier, obj.schema)
        table.overwrite(obj, overwrite_filter=AlwaysTrue())
        context.add_output_metadata({"dagster/row_count": dg.MetadataValue.int(_count_records(table))})

    def load_input(self, context: dg.InputContext) -> pa.Table:
        """Read the whole table."""
        return self._lake.catalog(MAIN).load_table(tuple(context.asset_key.path)).scan().to_arrow()


@dataclass
class _RunPair:
    """The seconds of one round: the plain run, the run on its branch, and its publisher's pass."""

    plain_s: float
    branched_s: float
    publication_s: float


def measure_materialization(
    lake: Lakehouse, *, rounds: int = 7, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure materializations on a branch and without branchlake, as medians over pairs of runs.

    Each pair is a run on its branch and a plain run, in alternating order. All runs are Dagster runs in
    this process, and write to new tables of `lake`, whose Nessie must run.

    - `materialise_ratio_10`, `materialise_ratio_2m`: seconds on the branch divided by plain seconds, for
      frames with five columns and ten or two million rows.
    - `materialise_pass_ratio_…`: the same with the pass of the publisher.
    - `materialise_plain_s_…`: seconds of the plain run.
    - `pass_one_run_ms`: milliseconds of the publisher's pass for a run of ten rows.
    """
    figures: dict[str, Any] = {}
    for name, rows in SIZES.items():
        pairs = _time_pairs(lake, rows, rounds)
        plain = statistics.median(pair.plain_s for pair in pairs)
        figures |= {
            f"materialise_ratio_{name}": _rounded_median(pair.branched_s / pair.plain_s for pair in pairs),
            f"materialise_pass_ratio_{name}": _rounded_median(
                (pair.branched_s + pair.publication_s) / pair.plain_s for pair in pairs
            ),
            f"materialise_plain_s_{name}": round(plain, 3),
        }
        if name == "10":
            passes = [pair.publication_s for pair in pairs]
            figures["pass_one_run_ms"] = round(1000 * statistics.median(passes), 1)
        say(f"{rows:,} rows: {figures[f'materialise_ratio_{name}']} times the {plain:.2f} s of the plain run")
    return figures


def _time_pairs(lake: Lakehouse, rows: int, rounds: int) -> list[_RunPair]:
    frame, namespace = _build_frame(rows), f"bench{uuid.uuid4().hex[:8]}"

    @dg.asset(key=[namespace, "plain"], io_manager_key="plain")
    def plain() -> pa.Table:
        return frame

    @dg.asset(key=[namespace, "branched"], metadata=table_metadata(require_checks=False))
    def branched() -> pa.Table:
        return frame

    definitions = dg.Definitions.merge(
        branchlake_definitions(lake.settings, lakehouse=LakehouseResource.from_settings(lake.settings)),
        dg.Definitions(
            assets=[plain, branched],
            resources={"plain": PlainTableIOManager(lake)},
            executor=dg.in_process_executor,
        ),
    )
    job = definitions.resolve_implicit_global_asset_job_def()
    graph = definitions.get_repository_def().asset_graph
    pairs = []
    with dg.DagsterInstance.local_temp() as instance:

        def time_run(asset: dg.AssetsDefinition) -> tuple[str, float]:
            began = time.perf_counter()
            run_result = job.execute_in_process(
                instance=instance, asset_selection=[asset.key], run_config=_QUIET
            )
            return run_result.run_id, time.perf_counter() - began

        for number in range(rounds + 1):  # the first round creates the tables and is not counted
            if number % 2:
                _, plain_s = time_run(plain)
                run_id, branched_s = time_run(branched)
            else:
                run_id, branched_s = time_run(branched)
                _, plain_s = time_run(plain)
            began = time.perf_counter()
            outcomes = list(Reconciler.from_lake(lake, instance, graph).reconcile_branches())
            pairs.append(_RunPair(plain_s, branched_s, time.perf_counter() - began))
            if [outcome.state for outcome in outcomes if outcome.run_id == run_id] != [RunState.PUBLISHED]:
                raise RuntimeError(f"A publication of the benchmark failed: {outcomes}")
    catalog = lake.catalog(MAIN)
    rows_per_file = [_rows_per_file(catalog.load_table((namespace, name))) for name in ("plain", "branched")]
    if rows_per_file[0] != rows_per_file[1]:
        raise RuntimeError(
            f"The two ways wrote different files, so their times cannot be compared: {rows_per_file}"
        )
    return pairs[1:]


def _build_frame(rows: int) -> pa.Table:
    """Build a frame with five columns: a time, a counter, two random numbers and a repeating name."""
    generator = np.random.default_rng(0)
    start = np.datetime64("2026-01-01", "us")
    return pa.table(
        {
            "at": pa.array(start + np.arange(rows) * np.timedelta64(1, "ms"), pa.timestamp("us", tz="UTC")),
            "id": pa.array(np.arange(rows)),
            "x": pa.array(generator.random(rows)),
            "y": pa.array(generator.random(rows)),
            "name": pa.array(np.char.add("object ", (np.arange(rows) % 1000).astype(str))),
        }
    )


def _count_records(table: Any) -> int:
    return int(table.current_snapshot().summary.additional_properties["total-records"])


def _rows_per_file(table: Any) -> list[int]:
    """Return the number of rows of each data file, sorted."""
    return sorted(task.file.record_count for task in table.scan().plan_files())


def _rounded_median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)
