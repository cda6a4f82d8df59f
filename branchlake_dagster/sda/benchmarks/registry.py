"""`branchlake bench registry`: time the merge of five providers' catalogs, beside plain Spark and Polars."""

from __future__ import annotations

import gzip
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
from rich.console import Console
from rich.table import Table

from branchlake_dagster.bench.own_lake import own_lake
from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.internals.dagster_sqlite import keep_sqlite_connections
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.sda.assets.catalogue import (
    CATALOGUE,
    ELEMENT_SETS,
    REJECTED_RECORDS,
    SATELLITE_ENTRIES,
)
from branchlake_dagster.sda.assets.registry import ELEMENT_HISTORY, MERGE_AUDIT, OBJECTS
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH, simulated_elements
from branchlake_dagster.sda.gp.write import format_omm_json
from branchlake_dagster.sda.graph.code_location import build_definitions
from branchlake_dagster.sda.partitions import gp_snapshots
from branchlake_dagster.sda.registry.sources import SOURCES
from branchlake_dagster.sda.sources import GpSource
from branchlake_dagster.settings import Settings

PROVIDERS = ("18sds", "esa", "leolabs", "exoanalytic", "numerica")
_INGEST = (ELEMENT_SETS, REJECTED_RECORDS, SATELLITE_ENTRIES)
_MERGE = (CATALOGUE, OBJECTS, ELEMENT_HISTORY, MERGE_AUDIT)
_WARM_UP_ROWS = 5_000
_RANGE = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")
_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


