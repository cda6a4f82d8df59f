"""The benchmark `branchlake bench checks`: twenty column rules and five SQL checks on a valid partition."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg
import pyspark.sql.types as pst
from pandera.pyspark import DataFrameModel, Field
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the library's own abbreviation
from rich.console import Console
from rich.table import Table

from branchlake_dagster.bench.own_lake import own_lake
from branchlake_dagster.checks.asset_checks import pandera_checks
from branchlake_dagster.checks.compiler import compile_schema
from branchlake_dagster.checks.constraints import SchemaConstraint, SqlConstraint
from branchlake_dagster.checks.counting import collect_rows
from branchlake_dagster.checks.judge import CheckedRows, ConstraintGroup, FrameRows, judge_constraints
from branchlake_dagster.checks.stored_rows import TableRows
from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.io_manager.loading import StoredRows
from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_branch import ensure_main_has_commit, run_branch_name
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.settings import Settings
from branchlake_dagster.tables.selection import Selection, Values
from branchlake_dagster.tables.specification import table_metadata

_KINDS = dg.StaticPartitionsDefinition(["radar", "optical"])
_PARTITION = "radar"
_NAME = ("bench", "sightings")
_TABLE = "nessie.bench.sightings"
_SELECTION = Selection(((Values("kind", (_PARTITION,)),),))
_FAILING_CONDITIONS = {
    "azimuth_deg": "abs(azimuth_deg) > 360",
    "track": "length(track) > 20",
    "elevation_deg": "elevation_deg * 2 > 181",
    "range_km": "sqrt(range_km) > 400",
    "sensor": "sensor + 1 < 1",
}
"""Conditions that no row meets, by the only column that each reads. Bounds of files cannot prove them."""


if TYPE_CHECKING:
    _Contract = DataFrameModel[Any]
else:
    # Only type checkers may see the type parameter: pandera refuses it at run time.
    _Contract = DataFrameModel


class _Sightings(_Contract):
    """A contract of twenty rules, all of which file metadata can prove."""

    kind: pst.StringType = Field(isin=["radar", "optical"])
    number: pst.LongType = Field(ge=0)
    sensor: pst.IntegerType = Field(ge=0, lt=1000)
    range_km: pst.DoubleType = Field(gt=0, lt=500_000)
    azimuth_deg: pst.DoubleType = Field(in_range={"min_value": 0, "max_value": 360})
    elevation_deg: pst.DoubleType = Field(ge=-90, le=90)
    quality: pst.FloatType = Field(ge=0, le=1)
    track: pst.StringType = Field(str_startswith="t-")


class _Mixed(_Sightings):
    """A contract of the same twenty rules, one of which file metadata cannot prove."""

    track: pst.StringType = Field(str_matches="^t-[0-9]+$")


class ChecksFailed(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """A contract of the benchmark failed, or was not judged in the way that is timed."""


@dataclass(frozen=True)
class _CheckedPartition:
    """The partition on a run's branch of a lake, and a Spark session on that branch."""

    lake: Lakehouse
    ref: str
    session: SparkSession
    rows: int

    def frame(self) -> DataFrame:
        return self.session.table(_TABLE).filter(F.col("kind") == _PARTITION)

    def load_stored_rows(self) -> StoredRows:
        """Load the table from Nessie again, as a step does."""
        table = self.lake.catalog(self.ref).load_table(_NAME)
        return StoredRows(table, _SELECTION, self.ref, self.frame)


