"""The benchmark `branchlake bench upserts`: upserts by Spark, without a JVM, and by PyIceberg alone."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyiceberg.table import Table
from rich.console import Console
from rich.table import Table as Grid

from branchlake_dagster.bench.own_lake import own_lake
from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.incremental.spark_inputs import from_arrow
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings
from branchlake_dagster.tables import spark_frames
from branchlake_dagster.tables import upserts as merge
from branchlake_dagster.tables.schemas import build_iceberg_schema
from branchlake_dagster.tables.specification import TableSpec

_NAMESPACE = "bench"
_MAX_PYICEBERG_ROWS = 1_000
"""Maximum rows of a frame for PyIceberg's own `upsert`, which compares row by row and is slow."""


class UpsertsFailed(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The measured ways to upsert wrote different tables, or an upsert without a JVM needs Spark."""


@dataclass(frozen=True)
class _Scenario:
    """An upsert of `rows` rows into a table of `files` files with `rows_per_file` rows each.

    Half of the upserted rows have keys that exist in the table. With `spread`, the keys are drawn from all
    files, and otherwise from one file.
    """

    table: str
    files: int
    rows_per_file: int
    rows: int
    spread: bool = True

    @property
    def name(self) -> str:
        """The name of the scenario in the results."""
        where = "all_files" if self.spread else "one_file"
        return f"{self.table}_{self.rows // 1000}k_{where}"

    def frame(self, seed: int) -> pa.Table:
        """Build the rows to upsert. The table has even keys, so new rows have odd keys."""
        generator = np.random.default_rng(seed)
        id_count = self.files * self.rows_per_file if self.spread else self.rows_per_file
        half = self.rows // 2
        existing_ids = 2 * generator.choice(id_count, half, replace=False)
        new_ids = 2 * generator.choice(id_count, self.rows - half, replace=False) + 1
        return _build_rows(np.concatenate([existing_ids, new_ids]), seed)


_SCENARIOS = (
    _Scenario("small", 8, 12_500, 1_000),
    _Scenario("small", 8, 12_500, 100_000),
    _Scenario("large", 32, 100_000, 1_000, spread=False),
    _Scenario("large", 32, 100_000, 1_000),
    _Scenario("large", 32, 100_000, 100_000),
)


def measure_upserts(settings: Settings, *, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure the ways to upsert in each scenario, as medians in seconds.

    Works in a temporary state folder. Each upsert works on its own branch from the same table. The ways
    take turns, and are warmed up once. `small` tables have 8 files and 100,000 rows, `large` ones 32 files
    and 3,200,000 rows.

    - `spark_s`: MERGE in an open Spark session.
    - `pyiceberg_s`: the upsert of the IO manager without a JVM.
    - `plain_s`: PyIceberg's `Table.upsert`, for frames of 1,000 rows.

    Raises UpsertsFailed.
    """
    with own_lake(settings) as bench_settings:
        lake = Lakehouse(bench_settings, say=say)
        try:
            lake.endpoints()
            ensure_main_has_commit(lake.nessie)
            for scenario in {scenario.table: scenario for scenario in _SCENARIOS}.values():
                say(f"Writing the {scenario.table} table …")
                _write_table(lake, scenario)
            return {
                "rounds": rounds,
                **{scenario.name: _time_scenario(lake, scenario, rounds, say) for scenario in _SCENARIOS},
            }
        finally:
            lake.servers.stop_all()


def _build_rows(ids: np.ndarray[Any, np.dtype[Any]], seed: int) -> pa.Table:
    generator = np.random.default_rng(seed)
    start = np.datetime64("2026-01-01", "us")
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "at": pa.array(start + ids * np.timedelta64(1, "ms"), pa.timestamp("us", tz="UTC")),
            "x": pa.array(generator.random(len(ids))),
            "y": pa.array(generator.random(len(ids))),
            "name": pa.array(np.char.add("object ", (ids % 1000).astype(str))),
        }
    )


