"""Plans what one materialization writes, then writes it to the run's branch by PyIceberg or by Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from dagster import OutputContext, PartitionsDefinition
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CreateTableTransaction, Table
from pyspark.sql import DataFrame, SparkSession

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.incremental import inputs, outputs, spark_inputs
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.io_manager import earlier_attempts
from branchlake_dagster.runs import provenance
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.provenance import mark_merge_target
from branchlake_dagster.tables import arrow_frames, partitioning, replaced_rows, spark_frames, upserts
from branchlake_dagster.tables.errors import UnsupportedType, name_in_use_error, no_namespace_error
from branchlake_dagster.tables.schemas import (
    build_iceberg_schema,
    drop_untyped_columns,
    evolve_table,
    require_distinct_names,
    require_unchanged_columns,
    stored_schema,
    table_arrow_schema,
)
from branchlake_dagster.tables.selection import Selection, select_partitions
from branchlake_dagster.tables.specification import TableSpec, require_parquet
from branchlake_dagster.tables.upsert_engine import SparkReason, engine_metadata


@dataclass(frozen=True)
class WriteRequest:
    """The table of an asset, the run's branch, and the partitions that a step writes.

    For an asset without partitions, `definition` is None and `partition_keys` is empty.
    """

    spec: TableSpec
    branch: str
    definition: PartitionsDefinition[str] | None = None
    partition_keys: Sequence[str] = ()


@dataclass(frozen=True)
class OutputFrame:
    """The rows that an asset returned, and the Arrow types with which the table stores them.

    pandas and Polars frames are already converted to an Arrow table. A Spark frame has not been executed.
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
        candidate_rows: the largest number of rows of the table that may have the keys of an upsert.
        replaces_keys: whether the frame replaces all rows with the keys that changed in the inputs.
        partition_spec: the partitions of a table to create.
        creation_properties: the properties of a table to create.
    """

    spec: TableSpec
    existing_table: Table | None
    schema: Schema
    selection: Selection | None
    candidate_rows: int = 0
    replaces_keys: bool = False
    partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC
    creation_properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def matches_rows(self) -> bool:
        """Whether rows of the table may have the keys of an upsert."""
        return self.candidate_rows > 0


def convert_frame(value: Any, request: WriteRequest, existing_table: Table | None) -> OutputFrame:
    """Convert the value that an asset returned to rows for its table.

    Raises:
        UnsupportedType: the value is not a frame.
        ForeignSession: a Spark frame belongs to a session that is not on the run's branch.
        ColumnUnsupported: a column has a type that a table cannot store.
        SchemaMismatch: the frame has no columns, or several with the same name.
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

    `consumption` has the changes that the step consumes; None if the asset consumes no changes.

    Raises:
        ConfigurationError: the existing table is not written as Parquet, or the metadata contradicts itself.
        UpsertKeyInvalid: the frame lacks a key.
        ColumnUnsupported: a column of a new table has no type.
        SchemaMismatch: a partition column is missing or has a type that does not fit the run's partitions, or
            names of columns of a new table differ in case only.
    """
    spec = request.spec if consumption is None else outputs.effective_spec(consumption, request.spec)
    if existing_table is not None:
        require_parquet(existing_table.metadata.properties, table_name=spec.name)
    if spec.requires_unique_keys:
        spark_frames.require_key_columns(spec, frame_schema.names)
    columns = spec.columns_by_dimension
    if existing_table is not None:
        schema = existing_table.schema()
    else:
        required = (*spec.keys, *columns.values())
        typed_columns = drop_untyped_columns(frame_schema, required, table_name=spec.name)
        require_distinct_names(typed_columns, table_name=spec.name)
        schema = build_iceberg_schema(typed_columns, table_name=spec.name)
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
        if spec.write_mode != "upsert":
            return plan
        # Rows with the same keys have the same values in the partition columns that are keys.
        candidates = None if selection is None else selection.limited_to(spec.keys)
        return replace(plan, candidate_rows=arrow_frames.count_candidate_rows(existing_table, candidates))
    partition_spec = partitioning.build_partition_spec(
        request.definition, columns, schema, table_name=spec.name, layout=spec.layout
    )
    properties = {**spec.properties, **partitioning.path_properties(selection)}
    return replace(plan, partition_spec=partition_spec, creation_properties=properties)


_MAX_REWRITES = 3
"""The largest number of times that rows are written again because of late commits of earlier attempts.

