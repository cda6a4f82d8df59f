"""A contract's columns as Dagster shows them: no session, no JVM."""

from __future__ import annotations

import dagster as dg
import pandera.pyspark as pa
import pyspark.sql.types as pst
import pytest
from pandera.pyspark import DataFrameModel, Field
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from branchlake_dagster import column_metadata, row_predicate, table_metadata
from branchlake_dagster.checks import ContractError
from branchlake_dagster_tests.checks.contracts import EveryKind
from branchlake_dagster_tests.suite.raised import raising


class Passes(DataFrameModel):
    sat_no: pst.LongType = Field(ge=1, description="Catalogue number of the\n    object.")
    rise: pst.TimestampType = Field(title="Rise, UTC")
    elevation: pst.DoubleType = Field(
        ge=0.0, le=90.0, nullable=True, description="Highest elevation.", metadata={"unit": "deg"}
    )
    duration: pst.DecimalType = Field(
        dtype_kwargs={"precision": 9, "scale": 3}, nullable=True, metadata={"unit": "s", "source": "radar"}
    )
    sensors: pst.ArrayType = Field(dtype_kwargs={"elementType": pst.StringType()}, nullable=True)
    extra: pst.DoubleType = Field(alias="extra_.*", regex=True, nullable=True)

    @pa.dataframe_check
    @classmethod
    @row_predicate
    def after_1957(cls, rows: DataFrame) -> object:
        """Rises are after Sputnik's launch."""
        return F.year("rise") >= 1957

    class Config:
        unique = ["sat_no", "rise"]  # noqa: RUF012 - pandera's way


def schema_of(model: type[DataFrameModel]) -> dg.TableSchema:
    (schema,) = column_metadata(model).values()
    assert isinstance(schema, dg.TableSchema)
    return schema


def column(name: str) -> dg.TableColumn:
    return next(one for one in schema_of(Passes).columns if one.name == name)


def test_columns_are_those_of_the_contract_in_its_order() -> None:
    # A pattern names no column.
    names = [one.name for one in schema_of(Passes).columns]
    assert names == ["sat_no", "rise", "elevation", "duration", "sensors"]


def test_types_are_those_that_the_lake_stores() -> None:
    types = [one.type for one in schema_of(Passes).columns]
    assert types == ["long", "timestamptz", "double", "decimal(9, 3)", "list<string>"]


def test_descriptions_say_the_unit() -> None:
    assert column("elevation").description == "Highest elevation [deg]."
    assert column("sat_no").description == "Catalogue number of the object."
    assert column("rise").description == "Rise, UTC"
    assert column("duration").description == "[s]"
    assert column("sensors").description is None


def test_the_unit_is_a_tag_and_nothing_else_is() -> None:
    assert column("duration").tags == {"unit": "s"}
    assert column("sat_no").tags == {}


def test_promises_on_one_column_are_its_constraints() -> None:
    assert column("elevation").constraints == dg.TableColumnConstraints(
        nullable=True, other=[">= 0.0", "<= 90.0"]
    )
    assert column("rise").constraints == dg.TableColumnConstraints(nullable=False)
    every = {one.name: one.constraints.other for one in schema_of(EveryKind).columns}
    assert every["x"] == ["in [0, 360)"]
    assert every["n"] == [">= 1", "< 40", "not in [13]", "mostly_even holds", "below_code holds"]


def test_promises_on_several_columns_are_the_tables() -> None:
    texts = schema_of(Passes).constraints.other
    assert "no two rows agree on sat_no, rise" in texts
    assert not any(text.startswith("columns sat_no") for text in texts)
    assert any("extra_.*" in text for text in texts)


def test_a_key_of_one_column_is_unique() -> None:
    class Keyed(DataFrameModel):
        a: pst.LongType

        class Config:
            unique = "a"

    (one,) = schema_of(Keyed).columns
    assert one.constraints == dg.TableColumnConstraints(nullable=False, unique=True)


@pytest.mark.parametrize("element", [pst.DayTimeIntervalType(), pst.CalendarIntervalType()])
def test_a_type_that_the_lake_has_not_is_named_as_spark_does(element: pst.DataType) -> None:
    class Timed(DataFrameModel):
        took: pst.ArrayType = Field(dtype_kwargs={"elementType": element})

    (one,) = schema_of(Timed).columns
    assert one.type == f"array<{element.simpleString()}>"


def test_dagster_takes_it_beside_the_tables_metadata() -> None:
    @dg.asset(metadata=table_metadata(partition_by="rise") | column_metadata(Passes))
    def passes() -> None: ...

    metadata = passes.metadata_by_key[passes.key]
    assert metadata["partition_expr"] == "rise"
    assert metadata["dagster/column_schema"] == schema_of(Passes)
    dg.Definitions([passes]).resolve_all_asset_specs()


@pytest.mark.parametrize("wrong", [dict, Passes.to_schema()])
def test_what_is_no_model_is_refused(wrong: object) -> None:
    with raising(ContractError, reason="not_a_spark_model"):
        column_metadata(wrong)


def test_a_contract_that_cannot_be_a_check_describes_nothing() -> None:
    class Coerced(DataFrameModel):
        a: pst.LongType = Field(coerce=True)

    with raising(ContractError, reason="coerce", subject="a"):
        column_metadata(Coerced)