class RegistryFailed(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """A run of the benchmark was not published, or the three implementations have different results."""


def measure_registry(
    settings: Settings, *, rows: int, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure merges of five catalogs: median seconds, in a separate state folder with warm servers.

    Each round has five new pulls (files of one provider each) with `rows` rows together. Every object is in
    each pull with another epoch. Figures of a round:

    - `ingest_s`: parse, check and publish the pulls.
    - `registry_s`: one run that merges them into catalog, objects, history and audit, with all checks, until
      its publication. `merge_and_write_s` and `checks_s` are parts of it.
    - `registry_plain_spark_s`: select the current element sets by a window function of Spark, and write them
      to a table on `main`.
    - `registry_polars_s`: select them with Polars from the table's files, and write them to a Parquet file.

    Raises RegistryFailed.
    """
    with own_lake(settings) as bench:
        lake = Lakehouse(bench, say=say)
        try:
            lake.endpoints()
            ensure_main_has_commit(lake.nessie)
            keep_sqlite_connections()
            with dg.DagsterInstance.local_temp() as instance:
                stage = _Stage(lake, bench, instance, bench.state_dir.parent / "gp")
                stage.run_round(0, _WARM_UP_ROWS)
                found = []
                for number in range(1, rounds + 1):
                    found.append(stage.run_round(number, rows))
                    figures = ", ".join(f"{name} {value:.2f}" for name, value in found[-1].items())
                    say(f"round {number}/{rounds}: {figures}")
        finally:
            lake.servers.stop_all()
    return {
        **{name: round(statistics.median(one[name] for one in found), 2) for name in found[0]},
        "rows": rows,
        "objects": rows // len(PROVIDERS),
        "rounds": rounds,
    }


class _Stage:
    """A lake, the product's code location on it, and a folder of GP files."""

    def __init__(self, lake: Lakehouse, settings: Settings, instance: dg.DagsterInstance, folder: Path):
        self._lake = lake
        self._instance = instance
        self._folder = folder
        folder.mkdir()
        made = build_definitions(settings)
        gp = GpSource(catalogue_dir=str(folder))
        resources = {**(made.resources or {}), "gp": gp}
        self._definitions = dg.Definitions(
            assets=made.assets,
            asset_checks=made.asset_checks,
            jobs=made.jobs,
            resources=resources,
            executor=dg.in_process_executor,
        )
        graph = self._definitions.get_repository_def().asset_graph
        self._reconciler = Reconciler.from_lake(lake, instance, graph)
        self._job = self._definitions.resolve_job_def("catalogue_job")

    def run_round(self, number: int, rows: int) -> dict[str, float]:
        names = self._files(number, rows // len(PROVIDERS))
        self._instance.add_dynamic_partitions(gp_snapshots.name or "", names)
        ingest, _ = self._run(names, _INGEST)
        registry, phases = self._run(names, _MERGE)
        spark, by_spark = _time_call(lambda: self._spark(names))
        polars, by_polars = _time_call(lambda: self._polars(names))
        ours = self._catalogue()
        if not by_spark == by_polars == ours:
            raise RegistryFailed(f"The ways disagree: {ours} beside {by_spark} and {by_polars}.")
        return {
            "registry_s": registry,
            **phases,
            "registry_plain_spark_s": spark,
            "registry_polars_s": polars,
            "ingest_s": ingest,
        }

    def _files(self, number: int, objects: int) -> list[str]:
        """Write five files of the same objects, in which all values except the catalog numbers differ."""
        # Epochs lie within twelve hours, so every set of a round is newer than those of the round before.
        at = REFERENCE_EPOCH + timedelta(days=number)
        names = []
        for rank, provider in enumerate(PROVIDERS):
            name = f"{provider}-{at:%Y%m%dT%H%M}Z"
            elements = simulated_elements(seed=7 + rank, objects=objects, epoch=at).with_columns(
                # The simulation has only 30,000 different numbers; here each object gets its own.
                sat_no=pl.int_range(1, objects + 1, dtype=pl.Int64)
            )
            path = self._folder / f"{name}.json.gz"
            path.write_bytes(gzip.compress(format_omm_json(elements).encode(), 1))
            names.append(name)
        return names

    def _run(self, names: Sequence[str], assets: Sequence[dg.AssetKey]) -> tuple[float, dict[str, float]]:
        began = time.perf_counter()
        done = self._job.execute_in_process(
            instance=self._instance,
            asset_selection=list(assets),
            tags=dict(zip(_RANGE, (names[0], names[-1]), strict=True)),
            run_config=_QUIET,
            raise_on_error=False,
        )
        outcome = self._reconciler.reconcile_run(done.run_id)
        took = time.perf_counter() - began
        if outcome is None or outcome.state is not RunState.PUBLISHED:
            failed = [e.message for e in done.all_events if e.is_step_failure]
            raise RegistryFailed(f"The run was not published: {failed or outcome}.", run_id=done.run_id)
        return took, self._phases(done.run_id)

    def _phases(self, run_id: str) -> dict[str, float]:
        starts: dict[str, float] = {}
        phases = {"merge_and_write_s": 0.0, "checks_s": 0.0}
        for record in self._instance.all_logs(run_id):
            event = record.dagster_event
            if event is None or event.step_key is None:
                continue
            if event.is_step_start:
                starts[event.step_key] = record.timestamp
            elif event.is_step_success:
                is_check = event.step_key not in ("registry", "gp_ingest")
                phases["checks_s" if is_check else "merge_and_write_s"] += (
                    record.timestamp - starts[event.step_key]
                )
        return phases

    def _spark(self, names: Sequence[str]) -> tuple[int, float]:
        session = self._lake.spark_session(MAIN)
        ranked = ", ".join(f"'{source}'" for source in SOURCES)
        try:
            session.sql("CREATE NAMESPACE IF NOT EXISTS nessie.bench")
            session.sql(
                f"""
                CREATE OR REPLACE TABLE nessie.bench.catalogue USING iceberg AS
                SELECT * FROM (
                    SELECT *, row_number() OVER (
                        PARTITION BY sat_no
                        ORDER BY epoch DESC, array_position(array({ranked}), source),
                            collected_at DESC, snapshot_id DESC
                    ) AS place
                    FROM nessie.sda.element_sets WHERE snapshot_id IN ({", ".join(f"'{n}'" for n in names)})
                ) WHERE place = 1
                """  # noqa: S608 - names of our own
            ).collect()
            row = session.sql("SELECT count(*), sum(mean_anomaly) FROM nessie.bench.catalogue").collect()[0]
        finally:
            session.stop()
        return int(row[0]), round(float(row[1]), 3)

    def _polars(self, names: Sequence[str]) -> tuple[int, float]:
        table = self._lake.catalog(MAIN).load_table(("sda", "element_sets"))
        files = [task.file.file_path.removeprefix("file://") for task in table.scan().plan_files()]
        ranks = {source: rank for rank, source in enumerate(SOURCES)}
        winners = (
            pl.scan_parquet(files)
            .filter(pl.col("snapshot_id").is_in(names))
            .with_columns(_rank=pl.col("source").replace_strict(ranks, return_dtype=pl.Int8))
            .sort("sat_no", "epoch", "_rank", "collected_at", descending=[False, True, False, True])
            .unique("sat_no", keep="first", maintain_order=True)
            .drop("_rank")
            .collect()
        )
        winners.write_parquet(self._folder.parent / "winners.parquet")
        return winners.height, round(float(winners["mean_anomaly"].sum()), 3)

    def _catalogue(self) -> tuple[int, float]:
        table = self._lake.catalog(MAIN).load_table(tuple(CATALOGUE.path))
        rows = pl.DataFrame(pl.from_arrow(table.scan(selected_fields=("mean_anomaly",)).to_arrow()))
        return rows.height, round(float(rows["mean_anomaly"].sum()), 3)


def _time_call(call: Callable[[], tuple[int, float]]) -> tuple[float, tuple[int, float]]:
    began = time.perf_counter()
    found = call()
    return time.perf_counter() - began, found


def print_registry(found: dict[str, Any]) -> None:
    """Print the times as a table."""
    table = Table("way", "s", title=f"{found['rows']:,} rows of five sources, {found['objects']:,} objects")
    for name, what in {
        "registry_s": "merged, gated, published",
        "merge_and_write_s": "  of it the merge and four tables",
        "checks_s": "  of it the checks",
        "registry_plain_spark_s": "for comparison: the winners by bare Spark, to a table",
        "registry_polars_s": "for comparison: the winners by Polars, to a file",
        "ingest_s": "before it: five files parsed, checked, published",
    }.items():
        table.add_row(what, f"{found[name]:.2f}")
    Console().print(table)
