"""Writes assets to the run's own branch and reads them from it, as `NessieBranchIOManager`.

`count_partition_rows` counts the rows of each Dagster partition of a table from its manifests, without
reading data.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from types import NoneType
from typing import Any, Union, get_args, get_origin

import pyarrow as pa
from dagster import (
    ConfigurableIOManager,
    InputContext,
    MetadataValue,
    OutputContext,
    PartitionsDefinition,
)
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyspark.sql import DataFrame

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.manifests import column_facts
from branchlake_dagster.incremental import inputs as arrow_inputs
from branchlake_dagster.incremental import outputs, spark_inputs
from branchlake_dagster.incremental.step_consumption import consumption_of
from branchlake_dagster.internals.dagster import CopiedByFields
from branchlake_dagster.io_manager import loading as op_values
from branchlake_dagster.io_manager.loading import (
    RowPartitions,
    StoredRows,
    checks_whole_table,
    delivered_columns,
    format_preview,
    input_columns,
    select_input_partitions,
    wants_stored_rows,
)
from branchlake_dagster.io_manager.table_writer import TableWriter, WriteRequest
from branchlake_dagster.nessie.errors import NessieUnauthorized
from branchlake_dagster.runs import provenance
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.spark.session import quote_spark_name, translate_refusals
from branchlake_dagster.stored_names import AssetMetadata, EventMetadata
from branchlake_dagster.tables import arrow_frames, spark_frames
from branchlake_dagster.tables.errors import PartitionMismatch, TableMissing, UnsupportedType
from branchlake_dagster.tables.selection import (
    Condition,
    Selection,
    Values,
    select_partitions,
    to_iceberg_filter,
)
from branchlake_dagster.tables.specification import TableSpec, parse_preview_rows, parse_table_spec

MAX_PARTITIONS = 400
"""The largest number of partitions of one output whose row counts are reported: a year of days."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FileValueFinder = Callable[[DataFile], Any]
"""Returns the column value, or the start of the window, that all rows of a file have; None if not known."""


def report_partition_rows(
    context: OutputContext, table: Table, spec: TableSpec, definition: PartitionsDefinition[str] | None
) -> int | None:
    """Count the rows of the output's partitions: return one count, or report several to Dagster.

    For several partitions, the counts are added to their materializations, and the result is None. The result
    is also None, and nothing is reported, if counts are not known or there are more than `MAX_PARTITIONS`
    partitions: Dagster lists all partitions of the run for each reported one.
    """
    if definition is None or not spec.columns_by_dimension:
        return None
    keys = tuple(context.asset_partition_keys)
    if len(keys) > MAX_PARTITIONS:
        return None
    row_counts = count_partition_rows(table, keys, definition, spec.columns_by_dimension, name=spec.name)
    if row_counts is None:
        return None
    if len(keys) == 1:
        return row_counts[keys[0]]
    for key, rows in row_counts.items():
        context.step_context.add_asset_metadata(
            {EventMetadata.PARTITION_ROWS_ON_BRANCH: MetadataValue.int(rows)}, context.asset_key, key
        )
    return None


def count_partition_rows(
    table: Table,
    keys: Sequence[str],
    definition: PartitionsDefinition[str],
    columns: Mapping[str, str],
    *,
    name: str,
) -> dict[str, int] | None:
    """Count the rows of each partition of `keys`, from manifests.

    The partition of a file is found by the bounds of columns and by identity partitions. Returns None if a
    file has rows of several or of unknown partitions, or if the table has delete files for these rows.
    """
    schema = table.schema()
    slices: dict[str, tuple[Condition, ...]] = {}
    for key in keys:
        (slices[key],) = select_partitions([key], definition, columns, schema=schema, table_name=name).slices
    if not slices:
        return {}
    names = [condition.column for condition in next(iter(slices.values()))]
    value_finders = [
        _build_value_finder([part[i] for part in slices.values()], column, schema, table.specs())
        for i, column in enumerate(names)
    ]
    keys_by_values = {tuple(map(_condition_value, part)): key for key, part in slices.items()}
    row_counts = dict.fromkeys(keys, 0)
    row_filter = to_iceberg_filter(
        select_partitions(keys, definition, columns, schema=schema, table_name=name), schema
    )
    for task in table.scan(row_filter=row_filter).plan_files():
        partition_key = keys_by_values.get(tuple(find_value(task.file) for find_value in value_finders))
        if partition_key is None or task.delete_files:
            return None
        row_counts[partition_key] += task.file.record_count
    return row_counts


def _condition_value(condition: Condition) -> Any:
    return condition.values[0] if isinstance(condition, Values) else _to_iceberg_number(condition.start)


