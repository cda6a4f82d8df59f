"""`NessieBranchIOManager`: assets are written to and read from the run's own branch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from dagster import (
    ConfigurableIOManager,
    InputContext,
    MetadataValue,
    OutputContext,
    PartitionsDefinition,
)
from pyiceberg.exceptions import NoSuchTableError, TableAlreadyExistsError
from pyiceberg.schema import Schema
from pyiceberg.table import CreateTableTransaction, Table
from pyspark.sql import DataFrame

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.incremental import inputs, outputs, replace_keys, spark_inputs
from branchlake_dagster.incremental import inputs as arrow_inputs
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.step_consumption import consumption_of
from branchlake_dagster.internals.dagster import CopiedByFields
from branchlake_dagster.io_manager import earlier_attempts
from branchlake_dagster.io_manager import loading as op_values
from branchlake_dagster.io_manager import row_counts as partition_row_counts
from branchlake_dagster.io_manager.loading import (
    RowPartitions,
    StoredRows,
    delivered_columns,
    input_columns,
    preview,
    wants_stored_rows,
)
from branchlake_dagster.nessie.errors import NessieUnauthorized
from branchlake_dagster.runs import provenance
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.read_set import merging
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.spark.session import quoted, telling_refusals
from branchlake_dagster.tables import arrow_frames, spark_frames
from branchlake_dagster.tables import arrow_frames as frame_conversion
from branchlake_dagster.tables import partitioning as long_keys
from branchlake_dagster.tables import partitioning as splitting
from branchlake_dagster.tables import replaced_rows as replaced
from branchlake_dagster.tables import upserts as merge
from branchlake_dagster.tables.errors import TableMissing, UnsupportedType
from branchlake_dagster.tables.partitioning import partition_spec
from branchlake_dagster.tables.schemas import (
    arrow_schema,
    evolve,
    iceberg_schema,
    require_unchanged,
    stored_schema,
    without_untyped,
)
from branchlake_dagster.tables.selection import Selection, select
from branchlake_dagster.tables.specification import PREVIEW_ROWS, TableSpec, require_parquet, table_spec
from branchlake_dagster.tables.upsert_engine import SparkReason, engine_metadata


class NessieBranchIOManager(CopiedByFields, ConfigurableIOManager):
    """Stores assets as Iceberg tables on the branch of the run.

    Writes and loads Spark frames (Connect and classic), pandas, PyArrow and Polars, chosen by the value's
    type on the way in and by the annotation on the way out (none: a Spark frame). Anything but Spark
    frames goes through PyIceberg and needs no JVM, apart from upserts that only Spark can do (their
    materialization reports the reason). How a table is written stands in the asset's metadata: see
    `table_metadata`. Outside a run it reads `main`. The asset with the key
    `["shop", "prices"]` is the table `shop.prices`; one without a prefix is in the default namespace.

    Args:
        lakehouse (LakehouseResource): The lake.
        spark (BranchSparkResource): Spark frames, and upserts that PyIceberg cannot do, are written in its
            session, which is opened for nothing else.

    Raises:
        UnsupportedType: The asset returned, or an input is annotated with, something else than such a frame.
        SchemaMismatch: The frame does not fit the table, and not only by new nullable columns.
        ColumnsFrozen: The frame would change columns that `table_metadata(columns="freeze")` keeps.
        PartitionMismatch: The frame has rows outside the run's partitions.
        ConfigurationError: The asset's metadata contradicts itself, or the table is not written as Parquet.
        UpsertKeyInvalid: A key of an upsert is null, is missing or occurs twice.
        TableMissing: An input has no table there.
        ForeignSession: A Spark frame belongs to a session that is not the run's.
        RunBranchGone: The run was fenced: its branch was deleted under it.

    Examples:
        .. code-block:: python

            import dagster as dg
            import polars as pl

            from branchlake_dagster import BranchSparkResource, LakehouseResource, NessieBranchIOManager

            lakehouse = LakehouseResource()
            spark = BranchSparkResource(lakehouse=lakehouse)

            @dg.asset
            def prices() -> pl.DataFrame:
                return pl.DataFrame({"price": [2.5]})

            @dg.asset
            def cheap(prices: pl.DataFrame) -> pl.DataFrame:
                return prices.filter(pl.col("price") < 3)

            defs = dg.Definitions(
                assets=[prices, cheap],
                resources={"io_manager": NessieBranchIOManager(lakehouse=lakehouse, spark=spark)},
            )
    """

    lakehouse: LakehouseResource
    spark: BranchSparkResource

    def handle_output(self, context: OutputContext, obj: Any) -> None:
        """Write one materialisation of an asset. `None` writes nothing (the asset used SQL itself).

        What goes from op to op is no table, see `op_values`.
        """
        if not context.has_asset_key:
            op_values.store(context, obj)
            return
        definition = context.asset_partitions_def if context.has_asset_partitions else None
        spec = self._spec(context, definition)
        self.lakehouse.require_writable()
        with self._fenced():
            branch = self.lakehouse.open_branch()
            catalog = self.lakehouse.own_catalog()
            consumption = consumption_of(context.step_context, self.lakehouse)
            table: Table | None = None
            if obj is not None:
                table = self._write(context, obj, spec, definition, branch, catalog, consumption)
            else:
                table = self._existing(catalog, spec)
            if table is not None and consumption is not None:
                table = outputs.record(consumption, table)
                consumption.written()
            if table is not None:
                rows = partition_row_counts.report(context, table, spec, definition)
                metadata = provenance.materialisation_metadata(
                    table,
                    spec,
                    self.lakehouse.run_branch,
                    partition_rows=rows,
                    branch_head=catalog.last_hash,
                )
                if obj is not None and (shown := preview(table, rows=self._preview_rows(context))):
                    metadata[provenance.PREVIEW] = MetadataValue.md(shown)
                if consumption is not None:
                    metadata |= outputs.consumed_metadata(consumption, table)
                context.add_output_metadata(metadata)

    def load_input(self, context: InputContext) -> Any:
        """Load an upstream asset, restricted to the partitions its partition mapping chose.

        And to the columns of `AssetIn(metadata={"columns": […]})`.

        Or what an op before this one returned. An asset that reads its own earlier partitions gets an empty
        frame without columns before its table exists.
        """
        if not context.has_asset_key:
            return op_values.load(context)
        definition = context.asset_partitions_def if context.has_asset_partitions else None
        spec = self._spec(context, definition)
        kind = context.dagster_type.typing_type
        spark = kind is None or kind is Any or (isinstance(kind, type) and issubclass(kind, DataFrame))
        if not spark and not arrow_frames.loads(kind):
            raise UnsupportedType(
                f"Input {context.name!r} is annotated {kind!r}.",
                table=spec.name,
                hint="Annotate a pyspark, pandas, polars (or polars.LazyFrame) frame or a pyarrow.Table.",
            )
        with self._fenced():
            ref = self.lakehouse.open_branch()
            try:
                table = self.lakehouse.own_catalog().load_table(spec.identifier)
            except NoSuchTableError as error:
                if _of_itself(context) and not wants_stored_rows(context.dagster_type):
                    return self._nothing(kind, spark=spark)
                raise TableMissing(
                    f"Asset {context.asset_key.to_user_string()} has no table there.",
                    table=spec.name,
                    branch=ref,
                    hint="Materialise it and let it be published first, or select it in the same run.",
                ) from error
            provenance.report_read(context, spec, ref)
            existing = [field.name for field in table.schema().fields]
            columns = input_columns(context.definition_metadata, existing, table=spec.name)
            consumption = consumption_of(context.step_context, self.lakehouse) if _in_step(context) else None
            if consumption is not None and context.asset_key in consumption.inputs:
                one = consumption.inputs[context.asset_key]
                if spark:
                    frame = spark_inputs.load(consumption, one, self.spark.own_session(), self.lakehouse)
                    return frame if columns is None else _only(frame, columns, existing)
                rows = arrow_inputs.load(consumption, one)
                if columns is not None:
                    rows = rows.select(delivered_columns(columns, existing, rows.column_names))
                return arrow_frames.as_kind(rows, kind)
            # Of its own table an asset reads what was before its run's partitions, not what it replaces.
            in_order = consumption is not None and consumption.consumer.in_order and _of_itself(context)
            replaced = consumption.partitions if consumption is not None and in_order else ()
            selection = self._input_selection(context, spec, definition, table.schema(), replaced)
            if wants_stored_rows(context.dagster_type):
                return StoredRows(
                    table,
                    selection,
                    ref,
                    lambda: self._frame(spec, table.schema(), selection),
                    _several_partitions(context, spec, definition),
                )
            if spark:
                frame = spark_frames.read(self.spark.own_session(), spec, table.schema(), selection)
                return frame if columns is None else _only(frame, columns, existing)
            return arrow_frames.read(table, kind, selection, columns)

    def _nothing(self, kind: Any, *, spark: bool) -> Any:
        empty = pa.table({})
        return (
            spark_inputs.from_arrow(self.spark.own_session(), empty)
            if spark
            else arrow_frames.as_kind(empty, kind)
        )

    def _frame(self, spec: TableSpec, schema: Schema, selection: Selection | None) -> DataFrame:
        with self._fenced():
            return spark_frames.read(self.spark.own_session(), spec, schema, selection)

    # -- writing ---------------------------------------------------------------------------------------

    def _write(
        self,
        context: OutputContext,
        obj: Any,
        spec: TableSpec,
        definition: PartitionsDefinition[str] | None,
        branch: str,
        catalog: NessieCatalog,
        consumption: Consumption | None = None,
    ) -> Table:
        """The table after the write, without what earlier attempts of this step had added to it."""
        is_spark = isinstance(obj, DataFrame)
        if not is_spark and not frame_conversion.handles(type(obj)):
            raise UnsupportedType(
                f"The asset returned a {type(obj).__module__}.{type(obj).__qualname__}.",
                table=spec.name,
                hint="Return a Spark, pandas or Polars frame or a pyarrow.Table.",
            )
        changed_keys: pa.Table | None = None
        if consumption is not None:
            spec = outputs.effective(consumption, spec)
            if consumption.replaced_keys:
                changed_keys = inputs.changed_keys(consumption)
        keys = provenance.asset_partitions(context)
        found = self._existing(catalog, spec)
        if found is not None:
            require_parquet(found.metadata.properties, table=spec.name)
        # Where there is no row yet, an upsert has none to match.
        matches = spec.write_mode == "upsert" and found is not None and arrow_frames.may_have_rows(found)
        if is_spark:
            spark_frames.require_branch(obj, branch, table=spec.name)
            wanted = stored_schema(spark_frames.arrow_schema(obj, table=spec.name), table=spec.name)
        else:
            like = arrow_schema(found.schema(), name=spec.name) if found is not None else None
            obj = frame_conversion.to_arrow(obj, like, table=spec.name)
            wanted = obj.schema
        if spec.write_mode == "upsert":
            spark_frames.check_keys(spec, wanted.names)
        if found is None:
            needed = (*spec.keys, *spec.columns_by_dimension.values())
            schema = iceberg_schema(without_untyped(wanted, needed, name=spec.name), table=spec.name)
        else:
            schema = found.schema()
        # Before anything is made: windows that do not fit the column must leave no table behind.
        selection = (
            select(keys, definition, spec.columns_by_dimension, schema=schema, table=spec.name)
            if definition is not None and spec.columns_by_dimension
            else None
        )
        if consumption is not None and outputs.by_range(consumption):
            selection = outputs.replaced_range(consumption, schema)
        if consumption is not None:
            obj = outputs.own_rows(obj, consumption, selection, schema)
        if found is None:
            how: dict[str, Any] = {
                "partition_spec": partition_spec(
                    definition, spec.columns_by_dimension, schema, table=spec.name, layout=spec.layout
                ),
                "properties": {**spec.properties, **long_keys.properties(selection)},
            }
            try:
                if not is_spark:
                    creation = catalog.create_table_transaction(spec.identifier, schema, **how)
                    return self._begin(context, obj, spec, selection, creation)
                table = catalog.create_table(spec.identifier, schema, **how)
            except TableAlreadyExistsError:  # another step of this run was first
                return self._write(context, obj, spec, definition, branch, catalog, consumption)
        else:
            catalog.record_prefixes(found.metadata)
            table = long_keys.make_room(self._evolve(found, wanted, spec), selection)
        properties = self._properties(context, spec, selection, table.schema())
        table = earlier_attempts.undo_earlier(table, spec, properties)
        if not is_spark:
            obj = frame_conversion.cast(obj, arrow_schema(table.schema(), name=spec.name), table=spec.name)
        if changed_keys is not None and not changed_keys.num_rows:
            return table  # no key has changed, so nothing of it takes any row's place
        if matches and not is_spark and changed_keys is None and not obj.num_rows:
            return table  # no row to match, and none to add
        planned = _planned(obj, table, spec, selection, changed_keys) if matches else None
        if matches:
            context.add_output_metadata(engine_metadata(planned))
        if not is_spark and not isinstance(planned, SparkReason):
            if isinstance(planned, merge.UpsertPlan):
                table = merge.write(planned, properties)
            elif changed_keys is not None:
                replace_keys.by_arrow(obj, table, spec, changed_keys, properties, selection)
            else:
                arrow_frames.write(obj, table, spec, selection, properties)
            if not self._attempted_before(context):
                return table  # what others wrote meanwhile would have been refused, or shown
        else:
            if selection is not None and spec.write_mode == "replace_partitions":
                table = splitting.divide(table, selection, properties)
            frame = obj if is_spark else spark_inputs.from_arrow(self.spark.own_session(), obj)
            with merging(spec.identifier):
                if changed_keys is not None:
                    replace_keys.by_spark(frame, table.schema(), spec, changed_keys, properties, selection)
                else:
                    spark_frames.write(frame, spec, table.schema(), selection, properties)
        return earlier_attempts.settle(catalog.load_table(spec.identifier), spec, properties)

    def _begin(
        self,
        context: OutputContext,
        obj: pa.Table,
        spec: TableSpec,
        selection: Selection | None,
        creation: CreateTableTransaction,
    ) -> Table:
        """A new table with its first rows, in one commit with the namespaces that it needs."""
        schema = creation.table_metadata.schema()
        rows = frame_conversion.cast(obj, arrow_schema(schema, name=spec.name), table=spec.name)
        arrow_frames.require_inside(rows, schema, spec, selection)
        if spec.write_mode == "upsert":
            arrow_frames.require_unique(rows, spec)
        properties = self._properties(context, spec, selection, schema)
        creation.append(rows, snapshot_properties=properties)
        return creation.commit_transaction()

    def _existing(self, catalog: NessieCatalog, spec: TableSpec) -> Table | None:
        try:
            return catalog.load_table(spec.identifier)
        except NoSuchTableError:
            return None

    def _evolve(self, table: Table, wanted: pa.Schema, spec: TableSpec) -> Table:
        widen = self.lakehouse.lakehouse.settings.widen_columns
        if spec.frozen:
            require_unchanged(table, wanted, name=spec.name, widen=widen)
        return evolve(table, wanted, name=spec.name, widen=widen)

    def _properties(
        self, context: OutputContext, spec: TableSpec, selection: Selection | None, schema: Schema
    ) -> dict[str, str]:
        run = context.step_context.dagster_run
        predicate = (
            replaced.to_text(replaced.replaced(selection, schema))
            if selection is not None and spec.write_mode == "replace_partitions"
            else None
        )
        return provenance.snapshot_properties(
            spec=spec,
            asset=context.asset_key.to_user_string(),
            partitions=provenance.asset_partitions(context),
            code_version=context.asset_spec.code_version,
            run=self.lakehouse.run_branch,
            root_run_id=run.root_run_id or run.run_id,
            step=context.step_context.step.key,
            attempt=context.step_context.previous_attempt_count + 1,
            replaced=predicate,
        )

    @staticmethod
    def _attempted_before(context: OutputContext) -> bool:
        """Whether an earlier attempt of the step may have a commit on its way."""
        run = context.step_context.dagster_run
        return context.step_context.previous_attempt_count > 0 or run.root_run_id not in (None, run.run_id)

    # -- shared ----------------------------------------------------------------------------------------

    def _preview_rows(self, context: OutputContext) -> int:
        default = self.lakehouse.lakehouse.settings.preview_rows
        return int(context.definition_metadata.get(PREVIEW_ROWS, default))

    def _spec(
        self, context: OutputContext | InputContext, definition: PartitionsDefinition[str] | None
    ) -> TableSpec:
        return table_spec(
            context.asset_key,
            context.definition_metadata
            if isinstance(context, OutputContext)
            else (context.upstream_output.definition_metadata if context.upstream_output else {}),
            default_namespace=self.lakehouse.lakehouse.settings.default_namespace,
            partitioned=definition is not None,
        )

    def _input_selection(
        self,
        context: InputContext,
        spec: TableSpec,
        definition: PartitionsDefinition[str] | None,
        schema: Schema,
        replaced: Sequence[str] = (),
    ) -> Selection | None:
        if definition is None or not spec.columns_by_dimension:
            return None
        keys = [key for key in context.asset_partition_keys if key not in replaced]
        if len(keys) == len(definition.get_partition_keys(dynamic_partitions_store=context.instance)):
            return None  # all of them: the whole table, without a predicate as long as the list
        return select(keys, definition, spec.columns_by_dimension, schema=schema, table=spec.name)

    @contextlib.contextmanager
    def _fenced(self) -> Iterator[None]:
        """Turn any failure on a branch that is gone into RunBranchGone, whatever the engine called it.

        A refusal by Nessie is NessieUnauthorized, from whichever engine.
        """
        try:
            with telling_refusals():
                yield
        except NessieUnauthorized:
            raise  # the branch would not be shown to us either
        except Exception:
            if self.lakehouse.run_branch is not None:
                self.lakehouse.run_branch.head()
            raise


def _several_partitions(
    context: InputContext, spec: TableSpec, definition: PartitionsDefinition[str] | None
) -> RowPartitions | None:
    """How the rows of several partitions belong to them; None for one partition, or without columns."""
    if definition is None or not spec.columns_by_dimension or len(context.asset_partition_keys) < 2:
        return None
    return RowPartitions(definition, spec.columns_by_dimension)


def _planned(
    obj: Any, table: Table, spec: TableSpec, selection: Selection | None, changed_keys: pa.Table | None
) -> merge.UpsertPlan | SparkReason | None:
    """How an upsert into rows is written. None: by PyIceberg, in place of all rows of few changed keys."""
    if isinstance(obj, DataFrame):
        return SparkReason.SPARK_FRAME
    if changed_keys is not None:
        return SparkReason.CHANGED_KEYS if changed_keys.num_rows > replace_keys.MOST_KEYS else None
    return merge.plan(obj, table, spec, selection)


def _in_step(context: InputContext) -> bool:
    """Whether a step of a run asks, rather than somebody who loads an asset's value."""
    return getattr(context, "_step_context", None) is not None


def _only(frame: DataFrame, columns: Sequence[str], existing: Sequence[str]) -> DataFrame:
    return frame.select(*map(quoted, delivered_columns(columns, existing, frame.columns)))


def _of_itself(context: InputContext) -> bool:
    """Whether an asset reads its own table, as one does that depends on its earlier partitions."""
    assets = context.step_context.assets_def if _in_step(context) else None
    return assets is not None and context.asset_key in assets.keys
