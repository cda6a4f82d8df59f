"""Checks inside Dagster: which rows they load, which events the gate gets to see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dagster as dg
import pandera.pandas as pandera
import pyspark.sql.types as pst
import pytest
from dagster import AssetCheckEvaluation
from pandera.pyspark import DataFrameModel, Field
from pyspark.sql import DataFrame, SparkSession

from branchlake_dagster.checks import ContractError, join_checks, pandera_checks, sql_check
from branchlake_dagster.stored_names import AssetMetadata
from branchlake_dagster_tests.suite.raised import raising

WINDOWS = dg.StaticPartitionsDefinition(["a", "b", "c"])


class Values(DataFrameModel):
    v: pst.LongType = Field(ge=0)
    w: pst.StringType = Field(isin=["a", "b"], nullable=True)


@dg.asset(partitions_def=WINDOWS)
def values() -> None:
    pass


class Lake(dg.IOManager):
    """Keeps no rows: makes two per partition it is asked for, and remembers what that was."""

    def __init__(self, spark: SparkSession | None) -> None:
        self.spark = spark
        self.asked: list[list[str]] = []

    def handle_output(self, context: dg.OutputContext, obj: object) -> None:
        pass

    def load_input(self, context: dg.InputContext) -> DataFrame:
        self.asked.append(sorted(context.asset_partition_keys))
        assert self.spark is not None
        return self.spark.createDataFrame(
            [(v, key) for key in self.asked[-1] for v in (1, -1)], "v bigint, w string"
        )


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral


@pytest.fixture
def lake(spark_session: SparkSession) -> Lake:
    return Lake(spark_session)


def _run(
    instance: dg.DagsterInstance, lake: Lake, *checks: dg.AssetChecksDefinition, **kwargs: Any
) -> dg.ExecuteInProcessResult:
    defs = dg.Definitions(assets=[values], asset_checks=checks, resources={"io_manager": lake})
    job = defs.resolve_implicit_global_asset_job_def()
    return job.execute_in_process(instance=instance, raise_on_error=False, **kwargs)


def _planned(instance: dg.DagsterInstance, run_id: str) -> dict[str, set[str] | None]:
    found = {}
    for record in instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION_PLANNED):
        data = record.get_dagster_event().asset_check_planned_data
        subset = data.partitions_subset
        found[data.check_name] = None if subset is None else set(subset.get_partition_keys())
    return found


def _evaluated(result: dg.ExecuteInProcessResult) -> dict[str, AssetCheckEvaluation]:
    return {evaluation.check_name: evaluation for evaluation in result.get_asset_check_evaluations()}


@pytest.mark.spark
def test_a_run_checks_its_own_partition(instance: dg.DagsterInstance, lake: Lake) -> None:
    result = _run(instance, lake, pandera_checks(values, Values, examples=1), partition_key="c")
    assert result.success  # the gate is at publication, not in the step order
    assert lake.asked == [["c"]]
    planned, evaluated = _planned(instance, result.run_id), _evaluated(result)
    assert planned == {name: {"c"} for name in ("schema", "not_null__v", "ge__v", "isin__w")}
    assert set(planned) == set(evaluated)
    assert {evaluation.partition for evaluation in evaluated.values()} == {"c"}
    assert not any(evaluation.blocking for evaluation in evaluated.values())
    metadata = {key: value.value for key, value in evaluated["isin__w"].metadata.items()}
    assert metadata["failing_rows"] == 2
    assert metadata["total_rows"] == 2
    assert metadata["failing_ratio"] == 1.0
    assert metadata["constraint"] == "w in ['a', 'b']"
    assert metadata["branch"]
    table = evaluated["isin__w"].metadata["examples"]
    assert isinstance(table, dg.TableMetadataValue)
    assert [record.data for record in table.records] == [{"w": "c", "v": "-1"}]
    assert evaluated["isin__w"].description == "2 of 2 rows fail: w in ['a', 'b']."


@pytest.mark.spark
def test_a_run_over_a_range_checks_exactly_its_partitions(instance: dg.DagsterInstance, lake: Lake) -> None:
    tags = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "b"}
    result = _run(instance, lake, pandera_checks(values, Values), tags=tags)
    assert lake.asked == [["a", "b"]]
    assert _planned(instance, result.run_id)["ge__v"] == {"a", "b"}
    # One verdict stands for all of them: Dagster leaves its partition empty.
    assert {evaluation.partition for evaluation in _evaluated(result).values()} == {None}


@pytest.mark.spark
def test_a_check_on_the_whole_table_sees_all_of_it(instance: dg.DagsterInstance, lake: Lake) -> None:
    checks = pandera_checks(values, Values, whole_table=True)
    result = _run(instance, lake, checks, partition_key="a")
    assert lake.asked == [["a", "b", "c"]]
    assert _planned(instance, result.run_id)["ge__v"] is None
    assert {spec.metadata[AssetMetadata.CHECK_SCOPE] for spec in checks.check_specs} == {"table"}
    assert {
        spec.metadata[AssetMetadata.CHECK_SCOPE] for spec in pandera_checks(values, Values).check_specs
    } == {"rows"}


@pytest.mark.spark
def test_warn_publishes_with_a_warning(instance: dg.DagsterInstance, lake: Lake) -> None:
    checks = pandera_checks(values, Values, warn=["ge__v"])
    evaluated = _evaluated(_run(instance, lake, checks, partition_key="c"))
    assert evaluated["ge__v"].severity is dg.AssetCheckSeverity.WARN
    assert evaluated["isin__w"].severity is dg.AssetCheckSeverity.ERROR


@pytest.mark.spark
def test_a_selected_check_runs_alone(instance: dg.DagsterInstance, lake: Lake) -> None:
    defs = dg.Definitions(
        assets=[values], asset_checks=[pandera_checks(values, Values)], resources={"io_manager": lake}
    )
    result = (
        defs.resolve_implicit_global_asset_job_def()
        .get_subset(asset_check_selection={dg.AssetCheckKey(values.key, "ge__v")}, asset_selection=set())
        .execute_in_process(instance=instance, partition_key="a")
    )
    assert set(_evaluated(result)) == {"ge__v"}


@pytest.mark.spark
def test_sql_failures_are_the_rows_returned(instance: dg.DagsterInstance, lake: Lake) -> None:
    checks = (
        sql_check(values, "no_negatives", "select *, t.* from {this} t where v < 0 -- per row;"),
        sql_check(values, "in_pairs", "select w from {this} group by w having count(*) != 2;"),
        sql_check(
            "values", "rare", "select 1 from {this} where true", severity="warn", partitions_def=WINDOWS
        ),
    )
    evaluated = _evaluated(_run(instance, lake, *checks, partition_key="b"))
    assert evaluated["in_pairs"].passed
    assert not evaluated["no_negatives"].passed
    assert evaluated["no_negatives"].severity is dg.AssetCheckSeverity.ERROR
    assert evaluated["rare"].severity is dg.AssetCheckSeverity.WARN
    assert evaluated["no_negatives"].metadata["failing_rows"].value == 1
    table = evaluated["no_negatives"].metadata["examples"]
    assert isinstance(table, dg.TableMetadataValue)
    assert [record.data for record in table.records] == [{"v": "-1", "w": "b", "v_2": "-1", "w_2": "b"}]
    assert {evaluation.partition for evaluation in evaluated.values()} == {"b"}
    assert lake.spark is not None
    assert not [view for view in lake.spark.catalog.listTables() if view.name.startswith("branchlake_this")]


@pytest.mark.spark
@pytest.mark.parametrize(
    "sql", ["select from where {this}", "select nope from {this}", "with x as (select 1) delete from {this}"]
)
def test_bad_sql_leaves_a_planned_check_without_verdict(
    instance: dg.DagsterInstance, lake: Lake, sql: str
) -> None:
    result = _run(instance, lake, sql_check(values, "broken", sql), partition_key="a")
    assert not result.success
    assert set(_planned(instance, result.run_id)) == {"broken"}
    assert not _evaluated(result)
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    cause = failure.step_failure_data.error.cause
    assert cause.cls_name == "CheckFailedToRun"
    assert "broken" in cause.message
    assert "\tat org.apache" not in cause.message


def test_declarations_that_cannot_be_kept_are_refused() -> None:
    with raising(ContractError, "Values", reason="unknown_constraint", subject="nope"):
        pandera_checks(values, Values, warn=["nope"])
    with raising(ContractError, reason="whole_table_with_partitions"):
        pandera_checks("values", Values, partitions_def=WINDOWS, whole_table=True)
    with raising(ContractError, reason="check_name", subject="no spaces"):
        sql_check(values, "no spaces", "select 1")
    for text in ("", "delete from {this}", "is null", "-- select\ndrop table t"):
        with raising(ContractError, "values", reason="not_a_query", subject="odd"):
            sql_check(values, "odd", text)
    with raising(ContractError, "values", reason="no_rows_named", subject="odd"):
        sql_check(values, "odd", "select 1")
    for text in (" ( select * from {this})", "/* why */ -- and\nWITH x AS (SELECT 1) SELECT * FROM {this}"):
        assert sql_check(values, "fine", text)
    with raising(ContractError, reason="not_a_spark_model", subject="values"):
        pandera_checks(values, pandera.DataFrameModel)
    (slashed,) = sql_check("sda/catalogue", "fine", "select * from {this}").check_keys
    assert slashed.asset_key == dg.AssetKey(["sda", "catalogue"])
    with raising(ContractError, "fatal", reason="severity", subject="loud"):
        sql_check(values, "loud", "select 1", severity="fatal")


def test_two_models_on_one_asset_need_a_prefix() -> None:
    checks = [pandera_checks(values, Values), pandera_checks(values, Values, name_prefix="late")]
    dg.Definitions(assets=[values], asset_checks=checks)
    names = [spec.name for check in checks for spec in check.check_specs]
    assert names[4:] == [f"late_{name}" for name in names[:4]]


def _joined() -> list[dg.AssetChecksDefinition]:
    @dg.asset_check(asset=values)
    def own() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    return join_checks(
        [
            pandera_checks(values, Values, warn=["isin__w"]),
            own,
            sql_check(values, "in_pairs", "select w from {this} group by w having count(*) != 2"),
            pandera_checks(values, Values, whole_table=True, name_prefix="all"),
            sql_check("values", "none_bad", "select * from {this} where v < -1", partitions_def=WINDOWS),
        ]
    )


def test_descriptions_say_what_is_promised_and_what_a_failure_does() -> None:
    told = {
        spec.name: spec.description
        for checks in (
            pandera_checks(values, Values, warn=["ge__v"]),
            sql_check(values, "rare", "select * from {this}", severity="warn", description="Few rows."),
        )
        for spec in checks.check_specs
    }
    assert told["not_null__v"] == (
        "Blocks the publication when it fails; non-blocking means that the run's other steps continue."
        " Promise: v is not null."
    )
    assert told["ge__v"] == "A failure is published with a warning. Promise: v >= 0."
    assert told["rare"] == "A failure is published with a warning. Promise: Few rows."


PARTITIONED = {"schema", "not_null__v", "ge__v", "isin__w", "in_pairs", "none_bad"}
WHOLE = {"all_schema", "all_not_null__v", "all_ge__v", "all_isin__w"}


def test_checks_on_the_same_rows_are_one_step() -> None:
    joined = _joined()
    assert [{spec.name for spec in checks.check_specs} for checks in joined] == [PARTITIONED, {"own"}, WHOLE]
    assert [checks.node_def.name for checks in joined] == [
        "values__checks",
        "values_own",
        "values__all_contract",
    ]
    again = join_checks([*joined, sql_check(values, "more", "select * from {this}")])
    assert {spec.name for spec in again[0].check_specs} == PARTITIONED | {"more"}
    with raising(ContractError, reason="same_name", subject="in_pairs"):
        join_checks([*joined, sql_check(values, "in_pairs", "select * from {this}")])


@pytest.mark.spark
def test_joined_checks_keep_the_result_of_each(instance: dg.DagsterInstance, lake: Lake) -> None:
    result = _run(instance, lake, *_joined(), partition_key="c")
    assert result.success
    assert sorted(lake.asked) == [["a", "b", "c"], ["c"]]
    evaluated = _evaluated(result)
    assert set(evaluated) == PARTITIONED | WHOLE | {"own"}
    assert {name for name, one in evaluated.items() if not one.passed} == {
        "ge__v",
        "isin__w",
        "all_ge__v",
        "all_isin__w",
    }
    assert evaluated["isin__w"].severity is dg.AssetCheckSeverity.WARN
    assert evaluated["all_isin__w"].severity is dg.AssetCheckSeverity.ERROR
    assert {evaluated[name].partition for name in PARTITIONED} == {"c"}
    assert {evaluated[name].partition for name in WHOLE} == {None}
    assert evaluated["all_isin__w"].metadata["total_rows"].value == 6


@pytest.mark.spark
def test_one_of_joined_checks_runs_alone(instance: dg.DagsterInstance, lake: Lake) -> None:
    for name in ("isin__w", "in_pairs"):
        defs = dg.Definitions(assets=[values], asset_checks=_joined(), resources={"io_manager": lake})
        result = (
            defs.resolve_implicit_global_asset_job_def()
            .get_subset(asset_check_selection={dg.AssetCheckKey(values.key, name)}, asset_selection=set())
            .execute_in_process(instance=instance, partition_key="a")
        )
        assert set(_evaluated(result)) == {name}


@pytest.mark.spark
def test_a_broken_check_keeps_no_verdict_from_the_others(instance: dg.DagsterInstance, lake: Lake) -> None:
    checks = join_checks(
        [
            pandera_checks(values, Values),
            sql_check(values, "broken", "select nope from {this}"),
            sql_check(values, "none_bad", "select * from {this} where v < -1"),
        ]
    )
    result = _run(instance, lake, *checks, partition_key="a")
    assert not result.success
    evaluated = _evaluated(result)
    assert set(evaluated) == {"schema", "not_null__v", "ge__v", "isin__w", "none_bad"}
    assert {name for name, one in evaluated.items() if not one.passed} == {"ge__v"}
    assert set(_planned(instance, result.run_id)) - set(evaluated) == {"broken"}  # blocks for want of one
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    cause = failure.step_failure_data.error.cause
    assert (cause.cls_name, "broken" in cause.message) == ("CheckFailedToRun", True)
