"""The one job against pandera's own verdict, over Spark Connect."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from typing import Any

import pandera.pyspark as pa
import pyspark.sql.types as pst
import pytest
from pandera.api.pyspark.container import DataFrameSchema
from pandera.pyspark import DataFrameModel, Field, dataframe_check
from pyspark.errors.exceptions.connect import SparkConnectGrpcException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from branchlake_dagster.checks import ContractError, row_predicate
from branchlake_dagster.checks.compiler import compile_schema
from branchlake_dagster.checks.constraints import (
    CheckOutcome,
    PanderaConstraint,
    RowConstraint,
    SqlConstraint,
)
from branchlake_dagster.checks.counting import Collect, collect_rows
from branchlake_dagster.checks.judge import ConstraintGroup, FrameRows, Verdicts, judge_constraints
from branchlake_dagster_tests.checks.contracts import DDL, PANDERA_NAMES, EveryKind, random_rows
from branchlake_dagster_tests.suite.raised import raising

pytestmark = pytest.mark.spark


def _judged(rows: DataFrame, model: type[DataFrameModel[Any]], examples: int = 3) -> dict[str, CheckOutcome]:
    schema = model.to_schema()
    verdicts = _verdicts(rows, ConstraintGroup(schema, compile_schema(schema), examples))
    assert not verdicts.errors
    return verdicts.outcomes


def _verdicts(rows: DataFrame, *asked: ConstraintGroup, collect: Collect = collect_rows) -> Verdicts:
    return judge_constraints(FrameRows(rows), asked, view="branchlake_judged", collect=collect)


def _strict_twin(model: type[DataFrameModel[Any]]) -> DataFrameSchema:
    """The schema with raise_warning off: with it, pandera counts a breach as passed."""
    schema = model.build_schema_(name="twin", unique=["n", "s"], strict=True)
    for column in schema.columns.values():
        for check in column.checks:
            check.raise_warning = False
    return schema


def _broken_in_pandera(rows: DataFrame, schema: DataFrameSchema) -> set[str]:
    """What pandera's own backend finds broken, in our names."""
    report = schema.validate(rows).pandera.errors
    broken = set()
    for record in [one for reasons in report.values() for many in reasons.values() for one in many]:
        check = record["check"].split("(")[0]
        if check == "unique":
            broken.add("unique__n__s")
        elif record["column"] == "twin":
            broken.add(check)
        else:
            short = "not_null" if check == "not_nullable" else PANDERA_NAMES.get(check, check)
            broken.add(f"{short}__{record['column']}")
    return broken