def _to_iceberg_number(moment: datetime | date) -> int:
    """Convert a time stamp to microseconds since 1970, or a date to days since 1970, as Iceberg stores them.

    A time stamp must have a time zone.
    """
    if isinstance(moment, datetime):
        return (moment - _EPOCH) // timedelta(microseconds=1)
    return (moment - _EPOCH.date()).days


def _build_value_finder(
    conditions: Sequence[Condition], column: str, schema: Schema, specs: Mapping[int, PartitionSpec]
) -> FileValueFinder:
    field = schema.find_field(column)
    if isinstance(conditions[0], Values):
        return lambda file: _identity_value(file, field.field_id, specs[file.spec_id])
    windows = sorted(
        {
            (_to_iceberg_number(condition.start), _to_iceberg_number(condition.end))
            for condition in conditions
            if not isinstance(condition, Values)
        }
    )
    starts = [start for start, _ in windows]

    def find_window(file: DataFile) -> int | None:
        file_facts = column_facts(file, field, specs[file.spec_id])
        if file_facts.low is None or file_facts.high is None or not file_facts.no_null:
            return None
        index = bisect_right(starts, file_facts.low) - 1
        return starts[index] if index >= 0 and file_facts.high < windows[index][1] else None

    return find_window


def _identity_value(file: DataFile, field_id: int, spec: PartitionSpec) -> Any:
    for i, field in enumerate(spec.fields):
        if field.source_id == field_id and isinstance(field.transform, IdentityTransform):
            return file.partition[i]
    return None


