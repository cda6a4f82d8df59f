"""Describe the columns of a contract for the asset's page in Dagster: text, unit, type and constraints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg
from pandera.pyspark import DataFrameModel
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import to_arrow_type

from branchlake_dagster.checks.compiler import compile_schema
from branchlake_dagster.checks.constraints import (
    Constraint,
    ContractError,
    SchemaConstraint,
    UniqueConstraint,
)
from branchlake_dagster.tables.errors import ColumnUnsupported
from branchlake_dagster.tables.schemas import format_type, stored_type

if TYPE_CHECKING:
    from pandera.api.pyspark.components import Column
    from pyspark.sql.types import DataType

COLUMN_SCHEMA = "dagster/column_schema"
UNIT = "unit"


def column_metadata(model: type[DataFrameModel[Any]]) -> dict[str, Any]:
    """Asset metadata for `@dg.asset(metadata=…)`: the columns of a pandera model as Dagster shows them.

    Each column shows the field's `description` (or its `title`) with the unit in brackets, the type that the
    lake stores, and the promises of the contract. Promises on several columns belong to the table. The unit
    is `"unit"` in the field's `metadata`; it also becomes a tag of the column. After a materialization,
    Dagster shows the columns and types of the stored table, and the descriptions and tags from here.

    Args:
        model (type[DataFrameModel]): A model of `pandera.pyspark`. Fields with `regex=True` do not name a
            column and are omitted.

    Returns:
        Dict[str, Any]: Metadata. Combine it with the result of `table_metadata`.

    Raises:
        ContractError: The object is not such a model, or the model cannot be compiled to checks.

    Examples:
        .. code-block:: python

            import dagster as dg
            import pandera.pyspark as pa
            import polars as pl
            import pyspark.sql.types as T

            from branchlake_dagster import column_metadata, table_metadata

            class Weather(pa.DataFrameModel):
                station: T.StringType = pa.Field(description="Call sign of the station.")
                wind: T.DoubleType = pa.Field(
                    ge=0, description="Mean wind speed at 10 m.", metadata={"unit": "m/s"}
                )

            @dg.asset(metadata=table_metadata() | column_metadata(Weather))
            def weather() -> pl.DataFrame:
                return pl.DataFrame({"station": ["EDDF"], "wind": [3.2]})
    """
    if not (isinstance(model, type) and issubclass(model, DataFrameModel)):
        raise ContractError(
            f"{model!r} does not describe columns: it is not a pandera model for Spark.",
            hint="Derive the model from pandera.pyspark.DataFrameModel.",
            reason="not_a_spark_model",
        )
    schema = model.to_schema()
    columns = {name: column for name, column in schema.columns.items() if not column.regex}
    column_constraints: dict[str, list[Constraint]] = {name: [] for name in columns}
    table_promises: list[str] = []
    for constraint in compile_schema(schema):
        if len(constraint.columns) == 1 and constraint.columns[0] in column_constraints:
            column_constraints[constraint.columns[0]].append(constraint)
        elif not isinstance(constraint, SchemaConstraint):
            table_promises.append(constraint.description)
    return {
        COLUMN_SCHEMA: dg.TableSchema(
            columns=[
                _build_table_column(name, column, schema.dtype or column.dtype, column_constraints[name])
                for name, column in columns.items()
            ],
            constraints=dg.TableConstraints(other=table_promises),
        )
    }


def _build_table_column(
    name: str, column: Column, dtype: Any, constraints: list[Constraint]
) -> dg.TableColumn:
    unit = str((column.metadata or {}).get(UNIT, ""))
    description = " ".join((column.description or column.title or "").split())
    return dg.TableColumn(
        name,
        type=_column_type(name, dtype.type) if dtype else "any",
        description=_add_unit(description, unit) or None,
        constraints=dg.TableColumnConstraints(
            nullable=column.nullable,
            unique=any(isinstance(constraint, UniqueConstraint) for constraint in constraints),
            other=_other_promises(name, constraints),
        ),
        tags={UNIT: unit} if unit else None,
    )


def _add_unit(description: str, unit: str) -> str:
    """Add a unit to a description: `Inclination.` with `deg` gives `Inclination [deg].` as in CCSDS."""
    if not unit:
        return description
    stop = "." if description.endswith(".") else ""
    return f"{description.removesuffix('.')} [{unit}]{stop}".lstrip()


def _other_promises(name: str, constraints: list[Constraint]) -> list[str]:
    """Return a column's promises other than nullable and unique, without the leading column name."""
    descriptions = [
        constraint.description for constraint in constraints if not isinstance(constraint, UniqueConstraint)
    ]
    promises = [promise.removeprefix(name).removeprefix(":").strip() for promise in descriptions]
    return [promise for promise in promises if promise != "is not null"]


def _column_type(name: str, dtype: DataType) -> str:
    """Return the type name of the stored column; Spark's type name if the lake cannot store the type."""
    try:
        return format_type(stored_type(to_arrow_type(dtype), name, name), table_name=name)
    except (PySparkException, ColumnUnsupported):
        return dtype.simpleString()
