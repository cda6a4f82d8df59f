"""Checks that read several partitions name those of the failing rows."""

# No `from __future__ import annotations`: Dagster reads the annotations of the assets.
from typing import Any

import dagster as dg
import polars as pl
import pyspark.sql.types as pst
import pytest
from pandera.pyspark import DataFrameModel, Field
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from branchlake_dagster.checks import join_checks, pandera_checks, sql_check
from branchlake_dagster.checks.constraints import FailingPartitions, RowConstraint, UniqueConstraint
from branchlake_dagster.checks.counting import find_failing_partitions
from branchlake_dagster.io_manager.loading import RowPartitions
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import EventMetadata
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import project

pytestmark = pytest.mark.spark

POSITIVE = RowConstraint(
    name="positive", columns=("n",), description="n > 0", build_condition=lambda rows: rows["n"] > 0
)
UNIQUE = UniqueConstraint(name="unique", columns=("n",), description="n is unique")
DAILY = dg.DailyPartitionsDefinition("2026-11-01")
IN_KOLKATA = dg.DailyPartitionsDefinition("2026-11-01", timezone="Asia/Kolkata")
WEEKLY = dg.WeeklyPartitionsDefinition("2026-11-01")
KINDS = dg.StaticPartitionsDefinition(["radar", "optical"])


def frame(session: SparkSession, kind: str, *rows: str) -> DataFrame:
    values = ", ".join(f"({row})" for row in rows)
    return session.sql(f"SELECT CAST(at AS {kind}) AS at, n, kind FROM VALUES {values} AS t(at, n, kind)")


@pytest.mark.parametrize("kind", ["DATE", "TIMESTAMP", "TIMESTAMP_NTZ"])
@pytest.mark.parametrize(
    ("definition", "expected"),
    [
        (DAILY, {"2026-11-02": 2, "2026-11-03": 1}),
        (WEEKLY, {"2026-11-01": 3}),
    ],
)
def test_rows_are_counted_by_the_windows_of_the_partitions(
    spark_session: SparkSession, kind: str, definition: Any, expected: dict[str, int]
) -> None:
    rows = frame(
        spark_session,
        kind,
        *("'2026-11-02 10:00:00Z', 0, ''" if kind == "TIMESTAMP" else "'2026-11-02 10:00:00', 0, ''",) * 2,
        "'2026-11-03 23:59:00', -1, ''" if kind != "TIMESTAMP" else "'2026-11-03 23:59:00Z', -1, ''",
        "'2026-11-04', 1, ''",
        "NULL, 0, ''",
        "'2020-01-01', 0, ''",
    )
    found = find_failing_partitions(rows, [POSITIVE], RowPartitions(definition, {"": "at"}))
    assert found["positive"].rows_by_partition == expected


def test_a_time_stamp_belongs_to_the_day_of_the_partitions_zone(spark_session: SparkSession) -> None:
    rows = frame(spark_session, "TIMESTAMP", "'2026-11-02 18:29:59Z', 0, ''", "'2026-11-02 18:30:00Z', 0, ''")
    found = find_failing_partitions(rows, [POSITIVE], RowPartitions(IN_KOLKATA, {"": "at"}))
    assert found["positive"].rows_by_partition == {"2026-11-02": 1, "2026-11-03": 1}


def test_keys_that_repeat_are_counted_in_each_of_their_partitions(spark_session: SparkSession) -> None:
    rows = frame(spark_session, "DATE", "'2026-11-02', 1, 'radar'", "'2026-11-03', 1, 'optical'")
    both = dg.MultiPartitionsDefinition({"day": DAILY, "kind": KINDS})
    found = find_failing_partitions(
        rows, [POSITIVE, UNIQUE], RowPartitions(both, {"day": "at", "kind": "kind"})
    )
    assert set(found) == {"unique"}
    assert found["unique"].rows_by_partition == {"2026-11-02|radar": 1, "2026-11-03|optical": 1}


def test_at_most_five_partitions_are_named_the_largest_first(spark_session: SparkSession) -> None:
    rows = spark_session.range(70).select(
        F.when(F.col("id") < 62, "most").otherwise(F.concat(F.lit("p"), F.col("id"))).alias("kind"),
        F.lit(0).alias("n"),
    )
    found = find_failing_partitions(
        rows, [POSITIVE], RowPartitions(dg.DynamicPartitionsDefinition(name="kinds"), {"": "kind"})
    )
    listed = {"most": 62, "p62": 1, "p63": 1, "p64": 1, "p65": 1}
    assert found["positive"] == FailingPartitions(listed, 4)


def test_rows_without_the_partition_column_name_none(spark_session: SparkSession) -> None:
    rows = spark_session.sql("SELECT 0 AS n")
    assert find_failing_partitions(rows, [POSITIVE], RowPartitions(KINDS, {"": "kind"})) == {}
    rows = spark_session.sql("SELECT 0 AS n, 'no day' AS kind")
    assert find_failing_partitions(rows, [POSITIVE], RowPartitions(DAILY, {"": "kind"})) == {}


class Measured(DataFrameModel):
    kind: pst.StringType = Field()
    n: pst.LongType = Field(ge=1)


def test_a_block_by_a_check_of_the_whole_table_names_partitions(lakehouse: Lakehouse, namespace: str) -> None:
    @dg.asset(key=[namespace, "measured"], partitions_def=KINDS, metadata=table_metadata(partition_by="kind"))
    def measured(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"kind": list(context.partition_keys), "n": [0] * len(context.partition_keys)})

    whole = pandera_checks(measured, Measured, whole_table=True, name_prefix="all")
    of_run = pandera_checks(measured, Measured)
    rows = sql_check(measured.key, "no_zero", "SELECT * FROM {this} WHERE n = 0")
    counts = sql_check(measured.key, "few", "SELECT n FROM {this} WHERE n = 0")
    with project(lakehouse, measured, *join_checks([whole, of_run, rows, counts])) as made:
        run = made.run(
            measured.key,
            tags={
                "dagster/asset_partition_range_start": "radar",
                "dagster/asset_partition_range_end": "optical",
            },
        )
        found = {one.check_name: one.metadata for one in made.last.get_asset_check_evaluations()}
        both = [("optical", 1), ("radar", 1)]
        for name in ("all_ge__n", "ge__n", "no_zero"):
            table = found[name]["branchlake/failing_partitions"]
            assert isinstance(table, dg.TableMetadataValue)
            assert [(one.data["partition"], one.data["failing_rows"]) for one in table.records] == both
        assert "branchlake/failing_partitions" not in found["few"]
        outcome = made.settle(run)
        assert outcome.state is RunState.BLOCKED
        events = made.instance.fetch_observations(measured.key, limit=1).records
        observation = events[0].event_log_entry.dagster_event
        assert observation is not None
        reasons = observation.event_specific_data.asset_observation.metadata[EventMetadata.REASONS]
        assert [name for name in ("optical", "radar") if name not in str(reasons.value)] == []
        made.run(measured.key, partition="radar")
        found = {one.check_name: one.metadata for one in made.last.get_asset_check_evaluations()}
        assert "branchlake/failing_partitions" not in found["ge__n"]