def measure_checks(
    settings: Settings, *, rows: int, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the ways to check a partition, as medians in seconds. Each way is warmed up once.

    Works in a temporary state folder.

    - `metadata_only_s`: all twenty rules are proved by metadata, and the table is loaded again.
    - `one_job_s`: the same rules are counted in one Spark job.
    - `mixed_s`: nineteen rules are proved by metadata, and one is counted.
    - `count_s`: a count of the values in the same columns, for comparison.
    - `count_rows_s`: `count(*)`, which Iceberg answers from metadata, for comparison.
    - `sql_1_s`, `sql_2_s`, `sql_5_s`: one, two and five SQL checks in one job, each on another column.
    - `sql_5_scan_s`, `sql_5_cached_s`: the five conditions in one aggregation, and on a cached frame.
    - `plain_pandera_s`: the twenty rules by pandera's own backend, measured once.
    - `step_s`: the check step in a Dagster run, measured once.
    """
    with own_lake(settings) as bench_settings:
        lake = Lakehouse(bench_settings, say=say)
        try:
            lake.endpoints()
            ensure_main_has_commit(lake.nessie)
            say(f"Writing {rows:,} rows …")
            ref, step_s = _run_checked_asset(lake, rows)
            session = lake.spark_session(ref)
            try:
                return _time_ways(_CheckedPartition(lake, ref, session, rows), rounds, say) | {
                    "step_s": round(step_s, 3)
                }
            finally:
                session.stop()
        finally:
            lake.servers.stop_all()


def _run_checked_asset(lake: Lakehouse, rows: int) -> tuple[str, float]:
    """Write two partitions and check one in a run. Return its branch and the seconds of the check step."""

    # Annotations of this module are strings, which Dagster does not resolve, so the class is assigned below.
    def sightings(spark: Any) -> None:
        session = spark.spark_session
        session.sql(f"CREATE NAMESPACE IF NOT EXISTS {_TABLE.rpartition('.')[0]}")
        frame = _build_frame(session, rows, _PARTITION)
        frame.writeTo(_TABLE).partitionedBy(F.col("kind")).create()
        _build_frame(session, max(rows // 100, 1), "optical").writeTo(_TABLE).append()

    sightings.__annotations__ = {"spark": BranchSparkResource}
    asset = dg.asset(key=list(_NAME), partitions_def=_KINDS, metadata=table_metadata(partition_by="kind"))(
        sightings
    )
    definitions = dg.Definitions.merge(
        branchlake_definitions(lake.settings, lakehouse=LakehouseResource.from_settings(lake.settings)),
        dg.Definitions(
            assets=[asset], asset_checks=[pandera_checks(asset, _Sightings)], executor=dg.in_process_executor
        ),
    )
    with dg.DagsterInstance.local_temp() as instance:
        job = definitions.resolve_implicit_global_asset_job_def()
        quiet = {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}
        run = job.execute_in_process(instance=instance, partition_key=_PARTITION, run_config=quiet)
        times = {
            record.dagster_event.event_type_value: record.timestamp
            for record in instance.all_logs(run.run_id)
            if record.dagster_event is not None and (record.step_key or "").endswith("__contract")
        }
    evaluations = run.get_asset_check_evaluations()
    if not all(evaluation.passed for evaluation in evaluations):
        raise ChecksFailed("The contract of the benchmark failed.", run_id=run.run_id)
    return run_branch_name(run.run_id), times["STEP_SUCCESS"] - times["STEP_START"]


def _build_frame(session: SparkSession, rows: int, kind: str) -> DataFrame:
    return session.range(rows).select(
        F.lit(kind).alias("kind"),
        F.col("id").alias("number"),
        (F.col("id") % 997).cast("int").alias("sensor"),
        (F.rand(1) * 40_000 + 100).alias("range_km"),
        (F.rand(2) * 360).alias("azimuth_deg"),
        (F.rand(3) * 180 - 90).alias("elevation_deg"),
        F.rand(4).cast("float").alias("quality"),
        F.concat(F.lit("t-"), (F.col("id") % 100_000).cast("string")).alias("track"),
    )


def _time_ways(partition: _CheckedPartition, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    ways: dict[str, Callable[[], object]] = {
        "metadata_only_s": lambda: _judge_contract(
            TableRows(partition.load_stored_rows()), _Sightings, proved_count=20
        ),
        "count_s": lambda: _count_column_values(partition),
        "one_job_s": lambda: _judge_contract(FrameRows(partition.frame()), _Sightings, proved_count=0),
        "mixed_s": lambda: _judge_contract(TableRows(partition.load_stored_rows()), _Mixed, proved_count=19),
        "count_rows_s": lambda: partition.frame().count(),
        "sql_1_s": lambda: _judge_sql_checks(partition.frame(), 1),
        "sql_2_s": lambda: _judge_sql_checks(partition.frame(), 2),
        "sql_5_s": lambda: _judge_sql_checks(partition.frame(), 5),
        "sql_5_scan_s": lambda: _count_in_one_scan(partition.frame()),
        "sql_5_cached_s": lambda: _judge_cached_frame(partition.frame()),
    }
    durations: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        # The ways take turns, so that a slow minute of the machine affects all of them.
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if number:
                durations[name].append(time.perf_counter() - began)
        say(f"round {number}/{rounds}" if number else "warmed up")
    began = time.perf_counter()
    _Sightings.to_schema().validate(partition.frame())
    medians = {name: round(statistics.median(seconds), 3) for name, seconds in durations.items()}
    ratios = [job / count for job, count in zip(durations["one_job_s"], durations["count_s"], strict=True)]
    return {
        "rows": partition.rows,
        "promises": 20,
        **medians,
        "plain_pandera_s": round(time.perf_counter() - began, 3),
        "one_job_ratio": round(statistics.median(ratios), 2),
        "rounds": {name: [round(duration, 3) for duration in seconds] for name, seconds in durations.items()},
    }


def _judge_contract(rows: CheckedRows, model: type[DataFrameModel[Any]], *, proved_count: int) -> None:
    schema = model.to_schema()
    promises = [rule for rule in compile_schema(schema) if not isinstance(rule, SchemaConstraint)]
    verdicts = judge_constraints(rows, [ConstraintGroup(schema, promises, 5)], view="branchlake_bench")
    outcomes = list(verdicts.outcomes.values())
    by_metadata = sum(
        outcome.proof is not None and outcome.proof.source == "metadata" for outcome in outcomes
    )
    if len(outcomes) != 20 or by_metadata != proved_count or not all(outcome.passed for outcome in outcomes):
        raise ChecksFailed(
            f"Metadata proved {by_metadata} of {len(outcomes)} rules instead of {proved_count}, or a rule"
            " failed."
        )


def _judge_sql_checks(frame: DataFrame, number: int) -> None:
    texts = {column: f"SELECT * FROM {{this}} WHERE {wrong}" for column, wrong in _FAILING_CONDITIONS.items()}  # noqa: S608
    checks = [
        SqlConstraint(name=name, columns=(), description=text, sql=text) for name, text in texts.items()
    ]
    verdicts = judge_constraints(
        FrameRows(frame), [ConstraintGroup(None, checks[:number], 5)], view="branchlake_bench"
    )
    if len(verdicts.outcomes) != number or not all(outcome.passed for outcome in verdicts.outcomes.values()):
        raise ChecksFailed(f"Not all of the {number} SQL checks passed: {verdicts}.")


def _count_in_one_scan(frame: DataFrame) -> None:
    """Count the five conditions in one aggregation, which the check compiler does not do."""
    flags = frame.select(*[F.expr(wrong).alias(column) for column, wrong in _FAILING_CONDITIONS.items()])
    # With this filter, Iceberg skips files whose bounds exclude all five conditions.
    suspect_rows = flags.where(" OR ".join(_FAILING_CONDITIONS))
    counts = [
        F.coalesce(F.sum(F.bit_count(column)), F.lit(0)).alias(column) for column in _FAILING_CONDITIONS
    ]
    (totals,) = collect_rows(suspect_rows.agg(*counts))
    if set(totals) != {0}:
        raise ChecksFailed(f"Rows met the conditions: {totals}.")


def _judge_cached_frame(frame: DataFrame) -> None:
    cached_frame = frame.select(*_FAILING_CONDITIONS).persist()
    try:
        _judge_sql_checks(cached_frame, len(_FAILING_CONDITIONS))
    finally:
        cached_frame.unpersist(blocking=True)


def _count_column_values(partition: _CheckedPartition) -> None:
    """Count the values of each column by reading the columns, not from Iceberg's metadata."""
    conf = "spark.sql.iceberg.aggregate-push-down.enabled"
    partition.session.conf.set(conf, "false")
    try:
        counts = [F.count(name).alias(name) for name in _Sightings.to_schema().columns]
        (totals,) = partition.frame().agg(*counts).collect()
    finally:
        partition.session.conf.unset(conf)
    if set(totals) != {partition.rows}:
        raise ChecksFailed(f"Spark counted {totals} values instead of {partition.rows}.")


def show_checks(figures: dict[str, Any]) -> None:
    """Print the seconds of each way as a table."""
    table = Table(
        "way", "s", title=f"{figures['promises']} rules, and SQL checks, on {figures['rows']:,} rows"
    )
    for name, description in {
        "metadata_only_s": "all from metadata",
        "mixed_s": "19 from metadata, one counted",
        "one_job_s": "all counted in one job",
        "count_s": "for comparison: a count of the same columns",
        "count_rows_s": "for comparison: count(*)",
        "sql_1_s": "one SQL check",
        "sql_2_s": "two SQL checks, in one job",
        "sql_5_s": "five SQL checks, in one job",
        "sql_5_scan_s": "for comparison: the five as one aggregation",
        "sql_5_cached_s": "for comparison: the five on a cached frame",
        "plain_pandera_s": "for comparison: pandera's own backend",
        "step_s": "the check step in a Dagster run, first time",
    }.items():
        table.add_row(description, f"{figures[name]:.3f}")
    Console().print(table)