@pytest.fixture
def queries(spark_session: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the queries that the Connect client sends for execution (schema analysis is not one)."""
    sent: Counter[str] = Counter()
    client = spark_session.client
    original = client._execute_and_fetch_as_iterator

    def counted(*args: Any, **kwargs: Any) -> Any:
        sent["executed"] += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(client, "_execute_and_fetch_as_iterator", counted)
    return sent


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 6))]
)
def test_verdicts_equal_panderas(spark_session: SparkSession, seed: int) -> None:
    rows = spark_session.createDataFrame(random_rows(seed, size=20), DDL)
    outcomes = _judged(rows, EveryKind)
    ours = {name for name, outcome in outcomes.items() if not outcome.passed}
    assert ours == _broken_in_pandera(rows, _strict_twin(EveryKind))


def test_random_rows_break_every_promise_somewhere(spark_session: SparkSession) -> None:
    # Guards the comparison above against data on which everything passes.
    rows = [row for seed in range(6) for row in random_rows(seed, size=20)]
    outcomes = _judged(spark_session.createDataFrame(rows, DDL), EveryKind)
    assert {name for name, outcome in outcomes.items() if outcome.passed} == {"schema", "not_empty"}


def test_counts_nulls_and_nan(spark_session: SparkSession) -> None:
    class Small(DataFrameModel):
        a: pst.LongType = Field(ge=1, le=5)
        x: pst.DoubleType = Field(nullable=True, lt=10)

        class Config:
            unique = ["a"]  # noqa: RUF012

    rows = spark_session.createDataFrame(
        [(1, 1.0), (7, None), (None, float("nan")), (None, 10.0), (0, 2.0), (1, 3.0)], "a bigint, x double"
    )
    outcomes = _judged(rows, Small)
    assert {name: outcome.failing for name, outcome in outcomes.items()} == {
        "schema": None,
        "not_null__a": 2,
        "ge__a": 1,
        "le__a": 1,
        "lt__x": 2,  # NaN is greater than any number, null is no failure
        "unique__a": 4,  # the two ones and the two nulls
    }
    assert {outcome.total for outcome in outcomes.values()} == {None, 6}
    assert outcomes["le__a"].examples == ({"a": "7", "x": None},)
    assert outcomes["unique__a"].examples
    assert {tuple(e.items()) for e in outcomes["unique__a"].examples} <= {
        (("a", "1"), ("rows", "2")),
        (("a", None), ("rows", "2")),
    }


KEEPS_ALL = (2, 1.5, "ab", dt.date(2026, 8, 8), dt.datetime(2026, 8, 8, 12, tzinfo=dt.UTC), True, 4)
"""A row that breaks no promise of EveryKind."""


@pytest.mark.parametrize(("broken", "jobs"), [(False, 1), (True, 2)])
def test_a_model_that_holds_is_one_query_and_examples_are_one_more(
    spark_session: SparkSession, queries: Counter[str], broken: bool, jobs: int
) -> None:
    rows = spark_session.createDataFrame([*([(0, *KEEPS_ALL[1:])] * 2 * broken), KEEPS_ALL], DDL)
    schema = EveryKind.to_schema()
    compiled = [c for c in compile_schema(schema) if not isinstance(c, PanderaConstraint)]
    collected: list[str] = []

    def collect(frame: DataFrame) -> list[Row]:
        collected.append("one")
        return collect_rows(frame)

    verdicts = _verdicts(rows, ConstraintGroup(schema, compiled, 3), collect=collect)
    assert len(verdicts.outcomes) == 20
    failing = {name for name, outcome in verdicts.outcomes.items() if not outcome.passed}
    assert failing == ({"ge__n", "unique__n__s"} if broken else set())
    assert all(verdicts.outcomes[name].examples for name in failing)
    assert len(collected) == jobs
    assert queries["executed"] == jobs
    _strict_twin(EveryKind).validate(rows)
    assert queries["executed"] > 10  # what the same model costs in pandera


def test_sql_checks_share_the_one_query(spark_session: SparkSession, queries: Counter[str]) -> None:
    rows = spark_session.createDataFrame([KEEPS_ALL], DDL)
    schema = EveryKind.to_schema()
    compiled = [c for c in compile_schema(schema) if not isinstance(c, PanderaConstraint)]
    checks = [_sql("none", "SELECT * FROM {this} WHERE n < 0"), _sql("all", "SELECT n, n FROM {this}")]
    collected: list[DataFrame] = []

    def collect(frame: DataFrame) -> list[Row]:
        collected.append(frame)
        return collect_rows(frame)

    verdicts = _verdicts(
        rows, ConstraintGroup(schema, compiled, 3), ConstraintGroup(None, checks, 2), collect=collect
    )
    assert len(verdicts.outcomes) == 22
    assert verdicts.outcomes["none"] == CheckOutcome(passed=True, failing=0)
    assert verdicts.outcomes["all"] == CheckOutcome(
        passed=False, failing=1, examples=({"n": "2", "n_2": "2"},)
    )
    assert len(collected) == 2  # the counts of all, and examples of what failed
    assert not [view for view in spark_session.catalog.listTables() if view.name == "branchlake_judged"]


@pytest.mark.parametrize(
    "bad", ["SELECT nope FROM {this}", "SELECT FROM WHERE {this}", "SELECT 1/(n-2) FROM {this}"]
)
def test_what_cannot_be_evaluated_leaves_the_others_their_verdicts(
    spark_session: SparkSession, bad: str
) -> None:
    class Rules(DataFrameModel):
        n: pst.LongType = Field(ge=1, le=1)

        @pa.check("n")
        @classmethod
        @row_predicate
        def explodes(cls, rows: DataFrame) -> Any:
            raise KeyError("no such thing")

        @pa.check("n")
        @classmethod
        @row_predicate
        def divides(cls, rows: DataFrame) -> Any:
            return F.lit(1) / (F.col("n") - 2) > 0

    schema = Rules.to_schema()
    checks = [_sql("good", "SELECT * FROM {this} WHERE n > 5"), _sql("bad", bad)]
    rows = spark_session.createDataFrame([(2,)], "n bigint")
    verdicts = _verdicts(
        rows, ConstraintGroup(schema, compile_schema(schema), 3), ConstraintGroup(None, checks, 2)
    )
    assert set(verdicts.errors) == {"bad", "explodes__n", "divides__n"}
    assert {name: outcome.passed for name, outcome in verdicts.outcomes.items()} == {
        "schema": True,
        "not_null__n": True,
        "ge__n": True,
        "le__n": False,
        "good": True,
    }
    assert verdicts.outcomes["le__n"].examples == ({"n": "2"},)


def test_a_lost_connection_is_not_asked_again_for_each(spark_session: SparkSession) -> None:
    tries: list[int] = []

    def lost(frame: DataFrame) -> list[Row]:
        tries.append(1)
        raise SparkConnectGrpcException("unavailable")

    schema = EveryKind.to_schema()
    compiled = [c for c in compile_schema(schema) if isinstance(c, RowConstraint)]
    verdicts = _verdicts(
        spark_session.createDataFrame([KEEPS_ALL], DDL), ConstraintGroup(schema, compiled, 3), collect=lost
    )
    assert len(tries) == 1
    assert set(verdicts.errors) == {one.name for one in compiled}
    assert not verdicts.outcomes


def _sql(name: str, text: str) -> SqlConstraint:
    return SqlConstraint(name=name, columns=(), description=text, sql=text)


def test_the_session_keeps_its_settings(spark_session: SparkSession) -> None:
    before = spark_session.conf.get("spark.sql.adaptive.enabled")
    during = collect_rows(spark_session.range(3).selectExpr("max(id) AS m"))
    assert during == [Row(m=2)]
    assert spark_session.conf.get("spark.sql.adaptive.enabled") == before


def test_examples_are_bounded_and_cut_short(spark_session: SparkSession) -> None:
    class Text(DataFrameModel):
        s: pst.StringType = Field(str_length={"max_value": 3})
        raw: pst.BinaryType = Field()
        n: pst.LongType = Field(lt=0)

    rows = spark_session.range(5000).selectExpr(
        "repeat('long', 100) AS s", "cast(repeat('b', 500) AS binary) AS raw", "id AS n"
    )
    outcomes = _judged(rows, Text, examples=4)
    assert outcomes["str_length__s"].failing == 5000
    assert len(outcomes["lt__n"].examples) == 4
    assert next(iter(outcomes["lt__n"].examples[0])) == "n"
    assert all(len(value or "") <= 80 for e in outcomes["lt__n"].examples for value in e.values())


def test_a_rare_failure_is_shown_beside_a_total_one(spark_session: SparkSession) -> None:
    class Both(DataFrameModel):
        n: pst.LongType = Field(lt=0, ne=4321)

    outcomes = _judged(spark_session.range(5000).selectExpr("id AS n"), Both, examples=2)
    assert outcomes["lt__n"].failing == 5000
    assert outcomes["ne__n"].examples == ({"n": "4321"},)


def test_no_rows(spark_session: SparkSession) -> None:
    outcomes = _judged(spark_session.createDataFrame([], DDL), EveryKind)
    assert {name for name, outcome in outcomes.items() if not outcome.passed} == {"not_empty"}
    assert outcomes["ge__n"].total == 0


def test_missing_and_mistyped_columns_take_no_other_verdict_along(
    spark_session: SparkSession, queries: Counter[str]
) -> None:
    class Wide(DataFrameModel):
        a: pst.LongType = Field(ge=1)
        b: pst.LongType = Field(ge=1)
        c: pst.LongType = Field(ge=1, required=False)
        d: pst.LongType = Field(ge=1)

        @dataframe_check
        @classmethod
        @row_predicate
        def b_before_d(cls, rows: DataFrame) -> Any:
            return F.col("b") < F.col("d")

    outcomes = _judged(spark_session.createDataFrame([("x", 3)], "a string, d bigint"), Wide)
    assert outcomes["ge__d"] == CheckOutcome(passed=True, failing=0, total=1)
    assert outcomes["not_null__a"].passed
    assert outcomes["ge__c"].passed
    notes = {name: outcome.note or "" for name, outcome in outcomes.items() if not outcome.passed}
    assert set(notes) == {"schema", "ge__a", "not_null__b", "ge__b", "b_before_d"}
    assert notes["ge__a"] == "not evaluated: column a has type string, the contract says bigint"
    assert notes["ge__b"] == "not evaluated: column b is missing"
    assert "UNRESOLVED_COLUMN" in notes["b_before_d"]
    assert queries["executed"] == 1


def test_pandera_switched_off_in_the_environment_is_no_pass(
    spark_session: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pandera.config import CONFIG

    monkeypatch.setattr(CONFIG, "validation_enabled", False)
    rows = spark_session.createDataFrame([(i, None, None, None, None, None, 9) for i in range(1, 39, 2)], DDL)
    outcomes = _judged(rows, EveryKind)
    assert not outcomes["mostly_even__n"].passed
    assert outcomes["mostly_even__n"].failing is None


def test_a_raising_check_is_a_failed_check(spark_session: SparkSession) -> None:
    class Raises(DataFrameModel):
        n: pst.LongType = Field()

        @dataframe_check
        @classmethod
        def explodes(cls, rows: DataFrame) -> bool:
            raise TypeError("no such thing")

    outcomes = _judged(spark_session.range(1).selectExpr("id AS n"), Raises)
    assert not outcomes["explodes"].passed
    assert "no such thing" in (outcomes["explodes"].note or "")
    assert outcomes["not_null__n"].passed


def test_examples_must_be_few(spark_session: SparkSession) -> None:
    with raising(ContractError, 100, 101, reason="examples"):
        _judged(spark_session.range(1).selectExpr("id AS n"), EveryKind, examples=101)