Each earlier attempt has at most one late commit.
"""


@dataclass(frozen=True)
class PreparedWrite:
    """A plan with the table that it is applied to, and the engine that writes.

    Args:
        plan: what is written.
        table: the table, created or evolved, without rows of earlier attempts of the step.
        frame: the rows; Arrow rows have the table's columns and types.
        properties: the summary of the snapshot.
        changed_keys: the keys that changed in the inputs, if `plan.replaces_keys`.
        upsert: how an upsert matches rows: PyIceberg's plan, the reason why Spark does it, or None.
    """

    plan: WritePlan
    table: Table
    frame: OutputFrame
    properties: Mapping[str, str]
    changed_keys: pa.Table | None = None
    upsert: upserts.UpsertPlan | SparkReason | None = None

    @property
    def by_spark(self) -> bool:
        """Whether Spark writes: its own frames, and upserts that PyIceberg cannot do."""
        return self.frame.is_spark or isinstance(self.upsert, SparkReason)

    @property
    def is_empty(self) -> bool:
        """Whether the write would change nothing: no key has changed, or an upsert has no rows."""
        if self.changed_keys is not None:
            return not self.changed_keys.num_rows
        if self.plan.spec.write_mode != "upsert" or self.table.current_snapshot() is None:
            return False
        return not self.frame.is_spark and not self.frame.rows.num_rows


@dataclass(frozen=True)
class TableWriter:
    """Writes materializations of one step to tables on the run's branch.

    `spark_session` opens the run's Spark session; it is called for writes by Spark only.
    """

    context: OutputContext
    lakehouse: LakehouseResource
    catalog: NessieCatalog
    spark_session: Callable[[], SparkSession]

    def existing_table(self, spec: TableSpec) -> Table | None:
        """Return the table of an asset, loaded from the run's branch, or None if it does not exist."""
        try:
            return self.catalog.load_table(spec.identifier)
        except NoSuchTableError:
            return None

    def write_nothing(self, spec: TableSpec) -> Table | None:
        """Return the table of an asset that returned no frame, or None if it does not exist.

        Rows that earlier attempts of the step returned are removed. Raises RetryNeedsFullRun if they can no
        longer be separated from other rows.
        """
        table = self.existing_table(spec)
        if table is None:
            return None
        return earlier_attempts.undo_abandoned_attempts(table, spec, self._snapshot_properties(spec))

    def write(self, request: WriteRequest, value: Any, consumption: Consumption | None) -> Table:
        """Write the frame that an asset returned, and return the table.

        Creates the table, or adds new columns, if needed. Rows of earlier attempts of the step are removed.
        `consumption` is None if the step consumes no changes. Raises ConfigurationError if the name of the
        table or of its namespace is in use for something else.
        """
        value = arrow_frames.read_stream(value)  # it is converted twice if another step creates the table
        existing_table = self.existing_table(request.spec)
        frame = convert_frame(value, request, existing_table)
        plan = plan_write(request, frame.schema, existing_table, consumption)
        changed_keys = None
        if consumption is not None:
            changed_keys = inputs.read_changed_keys(consumption) if plan.replaces_keys else None
            frame = replace(
                frame, rows=outputs.keep_own_rows(frame.rows, consumption, plan.selection, plan.schema)
            )
        try:
            if existing_table is None and not frame.is_spark:
                return self.create_with_rows(plan, frame.rows, self._begin_creation(plan))
            table = self._table_to_write(plan, frame.schema)
        except TableAlreadyExistsError as error:
            if self.existing_table(request.spec) is None:
                raise name_in_use_error(request.spec.name) from error
            return self.write(request, value, consumption)  # another step of this run created it first
        except NoSuchNamespaceError as error:  # missing namespaces are created
            raise no_namespace_error(request.spec.name) from error
        prepared = self._prepare(plan, table, frame, changed_keys)
        if prepared.is_empty:
            return prepared.table
        prepared = self._with_engine(prepared)
        return self._write_by_spark(prepared) if prepared.by_spark else self._write_by_pyiceberg(prepared)

    def create_with_rows(self, plan: WritePlan, rows: pa.Table, creation: CreateTableTransaction) -> Table:
        """Create a table with its first rows and missing namespaces in one commit, and return the table.

        Raises TableAlreadyExistsError, PartitionMismatch or UpsertKeyInvalid.
        """
        spec, schema = plan.spec, creation.table_metadata.schema()
        rows = arrow_frames.cast_columns(
            rows, table_arrow_schema(schema, table_name=spec.name), table_name=spec.name
        )
        arrow_frames.require_rows_inside(rows, schema, spec, plan.selection)
        if spec.requires_unique_keys:
            arrow_frames.require_unique_keys(rows, spec)
        creation.append(
            rows, snapshot_properties=self._snapshot_properties(spec, _describe_replaced(plan, schema))
        )
        return creation.commit_transaction()

    def _begin_creation(self, plan: WritePlan) -> CreateTableTransaction:
        return self.catalog.create_table_transaction(
            plan.spec.identifier,
            plan.schema,
            partition_spec=plan.partition_spec,
            properties=dict(plan.creation_properties),
        )

    def _table_to_write(self, plan: WritePlan, frame_schema: pa.Schema) -> Table:
        """Return the table to which the planned write adds rows, on the run's branch.

        If the table exists, commits the new columns of `frame_schema` and the path properties. Otherwise,
        commits an empty table. Raises TableAlreadyExistsError if another step created the table since the
        plan, and SchemaMismatch if the frame does not fit.
        """
        table = plan.existing_table
        if table is None:
            return self.catalog.create_table(
                plan.spec.identifier,
                plan.schema,
                partition_spec=plan.partition_spec,
                properties=dict(plan.creation_properties),
            )
        self.catalog.record_prefixes(table.metadata)
        widen, name = self.lakehouse.lakehouse.settings.widen_columns, plan.spec.name
        if plan.spec.frozen:
            require_unchanged_columns(table, frame_schema, table_name=name, widen=widen)
        table = evolve_table(table, frame_schema, table_name=name, widen=widen)
        return partitioning.set_path_properties(table, plan.selection)

    def _prepare(
        self, plan: WritePlan, table: Table, frame: OutputFrame, changed_keys: pa.Table | None
    ) -> PreparedWrite:
        properties = self._snapshot_properties(plan.spec, _describe_replaced(plan, table.schema()))
        table = earlier_attempts.undo_earlier_attempts(table, plan.spec, properties)
        if not frame.is_spark:
            stored = table_arrow_schema(table.schema(), table_name=plan.spec.name)
            frame = replace(
                frame, rows=arrow_frames.cast_columns(frame.rows, stored, table_name=plan.spec.name)
            )
        return PreparedWrite(plan, table, frame, properties, changed_keys)

    def _with_engine(self, prepared: PreparedWrite) -> PreparedWrite:
        """Decide which engine matches the rows of an upsert, and add the decision to the materialization.

        Writes that match no rows are returned unchanged.
        """
        if not prepared.plan.matches_rows:
            return prepared
        prepared = replace(prepared, upsert=_plan_upsert(prepared))
        self.context.add_output_metadata(engine_metadata(prepared.upsert))
        return prepared

    def _write_by_pyiceberg(self, prepared: PreparedWrite) -> Table:
        plan, table, properties = prepared.plan, prepared.table, prepared.properties
        spec, selection, rows = plan.spec, plan.selection, prepared.frame.rows
        if isinstance(prepared.upsert, upserts.UpsertPlan):
            table = upserts.write_upsert(prepared.upsert, properties)
        elif prepared.changed_keys is not None:
            spark_inputs.replace_by_pyiceberg(rows, table, spec, prepared.changed_keys, properties, selection)
        else:
            arrow_frames.write_frame(rows, table, spec, selection, properties)
        # The write detects all other concurrent changes. Only a late commit of an earlier attempt can pass.
        return self._without_late_commits(plan, properties) if self._was_attempted_before() else table

    def _write_by_spark(self, prepared: PreparedWrite) -> Table:
        plan, table, properties = prepared.plan, prepared.table, prepared.properties
        spec, selection, rows = plan.spec, plan.selection, prepared.frame.rows
        if selection is not None and spec.write_mode == "replace_partitions":
            table = partitioning.split_straddling_files(table, selection, properties)
        frame = rows if isinstance(rows, DataFrame) else spark_inputs.from_arrow(self.spark_session(), rows)
        with mark_merge_target(spec.identifier):
            if prepared.changed_keys is not None:
                keys = prepared.changed_keys
                spark_inputs.replace_by_spark(frame, table.schema(), spec, keys, properties, selection)
            else:
                spark_frames.write_spark_frame(
                    frame, spec, table.schema(), selection, properties, candidate_rows=plan.candidate_rows
                )
                if spec.keeps_matched:
                    self._rewrite_after_late_commits(plan, frame, properties)
        return self._without_late_commits(plan, properties)

    def _rewrite_after_late_commits(
        self, plan: WritePlan, frame: DataFrame, properties: Mapping[str, str]
    ) -> None:
        """Write the rows again, while late commits of earlier attempts have decided which rows were added.

        Raises RetryNeedsFullRun after `_MAX_REWRITES` times.
        """
        spec = plan.spec
        for _ in range(_MAX_REWRITES):
            table = self.catalog.load_table(spec.identifier)
            if not earlier_attempts.has_late_commits(table, spec, properties):
                return
            table = earlier_attempts.undo_earlier_attempts(table, spec, properties)
            spark_frames.write_spark_frame(frame, spec, table.schema(), plan.selection, properties)
        raise earlier_attempts.mixed_rows_error(spec)

    def _without_late_commits(self, plan: WritePlan, properties: Mapping[str, str]) -> Table:
        table = self.catalog.load_table(plan.spec.identifier)
        return earlier_attempts.remove_late_commits(table, plan.spec, properties)

    def _was_attempted_before(self) -> bool:
        """Whether a commit of an earlier attempt of the step may still arrive."""
        step = self.context.step_context
        run = step.dagster_run
        return step.previous_attempt_count > 0 or run.root_run_id not in (None, run.run_id)

    def _snapshot_properties(self, spec: TableSpec, replaced: str | None = None) -> dict[str, str]:
        step = self.context.step_context
        run = step.dagster_run
        return provenance.build_snapshot_properties(
            spec=spec,
            asset=self.context.asset_key.to_user_string(),
            partitions=provenance.output_partition_keys(self.context),
            code_version=self.context.asset_spec.code_version,
            run=self.lakehouse.run_branch,
            root_run_id=run.root_run_id or run.run_id,
            step=step.step.key,
            attempt=step.previous_attempt_count + 1,
            replaced=replaced,
        )


def _describe_replaced(plan: WritePlan, schema: Schema) -> str | None:
    """Return the predicate of the rows that a write replaces, as JSON; None if it replaces no partitions."""
    if plan.selection is None or plan.spec.write_mode != "replace_partitions":
        return None
    return replaced_rows.to_json(replaced_rows.build_replaced_rows(plan.selection, schema))


def _plan_upsert(prepared: PreparedWrite) -> upserts.UpsertPlan | SparkReason | None:
    """Decide how the rows of an upsert are matched.

    None means that PyIceberg replaces all rows of the changed keys, because they are few.
    """
    if prepared.frame.is_spark:
        return SparkReason.SPARK_FRAME
    if prepared.changed_keys is not None:
        return SparkReason.CHANGED_KEYS if prepared.changed_keys.num_rows > spark_inputs.MAX_KEYS else None
    return upserts.plan_upsert(
        prepared.frame.rows, prepared.table, prepared.plan.spec, prepared.plan.selection
    )