class NessieBranchIOManager(CopiedByFields, ConfigurableIOManager):
    """Stores assets as Iceberg tables on the branch of the run.

    Writes and loads Spark frames (Connect and classic), pandas, PyArrow and Polars. The type of the returned
    value decides how it is written, and the annotation of an input decides what is loaded (without
    annotation: a Spark frame). PyIceberg reads and writes all frames but Spark's, without a JVM. Only some
    upserts need Spark; their materialization reports the reason. `table_metadata` on the asset decides how
    its table is written. Outside a run, the IO manager reads `main`. The asset with the key
    `["shop", "prices"]` is the table `shop.prices`; an asset without key prefix is in the default namespace.

    Args:
        lakehouse (LakehouseResource): The lake.
        spark (BranchSparkResource): The Spark session for Spark frames, and for upserts that PyIceberg
            cannot do. It is opened only if it is needed.

    Raises:
        UnsupportedType: The returned value, or the annotation of an input, is not such a frame.
        SchemaMismatch: The frame does not fit the table. Only new nullable columns and, with the setting
            `widen_columns`, wider types are allowed.
        ColumnsFrozen: The frame would change columns that `table_metadata(columns="freeze")` keeps.
        PartitionMismatch: The frame has rows outside the run's partitions, or the run has no partitions.
        ConfigurationError: The asset's metadata is contradictory, or its table is not stored as Parquet.
        UpsertKeyInvalid: A key of an upsert is null, is missing or occurs twice.
        TableMissing: An input has no table on the branch.
        ForeignSession: A Spark frame belongs to another session than the run's.
        RunBranchGone: The run was fenced: its branch was deleted during the run.

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
        """Write one materialization of an asset. `None` writes nothing: the asset wrote its table by SQL.

        Then the row counts, a preview and the consumed changes are added to the materialization's metadata.
        Values that ops exchange are not tables; `store_op_value` writes them to files.
        """
        if not context.has_asset_key:
            op_values.store_op_value(context, obj)
            return
        definition = context.asset_partitions_def if context.has_asset_partitions else None
        spec = self._table_spec(context, definition)
        if obj is not None:
            _require_partitions_of_run(context, spec)
        self.lakehouse.require_writable()
        with self._fenced():
            request = WriteRequest(
                spec, self.lakehouse.open_branch(), definition, provenance.output_partition_keys(context)
            )
            catalog = self.lakehouse.own_catalog()
            writer = TableWriter(context, self.lakehouse, catalog, self.spark.own_session)
            consumption = consumption_of(context.step_context, self.lakehouse)
            table = writer.write_nothing(spec) if obj is None else writer.write(request, obj, consumption)
            is_head_known = True
            if table is not None and consumption is not None:
                table = outputs.record_consumption(consumption, table)
                # Another catalog's commits drop the change tables.
                is_head_known = not consumption.clean_up()
            if table is not None:
                rows = report_partition_rows(context, table, spec, definition)
                metadata = provenance.materialization_metadata(
                    table,
                    spec,
                    self.lakehouse.run_branch,
                    partition_rows=rows,
                    branch_head=catalog.last_hash if is_head_known else None,
                )
                if obj is not None and (
                    preview_table := format_preview(table, rows=self._preview_rows(context))
                ):
                    metadata[EventMetadata.PREVIEW] = MetadataValue.md(preview_table)
                if consumption is not None:
                    metadata |= outputs.consumption_metadata(consumption, table)
                context.add_output_metadata(metadata)

    def load_input(self, context: InputContext) -> Any:
        """Load an upstream asset, limited to the partitions that its partition mapping selects.

        Rows of no partition are left out, such as those of deleted keys. Only a check without partitions gets
        all rows of the table that it checks.

        The type annotation of the input decides which frame is returned. If the asset consumes changes of the
        input, only these are loaded. `AssetIn(metadata={"columns": […]})` limits the columns. For an input
        without asset, the value that the upstream op returned is loaded. An asset that reads its own earlier
        partitions, or an optional input, gets an empty frame without columns if the table does not exist yet.
        """
        if not context.has_asset_key:
            return op_values.load_op_value(context)
        definition = context.asset_partitions_def if context.has_asset_partitions else None
        spec = self._input_spec(context, definition)
        annotation = _without_none(context.dagster_type.typing_type)
        is_spark = (
            annotation is None
            or annotation is Any
            or (isinstance(annotation, type) and issubclass(annotation, DataFrame))
        )
        if not is_spark and not arrow_frames.can_load_type(annotation):
            raise UnsupportedType(
                f"Input {context.name!r} has the annotation {annotation!r}, which cannot be loaded.",
                table=spec.name,
                hint="Annotate a PySpark, pandas or Polars frame, a polars.LazyFrame or a pyarrow.Table.",
            )
        with self._fenced():
            ref = self.lakehouse.open_branch()
            try:
                table = self.lakehouse.own_catalog().load_table(spec.identifier)
            except NoSuchTableError as error:
                may_be_missing = _reads_own_table(context) or self._is_optional_input(context)
                if may_be_missing and not wants_stored_rows(context.dagster_type):
                    return self._empty_frame(annotation, is_spark=is_spark)
                name = context.asset_key.to_user_string()
                raise TableMissing.of_asset(name, spec.name, ref) from error
            provenance.report_read(context, spec, ref)
            if not _is_in_step(context) and (reads := self.lakehouse.read_set) is not None:
                # The code of a step loads the value, so Dagster records no LOADED_INPUT event.
                reads.report_load(spec.identifier)
            existing = [field.name for field in table.schema().fields]
            columns = input_columns(context.definition_metadata, existing, table=spec.name)
            consumption = (
                consumption_of(context.step_context, self.lakehouse) if _is_in_step(context) else None
            )
            if consumption is not None and context.asset_key in consumption.inputs:
                upstream = consumption.inputs[context.asset_key]
                if is_spark:
                    frame = spark_inputs.load_frame(
                        consumption, upstream, self.spark.session_of_frames(), self.lakehouse
                    )
                    return frame if columns is None else _select_columns(frame, columns, existing)
                rows = arrow_inputs.load_rows(consumption, upstream)
                if columns is not None:
                    rows = rows.select(delivered_columns(columns, existing, rows.column_names))
                return arrow_frames.from_arrow(rows, annotation)
            # From its own table, an asset reads earlier partitions, not those that this run replaces.
            in_order = (
                consumption is not None
                and consumption.consumer.computes_in_order
                and _reads_own_table(context)
            )
            excluded_keys = consumption.partitions if consumption is not None and in_order else ()
            selection = self._input_selection(context, spec, definition, table.schema(), excluded_keys)
            if wants_stored_rows(context.dagster_type):
                return StoredRows(
                    table,
                    selection,
                    ref,
                    lambda: self._read_frame(spec, table.schema(), selection),
                    _row_partitions(context, spec, definition),
                )
            if is_spark:
                frame = spark_frames.read_spark_frame(
                    self.spark.session_of_frames(), spec, table.schema(), selection
                )
                return frame if columns is None else _select_columns(frame, columns, existing)
            return arrow_frames.read_frame(table, annotation, selection, columns)

    def _is_optional_input(self, context: InputContext) -> bool:
        """Whether the input is optional and has no table yet. Raises TableMissing."""
        consumption = consumption_of(context.step_context, self.lakehouse) if _is_in_step(context) else None
        return (
            consumption is not None
            and context.asset_key in consumption.consumer.declaration.optional
            and context.asset_key not in consumption.inputs
        )

    def _empty_frame(self, annotation: Any, *, is_spark: bool) -> Any:
        empty = pa.table({})
        return (
            spark_inputs.from_arrow(self.spark.session_of_frames(), empty)
            if is_spark
            else arrow_frames.from_arrow(empty, annotation)
        )

    def _read_frame(self, spec: TableSpec, schema: Schema, selection: Selection | None) -> DataFrame:
        with self._fenced():
            return spark_frames.read_spark_frame(self.spark.session_of_frames(), spec, schema, selection)

    # -- shared ----------------------------------------------------------------------------------------

    def _preview_rows(self, context: OutputContext) -> int:
        default = self.lakehouse.lakehouse.settings.preview_rows
        table_name = context.asset_key.to_user_string()
        return parse_preview_rows(context.definition_metadata, default, table_name)

    def _table_spec(
        self, context: OutputContext | InputContext, definition: PartitionsDefinition[str] | None
    ) -> TableSpec:
        return parse_table_spec(
            context.asset_key,
            context.definition_metadata
            if isinstance(context, OutputContext)
            else (context.upstream_output.definition_metadata if context.upstream_output else {}),
            default_namespace=self.lakehouse.lakehouse.settings.default_namespace,
            partitioned=definition is not None,
        )

    def _input_spec(self, context: InputContext, definition: PartitionsDefinition[str] | None) -> TableSpec:
        """Return the table spec of an upstream asset, which may be declared by `AssetSpec` only.

        Raises ConfigurationError if its metadata is invalid or names no column for its partitions.
        """
        try:
            return self._table_spec(context, definition)
        except ConfigurationError as error:
            if error.reason != "only_last_partition":
                raise
            raise ConfigurationError(
                f"Asset {context.asset_key.to_user_string()} has partitions, but no partition column. So the"
                " rows of a partition cannot be selected.",
                table=error.table,
                hint="Declare metadata=table_metadata(partition_by=…) on the asset or on its AssetSpec.",
                reason="partition_column_missing",
            ) from error

    def _input_selection(
        self,
        context: InputContext,
        spec: TableSpec,
        definition: PartitionsDefinition[str] | None,
        schema: Schema,
        excluded_keys: Sequence[str] = (),
    ) -> Selection | None:
        if definition is None or not spec.columns_by_dimension:
            return None
        if _is_in_step(context) and checks_whole_table(context):
            return None
        keys = [key for key in context.asset_partition_keys if key not in excluded_keys]
        return select_input_partitions(keys, definition, spec, schema)

    @contextlib.contextmanager
    def _fenced(self) -> Iterator[None]:
        """Raise RunBranchGone for any failure of the block if the run's branch was deleted.

        A refusal by Nessie becomes NessieUnauthorized, from any engine. Other errors are raised unchanged.
        """
        try:
            with translate_refusals():
                yield
        except NessieUnauthorized:
            raise  # reading the branch would be refused too
        except Exception:
            if self.lakehouse.run_branch is not None:
                self.lakehouse.run_branch.load_head()
            raise


def _require_partitions_of_run(context: OutputContext, spec: TableSpec) -> None:
    """Raise PartitionMismatch if nothing limits the rows that a write of partitions may replace.

    Dagster starts a run without partitions of a partitioned asset, for example for a request of a sensor
    without a partition key. An asset without partitions can still name a partition column. An asset that
    consumes changes chooses its write mode in each run.
    """
    if context.has_asset_partitions:
        return
    if context.step_context.has_asset_partitions_for_output(context.name):
        raise PartitionMismatch.of_run_without_partitions(context.asset_key.to_user_string(), spec.name)
    if spec.write_mode == "replace_partitions" and AssetMetadata.CONSUMES not in context.definition_metadata:
        raise PartitionMismatch(
            "The asset has no partitions, so replace_partitions would replace the whole table.",
            table=spec.name,
            hint="Give the asset a partitions_def. Or declare write_mode='replace_table', and columns that"
            " only split its files with table_metadata(layout=[…]).",
            reason="no_partitions",
        )


def _row_partitions(
    context: InputContext, spec: TableSpec, definition: PartitionsDefinition[str] | None
) -> RowPartitions | None:
    """Return the partitions definition of an input's rows, with the column of each dimension.

    Returns None if the input has at most one partition, or if the upstream asset has no partitions or no
    partition columns. `spec` and `definition` are those of the upstream asset.
    """
    if definition is None or not spec.columns_by_dimension or len(context.asset_partition_keys) < 2:
        return None
    return RowPartitions(definition, spec.columns_by_dimension)


def _without_none(annotation: Any) -> Any:
    """Return the type `T` of the annotation `T | None`; other annotations unchanged."""
    types = [kind for kind in get_args(annotation) if kind is not NoneType]
    return types[0] if get_origin(annotation) is Union and len(types) == 1 else annotation


def _is_in_step(context: InputContext) -> bool:
    """Whether a step of a run loads the input, and not a user who loads an asset's value."""
    return getattr(context, "_step_context", None) is not None


def _select_columns(frame: DataFrame, columns: Sequence[str], existing: Sequence[str]) -> DataFrame:
    return frame.select(*map(quote_spark_name, delivered_columns(columns, existing, frame.columns)))


def _reads_own_table(context: InputContext) -> bool:
    """Whether an asset reads its own table, as one that depends on its own earlier partitions does."""
    assets = context.step_context.assets_def if _is_in_step(context) else None
    return assets is not None and context.asset_key in assets.keys
