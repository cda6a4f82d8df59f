"""Names, texts, kinds and refusals of the compiler: no session, no JVM."""

from __future__ import annotations

from datetime import date

import pyspark.sql.types as pst
import pytest
from pandera.pyspark import DataFrameModel, Field

from branchlake_dagster.checks.compiler import compile_schema
from branchlake_dagster.checks.constraints import (
    ContractError,
    PanderaConstraint,
    RowConstraint,
    SchemaConstraint,
    UniqueConstraint,
)
from branchlake_dagster.checks.judge import schema_outcome
from branchlake_dagster_tests.checks.contracts import EveryKind
from branchlake_dagster_tests.suite.raised import raising


def _names(model: type[DataFrameModel]) -> list[str]:
    return [constraint.name for constraint in compile_schema(model.to_schema())]


def test_every_promise_becomes_one_named_constraint() -> None:
    assert _names(EveryKind) == [
        "schema",
        "not_null__n",
        "ge__n",
        "lt__n",
        "notin__n",
        "mostly_even__n",
        "below_code__n",
        "in_range__x",
        "isin__s",
        "str_contains__s",
        "str_endswith__s",
        "str_matches__s",
        "str_length__s",
        "str_startswith__s",
        "eq__ok",
        "not_null__code",
        "ne__code",
        "gt__code",
        "le__code",
        "unique__n__s",
        "day_is_days_start",
        "not_empty",
    ]


def test_only_what_must_goes_through_pandera() -> None:
    kinds = {type(c): [] for c in compile_schema(EveryKind.to_schema())}
    for constraint in compile_schema(EveryKind.to_schema()):
        kinds[type(constraint)].append(constraint.name)
    assert kinds[PanderaConstraint] == ["mostly_even__n", "not_empty"]
    assert kinds[SchemaConstraint] == ["schema"]
    assert kinds[UniqueConstraint] == ["unique__n__s"]
    assert len(kinds[RowConstraint]) == 18


def test_texts_say_the_promise() -> None:
    texts = {c.name: c.description for c in compile_schema(EveryKind.to_schema())}
    assert texts["in_range__x"] == "x in [0, 360)"
    assert texts["isin__s"] == "s in ['ab', 'abc', 'b']"
    assert texts["str_matches__s"] == "s matches '^a|b'"
    assert texts["str_length__s"] == "s has length 2 to 3"
    assert texts["unique__n__s"] == "no two rows agree on n, s"


def test_a_promise_added_renames_no_other() -> None:
    class Before(DataFrameModel):
        a: pst.LongType = Field(ge=1)

    class After(DataFrameModel):
        a: pst.LongType = Field(lt=9, ge=1)

    assert set(_names(Before)) < set(_names(After))


def test_names_stay_apart_and_acceptable_to_dagster() -> None:
    class Odd(DataFrameModel):
        first: pst.LongType = Field(alias="a b")
        second: pst.LongType = Field(alias="a-b")

    assert _names(Odd) == ["schema", "not_null__a_b", "not_null__a_b__2"]


def test_raise_warning_is_warn_severity() -> None:
    warned = [c.name for c in compile_schema(EveryKind.to_schema()) if c.warn]
    assert warned == ["ne__code", "gt__code", "le__code"]


def test_a_check_that_means_nothing_for_the_type_is_refused_at_definition() -> None:
    class Wrong(DataFrameModel):
        name: pst.StringType = Field(ge=3)

    with raising(ContractError, "ge", "string", reason="check_on_type", subject="name"):
        compile_schema(Wrong.to_schema())


def test_dates_can_be_bounded() -> None:
    class Dated(DataFrameModel):
        day: pst.DateType = Field(ge=date(2026, 1, 1))

    assert "ge__day" in _names(Dated)


def test_a_contract_that_would_change_rows_is_refused() -> None:
    class Casts(DataFrameModel):
        a: pst.LongType = Field(coerce=True)

    class Filters(DataFrameModel):
        a: pst.LongType = Field()

        class Config:
            strict = "filter"

    with raising(ContractError, reason="coerce", subject="a"):
        compile_schema(Casts.to_schema())
    with raising(ContractError, reason="filter"):
        compile_schema(Filters.to_schema())


def test_regex_columns_go_through_pandera() -> None:
    class Wide(DataFrameModel):
        a: pst.LongType = Field(alias="v_.*", regex=True, ge=1)

    _, matching = compile_schema(Wide.to_schema())
    assert isinstance(matching, PanderaConstraint)
    assert matching.name == "matching__v___"
    assert schema_outcome(Wide.to_schema(), pst.StructType().add("v_1", pst.LongType())).passed


@pytest.mark.parametrize(
    ("ddl", "note"),
    [
        ("a bigint, b string", None),
        ("a bigint", None),
        ("b string", "column a is missing"),
        ("a string", "column a has type string, the contract says bigint"),
        ("a bigint, c int", "column c is not in the contract"),
        ("b string, a bigint", "columns are not in the contract's order: b, a"),
    ],
)
def test_shape(ddl: str, note: str | None) -> None:
    class Ordered(DataFrameModel):
        a: pst.LongType = Field()
        b: pst.StringType = Field(required=False)

        class Config:
            strict = True
            ordered = True

    fields = pst.StructType()
    for column in ddl.split(", "):
        name, kind = column.split(" ")
        fields.add(
            name, {"bigint": pst.LongType(), "string": pst.StringType(), "int": pst.IntegerType()}[kind]
        )
    outcome = schema_outcome(Ordered.to_schema(), fields)
    assert (outcome.passed, outcome.note) == (note is None, note)
