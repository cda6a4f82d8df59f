"""One materialisation inside a process beside a plain IO manager's, and one pass of the publisher for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import dagster as dg
import numpy as np
import pyarrow as pa
from pyiceberg.exceptions import NoSuchTableError

from branchlake_dagster.branching.table.spec import table_metadata
from branchlake_dagster.cli.bench.daemon.ui import BenchFailed
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.reconcile.outcome import PublicationAction
from branchlake_dagster.publication.reconcile.reconciler import Reconciler
from branchlake_dagster.publication.runtime.definitions import branchlake_definitions

_NAMESPACE = "single"
_SIZES = {"10": (10, 12), "2m": (2_000_000, 5)}
"""Name of the size: rows, and rounds after one to warm up."""


class _Plain(dg.IOManager):
    """What one would write with PyIceberg alone: replaces the table's rows on `main`."""

    def __init__(self, lake: Lakehouse) -> None:
        self._catalog = lake.catalog(MAIN)

    def handle_output(self, context: dg.OutputContext, obj: pa.Table) -> None:
        identifier = tuple(context.asset_key.path)
        try:
            table = self._catalog.load_table(identifier)
        except NoSuchTableError:
            table = self._catalog.create_table(identifier, obj.schema)
        table.overwrite(obj)

    def load_input(self, context: dg.InputContext) -> None:
        raise NotImplementedError


def materialise_figures(lake: Lakehouse, *, say: Callable[[str], None]) -> dict[str, float]:
    """Ours over the plain one, and the pass of the publisher, each the median of rounds in turns.

    `materialise_ratio_10` and `_2m` compare whole runs of one asset in this process; `pass_one_run_ms` is the
    pass for one such run, in milliseconds.
    """
    lake.catalog(MAIN).create_namespace_if_not_exists((_NAMESPACE,))
    found: dict[str, float] = {}
    passes: list[float] = []
    for name, (rows, rounds) in _SIZES.items():
        frame = pa.table({"n": np.arange(rows), "x": np.random.default_rng(1).random(rows)})
        branched, plain = [], []
        with dg.DagsterInstance.local_temp() as instance:
            ours, theirs = _branched(lake, frame, name), _plain(lake, frame, name)
            reconciler = Reconciler.of(lake, instance, ours.get_repository_def().asset_graph)
            for number in range(rounds + 1):
                plain_s, _ = _materialised(theirs, instance)
                branched_s, run_id = _materialised(ours, instance)
                began = time.perf_counter()
                outcomes = list(reconciler.run())
                took = time.perf_counter() - began
                if [one.action for one in outcomes if one.run_id == run_id] != [PublicationAction.PUBLISHED]:
                    raise BenchFailed(f"A materialisation was not published: {outcomes}", run_id=run_id)
                if number:
                    plain.append(plain_s)
                    branched.append(branched_s)
                    if name == "10":
                        passes.append(took * 1000)
        found[f"materialise_ratio_{name}"] = round(statistics.median(branched) / statistics.median(plain), 2)
        say(f"{rows:,} rows: {statistics.median(branched):.2f} s beside {statistics.median(plain):.2f} s")
    found["pass_one_run_ms"] = round(statistics.median(passes), 1)
    return found


def _branched(lake: Lakehouse, frame: pa.Table, name: str) -> dg.Definitions:
    @dg.asset(key=[_NAMESPACE, f"branched_{name}"], metadata=table_metadata(require_checks=False))
    def branched() -> pa.Table:
        return frame

    return dg.Definitions.merge(
        branchlake_definitions(lake.settings),
        dg.Definitions(assets=[branched], executor=dg.in_process_executor),
    )


def _plain(lake: Lakehouse, frame: pa.Table, name: str) -> dg.Definitions:
    @dg.asset(key=[_NAMESPACE, f"plain_{name}"])
    def plain() -> pa.Table:
        return frame

    return dg.Definitions(
        assets=[plain], resources={"io_manager": _Plain(lake)}, executor=dg.in_process_executor
    )


def _materialised(definitions: dg.Definitions, instance: dg.DagsterInstance) -> tuple[float, str]:
    """Seconds of a whole run in this process, and its id."""
    job = definitions.resolve_implicit_global_asset_job_def()
    quiet = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    began = time.perf_counter()
    run = job.execute_in_process(instance=instance, run_config=quiet)
    return time.perf_counter() - began, run.run_id
