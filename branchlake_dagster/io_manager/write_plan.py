"""Plans what one materialization writes, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from dagster import PartitionsDefinition
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyspark.sql import DataFrame

from branchlake_dagster.incremental import outputs
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.tables import arrow_frames, partitioning, spark_frames
from branchlake_dagster.tables.errors import UnsupportedType
from branchlake_dagster.tables.schemas import (
    build_iceberg_schema,
    drop_untyped_columns,
    stored_schema,
    table_arrow_schema,
)
from branchlake_dagster.tables.selection import Selection, select_partitions
from branchlake_dagster.tables.specification import TableSpec, require_parquet


@dataclass(frozen=True)
class WriteRequest:
    """The request of a step: the asset's table, the run's branch, and the partitions to write.

    For an asset without partitions, `definition` is None and `partition_keys` is empty.
    """

    spec: TableSpec
    branch: str
    definition: PartitionsDefinition[str] | None = None
    partition_keys: Sequence[str] = ()


@dataclass(frozen=True)
class OutputFrame:
    """The rows that an asset returned, and the Arrow types with which the table stores them.

    A pandas or Polars frame is already an Arrow table here. A Spark frame has not been executed.
    """

    rows: pa.Table | DataFrame
    schema: pa.Schema

    @property
    def is_spark(self) -> bool:
        """Whether the rows are a Spark frame, which only Spark writes."""
        return isinstance(self.rows, DataFrame)


@dataclass(frozen=True)
class WritePlan:
    """How rows get into the table of an asset.

    Args:
        spec: the table and its write mode. Consumption may have changed the mode that the asset declares.
        existing_table: the table on the run's branch; None if it is created by this write.
        schema: the columns of the existing table, or of the one to create.
        selection: the rows that belong to the run's partitions or ranges; None for all rows.
        matches_rows: whether rows of the table may have the keys of an upsert.
        replaces_keys: whether the frame replaces all rows with the keys that changed in the inputs.
        partition_spec: the partitions of a table to create.
        creation_properties: the properties of a table to create.
    """

    spec: TableSpec
    existing_table: Table | None
    schema: Schema
    selection: Selection | None
    matches_rows: bool = False
    replaces_keys: bool = False
    partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC
    creation_properties: Mapping[str, str] = field(default_factory=dict)


def convert_frame(value: Any, request: WriteRequest, existing_table: Table | None) -> OutputFrame:
    """Convert the value that an asset returned to rows for its table.

    Raises:
        UnsupportedType: the value is not a frame.
        ForeignSession: a Spark frame belongs to a session that is not on the run's branch.
        ColumnUnsupported: a column has a type that a table cannot store.
    """
    name = request.spec.name
    if isinstance(value, DataFrame):
        spark_frames.require_session_branch(value, request.branch, table_name=name)
        return OutputFrame(
            value, stored_schema(spark_frames.spark_arrow_schema(value, table_name=name), table_name=name)
        )
    if not arrow_frames.can_write_type(type(value)):
        raise UnsupportedType(
            f"The asset returned {type(value).__module__}.{type(value).__qualname__}, which is not a frame.",
            table=name,
            hint="Return a Spark, pandas or Polars frame or a pyarrow.Table.",
        )
    stored = (
        table_arrow_schema(existing_table.schema(), table_name=name) if existing_table is not None else None
    )
    rows = arrow_frames.to_arrow(value, stored, table_name=name)
    return OutputFrame(rows, rows.schema)


def plan_write(
    request: WriteRequest,
    frame_schema: pa.Schema,
    existing_table: Table | None,
    consumption: Consumption | None = None,
) -> WritePlan:
    """Decide how rows with these columns are written. Reads at most the manifests of an existing table.

    `consumption` is what the step consumes of its inputs' changes; None if it consumes none.

    Raises:
        ConfigurationError: the existing table is not written as Parquet, or the metadata contradicts itself.
        UpsertKeyInvalid: the frame lacks a key.
        ColumnUnsupported: a column of a new table has no type.
        PartitionMismatch: the run's partitions cannot be expressed on the table's columns.
    """
    spec = request.spec if consumption is None else outputs.effective_spec(consumption, request.spec)
    if existing_table is not None:
        require_parquet(existing_table.metadata.properties, table_name=spec.name)
    if spec.write_mode == "upsert":
        spark_frames.require_key_columns(spec, frame_schema.names)
    columns = spec.columns_by_dimension
    if existing_table is not None:
        schema = existing_table.schema()
    else:
        required = (*spec.keys, *columns.values())
        schema = build_iceberg_schema(
            drop_untyped_columns(frame_schema, required, table_name=spec.name), table_name=spec.name
        )
    selection = None
    if consumption is not None and outputs.replaces_ranges(consumption):
        selection = outputs.select_replaced_rows(consumption, schema)
    elif request.definition is not None and columns:
        selection = select_partitions(
            request.partition_keys, request.definition, columns, schema=schema, table_name=spec.name
        )
    plan = WritePlan(
        spec=spec,
        existing_table=existing_table,
        schema=schema,
        selection=selection,
        replaces_keys=consumption is not None and bool(consumption.replaced_keys),
    )
    if existing_table is not None:
        # An upsert into a table without rows has nothing to match.
        matches_rows = spec.write_mode == "upsert" and arrow_frames.may_have_rows(existing_table)
        return replace(plan, matches_rows=matches_rows)
    partition_spec = partitioning.build_partition_spec(
        request.definition, columns, schema, table_name=spec.name, layout=spec.layout
    )
    properties = {**spec.properties, **partitioning.path_properties(selection)}
    return replace(plan, partition_spec=partition_spec, creation_properties=properties)