def _write_table(lake: Lakehouse, scenario: _Scenario) -> None:
    catalog = lake.catalog(MAIN)
    catalog.create_namespace_if_not_exists(_NAMESPACE)
    schema = build_iceberg_schema(_build_rows(np.arange(1), 0).schema, table_name=scenario.table)
    table = catalog.create_table((_NAMESPACE, scenario.table), schema)
    for number in range(scenario.files):
        ids = 2 * np.arange(number * scenario.rows_per_file, (number + 1) * scenario.rows_per_file)
        table.append(_build_rows(ids, number))


def _time_scenario(
    lake: Lakehouse, scenario: _Scenario, rounds: int, say: Callable[[str], None]
) -> dict[str, float]:
    ways: dict[str, Callable[[Lakehouse, str, _Scenario, pa.Table], float]] = {
        "spark_s": _time_spark_merge,
        "pyiceberg_s": _time_pyiceberg,
    }
    if scenario.rows <= _MAX_PYICEBERG_ROWS:
        ways["plain_s"] = _time_plain_upsert
    durations: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        frame, tables = scenario.frame(number), []
        for name, way in ways.items():
            branch = f"bench-{uuid.uuid4().hex[:8]}"
            base = lake.nessie.reference(MAIN).hash
            lake.nessie.create_branch(branch, from_ref=MAIN, from_hash=base)
            seconds = way(lake, branch, scenario, frame)
            tables.append(_table_state(lake.catalog(branch).load_table((_NAMESPACE, scenario.table))))
            lake.nessie.delete_branch(branch, expected_hash=lake.nessie.reference(branch).hash)
            if number:
                durations[name].append(seconds)
        if any(state != tables[0] for state in tables):
            raise UpsertsFailed(f"The ways wrote different tables in scenario {scenario.name}: {tables}.")
    medians = {name: round(statistics.median(seconds), 3) for name, seconds in durations.items()}
    say(f"{scenario.name}: {medians}")
    return medians


def _build_spec(scenario: _Scenario) -> TableSpec:
    return TableSpec((_NAMESPACE, scenario.table), "upsert", ("id",))


def _time_spark_merge(lake: Lakehouse, branch: str, scenario: _Scenario, frame: pa.Table) -> float:
    session = lake.spark_session(branch)
    try:
        session.range(1).collect()
        began = time.perf_counter()
        table = lake.catalog(branch).load_table((_NAMESPACE, scenario.table))
        spark_frames.write_spark_frame(
            from_arrow(session, frame), _build_spec(scenario), table.schema(), None, {}
        )
        return time.perf_counter() - began
    finally:
        session.stop()


def _time_pyiceberg(lake: Lakehouse, branch: str, scenario: _Scenario, frame: pa.Table) -> float:
    began = time.perf_counter()
    table = lake.catalog(branch).load_table((_NAMESPACE, scenario.table))
    upsert_plan = merge.plan_upsert(frame, table, _build_spec(scenario), None)
    if not isinstance(upsert_plan, merge.UpsertPlan):
        raise UpsertsFailed(f"Scenario {scenario.name} needs Spark, because {upsert_plan.value}.")
    merge.write_upsert(upsert_plan, {})
    return time.perf_counter() - began


def _time_plain_upsert(lake: Lakehouse, branch: str, scenario: _Scenario, frame: pa.Table) -> float:
    began = time.perf_counter()
    lake.catalog(branch).load_table((_NAMESPACE, scenario.table)).upsert(frame, join_cols=["id"])
    return time.perf_counter() - began


def _table_state(table: Table) -> tuple[int, float]:
    """Return the number of rows of a table, and the sum of a column that every upsert changes."""
    rows = table.scan(selected_fields=("x",)).to_arrow()
    return rows.num_rows, round(float(np.sort(rows["x"].to_numpy()).sum()), 6)


def show_upserts(results: Mapping[str, Any]) -> None:
    """Print the seconds of each way as a table."""
    table = Grid("upsert", "Spark's MERGE, s", "without a JVM, s", "Table.upsert, s", title="Upserts")
    for name, figures in results.items():
        if isinstance(figures, dict):
            plain = figures.get("plain_s")
            shown = "" if plain is None else f"{plain:.2f}"
            table.add_row(name, f"{figures['spark_s']:.2f}", f"{figures['pyiceberg_s']:.2f}", shown)
    Console().print(table)
